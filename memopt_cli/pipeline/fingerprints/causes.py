"""Finding the likely cause of a difference between two trainings, from one watched step of each.

The explanations are tried in order, the most specific first, and the first that fits is the answer.  Most compare the
calls of modules: a call in forward with the same call of the other side, or with its repetition in a recomputation.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memopt_cli.pipeline.fingerprints.gaps import gaps_between
from memopt_cli.records import CallPrint, Cause, ChoicePrint, StepPrint, TensorGap
from memopt_cli.text.paths import is_within

_NO_GRADIENTS_WARNING = "None of the inputs have requires_grad=True"
"""Text of PyTorch's warning for a reentrant checkpoint without an input that requires a gradient."""
_CHECKPOINT_ERROR = "CheckpointError"
"""Part of PyTorch's error for a recomputation that saves different tensors from forward."""
_SELECTIVE_ERROR = "not found in storage"
"""Part of PyTorch's error for a recomputation that asks a selective checkpoint for a tensor not held there."""
_SECOND_BACKWARD_ERROR = "backward through the graph a second time"
"""Part of autograd's error where a graph was freed by an earlier backward."""

# Each text says what happened, why, and what to do.  A report shows it below the name of the module.

REENTRANT = (
    "no input of a reentrant checkpoint requires a gradient, so backward does not enter the checkpoint. Such a "
    "checkpoint does not look for tensors in a dict or a list: set use_reentrant=False, or call "
    "model.enable_input_require_grads() (Hugging Face)"
)
REENTRANT_WITHIN = (
    "a reentrant checkpoint does not detach tensors inside a dict or a list, so backward runs twice through the graph "
    "before it: set use_reentrant=False, or pass the tensor as an argument"
)
STALE_GRAPH = (
    "the model keeps a tensor from the previous step, whose graph was already freed: detach or reset it between steps"
)
REDRAWS = (
    "the recomputation uses different random numbers from forward: keep preserve_rng_state=True, and use PyTorch's "
    "global generators"
)
IN_BACKWARD = (
    "the outputs agree, and the gradients do not{}: look for detach(), no_grad() or a hook that changes a gradient"
)
FROM_MODULE = ", beginning in backward with this module"
EARLY_STOP = (
    "the recomputation stops before this module makes its random numbers and writes them into a tensor saved earlier: "
    "leave the module out of the checkpoint"
)
DRAWS = (
    "the reference and the candidate use different random numbers: seed both in the same way, and use them in the same "
    "order"
)
OTHER_DRAWING = (
    "the module returns a different output for the same input and the same random numbers: compare its code and its "
    "settings, such as the rate of a dropout, and how it uses random numbers"
)
DRAWS_COMPILED = (
    "torch.compile uses different random numbers from the uncompiled model; with the same ones "
    "(torch._inductor.config.fallback_random = True) the two agree"
)
DRAWS_IN_BACKWARD = (
    "wrong gradients: with the same random numbers the outputs agree and the gradients do not, so backward recomputes "
    "with different random numbers (a different dropout mask) from those of forward; try a memory budget of 1, "
    "torch._functorch.config.activation_memory_budget = 1"
)
EVAL_MODE = "the module is in eval mode only in the {}: call train() where the {} is made, or before it is saved"
REPEAT = (
    "the recomputation changes the state of this module a second time: leave the module out of the checkpoint, or let "
    "it skip recomputations"
)
CHANGED_INPUT = (
    "the input of the recomputation differs from that of forward: it was modified in between. Look for a tensor that "
    "is written in place, or a cache that grows"
)
OTHER_OUTPUT = (
    "the recomputation returns a different output for the same input, since the module reads state that forward "
    "changed: leave the module out of the checkpoint, or let it skip recomputations"
)
OTHER_CALLS = (
    "the recomputation calls {}, which forward did not: the module branches on state that forward changed. Decide "
    "once, outside the checkpoint"
)
NEW_ERROR = (
    "the recomputation raises an error, and forward did not: the module, or a hook of it, reads state that forward "
    "changed. Leave the module out of the checkpoint, or let it skip recomputations"
)
OTHER_TENSORS = (
    "the recomputation of a checkpoint saves different tensors from its forward, since the checkpointed function reads "
    "state that forward changed, such as a cache, a counter or a choice: keep that out of the checkpoint"
)
TIES = "values are equal, or nearly equal, and the tie is broken differently: make the choice stable"
NO_GRADIENT = "no gradient reaches this module"
FREEZING = "the module is frozen only in the candidate: call requires_grad_() there"
OTHER_UPDATE = "the gradients agree and the updates do not: give both sides the same optimizer, with the same settings"
OTHER_CODE = "the module returns a different output for the same input: compare its code and its settings on both sides"
OTHER_VALUES = (
    "the module gives the same output and keeps other values: compare its settings, such as the momentum of a batch "
    "norm"
)
_TIE_DISTANCE = 1e-5
"""Values at most this far apart, relatively, count as tied, where float32 was compared bit for bit."""


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
        _by_missing_gradient_of_reentrant,
        _by_choice,
        _by_recomputation,
        _by_early_stop,
        _by_second_change,
        _by_first_output,
        _by_kept_values,
        lambda pair: cause_of_gaps(pair.gaps),
    )
    return next(filter(None, (explain(pair) for explain in explanations)), None)


def cause_of_failure(pair: Pair, *, is_first: bool) -> Cause | None:
    """Return the first cause that explains why only the candidate's step of ``pair`` failed; ``None`` if no cause does.

    ``is_first``: whether it is the first step of the training.
    """
    explanations = (
        _by_reentrant_warning,
        _by_choice,
        _by_other_calls,
        _by_recomputation,
        _by_error,
        functools.partial(_by_second_backward, is_first=is_first),
        _by_checkpoint_error,
    )
    return next(filter(None, (explain(pair) for explain in explanations)), None)


def _by_reentrant_warning(pair: Pair) -> Cause | None:
    """Return the cause if PyTorch has warned the candidate of a reentrant checkpoint that backward does not enter."""
    has_warned = any(_NO_GRADIENTS_WARNING in text for text in pair.candidate.warnings)
    return Cause(text=REENTRANT) if has_warned else None


def _by_other_calls(pair: Pair) -> Cause | None:
    """Return the cause if a recomputation calls a module that forward did not call."""
    calls = pair.candidate.calls
    paths_in_forward = {call.path for call in calls if not call.recomputed}
    pairs = list(_recomputations(calls))
    for repeated in (call for call in calls if call.recomputed and call.path not in paths_in_forward):
        outer_call = next(reversed(_enclosing_calls(repeated, [outer for _, outer in pairs])), None)
        if outer_call is not None:
            draws_differ = any(outer is outer_call and forward.begun != outer.begun for forward, outer in pairs)
            return _cause_at(outer_call, REDRAWS if draws_differ else OTHER_CALLS.format(repeated.path))
    return None


def _by_error(pair: Pair) -> Cause | None:
    """Return the cause if an exception has just left a call in a recomputation, with the innermost such call."""
    if _CHECKPOINT_ERROR in pair.candidate.failed:  # a checkpoint itself ends calls early when it has enough
        return None
    ended_call: CallPrint | None = None
    for call in reversed(pair.candidate.calls):
        if call.finished or not call.recomputed:
            break
        if ended_call is not None and not _is_below(call.path, ended_call.path):  # such as an earlier call of it
            break
        ended_call = call
    return _cause_at(ended_call, NEW_ERROR) if ended_call is not None else None


def _is_below(path: str, ancestor: str) -> bool:
    return path != ancestor and is_within(path, ancestor)


def _by_second_backward(pair: Pair, *, is_first: bool) -> Cause | None:
    """Return the cause if backward has gone through the same graph twice."""
    if _SECOND_BACKWARD_ERROR not in pair.candidate.failed:
        return None
    if pair.candidate.nested_backward:
        return Cause(text=REENTRANT_WITHIN)
    return None if is_first else Cause(text=STALE_GRAPH)


def _by_checkpoint_error(pair: Pair) -> Cause | None:
    """Return the cause shown by PyTorch's error itself, for a checkpointed function that calls no modules."""
    is_checkpoint_error = _CHECKPOINT_ERROR in pair.candidate.failed or _SELECTIVE_ERROR in pair.candidate.failed
    return Cause(text=OTHER_TENSORS) if is_checkpoint_error else None


def cause_of_gaps(gaps: Sequence[TensorGap]) -> Cause | None:
    """Return the cause that the names in ``gaps`` show: a gradient is missing, or only parameters differ."""
    if all(gap.name.startswith("parameter") for gap in gaps):
        return Cause(text=OTHER_UPDATE)
    return _at_missing_gradient(gaps, NO_GRADIENT)


def cause_in_backward(pair: Pair) -> Cause:
    """Return the cause for gradients that differ where the outputs agree, at the first such module in backward."""
    differing_paths = {_module_of(gap.name) for gap in pair.gaps if gap.name.startswith("gradient")} - {""}
    calls = (c for c in reversed(pair.candidate.calls) if not c.recomputed and c.path in differing_paths)
    call = next(calls, None)
    return Cause(text=IN_BACKWARD.format("")) if call is None else _cause_at(call, IN_BACKWARD.format(FROM_MODULE))


def _at_missing_gradient(gaps: Sequence[TensorGap], text: str) -> Cause | None:
    """Return ``text`` as the cause at the first module whose gradient the candidate lacks; ``None`` if none."""
    missing = next((gap for gap in gaps if gap.missing == "candidate" and gap.name.startswith("gradient")), None)
    return Cause(module=_module_of(missing.name), text=text) if missing is not None else None


def _module_of(name: str) -> str:
    """Return the module that a tensor belongs to: ``gradient of block1.weight`` belongs to ``block1``."""
    return name.partition(" at update ")[0].split(" ")[-1].rpartition(".")[0]


def _by_missing_gradient_of_reentrant(pair: Pair) -> Cause | None:
    """Return the cause at the first module without a gradient, if PyTorch has warned of a reentrant checkpoint."""
    return _by_reentrant_warning(pair) and _at_missing_gradient(pair.gaps, REENTRANT)


def _by_recomputation(pair: Pair) -> Cause | None:
    """Return the cause at the first call in a recomputation with a different input or output from forward's.

    If the input differs, the fault lies in the innermost enclosing call that has the input of forward.  If there is no
    such call, the fault lies outside the checkpoint.
    """
    same_input_calls: list[CallPrint] = []
    other_input_calls: list[CallPrint] = []
    first_other_pair: tuple[CallPrint, CallPrint] | None = None
    for forward, repeated in _recomputations(pair.candidate.calls):
        has_other_input = bool(gaps_between(forward.inputs, repeated.inputs))
        (other_input_calls if has_other_input else same_input_calls).append(repeated)
        is_other = has_other_input or (repeated.finished and bool(gaps_between(forward.outputs, repeated.outputs)))
        if first_other_pair is None and is_other:
            first_other_pair = forward, repeated
    if first_other_pair is None:
        return None
    forward, repeated = first_other_pair
    draws_differ = forward.begun != repeated.begun
    if repeated in same_input_calls:
        return _cause_at(
            repeated,
            REDRAWS if draws_differ and (forward.draws or repeated.draws) else OTHER_OUTPUT,
        )
    innermost = next(reversed(_enclosing_calls(repeated, same_input_calls)), None)
    if draws_differ:
        return _cause_at(innermost or repeated, REDRAWS)
    if innermost is not None:
        return _cause_at(innermost, OTHER_OUTPUT)
    return _cause_at(_enclosing_calls(repeated, [*other_input_calls, repeated])[0], CHANGED_INPUT)


def _enclosing_calls(call: CallPrint, calls: Iterable[CallPrint]) -> list[CallPrint]:
    """Return those of ``calls`` whose modules contain that of ``call``, and ``call`` if it is among them.

    The outermost comes first.
    """
    outer_calls = (outer for outer in calls if outer is call or is_within(call.path, outer.path))
    return sorted(outer_calls, key=lambda outer: len(outer.path))


def _by_early_stop(pair: Pair) -> Cause | None:
    """Return the cause if a recomputation ended inside a module before it made its random numbers."""
    calls = pair.candidate.calls
    for forward, repeated in _recomputations(calls):
        if forward.draws and not repeated.finished and not any(c.path.startswith(f"{repeated.path}.") for c in calls):
            return _cause_at(repeated, EARLY_STOP)
    return None


def _by_second_change(pair: Pair) -> Cause | None:
    """Return the cause if only the candidate recomputes a module whose buffer or other attribute differs."""
    paths_in_reference = {call.path for call in pair.reference.calls if call.recomputed}
    recomputed = [call for call in pair.candidate.calls if call.recomputed and call.path not in paths_in_reference]
    for name in (gap.name.split(" ")[-1] for gap in pair.gaps if gap.name.startswith(("buffer", "state"))):
        owners = [call for call in recomputed if _is_below(name, call.path)]
        if owners:
            return _cause_at(max(owners, key=lambda call: len(call.path)), REPEAT)
    return None


def _by_first_output(pair: Pair) -> Cause | None:
    """Return the cause at the first call in forward whose output differs between the sides, but not its input."""
    reference_calls = dict(_with_call_numbers(c for c in pair.reference.calls if not c.recomputed))
    for key, candidate_call in _with_call_numbers(c for c in pair.candidate.calls if not c.recomputed):
        reference_call = reference_calls.get(key)
        if reference_call is None or not gaps_between(reference_call.outputs, candidate_call.outputs, pair.tolerance):
            continue
        if gaps_between(reference_call.inputs, candidate_call.inputs, pair.tolerance):
            continue
        return _cause_at(candidate_call, _difference_in_call(reference_call, candidate_call))
    return None


def _by_kept_values(pair: Pair) -> Cause | None:
    """Return the cause if the first gap is a buffer or attribute of a module, at the innermost such module."""
    first_name = pair.gaps[0].name if pair.gaps else ""
    kind, _, name = first_name.partition(" ")
    if kind not in ("buffer", "state"):
        return None
    owners = [call for call in pair.candidate.calls if not call.recomputed and is_within(name, call.path)]
    return _cause_at(max(owners, key=lambda call: len(call.path)), OTHER_VALUES) if owners else None


def _difference_in_call(reference_call: CallPrint, candidate_call: CallPrint) -> str:
    if reference_call.training != candidate_call.training:
        return eval_text("candidate" if reference_call.training else "reference")
    if not reference_call.draws and not candidate_call.draws:
        return OTHER_CODE
    return DRAWS if reference_call.begun != candidate_call.begun else OTHER_DRAWING


def _by_choice(pair: Pair) -> Cause | None:
    """Return the cause if an operator such as a sort chooses differently among values that agree."""
    classes = {call.path: call.class_name for call in pair.candidate.calls}
    for choice, repeated_choice in _choices(pair):
        if choice.chosen.bits != repeated_choice.chosen.bits and not gaps_between(
            [choice.values], [repeated_choice.values], pair.tolerance or _TIE_DISTANCE
        ):
            text = f"{TIES} ({choice.operator})"
            return Cause(module=repeated_choice.path, class_name=classes.get(repeated_choice.path, ""), text=text)
    return None


def _choices(pair: Pair) -> Iterator[tuple[ChoicePrint, ChoicePrint]]:
    """Yield corresponding choices of both forwards, and of forward and recomputation of the candidate."""
    candidate_choices = [choice for choice in pair.candidate.choices if not choice.recomputed]
    reference_choices = [choice for choice in pair.reference.choices if not choice.recomputed]
    yield from zip(reference_choices, candidate_choices, strict=False)
    choices_in_forward = {(choice.path, choice.operator): choice for choice in reversed(candidate_choices)}
    for repeated in (choice for choice in pair.candidate.choices if choice.recomputed):
        if (repeated.path, repeated.operator) in choices_in_forward:
            yield choices_in_forward[repeated.path, repeated.operator], repeated


def _recomputations(calls: Sequence[CallPrint]) -> Iterator[tuple[CallPrint, CallPrint]]:
    """Yield each call in a recomputation after its call in forward: one with the same input, if there is one."""
    forward: dict[str, list[CallPrint]] = {}
    for call in calls:
        if not call.recomputed:
            forward.setdefault(call.path, []).append(call)
    for repeated in (call for call in calls if call.recomputed and call.path in forward):
        same_input_calls = (call for call in forward[repeated.path] if not gaps_between(call.inputs, repeated.inputs))
        yield next(same_input_calls, forward[repeated.path][0]), repeated


def _with_call_numbers(calls: Iterable[CallPrint]) -> Iterator[tuple[tuple[str, int], CallPrint]]:
    """Yield ``calls``, each after a key: the module's path, and how often the module was called so far."""
    counts: Counter[str] = Counter()
    for call in calls:
        counts[call.path] += 1
        yield (call.path, counts[call.path]), call


def eval_text(side: str) -> str:
    """Return :data:`EVAL_MODE` for a module that only ``side``, the reference or the candidate, has in eval mode."""
    return EVAL_MODE.format(side, side)


def _cause_at(call: CallPrint, text: str) -> Cause:
    return Cause(module=call.path, class_name=call.class_name, text=text)
