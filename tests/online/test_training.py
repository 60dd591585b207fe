from __future__ import annotations

import shutil
from collections.abc import Iterator
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.online_lif import curves
from memopt_cli.errors import MemoptError
from memopt_cli.online import (
    D_RTRL,
    ES_D_RTRL,
    LIF,
    LeakyRateReadout,
    OnlineAlgorithm,
    init_all_states,
    traced,
)
from memopt_cli.online.training import CompiledStep, accumulate_online, accumulate_through_time
from memopt_cli.trace import StorageLog
from tests.online.networks import (
    BATCH,
    INPUTS,
    automatic,
    gradients,
    lif_net,
    manual,
    relative,
    sequence,
    through_time,
)


def batched(net: nn.Module, x: Tensor) -> OnlineAlgorithm:
    return manual(lambda model, **mode: ES_D_RTRL(model, 0.9, **mode), net, x)


def test_through_time_is_back_propagation_through_time() -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    init_all_states(net, BATCH)
    mean = accumulate_through_time(net, inputs, labels, F.cross_entropy)
    found = gradients(net)
    assert relative(found, through_time(net, inputs, labels)) == 0
    algorithm = batched(net, inputs[0])
    torch.testing.assert_close(accumulate_online(algorithm, inputs, labels, F.cross_entropy), mean)


@pytest.mark.parametrize("accumulate", [accumulate_online, accumulate_through_time])
def test_a_sequence_of_no_steps_is_refused(accumulate: object) -> None:
    with pytest.raises(MemoptError, match="no steps"):
        accumulate(lif_net(), [], None, F.cross_entropy)


def test_two_generations_of_a_trace_are_held_at_most() -> None:
    wide = nn.Sequential(traced(nn.Linear(64, 256)), LIF(256))
    algorithm = manual(D_RTRL, wide, torch.zeros(32, 64))
    (trace,) = (t for name, t in algorithm.get_etrace_of(wide[0].weight).items() if name.endswith("weight"))
    trace_bytes = trace.nbytes
    del trace
    log = StorageLog(lambda: "")
    with log:
        accumulate_online(algorithm, (torch.rand(32, 64) for _ in range(4)), None, lambda out, _: out.sum())
    assert 2 * trace_bytes < log.peaks.tensor_bytes < 2.9 * trace_bytes


def counted_peak(steps: int, *, online: bool) -> int:
    net = lif_net()
    random = torch.Generator().manual_seed(0)

    def inputs() -> Iterator[Tensor]:
        for _ in range(steps):
            yield torch.rand(BATCH, INPUTS, generator=random)

    labels = torch.zeros(BATCH, dtype=torch.int64)
    algorithm = batched(net, torch.zeros(BATCH, INPUTS))
    algorithm.reset_state(BATCH)
    log = StorageLog(lambda: "")
    with log:
        if online:
            accumulate_online(algorithm, inputs(), labels, F.cross_entropy)
        else:
            accumulate_through_time(net, inputs(), labels, F.cross_entropy)
    return log.peaks.tensor_bytes


@pytest.mark.slow
def test_online_memory_is_constant_in_time_and_that_of_back_propagation_through_time_grows() -> None:
    assert counted_peak(16, online=True) == counted_peak(256, online=True)
    short, middle, long = (counted_peak(steps, online=False) for steps in (16, 32, 64))
    assert 2 * (middle - short) == long - middle > short


@pytest.mark.slow
def test_ten_epochs_of_the_reference_network_learn_as_back_propagation_through_time_does() -> None:
    runs = [curves(seed, epochs=10) for seed in range(3)]
    for found in runs:
        assert found["manual"] == pytest.approx(found["automatic"], rel=1e-4)
        assert found["manual"][0] == pytest.approx(found["through time"][0])  # before any update
    manual, through = (median(found[name][-1] for found in runs) for name in ("manual", "through time"))
    assert manual <= min(2.6, through + 0.15)


def put_back(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, value in buffers.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, value)


@pytest.mark.slow
@pytest.mark.parametrize("in_lanes", [False, True])
def test_a_compiled_step_is_the_step(in_lanes: bool) -> None:
    net = lif_net()
    inputs, labels = sequence()
    inputs = inputs.float()
    model: nn.Module = automatic(D_RTRL, net, inputs[0]) if in_lanes else batched(net, inputs[0])
    values = {name: b.clone() for name, b in model.named_buffers()}
    expected_loss = accumulate_online(model, inputs, labels, F.cross_entropy)
    expected = gradients(net)
    after = {name: b.clone() for name, b in model.named_buffers()}
    put_back(model, values)
    step = CompiledStep(model, F.cross_entropy, inputs[0], labels, backend="aot_eager")
    losses = torch.stack([step(x, labels) for x in inputs])
    torch.testing.assert_close(losses.mean(), expected_loss)
    assert relative(gradients(net), expected) <= 1e-5
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, after[name])


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_neurons_behind_a_matrix_product() -> None:
    net = nn.Sequential(nn.Linear(5, 6, bias=False), LIF(6), LeakyRateReadout(6, 3))
    init_all_states(net, 4)
    values, inputs = dict(net.named_buffers()), torch.rand(3, 4, 5)
    expected = [net(x) for x in inputs]
    put_back(net, values)
    compiled = torch.compile(net)
    for x, output in zip(inputs, expected, strict=True):
        torch.testing.assert_close(compiled(x), output)
