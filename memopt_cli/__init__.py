"""memopt: train the same model in a fraction of the memory.

The public names are loaded when they are first used, so that ``import memopt_cli.runtime`` (what an optimized model
needs) and ``memopt --help`` stay light.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "apply_gc": "memopt_cli.api",
    "get_module_and_parent": "memopt_cli.api",
    "memory_optimization": "memopt_cli.api",
    "optimize_step": "memopt_cli.optimized_step",
    "resolve_device": "memopt_cli.api",
    "MEMOPT_CHECKPOINT_BUDGETS": "memopt_cli.api",
    "MEMOPT_PREFERENCES": "memopt_cli.api",
    "MEMOPT_PROFILES": "memopt_cli.api",
    "Step": "memopt_cli.user_step",
    "baseline": "memopt_cli.live",
    "check": "memopt_cli.live",
    "frontier": "memopt_cli.live",
    "optimize": "memopt_cli.live",
    "profile": "memopt_cli.live",
    "plan_rank": "memopt_cli.predicted",
    "predict_rank": "memopt_cli.predicted",
    "recommend_ranks": "memopt_cli.predicted",
    "verify": "memopt_cli.verified",
    "explain_oom": "memopt_cli.oom",
    "recommend_batch": "memopt_cli.live",
    "apply_plan": "memopt_cli.proven",
    "load": "memopt_cli.loading",
    "export_plan": "memopt_cli.export",
    "read_plan": "memopt_cli.contents",
    "plan_of": "memopt_cli.apply",
    "remove_plan": "memopt_cli.apply",
    "GCContainer": "memopt_cli.runtime",
    "MemOptSummary": "memopt_cli.records",
    "DeviceProfile": "memopt_cli.records",
    "Plan": "memopt_cli.records",
    "RankPrediction": "memopt_cli.records",
    "PlanRange": "memopt_cli.records",
    "InputDimension": "memopt_cli.records",
    "SegmentPlan": "memopt_cli.records",
    "Trust": "memopt_cli.records",
    "TCGCContainer": "memopt_cli.runtime",
    "checkpoint": "memopt_cli.runtime",
    "is_recomputing": "memopt_cli.runtime",
    "to_gc_function": "memopt_cli.runtime",
    "AbstractBatchModule": "memopt_cli.model_batching",
    "BatchModule": "memopt_cli.model_batching",
    "batch_accuracy": "memopt_cli.model_batching",
    "batch_loss": "memopt_cli.model_batching",
    "batch_topk": "memopt_cli.model_batching",
    "clip_grad_norm_per_model": "memopt_cli.model_batching",
    "inner_batch_size": "memopt_cli.model_batching",
    "merge_batch": "memopt_cli.model_batching",
    "register_batch_module": "memopt_cli.model_batching",
    "split_batch": "memopt_cli.model_batching",
    "test_batched_model": "memopt_cli.model_batching",
    "test_model_batching": "memopt_cli.model_batching",
    "AdaptiveBatchSizer": "memopt_cli.batching.sizer",
    "BatchShapeManager": "memopt_cli.batching.manager",
    "BatchShapeOptimizer": "memopt_cli.batching.shape_optimizer",
    "BatchShapeValidator": "memopt_cli.batching.validator",
    "LengthBucketSampler": "memopt_cli.batch_size.samplers",
    "MemoryAwareShaper": "memopt_cli.batching.shaper",
    "PerformanceMonitor": "memopt_cli.batching.monitor",
    "StatefulAdapter": "memopt_cli.batching.conventions",
    "TokenBudgetSampler": "memopt_cli.batch_size.samplers",
    "collate_nested": "memopt_cli.batching.sequences",
    "collate_packed": "memopt_cli.batching.sequences",
    "collate_padded": "memopt_cli.batching.sequences",
    "compare_length_strategies": "memopt_cli.batch_size.length_strategies",
    "flatten_sequences": "memopt_cli.batching.conventions",
    "unflatten_sequences": "memopt_cli.batching.conventions",
    "read_batch_shaping": "memopt_cli.batch_size.config",
    "D_RTRL": "memopt_cli.online",
    "ES_D_RTRL": "memopt_cli.online",
    "GRU": "memopt_cli.online",
    "LRU": "memopt_cli.online",
    "LSTM": "memopt_cli.online",
    "MGU": "memopt_cli.online",
    "MiniGRU": "memopt_cli.online",
    "MinimalRNN": "memopt_cli.online",
    "VanillaRNN": "memopt_cli.online",
    "ALIF": "memopt_cli.online",
    "Neuron": "memopt_cli.online",
    "STD": "memopt_cli.online",
    "STP": "memopt_cli.online",
    "Alpha": "memopt_cli.online",
    "DeltaProj": "memopt_cli.online",
    "Expon": "memopt_cli.online",
    "Batching": "memopt_cli.online",
    "ElementWise": "memopt_cli.online",
    "ExplicitState": "memopt_cli.online",
    "GatedUnit": "memopt_cli.online",
    "HybridTrace": "memopt_cli.online",
    "IF": "memopt_cli.online",
    "LIF": "memopt_cli.online",
    "OverTime": "memopt_cli.online",
    "LeakyRateReadout": "memopt_cli.online",
    "Vmap": "memopt_cli.online",
    "accumulate_online": "memopt_cli.online",
    "accumulate_through_time": "memopt_cli.online",
    "CompiledStep": "memopt_cli.online",
    "declare_state": "memopt_cli.online",
    "environ": "memopt_cli.online",
    "init_all_states": "memopt_cli.online",
    "traced": "memopt_cli.online",
    "untraced": "memopt_cli.online",
    "vmap_new_states": "memopt_cli.online",
}

__all__ = list(_PUBLIC)

__version__ = "0.1.0"

on_unsafe = "warn"
"""What a segment does whose forward did what a recomputation cannot repeat, or whose recomputation computes something
else: ``warn``, and run plainly from then on; or ``raise``."""


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'memopt_cli' has no attribute {name!r}")
