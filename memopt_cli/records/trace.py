"""One training step, recorded operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from memopt_cli.records.plan import CompressorName

Phase = Literal["forward", "backward", "clip", "update"]
"""Of a step.  In ``clip`` gradients are unscaled and clipped, in ``update`` the optimizer takes its step."""

UPDATE_PHASES: Final[frozenset[Phase]] = frozenset({"clip", "update"})
"""They take as long whatever the batch, and come once for all passes that a step of the optimizer accumulates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """One module in a recorded training step; bytes are summed over its calls."""

    path: str
    class_name: str
    calls: int
    """How often forward ran."""
    order: int
    """Rank of the first call among all modules."""
    forward_s: float = 0.0
    """Measured time, of modules below it too; 0 where only tensors without data ran."""
    input_bytes: int
    """Bytes of the input tensors, each storage once."""
    packed_input_bytes: int
    """The same after the lossless compressor named in :attr:`compressor`."""
    compressor: CompressorName
    """The codec that the module asks for, else the smallest that held every input of this module exactly."""
    codec_misfit: str = ""
    """What the codec of the user's own that the module asks for did not give back; empty if it gave back everything."""
    input_shape: tuple[int, ...]
    """Shape of the first positional tensor of the first call; empty if there is none."""
    first_input_bytes: int = 0
    """Bytes of that tensor."""
    output_bytes: int
    saved_bytes: int
    """Bytes of storages born in this module or below it and alive when the model's forward had ended."""
    refusal: str = ""
    """Why the module cannot be a segment; empty if it can."""
    spatial_split: bool = False
    """The class defines ``__spatial_split__``."""
    spatial_parts: tuple[str, ...] = ()
    """Paths of the modules that it returns, where they are modules of the model and the class asks for no codec."""
    state_bytes: int = 0
    """Of the tensors that its first call left in attributes, vectors aside: what it carries from chunk to chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTrace:
    """One operator call of a recorded step, as the dispatcher saw it.  Storages are indices into the trace's."""

    name: str
    """Without the overload: ``aten::convolution``."""
    module: str
    """Path of the innermost module: in forward the one running, in backward the one whose forward it differentiates
    or, in a segment, recomputes.  Empty for the loss, which is part of forward."""
    phase: Phase
    reads: tuple[int, ...] = ()
    """Storages of its arguments, those that it modifies among them."""
    makes: tuple[int, ...] = ()
    """Storages born in it; an operator that gives a view makes none."""
    mutates: tuple[int, ...] = ()
    """Storages modified in place."""
    random: bool = False
    """It draws from a generator."""
    flops: int = 0
    dtype: str = ""
    """``bfloat16``: of its first floating-point argument; empty if there is none."""
    moved_bytes: int = 0
    """Bytes of its arguments and results, of a view only what it shows: at most so many are read and written."""
    seconds: float = 0.0
    """Measured time, or estimated for another device; 0 where only tensors without data ran."""
    workspace_bytes: int = 0
    """What its kernel holds for itself while it runs."""
    fixed_workspace_bytes: int = 0
    """Of that, what it would hold however small its batch."""
    line: str = ""
    """``model.py:31``: where the model's code calls it in forward; empty in backward, and of a lifted program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTrace:
    """One storage's life in a recorded step; instants are indices into the trace's operators."""

    nbytes: int
    kind: str
    """A field of :class:`Breakdown` without its unit: ``activations``, ``gradients`` …"""
    module: str
    """Path of the module of the operator that made it; of a parameter or buffer, its owner."""
    born: int
    """The operator that made it; -1: it existed before the step."""
    died: int | None
    """The first operator that ran without it, or that wrote its sum into it; ``None``: it outlives the step."""
    freed: int | None
    """As ``died``, had autograd kept nothing: forward's own references alone."""
    saved_by: tuple[int, ...] = ()
    """Operators of forward whose gradient holds it until backward; not told of parameters, which live on anyway."""
    compressor: CompressorName = "null"
    """The smallest codec that held its contents exactly; ``null`` where they were not looked into."""
    packed_bytes: int = 0
    """Bytes in that codec; ``nbytes`` for ``null``."""
    fixed_bytes: tuple[tuple[int, int], ...] = ()
    """Pairs: the length of an axis, and the bytes that it would hold however short that was; none of most tensors."""

    @property
    def packing_bytes(self) -> int:
        """Of spikes that take as long to pack: of a concatenation, parts are copied and compared."""
        return self.nbytes // 2 if self.compressor == "parts" else self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module; ranges of operators are half open."""

    path: str
    start: int
    """First operator of its forward, those of modules below it included."""
    end: int
    backward_start: int
    """First operator of its backward; equal to ``backward_end`` if it has none."""
    backward_end: int
    inputs: tuple[int, ...]
    """Storages of its tensor arguments."""
    outputs: tuple[int, ...]
    """Storages of what it returned, in turn: that of several views as often."""

    @property
    def forward(self) -> range:
        """The operators of its forward."""
        return range(self.start, self.end)

    @property
    def backward(self) -> range:
        """Those of its backward; empty if it has none."""
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
    """In the order of execution."""
    storages: tuple[StorageTrace, ...] = ()
    """In the order of birth."""
    calls: tuple[ModuleCall, ...] = ()
    """In the order of their start, a caller before those it calls."""
    allocated_peak_bytes: int = 0
    """The tensor peak with the workspaces of operators."""
    packing_bytes_per_s: float = 0.0
    """How fast the device packs a tensor and unpacks it again, of the bytes that go through both; 0: not measured."""
    segment_overhead: float = 1.0
    """What a segment takes beside its operators, over what it takes where the cost model's constants come from."""


def ancestry(path: str) -> Iterator[str]:
    """``a.b``, ``a`` and the root."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path
