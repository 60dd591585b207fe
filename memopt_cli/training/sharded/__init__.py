"""A model spread over many ranks: of a real group, or of one in which this process is the only rank that there is."""

from memopt_cli.training.sharded.agreement import Ranks, parameters_of, ranks_of, reporting_lost_ranks
from memopt_cli.training.sharded.group import fake_group, real_group
from memopt_cli.training.sharded.reduced import buckets_seen
from memopt_cli.training.sharded.spread import Spread, data_ranks, spread, spread_really

__all__ = [
    "Ranks",
    "Spread",
    "buckets_seen",
    "data_ranks",
    "fake_group",
    "parameters_of",
    "ranks_of",
    "real_group",
    "reporting_lost_ranks",
    "spread",
    "spread_really",
]
