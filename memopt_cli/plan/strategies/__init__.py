"""The levels, one file each."""

from memopt_cli.plan.interface import Strategy
from memopt_cli.plan.strategies.greedy_unwrap import GreedyUnwrap
from memopt_cli.plan.strategies.segments import Segments
from memopt_cli.plan.strategies.spatial_split import SpatialSplit
from memopt_cli.plan.strategies.temporal_split import TemporalSplit

STRATEGIES: tuple[Strategy, ...] = (Segments(), SpatialSplit(), TemporalSplit(), GreedyUnwrap())
"""In the order of their levels, 1 to 4."""
