"""Measure what memopt costs and saves on a GPU, and compare it with PyTorch's own checkpoint.

    PYTHONPATH=. python benchmarks/gpu.py [--device cuda:0] [--seconds 330] [--small]

First, eager steps of a ResNet-50, a ViT and a GPT in bf16: plain, with ``torch.utils.checkpoint`` on every block, with
a segment on every block, and under the plan of ``memopt optimize``, whose predictions are shown, too.  Then blocks of a
few numbers, whose time is that of Python; the comparison of ``benchmarks/offload.py`` on a GPT of a billion parameters;
the tests that need a GPU; and ``memopt selftest``.  In the remaining time, the GPT and the ResNet-50 get the answer of
``memopt optimize --compile inductor --budget 60%``.

Each row is printed, and stored in ``build/gpu/rows.json``, at once, so that none is lost when the time runs out.
``--small`` shrinks the models, to try the script on a CPU.  Needs no network, and no package besides memopt's own.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import offload
from benchmarks.overhead import beside_pytorch
from benchmarks.planning import opened
from benchmarks.results import table, this_command, write_section
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.records import CompiledRow, InputSpec, Measurement, Plan, SegmentPlan, StepSettings, from_data
from memopt_cli.report.optimization import in_words
from memopt_cli.text.units import format_bytes
from memopt_cli.trace import resident_bytes
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep, synchronize
from sample_models.gpt import GPT, Block
from sample_models.resnet import Bottleneck, ResNet

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "gpu"
STEPS = 7
"""Steps of each way that are timed, in turns."""


class ViT(nn.Module):
    """Vision transformer without a class token: images ``[B, 3, H, W]`` -> scores ``[B, classes]``."""

    def __init__(self, size: int, patch: int, width: int, heads: int, blocks: int, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros((size // patch) ** 2, width))
        layer = functools.partial(
            nn.TransformerEncoderLayer, width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.Sequential(*(layer() for _ in range(blocks)))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the mean of all patches."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        scores: Tensor = self.head(self.blocks(x).mean(1))
        return scores


@dataclass(frozen=True, slots=True)
class Case:
    """Model, and the inputs of its step."""

    build: Callable[[], nn.Module]
    block: type[nn.Module]
    """Class of the modules that are checkpointed."""
    inputs: tuple[str, ...]
    """Inputs as ``memopt optimize -i`` takes them."""
    make: Callable[[], tuple[Tensor, ...]]
    """Function that makes the inputs."""


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def resnet50() -> nn.Module:
    """Make a ResNet-50 for images of 224x224."""
    return _seeded(lambda: ResNet(classes=1000))


def vit_base() -> nn.Module:
    """Make a ViT-B/16 for images of 224x224."""
    return _seeded(lambda: ViT(224, 16, 768, 12, 12))


def gpt_small() -> nn.Module:
    """Make a GPT of 12 blocks of width 768 for 1024 tokens."""
    return _seeded(lambda: GPT(vocabulary=32000, context=1024, width=768, heads=12, blocks=12))


def gpt_billion() -> nn.Module:
    """Make a GPT of a billion parameters, in 20 blocks of width 2048, for 1024 tokens."""
    return _seeded(lambda: GPT(vocabulary=32000, context=1024, width=2048, heads=16, blocks=20))


def small_resnet() -> nn.Module:
    """Make a ResNet of four blocks."""
    return _seeded(lambda: ResNet((1, 1, 1, 1), 16))


def small_vit() -> nn.Module:
    """Make a ViT of three blocks."""
    return _seeded(lambda: ViT(32, 8, 64, 4, 3, 10))


def small_gpt() -> nn.Module:
    """Make a GPT of three blocks."""
    return _seeded(lambda: GPT(vocabulary=100, context=64, width=64, heads=4, blocks=3))


def _images(batch: int, size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, size, size),)


def _tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(0, vocabulary, (batch, length))
    return tokens, tokens.clone()


def _of_images(build: Callable[[], nn.Module], block: type[nn.Module], batch: int, size: int) -> Case:
    return Case(build, block, (f"{batch}x3x{size}x{size}",), functools.partial(_images, batch, size))


def _of_tokens(build: Callable[[], nn.Module], batch: int, length: int, vocabulary: int) -> Case:
    inputs = tuple(f"{name}:{batch}x{length}@int64=0..{vocabulary}" for name in ("input_ids", "targets"))
    return Case(build, Block, inputs, functools.partial(_tokens, batch, length, vocabulary))


LARGE = {
    "ResNet-50, 64 images": _of_images(resnet50, Bottleneck, 64, 224),
    "ViT-B/16, 64 images": _of_images(vit_base, nn.TransformerEncoderLayer, 64, 224),
    "GPT, 8 x 1024 tokens": _of_tokens(gpt_small, 8, 1024, 32000),
}
SMALL = {
    "small ResNet, 4 images": _of_images(small_resnet, Bottleneck, 4, 32),
    "small ViT, 4 images": _of_images(small_vit, nn.TransformerEncoderLayer, 4, 32),
    "small GPT, 2 x 64 tokens": _of_tokens(small_gpt, 2, 64, 100),
}
BILLION = "GPT of a billion, 8 x 1024 tokens", _of_tokens(gpt_billion, 8, 1024, 32000)
TINY = "small GPT, 16 x 64 tokens", _of_tokens(small_gpt, 16, 64, 100)
HEADER = ["step, bf16", "way", "allocated peak", "step", "of the plain step", "predicted peak", "predicted step"]
COMPILED_HEADER = ["step, bf16", "budget", "plan", "allocated peak", "step", ""]


@dataclass(slots=True)
class Bench:
    """Results so far, which are written after every row, and the time that is left."""

    device: str
    until_s: float
    """Time at which no further part begins, by ``time.monotonic``."""
    rows: dict[str, list[list[str]]]
    """Part -> rows of its table."""
    texts: dict[str, str]
    """Part -> text that it printed."""

    @property
    def left_s(self) -> float:
        """Seconds until the time is over."""
        return self.until_s - time.monotonic()

    def row(self, part: str, cells: list[str]) -> None:
        """Print a row of the table ``part``, and write all results."""
        print(" | ".join(cells), flush=True)
        self.rows.setdefault(part, []).append(cells)
        self._write()

    def text(self, part: str, text: str) -> None:
        """Print the text of ``part``, and write all results."""
        print(f"{part}: {text}", flush=True)
        self.texts[part] = text
        self._write()

    def _write(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "rows.json").write_text(json.dumps({"rows": self.rows, "texts": self.texts}, indent=1))
        if self.device == "cpu":  # a trial of this script, which must not change RESULTS.md
            return
        steps = table(HEADER, self.rows.get("steps", []))
        compiled = table(COMPILED_HEADER, self.rows.get("compiled", []))
        offloaded = table(offload.HEADER, self.rows.get("offload", []))
        told = "\n\n".join(f"### {part}\n\n{text}" for part, text in self.texts.items())
        write_section(
            f"On {self.device.partition(':')[0]}", this_command(), f"{steps}\n\n{offloaded}\n\n{compiled}\n\n{told}"
        )


# ---------------------------------------------------------------------------------------------- steps


def steps(bench: Bench, name: str, case: Case) -> None:
    """Measure a step of ``case`` in every way, the plain one first, and add a row for each."""
    ways = {way: prepare(case) for way, prepare in _WAYS.items()}
    predicted = _optimized(bench, case)
    if predicted is not None:
        ways["memopt optimize"] = apply_plan(case.build(), predicted.plan)
    taken = {way: _step(model.to(bench.device), case, bench.device) for way, model in ways.items()}
    peaks = {way: _peak(step) for way, step in taken.items()}
    times: dict[str, list[float]] = {way: [] for way in taken}
    for _ in range(STEPS):
        for way, step in taken.items():
            times[way].append(_seconds(step))
    plain_s = statistics.median(times["plain"])
    for way in taken:
        step_s = statistics.median(times[way])
        told = ["", ""]
        if way == "memopt optimize" and predicted is not None:
            told = [format_bytes(predicted.peak_bytes), f"{predicted.slowdown:.2f}x"]
        cells = [name, way, format_bytes(peaks[way]), f"{step_s * 1e3:.1f} ms", f"{step_s / plain_s:.2f}x", *told]
        bench.row("steps", cells)


def _plain(case: Case) -> nn.Module:
    return case.build()


def _checkpointed(case: Case) -> nn.Module:
    model = case.build()
    for module in model.modules():
        if isinstance(module, case.block):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return model


def _with_segments(case: Case) -> nn.Module:
    model = case.build()
    paths = [path for path, module in model.named_modules() if isinstance(module, case.block)]
    return apply_plan(model, Plan(segments=tuple(SegmentPlan(path=path) for path in paths)))


_WAYS = {"plain": _plain, "torch.utils.checkpoint": _checkpointed, "segments": _with_segments}


@dataclass(frozen=True, slots=True)
class Predicted:
    """Plan of ``memopt optimize``, with its predicted peak and time."""

    plan: Plan
    peak_bytes: int
    """Predicted allocated peak in bytes; 0 if there is no prediction."""
    slowdown: float
    """Predicted step time divided by that of the plain step; 1 if there is no prediction."""


def _optimized(bench: Bench, case: Case) -> Predicted | None:
    """Run ``memopt optimize`` on ``case``; ``None`` where it fails, finds no plan or there is no time left."""
    output = _written(bench, case, ["--search-time", "10"], min(bench.left_s, 90))
    if output is None:
        return None
    summary = json.loads(output.with_suffix(".summary.json").read_text())["summary"]
    row = next(row for row in reversed(summary["levels"]) if row["level"] == summary["applied_level"])
    return Predicted(
        from_data(Plan, summary["plan"]), row["predicted_allocated_peak_bytes"] or 0, row["predicted_slowdown"] or 1.0
    )


def _written(bench: Bench, case: Case, flags: list[str], limit_s: float) -> Path | None:
    """Run ``memopt optimize`` on ``case``, and return the path beside which its answer is; ``None`` where it fails."""
    model = f"{Path(__file__).relative_to(ROOT)}:{case.build.__name__}"
    inputs = [part for given in case.inputs for part in ("-i", given)]
    flags = ["--device", bench.device, "--precision", "bf16", *flags, "--plan-only", "--force", "-q"]
    output = FOLDER / f"{case.build.__name__}.pt"
    output.parent.mkdir(parents=True, exist_ok=True)
    command = ["optimize", model, *inputs, *flags, "-o", str(output)]
    done = _run(["-m", "memopt_cli", *command], limit_s)
    if done.returncode != 0:
        bench.text(shlex.join(["memopt", *command]), f"exit {done.returncode}: {done.stderr[-400:]}")
        return None
    return output


def compiled(bench: Bench, name: str, case: Case, backend: str) -> None:
    """Add a row for each compiled step that was measured within 60 % of the plain step's peak of ``case``."""
    output = _written(bench, case, ["--compile", backend, "--budget", "60%"], bench.left_s)
    if output is None:
        return
    summary = json.loads(output.with_suffix(".summary.json").read_text())["summary"]
    applied = from_data(Plan, summary["plan"])
    for row in (from_data(CompiledRow, each) for each in summary["compiled"]):
        measured = ["", ""]
        if isinstance(row.outcome, Measurement):
            measured = [format_bytes(row.outcome.allocated_peak_bytes), f"{row.outcome.step_s * 1e3:.1f} ms"]
        said = "applied" if row.plan == applied else row.dropped
        bench.row("compiled", [name, format_bytes(summary["budget_bytes"]), in_words(row.plan), *measured, said])


def offloaded(bench: Bench, name: str, case: Case) -> None:
    """Add a row for each way to take the step of ``case`` that ``benchmarks/offload.py`` compares."""
    spec = InputSpec(tensors=tuple(map(parse_tensor, case.inputs)), source="here")
    settings = StepSettings(device=bench.device, precision="bf16")
    ready = opened(f"benchmarks.gpu:{case.build.__name__}", spec, settings)
    for _, row in offload.rows_of(name, ready, STEPS, offload.SEARCH_S):
        bench.row("offload", row)


def _step(model: nn.Module, case: Case, device: str) -> TrainingStep:
    inputs = tuple(tensor.to(device) for tensor in case.make())
    return TrainingStep(
        model=model.train(), args=inputs, kwargs={}, settings=StepSettings(device=device, precision="bf16")
    )


def _peak(step: TrainingStep) -> int:
    for _ in range(2):
        _seconds(step)
    found = measure_allocated(lambda _: step.take(), step.settings.device, resident_bytes(step))
    step.model.zero_grad(set_to_none=True)
    return found.peak_bytes


def _seconds(step: TrainingStep) -> float:
    synchronize(step.settings.device)
    started = time.perf_counter()
    step.take()
    synchronize(step.settings.device)
    step.model.zero_grad(set_to_none=True)
    return time.perf_counter() - started


# ---------------------------------------------------------------------------------------------- the rest


def _run(arguments: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository; after ``limit_s`` seconds stop it with exit code 124."""
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(1, limit_s), check=False)
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return subprocess.CompletedProcess(command, 124, output, f"no end after {limit_s:.0f} s")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    return f"exit {done.returncode}: {' / '.join(lines[-3:])}"


def _parts(bench: Bench, *, small: bool) -> Iterator[Callable[[], None]]:
    for name, case in (SMALL if small else LARGE).items():
        yield functools.partial(steps, bench, name, case)
    yield lambda: bench.text("Blocks of a few numbers", beside_pytorch(5 if small else 15, bench.device))
    yield functools.partial(offloaded, bench, *(TINY if small else BILLION))
    tests = ["-m", "pytest", "-q", "-x", "tests/runtime/test_cuda.py"]
    yield lambda: bench.text("Tests on CUDA", _last_line(_run(tests, bench.left_s)))
    selftest = ["-m", "memopt_cli", "selftest", "--device", bench.device]
    yield lambda: bench.text("memopt selftest", _last_line(_run(selftest, bench.left_s)))
    backend = "aot_eager_decomp_partition" if small else "inductor"
    for name, case in (SMALL if small else LARGE).items():
        if case.build in (gpt_small, resnet50, small_gpt):
            yield functools.partial(compiled, bench, name, case, backend)


def main() -> None:
    """Run the parts in turn until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.device, time.monotonic() + options.seconds, {}, {})
    for part in _parts(bench, small=options.small):
        if bench.left_s < 1:
            print("The time is over; what follows was not run.", flush=True)
            break
        part()


if __name__ == "__main__":
    main()
