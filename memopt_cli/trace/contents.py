"""The choice of codecs by the values of tensors: which codec holds each input and each saved tensor in fewest bytes.

Only real tensors have values, so codecs are found in a step of a few samples, and carried over to the record of the
full step on tensors without data (:func:`with_contents`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.profiler import record_function

from memopt_cli.records import CompressorName, ModuleTrace, OpTrace, StepTrace, StorageTrace
from memopt_cli.runtime.compressor import COMPRESSORS
from memopt_cli.runtime.packing import codec_for
from memopt_cli.runtime.private_torch import unseen, version_counter
from memopt_cli.trace.log import StorageLog
from memopt_cli.trace.storages import held_bytes
from memopt_cli.trace.workspace import ASIDE

_CODECS: tuple[CompressorName, ...] = ("bit", "uint8", "sparse")
"""Codecs that are tried for inputs of segments."""


class Contents:
    """Examines the values of tensors, once each, as a module and its parts often get the same ones."""

    def __init__(self, log: StorageLog) -> None:
        self._log = log
        self._known: dict[tuple[int, ...], dict[CompressorName, int]] = {}
        """Storage, version, offset and length of a tensor -> its bytes in each codec."""

    def smallest_codec(self, tensors: list[Tensor]) -> tuple[CompressorName, int]:
        """Return the codec that packs ``tensors`` in the fewest bytes, and these; ``null`` unless it halves them."""
        best: CompressorName = "null"
        least = held_bytes(tensors)
        limit = least // 2
        packed = [self._packed_bytes(t) for t in tensors]
        for name in _CODECS:
            held = sum(sizes[name] for sizes in packed)
            if held <= limit and held < least:
                best, least = name, held
        return best, least

    def codec_of_saved(self, tensor: Tensor) -> tuple[CompressorName, int]:
        """Return the codec that packing outside of segments chooses for ``tensor``, and its packed bytes."""
        with aside():
            codec = codec_for(tensor)
            packed = codec.compress(tensor) if codec else None
        if codec is None or packed is None or packed.raw:
            return "null", tensor.nbytes
        return cast(CompressorName, codec.name), packed.nbytes

    def _packed_bytes(self, tensor: Tensor) -> dict[CompressorName, int]:
        storage = self._log.known(tensor)
        if storage is None:
            return _packed_bytes(tensor)
        key = storage.index, version_counter(tensor), int(tensor.storage_offset()), tensor.numel()
        if key not in self._known:
            self._known[key] = _packed_bytes(tensor)
        return self._known[key]


def _packed_bytes(tensor: Tensor) -> dict[CompressorName, int]:
    with aside():
        return {name: COMPRESSORS[name].packed_bytes(tensor) for name in _CODECS}


@contextmanager
def aside() -> Iterator[None]:
    """Keep the block out of the step: dispatch modes do not see it, and a profile marks it with a label."""
    with torch.no_grad(), unseen(), record_function(ASIDE):
        yield


def with_contents(full: StepTrace, small: StepTrace) -> tuple[StepTrace, str]:
    """Return ``full``, a step on fake tensors, with the codecs of ``small``, a real step on fewer samples, and a note.

    If the small step ran other operators, only modules get their codecs, and the note says so; otherwise it is empty.
    """
    seen = {module.path: module for module in small.modules}
    modules = tuple(_module_with(module, seen.get(module.path)) for module in full.modules)
    full = replace(full, modules=modules)
    if not _ran_alike(full, small):
        return full, (
            "a step of a few samples runs other operators than the full one, so it is not known whether saved tensors "
            "can be packed: they are assumed not to be"
        )
    known = dict(zip(_born_in_turn(full), (small.storages[i] for i in _born_in_turn(small)), strict=True))
    storages = (_storage_with(s, known[i]) if i in known else s for i, s in enumerate(full.storages))
    return replace(full, storages=tuple(storages)), ""


def with_parts(ops: Sequence[OpTrace], storages: Sequence[StorageTrace]) -> tuple[StorageTrace, ...]:
    """Set the codec ``parts`` for concatenations of which some parts are saved anyway: the codec refers to these."""

    def as_parts(storage: StorageTrace) -> StorageTrace:
        made = ops[storage.born] if storage.born >= 0 else None
        if made is None or made.name != "aten::cat" or storage.compressor != "null":
            return storage
        held = sum(storages[index].nbytes for index in made.reads if storages[index].saved_by)
        packed_bytes = max(0, storage.nbytes - held)
        return replace(storage, compressor="parts", packed_bytes=packed_bytes) if held else storage

    return tuple(map(as_parts, storages))


_LIKE = ("forward", "backward")
"""Phases that must run the same operators; a step of a few samples may have no update."""


def _ran_alike(full: StepTrace, small: StepTrace) -> bool:
    """Return whether ``full`` and ``small`` ran the same operators, and each made as many storages."""
    first, other = ([(op.name, len(op.makes)) for op in trace.ops if op.phase in _LIKE] for trace in (full, small))
    return first == other and len(_born_in_turn(full)) == len(_born_in_turn(small))


def _born_in_turn(trace: StepTrace) -> list[int]:
    """Return the indices of storages in the order of birth, but for the optimizer's and those made after backward."""
    updates = {index for op in trace.ops if op.phase not in _LIKE for index in op.makes}
    return [i for i, s in enumerate(trace.storages) if s.kind != "optimizer" and i not in updates]


def _module_with(module: ModuleTrace, seen: ModuleTrace | None) -> ModuleTrace:
    if seen is None or not seen.input_bytes:
        return module
    return replace(
        module,
        compressor=seen.compressor,
        codec_misfit=seen.codec_misfit,
        packed_input_bytes=module.input_bytes * seen.packed_input_bytes // seen.input_bytes,
        refusal=module.refusal or seen.refusal,
    )


def _storage_with(storage: StorageTrace, seen: StorageTrace) -> StorageTrace:
    if seen.compressor == "null" or not seen.nbytes:
        return storage
    packed = storage.nbytes * seen.packed_bytes // seen.nbytes
    return replace(storage, compressor=seen.compressor, packed_bytes=packed)
