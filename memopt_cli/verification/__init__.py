"""Comparison of the optimized model with the original: in the recorded step, and in a few further ones."""

from memopt_cli.verification.consecutive import consecutive
from memopt_cli.verification.fingerprint import fingerprint, left_by, left_on, repeated
from memopt_cli.verification.further_steps import first_samples
from memopt_cli.verification.recorded_step import verify
from memopt_cli.verification.sizes import least_sizes
from memopt_cli.verification.updates import compare_updates

__all__ = [
    "compare_updates",
    "consecutive",
    "fingerprint",
    "first_samples",
    "least_sizes",
    "left_by",
    "left_on",
    "repeated",
    "verify",
]
