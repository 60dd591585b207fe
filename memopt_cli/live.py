"""What the commands do, for a model in memory: the same names, the same answers."""

from __future__ import annotations

import contextlib
import html
import inspect
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor, nn

from memopt_cli.api import resolve_device
from memopt_cli.apply import apply_plan, plan_of
from memopt_cli.devices import resolve_device as device_named
from memopt_cli.errors import OptionError
from memopt_cli.measure import processes
from memopt_cli.measure.jobs import Data
from memopt_cli.pipeline.batch_advice import advise
from memopt_cli.pipeline.live_model import (
    described,
    found_and_proven,
    logged,
    prepared_model,
    take_off,
)
from memopt_cli.pipeline.prepare import Prepared, file_header
from memopt_cli.pipeline.profiling import profile_prepared
from memopt_cli.pipeline.recommendation import accumulating, recommend_prepared
from memopt_cli.pipeline.regression import check_prepared, record_prepared, step_of_baseline
from memopt_cli.pipeline.summary import Findings, summarize
from memopt_cli.plan.policy import resolve
from memopt_cli.progress import Progress
from memopt_cli.records import (
    BaselineRequest,
    BaselineResult,
    BatchAdvice,
    BatchRecommendation,
    BatchRequest,
    Budget,
    CheckRequest,
    Comparison,
    InputSpec,
    MemOptSummary,
    ModelSource,
    Objective,
    OptimizeRequest,
    OptimizeResult,
    Plan,
    Precision,
    SearchGoal,
    SearchOverrides,
    StepProfile,
    StepSettings,
)
from memopt_cli.report.text import TextReport
from memopt_cli.spec_text import check_inputs, parse_limit, parse_tensor, require_used
from memopt_cli.units import parse_amount
from memopt_cli.write import check_targets, read_plan

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | str | Sequence[str]
"""The one argument of ``forward``, its positional or keyword arguments, or text as for ``-i``: ``"Bx3x64x64"``."""
Loss = str | Callable[[Any], Tensor]
"""Called with the model's output: a function of a file, or its name as for ``--loss``."""


class _Shown:
    """Looks like the command's report where it is printed, and in a notebook."""

    def _write(self, stream: TextIO) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        text = io.StringIO()
        self._write(text)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


@dataclass(frozen=True, slots=True, repr=False)
class Optimized(_Shown):
    """What was found, as ``memopt optimize`` shows it."""

    result: OptimizeResult

    @property
    def summary(self) -> MemOptSummary:
        """All that was found: levels, measurements, notes, the frontier if it was asked for."""
        return self.result.summary

    @property
    def plan(self) -> Plan:
        """The plan that is on the model; of a frontier, none."""
        return self.result.summary.plan or Plan()

    def _write(self, stream: TextIO) -> None:
        TextReport().optimized(self.result, stream)


@dataclass(frozen=True, slots=True, repr=False)
class Profiled(_Shown):
    """Where a step's memory goes, as ``memopt profile`` shows it."""

    result: StepProfile

    def _write(self, stream: TextIO) -> None:
        TextReport().profiled(self.result, stream)


@dataclass(frozen=True, slots=True, repr=False)
class Recommended(_Shown):
    """How large a batch fits, as ``memopt recommend-batch`` shows it."""

    result: BatchRecommendation

    @property
    def batch(self) -> int:
        """The batch that is recommended."""
        return self.result.batch

    def _write(self, stream: TextIO) -> None:
        TextReport().recommended(self.result, stream)


@dataclass(frozen=True, slots=True, repr=False)
class Recorded(_Shown):
    """A baseline that was written, as ``memopt baseline`` shows it."""

    result: BaselineResult

    def _write(self, stream: TextIO) -> None:
        TextReport().recorded(self.result, stream)


@dataclass(frozen=True, slots=True, repr=False)
class Checked(_Shown):
    """A step held against its baseline, as ``memopt check`` shows it."""

    result: Comparison

    @property
    def passed(self) -> bool:
        """Whether nothing grew by more than it may."""
        return not self.result.exceeded

    def _write(self, stream: TextIO) -> None:
        TextReport().compared(self.result, stream)


def optimize(
    model: nn.Module,
    inputs: Inputs,
    *,
    dims: Mapping[str, int] | None = None,
    level: int | None = None,
    budget: str | float | None = None,
    max_slowdown: float | None = None,
    target: Sequence[str] = (),
    allow_inexact: bool = False,
    search_time: float | None = None,
    recommend_batch: bool = False,
    loss: Loss | None = None,
    optimizer: str = "",
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | None = None,
    seed: int = 0,
    verbose: bool = False,
) -> Optimized:
    """Make ``model`` train in less memory, in place, as ``memopt optimize`` does with a file.

    Parameters
    ----------
    inputs, dims:
        Of a step at full size; ``dims`` are the sizes of symbols, ``{"B": 16}``, where they are text.
    level:
        What a plan may do, 0 to 4; ``None``: 3.
    budget:
        The fastest plan whose measured peak stays within it, instead of the least peak: ``"8GiB"``, ``"60%"`` of the
        original's, ``0.6``, or bytes.
    max_slowdown:
        The longest step, over that of the original; ``None``: 1.33, or with a budget no limit; ``math.inf``: no limit.
    target:
        Classes or paths of the modules that may become segments; memopt chooses if there are none.
    search_time:
        Seconds after which the best so far is taken.
    recommend_batch:
        Say how large a batch the plan allows, too.  Inputs must be text for it: tensors are of one size.
    optimizer:
        Whose state counts, as for ``--optimizer``: ``adamw:fused``.
    accumulate:
        Micro-batches of a step of the optimizer.
    device:
        ``None``: the one of this process.
    verbose:
        Log the course of the search, by the logger ``memopt_cli``.

    Parameters, gradients, buffers, random numbers and the mode stay as they are; a plan that the model carries is
    replaced.  Raises :class:`VerificationError` if the optimized model differs, :class:`NothingFitsError` if no plan
    meets the budget, and other errors of :mod:`memopt_cli.errors`; then the model is as it was.
    """
    settings = _settings(loss, optimizer, accumulate, clip_norm, precision, device, seed)
    goal = SearchGoal() if budget is None else SearchGoal(budget=Budget.of(_memory(budget)))
    search = SearchOverrides(level=level, targets=tuple(target), allow_inexact=allow_inexact, max_slowdown=max_slowdown)
    return _searched(model, _given(inputs, dims), settings, search, goal, search_time, recommend_batch, verbose)


def frontier(
    model: nn.Module,
    inputs: Inputs,
    *,
    dims: Mapping[str, int] | None = None,
    level: int | None = None,
    max_slowdown: float | None = None,
    target: Sequence[str] = (),
    allow_inexact: bool = False,
    search_time: float | None = None,
    loss: Loss | None = None,
    optimizer: str = "",
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | None = None,
    seed: int = 0,
    verbose: bool = False,
) -> Optimized:
    """The plans between the fastest and the smallest, measured, as ``memopt optimize --frontier``.

    They are in ``summary.frontier``; ``memopt_cli.apply_plan(model, point.plan)`` takes one.  The model stays as it
    is.  Arguments and errors are those of :func:`optimize`.
    """
    settings = _settings(loss, optimizer, accumulate, clip_norm, precision, device, seed)
    search = SearchOverrides(level=level, targets=tuple(target), allow_inexact=allow_inexact, max_slowdown=max_slowdown)
    goal = SearchGoal(frontier=True)
    return _searched(model, _given(inputs, dims), settings, search, goal, search_time, False, verbose)


def profile(
    model: nn.Module,
    inputs: Inputs,
    *,
    dims: Mapping[str, int] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    fake: bool = False,
    loss: Loss | None = None,
    optimizer: str = "",
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | None = None,
    seed: int = 0,
    verbose: bool = False,
) -> Profiled:
    """Where the memory of a training step goes, as ``memopt profile``; the model stays as it is.

    ``plan``: one to run the step under, or the path of its file.  ``fake``: estimate on tensors without data.  A plan
    that the model carries is left out.  Other arguments and errors are those of :func:`optimize`.
    """
    settings = _settings(loss, optimizer, accumulate, clip_norm, precision, device, seed)
    with _prepared(model, _given(inputs, dims), settings, verbose) as (prepared, progress):
        data: Data = "small batch" if fake else "full size"
        return Profiled(profile_prepared(prepared, _plan(plan), data=data, timeout_s=_TIMEOUT_S, progress=progress))


def recommend_batch(
    model: nn.Module,
    inputs: Inputs,
    *,
    dims: Mapping[str, int] | None = None,
    memory: str | float = 0.9,
    plan: Plan | str | os.PathLike[str] | None = None,
    global_batch: int | None = None,
    multiple_of: int = 1,
    objective: Objective = "max",
    longest_step: float = 60.0,
    loss: Loss | None = None,
    optimizer: str = "",
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | None = None,
    seed: int = 0,
    verbose: bool = False,
) -> Recommended:
    """How large a batch fits, as ``memopt recommend-batch``; the model stays as it is.

    Tensors among the inputs tell their sizes and dtypes, and whole numbers their range: batches of other sizes are
    drawn at random.  ``memory``: ``"24GiB"``, ``"80%"`` or ``0.8`` of the device's, or bytes.  Other arguments and
    errors are those of :func:`optimize`.
    """
    settings = _settings(loss, optimizer, accumulate, clip_norm, precision, device, seed)
    settings = accumulating(settings, global_batch)
    spec = _description(inputs, dims)
    with _prepared(model, spec, settings, verbose) as (prepared, progress):
        amount = _memory(memory)
        request = BatchRequest(
            source=prepared.subject.source,
            spec=spec,
            settings=prepared.subject.settings,
            memory=amount,
            objective=objective,
            global_batch=global_batch,
            multiple_of=multiple_of,
            timeout_s=_TIMEOUT_S,
            longest_step_s=longest_step,
        )
        chosen = None if plan is None else _plan(plan)
        return Recommended(recommend_prepared(request, prepared, chosen, (), progress))


def baseline(
    model: nn.Module,
    inputs: Inputs,
    output: str | os.PathLike[str] = "memopt-baseline.json",
    *,
    dims: Mapping[str, int] | None = None,
    force: bool = False,
    loss: Loss | None = None,
    optimizer: str = "",
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | None = None,
    seed: int = 0,
    verbose: bool = False,
) -> Recorded:
    """Write down what a step needs, as ``memopt baseline``, under the plan that the model carries.

    Tensors among the inputs are described, as for :func:`recommend_batch`.  ``force``: an existing file is replaced.
    Other arguments and errors are those of :func:`optimize`.
    """
    check_targets([Path(output)], force=force)
    settings = _settings(loss, optimizer, accumulate, clip_norm, precision, device, seed)
    with _prepared(model, _description(inputs, dims), settings, verbose) as (prepared, progress):
        request = BaselineRequest(
            source=ModelSource(location=type(model).__name__),
            spec=prepared.subject.spec,
            settings=settings,
            output=os.fspath(output),
            force=force,
        )
        return Recorded(record_prepared(request, replace(prepared, carried=plan_of(model).of_model), progress))


def check(
    model: nn.Module,
    inputs: Inputs,
    baseline: str | os.PathLike[str] = "memopt-baseline.json",
    *,
    dims: Mapping[str, int] | None = None,
    fail_on: Sequence[str] = ("peak:0",),
    loss: Loss | None = None,
    verbose: bool = False,
) -> Checked:
    """Hold a step against its baseline, as ``memopt check``, under the plan that the model carries.

    ``fail_on``: how much a metric may grow, ``"peak:5%"``.  How the step is run is in the baseline; only the loss,
    which is code, is given again.  Raises :class:`BaselineError` for a baseline that is missing, or of another step.
    """
    spec = _description(inputs, dims)
    request = CheckRequest(
        source=ModelSource(location=type(model).__name__),
        baseline_path=os.fspath(baseline),
        limits=tuple(map(parse_limit, fail_on)),
        spec=spec,
        loss=_name_of(loss),
    )
    before, settings = step_of_baseline(request)
    settings = replace(settings, device=device_named(settings.device))
    with _prepared(model, spec, settings, verbose) as (prepared, progress):
        carrying = replace(prepared, carried=plan_of(model).of_model)
        return Checked(check_prepared(request, before, carrying, progress))


_TIMEOUT_S = 600.0
"""Of each answer of a profiling subprocess, as for ``--timeout``."""


# ---------------------------------------------------------------------------------------------- how


def _searched(
    model: nn.Module,
    given: tuple[Any, ...] | Mapping[str, Any] | InputSpec,
    settings: StepSettings,
    search: SearchOverrides,
    goal: SearchGoal,
    search_time: float | None,
    recommend_batch: bool,
    verbose: bool,
) -> Optimized:
    started, resolved = time.monotonic(), resolve(search)
    with _prepared(model, given, settings, verbose) as (prepared, progress):
        request = OptimizeRequest(
            source=prepared.subject.source,
            spec=None,
            settings=settings,
            search=search,
            goal=goal,
            search_limit_s=search_time,
            recommend_batch=recommend_batch,
        )
        found = found_and_proven(request, resolved, prepared, progress)
        advice = None
        if found.verification is not None:
            found.notes[:0] = take_off(model)
            apply_plan(model, found.plan.of_model)
            advice = _advice(request, prepared, found, progress) if recommend_batch else None
        summary = summarize(found, spent_s=time.monotonic() - started, advice=advice)
        header = replace(file_header(prepared), model=type(model).__name__)
        return Optimized(OptimizeResult(header=header, summary=summary, files=()))


def _advice(request: OptimizeRequest, prepared: Prepared, found: Findings, progress: Progress) -> BatchAdvice | None:
    assert found.measured is not None, "it is applied"
    return advise(request, prepared, found.plan, found.measured, found.notes, progress)


@contextlib.contextmanager
def _prepared(
    model: nn.Module,
    given: tuple[Any, ...] | Mapping[str, Any] | InputSpec,
    settings: StepSettings,
    verbose: bool,
) -> Iterator[tuple[Prepared, Progress]]:
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"the model is a {type(model).__name__}, no torch.nn.Module",
            hint="A step of one's own is optimized by memopt_cli.optimize_step, or by memopt optimize FILE:FUNCTION.",
        )
    with logged(verbose) as progress, processes.kept(), prepared_model(model, given, settings) as prepared:
        for note in prepared.notes:
            progress.note(note)
        yield prepared, progress


def _settings(
    loss: Loss | None,
    optimizer: str,
    accumulate: int,
    clip_norm: float | None,
    precision: Precision,
    device: str | None,
    seed: int,
) -> StepSettings:
    return StepSettings(
        device=resolve_device() if device is None else device,
        precision=precision,
        loss=_name_of(loss),
        optimizer=optimizer,
        micro_batches=accumulate,
        clip_norm=clip_norm,
        seed=seed,
    )


def _name_of(loss: Loss | None) -> str | None:
    """``file.py:function``, by which a subprocess finds it.  Raises :class:`OptionError` if it cannot."""
    if loss is None or isinstance(loss, str):
        return loss
    name = getattr(loss, "__qualname__", "")
    try:
        file = inspect.getsourcefile(loss)
    except TypeError:  # an object that is called
        file = None
    if file is None or not os.path.isfile(file) or not name.isidentifier():
        raise OptionError(
            "the loss cannot be handed to a profiling subprocess: it is no function of a file",
            hint='Define it at the top of a file, or name it: loss="losses.py:loss".',
        )
    return f"{os.path.abspath(file)}:{name}"


def _given(inputs: Inputs, dims: Mapping[str, int] | None) -> tuple[Any, ...] | Mapping[str, Any] | InputSpec:
    """Values as they are; text as a description.  Raises :class:`OptionError` and :class:`UsageError`."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    if isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
        tensors, sizes = tuple(parse_tensor(str(text)) for text in texts), dict(dims or {})
        check_inputs(tensors, sizes)
        require_used(sizes, tensors, "inputs")
        return InputSpec(tensors=tensors, dims=sizes, source="inputs")
    if dims:
        raise OptionError("dims are given, and the inputs have sizes of their own", hint='Describe them: "Bx3x64x64".')
    if isinstance(inputs, Tensor):
        return (inputs,)
    if isinstance(inputs, tuple | Mapping):
        return inputs
    raise OptionError(
        f"inputs is a {type(inputs).__name__}",
        hint='Give a tensor, a tuple or a dict of the arguments of forward, or text such as "16x3x64x64".',
    )


def _description(inputs: Inputs, dims: Mapping[str, int] | None) -> InputSpec:
    given = _given(inputs, dims)
    return given if isinstance(given, InputSpec) else described(given)


def _memory(given: str | float) -> int | float:
    """Bytes, or a share, which is a float up to 1."""
    amount = parse_amount(given) if isinstance(given, str) else given
    if not amount > 0 or (isinstance(amount, float) and amount > 1):
        raise OptionError(f"{given!r} is neither bytes nor a share up to 1", hint='Write "24GiB", "60%" or 0.6.')
    return amount


def _plan(given: Plan | str | os.PathLike[str] | None) -> Plan:
    if given is None:
        return Plan()
    return given if isinstance(given, Plan) else read_plan(given)[1]
