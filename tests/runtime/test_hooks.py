"""Hooks within a segment that change what is computed: a recomputation has those of forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memopt_cli.runtime import SegmentConfig, install_segment

Handle = Any


def _tripled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 3


def _tripled_linear(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 3 if type(module) is nn.Linear else None


def _doubled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,) if type(module) is nn.Linear else None


def _doubled_by_name(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] * 2,), kwargs


def _halved(module: nn.Module, before: Any, after: Any) -> Any:
    return tuple(g / 2 for g in before)


HOOKS: dict[str, Callable[[nn.Module], Handle]] = {
    "after": lambda m: m.register_forward_hook(_tripled),
    "always after": lambda m: m.register_forward_hook(_tripled, always_call=True),
    "before": lambda m: m.register_forward_pre_hook(_doubled),
    "before, by name": lambda m: m.register_forward_pre_hook(_doubled_by_name, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(_halved),
    "after every module": lambda m: register_module_forward_hook(_tripled_linear),
    "before every module": lambda m: register_module_forward_pre_hook(_doubled),
}


@pytest.fixture(params=HOOKS)
def hook(request: pytest.FixtureRequest) -> Callable[[nn.Module], Handle]:
    return HOOKS[request.param]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()))


def _gradients(paths: list[str], train: Callable[[nn.Module], None], config: SegmentConfig) -> list[Tensor]:
    model = _model()
    for path in paths:
        install_segment(model.get_submodule(path), config)
    train(model)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("config", [SegmentConfig(), SegmentConfig(chunks=2)], ids=["whole", "chunks"])
@pytest.mark.parametrize("paths", [["1"], [""], ["", "1"]], ids=" and ".join)
@pytest.mark.parametrize("way", ["added", "removed"])
def test_between_forward_and_backward(
    hook: Callable[[nn.Module], Handle], way: str, paths: list[str], config: SegmentConfig
) -> None:
    def train(model: nn.Module) -> None:
        x = torch.linspace(-1, 1, 24).view(6, 4)
        for _ in range(5):  # whoever looks at a sample of the steps does not at all of these
            handle = hook(model[1][0]) if way == "removed" else None
            output = model(x)
            if handle is None:
                handle = hook(model[1][0])
            else:
                handle.remove()
            output.square().sum().backward()
            if way == "added":
                assert handle.hooks_dict_ref(), "it is there again"
            handle.remove()

    expected, found = _gradients([], train, config), _gradients(paths, train, config)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("paths", [["1"], [""], ["", "1"]], ids=" and ".join)
def test_a_hook_that_removes_itself(paths: list[str]) -> None:
    def train(model: nn.Module) -> None:
        x = torch.linspace(-1, 1, 24).view(6, 4)
        for _ in range(3):
            handles: list[Handle] = []

            def once(module: nn.Module, args: Any, output: Tensor, handles: list[Handle] = handles) -> Tensor:
                handles.pop().remove()
                return output * 3

            handles.append(model[1][0].register_forward_hook(once))
            model(x).square().sum().backward()

    expected = _gradients([], train, SegmentConfig())
    with pytest.warns(UserWarning, match="adds or removes hooks of its modules, .* runs without recomputation"):
        found = _gradients(paths, train, SegmentConfig())
    torch.testing.assert_close(found, expected)


def test_hooks_that_stay_are_nothing_to_warn_of(recwarn: pytest.WarningsRecorder) -> None:
    model = _model()
    for make in HOOKS.values():
        handle = make(model[1][0])
        plain = copy.deepcopy(model)
        install_segment(model[1], SegmentConfig())
        for net in (plain, model):
            net.zero_grad()
            net(torch.ones(2, 4)).square().sum().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        handle.remove()
        model = _model()
    assert not [w for w in recwarn if "recomputation" in str(w.message)]
