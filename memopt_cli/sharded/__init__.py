"""A model spread over many ranks, of which this process is one and the others do not exist."""

from memopt_cli.sharded.group import fake_group
from memopt_cli.sharded.spread import Spread, data_ranks, spread

__all__ = ["Spread", "data_ranks", "fake_group", "spread"]
