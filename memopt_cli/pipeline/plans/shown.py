"""Keeping the plans of ``--frontier`` in a file next to the model, and taking plan N from it for ``--pick N``.

A number refers to the table that the user has seen.  If the model, the inputs or the step have changed since, the
command fails rather than search again and apply another plan under the same number.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from memopt_cli.errors import UsageError, WriteError
from memopt_cli.files.memopt_files import frontier_json, read_frontier
from memopt_cli.files.outputs import output_paths
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.frontier import check_pick
from memopt_cli.pipeline.plans.goal import FRONTIER_SLOWDOWN
from memopt_cli.pipeline.prepare import PreparedModel, file_header, typed_inputs
from memopt_cli.pipeline.terms import (
    differences,
    fill_in,
    flags_in_words,
    inputs_term,
    missing_settings,
    settings_naming_code,
    step_terms,
)
from memopt_cli.records import (
    Measurement,
    OptimizeRequest,
    Plan,
    SearchOptions,
    ShownFrontier,
    StepSettings,
)
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.documents import quoted_flag
from memopt_cli.text.units import format_bytes
from memopt_cli.text.writing import check_targets, content, write_all

_SHOW_AGAIN_HINT = "Run `--frontier` for this step, and pick one of its plans."
_MAX_HASH_DIGITS = 12
"""Maximum number of digits of a hash that a message shows."""


def frontier_path(request: OptimizeRequest) -> Path:
    """Return the path of the shown plans: next to the output that ``request`` names, else next to the model.

    The picked plan may go to a different output, so with ``--pick`` a file next to the output counts only if it exists.
    """
    output_frontier = output_paths(request.source.location, request.output).frontier
    if request.goal.frontier or os.path.lexists(output_frontier):
        return output_frontier
    return output_paths(request.source.location, None).frontier


def check_frontier_target(request: OptimizeRequest) -> None:
    """Raise as :func:`check_targets` for a file in the place of the frontier that memopt did not write.

    The plans that were shown last are replaced without ``--force``: they can be searched again.
    """
    path = frontier_path(request)
    if request.force or not os.path.lexists(path):
        return
    try:
        read_frontier(path)
    except FileNotFoundError:  # a dangling symbolic link
        check_targets([path], force=False)


def with_shown_plans(request: OptimizeRequest) -> OptimizeRequest:
    """Return ``request`` with the plans to pick from, and with their level, inputs and settings where it gives none.

    Without ``--pick``, with ``--frontier``, or if no plans are kept, return ``request`` unchanged.  Raises
    :class:`UsageError` for a file that holds no frontier or lacks the plan, and for options of another search.
    """
    number = request.goal.pick
    if number is None or request.goal.frontier:
        return request
    try:
        frontier = read_frontier(frontier_path(request))
    except FileNotFoundError:
        return request
    check_pick(number, len(frontier.points))
    _check_options(request.search.options, frontier.options)
    compilers = {point.plan.compile.backend for point in frontier.points if point.plan.compile is not None}
    if request.backend not in (None, *compilers):
        raise UsageError(
            f"`--pick` takes a plan that was shown, and {request.backend} compiles none of them",
            hint="Leave `--compile` out, or add `--frontier` to search again.",
        )
    _check_permissions(number, frontier.points[number - 1].plan, request.search.options)
    settings, shown_settings = request.settings, frontier.settings
    _check_code(settings, shown_settings)
    _check_inputs(request, frontier)
    options = replace(request.search.options, level=frontier.options.level)
    filled_names = missing_settings(settings, shown_settings)
    notes = request.search.notes
    if filled_names:
        notes += (f"As when the plans were shown: {flags_in_words(shown_settings, filled_names)}.",)
    return replace(
        request,
        spec=request.spec or typed_inputs(frontier.header, frontier_path(request)),
        settings=fill_in(settings, shown_settings),
        search=replace(request.search, options=options, requested_level=options.level, notes=notes),
        shown=frontier,
    )


def _check_permissions(number: int, plan: Plan, options: SearchOptions) -> None:
    """Raise :class:`UsageError` for a ``plan`` that needs a permission beyond those of ``options``.

    The file may have come with the model, so it grants none.
    """
    if any(segment.inexact for segment in plan.everywhere) and not options.allow_inexact:
        fault, flag = "is not exact", "`--allow-inexact`"
    elif plan.in_backward and not options.optimizer_in_backward:
        fault, flag = "runs the optimizer in backward", "`--optimizer-in-backward`"
    else:
        return
    raise UsageError(f"the plan of `--pick {number}` {fault}", hint=f"Add {flag}, or pick another plan.")


def _check_code(settings: StepSettings, shown_settings: StepSettings) -> None:
    """Raise :class:`UsageError` if ``settings`` leaves out code that the step of the shown plans names."""
    if code := settings_naming_code(settings, shown_settings):
        flags = flags_in_words(shown_settings, code)
        raise UsageError(
            f"the plans were shown for a step with {flags}, and memopt runs no code that only a file names",
            hint=f"If that is your code, add {flags}.",
        )


def _check_inputs(request: OptimizeRequest, frontier: ShownFrontier) -> None:
    """Raise :class:`UsageError` if ``request`` leaves out the file or script with the inputs of ``frontier``."""
    spec = frontier.header.spec
    files = {"--input-data": spec.data_file, "--input-script": spec.script}
    flag = next((quoted_flag(flag, path) for flag, path in files.items() if path), "")
    if flag and not (request.spec is not None and request.spec.has_inputs):
        raise UsageError(
            f"the plans were shown for a step with `{flag}`; memopt opens no file just because a file next to the "
            "model names it",
            hint=f"If those are your inputs, add `{flag}`.",
        )


def _check_options(options: SearchOptions, shown_options: SearchOptions) -> None:
    """Raise :class:`UsageError` where ``options`` sets an option to a different value from the shown plans."""
    defaults = resolve({}).options
    for name in (f.name for f in fields(SearchOptions)):
        value, shown_value = getattr(options, name), getattr(shown_options, name)
        if value not in (getattr(defaults, name), shown_value):
            raise UsageError(
                f"`--pick` takes a plan that was shown; its {name.removesuffix('s').replace('_', ' ')} was "
                f"{_option_text(shown_value)}, not {_option_text(value)}",
                hint=f"Leave the option out. {_SHOW_AGAIN_HINT}",
            )


def _option_text(value: Any) -> str:
    """Return the ``value`` of an option about as it is typed."""
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_shown(request: OptimizeRequest, prepared: PreparedModel) -> None:
    """Raise :class:`UsageError` if the plans to pick from were shown for a different step from ``prepared``."""
    if request.shown is None:
        return
    changes = differences(_terms(request.shown), _terms(_empty_frontier(request, prepared)))
    if changes:
        raise UsageError(
            f"the plans in {frontier_path(request)} were shown for a different step: "
            + "; ".join(f"{d.name} {d.before} → {d.after}" for d in changes),
            hint=_SHOW_AGAIN_HINT,
        )


def check_original(request: OptimizeRequest, original: object) -> None:
    """Raise :class:`UsageError` if the original's tensor peak, ``original`` now, differs from when plans were shown.

    Hashes do not cover code: a function that builds the model or its inputs may have changed since.
    """
    assert request.shown is not None, "a plan is picked from it"
    shown_outcomes = [point.outcome for point in request.shown.points if point.plan.is_empty]
    peaks = [outcome.tensor_peak_bytes for outcome in (*shown_outcomes, original) if isinstance(outcome, Measurement)]
    if len(set(peaks)) > 1:
        shown_peak, current_peak = (format_bytes(peak) for peak in peaks[-2:])
        raise UsageError(
            f"the plans in {frontier_path(request)} were shown for a step with a tensor peak of {shown_peak}; "
            f"the step now has a tensor peak of {current_peak}",
            hint=_SHOW_AGAIN_HINT,
        )


def _terms(frontier: ShownFrontier) -> dict[str, str]:
    header = frontier.header
    return {
        "model": _short_hash(header.sha256) or header.model,
        "weights": _short_hash(frontier.weights_sha256) or "none",
        "entry": frontier.key or "none",
        "inputs": inputs_term(header.spec),
        "input data": _short_hash(header.spec.data_sha256) or "none",
        "device": header.device,
        "seed": str(header.seed),
        **step_terms(frontier.settings),
    }


def _short_hash(sha256: str | None) -> str:
    return "" if sha256 is None else f"with hash {sha256[:_MAX_HASH_DIGITS]}"


def write_shown(request: OptimizeRequest, prepared: PreparedModel, findings: Findings) -> list[Path]:
    """Write the frontier in ``findings`` next to the model and return its path; if that fails, add a note instead.

    The folder may be read-only.  Without the file, ``--pick`` only has to search again.
    """
    path = frontier_path(request)
    text = frontier_json(replace(_empty_frontier(request, prepared), points=tuple(findings.frontier)))
    try:
        check_frontier_target(request)
        write_all({path: content(text)}, force=True)
    except (UsageError, WriteError) as err:
        findings.notes.append(f"The plans are not kept, so `--pick` will search again: {err.message}.")
        return []
    if path != output_paths(request.source.location, None).frontier:
        findings.notes.append(f"`--pick` finds these plans with `{quoted_flag('-o', str(request.output))}`.")
    return [path]


def _empty_frontier(request: OptimizeRequest, prepared: PreparedModel) -> ShownFrontier:
    options = request.search.options
    if request.search.asked_slowdown is None:
        options = replace(options, max_slowdown=FRONTIER_SLOWDOWN)
    return ShownFrontier(
        header=file_header(prepared),
        weights_sha256=prepared.facts.weights_sha256,
        key=prepared.subject.source.key,
        settings=prepared.subject.settings,
        options=options,
        points=(),
    )
