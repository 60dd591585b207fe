"""Shrink a failing case: leave out blocks, parts of the plan and parts of the training as long as it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from fuzz.cases import Case
from fuzz.models import Block
from fuzz.scenarios import PLAIN, Scenario
from memopt_cli.records import SegmentPlan


def shrunk(case: Case, still_fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case found that ``still_fails``, by leaving out one part of ``case`` after another."""
    pending = _smaller(case)
    while (smaller := next(pending, None)) is not None:
        if smaller.is_comparable and still_fails(smaller):
            case, pending = smaller, _smaller(smaller)
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield ``case`` with one part left out, the largest parts first."""
    for blocks in _fewer(case.blocks):
        yield replace(case, blocks=blocks)
    for segments in _fewer_segments(case.segments):
        yield replace(case, segments=segments)
    if case.packed:
        yield replace(case, packed=False)
    if case.place != "device":
        yield replace(case, place="device")
    for scenario in _plainer(case.scenario):
        yield replace(case, scenario=scenario)
    for steps in range(1, case.steps):
        yield replace(case, steps=steps)
    if case.seed:
        yield replace(case, seed=0)


def _fewer(blocks: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    for at, block in enumerate(blocks):
        before, behind = blocks[:at], blocks[at + 1 :]
        yield (*before, *behind)
        if block.inner:
            yield (*before, *block.inner, *behind)
        for inner in _fewer(block.inner):
            yield (*before, replace(block, inner=inner), *behind)
        for segments in _fewer_segments(block.segments):
            yield (*before, replace(block, segments=segments), *behind)


def _fewer_segments(segments: tuple[SegmentPlan, ...]) -> Iterator[tuple[SegmentPlan, ...]]:
    for at, segment in enumerate(segments):
        before, behind = segments[:at], segments[at + 1 :]
        yield (*before, *behind)
        plain = SegmentPlan(path=segment.path)
        if segment != plain:
            yield (*before, plain, *behind)
        if segment.place != "device":
            yield (*before, replace(segment, place="device"), *behind)
        for kept in segment.keep:
            yield (*before, replace(segment, keep=tuple(k for k in segment.keep if k != kept)), *behind)
        if segment.compressor != "null":
            yield (*before, replace(segment, compressor="null"), *behind)


def _plainer(scenario: Scenario) -> Iterator[Scenario]:
    for field in fields(Scenario):
        there, plain = getattr(scenario, field.name), getattr(PLAIN, field.name)
        if there != plain:
            yield replace(scenario, **{field.name: plain})
        if isinstance(there, tuple) and len(there) > 1:
            for name in there:
                yield replace(scenario, **{field.name: tuple(other for other in there if other != name)})
