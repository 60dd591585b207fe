"""A case of the fuzz: a random model with a plan and a training.

A case is drawn from a seed and a number, so that it can be repeated, or read from the text that a failure prints.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

import torch

from fuzz.models import Block, Network, drawn_blocks, placed
from fuzz.outside import OUTSIDE
from fuzz.plans import drawn_around, drawn_place, drawn_segments, plan_of
from fuzz.scenarios import PLAIN, Scenario, drawn_scenario
from memopt_cli.records import PlaceName, Plan, SegmentPlan, from_data


@dataclass(frozen=True, slots=True)
class Known:
    """Combination of blocks and events that is known to fail for a reason outside memopt, and is not drawn."""

    names: frozenset[str]
    """Blocks and parts of a scenario that all must be in a case for it to fail."""
    why: str
    """Reason of the failure."""
    others: frozenset[str] = frozenset()
    """Further names, at least one of which must also be in the case; empty if ``names`` are enough."""

    def applies(self, names: set[str]) -> bool:
        """Return whether a case with the blocks and events ``names`` is known to fail."""
        return self.names <= names and (not self.others or not self.others.isdisjoint(names))


_CHECKPOINTS: Final = ("checkpointed", "checkpointed, reentrant", "in a checkpoint")
_NOT_REPEATED: Final = frozenset(
    {"generator of PyTorch's", "generator of NumPy's", "generator of Python's", "iterator", "NumPy", "Python"}
    | {
        "buffer assigned",
        "buffer copied",
        "buffer through data",
        "counting",
        "remembering",
        "membranes",
        "memory in place",
    }
    | {"spectral norm", "leaf", "with other parameters", "called", "embedding with a largest norm", "written"}
    | {"reweighted", "parameter made"}
    | OUTSIDE.keys()
)
"""Blocks with state that PyTorch's own checkpoint does not restore for a recomputation."""
_MODES: Final = frozenset({"eval between", "train between"})
"""Events that change the mode before backward: PyTorch's own checkpoint recomputes in the new mode."""

KNOWN: Final = (
    Known(frozenset({"penalized", "thaw between"}), "packed, what was frozen when it was saved has no gradient"),
    Known(
        frozenset({"penalized", "freeze between"}),
        "packed, what was trained when it was saved has one, on a way that PyTorch cannot differentiate twice",
        # The embeddings fail only with an empty batch.
        frozenset({"bag", "largest of a bag", "embedding", "embedding with padding"}),
    ),
    Known(
        frozenset({"saved on the CPU", "change the inputs"}),
        "of what is on the CPU PyTorch saves no copy there, and does not see that it changes; packed, it is one",
    ),
    Known(
        frozenset({"train between", "look between"}),
        "PyTorch's batch norm in eval mode differentiates by the statistics that there are in backward, moved or not",
        frozenset({"eval", "frozen batch norm"}),
    ),
    Known(frozenset({"saved by hooks", "rrelu"}), "the user's own hooks copy the noise before it is drawn"),
    Known(frozenset({"saved on the CPU", "rrelu"}), "and so does PyTorch's own hook, of what is on a GPU"),
    Known(frozenset({"view of result", "penalized"}), "PyTorch's checkpoint unpacks a tensor once a backward"),
    Known(
        frozenset({"saved on the CPU", "begin statistics anew between"}),
        "PyTorch's hook copies nothing that is on the CPU already, and without a plan gradients are of the new ones",
    ),
    *(Known(frozenset({own}), "the user's own checkpoint is wrong", _NOT_REPEATED | _MODES) for own in _CHECKPOINTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Model, plan and training of one run."""

    seed: int = 0
    """Seed of the weights and the inputs."""
    blocks: tuple[Block, ...] = ()
    """Blocks of the model, with their segments."""
    segments: tuple[SegmentPlan, ...] = ()
    """Segments on the whole model or on runs of blocks; those inside a block are in ``blocks``."""
    packed: bool = False
    """Whether the plan packs saved tensors."""
    place: PlaceName = "device"
    """Place where tensors saved outside segments wait for backward."""
    scenario: Scenario = PLAIN
    """Training around the model."""
    steps: int = 3
    """Steps of the training."""

    @property
    def plan(self) -> Plan:
        """Plan of the whole model."""
        return plan_of(self.blocks, self.segments, self.packed, self.place)

    @property
    def is_exact(self) -> bool:
        """Whether results must be equal to the bit: not with kept outputs, nor with chunks, which reorder sums."""
        return all(segment.chunks == 1 and not segment.keep for segment in self.plan.segments)

    @property
    def is_comparable(self) -> bool:
        """Whether results can be compared: those of an inexact plan need double precision and ordinary inputs.

        Adam is left out, since it divides a gradient by its own size: a gradient that is mere rounding moves a
        parameter as far as a large one.
        """
        scenario = self.scenario
        is_sound = scenario.inputs not in _DEGENERATE and scenario.update != "adam" and "autocast" not in _names(self)
        return self.is_exact or (scenario.dtype == "float64" and not scenario.around and is_sound)


_DEGENERATE: Final = ("not a number", "negative zero")
"""Forms of a batch full of equal values or NaN, where rounding decides which value is the largest."""


def build(case: Case) -> Network:
    """Build the model of ``case`` in its dtype; its seed gives the same weights each time."""
    torch.manual_seed(case.seed)
    return Network(case.blocks).to(getattr(torch, case.scenario.dtype))


def drawn_case(seed: int, index: int) -> Case:
    """Draw case number ``index`` of ``seed``, again and again until it is not known to fail."""
    draws = random.Random(f"training {seed} {index}")
    while True:
        case = _drawn(draws)
        if _is_known(case):
            continue
        case = _planned(draws, case)
        if case.is_comparable and not _is_known(case):
            return case


def _is_known(case: Case) -> bool:
    names = _names(case)
    return any(known.applies(names) for known in KNOWN)


def _planned(draws: random.Random, case: Case) -> Case:
    """Return ``case`` with a random plan, and in double precision if the plan is not exact."""
    model = build(case)
    segments, blocks = drawn_around(draws, case.blocks, model), drawn_segments(draws, case.blocks, model)
    case = replace(case, segments=segments, blocks=blocks)
    if case.plan.is_empty:
        return replace(case, packed=True)
    if case.is_comparable:
        return case
    return replace(case, scenario=replace(case.scenario, dtype="float64", around=(), inputs="normal", update="sgd"))


def _drawn(draws: random.Random) -> Case:
    return Case(
        seed=draws.randrange(1000),
        blocks=drawn_blocks(draws),
        packed=draws.random() < 0.3,
        place=drawn_place(draws),
        scenario=drawn_scenario(draws, draws.choice(_DTYPES)),
    )


def _names(case: Case) -> set[str]:
    scenario = case.scenario
    events = (*scenario.around, *scenario.before, *scenario.between, *scenario.after)
    between = (f"{name} between" for name in scenario.between)
    kept = {"kept"} if any(segment.keep for segment in case.plan.segments) else set()
    kinds = {block.kind for _, block in placed(case.blocks)}
    return kinds | kept | {scenario.call, scenario.backward, *events, *between}


_DTYPES: Final = ("float32", "float32", "float32", "float64", "bfloat16")


def to_text(case: Case) -> str:
    """Return ``case`` as JSON for a command line, without fields at their defaults."""
    return json.dumps(_said(case), separators=(",", ":"))


def from_text(text: str) -> Case:
    """Return the case that :func:`to_text` wrote."""
    return from_data(Case, json.loads(text))


def _said(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: (getattr(value, f.name), f.default) for f in fields(value)}
        return {name: _said(there) for name, (there, default) in named.items() if there != default}
    return [_said(item) for item in value] if isinstance(value, tuple) else value
