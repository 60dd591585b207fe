"""``memopt selftest``: small models of each kind are planned, measured and verified on this machine."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import torch

from memopt_cli.devices import resolve_device
from memopt_cli.errors import MemoptError
from memopt_cli.measure.conditions import conditions_of
from memopt_cli.measure.jobs import ORIGINAL, MeasureJob
from memopt_cli.pipeline.optimization import optimize
from memopt_cli.pipeline.prepare import Prepared, opening_of, prepare
from memopt_cli.pipeline.profiling import profile
from memopt_cli.pipeline.recommendation import recommend_batch
from memopt_cli.progress import Progress
from memopt_cli.records import (
    BatchAdvice,
    BatchRequest,
    InputSpec,
    LevelRow,
    Measurement,
    MemOptSummary,
    ModelSource,
    OptimizeRequest,
    OutOfMemory,
    ProfileRequest,
    SearchOverrides,
    SelftestReport,
    SelftestRow,
    StepSettings,
    describe,
)
from memopt_cli.spec_text import parse_tensor
from memopt_cli.units import format_bytes

_MODELS = "memopt_cli.selftest.models"
_CLOSE = 0.02
"""A predicted peak may be off by this share of the measured one."""
_SEARCH_S = 15.0
_TIMEOUT_S = 120.0
_MORE_THAN_THERE_IS = 2**50


_PLAIN = StepSettings(optimizer="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A model, and how its step is run."""

    name: str
    model: str = "transformer"
    """Function of :mod:`memopt_cli.selftest.models`."""
    inputs: str = "BxSx64"
    dims: dict[str, int] = field(default_factory=lambda: {"B": 8, "S": 128})
    level: int = 2
    settings: StepSettings = _PLAIN
    needs_gpu: bool = False

    @property
    def source(self) -> ModelSource:
        return ModelSource(location=f"{_MODELS}:{self.model}")

    @property
    def spec(self) -> InputSpec:
        return InputSpec(tensors=(parse_tensor(self.inputs),), dims=self.dims, source="selftest")

    def on(self, device: str) -> StepSettings:
        return replace(self.settings, device=device)


_ATTENTION = _Case(name="attention")
_PLANNED = (
    _Case(name="convolutions, batch norm", model="convolutional", inputs="Bx3x32x32", dims={"B": 16}, level=3),
    _ATTENTION,
    _Case(name="attention, outputs kept", level=4),
    _Case(name="attention, bf16", settings=StepSettings(optimizer="none", precision="bf16")),
    _Case(
        name="attention, fp16 with a scaler",
        settings=StepSettings(optimizer="adamw", precision="fp16"),
        needs_gpu=True,
    ),
    _Case(name="an LSTM", model="Recurrent", inputs="TxBx64", dims={"T": 24, "B": 32}, level=3),
    _Case(name="spiking layers", model="spiking", inputs="TxBx64", dims={"T": 12, "B": 64}, level=3),
    _Case(name="several streams", model="streams", inputs="Bx64", dims={"B": 2048}, level=1, needs_gpu=True),
)
_WITH_OPTIMIZER = (
    _Case(name="AdamW, foreach", settings=StepSettings(optimizer="adamw:foreach")),
    _Case(name="AdamW, fused", settings=StepSettings(optimizer="adamw:fused")),
    _Case(
        name="SGD, four micro-batches, clipped",
        settings=StepSettings(optimizer="sgd", micro_batches=4, clip_norm=1.0),
    ),
)


def selftest(device: str, *, progress: Progress) -> SelftestReport:
    """Try what memopt promises on a device: ``auto``, ``cpu`` or ``cuda[:N]``.

    What fails is a row that does not hold.  Raises :class:`UsageError` for a device that is not there.
    """
    started, device = time.monotonic(), resolve_device(device)
    rows = tuple(row for case, test in _tests(device) for row in _tried(case, test, device, progress))
    return SelftestReport(
        memopt=version("memopt"),
        torch=str(torch.__version__),
        platform=platform.platform(),
        cuda=f"{torch.version.cuda}, {torch.cuda.get_device_capability(device)}" if device != "cpu" else "",
        conditions=conditions_of(StepSettings(device=device)),
        rows=rows,
        spent_s=time.monotonic() - started,
    )


def _tests(device: str) -> Iterator[tuple[_Case, _Test]]:
    """What is run, and what yields the rows of it."""
    for case in _PLANNED:
        if device != "cpu" or not case.needs_gpu:
            yield case, _optimized
    yield from ((case, _phases) for case in _WITH_OPTIMIZER)
    yield replace(_ATTENTION, name="a step, twice"), _repeated
    yield replace(_ATTENTION, name="a recommended batch"), _recommended
    yield (
        _Case(name="a step that does not fit", inputs=f"{_MORE_THAN_THERE_IS}x64", dims={}, model="streams"),
        _too_large,
    )


_Test = Callable[[_Case, str], Iterator[SelftestRow]]


def _tried(case: _Case, test: _Test, device: str, progress: Progress) -> Iterator[SelftestRow]:
    progress.stage(case.name)
    try:
        yield from test(case, device)
    except MemoptError as err:
        yield SelftestRow(name=case.name, promise="it runs", seen=err.message, holds=False)


def _optimized(case: _Case, device: str) -> Iterator[SelftestRow]:
    request = OptimizeRequest(
        source=case.source,
        spec=case.spec,
        settings=case.on(device),
        search=SearchOverrides(level=case.level, max_slowdown=math.inf),
        dry_run=True,
        recommend_batch=False,
        timeout_s=_TIMEOUT_S,
        search_limit_s=_SEARCH_S,
    )
    summary = optimize(request, progress=Progress(), ask=None).summary
    yield _verified(case.name, summary)
    for row in summary.levels:
        if row.level in (0, summary.applied_level) and row.predicted_allocated_peak_bytes is not None:
            yield _predicted(case.name, row)
    yield _smaller(case.name, summary)


def _verified(name: str, summary: MemOptSummary) -> SelftestRow:
    found = summary.verification
    assert found is not None, "a level was asked for"
    seen = "equal" if found.passed else found.difference
    return SelftestRow(name=name, promise="the plan computes the same", seen=seen, holds=found.passed)


def _predicted(name: str, row: LevelRow) -> SelftestRow:
    predicted, measured = row.predicted_allocated_peak_bytes or 0, row.outcome
    promise = f"the peak of {'the original' if row.level == 0 else 'the plan'} is predicted within {_CLOSE:.0%}"
    if not isinstance(measured, Measurement):
        return SelftestRow(name=name, promise=promise, seen=describe(measured) if measured else "not run", holds=False)
    return _compared(name, promise, predicted, measured.allocated_peak_bytes)


def _compared(name: str, promise: str, predicted: int, measured: int) -> SelftestRow:
    return SelftestRow(
        name=name,
        promise=promise,
        seen=f"{format_bytes(predicted)} predicted, {format_bytes(measured)} measured",
        holds=abs(predicted - measured) <= _CLOSE * measured,
    )


def _smaller(name: str, summary: MemOptSummary) -> SelftestRow:
    outcomes = {row.level: row.outcome for row in summary.levels}
    before, after = outcomes[0], outcomes[summary.applied_level]
    assert isinstance(before, Measurement)
    assert isinstance(after, Measurement)
    peaks = before.allocated_peak_bytes, after.allocated_peak_bytes
    return SelftestRow(
        name=name,
        promise="the plan takes less",
        seen=" → ".join(map(format_bytes, peaks)),
        holds=peaks[1] < peaks[0],
    )


def _phases(case: _Case, device: str) -> Iterator[SelftestRow]:
    """Of a step with an optimizer."""
    request = ProfileRequest(source=case.source, spec=case.spec, settings=case.on(device), timeout_s=_TIMEOUT_S)
    found = profile(request, progress=Progress(), ask=None)
    assert isinstance(found.measurement, Measurement)
    measured = {peak.phase: peak.allocated_peak_bytes for peak in found.measurement.phases}
    for peak in found.phases:
        promise = f"the peak of its {peak.phase} is predicted within {_CLOSE:.0%}"
        yield _compared(case.name, promise, peak.allocated_peak_bytes, measured[peak.phase])


def _prepared(case: _Case, device: str) -> Prepared:
    request = ProfileRequest(source=case.source, spec=case.spec, timeout_s=_TIMEOUT_S)
    return prepare(opening_of(request, case.on(device)), progress=Progress(), ask=None)


def _repeated(case: _Case, device: str) -> Iterator[SelftestRow]:
    prepared = _prepared(case, device)
    peaks = []
    for _ in range(2):
        with prepared.session(_TIMEOUT_S) as session:
            answer = session.ask(MeasureJob(plan=ORIGINAL))
        peaks.append(getattr(getattr(answer, "measurement", None), "tensor_peak_bytes", None))
    yield SelftestRow(
        name=case.name,
        promise="the tensor peak repeats to the byte",
        seen=" and ".join(f"{peak} bytes" for peak in peaks),
        holds=peaks[0] is not None and peaks[0] == peaks[1],
    )


def _recommended(case: _Case, device: str) -> Iterator[SelftestRow]:
    request = BatchRequest(
        source=case.source,
        spec=case.spec,
        settings=case.on(device),
        memory=64 * 2**20,
        longest_step_s=5.0,
        timeout_s=_TIMEOUT_S,
    )
    found = recommend_batch(request, progress=Progress(), ask=None)
    outcome = found.rows[found.chosen].outcome
    runs = (
        {probe.batch: probe.allocated_peak_bytes for probe in outcome.probes}
        if isinstance(outcome, BatchAdvice)
        else {}
    )
    peak = runs.get(found.batch)
    yield SelftestRow(
        name=case.name,
        promise="it was run and stays within 64 MiB",
        seen=f"batch {found.batch}: {format_bytes(peak)}" if peak else f"batch {found.batch} was not run",
        holds=peak is not None and peak <= 64 * 2**20,
    )


def _too_large(case: _Case, device: str) -> Iterator[SelftestRow]:
    prepared = _prepared(case, device)
    with prepared.session(_TIMEOUT_S) as session:
        answer = session.ask(MeasureJob(plan=ORIGINAL))
    yield SelftestRow(
        name=case.name,
        promise="running out of memory is an answer",
        seen=type(answer).__name__,
        holds=isinstance(answer, OutOfMemory),
    )
