"""Level 1: which modules become segments."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from memopt_cli.errors import PlanError
from memopt_cli.plan.interface import Candidate, Improvement, ModuleTree, Probes, is_within
from memopt_cli.records import Counted, ModuleTrace, Plan, SearchOptions, SegmentPlan

_SHORTLIST = 6
"""How many sets of targets are probed when memopt chooses by itself."""
_LEAST_SHARE = 1e-3
"""A segment must save at least this share of all saved bytes."""


class Segments:
    """Installs segments on the targets asked for, or on the set of modules that gives the lowest peak."""

    level = 1

    def improve(self, start: Candidate, tree: ModuleTree, options: SearchOptions, probes: Probes) -> Improvement:
        """Probe the sets of targets and keep the best; ``start`` if none lowers the peak (targets asked for stay)."""
        sets = [matching_targets(tree, options.targets)] if options.targets else choose_targets(tree)
        best, tried, notes = start, 0, []
        for targets in sets:
            plan = Plan(level=1, segments=tuple(segment(m, options.compress_x) for m in targets))
            probes.report(f"segments on {len(targets)} modules")
            counted = probes.count(plan)
            tried += 1
            if not isinstance(counted, Counted):
                notes.append(f"level 1: {len(targets)} segments could not run")
                continue
            candidate = Candidate(plan=plan, counted=counted)
            if options.targets or candidate.peak_bytes < best.peak_bytes:
                best = candidate
        return Improvement(best=best, tried=tried, notes=tuple(notes))


def segment(module: ModuleTrace, compress: bool) -> SegmentPlan:
    """The plain segment on a module, its input packed by the codec that held it in the recorded step."""
    return SegmentPlan(path=module.path, compressor=module.compressor if compress else "null")


def matching_targets(tree: ModuleTree, targets: Iterable[str]) -> list[ModuleTrace]:
    """The outermost modules whose class name or path matches; :class:`PlanError` if a target matches nothing usable."""
    chosen: list[ModuleTrace] = []
    for target in targets:
        matches = [m for m in tree if m.class_name == target or (m.path and fnmatch.fnmatchcase(m.path, target))]
        usable = [m for m in matches if not m.refusal]
        if not usable:
            raise PlanError(_no_match(tree, target, matches), hint="Name a class or a path glob: --target Bottleneck.")
        chosen += [m for m in usable if m not in chosen]
    return [m for m in sorted(chosen, key=lambda m: m.order) if not _is_below_another(m, chosen)]


def choose_targets(tree: ModuleTree) -> list[list[ModuleTrace]]:
    """Sets of targets, most promising first.

    By the classic trade-off of checkpointing: what stays is the packed inputs of the segments and whatever is saved
    outside of them; on top comes, one at a time, what a segment recomputes.  For every bound on the latter the best
    set is found exactly, by recursion over the tree: a module is a segment, or its children are decided on their own.
    """
    usable = [m for m in tree if m.path and not m.refusal]
    bounds = sorted({tree.saved_at_once(m.path) for m in usable})
    options: dict[tuple[str, ...], float] = {}
    for bound in bounds:
        saving, targets = _best_below(tree, "", bound)
        if targets:
            largest = max(tree.saved_at_once(m.path) for m in targets)
            options.setdefault(tuple(m.path for m in targets), largest - saving)
    ranked = sorted(options, key=lambda paths: (options[paths], len(paths)))
    return [[tree[path] for path in paths] for paths in ranked[:_SHORTLIST]]


def _best_below(tree: ModuleTree, path: str, bound: float) -> tuple[float, list[ModuleTrace]]:
    saving, targets = 0.0, []
    for child in tree.children(path):
        child_saving, child_targets = _best_below(tree, child.path, bound)
        saving += child_saving
        targets += child_targets
    if path not in tree:
        return saving, targets
    module = tree[path]
    own = module.saved_bytes - module.packed_input_bytes
    worth_it = own > tree[""].saved_bytes * _LEAST_SHARE and own > saving
    if path and not module.refusal and tree.saved_at_once(path) <= bound and worth_it:
        return own, [module]
    return saving, targets


def _is_below_another(module: ModuleTrace, others: list[ModuleTrace]) -> bool:
    return any(o is not module and is_within(module.path, o.path) for o in others)


def _no_match(tree: ModuleTree, target: str, matches: list[ModuleTrace]) -> str:
    if matches:
        return f"target '{target}' matches '{matches[0].path}', which cannot be a segment: {matches[0].refusal}"
    classes = sorted({m.class_name for m in tree if not m.refusal})
    return f"target '{target}' matches no module that the training step calls (classes: {', '.join(classes)})"
