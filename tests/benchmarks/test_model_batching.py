"""What ``benchmarks/model_batching.py`` claims of accuracy, on cases that are quick to run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import model_batching

    yield model_batching
    for name in ("model_batching", "results"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp-17x64", "gru-16x32", "transformer-16x8"])
def test_smooth_models_equal_the_loop_in_both_precisions(benchmark: Any, name: str) -> None:
    torch.manual_seed(0)
    gaps = benchmark.gaps_of(benchmark.CASES[name])
    assert gaps.fp64 <= 1e-10
    assert 0 < gaps.fp32 <= 1e-5


@pytest.mark.slow
def test_at_a_kink_float32_is_no_farther_from_float64_than_the_loop_is(benchmark: Any) -> None:
    torch.manual_seed(0)
    gaps = benchmark.gaps_of(benchmark.CASES["lenet-100x4"])
    assert gaps.fp64 <= 1e-10
    assert gaps.fp32 <= max(1e-5, 2 * gaps.loop_fp32)


def test_the_section(benchmark: Any) -> None:
    result = benchmark.Result(
        case="mlp-17x64",
        route="fused",
        times_ms={"memopt": 2.0, "loop": 5.0, "vmap": 3.0},
        cannot={"torchmb": "ModuleNotFoundError: No module named 'torchmb'"},
        gaps=benchmark.Gaps(fp64=3e-16, fp32=2e-7, loop_fp32=4e-7),
    )
    text = benchmark.markdown([result], 15, 2)
    assert "| mlp-17x64 | 2.00 | 5.00 | 3.00 | – | 1.50× | fused | 3e-16 | 2e-07 | 4e-07 |" in text
    assert "- mlp-17x64, torchmb: ModuleNotFoundError: No module named 'torchmb'" in text
