"""The records that stages hand each other: frozen dataclasses, sizes in bytes, times in seconds.

:func:`to_data` turns any of them into plain JSON/YAML values and :func:`from_data` reads them back, checking every
field; plans, summaries and the messages of profiling subprocesses all use this one pair.
"""

from __future__ import annotations

import functools
import statistics
import types
import typing
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union

from memopt_cli.errors import MemoptError, UsageError, shortened

if TYPE_CHECKING:
    from torch import nn

SCHEMA_VERSION = 1
"""Version of every file memopt writes; raised when a field changes its meaning."""

Precision = Literal["stored", "fp32", "bf16", "fp16", "fp64"]
OptimizerName = Literal["none", "sgd", "adamw"]

Profile = Literal["safe", "balanced", "memory", "exhaustive"]
Preference = Literal["speed", "balanced", "memory"]
StrategyName = Literal["bptt", "plan", "online"]
"""Ways to learn sequences: back-propagation through time, the same under a plan, and online learning."""
OnlineRule = Literal["D-RTRL", "ES-D-RTRL"]
SelectionPolicy = Literal[
    "no_candidates",
    "explicit_zero_budget",
    "zero_ratio_budget",
    "all_candidates",
    "budget_covers_all",
    "fallback_module_order",
    "largest_input_activations",
    "least_predicted_peak",
    "fastest_within_budget",
]

PRECISIONS: tuple[str, ...] = typing.get_args(Precision)
OPTIMIZERS: tuple[str, ...] = typing.get_args(OptimizerName)
STRATEGIES: tuple[StrategyName, ...] = typing.get_args(StrategyName)
ONLINE_RULES: tuple[OnlineRule, ...] = typing.get_args(OnlineRule)


# ---------------------------------------------------------------------------------------------- what to run


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What the user vouched for when a file is loaded."""

    libraries: tuple[str, ...] = ()
    """Packages whose ``nn.Module`` classes may be built (``trust:``), like those of well-known model libraries."""
    packages: tuple[str, ...] = ()
    """Top-level packages vouched for (``--allow-package``): the classes that they define may be built, and their
    functions referred to; a function that the file itself calls must be named in :attr:`globals`."""
    globals: tuple[str, ...] = ()
    """Single qualified names that may be imported (``--allow-global``)."""
    code_paths: tuple[str, ...] = ()
    """Files or folders made importable, whose module classes are trusted (``--code-path``)."""
    pickle: bool = False
    """No check at all (``--trust-pickle``)."""
    sandbox: bool = True
    """Subprocesses that load and run the model are confined, unless nothing is checked (``--no-sandbox`` says no)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGlobal:
    """A class or function that a model file wants to import and that is not allowed without asking."""

    name: str
    """Qualified name, e.g. ``mymodels.net.Net``."""
    package: str
    """Top-level package, e.g. ``mymodels``."""
    reason: str
    """Why it is not allowed, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from: enough for a subprocess to load the same model again."""

    location: str
    """Path of a file, or ``package.module:callable``."""
    weights: str | None = None
    """Path of a state dict that fills the model (``--weights``)."""
    key: str | None = None
    """Which entry is meant of a file that holds several, as keys joined by dots (``--key``)."""
    trust: Trust = Trust()
    sha256: str | None = None
    """Hash of the model file when it was first read: one that has become another is refused.  ``None``: not read yet,
    or a callable."""
    weights_sha256: str | None = None
    """The same of the file of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, with what is known of the file it came from."""

    module: nn.Module
    source: ModelSource
    format: str
    """``pickle``, ``torchscript``, ``exported``, ``pretrained`` or ``factory``."""
    sha256: str | None
    """Hash of the model file; ``None`` for a factory."""
    weights_sha256: str | None = None
    """Hash of the file of weights; ``None`` if there is none."""
    notes: tuple[str, ...] = ()
    example_spec: InputSpec | None = None
    """The inputs that the file carries, if it does (``.pt2``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a command must know of a model that was loaded in another process."""

    format: str
    """As of :class:`LoadedModel`."""
    class_name: str
    """Of the model itself."""
    sha256: str | None
    weights_sha256: str | None
    notes: tuple[str, ...]
    spec: InputSpec | None
    """The inputs of its step; ``None`` if they were not asked for."""
    batch: int | None
    """How many samples they are, which a file of inputs may have to tell; ``None`` if they were not asked for."""
    carried: Plan
    """The plan that the file carries."""
    asked_codecs: tuple[str, ...]
    """Paths of the modules that name a codec, other than none, for their inputs (``x_compressor``)."""
    fixed_sizes: bool
    """The file was made for inputs of one size (``torch.export`` without ``dynamic_shapes``)."""
    batch_norms: bool
    """A layer of it normalizes by statistics of the batch."""
    trainable_bytes: int
    """Of the parameters that require gradients, as they are stored."""
    sync_norms: tuple[str, ...]
    """Paths of batch norms that need all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input tensor: ``[name:]SHAPE[@dtype][=values]``."""

    name: str | None = None
    """Keyword of ``forward``; ``None`` for a positional argument."""
    shape: tuple[int | str, ...]
    """Sizes; a string is a symbol looked up in :attr:`InputSpec.dims`."""
    dtype: str = "float32"
    """Name of a torch dtype without the prefix."""
    values: str = "normal"
    """``normal``, ``uniform``, ``zeros``, ``ones``, ``spikes:RATE`` or ``LOW..HIGH`` (high exclusive)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The inputs of one training step, by one of ``tensors``, ``data_file`` and ``script``.

    With none of them its ``dims`` resize those that are found elsewhere.  Raises :class:`UsageError` for two at once:
    whoever looked at the one would run the other.
    """

    tensors: tuple[TensorSpec, ...] = ()
    dims: dict[str, int] = field(default_factory=dict)
    """Size of each symbol, e.g. ``{"B": 8, "S": 128}``."""
    optional_dims: tuple[str, ...] = ()
    """Those of ``dims`` that are left out where nothing takes them: a config file may be of other models, too."""
    data_file: str | None = None
    """``--input-data``: a file that holds the inputs."""
    data_sha256: str | None = None
    """Hash of that file when it was first read: one that has become another is refused.  ``None``: not read yet."""
    script: str | None = None
    """``--input-script``: ``file.py:function``, called with the dimensions it names."""
    source: str
    """Where the spec was found, for people: ``--input``, ``model.inputs.yaml``, ``a guess from conv1`` …"""

    def __post_init__(self) -> None:
        ways = {"tensors": self.tensors, "data_file": self.data_file, "script": self.script}
        given = [name for name, value in ways.items() if value]
        if len(given) > 1:
            raise UsageError(f"the inputs are described twice, by {' and '.join(given)}", hint="Keep one of them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How one training step is run."""

    device: str = "cpu"
    """``cpu`` or ``cuda:N`` (already resolved)."""
    precision: Precision = "stored"
    """``stored`` keeps the file's dtypes; ``fp32`` and ``fp64`` cast; ``bf16`` and ``fp16`` run under autocast."""
    loss: str | None = None
    """``file.py:function``, called with the model's output; ``None``: see :func:`memopt_cli.step.seeds_of_backward`."""
    optimizer: OptimizerName = "none"
    accumulates: bool = False
    """It finds the gradients of earlier micro-batches, and adds to them."""
    seed: int = 0


# ---------------------------------------------------------------------------------------------- plans


CompressorName = Literal["null", "boolean", "uint8", "bit", "sparse", "two-valued", "index", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """What to do at one module: make it a segment, perhaps run in chunks."""

    path: str
    """Module path as in ``named_modules``; empty for the root."""
    compressor: CompressorName = "null"
    """Codec of the stored input tensors; ``own`` is the module's ``x_compressor``."""
    chunks: int = 1
    """Number of chunks; 1 means the whole input at once."""
    axis: int = 0
    """Dimension of inputs and outputs along which the chunks are cut."""
    seq_inputs: int = 1
    """How many leading positional arguments are cut; later ones are states, or passed whole."""
    seq_outputs: int = 1
    """How many leading outputs are concatenated; later ones are states that the next chunk receives."""
    spatial_split: bool = False
    """Each module that ``__spatial_split__`` returns is a segment of its own."""
    keep: tuple[str, ...] = ()
    """Operators, by the names of :attr:`OpTrace.name`, whose outputs are kept (``aten::convolution#2``: of the second
    call that the segment makes outside of segments in it); all others are recomputed."""
    batch_statistics: bool = False
    """Of chunks: a first pass over them gathers the statistics that batch norms inside normalize by."""
    through_loss: bool = False
    """Of chunks of a linear layer: each runs on through the cross-entropy that its output goes to, to its gradients;
    neither the whole output nor the gradient of it ever exists."""
    inexact: bool = False
    """Of chunks: batch norms inside normalize each by its own statistics.  Not what the whole computes: it must be
    asked for."""
    recompute_states: bool = False
    """Of chunks: the states that the module hands from one to the next in its attributes are recomputed, not held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Module path -> what to do there."""

    level: int
    segments: tuple[SegmentPlan, ...] = ()
    """In the order of first call."""
    packed: bool = False
    """What is saved for backward outside of segments is packed where that is lossless; nothing is run again for it."""

    @property
    def is_empty(self) -> bool:
        """The model stays as it is."""
        return not self.segments and not self.packed


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRule:
    """How a module may run in chunks with the same result: the fields of :class:`SegmentPlan` of the same names."""

    axis: int
    seq_inputs: int
    seq_outputs: int
    batch_statistics: bool = False
    inexact: bool = False

    def applied(self, segment: SegmentPlan, chunks: int) -> SegmentPlan:
        """The segment in so many chunks."""
        return replace(segment, chunks=chunks, **asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A module cannot run in chunks, and why."""

    reason: str


# ---------------------------------------------------------------------------------------------- what a step did


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


Phase = Literal["forward", "backward", "update"]


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
    seconds: float = 0.0
    """Measured time; 0 where only tensors without data ran."""
    recompute_s: float | None = None
    """Measured time of it in a recomputation; ``None``: as long as the first time."""
    workspace_bytes: int = 0
    """What its kernel holds for itself while it runs."""
    fixed_workspace_bytes: int = 0
    """Of that, what it would hold however small its batch."""


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
    """Storages of what it returned."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of a plan, without running anything."""

    allocated_peak_bytes: int
    module: str
    """The module that runs when the peak is reached."""
    step_s: float
    """Time of a step: the recorded operators', and what the plan runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Bytes alive at the instant of the tensor peak, by category."""

    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    inputs_bytes: int
    activations_bytes: int
    """Born in forward (or in its recomputation) and not one of the above."""
    temporaries_bytes: int
    """Born in backward or in the optimizer and not one of the above."""


def break_down(sizes: Iterable[tuple[str, int]]) -> Breakdown:
    """From (kind, bytes) of the storages that are alive."""
    total: Counter[str] = Counter()
    for kind, nbytes in sizes:
        total[kind] += nbytes
    return Breakdown(**{f.name: total[f.name.removesuffix("_bytes")] for f in fields(Breakdown)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShare:
    """Activation bytes that one module holds at the instant of the tensor peak."""

    path: str
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One step's tensor peak and who holds it, from a run on real or fake tensors."""

    tensor_peak_bytes: int
    allocated_peak_bytes: int
    """The tensor peak with the workspaces that kernels were seen to take."""
    resident_bytes: int
    """All parameters, buffers, gradients, optimizer state and inputs at full size."""
    breakdown: Breakdown
    """At the instant of the tensor peak."""
    holders: tuple[ModuleShare, ...]
    """Modules that hold most at the instant of the allocated peak, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One training step, measured in a profiling subprocess."""

    tensor_peak_bytes: int
    allocated_peak_bytes: int
    resident_bytes: int
    """All parameters, buffers, gradients, optimizer state and inputs at full size."""
    reserved_peak_bytes: int
    """CUDA: what the caching allocator held; CPU: the same as the allocated peak."""
    process_peak_bytes: int
    """Largest resident set of the subprocess, interpreter and libraries included."""
    step_times_s: tuple[float, ...]
    """Wall time of each measured step, warm-up excluded."""
    breakdown: Breakdown
    holders: tuple[ModuleShare, ...]
    """Modules that hold most at the tensor peak, largest first."""
    backend: str
    """What counted the allocated peak, e.g. ``cpu profiler``."""
    batch: int
    spent_s: float
    """Wall time the whole measurement took, start of the subprocess included."""

    @property
    def step_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.step_times_s)

    def slowdown(self, original: Measurement) -> float:
        """Median step time over the original's, to the two decimals that are shown and that limits are held to."""
        return round(self.step_s / original.step_s, 2)

    @property
    def step_variation(self) -> float:
        """Interquartile range of the step times over their median; 0 of a single step."""
        if len(self.step_times_s) < 2:
            return 0.0
        first, median, third = statistics.quantiles(self.step_times_s, n=4, method="inclusive")
        return (third - first) / median if median else 0.0

    @property
    def activation_peak_bytes(self) -> int:
        """Allocated peak less everything resident, in bytes."""
        return max(0, self.allocated_peak_bytes - self.resident_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPrint:
    """What tells a tensor that a step left from another one, in its place."""

    name: str
    kind: str
    """Its dtype, shape and layout, and of a sparse one a digest of where its values are."""
    bits: str
    """A digest of its kind and bits."""
    elements: int
    epsilon: float
    """Of its dtype; 0 of one that is not floating."""
    norm: float
    """The root of the sum of squares, in float64; 0 of one that is not floating."""
    projections: tuple[float, ...]
    """Weighted sums of its elements, in float64: those of two tensors differ as far as these do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Of a measured step: its outputs, gradients of parameters, buffers, state and generators."""

    tensors: tuple[TensorPrint, ...]
    put_off: tuple[str, ...]
    """Outputs whose values were not computed."""
    repeats: bool
    """Another step of the same plan, from the same state and seed, left the same bits."""


# A measurement that gave no numbers says why, as a type.


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The step needs more memory than the subprocess may have."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The subprocess passed its time limit and was ended."""

    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The subprocess ended without an answer."""

    reason: str
    """``killed by SIGSEGV``, ``exit code 7`` …"""
    output_tail: str
    """The last lines it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """The model's own code raised, or its step has no usable result."""

    message: str
    hint: str = ""
    exit_code: int = 3
    wanted: tuple[WantedGlobal, ...] = ()
    """What the model's file would have to be allowed, where a yes would do."""


Failure = OutOfMemory | TimedOut | Crashed | StepFailed


def describe(failure: Failure) -> str:
    """One sentence on why there is no measurement."""
    match failure:
        case OutOfMemory(detail=detail):
            return f"out of memory ({detail})" if detail else "out of memory"
        case TimedOut(limit_s=limit_s):
            return f"the step ran past its time limit of {limit_s:g} s"
        case Crashed(reason=reason):
            return f"the profiling subprocess was lost: {reason}"
        case StepFailed(message=message):
            return message


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherCheck:
    """A step after the recorded one, varied in one way, and compared as that was."""

    name: str
    """As it ends a sentence: ``in eval mode``."""
    batch: int
    compared: int = 0
    """Number of tensors compared."""
    not_tried: str = ""
    """Why it was left out: what the original cannot do, or that its steps are long; empty if it was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintCheck:
    """The measured step with the plan against that of the original, by their fingerprints, at the size asked for."""

    batch: int
    dims: dict[str, int]
    """Sizes of other symbols."""
    compared: int
    """Number of tensors."""
    equal: int
    """Of these, the same to the bit."""
    tolerance: float
    """Relative to the norm; what was allowed to the tensor that differed most for what it may."""
    worst_name: str
    """That tensor; empty if none differed."""
    worst_difference: float
    """Its distance from that of the original, over the norm of that, as projections tell it."""

    @property
    def sizes(self) -> str:
        """In words: ``batch 8, S=256``."""
        return _sizes_in_words(self.batch, self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The optimized model against the original on the same inputs."""

    passed: bool
    exact: bool
    """Compared bit for bit (a plan without chunks) or within ``tolerance`` (relative)."""
    precision: str
    """``--precision`` of the comparison; ``fp64`` with chunks."""
    tolerance: float
    compared: int
    """Number of tensors compared: outputs, gradients, buffers, state."""
    worst_name: str
    """The tensor that differed most; empty if none differed."""
    worst_difference: float
    """Largest difference relative to the largest magnitude of the original tensor."""
    batch: int
    """Batch size the comparison ran at."""
    full_size: bool
    """``batch`` and ``dims`` are the sizes that were asked for."""
    dims: dict[str, int] = field(default_factory=dict)
    """Sizes of other symbols that the comparison ran at."""
    measured: FingerprintCheck | None = None
    """The measured steps, which agree; ``None`` where none were compared, or they did not."""
    detail: str = ""
    """What the step with the plan raised, where the original raises nothing."""
    inexact: tuple[str, ...] = ()
    """Segments that are not exact, as asked for: their batch norms were compared at fixed statistics."""
    further: tuple[FurtherCheck, ...] = ()
    """What follows the recorded step; none where that differed, or was all that was asked for."""
    differs_in: str = ""
    """The name of the further check that failed; empty if the recorded step itself did, or none."""

    @property
    def sizes(self) -> str:
        """Those of the comparison, in words: ``batch 8, S=256``."""
        return _sizes_in_words(self.batch, self.dims)

    @property
    def difference(self) -> str:
        """What differed most, and where: ``output[0] differs by 0.5 in eval mode``."""
        where = f" {self.differs_in}" if self.differs_in else ""
        if self.detail:
            return f"{self.worst_name} fails{where} ({self.detail})"
        return f"{self.worst_name or 'its output'} differs by {self.worst_difference:.2g}{where}"


def _sizes_in_words(batch: int, dims: Mapping[str, int]) -> str:
    return ", ".join([f"batch {batch}", *(f"{symbol}={size}" for symbol, size in dims.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProbe:
    """One point of the memory model: the allocated peak at a batch size."""

    batch: int
    """Of each replica."""
    allocated_peak_bytes: int
    step_s: float
    """Wall time of a step."""
    replicas: int = 1
    """Copies of the model that took the step at once."""
    route: str = ""
    """What ran the copies (``BatchModule``); empty for one, which runs as it is."""

    @property
    def samples_per_s(self) -> float:
        """Of all copies together."""
        return self.replicas * self.batch / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvice:
    """How large a batch fits: ``peak = intercept + slope * batch`` near the answer."""

    recommended_batch: int
    """The largest batch that was run and stayed within the budget."""
    fastest_batch: int
    """Of the batches that did, the one with most samples per second."""
    estimated_batch: int
    """The largest batch by the model; equal to ``recommended_batch`` when that was verified by a run."""
    probes: tuple[BatchProbe, ...]
    intercept_bytes: float
    slope_bytes: float
    """Bytes per sample, near the recommended batch."""
    budget_bytes: int
    device_bytes: int
    limited_by: str
    """What bounds the recommendation: the budget, the longest step that may be run, or a failed run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimate:
    """How large a batch would fit by the model; none was run."""

    batch: int
    predicted_peak_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBatchFits:
    """Not even the smallest batch fits."""

    batch: int
    """The smallest."""
    budget_bytes: int
    reason: str
    """What became of it."""


BatchOutcome = BatchAdvice | BatchEstimate | NoBatchFits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAdvice:
    """How many copies of a model train fastest as one, each with the batch that is described."""

    fastest: int
    """Number of copies with most samples per second, of those within the budget."""
    probes: tuple[BatchProbe, ...]
    """One run for each number of copies that was tried, ascending; the last may be over the budget."""
    limited_by: str
    """Why no more copies were tried."""

    @property
    def best(self) -> BatchProbe:
        """The run of the fastest."""
        return next(run for run in self.probes if run.replicas == self.fastest)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRow:
    """One level's line in the summary."""

    level: int
    plan: Plan
    outcome: Measurement | Failure | None
    """``None``: it was not measured; what is predicted has to do."""
    predicted_tensor_peak_bytes: int | None
    """From the dry run on fake tensors; ``None`` if the model cannot be traced without data."""
    predicted_allocated_peak_bytes: int | None
    """The same with the workspaces of kernels recorded from the original."""
    candidates: int
    """Plans that were dry-run for this level, beside those for the levels below."""
    search_s: float
    note: str = ""
    predicted_slowdown: float | None = None
    """Step time over that of the original, by the cost model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """One plan between least time and least memory."""

    plan: Plan
    predicted_allocated_peak_bytes: int
    predicted_slowdown: float
    """Step time over that of the original, by the cost model."""
    outcome: Measurement | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What another plan would give: its dry run's peak, and the cost model's time."""

    peak_bytes: int
    slowdown: float
    """Step time over that of the original."""


@dataclass(slots=True)
class MemOptSummary:
    """What one optimization did.

    The fields down to ``skipped_errors`` keep their names and order: they are a file format.
    """

    profile: str | None
    checkpoint_budget: str | None
    prefer: str | None
    device: str
    requested_level: int
    applied_level: int
    compress_x: bool
    allow_expensive_profiling: bool
    applied_steps: list[str] = field(default_factory=list)
    skipped_steps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gc_wrap_count: int = 0
    manual_compressor_count: int = 0
    bit_compressor_count: int = 0
    null_compressor_count: int = 0
    spatial_split_count: int = 0
    temporal_split_count: int = 0
    unwrap_count: int = 0
    gc_container_count: int = 0
    tcgc_container_count: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    gc_candidate_count: int = 0
    gc_selected_count: int = 0
    gc_selection_policy: str = "all_candidates"
    gc_selected_modules: list[str] = field(default_factory=list)
    gc_selection_explanation: str = ""
    recommendation: str = ""
    peak_memory_mb: float | None = None
    """Measured allocated peak of the applied plan in MiB."""
    total_gc_count: int = 0
    total_sliding_count: int = 0
    compressed_layers: int = 0
    skipped_errors: int = 0
    levels: list[LevelRow] = field(default_factory=list)
    plan: Plan | None = None
    verification: Verification | None = None
    advice: BatchAdvice | None = None
    model_format: str = ""
    spent_s: float = 0.0
    """Wall time of the whole optimization."""
    budget_bytes: int | None = None
    """The allocated peak that was not to be exceeded."""
    frontier: list[ParetoPoint] = field(default_factory=list)
    """Fastest first; a plan that was picked from it is the applied one."""
    interrupted: bool = False
    """By the user, in the search: the plan is the best of what had been tried."""
    faster: Outlook | None = None
    """The next plan on the frontier with a shorter step than the applied one, of those that were dry-run."""
    smaller: Outlook | None = None
    """The next with a lower peak."""


# ---------------------------------------------------------------------------------------------- one job's in and out


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The search as it was asked for; ``None``: not said, so that a profile or a default decides."""

    level: int | None = None
    targets: tuple[str, ...] = ()
    modules: tuple[str, ...] | None = None
    parts: tuple[str, ...] | None = None
    chunkable: tuple[str, ...] | None = None
    compress_x: bool | None = None
    temporal_split_factor: int = 2
    max_split_rounds: int | None = None
    max_candidates_per_round: int | None = None
    warmup_in_main_process: bool | None = None
    warmup_in_profile_workers: bool | None = None
    prefer: Preference | None = None
    profile: Profile | None = None
    allow_expensive_profiling: bool | None = None
    checkpoint_budget: Preference | None = None
    max_gc_wrapped_modules: int | None = None
    gc_target_budget_ratio: float | None = None
    allow_inexact: bool = False
    max_slowdown: float | None = None
    """Infinite: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Limits and switches of the search, as :func:`memopt_cli.plan.policy.resolve` settled them."""

    level: int = 3
    targets: tuple[str, ...] = ()
    """``--target``: class names or path globs; empty: memopt chooses, unless there are ``modules``."""
    modules: tuple[str, ...] | None = None
    """Paths of the only modules that may become segments."""
    parts: tuple[str, ...] | None = None
    """Paths of the only ones, of what lies in those, that may from level 2 on; ``None``: all."""
    chunkable: tuple[str, ...] | None = None
    """Paths of the only modules that may run in chunks; ``None``: all that can."""
    compress_x: bool = True
    temporal_split_factor: int = 2
    """How many chunks a temporal split makes of one."""
    max_split_rounds: int | None = None
    """How many segments may have others in them, and how often chunks may be multiplied; ``None``: no limit."""
    max_candidates_per_round: int | None = None
    """Modules that are asked for chunks, and changes of a plan that are tried, in a round; ``None``: no limit."""
    warmup_in_main_process: bool = True
    """One step of the optimized model in the process that goes on to train it."""
    warmup_in_profile_workers: bool = True
    """One step before the timed ones of a measurement, and not among them."""
    prefer: Preference | None = None
    profile: Profile | None = None
    """The one that was asked for, or that ``prefer`` stands for."""
    allow_expensive_profiling: bool = True
    checkpoint_budget: Preference | None = None
    """The one that was asked for, or that ``prefer`` stands for."""
    max_gc_wrapped_modules: int | None = None
    """The most segments that lie in no other; ``None``: no limit; 0 or less: none."""
    gc_target_budget_ratio: float | None = None
    """The same as a share of the candidates; ``None``: all of them; 0 or less: none."""
    allow_inexact: bool = False
    """Chunks may have batch statistics of their own where the whole's cannot be gathered."""
    max_slowdown: float | None = None
    """The longest step of a level's plan, over that of the original; ``None``: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Most bytes that the measured allocated peak may have; one of the two is set."""

    nbytes: int | None = None
    share: float | None = None
    """Of the original's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchGoal:
    """What to look for in place of the lowest peak of a level."""

    budget: Budget | None = None
    """The fastest plan within it."""
    frontier: bool = False
    """Plans from the fastest to the smallest."""
    pick: int | None = None
    """Which of those to apply, from 1, if ``frontier``; ``None``: none."""

    @property
    def applies(self) -> bool:
        """Whether a plan is chosen, not shown alone."""
        return self.budget is not None or self.pick is not None or not self.frontier


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeRequest:
    """Everything ``memopt optimize`` was asked for."""

    source: ModelSource
    spec: InputSpec | None
    """``None``: look for it beside the model, then guess."""
    settings: StepSettings = StepSettings()
    search: SearchRequest = SearchRequest()
    goal: SearchGoal = SearchGoal()
    output: str | None = None
    """Path of the optimized model; ``None``: beside the original."""
    dry_run: bool = False
    """Search and report, write nothing."""
    plan_only: bool = False
    """Write no model: the plan is applied where it trains."""
    force: bool = False
    """Existing files may be replaced."""
    timeout_s: float = 600.0
    """Time limit of one profiling subprocess answer."""
    longest_step_s: float | None = None
    """The step that verifies the recommended batch is to take no longer; ``None``: see ``pipeline.batch_advice``."""
    recommend_batch: bool = True
    """Find the batch that fits, too."""
    record_steps: bool = False
    """Record a step before and after, for a report that shows them."""
    search_limit_s: float | None = None
    """No plan is tried any more when the search has taken this long: the best so far is taken."""
    measure_levels: bool = False
    """Measure the plan of every level, not the applied one alone."""
    interruptible: bool = False
    """Ctrl-C in the search ends the search alone: the best so far is measured, verified and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRequest:
    """Everything ``memopt apply`` was asked for."""

    source: ModelSource
    plan_path: str
    spec: InputSpec | None = None
    """As in :class:`OptimizeRequest`; only needed to verify."""
    settings: StepSettings = StepSettings()
    verify: bool = False
    """Compare with the original first; nothing is written if they differ."""
    output: str | None = None
    force: bool = False
    timeout_s: float = 600.0
    """Of loading the model, of the comparison, and of each piece of the file that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """What ``memopt apply`` did."""

    files: tuple[str, ...]
    verification: Verification | None = None
    """``None`` unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """What every written file says of its origin."""

    schema_version: int
    memopt: str
    torch: str
    model: str
    """Location of the original, as given."""
    sha256: str | None
    spec: InputSpec
    seed: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """One training step as it was, and under the plan that is applied."""

    original: StepTrace
    optimized: StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeResult:
    """What ``memopt optimize`` did."""

    header: FileHeader
    summary: MemOptSummary
    files: tuple[str, ...]
    """Paths written; empty for a dry run."""
    steps: RecordedSteps | None = None
    """``None`` unless asked for."""
    ended_by: MemoptError | None = None
    """What kept it from its end once the plan was found; all that was found before is here."""


# ---------------------------------------------------------------------------------------------- how large a step fits


Objective = Literal["max", "throughput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DimRange:
    """Sizes of a symbol, doubled from the first to the last."""

    symbol: str
    low: int
    high: int

    def sizes(self) -> tuple[int, ...]:
        """``low``, twice that … and ``high``."""
        doubled = [self.low]
        while doubled[-1] * 2 < self.high:
            doubled.append(doubled[-1] * 2)
        return tuple(dict.fromkeys([*doubled, self.high]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """Everything ``memopt recommend-batch`` was asked for."""

    source: ModelSource
    spec: InputSpec | None
    """``None``: look for it beside the model, then guess."""
    settings: StepSettings = StepSettings()
    memory: int | float = 0.9
    """Bytes, or a share of the memory that the device has free."""
    objective: Objective = "max"
    global_batch: int | None = None
    """Samples per optimizer step."""
    multiple_of: int = 1
    dim_range: DimRange | None = None
    replicas: DimRange | None = None
    """Numbers of copies of the model; ``None``: one model is trained."""
    plan_path: str | None = None
    """A plan to recommend for, too."""
    lengths_path: str | None = None
    """A file of sequence lengths."""
    strategies: tuple[StrategyName, ...] = ()
    """Ways to learn sequences, to be compared over ``dim_range`` instead."""
    output: str | None = None
    """Path of the batch configuration; ``None``: none is written."""
    force: bool = False
    timeout_s: float = 600.0
    """Time limit of one profiling subprocess answer."""
    longest_step_s: float = 60.0
    """No step that is run is to take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """What fits in one case."""

    planned: bool
    """Under the plan."""
    dims: dict[str, int]
    """The size of the symbol that has a range; empty without one."""
    outcome: BatchOutcome
    """With copies: the batch of each of the fastest number of them."""
    replicas: ReplicaAdvice | None = None
    """``None``: not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """How a step of the optimizer is made of steps that fit."""

    global_batch: int
    """As asked for."""
    batch: int
    """Of one forward and backward; it was run."""
    steps: int
    """Forward and backward passes per optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStrategy:
    """What an epoch of the user's sequences costs, batched one way."""

    name: str
    batch: int | None
    """Sequences of a batch; ``None``: as many as ``max_tokens`` allows."""
    max_tokens: int | None
    """Positions of a batch, padding too; ``None``: the batch has a number of sequences."""
    batches: int
    waste: float
    """Share of computed positions that are padding."""
    peak_bytes: int
    """Of the batch that needs most, by the fit."""
    epoch_s: float
    """By the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecommendation:
    """What ``memopt recommend-batch`` found."""

    header: FileHeader
    objective: Objective
    limit: str
    """The memory limit, and what sets it."""
    rows: tuple[BatchRow, ...]
    """Without the plan first; sizes ascending."""
    chosen: int
    """Index of the row that the recommendation is of: of the largest size at which a batch was run, the better by the
    objective."""
    batch: int
    """By the objective, of that row."""
    verified: bool
    """It was run; if not, it is an estimate."""
    accumulation: Accumulation | None
    """``None``: not asked for."""
    lengths: tuple[LengthStrategy, ...]
    """Ways to batch the user's sequences; empty: not asked for."""
    notes: tuple[str, ...]
    probes: int
    """Steps that were run on data, failed ones too."""
    dry_runs: int
    files: tuple[str, ...]
    spent_s: float
    interrupted: bool = False
    """Something was still to be run; what is recommended is the best of what had been."""


# ---------------------------------------------------------------------------------------------- ways to learn sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAgreement:
    """A gradient of online learning against that of back-propagation through time, all parameters as one vector."""

    rule: OnlineRule
    steps: int
    """Time steps of the sequence that both were taken of."""
    cosine: float
    relative_error: float
    """Norm of the difference over that of the latter."""
    exact: bool
    """The relative error is that of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyPoint:
    """Memory of a training step of so many time steps."""

    steps: int
    allocated_peak_bytes: int
    measured: bool
    """If not, it is by the line through those that were."""
    step_s: float | None
    """Wall time of the whole sequence; ``None`` if it was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCurve:
    """One way to learn sequences."""

    strategy: StrategyName
    label: str
    """The strategy, and its rule if it has one."""
    points: tuple[StrategyPoint, ...]
    """By the number of steps; empty if it cannot be run."""
    slope_bytes: float | None
    """Bytes per time step; ``None``: not known, as fewer than two sizes could be measured."""
    exact: bool | None
    """Its gradient is that of back-propagation through time; ``None``: not known."""
    remark: str
    """How that is known, or why it cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyComparison:
    """What ``memopt recommend-batch --strategy`` found."""

    header: FileHeader
    symbol: str
    batch: int
    budget_bytes: int
    limit: str
    """The memory limit, and what sets it."""
    curves: tuple[StrategyCurve, ...]
    notes: tuple[str, ...]
    spent_s: float


# ---------------------------------------------------------------------------------------------- where memory goes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Everything ``memopt profile`` was asked for."""

    source: ModelSource
    spec: InputSpec | None
    """``None``: look for it beside the model, then guess."""
    settings: StepSettings = StepSettings()
    plan_path: str | None = None
    """A plan to run the step under; ``None``: the model as it is."""
    fake: bool = False
    """Estimate on tensors without data; run no step at full size."""
    timeout_s: float = 600.0
    """Time limit of one profiling subprocess answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A moment of a recorded step: while an operator runs."""

    allocated_bytes: int
    """Storages alive, and the operator's workspace."""
    op: int
    """Index into the trace's operators; -1: before the first."""
    name: str
    """The operator; empty before the first."""
    phase: Phase
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUse:
    """One module's part of the memory, the modules below it included."""

    path: str
    class_name: str
    calls: int
    held_bytes: int
    """Activations and temporaries that it holds at the instant of the allocated peak."""
    saved_bytes: int
    """What forward leaves alive for backward."""
    seconds: float
    """Its operators in forward and backward; 0 where only tensors without data ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A storage that autograd keeps for backward."""

    nbytes: int
    made_by: str
    """The operator that made it; empty for what existed before the step."""
    module: str
    """Of the operator that saved it first."""
    op: str
    """The operator that saved it first."""
    savers: int
    """How many operators did."""
    compressor: CompressorName
    """The smallest codec that holds its contents exactly."""
    packed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Where the memory of one training step goes."""

    header: FileHeader
    plan: Plan
    measurement: Measurement | OutOfMemory | None
    """``None``: the step was not to be run at full size."""
    fake: bool
    """The step was recorded on tensors without data."""
    tensor_peak_bytes: int
    peak: Instant
    """Of the allocated peak, as recorded."""
    breakdown: Breakdown
    """At that instant."""
    workspace_bytes: int
    """What the operator of that instant holds for itself."""
    modules: tuple[ModuleUse, ...]
    """In the order of first call."""
    saved: tuple[SavedTensor, ...]
    """Largest first."""
    live_bytes: tuple[int, ...]
    """Storages alive before the first operator, and when each has run."""
    flops: int
    notes: tuple[str, ...]
    trace: StepTrace


# ---------------------------------------------------------------------------------------------- regressions


Metric = Literal[
    "peak",
    "allocated",
    "step",
    "parameters",
    "buffers",
    "gradients",
    "optimizer",
    "inputs",
    "activations",
    "temporaries",
]
METRICS: tuple[Metric, ...] = typing.get_args(Metric)
"""Tensor peak, allocated peak and step time, and each category of bytes alive at the instant of the tensor peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much a metric may grow over its baseline (``--fail-on``)."""

    text: str
    """As typed: ``peak:5%``."""
    metric: Metric
    amount: float
    """Percent of the baseline if relative; else bytes, of ``step`` seconds."""
    relative: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under what a step was measured."""

    settings: StepSettings
    backend: tuple[str, ...]
    """Libraries that PyTorch may take kernels from (``mkldnn``, ``cudnn`` …): with others, other tensors are saved."""
    device_name: str
    python: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPlace:
    """What runs when the tensor peak is reached."""

    op: str
    """Empty before the first operator."""
    module: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """One module's own part of the tensor peak, the modules below it left out."""

    path: str
    class_name: str
    output_bytes: int
    """Of its output tensors, over all calls; whatever the peak."""
    held_bytes: dict[str, int]
    """Category -> bytes alive at the instant of the tensor peak; categories that hold nothing are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What one training step needs."""

    plan: Plan
    """What the step ran under."""
    tensor_peak_bytes: int
    allocated_peak_bytes: int
    step_s: float
    """Median wall time of a step; it depends on the machine and its load."""
    breakdown: Breakdown
    """At the instant of the tensor peak."""
    peak: PeakPlace | None = None
    """``None`` where no step was recorded, as in a summary."""
    modules: tuple[ModuleBytes, ...] = ()
    """In the order of first call."""
    saved: tuple[SavedTensor, ...] = ()
    """The largest that autograd keeps for backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What one training step needed when it was last looked at, and under what conditions."""

    header: FileHeader
    conditions: Conditions | None
    """``None``: read from a summary, which does not say."""
    memory: StepMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineResult:
    """What ``memopt baseline`` did."""

    baseline: Baseline
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not the same in two measurements."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A metric before and after: bytes, of ``step`` seconds."""

    metric: Metric
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One limit, and whether the step stays within it."""

    limit: Limit
    change: Change
    exceeded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """A module that holds more or less at the tensor peak than before; its own bytes, those below it left out."""

    path: str
    was: str
    """Its path before, if that was another; else empty."""
    class_name: str
    before_bytes: int
    after_bytes: int
    growth_bytes: dict[str, int]
    """Category -> how much more it holds, where that is not zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """Modules with the same classes and bytes under another path."""

    before: str
    """What their paths began with; empty: the root."""
    after: str
    modules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """Paths of segments that one of two plans has alone, or that both have in different ways."""

    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    packing: Literal["same", "dropped", "added"] = "same"
    """Of what is saved outside of segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one training step needs, against what it needed before, and why."""

    before: FileHeader
    after: FileHeader
    changes: tuple[Change, ...]
    """Of every metric."""
    verdicts: tuple[Verdict, ...]
    """None if there were no limits."""
    modules: tuple[ModuleChange, ...]
    """Largest growth first."""
    new_saved: tuple[SavedTensor, ...]
    """Of the largest tensors kept for backward, those without a counterpart before."""
    renames: tuple[Rename, ...]
    plan: PlanChange
    peak_before: PeakPlace | None
    peak_after: PeakPlace | None
    peak_moved: bool
    """It is reached in another operator or module; a rename is no move."""
    unlike: tuple[Difference, ...]
    """What the two would have to agree in to tell of the model alone; never any in a check."""
    surroundings: tuple[Difference, ...]
    """Versions and machines that differ; most of them leave the tensor peak alone."""

    @property
    def exceeded(self) -> tuple[Verdict, ...]:
        """The limits that were passed."""
        return tuple(verdict for verdict in self.verdicts if verdict.exceeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRequest:
    """Everything ``memopt baseline`` was asked for."""

    source: ModelSource
    spec: InputSpec | None
    """``None``: look for it beside the model, then guess."""
    settings: StepSettings = StepSettings()
    plan_path: str | None = None
    """A plan to run the step under; ``None``: the one that the file carries, if it does."""
    output: str = "memopt-baseline.json"
    force: bool = False
    """An existing file may be replaced."""
    timeout_s: float = 600.0
    """Time limit of one profiling subprocess answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """Everything ``memopt check`` was asked for; ``None``: as in the baseline."""

    source: ModelSource
    baseline_path: str
    limits: tuple[Limit, ...]
    spec: InputSpec | None = None
    device: str | None = None
    precision: Precision | None = None
    loss: str | None = None
    optimizer: OptimizerName | None = None
    seed: int | None = None
    plan_path: str | None = None
    """A plan to run the step under; ``None``: the one that the file carries, if it does."""
    timeout_s: float = 600.0
    """Time limit of one profiling subprocess answer."""


# ---------------------------------------------------------------------------------------------- what is in a file


TensorKind = Literal["parameter", "buffer", "attribute", "tensor", "input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as a model file describes it."""

    name: str
    """Path in the model, as in ``named_parameters``; the key in a state dict."""
    kind: TensorKind
    """``attribute``: a tensor that a module keeps without having registered it; ``tensor``: one outside of modules."""
    shape: tuple[int | str, ...]
    """Sizes; a string is a dimension that may vary."""
    dtype: str
    size_bytes: int
    """Bytes of its items; for an input the bytes at the sizes of the example."""
    trainable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModule:
    """A module as a model file describes it."""

    path: str
    """As in ``named_modules``; empty for the root."""
    class_name: str
    """Qualified name of its class."""
    parameters: int
    """Items of all parameters in it and below, shared ones once."""
    size_bytes: int
    """Bytes of all parameters and buffers in it and below, shared ones once."""
    segment: bool = False
    """memopt made it a segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalVerdict:
    """A class or function that a model file would import, and whether memopt lets it."""

    name: str
    verdict: Literal["allowed", "needs trust", "refused", "missing"]
    reason: str = ""
    flag: str = ""
    """What to type to allow it; empty if it is allowed, or if nothing should be suggested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What is in a model file, told without running or building any of it."""

    path: str
    format: str
    size_bytes: int
    sha256: str
    versions: dict[str, str]
    """What the file says of the format and the programs that wrote it."""
    modules: tuple[StoredModule, ...]
    """Parents before children; empty for a file of weights alone."""
    tensors: tuple[StoredTensor, ...]
    tied: tuple[tuple[str, ...], ...]
    """Names of tensors that are one and the same memory."""
    globals: tuple[GlobalVerdict, ...] = ()
    inputs: tuple[StoredTensor, ...] = ()
    """Example inputs."""
    notes: tuple[str, ...] = ()
    parameters: int = 0
    """Items of all parameters, shared ones once; in a file of weights alone, of all tensors."""
    parameter_bytes: int = 0
    buffer_bytes: int = 0


# ---------------------------------------------------------------------------------------------- plain data and back


Record = TypeVar("Record")

_TAGGED = (
    *(Measurement, OutOfMemory, TimedOut, Crashed, StepFailed, ChunkRule, Refused),
    *(BatchAdvice, BatchEstimate, NoBatchFits),
)
"""Members of a union of records, which plain data must tell apart."""


def to_data(value: Any) -> Any:
    """A record -> dicts, lists and scalars; a measurement's outcome carries its class name as ``kind``."""
    if is_dataclass(value) and not isinstance(value, type):
        data = {f.name: to_data(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__, **data} if isinstance(value, _TAGGED) else data
    if isinstance(value, Mapping):
        return {key: to_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    return value


def from_data(cls: type[Record], data: Any, *, where: str = "") -> Record:
    """The inverse of :func:`to_data`.

    Raises :class:`UsageError` that names the place (``segments[2].chunks``) for a missing or unknown key and for a
    value of the wrong type.
    """
    result: Record = _read(cls, data, where or cls.__name__)
    return result


def _read(annotation: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_dataclass(annotation):
        return _read_record(annotation, data, where)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, data, where)
    if origin is Literal:
        if data not in arguments:
            raise UsageError(f"{where} is {shortened(data)}; it must be one of {', '.join(map(str, arguments))}")
        return data
    if origin in (tuple, list):
        if not isinstance(data, list | tuple):
            raise UsageError(f"{where} must be a list, not {shortened(data)}")
        return origin(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, Mapping):
            raise UsageError(f"{where} must be a mapping, not {shortened(data)}")
        return {_read(arguments[0], k, where): _read(arguments[1], v, f"{where}.{_named(k)}") for k, v in data.items()}
    return data if annotation is Any else _read_scalar(annotation, data, where)


def _named(key: Any) -> str:
    """A key of a file as a place in it."""
    return key if isinstance(key, str) and len(key) <= _LONGEST_KEY else shortened(key)


_LONGEST_KEY = 60


@functools.cache
def _hints_of(cls: type) -> dict[str, Any]:
    """Types of the fields; a trace has thousands of records, and resolving names takes long."""
    return typing.get_type_hints(cls)


def _read_record(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise UsageError(f"{where} must be a mapping, not {shortened(data)}")
    known = {f.name: f for f in fields(cls)}
    refuse_unknown((key for key in data if key != "kind"), known, where)
    hints = _hints_of(cls)
    values = {}
    for name, f in known.items():
        if name in data:
            values[name] = _read(hints[name], data[name], f"{where}.{name}")
        elif f.default is MISSING and f.default_factory is MISSING:
            raise UsageError(f"{where} lacks the key {name!r}")
    try:
        return cls(**values)
    except UsageError as err:
        raise UsageError(f"{where}: {err.message}", hint=err.hint) from err


def refuse_unknown(keys: Iterable[Any], known: Collection[str], where: str) -> None:
    """Raise :class:`UsageError` for the first key that is not among the known ones, which it lists."""
    for key in keys:
        if key not in known:
            raise UsageError(f"{where} has an unknown key {shortened(key)}", hint=f"Known keys: {', '.join(known)}.")


def _read_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    options = tuple(o for o in options if o is not type(None))
    records = {o.__name__: o for o in options if isinstance(o, type) and is_dataclass(o)}
    if len(records) > 1:
        kind = data.get("kind") if isinstance(data, Mapping) else None
        if not isinstance(kind, str) or kind not in records:
            raise UsageError(f"{where} must have a kind among {', '.join(records)}, not {shortened(kind)}")
        return _read(records[kind], data, where)
    for option in options[:-1]:
        try:
            return _read(option, data, where)
        except UsageError:
            continue
    return _read(options[-1], data, where)


def _read_scalar(annotation: Any, data: Any, where: str) -> Any:
    if annotation is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError as err:
            raise UsageError(f"{where} is too large a number") from err
    if not isinstance(data, annotation) or (isinstance(data, bool) and annotation is not bool):
        wanted, hint = annotation.__name__, ""
        if annotation is str:
            wanted = "text"
            if not isinstance(data, Mapping | list):
                hint = "YAML takes text that looks like a number, a date or a yes or no for one: write it in quotes."
        raise UsageError(f"{where} must be {wanted}, not {shortened(data)}", hint=hint)
    return data
