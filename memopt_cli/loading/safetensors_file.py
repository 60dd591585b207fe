"""Reading safetensors files: tensors by name, without any code; the header is checked before the data is used.

The format: 8 bytes, the length of the header; the header, JSON of ``name: {dtype, shape, data_offsets}``; the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt_cli.errors import FileFormatError
from memopt_cli.loading.interface import DOWNLOAD_AGAIN_HINT, Loaded, ModelFile, no_model
from memopt_cli.loading.pickles.described import MAX_SIZE, items_in
from memopt_cli.records import Trust
from memopt_cli.text.documents import read_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_LENGTH = 8  # bytes of the number before the header
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Position of the tensor's first byte in the file."""
    end: int
    """Position after the tensor's last byte."""


class SafeTensors:
    """The format of safetensors, which holds weights and never a model: loading one always raises an error."""

    name = "safetensors"

    def recognizes(self, file: ModelFile) -> bool:
        return is_safetensors(file.data)

    def load(self, file: ModelFile, trust: Trust) -> Loaded:
        raise no_model(file.path, [*read_header(file.data, file.path)[0]], trust.code_paths)


def is_safetensors(data: bytes) -> bool:
    """Return whether ``data`` starts as this format does."""
    return data[_LENGTH : _LENGTH + 1] == b"{" and int.from_bytes(data[:_LENGTH], "little") <= _MAX_HEADER_BYTES


def read_safetensors(data: bytes, path: str) -> dict[str, Tensor]:
    """Read the tensors in ``data`` onto the CPU.  Raises :class:`FileFormatError` for a damaged header."""
    tensors = {}
    for name, entry in read_header(data, path)[0].items():
        part = bytearray(data[entry.start : entry.end])
        flat = torch.frombuffer(part, dtype=entry.dtype) if part else torch.empty(0, dtype=entry.dtype)
        tensors[name] = flat.reshape(entry.shape)
    return tensors


def read_header(data: bytes, path: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the entries of the header by name, in the order of their bytes, and the header's ``__metadata__``.

    Raises :class:`FileFormatError` unless the header is complete and each byte of data belongs to exactly one tensor.
    """
    try:
        start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        if not is_safetensors(data) or start > len(data):
            raise ValueError(f"its header of {start - _LENGTH} bytes does not fit")
        header = read_json(data[_LENGTH:start], unique=True)
        remarks = header.pop("__metadata__", {})
        named = ((str(name), _read_entry(item, start)) for name, item in header.items())
        entries = dict(sorted(named, key=lambda pair: (pair[1].start, pair[1].end)))
        for entry in entries.values():  # in the order of their bytes, so each must begin where the last one ended
            if entry.start != start:
                raise ValueError("its tensors overlap, or leave a gap")
            start = entry.end
        if start != len(data):
            raise ValueError(f"it holds {len(data)} bytes, its tensors end at {start}")
        return entries, {str(key): str(value) for key, value in remarks.items()}
    except Exception as err:  # a damaged or hostile header may raise anything
        reason = str(err) if type(err) is ValueError else "its header is broken"
        raise FileFormatError(f"{path} is not a complete safetensors file: {reason}", hint=DOWNLOAD_AGAIN_HINT) from err


def _read_entry(item: Any, start: int) -> Entry:
    dtype = _DTYPES[item["dtype"]]
    shape = item["shape"]
    (begin, end) = item["data_offsets"]
    if not all(type(place) is int and 0 <= place <= MAX_SIZE for place in (begin, end)):
        raise ValueError("a position in its header is not a whole number")
    if end - begin != items_in(shape) * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes are not a tensor of {len(shape)} sizes and {item['dtype']}")
    return Entry(dtype=dtype, shape=tuple(shape), start=start + begin, end=start + end)
