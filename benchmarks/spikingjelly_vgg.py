"""SpikingJelly's own VGG, from its tutorial on memory optimization, and SpikingJelly's own search on it.

Eight blocks of 3x3 convolution, batch norm and LIF neurons on T = 10 frames of batch 4, then a classifier; the loss is
the sum of its outputs.  SpikingJelly's search measures peaks and times with CUDA.  Here memopt's exact count of
tensor bytes replaces the peak, without a step to warm up, and the wall time of one forward replaces fifteen timings.
Both make SpikingJelly's search faster than it really is.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from spikingjelly.activation_based.memopt import optimize_memory, pipeline
from torch import Tensor, nn

from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.records import InputSpec
from memopt_cli.trace import count_step
from memopt_cli.training.step import TrainingStep

WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
POOLED = (2, 4, 6)
"""Indices of the blocks that pool before they convolve."""
SPEC = InputSpec(tensors=(parse_tensor("BxTx2x48x48@float32=spikes:0.2"),), dims={"B": 4, "T": 10}, source="here")


class Block(nn.Module):
    """Block of convolution, batch norm and LIF neurons on ``[T, B, C, H, W]``."""

    def __init__(self, inputs: int, outputs: int, *, pooled: bool) -> None:
        super().__init__()
        pool = [layer.AvgPool2d(2)] if pooled else []
        self.convolution = nn.Sequential(*pool, layer.Conv2d(inputs, outputs, 3, padding=1), layer.BatchNorm2d(outputs))
        self.neurons = neuron.LIFNode(
            tau=1.333, decay_input=False, detach_reset=True, surrogate_function=surrogate.ATan(), step_mode="m"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the spikes of the neurons."""
        spikes: Tensor = self.neurons(self.convolution(x))
        return spikes


class VGG(nn.Module):
    """Network from frames ``[B, T, 2, 48, 48]`` to logits ``[T, B, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        sizes = zip((2, *WIDTHS), WIDTHS, strict=False)
        blocks = [Block(inputs, outputs, pooled=i in POOLED) for i, (inputs, outputs) in enumerate(sizes)]
        self.features = nn.Sequential(*blocks, layer.AvgPool2d(2))
        self.classifier = nn.Sequential(nn.Dropout(0.25), nn.Linear(WIDTHS[-1] * 9, 10))
        functional.set_step_mode(self, "m")

    def forward(self, x: Tensor) -> Tensor:
        """Reset the neurons, and return the logits of the frames ``x``."""
        functional.reset_net(self)
        spikes = self.features(x.transpose(0, 1).contiguous())
        logits: Tensor = self.classifier(spikes.flatten(2))
        return logits


def build() -> nn.Module:
    """Build the VGG with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return VGG()


def total(output: Tensor) -> Tensor:
    """Return the sum of ``output``, which is the loss."""
    return output.sum()


def search(step: TrainingStep, level: int) -> nn.Module:
    """Return the model of ``step`` after SpikingJelly's search at ``level``, called as in its tutorial."""
    pipeline._measure_peak = lambda model, example: _peak(step)
    pipeline._forward_costs = _forward_seconds
    found: nn.Module = optimize_memory(
        step.model,
        Block,
        lambda model: model(*step.args).sum(),
        level=level,
        split_fn=lambda module: (module.convolution, module.neurons) if isinstance(module, Block) else (),
        can_chunk=lambda module: isinstance(module, neuron.BaseNode),
    )
    return found


def _peak(step: TrainingStep) -> float:
    peak = count_step(step).tensor_peak_bytes
    functional.reset_net(step.model)
    return float(peak)


def _forward_seconds(model: nn.Module, example: Any, process_group: Any) -> dict[str, float]:
    """Return path of a segment -> wall seconds of its forward."""
    seconds: dict[str, float] = {}
    handles = []
    for path, wrapper in pipeline._checkpoint_leaves(model):

        def begin(module: nn.Module, args: Any, path: str = path) -> None:
            seconds[path] = -time.perf_counter()

        def end(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
            seconds[path] += time.perf_counter()

        handles += [wrapper.register_forward_pre_hook(begin), wrapper.register_forward_hook(end)]
    example(model)
    for handle in handles:
        handle.remove()
    return seconds
