"""Compare two trainings tensor by tensor, by the fingerprints that each step left, and list the gaps between them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, Literal

from memopt_cli.errors import StepError
from memopt_cli.pipeline.fingerprints.steps import ROUNDING_SHARE, relative, typical
from memopt_cli.records import NOT_FINITE, Followed, StepPrint, TensorGap, TensorPrint

_Rename = Callable[[str], str]
_Named = Mapping[str, TensorPrint]

_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Prefixes that torch.compile, PyTorch's checkpoint wrapper and FSDP add to names in the modules that they wrap."""
_REPLICATED = "module."
"""Prefix that DataParallel adds to all names; a model may also have a child of that name."""
_KINDS = ("output", "input", "gradient", "buffer", "state", "the random", "parameter")
"""Beginnings of tensor names, in the order in which a step makes the tensors: an early gap may cause later ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """The first step in which two trainings differ."""

    step: int
    """Index of the step, from 0."""
    gaps: tuple[TensorGap, ...]
    """The gaps in the order in which a step makes the tensors; the largest of a kind first."""

    @property
    def is_rounding(self) -> bool:
        """Whether sums in another order may cause all gaps: no tensor is missing, of another kind, or of integers."""
        return all(math.isfinite(gap.apart) for gap in self.gaps)


def first_gap(reference: Followed, other: Followed, tolerance: float = 0.0) -> Apart | None:
    """Return the first step in which ``other`` differs by more than ``tolerance`` (0: in any bit), or ``None``."""
    for index, (one, another) in enumerate(zip(reference.steps, other.steps, strict=True)):
        gaps = gaps_between(one.effects, another.effects, tolerance)
        if gaps:
            return Apart(step=index, gaps=gaps)
    return None


def largest_gap(reference: Followed, other: Followed) -> float:
    """Return the largest gap between all tensors in all steps."""
    pairs = zip(reference.steps, other.steps, strict=True)
    return max((gap.apart for one, another in pairs for gap in gaps_between(one.effects, another.effects)), default=0.0)


def is_in_double(found: Followed) -> bool:
    """Return whether all tensors in ``found`` are in float64 already, so that no dtype compares more precisely."""
    tensors = (tensor for step in found.steps for tensor in step.effects if not tensor.name.startswith("input"))
    return all(tensor.epsilon in (0.0, _DOUBLE) for tensor in tensors)


_DOUBLE: Final = 2.0**-52
"""The distance of 1 to the next number of float64."""


def is_nowhere_finite(tensor: TensorPrint) -> bool:
    """Return whether ``tensor`` holds NaN or infinity alone."""
    return NOT_FINITE in tensor.kind and not tensor.norm


def first_step_apart(reference: Followed, other: Followed) -> float:
    """Return the largest gap in the first step before its update, while parameters are still equal.

    The update may blow gaps up: Adam turns gradients of pure rounding into steps of a full learning rate.
    """
    gaps = gaps_between(reference.steps[0].effects, other.steps[0].effects)
    return max((gap.apart for gap in gaps if not gap.name.startswith("parameter")), default=0.0)


def half_of_digits(found: Followed, epsilon: float) -> float:
    """Return the relative difference up to which half of the digits agree; ``epsilon``: that of autocast's dtype."""
    digits = (tensor.epsilon for step in found.steps for tensor in step.effects if tensor.epsilon)
    return math.sqrt(max((epsilon, *digits)))


def gaps_between(
    reference: Iterable[TensorPrint], other: Iterable[TensorPrint], tolerance: float = 0.0
) -> tuple[TensorGap, ...]:
    """Return the tensors that differ by more than ``tolerance``."""
    one, another = ({tensor.name: tensor for tensor in side} for side in (reference, other))
    # Gradients far smaller than the largest may be pure rounding: their gaps are taken relative to a share of that.
    largest = max((typical(tensor) for name, tensor in one.items() if name.startswith("gradient")), default=0.0)
    found = []
    for name in one.keys() | another.keys():
        a, b = one.get(name), another.get(name)
        if a is not None and b is not None and a.bits == b.bits:
            continue
        apart = relative(a, b, ROUNDING_SHARE * (largest if name.startswith("gradient") else 1.0))
        if apart > tolerance or not tolerance:
            has_rounding = a is not None and a.epsilon  # integers have none
            found.append(TensorGap(name=name, apart=apart if has_rounding else math.inf, missing=_missing(a, b)))
    return tuple(sorted(found, key=_rank))


def _missing(ours: TensorPrint | None, theirs: TensorPrint | None) -> Literal["", "reference", "candidate"]:
    if ours is None:
        return "reference"
    return "candidate" if theirs is None else ""


def _rank(gap: TensorGap) -> tuple[int, float, str]:
    kind = next((i for i, beginning in enumerate(_KINDS) if gap.name.startswith(beginning)), len(_KINDS))
    return kind, -gap.apart, gap.name


# ---------------------------------------------------------------------------------------------- the same names


def by_the_same_names(reference: Followed, other: Followed) -> tuple[Followed, Followed]:
    """Return both trainings without the prefixes that wrappers add to names.

    Raises :class:`StepError` if they do not start with the same parameters, of the same values.
    """
    one, another = (_named(side, lambda name: _WRAPPERS.sub("", name)) for side in (reference, other))
    if _parameters(one) != _parameters(another):
        one, another = (_without_replicas(side, beside) for side, beside in ((one, another), (another, one)))
    _require_same_start(one, another)
    return one, another


def _is_within(name: str, other: str) -> bool:
    """Return whether ``other`` is ``name`` in a wrapper: ``parameter norm.weight``, ``parameter net.norm.weight``."""
    return other.endswith(f".{name.removeprefix('parameter ')}")


def _require_same_start(reference: Followed, other: Followed) -> None:
    ours, theirs = _parameters(reference), _parameters(other)
    for have, lack, which in ((ours, theirs, "candidate"), (theirs, ours, "reference")):
        lacking = sorted(have.keys() - lack.keys())
        if lacking:
            alike = any(_is_within(lacking[0], name) or _is_within(name, lacking[0]) for name in lack)
            raise StepError(
                f"the {which} has no {lacking[0]}",
                hint="memopt does not compare a model with a step, or with a model around it: give two of the same "
                "kind."
                if alike
                else "Compare two ways to train the same model.",
            )
    ours, theirs = ours | _at_start(reference, "buffer"), theirs | _at_start(other, "buffer")
    different = next((name for name in sorted(ours.keys() & theirs.keys()) if ours[name] != theirs[name]), None)
    if different is not None:
        raise StepError(
            f"the two start with different values of {different}",
            hint="Save both from one model, or seed at the top of the functions that make them.",
        )


# ---------------------------------------------------------------------------------------------- numbers and generators


def unsteady(once: Followed, again: Followed) -> frozenset[str]:
    """Return the names of numbers and generators that differ between two runs of one model, such as a time of day."""
    pairs = (
        ({held.name: held.bits for held in side.others} for side in steps)
        for steps in zip(once.steps, again.steps, strict=True)
    )
    return frozenset(
        name for one, other in pairs for name in one.keys() | other.keys() if one.get(name) != other.get(name)
    )


def with_others(one: Followed, other: Followed, without: Set[str]) -> tuple[Followed, Followed]:
    """Add the numbers and generators that both models have, but for those named in ``without``, to their steps.

    State that only the candidate, ``other``, keeps is ignored.
    """
    shared = (set(one.others) & set(other.others)) - without
    pairs = [_step_with_others(*steps, shared, without) for steps in zip(one.steps, other.steps, strict=True)]
    ours, theirs = zip(*pairs, strict=True)
    return replace(one, steps=ours), replace(other, steps=theirs)


def _step_with_others(
    one: StepPrint, other: StepPrint, shared: Set[str], without: Set[str]
) -> tuple[StepPrint, StepPrint]:
    ours, theirs = ({held.name: held for held in step.others if held.name not in without} for step in (one, other))
    known = {tensor.name for tensor in one.effects}
    effects = tuple(tensor for tensor in other.effects if tensor.name in known or not tensor.name.startswith("state"))
    return replace(one, effects=one.effects + _others(ours, theirs, shared)), replace(
        other, effects=effects + _others(theirs, ours, shared)
    )


def _others(held: _Named, beside: _Named, shared: Set[str]) -> tuple[TensorPrint, ...]:
    """Return the ``shared`` tensors that moved on at least one side, and all numbers of the outputs.

    A tensor that moved only on the other side, ``beside``, gets a placeholder, so that the two differ.
    """
    unmoved = {name: replace(moved, kind="unmoved", bits="") for name, moved in beside.items()}
    moved = (tensor for name, tensor in {**unmoved, **held}.items() if name in shared)
    return (*moved, *(number for name, number in held.items() if name.startswith("output")))


def _parameters(found: Followed) -> dict[str, str]:
    return _at_start(found, "parameter")


def _at_start(found: Followed, kind: str) -> dict[str, str]:
    """Return the bits of all tensors of ``kind``, by name."""
    return {tensor.name: tensor.bits for tensor in found.start if tensor.name.startswith(kind)}


def _without_replicas(side: Followed, beside: Followed) -> Followed:
    known = _parameters(beside)
    is_wrapped = all(name.partition(" ")[2].startswith(_REPLICATED) for name in _parameters(side))
    if not is_wrapped or all(name in known for name in _parameters(side)):
        return side
    return _named(side, lambda name: name.replace(f" {_REPLICATED}", " ", 1).removeprefix(_REPLICATED))


def _named(found: Followed, rename: _Rename) -> Followed:
    return replace(
        found,
        start=_renamed(found.start, rename),
        others=tuple(map(rename, found.others)),
        evaluating=tuple(rename(f"{path}.")[:-1] for path in found.evaluating),
        steps=tuple(_renamed_step(step, rename) for step in found.steps),
    )


def _renamed_step(step: StepPrint, rename: _Rename) -> StepPrint:
    return replace(
        step,
        effects=_renamed(step.effects, rename),
        others=_renamed(step.others, rename),
        hooks=tuple(map(rename, step.hooks)),
        calls=tuple(replace(call, path=rename(f"{call.path}.")[:-1]) for call in step.calls),
        choices=tuple(replace(choice, path=rename(f"{choice.path}.")[:-1]) for choice in step.choices),
    )


def _renamed(tensors: Sequence[TensorPrint], rename: _Rename) -> tuple[TensorPrint, ...]:
    return tuple(replace(tensor, name=rename(tensor.name)) for tensor in tensors)
