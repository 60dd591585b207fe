"""``memopt optimize --for``: a plan by estimates alone, which its file carries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt_cli
from memopt_cli.errors import OptionError
from memopt_cli.files.memopt_files import read_prediction
from memopt_cli.records import DeviceProfile

pytestmark = pytest.mark.usefixtures("in_process")

Memopt = Callable[..., Any]
STEP = "-i 4096x32 --for slow.yaml --level 1 --max-slowdown none".split()


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))


@pytest.fixture(autouse=True)
def net(memopt: Memopt) -> nn.Module:  # which enters a folder of its own
    """In ``net.pt``, with a card in ``slow.yaml``; segments pay."""
    model = nn.Sequential(layer(), layer(), layer())
    torch.save(model, "net.pt")
    Path("slow.yaml").write_text(
        "memory_bytes: 20MiB\nbandwidth_bytes_per_s: 1.0e+7\nflops_per_s: {fp32: 1.0e+9}\nlibrary_bytes: 1MiB\n"
    )
    return model


def optimized(memopt: Memopt, *flags: str) -> dict[str, Any]:
    done = memopt("optimize", "net.pt", *STEP, "--json", *flags)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return {**found, "changed": done.changed}


@pytest.mark.slow
def test_a_plan_by_estimates(memopt: Memopt) -> None:
    found = optimized(memopt)
    summary = found["summary"]
    before, after = summary["estimates"]["original"], summary["estimates"]["planned"]
    assert [row["outcome"] for row in summary["levels"]] == [None, None]
    assert [row["predicted_allocated_peak_bytes"] for row in summary["levels"]] == [
        before["allocated_peak_bytes"],
        after["allocated_peak_bytes"],
    ]
    assert after["allocated_peak_bytes"] < 0.8 * before["allocated_peak_bytes"]
    assert after["step_s"] > before["step_s"]
    assert not before["fits"]
    assert before["device"] == "slow"
    assert summary["peak_memory_mb"] is None
    assert summary["verification"]["passed"]
    assert summary["verification"]["batch"] == 2
    assert found["changed"] == {f"net.memopt.{end}" for end in ("pt", "plan.yaml", "summary.json")}
    predicted = read_prediction("net.memopt.plan.yaml")
    assert predicted.estimate.allocated_peak_bytes == after["allocated_peak_bytes"]
    assert predicted.estimate.reserved_peak_bytes == after["reserved_peak_bytes"]
    confirmed = memopt("apply", "net.pt", "net.memopt.plan.yaml", "--confirm", "-o", "there.pt")
    assert "estimated for slow, and measured on cpu:" in confirmed.out


@pytest.mark.slow
def test_every_number_is_called_an_estimate(memopt: Memopt) -> None:
    done = memopt("optimize", "net.pt", *STEP, "--dry-run")
    assert done.out.startswith("estimated for slow: ")
    assert "estimated for slow, not measured; memopt apply --confirm measures the plan on slow" in done.out
    assert "Measured" not in done.out
    assert not done.changed


RANGE = "-i BxSx32 --dim B=2 --dim S=16:2048 --for slow.yaml --level 1 --budget 75% --dry-run".split()


@pytest.mark.slow
def test_a_plan_by_length_is_estimated_at_every_range(memopt: Memopt, net: nn.Module) -> None:
    done = memopt("optimize", "net.pt", *RANGE, "--json")
    assert done.code == 0, done.err
    summary = json.loads(done.out)["summary"]
    rows, budget = summary["ranges"], summary["budget_bytes"]
    assert len(rows) > 1
    assert [row["outcome"] for row in rows] == [None] * len(rows)
    assert all(row["predicted_allocated_peak_bytes"] <= budget for row in rows)
    assert rows[-1]["predicted_allocated_peak_bytes"] == summary["estimates"]["planned"]["allocated_peak_bytes"]
    assert [row["plan"]["segments"] == [] for row in rows] == [True] + [False] * (len(rows) - 1)
    assert all(row["verification"]["passed"] for row in rows[1:])

    # The original takes as much there as `memopt profile --for` says, and more than the budget beyond.
    bound = rows[0]["up_to"]
    for length, fits in ((bound, True), (bound + 16 * 2, False)):
        profile = memopt_cli.profile(net, "BxSx32", dims={"B": 2, "S": length}, for_device="slow.yaml").result
        assert (profile.estimate.allocated_peak_bytes <= budget) is fits

    live = memopt_cli.optimize(
        net, "BxSx32", dims={"B": 2, "S": (16, 2048)}, for_device="slow.yaml", level=1, budget=0.75
    )
    assert [row.up_to for row in live.summary.ranges] == [row["up_to"] for row in rows]
    assert "~" in repr(live)
    assert memopt_cli.plan_of(net) == live.plan


@pytest.mark.slow
def test_without_a_plan_there_is_none_to_confirm(memopt: Memopt) -> None:
    done = memopt("optimize", "net.pt", *STEP, "--level", "0", "--dry-run")
    assert "estimated for slow, not measured" in done.out
    assert "--confirm" not in done.out


@pytest.mark.slow
def test_a_budget_is_one_of_the_estimate(memopt: Memopt) -> None:
    summary = optimized(memopt, "--budget", "90%", "--dry-run")["summary"]
    before, after = summary["estimates"]["original"], summary["estimates"]["planned"]
    assert summary["budget_bytes"] == int(0.9 * before["allocated_peak_bytes"])
    assert after["allocated_peak_bytes"] <= summary["budget_bytes"]
    refused = memopt("optimize", "net.pt", *STEP, "--budget", "1MiB")
    assert refused.code == 6
    assert "no plan found takes 1.0 MiB or less, as estimated" in refused.err


@pytest.mark.parametrize("flags", [["--pick", "1"], ["--device", "cuda:0"]])
def test_what_would_be_measured_is_refused(flags: list[str], memopt: Memopt) -> None:
    done = memopt("optimize", "net.pt", *STEP, *flags)
    assert done.code == 2
    named = "--frontier" if flags[0] == "--pick" else flags[0]
    assert f"{named} " in done.err.partition("hint")[0]
    assert not done.changed


BATCH = "-i Bx32 --dim B=512 --for slow.yaml".split()


@pytest.mark.slow
def test_the_largest_batch_on_a_card(memopt: Memopt) -> None:
    done = memopt("recommend-batch", "net.pt", *BATCH, "--memory", "19MiB", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["card"], found["verified"], found["probes"]) == ("slow", False, 0)

    def needs(batch: int) -> tuple[int, bool]:
        profiled = memopt("profile", "net.pt", *BATCH[:2], "--dim", f"B={batch}", *BATCH[4:], "--json")
        estimate = json.loads(profiled.out)["estimate"]
        return estimate["allocated_peak_bytes"], estimate["fits"]

    predicted = found["rows"][0]["outcome"]["predicted_peak_bytes"]  # between dry runs, not of one
    peak, fits = needs(found["batch"])
    assert fits
    assert peak == pytest.approx(predicted, abs=4096)
    assert peak <= 19 << 20
    peak, fits = needs(int(1.03 * found["batch"]))
    assert peak > 19 << 20 or not fits


@pytest.mark.slow
def test_the_largest_batch_on_a_card_under_a_plan(memopt: Memopt, net: nn.Module) -> None:
    optimized(memopt)
    done = memopt("recommend-batch", "net.pt", *BATCH, "--plan", "net.memopt.plan.yaml", "--global-batch", "9000")
    assert done.code == 0, done.err
    assert "under the plan should fit on slow: an estimate" in done.out
    assert "memory limit: 18.0 MiB (90 % of the memory of slow)" in done.out
    assert "The peaks are of a step with the gradients of earlier passes in memory" in done.out
    assert "batch run" not in done.out
    in_python = memopt_cli.recommend_batch(net, "Bx32", dims={"B": 512}, for_device="slow.yaml", global_batch=9000)
    assert in_python.result.card == "slow"
    assert f"without ~{in_python.result.batch} " in " ".join(done.out.split())


@pytest.mark.parametrize(
    "flags",
    [
        ["--objective", "throughput"],
        ["--memory", "21MiB"],
        ["--device", "cuda:0"],
    ],
)
def test_a_batch_that_would_be_run_is_refused(flags: list[str], memopt: Memopt) -> None:
    done = memopt("recommend-batch", "net.pt", *BATCH, *flags)
    assert done.code == 2
    assert "slow" in done.err
    assert not done.changed


@pytest.mark.slow
def test_in_python(net: nn.Module) -> None:
    card = DeviceProfile(
        name="slow", memory_bytes=2**24, bandwidth_bytes_per_s=1e7, flops_per_s={"fp32": 1e9}, library_bytes=2**20
    )
    found = memopt_cli.optimize(net, "4096x32", level=1, max_slowdown=float("inf"), for_device=card)
    estimates = found.summary.estimates
    assert estimates.planned.allocated_peak_bytes < estimates.original.allocated_peak_bytes
    assert memopt_cli.plan_of(net).segments == found.plan.segments != ()
    with pytest.raises(OptionError, match="device cannot be combined with for_device"):
        memopt_cli.profile(net, "8x32", for_device=card, device="cuda:0")
    with pytest.raises(OptionError, match="not the name of a card"):
        memopt_cli.profile(net, "8x32", for_device=3)  # type: ignore[arg-type]
