"""The optimizer in backward: the same bits as in its step, and what cannot be so is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from memopt_cli.runtime import GCContainer, SegmentConfig, install_segment
from memopt_cli.runtime.in_backward import (
    check_steps_alone,
    has_in_backward,
    install_in_backward,
    is_in_backward,
    remove_in_backward,
)
from memopt_cli.text.optimizer_text import _CLASSES, NamedOptimizer, parse_optimizer
from memopt_cli.training.optimizers import optimizer_maker
from tests.zoo.models import GIVEN, Parts

Make = Callable[[nn.Module], Optimizer]


class Tied(nn.Module):
    """Matrices alone, one of them used twice; two groups of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.second(torch.tanh(self.first(x))))))  # type: ignore[no-any-return]


def a_model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def every_optimizer() -> Iterator[Any]:
    for name, (kind, implementations) in _CLASSES.items():
        missing = pytest.mark.skipif(not hasattr(torch.optim, kind), reason=f"this PyTorch has no {kind}")
        texts = (name if one == "default" else f"{name}:{one}" for one in implementations)
        yield from (pytest.param(text, marks=missing) for text in texts)


def in_two_groups(text: str, rate: float = 0.01) -> Make:
    choice = parse_optimizer(text)
    assert isinstance(choice, NamedOptimizer)

    def make(model: nn.Module) -> Optimizer:
        whole = optimizer_maker(choice)(model)
        assert whole is not None
        options = {name: value for name, value in whole.defaults.items() if name != "lr"}
        *others, last = model.parameters()
        groups = [{"params": others, "lr": rate}, {"params": [last], "lr": 2 * rate, "weight_decay": 0.1}]
        return type(whole)(groups, lr=rate, **accepted(type(whole), options))

    return make


def accepted(kind: type[Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in inspect.signature(kind).parameters}


def trained(make: Make, *, in_backward: bool, model: nn.Module | None = None, steps: int = 10) -> dict[str, Any]:
    """Return the parameters and the optimizer's state after ten steps."""
    model = model or a_model()
    optimizer = make(model)
    if in_backward:
        check_steps_alone(optimizer)
        install_in_backward(optimizer, model)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        assert all((p.grad is None) == in_backward for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    remove_in_backward(model)
    return {"parameters": [p.detach() for p in model.parameters()], "state": optimizer.state_dict()}


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("text", [*every_optimizer()])
def test_ten_steps_are_the_same_to_the_bit(text: str) -> None:
    make = in_two_groups(text)
    plain, fused = trained(make, in_backward=False), trained(make, in_backward=True)
    assert not torch.equal(plain["parameters"][0], next(a_model().parameters()))
    assert_same(plain["parameters"], fused["parameters"])
    assert plain["state"]["param_groups"] == fused["state"]["param_groups"]
    assert_same(plain["state"]["state"], fused["state"]["state"])
    assert [*plain["state"]["state"]] == [*fused["state"]["state"]]


@pytest.mark.parametrize("text", [*every_optimizer()])
def test_one_that_has_state_is_tried_with_the_same(text: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
    optimizer = in_two_groups(text)(model)
    for _ in range(2):
        backward(model)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    check_steps_alone(optimizer)
    assert_same(before["state"], optimizer.state_dict()["state"])


class ReadyMade(torch.optim.SGD):
    """Makes its state when it is made, and counts on it, as PyTorch 2.8's Adagrad."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"sum": torch.ones_like(parameter), "taken": [0]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["sum"] += parameter.grad
            state["taken"][0] += 1
            parameter.detach().sub_(state["sum"] / state["taken"][0])


def test_an_optimizer_that_makes_its_state_itself_can_step_alone() -> None:
    optimizer = ReadyMade(a_model().parameters())
    check_steps_alone(optimizer)
    assert all(state["taken"] == [0] and state["sum"].eq(1).all() for state in optimizer.state.values())


def test_segments_recompute_before_their_parameters_change() -> None:
    make = in_two_groups("adamw")

    def segmented() -> Tied:
        model = a_model()
        for part in (model.first, model.second, model.last):
            install_segment(part, SegmentConfig())
        assert isinstance(model.second, GCContainer)
        return model

    plain = trained(make, in_backward=False)
    assert_same(plain["parameters"], trained(make, in_backward=True, model=segmented())["parameters"])


class Biased(nn.Module):
    """Its bias has a whole gradient before backward asks for anything that depends on the bias."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.inner, self.bias = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5)), nn.Parameter(torch.ones(6))
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        gate = (x + self.bias).detach().sigmoid() if self.gated else 1.0
        return y * gate + self.bias  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("paths", [("",), ("0", "1"), ("0", "0.inner", "1.inner"), ("0.inner.1",)], ids=str)
def test_a_segment_runs_again_before_a_parameter_changes_that_backward_is_done_with(
    gated: bool, paths: tuple[str, ...]
) -> None:
    def made(*segments: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Biased(gated=gated), Biased(gated=gated))
        for path in segments:
            install_segment(model.get_submodule(path), SegmentConfig())
        torch.manual_seed(0)
        return model

    make = in_two_groups("sgd")
    plain = trained(make, in_backward=False, model=made())
    assert_same(plain["parameters"], trained(make, in_backward=True, model=made())["parameters"])
    assert_same(plain["parameters"], trained(make, in_backward=True, model=made(*paths))["parameters"])


def installed(make: Make | None = None) -> tuple[nn.Module, Optimizer]:
    model = a_model()
    optimizer = (make or in_two_groups("adamw"))(model)
    install_in_backward(optimizer, model)
    return model, optimizer


def backward(model: nn.Module, *, retain_graph: bool = False) -> Tensor:
    loss = model(torch.ones(4, 6)).square().mean()
    loss.backward(retain_graph=retain_graph)
    assert isinstance(loss, Tensor)
    return loss


def test_it_can_be_taken_off() -> None:
    model, optimizer = installed()
    assert has_in_backward(model)
    assert is_in_backward(optimizer)
    remove_in_backward(model)
    assert not has_in_backward(model)
    assert not is_in_backward(optimizer)
    backward(model)
    assert all(p.grad is not None for p in model.parameters())


def test_a_loaded_state_is_used() -> None:
    make = in_two_groups("adamw")
    model, optimizer = installed(make)
    plain = a_model()
    of_plain = make(plain)
    state = copy.deepcopy(of_plain.state_dict())
    state["param_groups"][0]["lr"] = 0.5
    for one in (optimizer, of_plain):
        one.load_state_dict(copy.deepcopy(state))
    for one, its in ((model, optimizer), (plain, of_plain)):
        backward(one)
        its.step()
    assert_same(list(plain.parameters()), list(model.parameters()))


def test_a_copy_and_a_saved_model_are_plain() -> None:
    model, _ = installed()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        backward(other)
        assert all(p.grad is not None for p in other.parameters())


def test_a_parameter_thawed_later_takes_the_plain_step() -> None:
    make, models = in_two_groups("adamw"), [a_model(), a_model()]
    for model in models:
        model.get_parameter("first.weight").requires_grad_(False)
    optimizers = [make(model) for model in models]
    install_in_backward(optimizers[0], models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            model.get_parameter("first.weight").requires_grad_(True)
    assert_same(*[list(model.parameters()) for model in models])


@pytest.mark.slow
def test_without_its_optimizer_a_model_has_gradients_again() -> None:
    model, optimizer = installed()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(model)
    assert all(p.grad is not None for p in model.parameters())


def test_sparse_gradients_are_used() -> None:
    def steps(in_backward: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Embedding(8, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        if in_backward:
            install_in_backward(optimizer, model)
        for step in range(4):
            model(torch.tensor([step, step, 7])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    assert_same(steps(False), steps(True))


def test_a_closure_finds_the_same() -> None:
    make, models = in_two_groups("adamw"), [a_model(), a_model()]
    optimizers = [make(model) for model in models]
    install_in_backward(optimizers[0], models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step(lambda model=model: backward(model).item())  # type: ignore[misc]
    assert_same(*[list(model.parameters()) for model in models])


# ---------------------------------------------------------------------------------------------- refused at once


class Counting(torch.optim.SGD):
    """Its rate falls with each step, whichever parameters that has."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
        super().step(closure)


class Clipping(torch.optim.SGD):
    """Looks at all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step(closure)


class Demanding(torch.optim.SGD):
    """Wants all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        super().step(closure)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "closure"),
        (lambda parameters: Counting(parameters, lr=0.1), "several parameters at once"),
        (lambda parameters: Clipping(parameters, lr=0.0), "several parameters at once"),
        (lambda parameters: Demanding(parameters, lr=0.1), "cannot take a step"),
        (torch.optim.SparseAdam, "dense"),
    ],
)
def test_an_optimizer_that_cannot_step_alone_is_refused(make: Any, reason: str) -> None:
    model = a_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = make(list(model.parameters()))
    with pytest.raises(ValueError, match=reason):
        check_steps_alone(optimizer)
    assert_same(before, model.state_dict())
    assert not optimizer.state


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    model, optimizer = installed()
    with pytest.raises(ValueError, match="already"):
        install_in_backward(torch.optim.SGD(model.parameters()), model)
    assert is_in_backward(optimizer)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice_in_a_group_is_refused() -> None:
    model = a_model()
    with pytest.raises(ValueError, match="twice"):
        install_in_backward(torch.optim.SGD([model.last.weight, model.last.weight]), model)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is not a torch\.optim\.Optimizer"):
        install_in_backward(3, a_model())  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter of the model"):
        install_in_backward(torch.optim.SGD(a_model().parameters()), a_model())


# ---------------------------------------------------------------------------------------------- refused as it shows


class CallingItsBase(torch.optim.SGD):
    """An optimizer that is extended in the usual way; the step of the base also calls the hooks of this one."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_a_step_that_calls_that_of_its_base() -> None:
    torch.optim.SGD(a_model().parameters(), lr=0.1)  # from here on the class has hooks
    plain, model = a_model(), a_model()
    for net in (plain, model):
        optimizer = CallingItsBase(net.parameters(), lr=0.1, momentum=0.9)
        if net is model:
            install_in_backward(optimizer, net)
        for _ in range(3):
            net(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_accumulation_is_refused_by_name() -> None:
    model, _ = installed()
    backward(model)
    with pytest.raises(RuntimeError, match=r"'last.weight' gets a second gradient"):
        backward(model)


def test_a_second_backward_through_a_graph_is_refused() -> None:
    model, _ = installed()
    loss = backward(model, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # PyTorch's own check is the first
        loss.backward()


def test_settings_that_change_after_backward_are_refused() -> None:
    model, optimizer = installed()
    backward(model)
    optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="settings"):
        optimizer.step()


def test_a_gradient_given_after_backward_is_refused() -> None:
    model, optimizer = installed()
    backward(model)
    model.get_parameter("last.weight").grad = torch.ones(3, 6)
    with pytest.raises(RuntimeError, match=r"'last.weight' got a new gradient"):
        optimizer.step()


@pytest.mark.parametrize("text", ["adamw", "adamw:fused"])
def test_a_gradient_scaler_is_refused(text: str) -> None:
    model, optimizer = installed(in_two_groups(text))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()
    with pytest.raises((RuntimeError, AssertionError), match=r"No inf checks were recorded|GradScaler"):
        scaler.step(optimizer)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = installed()
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="2 processes"):
        backward(model)
    assert_same(before, model.state_dict())


# ---------------------------------------------------------------------------------------------- read without gradient


class Reading(Parts, linear=lambda: nn.Linear(4, 4), shared=lambda: nn.Parameter(torch.ones(4)), detached=GIVEN):
    """Reads a parameter whose gradient is whole before this module's backward begins."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.shared if self.detached else self.shared * 2
        return torch.sin(self.linear(x) * scale.detach())


class Shared(nn.Module):
    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.part = Reading(detached=detached)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) * self.part.shared  # type: ignore[no-any-return]


def test_a_segment_reads_a_parameter_before_its_update() -> None:
    def make(segment: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Shared(detached=False)
        if segment:
            install_segment(model.part, SegmentConfig())
        return model

    def step(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        install_in_backward(optimizer, model)
        model(torch.ones(2, 4)).square().sum().backward()
        return [parameter.detach() for parameter in model.parameters()]

    assert_same(step(make(segment=False)), step(make(segment=True)))


@pytest.mark.parametrize("segment", [False, True])
def test_a_parameter_read_after_its_update_is_refused(segment: bool) -> None:
    model = Shared(detached=True)
    if segment:
        install_segment(model.part, SegmentConfig())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    install_in_backward(optimizer, model)
    with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place between forward and backward)"):
        model(torch.ones(2, 4)).square().sum().backward()
