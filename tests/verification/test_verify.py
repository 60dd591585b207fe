"""The last gate: a right plan passes, and whatever changes the mathematics, however little, does not."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import PlanError, StepError
from memopt_cli.records import TOLERANCE, Plan, SegmentPlan, StepSettings, Verification
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.recorded_step import _noise, verify_step
from tests.zoo.models import Parts

Install = Callable[[nn.Module], object]


class Net(
    Parts,
    body=lambda: nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3)),
    memory=None,
    head=lambda: nn.Linear(6, 2),
    steps=lambda: nn.Buffer(torch.zeros(1)),
):
    """Convolution, batch norm, dropout, a decaying memory that lives in an attribute, and a counter in a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).mean(-1)
        self.memory = y.detach() if self.memory is None else self.memory / 2 + y.detach()
        self.steps += 1
        return self.head(y + self.memory)


EXACT = Plan(segments=(SegmentPlan(path="body"), SegmentPlan(path="head")))
CHUNKED = Plan(segments=(SegmentPlan(path="head", chunks=2),))


def step_of(model: nn.Module) -> TrainingStep:
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
    return TrainingStep(model=model, args=(x,), kwargs={}, settings=StepSettings(seed=5))


def check(plan: Plan, install: Install | None = None, model: nn.Module | None = None) -> Verification:
    """Verify a plan that ``install``, if given, puts on in a wrong way."""
    torch.manual_seed(0)
    model = model or Net()
    right: Install = lambda model: apply_plan(model, plan)  # noqa: E731
    return verify_step(step_of(model), plan, install or right, remove_plan, batch=4, full_size=True)


@pytest.mark.parametrize(("plan", "exact"), [(Plan(), True), (EXACT, True), (CHUNKED, False)])
def test_a_right_plan_passes(plan: Plan, exact: bool) -> None:
    found = check(plan)
    assert found.passed
    assert found.exact is exact
    assert (found.precision, found.tolerance) == (("stored", 0.0) if exact else ("fp64", TOLERANCE))
    assert (found.batch, found.full_size) == (4, True)
    assert found.worst_difference <= found.tolerance
    # Six parameters, four buffers, the memory, the output, the input's gradient, the generator.
    assert found.compared == 14


INEXACT = SegmentPlan(path="body.1", chunks=2, inexact=True)


def test_a_mean_that_is_rounding_alone_is_no_difference() -> None:
    chunked = Plan(segments=(SegmentPlan(path="0", chunks=3, batch_statistics=True),))
    assert check(
        chunked, model=nn.Sequential(nn.BatchNorm1d(3), nn.Conv1d(3, 3, 1, bias=False), nn.BatchNorm1d(3))
    ).passed


def test_what_is_inexact_as_asked_for_is_named_and_all_else_is_compared() -> None:
    asked = check(Plan(segments=(INEXACT,)))
    assert asked.passed
    assert asked.inexact == ("body.1",)
    assert not asked.exact
    with pytest.raises(PlanError, match="statistics of its own"):
        check(Plan(segments=(replace(INEXACT, inexact=False),)))
    both = Plan(segments=(INEXACT, *CHUNKED.segments))
    assert check(both).passed
    assert not check(both, scaled(1 + 1e-8)).passed


def test_norms_train_again_after_that() -> None:
    model = Net()
    check(Plan(segments=(INEXACT,)), model=model)
    assert model.body[1].training


def scaled(factor: float) -> Install:
    """The head's output times a factor."""

    def install(model: Any) -> None:
        model.head.register_forward_hook(lambda module, args, output: output * factor)

    return install


def with_a_changed_gradient(model: Any) -> None:
    model.body[0].weight.register_hook(lambda gradient: gradient * (1 + 1e-6))


def with_frozen_statistics(model: Any) -> None:
    model.body[1].register_forward_pre_hook(lambda module, args: setattr(module, "momentum", 0.0))


def with_another_dropout(model: Any) -> None:
    model.body[3].register_forward_pre_hook(lambda module, args: torch.rand(1) and None)


def with_a_step_too_many(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: module.steps.add_(1) and None)


def with_memory_advanced_twice(model: Any) -> None:
    def advance(module: Any, args: Any, output: Any) -> None:
        module.memory = module.memory / 2

    model.register_forward_hook(advance)


def with_memory_dropped(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: setattr(module, "memory", None))


WRONG = [
    (scaled(1 + 1e-6), ""),
    (with_a_changed_gradient, "gradient of body.0.weight"),
    (with_frozen_statistics, "buffer body.1.running_"),
    (with_another_dropout, ""),
    (with_a_step_too_many, "buffer steps"),
    (with_memory_advanced_twice, "state "),
    (with_memory_dropped, "state "),
]


@pytest.mark.parametrize(("install", "named"), WRONG)
@pytest.mark.parametrize("plan", [EXACT, CHUNKED], ids=["to the bit", "in float64"])
def test_a_wrong_one_does_not(plan: Plan, install: Install, named: str) -> None:
    found = check(plan, install)
    assert not found.passed
    assert found.worst_difference > found.tolerance
    assert found.worst_name.startswith(named)


def test_float64_sees_what_float32_does_not() -> None:
    assert not check(CHUNKED, scaled(1 + 1e-8)).passed
    assert check(CHUNKED, scaled(1 + 1e-12)).passed
    assert check(EXACT, scaled(1 + 1e-12)).passed


@pytest.mark.parametrize("plan", [EXACT, CHUNKED])
def test_the_state_is_as_before(plan: Plan) -> None:
    torch.manual_seed(0)
    model = Net()
    model.memory = torch.ones(4, 6)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    random_state = torch.get_rng_state()
    assert verify_step(
        step_of(model), plan, lambda m: apply_plan(m, plan), remove_plan, batch=4, full_size=False
    ).passed
    assert model.memory is not None
    assert torch.equal(model.memory, torch.ones(4, 6))
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert all(torch.equal(p, parameters[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [type(m).__name__ for m in model.modules()][1] == "Sequential"


def test_a_step_that_fails_in_float64_leaves_the_model_as_it_was() -> None:
    model = Net()
    before = {name: t.clone() for name, t in model.state_dict().items()}

    def fails(model: Any) -> None:
        def refuse(module: nn.Module, args: Any) -> None:
            raise ValueError("no")

        model.head.register_forward_pre_hook(refuse)

    with pytest.raises(StepError, match=r"plan the step runs, and with it module 'head' .* ValueError: no"):
        check(CHUNKED, fails, model)
    after = model.state_dict()
    assert all(torch.equal(after[name], t) and after[name].dtype == t.dtype for name, t in before.items())
    assert all(p.grad is None for p in model.parameters())


class Noisy(Parts, layer=lambda: nn.Linear(8, 8)):
    """Never twice the same, whatever is seeded."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * (1 + 1e-6 * (1 + secrets.randbelow(10**6)))


def test_an_original_that_differs_from_itself_proves_nothing() -> None:
    with pytest.raises(StepError, match=r"not repeatable: .* differs between two runs from one seed"):
        check(Plan(segments=(SegmentPlan(path="layer"),)), model=Noisy())


def test_on_a_gpu_the_originals_own_noise_is_allowed_twice() -> None:
    once, again = {"y": torch.tensor([4.0, 2.0])}, {"y": torch.tensor([4.0, 2.5])}
    assert _noise(once, once, "cuda:0") == 0.0
    assert _noise(once, again, "cuda:0") == 2 * 0.5 / 4
    with pytest.raises(StepError):
        _noise(once, {"y": torch.tensor([4.0, math.nan])}, "cuda:0")
    with pytest.raises(StepError):
        _noise(once, again, "cpu")


class Rounding(Parts, weight=lambda: nn.Parameter(torch.ones(8))):
    """Computes in float32 whatever it is given, as the norms and losses of Hugging Face's models do."""

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(torch.float32)
        scaled = precise * torch.rsqrt(precise.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype) * torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)


def test_what_a_model_rounds_to_float32_is_not_taken_for_a_difference() -> None:
    """In a segment's recomputation too."""
    torch.manual_seed(0)
    model = nn.Sequential(Rounding(), nn.Linear(8, 8), Rounding())
    plan = Plan(segments=(SegmentPlan(path="0"), SegmentPlan(path="1", chunks=3), SegmentPlan(path="2")))
    found = check(plan, model=model)
    assert found.passed, found
    assert found.worst_difference < 1e-12


@torch.library.custom_op("memopt_tests::product_in_single", mutates_args=())
def product_in_single(x: Tensor, weight: Tensor) -> Tensor:
    """Stands for a kernel that PyTorch has not for float64, such as the grouped product of experts."""
    if x.dtype is torch.float64:
        raise RuntimeError("expected a float32 matrix, got double")
    return x @ weight


def _product_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return product_in_single(gradient, weight.t()), product_in_single(x.t(), gradient)


product_in_single.register_autograd(
    _product_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class InSingle(Parts, weight=lambda: nn.Parameter(torch.randn(8, 8))):
    def forward(self, x: Tensor) -> Tensor:
        return product_in_single(x.flatten(0, 1), self.weight).view_as(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("right", [True, False])
def test_an_operator_without_a_kernel_for_float64_hinders_no_verification(right: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), InSingle(), nn.Linear(8, 8))
    plan = Plan(segments=(SegmentPlan(path="1"), SegmentPlan(path="2", chunks=2)))

    def wrong(model: nn.Module) -> None:
        apply_plan(model, plan)
        model[1].register_forward_hook(lambda module, args, output: output * (1 + 1e-6))  # type: ignore[operator]

    found = check(plan, None if right else wrong, model)
    assert found.passed is right
    assert found.precision == "fp64"


class Speech(Parts, conv=lambda: nn.Conv1d(1, 4, 3), head=lambda: nn.Linear(4, 2)):
    """Asks for the gradient of a view of its input, as Wav2Vec2 does, which an input that needs one forbids."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(1)[:, None]
        y.requires_grad = True
        return self.head(self.conv(y).mean(-1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", [Plan(segments=(SegmentPlan(path="conv"),)), CHUNKED])
def test_a_model_that_rejects_inputs_which_need_a_gradient_is_verified(plan: Plan) -> None:
    found = check(plan, model=Speech())
    assert found.passed
    assert found.compared == 6  # the output, four parameters and the generator: no gradient of the input
