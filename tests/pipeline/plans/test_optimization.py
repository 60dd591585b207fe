"""From a saved model to an optimized one, through the command line.

One run with real subprocesses is asserted by many tests; variants profile in this process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import memopt_cli
from memopt_cli import pipeline
from memopt_cli.errors import MeasurementError
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.loading import input_spec, load_model
from memopt_cli.measure import processes
from memopt_cli.measure.jobs import CountJob, MeasureAnswer, MeasureJob, Subject, TraceJob, VerifyJob
from memopt_cli.measure.local import LocalSession
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.plans import optimization, started_search
from memopt_cli.pipeline.plans.climb import Climb
from memopt_cli.pipeline.plans.goal import GoalSearch
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.proof import row_to_apply
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    TOLERANCE,
    BatchEstimate,
    Crashed,
    FurtherCheck,
    InputSpec,
    LevelRow,
    Measurement,
    MemOptSummary,
    ModelSource,
    OptimizeRequest,
    OutOfMemory,
    Plan,
    SearchOverrides,
    SegmentPlan,
    StepSettings,
    TensorSpec,
    TooSlow,
    Trust,
    from_data,
    to_data,
)
from memopt_cli.records.progress import Progress
from memopt_cli.runtime import GCContainer, named_parts, segment_of
from memopt_cli.search.batch_size.batch_search import BatchSearch
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.units import exact_bytes
from tests.zoo.models import Parts, deep_net
from tests.zoo.records import a_row, measured, summary_of

Memopt = Callable[..., Any]


def block(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def conv_net() -> nn.Sequential:
    """Activations make up nearly all of its memory at ``8x1x16x16``: 2 MiB."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        deeper = nn.Sequential(block(16, 16), block(16, 16))
        return nn.Sequential(block(1, 16), deeper, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def small_net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


@dataclass(frozen=True)
class Run:
    """What the real run did."""

    done: Any
    folder: Path
    sha256: str

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "net.memopt.summary.json").read_text())

    def yaml(self, kind: str) -> dict[str, Any]:
        return yaml.safe_load((self.folder / f"net.memopt.{kind}.yaml").read_text())

    def rows(self) -> list[LevelRow]:
        return from_data(MemOptSummary, self.summary()["summary"]).levels

    def original(self) -> nn.Module:
        return torch.load(self.folder / "net.pt", weights_only=False)

    def optimized(self) -> nn.Module:
        return torch.load(self.folder / "net.memopt.pt", weights_only=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, spawn_memopt: Memopt) -> Run:
    folder = tmp_path_factory.mktemp("run")
    torch.save(conv_net(), folder / "net.pt")
    sha256 = hashlib.sha256((folder / "net.pt").read_bytes()).hexdigest()
    arguments = (
        "optimize net.pt -i Bx1x16x16 --dim B=8 --level 4 --seed 3 --longest-step 0.1 --max-slowdown none"
        " --max-split-rounds 1".split()
    )
    return Run(spawn_memopt(folder, *arguments), folder, sha256)


def test_it_writes_four_files_and_leaves_the_original(run: Run) -> None:
    assert run.done.code == 0, run.done.err
    assert run.done.changed == {f"net.memopt.{end}" for end in ("pt", "summary.json", "plan.yaml", "batch.yaml")}
    assert hashlib.sha256((run.folder / "net.pt").read_bytes()).hexdigest() == run.sha256
    assert "\nwrote net.memopt.pt, .summary.json, .plan.yaml, .batch.yaml in " in run.done.out
    assert run.done.out.endswith("\nuse it: model = memopt_cli.load('net.memopt.pt')\n")


def test_piped_output_is_plain(run: Run) -> None:
    assert "\x1b" not in run.done.out + run.done.err
    assert run.done.out.count("\n0 ") == 1
    log = run.done.err.splitlines()
    stages = [line for line in log if line.startswith("level") and "·" not in line and "its plan" not in line]
    stages = [line.partition(", at most ")[0] for line in stages]
    assert stages == ["level 0: measuring the original", *(f"level {n} of 4: searching" for n in range(1, 5))]
    assert any(line.startswith("level 1 of 4: searching · ") and ", the least so far" in line for line in log)
    assert any(line.startswith("level 4: measuring its plan, about ") for line in log)
    assert "verifying" in log
    assert "Inputs: Bx1x16x16, B=8 (--input)." in log
    assert len(run.done.out.splitlines()) <= 13


def test_every_file_says_where_it_comes_from(run: Run) -> None:
    for data in (run.summary(), run.yaml("plan"), run.yaml("batch")):
        assert data["schema_version"] == 3
        assert data["memopt"] == version("memopt")
        assert data["torch"] == version("torch")
        assert data["model"] == "net.pt"
        assert data["sha256"] == run.sha256
        assert data["spec"]["dims"] == {"B": 8}
        assert data["spec"]["tensors"][0]["shape"] == ["B", 1, 16, 16]
        assert (data["seed"], data["device"]) == (3, "cpu")


def test_the_summary_reads_back(run: Run) -> None:
    data = run.summary()["summary"]
    assert to_data(from_data(MemOptSummary, data)) == data
    assert data["requested_level"] == 4


def test_the_original_and_the_applied_plan_are_measured(run: Run) -> None:
    rows = run.rows()
    assert [row.level for row in rows] == [0, 1, 2, 3, 4]
    first, *between, last = rows
    assert all(row.outcome is None for row in between)
    for row in rows:
        assert row.predicted_allocated_peak_bytes is not None
        assert row.predicted_slowdown is not None or row is first
    for outcome in (first.outcome, last.outcome):
        assert 3 <= len(outcome.step_times_s) <= 20
        assert outcome.batch == 8
        assert sum(to_data(outcome.breakdown).values()) == outcome.tensor_peak_bytes
        assert outcome.process_peak_bytes > outcome.allocated_peak_bytes
        assert outcome.spent_s > sum(outcome.step_times_s)


def test_no_level_is_above_the_one_below(run: Run) -> None:
    peaks = [row.predicted_allocated_peak_bytes or 0 for row in run.rows()]
    assert peaks == sorted(peaks, reverse=True)
    for before, row in itertools.pairwise(run.rows()):
        assert row.repeats == (before.level if row.plan == before.plan else None)


def test_the_plan_lowers_the_peak_and_was_predicted(run: Run) -> None:
    rows = {row.level: row for row in run.rows()}
    first, last = rows[0], rows[run.summary()["summary"]["applied_level"]]
    assert last.outcome.allocated_peak_bytes < 0.8 * first.outcome.allocated_peak_bytes
    for row in (first, last):
        assert row.predicted_tensor_peak_bytes == pytest.approx(row.outcome.tensor_peak_bytes, rel=0.05)
        assert row.predicted_allocated_peak_bytes == pytest.approx(row.outcome.allocated_peak_bytes, rel=0.15)


def test_the_applied_plan_is_verified(run: Run) -> None:
    summary = from_data(MemOptSummary, run.summary()["summary"])
    assert summary.verification.passed
    assert summary.verification.measured.batch == 8
    tensors = len(list(conv_net().parameters())) + len(list(conv_net().buffers()))
    assert summary.verification.compared >= tensors + 2  # and the output, the input's gradient
    assert ", same " in run.done.out.splitlines()[0]


def test_the_recommended_batch_was_run(run: Run) -> None:
    advice = from_data(MemOptSummary, run.summary()["summary"]).advice
    peak_of = {probe.batch: probe.allocated_peak_bytes for probe in advice.probes}
    assert peak_of[advice.recommended_batch] <= advice.budget_bytes == int(0.8 * advice.device_bytes)
    assert run.yaml("batch")["recommended"]["batch_size"] == advice.recommended_batch
    assert run.yaml("batch")["batch_shaping"]["adaptive_sizing"]["max_batch_size"] == advice.recommended_batch


@pytest.mark.slow
def test_the_optimized_model_trains(run: Run) -> None:
    model = run.optimized()
    assert any(isinstance(module, GCContainer) for module in model.modules())
    assert losses(model) == as_trained(losses(run.original()))
    assert losses(run.optimized())[-1] < losses(run.optimized())[0]


def losses(model: nn.Module, steps: int = 4) -> list[float]:
    """Of a few steps on one batch, in float64."""
    torch.manual_seed(0)
    model.double()
    images, labels = torch.randn(8, 1, 16, 16, dtype=torch.float64), torch.randint(10, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def as_trained(expected: list[float]) -> Any:
    """Chunks sum the gradients of parameters, and statistics, piece by piece: other than that, nothing may differ."""
    return pytest.approx(expected, rel=TOLERANCE)


def test_names_are_as_they_were(run: Run) -> None:
    original, optimized = run.original(), run.optimized()
    assert list(optimized.state_dict()) == list(original.state_dict())
    assert [name for name, _ in optimized.named_modules()] == [name for name, _ in original.named_modules()]
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), optimized.parameters(), strict=True))
    original.load_state_dict(optimized.state_dict())
    assert type(optimized).__name__ == "Sequential"
    assert isinstance(optimized, nn.Sequential)


@pytest.mark.slow
def test_it_loads_without_running_code(run: Run) -> None:
    loaded = memopt_cli.load(run.folder / "net.memopt.pt")
    assert segments(loaded) == segments(run.optimized())
    assert losses(loaded) == as_trained(losses(run.original()))


def test_the_plan_goes_onto_a_live_model(run: Run) -> None:
    header, plan = read_plan(run.folder / "net.memopt.plan.yaml")
    assert header.sha256 == run.sha256
    assert plan == from_data(MemOptSummary, run.summary()["summary"]).plan
    model = memopt_cli.apply_plan(conv_net(), plan)
    assert segments(model) == segments(run.optimized())
    assert losses(model) == as_trained(losses(conv_net()))


def test_apply_writes_the_same_model(run: Run, memopt: Memopt, tmp_path: Path) -> None:
    torch.save(conv_net(), "other.pt")
    done = memopt("apply", "other.pt", str(run.folder / "net.memopt.plan.yaml"), "--json")
    assert done.code == 0
    assert json.loads(done.out) == {
        "files": ["other.memopt.pt"],
        "verification": None,
        "shorter": [],
        "confirmation": None,
    }
    assert done.changed == {"other.memopt.pt"}
    assert segments(memopt_cli.load("other.memopt.pt")) == segments(run.optimized())
    again = memopt("apply", "other.pt", str(run.folder / "net.memopt.plan.yaml"))
    assert (again.code, again.changed) == (2, set())
    forced = memopt("apply", "other.pt", str(run.folder / "net.memopt.plan.yaml"), "--force")
    assert (forced.code, forced.out) == (0, "wrote other.memopt.pt\n")


def segments(model: nn.Module) -> dict[str, Any]:
    return {path: segment_of(module) for path, module in named_parts(model) if segment_of(module)}


def test_an_optimized_model_needs_only_torch_and_the_runtime(run: Run) -> None:
    code = (
        "import sys, torch; model = torch.load('net.memopt.pt', weights_only=False); "
        "model(torch.randn(8, 1, 16, 16)).sum().backward(); "
        "print(*sorted(m for m in sys.modules if m.startswith('memopt_cli.') and '.runtime' not in m))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], cwd=run.folder, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")


TRAIN = """
import torch
from torch import nn

class Deep(nn.Module):  # 64 tensors of 4 MiB are kept for backward
    def __init__(self):
        super().__init__()
        self.scale = nn.PReLU()
        self.blocks = nn.Sequential(*(nn.Sequential(*(nn.LeakyReLU() for _ in range(8))) for _ in range(8)))

    def forward(self, x):
        return self.blocks(self.scale(x))

if __name__ == "__main__":
    torch.save(Deep(), "deep.pt")
"""

UNFRAGMENTED = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
"""Every large tensor is a mapping of its own: the address space a step takes is that of its tensors."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_model_that_does_not_fit(tmp_path: Path, spawn_memopt: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 272 MiB where 200 MiB are left; the plan takes half of those.

    The model's class is one of the script's that saved it: ``__main__.Deep``.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    for name, value in UNFRAGMENTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("train.py", run_name="__main__")
    limit = address_space_without_tensors() + (200 << 20)
    done = spawn_memopt(
        tmp_path,
        *"optimize deep.pt -i Bx65536 --dim B=16 --level 1 --code-path train.py --max-slowdown none".split(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.code == 0, done.err
    assert {"deep.memopt.pt", "deep.memopt.plan.yaml"} <= done.changed
    summary = from_data(MemOptSummary, json.loads((tmp_path / "deep.memopt.summary.json").read_text())["summary"])
    assert isinstance(summary.levels[0].outcome, OutOfMemory)
    assert summary.levels[1].outcome.allocated_peak_bytes < 100 << 20
    assert summary.levels[0].predicted_allocated_peak_bytes is not None
    assert summary.levels[0].predicted_allocated_peak_bytes > 256 << 20
    assert summary.verification.passed
    assert not summary.verification.full_size
    assert summary.verification.batch < 16
    assert "does not run → " in done.out
    assert "The original does not fit here" in done.out
    assert f"at batch {summary.verification.batch}, not the requested size" in done.out
    assert isinstance(summary.advice, BatchEstimate)
    assert summary.advice.batch < 16 * 100


@pytest.mark.slow
def test_where_the_original_was_killed_nothing_runs_at_full_size_but_plans(
    optimize: Memopt, answered: Callable[..., None]
) -> None:
    """As the system does it where memory runs out: no exception tells of it."""
    torch.save(deep_net(), "net.pt")

    def killed(session: Session, job: MeasureJob, ask: Callable[..., Any]) -> Any:
        assert session._subject.tries_rows == bool(job.plan.segments), "nothing is compared at full size"
        return ask(job) if job.plan.segments else OutOfMemory(detail="the profiling subprocess was killed")

    def trace(session: Session, job: TraceJob, ask: Callable[..., Any]) -> Any:
        assert session._subject.data == "small batch"
        return ask(job)

    answered(MeasureJob, killed)
    answered(TraceJob, trace)
    done = optimize(
        "net.pt", *SPEC, *"--level 1 --budget 70% --no-recommend-batch --json --snapshot step.pickle".split()
    )
    summary = summary_of(done)
    assert isinstance(summary.levels[0].outcome, OutOfMemory)
    assert isinstance(summary.levels[-1].outcome, Measurement)
    assert summary.verification.passed


@pytest.mark.slow
def test_where_recording_a_full_step_was_killed_it_is_planned_from_a_few_samples(
    optimize: Memopt, answered: Callable[..., None]
) -> None:
    recorded: list[str] = []

    def killed(session: Session, job: TraceJob, ask: Callable[..., Any]) -> Any:
        recorded.append(session._subject.data)
        return ask(job) if recorded[-1] == "small batch" else OutOfMemory(detail="the profiling subprocess was killed")

    answered(TraceJob, killed)
    torch.save(small_net(), "net.pt")
    done = optimize("net.pt", *SPEC, "--level", "1", "--no-recommend-batch", "--max-slowdown", "none")
    assert done.code == 0, done.err
    assert recorded[:2] == ["full size", "small batch"]
    assert ", same bits in " in done.out


def address_space_without_tensors() -> int:
    """Bytes that a profiling subprocess maps to measure the same model on tiny inputs."""
    source = ModelSource(location="deep.pt", trust=Trust(code_paths=("train.py",)))
    spec = InputSpec(tensors=(TensorSpec(shape=(16, 2)),), source="here")
    segments = tuple(SegmentPlan(path=f"blocks.{n}") for n in range(8))
    with Session(Subject(source=source, spec=spec, settings=StepSettings()), 60) as session:
        assert isinstance(session.ask(MeasureJob(plan=Plan(segments=segments))), MeasureAnswer)
        lines = Path(f"/proc/{session.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmPeak"))


def test_nothing_changes_for_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real subprocesses; the caller may have set anything, and finds it as it was."""
    path = tmp_path / "net.pt"
    torch.save(small_net(), path)
    original = path.read_bytes()
    torch.manual_seed(11)
    random.seed(12)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    monkeypatch.setattr(processes, "_servers", processes._Servers())  # not what the tests share
    try:
        before = surroundings()
        with processes.keep_server():
            result = pipeline.optimize(
                OptimizeRequest(
                    source=ModelSource(location=str(path)),
                    spec=InputSpec(tensors=(TensorSpec(shape=("B", 64)),), dims={"B": 16}, source="here"),
                    search=resolve(SearchOverrides(level=1)),
                    output=str(tmp_path / "small.pt"),
                    longest_step_s=0.01,
                ),
                progress=Progress(),
                ask=None,
            )
        after = surroundings()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert [Path(file).name for file in result.files][:2] == ["small.pt", "small.summary.json"]
    assert after == before
    assert path.read_bytes() == original


def surroundings() -> dict[str, Any]:
    return {
        "random numbers": (torch.get_rng_state().tolist(), random.getstate()),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "import path": list(sys.path),
        "limits": resource.getrlimit(resource.RLIMIT_AS),
        "allowed globals": set(torch.serialization.get_safe_globals()),
        "files open": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else [],
    }


@pytest.fixture
def optimize(memopt: Memopt, in_process: None) -> Memopt:
    """``memopt optimize``, profiling in this process."""
    return lambda *arguments: memopt("optimize", *arguments)


SPEC = ("-i", "Bx64", "--dim", "B=512")
SMALL_BATCH = ("-i", "Bx64", "--dim", "B=64")
"""With fewer numbers of chunks to try: whole searches end soon."""


@pytest.mark.slow
@pytest.mark.parametrize("goal", [("--level", "4"), ("--frontier",), ("--pick", "1")])
def test_a_search_without_time_leaves_the_original(goal: tuple[str, ...], optimize: Memopt) -> None:
    torch.save(small_net(), "net.pt")
    done = optimize("net.pt", *SPEC, *goal, "--search-time", "0", "--no-recommend-batch", "--json")
    assert done.code == 0, done.err
    assert " → " not in done.err
    summary = from_data(MemOptSummary, json.loads(done.out)["summary"])
    assert [row.dry_runs for row in summary.levels if row.level] in ([0, 0, 0, 0], [], [0])
    assert summary.plan == Plan()
    assert any("ended after 0 s (--search-time)" in note for note in summary.notes)


@pytest.mark.slow
@pytest.mark.parametrize("price", [(), ("--max-slowdown", "none")])
def test_a_search_for_levels_ends_by_itself(
    price: tuple[str, ...], optimize: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started_search, "_SEARCH_S", 0)
    monkeypatch.setattr(started_search, "_SEARCH_STEPS", 0)
    torch.save(small_net(), "net.pt")
    done = optimize("net.pt", *SPEC, "--level", "4", *price, "--no-recommend-batch", "--json")
    summary = summary_of(done)
    assert [row.dry_runs for row in summary.levels if row.level] == [0, 0, 0, 0]


def test_a_lazy_module_is_named(optimize: Memopt) -> None:
    Path("lazy.py").write_text("from torch import nn\n\ndef make():\n    return nn.Sequential(nn.LazyLinear(3))\n")
    done = optimize("lazy:make", "-i", "4x8")
    assert done.code == 3
    assert done.err.endswith(
        "error: 0.weight has no value yet: a lazy module takes its shape from the first input\n"
        "hint: Run the model on an input once, then save it; or let the callable that builds it run it.\n"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.to("meta"), "0.weight is on the meta device"),
        (lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach().to_sparse())), "torch.sparse_coo"),
    ],
    ids=["no values", "sparse"],
)
def test_a_parameter_of_which_no_step_can_be_recorded_is_named(
    change: Callable[[nn.Module], object], reason: str, optimize: Memopt
) -> None:
    change((model := small_net())[0])
    torch.save(model, "net.pt")
    done = optimize("net.pt", *SPEC)
    assert done.code == 3
    assert reason in done.err.splitlines()[-2]


@pytest.mark.slow
def test_a_budget_chooses_from_a_frontier(optimize: Memopt) -> None:
    torch.save(deep_net(), "net.pt")
    done = optimize("net.pt", *SPEC, "--level", "1", "--frontier", "--budget", "80%", "--no-recommend-batch", "--json")
    summary = summary_of(done)
    first, *_, last = summary.frontier
    assert not first.plan.segments
    assert len(last.plan.segments) > 0
    chosen = summary.levels[-1].outcome
    assert summary.budget_bytes is not None
    assert chosen.allocated_peak_bytes <= summary.budget_bytes
    assert summary.plan == summary.levels[-1].plan
    assert segments(memopt_cli.load("net.memopt.pt"))


@pytest.mark.parametrize("level", ["1", "4"])
def test_a_budget_below_the_parameters_is_refused_before_a_search(
    level: str, optimize: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GoalSearch, "within", None)
    torch.save(small_net(), "net.pt")
    done = optimize("net.pt", *SPEC, "--level", level, "--budget", "60B")
    assert done.code == 6
    assert re.search(r"the parameters alone take [\d.]+ KiB, and the budget is 60 B", done.err)
    assert "--budget 60% a share" in done.err


@pytest.mark.slow
def test_the_batch_that_fits_is_counted_against_a_budget_in_bytes(optimize: Memopt) -> None:
    torch.save(small_net(), "net.pt")
    done = optimize("net.pt", *SMALL_BATCH, "--budget", "2MiB")
    assert done.code == 0, done.err
    batch = yaml.safe_load(Path("net.memopt.batch.yaml").read_text())["recommended"]
    assert batch["budget_bytes"] == 2 << 20
    assert 64 < batch["estimated_batch_size"] < 64 * 100
    assert " should fit, 2.0 MiB of 2.0 MiB" in done.out


@pytest.mark.slow
def test_the_batch_that_was_measured_is_not_called_predicted(optimize: Memopt) -> None:
    torch.save(small_net(), "net.pt")
    measured = summary_of(optimize("net.pt", *SMALL_BATCH, "--level", "0", "--json")).levels[0].outcome
    budget = measured.allocated_peak_bytes + 64  # a sample needs more
    done = optimize("net.pt", *SMALL_BATCH, "--budget", f"{budget}B", "--force")
    assert done.code == 0, done.err
    assert "batch: 64 fits (measured), " in done.out
    assert yaml.safe_load(Path("net.memopt.batch.yaml").read_text())["recommended"]["verified"]


@pytest.mark.slow
def test_the_original_has_the_same_time_on_the_frontier_and_among_the_levels(
    optimize: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be timed again, in turns with a plan that seems too slow."""
    frontier = GoalSearch.frontier

    def timed_again(search: GoalSearch, *args: Any) -> Any:
        points = frontier(search, *args)
        search.measurements.update_times(Plan(), step_times_s=(123.0,))
        return points

    monkeypatch.setattr(GoalSearch, "frontier", timed_again)
    torch.save(deep_net(), "net.pt")
    done = optimize("net.pt", *SPEC, "--level", "1", "--frontier", "--json")
    summary = summary_of(done)
    for found in (summary.levels[0], summary.frontier[0]):
        assert found.outcome.step_s == 123.0


@pytest.mark.slow
def test_a_frontier_is_not_measured_where_nothing_fits(optimize: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(small_net(), "net.pt")
    monkeypatch.setattr(GoalSearch, "frontier", lambda *_: pytest.fail("it was"))
    done = optimize("net.pt", *SMALL_BATCH, "--frontier", "--budget", "1KiB")
    assert done.code == 6, done.err


@pytest.mark.slow
def test_a_pick_beyond_the_frontier_is_refused_before_it_is_measured(
    optimize: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(deep_net(blocks=2), "net.pt")
    monkeypatch.setattr(GoalSearch, "frontier", lambda *_: pytest.fail("it was"))
    done = optimize("net.pt", *SMALL_BATCH, "--pick", "99")
    assert done.code == 2
    assert re.search(r"--pick 99 asks for a plan that the frontier does not have: it has [2-7] plans\n", done.err)


@pytest.mark.parametrize("may_improve", [True, False])
def test_the_end_of_the_search_is_a_note_only_where_more_time_may_help(
    may_improve: bool, optimize: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Climb, "may_go_lower", lambda climb: may_improve)
    torch.save(small_net(), "net.pt")
    done = optimize("net.pt", *SPEC, "--level", "1", "--search-time", "0", "--no-recommend-batch", "--json")
    assert done.code == 0, done.err
    summary = summary_of(done)
    over = "The search was ended after 0 s (--search-time): a longer search"
    (said,) = summary.notes if may_improve else summary.details[1:]
    assert said == f"{over} {'may find' if may_improve else 'would hardly find'} a better plan."


def test_the_default_time_of_a_search_is_blamed_on_no_flag(optimize: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_search, "_SEARCH_S", 0)
    monkeypatch.setattr(started_search, "_SEARCH_STEPS", 0)
    torch.save(small_net(), "net.pt")
    done = optimize("net.pt", *SPEC, "--level", "1", "--no-recommend-batch", "--json")
    assert done.code == 0, done.err
    said = "The search was ended after 0 s by its default time (--search-time 60 searches longer): a longer search"
    summary = summary_of(done)
    assert any(text.startswith(said) for text in (*summary.notes, *summary.details))


@pytest.mark.slow
@pytest.mark.parametrize(("goal", "code"), [(("--budget", "70%"), 6), (("--pick", "2"), 2)])
def test_what_a_search_without_time_cannot_meet(goal: tuple[str, ...], code: int, optimize: Memopt) -> None:
    torch.save(small_net(), "net.pt")
    done = optimize("net.pt", *SPEC, *goal, "--search-time", "0")
    assert done.code == code, done.err
    assert "; the search was ended after 0 s (--search-time)\n" in done.err
    assert "A longer search may find a better plan." in done.err


@pytest.mark.slow
def test_ctrl_c_again_once_the_batch_is_given_up_stops(optimize: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(small_net(), "net.pt")
    ends, pressed = Sessions.__exit__, list[BatchSearch]()

    def press(search: BatchSearch) -> None:
        pressed.append(search)
        raise KeyboardInterrupt

    def press_again(sessions: Sessions, *error: Any) -> None:
        ends(sessions, *error)
        if len(pressed) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(BatchSearch, "dry_run_ahead", press)
    monkeypatch.setattr(Sessions, "__exit__", press_again)
    done = optimize("net.pt", *SPEC, "--level", "1", "--max-slowdown", "none", "--recommend-batch")
    assert (done.code, done.out) == (130, "")
    assert "the search is interrupted" not in done.err.lower()
    assert os.listdir() == ["net.pt"]


def ended_once_lowered(answered: Callable[..., None], sent: signal.Signals) -> list[int]:
    """Send a signal in the dry run after the first that lowers the peak; return the peaks that were counted."""
    counted: list[int] = []

    def count(session: LocalSession, job: CountJob, ask: Callable[[CountJob], Any]) -> Any:
        if len(counted) > 1 and counted[-1] < counted[0]:
            signal.raise_signal(sent)
        found = ask(job)
        counted.append(found.allocated_peak_bytes)
        return found

    answered(CountJob, count)
    return counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "goal"),
    [
        (signal.SIGTERM, ("--level", "4", "--max-slowdown", "none")),
        (signal.SIGINT, ("--budget", "60%")),
        (signal.SIGINT, ("--frontier",)),
    ],
)
def test_a_signal_in_a_search_keeps_the_best_so_far(
    sent: signal.Signals, goal: tuple[str, ...], optimize: Memopt, answered: Callable[..., None]
) -> None:
    torch.save(deep_net(), "net.pt")
    counted = ended_once_lowered(answered, sent)
    done = optimize("net.pt", *SPEC, *goal, "--no-recommend-batch", "--json")
    assert done.code == 130
    found = "the frontier is made" if "--frontier" in goal else "the plan is the best"
    assert f"interrupted; {found} of what had been tried" in done.err
    assert ": searching" not in done.err.partition("Ctrl-C again: stop.")[2]
    summary = from_data(MemOptSummary, json.loads(done.out)["summary"])
    predicted = [row.predicted_allocated_peak_bytes for row in summary.levels]
    predicted += [point.predicted_allocated_peak_bytes for point in summary.frontier]
    assert min(peak for peak in predicted if peak is not None) == min(counted)
    assert summary.interrupted
    assert len({*summary.notes}) == len(summary.notes)
    if goal != ("--frontier",):
        assert summary.verification.passed
        assert segments(memopt_cli.load("net.memopt.pt"))


@pytest.mark.slow
def test_ctrl_c_before_anything_was_found_ends(optimize: Memopt, answered: Callable[..., None]) -> None:
    torch.save(deep_net(), "net.pt")
    plans: list[Plan] = []

    def pressed(session: LocalSession, job: CountJob, ask: Callable[[CountJob], Any]) -> Any:
        plans.append(job.plan)
        if len(plans) > 1:
            raise KeyboardInterrupt
        return ask(job)

    answered(CountJob, pressed)
    done = optimize("net.pt", *SPEC, "--max-slowdown", "none")
    assert (done.code, done.out) == (130, "")
    assert os.listdir() == ["net.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 4])
def test_levels(level: int, optimize: Memopt) -> None:
    torch.save(small_net(), "net.pt")
    flags = ("--level", str(level), "--json", "--measure-levels", "--max-slowdown", "none", "--no-recommend-batch")
    done = optimize("net.pt", *SMALL_BATCH, *flags)
    summary = summary_of(done)
    assert [row.level for row in summary.levels] == list(range(level + 1))
    assert summary.requested_level == level
    assert summary.applied_level <= level
    assert summary.plan == summary.levels[summary.applied_level].plan
    assert Path("net.memopt.pt").exists() == summary.is_applied
    if summary.is_applied:
        assert len(segments(memopt_cli.load("net.memopt.pt"))) == len(summary.plan.segments) + summary.plan.packed
    peaks = [row.outcome.allocated_peak_bytes for row in summary.levels if isinstance(row.outcome, Measurement)]
    assert len(peaks) == level + 1
    assert peaks[summary.applied_level] == min(peaks)


@pytest.mark.slow
def test_dry_run_reports_and_writes_nothing(optimize: Memopt) -> None:
    torch.save(small_net(), "net.pt")
    Path("net.memopt.pt").write_text("not in the way of a dry run")
    done = optimize("net.pt", *SPEC, *"--level 1 --max-slowdown none --dry-run -q".split())
    assert (done.code, done.err, done.changed) == (0, "", set())
    assert "nothing written" in done.out
    assert ", same bits in " in done.out


@pytest.mark.slow
def test_a_factory_with_weights(optimize: Memopt) -> None:
    Path("user_models.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(64, 3)\n")
    weights = nn.Linear(64, 3).state_dict()
    torch.save(weights, "weights.pt")
    done = optimize("user_models:build", *SPEC, *"--weights weights.pt --level 0 -o user_models.memopt.pt".split())
    assert done.code == 0, done.err
    assert "user_models.memopt.pt" in done.changed
    assert torch.equal(memopt_cli.load("user_models.memopt.pt").state_dict()["weight"], weights["weight"])


def test_a_factory_builds_the_same_model_in_every_subprocess(
    memopt: Memopt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("user_random.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(64, 3)\n")
    before = torch.get_rng_state()
    first, second = (load_model(ModelSource(location="user_random:build")).module for _ in range(2))
    assert torch.equal(*(model.state_dict()["weight"] for model in (first, second)))
    assert torch.equal(torch.get_rng_state(), before)


class UserNet(Parts, net=conv_net):
    """A class that only its user has."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)


def save_program(kind: str, path: str) -> None:
    """The user's model scripted, traced or exported, the batch of the last left open."""
    x = torch.randn(5, 1, 16, 16)
    if kind == "exported":
        torch.export.save(torch.export.export(UserNet(), (x,), dynamic_shapes=({0: torch.export.Dim("B")},)), path)
    else:
        script = torch.jit.script(UserNet()) if kind == "scripted" else torch.jit.trace(UserNet(), x, check_trace=False)
        torch.jit.save(script, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path", "flags"),
    [
        ("scripted", "net.ts", "-i Bx1x16x16 --level 1 --no-recommend-batch"),
        ("traced", "net.ts", "-i Bx1x16x16 --level 3 --max-split-rounds 1 --no-recommend-batch"),
        ("exported", "net.pt2", "--level 1"),  # it brings its own inputs
    ],
)
def test_a_program_is_optimized_and_trains_without_its_source(
    kind: str, path: str, flags: str, optimize: Memopt
) -> None:
    save_program(kind, path)
    done = optimize(path, *flags.split(), *"--dim B=4 --json --max-slowdown none".split())
    summary = summary_of(done)
    assert summary.model_format == ("exported" if kind == "exported" else "torchscript")
    assert summary.verification.passed
    assert summary.plan.segments
    reader = "torch.export.load" if kind == "exported" else "torch.jit.load"
    said = f"net.memopt.pt is a pickled module, which {reader} does not read: memopt_cli.load('net.memopt.pt') does."
    assert said in summary.details
    needed = torch.serialization.get_unsafe_globals_in_checkpoint("net.memopt.pt")
    assert all(name.startswith(("memopt_cli.runtime.", "torch.nn.")) for name in needed), needed
    for optimized in (memopt_cli.load("net.memopt.pt"), torch.load("net.memopt.pt", weights_only=False)):
        assert len(segments(optimized)) == len(summary.plan.segments) + summary.plan.packed
        assert optimized.state_dict().keys() == UserNet().state_dict().keys()
        assert losses(optimized) == as_trained(losses(UserNet()))


def test_a_guess_that_does_not_fit_is_called_a_guess(optimize: Memopt) -> None:
    torch.save(nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 4)), "net.pt")
    done = optimize("net.pt", "-q")
    assert (done.code, done.changed) == (3, set())
    assert "hint: The inputs were a guess from 0 (Linear). Use inputs" in done.err
    assert "a guess" not in optimize("net.pt", "-q", "-i", "2x8").err


@pytest.mark.slow
def test_inputs_from_a_file_cannot_be_resized(optimize: Memopt) -> None:
    torch.save(small_net(), "net.pt")
    torch.save([torch.randn(9, 64)], "inputs.pt")
    done = optimize("net.pt", "--input-data", "inputs.pt", "--level", "1")
    assert done.code == 0, done.err
    assert "No batch recommendation" in done.out
    assert yaml.safe_load(Path("net.memopt.batch.yaml").read_text())["recommended"]["batch_size"] == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "targets"), [(24, "zeros[:9]"), (24, "zeros[: len(out)]"), (20_000, "zeros[: len(out)]")]
)
def test_a_loss_of_so_many_targets_is_a_matter_of_the_batch_that_is_asked_for(
    optimize: Memopt, count: int, targets: str
) -> None:
    torch.save(small_net(), "net.pt")
    Path("loss.py").write_text(
        f"import torch\nzeros = torch.zeros({count})\ndef loss(out):\n    return (out.sum(1) - {targets}).mean()\n"
    )
    step = ("net.pt", "-i", "9x64", "--loss", "loss.py:loss", "--level", "1", "--force")
    done = optimize(*step, "-v")
    assert done.code == 0, done.err
    assert "he loss failed" not in done.out
    batch = {24: ("24", "25"), 20_000: ("1....", "2....")}[
        count
    ]  # the larger to 1 %, and larger than anybody trains with
    said = "about {} is predicted to fit into .*, but no larger one is considered, since the loss fails at batch {}: "
    assert bool(re.search(said.format(*batch), done.out)) == (targets != "zeros[:9]")
    assert "the loss fail" in optimize(*step, "--recommend-batch").out


def test_a_file_of_inputs_is_read_in_subprocesses_alone(memopt: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(small_net(), "net.pt")
    torch.save([torch.randn(9, 64)], "inputs.pt")
    monkeypatch.setattr(input_spec, "_read_data", lambda path: pytest.fail(f"{path} was read here"))
    done = memopt("optimize", "net.pt", "--input-data", "inputs.pt", "--level", "1")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_precision_loss_and_an_optimizer_of_the_users_own(optimize: Memopt) -> None:
    torch.save(small_net(), "net.pt")
    Path("train.py").write_text(
        "import torch\ndef square(output):\n    return (output ** 2).mean()\n"
        "def make(model):\n    return torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)\n"
    )
    step = "--optimizer train.py:make --precision bf16 --loss train.py:square".split()
    row = summary_of(optimize("net.pt", *SPEC, *"--level 1 --no-recommend-batch --json".split(), *step)).levels[0]
    parameters = sum(p.nbytes for p in small_net().parameters())
    assert isinstance(row.outcome, Measurement)
    assert row.outcome.breakdown.optimizer_bytes >= 3 * parameters
    assert row.outcome.resident_bytes >= 5 * parameters


def heavy_net() -> nn.Sequential:
    """Its parameters outweigh what a step of few samples keeps for backward."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Tanh())))


FEW = ("-i", "8x128", "--level", "1", "--max-slowdown", "none", "--no-recommend-batch")
ADAMW_IN_BACKWARD = ("--optimizer", "adamw", "--optimizer-in-backward")


@pytest.mark.slow
def test_the_optimizer_runs_in_backward_where_gradients_are_the_peak(optimize: Memopt) -> None:
    torch.save(heavy_net(), "net.pt")
    done = optimize("net.pt", *FEW, *ADAMW_IN_BACKWARD, "--json")
    summary = summary_of(done)
    before, after = (row.outcome for row in summary.levels)
    parameters = sum(p.nbytes for p in heavy_net().parameters())
    assert after.allocated_peak_bytes <= before.allocated_peak_bytes - parameters / 2
    assert after.allocated_peak_bytes == pytest.approx(summary.levels[1].predicted_allocated_peak_bytes, rel=0.01)
    assert [peak.phase for peak in after.phases] == ["forward", "backward"]
    assert summary.verification.further[-1].name == "in 3 updates in backward"
    assert summary.verification.further[-1].compared == 12 * 4  # parameters, two moments, a counter
    assert any("must then not accumulate, clip or scale gradients" in note for note in summary.notes)
    assert read_plan("net.memopt.plan.yaml")[1].in_backward
    saved: nn.Module = torch.load("net.memopt.pt", weights_only=False)
    saved(torch.ones(8, 128)).sum().backward()
    assert all(p.grad is not None for p in saved.parameters())


def test_a_plan_whose_latest_times_exceed_the_limit_is_not_applied(
    optimize: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_rows = Climb.rows

    def rows(self: Climb) -> list[LevelRow]:
        found = find_rows(self)
        assert self.applied is not None
        self.measurements.update_times(Plan(), step_times_s=(1e-6,))
        return found

    def measure_again(self: PlanMeasurements, row: LevelRow, max_slowdown: float = 0.0) -> LevelRow:
        return replace(row, outcome=self.measure(row.plan))

    monkeypatch.setattr(Climb, "rows", rows)
    monkeypatch.setattr(PlanMeasurements, "confirm", measure_again)
    torch.save(small_net(), "net.pt")
    summary = summary_of(optimize("net.pt", *SPEC, "--level", "1", "--max-slowdown", "100", "--json"))
    assert (summary.applied_level, summary.plan) == (0, Plan())
    assert isinstance(summary.decisive.why, TooSlow)


@pytest.mark.slow
def test_naming_the_optimizer_does_not_change_how_the_script_trains(optimize: Memopt) -> None:
    torch.save(heavy_net(), "net.pt")
    done = optimize("net.pt", *FEW, "--optimizer", "adamw", "--json")
    summary = summary_of(done)
    assert not any(row.plan.in_backward for row in summary.levels)
    (offer,) = (note for note in summary.notes if "--optimizer-in-backward" in note)
    assert offer.startswith("--optimizer-in-backward would lower the peak to about ")
    clipped = summary_of(optimize("net.pt", *FEW, "--optimizer", "adamw", "--clip-norm", "1", "--force", "--json"))
    assert not any("in-backward" in note for note in clipped.notes)


@pytest.mark.slow
def test_a_budget_is_met_by_the_optimizer_in_backward(optimize: Memopt) -> None:
    torch.save(heavy_net(), "net.pt")
    goal = ("-i", "8x128", "--level", "1", "--no-recommend-batch", "--budget", "85%", "--json")
    done = optimize("net.pt", *goal, *ADAMW_IN_BACKWARD)
    summary = summary_of(done)
    assert summary.plan == Plan(in_backward=True)
    assert summary.budget_bytes is not None
    (found,) = (row.outcome for row in summary.levels if row.plan.in_backward)
    assert found.allocated_peak_bytes <= summary.budget_bytes
    unasked = optimize("net.pt", *goal, "--force", "--optimizer", "adamw")
    assert unasked.code == 6  # its gradients are all there at once, and no segment lowers that
    explain = "memopt explain net.pt --input 8x128 --optimizer adamw --memory "
    assert f"and which other changes fit: {explain}{exact_bytes(summary.budget_bytes)}" in unasked.err
    asked = optimize("net.pt", *goal[:-2], "1KiB", "--force", *ADAMW_IN_BACKWARD)
    assert "memopt explain net.pt --input 8x128 --optimizer adamw --optimizer-in-backward --memory 1KiB" in asked.err


LOOKING_AT_ALL = """
import torch

class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)

def make(model):
    return Clipping(model.parameters(), lr=0.1)
"""


@pytest.mark.slow
def test_an_optimizer_that_looks_at_all_gradients_does_not_run_in_backward(optimize: Memopt) -> None:
    torch.save(heavy_net(), "net.pt")
    Path("train.py").write_text(LOOKING_AT_ALL)
    done = optimize("net.pt", *FEW, "--optimizer", "train.py:make", "--optimizer-in-backward", "--json")
    summary = summary_of(done)
    assert not summary.plan.in_backward
    (dropped,) = summary.dropped
    assert "does not run in backward" in dropped.sentence
    assert "several parameters at once" in dropped.sentence


@pytest.mark.slow
def test_a_frontier_has_the_optimizer_in_backward_and_shows_a_pick_as_it_was_confirmed(
    optimize: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimization, "without_beaten", lambda points: (points, ""))  # of steps so short, any may be
    torch.save(heavy_net(), "net.pt")
    wanted = ("-i", "8x128", "--level", "1", "--no-recommend-batch", "--frontier", "--pick", "2", "--json")
    done = optimize("net.pt", *wanted, *ADAMW_IN_BACKWARD)
    summary = summary_of(done)
    assert summary.plan == Plan(in_backward=True) == summary.frontier[1].plan
    assert summary.frontier[1].outcome == summary.levels[-1].outcome
    assert summary.frontier[0].outcome == summary.levels[0].outcome
    assert summary.frontier[1].original_step_s == summary.levels[0].outcome.step_s


@pytest.mark.slow
def test_memopt_apply_says_how_the_optimizer_runs_in_backward(memopt: Memopt, in_process: None) -> None:
    torch.save(heavy_net(), "net.pt")
    done = memopt("optimize", "net.pt", *FEW, "--optimizer", "sgd", "--optimizer-in-backward", "--plan-only")
    assert done.code == 0, done.err
    assert "net.memopt.plan.yaml', optimizer=optimizer)" in " ".join(done.out.split())
    done = memopt("apply", "net.pt", "net.memopt.plan.yaml", "-o", "other.pt", "--verify")
    assert done.code == 0, done.err
    assert "memopt_cli.Plan(in_backward=True)" in " ".join((done.out + done.err).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "where"), [("one_sees_backward", "."), ("one_sees_backward_in_eval", " in eval mode.")]
)
def test_a_plan_that_changes_the_result_is_applied_without_what_changes_it(
    model: str, where: str, optimize: Memopt, user_code: str
) -> None:
    flags = "-i 256x32 --level 2 --max-slowdown none --no-recommend-batch --code-path".split()
    done = optimize(f"faulty:{model}", *flags, user_code)
    assert done.code == 0, done.err
    assert ", same bits in " in done.out
    assert "the plan of level 1" not in done.out
    (line,) = (
        line for line in done.out.splitlines() if line.startswith("'2' is not a segment: as a segment, gradient of 2.")
    )
    assert line.endswith(where)
    _, plan = read_plan(f"faulty.{model}.memopt.plan.yaml")
    assert {segment.path for segment in plan.segments} == {"0", "1"}


@pytest.mark.slow
def test_what_follows_the_step_is_left_out_where_it_ends_the_subprocess(
    optimize: Memopt, answered: Callable[..., None]
) -> None:
    def lost(session: LocalSession, job: VerifyJob, ask: Callable[[VerifyJob], Any]) -> Any:
        return Crashed(reason="gone", output_tail="") if job.further_steps else ask(job)

    answered(VerifyJob, lost)
    torch.save(deep_net(), "net.pt")
    done = optimize("net.pt", *SPEC, "--level", "1", "--max-slowdown", "none", "--no-recommend-batch", "--json")
    found = summary_of(done).verification
    assert (found.passed, found.batch) == (True, 512)
    assert found.further == (
        FurtherCheck(name="in later steps", batch=512, not_tried="the profiling subprocess died: gone", skipped=True),
    )


APPLIED = (
    "{schema_version: 1, memopt: '0', torch: '2', model: m, sha256: null, spec: {source: here}, seed: 0, device: cpu"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "differs"), [("one_sees_backward", ""), ("one_sees_backward_in_eval", "in eval mode")]
)
def test_apply_compares_if_asked_to(model: str, differs: str, memopt: Memopt, in_process: None, user_code: str) -> None:
    command = ("apply", f"faulty:{model}", "p.yaml", "--code-path", user_code)
    Path("p.yaml").write_text(f"{APPLIED}, level: 1, segments: [{{path: '1'}}, {{path: '2'}}]}}")
    done = memopt(*command, "--verify", "-i", "8x32")
    assert (done.code, done.out, done.changed) == (1, "", set())
    assert "error: with the plan gradient of 2.narrow.weight differs by " in done.err
    assert f"{differs}, at batch 8\n" in done.err
    Path("p.yaml").write_text(f"{APPLIED}, level: 1, segments: [{{path: '1'}}]}}")
    done = memopt(*command, "--verify", "-i", "8x32")
    assert (done.code, done.changed) == (0, {f"faulty.{model}.memopt.pt"}), done.err
    assert done.out.startswith("verified: ")
    assert done.out.endswith(f"\nwrote faulty.{model}.memopt.pt\n")


@pytest.mark.slow
def test_hidden_state_of_earlier_steps_is_not_saved(optimize: Memopt, user_code: str) -> None:
    flags = "--level 0 --no-recommend-batch -o faulty.memopt.pt".split()
    done = optimize("faulty:Remembers", "-i", "2x3", "--code-path", user_code, *flags)
    assert done.code == 0, done.err
    saved = torch.load("faulty.memopt.pt", weights_only=False)
    assert saved.last.grad_fn is None


def row(level: int, peak: int | None) -> LevelRow:
    return a_row(level, OutOfMemory(detail="") if peak is None else measured(peak))


@pytest.mark.parametrize(("original", "chosen", "applied"), [(100, 80, 3), (None, 120, 3), (100, None, 0)])
def test_the_chosen_row_is_applied_if_it_runs(original: int | None, chosen: int | None, applied: int) -> None:
    rows = [row(level, peak) for level, peak in ((0, original), (1, 10), (3, chosen))]
    assert row_to_apply(rows, rows[-1]).level == applied


def test_nothing_fits() -> None:
    with pytest.raises(MeasurementError, match="no plan up to level 1 could be run: out of memory") as error:
        row_to_apply([row(0, None), row(1, None)], None)
    assert "--dim B=1" in error.value.hint
