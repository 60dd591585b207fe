"""A short run of the fuzz of peaks."""

from __future__ import annotations

import pytest

from memopt_cli.records import SegmentPlan
from tests.fuzz.cases import Case, drawn_case
from tests.fuzz.models import Block
from tests.fuzz.peaks import LEFT_OUT, Peaks, outcome


@pytest.mark.slow
def test_predicted_counted_and_allocated_peaks_agree() -> None:
    found = {index: outcome(drawn_case(1, index)) for index in range(20)}
    assert {index: result for index, result in found.items() if result.is_failure} == {}
    assert sum(result.kind == "same" for result in found.values()) > 10


@pytest.mark.parametrize(
    ("peaks", "agree"), [((100, 100, 100), True), ((90, 100, 100), False), ((100, 100, 90), False), ((9, 9, 99), True)]
)
def test_agreement(peaks: tuple[int, int, int], agree: bool) -> None:
    assert Peaks(*peaks).agree is agree


def test_what_is_left_out_says_why() -> None:
    kind, why = next(iter(LEFT_OUT.items()))
    found = outcome(Case(blocks=(Block(kind=kind),), segments=(SegmentPlan(path=""),)))
    assert why in found.reason
