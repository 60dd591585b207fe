"""A case: a model, a plan and a training, drawn from a number or read from text."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

import torch

from memopt_cli.records import Plan, SegmentPlan, from_data
from tests.fuzz.models import Block, Network, drawn_blocks
from tests.fuzz.plans import drawn_around, drawn_segments, plan_of
from tests.fuzz.scenarios import PLAIN, Scenario, drawn_scenario

KNOWN: Final[dict[str, str]] = {
    "another default dtype": "a recomputation runs under the default dtype of backward",
    "written": "a forward that writes to its own parameters is refused",
}
"""Blocks and parts of a scenario that are never drawn -> why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one run compares."""

    seed: int = 0
    """Of weights and inputs."""
    blocks: tuple[Block, ...] = ()
    segments: tuple[SegmentPlan, ...] = ()
    """On the whole model, or on several of its blocks."""
    packed: bool = False
    scenario: Scenario = PLAIN
    steps: int = 3

    @property
    def plan(self) -> Plan:
        """The plan of the whole model."""
        return plan_of(self.blocks, self.segments, self.packed)

    @property
    def is_exact(self) -> bool:
        """To the bit; chunks change the order of sums."""
        return all(segment.chunks == 1 for segment in self.plan.segments)

    @property
    def is_comparable(self) -> bool:
        """What is not exact is compared in double precision throughout, where there are numbers."""
        scenario = self.scenario
        return self.is_exact or (
            scenario.dtype == "float64" and not scenario.around and scenario.inputs != "not a number"
        )


def build(case: Case) -> Network:
    """The model, in the case's dtype, always with the same weights."""
    torch.manual_seed(case.seed)
    return Network(case.blocks).to(getattr(torch, case.scenario.dtype))


def drawn_case(seed: int, index: int) -> Case:
    """The case of that number."""
    draws = random.Random(f"training {seed} {index}")
    case = Case(seed=draws.randrange(1000), blocks=drawn_blocks(draws, [*KNOWN]), packed=draws.random() < 0.3)
    case = replace(case, scenario=drawn_scenario(draws, draws.choice(_DTYPES), [*KNOWN]))
    model = build(case)
    case = replace(
        case, segments=drawn_around(draws, case.blocks, model), blocks=drawn_segments(draws, case.blocks, model)
    )
    if case.plan.is_empty:
        return replace(case, packed=True)
    if case.is_comparable:
        return case
    return replace(case, scenario=replace(case.scenario, dtype="float64", around=(), inputs="normal"))


_DTYPES: Final = ("float32", "float32", "float32", "float64", "bfloat16")


def to_text(case: Case) -> str:
    """What differs from the defaults, for a command line."""
    return json.dumps(_said(case), separators=(",", ":"))


def from_text(text: str) -> Case:
    """The inverse of :func:`to_text`."""
    return from_data(Case, json.loads(text))


def _said(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: (getattr(value, f.name), f.default) for f in fields(value)}
        return {name: _said(there) for name, (there, default) in named.items() if there != default}
    return [_said(item) for item in value] if isinstance(value, tuple) else value
