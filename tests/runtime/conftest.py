"""One judge for every segment: the model with it must do what the same model does without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.runtime import SegmentConfig, install_segment, reset_hidden_state
from memopt_cli.runtime.module_state import ModuleState
from memopt_cli.runtime.segment_run import SegmentRun
from memopt_cli.runtime.tree import map_leaves, tensors_of

Call = Callable[..., Any]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit: -0.0 is not 0.0, and a NaN is itself."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return not a.numel() or torch.equal(_octets(a), _octets(b))


def _octets(x: Tensor) -> Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)).view(torch.uint8)


def train(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int, between: Callable[[nn.Module], object]
) -> dict[str, Tensor]:
    """Take training steps, ``between`` after each, and collect everything they leave behind, by name."""
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
        between(model)
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
    """Counts recomputations and compares a model with its optimized copy, to the bit unless a tolerance is set."""

    recomputations: int = 0
    between: Callable[[nn.Module], object] = reset_hidden_state
    """Called after each step; the next one starts from what it leaves."""
    tolerance: float = 0.0
    """Difference allowed, relative to the largest magnitude of the tensor."""

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
        reference = train(model, args, kwargs, steps, self.between)
        other = train(optimized, args, kwargs, steps, self.between)
        assert reference.keys() == other.keys()
        assert [name for name, t in reference.items() if not self._agree(t, other[name])] == []

    def _agree(self, a: Tensor, b: Tensor) -> bool:
        if same_bits(a, b):
            return True
        if not self.tolerance or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return bool(((a - b).abs() <= self.tolerance * a.abs().max()).all())


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """Yield a :class:`Judge`; a test whose gradients it judged must have recomputed something."""
    judge = Judge()
    recompute = SegmentRun.repeat

    def counted(run: SegmentRun) -> Any:
        judge.recomputations += 1
        return recompute(run)

    monkeypatch.setattr(SegmentRun, "repeat", counted)
    torch.manual_seed(0)
    return judge


@pytest.fixture
def exactly(judge: Judge) -> Iterator[Judge]:
    """Return the judge for float64."""
    judge.tolerance = 1e-9
    torch.set_default_dtype(torch.float64)
    yield judge
    torch.set_default_dtype(torch.float32)
