"""``memopt profile``: what it says adds up, agrees with the measurement, and needs no memory where it may take none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import StepError, UsageError
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure.jobs import MeasureJob, RecordJob, Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.pipeline import profile
from memopt_cli.pipeline.memory import profiling
from memopt_cli.pipeline.memory.profiling import profile_prepared
from memopt_cli.pipeline.prepare import load_request_for, prepare
from memopt_cli.records import (
    PACKING,
    SEGMENT,
    InputSpec,
    Measurement,
    ModelSource,
    OutOfMemory,
    Plan,
    ProfileRequest,
    SegmentPlan,
    StepProfile,
    StepSettings,
    Trust,
    to_data,
)
from memopt_cli.records.progress import Progress
from memopt_cli.text.units import format_apart
from tests.zoo.records import plan_file

pytestmark = pytest.mark.usefixtures("in_process")

HUGE = 10**9
"""A batch whose inputs alone would take terabytes."""


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Sigmoid())


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    torch.manual_seed(0)
    path = tmp_path / "net.pt"
    torch.save(nn.Sequential(block(), block(), block(), nn.Linear(256, 4)), path)
    return str(path)


def profiled(location: str, spec: str = "128x256", **request: Any) -> StepProfile:
    made = ProfileRequest(
        source=ModelSource(location=location),
        spec=InputSpec(tensors=(parse_tensor(spec),), source="here"),
        **request,
    )
    return profile(made, progress=Progress(), ask=None)


@pytest.mark.slow
def test_it_adds_up(model_file: str) -> None:
    found = profiled(model_file, settings=StepSettings(optimizer="sgd"))
    assert isinstance(found.measurement, Measurement)
    parts = to_data(found.breakdown)
    assert sum(parts.values()) + found.workspace_bytes == found.peak.allocated_bytes
    assert found.peak.allocated_bytes == found.trace.allocated_peak_bytes
    assert max(found.live_bytes) == found.tensor_peak_bytes == found.measurement.tensor_peak_bytes
    assert found.peak.allocated_bytes == pytest.approx(found.measurement.allocated_peak_bytes, rel=0.01)
    assert len(found.live_bytes) == len(found.trace.ops) + 1
    root = found.modules[0]
    assert root.path == ""
    assert root.held_bytes == parts["activations_bytes"] + parts["temporaries_bytes"]
    assert root.seconds == pytest.approx(sum(op.seconds for op in found.trace.ops))
    assert all(use.seconds > 0 for use in found.modules)
    assert found.flops == sum(op.flops for op in found.trace.ops) > 0
    op = found.trace.ops[found.peak.op]
    assert (op.name, op.phase, op.module) == (found.peak.name, found.peak.phase, found.peak.module)
    assert json.dumps(to_data(found))


@pytest.mark.slow
def test_modules_include_those_below(model_file: str) -> None:
    uses = {use.path: use for use in profiled(model_file).modules}
    inner = [uses[f"0.{i}"] for i in range(4)]
    assert uses["0"].saved_bytes == sum(use.saved_bytes for use in inner) == 2 * 128 * 256 * 4
    assert uses["0"].held_bytes >= sum(use.held_bytes for use in inner) > 0
    assert uses["0"].class_name == "Sequential"


@pytest.mark.slow
def test_saved_tensors_and_who_saves_them(model_file: str) -> None:
    found = profiled(model_file)
    assert [s.nbytes for s in found.saved] == sorted((s.nbytes for s in found.saved), reverse=True)
    first = found.saved[0]
    assert first.nbytes == 128 * 256 * 4
    tanh = next(s for s in found.saved if s.made_by == "aten::tanh")
    assert (tanh.module, tanh.op, tanh.savers, tanh.compressor) == ("0.1", "aten::tanh", 2, "null")
    assert found.saved[-1].nbytes <= first.nbytes
    assert sum(s.made_by == "" for s in found.saved) == 1  # the input


def test_spikes_are_known_to_pack(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), path)
    (spikes,) = (s for s in profiled(str(path), "96x64=spikes:0.3").saved if not s.made_by)
    assert (spikes.compressor, spikes.nbytes, spikes.packed_bytes) == ("bit", 96 * 64 * 4, 96 * 64 * 4 // 32)


def test_what_packing_and_segments_keep_is_named(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.save(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 4)), path
    )
    spec = InputSpec(tensors=(parse_tensor("96x64"),), source="here")
    request = ProfileRequest(source=ModelSource(location=str(path)), spec=spec, fake=True)
    prepared = prepare(load_request_for(request, request.settings, fake=True), progress=Progress(), ask=None)
    plans = Plan(packed=True), Plan(packed=True, segments=(SegmentPlan(path="2", compressor="sparse"),))
    packed, segment = (profile_prepared(request, prepared, plan).saved for plan in plans)
    assert [(s.op, s.module, s.nbytes) for s in packed if s.made_by] == [
        ("aten::addmm", "1", 96 * 64 * 4),  # dense numbers, which packing leaves as they are
        ("aten::addmm", "2.1", 96 * 64 * 4),
    ]
    assert {(s.op, s.module) for s in segment if s.made_by} == {(SEGMENT, "2"), ("aten::addmm", "2.1")}
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 4)), path)
    found = profile_prepared(
        request, prepare(load_request_for(request, request.settings), progress=Progress(), ask=None), plans[0]
    )
    assert PACKING in {s.op for s in found.saved}  # the mask


def test_tensors_in_memory_that_the_model_rejects_are_said_to_be_rejected(tmp_path: Path) -> None:
    model, data = tmp_path / "net.pt", tmp_path / "inputs.pt"
    torch.save(nn.Sequential(nn.Conv2d(3, 8, 3)), model)
    torch.save(torch.zeros(16, 1, 8, 8), data)
    spec = InputSpec(data_file=str(data), source="here")
    request = ProfileRequest(source=ModelSource(location=str(model)), spec=spec, fake=True)
    with pytest.raises(StepError, match="to have 3 channels, but got 1 channels") as raised:
        profile(request, progress=Progress(), ask=None)
    assert str(data) not in str(raised.value)


def test_what_packing_runs_is_not_taken_for_the_models(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 4)), path)
    spec = InputSpec(tensors=(parse_tensor("96x64"),), source="here")
    with LocalSession(
        Subject(source=ModelSource(location=str(path), trust=Trust(pickle=True)), spec=spec), 60.0
    ) as asked:
        plain, packed = (asked.ask(RecordJob(plan=plan)) for plan in (Plan(), Plan(packed=True)))
    forward = [op for op in packed.ops if op.phase == "forward"]
    own = [op.name for op in forward if not op.packs]
    assert own == [op.name for op in plain.ops if op.phase == "forward"]
    assert len(own) < len(forward)


@pytest.mark.slow
def test_under_a_plan(model_file: str, tmp_path: Path) -> None:
    segments = tuple(SegmentPlan(path=str(i)) for i in range(3))
    paths = None, plan_file(tmp_path, Plan(segments=segments))
    plain, planned = (profiled(model_file, "2048x256", plan_path=path) for path in paths)
    assert planned.plan.segments == segments
    assert plain.plan.segments == ()
    assert planned.fake
    assert planned.tensor_peak_bytes == planned.measurement.tensor_peak_bytes < plain.tensor_peak_bytes
    assert planned.modules[0].saved_bytes < plain.modules[0].saved_bytes
    assert {use.segment for use in planned.times if use.name == "recomputation"} == {"0", "1", "2"}
    assert "recomputation" not in {use.name for use in plain.times}
    assert sum(use.seconds for use in planned.times) == pytest.approx(planned.measurement.step_s)
    kept = {(s.op, s.module) for s in planned.saved}
    assert kept == {("aten::addmm", "3"), *((SEGMENT, str(i)) for i in range(3))}
    made = sum(s.nbytes for s in planned.saved if s.made_by)
    assert made == planned.modules[0].saved_bytes - 2048 * 4 * 4  # less the output
    compiled, both = (profiled(model_file, "2048x256", plan_path=path, backend="aot_eager").compiled for path in paths)
    assert both is not None
    assert compiled.step_s > 0
    assert compiled.broken == ""
    assert compiled.allocated_peak_bytes == pytest.approx(plain.measurement.allocated_peak_bytes, rel=0.15)
    assert both.allocated_peak_bytes < 0.9 * compiled.allocated_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "message"),
    [({"backend": "nope"}, "no backend 'nope'"), ({"backend": "eager", "fake": True}, "`--fake` runs none here")],
)
def test_a_step_that_is_not_compiled(model_file: str, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profiled(model_file, **request_)


@pytest.mark.slow
def test_a_backend_that_fails_says_so(model_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(hooks: str, x: Tensor) -> Tensor:
        raise RuntimeError("no compiler is here\nmore of it")

    monkeypatch.setattr(torch, "compile", lambda model, **named: fails)
    with pytest.raises(StepError, match=r"compiled by eager: RuntimeError: no compiler is here\nTake") as said:
        profiled(model_file, backend="eager")
    assert "torch.compile(model, backend='eager')" in str(said.value.hint)


@pytest.mark.slow
def test_of_code_that_was_compiled_often_the_next_model_is_too(
    model_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch compiles a function eight times, and runs it as it is from then on."""
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile

    def compile_anew(model: nn.Module, **named: Any) -> Any:
        return compiled(model, backend=backend)

    monkeypatch.setattr(torch, "compile", compile_anew)
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            assert profiled(model_file, backend="eager").compiled is not None
    assert len(graphs) == 3


@pytest.mark.slow
def test_a_model_that_is_not_one_graph_is_said_to_run_in_part_as_it_is(tmp_path: Path) -> None:
    """Of an LSTM, a compiler that is not installed was said to have compiled it."""
    torch.save(nn.LSTM(8, 8), tmp_path / "net.pt")
    found = profiled(str(tmp_path / "net.pt"), "4x2x8", backend="eager")
    assert "LSTM" in found.compiled.broken
    assert any("run as is: Attempted to wrap" in note for note in found.notes)


def test_a_step_of_ones_own_is_not_compiled_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is told before anything is run."""
    monkeypatch.setattr(profiling, "_measure", lambda *_: pytest.fail("a step is run"))
    steps = Path(__file__).parents[2] / "user_code" / "own_steps.py"
    with pytest.raises(StepError, match="calls its models itself"):
        profiled(f"{steps}:two_rounds", "4x8", backend="eager")


def test_a_missing_plan(model_file: str) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml"):
        profiled(model_file, plan_path="nowhere.yaml")


@pytest.mark.slow
def test_an_estimate_needs_no_memory(model_file: str) -> None:
    found = profiled(model_file, f"{HUGE}x256", fake=True)
    small = profiled(model_file, "1000x256", fake=True)
    assert found.fake
    assert found.measurement is None
    assert found.peak.allocated_bytes > 6 * HUGE * 256 * 4
    assert found.saved[0].nbytes == HUGE * 256 * 4
    parameters = small.breakdown.parameters_bytes
    grown = (found.breakdown.activations_bytes, small.breakdown.activations_bytes)
    assert grown[0] == pytest.approx(grown[1] * HUGE / 1000, rel=0.01)
    assert found.breakdown.parameters_bytes == parameters
    assert all(op.seconds == 0 for op in found.trace.ops)


@pytest.mark.slow
def test_an_estimate_says_that_chunks_were_not_tried(model_file: str) -> None:
    spec = InputSpec(tensors=(parse_tensor("128x256"),), source="here")
    request = ProfileRequest(source=ModelSource(location=model_file), spec=spec, fake=True)
    prepared = prepare(load_request_for(request, request.settings, fake=True), progress=Progress(), ask=None)
    for chunks, told in ((1, False), (2, True)):
        plan = Plan(segments=(SegmentPlan(path="0", chunks=chunks),))
        notes = profile_prepared(request, prepared, plan).notes
        assert any("memopt does not try here whether modules can run in chunks" in note for note in notes) == told


@pytest.mark.slow
def test_an_estimate_knows_contents_of_a_small_step(model_file: str) -> None:
    found = profiled(model_file, f"{HUGE}x256=spikes:0.3", fake=True)
    (spikes,) = (s for s in found.saved if not s.made_by)
    assert (spikes.compressor, spikes.packed_bytes) == ("bit", HUGE * 256 * 4 // 32)


def test_parameters_of_a_callable_need_no_memory_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n"
    source += "        super().__init__(nn.Linear(1000000, 1000000), nn.Tanh(), nn.Linear(1000000, 3))\n"
    (tmp_path / "enormous.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    found = profiled("enormous:Net", "8x1000000", fake=True, settings=StepSettings(optimizer="adamw"))
    assert found.breakdown.parameters_bytes > 4e12
    assert found.breakdown.optimizer_bytes > 8e12
    assert found.saved[0].module == "0"


READING = "tests.zoo.models:Reading"


def test_a_model_that_wants_data_is_run_for_its_record() -> None:
    found = profiled(READING, "128x64")
    assert not found.fake
    assert found.tensor_peak_bytes == found.measurement.tensor_peak_bytes
    assert any("cannot run on tensors without data" in note and "on real ones" in note for note in found.notes)
    assert any("it reads a tensor's values" in note and "zoo/models.py, line " in note for note in found.notes)


def test_a_loss_that_wants_data_is_named(model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def loss(output):\n    scale = output.sum().item()\n    return output.sum() * scale\n"
    (tmp_path / "reading.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StepError, match=r"the loss reads a tensor's values, .* \(.*reading\.py, line 2\)"):
        profiled(model_file, fake=True, settings=StepSettings(loss="reading.py:loss"))


def test_a_dry_run_that_differs_is_told_by_tensor_peaks(model_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headline is the allocated peak, with which these numbers must not be confused."""
    monkeypatch.setattr(profiling, "_TRUSTED_ERROR", -1.0)  # an equal peak counts as different
    found = profiled(model_file)
    assert found.measurement is not None
    peak, _ = format_apart(found.measurement.tensor_peak_bytes, found.measurement.tensor_peak_bytes)
    told = (
        f"a tensor peak of {peak} instead of the measured {peak}; it was recorded on real ones. You need to do nothing."
    )
    assert f"On tensors without data the step has {told}" in found.notes


def test_a_model_that_wants_data_cannot_be_estimated() -> None:
    with pytest.raises(StepError, match="cannot run on tensors without data") as caught:
        profiled(READING, "128x64", fake=True)
    assert "without `--fake`" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("fake", [False, True])
def test_wrong_inputs_are_explained_alike(fake: bool, model_file: str) -> None:
    with pytest.raises(StepError, match=r"module '0\.0' \(Linear\) rejected its input \d+x255@float32"):
        profiled(model_file, "128x255", fake=fake)


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_estimated(model_file: str, answered: Callable[..., None]) -> None:
    answered(MeasureJob, lambda *_: OutOfMemory(detail="you tried"))
    found = profiled(model_file, f"{HUGE}x256")
    assert isinstance(found.measurement, OutOfMemory)
    assert found.peak.allocated_bytes > 6 * HUGE * 256 * 4
    assert any("does not fit" in note for note in found.notes)
