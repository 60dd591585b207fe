"""What each command does, stage by stage.  The only place that knows the order."""

from memopt_cli.pipeline.application import apply
from memopt_cli.pipeline.optimization import optimize

__all__ = ["apply", "optimize"]
