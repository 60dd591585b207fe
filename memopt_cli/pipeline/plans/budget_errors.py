"""Reasons why no plan fits into a budget: what the smallest plan takes, what no plan lowers, and what would help."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from memopt_cli.errors import NothingFitsError
from memopt_cli.records import OpTrace, OutOfMemory, StepPeaks, describe
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.text.paths import gather_paths, quote_module
from memopt_cli.text.units import format_apart, format_bytes

_REASON_SHARE: Final = 0.1
"""Activations and kernel workspaces are named as reasons if they are at least this share of the peak."""
_NAMED_SHARE: Final = 0.8
"""A message names modules until they account for this share of the activations at a peak."""
_MAX_HOLDERS: Final = 8
"""Maximum number of modules, or groups of similar modules, that a message names."""
_WEIGHTS_SHARE: Final = 0.5
"""Above this share of a peak, a message names parameters and gradients as most of the peak."""


class ParametersTooLargeError(NothingFitsError):
    """The parameters alone exceed the budget, so that neither a plan nor smaller inputs help."""


class NotRunHereError(NothingFitsError):
    """A plan is predicted to fit into the budget, but this machine has too little memory to run its step."""

    def __init__(self, message: str, priced: PricedPlan, outcome: OutOfMemory) -> None:
        super().__init__(
            message,
            hint="Run the command where that much is free, or use a smaller batch (`--dim B=…`, if the shape has a B). "
            "For another machine's GPU, `--for CARD` searches by estimates alone.",
        )
        self.priced, self.outcome = priced, outcome

    @classmethod
    def of(cls, priced: PricedPlan, outcome: OutOfMemory) -> NotRunHereError:
        """Return the error to raise for the ``priced`` plan, which was tried with this ``outcome``."""
        outcome = replace(outcome, needed_bytes=max(priced.peak_bytes, outcome.needed_bytes))  # one with workspaces
        peak = format_bytes(priced.peak_bytes)
        return cls(f"a plan of {peak} is predicted to fit, but {describe(outcome)}", priced, outcome)


def nothing_fits(
    budget_bytes: int,
    least_bytes: int,
    source: str = "",
    *,
    stays: Sequence[str] = (),
    can_rise: bool = True,
    can_shrink: bool = True,
    has_plan: bool = True,
) -> NothingFitsError:
    """Return the error to raise where no plan fits into ``budget_bytes``, with a hint at what would help.

    ``source``: the source of ``least_bytes``, such as ", as estimated".  ``stays``: sentences on the part that
    no plan makes smaller.  ``can_rise``: there is a higher level.  ``can_shrink``: the batch has several samples.
    ``has_plan``: ``least_bytes`` is the peak of a plan; otherwise no plan was found, and it is the original's.
    """
    budget, smallest = format_apart(budget_bytes, least_bytes)
    flags = "`--budget` or `--level`" if can_rise else "`--budget`"
    smaller = ", or use a smaller batch (`--dim B=…`, if the shape has a B)" if can_shrink else ""
    text = f"no plan found takes {budget} or less{source}; the smallest plan found takes about {smallest}"
    if not has_plan:
        text = f"no plan was found that takes less than the original{source}, {smallest}; the budget is {budget}"
    error = NothingFitsError(
        text,
        hint="\n".join([f"Raise {flags}{smaller}.", *stays]),
    )
    error.least_bytes = least_bytes
    return error


def require_parameters_fit(budget_bytes: int, original: StepPeaks) -> None:
    """Raise :class:`ParametersTooLargeError` if the parameters of the ``original`` alone exceed the budget."""
    parameters_bytes = original.breakdown.parameters_bytes
    if parameters_bytes > budget_bytes:
        budget, parameters = format_apart(budget_bytes, parameters_bytes)
        raise ParametersTooLargeError(
            f"the parameters alone take {parameters}, and the budget is {budget}",
            hint="Raise `--budget`: `--budget 8GiB` is a size, and `--budget 60%` a share of the original's peak.",
        )


def unavoidable_parts(smallest: StepPeaks, operators: Sequence[OpTrace], *, frees_gradients: bool) -> Iterator[str]:
    """Yield sentences on the parts of the ``smallest`` peak that no plan lowers, and on changes that would.

    ``operators``: operators of the original's step, with the measured workspaces of their kernels.
    ``frees_gradients``: whether plans were tried that run the optimizer in backward.
    """
    parts = {
        "parameters": smallest.breakdown.parameters_bytes,
        "gradients": smallest.breakdown.gradients_bytes,
        "the optimizer's state": smallest.breakdown.optimizer_bytes,
        "buffers": smallest.breakdown.buffers_bytes,
        "inputs": smallest.breakdown.inputs_bytes,
    }
    parts_in_words = ", ".join(f"{format_bytes(size)} of {name}" for name, size in parts.items() if size)
    if parts_in_words:
        yield f"No plan can make these parts of its peak smaller: {parts_in_words}."
    workspace_bytes = smallest.allocated_peak_bytes - smallest.tensor_peak_bytes
    rest_bytes = smallest.allocated_peak_bytes - workspace_bytes - sum(parts.values())
    if smallest.holders and rest_bytes > _REASON_SHARE * smallest.allocated_peak_bytes:
        holders = _largest_holders(smallest, _NAMED_SHARE * rest_bytes)
        names = ", ".join(f"{format_bytes(nbytes)} of {name}" for name, nbytes in holders)
        others = rest_bytes - sum(nbytes for _, nbytes in holders)
        if others > 0:
            names += f", and {format_bytes(others)} of others"
        yield f"The rest are activations and tensors that backward makes: {names}."
    weights_bytes = smallest.breakdown.parameters_bytes + smallest.breakdown.gradients_bytes
    if weights_bytes > _WEIGHTS_SHARE * smallest.allocated_peak_bytes:
        advice = (
            ""
            if frees_gradients
            else " With `--optimizer-in-backward`, a plan can free each gradient as soon as it is used."
        )
        yield (
            "Parameters and gradients are most of its peak: model.bfloat16() halves both, but changes the results."
            f"{advice}"
        )
    if workspace_bytes < _REASON_SHARE * smallest.allocated_peak_bytes:
        return
    largest = max(operators, key=lambda op: op.workspace_bytes, default=None)
    place = f", most of all {largest.name} in {quote_module(largest.module)}" if largest is not None else ""
    yield (
        f"Kernels hold {format_bytes(workspace_bytes)} of its peak as workspace{place}. Other kernels may take less, "
        "or more, which memopt has not tried: another batch, other sizes of the inputs (larger ones may take less in "
        "all), another `--precision`, or a function that builds the model (memopt optimize net.py:build) and returns "
        "model.to(memory_format=torch.channels_last)."
    )


def _largest_holders(smallest: StepPeaks, named_bytes: float) -> list[tuple[str, int]]:
    """Return the largest holders in the ``smallest`` peak, with their bytes, that add up to ``named_bytes``."""
    rows = list(gather_paths({holder.path: holder.held_bytes for holder in smallest.holders}).items())
    count = 1 + sum(1 for total in itertools.accumulate(nbytes for _, nbytes in rows) if total < named_bytes)
    shown = rows[: min(count, _MAX_HOLDERS)]
    return [(f"'{path}'" if path else "the step outside modules", nbytes) for path, nbytes in shown]


def require_fast(priced: PricedPlan, max_slowdown: float, verb: str = "makes") -> None:
    """Raise :class:`NothingFitsError` if ``priced``, the fastest plan that fits, slows the step down too much.

    ``verb``: the verb of the message, ``is estimated to make`` where the step was not measured.
    """
    if priced.slowdown > max_slowdown:
        raise NothingFitsError(
            f"the fastest plan found that fits, of {format_bytes(priced.peak_bytes)}, {verb} the step "
            f"{priced.slowdown:.2f} times as long",
            hint="Raise `--max-slowdown` or `--budget`.",
        )
