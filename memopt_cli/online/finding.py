"""Finding the structure of a time step: running one step, and seeing in autograd's graph which parts read which.

The step runs twice from random states, one near rest and one far from it.  A part that is seen to mix neurons in either
run is refused: eligibility traces need derivatives that are diagonal over neurons.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError
from memopt_cli.online.followable import check_exposed, check_neuron_by_neuron, check_tagged
from memopt_cli.online.graph import AutogradGraph
from memopt_cli.online.interception import cell_states
from memopt_cli.online.operations import trace_kind
from memopt_cli.online.probe import Probe
from memopt_cli.online.reach import Reach
from memopt_cli.online.states import states_of, tensors_in
from memopt_cli.online.structure import Source, Structure
from memopt_cli.online.traces import CellOutput, ModuleUse, PastState
from memopt_cli.runtime.graph import reachable_nodes
from memopt_cli.runtime.private_torch import tree_leaves
from memopt_cli.runtime.state import StartingState

_SPREADS = (1.0, 10.0)
"""Average distances of the random states from rest, one for each run of the step.

The structure is taken from the first run.  The second only adds parts that mix neurons where states are large: the
first may not show these.
"""


def find_structure(model: nn.Module, inputs: Sequence[Tensor], *, batched: bool) -> Structure:
    """Run ``model`` on one step's ``inputs``, and return the structure of the step.

    The model's states and buffers, and the random generator, are restored.
    Raises :class:`MemoptError` if a traced weight reaches a state in a way that eligibility traces cannot follow.
    """
    weights = {path: m for path, m in model.named_modules() if trace_kind(m)}
    cells = {path: m for path, m in model.named_modules() if cell_states(m)}
    start = StartingState(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), _all_trainable(model) as trainable:
            _refuse_undeclared(model, inputs)
            start.restore()
            graph = AutogradGraph(model, trainable, weights)
            probes = [Probe(weights, cells, graph, batched=batched, spread=spread) for spread in _SPREADS]
            for probe in probes:
                with probe.batch.like(inputs[0]):
                    probe.take_step(model, inputs)
                start.restore()
    finally:
        start.restore()
    # Mixing in either run counts, and :func:`check_neuron_by_neuron` then refuses it.
    for out, reads in probes[0].reads.items():
        reads.mixed = reads.mixed.union(*(probe.reads[out].mixed for probe in probes if out in probe.reads))
    return _structure(Reach(probes[0]))


def _structure(reach: Reach) -> Structure:
    """Return the structure that ``reach`` shows.  Raises :class:`MemoptError` if traces cannot follow it."""
    outs = [out for out in reach.cell_outputs if out in reach.followed_outputs]
    for out in outs:
        check_neuron_by_neuron(reach, out)
    check_tagged(reach)
    edges = {out: reach.edges(out) for out in outs}
    constant = frozenset(use for use in reach.reached if reach.is_constant(use))
    exposed = frozenset(past_state for past_state in reach.followed_states if reach.is_exposed(past_state))
    for past_state in exposed:
        check_exposed(reach, past_state, constant)
    attached = frozenset(out for out in outs if reach.is_attached(out, edges[out]))
    connected = frozenset(use for use in reach.reached if reach.is_connected(use))
    read_by_attached = {use for out in attached - reach.probe.derived.keys() for use in edges[out].uses}
    unread = _unread_parts(reach, constant, connected, read_by_attached)
    reason = "its output enters no cell (a module that declares states), or only past another traced weight"
    return Structure(
        groups={use: reach.groups(states) for use, states in reach.reached.items()},
        input_shapes={use: reach.probe.input_shapes[use] for use in reach.reached},
        cells=tuple(path for path in reach.probe.cells if path in reach.cells),
        edges=edges,
        constant_uses=constant,
        connected_uses=connected,
        doubled_uses=connected & read_by_attached,
        exposed_states=exposed,
        attached_outputs=attached,
        source_states={out: states for out, states in reach.probe.derived.items() if out in reach.followed_outputs},
        plain_parameters=tuple(
            sorted({name for h in reach.followed_states for name in reach.reads[reach.output_of_new_state[h]].plain})
        ),
        untraced_reasons={path: reason for path in reach.probe.weights if path not in reach.traced},
        call_counts=reach.probe.calls,
        known_sources={out: reach.known_sources(out) for out in outs},
        unfollowed_sources=_unfollowed_sources(reach),
        unread_parts=unread,
        entering_states=frozenset(reach.followed_states) - unread - exposed,
        sources_by_weight=_sources_by_weight(reach),
    )


def _unfollowed_sources(reach: Reach) -> dict[PastState, frozenset[Source]]:
    """Map each state that does not depend on traced weights to all parts that its cell's outputs were computed from."""
    sources_of: dict[PastState, frozenset[Source]] = {}
    for cell in reach.probe.cells.keys() - reach.cells:
        outs = [out for out in reach.cell_outputs if out.cell == cell]
        sources = frozenset[Source]().union(*map(reach.known_sources, outs))
        sources_of |= {PastState(cell, state.name): sources for state in reach.probe.states[cell]}
    return sources_of


def _unread_parts(
    reach: Reach, constant: frozenset[ModuleUse], connected: frozenset[ModuleUse], read_by_attached: set[ModuleUse]
) -> frozenset[PastState | ModuleUse]:
    """Return the states and the uses of traced weights that only the cells tied to them read."""
    inputs = [reach.reads[use] for use in reach.uses if use not in constant]
    unfollowed = [reach.reads[out] for out in reach.cell_outputs if out not in reach.followed_outputs]
    read = set[Source](reach.probe.overwritten | reach.probe.read_outside).union(
        *(reach.sources_behind(r)[1] for r in (*inputs, *unfollowed, *reach.probe.output_reads))
    )
    for out in reach.followed_outputs:
        reads = reach.reads[out]
        read |= reads.weighted | {s for s in reads.direct if isinstance(s, PastState) and s.cell != out.cell}
    uses = reach.reached.keys() - connected - read_by_attached
    return frozenset((reach.output_of_new_state.keys() | uses) - read)


def _sources_by_weight(reach: Reach) -> dict[CellOutput | PastState, frozenset[Source]]:
    """Map outputs of cells, and states not followed, to the traced parts that reach them only through weights."""
    sources_of: list[tuple[CellOutput | PastState, frozenset[Source]]] = [
        (out, reach.known_sources(out) - reach.reads[out].direct)
        for out in reach.cell_outputs
        if out in reach.followed_outputs
    ]
    sources_of += _unfollowed_sources(reach).items()  # a state that a traced part reaches without a weight is followed
    carrying = {key: frozenset(filter(reach.carries, sources)) for key, sources in sources_of}
    return {key: sources for key, sources in carrying.items() if sources}


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[set[int]]:
    """Make all parameters of ``model`` trainable in the ``with`` block, and yield the ids of those that were trainable.

    A frozen weight is not in autograd's graph, so that a product with it would look like a product with a constant.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield trainable
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _refuse_undeclared(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Take two steps, and raise an error if anything but the declared states connects their graphs.

    No trace would follow such a tensor.  A detached tensor that a module keeps connects nothing.  The states advance by
    both steps.
    """
    first_results = _results_and_states(model, inputs)
    states = states_of(model)
    undeclared = [(path, tensor) for path, tensor in tensors_in(model) if path not in states]
    paths = {tensor.grad_fn: path for path, tensor in undeclared if tensor.grad_fn is not None}
    first_nodes = set(reachable_nodes([*first_results, *(tensor for _, tensor in undeclared)]))
    for state in states.values():
        state.value = state.value.detach()
    # A variable, since in PyTorch 2.8 the nodes of a user-defined Function die with its result.
    second_results = _results_and_states(model, inputs)
    for node in reachable_nodes(second_results):
        if node in first_nodes and not hasattr(node, "variable"):
            raise MemoptError(
                f"{paths.get(node, 'a tensor that the model keeps')} is carried from one time step to the next, and is "
                "not a declared state",
                hint="Declare it with declare_state(module, name, shape), so that its past is followed; or keep a "
                "detach()ed tensor, which is a constant.",
            )


def _results_and_states(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    returned = [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
    return [*returned, *(state.value for state in states_of(model).values())]
