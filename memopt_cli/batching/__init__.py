"""Adapting batches to the memory in use while a model trains, and batching sequences: an extra library.

``BatchShapeManager`` does everything; its parts (sizer, shaper, monitor, validator) can also be used separately.
"""

from memopt_cli.batching.config import read_batch_shaping
from memopt_cli.batching.conventions import StatefulAdapter, flatten_sequences, unflatten_sequences
from memopt_cli.batching.manager import BatchShapeManager
from memopt_cli.batching.monitor import PerformanceMonitor
from memopt_cli.batching.sequences import collate_nested, collate_packed, collate_padded
from memopt_cli.batching.shape_optimizer import BatchShapeOptimizer
from memopt_cli.batching.shaper import MemoryAwareShaper
from memopt_cli.batching.sizer import AdaptiveBatchSizer
from memopt_cli.batching.validator import BatchShapeValidator
from memopt_cli.search.batch_size.length_strategies import compare_length_strategies
from memopt_cli.search.batch_size.samplers import LengthBucketSampler, TokenBudgetSampler

__all__ = [
    "AdaptiveBatchSizer",
    "BatchShapeManager",
    "BatchShapeOptimizer",
    "BatchShapeValidator",
    "LengthBucketSampler",
    "MemoryAwareShaper",
    "PerformanceMonitor",
    "StatefulAdapter",
    "TokenBudgetSampler",
    "collate_nested",
    "collate_packed",
    "collate_padded",
    "compare_length_strategies",
    "flatten_sequences",
    "read_batch_shaping",
    "unflatten_sequences",
]
