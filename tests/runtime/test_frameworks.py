"""Modules of spiking frameworks, with the state they keep, as segments: steps, chunks, resets, copies."""

from __future__ import annotations

import copy
import importlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.measure.jobs import ChunkingJob, CountJob, Subject, VerifyJob
from memopt_cli.measure.worker import Worker
from memopt_cli.records import (
    ChunkRule,
    InputSpec,
    ModelSource,
    Plan,
    Refused,
    SegmentPlan,
    StepSettings,
    TensorSpec,
    Trust,
)
from memopt_cli.runtime import SegmentConfig, install_segment, reset_hidden_state
from memopt_cli.runtime.module_state import ModuleState
from memopt_cli.verification.chunking import find_rule
from tests.rows import quick
from tests.user_code.spiking import FEATURES, Keeping
from tests.zoo.models import GIVEN, Parts

BIT = SegmentConfig(compressor="bit")
TOLERANCE = 1e-9
STEPS, SAMPLES = 6, 3


def forget_graph(model: nn.Module) -> None:
    """Carry the state over to the next step, as truncated back-propagation through time does."""
    state = ModuleState(model)
    state.restore({id(t): t.detach() for t in state.tensors()})


# ---------------------------------------------------------------------------------------------- SpikingJelly


def _jelly() -> tuple[Any, Any]:
    pytest.importorskip("spikingjelly")
    from spikingjelly.activation_based import layer, neuron

    return layer, neuron


def _after_linear(*modules: nn.Module) -> nn.Module:
    layer, _ = _jelly()
    return nn.Sequential(layer.Linear(FEATURES, FEATURES, step_mode="m"), *modules)


def _node(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: _after_linear(getattr(_jelly()[1], name)(step_mode="m", **settings))


def _parallel() -> nn.Module:
    return _after_linear(_jelly()[1].PSN(T=STEPS))


def _of_steps() -> nn.Module:
    """Return a single-step neuron, which its container calls once a time step and which runs scripted functions."""
    layer, neuron = _jelly()
    return _after_linear(layer.MultiStepContainer(layer.Linear(FEATURES, FEATURES), neuron.LIFNode()))


def _recurrent() -> nn.Module:
    layer, neuron = _jelly()
    return _after_linear(layer.LinearRecurrentContainer(neuron.LIFNode(), FEATURES, FEATURES, step_mode="m"))


def _filtered() -> nn.Module:
    return _after_linear(_jelly()[0].SynapseFilter(tau=2.0, learnable=True, step_mode="m"))


def _membranes_kept() -> nn.Module:
    return _after_linear(_jelly()[1].LIFNode(step_mode="m", store_v_seq=True))


def _normed() -> nn.Module:
    layer, neuron = _jelly()
    normed = _after_linear(layer.SeqToANNContainer(nn.BatchNorm1d(FEATURES)), neuron.IFNode(step_mode="m"))
    normed.get_submodule("0").register_parameter("bias", None)  # before a norm its gradient is rounding alone
    return normed


def _dropping() -> nn.Module:
    layer, neuron = _jelly()
    return _after_linear(layer.Dropout(0.5, step_mode="m"), neuron.IFNode(step_mode="m"))


# ---------------------------------------------------------------------------------------------- snnTorch


class Looped(Parts, block=GIVEN):
    """Calls a block once a time step."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.block(step) for step in x])


class Handed(nn.Module):
    """A neuron whose membrane the caller passes in and gets back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.neuron = nn.Linear(FEATURES, FEATURES), _snntorch().Leaky(beta=0.9, learn_beta=True)

    def forward(self, x: Tensor, membrane: Tensor) -> tuple[Tensor, Tensor]:
        spikes = []
        for drive in self.linear(x):
            spike, membrane = self.neuron(drive, membrane)
            spikes.append(spike)
        return torch.stack(spikes), membrane


def _snntorch() -> Any:
    return pytest.importorskip("snntorch")


def _hidden(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Hidden state inside."""

    def make() -> nn.Module:
        neuron = getattr(_snntorch(), name)(init_hidden=True, **settings)
        return Looped(nn.Sequential(nn.Linear(FEATURES, FEATURES), neuron))

    return make


# ---------------------------------------------------------------------------------------------- all of them

IN_CHUNKS: dict[str, Callable[[], nn.Module]] = {
    "attribute": Keeping,
    "jelly-if": _node("IFNode"),
    "jelly-lif": _node("LIFNode", tau=2.0),
    "jelly-lif-soft-reset": _node("LIFNode", tau=2.0, v_reset=None, decay_input=False, detach_reset=True),
    "jelly-parametric-lif": _node("ParametricLIFNode"),
    "jelly-izhikevich": _node("IzhikevichNode"),
    "jelly-single-steps": _of_steps,
    "jelly-recurrent": _recurrent,
    "jelly-synapse-filter": _filtered,
    "snntorch-leaky": _hidden("Leaky", beta=0.9, learn_beta=True),
    "snntorch-synaptic": _hidden("Synaptic", alpha=0.8, beta=0.9),
    "snntorch-lapicque": _hidden("Lapicque", beta=0.9),
    "jelly-batch-norm": _normed,
}
"""Causal modules: they run in chunks of time."""

NOT_IN_CHUNKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "jelly-psn": (_parallel, "axis 0: "),
    "jelly-masked-psn": (_node("MaskedPSN", k=2, T=STEPS), "axis 0: "),
    "jelly-sliding-psn": (_node("SlidingPSN", k=2), "axis 0: "),
    "jelly-every-membrane-kept": (_membranes_kept, "once a call, and would change it once for each chunk"),
    "jelly-dropout": (_dropping, "it uses random numbers"),
}
"""They look ahead, keep the whole sequence or mix it; with part of the reason given."""

RECURRENT = _hidden("RLeaky", beta=0.9, linear_features=FEATURES)
"""Makes tensors of float32 by itself, whatever it is given."""

ALL = IN_CHUNKS | {"snntorch-recurrent": RECURRENT} | {name: make for name, (make, _) in NOT_IN_CHUNKS.items()}


def drawn(dtype: torch.dtype) -> Tensor:
    return 2 * torch.randn(STEPS, SAMPLES, FEATURES, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=ALL, ids=str)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return ALL[request.param]()


@pytest.mark.slow
@pytest.mark.parametrize("between", [reset_hidden_state, forget_graph])
def test_a_segment_is_the_same_to_the_bit(model: nn.Module, between: Callable[[nn.Module], object], judge: Any) -> None:
    """Three steps, each from where the one before left the state or from a reset."""
    judge.between = between
    x = (drawn(torch.float32) > 0).float().requires_grad_()
    judge(nn.Sequential(model), {"0": BIT}, x, steps=3)
    assert judge.recomputations >= 3


BETWEEN = [(between, name) for between in (reset_hidden_state, forget_graph) for name in IN_CHUNKS]
PROVEN = {(reset_hidden_state, name) for name in IN_CHUNKS} | {
    (forget_graph, name) for name in ("jelly-lif", "snntorch-leaky", "jelly-batch-norm")
}


@pytest.mark.slow
@pytest.mark.parametrize(("between", "name"), quick(BETWEEN, PROVEN))
def test_chunks_of_time_are_the_same(between: Callable[[nn.Module], object], name: str, judge: Any) -> None:
    judge.between, judge.tolerance = between, TOLERANCE
    model, x = IN_CHUNKS[name]().double(), drawn(torch.float64).requires_grad_()
    normed = name == "jelly-batch-norm"
    expected = ChunkRule(axis=0, seq_inputs=1, seq_outputs=1, batch_statistics=normed)
    assert find_rule(model, (x.detach(),), {}) == expected
    config = SegmentConfig(chunks=4, compressor="bit", batch_statistics=normed)
    judge(nn.Sequential(model), {"0": config}, x, steps=3)
    assert judge.recomputations >= 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_IN_CHUNKS)
def test_time_is_not_cut(name: str) -> None:
    make, reason = NOT_IN_CHUNKS[name]
    found = find_rule(make(), (drawn(torch.float32),), {})
    if isinstance(found, Refused):
        assert reason in found.reason
    else:
        assert found.axis == 1  # samples are independent


@pytest.mark.slow
def test_what_makes_tensors_of_float32_is_tried_in_float64_all_the_same() -> None:
    assert find_rule(RECURRENT(), (drawn(torch.float32),), {}) == ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)


@pytest.mark.slow
def test_a_membrane_that_the_caller_hands_over(judge: Any) -> None:
    judge.tolerance = TOLERANCE
    model, membrane = Handed().double(), torch.randn(SAMPLES, FEATURES, dtype=torch.float64, requires_grad=True)
    x = drawn(torch.float64).requires_grad_()
    assert find_rule(model, (x.detach(), membrane.detach()), {}) == ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)
    for config in (BIT, SegmentConfig(chunks=3)):
        judge(nn.Sequential(model)[0], {"": config}, x, membrane, steps=2)
    assert judge.recomputations >= 2 + 2 * 3


def test_a_neuron_called_by_a_loop_outside(judge: Any) -> None:
    """The segment is the single-step block: its state advances once a time step, not once a recomputation."""
    judge.between = forget_graph
    looped = _hidden("Leaky", beta=0.9)()
    judge(looped, {"block": SegmentConfig()}, drawn(torch.float32), steps=2)
    assert judge.recomputations >= 2 * STEPS


# ---------------------------------------------------------------------------------------------- after a step


def _after_a_step(model: nn.Module) -> nn.Module:
    segment = nn.Sequential(model)
    install_segment(segment[0], SegmentConfig())
    segment(drawn(torch.float32)).square().sum().backward()
    return segment


def test_spikingjelly_resets_a_segment() -> None:
    _jelly()
    from spikingjelly.activation_based import functional

    net = _after_a_step(IN_CHUNKS["jelly-lif"]())
    node = net[0][1]
    assert isinstance(node.v, Tensor)
    functional.reset_net(net)
    assert node.v == 0.0
    first = net(drawn(torch.float32)).detach()
    reset_hidden_state(net)
    assert node.v == 0.0
    assert torch.equal(net(drawn(torch.float32)), first)
    functional.detach_net(net)
    assert node.v.grad_fn is None
    assert not torch.equal(net(drawn(torch.float32)), first)


def test_snntorch_resets_a_segment() -> None:
    snntorch = _snntorch()
    from snntorch import utils

    net = _after_a_step(IN_CHUNKS["snntorch-leaky"]())
    neuron = net[0].block[1]
    assert neuron.mem.any()
    for reset in (lambda: utils.reset(net[0].block), snntorch.Leaky.reset_hidden, lambda: reset_hidden_state(net)):
        reset()
        assert not neuron.mem.any()
        first = net(drawn(torch.float32)).detach()
        snntorch.Leaky.detach_hidden()
        assert neuron.mem.grad_fn is None
        assert not torch.equal(net(drawn(torch.float32)), first)


def test_a_plain_attribute_is_only_detached() -> None:
    """Nothing says how to reset it: that is the user's."""
    net = _after_a_step(Keeping())
    value = net[0].membrane.clone()
    reset_hidden_state(net)
    assert torch.equal(net[0].membrane, value)
    assert net[0].membrane.grad_fn is None


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", IN_CHUNKS)
@pytest.mark.parametrize("forget", [reset_hidden_state, forget_graph])
def test_copies_after_a_step_go_on_from_there(name: str, forget: Callable[[nn.Module], object]) -> None:
    net = _after_a_step(IN_CHUNKS[name]())
    forget(net)
    copies = [copy.deepcopy(net), *([] if name.startswith("snntorch") else [_saved_and_loaded(net)])]
    expected = net(drawn(torch.float32))
    for other in copies:
        assert isinstance(other[0], type(net[0]))
        assert torch.equal(other(drawn(torch.float32)), expected)


def test_a_model_of_snntorch_is_saved_by_its_state_dict() -> None:
    """Its surrogate gradients are closures, which cannot be pickled, optimized or not."""
    make = IN_CHUNKS["snntorch-leaky"]
    net = _after_a_step(make())
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        torch.save(make(), io.BytesIO())
    reset_hidden_state(net)
    fresh = nn.Sequential(make())
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(drawn(torch.float32)), net(drawn(torch.float32)))


# ---------------------------------------------------------------------------------------------- through the stages


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
def test_a_saved_model_of_spikingjelly_is_counted_and_verified(level: int, tmp_path: Path) -> None:
    make = IN_CHUNKS["jelly-lif"]
    torch.save(nn.Sequential(make(), make()), tmp_path / "net.pt")
    spec = InputSpec(tensors=(TensorSpec(shape=(STEPS, "B", FEATURES), values="spikes:0.3"),), dims={"B": 8}, source="")
    source = ModelSource(location=str(tmp_path / "net.pt"), trust=Trust(packages=("spikingjelly",)))
    worker = Worker(Subject(source=source, spec=spec, settings=StepSettings()))
    assert worker.answer(ChunkingJob(path="1")) == ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)
    chunks = 1 if level == 1 else 3
    plan = Plan(segments=tuple(SegmentPlan(path=path, compressor="bit", chunks=chunks) for path in "01"))
    assert worker.answer(CountJob(plan=plan, fake=True)).tensor_peak_bytes > 0
    found = worker.answer(VerifyJob(plan=plan, batch=8))
    assert found.passed
    assert found.exact is (level == 1)
    assert found.compared == 9  # four parameters, the output, the input, two membranes, the generators


def _jelly_net() -> nn.Module:
    return nn.Sequential(*(IN_CHUNKS["jelly-lif"]() for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("stepped", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_saved_model_of_spikingjelly_through_the_command_line(
    stepped: bool, memopt: Callable[..., Any], in_process: None
) -> None:
    """Saved as it was built, or in the middle of a sequence, which goes on from there when it is loaded again."""
    net = _jelly_net()
    if stepped:
        net(drawn(torch.float32))
        forget_graph(net)
    torch.save(net, "net.pt")
    done = memopt(
        *"optimize net.pt -i TxBx5=spikes:0.3 --dim T=6 --dim B=512 --level 3 --target 0 --target 1"
        " --max-slowdown none".split()
    )
    assert done.code == 0, done.err
    assert ", same " in done.out
    optimized = torch.load("net.memopt.pt", weights_only=False)
    for _ in range(2):
        assert torch.equal(optimized(drawn(torch.float32)), net(drawn(torch.float32)))
    from spikingjelly.activation_based import functional  # type: ignore[import-untyped]

    functional.reset_net(optimized)
    functional.reset_net(net)
    assert torch.equal(optimized(drawn(torch.float32)), net(drawn(torch.float32)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("saved.pt", "--target Keeping"),
        ("spiking:keeping", "--target Keeping"),
        ("spiking:hidden", "--target Hidden"),  # snnTorch's models cannot be pickled
        ("spiking:handing", "--target Cell"),
    ],
)
def test_other_conventions_through_the_command_line(
    model: str, targets: str, memopt: Callable[..., Any], in_process: None, user_code: str
) -> None:
    _snntorch()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(user_code)
        spiking = importlib.import_module("spiking")
        torch.save(spiking.keeping(), "saved.pt")
    inputs = "-i TxBx5=spikes:0.3 --dim T=6 --dim B=3 --level 3 --dry-run --json"
    done = memopt("optimize", model, *inputs.split(), *targets.split(), "--code-path", f"{user_code}/spiking.py")
    assert done.code == 0, done.err
    summary = json.loads(done.out)["summary"]
    assert summary["verification"]["passed"]
    assert summary["gc_candidate_count"] == 2
