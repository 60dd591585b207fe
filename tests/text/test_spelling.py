"""What the commands say of flags, functions of Python say of arguments."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.errors import MeasurementError, MemoptError, NothingFitsError, OptionError, StepError, UsageError
from memopt_cli.pytest_plugin import TrainMemory
from memopt_cli.text.spelling import in_python, on_command_line, with_python_spelling
from memopt_cli.training import apply

SOURCES = Path(memopt_cli.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*|(?<![\w-])-[io]\b")
MARK = re.compile(r"`[^`]*`")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("`--search-time` is 0 (a--b)", "search_time is 0 (a--b)"),
        ("Add for example `--dim B=8 --dim S=64:2048`.", 'Add for example dims={"B": 8, "S": (64, 2048)}.'),
        ("smaller (`--dim B=…`, if the shape has a B)", 'smaller (dims={"B": …}, if the shape has a B)'),
        ("as in `-i Bx3x224x224 --dim B=8`.", 'as in inputs="Bx3x224x224", dims={"B": 8}.'),
        ("as in `-i 'x:Bx3' --dim B=8`;", 'as in inputs="x:Bx3", dims={"B": 8};'),
        ("`--memory 24GiB`. `--level 3`, `--budget 60%`", 'memory="24GiB". level=3, budget="60%"'),
        ("or a card, `--for h100-80gb`.", 'or a card, for_device="h100-80gb".'),
        ("Raise `--max-slowdown` or `--budget`.", "Raise max_slowdown or budget."),
        ("`--max-slowdown none`, `--max-slowdown 1.5`", "max_slowdown=math.inf, max_slowdown=1.5"),
        ("with `--loss file.py:function`, or", "with loss=function, or"),
        ("`--loss a/train.py:f`: there is no file", 'loss="a/train.py:f": there is no file'),
        ("`--loss 'my train.py:f'`: there is no file", 'loss="my train.py:f": there is no file'),
        ("`--key=--x` names none", 'key="--x" names none'),
        ("Or give `file.py:function`, which", "Or give a function, which"),
        ("choose a plan with `--pick N` or `--budget`", "choose a plan with memopt_cli.apply_plan or budget"),
        ("`memopt optimize --measure-levels` measures them", "memopt optimize --measure-levels measures them"),
        ("(predicted; `--frontier`, `--max-slowdown none`)", "(predicted; memopt_cli.frontier, max_slowdown=math.inf)"),
        ("`memopt profile --fake` may need none", "memopt_cli.profile(fake=True) may need none"),
        ("`memopt baseline 'my Net' … -o b.json`", 'memopt_cli.baseline(model, inputs, output="b.json")'),
        ("`memopt optimize net.pt -i 4x3`", 'memopt_cli.optimize(model, inputs="4x3")'),
        ("with memopt optimize", "with memopt optimize"),
        ("`--plan-only`; add `--unverified --plan-only`", "--plan-only; add unverified=True"),
        (
            "If you trust it: `--no-sandbox`, `--trust-pickle`.",
            "If you trust it: --no-sandbox, trust=memopt_cli.Trust(pickle=True).",
        ),
        (
            "it: `--code-path FOLDER`; or `--code-path a --allow-package b --code-path 'my c.py' --trust-pickle`",
            'it: trust=memopt_cli.Trust(code_paths=("FOLDER",)); or '
            'trust=memopt_cli.Trust(code_paths=("a", "my c.py"), packages=("b",), pickle=True)',
        ),
    ],
)
def test_each_surface_spells_a_marked_option(said: str, expected: str) -> None:
    assert in_python(said) == in_python(expected) == expected
    assert on_command_line(said) == said.replace("`", "")


@pytest.mark.parametrize(
    "said",
    [
        "run train.py --level 3 -o out.json",
        "RuntimeError: use `--fast-mode 3`, `--level 3 --fast`, `-x` or `make`",
        "no `--key 'a` and no `--level 3 4`",
        "`--level 3\nof two lines`",
        "cannot read '--level 3/plan.yaml'",
    ],
)
def test_what_others_say_stays_as_it_is(said: str) -> None:
    assert in_python(said) == on_command_line(said) == said


def texts() -> Iterator[tuple[str, str]]:
    """Yield where each text of the package is, and the text; ``X`` stands for a value."""
    for path in sorted(SOURCES.rglob("*.py")):
        if path.name in ("options.py", "spelling.py") and path.parent.name == "text":
            continue
        tree = ast.parse(path.read_text())
        parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        spared = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)} | {id(part) for part in parts}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in spared:
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", text_of(node)


def text_of(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.FormattedValue():
            return "X"
        case _:
            return ""


def parameters() -> set[str]:
    functions = [getattr(module, name) for module in (memopt_cli, memopt_cli.ranks) for name in module.__all__]
    signed = (f for f in functions if inspect.isfunction(f))
    return {name for function in signed for name in inspect.signature(function).parameters}


def flags_of(text: str) -> list[str]:
    """Return the options of memopt's that ``text`` names; a name of the table's may stand for others behind it."""
    return [flag for flag in FLAG.findall(text) if in_python(f"`{flag}`") != f"`{flag}`"]


def test_every_text_marks_the_options_that_it_names() -> None:
    """But a text that is nothing else: a part of a command line, which is made or compared with one."""
    marked, unmarked = set[str](), []
    for where, text in texts():
        marks = MARK.findall(text)
        marked.update(flag for mark in marks for flag in flags_of(mark))
        whole = f"`{text.removeprefix('X ')}`"
        if flags_of(MARK.sub("", text)) and on_command_line(whole) == whole:
            unmarked.append((where, text))
    assert {"--max-slowdown", "--search-time", "-i", "--dim"} <= marked
    assert unmarked == []


def test_every_mark_names_an_option() -> None:
    marks = [(where, mark) for where, text in texts() for mark in MARK.findall(text) if mark != "`X`"]
    assert [(where, mark) for where, mark in marks if "`" in on_command_line(mark)] == []


def test_every_option_that_is_named_below_the_commands_is_an_argument_or_stays_as_it_is() -> None:
    known = parameters()
    for where, text in texts():
        if where.startswith(("cli/", "report/")):
            continue
        for flag in (flag for mark in MARK.findall(text) for flag in flags_of(mark)):
            said = in_python(f"`{flag}`")
            name = flag.lstrip("-").replace("-", "_") if said == flag else said.partition("=")[0]
            is_known = name in known or name.removeprefix("memopt_cli.") in memopt_cli.__all__
            assert is_known == (said != flag), f"{where}: {flag} becomes {said}"


@with_python_spelling
def failing(error: Exception, cause: Exception | None = None) -> None:
    raise error from cause


def test_an_error_of_a_path_or_plan_has_a_short_traceback(tmp_path: Path) -> None:
    """Its last lines say what to do, and the frames before them are the caller's, and the one that raised it."""
    with pytest.raises(UsageError) as caught:
        memopt_cli.apply_plan(nn.Linear(2, 2), str(tmp_path / "typo.plan.yaml"))
    with pytest.raises(MemoptError) as unsuitable:
        memopt_cli.apply_plan(nn.Linear(2, 2), memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="blocks.3"),)))
    for error in (caught.value, unsuitable.value):
        assert [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)] == [
            Path(__file__).name,
            "spelling.py",
        ]
        assert error.__suppress_context__
        assert error.__cause__ is None


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, :2])


@pytest.mark.parametrize(
    ("model", "functions"), [(nn.Sequential(nn.Linear(2, 2)), []), (nn.Sequential(Halved()), ["forward"])]
)
def test_the_cause_of_a_failed_step_shows_the_frames_from_the_users_code_on(
    model: nn.Module, functions: list[str]
) -> None:
    plan = memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="0"),))
    with pytest.raises(MemoptError) as caught:
        memopt_cli.apply_plan(model, plan, verify=torch.randn(2, 4 if functions else 3))
    assert caught.value.__cause__ is not None
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert [frame.name for frame in frames[:1]] == functions
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 2


def test_ctrl_c_has_a_short_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object) -> None:
        try:
            raise RuntimeError
        except RuntimeError:
            raise KeyboardInterrupt  # noqa: B904

    monkeypatch.setattr(apply, "apply_plan", press)
    with pytest.raises(KeyboardInterrupt) as caught:
        memopt_cli.apply_plan(nn.Linear(2, 2), memopt_cli.Plan())
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 2
    assert caught.value.__suppress_context__


def test_what_an_error_comes_from_is_said_in_python_too() -> None:
    cause = UsageError("`--loss train.py:f`: there is no file", hint="Use `file.py:function`.")
    with pytest.raises(MeasurementError) as caught:
        failing(MeasurementError("it failed", hint="Raise `--timeout`."), cause)
    printed = "\n".join(map(str, chain(caught.value)))
    assert not FLAG.search(printed)
    assert "`" not in printed
    assert ".py:function" not in printed
    assert 'loss="train.py:f": there is no file' in printed


def test_the_own_errors_of_a_user_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"^give `--dim B=8`$"):
        failing(ValueError("give `--dim B=8`"))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


X = torch.randn(2, 8)
CALLS: tuple[tuple[str, Callable[[], Any], type[MemoptError], str], ...] = (
    ("a size", lambda: memopt_cli.optimize(net(), "Bx8"), UsageError, 'Add for example dims={"B": 8}'),
    ("no symbol", lambda: memopt_cli.frontier(net(), "2x8", dims={"S": 4}), UsageError, 'as in inputs="Sx3x224x224"'),
    ("a limit", lambda: memopt_cli.check(net(), X, fail_on="peek:0"), UsageError, "unknown metric"),
    ("level 0", lambda: memopt_cli.frontier(net(), X, level=0), OptionError, "Raise level."),
    ("an optimizer", lambda: memopt_cli.profile(net(), X, optimizer="adma"), UsageError, "Or give a function"),
    ("a rank", lambda: memopt_cli.ranks.predict_rank(net, X, ranks=1, parallelize="fsdq"), UsageError, "parallelize"),
    ("a loss", lambda: memopt_cli.apply_plan(net(), memopt_cli.Plan(), verify=X, loss=constant), MemoptError, "loss="),
    (
        "a test",
        lambda: TrainMemory(None)(net(), X, loss=constant),
        StepError,
        "loss with loss=function",
    ),
    ("memory", lambda: memopt_cli.recommend_batch(net(), X, memory="lots"), UsageError, "not a memory size"),
)


def constant(output: Tensor) -> Tensor:
    return torch.zeros(())


@pytest.mark.process  # one of them asks a subprocess
@pytest.mark.parametrize(("call", "kind", "said"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
def test_python_functions_name_no_flags(call: Callable[[], Any], kind: type[MemoptError], said: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert said in f"{caught.value.message}\n{caught.value.hint}"
    printed = "".join(map(str, chain(caught.value)))
    assert not FLAG.search(printed)
    assert "`" not in printed
    assert ".py:function" not in printed


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.usefixtures("in_process")
def test_what_fits_nowhere_says_what_to_change_in_python() -> None:
    with pytest.raises(NothingFitsError) as caught:
        memopt_cli.optimize(net(), X, budget=1024)
    raised, held, *_ = caught.value.hint.splitlines()
    assert raised == 'Raise budget or level, or use a smaller batch (dims={"B": …}, if the shape has a B).'
    assert held.startswith("No plan can make these parts of its peak smaller: ")


@pytest.mark.usefixtures("in_process")
def test_what_is_found_is_said_in_python_too() -> None:
    found = memopt_cli.frontier(net(), torch.randn(64, 8), search_time=0.01)
    assert "memopt_cli.apply_plan" in repr(found)
    for said in (repr(found), *found.summary.notes):
        assert not FLAG.search(said)
        assert "`" not in said
