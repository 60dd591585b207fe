"""What follows the recorded step: each check sees what it is for, and what the original cannot do is left out."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import StepError
from memopt_cli.records import FurtherCheck, Plan, SegmentPlan, StepSettings, Verification
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification import further_steps
from memopt_cli.verification.further_steps import RecordedStep, _Deadline, first_samples
from memopt_cli.verification.recorded_step import verify_step
from memopt_cli.verification.variations import Variation
from tests.zoo.models import Parts

Install = Callable[[Any], object]

EXACT = Plan(segments=(SegmentPlan(path="body"), SegmentPlan(path="head")))
CHUNKED = Plan(segments=(SegmentPlan(path="head", chunks=2),))
PLANS = pytest.mark.parametrize("plan", [EXACT, CHUNKED], ids=["to the bit", "in float64"])

NEXT, OTHER, MASKS, EVAL, FROZEN, LATE = (
    "in the next step",
    "at batch 2",
    "with masks changed",
    "in eval mode",
    "with frozen parameters",
    "with parameters frozen before backward",
)


@pytest.fixture(autouse=True)
def _in_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks at full size, however slow the machine."""
    monkeypatch.setattr(further_steps, "_MIN_LIMIT_S", 600.0)


class Net(
    Parts,
    body=lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3)),
    head=lambda: nn.Linear(6, 2),
    memory=None,
):
    """Batch norm, dropout, and a memory that it carries from step to step."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.body(x)
        if mask is not None:
            y = y * mask[:, -1:]
        self.memory = y.detach() if self.memory is None else self.memory / 2 + y.detach()
        return self.head(y + self.memory)


def check(model: nn.Module, plan: Plan = EXACT, install: Install | None = None, **kwargs: Tensor) -> Verification:
    torch.manual_seed(0)
    step = TrainingStep(model=model, args=(torch.randn(4, 3),), kwargs=kwargs, settings=StepSettings(seed=5))
    resize = functools.partial(first_samples, step.args, step.kwargs)
    right: Install = lambda m: apply_plan(m, plan)  # noqa: E731
    return verify_step(step, plan, install or right, without, batch=4, full_size=True, resize=resize)


def without(model: Any) -> None:
    """As it was before any of the installations here."""
    remove_plan(model)
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def tried(found: Verification) -> list[str]:
    return [check.name for check in found.further if not check.not_tried]


@PLANS
def test_a_right_plan_passes_them_all(plan: Plan) -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = check(model, plan, mask=torch.ones(4, 6, dtype=torch.int64))
    assert found.passed, found
    # A memory of four samples is none of two: the original begins anew there.
    assert tried(found) == [NEXT, OTHER, MASKS, EVAL, FROZEN, LATE]
    assert [check.batch for check in found.further] == [4, 2, 4, 4, 4, 4]
    assert all(check.compared for check in found.further)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert (model.memory, model.training) == (None, True)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def when(condition: Callable[[Any, Tensor], bool]) -> Install:
    """The head's output is a little more, on one condition."""

    def install(model: Any) -> None:
        first = model.head.weight.detach().clone()

        def hook(module: Any, args: Any, output: Tensor) -> Tensor:
            return output * (1 + 1e-6) if condition((model, first), output) else output

        model.head.register_forward_hook(hook)

    return install


def frozen_late(model: Any) -> None:
    """A gradient is a little more where parameters were frozen since forward."""

    def hook(module: Any, args: Any, output: Tensor) -> None:
        needed = model.body[0].weight.requires_grad

        def more(gradient: Tensor) -> Tensor:
            return gradient * (1 + 1e-6) if needed and not model.body[0].weight.requires_grad else gradient

        output.register_hook(more)

    model.head.register_forward_hook(hook)


LATER = [
    (when(lambda m, y: m[0].head.weight.shape == m[1].shape and len(y) == 2), OTHER),
    (when(lambda m, y: not m[0].training), EVAL),
    (when(lambda m, y: not m[0].body[0].weight.requires_grad), FROZEN),
    (frozen_late, LATE),
]


@PLANS
@pytest.mark.parametrize(("install", "name"), LATER)
def test_what_differs_later_alone_fails(plan: Plan, install: Install, name: str) -> None:
    found = check(Net(), plan, install)
    assert not found.passed
    assert found.differs_in == name
    assert found.further[-1].name == name
    assert found.difference.endswith(f" {name}")
    assert found.worst_difference > found.tolerance


def test_a_step_of_other_parameters() -> None:
    def install(model: Any) -> None:
        """As a plan would that holds on to what a parameter was."""
        held = model.head.bias.detach().clone()

        def hook(module: Any, args: Any, output: Tensor) -> Tensor:
            return output + (held - module.bias).detach()

        model.head.register_forward_hook(hook)

    assert check(Net(), EXACT, install).differs_in == NEXT


def test_masks() -> None:
    def install(model: Any) -> None:
        def more(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            return output if bool(kwargs["mask"].all()) else output * (1 + 1e-6)

        model.register_forward_hook(more, with_kwargs=True)

    assert check(Net(), install=install, mask=torch.ones(4, 6, dtype=torch.bool)).differs_in == MASKS
    unmasked = check(Net())
    assert {c.name: c.not_tried for c in unmasked.further if c.not_tried} == {MASKS: "no input is a mask"}


def test_a_step_that_fails_with_the_plan_alone() -> None:
    def install(model: Any) -> None:
        def refuse(module: Any, args: Any) -> None:
            if not module.training:
                raise ValueError("not in eval")

        model.head.register_forward_pre_hook(refuse)

    found = check(Net(), install=install)
    assert not found.passed
    assert found.difference == "the step fails in eval mode (ValueError: not in eval)"


class Narrow(Net):
    """Takes four samples, in training alone."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if len(x) != 4 or not self.training:
            raise ValueError("four samples, in training")
        return super().forward(x, mask)


def test_what_the_original_cannot_do_is_left_out() -> None:
    found = check(Narrow())
    assert found.passed
    assert tried(found) == [NEXT, FROZEN, LATE]
    reasons = {c.name: c.not_tried for c in found.further if c.not_tried}
    assert reasons.pop(MASKS)
    assert reasons == dict.fromkeys((OTHER, EVAL), "ValueError: four samples, in training")


class Attached(Net):
    """Its memory holds the last step's graph: a step that goes on from there cannot be differentiated."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        scores = scores if self.memory is None else scores + self.memory.mean()
        self.memory = scores
        return scores


def test_a_model_whose_steps_cannot_go_on_begins_each_anew() -> None:
    assert tried(check(Attached())) == [NEXT, OTHER, EVAL, FROZEN, LATE]


def test_a_model_that_cannot_be_copied() -> None:
    class Single(Net):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("one of a kind")

    found = check(Single())
    assert found.passed
    reason = "the model cannot be copied (TypeError: one of a kind)"
    assert found.further == (FurtherCheck(name="in later steps", batch=4, not_tried=reason, skipped=True),)


def test_long_steps_are_taken_of_fewer_samples_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(further_steps, "_MIN_LIMIT_S", 0.0)
    clock = iter(range(1000))
    monkeypatch.setattr(further_steps.time, "monotonic", lambda: float(next(clock)))  # a second at each look
    found = check(Net())
    assert found.passed
    assert {c.batch for c in found.further} == {1}
    assert OTHER not in [c.name for c in found.further]
    late = [c for c in found.further if c.not_tried.startswith("a step with the plan and one without take ")]
    assert late
    assert [c for c in found.further if c.skipped] == late


def test_a_check_of_fewer_samples_says_nothing_of_how_long_those_of_all_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of steps takes a second whatever its batch, as where samples take less than what is around them."""
    monkeypatch.setattr(further_steps, "_MIN_LIMIT_S", 4.5)
    now = 0.0
    monkeypatch.setattr(further_steps.time, "monotonic", lambda: now)
    step = TrainingStep(model=Net(), args=(), kwargs={}, settings=StepSettings(), loss=None, optimizer=None)
    recorded = RecordedStep(step=step, batch=8, gradients={}, plain_s=0.1, original_step_s=0.0, tolerance=0.0)
    deadline, batches = _Deadline(recorded), list[int]()
    for batch in (8, 1, 8, 8):
        with deadline.watching(Variation(NEXT, batch, nullcontext)):
            now += 1.0
            batches.append(batch)
    assert batches == [8, 1, 8, 8]
    refused = pytest.raises(StepError, match=r"^a step with the plan and one without take 1\.00 s together$")
    with refused, deadline.watching(Variation(NEXT, 8, nullcontext)):
        pass


def test_nothing_follows_an_empty_plan_or_one_that_differs() -> None:
    assert check(Net(), Plan()).further == ()
    assert check(Net(), EXACT, when(lambda m, y: True)).further == ()


def test_a_difference_of_an_original_that_does_not_repeat_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(further_steps, "_NOISE_RATIO", 1e9)  # two random differences may be far apart

    class Odd(Net):
        """Never twice the same in eval mode."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            factor = 1.0 if self.training else 1 + 1e-6 * secrets.randbelow(10**6)
            return super().forward(x, mask) * factor

    found = check(Odd())
    assert found.passed
    (reason,) = (c.not_tried for c in found.further if c.name == EVAL)
    assert reason == "the original's own step is not repeatable"


def test_what_differs_by_more_than_the_noise_of_the_original_fails() -> None:
    class Noisy(Net):
        """Not the same to the bit in eval mode, as sums of a GPU are."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            factor = 1.0 if self.training else 1 + 1e-15 * secrets.randbelow(10**3)
            return super().forward(x, mask) * factor

    assert check(Noisy(), CHUNKED).passed
    assert check(Noisy(), CHUNKED, when(lambda m, y: not m[0].training)).differs_in == EVAL


def test_first_samples() -> None:
    x, per_head = torch.arange(6.0).reshape(3, 2), torch.ones(4)
    args, kwargs = first_samples((x, [x, 1]), {"heads": per_head}, 2)
    assert torch.equal(args[0], x[:2])
    assert torch.equal(args[1][0], x[:2])
    assert kwargs["heads"] is per_head
    with pytest.raises(Exception, match="the inputs hold 3 samples, not 6"):
        first_samples((x,), {}, 6)
