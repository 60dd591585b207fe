"""What ``--for`` takes: names of cards, and files that describe one."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt_cli.errors import UsageError
from memopt_cli.records import AllocatorRules, DeviceProfile
from memopt_cli.search.estimation.cards import CARDS, device_profile

GOOD = "memory_bytes: 23GiB\nbandwidth_bytes_per_s: 1.0e+12\nflops_per_s: {fp32: 8.0e+13, bf16: 1.6e+14}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize("name", CARDS)
def test_every_card(name: str) -> None:
    card = device_profile(name.upper())
    assert card.name == name
    assert "NVIDIA" in card.source
    assert card.flops_per_s["fp64"] <= card.flops_per_s["fp32"] < card.flops_per_s["fp16"]
    assert 14 * 2**30 < card.memory_bytes < 141 * 2**30
    assert 3e11 <= card.bandwidth_bytes_per_s <= 5e12


def test_sizes_in_names_are_those_of_the_cards() -> None:
    sized = {card: float(card.rpartition("-")[2].removesuffix("gb")) for card in CARDS if card.endswith("gb")}
    assert len(sized) > 8
    assert all(0.85 * gb < CARDS[card].memory_bytes / 2**30 < gb for card, gb in sized.items())


@pytest.mark.parametrize(("typed", "meant"), [("a100", "a100-40gb"), ("rtx-4090", "rtx4090"), ("h100_80gb", "h100")])
def test_a_name_that_is_not_known(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match="unknown card") as error:
        device_profile(typed)
    assert meant in error.value.hint.partition("?")[0]
    assert all(card in error.value.hint for card in CARDS)


def test_a_file(file: Path) -> None:
    rates = {"fp32": 8e13, "bf16": 1.6e14}
    assert device_profile(str(file)) == DeviceProfile(
        name="mine", memory_bytes=23 * 2**30, bandwidth_bytes_per_s=1e12, flops_per_s=rates
    )
    file.write_text(GOOD + "name: other\nlaunch_s: 0.001\nallocator: {block_bytes: 256}\nlibrary_bytes: 1MiB\n")
    found = device_profile(str(file))
    assert (found.name, found.launch_s, found.library_bytes) == ("other", 0.001, 2**20)
    assert found.allocator == AllocatorRules(block_bytes=256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "lacks the key 'memory_bytes'"),
        ("- 1", "must hold keys and values"),
        (GOOD + "cores: 8", "unknown key 'cores'"),
        (GOOD.replace("23GiB", "-1"), "memory_bytes is -1"),
        (GOOD.replace("23GiB", "0"), "memory_bytes is 0; it must be 1 or more"),
        (GOOD.replace("23GiB", "much"), "memory_bytes: 'much' is not a memory size"),
        (GOOD.replace("23GiB", "[1]"), "memory_bytes must be int"),
        (GOOD.replace("23GiB", "true"), "memory_bytes must be int"),
        (GOOD.replace("1.0e+12", ".nan"), "bandwidth_bytes_per_s is nan"),
        (GOOD.replace("1.0e+12", ".inf"), "bandwidth_bytes_per_s is inf"),
        (GOOD.replace("1.0e+12", "0.0"), "bandwidth_bytes_per_s is 0; it must be 1 or more"),
        (GOOD.replace("1.0e+12", "1.0e-300"), "bandwidth_bytes_per_s is 1e-300"),
        (GOOD.replace("8.0e+13", "1.0e-300"), "flops_per_s.fp32 is 1e-300"),
        (GOOD.replace("8.0e+13", ".nan"), "flops_per_s.fp32 is nan"),
        (GOOD.replace("8.0e+13", "-5"), "flops_per_s.fp32 is -5"),
        (GOOD.replace("fp32", "fp8"), "must be one of fp64"),
        (GOOD.replace("fp32", "tf32"), "flops_per_s needs an entry fp32"),
        (GOOD.replace("fp32: 8.0e+13", "[1]: 2"), "mine.yaml"),
        (GOOD + "launch_s: -1", "launch_s is -1"),
        (GOOD + "launch_s: .nan", "launch_s is nan"),
        (GOOD + "allocator: {block_bytes: 0}", "block_bytes is 0"),
        (GOOD + "allocator: {block_bytes: 1e400}", "block_bytes"),
        (GOOD + "name: 7", "name must be text"),
        (GOOD + 'name: ""', "name is ''"),
        (GOOD + 'name: "mine\\nit fits"', "it must be one line"),
        (GOOD + "name: " + 70 * "x", "it must be one line of 1 to 60 characters"),
        (GOOD + "source: " + "[" * 3000 + "]" * 3000, "is not valid YAML"),
        (GOOD + "source: !!python/object/apply:os.system [ls]", "is not valid YAML"),
        (GOOD + "source: &a [*a]", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_profile(text: str, why: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        device_profile(str(file))
    assert why in error.value.message
    assert error.value.hint
    assert "\n" not in error.value.message + error.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*gone\.yaml"):
        device_profile(str(tmp_path / "gone.yaml"))


def test_a_file_with_a_long_name(file: Path) -> None:
    long = file.rename(file.with_name(200 * "x" + ".yaml"))
    assert device_profile(str(long)).name == 60 * "x"
