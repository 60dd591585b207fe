"""The stages of each command, in order; no other package knows that order."""

from memopt_cli.pipeline.batches.fastest import recommend_fastest
from memopt_cli.pipeline.batches.rank_batches import recommend_ranks
from memopt_cli.pipeline.batches.recommendation import recommend_batch
from memopt_cli.pipeline.comparisons.regression import baseline, check, compare_files
from memopt_cli.pipeline.equivalence import verify
from memopt_cli.pipeline.memory.group import measure
from memopt_cli.pipeline.memory.inspection import inspect
from memopt_cli.pipeline.memory.profiling import profile
from memopt_cli.pipeline.out_of_memory.explanation import explain
from memopt_cli.pipeline.plans.application import apply
from memopt_cli.pipeline.plans.optimization import optimize

__all__ = [
    "apply",
    "baseline",
    "check",
    "compare_files",
    "explain",
    "inspect",
    "measure",
    "optimize",
    "profile",
    "recommend_batch",
    "recommend_fastest",
    "recommend_ranks",
    "verify",
]
