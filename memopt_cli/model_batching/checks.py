"""Assertions for users' own tests: a batched model computes what each of its models computes by itself."""

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
    """Assert that ``batch`` copies of ``model`` with random weights compute what each computes by itself, in eval mode.

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
        If an output differs; the message names the output and the model that differ most.
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
    """Assert that ``batched_model``, a batch of copies of ``model``, computes what each copy computes by itself.

    Parameters
    ----------
    batched_model, model:
        The batched model, and the model that it batches.
    input_shapes:
        A shape (images, …) for each argument of forward, which is drawn from a normal distribution.
    rtol, atol:
        Tolerances of ``torch.allclose``.
    randomize:
        Give the models random weights first.  ``False``: compare them with their own weights.
    restore_state:
        Give the models their own weights back at the end.

    Raises
    ------
    AssertionError
        If an output differs; the message names the output and the model that differ most.
    """
    if not input_shapes or not all(isinstance(shape, Sequence) for shape in input_shapes):
        raise UsageError(
            f"input_shapes is {input_shapes!r}, not a list of shapes",
            hint="Pass a list of shapes, one for each argument.",
        )
    states = batched_model.state_dicts()
    modes = [(m, m.training) for m in batched_model.modules()]
    if randomize:
        batched_model.load_state_dicts([_randomize(state) for state in states])
    device = next(iter(tensors_of(list(model.state_dict().values()))), torch.empty(0)).device
    inputs = [torch.randn(batched_model.batch, *shape, device=device) for shape in input_shapes]
    try:
        with torch.no_grad():
            batched = tensors_of(batched_model.eval()(*inputs))
            cases = zip(batched_model.state_dicts(), *inputs, strict=True)
            separate = [_separate_outputs(model, state, model_inputs) for state, *model_inputs in cases]
    finally:
        for module, mode in modes:
            module.training = mode
        if restore_state:
            batched_model.load_state_dicts(states)
    _check_close(batched, [torch.stack(outputs) for outputs in zip(*separate, strict=True)], rtol, atol)


# pytest would take functions of these names for tests where they are imported.
test_model_batching.__test__ = test_batched_model.__test__ = False  # type: ignore[attr-defined]


def _randomize(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``state`` with random floating tensors, each with the norm of the original."""
    random_state = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            random_state[name] = tensor
            continue
        noise = torch.randn_like(tensor)
        noise = noise.abs() if bool((tensor >= 0).all()) else noise  # a variance must stay positive
        random_state[name] = noise * (tensor.norm() / noise.norm()) if noise.numel() else noise
    return random_state


def _separate_outputs(model: nn.Module, state: dict[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    single_model = copy.deepcopy(model).eval()
    single_model.load_state_dict(state)
    return tensors_of(single_model(*inputs))


def _check_close(batched: Sequence[Tensor], separate: Sequence[Tensor], rtol: float, atol: float) -> None:
    counts = f"{len(batched)} tensors, and a model by itself {len(separate)}"
    assert len(batched) == len(separate), f"the batched model returns {counts}"
    for index, (output, expected) in enumerate(zip(batched, separate, strict=True)):
        shapes = f"{tuple(output.shape)} in the batch and {tuple(expected.shape)} from models by themselves"
        assert output.shape == expected.shape, f"output {index} has the shapes {shapes}"
        if not torch.allclose(output, expected, rtol=rtol, atol=atol, equal_nan=True):
            differences = (output - expected).abs().flatten(1).amax(1)
            raise AssertionError(
                f"output {index} of model {int(differences.argmax())} differs by {float(differences.max()):.1e} from "
                f"the output of the model by itself (rtol={rtol:g}, atol={atol:g})"
            )
