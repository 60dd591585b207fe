"""The table of options: each is described once, for the command line, ``memopt.yaml``, Python and messages.

A parameter of a command or a function is looked up by its name: ``max_slowdown`` is ``--max-slowdown`` on the command
line, ``max-slowdown`` in ``memopt.yaml``, and ``max_slowdown=`` in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from memopt_cli.errors import OptionError, for_message
from memopt_cli.text.values import Amount, Choice, Offload, Real, Size, ValueKind, Whole

ARGUMENTS: Final = "Arguments"
ANSWER: Final = "Batch and memory"
BASELINE: Final = "Baseline and limits"
INPUTS: Final = "The inputs"
SEARCH: Final = "The search"
OUTPUT: Final = "Output"
LOADING: Final = "Loading the model"
STEP: Final = "The training step"
RANKS: Final = "Many ranks"
OTHERS: Final = "Other options"
FINE: Final = "Search limits as in SpikingJelly"

GROUPS: Final = (ARGUMENTS, ANSWER, BASELINE, INPUTS, SEARCH, OUTPUT, LOADING, STEP, RANKS, OTHERS, FINE)
"""The groups of options in the order of help, most needed first."""

TableFormat = Literal["table", "json", "md"]
ReportFormat = Literal[TableFormat, "junit", "github"]

MAX_RANKS: Final = 2**20
"""Maximum number of ranks of a layout."""
MAX_S: Final = 1e6
"""Maximum number of seconds that an option takes."""
_SECONDS = Real(0, MAX_S, unit="seconds")
_MODEL = (
    "A file of torch.save, torch.jit.save or torch.export.save, a save_pretrained folder, or package.module:callable "
    "or file.py:function, which builds your model or your step (memopt_cli.Step)."
)
_DIM = "Size of a symbol in the shapes: B=8. {}Repeatable."
_PLAN_FILE = ("FILE", "file")
_BUDGETS: Final = Choice(("speed", "balanced", "memory"))
"""Shares of the modules that may become segments, by name."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table: how an option is described, spelled and checked."""

    help: str
    group: str = OTHERS
    takes: str | None = None
    """Name of the option's value in help; ``None`` for a switch."""
    kind: ValueKind | str | None = None
    """Kind of value on the command line and in Python, or the name of a check in :mod:`memopt_cli.cli.values`;
    ``None`` if the type of the parameter is enough."""
    default: str = ""
    """Default as help describes it; empty to show the value itself."""
    flags: tuple[str, ...] = ()
    """Flags on the command line; empty for ``--`` and the option's name."""
    common: bool = False
    """Whether the option is on the first screen of help; all others are shown by ``--help-all``."""
    python: str | None = None
    """Spelling in Python; ``None`` for an argument of the same name, empty where Python has none.  ``trust.packages``:
    a field of :class:`memopt_cli.Trust`, the argument ``trust``."""
    risk: Literal["data", "file", "code"] = "code"
    """Highest risk of a value: that it is data, names a file to read, or names code to run or to trust.

    A ``memopt.yaml`` that memopt finds by itself may not set a "code" option, so a new row is refused there until it
    is marked "data".
    """

    @property
    def checked_risk(self) -> Literal["data", "file", "code"]:
        """Highest risk of a value; a switch and a value that is parsed are data."""
        is_parsed = isinstance(self.kind, ValueKind) and not isinstance(self.kind, Offload)  # disk:FOLDER writes there
        return "data" if self.takes is None or is_parsed else self.risk


_BASE: Final[dict[str, Option]] = {
    # -------------------------------------------------------------------------------------------- the model
    "model": Option(_MODEL, ARGUMENTS, "MODEL", "model"),
    "verify.reference": Option(_MODEL, ARGUMENTS, "MODEL", "model"),
    "verify.candidate": Option("The model or step to compare with MODEL.", ARGUMENTS, "CANDIDATE", "model"),
    "apply.plan": Option("A *.plan.yaml file.", ARGUMENTS, "PLAN", "file"),
    "compare.before": Option("A baseline, or a *.summary.json of optimize.", ARGUMENTS, "A.json"),
    "compare.after": Option("The baseline or summary to compare with A.json.", ARGUMENTS, "B.json"),
    # -------------------------------------------------------------------------------------------- the inputs
    "inputs": Option(
        "An input, [name:]SHAPE[@dtype][=values]: 4x3x224x224, or ids:BxS@int64=0..32000. Repeatable.",
        INPUTS,
        "SPEC",
        flags=("-i", "--input"),
        common=True,
        risk="data",
    ),
    "dims": Option(_DIM.format(""), INPUTS, "NAME=SIZE", flags=("--dim",), common=True, risk="data"),
    "input_data": Option(
        "Read the inputs from a .pt, .npz or .safetensors file.", INPUTS, "FILE", "file", python="", risk="file"
    ),
    "input_script": Option("Call a function that makes the inputs.", INPUTS, "FILE.py:NAME", "function", python=""),
    # -------------------------------------------------------------------------------------------- the step
    "device": Option("Device that the step runs on.", STEP, "auto|cpu|cuda:N", "device", common=True, risk="data"),
    "precision": Option(
        "stored (the file's dtypes), fp32, fp64, or bf16 and fp16 (autocast).",
        STEP,
        "NAME",
        Choice(("stored", "fp32", "bf16", "fp16", "fp64")),
        common=True,
    ),
    "loss": Option(
        "A function that takes the model's output and returns the loss. By default the loss is a scalar output, an "
        "entry 'loss' or the only scalar among the outputs; if there is none, every output gets a random gradient "
        "from the seed.",
        STEP,
        "FILE.py:NAME",
        "function",
        common=True,
    ),
    "optimizer": Option(
        "Optimizer whose memory is counted: adamw, adamw:fused, sgd:foreach …, or FILE.py:NAME, a function that takes "
        "the model and returns its optimizer.",
        STEP,
        "NAME",
        "optimizer",
        default="none",
        common=True,
        risk="data",
    ),
    "optimizer_in_backward": Option(
        "Let plans update each parameter in backward, with --optimizer, as soon as its gradient is complete, and free "
        "the gradient. The script must then not clip, accumulate or scale gradients, or read .grad.",
        STEP,
    ),
    "accumulate": Option(
        "Micro-batches per optimizer step. memopt runs only the last one, with the accumulated gradients in memory.",
        STEP,
        "N",
        Whole(1),
    ),
    "clip_norm": Option(
        "Clip the gradients to this norm before the optimizer's step.", STEP, "NORM", Real(0, above=True)
    ),
    "seed": Option("Seed of inputs, dropout and the loss.", STEP, "N", Whole(0)),
    "timeout": Option("Time limit for one measurement.", STEP, "SECONDS", Real(0.1, MAX_S, unit="seconds")),
    "card": Option(
        "Estimate for a GPU that is not here: a100-40gb, h100-80gb, rtx4090 … or a YAML file.",
        STEP,
        "CARD|FILE",
        "card",
        flags=("--for",),
        python="for_device",
        risk="file",
    ),
    "plan": Option(
        "Run the step under this plan.", STEP, *_PLAN_FILE, default="the one in the file, if any", risk="file"
    ),
    "profile.fake": Option("Estimate on tensors without data, for a step that does not fit here.", STEP, common=True),
    "recommend_batch.fake": Option(
        "Estimate on tensors without data, and run nothing, as --ranks does.", STEP, common=True
    ),
    "compile": Option("Also measure the step compiled: inductor, aot_eager, …", STEP, "BACKEND", risk="data"),
    "steps": Option("Consecutive steps to compare.", STEP, "N", Whole(1, 1000), common=True),
    # -------------------------------------------------------------------------------------------- many ranks
    "ranks": Option(
        "Predict one rank of this many, in one process. Needs --parallel.", RANKS, "N", Whole(1, MAX_RANKS)
    ),
    "recommend_batch.ranks": Option(
        "Predict the batch of one rank for each of these numbers of ranks, doubling: 8:512. Needs --parallel.",
        RANKS,
        "LOW:HIGH",
        "range of ranks",
        risk="data",
    ),
    "parallel": Option(
        "How the model is spread: fsdp (fully_shard on repeated blocks and on the rest), ddp, or a function of your "
        "training script that takes the model and a DeviceMesh and returns the model.",
        RANKS,
        "fsdp|ddp|FILE.py:NAME",
        "parallel",
        python="parallelize",
    ),
    "mesh": Option(
        "Axes of the mesh of ranks, the outermost first: dp=32,tp=2.",
        RANKS,
        "NAME=SIZE,...",
        "mesh",
        default="dp=N",
        risk="data",
    ),
    "rank": Option(
        "Which rank, from 0.", RANKS, "N", Whole(0), default="the first and the last, and the larger of them in full"
    ),
    # -------------------------------------------------------------------------------------------- the search
    "level": Option(
        "What a plan may do: 0 nothing, 1 segments and packing, 2 nested segments, 3 chunks, 4 keep costly outputs. "
        "Each level includes those below.",
        SEARCH,
        "0..4",
        Whole(0, 4),
        default="3, or what --profile sets",
        common=True,
    ),
    "budget": Option(
        "Find the fastest plan whose measured peak fits; % is of the original's peak.",
        SEARCH,
        "8GiB|60%",
        Amount(),
        common=True,
    ),
    "optimize.lengths": Option(
        "File with the sizes of the --dim that has a range: one per line, or a size and how often it occurs.",
        SEARCH,
        "FILE",
        default="all sizes equally frequent",
        risk="file",
    ),
    "frontier": Option(
        "Show plans from the fastest to the smallest. --pick or --budget applies one.",
        SEARCH,
        common=True,
        python="memopt_cli.frontier",
    ),
    "pick": Option(
        "Apply the Nth plan that --frontier showed last. If it has shown none, search first.",
        SEARCH,
        "N",
        Whole(1),
        common=True,
        python="memopt_cli.apply_plan",
    ),
    "max_slowdown": Option(
        "Longest step that a plan may have, as a multiple of the original's. none: the least memory, however long the "
        "step takes.",
        SEARCH,
        "RATIO",
        Real(1, unlimited=True),
        default="1.33; 10 with --frontier; none with --budget",
        common=True,
    ),
    "measure_levels": Option("Measure the plan of every level, not only the applied one.", SEARCH, python=""),
    "search": Option("Find the batch and plan that together train most samples per second.", SEARCH, common=True),
    "search_time": Option(
        "End the search after this time and take the best plan so far, as Ctrl-C does.",
        SEARCH,
        "SECONDS",
        _SECONDS,
        default="10 s and ten steps; no limit with --budget, --frontier or --max-slowdown none",
    ),
    "targets": Option(
        "Modules that may become segments, by class or by path. Repeatable.",
        SEARCH,
        "CLASS|PATH",
        default="memopt chooses",
        flags=("--target",),
        python="target",
        risk="data",
    ),
    "allow_inexact": Option(
        "Allow plans that change results: a batch norm may use the statistics of each chunk where it cannot use the "
        "whole batch's. The summary names the modules.",
        SEARCH,
    ),
    "offload": Option(
        "Where plans may send stored tensors until backward: from a GPU to host memory, or on the CPU to a file in "
        "FOLDER. auto: host on a GPU, none on the CPU.",
        SEARCH,
        "auto|none|host|disk[:FOLDER]",
        Offload(),
        default="none; FOLDER: the one for temporary files",
    ),
    "host_memory": Option(
        "Maximum memory that plans may use on the host, with --offload host.",
        SEARCH,
        "64GiB",
        Size(),
        default="half of the free memory, which is also the maximum",
    ),
    # ----------------------------------------------------------------------------------------- finer search limits
    "profile": Option(
        "A named set of limits: safe (level 1), balanced (level 2, one split round), memory (level 3, two) or "
        "exhaustive (level 4, no limit). Other flags override it.",
        FINE,
        "NAME",
        Choice(("safe", "balanced", "memory", "exhaustive")),
        default="none",
    ),
    "prefer": Option(
        "Short for --profile and --checkpoint-budget. speed sets safe and speed; balanced and memory set both to that "
        "name.",
        FINE,
        "NAME",
        _BUDGETS,
        default="none",
    ),
    "checkpoint_budget": Option(
        "Share of the eligible modules that may become segments: speed (half), balanced (three quarters) or memory "
        "(all).",
        FINE,
        "NAME",
        _BUDGETS,
        default="none",
    ),
    "max_gc_wrapped_modules": Option(
        "Maximum number of segments in a plan, without nested ones.", FINE, "N", Whole(0), default="no limit"
    ),
    "gc_target_budget_ratio": Option(
        "Maximum number of segments in a plan, as a share of the modules that may become segments.",
        FINE,
        "0..1",
        Real(0, 1),
        default="all",
    ),
    "compress_x": Option("Pack the stored inputs of segments, losslessly.", FINE, default="on"),
    "temporal_split_factor": Option(
        "Try numbers of chunks that grow by about this factor: 2, 4, 8 … for 2.", FINE, "N", Whole(2), default="2"
    ),
    "max_split_rounds": Option(
        "Maximum number of rounds that split a plan further: each nests segments in one more segment, or takes "
        "one more step of --temporal-split-factor. The two kinds are counted separately.",
        FINE,
        "N",
        Whole(0),
        default="no limit",
    ),
    "max_candidates_per_round": Option(
        "Maximum number of modules that each split round tries in chunks, and of changes to a plan tried at once.",
        FINE,
        "N",
        Whole(1),
        default="no limit",
    ),
    "allow_expensive_profiling": Option(
        "Allow several split rounds, several candidates per round, and a warm-up step, as other flags allow.",
        FINE,
        default="on, or what --profile sets",
    ),
    "warmup_in_profile_workers": Option(
        "Take a warm-up step before the timed ones.", FINE, default="on, or what --profile sets"
    ),
    # -------------------------------------------------------------------------------------------- batch and memory
    "memory": Option(
        "Memory that a step may use; % of the GPU's free memory, or on the CPU of the machine's.",
        ANSWER,
        "24GiB|90%",
        Amount(),
        default="90%",
        common=True,
    ),
    "global_batch": Option(
        "Samples per optimizer step; gradient accumulation makes them up.", ANSWER, "N", Whole(1), common=True
    ),
    "multiple_of": Option("Propose only multiples of N.", ANSWER, "N", Whole(1), common=True),
    "objective": Option(
        "Recommend the largest batch (max) or the fastest (throughput).",
        ANSWER,
        "NAME",
        Choice(("max", "throughput")),
        default="max; throughput with --replicas",
    ),
    "replicas": Option(
        "Find how many copies of the model train fastest as one BatchModule: 1:64.",
        ANSWER,
        "LOW:HIGH",
        "range of replicas",
        python="",
        risk="data",
    ),
    "recommend_batch.lengths": Option(
        "File of sequence lengths, one per line: compare padding, buckets, sequence packing and a token budget on "
        "them.",
        ANSWER,
        "FILE",
        risk="file",
    ),
    "strategy": Option(
        "Instead, print a table of memory by number of time steps (--dim T=LOW:HIGH) for each of these: bptt, plan "
        "(--plan, or searched), online.",
        ANSWER,
        "NAME,...",
        python="",
        risk="data",
    ),
    "longest_step": Option(
        "Recommend no batch whose step takes longer than this.",
        ANSWER,
        "SECONDS",
        Real(0.001, MAX_S, unit="seconds"),
    ),
    "log": Option(
        "The text of an out-of-memory error: a traceback, a log, the kernel's log; - reads standard input.",
        ANSWER,
        "FILE",
        "log",
        common=True,
        python="",
        risk="file",
    ),
    "explain.snapshot": Option(
        "A pickle of torch.cuda.memory._snapshot(); it is read as data.",
        ANSWER,
        "FILE",
        "file",
        common=True,
        python="",
        risk="file",
    ),
    # -------------------------------------------------------------------------------------------- baseline and limits
    "baseline": Option("A file that memopt baseline wrote.", BASELINE, "FILE", common=True, risk="file"),
    "fail_on": Option(
        "How much a metric may grow over the baseline: peak:5% or peak:64MiB (the tensor peak), allocated:1% (the "
        "allocated peak), step:20%, offloaded:5% (bytes that wait elsewhere), or a category of the tensor peak: "
        "activations:0. Repeatable.",
        BASELINE,
        "METRIC:LIMIT",
        default="peak:0",
        common=True,
        risk="data",
    ),
    # -------------------------------------------------------------------------------------------- loading
    "key": Option(
        "Which entry to use where a file, or --weights, holds several models: model, or ema.model.",
        LOADING,
        "NAME",
        risk="data",
    ),
    "weights": Option(
        "Load the weights in this file into the model.", LOADING, "FILE", "weights", python="", risk="file"
    ),
    "code_path": Option(
        "Import your own code, a .py file or a folder, and trust its module classes. Repeatable.",
        LOADING,
        "PATH",
        "code",
        common=True,
        python="trust.code_paths",
    ),
    "allow_package": Option("Trust the classes of a package. Repeatable.", LOADING, "PKG", python="trust.packages"),
    "allow_global": Option("Trust one class or function. Repeatable.", LOADING, "PKG.CLASS", python="trust.globals"),
    "trust_pickle": Option("Load without any check. The file may run code.", LOADING, python="trust.pickle"),
    "sandbox": Option(
        "Confine the processes that load and run the model: they write no other files and start no programs (Linux).",
        LOADING,
        default="on",
        flags=("--sandbox/--no-sandbox",),
        python="",
    ),
    # -------------------------------------------------------------------------------------------- output
    "output": Option(
        "Where to write the optimized model. The other files are named after it.",
        OUTPUT,
        "FILE",
        default="MODEL.memopt.pt",
        flags=("-o", "--output"),
        common=True,
    ),
    "force": Option("Replace files that exist.", OUTPUT, common=True),
    "dry_run": Option("Search and report, but write nothing.", OUTPUT, python=""),
    "plan_only": Option("Write the plan but no model: the training script applies the plan.", OUTPUT, python=""),
    "unverified": Option(
        "With --ranks or --for: write the plan without verification, if the model does not fit here.", OUTPUT
    ),
    "recommend_batch": Option(
        "Measure the largest batch that fits with the plan, or look for none.",
        OUTPUT,
        default="predicted by dry runs",
        flags=("--recommend-batch/--no-recommend-batch",),
    ),
    "html": Option("Also write a report as one HTML file. Needs memopt[html].", OUTPUT, "FILE", common=True, python=""),
    "snapshot": Option("Also write the step as a snapshot for pytorch.org/memory_viz.", OUTPUT, "FILE", python=""),
    "format": Option(
        f"{', '.join(get_args(ReportFormat))}. github writes annotations, and $GITHUB_STEP_SUMMARY if that is set.",
        OUTPUT,
        "NAME",
        common=True,
        python="",
        risk="data",
    ),
    "json": Option("Print the report as JSON.", OUTPUT, common=True, python=""),
    "quiet": Option("Show no progress on stderr.", OUTPUT, flags=("-q", "--quiet"), python=""),
    "verbose": Option("Show details, and tracebacks of errors.", OUTPUT, kind="verbose", flags=("-v", "--verbose")),
    # -------------------------------------------------------------------------------------------- the rest
    "apply.verify": Option(
        "First compare several steps with the original's; your own step is only compared.",
        common=True,
        python="verify",
    ),
    "confirm": Option(
        "First run the step with the plan, and report the error of the plan's prediction.", common=True, python=""
    ),
    "config": Option(
        "Read flags from YAML (level: 4). The command line wins.",
        OTHERS,
        "FILE",
        "config",
        default="memopt.yaml, if there is one",
        python="",
    ),
    "help_all": Option("Show all options and exit.", kind="help all", common=True, python=""),
}
_CHANGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "explain.model": {"help": "As for memopt optimize; not needed with --snapshot."},
    "inspect.model": {
        "help": "A file of torch.save, torch.jit.save or torch.export.save, or a save_pretrained folder."
    },
    "optimize.dims": {
        "help": _DIM.format("With a range, S=64:2048, and --budget: a plan for each of a few ranges of sizes. ")
    },
    "recommend_batch.dims": {"help": _DIM.format("With a range, S=128:4096, tabulate sizes, doubling. ")},
    "measure.plan": {"help": "Measure the step under this plan.", "default": ""},
    "profile.plan": {"help": "Profile the step under this plan.", "default": "", "common": True},
    "recommend_batch.plan": {
        "help": "Recommend a batch with this plan as well.",
        "group": ANSWER,
        "default": "",
        "common": True,
        "kind": None,
    },
    "optimize.compile": {
        "help": "Also try steps compiled by torch.compile, for --level, --budget or --frontier: inductor, aot_eager, …",
        "group": SEARCH,
    },
    "recommend_batch.compile": {
        "help": "Find the largest batch that fits when the model is compiled: inductor, aot_eager, …"
    },
    "recommend_batch.level": {
        "help": "What a plan may do, with --search, as for memopt optimize.",
        "default": "3",
        "common": False,
    },
    "recommend_batch.search_time": {
        "help": "End --search after this time and take the best so far, as Ctrl-C does.",
        "default": "no limit",
    },
    "explain.memory": {
        "help": "The memory available: 24GiB, or a share of the free memory of the device.",
        "default": "what the error reports, else 90%",
    },
    "baseline.output": {"help": "Where to write it.", "default": ""},
    "measure.output": {"help": "Also write the report to a file, as JSON. Only the first rank writes.", "default": ""},
    "recommend_batch.output": {
        "help": "Also write the recommendation as YAML; with --search, its plan next to it.",
        "default": "",
    },
    "optimize.longest_step": {
        "help": "Run the recommended batch, and no step that takes longer than this.",
        "group": OUTPUT,
        "default": "2.5 times the plan's step, at least 1 s (GPU: 5 s), at most 10 s",
    },
    "recommend_batch.html": {
        "help": "With --search, also write a report as one HTML file. Needs memopt[html].",
        "common": False,
    },
    "compare.format": {"help": f"{', '.join(get_args(TableFormat))}."},
    "check.quiet": {"help": "Show no progress, and print only the line with the verdict."},
}
"""``command.name`` -> what differs from the option ``name`` of other commands."""
OPTIONS: Final[Mapping[str, Option]] = _BASE | {
    key: replace(_BASE[key.partition(".")[2]], **changes) for key, changes in _CHANGES.items()
}
"""Name of a parameter -> its option; ``command.name`` -> the option of a command that differs from the others."""


def find_option(command: str, name: str) -> Option:
    """Return the description of option ``name`` for ``command``."""
    return OPTIONS.get(f"{command}.{name}") or OPTIONS[name]


def check_option(name: str, value: object, kind: ValueKind | None = None) -> Any:
    """Check the argument ``value`` for the option ``name``, and return it as a plain value, or a tensor's one number.

    ``kind``: the check if ``name`` is not an option, such as the size of a dimension.
    Raises :class:`OptionError` for a value that the option does not allow.
    """
    checked = kind or OPTIONS[name].kind
    assert isinstance(checked, ValueKind), f"{name} has no check"
    try:
        return checked.check(value)
    except ValueError as refusal:
        raise OptionError(f"{name} is {for_message(value)}", hint=f"Use {refusal}.") from None


def check_option_if_given(name: str, value: object) -> Any:
    """Return the value from :func:`check_option`; ``None`` for ``None``."""
    return None if value is None else check_option(name, value)
