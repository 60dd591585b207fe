"""Online learning of recurrent models, in memory that does not grow with the number of time steps.

A cell declares its states (``declare_state``).  A model is batched by hand (``init_all_states(model, batch_size=B)``,
``mode=Batching()``), or written for one sample and run by ``Vmap``.  Weights that should learn from the past carry a
tag (``traced``).  An algorithm (``D_RTRL``, ``ES_D_RTRL``, ``HybridTrace``) wraps the model, and keeps eligibility
traces for the tagged weights: with them, ``backward`` on the loss of one time step gives the gradient by all steps so
far.
"""

from memopt_cli.online.algorithm import D_RTRL, ES_D_RTRL, HybridTrace, OnlineAlgorithm
from memopt_cli.online.lanes import Vmap, vmap_new_states
from memopt_cli.online.neurons import LIF, DeltaProj, ExplicitState, LeakyRateReadout, Neuron, spike
from memopt_cli.online.operations import ElementWise, traced, untraced
from memopt_cli.online.over_time import OverTime
from memopt_cli.online.states import Batching, declare_state, environ, init_all_states, states_of
from memopt_cli.online.training import CompiledStep, accumulate_online, accumulate_through_time

__all__ = [
    "D_RTRL",
    "ES_D_RTRL",
    "LIF",
    "Batching",
    "CompiledStep",
    "DeltaProj",
    "ElementWise",
    "ExplicitState",
    "HybridTrace",
    "LeakyRateReadout",
    "Neuron",
    "OnlineAlgorithm",
    "OverTime",
    "Vmap",
    "accumulate_online",
    "accumulate_through_time",
    "declare_state",
    "environ",
    "init_all_states",
    "spike",
    "states_of",
    "traced",
    "untraced",
    "vmap_new_states",
]
