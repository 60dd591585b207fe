"""The folders from which ``memopt check`` and ``memopt baseline`` import the user's code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import parse_limit
from memopt_cli.measure import processes
from memopt_cli.pipeline import baseline, check
from memopt_cli.pipeline.fingerprints.imports import code_in_words
from memopt_cli.records import BaselineRequest, CheckRequest, InputSpec, ModelSource, TensorSpec, Trust
from memopt_cli.records.progress import Progress
from memopt_cli.report.comparison import reasons

NET = "from torch import nn\ndef make(): return nn.Sequential(nn.Linear(2, {width}), nn.Linear({width}, 2))"


@pytest.fixture
def checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of two checkouts of one package, ``main`` and ``branch``, whose models differ; the current folder."""
    monkeypatch.chdir(tmp_path)
    for checkout, width in (("main", 3), ("branch", 300)):
        for folder in ("ci", "src/seglab"):
            Path(checkout, folder).mkdir(parents=True)
        Path(checkout, "ci/memory.py").write_text(
            "def build():\n    import sys\n    sys.path.insert(0, 'src')\n    from seglab.net import make\n"
            "    return make()\n"
        )
        Path(checkout, "src/seglab/__init__.py").touch()
        Path(checkout, "src/seglab/net.py").write_text(NET.format(width=width))
    return tmp_path


def modules_in(folder: Path) -> dict[str, str]:
    """Return the modules of the package that Python imports from ``folder``, and their files."""
    return {"seglab": str(folder / "seglab/__init__.py"), "seglab.net": str(folder / "seglab/net.py")}


@pytest.mark.process
def test_a_check_says_whose_code_it_measured_and_refuses_that_of_another_checkout(
    checkouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = InputSpec(tensors=(TensorSpec(shape=(4, 2), dtype="float32"),), source="--input")

    def check_model(location: str, *code_paths: str) -> tuple[bool, list[str]]:
        source = ModelSource(location=location, trust=Trust(code_paths=code_paths))
        file, limits = str(checkouts / "main/memopt-baseline.json"), (parse_limit("peak:0"),)
        comparison = check(
            CheckRequest(source=source, baseline_path=file, limits=limits), progress=Progress(), ask=None
        )
        return bool(comparison.exceeded), list(reasons(comparison))

    with processes.keep_server():
        monkeypatch.chdir("main")
        source = ModelSource(location="ci/memory.py:build")
        recorded = baseline(
            BaselineRequest(source=source, spec=given, output="memopt-baseline.json"), progress=Progress(), ask=None
        )
        assert recorded.notes == ("Code: seglab from src.",)
        exceeded, lines = check_model("ci/memory.py:build")
        assert not exceeded
        assert "code: seglab from src" in lines
        other = str(checkouts / "branch/src")
        with pytest.raises(UsageError, match=f"imports seglab from src, and other code of it, in {other}, would not"):
            check_model("../branch/ci/memory.py:build")
        monkeypatch.chdir(checkouts / "branch")
        exceeded, lines = check_model("ci/memory.py:build")
        assert exceeded
        assert "code: seglab from src" in lines


def test_code_that_lies_elsewhere_is_refused_only_beside_other_code(checkouts: Path) -> None:
    memory, main = "branch/ci/memory.py:build", modules_in(checkouts / "main/src")
    with pytest.raises(UsageError, match="imports seglab from main/src") as refused:
        code_in_words(memory, main)
    assert "`--code-path branch/src`" in refused.value.hint
    Path("saved").mkdir()
    Path("saved/model.pt").touch()
    assert code_in_words("saved/model.pt", main) == "seglab from main/src"
    assert code_in_words("seglab.net:make", main) == "seglab from main/src"
    assert code_in_words("branch/ci/memory.py:build", {"memory": str(checkouts / "branch/ci/memory.py")}) == ""
    shutil.copytree("branch/src", "venv/lib/site-packages")
    installed = modules_in(checkouts / "venv/lib/site-packages")
    assert code_in_words(memory, installed) == ""
    shutil.copy("main/src/seglab/net.py", "branch/src/seglab/net.py")
    assert code_in_words(memory, main) == "seglab from main/src"  # the code is the same in both
    with pytest.raises(UsageError, match="site-packages, and other code of it, in branch/src, would not be measured"):
        code_in_words(memory, installed)  # installed before the code was changed
