"""A plan is proven at full size by what measured steps leave, and in full where that is cheap; slips are caught."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.measure.jobs import CountJob, MeasureAnswer, MeasureJob, RoundedJob, VerifyJob
from memopt_cli.measure.worker import Worker
from memopt_cli.pipeline import verification
from memopt_cli.pipeline.fingerprints.causes import DRAWS_COMPILED
from memopt_cli.pipeline.fingerprints.steps import compare_fingerprints
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.pipeline.verification import (
    MeasuredSteps,
    check_fingerprints,
    verify_by_fingerprints,
    verify_compiled,
    verify_plan,
)
from memopt_cli.records import (
    Cause,
    CompilePlan,
    Equivalence,
    Failure,
    Fingerprint,
    InputSpec,
    Measurement,
    Plan,
    SegmentPlan,
    StepFailed,
    TensorGap,
    TensorSpec,
    Verification,
)
from memopt_cli.runtime import chunked
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.state import StartingState
from tests.zoo import records
from tests.zoo.models import GIVEN, Parts
from tests.zoo.prepared import prepare_here

ORIGINAL = Plan()


class Net(
    Parts,
    body=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh()),
    norm=lambda: nn.BatchNorm1d(8),
    head=lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)),
    steps=lambda: nn.Buffer(torch.zeros(1)),
):
    """Dropout, batch norm, a counter, and a head that can run in chunks of samples; input ``BxTx6``."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.head(self.norm(self.body(x).mean(1)))


EXACT = Plan(segments=(SegmentPlan(path="body"), SegmentPlan(path="norm"), SegmentPlan(path="head")))
CHUNKED = Plan(segments=(SegmentPlan(path="body"), SegmentPlan(path="norm"), SegmentPlan(path="head", chunks=4)))
SIZES = {"B": 64, "T": 20}


def prepared(model: Callable[[], nn.Module] = Net, **settings: Any) -> PreparedModel:
    spec = InputSpec(tensors=(TensorSpec(shape=("B", "T", 6)),), dims=SIZES, source="here")
    return prepare_here(model, spec, SIZES["B"], **settings)


def measured(one: PreparedModel, plan: Plan) -> tuple[Measurement, Fingerprint]:
    with one.session() as session:
        found = session.ask(MeasureJob(plan=plan))
    assert isinstance(found, MeasureAnswer), found
    return found.measurement, found.fingerprint


def steps_of(one: PreparedModel, plan: Plan, step_s: float = 1.0) -> MeasuredSteps:
    return MeasuredSteps(original=measured(one, ORIGINAL)[1], planned=measured(one, plan)[1], original_s=step_s)


def proven(one: PreparedModel, plan: Plan, steps: MeasuredSteps) -> Verification:
    found = verify_by_fingerprints(one, plan, steps)
    assert isinstance(found, Verification), found
    return found


@pytest.fixture
def verified_at(monkeypatch: pytest.MonkeyPatch) -> list[VerifyJob]:
    """What is compared in full."""
    jobs: list[VerifyJob] = []
    do = Worker.answer

    def watched(worker: Worker, job: Any) -> Any:
        if isinstance(job, VerifyJob):
            jobs.append(job)
        return do(worker, job)

    monkeypatch.setattr(Worker, "answer", watched)
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("plan", [ORIGINAL, EXACT], ids=["original", "segments"])
def test_an_exact_plan_leaves_the_same_bits_at_full_size(plan: Plan, verified_at: list[VerifyJob]) -> None:
    one = prepared()
    found = proven(one, plan, steps_of(one, plan))
    assert (found.passed, found.exact) == (True, True)
    # The output, gradients, buffers and generators.
    assert found.measured.compared == found.measured.equal == 1 + 8 + 4 + 1
    assert (found.measured.batch, found.measured.dims) == (64, {"T": 20})
    # Three steps of a second are taken with as many samples as take a second.
    assert (found.batch, found.dims, found.full_size) == (21, {"T": 20}, False)
    assert [(job.batch, job.dims) for job in verified_at] == [(21, {})]
    assert ("in the next step" in [check.name for check in found.further]) is not plan.is_empty


@pytest.mark.slow
def test_a_quick_step_is_compared_in_full_as_it_is() -> None:
    one = prepared()
    found = proven(one, EXACT, steps_of(one, EXACT, step_s=0.01))
    assert (found.batch, found.full_size) == (64, True)
    assert found.measured is not None


@pytest.mark.slow
def test_chunks_are_proven_in_float64_at_the_least_size_that_has_all(verified_at: list[VerifyJob]) -> None:
    one = prepared()
    found = proven(one, CHUNKED, steps_of(one, CHUNKED))
    assert (found.passed, found.exact, found.precision) == (True, False, "fp64")
    assert (found.batch, found.dims, found.full_size) == (5, {"T": 3}, False)
    assert (found.measured.batch, found.measured.dims) == (64, {"T": 20})
    assert found.measured.equal < found.measured.compared
    assert 0 < found.measured.worst_difference < found.measured.tolerance
    assert [(job.batch, job.dims) for job in verified_at] == [(5, {"T": 3})]


@pytest.mark.slow
def test_a_measurement_is_no_larger_for_it() -> None:
    """What is held when a step's peak is taken is counted by the dry run, which takes no fingerprint."""
    one = prepared()
    measurement, left = measured(one, EXACT)
    with one.session() as session:
        counted = session.ask(CountJob(plan=EXACT, fake=True))
    assert not isinstance(counted, Failure)
    assert measurement.tensor_peak_bytes == counted.tensor_peak_bytes
    assert left.repeats


class OfOneSize(Net):
    """Takes no other batch than 64."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(64, -1, 6))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [EXACT, CHUNKED], ids=["segments", "chunks"])
def test_where_no_smaller_step_can_be_taken_all_is_compared_at_full_size(plan: Plan) -> None:
    one = prepared(OfOneSize)
    found = proven(one, plan, steps_of(one, plan))
    assert (found.passed, found.batch) == (True, 64)


class WantsRows(Parts, linear=lambda: nn.Linear(8, 4), least=GIVEN):
    """Takes no few rows: in chunks at the least sizes it fails, and runs whole."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < self.least:
            raise ValueError("too few")
        return self.linear(x)


@pytest.mark.slow
@pytest.mark.parametrize("least", [2, 3])
def test_chunks_that_run_whole_at_small_sizes_are_proven_at_full_size(least: int) -> None:
    one = prepared(lambda: Net(head=nn.Sequential(WantsRows(least))))
    for wrong in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if wrong:
                chunks_off_by_a_little(patch)
            steps = steps_of(one, CHUNKED)
            assert check_fingerprints(steps, CHUNKED, one)[1]
            found = proven(one, CHUNKED, steps)
        assert (found.full_size, found.whole, found.passed) == (True, False, not wrong)
        assert (found.worst_difference > 0, found.differs_in) == (True, "")  # chunks ran in the recorded step


class Steep(Net):
    """A rounding of its parameters changes what follows by half a per cent."""

    def forward(self, x: Tensor) -> Tensor:
        return (1e5 * super().forward(x)).sin()


class WithThreshold(Net, threshold=lambda: nn.Parameter(torch.tensor(1.0), requires_grad=False)):
    """A rounding of its parameters may tip a choice that no order of sums tips."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.threshold >= 1 else 1.0)


class WithLength(Net, length=lambda: nn.Parameter(torch.tensor(4.0), requires_grad=False)):
    """The same of a length."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, : int(self.length)]


Slip = Callable[[pytest.MonkeyPatch], None]


def chunks_joined(change: Callable[[Any, Callable[[Any], Tensor]], Tensor]) -> Slip:
    """Join chunks as ``change`` does, which is given them and the function that joins them."""

    def slip(patch: pytest.MonkeyPatch) -> None:
        joined = chunked._concatenate
        patch.setattr(chunked, "_concatenate", lambda column, axis: change(column, lambda given: joined(given, axis)))

    return slip


def scaled_if(condition: Callable[[Any, Tensor], bool], factor: float) -> Slip:
    """Multiply what chunks are joined to where ``condition`` holds of them and of that."""

    def change(column: Any, join: Callable[[Any], Tensor]) -> Tensor:
        whole = join(column)
        return whole * factor if condition(column, whole) else whole

    return chunks_joined(change)


chunks_off_by_a_little = scaled_if(lambda column, whole: True, 1 + 1e-6)
chunks_rounded_otherwise = scaled_if(lambda column, whole: whole.dtype is torch.float32, 1 + 1e-7)


@pytest.mark.slow
def test_chunks_may_differ_by_as_much_as_a_rounding_of_the_parameters_changes(verified_at: list[VerifyJob]) -> None:
    one = prepared(Steep)
    with pytest.MonkeyPatch.context() as patch:
        chunks_rounded_otherwise(patch)
        steps = steps_of(one, CHUNKED)
        assert not check_fingerprints(steps, CHUNKED, one)[1]
        found = proven(one, CHUNKED, steps)
    assert found.passed
    assert found.measured.by_rounding
    assert found.rounding >= found.measured.worst_difference
    assert 1e-3 < found.measured.worst_difference < found.measured.tolerance <= 0.1
    assert [(job.batch, job.dims) for job in verified_at] == [(5, {"T": 3})]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_verification_tells_parameters_in_bfloat16(dtype: str) -> None:
    spec = InputSpec(tensors=(TensorSpec(shape=("B", 6), dtype=dtype),), dims={"B": 4}, source="here")
    one = prepare_here(lambda: nn.Sequential(nn.Linear(6, 4)).to(getattr(torch, dtype)), spec, 4)
    exact = Plan(segments=(SegmentPlan(path="0"),))
    assert proven(one, exact, steps_of(one, exact)).in_bfloat16 is (dtype == "bfloat16")


@pytest.mark.slow
def test_where_no_step_of_rounded_parameters_is_taken_all_is_compared_at_full_size(
    monkeypatch: pytest.MonkeyPatch, verified_at: list[VerifyJob]
) -> None:
    do = Worker.answer

    def refused(worker: Worker, job: Any) -> Any:
        if isinstance(job, RoundedJob):
            raise MemoryError
        return do(worker, job)

    monkeypatch.setattr(Worker, "answer", refused)
    one = prepared(Steep)
    with pytest.MonkeyPatch.context() as patch:
        chunks_rounded_otherwise(patch)
        found = proven(one, CHUNKED, steps_of(one, CHUNKED))
    assert (found.passed, found.full_size, found.measured) == (True, True, None)
    assert [(job.batch, job.dims) for job in verified_at] == [(64, {})]


class Odd(Net):
    """With parameters of all kinds, and one that nobody can write to before others."""

    def __init__(self) -> None:
        super().__init__()
        self.expanded = nn.Parameter(torch.ones(1).expand(4), requires_grad=False)
        others = torch.tensor([math.nan, -math.inf, torch.finfo(torch.float32).max, 1e-45, -0.0])
        self.others = nn.Parameter(others, requires_grad=False)
        self.integers = nn.Parameter(torch.arange(3), requires_grad=False)
        self.turning = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.short = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.head[2].bias.data = self.head[0].bias.data[:4]  # shares memory
        self.tied = self.head[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.expanded + self.short.sum() + self.turning.sum().real


@pytest.mark.slow
@pytest.mark.parametrize("model", [Net, Odd])
def test_a_step_of_rounded_parameters_leaves_them_as_they_were(model: type[nn.Module]) -> None:
    one = prepared(model)
    with one.session() as session:
        before, rounded, after = (
            session.ask(job) for job in (MeasureJob(plan=ORIGINAL), RoundedJob(), MeasureJob(plan=ORIGINAL))
        )
    assert isinstance(rounded, Fingerprint)
    assert before.fingerprint == after.fingerprint
    moved = compare_fingerprints(before.fingerprint, rounded, batch=64, dims={}, exact=False)[0]
    assert 0 < moved.worst_difference < moved.tolerance


def generators_that_stay(patch: pytest.MonkeyPatch) -> None:
    """A recomputation draws on where forward ended."""
    patch.setattr(Generators, "restore", lambda self, present=None: None)


def other_random_numbers(patch: pytest.MonkeyPatch) -> None:
    """A recomputation draws others; nothing is left of that but gradients."""
    replay = StartingState.replay

    @contextlib.contextmanager
    def seeded_replay(self: StartingState, state_tensors: Any = ()) -> Iterator[Any]:
        with replay(self, state_tensors) as replaced, torch.random.fork_rng():
            torch.manual_seed(99)
            yield replaced

    patch.setattr(StartingState, "replay", seeded_replay)


def state_that_is_not_put_back(patch: pytest.MonkeyPatch) -> None:
    """A recomputation advances batch statistics and counters once more."""

    @contextlib.contextmanager
    def replay(self: Any, state_tensors: Any = ()) -> Iterator[Any]:
        generators = self._generators.current()
        self._generators.restore()
        yield {}
        generators.restore()

    patch.setattr(StartingState, "replay", replay)


chunks_in_reverse = chunks_joined(lambda column, join: join(column[::-1]))
last_chunk_missing = chunks_joined(lambda column, join: join((*column[:-1], column[-2])))
long_chunks_scaled = scaled_if(lambda column, whole: whole.shape[0] > 60, 1.01)
"""Wrong where there is much of it alone: no small step tells."""
uneven_chunks_scaled = scaled_if(lambda column, whole: len({len(piece) for piece in column}) > 1, 1.01)
"""Wrong where chunks are uneven alone, which those of the full size are not."""


SEEN_AT_FULL_SIZE = [
    (EXACT, generators_that_stay, "the random generator's state"),
    (EXACT, other_random_numbers, "gradient of "),
    (EXACT, state_that_is_not_put_back, "buffer norm."),
    (CHUNKED, generators_that_stay, "the random generator's state"),
    (CHUNKED, other_random_numbers, "gradient of "),
    (CHUNKED, state_that_is_not_put_back, "buffer norm."),
    (CHUNKED, chunks_in_reverse, ""),
    (CHUNKED, last_chunk_missing, ""),
    (CHUNKED, long_chunks_scaled, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "slip", "named"), SEEN_AT_FULL_SIZE)
def test_a_slip_of_the_runtime_is_caught_by_fingerprints(
    plan: Plan, slip: Slip, named: str, verified_at: list[VerifyJob]
) -> None:
    one = prepared()
    with pytest.MonkeyPatch.context() as patch:
        slip(patch)
        steps = steps_of(one, plan)
        assert not check_fingerprints(steps, plan, one)[1]
        found = proven(one, plan, steps)
    assert not found.passed
    assert found.worst_name.startswith(named)
    assert found.measured is None
    assert [(job.batch, job.dims) for job in verified_at] == [(64, {})]


@pytest.mark.slow
@pytest.mark.parametrize("slip", [chunks_in_reverse, last_chunk_missing, long_chunks_scaled])
def test_a_slip_is_no_rounding(slip: Slip, verified_at: list[VerifyJob]) -> None:
    one = prepared(Steep)
    with pytest.MonkeyPatch.context() as patch:
        slip(patch)
        found = proven(one, CHUNKED, steps_of(one, CHUNKED))
    assert not found.passed
    assert [(job.batch, job.dims) for job in verified_at] == [(64, {})]


@pytest.mark.slow
@pytest.mark.parametrize("model", [WithThreshold, WithLength])
def test_a_choice_that_rounding_the_parameters_tips_excuses_no_slip(
    model: type[nn.Module], verified_at: list[VerifyJob]
) -> None:
    one = prepared(model)
    with one.session() as session:
        rounded = session.ask(RoundedJob())
    assert isinstance(rounded, Fingerprint)
    with pytest.MonkeyPatch.context() as patch:
        long_chunks_scaled(patch)
        steps = steps_of(one, CHUNKED)
        tipped, _ = compare_fingerprints(steps.original, rounded, batch=64, dims={}, exact=False)
        assert tipped.worst_difference > 0.1
        found = proven(one, CHUNKED, steps)
    assert not found.passed
    assert [(job.batch, job.dims) for job in verified_at] == [(64, {})]


@pytest.mark.slow
def test_a_slip_that_full_size_does_not_show_is_caught_by_the_proof(verified_at: list[VerifyJob]) -> None:
    one = prepared()
    with pytest.MonkeyPatch.context() as patch:
        uneven_chunks_scaled(patch)
        steps = steps_of(one, CHUNKED)
        assert check_fingerprints(steps, CHUNKED, one)[1]
        found = proven(one, CHUNKED, steps)
    assert not found.passed
    assert [(job.batch, job.dims) for job in verified_at] == [(5, {"T": 3})]


class Noisy(Net):
    """Never twice the same, whatever is seeded."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-6 * (1 + secrets.randbelow(10**6)))


def test_an_original_that_differs_from_itself_proves_nothing() -> None:
    one = prepared(Noisy)
    steps = steps_of(one, EXACT)
    assert not steps.original.repeats
    found = verify_by_fingerprints(one, EXACT, steps)
    assert isinstance(found, StepFailed)
    assert "the original's own step is not repeatable" in found.message


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_other_precisions_have_a_tolerance_of_their_own(precision: str) -> None:
    one = prepared(precision=precision)
    for plan in (EXACT, CHUNKED):
        found, agrees = check_fingerprints(steps_of(one, plan), plan, one)
        assert agrees
        assert found.worst_difference <= found.tolerance <= (1e-7 if precision == "fp64" else 0.1)


@pytest.mark.exhaustive
def test_a_compiled_plan_is_compared_with_the_compiled_step_without_it() -> None:
    one, how = prepared(), CompilePlan(backend="aot_eager_decomp_partition")
    found = verify_plan(one, replace(EXACT, compile=how))
    assert isinstance(found, Verification)
    assert found.passed
    assert found.further[-1].name == "compiled by aot_eager_decomp_partition"
    assert found.further[-1].compared > 0
    budget = verify_plan(one, Plan(compile=replace(how, activation_memory_budget=0.0)))
    assert isinstance(budget, Verification)
    if budget.passed:
        pytest.skip("this PyTorch computes right gradients with dropout under a memory budget")
    assert "compiles it (wrong gradients: " in budget.difference


@pytest.mark.parametrize(("budget", "passes"), [(None, True), (0.5, False)])
def test_other_random_numbers_excuse_what_differs_without_a_memory_budget(
    budget: float | None, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Equivalence(
        reference="-",
        candidate="-",
        alike="not",
        steps=3,
        batch=64,
        compared=9,
        in_training_mode=True,
        precision="stored",
        worst=0.5,
        gaps=(TensorGap(name="output", apart=0.5),),
        cause=Cause(text=DRAWS_COMPILED),
    )
    monkeypatch.setattr(verification, "compare_prepared", lambda *_: told)
    plan = replace(EXACT, compile=CompilePlan(backend="inductor", activation_memory_budget=budget))
    found = verify_compiled(prepared(), plan, records.verified())
    assert isinstance(found, Verification)
    assert found.passed is passes
