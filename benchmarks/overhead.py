"""Measure the time that a segment adds besides its kernels, from which the cost model's constants come.

    python benchmarks/overhead.py [--rounds 25]

Layers of a few numbers make the kernels so short that the rest is seen.  Times are CPU time of one thread, medians of
many steps, plainly and with one segment in 1, 2 and 4 chunks.  The time that a segment adds besides a second forward is
taken as a sum of constants: one for each run of the segment, for each module and operator in it, and for each operator
that chunks run again.  The constants minimize the squares of the relative errors.

Four more tables show what keeping the outputs of products adds to each operator; what packing a tensor takes, and
finding that it is not to be packed; what each norm adds where chunks gather batch statistics; and what a block adds as
a segment, with packing, and in PyTorch's own checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.results import table, this_command, write_section
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.search.plan.cost_model import (
    CONVOLUTION_S,
    INSPECTION_S,
    MODULE_S,
    NORM_S,
    OP_S,
    PACKING_S,
    PRODUCT_S,
    SEGMENT_OP_S,
    SEGMENT_S,
    CostModel,
    Passes,
    Recomputation,
)
from memopt_cli.search.plan.replay import MIN_PACKED_BYTES
from memopt_cli.trace import FakeStep
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep, synchronize

_LAYERS = 20
"""Layers of the models on which keeping products is measured."""
_COUNTS = (5, 20, 60)
"""Layers of the models to which the constants are fitted."""
_CHUNKS = 16
"""Chunks of the models with norms."""
_NORM_COUNTS = [1, 2, 4, 8]
"""Norms of these models."""


class _Functions(nn.Module):
    """Module whose forward calls ``layer`` again and again, with one linear layer."""

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
    """Return the median CPU seconds of ``run``."""
    return statistics.median(_cpu_s(run) for _ in range(rounds + 1))


def _cpu_s(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()


class _Segments:
    """Seconds that a module adds to a step as each of ``segments``, besides those of a second forward.

    All take turns in every round, since a machine may run at half its speed a minute later.
    """

    def __init__(self, module: nn.Module, x: Tensor, segments: Sequence[SegmentPlan], rounds: int) -> None:
        plain = nn.Sequential(module)
        step = TrainingStep(model=plain, args=(x,), kwargs={}, settings=StepSettings(), loss=None, optimizer=None)
        trace = FakeStep(step).record(batch=len(x))
        call = next(call for call in trace.calls if call.path == "0")
        self.recomputation = CostModel(trace).recomputation(call)
        operators = [trace.ops[index] for index in call.forward]
        self.convolutions = sum("convolution" in op.name for op in operators)
        """Number of convolutions in the module."""
        self.products = sum(op.flops > 0 for op in operators) - self.convolutions
        """Number of products of matrices in the module."""
        models = [copy.deepcopy(plain) for _ in segments]
        for model, segment in zip(models, segments, strict=True):
            apply_plan(model, Plan(segments=(segment,)))
        self.added_s = _medians_beside(plain, models, x, rounds)
        """Seconds that each segment adds, in the order of ``segments``."""


def _medians_beside(plain: nn.Module, models: Sequence[nn.Module], x: Tensor, rounds: int) -> list[float]:
    """Return the median seconds of a step of each of ``models``, less those of a step and a forward of ``plain``."""
    added: list[list[float]] = [[] for _ in models]
    for _ in range(_WARM_UP + rounds):
        with torch.no_grad():
            twice_s = _cpu_s(lambda: plain(x))
        twice_s += _cpu_s(lambda: _step(plain, x))
        for model, taken in zip(models, added, strict=True):
            taken.append(_cpu_s(functools.partial(_step, model, x)) - twice_s)
    return [statistics.median(taken[_WARM_UP:]) for taken in added]


_WARM_UP = 17
"""First steps, not timed: in these a segment also checks its recomputation."""


def _terms(chunks: int, segments: _Segments) -> list[int]:
    """Return how many times each of :data:`_FITTED` is in the time of a segment."""
    recomputation = segments.recomputation
    # The first chunk takes the place of the plain run; others add one in forward, recomputation and backward each.
    again = 3 * (chunks - 1)
    chunked = [again * recomputation.ops, again * segments.products, again * segments.convolutions]
    return [chunks, chunks * recomputation.modules, chunks * recomputation.ops, *chunked]


_FITTED = {
    "SEGMENT_S": SEGMENT_S,
    "MODULE_S": MODULE_S,
    "SEGMENT_OP_S": SEGMENT_OP_S,
    "OP_S": OP_S,
    "PRODUCT_S": PRODUCT_S,
    "CONVOLUTION_S": CONVOLUTION_S,
}
"""Constant -> its seconds in the cost model."""


def _fitted(rounds: int) -> str:
    plans = [SegmentPlan(path="0", chunks=chunks) for chunks in (1, 2, 4)]
    cases = [
        (f"{name} x {layers}", plan.chunks, segments, added_s)
        for name, (make, x) in MODELS.items()
        for layers in _COUNTS
        for segments in [_Segments(make(layers), x, plans, rounds)]
        for plan, added_s in zip(plans, segments.added_s, strict=True)
    ]
    terms = torch.tensor([_terms(chunks, segments) for _, chunks, segments, _ in cases], dtype=torch.float64)
    added = torch.tensor([added_s for *_, added_s in cases], dtype=torch.float64)
    fit = torch.linalg.lstsq(terms / added[:, None], torch.ones(len(cases), 1, dtype=torch.float64)).solution[:, 0]
    now = torch.tensor(list(_FITTED.values()), dtype=torch.float64)
    constants = [[name, *(f"{s * 1e6:.1f} µs" for s in pair)] for name, *pair in zip(_FITTED, fit, now, strict=True)]
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
    plans = [SegmentPlan(path="0", keep=keep) for keep in ((), (product,))]
    segments = _Segments(make(_LAYERS), x, plans, rounds)
    whole_s, keeping_s = segments.added_s
    # Divided by 2, since each operator runs in forward and in the recomputation.
    return [name, f"{(keeping_s - whole_s) / (2 * segments.recomputation.ops) * 1e6:.0f} µs"]


class _Saves(nn.Module):
    """Module that saves many tensors of 4 KiB: of zeros and ones, which are packed, or of other numbers."""

    def __init__(self, are_bits: bool) -> None:
        super().__init__()
        self._are_bits = are_bits
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(_IN_A_ROW))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x + scale * ((x > 0).to(x.dtype) if self._are_bits else x.detach() * 1.1)
        return x


def _packing_row(name: str, rounds: int) -> list[str]:
    """Return the row of a constant: what packing adds to each tensor that :class:`_Saves` saves."""
    plain = _Saves(are_bits=name == "PACKING_S")
    packed = copy.deepcopy(plain)
    apply_plan(packed, Plan(packed=True))
    x = torch.randn(MIN_PACKED_BYTES // 4)
    added: list[float] = []
    for _ in range(_WARM_UP + rounds):
        plain_s = _cpu_s(functools.partial(_step, plain, x))
        added.append((_cpu_s(functools.partial(_step, packed, x)) - plain_s) / _IN_A_ROW)
    return [name, *(f"{s * 1e6:.1f} µs" for s in (statistics.median(added[_WARM_UP:]), _PACKING[name]))]


_PACKING = {"PACKING_S": PACKING_S, "INSPECTION_S": INSPECTION_S}
"""Constant of packing -> its seconds in the cost model."""


def _chunked_row(norms: int, rounds: int) -> list[str]:
    """Return the row of ``norms``: what each chunk adds, and the part of it for each time that it runs a norm."""
    layers = [layer for _ in range(norms) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    x = torch.randn(_CHUNKS, 4, 2, 2, requires_grad=True)
    segment = SegmentPlan(path="0", chunks=_CHUNKS, batch_statistics=True)
    module = nn.Sequential(*layers)
    forward_s = _median_s(lambda: module(x), rounds)
    (added_s,) = _Segments(module, x, [segment], rounds).added_s
    chunk_s = (added_s + forward_s) / _CHUNKS
    # A layer is three operators; the pass up to norm number ``before`` ends with a convolution and that norm.
    passes = Passes(norms=norms, ops=sum(3 * before + 2 for before in range(norms)))
    min_s = len(layers) * OP_S + norms * CONVOLUTION_S
    recomputation = Recomputation(ops=len(layers), min_s=min_s, modules=len(layers) + 1, passes=passes)
    # Norms run in all passes: 1 + 2 + ... + n in those that gather statistics, and n in the last.
    met = norms * (norms + 3) / 2
    left_s = chunk_s - recomputation.overhead_s(segment) / _CHUNKS + met * NORM_S
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
"""Blocks in a row, over which the time of a step is divided."""
_WAYS = ("plain", "PyTorch's checkpoint", "segments", "packing")


def beside_pytorch(rounds: int, device: str = "cpu") -> str:
    """Return a table of the time of a block in a plain step, and of what each way adds.

    On the CPU, it is CPU time; on another ``device``, wall time until the device is done.
    """
    rows = []
    for name, (kind, x) in _BLOCKS.items():
        plain_s, *added = _block_times(kind, x.to(device), rounds)
        segment = f"{(added[1] - plain_s) / (added[0] - plain_s):.2f}"
        rows.append([name, *(f"{s * 1e6:.0f} µs" for s in (plain_s, *(s - plain_s for s in added))), segment])
    header = ["one block, a step", "plain", *(f"{way} adds" for way in _WAYS[1:]), "segments / checkpoint"]
    return f"{_IN_A_ROW} blocks in a row, PyTorch {torch.__version__}.\n\n{table(header, rows)}"


def _block_times(kind: type[nn.Module], x: Tensor, rounds: int) -> list[float]:
    """Return the median seconds of a block in a step in each of :data:`_WAYS`, which take turns."""
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
    """Measure, print the tables and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keeps = [_keep_row(*case, options.rounds) for case in _KEPT]
    kept = table(["layers", "keeping products adds to each operator of each run"], keeps)
    text = f"CPU time of one thread, medians of {options.rounds} steps.\n\n{_fitted(options.rounds)}\n\n{kept}"
    header = ["norms", f"a chunk of {_CHUNKS} adds", "of that, a norm each time"]
    chunked = table(header, [_chunked_row(count, options.rounds) for count in _NORM_COUNTS])
    packing = [_packing_row(name, options.rounds) for name in _PACKING]
    text += f"\n\n{table(['constant', 'measured', 'the cost model has'], packing)}"
    text += f"\n\n{chunked}\n\n{beside_pytorch(options.rounds)}"
    write_section("Segments: cost beside their kernels", this_command(), text)
    print(text)


if __name__ == "__main__":
    main()
