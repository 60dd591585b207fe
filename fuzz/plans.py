"""Random plans: segments on any module and inside each other, with compressors, chunks, kept outputs and places."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import nn

import memopt_cli
from fuzz.models import KINDS, Block, placed
from memopt_cli.errors import PlanError
from memopt_cli.records import PlaceName, Plan, SegmentPlan
from memopt_cli.runtime import find_part

_COMPRESSORS: Final = ("null", "null", "null", "bit", "boolean", "uint8", "sparse", "parts", "parts")
_SENT: Final = 0.3
"""Probability that a drawn plan or segment stores its tensors on the disk."""
_KEPT: Final = (
    *("aten::addmm", "aten::addmm#2", "aten::mm", "aten::bmm", "aten::convolution", "aten::native_batch_norm"),
    *("aten::native_layer_norm", "aten::native_dropout", "aten::bernoulli", "aten::tanh", "aten::mul", "aten::add"),
    *("aten::_softmax", "aten::relu", "aten::sigmoid", "aten::index", "aten::embedding", "aten::rand"),
)


def plan_of(blocks: Sequence[Block], segments: Sequence[SegmentPlan], packed: bool, place: PlaceName) -> Plan:
    """Return the plan of ``segments``, on the whole model, and of the segments in ``blocks``."""
    within = (replace(s, path=_joined(path, s.path)) for path, block in placed(blocks) for s in block.segments)
    return Plan(segments=(*segments, *within), packed=packed, place=place)


def _joined(path: str, rest: str) -> str:
    return f"{path}.{rest}" if rest else path


def drawn_segments(draws: random.Random, blocks: Sequence[Block], model: nn.Module) -> tuple[Block, ...]:
    """Return ``blocks`` with random segments on their modules, without those that ``model``, made of them, refuses."""
    return tuple(_planned(draws, block, f"blocks.{index}", model) for index, block in enumerate(blocks))


def _planned(draws: random.Random, block: Block, path: str, model: nn.Module) -> Block:
    inner = tuple(_planned(draws, b, f"{path}.inner.{i}", model) for i, b in enumerate(block.inner))
    block = replace(block, inner=inner)
    drawn = [s for s in _candidates(draws, block, find_part(model, path)) if _fits(model, path, s)]
    return replace(block, segments=tuple(drawn))


def _candidates(draws: random.Random, block: Block, module: nn.Module) -> Iterator[SegmentPlan]:
    if draws.random() < 0.55:
        yield _segment(draws, "", _chunks(draws, block))
    parts = [path for path, _ in module.named_modules() if path and not path.startswith("inner.")]
    if parts and draws.random() < 0.3:
        yield _segment(draws, draws.choice(parts), {})
    # Along some axes the outputs of chunks cannot be joined: the segment must then run whole.
    if block.kind.startswith("summed") and draws.random() < 0.5:
        yield _segment(draws, "sum", {"chunks": draws.choice([2, 3]), "axis": draws.choice([0, 1, 2, -1])})
    if len(block.inner) > 1 and draws.random() < 0.2:
        first = draws.randrange(len(block.inner) - 1)
        yield _segment(draws, f"inner.{first}-{draws.randrange(first + 1, len(block.inner))}", {})


def _segment(draws: random.Random, path: str, settings: dict[str, Any]) -> SegmentPlan:
    kept = tuple(sorted(draws.sample(_KEPT, draws.choice([1, 2, 3])))) if draws.random() < 0.25 else ()
    return SegmentPlan(
        path=path, compressor=draws.choice(_COMPRESSORS), keep=kept, place=drawn_place(draws), **settings
    )


def drawn_place(draws: random.Random) -> PlaceName:
    """Draw the place of stored tensors: mostly the device, sometimes the disk."""
    return "disk" if draws.random() < _SENT else "device"


def _chunks(draws: random.Random, block: Block) -> dict[str, Any]:
    if block.kind == "split" and draws.random() < 0.5:
        return {"spatial_split": True}
    axes = _axes(block)
    if not axes or draws.random() > 0.25:
        return {}
    chunks: dict[str, Any] = {"chunks": draws.choice([2, 3]), "axis": draws.choice(sorted(axes))}
    gathers = any(KINDS[b.kind].gathers for _, b in placed([block]))
    return (
        chunks
        | ({"batch_statistics": True} if gathers else {})
        | ({"recompute_states": True} if draws.random() < 0.3 else {})
    )


def _axes(block: Block) -> set[int]:
    """Return the dimensions along which nothing in the block mixes, so that chunks are possible."""
    kinds = [KINDS[b.kind] for _, b in placed([block])]
    mixes = any(kind.repeats for kind in kinds) and any(kind.hands_on for kind in kinds)
    return set() if mixes else set.intersection(*(set(kind.axes) for kind in kinds))


def drawn_around(draws: random.Random, blocks: Sequence[Block], model: nn.Module) -> tuple[SegmentPlan, ...]:
    """Draw segments on the whole model, on all of its blocks or on a run of blocks; often none."""
    last = len(blocks) - 1
    run = f"blocks.{draws.randrange(last)}-{last}" if last else "blocks"
    paths = {"": 0.15, "blocks": 0.15, run: 0.15}
    drawn = [_segment(draws, path, {}) for path, share in paths.items() if draws.random() < share]
    return tuple(s for s in drawn if _fits(model, "", s))


def _fits(model: nn.Module, path: str, segment: SegmentPlan) -> bool:
    try:
        memopt_cli.apply_plan(model, Plan(segments=(replace(segment, path=_joined(path, segment.path)),)))
    except PlanError:
        return False
    memopt_cli.remove_plan(model)
    return True
