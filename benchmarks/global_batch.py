"""Check the advice of ``memopt recommend-batch --global-batch`` by training with it for three optimizer steps.

    python benchmarks/global_batch.py [--models gpt,resnet] [--optimizer adamw]

Each model has a memory limit, and a global batch several times as large as what fits into it.  A plain loop in a
process of its own trains with the advised micro-batches: forward and backward of every micro-batch, the optimizer's
step and ``zero_grad``, three times.  The allocated peak must stay within the limit.  With 5 % more samples (at least
one) than the largest batch that is said to fit, it must exceed the limit.  Each model has a section in RESULTS.md.

The sample models are those of ``make samples``.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.results import table, write_section
from memopt_cli.inputs.batch_axis import with_batch
from memopt_cli.loading.input_spec import make_inputs, read_spec_file
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.pipeline import recommend_batch
from memopt_cli.records import BatchAdvice, BatchRequest, ModelSource, StepSettings, Trust
from memopt_cli.records.progress import Progress
from memopt_cli.text.units import format_bytes, parse_bytes
from memopt_cli.trace.log import resident_bytes
from memopt_cli.training.step import TrainingStep, seeds_of_backward

SAMPLES = Path(__file__).parents[1] / "sample_models"
CASES = {
    "char_rnn": ("24MiB", 512),
    "gpt": ("450MiB", 12),
    "lif_rnn": ("24MiB", 1024),
    "resnet": ("600MiB", 48),
    "spiking_vgg": ("500MiB", 6),
}
"""Model -> memory limit, and global batch: the samples of an optimizer step."""
OPTIMIZER_STEPS = 3
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
OPTIONS = {"sgd": {"momentum": 0.9}, "adamw": {}}
HEADER = ["model", "limit", "advice", "its peak", "of the limit", "largest", "5 % more", "its peak", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Advice for one model, and the peaks of training with it."""

    model: str
    limit_bytes: int
    batch: int
    """Samples of a micro-batch, as advised."""
    micro_batches: int
    """Micro-batches of an optimizer step, as advised."""
    peak_bytes: int
    """Allocated peak of training as advised."""
    largest: int
    """Largest batch that fits, as memopt says."""
    more: int
    """Batch that is 5 % larger than ``largest``."""
    more_bytes: int
    """Allocated peak of training with the batch ``more``."""

    @property
    def is_right(self) -> bool:
        """Whether the advised batch fits, and one that is 5 % larger than the largest does not."""
        return self.peak_bytes <= self.limit_bytes < self.more_bytes

    def cells(self) -> list[str]:
        """Return the cells under :data:`HEADER`."""
        share = f"{self.peak_bytes / self.limit_bytes:.1%}"
        advised = f"{self.micro_batches} of {self.batch}"
        peaks = format_bytes(self.peak_bytes), format_bytes(self.more_bytes)
        verdict = "yes" if self.is_right else "NO"
        return [
            self.model,
            format_bytes(self.limit_bytes),
            advised,
            peaks[0],
            share,
            str(self.largest),
            str(self.more),
            peaks[1],
            verdict,
        ]


def run(model: str, optimizer: str) -> Case:
    """Ask memopt for advice, then train with the advised batch, and with a larger one."""
    limit, global_batch = CASES[model]
    limit_bytes = parse_bytes(limit)
    request = BatchRequest(
        source=ModelSource(location=str(_file(model)), trust=Trust(code_paths=(str(SAMPLES.parent),))),
        spec=None,
        settings=StepSettings(optimizer=optimizer),
        memory=limit_bytes,
        global_batch=global_batch,
    )
    found = recommend_batch(request, progress=Progress(), ask=None)
    advice, advised = found.rows[found.chosen].outcome, found.accumulation
    assert isinstance(advice, BatchAdvice)
    assert advised is not None
    largest = advice.recommended_batch
    more = largest + max(1, math.ceil(0.05 * largest))
    return Case(
        model=model,
        limit_bytes=limit_bytes,
        batch=advised.batch,
        micro_batches=advised.steps,
        peak_bytes=_alone(model, optimizer, advised.batch, advised.steps),
        largest=largest,
        more=more,
        more_bytes=_alone(model, optimizer, more, max(2, advised.steps)),
    )


def _file(model: str) -> Path:
    return SAMPLES / "build" / f"{model}.pt"


def _alone(model: str, optimizer: str, batch: int, micro_batches: int) -> int:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        return process.submit(trained_peak_bytes, model, optimizer, batch, micro_batches).result()


def trained_peak_bytes(model: str, optimizer: str, batch: int, micro_batches: int) -> int:
    """Return the allocated peak of training in bytes."""
    sys.path.insert(0, str(SAMPLES.parent))
    net = importlib.import_module(f"sample_models.{model}").build().train()
    spec = with_batch(read_spec_file(_file(model).with_suffix(".inputs.yaml")), batch)
    args, kwargs = make_inputs(spec, seed=0, device="cpu", dtype=None)
    updates = OPTIMIZERS[optimizer](net.parameters(), lr=1e-4, **OPTIONS[optimizer])

    def train() -> None:
        for _ in range(OPTIMIZER_STEPS):
            for _ in range(micro_batches):
                roots, cotangents = seeds_of_backward(net(*args, **kwargs), None, 0)
                torch.autograd.backward(roots, cotangents)
                del roots, cotangents
            updates.step()
            updates.zero_grad()

    held = resident_bytes(TrainingStep(model=net, args=args, kwargs=kwargs, settings=StepSettings()))
    return measure_allocated(lambda entered: train(), "cpu", held).peak_bytes


def main() -> int:
    """Run the models that ``--models`` names; return 1 if the advice for one of them is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    arguments = parser.parse_args()
    is_right = True
    for model in arguments.models.split(","):
        case = run(model, arguments.optimizer)
        report(case, arguments.optimizer)
        is_right &= case.is_right
    return 0 if is_right else 1


def report(case: Case, optimizer: str) -> None:
    """Print the results, and write them to RESULTS.md."""
    print(" | ".join(case.cells()), flush=True)
    command = f"python benchmarks/global_batch.py --models {case.model} --optimizer {optimizer}"
    title = f"recommend-batch --global-batch: {case.model}, {optimizer}"
    write_section(title, command, table(HEADER, [case.cells()]))


if __name__ == "__main__":
    sys.exit(main())
