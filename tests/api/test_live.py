"""The commands on a model in memory: the same answers as on its file."""

from __future__ import annotations

import copy
import functools
import html
import importlib
import io
import json
import math
import pickle
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.api import live
from memopt_cli.cli.app import main
from memopt_cli.errors import MeasurementError, StepError, UsageError
from memopt_cli.measure.jobs import CountJob
from memopt_cli.measure.local import LocalSession
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.plans.proof import Prover
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.records import Measurement, Plan, TimedOut, from_data
from memopt_cli.search.batch_size.search import BatchSearch
from memopt_cli.training.apply import apply_plan
from tests.api.live_model import Block, mean_square

pytestmark = pytest.mark.process

WIDTH, BATCH = 32, 128


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(6)))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    mean_square(model(x)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def optimized(x: Tensor) -> tuple[nn.Module, Any]:
    model = made()
    # The least there is: which of several plans within a budget is the fastest, times tell, and those vary.
    return model, memopt_cli.optimize(model, x, budget=0.72, level=1, loss=mean_square)


def test_a_budget_is_met_in_place_and_gradients_stay(optimized: tuple[nn.Module, Any], x: Tensor) -> None:
    model, found = optimized
    original, applied = found.summary.levels
    assert applied.outcome.allocated_peak_bytes <= 0.72 * original.outcome.allocated_peak_bytes
    assert memopt_cli.plan_of(model) == found.plan != memopt_cli.Plan()
    assert all(map(torch.equal, gradients(model, x), gradients(made(), x)))


def test_the_answer_is_that_of_the_command_to_the_byte(
    optimized: tuple[nn.Module, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = optimized
    file = tmp_path / "net.pt"
    torch.save(made(), file)
    loss = f"{Path(__file__).with_name('live_model.py')}:mean_square"
    flags = ["--level", "1", "--budget", "72%", "--loss", loss, "--no-recommend-batch", "--allow-package", "tests"]
    assert main(["optimize", str(file), "-i", f"{BATCH}x{WIDTH}", *flags, "--json", "-q"]) == 0
    told = json.loads(capsys.readouterr().out)["summary"]
    peaks = [row.outcome.allocated_peak_bytes for row in found.summary.levels]
    assert [row["outcome"]["allocated_peak_bytes"] for row in told["levels"]] == peaks
    assert told["budget_bytes"] == found.summary.budget_bytes
    assert [s["path"] for s in told["plan"]["segments"]] == [s.path for s in found.plan.segments]


@pytest.mark.usefixtures("in_process")
def test_a_range_of_lengths_has_a_plan_for_each_and_training_switches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
    model[1].requires_grad_(False)
    plain = copy.deepcopy(model)
    found = memopt_cli.optimize(
        model,
        f"BxSx{WIDTH}",
        dims={"B": 2, "S": (8, 256)},
        lengths={8: 90, 64: 9, 256: 1},
        budget=0.7,
        level=1,
        loss=lambda output: mean_square(output),  # which is called in this process alone
    )
    rows, plan = found.summary.ranges, found.plan
    assert plan.by == memopt_cli.records.InputDimension(dim="S", argument=0, axis=1)
    assert (rows[0].plan, rows[-1].up_to) == (memopt_cli.Plan(), 256)
    assert rows[-1].plan.segments
    assert all(row.outcome.allocated_peak_bytes <= (found.summary.budget_bytes or 0) for row in rows)
    assert "S from" in repr(found)

    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for planned in (model, pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        assert memopt_cli.plan_of(planned) == plan
        for length in (4, 8, 65, 256):
            x = torch.randn(2, length, WIDTH)
            assert all(map(torch.equal, gradients(planned, x), gradients(plain, x)))
            assert recomputed(planned, x) == len(plan.at({"S": length}).segments)
    with pytest.warns(UserWarning, match="S is 300, beyond the 256"):
        assert recomputed(model, torch.randn(2, 300, WIDTH)) == len(rows[-1].plan.segments)

    # The command line finds the same: three blocks, in the one plan of this level that is within the budget at S=256.
    file, lengths = tmp_path / "net.pt", tmp_path / "lengths.txt"
    torch.save(plain, file)
    lengths.write_text("8 90\n64 9\n256\n")
    loss = f"{Path(__file__).with_name('live_model.py')}:mean_square"
    flags = ["--dim", "B=2", "--dim", "S=8:256", "--lengths", str(lengths), "--budget", "70%", "--level", "1"]
    flags += ["--loss", loss, "--allow-package", "tests", "--no-recommend-batch", "--dry-run", "--json", "-q"]
    assert main(["optimize", str(file), "-i", f"BxSx{WIDTH}", *flags]) == 0
    told = json.loads(capsys.readouterr().out)["summary"]
    assert told["budget_bytes"] == found.summary.budget_bytes
    assert from_data(memopt_cli.Plan, told["plan"]) == plan
    for row, same in zip(told["ranges"], rows, strict=True):
        assert row["outcome"]["allocated_peak_bytes"] == same.outcome.allocated_peak_bytes
        assert row["outcome"]["tensor_peak_bytes"] == same.outcome.tensor_peak_bytes


def recomputed(model: nn.Module, x: Tensor) -> int:
    """How many blocks run once more in backward."""
    calls: list[nn.Module] = []
    hooks = [block.up.register_forward_hook(lambda module, *_: calls.append(module)) for block in model.children()]
    gradients(model, x)
    for hook in hooks:
        hook.remove()
    return len(calls) - len(hooks)


@pytest.mark.parametrize("name", ["FORCE_COLOR", "JUPYTER"])
def test_a_result_is_its_own_text_wherever_it_is_shown(
    optimized: tuple[nn.Module, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = optimized
    here = str(found)
    if name == "JUPYTER":
        monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # rich would display the text
    else:
        monkeypatch.setenv(name, "1")
    assert here.splitlines()
    assert "\x1b" not in here
    assert str(found) == here


def test_a_notebook_shows_the_tables_of_the_report(optimized: tuple[nn.Module, Any]) -> None:
    _, found = optimized
    shown = found._repr_html_()
    assert shown.startswith('<pre style="white-space: pre-wrap"><b>')
    assert shown.count("<table>") == shown.count("</table>") == 1
    words = re.sub(r"<[^>]*>|[-\s]", "", html.unescape(shown))
    assert words == re.sub(r"[-\s]", "", str(found))


@pytest.mark.parametrize("elsewhere", [{"fake": True}, {"for_device": "h100-80gb"}])
def test_what_is_not_run_is_not_compiled(elsewhere: dict[str, Any], x: Tensor) -> None:
    with pytest.raises(UsageError, match=r"measures the step, but .* runs none here"):
        memopt_cli.profile(made(), x, compile="eager", **elsewhere)


@pytest.mark.parametrize("find", [memopt_cli.optimize, memopt_cli.frontier])
def test_an_optimizer_that_may_run_in_backward_is_named(find: Callable[..., Any], x: Tensor) -> None:
    with pytest.raises(UsageError, match=r"^optimizer_in_backward=True lets an optimizer run in "):
        find(made(), x, optimizer_in_backward=True)


def test_a_backend_is_named(x: Tensor) -> None:
    with pytest.raises(UsageError, match="compile is "):
        memopt_cli.profile(made(), x, compile=print)  # type: ignore[arg-type]


@pytest.mark.usefixtures("in_process")
def test_a_frontier_is_measured_and_nothing_applied(x: Tensor) -> None:
    model = made()
    found = memopt_cli.frontier(model, x, level=1)
    points = found.summary.frontier
    assert len(points) > 1
    assert all(isinstance(point.outcome, Measurement) for point in points)
    assert memopt_cli.plan_of(model).is_empty
    with pytest.raises(UsageError, match="a frontier has several plans"):
        found.plan.save("net.plan.yaml")
    memopt_cli.apply_plan(model, points[-1].plan)
    assert all(map(torch.equal, gradients(model, x), gradients(made(), x)))


def test_a_profile_tells_the_peak_under_a_plan_too(optimized: tuple[nn.Module, Any], x: Tensor) -> None:
    _, found = optimized
    model = made()
    plain = memopt_cli.profile(model, x, loss=mean_square).result
    planned = memopt_cli.profile(model, x, loss=mean_square, plan=found.plan).result
    peaks = [row.outcome.tensor_peak_bytes for row in found.summary.levels]
    assert [plain.tensor_peak_bytes, planned.tensor_peak_bytes] == peaks
    assert memopt_cli.profile(model, x, loss=mean_square, fake=True).result.measurement is None


@pytest.mark.parametrize("inputs", ["tensor", "text"])
def test_a_batch_is_recommended_that_fits(inputs: str, x: Tensor) -> None:
    given, dims = (f"Bx{WIDTH}", {"B": BATCH}) if inputs == "text" else (x, None)
    found = memopt_cli.recommend_batch(made(), given, dims=dims, memory="3MiB", longest_step=5)
    advice = found.result.rows[0].outcome
    assert advice.budget_bytes == 3 * 2**20
    assert any(probe.batch == found.batch for probe in advice.probes)
    assert f"batch {found.batch}" in repr(found)


@pytest.mark.usefixtures("in_process")
def test_a_search_finds_batch_and_plan_and_leaves_the_model_alone(x: Tensor) -> None:
    model = made()
    found = memopt_cli.recommend_batch(model, x, memory="2MiB", search=True, level=1, search_time=60)
    answer = found.result.answer
    assert (found.batch, found.plan) == (answer.batch, answer.plan)
    assert answer.outcome.allocated_peak_bytes <= 2 << 20
    assert len(found.result.runs) <= 8
    assert f"recommended: batch {found.batch} " in repr(found)
    assert memopt_cli.plan_of(model).is_empty


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"level": 2}, "apply only to a search for plans"),
        ({"search_time": 5}, "apply only to a search for plans"),
        ({"search": True, "plan": memopt_cli.Plan(packed=True)}, "plan cannot be combined with search"),
        ({"search": True, "level": 9}, "level"),
    ],
)
def test_what_does_not_go_with_a_search(asked: dict[str, Any], said: str, x: Tensor) -> None:
    with pytest.raises(UsageError, match=said):
        memopt_cli.recommend_batch(made(), x, memory="2MiB", **asked)


@pytest.mark.usefixtures("in_process")
def test_a_global_batch_counts_the_gradients_of_earlier_micro_batches(x: Tensor) -> None:
    one, many = (
        memopt_cli.recommend_batch(made(), x, memory="3MiB", longest_step=5, global_batch=asked)
        for asked in (None, 4096)
    )
    assert many.result.accumulation.batch * many.result.accumulation.steps == 4096
    assert many.batch < one.batch


@pytest.mark.usefixtures("in_process")
def test_text_describes_inputs_and_a_batch_is_advised_with_the_plan() -> None:
    found = memopt_cli.optimize(
        made(), f"Bx{WIDTH}", dims={"B": BATCH}, level=1, max_slowdown=math.inf, recommend_batch=True
    )
    assert found.summary.advice is not None
    assert not found.plan.is_empty


def test_a_plan_that_goes_missing_fails_a_check(x: Tensor, tmp_path: Path) -> None:
    file, model = tmp_path / "base.json", made()
    memopt_cli.apply_plan(model, memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="2"),)))
    recorded = memopt_cli.baseline(model, x, file, loss=mean_square)
    assert f"wrote {file}" in repr(recorded)
    same = memopt_cli.check(model, x, file, loss=mean_square)
    assert same.passed
    assert "another file than before" not in repr(same)  # the file that subprocesses read is nobody's business
    grown = memopt_cli.check(memopt_cli.remove_plan(model), x, file, loss=mean_square)
    assert not grown.passed
    assert "2" in grown.result.plan.dropped
    assert "tensor peak" in repr(grown)
    assert memopt_cli.check(model, x, file, loss=mean_square, fail_on=["peak:50%"]).passed


@pytest.mark.usefixtures("in_process")
def test_a_plan_that_the_model_carries_is_replaced(x: Tensor) -> None:
    model = memopt_cli.apply_plan(made(), memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="0"),)))
    found = memopt_cli.optimize(model, x, level=1, max_slowdown=math.inf)
    assert "The model carried a plan already; it was taken off first." in found.summary.notes
    assert memopt_cli.plan_of(model) == found.plan


@pytest.mark.usefixtures("in_process")
def test_a_plan_that_the_model_carries_stays_where_none_is_found(x: Tensor) -> None:
    carried = memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="0"),))
    model = memopt_cli.apply_plan(made(), carried)
    found = memopt_cli.optimize(model, x, level=1, budget="8GiB")
    assert not found.plan
    assert memopt_cli.plan_of(model) == carried
    assert found.summary.notes[0].startswith("The model keeps the plan that it carries.")


@pytest.mark.usefixtures("in_process")
def test_a_plan_that_the_model_carries_is_run_or_said_to_be_left_out(x: Tensor) -> None:
    plan = memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="0"),))
    model = memopt_cli.apply_plan(made(), plan)
    recommended = memopt_cli.recommend_batch(model, x, memory="4MiB", longest_step=0.01)
    assert [row.planned for row in recommended.result.rows] == [False, True]
    assert "a batch is sought without the plan and with it" in repr(recommended)
    left_out = "The model carries a plan already; it is left out here."
    assert left_out in memopt_cli.profile(model, x, fake=True).result.notes
    assert left_out in memopt_cli.frontier(model, x, level=1).summary.notes
    fastest = memopt_cli.recommend_batch(model, x, memory="4MiB", longest_step=0.01, search=True, level=1)
    assert left_out in fastest.result.notes
    assert memopt_cli.plan_of(model) == plan


def test_what_fails_leaves_the_model_as_it_was(x: Tensor) -> None:
    plan = memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="0"),))
    model = memopt_cli.apply_plan(made(), plan)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(
        memopt_cli.errors.MemoptError,
        match=r"no plan found takes .*; the plan on the model takes about \S+ .iB\nRaise budget or level",
    ):
        memopt_cli.optimize(model, x, budget=300_000, level=1)
    assert memopt_cli.plan_of(model) == plan
    assert all(map(torch.equal, state.values(), model.state_dict().values()))


def test_a_closure_is_called_here_and_touches_nothing_of_the_model(x: Tensor) -> None:
    """A loss that reads the weights of the model itself would leave gradients on them."""
    model, target = made(), torch.zeros_like(x)
    mean_square(model(x)).backward()
    before = [p.grad for p in model.parameters() if p.grad is not None]
    kept = [gradient.clone() for gradient in before]
    found = memopt_cli.optimize(
        model,
        x,
        level=1,
        max_slowdown=math.inf,
        loss=lambda output: (output - target[: len(output)]).pow(2).mean() + sum(p.sum() for p in model.parameters()),
        optimizer=lambda copied: torch.optim.AdamW(copied.parameters(), amsgrad=True),
    )
    assert not found.plan.is_empty
    assert any("a subprocess cannot import the loss" in note for note in found.summary.notes)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    assert all(map(torch.equal, kept, before))


def test_a_loss_of_one_batch_size_is_said_to_be(x: Tensor) -> None:
    labels = torch.zeros(BATCH, dtype=torch.long)
    found = memopt_cli.optimize(
        made(), x, level=1, max_slowdown=math.inf, loss=lambda output: nn.functional.cross_entropy(output, labels)
    )
    assert found.summary.verification.batch == BATCH


@pytest.mark.usefixtures("in_process")
def test_a_loss_that_holds_its_targets_is_blamed_and_not_the_model(x: Tensor) -> None:
    labels = torch.zeros(BATCH, dtype=torch.long)

    def loss(output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels)

    with pytest.raises(StepError, match=f"as if the loss held {BATCH} targets: the loss failed") as caught:
        memopt_cli.recommend_batch(made(), x, memory="64MiB", longest_step=0.01, loss=loss)
    assert "targets[: len(output)]" in caught.value.hint


def test_a_batch_module_is_refused(x: Tensor) -> None:
    batched = memopt_cli.model_batching.BatchModule(made(), batch=2)
    for call in (memopt_cli.optimize, memopt_cli.frontier, memopt_cli.profile, memopt_cli.baseline):
        with pytest.raises(UsageError, match="is a BatchModule"):
            call(batched, x.expand(2, *x.shape))
    with pytest.raises(UsageError, match="is a BatchModule"):
        memopt_cli.recommend_batch(batched, x.expand(2, *x.shape))


@pytest.mark.parametrize(
    "name", ["optimize", "optimize_step", "frontier", "profile", "recommend_batch", "baseline", "check"]
)
def test_a_subprocess_has_the_time_that_is_given(
    name: str, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "check":
        memopt_cli.baseline(made(), x)

    def late(prepared: Prepared, data: str = "") -> Any:
        raise_failure(TimedOut(limit_s=prepared.timeout_s))

    monkeypatch.setattr(Prepared, "session", late)
    call = getattr(memopt_cli, name)
    with pytest.raises(MeasurementError) as error:
        call(made_step if name == "optimize_step" else made(), (x,), timeout=7)
    assert error.value.message.endswith("the step ran past its time limit of 7 s")
    assert error.value.hint == "Raise timeout, or give smaller inputs."


def made_step() -> memopt_cli.Step:
    model = made()
    return memopt_cli.Step(models={"model": model}, run=lambda x: mean_square(model(x)).backward())


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_as_the_plan_goes_on_leaves_the_other(
    error: type[BaseException], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="0"),), packed=True)
    model = memopt_cli.apply_plan(made(), plan)

    def fails(*given: Any) -> None:
        apply_plan(*given)
        raise error

    monkeypatch.setattr(live, "apply_plan", fails)
    with pytest.raises(error):
        memopt_cli.optimize(model, x, level=1, max_slowdown=math.inf)
    assert memopt_cli.plan_of(model) == plan


@pytest.mark.usefixtures("in_process")
def test_ctrl_c_in_a_search_applies_the_best_so_far(
    x: Tensor, answered: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    peaks: list[int] = []

    def count(session: LocalSession, job: CountJob, ask: Callable[[CountJob], Any]) -> Any:
        if peaks and peaks[-1] < peaks[0]:
            peaks.clear()
            raise KeyboardInterrupt
        found = ask(job)
        peaks.append(found.allocated_peak_bytes)
        return found

    answered(CountJob, count)
    model = made()
    found = memopt_cli.optimize(model, x, max_slowdown=math.inf)
    assert found.summary.interrupted
    assert found.plan == memopt_cli.plan_of(model) != memopt_cli.Plan()
    assert "Ctrl-C again: stop" in caplog.text


@pytest.mark.usefixtures("in_process")
def test_ctrl_c_in_the_verification_does_not_lose_the_plan(
    x: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verify, pressed = Prover.verify, list[Plan]()

    def press(prover: Prover, plan: Plan) -> Any:
        pressed.append(plan)
        if len(pressed) == 1:
            raise KeyboardInterrupt
        return verify(prover, plan)

    monkeypatch.setattr(Prover, "verify", press)
    model = made()
    found = memopt_cli.optimize(model, x, level=1, max_slowdown=math.inf)
    assert found.summary.interrupted
    assert found.summary.verification.passed
    assert found.plan == memopt_cli.plan_of(model) == pressed[0] != Plan()
    assert "Ctrl-C again: stop" in caplog.text


@pytest.mark.usefixtures("in_process")
def test_a_second_ctrl_c_in_the_verification_leaves_the_model(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(prover: Prover, plan: Plan) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Prover, "verify", press)
    model = made()
    with pytest.raises(KeyboardInterrupt):
        memopt_cli.optimize(model, x, level=1, max_slowdown=math.inf)
    assert memopt_cli.plan_of(model) == Plan()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("place", ["dry_run_ahead", "find"])
def test_ctrl_c_in_the_search_for_the_batch_ends_only_that(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In its dry runs, before the plan is verified, and in its runs, after that."""
    pressed: list[str] = []

    def press(search: BatchSearch) -> None:
        pressed.append(place)
        raise KeyboardInterrupt

    monkeypatch.setattr(BatchSearch, place, press)
    model = made()
    options: dict[str, Any] = {"level": 1, "max_slowdown": math.inf, "recommend_batch": True}
    found = memopt_cli.optimize(model, f"Bx{WIDTH}", dims={"B": BATCH}, **options)
    assert pressed == [place]
    assert found.summary.interrupted
    assert found.summary.advice is None
    assert found.plan == memopt_cli.plan_of(model) != Plan()
    assert "no batch is recommended" in caplog.text


def longer(block: nn.Module, x: Tensor) -> Tensor:
    return type(block).forward(block, x.sin().cos().exp())


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("kind", [types.MethodType, functools.partial])
def test_a_method_replaced_in_an_object_is_measured(kind: Callable[..., Any], x: Tensor) -> None:
    model = made()
    before = memopt_cli.profile(model, x).result
    model[3].forward = kind(longer, model[3])
    after = memopt_cli.profile(model, x).result
    assert after.tensor_peak_bytes > before.tensor_peak_bytes
    assert "Block.forward is replaced in an object" in after.notes[0]


@pytest.mark.parametrize("change", ["method", "allowed", "constant", "file", "loss"])
def test_code_that_differs_from_its_file_is_profiled_in_this_process(
    change: str, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is the model here: subprocesses would import the code on disk."""
    name = f"changed_{change}"
    file = tmp_path / f"{name}.py"
    source = (
        "from torch import nn\nREPEATS = 1\nSEEN = {}\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.linear = nn.Linear(32, 32)\n"
        "    def forward(self, x):\n        SEEN[len(x)] = x\n"
        "        for _ in range(REPEATS): x = self.linear(x).tanh()\n        return x\n"
        "def loss(output): return output.sum()\n"
    )
    file.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    model = module.Net()
    model(x)  # fills SEEN, which is no change of the code
    file.write_text(f"# the same code, two lines further down\n\n{source}")
    same = memopt_cli.profile(model, x, loss=module.loss).result
    assert same.notes == ()
    if change in ("method", "allowed"):
        monkeypatch.setattr(module.Net, "forward", lambda self, x: self.linear(x).sin().cos().exp().sin())
    elif change == "constant":
        monkeypatch.setattr(module, "REPEATS", 4)
    elif change == "file":
        file.write_text(source.replace("REPEATS = 1", "REPEATS = 9"))
    else:
        monkeypatch.setattr(module.loss, "__code__", (lambda output: output.exp().sin().sum()).__code__)
    with torch.serialization.safe_globals([module.Net] if change == "allowed" else []):
        allowed = torch.serialization.get_safe_globals()
        changed = memopt_cli.profile(model, x, loss=module.loss).result
        assert {*torch.serialization.get_safe_globals()} == {*allowed}
    differs = {"method": "Net.forward", "allowed": "Net.forward", "loss": "loss"}.get(change, "REPEATS")
    assert changed.notes == (
        f"Profiled in this process, without a time limit: {differs} in this process differs from the one in {name}.py.",
    )
    assert (changed.tensor_peak_bytes == same.tensor_peak_bytes) == (change == "file")
