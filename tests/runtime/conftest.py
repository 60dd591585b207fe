"""One judge for every segment: the model with it must do, to the bit, what the same model does without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.runtime import SegmentConfig, install_segment, reset_hidden_state
from memopt_cli.runtime.container import _Run
from memopt_cli.runtime.state import ModuleState
from memopt_cli.runtime.tree import map_leaves, tensors_of

Call = Callable[..., Any]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit: -0.0 is not 0.0, and a NaN is itself."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return not a.numel() or torch.equal(_octets(a), _octets(b))


def _octets(x: Tensor) -> Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)).view(torch.uint8)


def train(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int) -> dict[str, Tensor]:
    """Take training steps and collect everything they leave behind, by name."""
    found: dict[str, Tensor] = {}
    for step in range(steps):
        given = map_leaves(_leaf, (args, kwargs))
        torch.manual_seed(step)
        outputs = tensors_of(model(*given[0], **given[1]))
        leaves = [t for t in outputs if t.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.randn(t.shape, dtype=t.dtype) for t in leaves])
        kept = [(f"output {i} {t.requires_grad}", t) for i, t in enumerate(outputs)]
        kept += [(f"gradient of input {i}", t.grad) for i, t in enumerate(tensors_of(given)) if t.grad is not None]
        kept += [(f"gradient of {n}", p.grad) for n, p in model.named_parameters() if p.grad is not None]
        kept += [(f"buffer {n}", b) for n, b in model.named_buffers()]
        kept += [(f"state {i}", t) for i, t in enumerate(ModuleState(model).tensors())]
        kept.append(("random numbers", torch.get_rng_state()))
        found |= {f"step {step}: {name}": t.detach().clone() for name, t in kept}
        reset_hidden_state(model)
        _update(model)
    return found


def _leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point() and leaf.requires_grad)


def _update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.zero_grad()


@dataclass
class Judge:
    """Counts recomputations and compares a model with its optimized copy."""

    recomputations: int = 0

    def __call__(
        self, model: nn.Module, segments: dict[str, SegmentConfig], *args: Any, steps: int = 2, **kwargs: Any
    ) -> nn.Module:
        """Assert that ``segments``, by path, change nothing; returns the optimized copy after its steps."""
        optimized = copy.deepcopy(model)
        for path, config in segments.items():
            install_segment(optimized.get_submodule(path), config)
        self.compare(model, optimized, *args, steps=steps, **kwargs)
        return optimized

    def compare(self, model: nn.Module, optimized: nn.Module, *args: Any, steps: int = 2, **kwargs: Any) -> None:
        """Assert that two models do the same."""
        reference = train(model, args, kwargs, steps)
        other = train(optimized, args, kwargs, steps)
        assert reference.keys() == other.keys()
        assert [name for name, t in reference.items() if not same_bits(t, other[name])] == []


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """A :class:`Judge`; if it judged gradients, the test must see to it that something was recomputed."""
    judge = Judge()
    entered = _Run.entered

    def counted(run: _Run, recomputing: bool) -> None:
        judge.recomputations += recomputing
        entered(run, recomputing)

    monkeypatch.setattr(_Run, "entered", counted)
    torch.manual_seed(0)
    return judge
