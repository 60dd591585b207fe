"""Time forward and backward of many small models: memopt's batched model, a loop, ``vmap`` and torchmb 0.2.

    python benchmarks/model_batching.py [--cases mlp-17x64,gru-16x32] [--rounds 15] [--threads 2] [--save]
    python benchmarks/model_batching.py --first-call [--cases resnet18-5x7]

The contestants of a case take turns, so that the load of the machine is the same for all; the table shows medians.
The loop is what a user writes without any library: separate modules, called one after another.

Then memopt and the loop take one step with the same weights, in float64 and in float32.  Where two inputs of a maximum
differ by less than float32's rounding (or the input of a ReLU is as near to 0), a gradient may take another path, so
that even the loop's float32 gradients are far from its float64 ones.  In float32, memopt must therefore only be as near
to float64 as the loop is.

torchmb is optional (``pip install --no-deps torchmb==0.2 && pip install einops``); the table says where it cannot run
a case.

``--first-call`` shows instead what the choice of a route costs: the CPU time of a batched model's first call, and of
its first forward and backward, divided by that of a step of the loop.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.results import table, this_command, write_section
from memopt_cli.model_batching import BatchModule
from memopt_cli.verification.effects import difference

Step = Callable[[], None]
"""Function that runs one forward and backward."""


class LeNet(nn.Module):
    """LeNet-5 for images of 28×28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (n, 10) of images (n, 1, 28, 28)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        scores: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return scores


class BasicBlock(nn.Module):
    """Residual block of two 3×3 convolutions and a shortcut."""

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
        """Map (n, inputs, h, w) to (n, outputs, h/stride, w/stride)."""
        hidden = self.relu(self.bn1(self.conv1(x)))
        output: Tensor = self.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))
        return output


def resnet18() -> nn.Module:
    """Build a ResNet-18 for images of 32×32."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    strides = [1, 1, 2, 1, 2, 1, 2, 1]
    blocks = [BasicBlock(i, o, s) for i, o, s in zip(widths, widths[1:], strides, strict=False)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mlp() -> nn.Module:
    """Build a perceptron of widths 64-128-64-10, as for scikit-learn's digits."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def wide_mlp() -> nn.Module:
    """Build a perceptron of widths 784-128-64-10, as for MNIST, whose speed reading the weights limits."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class Gru(nn.Module):
    """GRU of 64 units over sequences of 16 features, with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 64, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (n, 10) of sequences (n, time, 16)."""
        scores: Tensor = self.out(self.gru(x)[0][:, -1])
        return scores


class Transformer(nn.Module):
    """Classifier of 32 tokens with two encoder layers of width 64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.position = nn.Parameter(torch.randn(32, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores (n, 10) of tokens (n, 32)."""
        hidden = self.encoder(self.embedding(tokens) + self.position)
        scores: Tensor = self.out(hidden.mean(dim=1))
        return scores


@dataclass(frozen=True)
class Case:
    """Number of equal models, and the batch that each of them takes."""

    make: Callable[[], nn.Module]
    models: int
    """Number of models."""
    images: int
    """Samples in the batch of each model."""
    shape: tuple[int, ...]
    """Shape of one sample."""
    tokens: bool = False
    """Whether samples are token ids rather than numbers."""

    def inputs(self) -> Tensor:
        """Return random inputs of shape (models, images, *shape)."""
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
    "resnet18-5x7": Case(resnet18, 5, 7, (3, 32, 32)),
    "gru-16x32": Case(Gru, 16, 32, (24, 16)),
    "transformer-16x8": Case(Transformer, 16, 8, (32,), tokens=True),
}


@dataclass(frozen=True)
class Gaps:
    """Largest relative difference of outputs and gradients between two ways to take one step."""

    fp64: float
    """Difference between memopt and the loop, both in float64."""
    fp32: float
    """Difference between memopt in float32 and the loop in float64."""
    loop_fp32: float
    """Difference between the loop in float32 and in float64."""


@dataclass(frozen=True)
class Result:
    """Result of one case."""

    case: str
    route: str
    """Route that memopt chose."""
    times_ms: dict[str, float]
    """Contestant -> median time of a step in milliseconds."""
    cannot: dict[str, str]
    """Contestant that cannot run the case -> the reason."""
    gaps: Gaps

    @property
    def speedup(self) -> float:
        """Time of the fastest other contestant divided by memopt's."""
        return min(t for name, t in self.times_ms.items() if name != "memopt") / self.times_ms["memopt"]


def memopt_step(case: Case, inputs: Tensor) -> tuple[Step, str]:
    """Return memopt's step, and the route that memopt chose by itself."""
    batched = BatchModule(case.make(), case.models, example_inputs=(inputs,))
    (used,) = [trial for trial in batched.trials if trial.used]

    def step() -> None:
        batched.zero_grad()
        batched(inputs).square().mean().backward()

    return step, used.name


def loop_step(case: Case, inputs: Tensor) -> Step:
    """Return the step of separate modules, one after another."""
    models = [case.make() for _ in range(case.models)]

    def step() -> None:
        for model, x in zip(models, inputs, strict=True):
            model.zero_grad()
            model(x).square().mean().backward()

    return step


def vmap_step(case: Case, inputs: Tensor) -> Step:
    """Return the step by ``torch.func``, as PyTorch's tutorial on ensembles writes it."""
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
    """Return the step of torchmb's batched model."""
    import torchmb  # type: ignore[import-not-found]

    batched = torchmb.BatchModule(case.make(), batch=case.models)
    parameters = [p for _, p in batched.named_parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        batched(inputs).square().mean().backward()

    return step


OTHERS = {"loop": loop_step, "vmap": vmap_step, "torchmb": torchmb_step}


def gaps_of(case: Case) -> Gaps:
    """Compare memopt with the loop on one step of the same models."""
    models = [case.make() for _ in range(case.models)]
    inputs = case.inputs()
    steps = {dtype: in_precision(case, models, inputs, dtype) for dtype in (torch.float64, torch.float32)}
    (batched, loop), (batched_32, loop_32) = steps.values()
    return Gaps(
        fp64=difference(loop, batched).relative,
        fp32=difference(loop, batched_32).relative,
        loop_fp32=difference(loop, loop_32).relative,
    )


def in_precision(
    case: Case, models: list[nn.Module], inputs: Tensor, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return outputs and gradients of a step in ``dtype``, by memopt and by the loop, converted to float64."""
    models = [copy.deepcopy(model).to(dtype) for model in models]
    given = inputs if case.tokens else inputs.to(dtype)
    cotangent = torch.randn(case.models, case.images, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    batched = BatchModule(models[0], case.models)
    batched.load_state_dicts([model.state_dict() for model in models])
    outputs = batched(given)
    outputs.backward(cotangent)
    apart = [model(x) for model, x in zip(models, given, strict=True)]
    torch.autograd.backward(apart, list(cotangent.unbind(0)))
    gradients = [dict(_gradients(model)) for model in models]
    stacked = {name: torch.stack([of[name] for of in gradients]) for name in gradients[0]}
    return _as_float64(outputs, dict(_gradients(batched.models))), _as_float64(torch.stack(apart), stacked)


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        yield name, parameter.grad


def _as_float64(output: Tensor, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"output": output.detach().double()} | {f"gradient of {n}": g.double() for n, g in gradients.items()}


def run(name: str, rounds: int) -> Result:
    """Time the contestants on case ``name`` for ``rounds`` rounds, and compare their results."""
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
    return Result(case=name, route=route, times_ms=medians, cannot=cannot, gaps=gaps_of(case))


def first_call(name: str, *, check: bool) -> str:
    """Return as text what the first call and the first step cost in case ``name``."""
    case = CASES[name]
    torch.manual_seed(0)
    inputs = case.inputs()
    step = loop_step(case, inputs)
    loop_s = min([_cpu_seconds(step) for _ in range(4)][1:])
    batched = BatchModule(case.make(), case.models, check=check)
    outputs: list[Tensor] = []
    call_s = _cpu_seconds(lambda: outputs.append(batched(inputs)))
    step_s = call_s + _cpu_seconds(lambda: outputs[0].square().mean().backward())
    (used,) = [trial for trial in batched.trials if trial.used]
    steps = f"first call {call_s / loop_s:.2f}, first step {step_s / loop_s:.2f} steps of the loop ({loop_s:.2f} s)"
    return f"{name}, check={check}: {steps}; {used.name}"


def _cpu_seconds(run: Step) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


HEADER = ["ms", "memopt", *OTHERS, "speed", "route", "float64", "float32", "the loop's float32"]


def row(result: Result) -> list[str]:
    """Return the row of ``result`` in the table."""
    times = (result.times_ms.get(name) for name in ("memopt", *OTHERS))
    shown = ["–" if t is None else f"{t:.2f}" for t in times]
    gaps = (f"{gap:.0e}" for gap in (result.gaps.fp64, result.gaps.fp32, result.gaps.loop_fp32))
    return [result.case, *shown, f"{result.speedup:.2f}×", result.route, *gaps]


def markdown(results: list[Result], rounds: int, threads: int) -> str:
    """Return the section of ``RESULTS.md``."""
    about = (
        f"Forward and backward of MODELSxIMAGES, median of {rounds} in turns, {threads} threads. *speed*: against the "
        "best of the others. *float64*: largest relative difference from the loop; *float32*: memopt's, and the "
        "loop's own, from the loop in float64."
    )
    cannot = [f"- {result.case}, {name}: {reason}" for result in results for name, reason in result.cannot.items()]
    return "\n".join(
        [about, "", table(HEADER, list(map(row, results))), *(["", "–: cannot run it", *cannot] if cannot else [])]
    )


def main() -> None:
    """Run the cases, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated, of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--first-call", action="store_true", help="only what the first call costs")
    parser.add_argument("--save", action="store_true", help="write the section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.first_call:
        for name in options.cases.split(","):
            print(first_call(name, check=True), first_call(name, check=False), sep="\n", flush=True)
        return
    results = []
    for name in options.cases.split(","):
        results.append(run(name, options.rounds))
        print(*row(results[-1]), sep=" | ", flush=True)
    found = markdown(results, options.rounds, options.threads)
    print(found)
    if options.save:
        write_section("Many models as one batch", this_command(), found)


if __name__ == "__main__":
    main()
