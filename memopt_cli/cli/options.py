"""The flags that commands share, each defined once."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Annotated

import typer

from memopt_cli.cli.config import read_config
from memopt_cli.cli.help import ANSWER, INPUTS, LOADING, OUTPUT, STEP
from memopt_cli.errors import UsageError
from memopt_cli.optimizer_text import MadeOptimizer, is_function, parse_optimizer
from memopt_cli.records import Precision
from memopt_cli.spec_text import MODEL_SETTINGS, is_pretrained, parse_device, parse_factory
from memopt_cli.units import parse_amount

_LOG = logging.getLogger("memopt_cli")


def is_verbose() -> bool:
    """``-v`` was given."""
    return _LOG.isEnabledFor(logging.DEBUG)


def _set_verbose(verbose: bool) -> bool:
    if verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
    _LOG.setLevel(logging.DEBUG if verbose else logging.WARNING)
    return verbose


def whole(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` to ``high``, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError as err:
            raise typer.BadParameter(f"'{text}' is not a whole number") from err
        if not low <= value <= high:
            bound = f"at least {low}" if value < low and high > 1000 else f"from {low} to {high}"
            raise typer.BadParameter(f"it is {value}; it must be {bound}")
        return value

    return parse


def memory(text: str) -> int | float:
    """``8GiB`` -> bytes, ``60%`` -> a share, which is a float."""
    try:
        amount = parse_amount(text)
    except UsageError as err:
        hint = " (write for example 24GiB, 512MB or 60%)" if err.hint else ""
        raise typer.BadParameter(f"{err.message}{hint}") from err
    if not amount:
        raise typer.BadParameter("it is 0 bytes; nothing fits into that")
    return amount


def seconds(low: float) -> Callable[[str], float]:
    """A parser of times in seconds, at least ``low``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError as err:
            raise typer.BadParameter(f"'{text}' is not a number of seconds") from err
        if not low <= value <= 10**6:
            raise typer.BadParameter(f"it is {value:g} s; it must be from {low:g} to 1000000 s")
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError as err:
        raise typer.BadParameter(f"'{text}' is not a number") from err
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"it is {value:g}; it must be above 0 and finite")
    return value


def check_model(location: str) -> str:
    """Raises :class:`typer.BadParameter` for what names no model."""
    if os.path.isdir(location) and not is_pretrained(location):
        raise typer.BadParameter(f"'{location}' is a folder without {MODEL_SETTINGS}, not a model")
    if os.path.exists(location):
        if not os.access(location, os.R_OK):
            raise typer.BadParameter(f"'{location}' cannot be read: permission denied")
    elif is_function(location):
        check_file(location.rpartition(":")[0])
    elif parse_factory(location) is None:
        raise typer.BadParameter(f"there is no file '{location}', and it is not of the form package.module:callable")
    return location


def _check_device(device: str | None) -> str | None:
    try:
        return None if device is None else parse_device(device)
    except UsageError as err:
        raise typer.BadParameter(err.message) from err


def _check_function(text: str | None) -> str | None:
    """``file.py:function``, not yet opened."""
    if text is not None and not is_function(text):
        raise typer.BadParameter(f"'{text}' is not of the form file.py:function")
    if text is not None:
        check_file(text.rpartition(":")[0])
    return text


def _check_optimizer(text: str | None) -> str | None:
    """A name of ``torch.optim``, or ``file.py:function``, not yet opened."""
    if text is None:
        return None
    try:
        choice = parse_optimizer(text)
    except UsageError as err:
        raise typer.BadParameter(f"{err.message}. {err.hint}".strip()) from err
    return _check_function(text) if isinstance(choice, MadeOptimizer) else text


def check_file(path: str | None) -> str | None:
    """Callback of a flag that names a file to read, which is not yet opened."""
    if path is not None and not os.path.exists(path):
        raise typer.BadParameter(f"there is no file '{path}'")
    return path


def _check_code(paths: list[str]) -> list[str]:
    for path in paths:
        check_file(path)
        if not os.path.isdir(path) and not path.endswith(".py"):
            raise typer.BadParameter(f"'{path}' is neither a folder nor a Python file")
    return paths


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        callback=check_model,
        help="A file of torch.save, torch.jit.save or torch.export.save, a save_pretrained folder, or "
        "package.module:callable or file.py:function, which builds a model or a step of yours (memopt_cli.Step).",
        show_default=False,
    ),
]

SavedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        callback=check_model,
        help="A file of torch.save, torch.jit.save or torch.export.save, or a save_pretrained folder.",
        show_default=False,
    ),
]

Inputs = Annotated[
    list[str],
    typer.Option(
        "-i",
        "--input",
        metavar="SPEC",
        default_factory=list,
        show_default=False,
        rich_help_panel=INPUTS,
        help="An input, [name:]SHAPE[@dtype][=values]: 4x3x224x224, or ids:BxS@int64=0..32000. Repeatable.",
    ),
]
Dims = Annotated[
    list[str],
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        default_factory=list,
        show_default=False,
        rich_help_panel=INPUTS,
        help="Size of a symbol in the shapes: B=8. Repeatable.",
    ),
]
InputData = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        callback=check_file,
        rich_help_panel=INPUTS,
        show_default=False,
        help="Read the inputs from a .pt, .npz or .safetensors file.",
    ),
]
InputScript = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        callback=_check_function,
        rich_help_panel=INPUTS,
        show_default=False,
        help="Call a function that makes the inputs.",
    ),
]

DEVICE = typer.Option(
    metavar="auto|cpu|cuda:N", callback=_check_device, rich_help_panel=STEP, help="Device that the step runs on."
)
PRECISION = typer.Option(
    "--precision",
    metavar="NAME",
    rich_help_panel=STEP,
    help="stored (the file's dtypes), fp32, fp64, or bf16 and fp16 (autocast).",
)
Device = Annotated[str, DEVICE]
PrecisionChoice = Annotated[Precision, PRECISION]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        callback=_check_function,
        rich_help_panel=STEP,
        show_default=False,
        help="Call a function of the model's output for the loss. Without it, the loss is a scalar output or an entry "
        "'loss', else every output gets a seeded random gradient.",
    ),
]
SEED = typer.Option(metavar="N", parser=whole(0), rich_help_panel=STEP, help="Seed of inputs, dropout and the loss.")
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        callback=_check_optimizer,
        rich_help_panel=STEP,
        show_default="none",
        help="Count the memory of this optimizer: adamw, adamw:fused, sgd:foreach …, or FILE.py:NAME, a function of "
        "yours that takes the model and returns one.",
    ),
]
Seed = Annotated[int, SEED]
Accumulate = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(1),
        rich_help_panel=STEP,
        help="Micro-batches per optimizer step. Only the last is run, with the earlier gradients in memory.",
    ),
]
ClipNorm = Annotated[
    float | None,
    typer.Option(
        metavar="NORM",
        parser=_positive,
        rich_help_panel=STEP,
        show_default=False,
        help="Clip the gradients to this norm before the optimizer's step.",
    ),
]
RunUnder = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        callback=check_file,
        rich_help_panel=STEP,
        show_default="the one in the file, if any",
        help="Run the step under this plan.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", parser=seconds(0.1), rich_help_panel=STEP, help="Time limit for one measurement."),
]

RecommendBatch = Annotated[
    bool,
    typer.Option(
        "--recommend-batch/--no-recommend-batch",
        rich_help_panel=OUTPUT,
        show_default="on",
        help="Also find the largest batch that fits with the plan.",
    ),
]
LongestStep = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        parser=seconds(0.001),
        rich_help_panel=ANSWER,
        help="Recommend no batch whose step takes longer than this.",
    ),
]

LongestAdvisedStep = Annotated[
    float | None,
    typer.Option(
        "--longest-step",
        metavar="SECONDS",
        parser=seconds(0.001),
        rich_help_panel=OUTPUT,
        show_default="4 times the plan's step, but at least 5 s and at most 10 s",
        help="Recommend no batch whose step takes longer than this.",
    ),
]

TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", rich_help_panel=LOADING, help="Load without any check. The file may run code.")
]
Sandbox = Annotated[
    bool,
    typer.Option(
        "--sandbox/--no-sandbox",
        rich_help_panel=LOADING,
        show_default="on",
        help="Confine the processes that load and run the model: they write no other files and start no programs "
        "(Linux).",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=LOADING,
        show_default=False,
        help="Which entry to use, of a file or of --weights, where it holds several models: model, or ema.model.",
    ),
]
AllowPackage = Annotated[
    list[str],
    typer.Option(
        metavar="PKG",
        default_factory=list,
        show_default=False,
        rich_help_panel=LOADING,
        help="Trust the classes of a package. Repeatable.",
    ),
]
AllowGlobal = Annotated[
    list[str],
    typer.Option(
        metavar="PKG.CLASS",
        default_factory=list,
        show_default=False,
        rich_help_panel=LOADING,
        help="Trust one class or function. Repeatable.",
    ),
]
CodePath = Annotated[
    list[str],
    typer.Option(
        metavar="PATH",
        callback=_check_code,
        default_factory=list,
        show_default=False,
        rich_help_panel=LOADING,
        help="Import your own code, a .py file or a folder, and trust its module classes. Repeatable.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        callback=check_file,
        rich_help_panel=LOADING,
        show_default=False,
        help="Load this state dict into the model.",
    ),
]

Config = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        show_default="memopt.yaml, if there is one",
        help="Read flags from YAML (level: 4). The command line wins.",
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        rich_help_panel=OUTPUT,
        show_default="MODEL.memopt.pt",
        help="Where to write the optimized model. The other files are named after it.",
    ),
]
Force = Annotated[bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Replace files that exist.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Search and report, but write nothing.")
]
PlanOnly = Annotated[
    bool,
    typer.Option(
        "--plan-only",
        rich_help_panel=OUTPUT,
        help="Write the plan but no model: the training script applies the plan.",
    ),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print the report as JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", rich_help_panel=OUTPUT, help="Show no progress on stderr.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "-v", "--verbose", callback=_set_verbose, rich_help_panel=OUTPUT, help="Show details, and tracebacks of errors."
    ),
]
