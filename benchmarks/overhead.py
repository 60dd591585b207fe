"""What a segment costs beside its kernels, on layers of a few numbers: where the cost model's constants come from.

    python benchmarks/overhead.py [--rounds 25]

CPU time of one thread, medians of steps, plainly and with one segment in 1, 2 and 4 chunks.  What the segment adds
beside one forward is a sum over its runs, the modules and operators in these, and the operators that chunks run more
often; the constants are the least squares of the relative errors.  Then what it costs an operator that its segment
keeps the outputs of products; norms in chunks that gather the statistics of the batch, in one pass more than there are
norms; and the peer: blocks of a few numbers as segments, packed, and in PyTorch's own checkpoint, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.results import table, this_command, write_section
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.search.plan.cost_model import (
    MODULE_S,
    NORM_S,
    OP_S,
    PRODUCT_S,
    SEGMENT_OP_S,
    SEGMENT_S,
    CostModel,
    Passes,
    Rerun,
)
from memopt_cli.trace import FakeStep
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.step import Step, synchronize

_LAYERS = 20
_COUNTS = (5, 20, 60)
_CHUNKS = 16
_NORM_COUNTS = [1, 2, 4, 8]


class _Functions(nn.Module):
    """Operators of one module."""

    def __init__(self, layers: int, layer: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.linear, self._layers, self._layer = nn.Linear(8, 8), layers, layer

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._layers):
            x = self._layer(x, self.linear)
        return x


def _product(x: Tensor, linear: nn.Linear) -> Tensor:
    return F.gelu(F.linear(x, linear.weight, linear.bias))


def _elementwise(x: Tensor, _: nn.Linear) -> Tensor:
    return x.tanh() * 0.5


def _linears(layers: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.GELU())))


def _convolutions(layers: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())))


_KEPT = [
    ("products, functions", "aten::addmm"),
    ("linear, GELU", "aten::addmm"),
    ("convolution, ReLU", "aten::convolution"),
]
_ROWS, _IMAGES = torch.randn(8, 8, requires_grad=True), torch.randn(8, 4, 4, 4, requires_grad=True)
MODELS: dict[str, tuple[Callable[[int], nn.Module], Tensor]] = {
    "products, functions": (lambda layers: _Functions(layers, _product), _ROWS),
    "elementwise, functions": (lambda layers: _Functions(layers, _elementwise), _ROWS),
    "linear, GELU": (_linears, _ROWS),
    "convolution, ReLU": (_convolutions, _IMAGES),
}


def _median_s(run: Callable[[], object], rounds: int) -> float:
    """Seconds of CPU time."""
    taken = []
    for _ in range(rounds + 1):
        started = time.process_time()
        run()
        taken.append(time.process_time() - started)
    return statistics.median(taken[1:])


class _Segment:
    """A module as a segment: what that adds to its step."""

    def __init__(self, module: nn.Module, x: Tensor, rounds: int) -> None:
        self._model, self._x, self._rounds = nn.Sequential(module), x, rounds
        step = Step(model=self._model, args=(x,), kwargs={}, settings=StepSettings(), loss=None, optimizer=None)
        trace = FakeStep(step).record(batch=len(x))
        self.rerun = CostModel(trace).rerun(next(call for call in trace.calls if call.path == "0"))
        with torch.no_grad():
            self._forward_s = _median_s(lambda: self._model(x), rounds)
        self._plain_s = _median_s(self._step, rounds)

    def _step(self) -> None:
        self._model(self._x).sum().backward()
        self._model.zero_grad()

    def added_s(self, segment: SegmentPlan) -> float:
        """Beside running forward once more."""
        apply_plan(self._model, Plan(segments=(segment,)))
        try:
            for _ in range(_WARM_UP):
                self._step()
            return _median_s(self._step, self._rounds) - self._plain_s - self._forward_s
        finally:
            remove_plan(self._model)


_WARM_UP = 17
"""Steps in which a segment is compared with its recomputation twice."""


def _terms(chunks: int, rerun: Rerun) -> list[int]:
    """How often each constant counts."""
    again = 3 * (chunks - 1)
    return [chunks, chunks * rerun.modules, chunks * rerun.ops, again * rerun.ops, again * rerun.products]


def _fitted(rounds: int) -> str:
    cases = [
        (f"{name} x {layers}", chunks, segment.rerun, segment.added_s(SegmentPlan(path="0", chunks=chunks)))
        for name, (make, x) in MODELS.items()
        for layers in _COUNTS
        for segment in [_Segment(make(layers), x, rounds)]
        for chunks in (1, 2, 4)
    ]
    terms = torch.tensor([_terms(chunks, rerun) for _, chunks, rerun, _ in cases], dtype=torch.float64)
    added = torch.tensor([added_s for *_, added_s in cases], dtype=torch.float64)
    fit = torch.linalg.lstsq(terms / added[:, None], torch.ones(len(cases), 1, dtype=torch.float64)).solution[:, 0]
    now = torch.tensor([SEGMENT_S, MODULE_S, SEGMENT_OP_S, OP_S, PRODUCT_S], dtype=torch.float64)
    names = ["SEGMENT_S", "MODULE_S", "SEGMENT_OP_S", "OP_S", "PRODUCT_S"]
    constants = [[name, *(f"{s * 1e6:.1f} µs" for s in pair)] for name, *pair in zip(names, fit, now, strict=True)]
    rows = [
        [
            name,
            str(chunks),
            f"{added_s * 1e3:.1f} ms",
            f"{float(wanted @ fit) / added_s:.2f}",
            f"{float(wanted @ now) / added_s:.2f}",
        ]
        for (name, chunks, _, added_s), wanted in zip(cases, terms, strict=True)
    ]
    values = table(["constant", "fitted", "the cost model has"], constants)
    return values + "\n\n" + table(["layers", "chunks", "adds", "fitted / measured", "cost model / measured"], rows)


def _keep_row(name: str, product: str, rounds: int) -> list[str]:
    make, x = MODELS[name]
    segment = _Segment(make(_LAYERS), x, rounds)
    whole_s, keeping_s = (segment.added_s(SegmentPlan(path="0", keep=keep)) for keep in ((), (product,)))
    return [name, f"{(keeping_s - whole_s) / (2 * segment.rerun.ops) * 1e6:.0f} µs"]


def _chunked_row(norms: int, rounds: int) -> list[str]:
    """Of each chunk, and of that what is left for every time it comes to a norm."""
    layers = [layer for _ in range(norms) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    model, x = nn.Sequential(nn.Sequential(*layers)), torch.randn(_CHUNKS, 4, 2, 2, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    segment = SegmentPlan(path="0", chunks=_CHUNKS, batch_statistics=True)
    plain_s = _median_s(step, rounds)
    apply_plan(model, Plan(segments=(segment,)))
    chunk_s = (_median_s(step, rounds) - plain_s) / _CHUNKS
    passes = Passes(norms=norms, ops=sum(3 * before + 2 for before in range(norms)))
    rerun = Rerun(ops=len(layers), products=norms, modules=len(layers) + 1, passes=passes)
    met = norms * (norms + 3) / 2
    left_s = chunk_s - rerun.overhead_s(segment) / _CHUNKS + met * NORM_S
    return [f"{norms}", f"{chunk_s * 1e3:.1f} ms", f"{left_s / met * 1e6:.0f} µs"]


class _LinearBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(F.relu(self.first(self.norm(x))))
        return y


class _ConvolutionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.layers = nn.Sequential(*(part for conv in convolutions for part in (conv, nn.BatchNorm2d(4), nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(x)
        return y


_BLOCKS: dict[str, tuple[type[nn.Module], Tensor]] = {
    "LayerNorm, two Linear, ReLU, residual": (_LinearBlock, torch.randn(8, 8)),
    "two Conv2d, two BatchNorm2d, residual": (_ConvolutionBlock, torch.randn(4, 4, 4, 4)),
}
_IN_A_ROW = 24
_WAYS = ("plain", "PyTorch's checkpoint", "segments", "packing")


def beside_pytorch(rounds: int, device: str = "cpu") -> str:
    """Return the table of what a block costs in a step plainly, and what each way adds.

    CPU time on the CPU; on another ``device`` time on the wall, until it is done.
    """
    rows = []
    for name, (kind, x) in _BLOCKS.items():
        plain_s, *added = _block_times(kind, x.to(device), rounds)
        segment = f"{(added[1] - plain_s) / (added[0] - plain_s):.2f}"
        rows.append([name, *(f"{s * 1e6:.0f} µs" for s in (plain_s, *(s - plain_s for s in added))), segment])
    header = ["one block, a step", "plain", *(f"{way} adds" for way in _WAYS[1:]), "segments / checkpoint"]
    return f"{_IN_A_ROW} blocks in a row, PyTorch {torch.__version__}.\n\n{table(header, rows)}"


def _block_times(kind: type[nn.Module], x: Tensor, rounds: int) -> list[float]:
    """Return the median seconds of a block in a step, each of the ways in its turn."""
    device = str(x.device)
    models = {way: nn.Sequential(*(kind() for _ in range(_IN_A_ROW))).to(device) for way in _WAYS}
    now = time.process_time if device == "cpu" else time.perf_counter
    paths = [str(place) for place in range(_IN_A_ROW)]
    apply_plan(models["segments"], Plan(segments=tuple(SegmentPlan(path=path) for path in paths)))
    apply_plan(models["packing"], Plan(packed=True))
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    for _ in range(_WARM_UP + rounds):
        for way, model in models.items():
            started = now()
            y = x.requires_grad_()
            for block in model if way == "PyTorch's checkpoint" else ():
                y = checkpoint(block, y, use_reentrant=False)
            y = y if way == "PyTorch's checkpoint" else model(y)
            y.sum().backward()
            synchronize(device)
            times[way].append((now() - started) / _IN_A_ROW)
            model.zero_grad()
    return [statistics.median(taken[_WARM_UP:]) for taken in times.values()]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keeps = [_keep_row(*case, options.rounds) for case in _KEPT]
    kept = table(["layers", "keeping products adds to each operator of each run"], keeps)
    text = f"CPU time of one thread, medians of {options.rounds} steps.\n\n{_fitted(options.rounds)}\n\n{kept}"
    header = ["norms", f"a chunk of {_CHUNKS} adds", "of that, a norm each time"]
    chunked = table(header, [_chunked_row(count, options.rounds) for count in _NORM_COUNTS])
    text += f"\n\n{chunked}\n\n{beside_pytorch(options.rounds)}"
    write_section("Segments: cost beside their kernels", this_command(), text)
    print(text)


if __name__ == "__main__":
    main()
