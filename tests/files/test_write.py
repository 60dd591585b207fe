"""All files or none; and plans that read back as they were written."""

import errno
import io
import json
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, BinaryIO, get_args

import pytest
import yaml
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from memopt_cli.errors import BaselineError, UsageError, WriteError
from memopt_cli.files import write
from memopt_cli.files.contents import batch_yaml, plan_yaml, read_measured, read_plan, recommended_data, summary_json
from memopt_cli.files.write import check_targets, content, output_paths, pair_paths, write_all
from memopt_cli.inputs.spec_text import DTYPES
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
from tests.zoo.records import a_header, verified

HEADER = a_header(
    sha256="ab" * 32, spec=InputSpec(tensors=(TensorSpec(shape=("B", 3)),), dims={"B": 8}, source="--input")
)


# ---------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("location", "output", "names"),
    [
        ("d/model.pt", None, "d/model.memopt.pt d/model.memopt.summary.json d/model.memopt.plan.yaml"),
        ("net.v2.pth", None, "net.v2.memopt.pt net.v2.memopt.summary.json net.v2.memopt.plan.yaml"),
        ("model.pt", "o/x.pt", "o/x.pt o/x.summary.json o/x.plan.yaml"),
        ("model.pt", "x", "x x.summary.json x.plan.yaml"),
        ("sample_models.gpt:build", None, "gpt.memopt.pt gpt.memopt.summary.json gpt.memopt.plan.yaml"),
        ("gpt:Models.small", None, "gpt.memopt.pt gpt.memopt.summary.json gpt.memopt.plan.yaml"),
    ],
)
def test_output_paths(location: str, output: str | None, names: str) -> None:
    paths = output_paths(location, output)
    assert [str(path) for path in (paths.model, paths.summary, paths.plan)] == names.split()
    assert str(paths.batch) == str(paths.plan).replace(".plan.", ".batch.")
    assert paths.all() == (paths.model, paths.summary, paths.plan, paths.batch)


@pytest.mark.parametrize("output", ["", ".", "/"])
@pytest.mark.parametrize("paths", [output_paths, pair_paths])
def test_an_output_that_names_no_file(output: str, paths: Callable[[str, str], object]) -> None:
    with pytest.raises(UsageError, match="does not name a file"):
        paths("model.pt", output)


def test_an_output_over_the_model(tmp_path: Path) -> None:
    model = tmp_path / "net.pt"
    model.touch()
    (tmp_path / "link.pt").symlink_to(model)
    for output in (model, tmp_path / "link.pt"):
        for paths in (output_paths, pair_paths):
            with pytest.raises(UsageError, match="is the model itself"):
                paths(str(model), str(output))
        with pytest.raises(UsageError, match="is the model itself"):
            check_targets([output], force=True, model=str(model))


def test_an_output_over_the_script_that_builds_the_model(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(UsageError, match="is the model itself"):
        output_paths(f"{script}:build", str(script))
    with pytest.raises(UsageError, match="is the model itself"):
        check_targets([script], force=True, model=f"{script}:build")


# ---------------------------------------------------------------------------------------------- to the disk


def failing(err: BaseException) -> Callable[[BinaryIO], object]:
    def fill(file: BinaryIO) -> None:
        file.write(b"half of it")
        raise err

    return fill


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_writes_all(tmp_path: Path) -> None:
    files = write_all({tmp_path / "a": content(b"1"), tmp_path / "b": content(b"2")}, force=False)
    assert files == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert listing(tmp_path) == {"a": b"1", "b": b"2"}


def test_files_have_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "usual").write_bytes(b"")
    write_all({tmp_path / "a": content(b"1")}, force=False)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_existing_file_needs_force(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"old")
    files = {tmp_path / "a": content(b"1"), tmp_path / "b": content(b"2")}
    with pytest.raises(UsageError, match=r"b exists") as caught:
        write_all(files, force=False)
    assert "--force" in caught.value.hint
    assert listing(tmp_path) == {"b": b"old"}
    write_all(files, force=True)
    assert listing(tmp_path) == {"a": b"1", "b": b"2"}


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def fill(file: BinaryIO) -> None:
        (tmp_path / "a").write_bytes(b"theirs")

    with pytest.raises(UsageError):
        write_all({tmp_path / "a": fill}, force=False)
    assert listing(tmp_path) == {"a": b"theirs"}


@pytest.mark.parametrize(
    "err", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError("x")]
)
def test_failure_while_filling_leaves_nothing(err: BaseException, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(WriteError if isinstance(err, OSError) else type(err)):
        write_all({tmp_path / "a": content(b"new"), tmp_path / "b": failing(err)}, force=True)
    assert listing(tmp_path) == {"a": b"old"}


def test_disk_full_under_another_exception(tmp_path: Path) -> None:
    """``torch.save`` raises a RuntimeError while it handles the OSError of the file."""

    def fill(file: BinaryIO) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 1472 vs 1366")

    with pytest.raises(WriteError, match="No space left on device"):
        write_all({tmp_path / "a": fill}, force=False)
    assert listing(tmp_path) == {}


def test_a_disk_that_is_really_full(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode: open_file("/dev/full", os.O_WRONLY))
    with pytest.raises(WriteError, match="No space left"), write._os_errors(Path("model.pt")):
        write._fill(Path("model.pt"), content(b"x"))


def _links_refused(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


_IO_ERROR = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("has_links", "err", "step"),
    [
        *((False, err, step) for err in (_IO_ERROR, KeyboardInterrupt()) for step in range(5)),
        *((True, _IO_ERROR, step) for step in range(3)),  # a link that fails is a rename instead
        *((True, KeyboardInterrupt(), step) for step in range(5)),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_failure_while_renaming_restores_what_was(
    has_links: bool, err: BaseException, step: int, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps: two files with a backup each, one new; any may fail, or be interrupted just after it was done."""
    if not has_links:
        monkeypatch.setattr(os, "link", _links_refused)
    before = {"a": b"old a", "c": b"old c"}
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    calls = iter(range(100))

    def failing(do: Callable[..., None]) -> Callable[..., None]:
        def do_or_fail(source: Any, target: Any, **options: Any) -> None:
            if next(calls) != step:
                return do(source, target, **options)
            if late:
                do(source, target, **options)
            raise err

        return do_or_fail

    for name in ("replace", "link") if has_links and err is not _IO_ERROR else ("replace",):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    with pytest.raises(WriteError if isinstance(err, OSError) else KeyboardInterrupt):
        write_all({tmp_path / name: content(b"new") for name in "abc"}, force=True)
    assert listing(tmp_path) == before


def test_a_file_that_is_replaced_is_there_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever this process is killed, the old or the new one stands under its name."""
    (tmp_path / "a").write_bytes(b"old")
    seen: list[bytes] = []

    def watched(do: Callable[..., None]) -> Callable[..., None]:
        def watched_call(*args: Any, **options: Any) -> None:
            do(*args, **options)
            seen.append((tmp_path / "a").read_bytes())

        return watched_call

    for name in ("replace", "link", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    write_all({tmp_path / "a": content(b"new")}, force=True)
    assert seen[0] == b"old"
    assert seen[-1] == b"new"
    assert listing(tmp_path) == {"a": b"new"}


def test_targets_are_checked_beforehand(tmp_path: Path) -> None:
    check_targets([tmp_path / "free"], force=False)
    with pytest.raises(UsageError, match="is a folder"):
        check_targets([tmp_path], force=True)
    with pytest.raises(WriteError, match="there is no folder"):
        check_targets([tmp_path / "no" / "x.pt"], force=False)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_file_is_not_replaced(force: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(os.devnull)
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null"), Path("/dev/stdout")):
        with pytest.raises(UsageError, match="is not a regular file"):
            write_all({path: content(b"x")}, force=force)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists"):
        check_targets([tmp_path / "a"], force=False)


def test_folder_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root everything is writable
    with pytest.raises(WriteError, match="not writable"):
        check_targets([tmp_path / "a"], force=False)


def test_a_name_too_long(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="too long"):
        write_all({tmp_path / ("x" * 300): content(b"")}, force=False)


# ---------------------------------------------------------------------------------------------- contents

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
    dtype=st.sampled_from(DTYPES),
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
        ("seed: 0", "seed: 0\n# " + "\n" * 60_000, "far more values than any file"),
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


def test_a_file_that_comes_to_be_there_at_the_last_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    link = os.link

    def meanwhile(source: Path, target: Path) -> None:
        if target == second:
            second.write_text("another's")
        link(source, target)

    monkeypatch.setattr(os, "link", meanwhile)
    with pytest.raises(UsageError, match="exists"):
        write_all({first: content(b"1"), second: content(b"2")}, force=False)
    assert second.read_text() == "another's"
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_on_a_disk_without_links_files_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", _links_refused)
    write_all({tmp_path / "one": content(b"1")}, force=False)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("one", "1")]


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by whoever could foresee its name."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".a.known.memopt").symlink_to(tmp_path / "precious")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "known")
    with pytest.raises(WriteError, match="File exists"):
        write_all({tmp_path / "a": content(b"other")}, force=True)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "a").exists()


def test_names_of_temporary_files_are_never_the_same(tmp_path: Path) -> None:
    seen = set[str]()

    def look(file: BinaryIO) -> None:
        seen.update(path.name for path in tmp_path.iterdir() if path.name != "a")

    for _ in range(3):
        write_all({tmp_path / "a": look}, force=True)
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("output", "batch", "plan"),
    [
        (None, "a/net.memopt.batch.yaml", "a/net.memopt.plan.yaml"),
        ("b/fast.batch.yaml", "b/fast.batch.yaml", "b/fast.plan.yaml"),
        ("fast.yaml", "fast.yaml", "fast.plan.yaml"),
        ("fast", "fast", "fast.plan.yaml"),
    ],
)
def test_a_plan_is_written_beside_its_batch(output: str | None, batch: str, plan: str) -> None:
    assert pair_paths("a/net.pt", output) == (Path(batch), Path(plan))
