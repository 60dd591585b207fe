"""Several threads: some that train one model, forward and backward each, and one that draws during the training."""

from __future__ import annotations

import copy
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime import generators, is_recomputing
from memopt_cli.training.apply import apply_plan
from tests.rows import quick
from tests.zoo.models import Parts

THREADS, STEPS = 4, 12
KEPT = ("aten::addmm",)


@pytest.fixture
def busy() -> Iterator[None]:
    """Threads give way to each other all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], object]) -> None:
    """Run the functions in threads of their own, and raise what one of them raised."""
    raised: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


class Block(Parts, before=lambda: nn.Linear(8, 8), norm=lambda: nn.BatchNorm1d(8), after=lambda: nn.Linear(8, 8)):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.norm(self.before(x)).tanh())
        return y + x


def in_this_thread(output: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output.square().sum(), parameters)


def in_another(output: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    found: list[tuple[Tensor, ...]] = []
    thread = threading.Thread(target=lambda: found.append(in_this_thread(output, parameters)))
    thread.start()
    thread.join()
    return found[0]


PLANS = {
    "segments": Plan(segments=(SegmentPlan(path="1"), SegmentPlan(path="2"))),
    "packed": Plan(packed=True, segments=(SegmentPlan(path="1"),)),
    "nested": Plan(segments=(SegmentPlan(path=""), SegmentPlan(path="1"))),
    "kept": Plan(segments=(SegmentPlan(path="1", keep=KEPT), SegmentPlan(path="2"))),
    "chunks": Plan(segments=(SegmentPlan(path="1", chunks=2, batch_statistics=True), SegmentPlan(path="3", chunks=3))),
}


TRAINED = [(backward, name) for backward in (in_this_thread, in_another) for name in PLANS]
PROVEN = {(in_another, name) for name in PLANS} | {(in_this_thread, name) for name in ("segments", "chunks")}


@pytest.mark.slow
@pytest.mark.parametrize(("backward", "name"), quick(TRAINED, PROVEN))
def test_several_train_one_model(
    backward: Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]], name: str, busy: None
) -> None:
    """Gradients are those of each thread's own batch, and no recomputation takes back what others count."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 8))
    optimized = copy.deepcopy(plain)
    apply_plan(optimized, PLANS[name])
    batches = torch.randn(THREADS, STEPS, 6, 8)
    found: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def work(number: int) -> None:
        for step in range(STEPS):
            found[number, step] = backward(optimized(batches[number, step]), list(optimized.parameters()))

    in_threads(work)
    for (number, step), gradients in found.items():
        expected = in_this_thread(plain(batches[number, step]), list(plain.parameters()))
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)
    counted = [int(b) for name, b in optimized.named_buffers() if name.endswith("num_batches_tracked")]
    assert counted == [THREADS * STEPS] * 2


class Loader:
    """Draws a batch in a thread of its own whenever it is asked for one, and the first thread waits for it."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []
        self._asked: queue.Queue[bool] = queue.Queue()
        self._ready: queue.Queue[Tensor] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __call__(self) -> Tensor:
        self._asked.put(True)
        return self._ready.get(timeout=60)

    def close(self) -> None:
        self._asked.put(False)
        self._thread.join()

    def _work(self) -> None:
        while self._asked.get():
            batch = torch.randn(6, 8)
            self.drawn.append((batch.tolist(), random.random(), float(np.random.random())))
            self._ready.put(batch)


class Asking(Parts, linear=lambda: nn.Linear(8, 8)):
    """Has the loader draw in the middle of its forward, the first time that runs alone."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        for ask in () if is_recomputing() else pending:
            ask()
        return y.square()


pending: list[Callable[[], Tensor]] = []
"""What a forward of :class:`Asking` calls."""


def trained_beside_a_loader(model: nn.Module, when: str) -> list[Any]:
    """Return outputs, parameters, the loader's draws and the generators' positions after both threads."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    loader, left = Loader(), list[Any]()
    x = loader()
    for _ in range(4):
        hook = model[1].register_full_backward_hook(lambda *_: (loader(), None)[1]) if when == "in backward" else None
        pending.extend([loader] if when == "in forward" else [])
        output = model(x)
        pending.clear()
        x = loader() if when == "between" else x
        output.square().mean().backward()
        x = x if when == "between" else loader()
        if hook is not None:
            hook.remove()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        left.append(output.tolist())
    loader.close()
    assert len({str(draw) for draw in loader.drawn}) == len(loader.drawn)
    return [*left, [p.tolist() for p in model.parameters()], loader.drawn, torch.rand(3).tolist(), random.random()]


LOADED = {
    "segments": Plan(segments=tuple(SegmentPlan(path=path) for path in "012")),
    "packed": Plan(packed=True, segments=(SegmentPlan(path="1"),)),
    "nested": Plan(segments=(SegmentPlan(path=""), SegmentPlan(path="1"))),
    "kept": Plan(segments=(SegmentPlan(path="0", keep=KEPT), SegmentPlan(path="1", keep=KEPT))),
}


@pytest.mark.slow
@pytest.mark.parametrize("when", ["between", "in backward", "after", "in forward"])
@pytest.mark.parametrize("plan", LOADED.values(), ids=list(LOADED))
def test_a_loader_draws_beside_it(plan: Plan, when: str) -> None:
    """No draw is given twice, and none is missing to the model: both threads do as they do without the plan."""
    torch.manual_seed(0)
    drawing = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU())
    plain = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), drawing, Asking())
    optimized = copy.deepcopy(plain)
    apply_plan(optimized, plan)
    assert trained_beside_a_loader(optimized, when) == trained_beside_a_loader(plain, when)


_COLLECTING = """
import gc, threading, time
from memopt_cli.runtime.generators import Generators

gc.callbacks.append(lambda phase, info: time.sleep(0.0001))
gc.set_threshold(1)
threads = [threading.Thread(target=lambda: [Generators().restore() for _ in range(100)]) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.slow
def test_garbage_may_be_collected_while_a_generator_is_read() -> None:
    subprocess.run([sys.executable, "-c", _COLLECTING], check=True, timeout=120)


class Contended(dict[Any, Any]):
    """Another thread writes to it right after whoever does."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, "what another thread found")


def test_a_thread_gets_the_positions_that_it_found_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_latest", Contended())
    start = generators.Generators()
    drawn = torch.rand(3)
    start.restore()
    assert torch.equal(torch.rand(3), drawn)
