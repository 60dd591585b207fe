"""The structure of one time step: which weights carry traces, which states they reach, and which tensors are tied.

A step is taken apart at the states from the last step, at the outputs of tagged weights, and at the outputs of cells.
Which of the others each part reads, and whether it does so neuron by neuron, shows the states that a weight reaches:
paths from cell to cell are followed through the time steps, and end where they enter a weight, traced or not.

:mod:`memopt_cli.online.graph` walks autograd's graph, :mod:`memopt_cli.online.probe` takes a step apart,
:mod:`memopt_cli.online.reach` follows the weights from part to part, for :mod:`memopt_cli.online.finding`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.online.traces import CellOutput, Group, PastState, Row, Use

Source = PastState | Use | CellOutput
"""Part of a step that a tensor may be computed from."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Parts that carry traces, and that an output of a cell depends on neuron by neuron."""

    held: tuple[PastState, ...] = ()
    uses: tuple[Use, ...] = ()
    out: tuple[CellOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of one time step of a model."""

    groups: dict[Use, tuple[Group, ...]]
    """Use of a traced weight -> the groups of states it reaches neuron by neuron, in this step or a later one, without
    passing another weight."""
    z_shapes: dict[Use, tuple[int, ...] | None]
    """Shape of the weight's input per sample; ``None`` for an elementwise parameter, which has none."""
    cells: tuple[str, ...]
    """Paths of the cells that have states in a group, or through which others are reached."""
    edges: dict[CellOutput, Edges]
    """Output of a cell that is followed -> what it depends on."""
    constant: frozenset[Use]
    """Uses whose input was computed from nothing but the last step's states and the model's inputs."""
    connected: frozenset[Use]
    """Uses whose output is read by more than the cells, which are tied to it."""
    doubled: frozenset[Use]
    """Connected uses that a cell reads through the graph of an attached tensor."""
    exposed: frozenset[PastState]
    """States of the last step that are read by more than the cell that declares them."""
    attached: frozenset[CellOutput]
    """Outputs of cells that depend on more than their edges, and stay attached to their graphs."""
    derived: dict[CellOutput, frozenset[int]]
    """Output that depends on nothing but the cell's new states -> the numbers of those states."""
    untraced: dict[str, str]
    """Tagged module -> why it carries no trace: it gets the gradient of each step alone."""
    calls: dict[str, int]
    """Tagged module or cell -> how often the step called it."""
    known: dict[CellOutput, frozenset[Source]]
    """Output of a cell that is followed -> all that it was computed from, by any path."""
    not_followed: dict[PastState, frozenset[Source]]
    """State that carries nothing of traced weights -> all that it was computed from, by any path."""
    unread: frozenset[PastState | Use]
    """States, and outputs of traced weights, that only cells which are tied to them read."""
    entering: frozenset[PastState]
    """States of the last step that are read outside their cells by weights and by their own cells alone."""
    weighted: dict[CellOutput | PastState, frozenset[Source]]
    """Output of a cell, or state that is not followed -> parts that carry traces and reach it, but only through weights
    without tags."""

    def beside_its_graph(self, row: Row) -> Row:
        """Return ``row`` without the entries that an attached tensor's own graph accounts for."""
        return Row(
            {held: d for held, d in row.hidden.items() if held not in self.exposed},
            {use: d for use, d in row.inputs.items() if use not in self.connected},
        )
