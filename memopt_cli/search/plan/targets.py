"""The modules that the user named as segments, by class, path or object; and notes on modules that cannot be."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from memopt_cli.errors import UsageError
from memopt_cli.records import DroppedPlan, ModuleTrace, Plan, SearchOptions, SegmentPlan, SelectionPolicy
from memopt_cli.search.plan.policy import Selection, describe_choice
from memopt_cli.text.paths import is_within, quote_module
from memopt_cli.text.units import format_some

_NEVER_CALLED = "the step never calls it"
_NONE_ALLOWED: dict[SelectionPolicy, str] = {
    "explicit_zero_budget": "max_gc_wrapped_modules allows none",
    "zero_ratio_budget": "gc_target_budget_ratio allows none",
}
_LOOP_CALLS = 4
"""Minimum number of calls of each module in a loop over time steps."""
_LOOP_MODULES = 3
"""Minimum number of modules in a loop over time steps: with fewer, a module in a loop can be a segment."""


def segments_plan(selection: Selection, options: SearchOptions) -> Plan:
    """Return a plan with a plain segment on every module of ``selection``."""
    return Plan(segments=tuple(plain_segment(m, options.compress_x) for m in selection.selected))


def plain_segment(module: ModuleTrace, compress: bool) -> SegmentPlan:
    """Return the plain segment on ``module``; with ``compress``, its input is packed by the recorded compressor."""
    return SegmentPlan(path=module.path, compressor=module.compressor if compress else "null")


def find_named_modules(modules: Sequence[ModuleTrace], options: SearchOptions) -> list[ModuleTrace] | None:
    """Return the outermost modules that ``options`` name; ``None`` if they leave the choice to memopt."""
    if options.targets:
        return match_targets(modules, options.targets)
    if options.modules is not None:
        return find_outermost([m for m in modules if m.path in options.modules and not m.refusal])
    return None


def describe_selection(
    modules: Sequence[ModuleTrace], plan: Plan, options: SearchOptions, *, by_goal: bool
) -> Selection:
    """Describe the candidates that ``plan`` selects, and why modules named by the user cannot be candidates."""
    named = find_named_modules(modules, options)
    candidates = len(named) if named is not None else sum(not module.refusal for module in modules)
    modules_by_path = {module.path: module for module in modules}
    segments = find_outermost([modules_by_path[segment.path] for segment in plan.segments])
    selection = describe_choice(candidates, segments, options, by_goal=by_goal)
    return replace(selection, named=tuple(named or ()), refusals=find_refusals(modules, options))


def find_refusals(modules: Iterable[ModuleTrace], options: SearchOptions) -> dict[str, str]:
    """Return why modules that the user named cannot be candidates, as a dictionary by path."""
    refusals = {m.path: m.refusal for m in modules}
    reasons = {path: refusals.get(path, _NEVER_CALLED) for path in options.modules or ()}
    return {path: reason for path, reason in reasons.items() if reason}


def refusal_notes(refusals: Mapping[str, str]) -> list[str]:
    """Return a note on the modules in ``refusals``, from :func:`find_refusals`, if there are any."""
    modules = [f"{quote_module(path)} ({reason})" for path, reason in refusals.items()]
    return [f"These modules cannot be segments: {format_some(modules)}."] if modules else []


def loop_notes(modules: Sequence[ModuleTrace]) -> list[str]:
    """Return a note if forward loops over time steps and calls several of ``modules`` in turn in each.

    A segment then holds one of them at one time step, and all that lies between them is kept.
    """
    outer = find_outermost([module for module in modules if module.path and module.calls > 0])
    calls = min((module.calls for module in outer), default=0)
    if calls < _LOOP_CALLS or len(outer) < _LOOP_MODULES:
        return []
    names = format_some([module.path for module in outer])
    return [
        f"forward calls {names} at least {calls} times each, as a loop over time steps does. Put one time step, the "
        "body of the loop, into its own module, which a plan can recompute (docs/spiking.md has an example)."
    ]


def missing_segment_notes(
    classes: Iterable[tuple[str, Sequence[str]]], selection: Selection, dropped: DroppedPlan | None = None
) -> list[str]:
    """Return a note for each of ``classes``, pairs of a name and the paths of its modules, none of them a segment."""
    return [f"No segment of {name}: {_why_none(paths, selection, dropped)}." for name, paths in classes]


def _why_none(paths: Sequence[str], selection: Selection, dropped: DroppedPlan | None) -> str:
    refusals = selection.refusals
    if not paths:
        return "the model has none"
    if any(path not in refusals for path in paths):
        if dropped is not None:
            return f"a plan was found, but {dropped.why.because}"
        return _NONE_ALLOWED.get(selection.policy, "no plan that was found with one lowers the peak")
    reason = next((refusals[path] for path in paths if refusals[path] != _NEVER_CALLED), _NEVER_CALLED)
    return "the step calls none of them" if reason == _NEVER_CALLED else f"none can be one, as {reason}"


def find_outermost(modules: list[ModuleTrace]) -> list[ModuleTrace]:
    """Return the ``modules`` that lie in no other one, in the order of first call."""
    ordered = sorted(modules, key=lambda m: m.order)
    return [m for m in ordered if not any(o is not m and is_within(m.path, o.path) for o in modules)]


def match_targets(modules: Sequence[ModuleTrace], targets: Iterable[str]) -> list[ModuleTrace]:
    """Return the outermost modules whose class name or path matches one of ``targets``.

    Raises :class:`UsageError` for a target without a match among the modules that can be segments.
    """
    targeted: list[ModuleTrace] = []
    for target in targets:
        matches = [m for m in modules if m.class_name == target or (m.path and fnmatch.fnmatchcase(m.path, target))]
        usable = [m for m in matches if not m.refusal]
        if not usable:
            message = _no_match(modules, target, matches)
            raise UsageError(message, hint="Name a class or a path glob: `--target Bottleneck`.")
        targeted += [m for m in usable if m not in targeted]
    return find_outermost(targeted)


def _no_match(modules: Sequence[ModuleTrace], target: str, matches: list[ModuleTrace]) -> str:
    if matches:
        return f"target '{target}' matches '{matches[0].path}', which cannot be a segment: {matches[0].refusal}"
    classes = sorted({m.class_name for m in modules if not m.refusal})
    return f"target '{target}' matches no module that the training step calls (classes: {', '.join(classes)})"
