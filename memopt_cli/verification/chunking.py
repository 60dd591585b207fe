"""Trials of whether a module computes the same in chunks.  There is no list of such classes: the module is run.

A copy of the module, in float64 and training mode, runs whole and in even and uneven chunks, on the inputs that it gets
in the model and on random inputs.  Outputs, gradients, buffers and state must agree.  A module that looks ahead, mixes
samples or uses random numbers does not pass.  Batch norms mix samples only by their statistics, which are gathered
first, in passes over all chunks.  Where that is impossible, chunks are inexact, and used only if the user allows it.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import first_line
from memopt_cli.records import MAX_NORMS, TOLERANCE, ChunkRule, Refused, StepSettings
from memopt_cli.runtime import SegmentConfig, add_runs, find_part, install_segment
from memopt_cli.runtime.batch_statistics import statistics_refusal
from memopt_cli.runtime.chunk_rows import rows_untried
from memopt_cli.runtime.norms import batch_norms
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.runtime.unsafe import why_whole
from memopt_cli.training.step import TrainingStep, seed_everything
from memopt_cli.verification.effects import (
    DoubleThroughout,
    clone_tensors,
    copy_state,
    difference,
    effects,
    generator_state,
    generators_kept,
    in_double,
)

_AXES = (0, 1)
"""Axes of the inputs along which chunks are tried."""
TRIAL_LENGTH = 5
"""Length to which sequences are cut for trials with gradients on random inputs.  Captured inputs are not cut, since a
module may do something only after some steps, such as detach its state."""


class _ReachedError(Exception):
    """Raised to end the step when the module whose inputs are captured is about to run."""


def capture_call(step: TrainingStep, path: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a copy of the module at ``path`` when ``step`` first calls it, and copies of the arguments of that call.

    Raises :class:`LookupError` if the step does not call it.
    """
    add_runs(step.model, path)
    module = find_part(step.model, path)
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()  # the copy must not carry this hook
        calls.append((copy.deepcopy(module), *clone_tensors((args, kwargs))))
        raise _ReachedError

    handle = module.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        step.run_forward()
    except _ReachedError:
        return calls[0]
    finally:
        handle.remove()
    raise LookupError(f"the step does not call {path!r}")


def find_rule(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, allow_inexact: bool = False
) -> ChunkRule | Refused:
    """Find the first axis along which ``module`` computes the same in chunks, for a call with ``args`` and ``kwargs``.

    With ``allow_inexact``, only the statistics of batch norms may differ.
    """
    exact_rule = _exact_rule(module, args, kwargs)
    if isinstance(exact_rule, ChunkRule) or not allow_inexact or not batch_norms(module):
        return exact_rule
    for axis in _AXES:
        for candidate in _candidate_rules(module, args, kwargs, axis):
            rule = replace(candidate, batch_statistics=False, inexact=True)
            if _disproof(module, args, kwargs, rule) is None:
                return rule
    return exact_rule


def _exact_rule(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ChunkRule | Refused:
    """Return the first rule for exact chunks that passes every trial, or why there is none."""
    norms = len(batch_norms(module))
    if norms > MAX_NORMS:
        return Refused(
            reason=f"its {norms} batch norms would take {norms + 1} passes over the chunks; a smaller part may work"
        )
    if norms and (reason := statistics_refusal(module, chunks=2)):
        return Refused(reason=reason)
    reasons = []
    for axis in _AXES:
        for rule in _candidate_rules(module, args, kwargs, axis):
            disproof = _disproof(module, args, kwargs, rule)
            if disproof is None:
                return rule
            reasons.append(f"axis {axis}: {disproof}")
    return Refused(reason="; ".join(reasons) or "no tensor argument has an axis to cut")


def _candidate_rules(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int
) -> Iterator[ChunkRule]:
    """Yield the rules along ``axis`` that the shapes of inputs and outputs allow.

    The first inputs, and the first outputs, may be sequences, which are cut.  All others are state, passed from chunk
    to chunk, as in ``nn.LSTM``.
    """
    lengths = [t.shape[axis] if isinstance(t, Tensor) and t.dim() > axis else 0 for t in args]
    length = lengths[0] if lengths else 0
    if length < 2:
        return
    inputs = _count_leading(lengths, length)
    args, kwargs = in_double((args, kwargs))  # under autocast their precision may differ from its parameters'
    with torch.no_grad(), DoubleThroughout():  # type: ignore[no-untyped-call]
        output = copy.deepcopy(module).double()(*args, **kwargs)
    parts = output if isinstance(output, tuple) else (output,)
    outputs = _count_leading([t.shape[axis] if isinstance(t, Tensor) and t.dim() > axis else 0 for t in parts], length)
    for seq_inputs in _possible_counts(module, "n_seq_inputs", {inputs, 1}):
        for seq_outputs in _possible_counts(module, "n_outputs", {outputs, min(outputs, 1)} - {0}):
            yield ChunkRule(
                axis=axis,
                seq_inputs=seq_inputs,
                seq_outputs=seq_outputs,
                batch_statistics=bool(batch_norms(module)),
            )


def _possible_counts(module: nn.Module, attribute: str, possible: set[int]) -> list[int]:
    """List numbers of arguments, or outputs, that may be sequences: by the module's ``attribute``, or all ``possible``.

    The largest number comes first.
    """
    declared = getattr(module, attribute, None)
    return [declared] if isinstance(declared, int) else sorted(possible, reverse=True)


def _count_leading(lengths: list[int], target: int) -> int:
    """Count the first ``lengths`` that are equal to ``target``, up to one that is not."""
    return next((i for i, length in enumerate(lengths) if length != target), len(lengths))


def _disproof(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rule: ChunkRule) -> str | None:
    """Return why ``rule`` is wrong; ``None`` if it passes every trial."""
    module = copy.deepcopy(module).double().train()
    for norm in batch_norms(module) if rule.inexact else ():
        norm.eval()  # fixed statistics: everything else must agree
    try:
        with DoubleThroughout(), warnings.catch_warnings(), rows_untried():  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")  # a warning that a part runs whole is returned as the reason instead
            return _double_disproof(module, args, kwargs, rule)
    except Exception as error:  # the module's own code runs here: whatever it raises disproves the rule
        return first_line(error)


def _double_disproof(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rule: ChunkRule) -> str | None:
    """Return why ``rule`` is wrong for ``module``, in float64; ``None`` if it passes every trial."""
    length = args[0].shape[rule.axis]
    short = min(length, TRIAL_LENGTH)
    if reason := _forward_disproof(module, in_double((args, kwargs)), rule):
        return reason
    cut = *(a.narrow(rule.axis, 0, short) for a in args[: rule.seq_inputs]), *args[rule.seq_inputs :]
    all_inputs = _trial_inputs(in_double((args, kwargs)), in_double((cut, kwargs)))
    for seed, (chunks, inputs) in enumerate(zip((_uneven_number(length), 2, short), all_inputs, strict=True)):
        whole, chunked = copy.deepcopy(module), _in_chunks(module, rule, chunks)
        worst = difference(_compute_effects(whole, inputs, seed), _compute_effects(chunked, inputs, seed))
        if reason := why_whole(chunked):
            return f"it {reason}"
        if worst.relative > TOLERANCE:
            return f"in {chunks} chunks {worst.name} differs by {worst.relative:.1e}"
    return None


def _forward_disproof(module: nn.Module, inputs: Any, rule: ChunkRule) -> str | None:
    """Return why a forward in two chunks differs, or ``None``; this cheap trial at full length settles most cases."""
    all_effects = []
    for subject in (copy.deepcopy(module), _in_chunks(module, rule, 2)):
        with generators_kept():
            seed_everything(0)
            before = generator_state()
            output = subject(*inputs[0], **inputs[1])
            if reason := why_whole(subject):
                return f"it {reason}"
            if difference(before, generator_state()).name:
                return "it uses random numbers"
        outputs = {f"output[{i}]": t.detach() for i, t in enumerate(tensors_of(output))}
        all_effects.append(outputs | copy_state(subject))
    worst = difference(*all_effects)
    return f"in 2 chunks {worst.name} differs by {worst.relative:.1e}" if worst.relative > TOLERANCE else None


def _in_chunks(module: nn.Module, rule: ChunkRule, chunks: int) -> nn.Module:
    chunked = copy.deepcopy(module)
    install_segment(chunked, SegmentConfig(chunks=chunks, **asdict(rule)))
    return chunked


def _compute_effects(module: nn.Module, inputs: Any, seed: int) -> dict[str, Tensor]:
    args, kwargs = inputs
    return effects(TrainingStep(model=module, args=args, kwargs=kwargs, settings=StepSettings(seed=seed)))


def _uneven_number(length: int) -> int:
    """Return the minimum number of chunks, from 3 on, that are not all equally long; 2 if ``length`` has none."""
    return next((chunks for chunks in range(3, length) if length % chunks), 2)


def _trial_inputs(captured: Any, cut: Any) -> Iterator[Any]:
    """Yield ``captured`` inputs, then random ones like ``cut``, twice, since one trial may pass by chance."""
    yield captured
    for seed, scale in enumerate((-1.0, 4.0)):
        generator = torch.Generator().manual_seed(seed)
        yield map_leaves(functools.partial(_redrawn, generator=generator, scale=scale), cut)


def _redrawn(x: Any, generator: torch.Generator, scale: float) -> Any:
    """Return ``x`` with its elements shuffled and, unless they are integers, zeros or ones, noise of ``scale``."""
    if not isinstance(x, Tensor):
        return x
    order = torch.randperm(x.numel(), generator=generator).to(x.device)
    shuffled = x.flatten()[order].view(x.shape)
    if not x.is_floating_point() or bool(((x == 0) | (x == 1)).all()):
        return shuffled
    noise = 1 + torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    return shuffled + scale * noise * (x.std() if x.numel() > 1 else 1.0)
