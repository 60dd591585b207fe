"""Compare ways to take the same training step: memory and time, each way in a process of its own.

Each way (the plain model, a plan, ``torch.compile`` ...) is a :class:`Contestant`.  Its allocated peak is measured
first.  Then the contestants take steps in turns, so that the load of the machine is the same for all.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from torch import nn

from benchmarks.results import table
from memopt_cli.errors import first_line
from memopt_cli.loading import load_model
from memopt_cli.loading.input_spec import make_inputs
from memopt_cli.loading.user_function import user_function
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.measure.jobs import Subject
from memopt_cli.trace import resident_bytes
from memopt_cli.training.step import TrainingStep, move_model, seed_everything

HEAT = 5
"""Most contestants at a time besides the first: each takes up to 3 GiB of memory on SpikingJelly's VGG."""
Prepare = Callable[[TrainingStep], nn.Module]
"""Function from a step to the model that is run; it must pickle, to reach the contestant's process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Report of a contestant's process once it is ready to take steps."""

    peak_bytes: int
    """Allocated peak of a step in bytes."""
    prepared_s: float
    """Seconds that ``prepare`` took."""


@dataclass
class Contestant:
    """Way to take the step, with its process and its times."""

    name: str
    subject: Subject
    prepare: Prepare
    search_s: float | None = None
    """Seconds of the search for this way; if ``None``, ``start`` sets it to the seconds that ``prepare`` took."""
    measuring_s: float = 0.0
    """Seconds of the search spent on measuring steps; 0 if none was measured."""
    times_s: list[float] = field(default_factory=list)
    """Seconds of each step so far."""
    beside_s: list[float] = field(default_factory=list)
    """Seconds of the first contestant's steps in the same rounds; empty for the first itself."""
    _process: BaseProcess | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def ratio(self) -> float:
        """Median ratio of a step to the first contestant's in the same round; 1 for the first itself."""
        pairs = zip(self.times_s, self.beside_s or self.times_s, strict=True)
        return statistics.median(own / first for own, first in pairs)

    def start(self, threads: int) -> str:
        """Start the process unless it runs, and measure the peak; return why that fails, or an empty text."""
        if self._process is not None:
            return ""
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, self.subject, self.prepare, threads), daemon=True)
        process.start()
        other.close()
        try:
            answer = self._pipe.recv()
        except EOFError:
            return "its process ended"
        if isinstance(answer, str):
            return answer
        self._process, self.peak_bytes = process, int(answer.peak_bytes)
        self.search_s = answer.prepared_s if self.search_s is None else self.search_s
        return ""

    def take_step(self) -> None:
        """Take one more step, and append its seconds to ``times_s``."""
        self._pipe.send(True)
        self.times_s.append(self._pipe.recv())

    def stop(self) -> None:
        """End the contestant's process."""
        assert self._process is not None
        self._process.kill()
        self._process.join()


def make_step(subject: Subject) -> TrainingStep:
    """Return a step of the model of ``subject``, loaded in this process."""
    model = move_model(load_model(subject.source).module, subject.settings)
    args, kwargs = make_inputs(subject.spec, seed=subject.settings.seed, device=subject.settings.device, dtype=None)
    loss = user_function(subject.settings.loss, "--loss") if subject.settings.loss else None
    return TrainingStep(model=model, args=args, kwargs=kwargs, settings=subject.settings, loss=loss)


def take(step: TrainingStep) -> None:
    """Run forward and backward; gradients are ``None`` before and after."""
    seed_everything(step.settings.seed)
    step.backward(step.forward())
    step.model.zero_grad(set_to_none=True)


def contest(
    contestants: Iterable[Contestant], rounds: int, threads: int
) -> Iterator[tuple[list[Contestant], list[str]]]:
    """Run :data:`HEAT` contestants at a time beside the first; then yield all that ran, and why others failed.

    Raises :class:`RuntimeError` if the first cannot run.
    """
    waiting = iter(contestants)
    first = next(waiting)
    if reason := _started(first, threads):
        raise RuntimeError(reason)
    done, failed = [first], list[str]()
    running: list[Contestant] = []
    try:
        while heat := list(islice(waiting, HEAT)):
            reasons = [_started(one, threads) for one in heat]
            failed += filter(None, reasons)
            running = [one for one, reason in zip(heat, reasons, strict=True) if not reason]
            for _ in range(rounds):
                first.take_step()
                for one in running:
                    one.take_step()
                    one.beside_s.append(first.times_s[-1])
            for one in running:
                one.stop()
            done += running
            yield done, failed
    finally:
        for one in (first, *running):
            one.stop()


def _started(one: Contestant, threads: int) -> str:
    reason = one.start(threads)
    shown = reason or f"{one.peak_bytes / 2**20:.1f} MiB, found in {one.search_s:.1f} s"
    print(f"{one.name}: {shown}", file=sys.stderr, flush=True)
    return f"{one.name}: {reason}" if reason else ""


def left_out(failed: Sequence[str]) -> str:
    """Return a paragraph for each contestant that could not take part."""
    return "".join(f"\n\nLeft out: {reason}" for reason in failed)


def contest_table(found: Sequence[Contestant]) -> str:
    """Return a table of peaks, median steps, and median ratios to the first contestant's step in the same round."""
    first = found[0]
    rows = [
        [
            one.name,
            f"{one.search_s:.1f} s",
            f"{one.measuring_s:.1f} s" if one.measuring_s else "",
            f"{one.peak_bytes / 2**20:.1f} MiB",
            f"{one.peak_bytes / first.peak_bytes:.2f}",
            f"{statistics.median(one.times_s):.3f} s",
            f"{one.ratio:.2f}",
        ]
        for one in found
    ]
    return table(["", "found in", "of it measuring", "allocated peak", "of as it is", "step", "of as it is"], rows)


def _serve(pipe: Connection, subject: Subject, prepare: Prepare, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        step = make_step(subject)
        started = time.perf_counter()
        step = replace(step, model=prepare(step))
        prepared_s = time.perf_counter() - started
        take(step)
        peak = measure_allocated(lambda _: take(step), subject.settings.device, resident_bytes(step)).peak_bytes
        pipe.send(Ready(peak, prepared_s))
    except Exception as error:  # not every way works for every model: the reason is the answer
        pipe.send(first_line(error))
        return
    while pipe.recv():
        started = time.perf_counter()
        take(step)
        pipe.send(time.perf_counter() - started)
