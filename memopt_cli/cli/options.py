"""The flags that commands share, each defined once."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

from memopt_cli.cli.config import read_config
from memopt_cli.cli.help import ANSWER, INPUTS, LOADING, OUTPUT, RANKS, STEP
from memopt_cli.cli.values import (
    card,
    check_code,
    check_device,
    check_file,
    check_function,
    check_mesh,
    check_model,
    check_optimizer,
    check_parallel,
    positive,
    seconds,
    whole,
)
from memopt_cli.records import DeviceProfile, Precision
from memopt_cli.spec_text import MOST_RANKS

_LOG = logging.getLogger("memopt_cli")


def is_verbose() -> bool:
    """``-v`` was given."""
    return _LOG.isEnabledFor(logging.DEBUG)


def _set_verbose(verbose: bool) -> bool:
    if verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
    _LOG.setLevel(logging.DEBUG if verbose else logging.WARNING)
    return verbose


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


def dims_option(more: str = "") -> Any:
    """``--dim``; ``more``: what a command makes of a range."""
    return typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        default_factory=list,
        show_default=False,
        rich_help_panel=INPUTS,
        help=f"Size of a symbol in the shapes: B=8. {more}Repeatable.",
    )


def html_option(what: str) -> Any:
    """``--html``; ``what`` it writes."""
    return typer.Option(
        "--html",
        metavar="FILE",
        rich_help_panel=OUTPUT,
        show_default=False,
        help=f"{what} as one HTML file. Needs memopt[html].",
    )


Dims = Annotated[list[str], dims_option()]
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
        callback=check_function,
        rich_help_panel=INPUTS,
        show_default=False,
        help="Call a function that makes the inputs.",
    ),
]

DEVICE = typer.Option(
    metavar="auto|cpu|cuda:N", callback=check_device, rich_help_panel=STEP, help="Device that the step runs on."
)
PRECISION = typer.Option(
    "--precision",
    metavar="NAME",
    rich_help_panel=STEP,
    help="stored (the file's dtypes), fp32, fp64, or bf16 and fp16 (autocast).",
)
Device = Annotated[str, DEVICE]
Card = Annotated[
    DeviceProfile | None,
    typer.Option(
        "--for",
        metavar="CARD|FILE",
        parser=card,
        rich_help_panel=STEP,
        show_default=False,
        help="Estimate for a GPU that is not here: a100-40gb, h100-80gb, rtx4090 … or a YAML file.",
    ),
]
PrecisionChoice = Annotated[Precision, PRECISION]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        callback=check_function,
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
        callback=check_optimizer,
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
        parser=positive,
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

Ranks = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1, MOST_RANKS),
        rich_help_panel=RANKS,
        show_default=False,
        help="Predict one rank of so many, in one process: needs --parallel.",
    ),
]
Parallel = Annotated[
    str | None,
    typer.Option(
        metavar="fsdp|ddp|FILE.py:NAME",
        callback=check_parallel,
        rich_help_panel=RANKS,
        show_default=False,
        help="How the model is spread: fsdp (fully_shard of repeated blocks and of the rest), ddp, or a function of "
        "your training script that takes the model and a DeviceMesh and returns the model.",
    ),
]
MeshAxes = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="NAME=SIZE,...",
        callback=check_mesh,
        rich_help_panel=RANKS,
        show_default="dp=N",
        help="Axes of the mesh of ranks, the outermost first: dp=32,tp=2.",
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(0),
        rich_help_panel=RANKS,
        show_default="the first and the last, and the larger of them in full",
        help="Which rank, from 0.",
    ),
]

RecommendBatch = Annotated[
    bool | None,
    typer.Option(
        "--recommend-batch/--no-recommend-batch",
        rich_help_panel=OUTPUT,
        show_default="predicted by dry runs",
        help="Run steps of the largest batch that fits with the plan, or say nothing of it.",
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
        show_default="2.5 times the plan's step, at least 1 s (GPU: 5 s), at most 10 s",
        help="Run the recommended batch, and no step that takes longer than this.",
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
        callback=check_code,
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
Unverified = Annotated[
    bool,
    typer.Option(
        "--unverified",
        rich_help_panel=OUTPUT,
        help="With --ranks or --for: write the plan without proof, where the model does not fit here.",
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
