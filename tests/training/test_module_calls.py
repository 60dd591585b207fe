"""What is known of the calls of modules while a model runs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch import Tensor, cat, nn, ones, zeros_like
from torch.utils.hooks import RemovableHandle

from memopt_cli.errors import StepError
from memopt_cli.runtime.state import StartingState
from memopt_cli.training.module_calls import (
    InputsRejectedError,
    called_modules,
    calls_of_all_layers,
    failed_step,
    module_hooks,
    one_step_noted,
    running_calls,
    skipped_layers,
)
from tests.zoo.models import Parts


class Tries(Parts, layer=lambda: nn.Linear(3, 3)):
    """Catches what its layer raises."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.layer(x)  # type: ignore[no-any-return]
        except RuntimeError:
            return x


class Raises(Parts, within=Tries):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError(self.within(x).shape)


def test_an_exception_that_was_caught_is_not_where_the_next_comes_from() -> None:
    model = nn.Sequential(Raises())
    with pytest.raises(LookupError) as caught:
        model(ones(2, 4))
    assert [call.path for call in running_calls(caught.value, model)] == ["", "0"]


class Complains(nn.Module):
    def __init__(self, complaint: Exception) -> None:
        super().__init__()
        self.complaint = complaint

    def forward(self, x: Tensor) -> Tensor:
        raise self.complaint


def error_of(model: nn.Module, *inputs: Any) -> StepError:
    with pytest.raises(Exception, match=r"\w") as caught:
        model(*inputs)
    return failed_step(caught.value, model)


def test_an_error_that_speaks_of_no_input_is_told_as_what_it_is() -> None:
    error = error_of(nn.Sequential(Complains(ValueError("oops"))), ones(2, 3))
    assert not isinstance(error, InputsRejectedError)
    assert error.message.startswith("forward of module '0' (Complains) raised ValueError: oops (")
    line = Complains.forward.__code__.co_firstlineno + 1
    assert error.message.endswith(f"{__file__}, line {line})")
    assert "`-i" not in error.hint


@pytest.mark.parametrize("complaint", ["wrong input shape", "missing 1 required positional argument: 'y'"])
def test_an_error_that_speaks_of_an_input_has_a_hint_on_inputs(complaint: str) -> None:
    error = error_of(Complains(TypeError(complaint)), ones(2, 3))
    assert isinstance(error, InputsRejectedError)
    line = Complains.forward.__code__.co_firstlineno + 1
    where = f"({__file__}, line {line})"
    assert (
        error.message == f"the model itself (Complains) rejected its input 2x3@float32: TypeError: {complaint} {where}"
    )


def test_hints_on_a_batch_of_one_and_on_a_target_among_the_inputs() -> None:
    assert "a batch of at least 2" in error_of(nn.Sequential(nn.BatchNorm1d(3)), ones(1, 3)).hint
    assert "leave targets out" in error_of(nn.Linear(3, 3), ones(2, 3), ones(2)).hint


def test_hints_on_a_dictionary_beside_targets_and_on_sizes_that_do_not_halve() -> None:
    lacking = Complains(TypeError("forward() missing 1 required positional argument: 'num'"))
    hint = error_of(lacking, {"x": ones(2), "num": ones(2)}, {"y": ones(2)}).hint
    assert hint.startswith("The inputs are 2 positional arguments, and the first is a dictionary. Pass that alone")
    with pytest.raises(RuntimeError) as caught:
        cat([ones(2, 1, 6), ones(2, 1, 7)], 1)
    assert "halves its input n times" in error_of(Complains(caught.value), ones(2, 1, 30)).hint


def test_layers_without_gradients_beside_others_like_them_are_skipped() -> None:
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)),
            "experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)),
            "unused": nn.Linear(2, 2),
            "frozen": nn.ModuleList(nn.Linear(2, 2).requires_grad_(index == 0) for index in range(2)),
        }
    )
    assert skipped_layers(model) == []
    for parameter in model.parameters():
        parameter.grad = zeros_like(parameter) if parameter.requires_grad else None
    model["unused"].zero_grad()
    assert skipped_layers(model) == []
    model["layers"][1].zero_grad()
    assert skipped_layers(model) == ["layers.*"]
    model["experts"][0].zero_grad()
    assert skipped_layers(model) == ["layers.*", "experts.*"]


def test_a_layer_that_ran_in_part_is_not_skipped() -> None:
    model = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    for parameter in model.parameters():
        parameter.grad = zeros_like(parameter)
    model[0][1].zero_grad()
    assert skipped_layers(model) == ["*.*"]


def test_every_layer_calls_when_it_runs_what_any_layer_of_its_group_calls() -> None:
    layers = nn.ModuleList(nn.ModuleDict({"conv": nn.Linear(2, 2), "idle": nn.Linear(2, 2)}) for _ in range(3))
    layers[0]["down"] = nn.Linear(2, 2)  # type: ignore[operator]
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(2, 2)})

    def forward() -> None:
        model["head"](layers[0]["down"](layers[1]["conv"](ones(2))))  # type: ignore[index]

    called = called_modules(model, forward)
    assert called == {"head", "layers.0.down", "layers.1.conv"}
    convs = {f"layers.{number}.conv" for number in range(3)}
    assert calls_of_all_layers(model, ["layers.*"], called) == {"layers.0.down", *convs}


@pytest.mark.parametrize(
    ("name", "settings", "calls", "is_noted"),
    [
        ("spikingjelly.activation_based.neuron.LIFNode", {}, 1, True),
        ("spikingjelly.activation_based.neuron.LIFNode", {}, 3, False),
        ("spikingjelly.activation_based.neuron.LIFNode", {"step_mode": "m"}, 1, False),
        ("spikingjelly.activation_based.layer.Dropout", {}, 1, False),
        ("snntorch.Leaky", {"beta": 0.5, "init_hidden": True}, 1, True),
        ("snntorch.Leaky", {"beta": 0.5, "init_hidden": True}, 3, False),
    ],
)
def test_neurons_that_are_called_once_run_one_time_step(
    name: str, settings: dict[str, Any], calls: int, is_noted: bool
) -> None:
    package, _, class_name = name.rpartition(".")
    module = pytest.importorskip(package)
    net, notes = nn.Sequential(nn.Linear(3, 3), getattr(module, class_name)(**settings)), list[str]()
    with one_step_noted(net, notes.append):
        for _ in range(calls):
            net(ones(2, 3))
    assert [note.startswith("The step that was run is of one time step") for note in notes] == [True] * is_noted


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_hooks_that_were_added_stay_when_the_starting_state_is_restored() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: None)
    start = StartingState(layer)
    entered = list[str]()
    with module_hooks(nn.Sequential(layer), lambda path, *_: entered.append(path), lambda *_: None):
        start.restore()
        layer(ones(1, 2))
    assert entered == ["0"]


def test_no_hook_of_a_loaded_module_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are those of the process that saved it, and a process counts hooks from 0."""
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    saved = pickle.dumps(nn.utils.weight_norm(nn.Linear(2, 2)))
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    layer = pickle.loads(saved)
    hooks = dict(layer._forward_pre_hooks)
    entered = list[str]()
    with module_hooks(layer, lambda path, *_: entered.append(path), lambda *_: None):
        layer(ones(1, 2))
    assert entered == [""]
    assert layer._forward_pre_hooks == hooks != {}
