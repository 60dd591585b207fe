from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError, UsageError
from memopt_cli.online import Vmap, declare_state, init_all_states, states_of, vmap_new_states
from memopt_cli.online.neurons import LIF

LANES = 4


class Counter(nn.Module):
    """Adds its input to its state; written for one sample."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        declare_state(self, "total", 3)

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + self.scale * x
        return self.total


def for_lanes(model: nn.Module, tag: str = "new", lanes: int = LANES) -> None:
    vmap_new_states(axis_size=lanes, state_tag=tag)(lambda: init_all_states(model))()


def test_every_lane_is_a_run_of_its_own() -> None:
    model, x = Counter(), torch.rand(2, LANES, 3)
    for_lanes(model)
    batch = Vmap(model, vmap_states="new")
    found = [batch(step) for step in x]
    for lane in range(LANES):
        init_all_states(model)
        for step, output in zip(x, found, strict=True):
            torch.testing.assert_close(model(step[lane]), output[lane])


def test_parameters_are_shared() -> None:
    model = Counter()
    for_lanes(model)
    Vmap(model)(torch.ones(LANES, 3)).sum().backward()
    assert model.scale.grad == LANES * 3


def test_random_initial_states_differ_from_lane_to_lane_and_zeros_do_not_share_memory() -> None:
    model = nn.Module()
    declare_state(model, "noise", 5, torch.rand)
    declare_state(model, "zero", 5)
    for_lanes(model)
    assert len({tuple(lane.tolist()) for lane in model.noise}) == LANES
    model.zero[0] += 1
    assert model.zero[1:].eq(0).all()


def test_the_function_runs_twice_and_only_its_states_are_new() -> None:
    inside, outside, runs = Counter(), Counter(), []

    @vmap_new_states(axis_size=LANES, state_tag="mine")
    def init() -> None:
        runs.append(1)
        init_all_states(inside)

    init()
    assert len(runs) == 2
    assert states_of(inside)["total"].tag == "mine"
    assert states_of(outside)["total"].tag is None
    assert tuple(inside.total.shape) == (LANES, 3)
    assert tuple(outside.total.shape) == (3,)


def test_starting_anew_takes_the_tag_off() -> None:
    model = Counter()
    for_lanes(model)
    init_all_states(model)
    assert states_of(model)["total"].tag is None


def test_no_lanes_and_no_arguments() -> None:
    for size in (0, 2.5, "4"):
        with pytest.raises(UsageError, match=f"axis_size is {size!r}, not a batch size"):
            vmap_new_states(axis_size=size)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        vmap_new_states(axis_size=1)(lambda: None)(size=3)  # type: ignore[call-arg]


def test_a_model_without_tagged_states_is_refused() -> None:
    model = Counter()
    for_lanes(model, tag="other")
    with pytest.raises(MemoptError, match="tagged 'new'"):
        Vmap(model)(torch.ones(LANES, 3))


def test_a_model_that_declares_no_state_is_told_how() -> None:
    with pytest.raises(MemoptError, match="Linear declares no state") as raised:
        Vmap(nn.Linear(3, 3))(torch.ones(LANES, 3))
    assert "ExplicitState" in str(raised.value.hint)


class Stepped(nn.Module):
    """An LSTM cell of PyTorch's, which has no rule for vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 3)
        declare_state(self, "h", 3)
        declare_state(self, "c", 3)

    def forward(self, x: Tensor) -> Tensor:
        self.h, self.c = self.cell(x, (self.h, self.c))
        return self.h


def test_an_operator_without_a_rule_for_lanes_is_said_with_the_way_around_it() -> None:
    model = Stepped()
    for_lanes(model)
    with pytest.raises(MemoptError, match=r"Stepped cannot run in lanes: .*lstm_cell") as raised:
        Vmap(model)(torch.ones(LANES, 3))
    assert str(raised.value.hint).startswith("Batch the model by hand")


@pytest.mark.parametrize("x", [torch.ones(LANES + 1, 3), torch.tensor(1.0)])
def test_another_batch_size_is_refused(x: Tensor) -> None:
    model = Counter()
    for_lanes(model)
    with pytest.raises(MemoptError, match="does not have 4 samples"):
        Vmap(model)(x)


class Leaking(Counter):
    """Keeps what differs from lane to lane in an attribute that it did not declare."""

    def __init__(self, kept: object) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        self.kept = {"last": [x]} if isinstance(self.kept, dict) else x
        return super().forward(x)


@pytest.mark.parametrize("kept", [None, {}, torch.zeros(3)])
def test_an_undeclared_batched_write_is_an_error_and_leaves_the_model_as_it_was(kept: object) -> None:
    model = nn.Sequential(Leaking(kept))
    for_lanes(model)
    with pytest.raises(MemoptError, match=r"0\.kept was written with a different value for each sample"):
        Vmap(model)(torch.ones(LANES, 3))
    assert model[0].kept is kept
    assert model[0].total.tolist() == torch.zeros(LANES, 3).tolist()


def test_a_declared_state_without_the_tag_may_not_differ_either() -> None:
    model = nn.Sequential(Counter(), Counter())
    init_all_states(model)
    for_lanes(model[0])
    with pytest.raises(MemoptError, match=r"1\.total was written"):
        Vmap(model)(torch.ones(LANES, 3))


def test_writing_batched_values_into_a_shared_tensor_is_an_error() -> None:
    class InPlace(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shared", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.shared.add_(x)
            return super().forward(x)

    model = InPlace()
    for_lanes(model)
    with pytest.raises(RuntimeError, match="shape"):
        Vmap(model)(torch.ones(LANES, 3))


def test_an_undeclared_write_that_all_lanes_share_is_fine() -> None:
    class Clock(LIF):
        def __init__(self) -> None:
            super().__init__(3)
            self.register_buffer("now", torch.zeros(()))

        def forward(self, y: Tensor) -> Tensor:
            self.now = self.now + 1
            return super().forward(y)

    model = Clock()
    for_lanes(model)
    Vmap(model)(torch.ones(LANES, 3))
    assert model.now == 1
