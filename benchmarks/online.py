"""Measure online learning of a recurrent LIF network (100 -> 200 -> 10): memory by sequence length, time of a step.

    python benchmarks/online.py [--steps 16,256,1024,4096] [--rounds 15] [--threads 1] [--compile] [--write]

Memory is the tensor peak of forward and backward over one sequence, whose inputs are made step by step; it is counted
at PyTorch's dispatcher, and is the same in every run.  The time of a step is that of a sequence of 16 steps, with a
batch of 128, divided by 16.  The contestants take turns, so that the load of the machine is the same for all, and the
table shows medians.  *By hand* is an implementation of each algorithm for this one network, on plain tensors without
autograd.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from online_lif import N_BATCH, N_HIDDEN, N_IN, N_OUT, N_TIME, LIFNet

from benchmarks.results import table, this_command, write_section
from memopt_cli.online import (
    D_RTRL,
    ES_D_RTRL,
    Batching,
    CompiledStep,
    OnlineAlgorithm,
    Vmap,
    accumulate_online,
    accumulate_through_time,
    init_all_states,
    vmap_new_states,
)
from memopt_cli.text.units import format_bytes
from memopt_cli.trace import StorageLog

DECAY = 0.9
"""Factor by which ES-D-RTRL's traces fade from step to step."""
MEMORY_BATCH = 8
"""Samples in a batch where memory is measured: few, so that backward through 4096 steps fits a laptop."""
ALGORITHMS: dict[str, Callable[..., OnlineAlgorithm]] = {
    "ES_D_RTRL": lambda net, **mode: ES_D_RTRL(net, DECAY, **mode),
    "D_RTRL": D_RTRL,
}
Run = Callable[[], object]
"""Function that computes the gradients of one sequence."""


# ---------------------------------------------------------------------------------------------- contestants


def manual(name: str, net: LIFNet, x: Tensor) -> OnlineAlgorithm:
    """Return the algorithm ``name`` in its batched mode, compiled for the inputs ``x`` ``[B, I]`` of one step."""
    init_all_states(net, x.shape[0])
    algorithm = ALGORITHMS[name](net, mode=Batching())
    algorithm.compile_graph(x)
    return algorithm


def automatic(name: str, net: LIFNet, x: Tensor) -> tuple[Vmap, Run]:
    """Return the algorithm ``name`` for one sample under vmap, and a function that resets its states."""
    algorithm = ALGORITHMS[name](net)
    init_all_states(net)
    algorithm.compile_graph(x[0])
    return Vmap(algorithm), vmap_new_states(x.shape[0])(algorithm.reset_state)


def surrogate(u: Tensor) -> Tensor:
    """Return the surrogate slope of the spike at ``u`` above threshold."""
    return (0.3 * (1 - u.abs())).clamp_min_(0)


class ByHand:
    """Network with its gradients on plain tensors: the least work that an implementation for this network does."""

    def __init__(self, net: LIFNet, batch: int) -> None:
        self.parameters = [net.syn.weight, net.syn.bias, net.out.linear.weight]
        self.weight, self.bias, self.readout = (p.detach() for p in self.parameters)
        self.decay, self.batch = net.neu.decay, batch

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Add the gradients of a sequence to ``.grad``, and return the mean loss."""
        self.start(inputs)
        v, r = inputs.new_zeros(self.batch, N_HIDDEN), inputs.new_zeros(self.batch, N_OUT)
        total, spikes = inputs.new_zeros(()), v
        for t, x in enumerate(inputs):
            z, jacobian = torch.cat([x, spikes], 1), self.decay * (1 - surrogate(v - 1))
            v = self.decay * (v - spikes) + torch.addmm(self.bias, z, self.weight.t())
            spikes = v.sub(1).ge_(0)
            r = self.decay * r + spikes @ self.readout.t()
            log_likelihood = r.log_softmax(1)
            total += F.nll_loss(log_likelihood, labels)
            of_r = log_likelihood.exp()
            of_r[torch.arange(self.batch), labels] -= 1
            of_r /= self.batch
            of_v = (of_r @ self.readout) * surrogate(v - 1)
            of_weight, of_bias = self.of_weights(t, z, jacobian, of_v)
            for parameter, gradient in zip(self.parameters, (of_weight, of_bias, of_r.t() @ spikes), strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return total / len(inputs)

    def start(self, inputs: Tensor) -> None:
        """Set the eligibility traces to zero."""
        raise NotImplementedError

    def of_weights(self, t: int, z: Tensor, jacobian: Tensor, of_v: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the traces by one step, and return the gradients of weight and bias."""
        raise NotImplementedError


class ESByHand(ByHand):
    """ES-D-RTRL, whose traces are a vector of inputs and one of neurons for each sample."""

    def start(self, inputs: Tensor) -> None:
        self.of_input = inputs.new_zeros(self.batch, N_IN + N_HIDDEN)
        self.of_neuron = inputs.new_zeros(self.batch, N_HIDDEN)

    def of_weights(self, t: int, z: Tensor, jacobian: Tensor, of_v: Tensor) -> tuple[Tensor, Tensor]:
        self.of_input = DECAY * self.of_input + z
        self.of_neuron = DECAY * jacobian * self.of_neuron + (1 - DECAY)
        of_y = of_v * self.of_neuron / (1 - (1 - DECAY) ** (t + 1))
        return of_y.t() @ self.of_input, of_y.sum(0)


class FullByHand(ByHand):
    """D-RTRL, whose trace is a matrix as large as the weight for each sample."""

    def start(self, inputs: Tensor) -> None:
        self.trace = inputs.new_zeros(self.batch, N_HIDDEN, N_IN + N_HIDDEN)
        self.of_bias = inputs.new_zeros(self.batch, N_HIDDEN)

    def of_weights(self, t: int, z: Tensor, jacobian: Tensor, of_v: Tensor) -> tuple[Tensor, Tensor]:
        self.trace = (jacobian.unsqueeze(-1) * self.trace).add_(z.unsqueeze(1))
        self.of_bias = jacobian * self.of_bias + 1
        return torch.einsum("bh,bhi->hi", of_v, self.trace), (of_v * self.of_bias).sum(0)


# ---------------------------------------------------------------------------------------------- memory


def steps_of(count: int) -> Iterator[Tensor]:
    """Yield the inputs of ``count`` steps, each made when it is needed."""
    return (torch.rand(MEMORY_BATCH, N_IN) for _ in range(count))


def tensor_peak_bytes(strategy: str, steps: int) -> int:
    """Return the tensor peak in bytes of forward and backward over one sequence by ``strategy``."""
    net, labels = LIFNet(), torch.zeros(MEMORY_BATCH, dtype=torch.int64)
    model: nn.Module = net
    if strategy == "through time":
        init_all_states(net, MEMORY_BATCH)
    else:
        model = manual(strategy, net, torch.rand(MEMORY_BATCH, N_IN))
    accumulate = accumulate_through_time if strategy == "through time" else accumulate_online
    log = StorageLog(lambda: "")
    for tensor in (*model.parameters(), *model.buffers()):
        log.count_tensor(tensor, "parameters")
    with log:
        accumulate(model, steps_of(steps), labels, F.cross_entropy)
    return log.peaks.tensor_bytes


def memory(steps: list[int]) -> dict[str, dict[int, int]]:
    """Return strategy -> number of steps -> tensor peak in bytes."""
    return {s: {t: tensor_peak_bytes(s, t) for t in steps} for s in (*ALGORITHMS, "through time")}


# ---------------------------------------------------------------------------------------------- time


def contestants(name: str, *, compiled: bool) -> dict[str, Run]:
    """Return the implementations of algorithm ``name``, all for the same sequence."""
    net = LIFNet()
    other = copy.deepcopy(net)  # a model's states are either batched or one per lane
    inputs, labels = torch.rand(N_TIME, N_BATCH, N_IN), torch.randint(0, N_OUT, (N_BATCH,))
    by_hand = {"ES_D_RTRL": ESByHand, "D_RTRL": FullByHand}[name](net, N_BATCH)
    algorithm = manual(name, net, inputs[0])
    vmapped, restart = automatic(name, other, inputs[0])
    models: dict[str, tuple[nn.Module, Run]] = {
        "manual": (algorithm, lambda: algorithm.reset_state(N_BATCH)),
        "automatic": (vmapped, restart),
    }

    def eager(model: nn.Module, reset: Run) -> Tensor:
        reset()
        return accumulate_online(model, inputs, labels, F.cross_entropy)

    def stepping(step: CompiledStep, reset: Run) -> Tensor:
        reset()
        return torch.stack([step(x, labels) for x in inputs]).mean()

    runs: dict[str, Run] = {"by hand": lambda: by_hand(inputs, labels)}
    for mode, (model, reset) in models.items():
        runs[mode] = functools.partial(eager, model, reset)
        if compiled:
            reset()
            step = CompiledStep(model, F.cross_entropy, inputs[0], labels)
            runs[f"{mode}, compiled"] = functools.partial(stepping, step, reset)
    check_same_loss(runs)
    return runs


def check_same_loss(runs: dict[str, Run]) -> None:
    """End the program if the contestants do not compute the same loss."""
    losses = {name: float(run()) for name, run in runs.items()}  # type: ignore[arg-type]
    if max(losses.values()) - min(losses.values()) > 1e-4 * max(losses.values()):
        raise SystemExit(f"the contestants disagree: {losses}")


def step_seconds(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Return the median seconds of one step by each of ``runs``, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken[name].append((time.perf_counter() - start) / N_TIME)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


# ---------------------------------------------------------------------------------------------- report


def memory_table(found: dict[str, dict[int, int]]) -> str:
    """Return a table of peaks: a row for each strategy, a column for each number of steps, and last over first."""
    steps = list(next(iter(found.values())))
    rows = [
        [name, *map(format_bytes, peaks.values()), f"{peaks[steps[-1]] / peaks[steps[0]]:.3g}×"]
        for name, peaks in found.items()
    ]
    return table([f"batch {MEMORY_BATCH}", *(f"T={t}" for t in steps), "last / first"], rows)


def time_table(name: str, seconds: dict[str, float]) -> str:
    """Return a table of step times, with their ratios to the version by hand and to manual batching."""
    rows = [
        [who, f"{s * 1e3:.2f} ms", f"{s / seconds['by hand']:.2f}×", f"{s / seconds['manual']:.2f}×"]
        for who, s in seconds.items()
    ]
    return table([f"{name}, batch {N_BATCH}", "a step", "of by hand", "of manual"], rows)


def main() -> None:
    """Measure memory and time, print the tables, and write them if ``--write`` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="16,256,1024,4096")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compiled steps too; needs a C++ compiler on the CPU")
    parser.add_argument("--write", action="store_true", help="into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    peaks = memory([int(steps) for steps in arguments.steps.split(",")])
    parts = ["Tensor peak of a sequence:", memory_table(peaks), "Time, median; the contestants take turns:"]
    parts += (
        time_table(name, step_seconds(contestants(name, compiled=arguments.compile), arguments.rounds))
        for name in ALGORITHMS
    )
    text = "\n\n".join(parts)
    print(text)
    if arguments.write:
        write_section("Online learning", this_command(), text)


if __name__ == "__main__":
    main()
