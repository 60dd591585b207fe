"""``memopt recommend-batch --strategy``: memory by time steps, measured at the ends, for three ways to learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.errors import UsageError
from memopt_cli.online import LIF, OverTime
from memopt_cli.pipeline import compare_strategies
from memopt_cli.progress import Progress
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
from memopt_cli.spec_text import parse_tensor
from memopt_cli.write import plan_yaml
from sample_models.lif_rnn import LIFRNN
from tests.pipeline.test_recommendation import header

KIB = 1 << 10


def spiking() -> nn.Module:
    return OverTime(nn.Sequential(nn.Linear(32, 64), LIF(64), nn.Linear(64, 4)))


def compared(tmp_path: Path, model: nn.Module, *strategies: Any, steps: DimRange, **request: Any) -> StrategyComparison:
    torch.save(model, tmp_path / "net.pt")
    spec = InputSpec(
        tensors=(parse_tensor(request.pop("spec", "TxBx32=uniform")),), dims={"T": steps.low, "B": 8}, source="here"
    )
    made = BatchRequest(
        source=ModelSource(location=str(tmp_path / "net.pt"), trust=Trust(packages=("sample_models",))),
        spec=spec,
        strategies=strategies,
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
    def test_online_memory_is_flat_and_that_of_bptt_is_a_line(self, tmp_path: Path) -> None:
        found = compared(tmp_path, spiking(), "bptt", "online", steps=DimRange(symbol="T", low=16, high=512))
        bptt, full, factored = found.curves
        assert [curve.label for curve in found.curves] == ["bptt", "online D-RTRL", "online ES-D-RTRL"]
        assert [point.steps for point in bptt.points] == [16, 32, 64, 128, 256, 512]
        for curve in found.curves:
            assert [p.measured for p in curve.points] == [True, True, False, False, False, True]
        for curve in (full, factored):
            assert max(peaks(curve)) <= 1.01 * min(peaks(curve))
        assert peaks(factored)[0] < peaks(full)[0]
        growth = [peaks(bptt)[i] - peaks(bptt)[0] for i in (1, 5)]
        assert growth[1] == pytest.approx(31 * growth[0], rel=0.02)
        assert (bptt.exact, full.exact, factored.exact) == (True, True, False)
        assert "cosine" in factored.remark

    def test_a_plan_is_verified(self, tmp_path: Path) -> None:
        wide = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 64))
        net = OverTime(nn.Sequential(wide, LIF(64), nn.Linear(64, 4)))
        plan = Plan(level=1, segments=(SegmentPlan(path="model.0"),))
        (tmp_path / "p.plan.yaml").write_bytes(plan_yaml(header(), plan))
        steps = DimRange(symbol="T", low=16, high=32)
        found = compared(tmp_path, net, "bptt", "plan", steps=steps, plan_path=str(tmp_path / "p.plan.yaml"))
        bptt, planned = found.curves
        assert planned.exact
        assert "bit for bit" in planned.remark
        assert all(b < a for a, b in zip(peaks(bptt), peaks(planned), strict=True))

    def test_beyond_the_memory_is_an_estimate(self, tmp_path: Path) -> None:
        steps = DimRange(symbol="T", low=16, high=256)
        whole = compared(tmp_path, spiking(), "bptt", steps=steps).curves[0]
        limit = peaks(whole)[2] + 10 * KIB
        curve = compared(tmp_path, spiking(), "bptt", steps=steps, memory=limit).curves[0]
        assert [p.measured for p in curve.points] == [True, True, True, False, False]
        assert peaks(curve)[-1] == pytest.approx(peaks(whole)[-1], rel=0.02)

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
