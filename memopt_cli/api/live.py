"""The functions for a model in memory: ``memopt_cli.optimize``, ``frontier``, ``profile`` and others.

Each function checks its arguments, makes the same request as the command line, and passes it to the pipeline with the
model in memory in place of a file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from memopt_cli.api.arguments import (
    Given,
    Inputs,
    Lengths,
    Loss,
    Named,
    Optimizer,
    StepArguments,
    check_budget,
    check_card,
    check_functions,
    check_inputs_argument,
    check_lengths,
    check_model,
    check_names,
    check_path,
    check_step,
    check_text,
    resolve_search,
    split_range,
)
from memopt_cli.api.shown import BaselineReport, BatchReport, CheckReport, OptimizationReport, ProfileReport
from memopt_cli.errors import OptionError
from memopt_cli.files.memopt_files import load_plan
from memopt_cli.inputs.spec_text import parse_limit
from memopt_cli.measure import processes
from memopt_cli.measure.devices import resolve_device
from memopt_cli.pipeline.batches.batch_advice import NO_BATCH, advise
from memopt_cli.pipeline.batches.fastest_search import fastest_prepared
from memopt_cli.pipeline.batches.recommendation import recommend_prepared
from memopt_cli.pipeline.comparisons.regression import check_prepared, record_prepared, step_of_baseline
from memopt_cli.pipeline.live.every_rank import on_every_rank
from memopt_cli.pipeline.live.model import carried_note, describe_inputs, find_and_verify, prepared_model
from memopt_cli.pipeline.memory.profiling import profile_prepared
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.summary import summarize
from memopt_cli.pipeline.prepare import LEFT_OUT_NOTE, PreparedModel, file_header
from memopt_cli.records import (
    LONGEST_STEP_S,
    BaselineRequest,
    BatchAdvice,
    BatchEstimate,
    BatchRequest,
    CheckRequest,
    DeviceProfile,
    InputSpec,
    ModelSource,
    Objective,
    OptimizeRequest,
    OptimizeResult,
    Plan,
    Precision,
    ProfileRequest,
    SearchGoal,
)
from memopt_cli.records.progress import log_progress
from memopt_cli.runtime.places.disk import set_offload_folder
from memopt_cli.text.options import check_option, check_option_if_given
from memopt_cli.text.spelling import warn_if_unchanged, with_python_spelling
from memopt_cli.text.writing import check_targets
from memopt_cli.training.apply import apply_plan, replacing_plan

_ADD_SEARCH_HINT = "Add search=True."


@with_python_spelling
def optimize(
    model: nn.Module,
    inputs: Inputs,
    *,
    dims: Mapping[str, int | tuple[int, int]] | None = None,
    lengths: Lengths | None = None,
    level: int | None = None,
    budget: str | float | None = None,
    max_slowdown: float | None = None,
    target: Named | Sequence[Named] = (),
    allow_inexact: bool = False,
    search_time: float | None = None,
    compile: str | None = None,
    offload: str = "none",
    host_memory: str | int | None = None,
    recommend_batch: bool = False,
    for_device: str | os.PathLike[str] | DeviceProfile | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    optimizer_in_backward: bool = False,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | torch.device | None = None,
    seed: int = 0,
    process_group: torch.distributed.ProcessGroup | None = None,
    timeout: float = 600.0,
    verbose: bool = False,
) -> OptimizationReport:
    """Make ``model`` train in less memory, in place, as ``memopt optimize`` does with a file.

    Parameters
    ----------
    inputs, dims:
        The inputs of a full-size step.  If they are text, ``dims`` gives the size of each symbol: ``{"B": 16}``.  With
        a range, ``{"B": 16, "S": (64, 2048)}``, and a budget, the result is a plan by length: each of a few ranges of
        ``S`` has its own plan, and every forward uses the one for its input.
    lengths:
        How often each size of that range occurs, as for ``--lengths``: the path of a file, the size of each input, or
        ``{64: 900, 2048: 3}``.  With ``None``, every size is equally likely.
    level:
        What a plan may do, 0 to 4; by default 3.
    budget:
        The largest allowed peak: ``"8GiB"``, ``"60%"`` of the original's peak, ``0.6``, or bytes.  memopt then returns
        the fastest plan whose measured peak is within it.  With ``None``, the plan with the least peak.
    max_slowdown:
        The largest allowed step time, divided by the original's.  By default 1.33, or no limit with a budget;
        ``math.inf``: no limit.
    target:
        Classes or paths of the modules that may become segments; memopt chooses if there are none.
    search_time:
        Seconds after which the search ends with the best plan so far.
    compile:
        A backend of ``torch.compile``: compiled steps are tried as well, and if one of them is the answer, the model is
        compiled at its next call.
    offload:
        Where plans may send stored tensors until backward: ``"host"``, from a GPU; ``"disk"`` or ``"disk:FOLDER"``, on
        the CPU, which sets ``memopt_cli.offload_folder``; ``"auto"``: host on a GPU, and none on the CPU.
    host_memory:
        The most that plans may send to host memory, ``"64GiB"`` or bytes.  By default half of the free host memory,
        which no value can exceed.
    recommend_batch:
        Also return the largest batch that the plan allows.  This needs inputs that are text: tensors have one size.
    for_device:
        A GPU that is not here: estimates find the plan for it, as with ``--for``: ``"a100-40gb"``, the path of
        a YAML file, or a ``DeviceProfile``.  Nothing is measured, and no batch recommended.
    loss:
        A function of the model's output.  By default, the loss that the model returns, else a seeded random gradient.
    optimizer:
        The optimizer whose state counts: text as for ``--optimizer`` (``adamw:fused``), or a function that makes one,
        ``lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True)``.
    optimizer_in_backward:
        Let plans run the optimizer in backward, which frees each gradient as soon as it is used.  The returned plan is
        for ``memopt_cli.apply_plan(model, plan, optimizer=optimizer)``; the script must then not clip, accumulate or
        scale gradients.
    accumulate:
        Number of micro-batches for each step of the optimizer.
    device:
        The device to measure on.  By default this process's, as its launcher set it.
    process_group:
        A group whose ranks all make this call, each with its copy of the model; ``None`` for no group.  The first rank
        searches; all ranks get its plan and check that they have the same.  An error on one rank is raised on all.
    timeout:
        Seconds that each answer of a profiling subprocess may take.
    verbose:
        Log the course of the search, by the logger ``memopt_cli``.

    Parameters, gradients, buffers, random numbers and the mode stay as they are; the plan of the search replaces a plan
    that the model carries, which stays if no plan is found.

    Ctrl-C ends the search, and the best plan so far is measured, verified and applied; a second one, or one before any
    plan was found, is a ``KeyboardInterrupt``, which leaves the model as it was.

    Raises ``VerificationError`` if the optimized model differs, ``NothingFitsError`` if no plan meets the budget, and
    other errors of ``memopt_cli.errors``; then the model is as it was.
    """

    def optimized() -> OptimizationReport:
        card = check_card(for_device, device)
        step = check_step(loss, optimizer, accumulate, clip_norm, precision, "cpu" if card else device, seed)
        limit_s = check_option("timeout", timeout)
        sizes, varied = split_range(dims)
        given = check_inputs_argument(inputs, sizes)
        wants_batch = recommend_batch and card is None
        request = OptimizeRequest(
            source=_source_of(model),
            spec=None,
            settings=step.settings,
            search=resolve_search(
                level=level,
                max_slowdown=max_slowdown,
                target=target,
                allow_inexact=allow_inexact,
                offload=offload,
                host_memory=host_memory,
                optimizer_in_backward=optimizer_in_backward,
            ),
            goal=SearchGoal(budget=check_budget(budget)),
            dim_range=varied,
            lengths=check_lengths(lengths),
            search_limit_s=check_option_if_given("search_time", search_time),
            backend=None if compile is None else check_text("compile", compile),
            recommend_batch=wants_batch,
            confirm_batch=wants_batch,
            card=card,
            interruptible=process_group is None,
        )
        return _search(request, model, given, step, limit_s, verbose)

    result = on_every_rank(check_model(model), process_group, optimized, lambda result: result.plan)
    warn_if_unchanged(result.summary.unchanged)
    return result


@with_python_spelling
def frontier(
    model: nn.Module,
    inputs: Inputs,
    *,
    dims: Mapping[str, int] | None = None,
    level: int | None = None,
    max_slowdown: float | None = None,
    target: Named | Sequence[Named] = (),
    allow_inexact: bool = False,
    search_time: float | None = None,
    compile: str | None = None,
    offload: str = "none",
    host_memory: str | int | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    optimizer_in_backward: bool = False,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | torch.device | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    verbose: bool = False,
) -> OptimizationReport:
    """Find and measure the plans between the fastest and the smallest, as ``memopt optimize --frontier`` does.

    ``summary.frontier`` of the result holds them; ``memopt_cli.apply_plan(model, point.plan)`` applies one.  This
    function leaves the model as it is.  ``max_slowdown``: by default 10.  For other arguments and
    errors, see ``optimize``.
    """
    step = check_step(loss, optimizer, accumulate, clip_norm, precision, device, seed)
    request = OptimizeRequest(
        source=_source_of(model),
        spec=None,
        settings=step.settings,
        search=resolve_search(
            level=level,
            max_slowdown=max_slowdown,
            target=target,
            allow_inexact=allow_inexact,
            offload=offload,
            host_memory=host_memory,
            optimizer_in_backward=optimizer_in_backward,
        ),
        goal=SearchGoal(frontier=True),
        backend=None if compile is None else check_text("compile", compile),
        search_limit_s=check_option_if_given("search_time", search_time),
        recommend_batch=False,
        interruptible=True,
    )
    limit_s = check_option("timeout", timeout)
    return _search(request, model, check_inputs_argument(inputs, dims), step, limit_s, verbose)


@with_python_spelling
def profile(
    model: nn.Module,
    inputs: Inputs,
    *,
    dims: Mapping[str, int] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    fake: bool = False,
    for_device: str | os.PathLike[str] | DeviceProfile | None = None,
    compile: str | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | torch.device | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    verbose: bool = False,
) -> ProfileReport:
    """Show where the memory of a training step goes, as ``memopt profile`` does; ``model`` stays as it is.

    ``plan``: a plan to run the step under, or the path of its file; a plan that the model carries is ignored, with a
    note.  ``fake``: estimate on tensors without data.  ``for_device``: estimate for a GPU that is not here, as
    ``--for``: ``"a100-40gb"``, the path of a YAML file, or a ``DeviceProfile``.  ``compile``: a backend of
    ``torch.compile``; the compiled step is measured as well.

    For other arguments and errors, see ``optimize``.
    """
    card = check_card(for_device, device)
    limit_s = check_option("timeout", timeout)
    step = check_step(loss, optimizer, accumulate, clip_norm, precision, "cpu" if card else device, seed)
    request = ProfileRequest(
        source=_source_of(model),
        spec=None,
        settings=step.settings,
        fake=fake,
        card=card,
        backend=None if compile is None else check_text("compile", compile),
    )
    chosen = Plan() if plan is None else load_plan(plan)
    with _prepare(model, check_inputs_argument(inputs, dims), step, limit_s, verbose) as prepared:
        return ProfileReport(profile_prepared(request, prepared.without_carried(LEFT_OUT_NOTE), chosen))


@with_python_spelling
def recommend_batch(
    model: nn.Module,
    inputs: Inputs,
    *,
    dims: Mapping[str, int] | None = None,
    memory: str | float = 0.9,
    plan: Plan | str | os.PathLike[str] | None = None,
    global_batch: int | None = None,
    multiple_of: int = 1,
    objective: Objective | None = None,
    search: bool = False,
    level: int | None = None,
    target: Named | Sequence[Named] = (),
    allow_inexact: bool = False,
    search_time: float | None = None,
    longest_step: float = LONGEST_STEP_S,
    compile: str | None = None,
    for_device: str | os.PathLike[str] | DeviceProfile | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | torch.device | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    verbose: bool = False,
) -> BatchReport:
    """Find how large a batch fits, as ``memopt recommend-batch`` does; ``model`` stays as it is.

    Of tensors among the inputs, only shape, dtype and the range of whole numbers are used, and a negative number that
    stands apart from it, as labels of -100: batches of other sizes are filled at random.  ``memory``: the limit,
    ``"24GiB"``, ``"80%"`` or ``0.8`` of the device's memory, or bytes.
    ``plan``: the rows are without this plan and with it; by default the plan that the model carries, if any.
    ``objective``: ``None`` means ``"max"``.  ``search``: find the batch and the plan that together train fastest, among
    plans of a ``level``; ``memopt_cli.apply_plan(model, found.plan)`` applies the plan.  ``compile``: a backend of
    ``torch.compile``, to find the batch whose compiled step fits.  ``for_device``: estimate the largest batch on a GPU
    that is not here, as ``--for``, without running anything.  For other arguments and errors, see ``optimize``.
    """
    card = check_card(for_device, device)
    limit_s = check_option("timeout", timeout)
    step = check_step(loss, optimizer, accumulate, clip_norm, precision, "cpu" if card else device, seed)
    spec = _description(inputs, dims)
    plans = resolve_search(level=level, target=target, allow_inexact=allow_inexact)
    if search and plan is not None:
        raise OptionError(
            "`--plan` cannot be combined with `--search`, which finds the plan", hint="Remove one of them."
        )
    if not search and (level is not None or target or allow_inexact or search_time is not None):
        raise OptionError(
            "level, target, allow_inexact and search_time apply only to a search for plans", hint=_ADD_SEARCH_HINT
        )
    request = BatchRequest(
        source=_source_of(model),
        spec=spec,
        settings=step.settings,
        memory=check_option("memory", memory),
        objective=check_option_if_given("objective", objective),
        global_batch=check_option_if_given("global_batch", global_batch),
        multiple_of=check_option("multiple_of", multiple_of),
        search=plans if search else None,
        search_limit_s=check_option_if_given("search_time", search_time),
        longest_step_s=check_option("longest_step", longest_step),
        card=card,
        backend=None if compile is None else check_text("compile", compile),
    )
    chosen = None if plan is None else load_plan(plan)
    with _prepare(model, spec, replace(step, settings=request.step), limit_s, verbose) as prepared:
        if search:
            return BatchReport(fastest_prepared(request, prepared.without_carried(LEFT_OUT_NOTE)))
        return BatchReport(recommend_prepared(request, prepared, chosen, ()))


@with_python_spelling
def baseline(
    model: nn.Module,
    inputs: Inputs,
    output: str | os.PathLike[str] = "memopt-baseline.json",
    *,
    dims: Mapping[str, int] | None = None,
    force: bool = False,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | torch.device | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    verbose: bool = False,
) -> BaselineReport:
    """Write the memory and time of a step to the file ``output``, as ``memopt baseline`` does.

    The step runs under the plan that the model carries.  Of tensors among the inputs, only shape, dtype and range are
    used, as in ``recommend_batch``.  ``force``: replace an existing file.
    For other arguments and errors, see ``optimize``.
    """
    path = check_path("output", output)
    limit_s = check_option("timeout", timeout)
    check_targets([path], force=force)
    step = check_step(loss, optimizer, accumulate, clip_norm, precision, device, seed)
    with _prepare(model, _description(inputs, dims), step, limit_s, verbose) as prepared:
        request = BaselineRequest(
            source=_source_of(model),
            spec=prepared.subject.spec,
            settings=step.settings,
            output=str(path),
            force=force,
        )
        return BaselineReport(record_prepared(request, prepared))


@with_python_spelling
def check(
    model: nn.Module,
    inputs: Inputs,
    baseline: str | os.PathLike[str] = "memopt-baseline.json",
    *,
    dims: Mapping[str, int] | None = None,
    fail_on: str | Sequence[str] = ("peak:0",),
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    timeout: float = 600.0,
    verbose: bool = False,
) -> CheckReport:
    """Compare a step with its ``baseline``, as ``memopt check`` does, under the plan that the model carries.

    ``fail_on``: how much a metric may grow, ``"peak:5%"``.  The settings of the step come from the baseline; only code
    has to be given again: the loss, and an optimizer that is a function.  ``passed`` of the result is whether no
    metric grew by more than that; ``result.exceeded`` lists those that did.  Raises ``BaselineError`` if the baseline
    is missing, or describes a different step.
    """
    limits = tuple(map(parse_limit, check_names("fail_on", fail_on)))
    if not limits:
        raise OptionError("fail_on is empty: nothing could fail", hint='For example: "peak:5%".')
    functions = check_functions(loss, optimizer)
    limit_s = check_option("timeout", timeout)
    spec = _description(inputs, dims)
    request = CheckRequest(
        source=_source_of(model),
        baseline_path=str(check_path("baseline", baseline)),
        limits=limits,
        spec=spec,
        loss=functions[0].reference or None,
        optimizer=functions[1].reference or None,
    )
    before, request, settings = step_of_baseline(request)
    step = StepArguments(settings=replace(settings, device=resolve_device(settings.device)), functions=functions)
    with _prepare(model, spec, step, limit_s, verbose) as prepared:
        return CheckReport(check_prepared(request, before, prepared))


def _search(
    request: OptimizeRequest, model: nn.Module, given: Given, step: StepArguments, timeout_s: float, verbose: bool
) -> OptimizationReport:
    started = time.monotonic()
    with _prepare(model, given, step, timeout_s, verbose) as prepared:
        findings = find_and_verify(request, prepared)
        advice = _advise(request, prepared, findings)
        if findings.verification is not None:
            _replace_plan(model, findings)
        elif not prepared.carried.is_empty:
            findings.notes[:0] = [LEFT_OUT_NOTE]
        summary = summarize(findings, spent_s=time.monotonic() - started, advice=advice)
        header = replace(file_header(prepared), model=type(model).__name__)
        return OptimizationReport(OptimizeResult(header=header, summary=summary, files=(), in_memory=True))


def _advise(
    request: OptimizeRequest, prepared: PreparedModel, findings: Findings
) -> BatchAdvice | BatchEstimate | None:
    """Return the batch that fits under the plan of ``findings``; ``None`` if no advice is wanted, or on Ctrl-C."""
    if not findings.wants_batch_advice(request):
        return None
    try:
        return advise(
            request, prepared, findings.plan, findings.measurement, findings.advice, findings.notes, findings.details
        )
    except KeyboardInterrupt:
        if not request.interruptible:
            raise
        prepared.progress.interrupted(NO_BATCH)
        findings.interrupted = True
        return None


def _replace_plan(model: nn.Module, findings: Findings) -> None:
    with replacing_plan(model) as carried:
        apply_plan(model, findings.plan.of_model)
    _, folder = findings.resolved.options.sends_to
    if folder is not None and findings.plan.sends:
        set_offload_folder(folder)
    findings.notes[:0] = carried_note(carried, findings.plan)


@contextlib.contextmanager
def _prepare(
    model: nn.Module, given: Given, step: StepArguments, timeout_s: float, verbose: bool
) -> Iterator[PreparedModel]:
    prepare = prepared_model(check_model(model), given, step.settings, step.functions)
    with log_progress(verbose) as progress, processes.keep_server(), prepare as prepared:
        yield prepared.with_progress(progress, timeout_s)


def _source_of(model: nn.Module) -> ModelSource:
    return ModelSource(location=type(model).__name__)


def _description(inputs: Inputs, dims: Mapping[str, int] | None) -> InputSpec:
    given = check_inputs_argument(inputs, dims)
    return given if isinstance(given, InputSpec) else describe_inputs(given)
