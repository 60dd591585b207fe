"""Notes on every module that a step calls (packed inputs, outputs, state), from which its record is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from memopt_cli.records import CompressorName, ModuleTrace
from memopt_cli.runtime import named_parts, refusal
from memopt_cli.runtime.compressor import COMPRESSORS, OWN_COMPRESSOR, Compressor, OwnCompressor, declared_compressor
from memopt_cli.runtime.module_state import find_matrices
from memopt_cli.runtime.private_torch import version_counter
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.trace.compressor_choice import ContentsReader, outside_of_step
from memopt_cli.trace.log import StorageLog
from memopt_cli.trace.storages import Storage, held_bytes
from memopt_cli.training.module_calls import module_hooks


@dataclass(slots=True)
class ModuleNotes:
    """Notes on one module, with sums over its calls; :class:`~memopt_cli.records.ModuleTrace` explains most fields."""

    calls: int = 0
    input_bytes: int = 0
    packed_bytes: int = 0
    """Bytes of the inputs in their compressor."""
    compressor: CompressorName | None = None
    """Compressor of the inputs in all calls so far; ``null`` if calls differ, ``None`` before the first call."""
    compressor_misfit: str = ""
    input_shape: tuple[int, ...] = ()
    first_input_bytes: int = 0
    outputs: set[int] = field(default_factory=set)
    """Storages of the outputs so far."""
    output_bytes: int = 0
    state_bytes: int = 0
    mutates_input: bool = False
    """Whether forward wrote to one of its inputs."""
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """Pairs of an input of the running call and its version when the call began."""

    def enter(self, module: nn.Module, inputs: list[Tensor], contents: ContentsReader | None) -> None:
        """Note that a forward pass of ``module`` begins on ``inputs``."""
        if not self.calls and inputs:
            self.input_shape, self.first_input_bytes = tuple(inputs[0].shape), inputs[0].nbytes
        self.calls += 1
        self.versions = [(t, version_counter(t)) for t in inputs]
        nbytes = packed_bytes = held_bytes(inputs)
        name: CompressorName = "null"
        if contents is not None:
            name, smallest_bytes = contents.smallest_compressor(inputs)
            packed_bytes = nbytes if name == "null" else smallest_bytes
            requested = requested_compressor(module)
            if requested is not None:
                compressor = COMPRESSORS.get(requested) or _own_compressor(module)
                with outside_of_step():
                    packed_bytes = sum(map(compressor.packed_bytes, inputs))
                # A compressor that saves nothing would only take time.
                name = requested if packed_bytes < nbytes else "null"
                self.compressor_misfit = self.compressor_misfit or _why_inexact(requested, module, inputs)
        self.input_bytes += nbytes
        self.packed_bytes += packed_bytes
        self.compressor = name if self.compressor in (None, name) else "null"

    def leave(self, outputs: list[Storage | None], state_bytes: int) -> None:
        """Note that forward returned tensors on the storages ``outputs``, and left ``state_bytes`` in attributes."""
        self.state_bytes = self.state_bytes if self.calls > 1 else state_bytes
        self.mutates_input |= any(version_counter(t) != version for t, version in self.versions)
        self.versions = []
        for storage in outputs:
            if storage is not None and storage.index not in self.outputs:
                self.outputs.add(storage.index)
                self.output_bytes += storage.nbytes

    def to_record(self, path: str, module: nn.Module, order: int, saved_bytes: int) -> ModuleTrace:
        """Return the record of the module at ``path``, the ``order``-th to be called."""
        reason = refusal(module) or ("it modifies its input in place" if self.mutates_input else "")
        return ModuleTrace(
            path=path,
            class_name=type(module).__name__,
            calls=self.calls,
            order=order,
            input_bytes=self.input_bytes,
            input_shape=self.input_shape,
            first_input_bytes=self.first_input_bytes,
            packed_input_bytes=self.packed_bytes,
            compressor=self.compressor or "null",
            compressor_misfit=self.compressor_misfit,
            output_bytes=self.output_bytes,
            saved_bytes=saved_bytes,
            refusal=reason,
            state_bytes=self.state_bytes,
            spatial_split=hasattr(module, "__spatial_split__"),
        )


@contextmanager
def taking_notes(
    model: nn.Module, log: StorageLog, notes: dict[str, ModuleNotes], contents: ContentsReader | None
) -> Iterator[None]:
    """Fill ``notes``, by path, while forward runs in the ``with`` block; recomputations do not count.

    ``contents`` finds the compressor that holds the inputs of a module exactly; ``None`` if the inputs have no data.
    """

    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        if log.phase == "forward":
            tensors = [t for t in tensors_of(inputs) if not isinstance(t, nn.Parameter)]
            notes.setdefault(path, ModuleNotes()).enter(module, tensors, contents)

    def leave(path: str, module: nn.Module, output: Any) -> None:
        if log.phase == "forward":
            storages = ((tensor, log.find_storage(tensor)) for tensor in find_matrices(module))
            state = [tensor for tensor, storage in storages if storage is not None and storage.kind == "activations"]
            notes[path].leave([log.count_tensor(t) for t in tensors_of(output)], held_bytes(state))

    with module_hooks(model, enter, leave):
        yield


def requested_compressor(module: nn.Module) -> CompressorName | None:
    """Return the compressor that ``module`` names in ``x_compressor``; ``None`` if none or it cannot be a segment."""
    return None if refusal(module) else cast("CompressorName | None", declared_compressor(module))


def compressor_paths(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of modules that can be segments and ask for packed inputs with ``x_compressor``."""
    return tuple(path for path, module in named_parts(model) if requested_compressor(module) not in (None, "null"))


def _why_inexact(name: CompressorName, module: nn.Module, tensors: list[Tensor]) -> str:
    """Return why the user's own compressor fails to restore ``tensors``."""
    if name != OWN_COMPRESSOR:
        return ""
    with outside_of_step():
        return next(filter(None, map(_own_compressor(module).why_inexact, tensors)), "")


def _own_compressor(module: nn.Module) -> OwnCompressor:
    return OwnCompressor(cast("Compressor", module.x_compressor))


def list_modules(model: nn.Module) -> tuple[ModuleTrace, ...]:
    """List every module of ``model`` in its order, without inputs and outputs, as if no module was called."""
    return tuple(
        ModuleTrace(
            path=path,
            class_name=type(module).__name__,
            order=order,
            compressor=requested_compressor(module) or "null",
            refusal=refusal(module),
            spatial_split=hasattr(module, "__spatial_split__"),
        )
        for order, (path, module) in enumerate(model.named_modules())
    )
