"""``memopt selftest``: small models of each kind are planned, measured and verified on this machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

import torch

from memopt_cli.errors import MemoptError, first_line
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure.conditions import conditions_of
from memopt_cli.measure.devices import resolve_device
from memopt_cli.measure.jobs import ORIGINAL, CountJob, MeasureJob
from memopt_cli.pipeline.batches.recommendation import recommend_batch
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.plans.optimization import optimize
from memopt_cli.pipeline.plans.plan_measurements import measurement_in
from memopt_cli.pipeline.prepare import PreparedModel, load_request_for, prepare
from memopt_cli.records import (
    BatchRequest,
    Failure,
    InputSpec,
    Measurement,
    ModelSource,
    OptimizeRequest,
    OutOfMemory,
    Phase,
    ProfileRequest,
    SearchOverrides,
    SelftestReport,
    SelftestRow,
    StepSettings,
    describe,
)
from memopt_cli.records.progress import Progress
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.units import format_bytes
from memopt_cli.trace.workspace import MIN_BYTES
from memopt_cli.version import __version__

_MODELS = "memopt_cli.api.selftest.models"
_CLOSE = 0.02
"""A predicted peak may be off by this share of the measured one, or by the workspace that dry runs leave out."""
_WITHIN = f"within {_CLOSE:.0%} or {MIN_BYTES >> 10} KiB"
_SEARCH_S = 15.0
_MAX_SLOWDOWN = 50.0
"""Maximum slowdown of plans that save much, of steps that take milliseconds: without it, verifying one of hundreds of
chunks on a GPU took minutes."""
_TIMEOUT_S = 120.0
_MEMORY = 64 * 2**20
"""Memory limit in bytes of a recommended batch on the CPU."""
_GPU_MEMORY = 8 * _MEMORY
"""Memory limit in bytes of a recommended batch on a GPU, where cuBLAS may keep 64 MiB."""
_GPU_SAMPLES = 16
"""Batch on a GPU, as a multiple of the CPU's, so that a plan saves more than a few per cent of what libraries keep."""

_PLAIN = StepSettings(optimizer="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A model, and how its step is run."""

    name: str
    model: str = "transformer"
    """Function of :mod:`memopt_cli.api.selftest.models`."""
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

    def settings_on(self, device: str) -> StepSettings:
        return replace(self.settings, device=device)

    def row(self, promise: str, seen: str, *, holds: bool) -> SelftestRow:
        return SelftestRow(name=self.name, promise=promise, seen=seen, holds=holds)


_ATTENTION = _Case(name="attention")
_PLANNED = (
    # At 32x32, one image alone runs in another PyTorch kernel on the CPU, with its own workspace.
    _Case(name="convolutions, batch norm", model="convolutional", inputs="Bx3x48x48", dims={"B": 8}, level=3),
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

    What fails is a row that does not hold.  Ctrl-C ends it with the rows so far, if there are any.  Raises
    :class:`UsageError` for a device that is not there.
    """
    started = time.monotonic()
    device = resolve_device(device)
    interrupted = False
    conditions = conditions_of(StepSettings(device=device))
    rows = list[SelftestRow]()
    try:
        for case, test in _tests(device):
            rows.extend(_try_case(case, test, device, progress))
    except KeyboardInterrupt:
        if not rows:
            raise
        interrupted = True
    return SelftestReport(
        memopt=__version__,
        torch=str(torch.__version__),
        platform=platform.platform(),
        cuda=f"{torch.version.cuda}, {torch.cuda.get_device_capability(device)}" if device != "cpu" else "",
        conditions=conditions,
        rows=tuple(rows),
        spent_s=time.monotonic() - started,
        interrupted=interrupted,
    )


def _tests(device: str) -> Iterator[tuple[_Case, _Test]]:
    for case in _PLANNED:
        if device != "cpu":
            case = replace(case, dims={**case.dims, "B": _GPU_SAMPLES * case.dims["B"]})
        elif case.needs_gpu:
            continue
        yield case, _test_optimize
    yield from ((case, _phases) for case in _WITH_OPTIMIZER)
    yield replace(_ATTENTION, name="a step, twice"), _test_repetition
    yield replace(_ATTENTION, name="a recommended batch"), _test_recommend_batch
    yield _Case(name="a step that does not fit", model="TooLarge", inputs="Bx64", dims={"B": 8}), _too_large


_Test = Callable[[_Case, str], Iterator[SelftestRow]]


def _try_case(case: _Case, test: _Test, device: str, progress: Progress) -> Iterator[SelftestRow]:
    progress.stage(case.name)
    try:
        yield from test(case, device)
    except MemoptError as err:
        yield case.row("it runs", err.message, holds=False)
    except Exception as err:  # on a machine that nobody has tried, any error is a finding
        yield case.row("it runs", first_line(err), holds=False)


def _test_optimize(case: _Case, device: str) -> Iterator[SelftestRow]:
    request = OptimizeRequest(
        source=case.source,
        spec=case.spec,
        settings=case.settings_on(device),
        search=resolve(SearchOverrides(level=case.level, max_slowdown=_MAX_SLOWDOWN)),
        dry_run=True,
        recommend_batch=False,
        timeout_s=_TIMEOUT_S,
        search_limit_s=_SEARCH_S,
    )
    summary = optimize(request, progress=Progress(), ask=None).summary
    verification = summary.verification
    has_passed = verification is not None and verification.passed
    seen = "not compared" if verification is None else verification.difference
    yield case.row("the plan computes the same", "equal" if has_passed else seen, holds=has_passed)
    rows = {row.level: row for row in summary.levels}
    original, planned = rows[0], rows[summary.applied_level]
    for what, row in (("original", original), ("plan", planned)):
        promise = f"the peak of the {what} is predicted {_WITHIN}"
        predicted = row.predicted_allocated_peak_bytes
        yield _compare_bytes(case, promise, "not predicted" if predicted is None else predicted, _peak_of(row.outcome))
    before, after = _peak_of(original.outcome), _peak_of(planned.outcome)
    holds = isinstance(before, int) and isinstance(after, int) and after < before
    yield case.row("the plan takes less", f"{_text_of(before)} → {_text_of(after)}", holds=holds)


def _peak_of(outcome: Measurement | Failure | None) -> int | str:
    """Return the allocated bytes of ``outcome``, or why they are not known."""
    if isinstance(outcome, Measurement):
        return outcome.allocated_peak_bytes
    return "not run" if outcome is None else describe(outcome)


def _text_of(peak: int | str) -> str:
    return peak if isinstance(peak, str) else format_bytes(peak)


def _compare_bytes(case: _Case, promise: str, predicted: int | str, measured: int | str) -> SelftestRow:
    """Compare bytes; the promise is broken if ``predicted`` or ``measured`` is a reason in place of a number."""
    holds = False
    if isinstance(predicted, int) and isinstance(measured, int):
        holds = abs(predicted - measured) <= max(_CLOSE * measured, MIN_BYTES)
    seen = " and ".join(
        f"{_text_of(peak)} {how}" if isinstance(peak, int) else peak
        for peak, how in ((predicted, "predicted"), (measured, "measured"))
    )
    return case.row(promise, seen, holds=holds)


def _phases(case: _Case, device: str) -> Iterator[SelftestRow]:
    """Compare the phases of a step with an optimizer, measured and predicted on fake tensors."""
    with _prepare(case, device).session() as session:
        outcome = measurement_in(session.ask(MeasureJob(plan=ORIGINAL)))
        counted = require_answer(session.ask(CountJob(plan=ORIGINAL, fake=True)), "without data it could not be run: ")
    predicted = {peak.phase: peak.allocated_peak_bytes for peak in counted.phases}
    measured = {peak.phase: peak.allocated_peak_bytes for peak in getattr(outcome, "phases", ())}
    missing = "no such phase measured" if isinstance(outcome, Measurement) else describe(outcome)
    phases = ("forward", "backward", "update") if case.settings.clip_norm is None else get_args(Phase)
    for phase in phases:
        promise = f"the peak of its {phase} is predicted {_WITHIN}"
        yield _compare_bytes(case, promise, predicted.get(phase, "not predicted"), measured.get(phase, missing))


def _prepare(case: _Case, device: str) -> PreparedModel:
    request = ProfileRequest(source=case.source, spec=case.spec, timeout_s=_TIMEOUT_S)
    return prepare(load_request_for(request, case.settings_on(device)), progress=Progress(), ask=None)


def _test_repetition(case: _Case, device: str) -> Iterator[SelftestRow]:
    prepared = _prepare(case, device)
    runs = (_measure(prepared) for _ in range(2))
    first, second = (run.tensor_peak_bytes if isinstance(run, Measurement) else describe(run) for run in runs)
    seen = f"{first} and {second} bytes" if isinstance(first, int) else f"{first} and {second}"
    yield case.row("the tensor peak repeats to the byte", seen, holds=isinstance(first, int) and first == second)


def _measure(prepared: PreparedModel) -> Measurement | Failure:
    return measurement_in(prepared.ask(MeasureJob(plan=ORIGINAL)))


def _test_recommend_batch(case: _Case, device: str) -> Iterator[SelftestRow]:
    memory = _MEMORY if device == "cpu" else _GPU_MEMORY
    request = BatchRequest(
        source=case.source,
        spec=case.spec,
        settings=case.settings_on(device),
        memory=memory,
        longest_step_s=5.0,
        timeout_s=_TIMEOUT_S,
    )
    batch = recommend_batch(request, progress=Progress(), ask=None).batch
    peak = _peak_of(_measure(_prepare(replace(case, dims={**case.dims, "B": batch}), device)))
    yield case.row(
        f"a step of it stays within {format_bytes(memory)}, and takes half of that",
        f"batch {batch}: {_text_of(peak)}",
        holds=isinstance(peak, int) and memory / 2 <= peak <= memory,
    )


def _too_large(case: _Case, device: str) -> Iterator[SelftestRow]:
    outcome = _measure(_prepare(case, device))
    seen = "a measurement" if isinstance(outcome, Measurement) else describe(outcome)
    yield case.row("running out of memory is an answer", seen, holds=isinstance(outcome, OutOfMemory))
