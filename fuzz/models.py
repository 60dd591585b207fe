"""Random models: blocks one after another and inside each other; the model also works without any of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from fuzz.forwards import FORWARDS
from fuzz.layers import LAYERS, WIDTH, Kind
from fuzz.outside import OUTSIDE
from memopt_cli.records import SegmentPlan

KINDS: Final[dict[str, Kind]] = LAYERS | FORWARDS | OUTSIDE
"""Name of a block -> its kind."""

_MAX_BLOCKS: Final = 4
"""Blocks in a row at the top level; one fewer at each level below."""
_DEEPEST: Final = 2
"""Levels of blocks below the top level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Part of a model, with the segments of a plan inside it."""

    kind: str
    """Key of :data:`KINDS`."""
    inner: tuple[Block, ...] = ()
    """Blocks inside this one."""
    segments: tuple[SegmentPlan, ...] = ()
    """Segments of the plan in this block, with paths relative to the block."""


class Network(nn.Module):
    """Model that runs its blocks one after another, and resets the voltages of neurons before and after."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*map(_module_of, blocks))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self._reset()
        output: Tensor = self.blocks(x) * self.scale
        self._reset()
        return output

    def _reset(self) -> None:
        for module in self.modules():
            if hasattr(module, "voltage"):
                module.voltage = None


def _module_of(block: Block) -> nn.Module:
    kind = KINDS[block.kind]
    return kind.make(nn.Sequential(*map(_module_of, block.inner))) if kind.holds else kind.make()


def drawn_blocks(draws: random.Random, depth: int = 0) -> tuple[Block, ...]:
    """Draw one to four blocks in a row, fewer at each level of ``depth``."""
    kinds = [name for name, kind in KINDS.items() if depth < _DEEPEST or not kind.holds]
    return tuple(_drawn(draws, draws.choice(kinds), depth) for _ in range(draws.randint(1, _MAX_BLOCKS - depth)))


def _drawn(draws: random.Random, kind: str, depth: int) -> Block:
    return Block(kind=kind, inner=drawn_blocks(draws, depth + 1) if KINDS[kind].holds else ())


def placed(blocks: Sequence[Block], prefix: str = "blocks.") -> Iterator[tuple[str, Block]]:
    """Yield every block with its path in the model."""
    for index, block in enumerate(blocks):
        yield f"{prefix}{index}", block
        yield from placed(block.inner, f"{prefix}{index}.inner.")
