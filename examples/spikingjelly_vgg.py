"""Optimizes the spiking VGG of SpikingJelly's memory tutorial, made for CIFAR10-DVS, and prints the summary.

``python examples/spikingjelly_vgg.py`` takes some minutes on two CPU cores, nearly all of it for steps that are
measured: 653.3 MiB become 291.1 (torch 2.13.0).  ``--batch 1 --steps 4 --size 32`` is quick.  The net is built from
SpikingJelly's own multi-step layers (``pip install spikingjelly``), and nothing in it knows of memopt but
:meth:`Block.__spatial_split__`.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from spikingjelly.activation_based import layer, neuron, surrogate
from torch import Tensor, nn

from memopt_cli.records import Measurement, describe
from memopt_cli.spikingjelly import MemOptSummary, memory_optimization
from memopt_cli.text.units import format_bytes, format_seconds

CHANNELS = (2, 64, 128, 256, 256, 512, 512, 512, 512)
POOLED = (2, 4, 6)
"""Blocks that halve their input first."""
CLASSES = 10


class Block(nn.Module):
    """Convolution, batch norm and leaky integrate-and-fire neurons over ``[T, N, C, H, W]``."""

    def __init__(self, c_in: int, c_out: int, *, pooled: bool) -> None:
        super().__init__()
        pool = [layer.AvgPool2d(2, step_mode="m")] if pooled else []
        self.drive = nn.Sequential(
            *pool,
            layer.Conv2d(c_in, c_out, 3, padding=1, bias=False, step_mode="m"),
            layer.BatchNorm2d(c_out, step_mode="m"),
        )
        self.neurons = neuron.LIFNode(
            tau=1.333,
            decay_input=False,
            detach_reset=True,
            surrogate_function=surrogate.ATan(),
            step_mode="m",
        )

    def __spatial_split__(self) -> tuple[nn.Module, ...]:
        """Where memopt may cut the block in two; both are modules of it, so level 3 may run them in chunks of time."""
        return self.drive, self.neurons

    def forward(self, x: Tensor) -> Tensor:
        """Spikes ``[T, N, c_in, H, W]`` -> spikes ``[T, N, c_out, H, W]``, half as high and wide if pooled."""
        spikes: Tensor = self.neurons(self.drive(x))
        return spikes


class VGG(nn.Module):
    """Eight blocks and a linear classifier; ``size`` is the height and width of a frame, a multiple of 16."""

    def __init__(self, size: int) -> None:
        super().__init__()
        pairs = enumerate(pairwise(CHANNELS))
        self.features = nn.Sequential(
            *(Block(c_in, c_out, pooled=i in POOLED) for i, (c_in, c_out) in pairs), layer.AvgPool2d(2, step_mode="m")
        )
        self.classifier = nn.Sequential(
            layer.Flatten(step_mode="m"),
            layer.Dropout(0.25, step_mode="m"),
            layer.Linear(CHANNELS[-1] * (size // 16) ** 2, CLASSES, step_mode="m"),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Events ``[N, T, 2, size, size]`` -> scores ``[T, N, 10]``."""
        scores: Tensor = self.classifier(self.features(x.transpose(0, 1)))
        return scores


def show(summary: MemOptSummary) -> None:
    """What was measured, what was done, and what memopt recommends."""
    for row in summary.levels:
        match row.outcome:
            case Measurement() as found:
                peaks = f"allocated peak {format_bytes(found.allocated_peak_bytes):>10}"
                print(f"level {row.level}  {peaks}  step {format_seconds(found.step_s)}")
            case None:
                print(f"level {row.level}  not measured")
            case failure:
                print(f"level {row.level}  {describe(failure)}")
    before, after = (next(r.outcome for r in summary.levels if r.level == n) for n in (0, summary.applied_level))
    if isinstance(before, Measurement) and isinstance(after, Measurement):
        ratio = after.allocated_peak_bytes / before.allocated_peak_bytes
        print(f"peak before {format_bytes(before.allocated_peak_bytes)}")
        print(f"peak after  {format_bytes(after.allocated_peak_bytes)} ({ratio:.2f}×)")
    print(f"applied steps   {', '.join(summary.applied_steps) or 'none'}")
    print(f"skipped steps   {', '.join(summary.skipped_steps) or 'none'}")
    print(f"segments        {summary.gc_container_count}, {summary.tcgc_container_count} of them in chunks")
    print(f"selection       {summary.gc_selection_policy}: {summary.gc_selection_explanation}")
    if summary.verification:
        checked = summary.verification
        print(f"verified        {'passed' if checked.passed else 'FAILED'} at {checked.sizes}")
    for note in summary.notes:
        print(f"note            {note}")
    print(f"recommendation  {summary.recommendation}")
    print(f"total time      {format_seconds(summary.spent_s)}")


def main() -> None:
    """Build the net, optimize it, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="samples N (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="time steps T (default %(default)s)")
    parser.add_argument("--size", type=int, default=48, help="height and width, a multiple of 16 (default %(default)s)")
    parser.add_argument("--profile", default="memory", help="safe, balanced, memory or exhaustive")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    net = VGG(arguments.size)
    events = torch.bernoulli(torch.full((arguments.batch, arguments.steps, 2, arguments.size, arguments.size), 0.2))
    print(f"VGG of {sum(p.numel() for p in net.parameters()):,} parameters, events {tuple(events.shape)}")
    _, summary = memory_optimization(net, (Block,), (events,), profile=arguments.profile, return_summary=True)
    show(summary)


if __name__ == "__main__":
    main()
