"""Compare ``memopt optimize --compile`` within a budget with PyTorch's own activation memory budgets.

    python benchmarks/compiled.py [MODEL ...] [--backend inductor] [--budgets 65,50] [--theirs 0.1,0.2] [--minutes 12]
    python benchmarks/compiled.py --quick

Models: gpt, bert and resnet; with a dropout of 0.1 gpt_dropout, bert_dropout and resnet_dropout.  memopt's plan is
compared with the fastest ``activation_memory_budget`` of ``--theirs`` that fits the budget and computes the same as the
model compiled without one.  Both are measured three times in turns, each time in a process of its own.  It is a
violation if any peak of memopt's plan is above the budget.

Each row is printed as soon as it is known; rows that would not end within ``--minutes`` are named and left out.
``--quick`` tries the script: one model, two budgets, a backend that needs no C++ compiler, and nothing written to
``benchmarks/RESULTS.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.results import table, this_command, write_section
from memopt_cli.errors import NothingFitsError
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure.jobs import MeasureAnswer, MeasureJob
from memopt_cli.pipeline import optimize
from memopt_cli.pipeline.prepare import LoadRequest, PreparedModel, prepare
from memopt_cli.pipeline.verification import verify_plan
from memopt_cli.records import (
    Budget,
    CompilePlan,
    InputSpec,
    Measurement,
    MemOptSummary,
    ModelSource,
    OptimizeRequest,
    Plan,
    SearchGoal,
    StepSettings,
    Verification,
)
from memopt_cli.records.progress import Progress
from memopt_cli.report.optimization import in_words
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.units import format_bytes, format_seconds
from sample_models.gpt import GPT, Block
from sample_models.resnet import ResNet

DROPOUT = 0.1
BUDGETS = "65,50,80,40,90"
"""Budgets in percent of the eager peak, most important first: all models run at one before the next."""
THEIRS = "0.2,0.5,0.8"
"""Values of PyTorch's ``activation_memory_budget``."""
TIMEOUT_S = 120.0
TURNS = 3
"""Measurements of each plan."""
HEADER = ["model", "budget", "PyTorch's", "peak", "step", "memopt's", "peak", "step", "to PyTorch's", "violations"]


# ---------------------------------------------------------------------------------------------- models


def gpt(dropout: float = 0.0, blocks: int = 6) -> nn.Module:
    """Build the GPT of the sample models, with dropout after the perceptron of each block."""
    torch.manual_seed(0)
    model = GPT(vocabulary=1000, context=128, width=192, heads=6, blocks=blocks)
    if dropout:
        for block in model.blocks:
            assert isinstance(block, Block)
            block.mlp.append(nn.Dropout(dropout))
    return model


def gpt_dropout() -> nn.Module:
    """Build the GPT with dropout."""
    return gpt(DROPOUT)


def small_gpt_dropout() -> nn.Module:
    """Build a GPT of three blocks with dropout."""
    return gpt(DROPOUT, blocks=3)


def bert(dropout: float = 0.0) -> nn.Module:
    """Build a small BERT of transformers that predicts masked words."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 6}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model: nn.Module = BertForMaskedLM(BertConfig(**sizes, **rates, intermediate_size=768))
    return model


def bert_dropout() -> nn.Module:
    """Build the BERT with dropout of hidden states and of attention."""
    return bert(DROPOUT)


def resnet(dropout: float = 0.0) -> nn.Module:
    """Build the ResNet of the sample models, with dropout after each stage."""
    torch.manual_seed(0)
    model = ResNet((2, 2, 2, 2), 32)
    if dropout:
        for stage in model.stages:
            assert isinstance(stage, nn.Sequential)
            stage.append(nn.Dropout(dropout))
    return model


def resnet_dropout() -> nn.Module:
    """Build the ResNet with dropout."""
    return resnet(DROPOUT)


def _of_tokens(targets: str) -> tuple[str, ...]:
    return tuple(f"{name}:8x128@int64=0..1000" for name in ("input_ids", targets))


QUICK = "small_gpt_dropout"
INPUTS = {
    QUICK: _of_tokens("targets"),
    "gpt": _of_tokens("targets"),
    "gpt_dropout": _of_tokens("targets"),
    "bert": _of_tokens("labels"),
    "bert_dropout": _of_tokens("labels"),
    "resnet": ("8x3x64x64",),
    "resnet_dropout": ("8x3x64x64",),
}


# ---------------------------------------------------------------------------------------------- PyTorch's budgets


@dataclass(slots=True)
class Bench:
    """Model, and the results of its compiled steps; the compiler has a cache folder for each plan."""

    name: str
    backend: str
    prepared: PreparedModel
    folders: contextlib.ExitStack
    found: dict[Plan, MeasureAnswer | str] = field(default_factory=dict)
    """Plan -> its measurement, or why it cannot run."""
    wrong: dict[Plan, str] = field(default_factory=dict)
    """Plan -> why it computes something else than the model; empty if it computes the same."""
    _compiling: dict[Plan, PreparedModel] = field(default_factory=dict)

    def compiling(self, plan: Plan) -> PreparedModel:
        """Return the prepared model with the compiler cache of ``plan``."""
        if plan not in self._compiling:
            self._compiling[plan] = self.prepared.with_compiler_cache(self.folders)
        return self._compiling[plan]

    def measured(self, plan: Plan) -> Measurement | None:
        """Measure ``plan`` once; ``None`` if it does not run."""
        if plan not in self.found:
            answer = self.compiling(plan).ask(MeasureJob(plan=plan))
            self.found[plan] = answer if isinstance(answer, MeasureAnswer) else str(answer)
        found = self.found[plan]
        return found.measurement if isinstance(found, MeasureAnswer) else None

    def is_right(self, plan: Plan) -> bool:
        """Return whether the compiled model computes the same with ``plan`` as without; each plan is verified once."""
        if plan not in self.wrong:
            told = verify_plan(self.compiling(plan), plan)
            passed = isinstance(told, Verification) and told.passed
            self.wrong[plan] = "" if passed else told.difference if isinstance(told, Verification) else str(told)
            if not passed:
                print(f"{self.name}: {in_words(plan)}: {self.wrong[plan]}", flush=True)
        return not self.wrong[plan]

    def best_of_pytorch(self, budget_bytes: int, shares: Sequence[float]) -> Plan | None:
        """Return a plan of the fastest of PyTorch's budgets ``shares`` that fits and is right; ``None`` if none is."""
        plans = [Plan(compile=CompilePlan(backend=self.backend, activation_memory_budget=share)) for share in shares]
        taken = [
            (found.step_s, plan) for plan in plans if (found := self.measured(plan)) and _fits(found, budget_bytes)
        ]
        return next((plan for _, plan in sorted(taken, key=lambda pair: pair[0]) if self.is_right(plan)), None)

    def in_turns(self, plans: Sequence[Plan]) -> dict[Plan, list[Measurement]]:
        """Measure ``plans`` :data:`TURNS` times in turns, so that a busy moment of the machine slows all of them."""
        found: dict[Plan, list[Measurement]] = {plan: [] for plan in plans}
        for _ in range(TURNS):
            for plan, taken in found.items():
                answer = self.compiling(plan).ask(MeasureJob(plan=plan, steps=1))
                if isinstance(answer, MeasureAnswer):
                    taken.append(answer.measurement)
        return found


def _fits(found: Measurement, budget_bytes: int) -> bool:
    return found.allocated_peak_bytes <= budget_bytes


# ---------------------------------------------------------------------------------------------- memopt's answer


def request_of(name: str, backend: str, settings: StepSettings, **changes: Any) -> OptimizeRequest:
    """Return the request of ``memopt optimize --compile`` for model ``name``, as a dry run that writes nothing."""
    return OptimizeRequest(
        source=ModelSource(location=f"benchmarks.compiled:{name}"),
        spec=InputSpec(tensors=tuple(map(parse_tensor, INPUTS[name])), source="here"),
        settings=settings,
        backend=backend,
        search=resolve({}),
        recommend_batch=False,
        dry_run=True,
        timeout_s=TIMEOUT_S,
        **changes,
    )


def answered(request: OptimizeRequest) -> MemOptSummary | None:
    """Return the summary of memopt's answer to ``request``; ``None`` if nothing fits."""
    try:
        return optimize(request, progress=Progress(), ask=None).summary
    except NothingFitsError as error:
        print(f"{error.message}\n{error.hint}", flush=True)
        return None


def rows_of(bench: Bench, settings: StepSettings, share: float, theirs: Sequence[float]) -> list[str]:
    """Return the row of one budget, a ``share`` of the peak of the original."""
    original = bench.measured(Plan())
    if original is None:
        raise SystemExit(f"{bench.name}: the model does not run: {bench.found[Plan()]}")
    budget_bytes = int(share * original.allocated_peak_bytes)
    goal = SearchGoal(budget=Budget(nbytes=budget_bytes))
    summary = answered(request_of(bench.name, bench.backend, settings, goal=goal))
    peer, own = bench.best_of_pytorch(budget_bytes, theirs), summary.plan if summary is not None else None
    found = bench.in_turns(list(dict.fromkeys(plan for plan in (peer, own) if plan is not None)))
    cells = [bench.name, f"{share:.0%} = {format_bytes(budget_bytes)}"]
    times: list[float] = []
    violations = 0
    for is_own, plan in ((False, peer), (True, own)):
        taken = found.get(plan, []) if plan is not None else []
        if plan is None or not taken:
            cells += ["nothing fits" if plan is None else f"{in_words(plan)}: does not run", "", ""]
            continue
        peak, step_s = max(one.allocated_peak_bytes for one in taken), statistics.median(one.step_s for one in taken)
        cells += [in_words(plan), format_bytes(peak), format_seconds(step_s)]
        times.append(step_s)
        violations += is_own and peak > budget_bytes
    ratio = f"{times[1] / times[0]:.2f}x" if len(times) == 2 else ""
    return [*cells, ratio, str(violations)]


# ---------------------------------------------------------------------------------------------- the command


def run(
    names: Sequence[str], options: argparse.Namespace, theirs: Sequence[float]
) -> tuple[list[list[str]], list[str]]:
    """Print a row for each of the models ``names`` at each budget; return the rows, and the names of those left out.

    No row begins that would end too late if it took as long as the longest one so far.
    """
    settings, ends = StepSettings(device=options.device), time.monotonic() + 60 * options.minutes
    rows: list[list[str]] = []
    left: list[str] = []
    longest_s = 0.0
    print(" | ".join(HEADER), flush=True)
    with contextlib.ExitStack() as folders:
        benches: dict[str, Bench] = {}
        for share, name in itertools.product(options.budgets.split(","), names):
            begun = time.monotonic()
            if begun + longest_s > ends:
                left.append(f"{name} {share} %")
                continue
            if name not in benches:
                asked = request_of(name, options.backend, settings)
                load_request = LoadRequest(source=asked.source, spec=asked.spec, settings=settings, timeout_s=TIMEOUT_S)
                benches[name] = Bench(
                    name, options.backend, prepare(load_request, progress=Progress(), ask=None), folders
                )
            rows.append(rows_of(benches[name], settings, float(share) / 100, theirs))
            longest_s = max(longest_s, time.monotonic() - begun)
            print(" | ".join(rows[-1]), flush=True)
    return rows, left


def main() -> None:
    """Measure, print the rows, and write them unless ``--quick`` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--theirs", default=THEIRS)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    names = options.models or [name for name in INPUTS if name != QUICK]
    if options.quick:
        names, options.theirs = options.models[:1] or [QUICK], "0.3,0.6"
        options.backend, options.budgets = "aot_eager_decomp_partition", "80,50"
    rows, left = run(names, options, [float(share) for share in options.theirs.split(",")])
    violated = sum(int(row[-1]) for row in rows)
    text = f"Budgets are shares of the eager peak; PyTorch's are {options.theirs}. "
    text += f"Violations: {violated} of {len(rows)}.\n\n{table(HEADER, rows)}"
    text += f"\n\nNot run within {options.minutes:g} minutes: {', '.join(left)}." if left else ""
    print(text, flush=True)
    if not options.quick:
        write_section(f"Compiled steps, {options.backend}", this_command(), text)
    if violated:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
