"""Lines to paste run, and take the step that was measured."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.measure.jobs import CallJob, Subject
from memopt_cli.measure.worker import Worker
from memopt_cli.records import InputSpec, ModelCall, ModelSource, StepSettings, TensorSpec
from memopt_cli.report.pasted import loop_of, training_settings

RATE = 0.5


def gradient_of(model: nn.Module, batches: list[tuple[Tensor, Tensor]], step: StepSettings) -> Tensor:
    """Of all parameters, by a step that is written out here."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(step.precision)
    model = copy.deepcopy(model)
    for inputs, targets in batches:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = nn.functional.mse_loss(model(inputs), targets)
        (loss / len(batches)).backward()
    if step.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), step.clip_norm)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("steps", "precision", "clip_norm"), [*itertools.product([1, 4], ["stored", "bf16", "fp16"], [None, 0.01])]
)
def test_the_loop_takes_the_step_that_was_measured(steps: int, precision: Any, clip_norm: float | None) -> None:
    torch.manual_seed(0)
    step = StepSettings(precision=precision, clip_norm=clip_norm, micro_batches=steps)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    loader = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(steps)]
    expected = gradient_of(model, loader, step)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    pasted = "\n".join(loop_of(ModelCall(), steps, step, "cpu:0"))
    assert (pasted == "") is ((steps, precision, clip_norm) == (1, "stored", None))
    if pasted:
        run(pasted, model, loader)
        taken = (before - nn.utils.parameters_to_vector(model.parameters()).detach()) / RATE
        torch.testing.assert_close(taken, expected, rtol=1e-2 if precision == "fp16" else 1e-3, atol=1e-5)
    assert all(p.grad is None for p in model.parameters())


def run(pasted: str, model: nn.Module, loader: Any) -> None:
    """Run a pasted loop, with the names that a script of the user's has."""
    names = {"torch": torch, "model": model, "loader": loader, "loss_function": nn.functional.mse_loss}
    exec(pasted, names | {"optimizer": torch.optim.SGD(model.parameters(), lr=RATE)})


class Returning(nn.Module):
    """A net of two inputs that gives its output, and its loss if there are labels, to ``shape``."""

    def __init__(self, shape: Callable[[Tensor, Tensor | None], Any]) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(4, 2), shape

    def forward(self, x: Tensor, scale: Tensor, labels: Tensor | None = None) -> Any:
        output = self.layer(x) * scale
        return self.shape(output, None if labels is None else nn.functional.mse_loss(output, labels))


X, SCALE, LABELS = (TensorSpec(name=name, shape=("B", size)) for name, size in (("x", 4), ("scale", 1), ("labels", 2)))


@pytest.mark.parametrize(
    ("shape", "tensors", "said"),
    [
        (lambda output, loss: {"logits": output, "loss": loss}, [X, SCALE, LABELS], "model(**batch)['loss']"),
        (lambda output, loss: SimpleNamespace(loss=loss), [X, SCALE, LABELS], "model(**batch).loss"),
        (lambda output, loss: (output, loss), [X, SCALE, LABELS], "model(**batch)[1]"),
        (lambda output, loss: loss, [replace(X, name=None), SCALE, LABELS], "model(inputs, **batch)"),
        (lambda output, loss: loss, [replace(t, name=None) for t in (X, SCALE, LABELS)], "model(*inputs)"),
        (lambda output, loss: output, [X, SCALE], "loss_function(model(**batch), targets)"),
        (lambda output, loss: output, [replace(X, name=None), SCALE], "loss_function(model(inputs, **batch), targets)"),
    ],
)
def test_the_loop_calls_the_model_as_the_step_does(
    shape: Callable[[Tensor, Tensor | None], Any], tensors: list[TensorSpec], said: str
) -> None:
    torch.manual_seed(0)
    model = Returning(shape)
    subject = Subject(
        source=ModelSource(location="net.pt"), spec=InputSpec(tensors=(*tensors,), dims={"B": 3}, source="--input")
    )
    call = Worker(subject, lambda: model).answer(CallJob())
    pasted = "\n".join(loop_of(call, 2, StepSettings(), "cpu"))
    assert f"    ({said} / 2).backward()" in pasted.splitlines()
    values = {"x": torch.randn(3, 4), "scale": torch.randn(3, 1), "labels": torch.randn(3, 2)}
    positional = [values[name] for name, t in zip(values, tensors, strict=False) if t.name is None]
    keywords = {t.name: values[t.name] for t in tensors if t.name is not None}
    sample: list[Any] = [positional[0] if len(positional) == 1 else positional] if positional else []
    sample += [keywords] * bool(keywords) + [values["labels"]] * ("targets" in said)
    loop_model = copy.deepcopy(model)
    run(pasted, loop_model, [sample if len(sample) > 1 else sample[0]] * 2)
    nn.functional.mse_loss(model.layer(values["x"]) * values["scale"], values["labels"]).backward()
    expected = model.layer.weight.detach() - RATE * grad_of(model.layer.weight)
    torch.testing.assert_close(loop_model.layer.weight.detach(), expected)


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


LABELLED = InputSpec(tensors=(X, SCALE, LABELS), dims={"B": 3}, source="--input")


@pytest.mark.parametrize(
    ("spec", "passes", "is_told"),
    [
        (LABELLED, 4, True),  # the model computes its loss from labels
        (LABELLED, 1, False),
        (replace(LABELLED, tensors=(X, SCALE)), 4, False),  # the loss is the user's own, of images for example
        (replace(LABELLED, tensors=(X, replace(SCALE, dtype="int64", values="-100,0..5"))), 4, True),
        (replace(LABELLED, tensors=(X, replace(SCALE, dtype="int64", values="-200..5"))), 4, True),
        (replace(LABELLED, tensors=(X, replace(SCALE, dtype="int64", values="-1,0..5"))), 4, False),
    ],
)
def test_a_loop_says_that_passes_do_not_count_alike_where_labels_of_minus_100_can_occur(
    spec: InputSpec, passes: int, is_told: bool
) -> None:
    model = Returning(lambda output, loss: output if loss is None else loss)
    call = Worker(Subject(source=ModelSource(location="net.pt"), spec=spec), lambda: model).answer(CallJob())
    lines = [*loop_of(call, passes, StepSettings(clip_norm=1.0), "cpu")]
    assert lines[0].startswith("# 1/4 each: if your loss ignores labels (-100)") is is_told
    assert sum("-100" in line for line in lines) == is_told


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (StepSettings(), ["accumulate_grad_batches=1)", "gradient_accumulation_steps=1)"]),
        (StepSettings(precision="bf16"), ['accumulate_grad_batches=1, precision="bf16-mixed")', "steps=1, bf16=True)"]),
        (StepSettings(precision="fp16"), ['precision="16-mixed")', "fp16=True)", "torch.autocast"]),
        (StepSettings(precision="fp64"), ['precision="64-true")', "model.double()"]),
        (StepSettings(precision="fp32"), ["model.float()"]),
        (StepSettings(clip_norm=1.0), ["gradient_clip_val=1)", "max_grad_norm=1)", "clip_grad_norm_"]),
    ],
)
def test_every_setting_of_the_step_is_pasted(step: StepSettings, said: list[str]) -> None:
    lines = "\n".join(training_settings(8, 1, step, "cuda:0", ModelCall()))
    assert [text for text in said if text not in lines] == []
    assert ("for " in lines) == (step.clip_norm is not None or step.precision in ("bf16", "fp16"))
