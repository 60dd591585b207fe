"""The runtime of an optimized model: all that it needs while it trains, apart from torch.

Saved models refer to ``memopt_cli.runtime.container.restore_segment`` and ``restore_by_length`` and to
``memopt_cli.runtime.lifted.module.restore_lifted`` by their import paths; these and the arguments they take are a
file format and stay.

A segment adds Python to each call of its module (``benchmarks/overhead.py`` measures it), so what runs in every call
tests the most common case first.
"""

from memopt_cli.runtime.compressor import (
    BitSpikeCompressor,
    BooleanSpikeCompressor,
    NullSpikeCompressor,
    SparseSpikeCompressor,
    SpikeCompressor,
    Uint8SpikeCompressor,
)
from memopt_cli.runtime.container import (
    GCContainer,
    LossContainer,
    PackingContainer,
    TCGCContainer,
    install_segment,
    remove_segment,
    settings_of,
)
from memopt_cli.runtime.functions import checkpoint, to_gc_function
from memopt_cli.runtime.lengths import ConfigsByLength, LengthOf, segment_of, takes_argument
from memopt_cli.runtime.module_state import reset_hidden_state, uninitialized
from memopt_cli.runtime.refusals import refusal
from memopt_cli.runtime.running import is_recomputing
from memopt_cli.runtime.runs import Run, add_runs, find_part, group_layers, named_parts, remove_runs
from memopt_cli.runtime.segment_config import SegmentConfig

__all__ = [
    "BitSpikeCompressor",
    "BooleanSpikeCompressor",
    "ConfigsByLength",
    "GCContainer",
    "LengthOf",
    "LossContainer",
    "NullSpikeCompressor",
    "PackingContainer",
    "Run",
    "SegmentConfig",
    "SparseSpikeCompressor",
    "SpikeCompressor",
    "TCGCContainer",
    "Uint8SpikeCompressor",
    "add_runs",
    "checkpoint",
    "find_part",
    "group_layers",
    "install_segment",
    "is_recomputing",
    "named_parts",
    "refusal",
    "remove_runs",
    "remove_segment",
    "reset_hidden_state",
    "segment_of",
    "settings_of",
    "takes_argument",
    "to_gc_function",
    "uninitialized",
]
