"""The choice of compressors by the values of tensors: each input and saved tensor gets its smallest compressor.

Only real tensors have values.  So compressors are found in a step of a few samples, and copied to the record of the
full step, which was taken on tensors without data (:func:`with_contents`).
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
from memopt_cli.runtime.packing import compressor_for
from memopt_cli.runtime.private_torch import unseen, version_counter
from memopt_cli.trace.log import StorageLog
from memopt_cli.trace.storages import held_bytes
from memopt_cli.trace.workspace import ASIDE_LABEL

_TRIED: tuple[CompressorName, ...] = ("bit", "uint8", "sparse")
"""Compressors that are tried for inputs of segments."""
_COMPARED_PHASES = ("forward", "backward")
"""Phases that must run the same operators; a step of a few samples may have no update."""


class ContentsReader:
    """Examines the values of each tensor once: a module and its parts often get the same tensors."""

    def __init__(self, log: StorageLog) -> None:
        self._log = log
        self._sizes: dict[tuple[int, ...], dict[CompressorName, int]] = {}
        """Storage, version, offset and length of a tensor -> its bytes in each compressor."""

    def smallest_compressor(self, tensors: list[Tensor]) -> tuple[CompressorName, int]:
        """Return the smallest compressor of ``tensors``, and its bytes; ``null`` unless it halves their bytes."""
        best: CompressorName = "null"
        min_bytes = held_bytes(tensors)
        max_bytes = min_bytes // 2
        all_sizes = [self._packed_bytes(t) for t in tensors]
        for name in _TRIED:
            nbytes = sum(sizes[name] for sizes in all_sizes)
            if nbytes <= max_bytes and nbytes < min_bytes:
                best, min_bytes = name, nbytes
        return best, min_bytes

    def compressor_of_saved(self, tensor: Tensor) -> tuple[CompressorName, int]:
        """Return the compressor that packing outside segments chooses for ``tensor``, and its packed bytes."""
        with outside_of_step():
            compressor = compressor_for(tensor)
            packed = compressor.compress(tensor) if compressor else None
        if compressor is None or packed is None or packed.raw:
            return "null", tensor.nbytes
        return cast(CompressorName, compressor.name), packed.nbytes

    def _packed_bytes(self, tensor: Tensor) -> dict[CompressorName, int]:
        storage, sizes = self._log.find_storage(tensor), dict[CompressorName, int]()
        if storage is not None:
            key = storage.index, version_counter(tensor), int(tensor.storage_offset()), tensor.numel()
            sizes = self._sizes.setdefault(key, sizes)
        if not sizes:
            with outside_of_step():
                sizes |= {name: COMPRESSORS[name].packed_bytes(tensor) for name in _TRIED}
        return sizes


@contextmanager
def outside_of_step() -> Iterator[None]:
    """Keep the code in the ``with`` block out of the step: hide it from modes, and label it in profiles."""
    with torch.no_grad(), unseen(), record_function(ASIDE_LABEL):
        yield


def with_contents(full: StepTrace, small: StepTrace) -> tuple[StepTrace, str]:
    """Return ``full``, a step on fake tensors, with the compressors of the real step ``small``, and a note.

    If the small step ran different operators, only modules get their compressors, which the note explains.  Otherwise
    the note is empty.
    """
    small_modules = {module.path: module for module in small.modules}
    modules = tuple(_with_compressor_of(module, small_modules.get(module.path)) for module in full.modules)
    full = replace(full, modules=modules)
    if not _ran_alike(full, small):
        return full, (
            "a step of a few samples runs other operators than the full step, so memopt cannot tell which saved "
            "tensors can be packed, and assumes that none can"
        )
    small_storages = (small.storages[index] for index in _comparable_storages(small))
    pairs = dict(zip(_comparable_storages(full), small_storages, strict=True))
    storages = (_packed_like(s, pairs[i]) if i in pairs else s for i, s in enumerate(full.storages))
    return replace(full, storages=tuple(storages)), ""


def with_parts(ops: Sequence[OpTrace], storages: Sequence[StorageTrace]) -> tuple[StorageTrace, ...]:
    """Set the compressor ``parts``, which refers to parts saved anyway, for concatenations that have such parts."""

    def as_parts(storage: StorageTrace) -> StorageTrace:
        maker = ops[storage.born] if storage.born >= 0 else None
        if maker is None or maker.name != "aten::cat" or storage.compressor != "null":
            return storage
        saved_bytes = sum(storages[index].nbytes for index in maker.reads if storages[index].saved_by)
        packed_bytes = max(0, storage.nbytes - saved_bytes)
        return replace(storage, compressor="parts", packed_bytes=packed_bytes) if saved_bytes else storage

    return tuple(map(as_parts, storages))


def _ran_alike(full: StepTrace, small: StepTrace) -> bool:
    """Return whether ``full`` and ``small`` ran the same operators, and each made as many storages."""
    ops_of_full, ops_of_small = (
        [(op.name, len(op.makes)) for op in trace.ops if op.phase in _COMPARED_PHASES] for trace in (full, small)
    )
    return ops_of_full == ops_of_small and len(_comparable_storages(full)) == len(_comparable_storages(small))


def _comparable_storages(trace: StepTrace) -> list[int]:
    """Return the indices of storages in the order of birth, without the optimizer's, and none made after backward."""
    updates = {index for op in trace.ops if op.phase not in _COMPARED_PHASES for index in op.makes}
    return [i for i, s in enumerate(trace.storages) if s.kind != "optimizer" and i not in updates]


def _with_compressor_of(module: ModuleTrace, small: ModuleTrace | None) -> ModuleTrace:
    if small is None or not small.input_bytes:
        return module
    return replace(
        module,
        compressor=small.compressor,
        compressor_misfit=small.compressor_misfit,
        packed_input_bytes=module.input_bytes * small.packed_input_bytes // small.input_bytes,
        refusal=module.refusal or small.refusal,
    )


def _packed_like(storage: StorageTrace, small: StorageTrace) -> StorageTrace:
    if small.compressor == "null" or not small.nbytes:
        return storage
    packed_bytes = storage.nbytes * small.packed_bytes // small.nbytes
    return replace(storage, compressor=small.compressor, packed_bytes=packed_bytes)
