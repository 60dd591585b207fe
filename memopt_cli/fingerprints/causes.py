"""The likely cause of a difference between two trainings, by what was seen of one step of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memopt_cli.fingerprints.gaps import gaps_between
from memopt_cli.records import CallPrint, Cause, ChoicePrint, StepPrint, TensorGap, TensorPrint

_NO_GRADIENTS = "None of the inputs have requires_grad=True"
"""PyTorch's warning, of a reentrant checkpoint."""

REENTRANT = (
    "a reentrant checkpoint is given nothing that needs a gradient: take use_reentrant=False, or "
    "model.enable_input_require_grads() of Hugging Face"
)
RANDOM_AGAIN = (
    "its recomputation draws other random numbers than forward did: keep preserve_rng_state=True, and draw from "
    "PyTorch's global generators"
)
CUT_SHORT = (
    "it draws random numbers into a tensor that it has saved already, and its recomputation stops before they are "
    "drawn: leave it out of the checkpoint"
)
RANDOM = "the two draw other random numbers"
RANDOM_COMPILED = (
    "torch.compile draws other random numbers than the model does without: compare with "
    "torch._inductor.config.fallback_random = True"
)
EVAL = "it is in eval mode in the {} alone: call train() where that is made, or before it is saved"
TWICE = "its recomputation changes it a second time: leave it out of the checkpoint, or let it skip recomputations"
OVERWRITTEN = "its recomputation is given another input: what it is computed from was written over after forward"
OTHERWISE = "its recomputation gives something else of the same input: it reads what forward has changed"
TIES = "values that are equal, or nearly, fall otherwise: a choice among them is not stable"
MISSING = "no gradient reaches it"
UPDATE = "the gradients agree, and the update does not: the optimizers differ"
ELSEWHERE = "it gives something else of the same input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same step of both, watched."""

    reference: StepPrint
    candidate: StepPrint
    gaps: Sequence[TensorGap]
    tolerance: float
    """Relative; zero: a bit that differs counts."""


def cause_of(pair: Pair) -> Cause | None:
    """The first that explains what is seen; ``None`` where nothing does."""
    explanations = (
        _reentrant,
        _chosen_otherwise,
        _recomputed_otherwise,
        _cut_short,
        _changed_twice,
        _first_call,
        lambda pair: of_gaps(pair.gaps),
    )
    return next(filter(None, (explain(pair) for explain in explanations)), None)


def of_failure(step: StepPrint) -> Cause | None:
    """Of a step that failed."""
    return Cause(module="", class_name="", text=REENTRANT) if _warns_of_reentrant(step) else None


def of_gaps(gaps: Sequence[TensorGap]) -> Cause | None:
    """By names alone: what is missing, or only the update."""
    if all(gap.name.startswith("parameter") for gap in gaps):
        return Cause(module="", class_name="", text=UPDATE)
    return _without_gradient(gaps, MISSING)


def _without_gradient(gaps: Sequence[TensorGap], text: str) -> Cause | None:
    """The first module of which the candidate lacks a gradient."""
    missing = next((gap for gap in gaps if gap.missing == "candidate" and gap.name.startswith("gradient")), None)
    return Cause(module=_owner(missing.name), class_name="", text=text) if missing is not None else None


def _owner(name: str) -> str:
    """The module that a tensor is of: ``gradient of block1.weight`` is of ``block1``."""
    return name.partition(" at update ")[0].split(" ")[-1].rpartition(".")[0]


def _reentrant(pair: Pair) -> Cause | None:
    return _without_gradient(pair.gaps, REENTRANT) if _warns_of_reentrant(pair.candidate) else None


def _warns_of_reentrant(step: StepPrint) -> bool:
    return any(_NO_GRADIENTS in text for text in step.warnings)


def _recomputed_otherwise(pair: Pair) -> Cause | None:
    """The first call in backward, as they end, that gives something else than it gave in forward."""
    for forward, again in _recomputations(pair.candidate.calls):
        if not again.finished or not _differ(forward.outputs, again.outputs):
            continue
        is_drawn_otherwise = forward.begun != again.begun
        if _differ(forward.inputs, again.inputs):
            return _of(again, RANDOM_AGAIN if is_drawn_otherwise else OVERWRITTEN)
        return _of(again, RANDOM_AGAIN if is_drawn_otherwise and (forward.draws or again.draws) else OTHERWISE)
    return None


def _cut_short(pair: Pair) -> Cause | None:
    """A module that draws, and whose recomputation ended within it."""
    calls = pair.candidate.calls
    for forward, again in _recomputations(calls):
        if forward.draws and not again.finished and not any(c.path.startswith(f"{again.path}.") for c in calls):
            return _of(again, CUT_SHORT)
    return None


def _changed_twice(pair: Pair) -> Cause | None:
    """A buffer of what backward calls again."""
    recomputed = {call.path: call for call in pair.candidate.calls if call.recomputed}
    before = {call.path for call in pair.reference.calls if call.recomputed}
    for gap in pair.gaps:
        path = _owner(gap.name)
        if gap.name.startswith("buffer") and path in recomputed and path not in before:
            return _of(recomputed[path], TWICE)
    return None


def _first_call(pair: Pair) -> Cause | None:
    """The first call in forward whose output differs though its input does not."""
    ours = dict(_numbered(c for c in pair.reference.calls if not c.recomputed))
    for key, theirs in _numbered(c for c in pair.candidate.calls if not c.recomputed):
        call = ours.get(key)
        if call is None or not _differ(call.outputs, theirs.outputs, pair.tolerance):
            continue
        if _differ(call.inputs, theirs.inputs, pair.tolerance):
            continue
        return _of(theirs, _otherwise(call, theirs))
    return None


def _otherwise(ours: CallPrint, theirs: CallPrint) -> str:
    if ours.training != theirs.training:
        return EVAL.format("candidate" if ours.training else "reference")
    return RANDOM if ours.draws or theirs.draws else ELSEWHERE


def _chosen_otherwise(pair: Pair) -> Cause | None:
    """A choice among values that agree, which does not."""
    classes = {call.path: call.class_name for call in pair.candidate.calls}
    for one, other in _choices(pair):
        if one.chosen.bits != other.chosen.bits and not _differ(
            [one.values], [other.values], pair.tolerance or _NEARLY
        ):
            said = f"{TIES} ({one.operator})"
            return Cause(module=other.path, class_name=classes.get(other.path, ""), text=said)
    return None


_NEARLY = 1e-5
"""Relative distance of values that are taken for the same, where float32 was compared to the bit."""


def _choices(pair: Pair) -> Iterator[tuple[ChoicePrint, ChoicePrint]]:
    """The same choices in both forwards, and in forward and recomputation of the candidate."""
    theirs = [choice for choice in pair.candidate.choices if not choice.recomputed]
    ours = [choice for choice in pair.reference.choices if not choice.recomputed]
    yield from zip(ours, theirs, strict=False)
    first = {(choice.path, choice.operator): choice for choice in reversed(theirs)}
    for again in (choice for choice in pair.candidate.choices if choice.recomputed):
        if (again.path, again.operator) in first:
            yield first[again.path, again.operator], again


def _recomputations(calls: Sequence[CallPrint]) -> Iterator[tuple[CallPrint, CallPrint]]:
    """Calls in forward and the same again in backward; of several of one module that of the same input, if any."""
    forward: dict[str, list[CallPrint]] = {}
    for call in calls:
        if not call.recomputed:
            forward.setdefault(call.path, []).append(call)
    for again in (call for call in calls if call.recomputed and call.path in forward):
        alike = (call for call in forward[again.path] if not _differ(call.inputs, again.inputs))
        yield next(alike, forward[again.path][0]), again


def _numbered(calls: Iterable[CallPrint]) -> Iterator[tuple[tuple[str, int], CallPrint]]:
    """With the module's path and the number of the call."""
    counts: Counter[str] = Counter()
    for call in calls:
        counts[call.path] += 1
        yield (call.path, counts[call.path]), call


def _differ(ours: Sequence[TensorPrint], theirs: Sequence[TensorPrint], tolerance: float = 0.0) -> bool:
    return bool(gaps_between(ours, theirs, tolerance))


def _of(call: CallPrint, text: str) -> Cause:
    return Cause(module=call.path, class_name=call.class_name, text=text)
