"""``--device auto`` asks PyTorch only where there may be a GPU; importing it takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from memopt_cli.errors import UsageError
from memopt_cli.measure import devices
from memopt_cli.measure.devices import resolve_device

WITHOUT = "cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = '1'\n"
CUDA = "__version__ = '2.8.0'\ncuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n"
ROCM = "cuda = None\nhip = '6.4.4'\n"


@pytest.mark.parametrize(
    ("version", "has_driver", "asks"),
    [
        (WITHOUT, True, False),
        (CUDA, False, False),
        (CUDA, True, True),
        (ROCM, False, True),
        ("__version__ = '2.8.0'\n", False, True),
        (None, False, True),
    ],
)
def test_pytorch_is_asked_where_it_alone_can_tell(
    version: str | None, has_driver: bool, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None:
        (tmp_path / "version.py").write_text(version)

    def open_library(name: str) -> None:
        if not has_driver:
            raise OSError(name)

    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "torch")
    assert devices._may_have_gpu() is asks


def test_a_pytorch_that_is_there_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda:0"
    assert resolve_device("cpu") == "cpu"


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda") == "cuda:0"
    with pytest.raises(UsageError, match="no device cuda:2: PyTorch sees 1 CUDA device\n") as refused:
        resolve_device("cuda:2")
    assert refused.value.hint == "Name cuda:0."
