"""Exit codes: those that the tables of ``docs/troubleshooting.md`` and ``docs/ci.md`` promise."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli import VerificationError, pipeline
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.records import Plan, SegmentPlan, TimedOut
from memopt_cli.records.plan_file import plan_yaml
from tests.zoo.records import a_header

Memopt = Callable[..., Any]

DOCS = Path(__file__).parents[1] / "docs"


def documented(page: str) -> dict[str, int]:
    """Return the exit code of each cause that ``page`` lists: in a table, between semicolons, or in the code's list."""
    text = (DOCS / page).read_text()
    rows = re.findall(r"^\| (\d+) \| (?!anything else)(.+) \|$", text, re.MULTILINE)
    lists = re.findall(r"^### Exit code (\d+)\n\n((?:- .+\n)+)", text, re.MULTILINE)
    rows += [(code, "; ".join(item[2:] for item in items.splitlines())) for code, items in lists]
    return {cause: int(code) for code, causes in rows for cause in causes.split("; ")}


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def unread(*_: Any) -> None:
    raise BrokenPipeError(32, "Broken pipe")


def differing(*_: Any) -> None:
    raise VerificationError("the optimized model differs")


def timed_out(*_: Any) -> None:
    raise_failure(TimedOut(limit_s=1))


RECORDED = "baseline net.py:small -i 8x64 -q && "

CASES: dict[str, dict[str, tuple[str | Callable[..., None], ...]]] = {
    "troubleshooting.md": {
        "done": ("inspect good.pt", "--version"),
        "`check`: a limit is exceeded": (f"{RECORDED}check net.py:large --baseline memopt-baseline.json",),
        "`verify`: the two differ": ("verify net.py:small net.py:other -i 8x64",),
        "`optimize` or `apply`: the plan failed verification": (differing,),
        "a flag, input or path that cannot be used as given": (
            "optimize missing.pt",
            "optimize good.pt --level 5",
            "optimize good.pt -i 8xx3",
            "optimize good.pt -i 8x3 --target Conv2d",
            "optimize good.pt -i 8x3 --optimizer net.py:small",
            "profile checkpoint.pt -i 8x3 --key modle",
            "profile net.py:small -i 8x64 --weights checkpoint.pt --key modle",
            "profile net.py:wrong -i 8x3",
        ),
        "your own code that cannot be imported": (
            "profile nowhere:build -i 8x3",
            "profile broken:build -i 8x3",
            "profile broken.py:build -i 8x3",
            "profile good.pt -i 8x3 --loss broken.py:loss",
            "profile own.pt -i 8x3 --code-path broken.py",
        ),
        "a model's file that is damaged, holds no model, or needs a class that is missing": (
            "inspect damaged.pt",
            "profile weights.pt -i 8x3",
            "profile lost.pt -i 8x3",
        ),
        "a file of inputs, or a snapshot, that is damaged": (
            "profile good.pt --input-data damaged.npz",
            "explain --snapshot damaged.pickle",
        ),
        "a file that cannot be written": ("profile good.pt -i 8x3 --html no/such/folder/out.html",),
        "a model that cannot be built": ("profile net.py:failing -i 8x3",),
        "a plan that does not fit": ("profile good.pt -i 8x3 --plan plan.yaml",),
        "a step that fails": ("profile good.pt -i 8x5",),
        "a step that takes longer than `--timeout`": (timed_out,),
        "the file is not safe to load": ("profile hostile.pt -i 8x3",),
        "the baseline names a function (`--loss`) that was not given": (
            "baseline good.pt -i 8x3 --loss net.py:loss -q && check good.pt",
        ),
        "the baseline is missing": ("check good.pt",),
        "it is not comparable": (f"{RECORDED}check net.py:small --precision bf16",),
        "nothing fits the budget": ("recommend-batch good.pt -i 8x3 --memory 64B",),
        "for `memopt explain`, the limit": ("explain good.pt -i 8x3 --memory 64B",),
        "interrupted": (interrupted,),
        "broken pipe (SIGPIPE): the reader of the output, such as `head`, has closed it": (unread,),
    },
    "ci.md": {
        "no limit is exceeded": (f"{RECORDED}check net.py:small",),
        "a limit is exceeded: the report shows where": (f"{RECORDED}check net.py:large",),
        "a flag, a limit or a path that cannot be used as given": (
            "check good.pt --fial-on peak:5%",
            "check good.pt --fail-on peak",
            "check missing.pt",
        ),
        "code that cannot be imported": (f"{RECORDED}check broken:small",),
        "the model's file is damaged": (f"{RECORDED}check damaged.pt",),
        "the model cannot be built": (f"{RECORDED}check net.py:failing",),
        "its step fails, or takes longer than `--timeout`": (f"{RECORDED}check net.py:narrow",),
        "the model needs trust that was not given (`--code-path`)": (f"{RECORDED}check own.pt",),
        "the baseline names a function that was not given (`--loss`)": (
            "baseline good.pt -i 8x3 --loss net.py:loss -q && check good.pt",
        ),
        "the baseline is missing": ("check good.pt",),
        "it is of another model": (f"{RECORDED}check net.py:layer",),
        "it was recorded on another kind of device, or with other kernel libraries, inputs, precision, optimizer, loss "
        "or seed": (f"{RECORDED}check net.py:small --precision bf16",),
        "only one of the two commands names a plan": (f"{RECORDED}check net.py:small --plan whole.yaml",),
    },
}
"""Page -> cause -> command lines that end by it, or a function that raises it where one would take long."""

CODE = """
import torch
from torch import nn
def small(): return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
def large(): return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 4))
def other(): return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
def layer(): return nn.Linear(64, 4)
def narrow(): return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
def wrong(): return 3
def failing(): raise ValueError("no luck")
def loss(output): return output.sum()
"""


class Hostile:
    """Its pickle runs a command."""

    def __reduce__(self) -> Any:
        return eval, ("open('ran', 'w')",)


@pytest.fixture
def folder(memopt: Memopt, in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the command lines name, in the current folder."""
    Path("net.py").write_text(CODE)
    Path("broken.py").write_text("def build(:\n")
    for name, damaged in (("pt", b"PK\3\4"), ("npz", b"PK\3\4"), ("pickle", b"\x80\2}")):
        Path(f"damaged.{name}").write_bytes(damaged)
    Path("hostile.pt").write_bytes(pickle.dumps(Hostile()))
    for name, path in (("plan", "blocks.3"), ("whole", "1")):
        Path(f"{name}.yaml").write_bytes(plan_yaml(a_header(), Plan(segments=(SegmentPlan(path=path),)), 1))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    torch.save(model, "good.pt")
    torch.save(model.state_dict(), "weights.pt")
    torch.save({"model": model, "epoch": 3}, "checkpoint.pt")
    for name, file in (("lost", "lost.pt"), ("broken", "own.pt")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, module := ModuleType(name))
            module.__dict__["Net"] = type("Net", (nn.Linear,), {"__module__": name})
            torch.save(module.Net(3, 4), file)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("page", "cause", "action"),
    [(page, cause, each) for page, cases in CASES.items() for cause, actions in cases.items() for each in actions],
    ids=lambda value: value.__name__ if callable(value) else value,
)
def test_a_command_ends_with_the_code_that_is_documented(
    page: str, cause: str, action: Any, memopt: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    if callable(action):
        monkeypatch.setattr(pipeline, "inspect", action)
        action = "inspect good.pt"
    *earlier, last = action.split(" && ")
    for command in earlier:
        assert memopt(*command.split()).code == 0
    done = memopt(*last.split())
    assert done.code == documented(page)[cause], done.err


@pytest.mark.parametrize("page", CASES)
def test_every_documented_cause_is_tried(page: str) -> None:
    assert documented(page).keys() == CASES[page].keys()
