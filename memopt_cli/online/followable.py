"""Refusing models that eligibility traces cannot follow, each time with advice on what to change in the model."""

from __future__ import annotations

from collections.abc import Sequence

from memopt_cli.errors import MemoptError
from memopt_cli.online.reach import Reach
from memopt_cli.online.states import State
from memopt_cli.online.structure import Source
from memopt_cli.online.traces import CellOutput, ModuleUse, PastState


def check_neuron_by_neuron(reach: Reach, out: CellOutput) -> None:
    """Raise :class:`MemoptError` if ``out`` mixes neurons, or reads a part both through a weight and directly."""
    for source in sorted(filter(reach.carries, reach.reads[out].mixed), key=str):
        name, out_name = _name(reach, source), _name(reach, out)
        if source in reach.reads[out].weighted:
            raise MemoptError(
                f"{name} reaches {out_name} through a weight without a tag, and also on a path without a weight",
                hint="The past is not followed through a weight. Tag that weight with traced(), if it is a linear or "
                "convolutional layer, or remove the tags of the weights before it with untraced().",
            )
        shape = tuple(reach.probe.leaves[source].shape[1:])
        raise MemoptError(
            f"{name} {shape} does not reach {out_name}, {reach.probe.shapes[out]} per sample, neuron by neuron",
            hint="Let cells keep and pass on only tensors that act on each neuron by itself; or put a linear layer "
            "in between, where the past ends; or mark the weights before it with untraced(), which trains them with "
            "only the gradient of each step.",
        )


def check_tagged(reach: Reach) -> None:
    """Raise :class:`MemoptError` for a tagged weight that reaches a state without a call of its module.

    Such a use of the weight carries no trace, so its gradient would leave out the past.
    """
    tagged: dict[Source, set[str]] = {}
    for out in reach.cell_outputs:
        tagged[out] = reach.reads[out].tagged.union(*(tagged.get(s, ()) for s in reach.reads[out].direct))
    for past_state, out in reach.output_of_new_state.items():
        for path in sorted(tagged[out]):
            raise MemoptError(
                f"the weight of {path} reaches {_name(reach, past_state)} without a call of {path}, by its attribute "
                "or by a module that shares it: that past is not followed",
                hint=f"Call {path}, tag the module that shares its weight with traced(), or take the tag of {path} "
                "off with untraced(), which trains it with only the gradient of each step.",
            )


def check_exposed(reach: Reach, past_state: PastState, constant: frozenset[ModuleUse]) -> None:
    """Raise :class:`MemoptError` if ``past_state``, read outside its cell, is read with and without a weight."""
    entering = [reach.reads[use] for use in reach.uses if use.path in reach.traced and use not in constant]
    weighted = [
        reads for out in reach.followed_outputs if past_state not in (reads := reach.reads[out]).direct - reads.weighted
    ]
    if any(past_state in reach.sources_behind(reads)[1] for reads in (*entering, *weighted)):
        raise MemoptError(
            f"{_name(reach, past_state)} of the last step enters a weight, and is also read outside its cell on a path "
            "without that weight",
            hint="Call detach() on it where it enters the weight, which makes it a constant there.",
        )


def _name(reach: Reach, source: Source) -> str:
    if isinstance(source, ModuleUse):
        return source.path or "the model"
    if isinstance(source, PastState):
        return f"{source.cell}.{source.name}" if source.cell else source.name
    states: Sequence[State] = reach.probe.states[source.cell]
    if source.number < len(states):
        return _name(reach, PastState(source.cell, states[source.number].name))
    return f"a tensor that {source.cell or 'the model'} returns"
