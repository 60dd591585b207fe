"""A scripted history of one model: each commit's verdict, and what is said to explain it."""

from __future__ import annotations

import io
import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli import trace
from memopt_cli.errors import BaselineError
from memopt_cli.files.memopt_files import read_measured
from memopt_cli.inputs.spec_text import parse_limit, parse_tensor
from memopt_cli.measure.jobs import MeasureJob
from memopt_cli.measure.local import LocalSession
from memopt_cli.pipeline import baseline, check, compare_files, prepare
from memopt_cli.records import (
    Baseline,
    BaselineRequest,
    BaselineResult,
    CheckRequest,
    Comparison,
    CompilePlan,
    InputDimension,
    InputSpec,
    ModelSource,
    Plan,
    PlanChange,
    PlanRange,
    SegmentPlan,
    StepSettings,
    Trust,
    to_data,
)
from memopt_cli.records.plan_file import plan_yaml
from memopt_cli.records.progress import Progress
from memopt_cli.report.comparison import reasons
from memopt_cli.report.text import TextReport
from memopt_cli.search.plan.policy import resolve
from memopt_cli.training.apply import apply_plan

pytestmark = pytest.mark.usefixtures("in_process")

BATCH = 512
PLAN = Plan(segments=(SegmentPlan(path="features.0"), SegmentPlan(path="features.1")))


def block(width: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(widen=nn.Linear(128, width), act=nn.Tanh(), narrow=nn.Linear(width, 128)))


def model(*, width: int = 256, features: str = "features") -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(block(256), block(width), block(256))
    return nn.Sequential(OrderedDict([(features, body), ("head", nn.Linear(128, 4))]))


def with_buffer() -> nn.Module:
    changed = model()
    changed.get_submodule("features.1").register_buffer("window", torch.zeros(1000))
    return changed


COMMITS: dict[str, Callable[[], nn.Module]] = {
    "as it was": model,
    "under a plan": lambda: apply_plan(model(), PLAN),
    "widened": lambda: model(width=384),
    "buffer": with_buffer,
    "renamed": lambda: model(features="backbone"),
}


class History:
    """One folder: ``model.pt`` as of the latest commit, and a baseline."""

    def __init__(self, folder: Path) -> None:
        self.model, self.baseline = str(folder / "model.pt"), str(folder / "baseline.json")

    def commit(self, name: str) -> None:
        torch.save(COMMITS[name](), self.model)

    def record(self, spec: str = f"{BATCH}x128", **request: Any) -> Baseline:
        return self.recorded(spec, **request).baseline

    def recorded(self, spec: str, dims: dict[str, int] | None = None, **request: Any) -> BaselineResult:
        made = BaselineRequest(
            source=ModelSource(location=self.model),
            spec=InputSpec(tensors=(parse_tensor(spec),), dims=dims or {}, source="here"),
            output=self.baseline,
            **request,
        )
        return baseline(made, progress=Progress(), ask=None)

    def check(self, *limits: str, **request: Any) -> Comparison:
        made = CheckRequest(
            source=request.pop("source", ModelSource(location=self.model)),
            baseline_path=self.baseline,
            limits=tuple(map(parse_limit, limits or ("peak:0",))),
            **request,
        )
        return check(made, progress=Progress(), ask=None)

    def rewrite(self, **changes: Any) -> None:
        """Put other values into the baseline; ``conditions__backend`` is inside of ``conditions``."""
        data = json.loads(Path(self.baseline).read_text())
        for key, value in changes.items():
            *outer, name = key.split("__")
            (data[outer[0]] if outer else data)[name] = value
        Path(self.baseline).write_text(json.dumps(data))


@pytest.fixture
def history(tmp_path: Path) -> History:
    made = History(tmp_path)
    made.commit("as it was")
    return made


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Where the model as it was is recorded; once for all tests."""
    made = History(tmp_path_factory.mktemp("first"))
    made.commit("as it was")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "Session", LocalSession)
        made.record()
    return made


@pytest.fixture
def recorded(first: History, history: History) -> Baseline:
    """The model as it was, and the baseline that was recorded of it."""
    shutil.copy(first.model, history.model)
    shutil.copy(first.baseline, history.baseline)
    history.rewrite(model=history.model)
    return read_measured(history.baseline)


def change_of(found: Comparison, metric: str) -> float:
    return next(change.after - change.before for change in found.changes if change.metric == metric)


@pytest.mark.slow
def test_a_baseline_adds_up_and_reads_back(history: History) -> None:
    made = history.record()
    assert read_measured(history.baseline) == made
    memory = made.memory
    held = sum(sum(module.held_bytes.values()) for module in memory.modules)
    assert held == memory.tensor_peak_bytes <= memory.allocated_peak_bytes
    assert memory.breakdown.parameters_bytes == sum(m.held_bytes.get("parameters", 0) for m in memory.modules)
    assert memory.breakdown.activations_bytes == sum(m.held_bytes.get("activations", 0) for m in memory.modules)
    assert memory.saved[0].nbytes == BATCH * 256 * 4
    assert memory.peak.phase == "backward"
    assert made.header.sha256


@pytest.mark.slow
def test_nothing_is_timed_that_no_baseline_says(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("time_operators", "packing_bytes_per_s", "segment_overhead"):
        monkeypatch.setattr(trace, name, never)
    history.record()
    assert not history.check().exceeded


@pytest.mark.slow
def test_nothing_changed_twice(history: History, recorded: Baseline) -> None:
    for _ in range(2):
        found = history.check(*(f"{metric}:0" for metric in ("peak", "activations", "parameters", "temporaries")))
        assert not found.exceeded
        assert found.changes[0].after == recorded.memory.tensor_peak_bytes
        assert (found.modules, found.new_saved, found.renames, found.plan) == ((), (), (), PlanChange())
        assert not found.peak_moved


@pytest.mark.slow
def test_a_layer_is_widened(history: History, recorded: Baseline) -> None:
    history.commit("widened")
    found = history.check()
    assert len(found.exceeded) == 1
    added = 128 * (128 + 128 + 1) * 4  # 128 more columns of two weights, and of one bias
    assert change_of(found, "parameters") == added
    assert {m.path: m.growth_bytes["parameters"] for m in found.modules if "parameters" in m.growth_bytes} == {
        "features.1.widen": 128 * 129 * 4,
        "features.1.narrow": 128 * 128 * 4,
    }
    grown = [(growth.before_bytes, growth.saved.nbytes, growth.saved.module) for growth in found.grown_saved]
    assert (found.new_saved, grown) == ((), [(BATCH * 256 * 4, BATCH * 384 * 4, "features.1.act")])
    assert not found.renames
    said = list(reasons(found))
    assert any(line.startswith("parameters changed: features.1.widen (Linear) +64.5 KiB") for line in said)
    assert any(line.startswith("larger among the tensors kept for backward: ") for line in said)
    assert not any("model file is the same" in line for line in said)


@pytest.mark.slow
def test_a_plan_is_dropped(history: History) -> None:
    history.commit("under a plan")
    assert history.record().memory.plan.segments == PLAN.segments
    assert not history.check().exceeded
    history.commit("as it was")
    found = history.check()
    assert len(found.exceeded) == 1
    assert found.plan == PlanChange(dropped=("features.0", "features.1"))
    assert change_of(found, "parameters") == 0
    assert change_of(found, "activations") > 0
    assert {saved.module.rpartition(".")[0] for saved in found.new_saved} <= {"features.0", "features.1"}
    assert "plan: 2 segments dropped (features.0, features.1)" in reasons(found)


@pytest.mark.slow
def test_a_plan_from_a_file_counts_as_one_that_is_carried(history: History, tmp_path: Path) -> None:
    history.commit("under a plan")
    recorded = history.record()
    history.commit("as it was")
    plan = tmp_path / "plan.yaml"
    header = json.loads(Path(history.baseline).read_text())
    header = {key: header[key] for key in header if key not in ("conditions", "memory")}
    plan.write_text(json.dumps({**header, "level": 1, "segments": [{"path": s.path} for s in PLAN.segments]}))
    found = history.check(plan_path=str(plan))
    assert not found.exceeded
    assert found.changes[0].after == recorded.memory.tensor_peak_bytes


@pytest.mark.slow
def test_a_plan_that_only_one_command_names_is_not_comparable(
    history: History, recorded: Baseline, tmp_path: Path
) -> None:
    plan = tmp_path / "my plan.yaml"
    plan.write_bytes(plan_yaml(recorded.header, PLAN, 1))
    planned = history.record(plan_path=str(plan), force=True)
    assert read_measured(history.baseline) == planned
    assert not history.check(plan_path=str(plan)).exceeded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memopt_cli.pipeline.comparisons.regression._CheckedStep.session", never)
        with pytest.raises(BaselineError, match="recorded under a plan of 2 segments, and this step has no") as said:
            history.check()
        assert said.value.hint.startswith(f"Add the plan: `--plan '{plan}'`.\n")
        history.rewrite(plan_path="", memory__plan=to_data(Plan()))
        with pytest.raises(BaselineError, match="recorded without a plan, and this step has a plan of 2 segments"):
            history.check(plan_path=str(plan))


def never(*_: object, **__: object) -> None:
    raise AssertionError("it is measured")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "request_", "said"),
    [
        ({"conditions__backend": ["other"]}, {}, "backend: other in the baseline, mkldnn now"),
        ({"schema_version": 99}, {}, "its schema_version is 99"),
        ({"unheard_of": 1}, {}, "unheard_of"),
        ({}, {"precision": "bf16"}, "precision: stored in the baseline, bf16 now"),
        ({}, {"optimizer": "adamw"}, "optimizer: none in the baseline, adamw now"),
        ({}, {"loss": "l.py:f"}, "loss: default in the baseline, l.py:f now"),
        ({}, {"seed": 3}, "seed: 0 in the baseline, 3 now"),
        ({}, {"spec": InputSpec(tensors=(parse_tensor("9x128"),), source="here")}, "inputs: 512x128 .*, 9x128 now"),
    ],
)
def test_another_baseline_or_step_is_not_comparable(
    changes: dict[str, Any],
    request_: dict[str, Any],
    said: str,
    history: History,
    recorded: Baseline,
    answered: Callable[..., None],
) -> None:
    history.rewrite(**changes)
    answered(MeasureJob, never)
    with pytest.raises(BaselineError, match=said) as caught:
        history.check(**request_)
    assert "memopt baseline" in caught.value.hint


class Other(nn.Sequential):
    """A model of another class."""


def test_a_baseline_of_another_model_is_not_comparable(
    history: History, recorded: Baseline, answered: Callable[..., None]
) -> None:
    history.model = str(Path(history.model).with_name("other.pt"))
    torch.save(Other(nn.Linear(128, 128), nn.Tanh()), history.model)
    answered(MeasureJob, never)
    with pytest.raises(
        BaselineError, match=r"a different model, Sequential of .*model\.pt; .*other\.pt holds Other"
    ) as caught:
        history.check(source=trusted(history))
    assert "memopt baseline" in caught.value.hint


@pytest.mark.slow
def test_a_model_may_change_its_file_or_its_class(history: History, recorded: Baseline) -> None:
    torch.save(Other(OrderedDict(model().named_children())), history.model)
    assert not history.check(source=trusted(history)).exceeded
    history.model = str(Path(history.model).with_name("other.pt"))
    history.commit("as it was")
    found = history.check()
    assert not found.exceeded
    assert any(line.startswith("another file than before: ") for line in reasons(found))


def trusted(history: History) -> ModelSource:
    return ModelSource(location=history.model, trust=Trust(packages=(__name__.partition(".")[0],)))


@pytest.mark.slow
def test_a_backend_that_is_switched_off_is_another(tmp_path: Path) -> None:
    """That it matters: an LSTM's tensor peak is another one without oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this PyTorch has no oneDNN")
    history = History(tmp_path)
    torch.save(nn.LSTM(128, 32), history.model)
    recorded = history.record("8x128")
    with torch.backends.mkldnn.flags(enabled=False):
        with pytest.raises(BaselineError, match="backend: mkldnn in the baseline, none now"):
            history.check()
        other = history.record("8x128", force=True)
    assert other.memory.tensor_peak_bytes < recorded.memory.tensor_peak_bytes


@pytest.mark.slow
def test_the_step_is_the_baselines_unless_said_otherwise(history: History) -> None:
    history.record(settings=StepSettings(precision="fp64", optimizer="sgd", seed=5))
    found = history.check(precision="fp64", device="cpu")
    assert not found.exceeded
    assert found.after.seed == 5
    assert change_of(found, "optimizer") == 0
    assert found.changes[7].metric == "gradients"


def test_no_gpu_for_a_baseline_of_one(history: History, recorded: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads(Path(history.baseline).read_text())
    data["conditions"]["settings"]["device"] = data["device"] = "cuda:0"
    Path(history.baseline).write_text(json.dumps(data))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BaselineError, match="recorded on cuda:0, and PyTorch sees no CUDA device"):
        history.check()
    with pytest.raises(BaselineError, match="device kind: cuda in the baseline, cpu now"):
        history.check(device="cpu")


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", "no json", '{"schema_version": 1}', "\x00\xff"])
def test_no_baseline_is_never_green(content: str | None, history: History, answered: Callable[..., None]) -> None:
    if content is not None:
        Path(history.baseline).write_text(content)
    answered(MeasureJob, never)
    with pytest.raises(BaselineError, match="there is no baseline at" if content is None else "is not a baseline: "):
        history.check()


def test_a_broken_baseline_may_be_replaced_and_no_other_file(history: History, recorded: Baseline) -> None:
    file = Path(history.baseline)
    file.write_text(f"<<<<<<< HEAD\n{file.read_text()}=======\n")
    with pytest.raises(BaselineError, match="is not a baseline: it has a merge conflict\n") as raised:
        history.check()
    assert f"-o {file} --force`. Add the flags of the step" in raised.value.hint
    file.write_text("{}")
    with pytest.raises(BaselineError, match="is not a baseline") as raised:
        history.check()
    assert raised.value.hint.endswith("-o FILE`.")


@pytest.mark.slow
def test_a_summary_is_no_baseline_but_can_be_compared(history: History, recorded: Baseline, tmp_path: Path) -> None:
    from memopt_cli.pipeline import optimize
    from memopt_cli.records import OptimizeRequest, SearchOverrides

    spec = InputSpec(tensors=(parse_tensor(f"{BATCH}x128"),), source="here")
    made = OptimizeRequest(
        source=ModelSource(location=history.model),
        spec=spec,
        search=resolve(SearchOverrides(level=0)),
        recommend_batch=False,
    )
    optimize(made, progress=Progress(), ask=None)
    summary = str(tmp_path / "model.memopt.summary.json")
    found = compare_files(summary, history.baseline)
    assert found.changes[0].before == found.changes[0].after == recorded.memory.tensor_peak_bytes
    assert (found.modules, found.unlike) == ((), ())
    history.baseline = summary
    with pytest.raises(BaselineError, match="is a summary"):
        history.check()


BY = InputDimension(dim="S", argument=0, axis=1)
BY_LENGTH = Plan(by=BY, ranges=(PlanRange(up_to=16), PlanRange(up_to=64, segments=PLAN.segments)))


@pytest.mark.slow
def test_a_plan_by_length_is_held_at_the_end_of_every_range(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMITS, "by length", lambda: apply_plan(model(), BY_LENGTH))
    wider = replace(BY_LENGTH, ranges=(PlanRange(up_to=32), *BY_LENGTH.ranges[1:]))
    monkeypatch.setitem(COMMITS, "other bounds", lambda: apply_plan(model(), wider))
    history.commit("by length")
    recorded = history.record("BxSx128", dims={"B": 8, "S": 64})
    assert read_measured(history.baseline) == recorded
    assert [step.name for step in recorded.shorter] == ["S=16"]
    (short,) = recorded.shorter
    assert short.memory.plan == Plan()
    assert 0 < short.memory.tensor_peak_bytes < recorded.memory.tensor_peak_bytes
    assert [part.at for part in history.check().parts] == ["", "S=16"]

    history.commit("other bounds")  # both lengths that the baseline has are as they were
    assert not history.check().exceeded
    data = json.loads(Path(history.baseline).read_text())
    memory = data["shorter"][0]["memory"]
    memory["tensor_peak_bytes"] -= 1
    memory["breakdown"]["inputs_bytes"] -= 1
    Path(history.baseline).write_text(json.dumps(data))
    assert [(verdict.at, verdict.limit.text) for verdict in history.check().exceeded] == [("S=16", "peak:0")]

    same = InputSpec(tensors=(parse_tensor("8x64x128"),), source="here")
    with pytest.raises(BaselineError, match="it also has a step at S=16, but the inputs name no S"):
        history.check(spec=same)
    (step,) = data["shorter"]
    for sizes in ([-1], [0], [64], [10**12], [16, 16], [32, 16]):  # each would be run
        Path(history.baseline).write_text(json.dumps(data | {"shorter": [step | {"size": size} for size in sizes]}))
        with pytest.raises(
            BaselineError, match="the sizes of its shorter steps do not ascend to the size of its inputs"
        ):
            history.check()
    data["spec"]["dims"]["S"] = 1000
    data["shorter"] = [step | {"size": size} for size in range(1, 102)]
    Path(history.baseline).write_text(json.dumps(data))
    with pytest.raises(BaselineError, match="it has 101 shorter steps; memopt compares at most 100"):
        history.check()


@pytest.mark.slow
def test_only_lengths_that_inputs_have_are_recorded(history: History, recorded: Baseline, tmp_path: Path) -> None:
    plan = tmp_path / "net.plan.yaml"
    plan.write_bytes(plan_yaml(recorded.header, BY_LENGTH, 1))
    cases = {
        "BxSx128": ({"B": 8, "S": 12}, "Nothing is recorded beyond S=12, and the plan goes up to 64."),
        "8x64x128": ({}, "The plan has ranges of S, and no input names S, so only the length of these inputs"),
    }
    for spec, (dims, said) in cases.items():
        found = history.recorded(spec, dims=dims, plan_path=str(plan), force=True)
        assert found.baseline.shorter == ()
        (note,) = (note for note in found.notes if note.startswith(said))
        stream = io.StringIO()
        TextReport().show(found, stream)
        assert note in " ".join(stream.getvalue().split())


@pytest.mark.slow
def test_a_compiled_step_is_compared_with_a_compiled_one(history: History, recorded: Baseline, tmp_path: Path) -> None:
    """Of which only the allocator sees the tensors, so that its peak is another metric."""
    plan = tmp_path / "net.plan.yaml"
    plan.write_bytes(plan_yaml(recorded.header, replace(PLAN, compile=CompilePlan(backend="aot_eager")), 1))
    with pytest.raises(BaselineError, match="compiler: none in the baseline, aot_eager now"):
        history.check(plan_path=str(plan))
    found = history.record(plan_path=str(plan), force=True)
    assert found.memory.tensor_peak_bytes == found.memory.allocated_peak_bytes < recorded.memory.allocated_peak_bytes
    assert not history.check("peak:1%", plan_path=str(plan)).exceeded
    with pytest.raises(BaselineError, match="compiler: aot_eager in the baseline, none now") as said:
        history.check()
    assert said.value.exit_code == 5
