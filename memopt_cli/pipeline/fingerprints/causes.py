"""Find the likely cause of a difference between two trainings, from one watched step of each.

The explanations are tried in order, the most specific first, and the first that fits is the answer.  Most compare the
calls of modules: a call in forward with the same call of the other side, or with its repetition in a recomputation.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memopt_cli.pipeline.fingerprints.gaps import gaps_between
from memopt_cli.records import CallPrint, Cause, ChoicePrint, StepPrint, TensorGap, TensorPrint

_NO_GRADIENTS = "None of the inputs have requires_grad=True"
"""Text of PyTorch's warning for a reentrant checkpoint without an input that requires a gradient."""
_CHECKPOINT, _SELECTIVE, _AGAIN = "CheckpointError", "not found in storage", "backward through the graph a second time"
"""Parts of PyTorch's errors: of a checkpoint, of a selective checkpoint, and of autograd."""

REENTRANT = (
    "no input of a reentrant checkpoint requires a gradient, or only one in a dict or a list, which it does not "
    "search: set use_reentrant=False, or call model.enable_input_require_grads() (Hugging Face)"
)
WITHIN = (
    "a reentrant checkpoint is given a tensor within a dict or a list, which it does not cut off the graph before it: "
    "backward goes through that twice; take use_reentrant=False, or hand tensors over as arguments"
)
KEPT_GRAPH = "what it keeps from the step before hangs on the graph of that step: detach it, or reset it, between steps"
RANDOM_AGAIN = (
    "its recomputation draws other random numbers than forward did: keep preserve_rng_state=True, and draw from "
    "PyTorch's global generators"
)
CUT_SHORT = (
    "it draws random numbers into a tensor that it has saved already, and its recomputation stops before they are "
    "drawn: leave it out of the checkpoint"
)
RANDOM = "the two draw different random numbers"
RANDOM_ALIKE = (
    "with the same input and the same random numbers it gives another output: it has another rate, or draws in "
    "another way"
)
RANDOM_COMPILED = (
    "torch.compile draws other random numbers than the uncompiled model; with the same ones "
    "(torch._inductor.config.fallback_random = True) the two agree"
)
RANDOM_IN_BACKWARD = (
    "wrong gradients: with the same random numbers the outputs agree and these do not, so backward recomputes with "
    "others (another dropout mask) than forward drew; try a memory budget of 1, "
    "torch._functorch.config.activation_memory_budget = 1"
)
EVAL = "it is in eval mode only in the {}: call train() where that is made, or before it is saved"
TWICE = "its recomputation changes it a second time: leave it out of the checkpoint, or let it skip recomputations"
OVERWRITTEN = (
    "its recomputation is given another input than forward was: the input has changed since, like a tensor that is "
    "written over, or a cache that grows"
)
OTHERWISE = "its recomputation gives another output for the same input: it reads what forward has changed"
OTHER_WAY = "its recomputation calls {}, which forward did not: it chooses by something that forward has changed"
RAISES = "its recomputation raises what forward did not: it, or a hook of it, reads what forward has changed"
OTHER_TENSORS = (
    "the recomputation of a checkpoint saves other tensors than its forward did: it reads what forward has changed (a "
    "cache, a counter, a choice)"
)
TIES = "values are equal, or nearly, and the tie is broken differently: the choice is not stable"
MISSING = "no gradient reaches it"
FROZEN = "it is frozen only in the candidate: call requires_grad_() there"
UPDATE = "the gradients agree, and the update does not: the optimizers differ"
ELSEWHERE = "it gives another output for the same input"
KEEPS_OTHERWISE = (
    "it gives the same output and keeps other values: a setting of it differs, such as the momentum of a batch norm"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One step of both models, watched."""

    reference: StepPrint
    candidate: StepPrint
    gaps: Sequence[TensorGap]
    tolerance: float
    """Relative difference up to which tensors count as equal; 0: any bit that differs counts."""


def cause_of(pair: Pair) -> Cause | None:
    """Return the first cause that explains ``pair``; ``None`` where nothing does."""
    explanations = (
        _reentrant,
        _chosen_otherwise,
        _recomputed_otherwise,
        _cut_short,
        _changed_twice,
        _first_call,
        _kept_otherwise,
        lambda pair: of_gaps(pair.gaps),
    )
    return next(filter(None, (explain(pair) for explain in explanations)), None)


def of_failure(pair: Pair, *, is_first: bool) -> Cause | None:
    """Return the first cause that explains why only the candidate's step of ``pair`` failed; ``None`` if none does.

    ``is_first``: whether it is the first step of the training.
    """
    explanations = (
        _reentrant_alone,
        _chosen_otherwise,
        _another_way,
        _recomputed_otherwise,
        _raised_again,
        functools.partial(_twice_through, is_first=is_first),
        _of_checkpoint,
    )
    return next(filter(None, (explain(pair) for explain in explanations)), None)


def _reentrant_alone(pair: Pair) -> Cause | None:
    return Cause(text=REENTRANT) if _warns_of_reentrant(pair.candidate) else None


def _another_way(pair: Pair) -> Cause | None:
    """Return the cause if a recomputation calls a module that forward did not call."""
    calls = pair.candidate.calls
    before = {call.path for call in calls if not call.recomputed}
    both = list(_recomputations(calls))
    for again in (call for call in calls if call.recomputed and call.path not in before):
        around = next(reversed(_around(again, [outer for _, outer in both])), None)
        if around is not None:
            is_drawn = any(outer is around and forward.begun != outer.begun for forward, outer in both)
            return _of(around, RANDOM_AGAIN if is_drawn else OTHER_WAY.format(again.path))
    return None


def _raised_again(pair: Pair) -> Cause | None:
    """Return the cause if an exception has just left a call in a recomputation, with the innermost such call."""
    if _CHECKPOINT in pair.candidate.failed:  # a checkpoint itself ends calls early when it has enough
        return None
    left: CallPrint | None = None
    for call in reversed(pair.candidate.calls):
        is_within = left is None or call.path.startswith(f"{left.path}." if left.path else "")
        if call.finished or not call.recomputed or not is_within:
            break
        left = call
    return _of(left, RAISES) if left is not None else None


def _twice_through(pair: Pair, *, is_first: bool) -> Cause | None:
    """Return the cause if backward has gone through the same graph twice."""
    if _AGAIN not in pair.candidate.failed:
        return None
    if pair.candidate.nested_backward:
        return Cause(text=WITHIN)
    return None if is_first else Cause(text=KEPT_GRAPH)


def _of_checkpoint(pair: Pair) -> Cause | None:
    """Return the cause by PyTorch's error alone, for a checkpointed function that calls no modules."""
    is_told = _CHECKPOINT in pair.candidate.failed or _SELECTIVE in pair.candidate.failed
    return Cause(text=OTHER_TENSORS) if is_told else None


def of_gaps(gaps: Sequence[TensorGap]) -> Cause | None:
    """Return the cause that the names in ``gaps`` show: a gradient is missing, or only parameters differ."""
    if all(gap.name.startswith("parameter") for gap in gaps):
        return Cause(text=UPDATE)
    return _without_gradient(gaps, MISSING)


def _without_gradient(gaps: Sequence[TensorGap], text: str) -> Cause | None:
    """Return ``text`` as the cause at the first module of which the candidate lacks a gradient; ``None`` if none."""
    missing = next((gap for gap in gaps if gap.missing == "candidate" and gap.name.startswith("gradient")), None)
    return Cause(module=_owner(missing.name), text=text) if missing is not None else None


def _owner(name: str) -> str:
    """Return the module that a tensor belongs to: ``gradient of block1.weight`` belongs to ``block1``."""
    return name.partition(" at update ")[0].split(" ")[-1].rpartition(".")[0]


def _reentrant(pair: Pair) -> Cause | None:
    return _without_gradient(pair.gaps, REENTRANT) if _warns_of_reentrant(pair.candidate) else None


def _warns_of_reentrant(step: StepPrint) -> bool:
    return any(_NO_GRADIENTS in text for text in step.warnings)


def _recomputed_otherwise(pair: Pair) -> Cause | None:
    """Return the cause if a call in a recomputation has another input or output than in forward; take the first to end.

    If its input differs, the fault lies in the innermost call around it whose own input is the same as in forward, or
    outside of the checkpoint if there is none.
    """
    alike: list[CallPrint] = []
    others: list[CallPrint] = []
    found: tuple[CallPrint, CallPrint] | None = None
    for forward, again in _recomputations(pair.candidate.calls):
        is_given_otherwise = _differ(forward.inputs, again.inputs)
        (others if is_given_otherwise else alike).append(again)
        is_other = is_given_otherwise or (again.finished and _differ(forward.outputs, again.outputs))
        if found is None and is_other:
            found = forward, again
    if found is None:
        return None
    forward, again = found
    is_drawn_otherwise = forward.begun != again.begun
    if again in alike:
        return _of(again, RANDOM_AGAIN if is_drawn_otherwise and (forward.draws or again.draws) else OTHERWISE)
    innermost = next(reversed(_around(again, alike)), None)
    if is_drawn_otherwise:
        return _of(innermost or again, RANDOM_AGAIN)
    return _of(_around(again, [*others, again])[0], OVERWRITTEN) if innermost is None else _of(innermost, OTHERWISE)


def _around(call: CallPrint, others: Iterable[CallPrint]) -> list[CallPrint]:
    """Return those of ``others``, by their paths, inside which ``call`` was made, or which are it; outermost first."""
    around = (other for other in others if other is call or _is_below(call.path, other.path))
    return sorted(around, key=lambda other: len(other.path))


def _is_below(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _cut_short(pair: Pair) -> Cause | None:
    """Return the cause if a recomputation ended inside a module before its random numbers were drawn."""
    calls = pair.candidate.calls
    for forward, again in _recomputations(calls):
        if forward.draws and not again.finished and not any(c.path.startswith(f"{again.path}.") for c in calls):
            return _of(again, CUT_SHORT)
    return None


def _changed_twice(pair: Pair) -> Cause | None:
    """Return the cause if only the candidate recomputes a module whose buffer or other attribute differs."""
    before = {call.path for call in pair.reference.calls if call.recomputed}
    recomputed = [call for call in pair.candidate.calls if call.recomputed and call.path not in before]
    for name in (gap.name.split(" ")[-1] for gap in pair.gaps if gap.name.startswith(("buffer", "state"))):
        owners = [call for call in recomputed if call.path != name and _is_below(name, call.path)]
        if owners:
            return _of(max(owners, key=lambda call: len(call.path)), TWICE)
    return None


def _first_call(pair: Pair) -> Cause | None:
    """Return the cause at the first call in forward whose output differs between the sides, but not its input."""
    ours = dict(_numbered(c for c in pair.reference.calls if not c.recomputed))
    for key, theirs in _numbered(c for c in pair.candidate.calls if not c.recomputed):
        call = ours.get(key)
        if call is None or not _differ(call.outputs, theirs.outputs, pair.tolerance):
            continue
        if _differ(call.inputs, theirs.inputs, pair.tolerance):
            continue
        return _of(theirs, _otherwise(call, theirs))
    return None


def _kept_otherwise(pair: Pair) -> Cause | None:
    """Return the cause if the first gap is a buffer or attribute of a module, at the innermost such module."""
    first = pair.gaps[0].name if pair.gaps else ""
    kind, _, name = first.partition(" ")
    if kind not in ("buffer", "state"):
        return None
    owners = [call for call in pair.candidate.calls if not call.recomputed and _is_below(name, call.path)]
    return _of(max(owners, key=lambda call: len(call.path)), KEEPS_OTHERWISE) if owners else None


def _otherwise(ours: CallPrint, theirs: CallPrint) -> str:
    if ours.training != theirs.training:
        return EVAL.format("candidate" if ours.training else "reference")
    if not ours.draws and not theirs.draws:
        return ELSEWHERE
    return RANDOM if ours.begun != theirs.begun else RANDOM_ALIKE


def _chosen_otherwise(pair: Pair) -> Cause | None:
    """Return the cause if an operator such as a sort chooses differently among values that agree."""
    classes = {call.path: call.class_name for call in pair.candidate.calls}
    for one, other in _choices(pair):
        if one.chosen.bits != other.chosen.bits and not _differ(
            [one.values], [other.values], pair.tolerance or _NEARLY
        ):
            said = f"{TIES} ({one.operator})"
            return Cause(module=other.path, class_name=classes.get(other.path, ""), text=said)
    return None


_NEARLY = 1e-5
"""Relative distance up to which values count as tied, where float32 was compared to the bit."""


def _choices(pair: Pair) -> Iterator[tuple[ChoicePrint, ChoicePrint]]:
    """Yield corresponding choices of both forwards, and of forward and recomputation of the candidate."""
    theirs = [choice for choice in pair.candidate.choices if not choice.recomputed]
    ours = [choice for choice in pair.reference.choices if not choice.recomputed]
    yield from zip(ours, theirs, strict=False)
    first = {(choice.path, choice.operator): choice for choice in reversed(theirs)}
    for again in (choice for choice in pair.candidate.choices if choice.recomputed):
        if (again.path, again.operator) in first:
            yield first[again.path, again.operator], again


def _recomputations(calls: Sequence[CallPrint]) -> Iterator[tuple[CallPrint, CallPrint]]:
    """Yield each call in a recomputation after its call in forward: one with the same input, if there is one."""
    forward: dict[str, list[CallPrint]] = {}
    for call in calls:
        if not call.recomputed:
            forward.setdefault(call.path, []).append(call)
    for again in (call for call in calls if call.recomputed and call.path in forward):
        alike = (call for call in forward[again.path] if not _differ(call.inputs, again.inputs))
        yield next(alike, forward[again.path][0]), again


def _numbered(calls: Iterable[CallPrint]) -> Iterator[tuple[tuple[str, int], CallPrint]]:
    """Yield ``calls``, each after a key: the module's path, and how often the module was called so far."""
    counts: Counter[str] = Counter()
    for call in calls:
        counts[call.path] += 1
        yield (call.path, counts[call.path]), call


def _differ(ours: Sequence[TensorPrint], theirs: Sequence[TensorPrint], tolerance: float = 0.0) -> bool:
    return bool(gaps_between(ours, theirs, tolerance))


def _of(call: CallPrint, text: str) -> Cause:
    return Cause(module=call.path, class_name=call.class_name, text=text)
