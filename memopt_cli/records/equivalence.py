"""The request and the results of ``memopt verify``, which compares how two models, or two steps, train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.model import ModelSource
from memopt_cli.records.settings import StepSettings
from memopt_cli.records.verification import TensorPrint


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceRequest:
    """The options of ``memopt verify``, resolved."""

    reference: ModelSource
    candidate: ModelSource
    """Candidate: the same model or step, trained differently."""
    spec: InputSpec | None
    """Inputs of both; ``None`` to look for them next to the reference, then guess."""
    settings: StepSettings = StepSettings()
    steps: int = 3
    """Number of consecutive steps, with an optimizer."""
    timeout_s: float = 600.0
    """Time limit in seconds of each answer of a profiling subprocess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPrint:
    """One call of a module."""

    path: str
    class_name: str
    recomputed: bool
    """Whether backward made the call, to recompute."""
    training: bool
    """Whether the module was in training mode."""
    begun: str
    """Digest of the random generators' state at the start of the call, the model's own generators included."""
    inputs: tuple[TensorPrint, ...]
    outputs: tuple[TensorPrint, ...]
    """Outputs; empty for an unfinished call: a checkpoint stops a recomputation once it has all that it needs."""
    finished: bool
    draws: bool
    """Whether the call used random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePrint:
    """An operator that chooses among values: a sort, a maximum."""

    operator: str
    path: str
    """Path of the module that ran the operator."""
    recomputed: bool
    values: TensorPrint
    chosen: TensorPrint
    """Indices of the values chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrint:
    """The fingerprint of one of several consecutive steps."""

    effects: tuple[TensorPrint, ...]
    """Outputs, inputs, gradients before the update, buffers, state, generators, and the parameters after the update."""
    others: tuple[TensorPrint, ...]
    """Numbers among the outputs, and those numbers and generators among the attributes that have changed."""
    hooks: tuple[str, ...]
    """Calls of the user's hooks, in order: ``forward hook record of block1``."""
    calls: tuple[CallPrint, ...] = ()
    """Calls in a watched step, in the order in which they ended."""
    choices: tuple[ChoicePrint, ...] = ()
    warnings: tuple[str, ...] = ()
    """Warnings by Python."""
    nested_backward: bool = False
    """Whether backward ran within backward in a watched step, for example by a reentrant checkpoint."""
    draws_in_backward: bool = False
    """Whether backward ran operators that make random numbers in a watched step: it recomputed them."""
    failed: str = ""
    """Error of the step, which is then the last and has no effects; empty if it succeeded."""
    updated: bool = True
    """Whether the optimizer, if there is one, updated: the gradient scaler in the user's own step may skip updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSteps:
    """Several consecutive steps from the state in which the model was loaded."""

    start: tuple[TensorPrint, ...]
    """Parameters and buffers before the first step."""
    others: tuple[str, ...]
    """Names of the attributes that hold numbers or generators."""
    steps: tuple[StepPrint, ...]
    draws: bool
    """Whether random numbers were used."""
    is_compiled: bool
    """Whether ``torch.compile`` compiles modules of the model, whose calls could not be watched."""
    evaluating: tuple[str, ...] = ()
    """Paths of the modules that were in eval mode when the model was loaded."""
    frozen: tuple[str, ...] = ()
    """Names of the parameters that require no gradient."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Name of each imported module -> its file; without the standard library, PyTorch and memopt."""

    @property
    def failed(self) -> str:
        """Error of the last step; empty if it succeeded."""
        return self.steps[-1].failed


Likeness = Literal["to the bit", "within noise", "up to rounding", "as far as memopt can tell", "not"]
"""How similar two trainings are, best first:

- ``to the bit``: bit-identical;
- ``within noise``: no further apart than two runs of the reference;
- ``up to rounding``: equal to 1e-9 in float64;
- ``as far as memopt can tell``: equal in half of the digits, where float64 cannot decide;
- ``not``: different.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGap:
    """A tensor that differs between two trainings."""

    name: str
    """Name such as ``gradient of block1.weight``."""
    apart: float
    """Distance divided by the norm of the reference's tensor; infinite if one is missing, or their shapes differ."""
    missing: Literal["", "reference", "candidate"] = ""
    """Side that lacks the tensor; empty if neither does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The likely cause of a difference, found in a second run of the step."""

    module: str = ""
    """Path of the first module that differs; empty if it is not known, or the model itself."""
    class_name: str = ""
    text: str
    """Sentence on the cause; empty if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """The comparison of two trainings."""

    reference: str
    candidate: str
    alike: Likeness
    steps: int
    batch: int
    compared: int
    """Number of tensors compared in a step."""
    in_training_mode: bool
    """Whether the steps ran in training mode alone; a step of the user's own sets its modes."""
    precision: str
    """Precision of the comparison that decided."""
    worst: float
    """Largest relative distance in the precision of ``--precision``."""
    differs_in_step: int = 0
    """Number of the first step in which the trainings differ; 0 if they do not."""
    gaps: tuple[TensorGap, ...] = ()
    """Tensors with a difference in that step, the most telling ones first."""
    failed: str = ""
    """Error of the candidate in step ``differs_in_step``, where the reference raises none; empty if there is none."""
    hooks: str = ""
    """Text of the difference in the calls of hooks; empty if there is none."""
    cause: Cause | None = None
    notes: tuple[str, ...] = ()
    spent_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing differs by more than is allowed."""
        return self.alike != "not"
