"""Training many copies of a model at once, each with its own weights: sweeps and ensembles in the time of a few models.

A ``BatchModule`` stacks the copies' parameters, and runs all copies together, by the fastest of three routes that
computes the same as a loop over the models::

    models = BatchModule(LeNet(), batch=100)            # parameters (100, …)
    outputs = models(images)                            # (100, images, …) in and out
    batch_loss(outputs, targets, 100, F.cross_entropy).sum().backward()
"""

from memopt_cli.model_batching.checks import test_batched_model, test_model_batching
from memopt_cli.model_batching.clipping import clip_grad_norm_per_model
from memopt_cli.model_batching.comparison import RouteTrial
from memopt_cli.model_batching.extension import AbstractBatchModule, register_batch_module
from memopt_cli.model_batching.layout import inner_batch_size, merge_batch, split_batch
from memopt_cli.model_batching.module import BatchModule
from memopt_cli.model_batching.objectives import batch_accuracy, batch_loss, batch_topk

__all__ = [
    "AbstractBatchModule",
    "BatchModule",
    "RouteTrial",
    "batch_accuracy",
    "batch_loss",
    "batch_topk",
    "clip_grad_norm_per_model",
    "inner_batch_size",
    "merge_batch",
    "register_batch_module",
    "split_batch",
    "test_batched_model",
    "test_model_batching",
]
