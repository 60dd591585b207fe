"""Compare plans that offload tensors with plans that do not, and with PyTorch's hooks that offload all of them.

    python benchmarks/offload.py [MODEL ...] [--device cpu] [--rounds 5] [--threads 2] [--search-time 20] [--small]

Models: gpt, resnet and spiking_vgg (``make samples``), and unet.  A step is taken plainly; with PyTorch's
``save_on_cpu``, which copies all saved tensors to host memory, pinned if there is a GPU; with hooks that write all of
them to a file; and under memopt's plans for half of the activation peak, without and with ``--offload`` (``disk`` on
the CPU, ``host`` on a GPU).  Each way has its own model in this process, and the ways take turns.

A dry run predicts the peak of memopt's plans.  On the CPU the peak is counted from tensors; the script ends with exit
code 1 if a count differs from its prediction by a byte.  On a GPU the peak is the allocator's.  Each row is printed as
soon as it is known.  ``--small`` tries the script on a tiny GPT, and writes nothing to ``benchmarks/RESULTS.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from benchmarks.contest import make_step, take
from benchmarks.planning import bench, opened, prepared
from benchmarks.plans import OneStepEach, no_optimizer
from benchmarks.results import table, this_command, write_section
from memopt_cli import trace
from memopt_cli.errors import NothingFitsError
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure import processes
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.measure.jobs import Subject
from memopt_cli.pipeline.plans.goal import GoalSearch
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import InputSpec, PlaceName, Plan, StepPeaks, StepSettings
from memopt_cli.report.optimization import in_words
from memopt_cli.runtime.places.interface import counted_elsewhere
from memopt_cli.text.units import format_bytes, format_seconds
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep, synchronize

MODELS = ("gpt", "resnet", "spiking_vgg", "unet")
SEARCH_S = 20.0
HEADER = [
    "",
    "way",
    "predicted",
    "counted",
    "step",
    "of plain",
    "predicted",
    "waits simulated",
    "measured",
    "elsewhere",
]


@contextlib.contextmanager
def everything_in_file() -> Iterator[None]:
    """Write each tensor that autograd saves to a file, and read it in backward; neither overlaps with computation."""
    with tempfile.TemporaryFile(buffering=0) as file:

        def write(tensor: Tensor) -> tuple[int, Tensor, torch.device]:
            at = file.seek(0, os.SEEK_END)
            file.write(_raw(tensor.detach().cpu().contiguous()))
            return at, tensor.new_empty(tensor.shape, device="meta"), tensor.device

        def read(written: tuple[int, Tensor, torch.device]) -> Tensor:
            at, form, device = written
            found = torch.empty_like(form, device="cpu")
            file.seek(at)
            file.readinto(_raw(found))
            return found.to(device)

        with saved_tensors_hooks(write, read):
            yield


def _raw(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def saved_bytes(step: TrainingStep) -> int:
    """Return the bytes of all tensors that autograd saves in ``step``, each as often as it is saved."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        take(step)
    return sum(sizes)


@dataclass(slots=True)
class Way:
    """Way to take a step, with its predictions and measurements."""

    name: str
    plan: Plan = field(default_factory=Plan)
    hooks: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    predicted_bytes: int | None = None
    """Peak of a dry run in bytes; ``None`` if there was none."""
    simulated_s: float | None = None
    """Seconds that the step waits for transfers, by the cost model; ``None`` without a plan of memopt."""
    slowdown: float | None = None
    """Step time by the cost model, divided by that of the plain step; ``None`` without a plan of memopt."""
    counted_bytes: int = 0
    """Measured peak on the device in bytes."""
    elsewhere_bytes: int = 0
    """Most bytes in other places at once."""
    times_s: list[float] = field(default_factory=list)
    """Seconds of each step."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds that each step waited for transfers."""

    @property
    def step_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.times_s)

    @property
    def sends_all(self) -> bool:
        """Whether hooks offload all tensors that autograd saves."""
        return self.hooks is not contextlib.nullcontext

    def row(self, model: str, plain_s: float, device: str) -> list[str]:
        """Return its row in the table of ``model``, whose plain step takes ``plain_s``."""
        waits = ["", ""]
        if self.plan.sends and self.simulated_s is not None:
            measured = "–" if device != "cpu" else format_seconds(statistics.median(self.waits_s))
            waits = [format_seconds(self.simulated_s), measured]
        predicted = "" if self.predicted_bytes is None else format_bytes(self.predicted_bytes)
        elsewhere = format_bytes(self.elsewhere_bytes) if self.elsewhere_bytes else ""
        expected = "" if self.slowdown is None else f"{self.slowdown:.2f}x"
        step = [format_seconds(self.step_s), f"{self.step_s / plain_s:.2f}x", expected]
        return [model, self.name, predicted, format_bytes(self.counted_bytes), *step, *waits, elsewhere]


def ways_of(ready: PreparedModel, search_s: float) -> Iterator[Way]:
    """Yield the ways to take the step of ``ready``, those with memopt's plans for half of its activation peak last.

    ``search_s``: seconds of the search for each plan.
    """
    yield Way("plain")
    yield Way("`save_on_cpu`", hooks=lambda: save_on_cpu(pin_memory=True))
    yield Way("everything in a file", hooks=everything_in_file)
    device = ready.subject.settings.device
    place: PlaceName = "disk" if device == "cpu" else "host"
    ready = replace(ready, subject=replace(ready.subject, place=place))
    ways: tuple[tuple[str, PlaceName], ...] = (("", "device"), (f" --offload {place}", place))
    with bench(ready.subject.source.location, ready, search_s) as one:
        limit_bytes = (one.original.allocated_peak_bytes + one.original.resident_bytes) // 2
        for flag, allowed in ways:
            one.search.probes.prolong()
            search = GoalSearch(
                search=replace(one.search, planner=one.planner(allowed)),
                measurements=OneStepEach(prepared=one.prepared, warm_up=False, bench=one),
                in_backward=no_optimizer(one),
            )
            try:
                plan = search.within(limit_bytes).plan
            except NothingFitsError as error:
                print(f"memopt{flag}: {error.message}", flush=True)
                continue
            counted = one.probes.count(plan)
            assert isinstance(counted, StepPeaks), "it was counted before"
            predicted = counted.tensor_peak_bytes if device == "cpu" else counted.allocated_peak_bytes
            expected = one.model.predict(plan)
            yield Way(
                f"memopt{flag}: {in_words(plan)}",
                plan,
                predicted_bytes=predicted,
                simulated_s=expected.waits_s,
                slowdown=expected.step_s / one.model.step_s,
            )


def take_turns(ways: Sequence[Way], subject: Subject, rounds: int) -> None:
    """Count the peak of each of the ``ways``, and time their steps in turns."""
    steps = [make_step(subject) for _ in ways]
    for way, step in zip(ways, steps, strict=True):
        apply_plan(step.model, way.plan)
        # Before any other step: neurons keep a potential for the next one, which a dry run of the file does not know.
        way.counted_bytes = _peak(way, step)
        _take(way, step)
        if way.sends_all:
            way.elsewhere_bytes = saved_bytes(step)
        way.times_s.clear()
        way.waits_s.clear()
    for _ in range(rounds):
        for way, step in zip(ways, steps, strict=True):
            _take(way, step)


def _take(way: Way, step: TrainingStep) -> None:
    device = step.settings.device
    synchronize(device)
    started = time.perf_counter()
    with counted_elsewhere() as elsewhere, way.hooks():
        take(step)
        synchronize(device)
    way.times_s.append(time.perf_counter() - started)
    way.waits_s.append(elsewhere.waited_s)
    way.elsewhere_bytes = max(way.elsewhere_bytes, elsewhere.peak_bytes)


def _peak(way: Way, step: TrainingStep) -> int:
    device = step.settings.device
    if device == "cpu":
        with way.hooks():
            return trace.count_step(step).tensor_peak_bytes
    before_bytes, resident_bytes = torch.cuda.memory_allocated(device), trace.resident_bytes(step)
    found = measure_allocated(lambda _: _take(way, step), device, before_bytes)
    # The models of the other ways are on the device, too: they are in ``before_bytes``, but not in ``resident_bytes``.
    return found.peak_bytes - before_bytes + resident_bytes


def rows_of(model: str, ready: PreparedModel, rounds: int, search_s: float) -> Iterator[tuple[Way, list[str]]]:
    """Yield each way to take the step of ``ready``, called ``model``, with its row."""
    ways, device = list(ways_of(ready, search_s)), ready.subject.settings.device
    take_turns(ways, ready.subject, rounds)
    for way in ways:
        yield way, way.row(model, ways[0].step_s, device)


def main() -> None:
    """Measure, print the rows, and write them unless ``--small`` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], metavar="MODEL")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--search-time", type=float, default=SEARCH_S)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names, rows, wrong = ["tiny GPT"] if options.small else options.models or MODELS, list[list[str]](), 0
    print(" | ".join(HEADER), flush=True)
    with processes.keep_server(early=True):
        for name in names:
            ready = tiny(options.device) if options.small else prepared(name, options.device)
            for way, row in rows_of(name, ready, options.rounds, options.search_time):
                wrong += options.device == "cpu" and way.predicted_bytes not in (None, way.counted_bytes)
                rows.append(row)
                print(" | ".join(row), flush=True)
            if not options.small:
                text = (
                    f"{options.threads} threads, medians of {options.rounds} steps in turns. memopt's plans are those "
                    f"for half of the activation peak. Peaks that differ from the dry run's: {wrong}.\n\n"
                )
                title = f"Offload on {options.device}: {', '.join(names)}"
                write_section(title, this_command(), text + table(HEADER, rows))
    raise SystemExit(min(wrong, 1))


def tiny(device: str) -> PreparedModel:
    """Open a GPT of three blocks whose tensors are just large enough to be sent."""
    inputs = tuple(parse_tensor(f"{name}:16x64@int64=0..100") for name in ("input_ids", "targets"))
    spec = InputSpec(tensors=inputs, source="here")
    return opened("benchmarks.gpu:small_gpt", spec, StepSettings(device=device))


if __name__ == "__main__":
    main()
