"""What one time step of a model looks like to an online algorithm: which weights carry traces, and what of it is tied.

A step is taken apart at the states that the last one left, at the outputs of tagged weights, and at what leaves the
cells.  What each part reads of the others, and whether it does so neuron by neuron, says which states a weight reaches:
paths from cell to cell are followed through the time steps, and end where they enter a weight, traced or not.

:mod:`memopt_cli.online.graph` walks autograd's graph, :mod:`memopt_cli.online.probe` takes a step apart,
:mod:`memopt_cli.online.reach` follows the weights from part to part, for :mod:`memopt_cli.online.finding`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.online.traces import Group, Held, Left, Row, Use

Source = Held | Use | Left
"""What a tensor may be computed from."""


@dataclass(frozen=True, slots=True)
class Edges:
    """What a tensor that leaves a cell depends on neuron by neuron, of all that carries traces."""

    held: tuple[Held, ...] = ()
    uses: tuple[Use, ...] = ()
    left: tuple[Left, ...] = ()


@dataclass(frozen=True, slots=True)
class Structure:
    """What one time step of a model looks like to an online algorithm."""

    groups: dict[Use, tuple[Group, ...]]
    """Use of a traced weight -> the groups of states it reaches neuron by neuron, in this step or a later one, without
    passing another weight."""
    z_shapes: dict[Use, tuple[int, ...] | None]
    """Shape of the weight's input per sample; ``None`` for an elementwise parameter, which has none."""
    cells: tuple[str, ...]
    """Paths of those that have states in a group, or through which others are reached."""
    edges: dict[Left, Edges]
    """Of every tensor that is followed."""
    constant: frozenset[Use]
    """Uses whose input was computed from nothing but the last step's states and the model's inputs."""
    connected: frozenset[Use]
    """Uses whose output is read by more than the cells, which are tied to it."""
    doubled: frozenset[Use]
    """Those of them that one of the cells reads through the graph of an attached tensor."""
    exposed: frozenset[Held]
    """States that, as the last step left them, are read by more than the cell that declares them."""
    attached: frozenset[Left]
    """Tensors that depend on more than their edges tell."""
    derived: dict[Left, frozenset[int]]
    """Tensors that depend on nothing but the cell's new states -> the numbers of those states."""
    untraced: dict[str, str]
    """Tagged module -> why it carries no trace: it gets the gradient of each step alone."""
    calls: dict[str, int]
    """Tagged module or cell -> how often the step called it."""
    known: dict[Left, frozenset[Source]]
    """All that a tensor that is followed was computed from, by any path."""
    not_followed: dict[Held, frozenset[Source]]
    """The same of the states that carry nothing of traced weights."""
    unread: frozenset[Held | Use]
    """States, and outputs of traced weights, that no gradient reaches but from the cells that are tied to them."""
    entering: frozenset[Held]
    """States that, as the last step left them, are read outside their cells by weights and by their own cells alone."""
    weighted: dict[Left | Held, frozenset[Source]]
    """Tensor that leaves a cell, or state that is not followed -> what carries traces, and was found to reach it past
    weights without tags alone."""

    def beside_its_graph(self, row: Row) -> Row:
        """``row`` without what the graph of a tensor that is attached to it leads to."""
        return Row(
            {held: d for held, d in row.hidden.items() if held not in self.exposed},
            {use: d for use, d in row.inputs.items() if use not in self.connected},
        )
