"""The optimized model against the original: the recorded step, and in short what follows it in training."""

from memopt_cli.verify.further_steps import first_samples
from memopt_cli.verify.recorded_step import verify

__all__ = ["first_samples", "verify"]
