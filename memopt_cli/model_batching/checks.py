"""Assertions for users' own tests: a batched model computes what each of its models computes alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.model_batching.module import BatchModule
from memopt_cli.runtime.tree import tensors_of

Shape = Sequence[int]


def test_model_batching(
    model: nn.Module, input_shapes: Sequence[Shape], batch: int = 3, rtol: float = 1e-6, atol: float = 1e-6
) -> None:
    """Assert that ``batch`` copies of ``model`` with random weights compute what each computes alone, in eval mode.

    Gradients and buffers need no test: no route is used without comparing them.

    Parameters
    ----------
    model:
        Model to batch; it stays as it was.
    input_shapes:
        A shape (images, …) for each argument of forward, which is drawn from a normal distribution.
    batch:
        Number of copies.
    rtol, atol:
        Tolerances of ``torch.allclose``.

    Raises
    ------
    AssertionError
        If an output differs; it names the output and the model that differ most.
    """
    test_batched_model(BatchModule(model, batch), model, input_shapes, rtol, atol)


def test_batched_model(
    batched_model: BatchModule,
    model: nn.Module,
    input_shapes: Sequence[Shape],
    rtol: float = 1e-6,
    atol: float = 1e-6,
    randomize: bool = True,
    restore_state: bool = True,
) -> None:
    """Assert that ``batched_model``, which batches ``model``, computes what each of its models computes alone.

    Parameters
    ----------
    batched_model, model:
        The batch, and the model that it batches.
    input_shapes:
        A shape (images, …) for each argument of forward, which is drawn from a normal distribution.
    rtol, atol:
        Tolerances of ``torch.allclose``.
    randomize:
        Give the models random weights first; ``False`` compares those that they have.
    restore_state:
        Give the models their own weights back at the end.

    Raises
    ------
    AssertionError
        If an output differs; it names the output and the model that differ most.
    """
    if not input_shapes or not all(isinstance(shape, Sequence) for shape in input_shapes):
        raise UsageError(f"input_shapes={input_shapes!r}", hint="Give a list of shapes, one for each argument.")
    before, trained = batched_model.state_dicts(), [(m, m.training) for m in batched_model.modules()]
    if randomize:
        batched_model.load_state_dicts([_drawn(state) for state in before])
    device = next(iter(tensors_of(list(model.state_dict().values()))), torch.empty(0)).device
    inputs = [torch.randn(batched_model.batch, *shape, device=device) for shape in input_shapes]
    try:
        with torch.no_grad():
            together = tensors_of(batched_model.eval()(*inputs))
            each = zip(batched_model.state_dicts(), *inputs, strict=True)
            alone = [_outputs(model, state, given) for state, *given in each]
    finally:
        for module, mode in trained:
            module.training = mode
        if restore_state:
            batched_model.load_state_dicts(before)
    _compare(together, [torch.stack(outputs) for outputs in zip(*alone, strict=True)], rtol, atol)


# pytest would take functions of these names for tests where they are imported.
test_model_batching.__test__ = test_batched_model.__test__ = False  # type: ignore[attr-defined]


def _drawn(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``state`` with floating tensors drawn at random, each with the norm of the original."""
    drawn = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            drawn[name] = tensor
            continue
        noise = torch.randn_like(tensor)
        noise = noise.abs() if bool((tensor >= 0).all()) else noise  # a variance must stay positive
        drawn[name] = noise * (tensor.norm() / noise.norm()) if noise.numel() else noise
    return drawn


def _outputs(model: nn.Module, state: dict[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    alone = copy.deepcopy(model).eval()
    alone.load_state_dict(state)
    return tensors_of(alone(*inputs))


def _compare(together: Sequence[Tensor], alone: Sequence[Tensor], rtol: float, atol: float) -> None:
    assert len(together) == len(alone), f"the batched model returns {len(together)} tensors, one alone {len(alone)}"
    for index, (ours, theirs) in enumerate(zip(together, alone, strict=True)):
        shapes = f"{tuple(ours.shape)} and {tuple(theirs.shape)}"
        assert ours.shape == theirs.shape, f"output {index} has the shapes {shapes}, batched and alone"
        if not torch.allclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True):
            differences = (ours - theirs).abs().flatten(1).amax(1)
            raise AssertionError(
                f"output {index} of model {int(differences.argmax())} differs by {float(differences.max()):.1e} from "
                f"what it gives alone (rtol={rtol:g}, atol={atol:g})"
            )
