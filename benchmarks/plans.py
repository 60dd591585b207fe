"""Memory and time of a training step: memopt's levels and budgets beside the usual ways, in one run.

    python benchmarks/plans.py [--models gpt,resnet] [--rounds 5] [--threads 2] [--out benchmarks/RESULTS.md]

Contestants: the model as it is; ``torch.utils.checkpoint`` on every block; ``torch.compile`` with PyTorch's
``activation_memory_budget`` (its peak by the allocator's count, as everyone's here); memopt's levels 1 to 4 and
budgets.  Plans are searched first, in profiling subprocesses; then the contestants take turns, so that the load of the
machine is the same for all.  Shown are the allocated peak and the median step, and their ratios to the model as it is.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import platform
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memopt_cli.apply import apply_plan
from memopt_cli.loading.input_spec import make_inputs, read_spec_file
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.pipeline.optimization import optimize
from memopt_cli.progress import Progress
from memopt_cli.records import Budget, ModelSource, OptimizeRequest, Plan, SearchGoal, SearchRequest, StepSettings
from memopt_cli.step import Step
from memopt_cli.trace import resident_bytes

BUILD = Path("sample_models/build")
BLOCKS = {"gpt": "Block", "resnet": "Bottleneck", "spiking_vgg": "ConvBlock", "lif_rnn": "LIFCell", "char_rnn": "LSTM"}
"""What a user would checkpoint by hand."""
COMPILE_BUDGETS = (0.5, 0.2)
BUDGETS = (0.8, 0.6)


@dataclass
class Contestant:
    """One way to run the step of one model."""

    name: str
    step: Callable[[], object]
    resident_bytes: int
    peak_bytes: int = 0
    times_s: list[float] = field(default_factory=list)


def step_of(name: str, prepare: Callable[[nn.Module], nn.Module]) -> tuple[Callable[[], object], int]:
    """A training step of the sample model after ``prepare``, and what exists before it, in bytes."""
    model = prepare(importlib.import_module(f"sample_models.{name}").build().train())
    args, kwargs = make_inputs(read_spec_file(BUILD / f"{name}.inputs.yaml"), seed=0, device="cpu", dtype=None)
    step = Step(model=model, args=args, kwargs=kwargs, settings=StepSettings(), loss=None, optimizer=None)

    def run() -> None:
        torch.manual_seed(0)
        step.backward(step.forward())
        model.zero_grad(set_to_none=True)

    return run, resident_bytes(step)


def every_block(model: nn.Module, class_name: str) -> nn.Module:
    """Checkpoint every module of a class, as one does by hand."""
    for module in model.modules():
        if type(module).__name__ == class_name:
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def compiled(model: nn.Module, budget: float) -> nn.Module:
    """PyTorch's own trade-off of time for memory."""
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = budget
    torch._dynamo.reset()
    return torch.compile(model)  # type: ignore[return-value]


def plan_of(name: str, **request: Any) -> Plan:
    """What ``memopt optimize`` finds."""
    result = optimize(
        OptimizeRequest(
            source=ModelSource(location=f"sample_models.{name}:build"),
            spec=read_spec_file(BUILD / f"{name}.inputs.yaml"),
            dry_run=True,
            recommend_batch=False,
            **request,
        ),
        progress=Progress(),
        ask=None,
    )
    assert result.summary.plan is not None
    return result.summary.plan


def ways(name: str) -> Iterator[tuple[str, Callable[[nn.Module], nn.Module]]]:
    """Name of a contestant -> what it does to the model."""
    yield "as it is", lambda model: model
    yield "checkpoint on every block", functools.partial(every_block, class_name=BLOCKS[name])
    for level in range(1, 5):
        started = time.perf_counter()
        plan = plan_of(name, search=SearchRequest(level=level))
        yield f"memopt level {level} ({time.perf_counter() - started:.0f} s)", functools.partial(apply_plan, plan=plan)
    for share in BUDGETS:
        started = time.perf_counter()
        plan = plan_of(name, search=SearchRequest(level=4), goal=SearchGoal(budget=Budget(share=share)))
        label = f"memopt budget {share:.0%} ({time.perf_counter() - started:.0f} s)"
        yield label, functools.partial(apply_plan, plan=plan)
    if shutil.which("g++"):
        for share in COMPILE_BUDGETS:
            yield f"torch.compile, budget {share}", functools.partial(compiled, budget=share)


def contest(name: str, rounds: int) -> list[Contestant]:
    """Measure every contestant's peak, then their steps in turns."""
    contestants = []
    for label, prepare in ways(name):
        try:
            step, held = step_of(name, prepare)
            step()  # warm up, compile
        except Exception as error:
            print(f"{name}: {label} failed: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        found = Contestant(label, step, held)
        found.peak_bytes = measure_allocated(step, "cpu", held).peak_bytes
        contestants.append(found)
        print(f"{name}: {label}: {found.peak_bytes / 2**20:.1f} MiB", file=sys.stderr)
    for _ in range(rounds):
        for one in contestants:
            started = time.perf_counter()
            one.step()
            one.times_s.append(time.perf_counter() - started)
    return contestants


def table(name: str, contestants: list[Contestant]) -> Iterator[str]:
    """Markdown."""
    first = contestants[0]
    base_s = statistics.median(first.times_s)
    yield f"### {name}\n"
    yield "| | allocated peak | of as it is | step | ratio |\n|---|---|---|---|---|"
    for one in contestants:
        step_s = statistics.median(one.times_s)
        yield (
            f"| {one.name} | {one.peak_bytes / 2**20:.1f} MiB | {one.peak_bytes / first.peak_bytes:.2f} "
            f"| {step_s * 1000:.0f} ms | {step_s / base_s:.2f} |"
        )
    yield ""


def main() -> None:
    """Run the contests and print, or write, the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt,resnet,spiking_vgg")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    lines = [
        f"`{shlex.join(['python', *sys.argv])}`, torch {torch.__version__}, {platform.machine()}, "
        f"{chosen.threads} threads, {chosen.rounds} rounds; in brackets the time of the search.\n"
    ]
    for name in chosen.models.split(","):
        lines += table(name, contest(name, chosen.rounds))
    text = "\n".join(lines)
    print(text)
    if chosen.out:
        chosen.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
