"""Recognizing kinds of networks (convolutional, attention, recurrent, spiking), and the batch shapes that suit them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from memopt_cli.batching.requirements import sequence_axis

Architecture = Literal["convolutional", "attention", "recurrent", "spiking"]

_CONVOLUTIONAL = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATTENTION = (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_SPIKING_NAME = re.compile(r"Spik|LIF|IF(Node|Cell)|^R?Leaky$|^R?Synaptic$|Lapicque")
_ATTENTION_NAME = re.compile(r"Attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureRule:
    """Advice on the shape of batches of one architecture."""

    batch_factors: tuple[float, ...]
    """Factors of the batch size that are worth trying."""
    halved_axis: Literal["seq", "time"] | None
    """Axis that is worth halving as well, or ``None``."""
    advice: str


RULES: dict[Architecture, ArchitectureRule] = {
    "convolutional": ArchitectureRule(
        batch_factors=(0.5, 1, 2, 4),
        halved_axis=None,
        advice="convolutional: activations grow with batch x height x width, and small batches keep the device busy "
        "already; use channels_last, and keep enough samples per step for batch statistics, which accumulation does "
        "not pool",
    ),
    "attention": ArchitectureRule(
        batch_factors=(0.5, 1, 2, 4),
        halved_axis="seq",
        advice="attention: time (and memory, where scores are kept) grows with the square of the sequence; fill "
        "batches by tokens rather than by sequences, and shorten sequences before the batch",
    ),
    "recurrent": ArchitectureRule(
        batch_factors=(1, 2, 4, 8),
        halved_axis=None,
        advice="recurrent: the steps of a sequence run one after another, so that only the batch fills the device; "
        "pack sequences, or put sequences of similar length into one batch",
    ),
    "spiking": ArchitectureRule(
        batch_factors=(0.5, 1, 2, 4),
        halved_axis="time",
        advice="spiking: every time step's activations are kept for backward; halving the time steps saves what "
        "halving the batch saves, and running time in chunks (memopt_cli.optimize with level=3) changes neither",
    ),
}


def recognize_architectures(model: nn.Module) -> tuple[Architecture, ...]:
    """Return the architectures that the modules of ``model`` belong to, in the order of :data:`RULES`.

    PyTorch's layers are recognized by class, others by class names (``Attention``, ``LIF``, ``Leaky``, ``Spik`` …).
    """
    kinds = {kind for module in model.modules() for kind in _kinds(module)}
    return tuple(kind for kind in RULES if kind in kinds)


def candidate_shapes(model: nn.Module, input_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Apply the rules of the model's architectures to ``input_shape`` (batch first); return shapes worth measuring.

    Time is axis 1 of ``(batch, time, seq, dim)``; the sequence is axis 1 in 3 dimensions and axis 2 in 4.
    """
    shape = tuple(input_shape)
    rules = [RULES[kind] for kind in recognize_architectures(model)] or [RULES["convolutional"]]
    shapes = [_resize(shape, 0, factor) for rule in rules for factor in rule.batch_factors]
    for rule in rules:
        axis = {"seq": sequence_axis(shape), "time": 1 if len(shape) >= 4 else None, None: None}[rule.halved_axis]
        if axis is not None and shape[axis] > 1:
            half = _resize(shape, axis, 0.5)
            shapes += [half, _resize(half, 0, 2)]
    return list(dict.fromkeys(shapes))


def _resize(shape: tuple[int, ...], axis: int, factor: float) -> tuple[int, ...]:
    return (*shape[:axis], max(1, int(shape[axis] * factor)), *shape[axis + 1 :])


def _kinds(module: nn.Module) -> Iterator[Architecture]:
    name = "" if type(module).__module__.startswith("torch.") else type(module).__name__
    if isinstance(module, _CONVOLUTIONAL):
        yield "convolutional"
    if isinstance(module, _ATTENTION) or _ATTENTION_NAME.search(name):
        yield "attention"
    if isinstance(module, _RECURRENT):
        yield "recurrent"
    if _SPIKING_NAME.search(name):
        yield "spiking"
