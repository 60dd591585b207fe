"""Exit codes, messages and streams: what every command has in common."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt_cli.cli.app import main
from memopt_cli.errors import MemoptError, UnsafeFileError
from tests.rows import quick


def raising(err: BaseException) -> Any:
    def act(progress: Any) -> None:
        raise err

    return act


BUG = "hint: This is probably a bug in memopt: run it again with -v, and report the traceback."


@pytest.mark.parametrize(
    ("err", "code", "message"),
    [
        (MemoptError("it broke", hint="mend it"), 3, "error: it broke\nhint: mend it\n"),
        (UnsafeFileError("no"), 4, "error: no\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (
            ValueError("a\nb"),
            3,
            f"error: unexpected ValueError: a b\n{BUG}\n",
        ),
        (
            SystemExit(0),
            3,
            f"error: unexpected SystemExit: 0\n{BUG}\n",
        ),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
)
def test_failure_is_a_message_and_a_code(
    err: BaseException, code: int, message: str, pipeline: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline.act = raising(err)
    assert main(["optimize", "model.pt", "-q"]) == code
    out, diagnostics = capfd.readouterr()
    assert diagnostics == message
    assert out == ""


@pytest.mark.parametrize("code", ["import requets.api", "import importlib\nimportlib.import_module('requets.api')"])
def test_a_missing_module_is_named_with_the_line_that_imports_it(
    code: str, pipeline: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """No command installs it: the name may come from a file that hopes for that."""
    Path("train.py").write_text(code)
    pipeline.act = lambda progress: runpy.run_path("train.py")
    assert main(["optimize", "model.pt", "-q"]) == 2
    diagnostics = capfd.readouterr().err
    line = len(code.splitlines())
    assert diagnostics.startswith(f"error: train.py, line {line}, imports requets, which is not installed\n")
    assert "If you trust that code, install the package that provides it" in diagnostics
    assert "pip" not in diagnostics


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x" * 10**6, "x\n" * 10**6])
def test_a_failure_does_not_flood_the_terminal(text: str, pipeline: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pipeline.act = raising(UnsafeFileError(f"it uses {text}, of all things", hint=text))
    assert main(["optimize", "model.pt", "-q"]) == 4
    diagnostics = capfd.readouterr().err
    assert diagnostics.startswith("error: it uses x")
    assert ", of all things\nhint: x" in diagnostics
    assert len(diagnostics) < 2 * 10**5


def test_verbose_shows_where(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.act = raising(ValueError("deep inside"))
    assert main(["optimize", "model.pt", "-v"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_verbosity_ends_with_the_command(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.act = raising(ValueError("deep inside"))
    main(["optimize", "model.pt", "-v"])
    capsys.readouterr()
    main(["optimize", "model.pt"])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("optimize", "MODEL"),
        ("frobnicate", "frobnicate"),
        ("optimize model.pt --nope", "--nope"),
        ("optimize missing.pt", "missing.pt"),
        ("optimize .", "folder"),
        ("optimize model.pt --level 5", "5"),
        ("optimize model.pt --level -1", "-1"),
        ("optimize model.pt --level high", "high"),
        ("optimize model.pt --precision fp8", "fp8"),
        ("optimize model.pt --optimizer lion", "lion"),
        ("optimize model.pt --clip-norm 0", "above 0"),
        ("profile model.pt --clip-norm nan", "above 0"),
        ("baseline model.pt --accumulate 0", "at least 1"),
        ("optimize model.pt --optimizer adamax:fused", "Use one of: adamax, adamax:for-loop, adamax:foreach"),
        ("optimize model.pt --optimizer lbfgs", "runs forward and backward inside step()"),
        ("optimize model.pt --optimizer missing.py:make", "there is no file 'missing.py'"),
        ("optimize model.pt --device gpu", "gpu"),
        ("optimize model.pt --temporal-split-factor 1", "at least 2"),
        ("optimize model.pt --max-split-rounds -1", "at least 0"),
        ("optimize model.pt --max-candidates-per-round 0", "at least 1"),
        ("optimize model.pt --profile fast", "fast"),
        ("optimize model.pt --prefer safe", "safe"),
        ("optimize model.pt --checkpoint-budget all", "all"),
        ("optimize model.pt --max-slowdown 0.9", "is not a number of at least 1, or none"),
        ("optimize model.pt --max-slowdown nan", "is not a number of at least 1, or none"),
        ("optimize model.pt --max-gc-wrapped-modules -1", "at least 0"),
        ("optimize model.pt --gc-target-budget-ratio 5", "from 0 to 1"),
        ("optimize model.pt --gc-target-budget-ratio nan", "from 0 to 1"),
        ("optimize model.pt --timeout 0", "0.1"),
        ("optimize model.pt --timeout nan", "nan"),
        ("optimize model.pt --seed -3", "-3"),
        ("optimize model.pt --loss loss.py", "file.py:function"),
        ("optimize model.pt --input-script loss.py:1", "file.py:function"),
        ("optimize model.pt -i 4xq", "'q'"),
        ("optimize model.pt -i 4 --input-data x.pt", "twice"),
        ("optimize model.pt -i BxS --dim B=4", "--dim S=128"),
        ("optimize model.pt -i x:4 -i x:4", "twice"),
        ("optimize model.pt -i 4 --dim B", "'B'"),
        ("optimize model.pt -i 4x3 --dim B=8", "no input has a dimension B; they are 4x3 (--input)"),
        ("optimize model.pt --input-data x.pt --dim B=8", "no input has a dimension B; they are of fixed size"),
        ("recommend-batch model.pt -i Bx3 --dim B=8 --dim S=2:4", "no input has a dimension S"),
        ("optimize model.pt --config nowhere.yaml", "nowhere.yaml"),
        ("apply model.pt", "PLAN"),
        (
            "profile model.pt --level 2",
            "hint: --level is an option of memopt optimize, memopt recommend-batch. See memopt",
        ),
        ("explain model.pt --for h100", "--for is an option of memopt profile, "),
        ("profile model.pt --fake --compile eager", "--compile"),
        ("check model.pt --fail-on peak", "peak"),
        ("check model.pt --fail-on 5%", "hint: Write METRIC:LIMIT: peak:5%. Known metrics: peak, "),
        ("check model.pt --fail-on peak:5", "'peak:5': '5' has no unit\nhint: Write peak:5% for a share, "),
        ("check model.pt --format xml", "xml"),
    ],
)
def test_usage_error(arguments: str, said: str, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    out, diagnostics = capsys.readouterr()
    assert diagnostics.startswith("error: ")
    assert said in diagnostics
    assert "\nhint: " in diagnostics or "twice" in diagnostics
    assert out == ""
    assert pipeline.requests == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_model(pipeline: Any) -> None:
    os.chmod("model.pt", 0)
    assert main(["optimize", "model.pt"]) == 2


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("arguments", [[], ["--version"], ["optimize", "no.pt"]])
def test_answers_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from memopt_cli.cli.app import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = run("-c", code, *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (2 if "no.pt" in arguments else 0, False)


@pytest.mark.parametrize(
    "command", quick(["optimize", "profile", "baseline", "recommend-batch", "inspect"], ["optimize", "inspect"])
)
def test_a_file_is_refused_without_torch(command: str, tmp_path: Path) -> None:
    """Not in the command's own process: one import is what a refusal costs."""
    (tmp_path / "model.pt").write_bytes(b"cposix\nsystem\n(Vtouch canary\ntR.")
    code = (
        "import sys; from memopt_cli.cli.app import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    more = [] if command == "inspect" else ["-i", "2x3"]
    done = run("-c", code, command, "model.pt", *more, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0 if command == "inspect" else 4, False)
    assert "posix.system" in done.stdout + done.stderr
    assert command != "inspect" or done.stdout.splitlines()[1].startswith("not safe: ")
    assert not (tmp_path / "canary").exists()


def test_runs_as_a_module_without_colour_in_a_pipe() -> None:
    done = run("-m", "memopt_cli", "optimize", "--help")
    assert done.returncode == 0
    assert "--level" in done.stdout
    assert "\x1b" not in done.stdout


FAKE = """
import os, signal, sys, time, types
import memopt_cli
pipeline = types.ModuleType("memopt_cli.pipeline")
def optimize(request, *, progress, ask):
    progress.stage("level 1")
    {body}
pipeline.optimize = optimize
sys.modules["memopt_cli.pipeline"] = memopt_cli.__dict__["pipeline"] = pipeline
from memopt_cli.cli.app import main
sys.exit(main(["optimize", __file__ + ":optimize"]))
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_interrupt(sent: signal.Signals, tmp_path: Any) -> None:
    script = tmp_path / "run.py"
    script.write_text(FAKE.format(body=f"os.kill(os.getpid(), {int(sent)}); time.sleep(20)"))
    done = run(str(script))
    assert done.returncode == 130
    assert done.stderr == "level 1\nerror: interrupted\n"


@pytest.mark.parametrize(
    "arguments",
    quick(
        ["--help", "--version", "optimize --help", "inspect net.pt", "inspect net.pt --json"],
        ["--help", "inspect net.pt --json"],
    ),
)
def test_a_reader_that_has_enough_is_no_failure(arguments: str, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(3, 2), tmp_path / "net.pt")
    model = tmp_path / "net.pt"
    command = f"({sys.executable} -m memopt_cli {arguments.replace('net.pt', str(model))}; echo code $? >&2) | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == "code 141\n"


def test_nothing_is_said_of_numpy_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    torch.save(torch.nn.Linear(3, 2), tmp_path / "net.pt")
    done = subprocess.run(
        [sys.executable, "-m", "memopt_cli", "profile", str(tmp_path / "net.pt"), "-i", "4x3", "-q"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the peak is reached" in done.stdout


def test_json_on_stdout_and_nothing_else(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.act = lambda progress: progress.stage("level 0")
    assert main(["optimize", "model.pt", "--json"]) == 0
    out, diagnostics = capsys.readouterr()
    assert json.loads(out)["files"] == ["model.memopt.pt"]
    assert diagnostics == "level 0\n"


def test_a_strange_path_does_not_end_the_report() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "memopt_cli", "optimize", b"mod\xff\xe2\x86\x92.pt"],
        capture_output=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_a_ci_system_obeys_nothing_that_is_printed(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def act(progress: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            print(":", ":error::x", sep="", file=stream)
        raise ValueError("\x1b[2J\r::error::y")

    pipeline.act = act
    streams = sys.stdout, sys.stderr
    assert main(["optimize", "model.pt", "-v"]) == 3
    assert (sys.stdout, sys.stderr) == streams
    out, diagnostics = capsys.readouterr()
    assert out == ":\\:error::x\n"
    lines = diagnostics.split("\n")
    assert lines[0] == ":\\:error::x"
    assert all(line.isprintable() and not line.lstrip().startswith("::") for line in lines)
