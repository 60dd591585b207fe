"""What the commands say of flags, functions of Python say of arguments."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.errors import MeasurementError, MemoptError, NothingFitsError, OptionError, StepError, UsageError
from memopt_cli.pytest_plugin import TrainMemory
from memopt_cli.text.python_words import in_python, said_in_python

SOURCES = Path(memopt_cli.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*|(?<![\w-])-[io]\b")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("--search-time is 0 (a--b)", "search_time is 0 (a--b)"),
        ("Add for example --dim B=8 --dim S=64:2048.", 'Add for example dims={"B": 8, "S": (64, 2048)}.'),
        ("smaller (--dim B=… where the shape says B)", 'smaller (dims={"B": …} where the shape says B)'),
        ("as in -i Bx3x224x224 --dim B=8.", 'as in inputs="Bx3x224x224", dims={"B": 8}.'),
        ("as in -i 'x:Bx3' --dim B=8;", 'as in inputs="x:Bx3", dims={"B": 8};'),
        ("--memory 24GiB. --level 3", 'memory="24GiB". level=3'),
        ("or a card, --for h100-80gb.", 'or a card, for_device="h100-80gb".'),
        ("Raise --max-slowdown or --budget.", "Raise max_slowdown or budget."),
        ("--max-slowdown none", "max_slowdown=math.inf"),
        ("with --loss file.py:function, or", "with loss=function, or"),
        ("--loss a/train.py:f: there is no file", 'loss="a/train.py:f": there is no file'),
        ("Write file.py:function.", "Give a function."),
        ("Or write train.py:function, which", "Or give a function, which"),
        ("choose a plan with --pick N or --budget", "choose a plan with memopt_cli.apply_plan or budget"),
        ("~ dry; --measure-levels measures every level\n1", "~ dry\n1"),
        ("(predicted; --frontier, --max-slowdown none)", "(predicted; memopt_cli.frontier, max_slowdown=math.inf)"),
        ("memopt profile --fake may need none", "memopt_cli.profile(fake=True) may need none"),
        ("memopt baseline 'my Net' … -o b.json --force", "memopt baseline 'my Net' … output=\"b.json\", force=True"),
        ("memopt baseline Net … -o b.json --force", 'memopt_cli.baseline(model, inputs, output="b.json", force=True)'),
        ("with memopt optimize", "with memopt optimize"),
        ("run train.py --fast-mode 3 -o out.json", "run train.py --fast-mode 3 -o out.json"),
        (
            "'0' rejected 4x9: RuntimeError: use --device cuda or -i 4x8\nGive --level 3.",
            "'0' rejected 4x9: RuntimeError: use --device cuda or -i 4x8\nGive level=3.",
        ),
        ("UsageError: --level is 9", "UsageError: level is 9"),
        ("cannot read '--level 3/plan.yaml'", "cannot read '--level 3/plan.yaml'"),
        (
            "wrote lr=3,--depth=4/base.json and h.-o, h.--level 3",
            "wrote lr=3,--depth=4/base.json and h.-o, h.--level 3",
        ),
        ("of forward, such as -i 8x3x32x32.", 'of forward, such as inputs="8x3x32x32".'),
        ("If you trust it: --no-sandbox.", "If you trust it: --no-sandbox."),
        ("With --plan-only no model; add --unverified --plan-only", "With --plan-only no model; add unverified=True"),
    ],
)
def test_flags_are_arguments(said: str, expected: str) -> None:
    assert in_python(said) == in_python(expected) == expected


def texts() -> Iterator[tuple[str, str]]:
    """All that is said below the commands: where, and what; ``X`` stands for a value."""
    for path in sorted(SOURCES.rglob("*.py")):
        if path.relative_to(SOURCES).parts[0] in ("cli", "report") or path.name in ("options.py", "python_words.py"):
            continue
        tree = ast.parse(path.read_text())
        parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        spared = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)} | {id(part) for part in parts}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in spared:
                yield f"{path.name}:{node.lineno}", text_of(node)


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


def test_every_flag_that_is_named_below_the_commands_is_an_argument_or_stays_as_it_is() -> None:
    named = {flag: where for where, text in texts() for flag in FLAG.findall(text)}
    assert "--search-time" in named
    known = parameters()
    for flag, where in named.items():
        said = in_python(flag)
        name = flag[2:].replace("-", "_") if said == flag else said.partition("=")[0]
        is_known = name in known or name.removeprefix("memopt_cli.") in memopt_cli.__all__
        assert is_known == (said != flag), f"{where}: {flag} becomes {said}"


def test_no_text_names_arguments_as_flags_or_functions_by_files_once_it_is_said_in_python() -> None:
    left = [(where, said) for where, text in texts() if (said := in_python(text)) and " " in said and flawed(said)]
    assert left == []


def flawed(said: str) -> bool:
    return "file.py:" in said or any(in_python(flag) != flag for flag in FLAG.findall(said))


@said_in_python()
def failing(error: Exception, cause: Exception | None = None) -> None:
    raise error from cause


def test_what_an_error_comes_from_is_said_in_python_too() -> None:
    cause = UsageError("--loss train.py:f: there is no file", hint="Write file.py:function.")
    with pytest.raises(MeasurementError) as caught:
        failing(MeasurementError("it failed", hint="Raise --timeout."), cause)
    printed = "\n".join(map(str, chain(caught.value)))
    assert not FLAG.search(printed)
    assert ".py:function" not in printed
    assert 'loss="train.py:f": there is no file' in printed


def test_the_own_errors_of_a_user_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"^give --dim B=8$"):
        failing(ValueError("give --dim B=8"))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


X = torch.randn(2, 8)
CALLS: tuple[tuple[str, Callable[[], Any], type[MemoptError], str], ...] = (
    ("a size", lambda: memopt_cli.optimize(net(), "Bx8"), UsageError, 'Add for example dims={"B": 8}'),
    ("no symbol", lambda: memopt_cli.frontier(net(), "2x8", dims={"S": 4}), UsageError, 'as in inputs="Sx3x224x224"'),
    ("a limit", lambda: memopt_cli.check(net(), X, fail_on="peek:0"), UsageError, "is not a known metric"),
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
    assert raised == 'Raise budget or level, or take a smaller batch (dims={"B": …} where the shape says B).'
    assert held.startswith("It holds what no plan can make smaller: ")


@pytest.mark.usefixtures("in_process")
def test_what_is_found_is_said_in_python_too() -> None:
    found = memopt_cli.frontier(net(), torch.randn(64, 8), search_time=0.01)
    assert "memopt_cli.apply_plan" in repr(found)
    assert not FLAG.search(repr(found))
    assert not FLAG.search("\n".join(found.summary.notes))
