"""Sentences and table rows of ``memopt check`` and ``memopt compare``, shared by all report formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from memopt_cli.inputs.spec_text import format_layout
from memopt_cli.records import SKIPS_LAYERS, Change, Comparison, Difference, PeakPlace, SavedTensor, Verdict
from memopt_cli.report.rank import TENSOR_PEAK
from memopt_cli.text.paths import module_name
from memopt_cli.text.units import format_bytes, format_count, format_seconds

_NAMES = {"peak": "tensor peak", "allocated": "allocated peak", "offloaded": "waiting elsewhere"}
_MODULES = 10
"""Maximum number of rows in the table of modules."""
_NOTABLE = 0.01
"""A change of the allocated peak, which does not repeat, and a tensor are named from this share of the peak on."""
_NAMED = 3
"""Maximum number of modules, segments or tensors that a sentence names."""

METRIC_HEADINGS = ("", "before", "now", "change")
MODULE_HEADINGS = ("module", "", "before", "now", "change")


def headline(comparison: Comparison) -> Iterator[str]:
    """Yield each limit that ``comparison`` exceeds; if it exceeds none, how the peak of each part changed."""
    for verdict in comparison.exceeded:
        yield describe_verdict(verdict)
    if not comparison.exceeded:
        yield from map(_describe_peaks, comparison.parts)


def _describe_peaks(part: Comparison) -> str:
    """Return the changes of the tensor peak of ``part``, which exceeds no limit, and of the allocated peak, if any."""
    change = {change.metric: change for change in part.changes}
    change_text = _instant_in_words(part.at) + _change(change["peak"])
    allocated = change.get("allocated")
    if allocated is not None and abs(allocated.after - allocated.before) > _NOTABLE * allocated.before:
        change_text += f"; allocated peak {_difference(allocated)}"
    if not part.verdicts:
        return change_text
    if change["peak"].after <= change["peak"].before:
        return f"no regression: {change_text}"
    limits = [verdict.limit for verdict in part.verdicts]
    unlimited = "" if any(limit.metric == "peak" for limit in limits) else " (the tensor peak has no limit)"
    return f"within {', '.join(limit.text for limit in limits)}{unlimited}: {change_text}"


def describe_verdict(verdict: Verdict) -> str:
    """Return ``verdict`` as a sentence, such as ``tensor peak 12.0 MiB → 12.1 MiB (…), within the limit peak:5%``."""
    change = _instant_in_words(verdict.at) + _change(verdict.change)
    if verdict.exceeded:
        return f"regression: {change}, past the limit {verdict.limit.text}"
    return f"{change}, within the limit {verdict.limit.text}"


def grown_parts(comparison: Comparison) -> Iterator[Comparison]:
    """Yield the parts of ``comparison`` for shorter inputs that exceed a limit; each gets a section."""
    return (part for part in comparison.shorter if part.exceeded)


def reasons(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on what explains the change in ``comparison``, and on what may mislead."""
    if comparison.at:
        yield from _causes(comparison)
        return
    if comparison.layout is not None:
        yield f"{TENSOR_PEAK}: {comparison.layout.ranks} ranks, {format_layout(comparison.layout)}"
    if comparison.unlike:
        yield f"not like for like: {_list_differences(comparison.unlike)}"
    yield from _causes(comparison)
    yield from circumstances(comparison)


def _causes(comparison: Comparison) -> Iterator[str]:
    plan = {"dropped": comparison.plan.dropped, "added": comparison.plan.added, "changed": comparison.plan.changed}
    for what, paths in plan.items():
        if paths:
            names = _first_few([*map(module_name, paths)])
            yield f"plan: {format_count(len(paths), 'segment')} {what} ({names})"
    if comparison.plan.packing != "same":
        yield f"plan: packing of what is saved {comparison.plan.packing}"
    if comparison.plan.sending != "same":
        yield f"plan: sending away of what is saved {comparison.plan.sending}"
    yield from _size_changes(comparison)
    yield from _place_lines(comparison)
    notable_bytes = _NOTABLE * comparison.changes[0].after
    for saved in [saved for saved in comparison.new_saved if saved.nbytes >= notable_bytes][:_NAMED]:
        yield f"new among the largest tensors kept for backward: {format_bytes(saved.nbytes)}, {_origin(saved)}"
    for grown in [grown for grown in comparison.grown_saved if grown.saved.nbytes >= notable_bytes][:_NAMED]:
        sizes = f"{format_bytes(grown.before_bytes)} → {format_bytes(grown.saved.nbytes)}"
        yield f"larger among the tensors kept for backward: {sizes}, {_origin(grown.saved)}"
    for rename in comparison.renames:
        names = f"{module_name(rename.before)} → {module_name(rename.after)}"
        yield f"renamed: {names} ({format_count(rename.modules, 'module')}), which takes no memory"


def _origin(saved: SavedTensor) -> str:
    """Return the operators that made and kept ``saved``, and the module."""
    made = f"made by {saved.made_by.removeprefix('aten::')}" if saved.made_by else "an input"
    return f"{made}, kept by {saved.op.removeprefix('aten::')} of {module_name(saved.module)}"


def growth(comparison: Comparison) -> Iterator[str]:
    """Yield up to two sentences on ``comparison``: the change of each category, and the modules that grew most."""
    categories = [change for change in comparison.changes if change.metric not in ("peak", "step", *_NAMES)]
    changed = [change for change in categories if change.after != change.before]
    changed.sort(key=lambda change: change.before - change.after)
    if changed:
        yield "by category: " + ", ".join(f"{change.metric} {_format_change(change)}" for change in changed)
    modules = [change for change in comparison.modules if change.after_bytes > change.before_bytes]
    if modules:
        sizes = [(m, _signed_bytes(m.after_bytes - m.before_bytes)) for m in modules]
        yield "by module: " + _first_few([f"{module_name(m.path)} ({m.class_name}) {size}" for m, size in sizes])


def metric_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the cells under :data:`METRIC_HEADINGS` for every metric of ``comparison`` that is not zero."""
    shown = (change for change in comparison.changes if change.before or change.after)
    return [(_name(c), _amount(c, c.before), _amount(c, c.after), _difference(c)) for c in shown]


def module_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the cells under :data:`MODULE_HEADINGS` for the modules whose own bytes at the peak changed most."""
    changed = [m for m in comparison.modules if m.after_bytes != m.before_bytes]
    most = sorted(changed, key=lambda m: -abs(m.after_bytes - m.before_bytes))[:_MODULES]
    return [
        (
            module_name(m.path) + (f" (was {m.was})" if m.was else ""),
            m.class_name,
            format_bytes(m.before_bytes),
            format_bytes(m.after_bytes),
            _signed_bytes(m.after_bytes - m.before_bytes),
        )
        for m in comparison.modules
        if m in most
    ]


# ---------------------------------------------------------------------------------------------- sentences


def _size_changes(comparison: Comparison) -> Iterator[str]:
    """Yield the modules whose parameters or buffers changed in size, largest changes first."""
    for kind in ("parameters", "buffers"):
        changed = [(m, m.growth_bytes[kind]) for m in comparison.modules if kind in m.growth_bytes]
        changed.sort(key=lambda pair: -abs(pair[1]))
        if changed:
            yield f"{kind} changed: " + _first_few(
                [f"{module_name(m.path)} ({m.class_name}) {_signed_bytes(n)}" for m, n in changed]
            )


def _place_lines(comparison: Comparison) -> Iterator[str]:
    before, after = comparison.peak_before, comparison.peak_after
    if before is None or after is None:
        return
    if comparison.peak_moved:
        yield f"the tensor peak moved from {_place_in_words(before)} to {_place_in_words(after)}"
    else:
        yield f"the tensor peak is reached in {_place_in_words(after)}, as before"


def measured_elsewhere(comparison: Comparison) -> Iterator[str]:
    """Yield the differences of ``comparison`` in versions and machines, as one sentence, if there are any."""
    if comparison.surroundings:
        yield f"measured elsewhere than before: {_list_differences(comparison.surroundings)}"


def circumstances(comparison: Comparison) -> Iterator[str]:
    """Yield differences outside the model, such as the version of PyTorch, and what to do about each."""
    if Path(comparison.before.model).name != Path(comparison.after.model).name:
        yield f"another file than before: {comparison.before.model} → {comparison.after.model}"
    if comparison.code:
        yield f"code: {comparison.code}"
    yield from measured_elsewhere(comparison)
    yield from comparison.notes
    if not comparison.exceeded:
        peaks = [part.changes[0] for part in comparison.parts]
        skips_layers = any(SKIPS_LAYERS in note for note in comparison.notes)
        if comparison.verdicts and not skips_layers and any(peak.after < peak.before for peak in peaks):
            yield "record the baseline again to keep what was gained"
        return
    if any(d.name in ("torch", "memopt") for d in comparison.surroundings):
        yield "record a baseline of the old model with these versions to see how much of it is theirs"
    if comparison.before.sha256 is not None and comparison.before.sha256 == comparison.after.sha256:
        yield "the model file is the same as before"


def _place_in_words(place: PeakPlace) -> str:
    if not place.op:
        return "what exists before the step"
    return f"{place.phase} of {module_name(place.module)} ({place.op.removeprefix('aten::')})"


def _list_differences(differences: Sequence[Difference]) -> str:
    return ", ".join(f"{d.name} {d.before} → {d.after}" for d in differences)


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


# ---------------------------------------------------------------------------------------------- amounts


def _instant_in_words(at: str) -> str:
    return f"at {at} " if at else ""


def _change(change: Change) -> str:
    if change.before == change.after:
        return f"{_name(change)} {_amount(change, change.after)}, as before"
    return f"{_name(change)} {_amount(change, change.before)} → {_amount(change, change.after)} ({_difference(change)})"


def _difference(change: Change) -> str:
    """Return by how much ``change`` grew or shrank, such as ``+2.0 MiB, +16.7 %``."""
    if change.before == change.after:
        return "–"
    share = f", {100 * (change.after / change.before - 1):+.1f} %" if change.before else ""
    return _format_change(change) + share.replace("-", "−")


def _format_change(change: Change) -> str:
    difference = change.after - change.before
    return f"{'+' if difference > 0 else '−'}{_amount(change, abs(difference))}"


def _signed_bytes(size: int) -> str:
    if not size:
        return "–"  # bytes moved from one category to another, and the module's sum is the same
    return f"{'+' if size > 0 else '−'}{format_bytes(abs(size))}"


def _amount(change: Change, value: float) -> str:
    return format_seconds(value) if change.metric == "step" else format_bytes(value)


def _name(change: Change) -> str:
    return _NAMES.get(change.metric, change.metric)
