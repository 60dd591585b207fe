"""Comparing two measurements of a training step: whether they are comparable, what grew past a limit, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final, Literal

from memopt_cli.inputs.spec_text import format_layout
from memopt_cli.pipeline.renames import Moves, find_renames
from memopt_cli.pipeline.terms import differences, inputs_term, step_terms
from memopt_cli.records import (
    METRICS,
    Baseline,
    Change,
    Comparison,
    Limit,
    Metric,
    ModuleBytes,
    ModuleChange,
    Plan,
    PlanChange,
    SavedGrowth,
    SavedTensor,
    ShorterStep,
    StepMemory,
    Verdict,
    to_data,
)

MAX_SAVED_TENSORS = 20
"""Maximum number of saved tensors that a baseline names: the largest ones."""


_STEP_PATH: Final = "(the step)"
"""Path under which a comparison lists the tensors outside the model's modules."""
_STEP_KINDS: Final = ("inputs", "optimizer")
"""Categories that no module of the model holds."""


def comparable_terms(baseline: Baseline) -> dict[str, str]:
    """Return the conditions, by name, that must be equal for a difference to be caused by the model.

    The backend is included because it decides which tensors a step makes: with oneDNN, an LSTM keeps a workspace of its
    own, and its tensor peak is 1.5 times as large.  So is the compiler: the tensors of compiled code cannot be seen,
    and its allocated peak is used as the tensor peak.  The version of PyTorch is not included.
    """
    header, conditions, compiled = baseline.header, baseline.conditions, baseline.memory.plan.compile
    layout = None if conditions is None else conditions.layout
    always_comparable = {
        "device kind": header.device.partition(":")[0],
        "inputs": inputs_term(header.spec),
        "shorter inputs": ", ".join(step.name for step in baseline.shorter) or "none",
        "seed": str(header.seed),
        "compiler": "none" if compiled is None else compiled.backend,
    }
    if conditions is None:
        return always_comparable
    return always_comparable | {
        "backend": " + ".join(conditions.backend) or "none",
        **step_terms(conditions.settings),
        "ranks": "one device" if layout is None else f"{layout.ranks}, {format_layout(layout)}",
    }


def surroundings(baseline: Baseline) -> dict[str, str]:
    """Return conditions, by name, that may differ between comparable measurements; a report names those that do."""
    header, conditions = baseline.header, baseline.conditions
    versions = {"torch": header.torch, "memopt": header.memopt}
    if conditions is None:
        return versions
    machine = {
        "python": conditions.python,
        "device": conditions.device_name,
        "threads": str(conditions.threads),
    }
    return versions | machine


def compare(before: Baseline, after: Baseline, limits: Sequence[Limit] = ()) -> Comparison:
    """Compare ``after`` with ``before``: what changed, which ``limits`` were exceeded, and what explains it.

    Plans by length are compared at every length that both baselines have.
    """
    shorter_now = {step.name: _as_baseline(after, step) for step in after.shorter}
    comparison = _compare(before, after, limits)
    shorter = (
        _compare(_as_baseline(before, step), shorter_now[step.name], limits, at=step.name)
        for step in before.shorter
        if step.name in shorter_now
    )
    return replace(comparison, shorter=tuple(shorter))


def _as_baseline(baseline: Baseline, step: ShorterStep) -> Baseline:
    """Turn a step at shorter inputs into a separate baseline."""
    spec = baseline.header.spec
    header = replace(baseline.header, spec=replace(spec, dims={**spec.dims, step.dim: step.size}))
    return replace(baseline, header=header, memory=step.memory, shorter=())


def _compare(before: Baseline, after: Baseline, limits: Sequence[Limit], at: str = "") -> Comparison:
    old, new = before.memory, after.memory
    recorded = old.peak is not None and new.peak is not None
    renames, moves = find_renames(old.modules, new.modules)
    values_before, values_after = _values(old), _values(new)
    new_saved, grown_saved = _new_and_grown(old.saved, new.saved, moves) if recorded else ((), ())
    changes = {m: Change(metric=m, before=values_before[m], after=values_after[m]) for m in METRICS}
    return Comparison(
        before=before.header,
        after=after.header,
        changes=tuple(changes.values()),
        verdicts=tuple(judge(limit, changes[limit.metric], at) for limit in limits),
        modules=_module_changes(old.modules, new.modules, moves) if recorded else (),
        new_saved=new_saved,
        grown_saved=grown_saved,
        renames=renames,
        plan=_plan_change(old.plan.at(before.header.spec.dims), new.plan.at(after.header.spec.dims), moves),
        peak_before=old.peak,
        peak_after=new.peak,
        peak_moved=old.peak is not None
        and new.peak is not None
        and replace(old.peak, module=moves.get(old.peak.module, old.peak.module)) != new.peak,
        unlike=differences(comparable_terms(before), comparable_terms(after)),
        surroundings=differences(surroundings(before), surroundings(after)),
        layout=None if after.conditions is None else after.conditions.layout,
        at=at,
    )


def judge(limit: Limit, change: Change, at: str = "") -> Verdict:
    """Judge whether a metric grew by more than ``limit``; growth by exactly the limit is allowed.

    ``at``: the length of the inputs, if they are shorter than the longest.
    """
    # Exact fractions of the numbers as written: in binary, 0.29 * 100 is below 29.
    amount, before, after = (Fraction(str(number)) for number in (limit.amount, change.before, change.after))
    allowed = amount * before / 100 if limit.relative else amount
    return Verdict(limit=limit, change=change, exceeded=after - before > allowed, at=at)


def _values(memory: StepMemory) -> dict[Metric, float]:
    breakdown = {name.removesuffix("_bytes"): size for name, size in to_data(memory.breakdown).items()}
    return {
        "peak": memory.tensor_peak_bytes,
        "allocated": memory.allocated_peak_bytes,
        "step": memory.step_s,
        "offloaded": memory.elsewhere_bytes,
        **breakdown,
    }


def _module_changes(
    before: Sequence[ModuleBytes], after: Sequence[ModuleBytes], moves: Moves
) -> tuple[ModuleChange, ...]:
    """Return the modules that hold more or less, largest growth first."""
    old_paths = {new: old for old, new in moves.items()}
    old, new = ({m.path: m for m in _with_step_as_module(modules)} for modules in (before, after))
    changes = []
    for path in dict.fromkeys((*new, *(moves.get(path, path) for path in old))):
        module_before, module_after = old.get(old_paths.get(path, path)), new.get(path)
        held_before, held_after = (module.held_bytes if module else {} for module in (module_before, module_after))
        growth = {kind: held_after.get(kind, 0) - held_before.get(kind, 0) for kind in (held_before | held_after)}
        if any(growth.values()):
            change = ModuleChange(
                path=path,
                was=old_paths.get(path, ""),
                class_name=(module_after or old[old_paths.get(path, path)]).class_name,
                before_bytes=sum(held_before.values()),
                after_bytes=sum(held_after.values()),
                growth_bytes={kind: size for kind, size in growth.items() if size},
            )
            changes.append(change)
    return tuple(sorted(changes, key=lambda change: change.before_bytes - change.after_bytes))


def _with_step_as_module(modules: Iterable[ModuleBytes]) -> Iterator[ModuleBytes]:
    """Yield ``modules``, and as one more module the step's tensors that the root holds."""
    for module in modules:
        step_bytes = {kind: size for kind, size in module.held_bytes.items() if not module.path and kind in _STEP_KINDS}
        own = {kind: size for kind, size in module.held_bytes.items() if kind not in step_bytes}
        yield replace(module, held_bytes=own)
        if step_bytes:
            yield ModuleBytes(path=_STEP_PATH, class_name=", ".join(step_bytes), output_bytes=0, held_bytes=step_bytes)


def _new_and_grown(
    before: Sequence[SavedTensor], after: Sequence[SavedTensor], moves: Moves
) -> tuple[tuple[SavedTensor, ...], tuple[SavedGrowth, ...]]:
    """Return the saved tensors of ``after`` that have no counterpart in ``before``, and those that were smaller.

    A baseline names only its :data:`MAX_SAVED_TENSORS` largest, so smaller tensors do not count as new.
    """
    smallest_bytes = before[-1].nbytes if len(before) == MAX_SAVED_TENSORS else 0
    sizes: dict[tuple[str, ...], list[int]] = {}
    for saved in before:
        sizes.setdefault(_place_of(saved, moves), []).append(saved.nbytes)
    changed = []
    for saved in after:
        same_place = sizes.get(_place_of(saved, {}), [])
        if saved.nbytes in same_place:
            same_place.remove(saved.nbytes)
        elif saved.nbytes > smallest_bytes:
            changed.append(saved)
    new, grown = [], []
    for saved in changed:
        smaller = [size for size in sizes.get(_place_of(saved, {}), []) if size < saved.nbytes]
        if smaller:
            sizes[_place_of(saved, {})].remove(max(smaller))
            grown.append(SavedGrowth(saved=saved, before_bytes=max(smaller)))
        else:
            new.append(saved)
    return tuple(new), tuple(grown)


def _place_of(saved: SavedTensor, moves: Moves) -> tuple[str, ...]:
    return saved.made_by, saved.op, moves.get(saved.module, saved.module)


def _plan_change(before: Plan, after: Plan, moves: Moves) -> PlanChange:
    old = {path: replace(s, path=path) for s in before.segments for path in [moves.get(s.path, s.path)]}
    new = {s.path: s for s in after.segments}
    return PlanChange(
        dropped=tuple(path for path in old if path not in new),
        added=tuple(path for path in new if path not in old),
        changed=tuple(path for path in new if path in old and old[path] != new[path]),
        packing=_change_of(before.packed, after.packed),
        sending=_change_of(before.place != "device", after.place != "device"),
    )


def _change_of(before: bool, after: bool) -> Literal["same", "dropped", "added"]:
    if before == after:
        return "same"
    return "added" if after else "dropped"
