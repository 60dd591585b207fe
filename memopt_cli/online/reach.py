"""Finding the states that each tagged weight reaches: in the step that was taken apart, and in the steps after it."""

from __future__ import annotations

from memopt_cli.online.graph import Reads
from memopt_cli.online.probe import Probe
from memopt_cli.online.structure import Edges, Source
from memopt_cli.online.traces import CellOutput, Group, ModuleUse, PastState


class Reach:
    """A walk from each weight to the outputs of cells that depend on it, and on through the time steps.

    Take ``b = 0.8 b + tanh(a)`` and then ``a = 0.9 a + w(x)``, in two cells.  The new ``a`` reads the use of ``w``:
    ``w`` reaches the state ``a`` in this step.  The new ``b`` reads the state ``a`` of the last step: ``w`` reaches
    ``b`` one step later.  Both states are followed for ``w``.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe, self.reads = probe, probe.reads
        self.cell_outputs = [part for part in self.reads if isinstance(part, CellOutput)]
        """All outputs of cells."""
        self.uses = [part for part in self.reads if isinstance(part, ModuleUse)]
        """All uses of tagged weights."""
        self.sources: dict[CellOutput, set[Source]] = {}
        """Output of a cell -> the uses and states that it was computed from, through other cells as well."""
        for out in self.cell_outputs:
            sources = (self.sources[s] if isinstance(s, CellOutput) else {s} for s in self.reads[out].direct)
            self.sources[out] = set[Source]().union(*sources)
        self.output_of_new_state = {
            PastState(out.cell, names[out.number].name): out
            for out in self.cell_outputs
            if out.number < len(names := probe.states[out.cell])
            and PastState(out.cell, names[out.number].name) not in probe.forgotten
        }
        """State -> the output of the cell's last call in the step that is its new value."""
        self.reached = {use: states for use in self.uses if (states := self._states_reached(use))}
        """Use of a traced weight -> the states that it reaches; a use that reaches none carries no trace."""
        self.followed_states: set[PastState] = set().union(*self.reached.values())
        needed = self._needed_outputs()
        self.cells = {out.cell for out in needed if self.carries(out)}
        """Cells with an output that depends on traced weights neuron by neuron."""
        self.followed_outputs = {out for out in needed if out.cell in self.cells}
        """Outputs of these cells that are followed."""
        self.traced = {use.path for use in self.reached}
        """Paths of the traced weights' modules."""
        untraced = {use for use in self.uses if use.path not in self.traced}
        self.skipped: set[Source] = set[Source](untraced).union(self.cell_outputs) - self.followed_outputs
        """Parts that are not followed: a reader of such a part counts as a reader of all its parts."""

    def _states_reached(self, use: ModuleUse) -> set[PastState]:
        """Return the states that ``use`` reaches, in its own step and from there in later ones."""
        reached = {past_state for past_state, out in self.output_of_new_state.items() if use in self.sources[out]}
        while more := {
            h for h, out in self.output_of_new_state.items() if h not in reached and self.sources[out] & reached
        }:
            reached |= more
        return reached

    def carries(self, source: Source) -> bool:
        """Return whether ``source`` depends on traced weights neuron by neuron."""
        if isinstance(source, CellOutput):
            return any(map(self.carries, self.sources[source]))
        return source in self.followed_states or source in self.reached

    def _needed_outputs(self) -> set[CellOutput]:
        """Return the outputs to follow: new states, other outputs of cells with traced states, outputs before both."""
        needed: set[CellOutput] = set()
        stateful_cells = {past_state.cell for past_state in self.followed_states}
        for out in reversed(self.cell_outputs):
            if out.number < len(self.probe.states[out.cell]) or out.cell in stateful_cells or out in needed:
                needed |= {out, *(s for s in self.reads[out].direct if isinstance(s, CellOutput))}
        return needed

    def edges(self, out: CellOutput) -> Edges:
        """Return the parts that ``out`` depends on neuron by neuron, and that depend on traced weights."""
        direct = [s for s in self.probe.leaves if s in self.reads[out].direct and self.carries(s)]
        return Edges(
            past_states=tuple(s for s in direct if isinstance(s, PastState)),
            uses=tuple(s for s in direct if isinstance(s, ModuleUse)),
            outputs=tuple(s for s in direct if isinstance(s, CellOutput)),
        )

    def groups(self, reached: set[PastState]) -> tuple[Group, ...]:
        """Return the states in ``reached`` by cell."""
        by_cell: dict[str, list[PastState]] = {}
        for past_state in self.output_of_new_state:
            if past_state in reached:
                by_cell.setdefault(past_state.cell, []).append(past_state)
        return tuple(
            Group(
                cell,
                tuple(past_state.name for past_state in states),
                self.probe.shapes[self.output_of_new_state[states[0]]],
            )
            for cell, states in by_cell.items()
        )

    def is_attached(self, out: CellOutput, edges: Edges) -> bool:
        """Return whether ``out`` depends on more than its ``edges``."""
        reads = self.reads[out]
        other_sources = reads.sources - {*edges.past_states, *edges.uses, *edges.outputs} | reads.weighted
        return reads.has_parameters or any(not isinstance(source, PastState) for source in other_sources)

    def is_constant(self, use: ModuleUse) -> bool:
        """Return whether the input of ``use`` is computed only from the last step's states and the model's inputs."""
        has_parameters, sources = self.sources_behind(self.reads[use])
        return not has_parameters and all(isinstance(source, PastState) for source in sources)

    def sources_behind(self, reads: Reads) -> tuple[bool, set[Source]]:
        """Return whether ``reads`` has untraced parameters, and its sources, through parts that are skipped."""
        pending, seen, has_parameters = [reads], set[Source](), False
        while pending:
            reads = pending.pop()
            has_parameters |= reads.has_parameters
            new_sources = reads.sources - seen
            seen |= new_sources
            for source in new_sources & self.skipped:
                assert not isinstance(source, PastState)
                pending.append(self.reads[source])
                has_parameters |= isinstance(source, ModuleUse)
        return has_parameters, seen - self.skipped

    def is_connected(self, use: ModuleUse) -> bool:
        """Return whether ``use`` is also read outside the cells that are tied to it.

        Other readers are the model's output, weights, and outputs of cells that are not followed.
        """
        readers = ((part in self.followed_outputs, reads) for part, reads in self.reads.items())
        return any(use in reads.sources for reads in self.probe.output_reads) or any(
            use in (reads.weighted if is_followed else reads.sources) for is_followed, reads in readers
        )

    def is_exposed(self, past_state: PastState) -> bool:
        """Return whether ``past_state`` is read outside its own cell, or overwritten before the cell is called.

        Other readers are the model's output, by a path around all followed cells, and other cells, neuron by neuron.
        """
        return (
            past_state in self.probe.overwritten
            or any(past_state in self.sources_behind(reads)[1] for reads in self.probe.output_reads)
            or any(past_state in self.reads[out].direct for out in self.followed_outputs if out.cell != past_state.cell)
        )

    def known_sources(self, out: CellOutput) -> frozenset[Source]:
        """Return all parts that ``out`` was computed from, by any path."""
        return frozenset(self.reads[out].sources | self.sources_behind(self.reads[out])[1])
