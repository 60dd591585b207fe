"""Names of the files that memopt writes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from memopt_cli.errors import UsageError
from memopt_cli.files.outputs import check_outputs, output_paths, pair_paths


@pytest.mark.parametrize(
    ("location", "output", "names"),
    [
        ("d/model.pt", None, "d/model.memopt.pt d/model.memopt.summary.json d/model.memopt.plan.yaml"),
        ("net.v2.pth", None, "net.v2.memopt.pt net.v2.memopt.summary.json net.v2.memopt.plan.yaml"),
        ("model.pt", "o/x.pt", "o/x.pt o/x.summary.json o/x.plan.yaml"),
        ("model.pt", "x", "x x.summary.json x.plan.yaml"),
        ("sample_models.gpt:build", None, "gpt.memopt.pt gpt.memopt.summary.json gpt.memopt.plan.yaml"),
        ("d/gpt.py:build", None, "gpt.memopt.pt gpt.memopt.summary.json gpt.memopt.plan.yaml"),
        ("d/gpt.py:small", None, "gpt.small.memopt.pt gpt.small.memopt.summary.json gpt.small.memopt.plan.yaml"),
        ("d/gpt.py:Net", None, "gpt.Net.memopt.pt gpt.Net.memopt.summary.json gpt.Net.memopt.plan.yaml"),
        (
            "gpt:Models.small",
            None,
            "gpt.Models.small.memopt.pt gpt.Models.small.memopt.summary.json gpt.Models.small.memopt.plan.yaml",
        ),
    ],
)
def test_output_paths(location: str, output: str | None, names: str) -> None:
    paths = output_paths(location, output)
    assert [str(path) for path in (paths.model, paths.summary, paths.plan)] == names.split()
    assert str(paths.batch) == str(paths.plan).replace(".plan.", ".batch.")
    assert paths.all() == (paths.model, paths.summary, paths.plan, paths.batch)


@pytest.mark.parametrize(
    ("output", "plan", "summary"),
    [
        ("b.plan.yaml", "b.plan.yaml", "b.summary.json"),
        ("d/fast.yml", "d/fast.yml", "d/fast.summary.json"),
        ("b.pt", "b.plan.yaml", "b.summary.json"),
    ],
)
def test_the_plan_has_the_name_that_is_given_if_it_alone_is_written(output: str, plan: str, summary: str) -> None:
    paths = output_paths("model.pt", output, plan_only=True)
    assert [str(path) for path in (paths.plan, paths.summary)] == [plan, summary]


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
            check_outputs([output], str(model), force=True)


def test_an_output_over_the_script_that_builds_the_model(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(UsageError, match="is the model itself"):
        output_paths(f"{script}:build", str(script))
    with pytest.raises(UsageError, match="is the model itself"):
        check_outputs([script], f"{script}:build", force=True)


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
