"""Run one ``memopt optimize`` again and again: does it find the same plan, and is the plan as fast as promised?

    python benchmarks/repeats.py [bert gpt2 llama vit mlp resnet gpt] [--runs 10]

Four small transformers (``pip install transformers``; four layers of width 256, random weights), a multilayer
perceptron, and the ResNet and the GPT of ``sample_models``.  After each command, this script times the step with the
plan in turns with the original's.  The machine should do nothing else.  Writes a section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.results import table, this_command, write_section
from memopt_cli import apply_plan
from memopt_cli.records import Measurement, MemOptSummary, from_data
from memopt_cli.text.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
_TURNS = 7
"""Number of turns in which each model is timed."""


def _transformer(kind: str, **options: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    shape = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    config = getattr(library, f"{kind}Config")
    model = {"Bert": "BertForMaskedLM", "Llama": "LlamaForCausalLM", "ViT": "ViTForImageClassification"}[kind]
    built: nn.Module = getattr(library, model)(config(**shape, **options))
    return built


def bert() -> nn.Module:
    """Build a BERT for masked tokens."""
    return _transformer("Bert", vocab_size=4000)


def llama() -> nn.Module:
    """Build a Llama, which fills its cache as by default."""
    return _transformer("Llama", vocab_size=4000)


def vit() -> nn.Module:
    """Build a ViT for images of 96 pixels."""
    return _transformer("ViT", image_size=96, patch_size=8)


def gpt2() -> nn.Module:
    """Build a GPT-2."""
    library = importlib.import_module("transformers")
    config = library.GPT2Config(vocab_size=4000, n_layer=4, n_embd=256, n_head=4)
    built: nn.Module = library.GPT2LMHeadModel(config)
    return built


def mlp() -> nn.Module:
    """Build eight layers of 512 features."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())))


def resnet() -> nn.Module:
    """Build the ResNet of ``sample_models``."""
    built: nn.Module = importlib.import_module("sample_models.resnet").build()
    return built


def gpt() -> nn.Module:
    """Build the GPT of ``sample_models``."""
    built: nn.Module = importlib.import_module("sample_models.gpt").build()
    return built


def _tokens(batch: int, length: int, vocabulary: int, *names: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the inputs ``names``, as ``-i`` takes them and as keyword arguments."""
    flags = " ".join(f"-i {name}:{batch}x{length}@int64=0..{vocabulary}" for name in names)
    return flags, {name: torch.randint(vocabulary, (batch, length)) for name in names}


def _images(name: str, *shape: int) -> tuple[str, dict[str, torch.Tensor]]:
    prefix = "" if name == "input" else f"{name}:"
    return f"-i {prefix}{'x'.join(map(str, shape))}", {name: torch.randn(shape)}


MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[str, dict[str, torch.Tensor]]]] = {
    "bert": (bert, 4, _tokens(8, 128, 4000, "input_ids", "labels")),
    "gpt2": (gpt2, 4, _tokens(8, 128, 4000, "input_ids", "labels")),
    "llama": (llama, 4, _tokens(8, 128, 4000, "input_ids", "labels")),
    "vit": (vit, 4, _images("pixel_values", 16, 3, 96, 96)),
    "mlp": (mlp, 3, _images("input", 256, 512)),
    "resnet": (resnet, 3, _images("input", 16, 3, 64, 64)),
    "gpt": (gpt, 3, _tokens(2, 256, 8000, "input_ids", "targets")),
}
"""Name -> its builder, the level to search, and its inputs."""


def main() -> None:
    """Run the commands, print a row for each, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=[])
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    rows = []
    for name in options.models or MODELS:
        runs = []
        for _ in range(options.runs):
            runs.append(_run(name))
            print(name, *runs[-1].row, sep="  ", flush=True)
        rows.append(_summary(name, runs))
    header = [
        "model",
        "level",
        "original",
        "plans",
        "largest / smallest",
        "step, measured afterwards",
        "lines",
        "seconds",
    ]
    text = f"{options.runs} runs of each command.\n\n{table(header, rows)}"
    print(text)
    write_section("The same command again and again", this_command(), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of the command."""

    original_bytes: int
    """Peak of the original."""
    peak_bytes: int
    """Peak with the plan; the original's if there is no plan."""
    slowdown: float
    """Step with the plan divided by the original's, measured by this script."""
    said_slowdown: float
    """The same by the command."""
    lines: int
    """Number of lines printed."""
    seconds: float
    """Seconds of the whole command."""

    @property
    def row(self) -> list[str]:
        """Its numbers, as text."""
        share = f"{format_bytes(self.peak_bytes)} ({self.peak_bytes / self.original_bytes:.2f}×)"
        return [
            share,
            f"{self.said_slowdown:.2f}×, then {self.slowdown:.2f}×",
            f"{self.lines} lines",
            f"{self.seconds:.0f} s",
        ]


def _run(name: str) -> Run:
    """Run the command of model ``name`` once, and time its plan."""
    build, level, (flags, inputs) = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "model.memopt.pt"
        command = f"optimize benchmarks/repeats.py:{name} {flags} --level {level} --code-path . --plan-only -o {output}"
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "memopt_cli", *shlex.split(command)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        summary = from_data(MemOptSummary, json.loads(output.with_suffix(".summary.json").read_text())["summary"])
        plain = build()
        planned = copy.deepcopy(plain)
        if output.with_suffix(".plan.yaml").exists():
            apply_plan(planned, output.with_suffix(".plan.yaml"))
    original = summary.levels[0].outcome
    applied = next(level.outcome for level in summary.levels if level.level == summary.applied_level)
    if not isinstance(original, Measurement) or not isinstance(applied, Measurement):
        raise SystemExit(f"{name}: the command did not measure its plan\n{done.stdout}")
    return Run(
        original_bytes=original.allocated_peak_bytes,
        peak_bytes=applied.allocated_peak_bytes,
        slowdown=_slowdown(plain, planned, inputs),
        said_slowdown=applied.slowdown(original),
        lines=len(done.stdout.strip().splitlines()),
        seconds=seconds,
    )


def _slowdown(plain: nn.Module, planned: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Return the median ratio of a step of ``planned`` and one of ``plain``, which take turns.

    A turn is a step that is not timed, since the other model has left the caches and the allocator in another state,
    and the shorter of two more.
    """
    ratios = []
    for _ in range(_TURNS):
        times = []
        for model in (plain, planned):
            _step_s(model, inputs)
            times.append(min(_step_s(model, inputs) for _ in range(2)))
        ratios.append(times[1] / times[0])
    return statistics.median(ratios)


def _step_s(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Return the seconds of one forward and backward of ``model``."""
    started = time.perf_counter()
    output = model(inputs["input"]) if "input" in inputs else model(**inputs)
    loss = output if isinstance(output, torch.Tensor) else next(iter(output.values()))
    loss.sum().backward()
    taken = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    return taken


def _summary(name: str, runs: list[Run]) -> list[str]:
    """Return the row of model ``name`` in the table."""
    peaks = [run.peak_bytes for run in runs]
    plans = Counter(f"{run.peak_bytes / run.original_bytes:.2f}×" for run in runs)
    ratios = sorted(run.slowdown for run in runs)
    seconds = [run.seconds for run in runs]
    return [
        name,
        str(MODELS[name][1]),
        format_bytes(runs[0].original_bytes),
        ", ".join(f"{share} in {count}" for share, count in plans.most_common()),
        f"{max(peaks) / min(peaks):.3f}",
        f"{ratios[0]:.2f}× to {ratios[-1]:.2f}×; {sum(ratio <= 1.33 for ratio in ratios)} of {len(runs)} at most 1.33×",
        str(statistics.median_low(run.lines for run in runs)),
        f"{min(seconds):.0f} to {max(seconds):.0f}",
    ]


if __name__ == "__main__":
    main()
