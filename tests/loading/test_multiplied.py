"""Small files that would take far more memory than they are large: what is copied of them is charged for each copy."""

from __future__ import annotations

import itertools
import json
import pickletools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt_cli
from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.runtime.script import ScriptLeaf
from tests.loading.archives import (
    WEIGHTS_CONFIG,
    Call,
    Created,
    exported,
    saved,
    scripted,
    unzipped,
    with_record_by_weight,
    zipped,
)

_COPIES = 40
_BYTES = 1 << 16
"""Of what is copied: all copies are more than a small file may take."""


def _scripts() -> Iterator[Any]:
    """Scripts that are all read from one archive."""
    state = ScriptLeaf(torch.jit.script(nn.Linear(1, _BYTES // 8))).__getstate__()
    for _ in range(_COPIES):
        own = {name: type(value)(value) if isinstance(value, dict | set) else value for name, value in state.items()}
        yield Created(ScriptLeaf, state=own)


def _packed() -> Iterator[Any]:
    """Packed weights of one tensor."""
    weight = torch.quantize_per_tensor(torch.zeros(1, _BYTES), 0.1, 0, torch.qint8)
    state = torch.ops.quantized.linear_prepack(weight, None).__getstate__()
    for _ in range(_COPIES):
        yield Created(torch.ScriptObject, state=state)


def _quantized() -> Iterator[Any]:
    """Quantized tensors that have the same scales for their channels."""
    scales = torch.ones(_BYTES // 4)
    whole = torch.quantize_per_channel(torch.zeros(len(scales)), scales, torch.zeros(len(scales)), 0, torch.qint8)
    rebuild, (storage, offset, size, stride, (scheme, *_), *rest) = whole.__reduce_ex__(2)
    for _ in range(_COPIES):
        yield Call(rebuild, storage, offset, size, stride, (scheme, scales, scales, 0), *rest)


@pytest.mark.parametrize("parts", [_scripts, _packed, _quantized])
@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_copies_of_one_tensor_are_charged(parts: Callable[[], Iterator[Any]], tmp_path: Path) -> None:
    for count in (1, _COPIES):
        model = nn.Sequential(nn.Linear(1, 1))
        model.parts = [*parts()][:count]  # type: ignore[assignment]
        torch.save(model, tmp_path / f"{count}.pt")
    assert isinstance(memopt_cli.load(tmp_path / "1.pt"), nn.Module)
    with pytest.raises(FileFormatError, match="far more work than a model of its size"):
        memopt_cli.load(tmp_path / f"{_COPIES}.pt")


@pytest.mark.parametrize("compressed", [False, True])
def test_an_archive_within_another_unpacks_to_no_more_than_it_is(compressed: bool, tmp_path: Path) -> None:
    """Each could unpack to 16 MiB, and a thousand of them take a file of 600 kB."""
    within = zipped(unzipped(saved(torch.zeros(64, 64))), compressed=compressed)
    records = unzipped(with_record_by_weight(exported(nn.Linear(64, 64), torch.ones(1, 64))))
    config = json.loads(records[WEIGHTS_CONFIG])["config"]
    entry = config["weight"] | {"use_pickle": True}
    records[WEIGHTS_CONFIG] = json.dumps({"config": config | {"weight": entry}}).encode()
    records[f"data/weights/{entry['path_name']}"] = within
    (tmp_path / "model.pt2").write_bytes(zipped(records))
    if not compressed:
        assert isinstance(memopt_cli.load(tmp_path / "model.pt2"), nn.Module)
    else:
        with pytest.raises(
            UnsafeFileError, match=r"model\.pt2 \(data/weights/weight_\d\) was not loaded: .* unpack to"
        ):
            memopt_cli.load(tmp_path / "model.pt2")


class _Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(6):
            self.register_buffer(f"b{number}", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_script_reads_its_storages_once(tmp_path: Path) -> None:
    """PyTorch reads a record anew wherever a pickle names it."""
    records = unzipped(scripted(_Buffers()))
    data = records["data.pkl"]
    for opcode, key, at in [*pickletools.genops(data)]:
        if opcode.name == "BINUNICODE" and isinstance(key, str) and key.isdigit():
            assert at is not None
            data = data[: at + 5] + b"0" + data[at + 6 :]
    kept = {name: record for name, record in records.items() if name not in {f"data/{i}" for i in range(1, 6)}}
    (tmp_path / "m.ts").write_bytes(zipped({**kept, "data.pkl": data}))
    with pytest.raises(FileFormatError, match="reads its storages far too often"):
        memopt_cli.load(tmp_path / "m.ts")


def test_long_keys_of_one_hash_are_charged(tmp_path: Path) -> None:
    """All keys have one hash, as -1 and -2 do, and differ only in their last items."""
    model = nn.Sequential(nn.Linear(1, 1))
    model.keys = {((None,) * 1_000, *end): None for end in itertools.product((-1, -2), repeat=11)}  # type: ignore[assignment]
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(FileFormatError, match="work"):
        memopt_cli.load(tmp_path / "model.pt")
