"""A short run of the fuzz of peaks."""

from __future__ import annotations

import pytest

from fuzz.cases import drawn_case, from_text
from fuzz.peaks import outcome
from tests.rows import quick


@pytest.mark.slow
@pytest.mark.parametrize("first", quick([0, 10], {0}))
def test_predicted_counted_and_allocated_peaks_agree(first: int) -> None:
    found = {index: outcome(drawn_case(1, index)) for index in range(first, first + 10)}
    assert {index: result for index, result in found.items() if result.is_failure} == {}
    assert sum(result.kind == "same" for result in found.values()) > len(found) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        # What a batch norm makes of a transposed batch lies otherwise on real tensors, and the layer behind copies it.
        '{"blocks":[{"kind":"frozen batch norm"},{"kind":"gradient hook","segments":[{"path":""}]}]}',
        # A parameter that forward writes is seen in the dry run too: the segment runs plainly from then on.
        '{"blocks":[{"kind":"written","segments":[{"path":""}]},{"kind":"written"}]}',
        # Positions of generators have data in a dry run too.
        '{"blocks":[{"kind":"generator of PyTorch\'s","segments":[{"path":""}]}]}',
        '{"blocks":[{"kind":"gradient","segments":[{"path":""}]},{"kind":"pullback","segments":[{"path":""}]}]}',
        '{"blocks":[{"kind":"sum so far"},{"kind":"gelu","segments":[{"path":""}]}]}',
    ],
)
def test_the_peaks_of_one_case_agree(text: str) -> None:
    found = outcome(from_text(text))
    assert (found.kind, found.reason) == ("same", "")
