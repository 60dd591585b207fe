"""Steps on tensors without data, and whether the memory that such a step shows to be needed is free."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from memopt_cli import trace
from memopt_cli.errors import LossError, MemoptError, StepError, first_line
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.records import Plan, RankLayout
from memopt_cli.runtime.private_torch import UNKNOWN_WITHOUT_DATA, is_compiled
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.search.batch_size.capacity import runnable_bytes
from memopt_cli.trace.storages import unique_bytes
from memopt_cli.training.module_calls import raised_at
from memopt_cli.training.step import TrainingStep, is_out_of_memory, was_raised_in_loss

Value = TypeVar("Value")


class NeedsDataError(StepError):
    """A step that cannot be run on tensors without data, where no step on data may be recorded in its place."""


class StepTooLargeError(MemoryError):
    """A step was not run: it needs ``needed_bytes``, and ``free_bytes`` are free."""

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        super().__init__(f"the step needs {needed_bytes} bytes, and {free_bytes} are free")


def may_run_in_full(bench: Bench) -> bool:
    """Return whether the original's step may be run at full size on data; it must have room now."""
    if bench.subject.data != "full size":
        return False
    try:
        require_room(bench, bench.cached(needed_by_original))
    except StepTooLargeError:
        return False
    return True


def run_at_full_size(bench: Bench, run: Callable[[TrainingStep], Value]) -> Value | None:
    """Return the result of ``run`` for a step at full size; ``None`` if it does not fit or must not be tried."""
    if not may_run_in_full(bench):
        return None
    bench.enter_start()
    try:
        step = bench.step()
        bench.find_scale(step)
        return run(step)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        bench.reset()


def require_room(bench: Bench, needed_bytes: int) -> None:
    """Raise :class:`StepTooLargeError` if the machine has fewer than ``needed_bytes`` free for a step.

    The kernel may end any process when memory runs out, so such a step must not be tried.
    """
    held_tensors = {*bench.model.parameters(), *bench.model.buffers()}
    if bench.optimizer is not None:  # its state is here already once a step was taken
        held_tensors.update(tensors_of([*bench.optimizer.state.values()]))
    free_bytes = runnable_bytes("cpu") + unique_bytes(held_tensors)
    if needed_bytes > free_bytes:
        raise StepTooLargeError(needed_bytes, free_bytes)


def count_step_bytes(
    bench: Bench,
    plan: Plan,
    batch: int | None = None,
    dims: Mapping[str, int] = MappingProxyType({}),
    compressors_for: Callable[[Bench, Plan], trace.Compressors | None] = lambda *_: None,
) -> int:
    """Count the bytes of the machine's memory that a step under ``plan`` needs, packed by ``compressors_for`` the plan.

    0: a step on a GPU, where it fails and nothing else does; one with compiled parts, since the compiler cannot run
    without data; or a model that needs data.
    """
    compiles = plan.compile is not None or any(map(is_compiled, bench.model.modules()))
    if bench.settings.device != "cpu" or compiles:
        return 0
    try:
        compressors = compressors_for(bench, plan)
        with step_under(bench, plan, batch, dims) as fake:
            return fake.count(compressors=compressors).allocated_peak_bytes
    except Exception as error:
        if not may_need_data(error):
            raise
        return 0
    finally:
        bench.enter_start()


def may_need_data(error: Exception) -> bool:
    """Return whether ``error`` may come from tensors without data, on which a model or a loss may raise anything.

    memopt's own errors do not, except those of such a step; nor does a lack of memory.
    """
    is_known = isinstance(error, MemoptError) and not isinstance(error, LossError | NeedsDataError)
    return not is_known and not is_out_of_memory(error)


def failed_without_data(error: Exception) -> str:
    """Describe ``error`` of a step on tensors without data, with the user's line that raised it."""
    if not isinstance(error, UNKNOWN_WITHOUT_DATA):
        return f"{first_line(error)}{raised_at(error)}"
    reader = "the loss" if was_raised_in_loss(error) else "it"
    return f"{reader} reads a tensor's values, which a dry run does not have{raised_at(error)}"


def needed_by_original(bench: Bench) -> int:
    """Return the bytes of the machine's memory that a step of the original needs; 0 if that is unknown."""
    return count_step_bytes(bench, ORIGINAL)


@contextlib.contextmanager
def step_under(
    bench: Bench, plan: Plan, batch: int | None = None, dims: Mapping[str, int] = MappingProxyType({})
) -> Iterator[trace.FakeStep]:
    """Yield a step without data under ``plan`` in the ``with`` block; a rank's step if the subject is a rank."""
    if bench.subject.layout is not None:
        with _step_of_rank(bench, bench.subject.layout, plan, batch, dims) as fake:
            yield fake
        return
    fake = bench.cached(_step_as_described)
    described = batch is None and not dims
    with (
        contextlib.nullcontext(fake) if described else fake.using_inputs(_step_at(bench, batch, dims)),
        bench.with_plan(plan, fake.step),
    ):
        yield fake


def _step_as_described(bench: Bench) -> trace.FakeStep:
    return trace.FakeStep(_step_at(bench, None, {}), bench.mode)


def _step_at(bench: Bench, batch: int | None, dims: Mapping[str, int]) -> TrainingStep:
    # Inputs from a file or a script are made with data.  Inputs that are described by sizes are not: a search for a
    # batch may try sizes that do not fit into memory.
    is_described = batch is None and not dims
    without_data = bool(bench.subject.spec.tensors) and not (is_described and bench.subject.data == "full size")
    with bench.mode if without_data else contextlib.nullcontext():
        return bench.step(batch, dims)


@dataclass(slots=True, kw_only=True)
class _Rank:
    """The step of a rank; it takes long to make, so one step is fed the inputs of all sizes."""

    step: trace.FakeStep
    sizes: tuple[int | None, Mapping[str, int]]


@contextlib.contextmanager
def _step_of_rank(
    bench: Bench, layout: RankLayout, plan: Plan, batch: int | None, dims: Mapping[str, int]
) -> Iterator[trace.FakeStep]:
    """Yield the step of the subject's rank.  Raises :class:`StepError` if the model cannot run without data."""

    def make(entered: contextlib.ExitStack) -> _Rank:
        has = entered.enter_context(bench.rank(layout, plan))
        step = replace(_step_at(bench, batch, dims), buckets=has.buckets)
        return _Rank(step=trace.FakeStep(step, bench.mode, has.model), sizes=(batch, dims))

    try:
        rank = bench.rank_step.get(plan, make)
        if rank.sizes != (batch, dims):
            rank.step.set_inputs(_step_at(bench, batch, dims))
            rank.sizes = (batch, dims)
        yield rank.step
    except Exception as error:  # the model's own code may raise anything on tensors without data
        if isinstance(error, MemoptError) or is_out_of_memory(error):
            raise
        raise StepError(
            f"the step of a rank cannot be predicted: on tensors without data it fails: {failed_without_data(error)}",
            hint="Code that depends on values cannot run without data. `memopt profile --fake` without `--ranks` shows "
            "whether the model has such code.",
        ) from error
