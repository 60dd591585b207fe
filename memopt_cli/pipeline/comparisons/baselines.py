"""Comparing two measurements of a training step: whether they are comparable, what grew past a limit, and why."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from memopt_cli.inputs.spec_text import format_layout
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
    PeakPlace,
    Plan,
    PlanChange,
    Rename,
    SavedTensor,
    ShorterStep,
    StepMemory,
    Verdict,
    to_data,
)
from memopt_cli.text.paths import stems_of

MAX_SAVED_TENSORS = 20
"""Number of saved tensors, the largest ones, that a baseline names."""

Paths = Mapping[str, str]
"""Path of a module before -> its path now, for those that have another one."""


def comparable_terms(baseline: Baseline) -> dict[str, str]:
    """Return the conditions, by name, that must be equal for a difference to be caused by the model.

    The backend is included because it decides which tensors a step makes: with oneDNN, an LSTM keeps a workspace of its
    own, and its tensor peak is half as large again.  So is the compiler: the tensors of compiled code cannot be seen,
    and its allocated peak is used as the tensor peak.  The version of PyTorch is not included.
    """
    header, conditions, compiled = baseline.header, baseline.conditions, baseline.memory.plan.compile
    layout = None if conditions is None else conditions.layout
    of_any = {
        "device kind": header.device.partition(":")[0],
        "inputs": inputs_term(header.spec),
        "shorter inputs": ", ".join(step.name for step in baseline.shorter) or "none",
        "seed": str(header.seed),
        "compiler": "none" if compiled is None else compiled.backend,
    }
    if conditions is None:
        return of_any
    return of_any | {
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
    """Turn a step at shorter inputs into a baseline of its own."""
    spec = baseline.header.spec
    header = replace(baseline.header, spec=replace(spec, dims={**spec.dims, step.dim: step.size}))
    return replace(baseline, header=header, memory=step.memory, shorter=())


def _compare(before: Baseline, after: Baseline, limits: Sequence[Limit], at: str = "") -> Comparison:
    old, new = before.memory, after.memory
    recorded = old.peak is not None and new.peak is not None
    renames, moves = find_renames(old.modules, new.modules)
    values_before, values_after = _values(old), _values(new)
    changes = {m: Change(metric=m, before=values_before[m], after=values_after[m]) for m in METRICS}
    return Comparison(
        before=before.header,
        after=after.header,
        changes=tuple(changes.values()),
        verdicts=tuple(judge(limit, changes[limit.metric], at) for limit in limits),
        modules=_module_changes(old.modules, new.modules, moves) if recorded else (),
        new_saved=_new_saved(old.saved, new.saved, moves) if recorded else (),
        renames=renames,
        plan=_plan_change(old.plan.at(before.header.spec.dims), new.plan.at(after.header.spec.dims), moves),
        peak_before=old.peak,
        peak_after=new.peak,
        peak_moved=_peak_moved(old.peak, new.peak, moves),
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
    before: Sequence[ModuleBytes], after: Sequence[ModuleBytes], moves: Paths
) -> tuple[ModuleChange, ...]:
    """Return the modules that hold more or less, largest growth first."""
    old_paths = {new: old for old, new in moves.items()}
    old, new = ({m.path: m for m in modules} for modules in (before, after))
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


def _new_saved(before: Sequence[SavedTensor], after: Sequence[SavedTensor], moves: Paths) -> tuple[SavedTensor, ...]:
    """Return the saved tensors of ``after`` that have no counterpart in ``before``.

    A baseline names only its :data:`MAX_SAVED_TENSORS` largest, so smaller tensors do not count as new.
    """
    smallest_bytes = before[-1].nbytes if len(before) == MAX_SAVED_TENSORS else 0
    counts = Counter(_saved_key(saved, moves) for saved in before)
    new_tensors = []
    for saved in after:
        counts[_saved_key(saved, {})] -= 1
        if counts[_saved_key(saved, {})] < 0 and saved.nbytes > smallest_bytes:
            new_tensors.append(saved)
    return tuple(new_tensors)


def _saved_key(saved: SavedTensor, moves: Paths) -> tuple[object, ...]:
    return saved.nbytes, saved.made_by, saved.op, moves.get(saved.module, saved.module)


def _plan_change(before: Plan, after: Plan, moves: Paths) -> PlanChange:
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


def _peak_moved(before: PeakPlace | None, after: PeakPlace | None, moves: Paths) -> bool:
    if before is None or after is None:
        return False
    return replace(before, module=moves.get(before.module, before.module)) != after


def find_renames(
    before: Sequence[ModuleBytes], after: Sequence[ModuleBytes]
) -> tuple[tuple[Rename, ...], dict[str, str]]:
    """Find renamed parts of the model; return these renames, and a mapping of old to new paths of modules.

    Example: ``features.0.conv`` is gone and ``backbone.0.conv`` is new, with the same class, parameters, buffers and
    output bytes.  Without the last names that both share, the pair votes for the rename ``features`` -> ``backbone``.
    The renames with most votes are applied first, even to modules that have changed in size.  The modules that are
    left vote by class, where as many are new as are gone: they were renamed and changed in size.
    """
    old, new = ({m.path: m for m in modules} for modules in (before, after))
    missing = {path: module for path, module in old.items() if path not in new}
    added = {path: module for path, module in new.items() if path not in old}
    moves: dict[str, str] = {}
    targets: set[str] = set()
    renames = []
    sides = _Paths(missing), _Paths(added)
    for stems in _candidates(missing, added, moves):
        moved = 0
        for path, target in _pairs(*sides, *stems):
            is_free = path not in moves and target not in targets and path in missing and target in added
            if is_free and added[target].class_name == missing[path].class_name:
                moves[path] = target
                targets.add(target)
                moved += 1
        if moved:
            renames.append(Rename(before=stems[0], after=stems[1], modules=moved))
    return tuple(renames), moves


class _Paths:
    """A sorted list of module paths, in which those below a module are found by bisection."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._sorted = sorted(paths)

    def below(self, stem: str) -> Sequence[str]:
        """Return the path ``stem``, if it is in the list, and all paths of modules inside it."""
        if not stem:
            return self._sorted
        own_index, start, end = (bisect.bisect_left(self._sorted, text) for text in (stem, f"{stem}.", f"{stem}/"))
        return [*(path for path in self._sorted[own_index : own_index + 1] if path == stem), *self._sorted[start:end]]


def _pairs(missing: _Paths, added: _Paths, before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yield the paths that a rename would change, each with its new path; iterate over the shorter side, for speed."""
    sources, targets = missing.below(before), added.below(after)
    if len(sources) <= len(targets):
        for path in sources:
            yield path, _replace_prefix(path, before, after)
    else:
        for path in targets:
            source = _replace_prefix(path, after, before)
            if _replace_prefix(source, before, after) == path:
                yield source, path


def _candidates(
    missing: Mapping[str, ModuleBytes], added: Mapping[str, ModuleBytes], moves: Paths
) -> Iterator[tuple[str, str]]:
    """Yield candidate renames, as pairs of an old and a new beginning of paths, those with most votes first.

    ``moves``: the renames that the caller has applied, read again when modules of the same bytes have voted.
    """
    yield from _most_votes(_pairs_of_equals(missing.values(), added.values(), _signature))
    found = set(moves.values())
    left = [module for path, module in missing.items() if path not in moves]
    new = [module for path, module in added.items() if path not in found]
    yield from _most_votes(_pairs_of_equals(left, new, lambda module: module.class_name, same_count=True))


def _most_votes(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [stems for stems, _ in Counter(stems_of(*pair) for pair in pairs).most_common()]


def _pairs_of_equals(
    missing: Iterable[ModuleBytes],
    added: Iterable[ModuleBytes],
    key: Callable[[ModuleBytes], object],
    *,
    same_count: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield paths of modules with equal keys, in pairs.  ``same_count``: only of keys that both sides have as often."""
    paths_by_key: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, modules in enumerate((missing, added)):
        for module in modules:
            paths_by_key[key(module)][side].append(module.path)
    for before, after in paths_by_key.values():
        if not same_count or len(before) == len(after):
            yield from zip(before, after, strict=False)


def _signature(module: ModuleBytes) -> object:
    own = (module.held_bytes.get(kind, 0) for kind in ("parameters", "buffers"))
    return module.class_name, module.output_bytes, *own


def _replace_prefix(path: str, before: str, after: str) -> str:
    """Return ``path`` with ``after`` in place of ``before`` at its beginning."""
    rest = path[len(before) :].strip(".")
    return ".".join(part for part in (after, rest) if part)
