"""A step of one's own: recorded, optimized and verified as that of a model, and refused where it cannot be."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.errors import MemoptError, OptionError, StepError
from memopt_cli.loading.factory import build
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.pipeline.live.step import prepared_step
from memopt_cli.records import Plan, SearchOptions, SegmentPlan, StepSettings
from memopt_cli.runtime.state import StartingState
from memopt_cli.search.plan.block_tree import block_tree
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.levels import allowed_at, find_level
from memopt_cli.search.plan.proposals import Proposals
from memopt_cli.search.plan.schedules import SegmentLimits
from memopt_cli.trace import FakeStep, count_step, record
from memopt_cli.trace.log import resident_bytes
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.user_step import join_models
from memopt_cli.verification.effects import bit_equal, effects, step_in_double
from tests.conftest import Done

STEPS = Path(__file__).parents[1] / "user_code" / "own_steps.py"
GOOD = ("two_rounds", "penalized", "mean_teacher", "scaled")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of steps."""
    spec = importlib.util.spec_from_file_location("own_steps", STEPS)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_steps", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("kind", ["decorated", "old", "partial", "bound"])
def test_a_function_that_its_name_does_not_lead_to_is_called_here(
    kind: str, steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(STEPS.parent))
    make = steps.two_rounds
    if kind == "old":  # as after a reload
        steps.two_rounds = functools.partial(make)
    elif kind == "bound":
        steps.Maker = type("Maker", (), {"make": lambda self: make(), "__module__": "own_steps"})
        steps.Maker.make.__qualname__, steps.Maker.make.__module__ = "Maker.make", "own_steps"
    others = {
        "decorated": lambda: functools.wraps(make)(lambda: make()),
        "old": lambda: make,
        "partial": lambda: functools.partial(make),
        "bound": lambda: steps.Maker().make,
    }
    with prepared_step(others[kind](), (torch.randn(8, 8),), StepSettings()) as prepared:
        assert prepared.notes[0].endswith("(that is another object).")
    if kind != "old":
        with prepared_step(make, (torch.randn(8, 8),), StepSettings()) as prepared:
            assert prepared.notes == ()


def own_step(name: str, *, rows: int = 256) -> OwnStep:
    model = build(f"{STEPS}:{name}")
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return OwnStep(model=model, args=(x,), kwargs={}, settings=StepSettings())


def segments(*paths: str) -> Plan:
    return Plan(segments=tuple(SegmentPlan(path=path) for path in paths))


PLANS = {
    "two_rounds": segments("maker.0", "maker.1", "judge.0.0", "judge.0.1", "judge.0.2"),
    "penalized": segments("net.0", "net.1"),
    "mean_teacher": segments("net.0", "net.1", "net.2"),
    "scaled": segments("net.0", "net.1", "net.2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_every_phase_is_predicted_to_the_byte(name: str) -> None:
    step = own_step(name)
    step.reset_gradients()
    step.model.zero_grad(set_to_none=True)

    def taken(entered: Callable[[Any], None]) -> None:
        step.reset_gradients()
        step.take(entered)

    allocated = measure_allocated(taken, "cpu", resident_bytes(step))
    fake, real = FakeStep(step).count(allocated.workspaces), count_step(step, allocated.workspaces)
    assert [peak.phase for peak in fake.phases] == ["forward", "backward", "update"]
    assert fake.tensor_peak_bytes == real.tensor_peak_bytes
    predicted = {peak.phase: peak.allocated_peak_bytes for peak in fake.phases}
    assert predicted == pytest.approx(allocated.phases, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_a_plan_changes_nothing_and_saves(name: str) -> None:
    step = own_step(name)
    step.find_scale(StartingState(step.model))
    before, peak = effects(step), FakeStep(step).count().tensor_peak_bytes
    assert bit_equal(before, effects(step))
    memopt_cli.apply_plan(step.model, PLANS[name])
    assert bit_equal(before, effects(step))
    memopt_cli.remove_plan(step.model)
    fake = FakeStep(step)
    memopt_cli.apply_plan(fake.step.model, PLANS[name])
    found = fake.count().tensor_peak_bytes
    # A graph of the gradient keeps what was recomputed for it.
    assert found <= peak if name == "penalized" else found < 0.8 * peak


def test_the_gradients_that_optimizers_are_given_are_compared() -> None:
    step = own_step("two_rounds")
    found = effects(step)
    assert "gradient of judge.1.weight at update 1" in found
    assert "gradient of maker.0.0.weight at update 2" in found


def test_nothing_moves_from_step_to_step() -> None:
    step = own_step("mean_teacher")
    step.reset_gradients()
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    for _ in range(3):
        step.take()
    step.models.restore_moved()
    assert all(torch.equal(before[name], p) for name, p in step.model.named_parameters())
    (optimizer,) = step.optimizers()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**4)  # the schedule's, not the zero of its steps


class ReadyMade(torch.optim.SGD):
    """Makes its state when it is made, and counts on it, as PyTorch 2.8's Adagrad."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"sum": torch.full_like(parameter, 0.1), "step": torch.tensor(0.0)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            torch._foreach_add_([state["step"]], 1)
            torch._foreach_addcmul_([state["sum"]], [parameter.grad], [parameter.grad])


def test_an_optimizer_steps_in_double_with_the_state_that_it_made_itself() -> None:
    net = nn.Linear(8, 8)
    optimizer = ReadyMade(net.parameters())

    def run(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    own = memopt_cli.Step(models={"net": net}, optimizers=[optimizer], run=run)
    step = OwnStep(model=join_models(own), args=(torch.ones(2, 8),), kwargs={}, settings=StepSettings())
    with step_in_double(step) as double:
        assert effects(double)["gradient of net.weight at update 1"].dtype == torch.float64
        in_double = optimizer.state[net.weight]
        assert (in_double["sum"].dtype, in_double["step"].item()) == (torch.float64, 1)
    held = optimizer.state[net.weight]
    assert (held["sum"].dtype, held["sum"].max().item(), held["step"].item()) == (torch.float32, pytest.approx(0.1), 0)


def test_a_step_finds_the_gradients_that_one_before_it_leaves() -> None:
    step = own_step("two_rounds")
    assert step.models.leaves is None
    step.reset_gradients()
    assert step.models.leaves == {name for name, _ in step.model.named_parameters()}
    assert all(p.grad is not None and not p.grad.any() for p in step.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_the_replay_of_several_rounds(name: str) -> None:
    """By the record alone, peaks of the plain step and of plans are those of their dry runs."""
    step = own_step(name)
    model = CostModel(FakeStep(step).record(256))
    for plan in (Plan(), PLANS[name], segments(PLANS[name].segments[0].path)):
        fake = FakeStep(step)
        memopt_cli.apply_plan(fake.step.model, plan)
        counted = fake.count().allocated_peak_bytes
        assert model.predict(plan).allocated_peak_bytes == pytest.approx(counted, rel=0.03)


def test_a_copy_is_made_anew_with_the_same_parameters() -> None:
    import copy

    models = own_step("mean_teacher").models
    with torch.no_grad():
        for parameter in models.parameters():
            parameter.add_(1)
    copied = copy.deepcopy(models)
    assert copied is not models
    assert not {*copied.parameters()} & {*models.parameters()}
    assert all(torch.equal(a, b) for a, b in zip(models.parameters(), copied.parameters(), strict=True))
    assert [m.training for m in copied.modules()] == [m.training for m in models.modules()]


def test_a_scaler_of_ones_own_finds_its_scale_first() -> None:
    step = own_step("scaled")
    step.take()
    (optimizer,) = step.optimizers()
    assert not optimizer.state
    step.find_scale(StartingState(step.model))
    assert optimizer.state
    assert all(t.isfinite().all() for name, t in effects(step).items() if name.startswith("gradient"))


def test_optimizers_that_never_step_are_named() -> None:
    step = own_step("always_skipped", rows=4)
    with pytest.raises(StepError, match="none of the step's optimizers has stepped in 33 steps"):
        step.find_scale(StartingState(step.model))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "the step's function returned nothing, not a tensor"),
        ("closure_of_another", "SGD takes a closure, so it runs forward and backward inside step()"),
        ("nan_loss", "what the step returned is NaN or infinite"),
        ("nan_gradient", "the gradient of 'net.0.0.weight' holds NaN or infinity"),
        ("sparse", "the gradient of 'net.0.weight' is sparse"),
        ("unlisted", "the step uses an optimizer, SGD, that it does not list"),
        ("no_backward", "the step never calls backward"),
        ("rejects", "module 'net.0.0' (Linear) rejected its input 4x7@float32"),
        ("fails", "the step failed: KeyError: 'labels'"),
    ],
)
def test_what_is_wrong_with_a_step_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(StepError) as error:
        own_step(name, rows=4).run_checked()
    assert message in error.value.message
    assert error.value.hint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("something_else", "returned an int, neither an nn.Module nor a memopt_cli.Step"),
        ("closure", "LBFGS takes a closure, so it runs forward and backward inside step()"),
        ("strange_parameters", "SGD updates a tensor that is a parameter of no model of the step"),
    ],
)
def test_what_is_wrong_with_what_makes_a_step(name: str, message: str) -> None:
    with pytest.raises(MemoptError) as error:
        build(f"{STEPS}:{name}")
    assert message in error.value.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"models": {}}, "models must be a mapping"),
        ({"models": {"a.b": nn.ReLU()}}, "a model cannot be named 'a.b'"),
        ({"models": {"train": nn.ReLU()}}, "a model cannot be named 'train'"),
        ({"models": {"net": 3}}, "the model 'net' is an int"),
        ({"optimizers": [3]}, "optimizers holds an int"),
        ({"run": 3}, "run is an int"),
    ],
)
def test_a_step_that_cannot_be_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        memopt_cli.Step(**{"models": {"net": nn.ReLU()}, "run": print, **arguments})


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_step_that_draws_other_data_each_time(memopt: Callable[..., Done]) -> None:
    done = memopt("optimize", f"{STEPS}:draws_data", "-i", "256x8", "--no-recommend-batch")
    assert done.code == 3
    assert "the original's own step is not repeatable" in done.err
    assert not done.changed


@pytest.mark.slow
def test_a_plan_is_compared_with_a_step_that_cannot_be_saved(memopt: Callable[..., Done]) -> None:
    Plan(segments=(SegmentPlan(path="maker.0"),)).save("own.plan.yaml")
    refused = memopt("apply", f"{STEPS}:two_rounds", "own.plan.yaml")
    assert refused.code != 0
    assert "is not a model that can be saved" in refused.err
    done = memopt("apply", f"{STEPS}:two_rounds", "own.plan.yaml", "--verify", "-i", "4x8")
    assert done.code == 0, done.err
    assert "verified: " in done.out
    assert done.out.endswith("nothing written\n")


@pytest.mark.parametrize("flag", ["--optimizer=sgd", "--precision=bf16", "--accumulate=2", "--clip-norm=1"])
@pytest.mark.usefixtures("in_process")
def test_flags_that_say_how_a_step_is_run(memopt: Callable[..., Done], flag: str) -> None:
    done = memopt("profile", f"{STEPS}:two_rounds", "-i", "4x8", flag)
    assert done.code == 2
    assert "makes a step of its own" in done.err


@pytest.mark.usefixtures("in_process")
def test_a_step_of_ones_own_accumulates_by_itself(memopt: Callable[..., Done]) -> None:
    done = memopt("recommend-batch", f"{STEPS}:two_rounds", "-i", "4x8", "--global-batch", "64")
    assert done.code == 2
    assert "--accumulate, or --global-batch, sets how a step is run" in done.err


@pytest.mark.usefixtures("in_process")
def test_the_inputs_of_a_step_are_not_guessed(memopt: Callable[..., Done]) -> None:
    done = memopt("profile", f"{STEPS}:two_rounds")
    assert done.code == 2
    assert "memopt knows nothing about the inputs" in done.err


def trained(step: memopt_cli.Step, batches: list[Tensor]) -> list[float]:
    return [float(loss) for x in batches for loss in step(x).values()]


@pytest.mark.process
def test_a_step_is_optimized_and_trains_as_before(memopt: Callable[..., Done], tmp_path: Path, steps: Any) -> None:
    arguments = ("-i", "2048x8", "--level", "1", "--budget", "80%", "--search-time", "5", "--no-recommend-batch")
    done = memopt("optimize", f"{STEPS}:two_rounds", *arguments)
    assert done.code == 0, done.err
    assert done.changed == {
        "own_steps.memopt.plan.yaml",
        "own_steps.memopt.summary.json",
        "own_steps.memopt.batch.yaml",
    }
    assert "step = two_rounds(); memopt_cli.apply_plan(step, 'own_steps.memopt.plan.yaml')" in done.out
    torch.manual_seed(0)
    plain = steps.two_rounds()
    torch.manual_seed(0)
    planned = steps.two_rounds()
    assert memopt_cli.apply_plan(planned, tmp_path / "own_steps.memopt.plan.yaml") is planned
    assert memopt_cli.plan_of(join_models(planned)).segments
    batches = list(torch.randn(5, 2048, 8, generator=torch.Generator().manual_seed(3)))
    assert trained(plain, batches) == trained(planned, batches)


@pytest.mark.process
def test_from_python(steps: Any) -> None:
    step, summary = memopt_cli.optimize_step(steps.two_rounds, (torch.randn(2048, 8),), level=1, budget="80%")
    assert summary.verification.passed
    assert memopt_cli.plan_of(join_models(step)) == summary.plan
    original, found = (row.outcome for row in summary.levels)
    assert found.allocated_peak_bytes <= 0.8 * original.allocated_peak_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_step_is_held_against_its_baseline(memopt: Callable[..., Done], tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(STEPS.read_text())
    recorded = memopt("baseline", f"{mine}:two_rounds", "-i", "256x8")
    assert recorded.code == 0
    assert "memopt-baseline.json" in recorded.changed  # Python may write what it has compiled, too
    same = memopt("check", f"{mine}:two_rounds")
    assert same.code == 0
    assert "no regression" in same.out
    mine.write_text(STEPS.read_text().replace("made = maker(x)", "made = maker(x + maker(x).tanh())"))
    grown = memopt("check", f"{mine}:two_rounds")
    assert grown.code == 1
    assert "maker.0" in grown.out
    another = memopt("check", f"{mine}:mean_teacher")
    assert another.code == 5
    assert "it is of a different model" in another.err


def test_a_plan_goes_on_models_by_name(steps: Any) -> None:
    step = steps.two_rounds()
    models = dict(step.models)
    assert memopt_cli.apply_plan(models, PLANS["two_rounds"]) is models
    assert isinstance(step.models["maker"][0], memopt_cli.spikingjelly.GCContainer)
    with pytest.raises(OptionError, match="not for a step"):
        memopt_cli.apply_plan(models, Plan(), loss=torch.sum)


def test_a_record_has_a_round_for_each_backward() -> None:
    """The judge's first two calls are over when its third begins; the maker's is not."""
    trace = record(own_step("two_rounds"), 256, contents=True)
    first, second, third = (call for call in trace.calls if call.path == "judge")
    (maker,) = (call for call in trace.calls if call.path == "maker")
    assert max(first.backward_end, second.backward_end) <= third.start
    assert maker.backward_start >= third.backward_start
    root = block_tree(CostModel(trace))
    assert [child.path for child in root.children if child.path or child.is_round] == ["maker", "", "judge"]
    assert trace.modules[0].refusal


def test_no_segments_nest_at_level_1_although_each_call_chooses_its_own() -> None:
    """For some calls all of the net would be a segment, and for others a part of it."""

    def part(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))

    net = nn.Sequential(nn.Sequential(part(64), part(32)))
    optimizer = torch.optim.SGD(net.parameters())

    def run(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = sum(net(x) for _ in range(6)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    own = memopt_cli.Step(models={"net": net}, optimizers=[optimizer], run=run)
    step = OwnStep(model=join_models(own), args=(torch.ones(256, 8),), kwargs={}, settings=StepSettings())
    trace = record(step, 256, contents=True)
    proposals = Proposals(trace, lambda: None)
    proposals.allow(allowed_at(1, SearchOptions(level=1), trace.modules, SegmentLimits()))
    peak = proposals.model.peak_bytes
    plans = [proposals.solvers.fastest(False, peak * share // 100) for share in range(32, 100, 4)]
    found = [plan for plan in plans if plan is not None]
    assert [s.path for s in found[0].segments] == ["net.0"]
    assert [plan for plan in found if find_level(plan) > 1] == []
