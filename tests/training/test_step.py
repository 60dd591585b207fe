"""Where backward starts: at the loss in a model's output, or at random gradients on all outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import StepError
from memopt_cli.pipeline.batches.recommendation import recommend_prepared
from memopt_cli.pipeline.comparisons.regression import record_prepared
from memopt_cli.pipeline.equivalence import compare_prepared
from memopt_cli.pipeline.memory.profiling import profile_prepared
from memopt_cli.pipeline.plans.optimization import find_plan
from memopt_cli.records import (
    BaselineRequest,
    BatchRequest,
    InputSpec,
    ModelSource,
    OptimizeRequest,
    ProfileRequest,
    StepSettings,
    TensorSpec,
)
from memopt_cli.search.plan.policy import SearchOverrides, resolve
from memopt_cli.training.step import TrainingStep, seeds_of_backward
from tests.zoo.prepared import prepare_here

LOGITS = torch.ones(2, 3, requires_grad=True)
LOSS = LOGITS.sum()
OTHER = LOGITS.mean()


@dataclass
class Output:
    logits: Tensor
    parts: dict[str, Any]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (LOSS, ""),
        ({"loss": LOSS, "aux": OTHER}, ""),
        ((LOGITS, LOSS), "The scalar output 1 is taken as the loss; `--loss file.py:function` names another."),
        ((LOGITS, LOSS, LOSS.detach(), torch.tensor(3)), "The scalar output 1 is taken"),
        ([LOGITS, {"nll": LOSS, "total": LOSS}], "The scalar output '1.total' is taken"),
        ({"logits": LOGITS, "nll": LOSS}, "The scalar output 'nll' is taken"),
        (Output(LOGITS, {"nll": LOSS}), "The scalar output 'parts.nll' is taken"),
    ],
)
def test_the_only_scalar_of_an_output_is_its_loss(output: Any, said: str) -> None:
    messages: list[str] = []
    roots, cotangents = seeds_of_backward(output, None, 0, messages.append)
    assert roots[0] is LOSS
    assert (len(roots), cotangents) == (1, [None])
    assert [sentence[: len(said)] for sentence in messages] == [said] * bool(said)


@pytest.mark.parametrize(
    ("output", "count"), [((LOGITS, LOSS, OTHER), 3), ((LOGITS, LOSS.detach(), LOGITS * 2), 2), ((LOGITS, None), 1)]
)
def test_without_a_loss_all_outputs_get_random_gradients(output: Any, count: int) -> None:
    messages: list[str] = []
    roots, cotangents = seeds_of_backward(output, None, 0, messages.append)
    assert len(roots) == len(cotangents) == count
    assert None not in cotangents
    said = f"No loss is known: backward starts from random gradients on {count} outputs; `--loss file.py:function`"
    assert [sentence.startswith(said) for sentence in messages] == [True] * (count > 1)


def test_a_scalar_that_leaves_parameters_out_is_not_the_loss() -> None:
    """The temperature of a contrastive model, or an auxiliary loss of some layers."""
    encoder, scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))
    roots, _ = seeds_of_backward((encoder(torch.ones(2, 4)), scale.exp()), None, 0)
    assert len(roots) == 2
    first, head = nn.Linear(4, 4), nn.Linear(4, 4)
    hidden = first(torch.ones(2, 4))
    roots, _ = seeds_of_backward((head(hidden), hidden.square().mean()), None, 0)
    assert len(roots) == 2


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.net(x)
        return y, y.square().mean()


SAID = "The scalar output 1 is taken as the loss; `--loss file.py:function` names another."
SPEC = InputSpec(tensors=(TensorSpec(shape=("B", 64)),), dims={"B": 32}, source="--input")
REQUEST: dict[str, Any] = {"source": ModelSource(location="-"), "settings": StepSettings(), "spec": SPEC}


def notes_of(command: str, tmp_path: Any, build: Callable[[], nn.Module] = WithLoss) -> Any:
    prepared = prepare_here(build, SPEC, 32)
    match command:
        case "profile":
            return profile_prepared(ProfileRequest(**REQUEST), prepared, plan=prepared.carried).notes
        case "optimize":
            search = resolve(SearchOverrides(level=1))
            return find_plan(OptimizeRequest(**REQUEST, search=search), prepared).notes
        case "recommend-batch":
            request = BatchRequest(**REQUEST, memory=8 << 20)
            return recommend_prepared(request, prepared, None, ()).notes
        case "baseline":
            request = BaselineRequest(**REQUEST, output=str(tmp_path / "b.json"))
            return record_prepared(request, prepared).notes
    return compare_prepared(prepared, prepare_here(build, SPEC, 32), 1).notes


@pytest.mark.parametrize("command", ["profile", "optimize", "recommend-batch", "baseline", "verify"])
def test_each_report_says_which_output_is_the_loss(command: str, tmp_path: Any) -> None:
    assert list(notes_of(command, tmp_path)).count(SAID) == 1


class Neuron(nn.Module):
    """Neuron in SpikingJelly's step mode s."""

    def __init__(self) -> None:
        super().__init__()
        self._step_mode, self._memories = "s", {"v": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


@pytest.mark.parametrize("command", ["profile", "optimize", "recommend-batch", "baseline"])
def test_each_report_says_that_the_step_is_of_one_time_step(command: str, tmp_path: Any) -> None:
    notes = notes_of(command, tmp_path, lambda: nn.Sequential(nn.Linear(64, 64), Neuron()))
    assert sum("the step that was run is of one time step" in note.lower() for note in notes) == 1


class TakingAnything(nn.Linear):
    def forward(self, input: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Tensor:
        return super().forward(input)


class TakingNothingByName(nn.Linear):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(kwargs["input"])


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (TakingAnything, "attention_mask", []),
        (
            TakingAnything,
            "atention_mask",
            ["forward names no argument atention_mask, so it goes into **rest; did you mean attention_mask?"],
        ),
        (
            TakingAnything,
            "labels",
            ["forward names no argument labels, so it goes into **rest; it names input, attention_mask."],
        ),
        (TakingNothingByName, "atention_mask", []),
    ],
)
def test_an_argument_that_no_forward_names_is_told(kind: Callable[..., nn.Module], name: str, said: list[str]) -> None:
    tensors = (TensorSpec(name="input", shape=("B", 8)), TensorSpec(name=name, shape=("B", 8)))
    spec = InputSpec(tensors=tensors, dims={"B": 4}, source="--input")
    prepared = prepare_here(lambda: kind(8, 8), spec, 4)
    notes = profile_prepared(ProfileRequest(**{**REQUEST, "spec": spec}), prepared, prepared.carried).notes
    assert [note for note in notes if note.startswith("forward names")] == said


def test_of_a_model_with_no_parameters_no_loss_is_asked_for() -> None:
    step = TrainingStep(model=nn.Tanh(), args=(torch.ones(2),), kwargs={}, settings=StepSettings())
    with pytest.raises(StepError, match="nothing to differentiate") as raised:
        step.backward(step.forward())
    assert raised.value.hint.startswith("The model has no parameters, so no loss can train it. torch.jit.freeze")
