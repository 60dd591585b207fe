"""Many models as one against the same models one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.model_batching import BatchModule
from memopt_cli.runtime.tree import tensors_of


def randomized(model: nn.Module, seed: int) -> nn.Module:
    """A copy with weights and running statistics of its own."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
            tensor.data = noise * 0.5 + 0.1 if tensor.dim() < 2 else (noise - 0.5) * 0.7
    return model


def _leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]


@pytest.fixture
def equals_separate() -> Callable[..., BatchModule]:
    """Batch models of different weights, take two steps with them and with each alone, and compare all they leave.

    Inputs are (models, …).  The route is the one asked for, so that what cannot be fused fails the test.
    """

    def check(
        model: nn.Module, *inputs: Tensor, route: str = "fused", dtype: torch.dtype = torch.float64
    ) -> BatchModule:
        models = len(inputs[0])
        model = model.to(dtype)
        inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)
        alone = [randomized(model, seed) for seed in range(models)]
        batched = BatchModule(model, models, route=route)  # type: ignore[arg-type]
        batched.load_state_dicts([m.state_dict() for m in alone])
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
        for _ in range(2):
            together = _leaves(inputs)
            outputs = [t for t in tensors_of(batched(*together)) if t.requires_grad]
            seed = torch.Generator().manual_seed(7)
            cotangents = [torch.randn(t.shape, generator=seed, dtype=t.dtype) for t in outputs]
            torch.autograd.backward(outputs, cotangents)
            for g, single in enumerate(alone):
                own = [t.detach()[g].clone().requires_grad_(t.is_floating_point()) for t in inputs]
                expected = [t for t in tensors_of(single(*own)) if t.requires_grad]
                torch.autograd.backward(expected, [c[g] for c in cotangents])
                for found, wanted in zip(outputs, expected, strict=True):
                    close(found[g], wanted, tolerance, "output")
                for found, wanted in zip(together, own, strict=True):
                    if wanted.grad is not None:
                        close(found.grad[g], wanted.grad, tolerance, "gradient of the input")
        _compare_gradients(batched, alone, tolerance)
        for state, single in zip(batched.state_dicts(), alone, strict=True):
            assert state.keys() == single.state_dict().keys()
            for name, wanted in single.state_dict().items():
                close(state[name], wanted, tolerance, name)
        return batched

    return check


def _compare_gradients(batched: BatchModule, alone: list[nn.Module], tolerance: float) -> None:
    for name, stacked in batched.models.named_parameters():
        largest = max(p.grad.abs().max().item() for p in alone[0].parameters() if p.grad is not None)
        for g, single in enumerate(alone):
            wanted = single.get_parameter(name).grad
            assert (stacked.grad is None) == (wanted is None), name
            if wanted is not None and stacked.grad is not None:
                close(stacked.grad[g], wanted, tolerance, f"gradient of {name}", least=largest * 1e-4)


def close(found: Tensor, wanted: Tensor, tolerance: float, name: str, least: float = 0.0) -> None:
    """Equal up to ``tolerance`` of the magnitude of ``wanted``, or of ``least``."""
    assert found.shape == wanted.shape, name
    found, wanted = found.double(), wanted.double()
    scale = max(wanted.abs().max().item(), least)
    gap = (found - wanted).abs().max().item()
    assert gap <= tolerance * scale, f"{name} differs by {gap / (scale or 1):.1e}"
