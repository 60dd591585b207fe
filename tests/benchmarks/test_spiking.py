"""The table of spiking networks has a place on its page, and a row for every network."""

from __future__ import annotations

import pytest

from benchmarks.spiking import PAGE, REALISTIC, ROOT, with_table
from tests.examples.test_spiking_nets import SMALL


def test_the_table_goes_between_its_comments_again_and_again() -> None:
    page = PAGE.read_text(encoding="utf-8")
    once = with_table(page, [["`CSNN`", "2 MiB", "1 MiB (0.50×)", "1.20×", "`CSNN -i 2x1x28x28`"]])
    assert "| `CSNN` | 2 MiB | 1 MiB (0.50×) | 1.20× | `CSNN -i 2x1x28x28` |" in once
    again = with_table(once, [["`OwnNet`", "", "", "", ""]])
    assert "CSNN -i 2x1" not in again
    assert again[: again.index("| network")] == page[: page.index("| network")]
    with pytest.raises(SystemExit, match="0 places"):
        with_table("# No table", [])


def test_every_network_is_tested_measured_and_in_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    code = (ROOT / "examples" / "spiking_nets.py").read_text(encoding="utf-8")
    assert list(SMALL) == list(REALISTIC)
    for name, inputs in REALISTIC.items():
        assert f"class {name}(nn.Module)" in code
        assert f"`{name} -i {inputs}`" in page
