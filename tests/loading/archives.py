"""Files of models as bytes, their records, and what a pickler writes that was told to call something."""

from __future__ import annotations

import copyreg
import io
import zipfile
from typing import Any

import pytest
import torch
from torch import nn

WEIGHTS_CONFIG = "data/weights/model_weights_config.json"
Records = dict[str, bytes]
"""Name of a record, without the folder of all -> its bytes."""


class Call:
    """Pickles as a call of ``function(*arguments)``, whose result is then given ``state``."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


class Created:
    """Pickles as an object of ``kind``, created without its constructor from ``arguments`` and given ``state``."""

    def __init__(self, kind: type, *arguments: Any, state: Any = None) -> None:
        self.made = kind, arguments, state

    @property
    def __class__(self) -> Any:
        """What a pickler compares."""
        return self.made[0]

    def __reduce__(self) -> Any:
        kind, arguments, state = self.made
        return copyreg.__newobj__, (kind, *arguments), state  # type: ignore[attr-defined]


def saved(value: object, **options: Any) -> bytes:
    torch.save(value, buffer := io.BytesIO(), **options)
    return buffer.getvalue()


def scripted(module: nn.Module) -> bytes:
    torch.jit.save(torch.jit.script(module), buffer := io.BytesIO())
    return buffer.getvalue()


def exported(module: nn.Module, *inputs: torch.Tensor) -> bytes:
    torch.export.save(torch.export.export(module, inputs), buffer := io.BytesIO())
    return buffer.getvalue()


def unzipped(data: bytes) -> Records:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def zipped(records: Records, folder: str = "model/", *, compressed: bool = False) -> bytes:
    buffer = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", how, compresslevel=1) as file:
        for name, data in records.items():
            file.writestr(folder + name, data)
    return buffer.getvalue()


def archive(records: Records, *, compressed: bool = False) -> bytes:
    """A zip archive as PyTorch writes it, of these records."""
    return zipped({**records, "version": b"3\n", "byteorder": b"little"}, compressed=compressed)


def with_record_by_weight(data: bytes) -> bytes:
    """The same exported program.  Skips the test where PyTorch writes the other form."""
    if WEIGHTS_CONFIG not in unzipped(data):
        pytest.skip("this PyTorch writes all weights of an exported model into one pickle")
    return data


def with_weights_in_one_pickle(data: bytes, weights: Any = None) -> bytes:
    """The exported program as PyTorch 2.8 writes it; ``weights``: in place of its own."""
    program = torch.export.load(io.BytesIO(data))
    kept = {n: d for n, d in unzipped(data).items() if not n.startswith(("data/weights/", "data/constants/"))}
    kept["data/weights/model.pt"] = saved(program.state_dict if weights is None else weights)
    return zipped({**kept, "data/constants/model.pt": saved(program.constants)})
