"""The worker, without its process: every job starts from the state in which the model was loaded."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memopt_cli.errors import LossError, PlanError, StepError, UsageError
from memopt_cli.loading import bounds
from memopt_cli.loading.user_code import IMPORTED_HINT
from memopt_cli.measure import replies, sandbox, wire
from memopt_cli.measure.allocated import MarkedStep, StepAllocations, measure_allocated
from memopt_cli.measure.answers import timed, without_data
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.without_data import StepTooLargeError, may_run_in_full
from memopt_cli.measure.answers.workspaces import workspaces_for
from memopt_cli.measure.jobs import (
    ChunkingJob,
    CountJob,
    Data,
    DescribeJob,
    MeasureJob,
    ProbeJob,
    RecordJob,
    RoundedJob,
    SizesJob,
    Subject,
    TimeInTurnsJob,
    TraceAnswer,
    TraceJob,
    VerifyJob,
)
from memopt_cli.measure.local import LocalSession
from memopt_cli.measure.worker import Worker, _reply_line, failure_of, main
from memopt_cli.records import (
    ChunkRule,
    InputSpec,
    ModelFacts,
    ModelSource,
    OutOfMemory,
    Plan,
    Refused,
    SegmentPlan,
    StepFailed,
    StepSettings,
    TensorSpec,
    Trust,
    from_data,
    to_data,
    to_short_data,
)
from memopt_cli.runtime.private_torch import is_fake
from memopt_cli.trace import FakeStep
from memopt_cli.verification.chunking import capture_call
from tests.zoo.models import Parts

ORIGINAL = Plan()
MiB = 1 << 20


def block() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.1), nn.ReLU())


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., Worker]:
    def build(**settings: Any) -> Worker:
        path = tmp_path / "net.pt"
        torch.manual_seed(0)
        torch.save(nn.Sequential(block(), block(), block(), nn.AdaptiveAvgPool2d(1)), path)
        spec = InputSpec(tensors=(TensorSpec(shape=("B", 4, 32, 32)),), dims={"B": 8}, source="here")
        subject = Subject(source=ModelSource(location=str(path)), spec=spec, settings=StepSettings(**settings))
        return Worker(subject)

    return build


def plan(*paths: str, **fields: Any) -> Plan:
    return Plan(segments=tuple(SegmentPlan(path=path, **fields) for path in paths))


def everything(worker: Worker) -> dict[str, Any]:
    model = worker.bench.model
    return {
        "tensors": {name: t.clone() for name, t in model.state_dict().items()},
        "classes": [type(module) for module in model.modules()],
        "gradients": [p.grad for p in model.parameters()],
        "training": [module.training for module in model.modules()],
    }


JOBS = [
    TraceJob(fake=True),
    TraceJob(fake=False),
    RecordJob(plan=plan("0", "1")),
    CountJob(plan=plan("0", "1"), fake=True),
    CountJob(plan=plan("0", "1"), fake=False),
    ChunkingJob(path="0"),
    MeasureJob(plan=plan("1"), steps=2),
    TimeInTurnsJob(plans=(plan("1"),), turns=1),
    ProbeJob(plan=plan("1"), batch=5),
    RoundedJob(),
    VerifyJob(plan=plan("0", "1"), batch=4),
    VerifyJob(plan=plan("0", chunks=2, batch_statistics=True), batch=4),
]


@pytest.mark.slow
def test_a_job_leaves_the_model_as_it_was(worker: Callable[..., Worker]) -> None:
    one = worker(optimizer="adamw")
    before = everything(one)
    for job in JOBS:
        one.answer(job)
        after = everything(one)
        assert after["classes"] == before["classes"], job
        assert after["gradients"] == before["gradients"], job
        assert after["training"] == before["training"], job
        for name, tensor in before["tensors"].items():
            assert torch.equal(after["tensors"][name], tensor), (job, name)
            assert after["tensors"][name].dtype == tensor.dtype, (job, name)


def test_a_failed_job_leaves_the_model_as_it_was(worker: Callable[..., Worker]) -> None:
    one = worker()
    classes = everything(one)["classes"]
    with pytest.raises(PlanError, match="names module 'nowhere'"):
        one.answer(MeasureJob(plan=plan("0", "nowhere"), steps=1))
    assert everything(one)["classes"] == classes


@pytest.mark.slow
def test_what_is_answered_makes_sense(worker: Callable[..., Worker]) -> None:
    one = worker(optimizer="adamw")
    for job in (*JOBS, TraceJob(fake=False, plan=PACKED), DescribeJob(), SizesJob(plan=PACKED)):
        answer = one.answer(job)
        line = _reply_line({"kind": "answer", "answer": to_short_data(answer)}, job.max_bytes)
        assert replies.read(line.encode(), job) == answer, job


def test_two_hundred_thousand_operators_fit_into_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment in 128 chunks has as many in a net of about a hundred layers."""
    monkeypatch.setattr(bounds, "limits_process", bounds.limits_process)
    torch.save(nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))), tmp_path / "net.pt")
    spec = InputSpec(tensors=(TensorSpec(shape=("B", 8)),), dims={"B": 8}, source="here")
    subject = Subject(source=ModelSource(location=str(tmp_path / "net.pt")), spec=spec)
    jobs = [to_data(TraceJob(fake=False, plan=plan("0", chunks=chunks))) for chunks in (2, 8)]
    told = [to_data(subject), *({"kind": "TraceJob", "job": job} for job in jobs)]
    answers = io.StringIO()
    main(io.StringIO("\n".join(map(json.dumps, told))), answers, "", {})
    lines = answers.getvalue().splitlines()
    few_bytes, many_bytes = map(wire.memory_of, lines)
    few, many = (len(json.loads(line)["answer"]["trace"]["ops"]) for line in lines)
    assert (many_bytes - few_bytes) / (many - few) < TraceJob.max_bytes / 200_000


@pytest.mark.parametrize("asked", [True, False])
def test_facts_have_inputs_where_they_were_asked_for(asked: bool, worker: Callable[..., Worker]) -> None:
    one, spec = worker(), InputSpec(tensors=(TensorSpec(shape=("B", 4, 32, 32)),), dims={"B": 8}, source="here")
    answers = {inputs: to_data(one.answer(DescribeJob(inputs=inputs, spec=spec))) for inputs in (True, False)}
    job = DescribeJob(inputs=asked, spec=spec)
    line = json.dumps({"kind": "answer", "answer": answers[asked]})
    assert replies.read(line.encode(), job) == from_data(ModelFacts, answers[asked])
    with pytest.raises(ValueError):  # noqa: PT011  it is nonsense, of whatever kind
        replies.read(json.dumps({"kind": "answer", "answer": answers[not asked]}).encode(), job)


def subject_of(*shape: int | str, batch: int = 8, data: Data = "full size", location: str = "-") -> Subject:
    spec = InputSpec(tensors=(TensorSpec(shape=shape, values="spikes:0.5"),), dims={"B": batch}, source="here")
    return Subject(source=ModelSource(location=location), spec=spec, settings=StepSettings(), data=data)


PACKED = Plan(packed=True, segments=(SegmentPlan(path="0", compressor="bit"),))
TOLD_APART = [
    # each of these once knew more, or something else, when others of them had been answered before
    TraceJob(fake=True),
    TraceJob(fake=False),
    TraceJob(fake=True, plan=PACKED),
    RecordJob(plan=PACKED),
    CountJob(plan=ORIGINAL, fake=True),
    CountJob(plan=PACKED, fake=True),
    CountJob(plan=Plan(segments=(SegmentPlan(path="1", chunks=2),)), fake=True),
    ChunkingJob(path="1"),
    ChunkingJob(path="2"),
    MeasureJob(plan=ORIGINAL, steps=1),
    MeasureJob(plan=PACKED, steps=1),
    ProbeJob(plan=PACKED, batch=5),
]


def without_times(record: Any) -> Any:
    """What of an answer repeats to the bit."""
    if isinstance(record, dict):
        return {
            name: without_times(value)
            for name, value in record.items()
            if not name.endswith(("_s", "seconds", "waited")) and name != "process_peak_bytes"
        }
    return [without_times(item) for item in record] if isinstance(record, list | tuple) else record


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the data", "nothing"])
def test_answers_do_not_depend_on_the_order(where: str) -> None:
    build = depends_on_data if where == "the data" else functools.partial(two_alike, nn.Tanh())
    answers: list[dict[Any, Any]] = []
    for jobs in (TOLD_APART, TOLD_APART[::-1], [*TOLD_APART[5:], *TOLD_APART[:5]]):
        one = Worker(subject_of("B", 40), build=build)
        answers.append({job: without_times(to_data(one.answer(job))) for job in jobs})
    for job in TOLD_APART:
        assert answers[0][job] == answers[1][job] == answers[2][job], job


IN_CHUNKS = plan("2", chunks=2, inexact=True)


@pytest.mark.parametrize("data", ["full size", "small batch"])
def test_a_dry_run_makes_no_inputs_of_a_batch_that_no_machine_holds(data: Data, worker: Callable[..., Worker]) -> None:
    one = Worker(replace(worker().bench.subject, data=data))
    counted = one.answer(CountJob(plan=plan("0"), fake=True, batch=1 << 40))
    assert counted.tensor_peak_bytes > 1 << 54


@pytest.mark.slow
@pytest.mark.parametrize("p", [ORIGINAL, plan("0", "1"), IN_CHUNKS], ids=["original", "plan", "chunks"])
def test_the_dry_run_tells_the_tensor_peak_to_the_byte(p: Plan, worker: Callable[..., Worker]) -> None:
    one = worker()
    measured = one.answer(MeasureJob(plan=p, steps=1)).measurement
    assert one.answer(CountJob(plan=p, fake=True)).tensor_peak_bytes == measured.tensor_peak_bytes
    real = one.answer(CountJob(plan=p, fake=False))
    assert real.tensor_peak_bytes == measured.tensor_peak_bytes
    assert real.allocated_peak_bytes == measured.allocated_peak_bytes


def test_a_measurement_adds_up(worker: Callable[..., Worker]) -> None:
    one = worker(optimizer="adamw")
    found = one.answer(MeasureJob(plan=ORIGINAL, steps=3)).measurement
    parameters = sum(p.nbytes for p in one.bench.model.parameters())
    assert found.breakdown.parameters_bytes == parameters
    assert found.breakdown.inputs_bytes == 8 * 4 * 32 * 32 * 4
    assert found.breakdown.optimizer_bytes >= 2 * parameters
    assert found.resident_bytes >= 4 * parameters + found.breakdown.inputs_bytes
    assert found.allocated_peak_bytes >= found.tensor_peak_bytes > found.resident_bytes
    assert 3 <= len(found.step_times_s) <= 20
    assert found.step_s == statistics.median(found.step_times_s)
    assert found.process_peak_bytes > 50 * MiB
    assert found.holders[0].held_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["none", "adamw"])
def test_a_long_measured_step_is_not_taken_again_to_time_its_operators(
    optimizer: str, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopt_cli.measure.answers.timed._LONG_STEP_S", 0.0)
    monkeypatch.setattr("memopt_cli.trace.time_operators", lambda step: pytest.fail("it was"))
    one = worker(optimizer=optimizer)
    one.answer(MeasureJob(plan=ORIGINAL, steps=3))
    assert_timed(one.answer(TraceJob(fake=True)))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["none", "adamw"])
@pytest.mark.parametrize("fake", [True, False])
def test_a_step_that_was_not_measured_is_timed(optimizer: str, fake: bool, worker: Callable[..., Worker]) -> None:
    assert_timed(worker(optimizer=optimizer).answer(TraceJob(fake=fake)))


@pytest.mark.parametrize("optimizer", ["none", "sgd"])
def test_of_a_step_its_update_is_timed(optimizer: str, worker: Callable[..., Worker]) -> None:
    found = worker(optimizer=optimizer).answer(MeasureJob(plan=ORIGINAL)).measurement
    assert 0 < found.update_s < found.step_s if optimizer == "sgd" else found.update_s == 0


def test_a_pass_of_several_finds_the_memory_of_the_gradients_that_others_left(worker: Callable[..., Worker]) -> None:
    """Fresh memory for them in every step that is timed made a short pass seem three times as long."""
    one = worker(micro_batches=2)
    first, *others = one.bench.model.parameters()
    found = set[int]()
    one.bench.model.register_forward_pre_hook(
        lambda *_: found.add(first.grad.data_ptr() if first.grad is not None else 0)
    )
    timed._time_steps(one.bench, one.bench.step(), 3)
    assert len(found) == 1
    assert 0 not in found
    assert all(other.grad is not None for other in others)


def test_an_update_is_what_clips_and_what_optimizers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(timed.time, "perf_counter", lambda: float(2 ** next(clock)))
    step = timed._StepTimes("cpu")
    with step.running():  # at 1
        for phase in ("forward", "backward", "clip", "update", "forward", "backward", "update"):
            step.enter(phase)  # at 2, 4 and 8
    assert (step.step_s, step.update_s) == (16 - 1, (4 - 2) + (16 - 8))


def assert_timed(traced: TraceAnswer) -> None:
    assert not traced.unknown
    assert all(op.seconds > 0 for op in traced.trace.ops)
    assert all(module.forward_s > 0 for module in traced.trace.modules)
    assert traced.trace.packing_bytes_per_s > 0


@pytest.mark.slow
def test_one_step_of_a_few_samples_tells_contents_and_how_workspaces_grow(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []

    def watched(take: MarkedStep, device: str, held_bytes: int) -> StepAllocations:
        handle = one.bench.model.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
        try:
            return measure_allocated(take, device, held_bytes)
        finally:
            handle.remove()

    for place in ("steps", "small_step"):
        monkeypatch.setattr(f"memopt_cli.measure.answers.{place}.measure_allocated", watched)
    one = worker()
    one.answer(TraceJob(fake=True))
    one.answer(CountJob(plan=plan("0", "1"), fake=True))
    one.answer(CountJob(plan=plan("2", chunks=2, inexact=True), fake=True))
    assert batches == [8, 3]
    growing = workspaces_for(one.bench, plan("2", chunks=2))._runs["aten::convolution"]
    assert [run.smaller and run.smaller.shapes[0] for run in growing] == [(3, 4, 32, 32)] * 3


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_step_of_few_samples_that_does_not_fit_is_recorded_without_data(
    is_failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its small step is the step itself, which may also fail where there seems to be room."""
    torch.save(nn.Linear(8, 8), tmp_path / "net.pt")
    one = Worker(subject_of("B", 8, batch=2, location=str(tmp_path / "net.pt")))

    def out_of_memory(*_: object) -> None:
        assert is_failing
        raise MemoryError

    one.bench.model.register_forward_hook(lambda _, args, output: None if is_fake(output) else out_of_memory())
    monkeypatch.setattr(without_data, "runnable_bytes", lambda device: 1 << 40 if is_failing else 0)
    traced = one.answer(TraceJob(fake=True))
    assert (traced.fake, traced.trace.batch) == (True, 2)
    assert traced.trace.allocated_peak_bytes > 0


@pytest.mark.parametrize(
    ("original_s", "planned", "max_slowdown", "expected"),
    [
        (0.5, [1.2, *[1.35] * 7], 1.33, 5),  # near the limit, the first pair to warm up
        (0.5, [1.2, 1.45, 1.33] * 6, 1.33, 16),  # as often as it may be, where the ratios leave it open
        (0.5, [1.2, 1.05, 1.35, 1.15, 1.15], 1.33, 4),  # until the median is known well enough
        (0.5, [1.2] * 4, 1.33, 3),
        (0.5, [1.2, *[1.35] * 3], None, 3),
        (2.0, [1.35] * 7, 1.33, 3),  # of long steps fewer
        (2.0, [1.2] * 4, 1.33, 1),
        (0.5, [5.0] * 7, 1.33, 1),  # slower by far
    ],
)
def test_a_slowdown_near_the_limit_is_timed_more_often(
    original_s: float,
    planned: list[float],
    max_slowdown: float | None,
    expected: int,
    worker: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([step_s for slowdown in planned for step_s in (original_s, original_s * slowdown)])
    monkeypatch.setattr(timed, "_time_in_turn", lambda *_: next(times))
    found = worker().answer(TimeInTurnsJob(plans=(plan("2"),), turns=3, max_slowdown=max_slowdown))
    (planned_s,) = found.planned_times_s
    assert len(planned_s) == expected


def test_a_plan_far_beyond_the_limit_takes_a_single_turn_beside_others(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.5, 0.6, 5.0, 0.5, 0.6, 0.5, 0.6])
    monkeypatch.setattr(timed, "_time_in_turn", lambda *_: next(times))
    found = worker().answer(TimeInTurnsJob(plans=(plan("2"), plan("0")), turns=3, max_slowdown=1.33))
    assert found.original_times_s == (0.5, 0.5, 0.5)
    assert found.planned_times_s == ((0.6, 0.6, 0.6), (5.0,))


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_small_batch_tells_the_workspace_of_a_large_one(batch_first: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "net.pt")
    torch.save(nn.LSTM(32, 64, batch_first=batch_first), path)
    shape = ("B", 12, 32) if batch_first else (12, "B", 32)
    subject = subject_of(*shape, batch=64, location=path)
    measured = Worker(subject).answer(MeasureJob(plan=ORIGINAL, steps=1)).measurement
    estimated = Worker(replace(subject, data="small batch")).answer(CountJob(plan=ORIGINAL, fake=True))
    assert measured.allocated_peak_bytes > 1.1 * measured.tensor_peak_bytes
    assert estimated.allocated_peak_bytes == pytest.approx(measured.allocated_peak_bytes, rel=0.03)


def test_the_time_in_which_a_step_has_no_processor_is_noticed(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: the thread does not run while it sleeps."""
    monkeypatch.setattr("memopt_cli.measure.answers.timed._MIN_TIMED_S", 0.0)
    one = worker()
    one.bench.model.register_forward_hook(lambda *_: time.sleep(0.05))
    answers = [
        one.answer(MeasureJob(plan=ORIGINAL, steps=1)).measurement,
        one.answer(TimeInTurnsJob(plans=(plan("2"),), turns=1)),
        one.answer(ProbeJob(plan=ORIGINAL, batch=4)),
    ]
    assert all(0.5 < answer.waited < 1 for answer in answers)
    spent = iter([(0.0, 0.0), (2.0, 2.5)])
    monkeypatch.setattr(timed, "_read_clocks", lambda: next(spent))
    assert timed._waited_share(timed._read_clocks(), "cpu") == 0.0


def test_probes_grow_with_the_batch(worker: Callable[..., Worker]) -> None:
    one = worker()
    small, large = (one.answer(ProbeJob(plan=ORIGINAL, batch=batch)) for batch in (4, 16))
    assert (small.batch, large.batch) == (4, 16)
    assert large.allocated_peak_bytes > 3 * small.allocated_peak_bytes
    assert large.step_s > 0


@pytest.mark.parametrize(("long_s", "steps"), [(0.0, range(1, 2)), (math.inf, range(2, 99))])
def test_a_probe_takes_a_long_step_once(
    long_s: float, steps: range, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopt_cli.measure.answers.timed._LONG_STEP_S", long_s)
    one, taken = worker(), []
    one.bench.model.register_forward_hook(lambda *of: None if is_fake(of[-1]) else taken.append(1))
    found = one.answer(ProbeJob(plan=ORIGINAL, batch=16))
    assert len(taken) in steps
    assert found.step_s > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("long_s", "warm_up", "steps", "timed"),
    [(0.0, True, 4, 1), (math.inf, True, 6, 3), (0.0, False, 5, 3), (math.inf, False, 5, 3)],
)
def test_a_long_step_is_timed_once_warm(
    long_s: float,
    warm_up: bool,
    steps: int,
    timed: int,
    worker: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memopt_cli.measure.answers.timed._LONG_STEP_S", long_s)
    monkeypatch.setattr("memopt_cli.measure.answers.timed._MIN_TIMED_S", 0.0)
    one, taken = worker(), []
    one.bench.model.register_forward_hook(lambda *of: None if is_fake(of[-1]) else taken.append(1))
    found = one.answer(MeasureJob(plan=ORIGINAL, steps=3, warm_up=warm_up)).measurement
    assert len(taken) == steps
    assert len(found.step_times_s) == timed


def test_a_plan_is_timed_in_turns_with_the_original(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopt_cli.measure.answers.timed._MIN_TIMED_S", 0.0)
    one, runs = worker(), []
    one.bench.model.get_submodule("2.0").register_forward_hook(lambda *_: runs.append(1))
    found = one.answer(TimeInTurnsJob(plans=(plan("2"),), turns=3))
    (planned_s,) = found.planned_times_s
    assert len(found.original_times_s) == len(planned_s) == 3
    assert len(runs) == 3 * (3 * 1 + 3 * 2), "a segment runs twice, and the first step of each three is not timed"


def test_a_probe_costs_the_same_after_a_verification_in_float64(worker: Callable[..., Worker]) -> None:
    one = worker()
    probe = ProbeJob(plan=plan("1"), batch=8)
    before = one.answer(probe)
    assert one.answer(VerifyJob(plan=plan("2.3", chunks=2), batch=4)).precision == "fp64"
    assert one.answer(probe).allocated_peak_bytes == before.allocated_peak_bytes


def test_verification_names_its_size(worker: Callable[..., Worker]) -> None:
    one = worker()
    assert one.answer(VerifyJob(plan=plan("0"), batch=8)).full_size
    reduced = one.answer(VerifyJob(plan=plan("0"), batch=4))
    assert reduced.passed
    assert (reduced.batch, reduced.full_size) == (4, False)


def test_a_segment_that_never_runs_is_named(user_code: str) -> None:
    source = ModelSource(location="faulty:Spare", trust=Trust(code_paths=(user_code,)))
    spec = InputSpec(tensors=(TensorSpec(shape=(2, 3)),), source="here")
    worker = Worker(Subject(source=source, spec=spec, settings=StepSettings()))
    with pytest.raises(StepError, match="segment of 'spare', but the step never calls that module"):
        worker.answer(MeasureJob(plan=plan("layer", "spare"), steps=1))


class ByBatch(Parts, weight=lambda: nn.Parameter(torch.ones(40))):
    """Runs another operator on a few samples than on many."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh() if len(x) > 4 else (x * self.weight).sigmoid().tanh()


class EverOther(ByBatch):
    """Runs other operators in every step: 48 that are drawn where memopt cannot put back what was drawn."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = int.from_bytes(os.urandom(6), "big")
        for place in range(48):
            x = x * self.weight if drawn >> place & 1 else x + self.weight
        return x


class ByData(ByBatch):
    """Runs another operator on data than without."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:2] if isinstance(x, FakeTensor) else x)


def two_alike(first: nn.Module) -> nn.Module:
    """Two modules that differ in their widths alone."""
    torch.manual_seed(0)
    heavy, light = (nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 40)) for width in (400, 20))
    return nn.Sequential(first, heavy, light)


def depends_on_data() -> nn.Module:
    return two_alike(ByBatch())


def traced(model: type[nn.Module], data: Data = "full size") -> TraceAnswer:
    with LocalSession(subject_of("B", 40, data=data), 60.0, build=model) as session:
        found = session.ask(TraceJob(fake=True))
    assert isinstance(found, TraceAnswer)
    return found


def test_an_operator_that_fails_in_a_dry_run_here_is_not_logged_by_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    """It reached the output of a notebook's cell, as a page of traceback before the error of memopt."""
    with LocalSession(subject_of("B", 40), 60.0, build=lambda: nn.Linear(3, 4)) as session:
        found = session.ask(TraceJob(fake=True))
    assert isinstance(found, StepFailed)
    assert "shapes cannot be multiplied" in found.message
    assert not caplog.records


@pytest.mark.parametrize("model", [ByBatch, ByData])
def test_where_operators_depend_on_the_data_a_full_step_tells_of_it(model: type[nn.Module]) -> None:
    found = traced(model)
    assert not found.fake
    assert found.has_dry_runs
    assert_timed(found)
    assert [op.name for op in found.trace.ops[:2]] == ["aten::mul", "aten::tanh"]
    assert [s.compressor for s in found.trace.storages if s.kind == "inputs"] == ["bit"]


def test_a_full_step_that_cannot_be_recorded_leaves_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt_cli.measure.answers.dry_runs.record_on_data", lambda *_: 1 / 0)
    found = traced(ByBatch)
    assert found.fake
    assert found.has_dry_runs
    assert found.unknown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data", "told"),
    [(ByBatch, "small batch", "can be packed"), (EverOther, "full size", "times are estimated")],
)
def test_what_another_step_does_not_tell_is_said(model: type[nn.Module], data: Data, told: str) -> None:
    assert any(told in reason for reason in traced(model, data).unknown)


def three_norms() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.BatchNorm1d(40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.BatchNorm1d(40))
    )


def test_a_rule_for_inexact_chunks_is_no_answer_where_they_are_not_allowed() -> None:
    worker = Worker(subject_of("B", 40), build=three_norms)
    for _ in range(2):
        assert isinstance(worker.answer(ChunkingJob(path="0")), Refused)
        found = worker.answer(ChunkingJob(path="0", allow_inexact=True))
        assert isinstance(found, ChunkRule)
        assert found.inexact


def second_hooked() -> nn.Module:
    first, second = (nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Tanh()) for _ in range(2))
    second[1].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.5,))
    return nn.Sequential(first, second)


def test_modules_with_other_hooks_are_not_alike() -> None:
    worker = Worker(subject_of("B", 40), build=second_hooked)
    assert isinstance(worker.answer(ChunkingJob(path="0")), ChunkRule)
    assert isinstance(worker.answer(ChunkingJob(path="1")), Refused)


def wide_and_narrow() -> nn.Module:
    heavy, light = (nn.Sequential(nn.Linear(400, 400), nn.Tanh()) for _ in range(2))
    heavy.append(nn.Linear(400, 40))
    light[0] = nn.Linear(40, 40)
    return nn.Sequential(heavy[:2], heavy[2], light, nn.Sequential(nn.Linear(40, 40), nn.ReLU()))


@pytest.mark.slow
def test_of_modules_alike_but_for_their_widths_the_quickest_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(subject_of("B", 400, batch=64), build=wide_and_narrow)
    tried: list[str] = []

    def capture(step: Any, path: str) -> Any:
        tried.append(path)
        return capture_call(step, path)

    monkeypatch.setattr("memopt_cli.measure.answers.chunks.capture_call", capture)
    worker.answer(TraceJob(fake=True))
    for path in ("0", "2", "0", "3"):
        assert worker.answer(ChunkingJob(path=path)) == ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)
    assert tried == ["2", "3"]


def test_a_script_that_writes_as_it_is_imported_is_told_where_that_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to take the wall down."""
    monkeypatch.setattr(sandbox, "is_confined", lambda: True)
    error = UsageError("importing train.py failed: Permission denied", hint=IMPORTED_HINT)
    error.__cause__ = PermissionError(13, "Permission denied")
    assert failure_of(error) == StepFailed.from_error(error, error.hint)
    for other in (StepError("forward failed", hint="Give other inputs."), UsageError("make failed", hint="Run it.")):
        other.__cause__ = PermissionError(13, "Permission denied")
        assert sandbox.HINT in failure_of(other).hint


def test_an_answer_too_long_to_be_read_is_a_failure_that_says_so() -> None:
    """An answer that is cut at the maximum length of its kind would look made up."""
    reply = {"kind": "answer", "answer": ["x" * 50]}
    line = _reply_line(reply, 10_000)
    assert json.loads(line) == reply
    said = from_data(StepFailed, json.loads(_reply_line(reply, 100)))
    assert "does not fit into 100 B of memory" in said.message
    assert said.hint


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 1 is free.",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: Tried to allocate 64.00 MiB",
    ],
)
def test_of_a_lack_of_memory_it_is_told_how_much_was_wanted(message: str) -> None:
    assert failure_of(torch.OutOfMemoryError(f"{message}\nmore")) == OutOfMemory(detail="Tried to allocate 64.00 MiB")


def test_a_step_that_does_not_fit_here_is_not_run(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker()
    needed = one.answer(CountJob(plan=ORIGINAL, fake=True, batch=8)).allocated_peak_bytes
    segments = plan("0", "1", "2")
    planned = one.answer(CountJob(plan=segments, fake=True, batch=8)).allocated_peak_bytes
    assert planned < needed
    one.bench.reset()
    free = (planned + needed) // 2
    own = sum(tensor.nbytes for tensor in one.bench.model.state_dict().values())
    monkeypatch.setattr(without_data, "runnable_bytes", lambda device: free - own)
    ran = []
    monkeypatch.setattr(
        Bench, "reset_step", lambda self, step, reset_step=Bench.reset_step: (ran.append(step), reset_step(self, step))
    )
    for job in (MeasureJob(plan=ORIGINAL), ProbeJob(plan=ORIGINAL, batch=8)):
        with pytest.raises(StepTooLargeError) as raised:
            one.answer(job)
        outcome = failure_of(raised.value)
        assert (outcome.needed_bytes, outcome.free_bytes, outcome.was_tried) == (needed, free, False)
    assert ran == []
    assert not may_run_in_full(one.bench)
    assert one.answer(MeasureJob(plan=segments)).measurement.allocated_peak_bytes > 0
    assert ran
    assert one.answer(ProbeJob(plan=ORIGINAL, batch=2)).batch == 2


def test_room_that_others_took_for_a_moment_is_found_again(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, free = worker(), [0, 1 << 40]
    monkeypatch.setattr(without_data, "runnable_bytes", lambda device: free.pop(0))
    assert [may_run_in_full(one.bench) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("job", [MeasureJob(plan=ORIGINAL), ProbeJob(plan=ORIGINAL, batch=4)])
def test_a_step_is_counted_once_before_it_is_run(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, job: MeasureJob | ProbeJob
) -> None:
    one = worker()
    one.answer(job)
    counted = []
    count = FakeStep.count
    monkeypatch.setattr(FakeStep, "count", lambda self, **kwargs: counted.append(kwargs) or count(self, **kwargs))
    one.answer(job)
    assert len(counted) == 1


@pytest.mark.parametrize(
    ("error", "is_tried"),
    [
        (RuntimeError("the model reads a number"), True),
        (LossError("the loss reads a number"), True),
        (StepError("memopt knows better"), False),
        (MemoryError("the inputs"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_step_is_tried_uncounted_only_if_it_may_need_data(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, error: Exception, is_tried: bool
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    one = worker()
    monkeypatch.setattr(FakeStep, "count", fail)
    if is_tried:
        assert one.answer(ProbeJob(plan=ORIGINAL, batch=4)).batch == 4
    else:
        with pytest.raises(type(error)):
            one.answer(ProbeJob(plan=ORIGINAL, batch=4))


class _Scattering(nn.Module):
    """An embedding whose gradient is sparse, with a sparse buffer."""

    mixing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8, sparse=True)
        self.register_buffer("mixing", torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.mixing, self.embedding(x).flatten(0, -2).mT)


def test_a_step_with_sparse_tensors_is_measured_and_recorded() -> None:
    spec = InputSpec(tensors=(TensorSpec(shape=(4, 6), dtype="int64", values="0..100"),), source="here")
    subject = Subject(source=ModelSource(location="here"), spec=spec, settings=StepSettings(optimizer="sgd"))
    worker = Worker(subject, _Scattering)
    assert worker.answer(MeasureJob(plan=ORIGINAL, steps=1)).measurement.tensor_peak_bytes > 0
    assert worker.answer(TraceJob(fake=False)).trace.ops
