"""Plans and other files that read back as they were written."""

import io
import json
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from memopt_cli.errors import BaselineError, UsageError
from memopt_cli.files.memopt_files import batch_yaml, read_measured, read_plan, recommended_data, summary_json
from memopt_cli.inputs.spec_text import INPUT_DTYPES
from memopt_cli.records import (
    BatchAdvice,
    BatchEstimate,
    BatchProbe,
    CompressorName,
    FileHeader,
    InputSpec,
    MemOptSummary,
    PlaceName,
    Plan,
    SegmentPlan,
    TensorSpec,
)
from memopt_cli.records.plan_file import plan_yaml
from tests.zoo.records import a_header, verified

HEADER = a_header(
    sha256="ab" * 32, spec=InputSpec(tensors=(TensorSpec(shape=("B", 3)),), dims={"B": 8}, source="--input")
)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
segments = st.builds(
    SegmentPlan,
    path=text,
    compressor=st.sampled_from(get_args(CompressorName)),
    chunks=st.integers(1, 100),
    axis=st.integers(-3, 3),
    seq_inputs=st.integers(0, 3),
    seq_outputs=st.integers(0, 3),
    spatial_split=st.booleans(),
    keep=st.lists(text, max_size=2).map(tuple),
    batch_statistics=st.booleans(),
    through_loss=st.booleans(),
    inexact=st.booleans(),
    recompute_states=st.booleans(),
    compared=text,
    place=st.sampled_from(get_args(PlaceName)),
)
plans = st.builds(
    Plan,
    segments=st.lists(segments, max_size=5).map(tuple),
    packed=st.booleans(),
    place=st.sampled_from(get_args(PlaceName)),
)
words = text.filter(str.isidentifier)
tensors = st.builds(
    TensorSpec,
    name=st.none() | words,
    shape=st.lists(st.integers(0, 9) | words, max_size=4).map(tuple),
    dtype=st.sampled_from(INPUT_DTYPES),
    values=st.sampled_from(["zeros", "ones", "spikes:0.25", "0..2"]),
)
sizes = st.dictionaries(words, st.integers(0, 2**13), max_size=3)
headers = st.builds(
    FileHeader,
    schema_version=st.sampled_from([1, 2, 3]),
    memopt=text,
    torch=text,
    model=text,
    sha256=st.none() | text,
    spec=st.one_of(
        st.builds(InputSpec, dims=sizes, source=text, **{way: values})
        for way, values in {
            "tensors": st.lists(tensors, max_size=3).map(tuple),
            "data_file": st.none() | text,
            "script": st.none() | text,
        }.items()
    ),
    seed=st.integers(0, 2**62),
    device=text,
)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans") / "a.plan.yaml"


@pytest.mark.slow
@given(header=headers, plan=plans)
def test_reading_a_written_plan_is_the_identity(header: FileHeader, plan: Plan, plan_file: Path) -> None:
    plan_file.write_bytes(plan_yaml(header, plan, 3))
    assert read_plan(plan_file) == (header, plan)


@pytest.mark.parametrize("name", [f.name for f in fields(SegmentPlan)])
def test_every_field_of_a_segment_is_written_and_generated(name: str) -> None:
    """Or the identity above would hold of a field that is never anything but its default."""
    any_will_do = settings(phases=[Phase.generate], deadline=None)
    other = find(
        segments, lambda segment: getattr(segment, name) != getattr(SegmentPlan(path=""), name), settings=any_will_do
    )
    assert f"{name}:" in plan_yaml(HEADER, Plan(segments=(other,)), 3).decode()


@given(data=st.binary(max_size=80) | st.text("{}[]:-&*!|>?%@`'\" \n\tab1.0", max_size=60).map(str.encode))
def test_any_bytes_are_a_plan_or_a_usage_error(data: bytes, plan_file: Path) -> None:
    plan_file.write_bytes(data)
    with pytest.raises(UsageError):
        read_plan(plan_file)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.dates() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | st.integers(), inner, max_size=3),
    max_leaves=5,
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every container in plain values, with every key or index that it has."""
    keys = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    return [(data, key) for key in keys] + [place for key in keys for place in places(data[key])]


@pytest.mark.slow
@given(draw=st.data(), value=values)
def test_a_plan_with_any_value_anywhere_is_a_plan_or_a_usage_error(
    draw: st.DataObject, value: Any, plan_file: Path
) -> None:
    data = yaml.safe_load(PLAN_TEXT)
    container, key = draw.draw(st.sampled_from(range(len(places(data)))).map(lambda i: places(data)[i]))
    if draw.draw(st.booleans()) and isinstance(container, dict):
        container[draw.draw(text)] = container.pop(key)
    else:
        container[key] = value
    plan_file.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    with suppress(UsageError):  # it may still be a plan
        header, plan = read_plan(plan_file)
        plan_file.write_bytes(plan_yaml(header, plan, 3))
        assert read_plan(plan_file) == (header, plan)


def test_line_breaks_in_names_are_kept(tmp_path: Path) -> None:
    header = replace(HEADER, model="a\n \x85'\u2028 \u2029\r\n\ufeff: b.pt")
    (tmp_path / "p.yaml").write_bytes(plan_yaml(header, PLAN, 3))
    assert read_plan(tmp_path / "p.yaml") == (header, PLAN)


PLAN = Plan(segments=(SegmentPlan(path="features.0", compressor="bit"), SegmentPlan(path="head", chunks=4)))

VERSION_1 = Path(__file__).parents[1] / "written_by_version_1"

PLAN_TEXT = f"""\
schema_version: 3
memopt: 0.1.0
torch: 2.13.0
model: model.pt
sha256: {"ab" * 32}
spec:
  tensors:
  - shape: [B, 3]
  dims: {{B: 8}}
  source: --input
seed: 0
device: cpu
level: 3
segments:
- {{path: features.0, compressor: bit}}
- {{path: head, chunks: 4}}
"""


def test_a_plan_is_small_and_readable() -> None:
    assert plan_yaml(HEADER, PLAN, 3).decode() == PLAN_TEXT


def test_a_plan_says_where_tensors_wait(tmp_path: Path) -> None:
    plan = Plan(place="disk", segments=(SegmentPlan(path="head", place="host"), SegmentPlan(path="features")))
    text = plan_yaml(HEADER, plan, 4)
    assert b"\nplace: disk\n" in text
    assert b"\n- {path: head, place: host}\n- {path: features}\n" in text
    (tmp_path / "p.yaml").write_bytes(text)
    assert read_plan(tmp_path / "p.yaml") == (HEADER, plan)


def test_a_plan_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PLAN_TEXT.replace("schema_version: 3", "schema_version: 2"))
    assert read_plan(tmp_path / "p.yaml") == (replace(HEADER, schema_version=2), PLAN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema_version: 3", "schema_version: 4", "reads up to 3"),
        ("schema_version: 3", "schema_version: true", "not a plan"),
        ("schema_version: 3\n", "", "not a plan"),
        ("chunks: 4", "place: cloud", r"place is 'cloud'"),
        ("level: 3", "levle: 3", "unknown key 'levle'"),
        ("path: head", "path: 22", r"segments\[1\].path must be text, not 22\nYAML takes .*: write it in quotes"),
        ("chunks: 4", "chunk: 4", "unknown key 'chunk'"),
        ("compressor: bit", "compressor: zip", "compressor is 'zip'"),
        ("segments:\n", "segments: 3\nx:\n", "unknown key 'x'"),
        ("seed: 0", "seed: &a [*a]", "alias"),
        ("seed: 0", "seed: " + "[" * 5000, "not valid YAML"),
        ("seed: 0", "seed: 0\n# " + "\n" * 60_000, "far more values than any memopt file"),
        ("seed: 0", "seed: !!timestamp x", "not valid YAML"),
        ("seed: 0", "seed: !!python/object/apply:os.system [ls]", "not valid YAML"),
    ],
)
def test_a_wrong_plan_says_where(old: str, new: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PLAN_TEXT.replace(old, new))
    with pytest.raises(UsageError, match=said) as caught:
        read_plan(tmp_path / "p.yaml")
    assert "p.yaml" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_key_that_no_plan_has_is_told_with_all_that_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(f"{PLAN_TEXT}extra: 1\n")
    with pytest.raises(UsageError, match="unknown key 'extra'") as caught:
        read_plan(tmp_path / "p.yaml")
    keys = caught.value.hint.removeprefix("Known keys: ").removesuffix(".").split(", ")
    header = (field.name for field in fields(FileHeader))
    assert keys == [*header, "level", *(field.name for field in fields(Plan)), "predicted", "parallel", "turns_off"]


def test_a_plan_of_version_1_is_read() -> None:
    header, plan = read_plan(VERSION_1 / "net.memopt.plan.yaml")
    assert header.schema_version == 1
    assert plan == Plan(segments=(SegmentPlan(path="0", chunks=4),))


@pytest.mark.parametrize("name", ["net.memopt.summary.json", "memopt-baseline.json"])
def test_a_measured_step_of_version_1_is_read(name: str) -> None:
    found = read_measured(VERSION_1 / name)
    assert found.header.schema_version == 1
    assert found.memory.plan == Plan()
    assert found.memory.tensor_peak_bytes == 74160


def test_a_key_that_went_with_version_1_may_not_come_with_version_2(tmp_path: Path) -> None:
    text = (VERSION_1 / "memopt-baseline.json").read_text()
    (tmp_path / "b.json").write_text(text.replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(BaselineError, match="unknown key 'accumulates'"):
        read_measured(tmp_path / "b.json")


def test_summary_is_json_whatever_it_holds() -> None:
    failed = verified(passed=False, worst_name="fc.weight", worst_difference=float("nan"))
    summary = replace(MemOptSummary(None, None, None, "cpu", 3, 3, True, True), verification=failed)
    data = json.load(io.BytesIO(summary_json(HEADER, summary)), parse_constant=pytest.fail)
    assert data["schema_version"] == 3
    assert data["summary"]["verification"]["worst_difference"] is None


def test_files_name_options_as_they_are_typed() -> None:
    summary = replace(MemOptSummary(None, None, None, "cpu", 3, 3, True, True), notes=["Raise `--level`, or `make`."])
    assert json.loads(summary_json(HEADER, summary))["summary"]["notes"] == ["Raise --level, or `make`."]
    advice = replace(ADVICE, limited_by="`--memory 5MiB`")
    assert recommended_data(advice, 4)["limited_by"] == "--memory 5MiB"


ADVICE = BatchAdvice(
    recommended_batch=16,
    fastest_batch=8,
    estimated_batch=52,
    probes=(BatchProbe(batch=4, allocated_peak_bytes=1000, step_s=0.5),),
    intercept_bytes=200.0,
    slope_bytes=200.0,
    budget_bytes=8000,
    device_bytes=10000,
    limited_by="the time limit of a run",
)


def test_batch_configuration() -> None:
    text = batch_yaml(HEADER, shaping={"validation": {"strict_mode": True}}, recommended=recommended_data(ADVICE, 4))
    data = yaml.safe_load(text)
    assert next(iter(data)) == "schema_version"
    assert list(data)[-2:] == ["batch_shaping", "recommended"]
    assert data["batch_shaping"] == {"validation": {"strict_mode": True}}
    assert data["recommended"]["batch_size"] == 16
    assert data["recommended"]["fastest_batch_size"] == 8
    assert data["recommended"]["estimated_batch_size"] == 52
    assert data["recommended"]["peak_fit"] == {"intercept_bytes": 200.0, "bytes_per_sample": 200.0}


@pytest.mark.parametrize(("is_limited", "batch"), [(True, 37), (False, 8)])
def test_a_batch_of_dry_runs_is_written_as_one_that_was_not_run(is_limited: bool, batch: int) -> None:
    found = BatchEstimate(batch=37, predicted_peak_bytes=7, budget_bytes=9, is_limited_by_memory=is_limited)
    data = recommended_data(found, 8)
    assert data["limited_by"].startswith("memory" if is_limited else "the given batch: about 37 is predicted to fit")
    assert (data["batch_size"], data["verified"]) == (batch, not is_limited)
    assert data["estimated_batch_size"] == 37


def test_a_baseline_of_modules_within_each_other_without_end_is_refused(tmp_path: Path) -> None:
    data = json.loads((VERSION_1 / "memopt-baseline.json").read_text())
    data["memory"]["modules"] = [
        {"path": ".".join("a" * 300), "class_name": "Linear", "output_bytes": 1, "held_bytes": {}}
    ]
    (tmp_path / "b.json").write_text(json.dumps(data))
    with pytest.raises(BaselineError, match="nested 299 levels deep"):
        read_measured(tmp_path / "b.json")


def test_a_plan_in_memory_is_saved_and_read_again(tmp_path: Path) -> None:
    plan = Plan(segments=(SegmentPlan(path="body.0", keep=("aten::convolution",)),), packed=True)
    path = tmp_path / "net.plan.yaml"
    plan.save(path)
    header, read = read_plan(path)
    assert read == plan
    assert not header.spec.has_inputs
    assert "level" not in path.read_text()


def test_saving_a_plan_replaces_a_file_only_if_told_to(tmp_path: Path) -> None:
    path = tmp_path / "net.plan.yaml"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists") as caught:
        Plan(packed=True).save(str(path))
    assert "force=True" in caught.value.hint
    assert path.read_text() == "mine"
    Plan(packed=True).save(str(path), force=True)
    assert read_plan(path)[1] == Plan(packed=True)


@pytest.mark.parametrize("count", [20_000, 40_000])
def test_a_plan_that_could_not_be_read_again_is_not_saved(count: int, tmp_path: Path) -> None:
    """Too many segments, and too many bytes."""
    path = tmp_path / "net.plan.yaml"
    segments = tuple(SegmentPlan(path=f"layers.{i}.self_attention.q_proj") for i in range(count))
    with pytest.raises(UsageError, match="the plan is not saved"):
        Plan(segments=segments).save(path)
    assert not path.exists()
    few = Plan(segments=segments[:1000])
    few.save(path)
    assert read_plan(path)[1] == few
