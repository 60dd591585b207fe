"""The table of spiking networks on its page has a row for every network."""

from __future__ import annotations

from benchmarks.spiking import PAGE, REALISTIC, ROOT
from tests.examples.test_spiking_nets import SMALL


def test_every_network_is_tested_measured_and_in_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    code = (ROOT / "examples" / "spiking_nets.py").read_text(encoding="utf-8")
    assert list(SMALL) == list(REALISTIC)
    for name, inputs in REALISTIC.items():
        assert f"class {name}(nn.Module)" in code
        assert f"`{name} -i {inputs}`" in page
