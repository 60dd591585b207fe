"""SpikingJelly's ``memopt`` functions, with the same names and signatures, implemented by memopt's own pipeline.

A script that calls ``spikingjelly.activation_based.memopt`` changes its import and keeps its calls.  Levels follow
SpikingJelly: level 1 wraps exactly the modules that the caller names, and from level 2 on memopt searches among them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError, OptionError, StepError
from memopt_cli.loading.input_spec import guessed_spec, make_inputs
from memopt_cli.measure import processes
from memopt_cli.measure.devices import process_device
from memopt_cli.measure.jobs import CountJob
from memopt_cli.measure.local import LocalSession, isolate_state
from memopt_cli.model_batching.module import refuse_batched
from memopt_cli.pipeline.live.every_rank import on_every_rank
from memopt_cli.pipeline.live.model import (
    FORMAT,
    carried_note,
    detached_copy,
    difference_error,
    dropped_unmeasured,
    find_and_verify,
    inputs_of,
    notes_on_wrapping,
    prepared_model,
    step_of_copies,
)
from memopt_cli.pipeline.own_checkpoints import suspended_notes
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.named_segments import find_named_segments
from memopt_cli.pipeline.plans.optimization import find_plan
from memopt_cli.pipeline.plans.summary import summarize
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.pipeline.verification import verify_plan
from memopt_cli.records import (
    MemOptSummary,
    ModuleTrace,
    OptimizeRequest,
    Plan,
    Preference,
    Profile,
    ResolvedSearch,
    SearchOverrides,
    StepFailed,
    StepPeaks,
    StepSettings,
    Verification,
    describe,
    to_data,
)
from memopt_cli.records.progress import Progress, log_progress
from memopt_cli.runtime import GCContainer, TCGCContainer
from memopt_cli.runtime.compressor import OWN_COMPRESSOR
from memopt_cli.runtime.module_state import label_of
from memopt_cli.search.plan.policy import resolve, select, skipped_step
from memopt_cli.search.plan.targets import (
    find_outermost,
    find_refusals,
    missing_segment_notes,
    refusal_notes,
    segments_plan,
)
from memopt_cli.text.paths import quote_module
from memopt_cli.text.spelling import notes_in_python, warn_if_unchanged, with_python_spelling
from memopt_cli.text.units import format_some
from memopt_cli.trace import compressor_paths, compressors_failing_on_zeros, list_modules, record_inputs
from memopt_cli.training.apply import apply_plan, replacing_plan
from memopt_cli.training.own_checkpoints import find_switches
from memopt_cli.training.wrappers import unwrap

__all__ = [
    "MEMOPT_CHECKPOINT_BUDGETS",
    "MEMOPT_PREFERENCES",
    "MEMOPT_PROFILES",
    "GCContainer",
    "MemOptSummary",
    "TCGCContainer",
    "apply_gc",
    "get_module_and_parent",
    "memory_optimization",
    "resolve_device",
]

resolve_device = process_device  # SpikingJelly's name

_GUESS_LIMIT_S = 60.0
"""Time limit of a verification on guessed inputs: a few samples should take far less."""

MEMOPT_PROFILES: tuple[str, ...] = get_args(Profile)
"""Values of ``profile``, from the least search to the most."""
MEMOPT_CHECKPOINT_BUDGETS: tuple[str, ...] = get_args(Preference)
"""Values of ``checkpoint_budget``, from the fewest segments to the most."""
MEMOPT_PREFERENCES: tuple[str, ...] = get_args(Preference)
"""Values of ``prefer``."""


Inputs = tuple[Any, ...] | Mapping[str, Any]
"""Positional arguments of ``forward``, or its keyword arguments."""


@with_python_spelling
def memory_optimization(
    net: nn.Module,
    instance: type | tuple[type, ...],
    dummy_input: Inputs | Tensor | None = None,
    compress_x: bool | None = None,
    level: int | None = None,
    verbose: bool = False,
    temporal_split_factor: int = 2,
    max_split_rounds: int | None = None,
    max_candidates_per_round: int | None = None,
    warmup_in_main_process: bool | None = None,
    warmup_in_profile_workers: bool | None = None,
    prefer: Preference | None = None,
    profile: Profile | None = None,
    allow_expensive_profiling: bool | None = None,
    checkpoint_budget: Preference | None = None,
    max_gc_wrapped_modules: int | None = None,
    gc_target_budget_ratio: float | None = None,
    return_summary: bool = False,
    *,
    example_forward: Callable[[nn.Module], object] | None = None,
    split_fn: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    can_chunk: Callable[[nn.Module], bool] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Any:  # a tuple with return_summary
    """Make ``net`` train in less memory, in place, as ``memopt optimize`` does with a file; returns ``net``.

    Level 0, the default without ``profile`` and ``prefer``, makes no segments.  Level 1 makes a segment of every
    outermost module that is an ``instance``, as many as the limits allow, whether or not that saves memory.  From
    level 2 on, these modules and their submodules may become segments, and memopt searches for the plan with the
    lowest peak, however slow its step; a plan that does not lower the measured peak is not applied.

    Plans are measured in profiling subprocesses with ``dummy_input`` (any shapes that ``forward`` takes; dimension 0
    of the first tensor is the batch), and verified against the original.  Without ``dummy_input``, level 1 measures
    nothing, and verifies the plan on inputs guessed from the first layers; a note reports it if the model rejects them.

    If a search finds no plan to apply, a warning has the reason.  A plan that ``net`` already carries is removed first,
    and restored if this call fails.

    Parameters
    ----------
    compress_x:
        Store the inputs of segments packed where that is lossless; a module's ``x_compressor`` can choose how.
    verbose:
        Log the progress of the search with the logger ``memopt_cli`` at level ``INFO``.
    temporal_split_factor:
        Factor that level 3 multiplies the number of a segment's chunks by.
    max_split_rounds:
        Maximum number of rounds that nest segments, and of rounds that multiply chunks; the default is that of
        ``profile``.
    max_candidates_per_round:
        Maximum number of modules tried in each round; the default is that of ``profile``.
    warmup_in_main_process:
        Take one step of a copy of the optimized model in this process, so that the first real step is not slow.
    warmup_in_profile_workers:
        Take one step before the timed ones of each measurement.
    prefer, profile, allow_expensive_profiling, checkpoint_budget, max_gc_wrapped_modules, gc_target_budget_ratio:
        See :mod:`memopt_cli.search.plan.policy`.
    return_summary:
        Return ``(net, summary)``.
    example_forward:
        A function that runs a copy of ``net``, instead of ``dummy_input``; memopt takes the inputs of its first call.
    split_fn:
        A function from a possible segment to its submodules that may be segments in its place from level 2 on (no
        submodule inside another).  memopt calls the function again with each of them, and does not split a part without
        the attributes that the function reads.  By default every submodule may be a segment.
    can_chunk:
        A function that returns whether a module may run in chunks.  memopt still tests whether chunks compute the same.
    process_group:
        A group whose ranks all make this call, each with its copy of the model.  The first rank searches, and all ranks
        get its plan and check that they have the same plan.  An error on one rank is raised on all.

    The input, random numbers, gradients, train/eval mode and device stay as they are.  Raises :class:`OptionError` (a
    :class:`ValueError`) for a value out of its range, and for a level above 1 without ``dummy_input`` and profile;
    :class:`VerificationError` if the optimized model differs from the original; other errors of
    :mod:`memopt_cli.errors` if the model cannot take a step.
    """
    wrapper, net = net, unwrap(net)

    def optimize_net() -> MemOptSummary:
        started, inputs = time.monotonic(), dummy_input
        if example_forward is not None:
            if dummy_input is not None:
                raise OptionError(
                    "both dummy_input and example_forward are given",
                    hint="Pass one of them, which is enough to run the model.",
                )
            inputs = inputs_of(net, example_forward)
        is_default = level is None and profile is None and prefer is None
        instances = _instance_paths(net, instance)
        overrides = SearchOverrides(
            level=0 if is_default else level,
            modules=instances,
            parts=_part_paths(net, instances, split_fn) if split_fn is not None else None,
            chunkable=_chunkable_paths(net, instances, can_chunk) if can_chunk is not None else None,
            compress_x=compress_x,
            temporal_split_factor=temporal_split_factor,
            max_split_rounds=max_split_rounds,
            max_candidates_per_round=max_candidates_per_round,
            warmup_in_main_process=warmup_in_main_process,
            warmup_in_profile_workers=warmup_in_profile_workers,
            prefer=prefer,
            profile=profile,
            allow_expensive_profiling=allow_expensive_profiling,
            checkpoint_budget=checkpoint_budget,
            max_gc_wrapped_modules=max_gc_wrapped_modules,
            gc_target_budget_ratio=gc_target_budget_ratio,
            max_slowdown=math.inf,
            offload="none",  # SpikingJelly's levels never send tensors to the host
        )
        resolved = resolve(overrides, has_inputs=inputs is not None)
        settings = StepSettings(device=process_device())
        with log_progress(verbose) as progress:
            if inputs is None or resolved.options.level == 0:
                findings = _apply_unmeasured(net, resolved, settings, progress)
            else:
                findings = _search_and_apply(net, _arguments(inputs), resolved, settings, progress)
                findings.notes.extend(notes_on_wrapping(wrapper))
        findings.notes.extend(_missing_segment_notes(net, instance, findings))
        return summarize(findings, spent_s=time.monotonic() - started)

    summary = on_every_rank(net, process_group, optimize_net, lambda summary: summary.plan)
    warn_if_unchanged(summary.unchanged)
    return (wrapper, notes_in_python(summary)) if return_summary else wrapper


@with_python_spelling
def apply_gc(
    net: nn.Module,
    instance: type | tuple[type, ...],
    dummy_input: Inputs | Tensor | None = None,
    compress_x: bool | None = True,
    device: str = "cuda",
    checkpoint_budget: Preference | None = None,
    max_gc_wrapped_modules: int | None = None,
    gc_target_budget_ratio: float | None = None,
    return_summary: bool = False,
) -> Any:  # a tuple with return_summary
    """Make segments of the outermost modules of ``net`` that are an ``instance``, in place, without measuring.

    With ``dummy_input``, one forward of a copy in training mode shows the called modules among these, the compressors
    for their inputs, and the modules with the largest inputs.  Without ``dummy_input``, a checkpoint budget takes
    modules in the model's order, and inputs are stored unpacked unless a module has an ``x_compressor``.
    ``device``: the device of that forward; ``cuda`` without a number is the device of :func:`resolve_device`, which is
    the CPU on a machine without CUDA.  Returns ``net``, or ``(net, summary)``, a dictionary with the fields of
    :class:`MemOptSummary`.  Raises :class:`OptionError` for a value out of its range.
    """
    started, wrapper, net = time.monotonic(), net, unwrap(net)
    overrides = SearchOverrides(
        level=1,
        modules=_instance_paths(net, instance),
        compress_x=compress_x,
        checkpoint_budget=checkpoint_budget,
        max_gc_wrapped_modules=max_gc_wrapped_modules,
        gc_target_budget_ratio=gc_target_budget_ratio,
        max_slowdown=math.inf,
    )
    resolved = resolve(overrides)
    device = process_device() if device == "cuda" else device
    with replacing_plan(net) as carried:
        if dummy_input is None:
            modules = _list_modules(net, resolved, StepSettings(device=device))
        else:
            with isolate_state():
                step = step_of_copies(net, _arguments(dummy_input), StepSettings(device=device))
                modules = record_inputs(step)
        findings = _make_unmeasured(net, modules, resolved, device)
        apply_plan(net, findings.plan)
    findings.notes[:0] = carried_note(carried, findings.plan)
    findings.notes.extend(_missing_segment_notes(net, instance, findings))
    summary = summarize(findings, spent_s=time.monotonic() - started)
    warn_if_unchanged(summary.unchanged)
    return (wrapper, to_data(notes_in_python(summary))) if return_summary else wrapper


def get_module_and_parent(net: nn.Module, module_name: str) -> tuple[nn.Module, nn.Module, str]:
    """Return the module at ``module_name``, a path such as ``layer1.0.conv1``, its parent, and its name in the parent.

    Raises :class:`ValueError` for the empty path (the root has no parent), :class:`AttributeError` for one that leads
    to no module.
    """
    if not module_name:
        raise ValueError("the path of a module is empty: the model itself has no parent")
    parent_path, _, name = module_name.rpartition(".")
    return net.get_submodule(module_name), net.get_submodule(parent_path), name


def _apply_unmeasured(net: nn.Module, resolved: ResolvedSearch, settings: StepSettings, progress: Progress) -> Findings:
    """Make segments of the modules that the caller named, without measuring, and install them on ``net``."""
    with replacing_plan(net) as carried:
        findings = _make_unmeasured(net, _list_modules(net, resolved, settings), resolved, settings.device)
        if not findings.plan.is_empty:
            findings = replace(findings, verification=_verify_on_guess(net, findings, settings, progress))
        apply_plan(net, findings.plan)
    findings.notes[:0] = carried_note(carried, findings.plan)
    return findings


def _search_and_apply(
    net: nn.Module,
    inputs: Inputs,
    resolved: ResolvedSearch,
    settings: StepSettings,
    progress: Progress,
) -> Findings:
    """Run the pipeline of ``memopt optimize`` on ``net`` in memory, and apply the plan that it finds.

    Level 1 skips the search: its plan is the modules that the caller named.
    """
    search = find_named_segments if resolved.options.level == 1 else find_plan
    refuse_batched(net)
    with processes.keep_server(), prepared_model(net, inputs, settings) as prepared:
        prepared = prepared.with_progress(progress, prepared.timeout_s)
        request = OptimizeRequest(
            source=prepared.subject.source, spec=None, settings=settings, search=resolved, recommend_batch=False
        )
        with replacing_plan(net) as carried:
            findings = find_and_verify(request, prepared, search)
            apply_plan(net, findings.plan)  # in the with block, so that the old plan goes back on if this fails
        findings.notes[:0] = carried_note(carried, findings.plan)
        if resolved.options.warmup_in_main_process:
            progress.stage("warming up")
            findings.notes.extend(_warm_up(net, prepared, findings.plan))
    return findings


def _warm_up(net: nn.Module, prepared: PreparedModel, plan: Plan) -> list[str]:
    """Take a step of a copy of ``net`` under ``plan``; return a note if it fails."""
    with LocalSession(prepared.subject, 0.0, build=lambda: detached_copy(net)) as session:
        outcome = session.ask(CountJob(plan=plan, fake=False))
    if isinstance(outcome, StepPeaks):
        return []
    return [f"The step that was to warm up this process failed: {describe(outcome)}"]


def _verify_on_guess(
    net: nn.Module, findings: Findings, settings: StepSettings, progress: Progress
) -> Verification | None:
    """Verify the plan of ``findings`` on inputs guessed from the layers of ``net``.

    Returns ``None`` if the model does not take such inputs; ``findings`` gets a note.  Raises
    :class:`VerificationError` if the plan changes what the model computes.
    """
    try:
        with processes.keep_server(), prepared_model(net, _suggested_inputs(net, settings), settings) as prepared:
            outcome = verify_plan(replace(prepared, timeout_s=_GUESS_LIMIT_S, progress=progress), findings.plan)
    except MemoptError as err:
        outcome = StepFailed(message=err.message)
    if not isinstance(outcome, Verification):
        findings.notes.append(f"Not verified: {describe(outcome)}. Pass inputs as dummy_input.")
        return None
    if not outcome.passed:
        raise difference_error(dropped_unmeasured(findings.plan, outcome))
    return outcome


def _arguments(inputs: Inputs | Tensor) -> Inputs:
    return (inputs,) if isinstance(inputs, Tensor) else inputs


def _suggested_inputs(net: nn.Module, settings: StepSettings) -> tuple[Any, ...]:
    """Return inputs guessed from the layers of ``net``.  Raises :class:`StepError` if no layer allows a guess."""
    spec = guessed_spec(net)
    if spec is None:
        raise StepError("no layer reveals the shape of its inputs", hint="Pass dummy_input=(x, …).")
    return make_inputs(spec, seed=settings.seed, device="cpu", dtype=None)[0]


def _list_modules(net: nn.Module, resolved: ResolvedSearch, settings: StepSettings) -> tuple[ModuleTrace, ...]:
    """Return every module of ``net`` as it is before any forward.

    The user's own compressor that cannot pack guessed inputs is replaced by ``null``, and noted as a misfit.
    """
    modules = list_modules(net)
    if not resolved.options.compress_x or not any(m.compressor == OWN_COMPRESSOR for m in modules):
        return modules
    try:
        with isolate_state():
            failing = compressors_failing_on_zeros(step_of_copies(net, _suggested_inputs(net, settings), settings))
    except (
        Exception
    ):  # a model may raise anything on guessed inputs; _unobserved_compressors notes that nothing was tried
        return modules
    return tuple(
        replace(m, compressor="null", compressor_misfit=failing[m.path]) if m.path in failing else m for m in modules
    )


def _make_unmeasured(
    net: nn.Module, modules: tuple[ModuleTrace, ...], resolved: ResolvedSearch, device: str
) -> Findings:
    """Return findings with a plan that makes segments of the candidates within the limits, or none at level 0."""
    options = resolved.options
    instances = [m for m in modules if m.path in (options.modules or ())]
    selection = select(find_outermost([m for m in instances if not m.refusal]), options) if options.level else None
    if selection is not None:
        selection = replace(selection, refusals=find_refusals(modules, options))
    plan = segments_plan(selection, options) if selection else Plan()
    skipped = [skipped_step(1, segments=0, tried=0, options=options)] if options.level and not plan.segments else []
    notes = [*resolved.notes, *(refusal_notes(selection.refusals) if selection else ())]
    notes += suspended_notes(find_switches(net), plan)
    if options.compress_x and not any(m.calls for m in modules):
        notes.extend(_unobserved_compressors(plan))
    return Findings(
        resolved=resolved,
        asked_compressors=compressor_paths(net),
        model_format=FORMAT,
        device=device,
        plan=plan,
        applied_level=1 if selection else 0,
        selection=selection,
        skipped=skipped,
        notes=notes,
    )


def _unobserved_compressors(plan: Plan) -> list[str]:
    """Return notes for a ``plan`` made without inputs: how segments store theirs, and what was not tried."""
    untried = [quote_module(s.path) for s in plan.segments if s.compressor != "null"]
    stored = ["Without dummy_input, inputs are stored packed only where x_compressor is set."]
    tried = [
        f"x_compressor was not tried on your inputs in {format_some(untried)}: an input that it would not restore bit "
        "for bit is stored as it is. Pass dummy_input."
    ]
    return [*(stored if plan.segments else ()), *(tried if untried else ())]


def _instance_paths(net: nn.Module, instance: type | tuple[type, ...]) -> tuple[str, ...]:
    kinds = instance if isinstance(instance, tuple) else (instance,)
    for kind in kinds:
        if not isinstance(kind, type):
            raise OptionError(
                f"instance holds {kind!r}, which is not a class", hint="Pass a class, or a tuple of classes."
            )
    return tuple(path for path, module in net.named_modules() if isinstance(module, kinds))


def _missing_segment_notes(net: nn.Module, instance: type | tuple[type, ...], findings: Findings) -> list[str]:
    """Return a note for each class without a module that became a segment; none if the plan has any, or at level 0."""
    if findings.plan.segments or findings.selection is None:
        return []
    kinds = instance if isinstance(instance, tuple) else (instance,)
    classes = [(kind.__name__, _instance_paths(net, kind)) for kind in kinds]
    return missing_segment_notes(classes, findings.selection, findings.decisive)


def _part_paths(
    net: nn.Module, instances: Sequence[str], split_fn: Callable[[nn.Module], Sequence[nn.Module]]
) -> tuple[str, ...]:
    """Return the paths of the submodules that ``split_fn`` returns for ``instances``, and for these in turn."""
    part_paths: dict[str, None] = {}
    pending = list(instances)
    while pending:
        path = pending.pop()
        module = net.get_submodule(path)
        paths = {inner: name for name, inner in module.named_modules(prefix=path) if inner is not module}
        split = _split_of(path, module, split_fn, is_part=path not in instances)
        for part in split:
            if part not in paths:
                raise OptionError(
                    f"split_fn of {quote_module(path)} returned {label_of(part)}, which does not lie in it",
                    hint="Return submodules of the module that split_fn is called with, or an empty list.",
                )
            if any(part is not whole and part in whole.modules() for whole in split):
                raise OptionError(
                    f"split_fn of {quote_module(path)} returned '{paths[part]}' and a module that contains it",
                    hint="Return only modules that do not contain each other; memopt splits each of them in turn.",
                )
        pending += [paths[part] for part in split if paths[part] not in part_paths]
        part_paths.update(dict.fromkeys(paths[part] for part in split))
    return tuple(part_paths)


def _split_of(
    path: str, module: nn.Module, split_fn: Callable[[nn.Module], Sequence[nn.Module]], *, is_part: bool
) -> Sequence[nn.Module]:
    """Return the parts of ``module`` by ``split_fn``; none for a part without the attributes that it reads.

    Example: ``lambda block: (block.conv, block.neuron)`` is written for blocks, and is called with a ``conv`` as well.
    """
    try:
        split: object = split_fn(module)
    except AttributeError as err:
        if is_part and err.obj is module:
            return ()
        raise
    if not isinstance(split, list | tuple | nn.ModuleList):
        raise OptionError(
            f"split_fn of {quote_module(path)} returned a value of type {type(split).__name__}, not a list of modules",
            hint="Return a list or a tuple, which is empty for a module that is not to be split.",
        )
    return list(split)


def _chunkable_paths(
    net: nn.Module, instances: Sequence[str], can_chunk: Callable[[nn.Module], bool]
) -> tuple[str, ...]:
    candidates = {path: m for top in instances for path, m in net.get_submodule(top).named_modules(prefix=top)}
    return tuple(path for path, module in candidates.items() if can_chunk(module))
