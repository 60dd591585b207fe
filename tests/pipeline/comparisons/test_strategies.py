"""``memopt recommend-batch --strategy``: memory by time steps, measured at the ends, for three ways to learn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import MeasurementError, UsageError
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.online import LIF, OverTime
from memopt_cli.pipeline.comparisons import strategies
from memopt_cli.pipeline.comparisons.strategies import compare_strategies
from memopt_cli.records import (
    BatchRequest,
    DimRange,
    InputSpec,
    ModelSource,
    Plan,
    SegmentPlan,
    StrategyComparison,
    StrategyCurve,
    Trust,
    from_data,
    to_data,
)
from memopt_cli.records.progress import Progress
from memopt_cli.report.strategies import tables, verdicts
from sample_models.lif_rnn import LIFRNN
from tests.zoo.records import plan_file

KIB = 1 << 10


def spiking() -> nn.Module:
    return OverTime(nn.Sequential(nn.Linear(32, 64), LIF(64), nn.Linear(64, 4)))


class BriefOnly(OverTime):
    """Its own sequences may have up to 4 steps."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(32, 64), LIF(64), nn.Linear(64, 4)))

    def forward(self, *inputs: Tensor) -> Any:
        if len(inputs[0]) > 4:
            raise ValueError("more than 4 steps")
        return super().forward(*inputs)


def compared(tmp_path: Path, model: nn.Module, *names: Any, steps: DimRange, **request: Any) -> StrategyComparison:
    torch.save(model, tmp_path / "net.pt")
    spec = InputSpec(
        tensors=(parse_tensor(request.pop("spec", "TxBx32=uniform")),), dims={"T": steps.low, "B": 8}, source="here"
    )
    made = BatchRequest(
        source=ModelSource(location=str(tmp_path / "net.pt"), trust=Trust(packages=("sample_models", "tests"))),
        spec=spec,
        strategies=names,
        dim_range=steps,
        **request,
    )
    found = compare_strategies(made, progress=Progress(), ask=None)
    assert from_data(StrategyComparison, to_data(found)) == found
    return found


def peaks(curve: StrategyCurve) -> list[int]:
    return [point.allocated_peak_bytes for point in curve.points]


@pytest.mark.usefixtures("in_process")
class TestInProcess:
    @pytest.mark.slow
    def test_online_memory_is_flat_and_that_of_bptt_is_a_line(self, tmp_path: Path) -> None:
        found = compared(tmp_path, spiking(), "bptt", "online", steps=DimRange(symbol="T", low=16, high=128))
        bptt, full, factored = found.curves
        assert [curve.label for curve in found.curves] == ["bptt", "online D-RTRL", "online ES-D-RTRL"]
        assert [point.steps for point in bptt.points] == [16, 32, 64, 128]
        for curve in found.curves:
            assert [p.measured for p in curve.points] == [True, True, False, True]
        for curve in (full, factored):
            assert max(peaks(curve)) <= 1.01 * min(peaks(curve))
        assert peaks(factored)[0] < peaks(full)[0]
        growth = [peaks(bptt)[i] - peaks(bptt)[0] for i in (1, 3)]
        assert growth[1] == pytest.approx(7 * growth[0], rel=0.02)
        assert (bptt.exact, full.exact, factored.exact) == (True, True, False)
        assert "cosine" in factored.remark

    @pytest.mark.slow
    @pytest.mark.parametrize("low", [1, 2])
    def test_a_range_from_the_first_steps_shows_online_flat_too(self, tmp_path: Path, low: int) -> None:
        """What a first step has not made yet, and states that it found, are no growth."""
        net = OverTime(nn.Sequential(nn.Linear(32, 512), LIF(512), nn.Linear(512, 4)))
        found = compared(tmp_path, net, "online", steps=DimRange(symbol="T", low=low, high=32))
        for sentence, curve in zip(verdicts(found), found.curves, strict=True):
            assert "does not grow with T" in sentence
            assert max(peaks(curve)) <= 1.01 * min(peaks(curve))
        trace_bytes = 4 * 8 * 512 * 32
        assert peaks(found.curves[0])[-1] < 3 * trace_bytes  # the trace as it was and as it becomes, and the rest

    @pytest.mark.slow
    def test_a_plan_is_verified(self, tmp_path: Path) -> None:
        wide = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 64))
        net = OverTime(nn.Sequential(wide, LIF(64), nn.Linear(64, 4)))
        plan = Plan(segments=(SegmentPlan(path="model.0"),))
        steps = DimRange(symbol="T", low=16, high=32)
        found = compared(tmp_path, net, "bptt", "plan", steps=steps, plan_path=plan_file(tmp_path, plan))
        bptt, planned = found.curves
        assert planned.exact
        assert "bit for bit" in planned.remark
        assert all(b < a for a, b in zip(peaks(bptt), peaks(planned), strict=True))

    @pytest.mark.slow
    def test_beyond_the_memory_is_an_estimate(self, tmp_path: Path) -> None:
        steps = DimRange(symbol="T", low=16, high=256)
        whole = compared(tmp_path, spiking(), "bptt", steps=steps).curves[0]
        limit = peaks(whole)[2] + 10 * KIB
        curve = compared(tmp_path, spiking(), "bptt", steps=steps, memory=limit).curves[0]
        assert [p.measured for p in curve.points] == [True, True, True, False, False]
        assert peaks(curve)[-1] == pytest.approx(peaks(whole)[-1], rel=0.02)

    @pytest.mark.slow
    def test_one_size_tells_no_growth(self, tmp_path: Path) -> None:
        steps = DimRange(symbol="T", low=4, high=16)
        found = compared(tmp_path, BriefOnly(), "bptt", "online", steps=steps)
        bptt, online, _ = found.curves
        assert [p.steps for p in bptt.points] == [4]
        assert bptt.slope_bytes is None
        assert "; T=8: " in bptt.remark
        assert len(online.points) == 3
        (table,) = tables(found)
        assert list(table.columns[1].cells)[1:3] == ["–"] * 2
        assert "growth not known, as only T=4 was measured" in next(verdicts(found))

    def test_the_second_size_is_within_the_limits_too(self, tmp_path: Path) -> None:
        steps = DimRange(symbol="T", low=16, high=256)
        curve = compared(tmp_path, spiking(), "bptt", steps=steps, longest_step_s=1e-6).curves[0]
        assert [(p.steps, p.measured) for p in curve.points] == [(16, True)]

    @pytest.mark.slow
    def test_gradients_are_compared_where_something_is_carried_over(self, tmp_path: Path) -> None:
        """At one step, the smallest number here, the second layer's neurons have carried nothing over."""
        net = OverTime(nn.Sequential(nn.Linear(32, 16), LIF(16), nn.Linear(16, 16), LIF(16)))
        found = compared(tmp_path, net, "online", steps=DimRange(symbol="T", low=1, high=16))
        full = found.curves[0]
        assert full.exact is False
        assert "at 8 steps" in full.remark

    def test_where_no_plan_is_found_the_rest_is_compared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def find(*_: Any) -> None:
            raise MeasurementError("no plan could be run", hint="Try a smaller batch.")

        monkeypatch.setattr(strategies, "find_plan", find)
        found = compared(tmp_path, spiking(), "bptt", "plan", steps=DimRange(symbol="T", low=2, high=4))
        assert [len(curve.points) for curve in found.curves] == [2, 0]
        assert found.curves[1].remark == "no plan was found: no plan could be run. Try a smaller batch."

    def test_the_note_names_the_level_of_the_plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found_plan = SimpleNamespace(applied_level=1, plan=Plan(), decisive=None)
        monkeypatch.setattr(strategies, "find_plan", lambda *_: found_plan)
        found = compared(tmp_path, spiking(), "plan", steps=DimRange(symbol="T", low=2, high=4))
        assert "The plan was found by level 1 at T=2." in found.notes

    def test_a_model_that_runs_its_own_steps(self, tmp_path: Path) -> None:
        steps = DimRange(symbol="T", low=2, high=4)
        found = compared(tmp_path, LIFRNN(32, 16, 4), "bptt", "online", steps=steps)
        assert len(found.curves[0].points) == 2
        for curve in found.curves[1:]:
            assert curve.points == ()
            assert "LIFRNN runs its time steps within its own forward" in curve.remark

    def test_time_must_be_the_first_dimension(self, tmp_path: Path) -> None:
        steps = DimRange(symbol="T", low=2, high=4)
        found = compared(tmp_path, spiking(), "online", steps=steps, spec="BxTx32")
        assert "T is not the first dimension" in found.curves[0].remark

    @pytest.mark.parametrize("symbol", ["S", "B"])
    def test_another_symbol(self, symbol: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError):
            compared(tmp_path, spiking(), "bptt", steps=DimRange(symbol=symbol, low=2, high=4), spec="TxBx32")
