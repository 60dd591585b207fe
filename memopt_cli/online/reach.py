"""What reaches what in a step that was taken apart."""

from __future__ import annotations

from memopt_cli.online.graph import Reads
from memopt_cli.online.probe import Probe
from memopt_cli.online.structure import Edges, Source
from memopt_cli.online.traces import Group, Held, Left, Use


class Reach:
    """Follows the weights from part to part of the step, and on through the time steps."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.reads = probe, probe.reads
        self.lefts = [part for part in self.reads if isinstance(part, Left)]
        self.uses = [part for part in self.reads if isinstance(part, Use)]
        self.behind: dict[Left, set[Source]] = {}
        """Tensor that leaves a cell -> the uses and states behind it, past all other cells."""
        for left in self.lefts:
            behind = (self.behind[s] if isinstance(s, Left) else {s} for s in self.reads[left].direct)
            self.behind[left] = set[Source]().union(*behind)
        self.new = {
            Held(left.cell, names[left.number].name): left
            for left in self.lefts
            if left.number < len(names := probe.states[left.cell])
            and Held(left.cell, names[left.number].name) not in probe.forgotten
        }
        """State -> what the cell's last call in the step made of it."""
        self.reached = {use: held for use in self.uses if (held := self._states_reached(use))}
        self.held: set[Held] = set().union(*self.reached.values())
        needed = self._needed()
        self.cells = {left.cell for left in needed if self.carries(left)}
        self.followed = {left for left in needed if left.cell in self.cells}
        self.traced = {use.path for use in self.reached}
        untraced = {use for use in self.uses if use.path not in self.traced}
        self.left_alone: set[Source] = set[Source](untraced).union(self.lefts) - self.followed
        """What is not followed: it is part of what reads it."""

    def _states_reached(self, use: Use) -> set[Held]:
        """In the step of the use, and from there in later ones."""
        reached = {held for held, left in self.new.items() if use in self.behind[left]}
        while more := {h for h, left in self.new.items() if h not in reached and self.behind[left] & reached}:
            reached |= more
        return reached

    def carries(self, source: Source) -> bool:
        """Whether it depends on traced weights neuron by neuron."""
        if isinstance(source, Left):
            return any(map(self.carries, self.behind[source]))
        return source in self.held or source in self.reached

    def _needed(self) -> set[Left]:
        """What leaves a cell and has to be followed: states, what they are made of, and what comes with traced ones."""
        needed: set[Left] = set()
        with_states = {held.cell for held in self.held}
        for left in reversed(self.lefts):
            if left.number < len(self.probe.states[left.cell]) or left.cell in with_states or left in needed:
                needed |= {left, *(s for s in self.reads[left].direct if isinstance(s, Left))}
        return needed

    def edges(self, left: Left) -> Edges:
        """What a tensor that is followed depends on neuron by neuron."""
        direct = [s for s in self.probe.leaves if s in self.reads[left].direct and self.carries(s)]
        return Edges(
            held=tuple(s for s in direct if isinstance(s, Held)),
            uses=tuple(s for s in direct if isinstance(s, Use)),
            left=tuple(s for s in direct if isinstance(s, Left)),
        )

    def groups(self, reached: set[Held]) -> tuple[Group, ...]:
        """Those states by cell."""
        by_cell: dict[str, list[Held]] = {}
        for held in self.new:
            if held in reached:
                by_cell.setdefault(held.cell, []).append(held)
        return tuple(
            Group(cell, tuple(held.name for held in states), self.probe.shapes[self.new[states[0]]])
            for cell, states in by_cell.items()
        )

    def is_attached(self, left: Left, edges: Edges) -> bool:
        """Whether it depends on more than its edges tell."""
        reads = self.reads[left]
        others = reads.sources - {*edges.held, *edges.uses, *edges.left} | reads.weighted
        return reads.parameters or any(not isinstance(source, Held) for source in others)

    def is_constant(self, use: Use) -> bool:
        """Whether its input was computed from nothing but the last step's states and the model's inputs."""
        parameters, sources = self.behind_it(self.reads[use])
        return not parameters and all(isinstance(source, Held) for source in sources)

    def behind_it(self, reads: Reads) -> tuple[bool, set[Source]]:
        """Whether parameters without traces are, and which sources: those of what is not followed in its place."""
        pending, seen, parameters = [reads], set[Source](), False
        while pending:
            reads = pending.pop()
            parameters |= reads.parameters
            more = reads.sources - seen
            seen |= more
            for source in more & self.left_alone:
                assert not isinstance(source, Held)
                pending.append(self.reads[source])
                parameters |= isinstance(source, Use)
        return parameters, seen - self.left_alone

    def is_connected(self, use: Use) -> bool:
        """Read by the output, by weights, or by what leaves a cell and is not followed neuron by neuron."""
        parts = ((part in self.followed, reads) for part, reads in self.reads.items())
        return any(use in reads.sources for reads in self.probe.of_output) or any(
            use in (reads.weighted if followed else reads.sources) for followed, reads in parts
        )

    def is_exposed(self, held: Held) -> bool:
        """Read by the output, past all cells that are followed, or neuron by neuron by another of those; or changed
        before its cell is called.
        """
        return (
            held in self.probe.overwritten
            or any(held in self.behind_it(reads)[1] for reads in self.probe.of_output)
            or any(held in self.reads[left].direct for left in self.followed if left.cell != held.cell)
        )

    def known(self, left: Left) -> frozenset[Source]:
        """All that it was computed from, by any path."""
        return frozenset(self.reads[left].sources | self.behind_it(self.reads[left])[1])
