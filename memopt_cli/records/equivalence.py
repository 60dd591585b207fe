"""``memopt verify``: whether two models, or two steps, train alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.model import ModelSource
from memopt_cli.records.settings import StepSettings
from memopt_cli.records.verification import TensorPrint


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceRequest:
    """Everything ``memopt verify`` was asked for."""

    reference: ModelSource
    candidate: ModelSource
    """The same model or step, trained in another way."""
    spec: InputSpec | None
    """Of both; ``None``: look for it beside the reference, then guess."""
    settings: StepSettings = StepSettings()
    steps: int = 3
    """Consecutive ones, with an optimizer."""
    timeout_s: float = 600.0
    """Time limit of one profiling subprocess answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPrint:
    """A call of a module."""

    path: str
    class_name: str
    recomputed: bool
    """It was called by backward."""
    training: bool
    """The module was in training mode."""
    begun: str
    """A digest of where the random generators stood when it began, the model's own too."""
    inputs: tuple[TensorPrint, ...]
    outputs: tuple[TensorPrint, ...]
    """None of a call that was not finished: a checkpoint stops its recomputation where it has all it needs."""
    finished: bool
    draws: bool
    """The generators moved meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePrint:
    """An operator that chooses among values: a sort, a maximum."""

    operator: str
    path: str
    """Of the module that ran it."""
    recomputed: bool
    values: TensorPrint
    chosen: TensorPrint
    """Their indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrint:
    """What one of several steps left."""

    left: tuple[TensorPrint, ...]
    """Outputs, inputs, gradients before the update, buffers, state, generators, and the parameters after the update."""
    others: tuple[TensorPrint, ...]
    """Numbers among the outputs; numbers and generators among the attributes, where they have moved since the start."""
    hooks: tuple[str, ...]
    """Calls of the user's hooks, in turn: ``forward hook record of block1``."""
    calls: tuple[CallPrint, ...] = ()
    """Of a step that was watched, in the order in which they ended."""
    choices: tuple[ChoicePrint, ...] = ()
    warnings: tuple[str, ...] = ()
    """What Python warned of."""
    nested_backward: bool = False
    """Of a step that was watched: backward ran within backward, as a reentrant checkpoint has it."""
    failed: str = ""
    """What the step raised: it left nothing, and none follows it."""
    updated: bool = True
    """An optimizer stepped, if there is one: a scaler skips the first updates of a step of one's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Several consecutive steps from the state in which the model was loaded."""

    start: tuple[TensorPrint, ...]
    """Parameters and buffers before the first."""
    others: tuple[str, ...]
    """Names of the attributes that hold numbers or generators."""
    steps: tuple[StepPrint, ...]
    draws: bool
    """Random numbers were drawn."""
    is_compiled: bool
    """Modules in it go through ``torch.compile``, and were not watched."""
    evaluating: tuple[str, ...] = ()
    """Paths of modules that came in eval mode, of those that training mode is for."""
    frozen: tuple[str, ...] = ()
    """Names of the parameters that want no gradient."""

    @property
    def failed(self) -> str:
        """What the last step raised; empty: nothing."""
        return self.steps[-1].failed


Likeness = Literal["to the bit", "within noise", "up to rounding", "as far as can be told", "not"]
"""How far two trainings are alike: to the bit; no further apart than two runs of the reference; in float64 to 1e-9;
within half of the digits, where float64 tells nothing; not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGap:
    """A tensor that differs between two trainings."""

    name: str
    """As ``gradient of block1.weight``."""
    apart: float
    """The distance over the norm of the reference's; infinite where one has none, or another shape."""
    missing: Literal["", "reference", "candidate"] = ""
    """Who has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Where a difference comes from, as far as a second look at the step tells."""

    module: str
    """Path of the first module that differs; empty: it is not known, or the model itself."""
    class_name: str
    text: str
    """The likely cause; empty if nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """Two trainings, compared."""

    reference: str
    candidate: str
    alike: Likeness
    steps: int
    batch: int
    compared: int
    """Tensors of a step."""
    precision: str
    """That of the comparison which decided."""
    worst: float
    """The largest distance that was found in float32 or what else was asked for; relative."""
    differs_in_step: int = 0
    """The first one in which they differ; 0: none."""
    gaps: tuple[TensorGap, ...] = ()
    """All that differs in that step, what people look at first in front."""
    failed: str = ""
    """What the candidate's step raised, where the reference's raises nothing: that which ``differs_in_step`` names."""
    hooks: str = ""
    """How the calls of hooks differ."""
    cause: Cause | None = None
    notes: tuple[str, ...] = ()
    spent_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing differs by more than it may."""
        return self.alike != "not"
