"""What a segment costs beside its kernels, on layers of a few numbers: where the cost model's constants come from.

    python benchmarks/overhead.py [--rounds 25]

CPU time of one thread, medians: of a step plainly, in a segment, and in one that keeps the outputs of its products.
Then of a step of norms in a segment, which finds their statistics again or notes them, by the size of their input.
Last, of norms in chunks that gather the statistics of the batch, in one pass more than there are norms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.results import table, this_command, write_section
from memopt_cli.apply import apply_plan, remove_plan
from memopt_cli.plan.cost_model import OP_S, SEGMENT_OP_S, SEGMENT_S
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime import found_statistics

_LAYERS = 20
_CHUNKS = 16
_NORM_COUNTS = [1, 2, 4, 8]
_NORM_SIZES = [2**power for power in range(14, 21)]


def _linear() -> tuple[nn.Module, Tensor, str]:
    layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(8, 8), nn.GELU())]
    return nn.Sequential(nn.Sequential(*layers)), torch.randn(4, 8), "aten::addmm"


def _convolution(*, normalized: bool) -> tuple[nn.Module, Tensor, str]:
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        norm = [nn.BatchNorm2d(4)] if normalized else []
        layers += [nn.Conv2d(4, 4, 3, padding=1), *norm, nn.ReLU()]
    return nn.Sequential(nn.Sequential(*layers)), torch.randn(2, 4, 4, 4), "aten::convolution"


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, str]]] = {
    "linear, GELU": _linear,
    "convolution, ReLU": lambda: _convolution(normalized=False),
    "convolution, norm, ReLU": lambda: _convolution(normalized=True),
}


def _median_s(run: Callable[[], object], rounds: int) -> float:
    """Seconds of CPU time."""
    taken = []
    for _ in range(rounds + 1):
        started = time.process_time()
        run()
        taken.append(time.process_time() - started)
    return statistics.median(taken[1:])


def _row(name: str, rounds: int) -> list[str]:
    model, x, product = MODELS[name]()

    def forward() -> Tensor:
        with torch.no_grad():
            out: Tensor = model(x)
        return out

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    plain_s, forward_s = _median_s(step, rounds), _median_s(forward, rounds)
    more = []
    for keep in ((), (product,)):
        apply_plan(model, Plan(segments=(SegmentPlan(path="0", keep=keep),)))
        more.append((_median_s(step, rounds) - plain_s - forward_s) / _LAYERS)
        remove_plan(model)
    return [name, f"{forward_s / _LAYERS * 1e6:.0f} µs", *(f"{s * 1e6:.0f} µs" for s in more)]


def _norm_row(elements: int, rounds: int) -> list[str]:
    """Each of a few norms, whose statistics are found again and noted, in turns."""
    x = torch.randn(elements // 1024, 16, 8, 8, requires_grad=True)
    times: dict[int, list[float]] = {elements + 1: [], 0: []}
    models = [nn.Sequential(nn.Sequential(*(nn.BatchNorm2d(16) for _ in range(_LAYERS)))) for _ in times]
    for model in models:
        apply_plan(model, Plan(segments=(SegmentPlan(path="0"),)))
    for _ in range(rounds + 1):
        for (least, taken), model in zip(times.items(), models, strict=True):
            found_statistics._LEAST_ELEMENTS = least
            started = time.process_time()
            model(x).sum().backward()
            taken.append(time.process_time() - started)
    again, noted = (statistics.median(taken[1:]) / _LAYERS for taken in times.values())
    return [f"{elements}", f"{again * 1e6:.0f} µs", f"{noted * 1e6:.0f} µs"]


def _chunked_row(norms: int, rounds: int) -> list[str]:
    """Of each chunk, and of that what is left for every time it comes to a norm."""
    layers = [layer for _ in range(norms) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    model, x = nn.Sequential(nn.Sequential(*layers)), torch.randn(_CHUNKS, 4, 2, 2, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    plain_s = _median_s(step, rounds)
    apply_plan(model, Plan(segments=(SegmentPlan(path="0", chunks=_CHUNKS, batch_statistics=True),)))
    chunk_s = (_median_s(step, rounds) - plain_s) / _CHUNKS
    ops = len(layers) + sum(3 * before + 2 for before in range(norms))
    left_s = chunk_s - SEGMENT_S * (norms + 1) - (SEGMENT_OP_S + 3 * OP_S) * ops
    return [f"{norms}", f"{chunk_s * 1e3:.1f} ms", f"{left_s / (norms * (norms + 3) / 2) * 1e6:.0f} µs"]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [_row(name, options.rounds) for name in MODELS]
    header = ["", "forward", "a segment adds beside forward", "one that keeps products adds"]
    segments = table(header, rows)
    text = f"CPU time for each of {_LAYERS} layers, one thread, medians of {options.rounds} steps.\n\n"
    norms = table(
        ["elements", "a norm, found again", "noted"], [_norm_row(elements, options.rounds) for elements in _NORM_SIZES]
    )
    header = ["norms", f"a chunk of {_CHUNKS} adds", "of that, a norm each time"]
    chunked = table(header, [_chunked_row(count, options.rounds) for count in _NORM_COUNTS])
    text += f"{segments}\n\n{norms}\n\n{chunked}"
    write_section("Segments: cost beside their kernels", this_command(), text)
    print(text)


if __name__ == "__main__":
    main()
