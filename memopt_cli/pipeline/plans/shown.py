"""Keep the plans of ``--frontier`` in a file beside the model, and take plan N from it for ``--pick N``.

A number refers to the table that the user has seen.  If the model, the inputs or the step have changed since, the
command fails rather than search again and apply another plan under the same number.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from memopt_cli.errors import UsageError, WriteError
from memopt_cli.files.contents import frontier_json, read_frontier
from memopt_cli.files.outputs import output_paths
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.goal import FRONTIER_SLOWDOWN, check_pick
from memopt_cli.pipeline.prepare import Prepared, file_header, typed_inputs
from memopt_cli.pipeline.terms import differences, filled_in, inputs_term, left_out, naming_code, step_terms, typed
from memopt_cli.records import (
    Measurement,
    ModelSource,
    OptimizeRequest,
    SearchOptions,
    ShownFrontier,
    StepSettings,
)
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.documents import quoted_flag
from memopt_cli.text.units import format_bytes
from memopt_cli.text.writing import check_targets, content, write_all

_AGAIN = "Run `--frontier` for this step, and pick one of its plans."
_SHOWN_DIGITS = 12
"""The number of digits of a hash that a message shows."""


def frontier_path(source: ModelSource) -> Path:
    """Return the path of the plans that were shown for the model of ``source``, wherever its other files go."""
    return output_paths(source.location, None).frontier


def check_frontier_target(request: OptimizeRequest) -> None:
    """Raise as :func:`check_targets` for a file in the place of the frontier that is not one of memopt's.

    The plans that were shown last are replaced without ``--force``: they can be searched again.
    """
    path = frontier_path(request.source)
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
        shown = read_frontier(frontier_path(request.source))
    except FileNotFoundError:
        return request
    check_pick(number, len(shown.points))
    _check_options(request.search.options, shown.options)
    compilers = {point.plan.compile.backend for point in shown.points if point.plan.compile is not None}
    if request.backend not in (None, *compilers):
        raise UsageError(
            f"`--pick` takes a plan that was shown, and {request.backend} compiles none of them",
            hint="Leave `--compile` out, or add `--frontier` to search again.",
        )
    is_exact = not any(segment.inexact for segment in shown.points[number - 1].plan.everywhere)
    if not is_exact and not request.search.options.allow_inexact:
        raise UsageError(
            f"the plan of `--pick {number}` is not exact", hint="Add `--allow-inexact`, or pick another plan."
        )
    asked, then = request.settings, shown.settings
    _check_code(asked, then)
    _check_inputs(request, shown)
    options = replace(request.search.options, level=shown.options.level)
    taken = left_out(asked, then)
    notes = (*request.search.notes, *[f"As when the plans were shown: {typed(then, taken)}."] * bool(taken))
    return replace(
        request,
        spec=request.spec or typed_inputs(shown.header, frontier_path(request.source)),
        settings=filled_in(asked, then),
        search=replace(request.search, options=options, requested_level=options.level, notes=notes),
        shown=shown,
    )


def _check_code(asked: StepSettings, then: StepSettings) -> None:
    """Raise :class:`UsageError` if ``asked`` leaves out code that the step of the shown plans, ``then``, names."""
    if code := naming_code(asked, then):
        flags = typed(then, code)
        raise UsageError(
            f"the plans were shown for a step with {flags}, and a file beside the model names no code that is run",
            hint=f"If that is your code, add {flags}.",
        )


def _check_inputs(request: OptimizeRequest, shown: ShownFrontier) -> None:
    """Raise :class:`UsageError` if ``request`` leaves out the file or the script that made the inputs of ``shown``."""
    spec = shown.header.spec
    files = {"--input-data": spec.data_file, "--input-script": spec.script}
    flag = next((quoted_flag(flag, path) for flag, path in files.items() if path), "")
    if flag and not (request.spec is not None and request.spec.has_inputs):
        raise UsageError(
            f"the plans were shown for a step with `{flag}`, and a file beside the model names no other file",
            hint=f"If those are your inputs, add `{flag}`.",
        )


def _check_options(asked: SearchOptions, then: SearchOptions) -> None:
    """Raise :class:`UsageError` where ``asked`` sets an option to another value than ``then``, the search shown."""
    plain = resolve({}).options
    for name in (f.name for f in fields(SearchOptions)):
        value, before = getattr(asked, name), getattr(then, name)
        if value not in (getattr(plain, name), before):
            raise UsageError(
                f"`--pick` takes a plan that was shown, and its {name.removesuffix('s').replace('_', ' ')} was "
                f"{_text(before)}, not {_text(value)}",
                hint=f"Leave the option out. {_AGAIN}",
            )


def _text(value: Any) -> str:
    """Return the ``value`` of an option about as it is typed."""
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def check_shown(request: OptimizeRequest, prepared: Prepared) -> None:
    """Raise :class:`UsageError` where the plans to pick from were shown for another step than that of ``prepared``."""
    if request.shown is None:
        return
    found = differences(_terms(request.shown), _terms(_shown(request, prepared)))
    if found:
        raise UsageError(
            f"the plans in {frontier_path(request.source)} were shown for another step: "
            + "; ".join(f"{d.name} {d.before} → {d.after}" for d in found),
            hint=_AGAIN,
        )


def check_original(request: OptimizeRequest, measured: object) -> None:
    """Raise :class:`UsageError` if the original's tensor peak, ``measured`` now, differs from when plans were shown.

    Hashes do not cover code: a function that builds the model or its inputs may have changed since.
    """
    assert request.shown is not None, "a plan is picked from it"
    then = [point.outcome for point in request.shown.points if point.plan.is_empty]
    peaks = [found.tensor_peak_bytes for found in (*then, measured) if isinstance(found, Measurement)]
    if len(set(peaks)) > 1:
        before, now = (format_bytes(peak) for peak in peaks[-2:])
        raise UsageError(
            f"the plans in {frontier_path(request.source)} were shown for a step with a tensor peak of {before}, and "
            f"that of the model as it is has {now}",
            hint=_AGAIN,
        )


def _terms(shown: ShownFrontier) -> dict[str, str]:
    header = shown.header
    return {
        "model": _short(header.sha256) or header.model,
        "weights": _short(shown.weights_sha256) or "none",
        "entry": shown.key or "none",
        "inputs": inputs_term(header.spec),
        "input data": _short(header.spec.data_sha256) or "none",
        "device": header.device,
        "seed": str(header.seed),
        **step_terms(shown.settings),
    }


def _short(sha256: str | None) -> str:
    return "" if sha256 is None else f"with hash {sha256[:_SHOWN_DIGITS]}"


def keep_shown(request: OptimizeRequest, prepared: Prepared, found: Findings) -> list[Path]:
    """Write the frontier in ``found`` beside the model and return its path; if that fails, add a note instead.

    A read-only disk, say, is no reason to fail: without the file, ``--pick`` only has to search again.
    """
    path = frontier_path(request.source)
    text = frontier_json(replace(_shown(request, prepared), points=tuple(found.frontier)))
    try:
        check_frontier_target(request)
        write_all({path: content(text)}, force=True)
    except (UsageError, WriteError) as err:
        found.notes.append(f"The plans are not kept, so `--pick` will search again: {err.message}.")
        return []
    return [path]


def _shown(request: OptimizeRequest, prepared: Prepared) -> ShownFrontier:
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
