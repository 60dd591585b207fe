"""Level 1: which modules become segments."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import replace

from memopt_cli.errors import PlanError
from memopt_cli.plan.cost_models import CostModels
from memopt_cli.plan.interface import Candidate, Improvement, ModuleTree, NotTried, Probes, is_within
from memopt_cli.plan.policy import Selection, is_limited, least_predicted_peak, select
from memopt_cli.records import Counted, ModuleTrace, Plan, SearchOptions, SegmentPlan

_SHORTLIST = 6
"""How many sets of targets are probed when memopt chooses by itself."""
_LEAST_SHARE = 1e-3
"""A segment must save at least this share of all saved bytes."""
_NAMED = 3
"""How many modules a note names."""


class Segments:
    """Installs segments on the modules asked for, or on the set of modules that gives the lowest peak.

    Either way no more of them than the limits allow.
    """

    level = 1

    def improve(self, start: Candidate, tree: ModuleTree, options: SearchOptions, probes: Probes) -> Improvement:
        """Probe the sets of targets and keep the best; ``start`` if none lowers the peak (targets asked for stay).

        Sets that the cost model puts above the best so far are not probed.
        """
        models = CostModels(tree.trace, probes)
        targets = asked_for(tree, options)
        asked = targets is not None
        best, tried, notes = start, 0, left_out(tree, options)
        usable = sum(not module.refusal for module in tree)
        chosen = least_predicted_peak(usable, [])
        for candidates in choose_targets(tree, probes.late) if targets is None else [targets]:
            limited = asked or is_limited(options)
            selection = select(candidates, options) if limited else least_predicted_peak(usable, candidates)
            if asked or not selection.selected:
                chosen = selection
            if not selection.selected:
                continue
            plan = segments_plan(selection, options)
            if not asked and models.raises_peak(plan, best.plan):
                continue
            probes.report(f"segments: {len(plan.segments)}")
            counted = probes.count(plan)
            if isinstance(counted, NotTried):
                break
            tried += 1
            if not isinstance(counted, Counted):
                notes.append(f"level 1: {len(plan.segments)} segments could not run")
            elif asked or counted.allocated_peak_bytes < best.peak_bytes:
                best, chosen = Candidate(plan=plan, counted=counted), selection
        for plan in _packed_too((best.plan,) if asked else (start.plan, best.plan), tree, options):
            if models.raises_peak(plan, best.plan):
                continue
            probes.report("pack what is saved")
            counted = probes.count(plan)
            if isinstance(counted, NotTried):
                break
            tried += 1
            if isinstance(counted, Counted) and counted.allocated_peak_bytes < best.peak_bytes:
                best = Candidate(plan=plan, counted=counted)
                chosen = chosen if plan.segments else least_predicted_peak(usable, [])
        return Improvement(best=best, tried=tried, notes=tuple(notes), selection=chosen)


def _packed_too(plans: Iterable[Plan], tree: ModuleTree, options: SearchOptions) -> list[Plan]:
    """The plans with packing, if the recorded step saved anything that can be packed."""
    packable = any(s.saved_by and s.compressor != "null" for s in tree.trace.storages)
    if not options.compress_x or not packable or tree[""].refusal:
        return []
    return [replace(plan, level=1, packed=True) for plan in dict.fromkeys(plans)]


def segments_plan(selection: Selection, options: SearchOptions) -> Plan:
    """Segments on the selected modules."""
    return Plan(level=1, segments=tuple(segment(m, options.compress_x) for m in selection.selected))


def segment(module: ModuleTrace, compress: bool) -> SegmentPlan:
    """The plain segment on a module, its input packed by the codec that held it in the recorded step."""
    return SegmentPlan(path=module.path, compressor=module.compressor if compress else "null")


def asked_for(tree: ModuleTree, options: SearchOptions) -> list[ModuleTrace] | None:
    """The outermost modules that may be segments; ``None``: whichever memopt chooses."""
    if options.targets:
        return matching_targets(tree, options.targets)
    if options.modules is not None:
        return outermost([m for m in tree if m.path in options.modules and not m.refusal])
    return None


def left_out(modules: Iterable[ModuleTrace], options: SearchOptions) -> list[str]:
    """A note on the modules asked for by path that cannot be candidates, if there are any."""
    known = {m.path: m.refusal for m in modules}
    reasons = {path: known.get(path, "the step never calls it") for path in options.modules or ()}
    refused = [f"'{path or '(root)'}' ({reason})" for path, reason in reasons.items() if reason]
    more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
    return [f"Not candidates: {', '.join(refused[:_NAMED])}{more}."] if refused else []


def outermost(modules: list[ModuleTrace]) -> list[ModuleTrace]:
    """Those that lie below no other, in the order of first call: a segment within a segment is recomputed twice."""
    ordered = sorted(modules, key=lambda m: m.order)
    return [m for m in ordered if not any(o is not m and is_within(m.path, o.path) for o in modules)]


def matching_targets(tree: ModuleTree, targets: Iterable[str]) -> list[ModuleTrace]:
    """The outermost modules whose class name or path matches; :class:`PlanError` if a target matches nothing usable."""
    chosen: list[ModuleTrace] = []
    for target in targets:
        matches = [m for m in tree if m.class_name == target or (m.path and fnmatch.fnmatchcase(m.path, target))]
        usable = [m for m in matches if not m.refusal]
        if not usable:
            raise PlanError(_no_match(tree, target, matches), hint="Name a class or a path glob: --target Bottleneck.")
        chosen += [m for m in usable if m not in chosen]
    return outermost(chosen)


def choose_targets(tree: ModuleTree, late: Callable[[], bool] = lambda: False) -> list[list[ModuleTrace]]:
    """Sets of targets, most promising first.

    By the classic trade-off of checkpointing: what stays is the packed inputs of the segments and whatever is saved
    outside of them; on top comes, one at a time, what a segment recomputes.  For every bound on the latter the best
    set is found exactly, by recursion over the tree: a module is a segment, or its children are decided on their own.
    When it is ``late`` the bounds looked at so far have to do.
    """
    usable = [m for m in tree if m.path and not m.refusal]
    bounds = sorted({tree.saved_at_once(m.path) for m in usable})
    options: dict[tuple[str, ...], float] = {}
    for bound in bounds:
        if late():
            break
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


def _no_match(tree: ModuleTree, target: str, matches: list[ModuleTrace]) -> str:
    if matches:
        return f"target '{target}' matches '{matches[0].path}', which cannot be a segment: {matches[0].refusal}"
    classes = sorted({m.class_name for m in tree if not m.refusal})
    return f"target '{target}' matches no module that the training step calls (classes: {', '.join(classes)})"
