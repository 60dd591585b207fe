"""A short run of the fuzz of trainings, and that it notices what it is for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fuzz.cases import Case, build, drawn_case, from_text
from fuzz.models import KINDS, Block
from fuzz.scenarios import Scenario
from fuzz.shrinking import shrunk
from fuzz.training import Outcome, outcome
from memopt_cli.records import SegmentPlan
from memopt_cli.runtime.generators import Generators
from tests.rows import quick

CASES = 150
ROOT = (SegmentPlan(path=""),)


@pytest.mark.slow
@pytest.mark.parametrize("first", quick(range(0, CASES, CASES // 6), {0, CASES // 3}))
def test_a_plan_changes_nothing(first: int) -> None:
    found = {index: outcome(drawn_case(1, index)) for index in range(first, first + CASES // 6)}
    assert {index: result for index, result in found.items() if result.is_failure} == {}
    counted = Counter(result.kind for result in found.values())
    assert counted["same"] > len(found) / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_block_computes_and_is_trained(kind: str) -> None:
    inner = (Block(kind="linear"),) if KINDS[kind].holds else ()
    model = build(Case(blocks=(Block(kind=kind, inner=inner),)))
    x = torch.randn(4, 6, 8)
    assert model(x).shape == x.shape
    model(x).square().sum().backward()
    assert model.scale.grad is not None


ONCE_FAILED = {
    "an LSTM within a segment that keeps outputs": '{"blocks":[{"kind":"max pool"},{"kind":"mapping"},'
    '{"kind":"deep lstm"}],"segments":[{"path":"","keep":["aten::relu"]},{"path":"blocks"}],'
    '"scenario":{"dtype":"float64","batch":1},"steps":1}',
    "chunks of one sample that lies transposed": '{"blocks":[{"kind":"lstm","segments":[{"path":"","chunks":3,'
    '"recompute_states":true}]},{"kind":"alpha dropout"}],"scenario":{"dtype":"float64","batch":2},"steps":1}',
    "noise behind which others save": '{"blocks":[{"kind":"mapping"},{"kind":"rrelu"},{"kind":"saved by hooks",'
    '"inner":[{"kind":"object"}]},{"kind":"viewed"}],"segments":[{"path":"blocks.0-3"}],"steps":1}',
    "noise for a view that was written in place": '{"blocks":[{"kind":"conv2d and norm"},{"kind":"slice"},'
    '{"kind":"rrelu"}],"segments":[{"path":"blocks.1-2"}],"steps":1}',
    "a gradient within by an input whose gradient is kept": '{"blocks":[{"kind":"force"}],"segments":[{"path":""}],'
    '"scenario":{"inputs":"computed"},"steps":1}',
    "a gradient within by an input whose gradient is kept, and what cannot be repeated": '{"blocks":[{"kind":"force"},'
    '{"kind":"pullback"}],"segments":[{"path":""}],"scenario":{"inputs":"computed"},"steps":1}',
    "noise behind a norm in chunks": '{"blocks":[{"kind":"batch norm","segments":[{"path":"","chunks":2,'
    '"batch_statistics":true}]},{"kind":"alpha dropout"}],"scenario":{"dtype":"float64"},"steps":1}',
    "a norm behind a norm in chunks": '{"blocks":[{"kind":"batch norm","segments":[{"path":"","chunks":3,'
    '"batch_statistics":true}]},{"kind":"batch norm without momentum"}],"scenario":{"dtype":"float64"},"steps":1}',
    "a norm of what is the same everywhere": '{"blocks":[{"kind":"feed-forward","segments":[{"path":"","chunks":2}]},'
    '{"kind":"batch norm without momentum"}],"scenario":{"dtype":"float64","inputs":"negative zero"},"steps":2}',
    "what writes to a parameter in a checkpoint": '{"blocks":[{"kind":"checkpointed","inner":[{"kind":"written",'
    '"segments":[{"path":"linear"}]}],"segments":[{"path":"inner"}]}],"steps":2}',
    "what writes to a parameter in a checkpoint twice": '{"blocks":[{"kind":"checkpointed","inner":[{"kind":"twice",'
    '"inner":[{"kind":"written","segments":[{"path":""}]}]}]}],"segments":[{"path":""}],"packed":true,"steps":2}',
    "what is not a number, of either sign": '{"blocks":[{"kind":"saved by hooks","inner":[{"kind":"gru both ways"},'
    '{"kind":"scaled dot product"}],"segments":[{"path":"inner.0-1"}]}],"scenario":{"inputs":"not a number"},'
    '"steps":2}',
    "a call of what is kept that fails, and is tried again": '{"blocks":[{"kind":"trying","inner":[{"kind":'
    '"transformer layer, norm first"}],"segments":[{"path":"","keep":["aten::native_layer_norm"]}]}],'
    '"scenario":{"dtype":"float64"},"steps":1}',
    "chunks that fail as the whole does, and are tried again": '{"blocks":[{"kind":"trying","inner":[{"kind":'
    '"rms norm","segments":[{"path":"","chunks":2}]}],"segments":[{"path":""}]}],'
    '"scenario":{"dtype":"float64"},"steps":1}',
    "state that a transform has left behind": '{"blocks":[{"kind":"teacher","inner":[{"kind":"mapped",'
    '"inner":[{"kind":"membranes"}],"segments":[{"path":""}]}]}],"steps":1}',
}


@pytest.mark.slow
@pytest.mark.parametrize("text", ONCE_FAILED.values(), ids=ONCE_FAILED)
def test_what_once_failed(text: str) -> None:
    assert outcome(from_text(text)).kind == "same"


def _putting_nothing_back(self: Generators, present: Generators | None = None) -> None:
    pass


DROPOUT = Block(kind="dropout")


@pytest.mark.slow
def test_what_goes_wrong_is_noticed_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = (Block(kind="linear"), Block(kind="residual", inner=(DROPOUT, Block(kind="gelu"))))
    scenario = Scenario(between=("draw",), update="adam", after=("copied",))
    case = Case(blocks=blocks, segments=ROOT, packed=True, scenario=scenario)
    assert outcome(case) == Outcome("same")
    monkeypatch.setattr(Generators, "restore", _putting_nothing_back)
    assert outcome(case).kind == "differs"
    smallest = shrunk(case, lambda smaller: outcome(smaller).is_failure)
    assert smallest == Case(blocks=(DROPOUT,), segments=ROOT, scenario=smallest.scenario, steps=1)
    assert smallest.scenario in (Scenario(), replace(Scenario(), between=("draw",)))


def test_an_error_needs_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Generators, present: Generators | None = None) -> None:
        raise KeyError("no such luck")

    missing = Case(blocks=(DROPOUT,), segments=(SegmentPlan(path="absent"),))
    assert outcome(missing).kind == "refused"
    monkeypatch.setattr(Generators, "restore", broken)
    found = outcome(Case(blocks=(DROPOUT,), segments=ROOT))
    assert found.kind == "fails"
    assert "no such luck" in found.reason


AMPLIFYING = (
    '{"blocks":[{"kind":"counting"},{"kind":"gru cell","segments":[{"path":"","chunks":3}]},'
    '{"kind":"batch norm without momentum"}],"scenario":{"dtype":"float64","call":"in turn"},"steps":1}',
    '{"blocks":[{"kind":"clamped"},{"kind":"batch norm","segments":[{"path":"","chunks":2,"batch_statistics":true}]},'
    '{"kind":"median"}],"scenario":{"dtype":"float64","inputs":"counts"},"steps":1}',
)


@pytest.mark.slow
@pytest.mark.parametrize("text", AMPLIFYING)
def test_what_rounding_alone_changes_is_noise(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = from_text(text)
    assert outcome(case).kind == "noisy"
    drawing = replace(
        case, blocks=(Block(kind="linear"), DROPOUT, *case.blocks), segments=(SegmentPlan(path="blocks.1"),)
    )
    monkeypatch.setattr(Generators, "restore", _putting_nothing_back)
    assert outcome(drawing).kind == "differs"
