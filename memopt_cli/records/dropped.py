"""Plans that were found and not applied, each with its reason.

A reason is a class (``TooSlow``, ``SavesTooLittle`` …) with its own wording: ``because`` and ``remedy`` become
sentences of the summary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memopt_cli.records.measurement import Failure, describe
from memopt_cli.records.plan import Plan
from memopt_cli.records.verification import Verification
from memopt_cli.text.paths import quote_module
from memopt_cli.text.units import format_apart, format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TooSlow:
    """A reason not to apply a plan: its step takes longer than allowed."""

    slowdown: float
    """Measured step time divided by the original's."""
    most: float
    """Largest slowdown that was allowed."""
    error: float = 0.0
    """Uncertainty of the slowdown, which may be larger by this amount; 0 if unknown."""
    waited: float = 0.0
    """Share of the time of the timed steps that they waited for a processor, because the machine was busy."""

    @property
    def upper(self) -> float:
        """Largest slowdown within the error, to two decimals, which counts against the limit."""
        return round(self.slowdown + self.error, 2)

    @property
    def because(self) -> str:
        error = f" ± {self.error:.2f}" if self.upper > self.slowdown else ""
        takes = f"its step takes {self.slowdown:.2f}{error} times as long"
        if self.slowdown <= self.most:
            return f"{takes}, which may be more than the limit of {self.most:g}"
        return f"{takes}, and {self.most:g} is the limit"

    @property
    def remedy(self) -> str:
        allowed = f"`--max-slowdown {math.ceil(10 * self.upper) / 10 + 0.1:.1f}` allows it"
        return (
            f"{allowed}."
            if self.slowdown > self.most
            else f"On an idle machine it may stay within the limit; {allowed}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesTooLittle:
    """A reason not to apply a plan: it saves nothing, or too little for the time that it adds."""

    saved: float
    """Saved share of the original's allocated peak; 0 or less if the peak is not lower."""
    slowdown: float
    """Step time divided by the original's."""
    is_predicted: bool = False
    """Whether both numbers are predictions."""

    @property
    def because(self) -> str:
        verb = "is predicted to" if self.is_predicted else "was measured to"
        saving = "save nothing" if self.saved <= 0 else f"save {self.saved:.1%} of the peak"
        return f"it {verb} {saving} for a step {self.slowdown:.2f} times as long"

    @property
    def remedy(self) -> str:
        return "With a larger batch, activations are a larger share of the peak: try one."


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A part that was left out of a plan because it makes the step differ from the original."""

    segment: str | None
    """Path of the module that was a segment; ``None`` for packing outside segments."""
    difference: str
    """Text of the difference from the original that the part causes."""

    @property
    def sentence(self) -> str:
        """Sentence on which part was left out, and why."""
        if self.segment is None:
            return f"Tensors saved outside segments are not packed: with packing, {self.difference}."
        return f"{quote_module(self.segment)} is not a segment: as a segment, {self.difference}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """A reason not to apply a plan: its step computes something different from the original's."""

    verification: Verification
    left_out: tuple[LeftOut, ...] = ()
    """Parts of the plan that cause the difference; empty if they were not looked for."""

    @property
    def because(self) -> str:
        return f"verification failed: {self.verification.difference}, at {self.verification.sizes}"

    @property
    def remedy(self) -> str:
        paths = [quote_module(part.segment) for part in self.left_out if part.segment is not None]
        module = paths[0] if paths else "a module"
        return (
            f"If {module} uses state that memopt cannot see (a file, a C extension), keep the state in an attribute of "
            "a module, or leave the module out with `--target`. Otherwise please report the difference as a bug."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """A reason not to apply a plan: its step could not be run, or could not be verified."""

    failure: Failure
    in_verification: bool = False
    """Whether the plan was measured, and only the comparison with the original could not be run."""

    @property
    def because(self) -> str:
        problem = "it cannot be verified" if self.in_verification else "its step cannot be run"
        return f"{problem}: {describe(self.failure).removesuffix('.')}"

    @property
    def remedy(self) -> str:
        return "Try a lower `--level`, or name other modules with `--target`."


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnIsBetter:
    """A reason not to apply a plan: the unchanged model, with its own checkpoints, does better."""

    own_bytes: int
    """Allocated peak of the step with the model's own checkpoints."""
    own_s: float
    """Time of that step in seconds."""
    step_s: float
    """Time of the step under the plan in seconds."""
    budget_bytes: int | None = None
    """Budget, within which the fastest step was looked for; ``None`` if the smallest one was."""

    @property
    def because(self) -> str:
        own = f"{format_bytes(self.own_bytes)} and {format_seconds(self.own_s)} per step"
        return f"the model's own checkpoints need {own}, and the plan {format_seconds(self.step_s)}"

    @property
    def remedy(self) -> str:
        if self.budget_bytes is not None:
            return "Lower `--budget` to find a plan that needs less memory than the model's own checkpoints."
        budget = f"`--budget {format_bytes(self.own_bytes).replace(' ', '')}`"
        return f"A higher `--level` may find a smaller plan, and {budget} looks for the fastest one that takes no more."


Reason = TooSlow | SavesTooLittle | Differs | NotRun | OwnIsBetter
"""A reason, with ``because``, which follows the word "but" in a sentence, and ``remedy``, a sentence on what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedPlan:
    """A plan that was found and is not applied."""

    plan: Plan
    peak_bytes: int | None
    """Allocated peak under the plan, measured or else predicted; ``None`` if neither."""
    original_bytes: int | None
    """Allocated peak of the original; ``None`` if it does not run here."""
    why: Reason

    @property
    def in_words(self) -> str:
        """Plan as text: ``147.0 MiB of 200.0 MiB``, ``2.6 MiB (2.4 MiB without it)``, ``a plan of 2 segments``."""
        if self.peak_bytes is None:
            return f"a plan of {format_count(len(self.plan.segments), 'segment')}"
        if self.original_bytes is None:
            return format_bytes(self.peak_bytes)
        peak, original = format_bytes(self.peak_bytes), format_bytes(self.original_bytes)
        if peak == original and self.peak_bytes != self.original_bytes:
            peak, original = format_apart(self.peak_bytes, self.original_bytes)
        return f"{peak} of {original}" if self.peak_bytes < self.original_bytes else f"{peak} ({original} without it)"

    @property
    def sentence(self) -> str:
        """Sentence on why the plan is not applied."""
        if self.plan.in_backward:
            return f"The optimizer does not run in backward: {self.why.because}."
        plan_in_words = self.in_words if self.peak_bytes is None else f"a plan of {format_bytes(self.peak_bytes)}"
        return f"{plan_in_words[:1].upper()}{plan_in_words[1:]} is not applied: {self.why.because}."


def decisive(dropped: Sequence[DroppedPlan]) -> DroppedPlan | None:
    """Return the plan in ``dropped`` that came nearest to being applied; ``None`` if there is none.

    First comes the last plan that reached verification, or was beaten by the model's own checkpoints.  Then come
    the fastest plan of those too slow, the last plan that saved too little, and a plan that could not be run.  A failed
    optimizer in backward does not count as a plan.
    """
    plans = [plan for plan in dropped if not (plan.plan.in_backward and isinstance(plan.why, NotRun))]
    return min(reversed(plans), key=_distance, default=None)


def _distance(dropped: DroppedPlan) -> tuple[int, float]:
    """Return a sort key: the nearer the plan came to being applied, the smaller the key."""
    match dropped.why:
        case Differs() | NotRun(in_verification=True) | OwnIsBetter():
            return 0, 0.0
        case TooSlow(slowdown=slowdown):
            return 1, slowdown
        case SavesTooLittle():
            return 2, 0.0
    return 3, 0.0
