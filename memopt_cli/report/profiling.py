"""Text of ``memopt profile``: the peak, a plot of the step, and which modules hold the memory."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from rich.table import Table

from memopt_cli.records import (
    PACKING,
    DeviceEstimate,
    Measurement,
    ModuleUse,
    Phase,
    StepProfile,
    TimeUse,
    to_data,
)
from memopt_cli.report import rank
from memopt_cli.report.lines import plain_table, room_in_words
from memopt_cli.text.units import format_bytes, format_seconds

_PLOT_COLUMNS = 72
_ROWS = 6
"""Height of the plot in lines."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_MODULES = 24
"""Maximum number of rows in the table of modules."""
_SAVED = 10
"""Maximum number of rows in the table of saved tensors."""
_SEGMENTS = 8
"""Maximum number of segments that the table of times names."""
_ESTIMATE = (
    "an estimate, from the step's operators on tensors without data: peaks in the blocks of the device's allocator, "
    "with what its matrix library keeps and without other kernel workspace; times by a roofline"
)


def headline(profile: StepProfile) -> Iterator[str]:
    """Yield the peaks of ``profile``, the time of a step, and the operator that runs at the peak."""
    yield from rank.headline(profile)
    match profile.measurement:
        case _ if profile.estimate is not None:
            yield describe_estimate(profile.estimate)
        case Measurement() as measured:
            allocated = f"allocated peak {format_bytes(measured.allocated_peak_bytes)}"
            tensor = f"tensor peak {format_bytes(measured.tensor_peak_bytes)}"
            yield f"{allocated}, {tensor}, step {format_seconds(measured.step_s)}"
        case _ if profile.rank is not None:
            pass
        case _:
            allocated = f"allocated peak {format_bytes(profile.peak.allocated_bytes)}"
            yield f"{allocated}, tensor peak {format_bytes(profile.tensor_peak_bytes)}: estimated, the step was not run"
    if profile.compiled is not None:
        peak = format_bytes(profile.compiled.allocated_peak_bytes)
        step = format_seconds(profile.compiled.step_s)
        yield f"compiled by {profile.compiled.backend}: allocated peak {peak}, step {step}"
    yield f"the peak is reached {_peak_instant_in_words(profile)}"


def describe_estimate(estimate: DeviceEstimate) -> str:
    """Return ``estimate`` in one line: ``estimated for a100-40gb: allocated peak 1.2 GiB, step …; it fits: …``."""
    allocated = f"allocated peak {format_bytes(estimate.allocated_peak_bytes)}"
    step = f"step {format_seconds(estimate.step_s)}"
    return f"estimated for {estimate.device}: {allocated}, {step}; {room_in_words(estimate)}"


def _peak_instant_in_words(profile: StepProfile) -> str:
    if profile.peak.op < 0:
        return "before the step begins"
    where = f" of {_module_name(profile, profile.peak.module)}" if profile.peak.module else ""
    peak = profile.peak
    return f"in {peak.phase}{where}, while {peak.name} runs: operator {peak.op + 1} of {_count(profile)}"


def _module_name(profile: StepProfile, path: str) -> str:
    """Return ``path``, and the module's class where its own name is only a number: ``layers.1.2 (Linear)``."""
    kind = next((use.class_name for use in profile.modules if use.path == path), "")
    return f"{path} ({kind})" if kind and path.rpartition(".")[2].isdigit() else path


def _count(profile: StepProfile) -> int:
    return len(profile.trace.ops)


def parts(profile: StepProfile) -> Iterator[Table | str]:
    """Yield the plot of the step and its tables; some have no rows."""
    yield plot(profile, _PLOT_COLUMNS)
    if profile.rank is not None:
        yield rank.collective_table(profile.rank)
    yield _phase_table(profile)
    yield _category_table(profile)
    yield _time_table(profile)
    yield _module_table(profile)
    yield _saved_table(profile)


def plot(profile: StepProfile, columns: int) -> str:
    """Return a text plot of the bytes alive during the step, with its phases below.

    Its axis is time where that is known: an optimizer's update takes many operators, and little time.  It is the
    operators elsewhere.
    """
    seconds = [op.seconds for op in profile.trace.ops]
    has_times = any(seconds)
    widths = [0.0, *seconds] if has_times else [1.0] * len(profile.live_bytes)  # the first: before the step
    levels = _resample(profile.live_bytes, widths, min(columns, len(widths)))
    top = max(levels) or 1
    lines = []
    for row in reversed(range(_ROWS)):
        eighths = (round(8 * (_ROWS * level / top - row)) for level in levels)
        label = {_ROWS - 1: format_bytes(top), 0: "0"}.get(row, "")
        lines.append(f"{label:>10} │" + "".join(_BLOCKS[min(8, max(0, n))] for n in eighths).rstrip())
    return "\n".join(
        [*lines, f"{'':>10} └{_phases(profile, seconds if has_times else [1.0] * _count(profile), len(levels))}"]
    )


def _resample(values: Sequence[int], widths: Sequence[float], columns: int) -> list[int]:
    """Return a number for each of ``columns``: the largest of ``values`` in it, which are as wide as ``widths``."""
    levels, total, done = [0] * columns, sum(widths), 0.0
    for value, width in zip(values, widths, strict=True):
        first = min(columns - 1, int(columns * done / total))
        done += width
        last = max(first, min(columns, math.ceil(columns * done / total)) - 1)
        for column in range(first, last + 1):
            levels[column] = max(levels[column], value)
    return levels


def _phases(profile: StepProfile, widths: Sequence[float], columns: int) -> str:
    """Return the axis of the plot, such as ``forward─────┴backward────``, to scale."""
    width_by_phase: dict[Phase, float] = defaultdict(float)
    for op, width in zip(profile.trace.ops, widths, strict=True):
        width_by_phase[op.phase] += width
    text, done = "", 0.0
    for name, width in width_by_phase.items():
        done += width
        end = int(columns * done / sum(widths))
        text += name[: end - len(text)].ljust(end - len(text), "─")
    return text


def _category_table(profile: StepProfile) -> Table:
    table = plain_table("at the peak", "", "", names=["at the peak"])
    sizes = {name.removesuffix("_bytes"): size for name, size in to_data(profile.breakdown).items()}
    total = profile.peak.allocated_bytes
    for name, size in {**sizes, "kernel workspace": profile.workspace_bytes}.items():
        if size:
            table.add_row(name, format_bytes(size), _share(size, total))
    return table


def _phase_table(profile: StepProfile) -> Table:
    """Return a table of the peak of each phase: recorded, and also measured if the step was run."""
    measured = profile.measurement.phases if isinstance(profile.measurement, Measurement) else ()
    allocated = {peak.phase: format_bytes(peak.allocated_peak_bytes) for peak in measured}
    recorded = "predicted\npeak" if profile.fake else "recorded\npeak"
    table = plain_table("phase", recorded, *(("allocated\npeak",) if measured else ()), names=["phase"])
    for peak in profile.phases:
        cells = (allocated.get(peak.phase, "–"),) if measured else ()
        table.add_row(peak.phase, format_bytes(peak.allocated_peak_bytes), *cells)
    return table


def _time_table(profile: StepProfile) -> Table:
    """Return a table of what the time of a step goes to, recomputation by segment; without rows if it was not timed."""
    table = plain_table("time of the step", "", "", names=["time of the step"])
    total = sum(part.seconds for part in profile.times)
    for name, seconds in time_rows(profile.times, functools.partial(_module_name, profile)):
        table.add_row(name, format_seconds(seconds), _share(seconds, total))
    return table


def time_rows(times: Sequence[TimeUse], named: Callable[[str], str] = str) -> Iterator[tuple[str, float]]:
    """Yield the name and the seconds of each part in ``times``; of segments, the longest are ``named``, indented."""
    uses_by_name: dict[str, list[TimeUse]] = {}
    for part in times:
        uses_by_name.setdefault(part.name, []).append(part)
    for name, uses in uses_by_name.items():
        yield name, sum(use.seconds for use in uses)
        segments = sorted((use for use in uses if use.segment is not None), key=lambda use: -use.seconds)
        for use in segments[:_SEGMENTS]:
            yield f"  of {named(use.segment or '(model)')}", use.seconds
        if others := segments[_SEGMENTS:]:
            yield f"  {len(others)} more", sum(use.seconds for use in others)


def _module_table(profile: StepProfile) -> Table:
    """Return a table of the module tree, opened where most memory is held."""
    timed = any(use.seconds for use in profile.modules)
    time = "time" if profile.estimate is None else "estimated\ntime"
    headings = ("module", "", "held at\nthe peak", "of it", "left by\nforward", *((time,) if timed else ()))
    table = plain_table(*headings, names=["module"], words=[""])
    depths = {"": 0}  # of the rows above, whose names below are left out
    for use in _modules_to_show(profile.modules):
        above = nearest(use.path, depths)
        depth = depths[use.path] = depths[above] + 1 if use.path else 0
        name, indent = below(use.path, above) or "(model)", "  " * depth
        cells = (
            format_bytes(use.held_bytes),
            _share(use.held_bytes, profile.peak.allocated_bytes),
            format_bytes(use.saved_bytes),
        )
        seconds = (format_seconds(use.seconds),) if timed else ()
        calls = f" ×{use.calls}" if use.calls > 1 else ""
        table.add_row(indent + name, use.class_name + calls, *cells, *seconds)
    return table


def _modules_to_show(modules: tuple[ModuleUse, ...]) -> list[ModuleUse]:
    """Return the modules to show, at most :data:`_MODULES`: those that hold most are opened first."""
    children: dict[str, list[ModuleUse]] = {}
    paths = {use.path for use in modules}
    for use in modules:
        if use.path:
            children.setdefault(nearest(use.path, paths), []).append(use)
    shown: set[str] = {use.path for use in modules if not use.path}
    waiting = [use for use in modules if not use.path]
    while waiting:
        widest = max(waiting, key=lambda use: (use.held_bytes, use.saved_bytes))
        waiting.remove(widest)
        inner = children.get(widest.path, [])
        if len(shown) + len(inner) <= _MODULES:
            shown |= {use.path for use in inner}
            waiting += inner
    order = {path: position for position, path in enumerate(_depth_first("", children))}
    return sorted((use for use in modules if use.path in shown), key=lambda use: order[use.path])


def nearest(path: str, paths: Collection[str]) -> str:
    """Return the nearest module above ``path`` that is among ``paths``, or the root: a container is never called."""
    while path:
        path = path.rpartition(".")[0]
        if path in paths:
            break
    return path


def below(path: str, above: str) -> str:
    """Return ``path`` as it reads under the module ``above``: ``downs.0`` under the root if ``downs`` is not a row."""
    return path.removeprefix(f"{above}.") if above else path


def _depth_first(path: str, children: dict[str, list[ModuleUse]]) -> Iterator[str]:
    yield path
    for child in children.get(path, []):
        yield from _depth_first(child.path, children)


def _saved_table(profile: StepProfile) -> Table:
    table = plain_table("kept for backward", "", "in", "", names=["kept for backward"], words=["", "in"])
    for saved in profile.saved[:_SAVED]:
        others = f" and {saved.savers - 1} more" if saved.savers > 1 else ""
        origin = f"from {saved.made_by.removeprefix('aten::')}" if saved.made_by else "an input"
        table.add_row(
            f"{format_bytes(saved.nbytes):>9}",
            f"{origin}, by {saved.op.removeprefix('aten::')}{others}",
            _module_name(profile, saved.module),
            "" if saved.compressor == "null" else f"packs into {format_bytes(saved.packed_bytes)} ({saved.compressor})",
        )
    return table


def remarks(profile: StepProfile) -> Iterator[str]:
    """Yield the totals of ``profile``, and notes on how they were found."""
    total = sum(saved.nbytes for saved in profile.saved)
    spared = total - sum(saved.packed_bytes for saved in profile.saved)
    packed = sum(saved.nbytes for saved in profile.saved if saved.op == PACKING)
    packing = f"; a plan that packs could spare {format_bytes(spared)} of it" if spared else ""
    if packed:
        packing = f", {format_bytes(packed)} of it packed"
    yield f"{len(profile.saved)} tensors, {format_bytes(total)}, are kept for backward{packing}"
    if profile.flops:
        yield f"{profile.flops / 1e9:,.1f} GFLOP in products, convolutions and attention"
    if isinstance(profile.measurement, Measurement):
        recorded_on = "on tensors without data" if profile.fake else "on a real run"
        yield f"recorded: allocated peak {format_bytes(profile.peak.allocated_bytes)}, {recorded_on}"
    if profile.rank is not None:
        yield rank.NOTE
    if profile.estimate is not None:
        yield _ESTIMATE
    yield from profile.notes


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"
