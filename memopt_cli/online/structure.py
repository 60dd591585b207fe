"""The structure of one time step: weights that carry traces, the states that they reach, and tied tensors.

A step is taken apart into its *parts*: the states from the last step, the outputs of tagged weights, and the outputs of
cells.  For each part, it is recorded which other parts it reads, and whether it reads them neuron by neuron.  This
shows the states that a weight *reaches*: paths lead from its output to a cell's new state, and from there to other
cells and to later time steps; they end where they enter a weight, traced or not.

:mod:`memopt_cli.online.finding` finds the structure: :mod:`memopt_cli.online.probe` takes a step apart,
:mod:`memopt_cli.online.graph` walks autograd's graph, and :mod:`memopt_cli.online.reach` follows the weights from part
to part.
"""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.online.traces import CellOutput, Group, ModuleUse, PastState, Row

Source = PastState | ModuleUse | CellOutput
"""Part of a step that a tensor may be computed from."""


@dataclass(frozen=True, slots=True)
class Edges:
    """The parts that an output of a cell reads neuron by neuron and that depend on traced weights."""

    past_states: tuple[PastState, ...] = ()
    uses: tuple[ModuleUse, ...] = ()
    outputs: tuple[CellOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of one time step of a model.

    In the step ``v = 0.9 v + fc(x); s = spike(v); return readout(s)``, a cell ``lif`` declares the state ``v`` and
    returns ``s``, and two linear layers are tagged:

    - ``fc`` reaches ``v``: ``groups`` maps its use to the group ``v`` of ``lif``, and ``edges`` maps the new ``v`` to
      the last ``v`` and that use.
    - The use of ``fc`` is in ``constant_uses``, since its input is an input of the model.  It is in ``unread_parts``,
      as ``v`` is, since only ``lif`` reads it; if the model also returned ``fc(x)``, it would be in
      ``connected_uses``.
    - ``v`` would be in ``exposed_states`` if the model also returned the ``v`` of the last step.
    - ``readout`` is in ``untraced_reasons``: its output enters no cell.
    """

    groups: dict[ModuleUse, tuple[Group, ...]]
    """Use of a traced weight -> the groups of states that it reaches neuron by neuron, in this step or a later step,
    without passing another weight."""
    input_shapes: dict[ModuleUse, tuple[int, ...] | None]
    """Use of a traced weight -> shape of its input per sample; ``None`` for an elementwise parameter."""
    cells: tuple[str, ...]
    """Paths of the cells that have states in a group, and of cells between a weight and such a cell."""
    edges: dict[CellOutput, Edges]
    """Followed output of a cell -> the parts that it depends on."""
    constant_uses: frozenset[ModuleUse]
    """Uses whose input was computed only from the last step's states and the model's inputs."""
    connected_uses: frozenset[ModuleUse]
    """Uses with an output that is also read outside the cells tied to it."""
    doubled_uses: frozenset[ModuleUse]
    """Connected uses that a cell also reads through an attached output (see :attr:`attached_outputs`)."""
    exposed_states: frozenset[PastState]
    """States of the last step that are also read outside their own cell."""
    attached_outputs: frozenset[CellOutput]
    """Outputs of cells that depend on more than their edges, such as on a time constant, and keep their graph."""
    source_states: dict[CellOutput, frozenset[int]]
    """Output of a cell that depends only on the cell's new states -> the numbers of those states."""
    plain_parameters: tuple[str, ...]
    """Names of parameters that a followed state depends on, and that no tag could give a trace."""
    untraced_reasons: dict[str, str]
    """Path of a tagged module without a trace -> the reason.  Such a module gets only the gradient of each step."""
    call_counts: dict[str, int]
    """Tagged module or cell -> number of its calls in the step."""
    known_sources: dict[CellOutput, frozenset[Source]]
    """Followed output of a cell -> all parts that it was computed from, by any path."""
    unfollowed_sources: dict[PastState, frozenset[Source]]
    """State independent of traced weights -> all parts that it was computed from, by any path."""
    unread_parts: frozenset[PastState | ModuleUse]
    """States, and outputs of traced weights, that only the cells tied to them read."""
    entering_states: frozenset[PastState]
    """States of the last step that are read only by their own cells and by weights."""
    sources_by_weight: dict[CellOutput | PastState, frozenset[Source]]
    """Output of a cell, or state that is not followed -> the parts that depend on traced weights and reach it only
    through weights without tags."""

    def without_graph_entries(self, row: Row) -> Row:
        """Return the ``row`` of an attached tensor without the entries whose gradient autograd computes already."""
        return Row(
            {state: d for state, d in row.hidden.items() if state not in self.exposed_states},
            {use: d for use, d in row.inputs.items() if use not in self.connected_uses},
        )
