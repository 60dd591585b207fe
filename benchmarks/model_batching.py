"""Forward and backward of many models: memopt's batched model beside the loop, ``vmap`` and torchmb 0.2.

    python benchmarks/model_batching.py [--cases mlp-17x64,gru-16x32] [--rounds 15] [--threads 2] [--out FILE.json]

The contestants of a case take turns, so that the load of the machine is the same for all; what is shown are medians.
The loop is separate modules, each called and each with gradients of its own: what a user writes without any of these.
torchmb is optional (``pip install --no-deps torchmb==0.2 && pip install einops``); where it cannot run a case the
table says so.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.model_batching import BatchModule

Step = Callable[[], None]
"""One forward and backward."""


class LeNet(nn.Module):
    """LeNet-5 for 28×28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 1, 28, 28) to scores (n, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        scores: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return scores


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) to (n, outputs, h/stride, w/stride)."""
        hidden = self.relu(self.bn1(self.conv1(x)))
        output: Tensor = self.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))
        return output


def resnet18() -> nn.Module:
    """ResNet-18 for 32×32 images."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    strides = [1, 1, 2, 1, 2, 1, 2, 1]
    blocks = [BasicBlock(i, o, s) for i, o, s in zip(widths, widths[1:], strides, strict=False)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mlp() -> nn.Module:
    """64-128-64-10, as for scikit-learn's digits."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def wide_mlp() -> nn.Module:
    """784-128-64-10, as for MNIST: bound by the memory of its weights."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class Gru(nn.Module):
    """A GRU of 64 units over sequences of 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 64, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(n, time, 16) to (n, 10)."""
        scores: Tensor = self.out(self.gru(x)[0][:, -1])
        return scores


class Transformer(nn.Module):
    """Two encoder layers of width 64 over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.position = nn.Parameter(torch.randn(32, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, 32) to (n, 10)."""
        hidden = self.encoder(self.embedding(tokens) + self.position)
        scores: Tensor = self.out(hidden.mean(dim=1))
        return scores


@dataclass(frozen=True)
class Case:
    """So many models, each with a batch of its own."""

    make: Callable[[], nn.Module]
    models: int
    images: int
    shape: tuple[int, ...]
    tokens: bool = False

    def inputs(self) -> Tensor:
        """(models, images, …)."""
        shape = (self.models, self.images, *self.shape)
        return torch.randint(0, 100, shape) if self.tokens else torch.randn(shape)


CASES = {
    "mlp-17x64": Case(mlp, 17, 64, (64,)),
    "mlp-100x8": Case(mlp, 100, 8, (64,)),
    "wide-mlp-17x64": Case(wide_mlp, 17, 64, (784,)),
    "wide-mlp-100x8": Case(wide_mlp, 100, 8, (784,)),
    "lenet-17x64": Case(LeNet, 17, 64, (1, 28, 28)),
    "lenet-100x4": Case(LeNet, 100, 4, (1, 28, 28)),
    "resnet18-3x4": Case(resnet18, 3, 4, (3, 32, 32)),
    "gru-16x32": Case(Gru, 16, 32, (24, 16)),
    "transformer-16x8": Case(Transformer, 16, 8, (32,), tokens=True),
}


@dataclass(frozen=True)
class Result:
    """The medians of one case, in milliseconds; a contestant that cannot run it has the reason instead."""

    case: str
    route: str
    """What memopt chose."""
    times_ms: dict[str, float]
    cannot: dict[str, str]

    @property
    def speedup(self) -> float:
        """How many times as fast as the best of the others memopt is."""
        return min(t for name, t in self.times_ms.items() if name != "memopt") / self.times_ms["memopt"]


def memopt_step(case: Case, inputs: Tensor) -> tuple[Step, str]:
    """memopt's step, and the route it chose by itself."""
    batched = BatchModule(case.make(), case.models, example_inputs=(inputs,))
    (used,) = [trial for trial in batched.trials if trial.used]

    def step() -> None:
        batched.zero_grad()
        batched(inputs).square().mean().backward()

    return step, f"{used.name} {used.variant}".strip()


def loop_step(case: Case, inputs: Tensor) -> Step:
    """Separate modules, one after the other."""
    models = [case.make() for _ in range(case.models)]

    def step() -> None:
        for model, x in zip(models, inputs, strict=True):
            model.zero_grad()
            model(x).square().mean().backward()

    return step


def vmap_step(case: Case, inputs: Tensor) -> Step:
    """``torch.func`` as its tutorial on ensembles writes it."""
    models = [case.make() for _ in range(case.models)]
    parameters, buffers = torch.func.stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(skeleton, (parameters, buffers), (x,))
        return output

    def step() -> None:
        for parameter in parameters.values():
            parameter.grad = None
        torch.func.vmap(one, randomness="different")(parameters, buffers, inputs).square().mean().backward()

    return step


def torchmb_step(case: Case, inputs: Tensor) -> Step:
    """torchmb's batched model."""
    import torchmb  # type: ignore[import-not-found]

    batched = torchmb.BatchModule(case.make(), batch=case.models)
    parameters = [p for _, p in batched.named_parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        batched(inputs).square().mean().backward()

    return step


OTHERS = {"loop": loop_step, "vmap": vmap_step, "torchmb": torchmb_step}


def run(name: str, rounds: int) -> Result:
    """Time one case."""
    case = CASES[name]
    torch.manual_seed(0)
    inputs = case.inputs()
    step, route = memopt_step(case, inputs)
    steps, cannot = {"memopt": step}, {}
    for other, make in OTHERS.items():
        try:
            steps[other] = make(case, inputs)
            steps[other]()
        except Exception as error:
            steps.pop(other, None)
            cannot[other] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    times: dict[str, list[float]] = {other: [] for other in steps}
    for _ in range(rounds + 1):
        for other, step in steps.items():
            start = time.perf_counter()
            step()
            times[other].append((time.perf_counter() - start) * 1e3)
    medians = {other: statistics.median(taken[1:]) for other, taken in times.items()}
    return Result(case=name, route=route, times_ms=medians, cannot=cannot)


def row(result: Result) -> str:
    """One line of the table."""
    columns = (result.times_ms.get(name) for name in ("memopt", *OTHERS))
    shown = "".join(f"{'–' if t is None else f'{t:.2f}':>10}" for t in columns)
    return f"{result.case:18}{shown}{result.speedup:>9.2f}×  {result.route}"


def main() -> None:
    """Run the cases, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated, of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = "".join(f"{name:>10}" for name in ("memopt", *OTHERS, "speed"))
    print(f"{f'ms, median of {options.rounds}':18}{names}  route")
    results = []
    for name in options.cases.split(","):
        results.append(run(name, options.rounds))
        print(row(results[-1]), flush=True)
    about = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "torch": torch.__version__,
        "threads": options.threads,
        "processor": platform.processor() or platform.machine(),
        "results": [asdict(result) | {"speedup": result.speedup} for result in results],
    }
    options.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
