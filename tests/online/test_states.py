from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.errors import UsageError
from memopt_cli.online import Batching, declare_state, environ, init_all_states, states_of
from memopt_cli.online.neurons import LIF
from tests.online.networks import Adaptive


def test_states_are_declared_per_sample_and_made_for_a_batch() -> None:
    net = nn.Sequential(LIF(3), Adaptive((2, 4)))
    assert list(states_of(net)) == ["0.v", "1.v", "1.a"]
    assert [tuple(s.value.shape) for s in states_of(net).values()] == [(3,), (2, 4), (2, 4)]
    init_all_states(net, batch_size=5)
    assert [tuple(s.value.shape) for s in states_of(net).values()] == [(5, 3), (5, 2, 4), (5, 2, 4)]
    init_all_states(net)
    assert tuple(net[0].v.shape) == (3,)


def test_a_state_is_what_its_module_assigned_until_it_starts_anew() -> None:
    module = nn.Module()
    declare_state(module, "level", 2, torch.ones)
    module.level = module.level * 3
    assert states_of(module)["level"].value.tolist() == [3, 3]
    init_all_states(module)
    assert module.level.tolist() == [1, 1]


def test_states_are_not_saved_and_move_with_the_model() -> None:
    net = LIF(3).double()
    assert net.state_dict() == {}
    assert net.v.dtype == torch.float64
    init_all_states(net, 2)
    assert net.v.dtype == torch.float64


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_states_of_their_own(twin: object) -> None:
    net = LIF(3)
    other = twin(net)
    other.v = other.v + 1
    assert not net.v.any()
    init_all_states(other, 4)
    assert tuple(other.v.shape) == (4, 3)
    assert tuple(net.v.shape) == (3,)


def test_impossible_sizes_are_refused() -> None:
    for batch_size in (0, 2.5, "4", True):
        with pytest.raises(UsageError, match=f"batch_size is {batch_size!r}"):
            init_all_states(LIF(3), batch_size)  # type: ignore[arg-type]
    for size in (-1, 3.5, "x", None, True, (3, "a")):
        with pytest.raises(UsageError, match="is not a shape"):
            LIF(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["forward", "training", "a.b", 3])
def test_a_name_that_is_taken_or_is_none_is_refused_and_leaves_no_state(name: Any) -> None:
    module = nn.Identity()
    with pytest.raises(UsageError, match="cannot be a state of Identity"):
        declare_state(module, name, 3)
    assert not states_of(module)


def test_environment() -> None:
    assert environ.mode is None
    environ.set(mode=Batching())
    try:
        assert environ.mode == Batching()
        environ.set(dt=0.5)
        assert (environ.mode, environ.dt) == (Batching(), 0.5)
        assert LIF(3, tau=5.0).decay == math.exp(-0.1)
    finally:
        environ.set(mode=None, dt=1.0)
    assert LIF(3, tau=5.0).decay == math.exp(-0.2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dt": 0}, "dt is 0, not the length of a time step"),
        ({"dt": "1ms"}, "dt is '1ms'"),
        ({"dt": math.inf}, "dt is inf"),
        ({"dt": True}, "dt is True"),
        ({"mode": 1}, "mode is 1, not Batching"),
    ],
)
def test_what_is_no_setting(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        environ.set(**settings)
    assert str(raised.value.hint).startswith("Pass")
    with pytest.raises(UsageError, match="environ has no setting 'DT'"):
        environ.set(DT=1.0)
    assert (environ.mode, environ.dt) == (None, 1.0)
