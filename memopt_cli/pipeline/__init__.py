"""What each command does, stage by stage.  The only place that knows the order."""

from memopt_cli.pipeline.application import apply
from memopt_cli.pipeline.equivalence import verify
from memopt_cli.pipeline.explanation import explain
from memopt_cli.pipeline.fastest import recommend_fastest
from memopt_cli.pipeline.group import measure
from memopt_cli.pipeline.inspection import inspect
from memopt_cli.pipeline.optimization import optimize
from memopt_cli.pipeline.profiling import profile
from memopt_cli.pipeline.rank_batches import recommend_ranks
from memopt_cli.pipeline.recommendation import recommend_batch
from memopt_cli.pipeline.regression import baseline, check, compare_files

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
