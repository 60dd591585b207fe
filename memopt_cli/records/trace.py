"""The step trace: one training step, recorded operator by operator, with the life of every storage.

For example, ``relu(x)`` in forward is an :class:`OpTrace` that reads storage 3 and makes storage 7; the
:class:`StorageTrace` of 7 says that it was born there, which operators save it for backward, and when it dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from memopt_cli.records.plan import CompressorName

Phase = Literal["forward", "backward", "clip", "update"]
"""Phase of a step.  In ``clip`` gradients are unscaled and clipped, in ``update`` the optimizer takes its step."""

UPDATE_PHASES: Final[frozenset[Phase]] = frozenset({"clip", "update"})
"""Phases that run once for all accumulated passes.  Their time does not depend on the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """One module in a recorded training step; bytes are summed over its calls."""

    path: str
    class_name: str
    calls: int = 0
    """Number of times that forward ran."""
    order: int
    """Rank of the first call among all modules."""
    forward_s: float = 0.0
    """Measured seconds of forward, children included; 0 where only tensors without data ran."""
    input_bytes: int = 0
    """Bytes of the input tensors, each storage once."""
    packed_input_bytes: int = 0
    """Bytes of the input tensors in :attr:`compressor`."""
    compressor: CompressorName = "null"
    """Compressor that the module names, or else the smallest that held all of its inputs losslessly."""
    compressor_misfit: str = ""
    """How the user's own compressor, named by the module, failed to restore its inputs; empty if it did not."""
    input_shape: tuple[int, ...] = ()
    """Shape of the first positional tensor of the first call; empty if there is none."""
    first_input_bytes: int = 0
    """Bytes of the first positional tensor of the first call."""
    output_bytes: int = 0
    saved_bytes: int = 0
    """Bytes of storages that were made in this module or its children and live at the end of the model's forward."""
    refusal: str = ""
    """Reason why the module cannot be a segment."""
    spatial_split: bool = False
    """Whether the class defines ``__spatial_split__``."""
    state_bytes: int = 0
    """Bytes of tensors, except vectors, that the first call left in attributes: state that chunks would pass on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTrace:
    """One operator call of a recorded step, as the dispatcher saw it.  Storages are indices into the trace's."""

    name: str
    """Name without the overload: ``aten::convolution``."""
    module: str
    """Path of the innermost module: in forward the module that runs; in backward the module whose forward the operator
    differentiates or, in a segment, recomputes; empty for the loss, which is part of forward."""
    phase: Phase
    reads: tuple[int, ...] = ()
    """Storages of the arguments, modified ones included."""
    makes: tuple[int, ...] = ()
    """Storages that the operator makes; an operator that returns a view makes none."""
    mutates: tuple[int, ...] = ()
    """Storages modified in place."""
    recomputes: str | None = None
    """Path of the segment whose forward the operator recomputes; ``None`` for all other operators."""
    packs: bool = False
    """Whether the operator packs, unpacks or copies tensors for memopt, and is not the model's."""
    random: bool = False
    """Whether the operator uses a random generator."""
    flops: int = 0
    dtype: str = ""
    """Dtype of the first floating-point argument, ``bfloat16``; empty if there is none."""
    moved_bytes: int = 0
    """Bytes of arguments and results (of a view, only what it shows): an upper bound on what is read and written."""
    seconds: float = 0.0
    """Time in seconds, measured, or estimated for another device; 0 where only tensors without data ran."""
    workspace_bytes: int = 0
    """Bytes that the kernel holds for itself while it runs."""
    fixed_workspace_bytes: int = 0
    """Part of the workspace that does not shrink with the batch."""
    line: str = ""
    """Line of the model's code that calls the operator in forward, ``model.py:31``; empty in backward, and in lifted
    programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTrace:
    """The life of one storage in a recorded step; instants are indices into the trace's operators."""

    nbytes: int
    kind: str
    """A field of :class:`Breakdown` without its unit: ``activations``, ``gradients`` …"""
    module: str
    """Path of the module whose operator made the storage; for a parameter or buffer, its owner."""
    born: int
    """Operator that made the storage; -1 if it existed before the step."""
    died: int | None
    """Operator before which the storage was freed, or whose sum replaced it; ``None`` if it outlives the step."""
    freed: int | None
    """First operator that would have run without the storage if autograd had saved nothing; ``None`` if the model
    holds it to the end."""
    saved_by: tuple[int, ...] = ()
    """Operators of forward whose derivative holds the storage until backward; empty for parameters, which live on."""
    compressor: CompressorName = "null"
    """Smallest compressor that held the contents exactly; ``null`` if the contents were not looked at."""
    packed_bytes: int = 0
    """Bytes when compressed; ``nbytes`` for ``null``."""
    fixed_bytes: tuple[tuple[int, int], ...] = ()
    """Pairs of the length of an axis and the bytes that do not shrink with it; empty for most tensors."""

    @property
    def packing_cost_bytes(self) -> int:
        """Bytes of spikes that would take as long to pack: as many, or half as many for ``parts``, only copied."""
        return self.nbytes // 2 if self.compressor == "parts" else self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module; ranges of operators are half open."""

    path: str
    start: int
    """First operator of the call's forward, children included."""
    end: int
    backward_start: int
    """First operator of the call's backward; equal to ``backward_end`` if it has none."""
    backward_end: int
    inputs: tuple[int, ...]
    """Storages of the tensor arguments."""
    outputs: tuple[int, ...]
    """Storages of the returned tensors, in order; several views may share one."""

    @property
    def forward(self) -> range:
        """Operators of the call's forward."""
        return range(self.start, self.end)

    @property
    def backward(self) -> range:
        """Operators of the call's backward; empty if it has none."""
        return range(self.backward_start, self.backward_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One recorded training step of the original model."""

    modules: tuple[ModuleTrace, ...]
    """Called modules, in the order of first call; the root is among them with the empty path."""
    tensor_peak_bytes: int
    resident_bytes: int
    """Parameters, gradients, buffers, optimizer state and inputs."""
    batch: int
    """Batch size the step was recorded at."""
    ops: tuple[OpTrace, ...] = ()
    """Operators in the order of execution."""
    storages: tuple[StorageTrace, ...] = ()
    """Storages in the order of birth."""
    calls: tuple[ModuleCall, ...] = ()
    """Calls in the order of their start, a caller before its callees."""
    allocated_peak_bytes: int = 0
    """Peak with the workspaces of operators."""
    packing_bytes_per_s: float = 0.0
    """Rate at which the device packs tensors and unpacks them again; 0 if it was not measured."""
    out_bytes_per_s: float = 0.0
    """Rate at which tensors are sent to the place where plans let them wait; 0 if it was not measured."""
    in_bytes_per_s: float = 0.0
    """Rate of fetching tensors from that place; 0 if it was not measured."""
    copying_s_per_byte: float = 0.0
    """CPU seconds to send a byte to that place and to fetch it, lost to a step on the CPU; 0 on a GPU."""
    room_bytes: int | None = None
    """Maximum number of bytes that may wait in that place; ``None`` if unknown."""
    segment_overhead: float = 1.0
    """Overhead of a segment here, divided by that on the machine where the cost model's constants were measured."""
    recompute_factor: float = 1.0
    """Seconds of an operator that is recomputed, divided by its seconds in forward."""


def ancestry(path: str) -> Iterator[str]:
    """Yield ``path`` and the paths of its enclosing modules, up to the root: ``a.b``, ``a`` and the empty path."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path
