"""Archives of ``torch.export.save``, whose weights have one of two forms."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch

WEIGHTS_CONFIG = "data/weights/model_weights_config.json"


def with_record_by_weight(archive: bytes) -> bytes:
    """The same archive.  Skips the test where PyTorch writes the other form."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        if not any(name.endswith(WEIGHTS_CONFIG) for name in file.namelist()):
            pytest.skip("this PyTorch writes all weights of an exported model into one pickle")
    return archive


def with_weights_in_one_pickle(archive: bytes, weights: Any = None) -> bytes:
    """The archive as PyTorch 2.8 writes it; ``weights``: in place of its own."""
    program, buffer = torch.export.load(io.BytesIO(archive)), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as new:
        folder = old.namelist()[0].partition("/")[0]
        for name in old.namelist():
            if not name.startswith((f"{folder}/data/weights/", f"{folder}/data/constants/")):
                new.writestr(name, old.read(name))
        held = program.state_dict if weights is None else weights
        for kind, tensors in (("weights", held), ("constants", program.constants)):
            torch.save(tensors, pickled := io.BytesIO())
            new.writestr(f"{folder}/data/{kind}/model.pt", pickled.getvalue())
    return buffer.getvalue()
