"""``memopt recommend-batch``: the answer fits, a little more does not, and few runs were needed for it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError, NothingFitsError, StepError, UsageError
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure.jobs import ORIGINAL, ProbeJob, Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline import prepare as prepare_module
from memopt_cli.pipeline import recommend_batch
from memopt_cli.pipeline.batches import recommendation
from memopt_cli.pipeline.batches.batch_probes import BatchProbes
from memopt_cli.records import (
    Accumulation,
    BatchAdvice,
    BatchEstimate,
    BatchProbe,
    BatchRecommendation,
    BatchRequest,
    CompilePlan,
    DimRange,
    Failure,
    InputSpec,
    ModelSource,
    NoBatchFits,
    OutOfMemory,
    Plan,
    SegmentPlan,
    StepSettings,
    Trust,
    from_data,
    to_data,
)
from memopt_cli.records.progress import Progress
from memopt_cli.search.batch_size.accumulation import accumulate
from memopt_cli.search.batch_size.samplers import TokenBudgetSampler
from memopt_cli.training.apply import apply_plan
from tests.zoo.models import Parts, Reading, deep_net
from tests.zoo.records import plan_file

MIB = 1 << 20


def conv_net() -> nn.Sequential:
    block = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Sequential(*block), nn.Flatten(), nn.Linear(8 * 256, 4))


class OneGraph(Parts, edges=lambda: nn.Buffer(torch.arange(128).view(2, 64))):
    """Adds to each node what lies along the edges to it; they are of 128 nodes."""

    def forward(self, x: Tensor) -> Tensor:
        target, source = self.get_buffer("edges")
        return x.index_add(0, target, x[source])


def saved(path: Path, model: nn.Module) -> str:
    torch.save(model, path)
    return str(path)


def recommended(location: str, spec: str, *, dims: dict[str, int] | None = None, **request: Any) -> BatchRecommendation:
    made = BatchRequest(
        source=ModelSource(location=location, trust=Trust(pickle=True)),
        spec=InputSpec(tensors=(parse_tensor(spec),), dims=dims or {}, source="here"),
        **request,
    )
    found = recommend_batch(made, progress=Progress(), ask=None)
    assert found.probes <= 6
    assert from_data(BatchRecommendation, to_data(found)) == found
    return found


def only(found: BatchRecommendation) -> BatchAdvice:
    (row,) = found.rows
    assert isinstance(row.outcome, BatchAdvice)
    return row.outcome


def peak_of(location: str, spec: str, batch: int, plan: Plan = ORIGINAL, **settings: Any) -> int:
    """Measured apart from any search."""
    subject = Subject(
        source=ModelSource(location=location, trust=Trust(pickle=True)),
        spec=InputSpec(tensors=(parse_tensor(spec),), source="here"),
        settings=StepSettings(**settings),
    )
    with LocalSession(subject, 60.0) as session:
        probe = session.ask(ProbeJob(plan=plan, batch=batch))
    assert isinstance(probe, BatchProbe)
    return probe.allocated_peak_bytes


def assert_largest(batch: int, location: str, spec: str, memory: int, **settings: Any) -> None:
    """This batch fits, and one that is a twentieth larger does not."""
    assert peak_of(location, spec, batch, **settings) <= memory
    assert peak_of(location, spec, batch + max(1, math.ceil(0.05 * batch)), **settings) > memory


def test_with_subprocesses_the_answer_fits_and_a_twentieth_more_does_not(tmp_path: Path) -> None:
    location = saved(tmp_path / "net.pt", conv_net())
    advice = only(recommended(location, "4x1x16x16", memory=5 * MIB))
    assert advice.budget_bytes == 5 * MIB
    assert_largest(advice.recommended_batch, location, "4x1x16x16", 5 * MIB)
    assert advice.estimated_batch == advice.recommended_batch
    assert advice.limited_by == "`--memory 5MiB`"


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "fresh_compiler")
def test_the_largest_batch_of_a_compiled_step_is_found_by_runs_alone(tmp_path: Path) -> None:
    location, how = saved(tmp_path / "net.pt", conv_net()), CompilePlan(backend="aot_eager")
    found = recommended(location, "4x1x16x16", memory=5 * MIB, backend="aot_eager")
    advice, plan = only(found), Plan(compile=how)
    assert (found.backend, found.dry_runs) == ("aot_eager", 0)
    assert any(note.startswith("Dry runs do not know compiled steps") for note in found.notes)
    assert peak_of(location, "4x1x16x16", advice.recommended_batch, plan) <= 5 * MIB
    assert peak_of(location, "4x1x16x16", math.ceil(1.05 * advice.recommended_batch), plan) > 5 * MIB


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"backend": "nope"}, "torch.compile has no backend 'nope' here"),
        (
            {"backend": "eager", "plan": "compiled"},
            "the plan compiles the model .*, and `--compile` compiles it as well",
        ),
        ({"fake": True, "plan": "compiled"}, "the plan compiles the model .*, and `--fake` measures or predicts"),
    ],
)
def test_what_is_not_measured_compiled_is_refused(asked: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    location = saved(tmp_path / "net.pt", nn.Linear(8, 8))
    if asked.pop("plan", None):
        asked["plan_path"] = plan_file(tmp_path, Plan(compile=CompilePlan(backend="eager")))
    with pytest.raises(MemoptError, match=refusal):
        recommended(location, "4x8", memory=5 * MIB, **asked)


@pytest.fixture
def lstm(tmp_path: Path) -> str:
    return saved(tmp_path / "lstm.pt", nn.LSTM(16, 32, batch_first=True))


@pytest.mark.usefixtures("in_process")
class TestInProcess:
    """One process for all: what is searched, not how it is run."""

    @pytest.mark.slow
    def test_kernels_that_dry_runs_do_not_see(self, lstm: str) -> None:
        assert_largest(recommended(lstm, "4x9x16", memory=2 * MIB).batch, lstm, "4x9x16", 2 * MIB)

    def test_a_plan_in_the_file_stands_beside_the_original(self, tmp_path: Path) -> None:
        net, plan = conv_net(), Plan(segments=(SegmentPlan(path="0"),))
        apply_plan(net, plan)
        location = saved(tmp_path / "net.memopt.pt", net)
        found = recommended(location, "4x1x16x16", memory=4 * MIB)
        assert [row.planned for row in found.rows] == [False, True]
        assert "The model carries a plan: a batch is sought without the plan and with it." in found.notes
        path = plan_file(tmp_path, plan)
        named = recommended(location, "4x1x16x16", memory=4 * MIB, plan_path=path)
        assert [row.planned for row in named.rows] == [False, True]
        assert "The model carries a plan already; it is left out here." in named.notes
        assert named.plan == path

    def test_a_model_that_wants_data(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", Reading())
        found = recommended(location, "4x64", memory=MIB)
        assert any("cannot run on tensors without data" in note for note in found.notes)
        assert_largest(found.batch, location, "4x64", MIB)

    def test_a_model_that_wants_data_under_a_plan_that_packs(self, tmp_path: Path) -> None:
        """A record of the original finds its compressors, and cannot be made; runs find the batch all the same."""
        location = saved(tmp_path / "net.pt", Reading())
        found = recommended(location, "4x64", memory=MIB, plan_path=plan_file(tmp_path, Plan(packed=True)))
        assert [row.planned for row in found.rows] == [False, True]
        planned = found.rows[1].outcome
        assert isinstance(planned, BatchAdvice)
        assert max(probe.allocated_peak_bytes for probe in planned.probes if probe.batch == found.batch) <= MIB
        (told,) = [note for note in found.notes if "Dry runs fail under the plan, so peaks are extrapolated" in note]
        assert re.search(r"without data: it reads a tensor's values, .*models\.py, line \d+\)\.$", told)

    def test_a_model_that_wants_data_at_more_sizes_than_runs(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", Reading())
        symbols = DimRange(symbol="T", low=1, high=128)
        with pytest.raises(StepError, match="cannot run on tensors without data"):
            recommended(location, "BxTx64", dims={"B": 2, "T": 1}, memory=MIB, dim_range=symbols)

    @pytest.mark.slow
    def test_the_fastest_was_run_and_fits(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", deep_net(4))
        found = recommended(location, "16x64", memory=3 * MIB, objective="throughput")
        advice = only(found)
        rates = {probe.batch: probe.batch / probe.step_s for probe in advice.probes}
        assert found.batch == advice.fastest_batch == max(rates, key=lambda batch: rates[batch])
        assert advice.recommended_batch // 2 in rates

    @pytest.mark.slow
    def test_before_and_after_a_plan(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", deep_net(4))
        plan = Plan(segments=tuple(SegmentPlan(path=str(i)) for i in range(4)))
        found = recommended(location, "16x64", memory=2 * MIB, plan_path=plan_file(tmp_path, plan))
        before, after = (row.outcome for row in found.rows)
        assert [row.planned for row in found.rows] == [False, True]
        assert found.batch == after.recommended_batch > 1.2 * before.recommended_batch
        assert peak_of(location, "16x64", found.batch, plan) <= 2 * MIB < peak_of(location, "16x64", found.batch)

    @pytest.mark.slow
    def test_a_range_of_steps(self, lstm: str) -> None:
        symbols = DimRange(symbol="T", low=4, high=32)
        found = recommended(lstm, "BxTx16", dims={"B": 4, "T": 4}, memory=MIB, dim_range=symbols)
        assert [row.dims["T"] for row in found.rows] == [4, 8, 16, 32]
        assert "Inputs: BxTx16, B=4, T=4:32 (here)." in found.notes
        batches = []
        for row in found.rows:
            batches.append(row.outcome.recommended_batch)
            assert peak_of(lstm, f"4x{row.dims['T']}x16", batches[-1]) <= MIB
        assert batches == sorted(batches, reverse=True)
        assert batches[0] > 4 * batches[-1]

    def test_an_interruption_names_the_sizes_without_a_row(self, lstm: str, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = BatchProbes.probe

        def probe(self: BatchProbes, batch: int) -> BatchProbe | Failure:
            if self.dims["T"] == 8:
                raise KeyboardInterrupt
            return whole(self, batch)

        monkeypatch.setattr(BatchProbes, "probe", probe)
        symbols = DimRange(symbol="T", low=4, high=16)
        found = recommended(lstm, "BxTx16", dims={"B": 4, "T": 4}, memory=MIB, dim_range=symbols)
        assert [row.dims["T"] for row in found.rows] == [16]
        assert "Nothing was run yet that fits at T=4, at T=8: this has no row." in found.notes

    @pytest.mark.slow
    def test_more_cases_than_runs(self, lstm: str) -> None:
        symbols = DimRange(symbol="T", low=1, high=256)
        found = recommended(lstm, "BxTx16", dims={"B": 4, "T": 1}, memory=2 * MIB, dim_range=symbols)
        kinds = [type(row.outcome) for row in found.rows]
        assert kinds[:3] == [BatchEstimate] * 3
        assert kinds[-1] is BatchAdvice
        assert kinds.count(BatchAdvice) >= 4
        assert found.verified

    @pytest.mark.slow
    def test_a_size_at_which_nothing_fits(self, lstm: str) -> None:
        symbols = DimRange(symbol="T", low=16, high=8192)
        found = recommended(lstm, "BxTx16", dims={"B": 1, "T": 16}, memory=MIB, dim_range=symbols)
        assert isinstance(found.rows[0].outcome, BatchAdvice | BatchEstimate)
        assert isinstance(found.rows[-1].outcome, NoBatchFits)
        assert found.batch > 0

    @pytest.mark.slow
    def test_accumulation_is_of_a_batch_that_was_run(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", conv_net())
        found = recommended(location, "4x1x16x16", memory=5 * MIB, global_batch=512)
        assert found.accumulation.batch * found.accumulation.steps == 512
        assert found.accumulation.batch <= found.batch
        assert found.accumulation.batch in {probe.batch for probe in only(found).probes}
        (note,) = (note for note in found.notes if "batch normalization" in note)
        assert f"statistics cover {found.accumulation.batch} samples" in note

    def test_the_passes_that_were_asked_for_make_up_a_step(self, tmp_path: Path) -> None:
        """They were measured, and one pass was said to be a step."""
        location = saved(tmp_path / "net.pt", conv_net())
        settings = StepSettings(micro_batches=4, clip_norm=1.0)
        found = recommended(location, "4x1x16x16", memory=4 * MIB, settings=settings)
        assert found.accumulation == Accumulation(global_batch=4 * found.batch, batch=found.batch, steps=4)
        assert found.step == settings
        assert any(f"statistics cover {found.batch} samples" in note for note in found.notes)

    @pytest.mark.slow
    @pytest.mark.parametrize("optimizer", ["none", "adamw"])
    def test_micro_batches_fit_beside_the_gradients_of_earlier_ones(self, optimizer: str, tmp_path: Path) -> None:
        location, settings = saved(tmp_path / "net.pt", deep_net(4)), StepSettings(optimizer=optimizer)
        alone = recommended(location, "16x64", memory=MIB, settings=settings)
        found = recommended(location, "16x64", memory=MIB, settings=settings, global_batch=5000)
        assert 0 < found.accumulation.batch <= found.batch < alone.batch
        assert peak_of(location, "16x64", found.batch, optimizer=optimizer, micro_batches=2) <= MIB
        assert peak_of(location, "16x64", alone.batch, optimizer=optimizer, micro_batches=2) > MIB
        assert any("gradients of earlier passes" in note for note in found.notes)

    @pytest.mark.slow
    @pytest.mark.parametrize(("optimizer", "said"), [("", ["130.0 KiB"]), ("none", []), ("adamw", [])])
    def test_what_an_optimizer_would_add_is_said(self, optimizer: str, said: list[str], tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[0].requires_grad_(False)  # 4 × (64 × 64 + 64) bytes require gradients, AdamW keeps two of each
        location = saved(tmp_path / "net.pt", nn.Sequential(*(copy.deepcopy(model) for _ in range(4))))
        found = recommended(location, "16x64", memory=MIB, settings=StepSettings(optimizer=optimizer))
        notes = [note for note in found.notes if "AdamW" in note]
        assert len(notes) == len(said)
        assert all(size in note for size, note in zip(said, notes, strict=True))

    @pytest.mark.slow
    def test_every_way_to_batch_sequences_fits(self, lstm: str, tmp_path: Path) -> None:
        lengths = [1 + 7 * i % 40 for i in range(200)]
        (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
        path = str(tmp_path / "lengths.txt")
        found = recommended(lstm, "BxSx16", dims={"B": 4, "S": 8}, memory=MIB, lengths_path=path)
        ways = {way.name: way for way in found.lengths}
        assert list(ways) == ["padding", "buckets", "sequence_packing", "token_budget"]
        assert ways["sequence_packing"].waste == 0 < ways["buckets"].waste < ways["padding"].waste
        assert ways["padding"].batches == math.ceil(200 / found.batch)
        assert all(way.epoch_s >= 0 for way in found.lengths)
        assert found.rows[found.chosen].dims == {"S": 40}
        longest = peak_of(lstm, "4x40x16", found.batch)
        assert longest <= MIB
        assert ways["padding"].peak_bytes == pytest.approx(longest, rel=0.05)
        assert {way.batch for way in found.lengths} == {found.batch, None}
        assert all(way.peak_bytes <= MIB for way in found.lengths)
        budget = ways["token_budget"].max_tokens
        assert budget is not None
        drawn = TokenBudgetSampler(lengths, budget, oversize="alone")
        count, steps = max((len(batch), max(lengths[i] for i in batch)) for batch in drawn)
        assert peak_of(lstm, f"4x{steps}x16", count) <= 1.05 * MIB
        assert budget >= 0.8 * 40 * found.batch

    def test_a_range_of_the_lengths_themselves(self, lstm: str, tmp_path: Path) -> None:
        (tmp_path / "lengths.txt").write_text("3\n4\n")
        sizes = DimRange(symbol="S", low=4, high=8)
        with pytest.raises(UsageError, match="the lengths are the sizes of S"):
            recommended(
                lstm, "BxSx16", dims={"B": 4, "S": 4}, lengths_path=str(tmp_path / "lengths.txt"), dim_range=sizes
            )

    @pytest.mark.slow
    @pytest.mark.parametrize("objective", ["throughput", "max"])
    def test_a_plan_that_is_slower(self, objective: str, tmp_path: Path, answered: Callable[..., None]) -> None:
        def timed(session: Session, job: ProbeJob, ask: Callable[..., Any]) -> Any:
            run, step_s = ask(job), (1 + bool(job.plan.segments)) * 1e-3 * job.batch
            return replace(run, step_s=step_s) if isinstance(run, BatchProbe) else run

        answered(ProbeJob, timed)
        location = saved(tmp_path / "net.pt", deep_net(4))
        plan = Plan(segments=tuple(SegmentPlan(path=str(i)) for i in range(4)))
        path = plan_file(tmp_path, plan)
        found = recommended(location, "16x64", memory=2 * MIB, plan_path=path, objective=objective)
        assert found.rows[found.chosen].planned is (objective == "max")
        outcome = found.rows[found.chosen].outcome
        assert isinstance(outcome, BatchAdvice)
        assert found.batch == (outcome.recommended_batch if objective == "max" else outcome.fastest_batch)

    def test_inputs_that_are_no_batches(self, tmp_path: Path) -> None:
        request = BatchRequest(
            source=ModelSource(location=saved(tmp_path / "net.pt", conv_net()), trust=Trust(pickle=True)),
            spec=InputSpec(tensors=(parse_tensor("x:100x16"), parse_tensor("edges:2x300@int64=0..100")), source="here"),
        )
        with pytest.raises(UsageError, match="memopt cannot tell which dimension is the batch") as caught:
            recommend_batch(request, progress=Progress(), ask=None)
        assert "-i x:Bx16 --dim B=100" in str(caught.value.hint)

    def test_a_model_of_one_graph(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "graph.pt", nn.Sequential(nn.Linear(16, 16), OneGraph()))
        for rows in (128, 256, 300):  # of the larger ones half runs
            with pytest.raises(
                StepError, match=rf"'1\.edges' of the model seems to point at rows .* with 127 of the {rows}"
            ):
                recommended(location, f"{rows}x16", memory=MIB)

    def test_integers_that_are_no_rows_do_not_hold_it_back(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(16, 16))
        model.register_buffer("order", torch.arange(5))
        assert recommended(saved(tmp_path / "net.pt", model), "8x16", memory=MIB).batch > 8

    def test_a_model_of_one_batch(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", nn.Sequential(nn.Linear(16, 16), nn.LayerNorm((8, 16))))
        with pytest.raises(StepError, match=r"runs at batch 8 only: module '1' \(LayerNorm\) rejected its input 9x16"):
            recommended(location, "8x16", memory=MIB)

    def test_a_loss_whose_targets_run_out_is_named_beside_the_batch(self, tmp_path: Path) -> None:
        script = tmp_path / "loss.py"
        script.write_text(
            "import torch\ndef loss(out):\n    return (out.sum(1) - torch.zeros(24)[: len(out)]).mean()\n"
        )
        location = saved(tmp_path / "net.pt", nn.Linear(16, 16))
        found = recommended(location, "8x16", memory=MIB, fake=True, settings=StepSettings(loss=f"{script}:loss"))
        assert found.batch == 24
        assert any(": the loss fails at batch 25: " in note for note in found.notes)

    @pytest.mark.slow
    def test_an_exported_program_of_fixed_sizes(self, tmp_path: Path) -> None:
        for name, shapes in (("fixed", None), ("free", ({0: torch.export.Dim("batch")},))):
            program = torch.export.export(nn.Linear(16, 4), (torch.randn(8, 16),), dynamic_shapes=shapes)
            torch.export.save(program, tmp_path / f"{name}.pt2")
        with pytest.raises(UsageError, match=r"torch.export fixed every size in .*fixed.pt2, the batch size included"):
            recommended(str(tmp_path / "fixed.pt2"), "8x16", memory=MIB)
        assert recommended(str(tmp_path / "free.pt2"), "8x16", memory=MIB).batch > 100

    def test_a_share_of_the_device(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", nn.Linear(8, 8))
        found = recommended(location, "4x8", memory=0.5, longest_step_s=0.001)
        advice = only(found)
        assert advice.budget_bytes == advice.device_bytes // 2
        limit, bare = found.limit.split(", without an optimizer's state")
        assert limit.endswith(("memory)", "limit)"))
        assert bare == ", which `--optimizer adamw` counts"
        assert "(50 % of the" in limit
        assert advice.estimated_batch > advice.recommended_batch
        assert advice.limited_by == "`--longest-step` (0.001 s)"

    def test_nothing_fits(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", deep_net(4))
        with pytest.raises(NothingFitsError, match=r"a batch of 8 fits in 64\.0 KiB \(`--memory 64KiB`\): it took"):
            recommended(location, "16x64", memory=1 << 16, multiple_of=8)


def test_a_run_that_dies_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(LocalSession):
        """Ends where more than 100 samples are run."""

        gone = False

        @property
        def ended(self) -> bool:
            return self.gone

        def ask(self, job: Any) -> Any:
            if not isinstance(job, ProbeJob) or job.batch <= 100:
                return super().ask(job)
            self.gone = True
            return OutOfMemory(detail="killed")

    monkeypatch.setattr(prepare_module, "Session", Dying)
    found = recommended(saved(tmp_path / "net.pt", deep_net(4)), "64x64", memory=3 * MIB)
    advice = only(found)
    assert 64 <= advice.recommended_batch <= 100
    assert advice.limited_by.endswith("out of memory (killed)")
    assert any("another was started" in note for note in found.notes)
    assert issubclass(Dying, Session)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((512, 162, 1), (128, 4)),
        ((512, 600, 1), (512, 1)),
        ((512, 160, 8), (128, 4)),
        ((500, 160, 8), (128, 4)),  # no multiple of 8 divides 500
        ((509, 100, 1), (85, 6)),  # a prime
        ((96, 40, 8), (32, 3)),
        ((5, 8, 8), (8, 1)),
    ],
)
def test_accumulation(asked: tuple[int, int, int], found: tuple[int, int]) -> None:
    made = accumulate(*asked)
    assert (made.batch, made.steps) == found
    assert made.batch * made.steps >= made.global_batch == asked[0]


@pytest.mark.parametrize(
    ("batches", "estimates", "runnable", "planned"),
    [
        ((13, 4), (13, 32), 1 << 30, False),  # time limits the plan's runs
        ((13, 16), (13, 32), 1 << 30, True),
        ((13, 16), (26, 32), 1 << 30, True),  # memory limits neither
        ((13, 4), (13, 32), 1 << 10, True),  # this machine is too small for the runs
    ],
)
def test_the_recommended_of_two_cases(
    batches: tuple[int, int], estimates: tuple[int, int], runnable: int, planned: bool
) -> None:
    cases: Any = []
    for index, (batch, estimate) in enumerate(zip(batches, estimates, strict=True)):
        advice = BatchAdvice(
            recommended_batch=batch,
            fastest_batch=batch,
            estimated_batch=estimate,
            probes=(),
            intercept_bytes=0.0,
            slope_bytes=1.0,
            budget_bytes=1 << 20,
            device_bytes=1 << 30,
            limited_by="",
        )
        run = BatchProbe(batch=batch, allocated_peak_bytes=1, step_s=float((1 + index) * batch))
        search = SimpleNamespace(outcome=lambda advice=advice: advice, runs={batch: run})
        cases.append(SimpleNamespace(planned=index > 0, dims={}, search=search, probes=SimpleNamespace(replicas=1)))
    request: Any = SimpleNamespace(aim="max", dim_range=None)
    limits = SimpleNamespace(runnable_bytes=runnable, budget_bytes=1 << 20)
    given: Any = None
    job = recommendation._Recommender(
        request=request, prepared=given, longest={}, search=cast(Any, SimpleNamespace(limits=limits))
    )
    assert job._main_case(cases).planned is planned
