"""The stages of each command, in order; no other package knows that order."""

from memopt_cli.pipeline.batches.fastest_search import recommend_fastest as recommend_fastest
from memopt_cli.pipeline.batches.rank_batches import recommend_ranks as recommend_ranks
from memopt_cli.pipeline.batches.recommendation import recommend_batch as recommend_batch
from memopt_cli.pipeline.comparisons.regression import baseline as baseline
from memopt_cli.pipeline.comparisons.regression import check as check
from memopt_cli.pipeline.comparisons.regression import compare_files as compare_files
from memopt_cli.pipeline.equivalence import verify as verify
from memopt_cli.pipeline.memory.inspection import inspect as inspect
from memopt_cli.pipeline.memory.measured_ranks import measure as measure
from memopt_cli.pipeline.memory.profiling import profile as profile
from memopt_cli.pipeline.out_of_memory.explanation import explain as explain
from memopt_cli.pipeline.plans.application import apply as apply
from memopt_cli.pipeline.plans.optimization import optimize as optimize
