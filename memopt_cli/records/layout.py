"""The layout of a model over many ranks, and the collectives that exchange tensors between ranks."""

from __future__ import annotations

from dataclasses import dataclass

BUILT_IN = ("fsdp", "ddp")
"""Layouts that memopt makes itself; any other layout needs a user function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The distribution of a model over ranks; each is a process with a device."""

    ranks: int
    parallel: str
    """One of :data:`BUILT_IN`, or ``file.py:function``, which is given the model and a mesh and returns the model."""
    mesh: dict[str, int]
    """Name of each axis -> its length, the outermost first; their product is the number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The calls of one kind that exchange tensors between ranks in a step."""

    kind: str
    """``all-gather``, ``reduce-scatter``, ``all-reduce``, ``broadcast``, ``all-to-all`` …"""
    calls: int
    whole_bytes: int
    """Bytes of the whole gathered tensors, or of the tensors that each rank gives to be reduced."""
