"""memopt: train the same model in a fraction of the memory.

The public names are loaded when they are first used, so that ``import memopt_cli.runtime`` (what an optimized model
needs) and ``memopt --help`` stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _PUBLIC, for editors and type checkers
    # isort: off
    from memopt_cli.api import (
        MEMOPT_CHECKPOINT_BUDGETS as MEMOPT_CHECKPOINT_BUDGETS,
        MEMOPT_PREFERENCES as MEMOPT_PREFERENCES,
        MEMOPT_PROFILES as MEMOPT_PROFILES,
        apply_gc as apply_gc,
        get_module_and_parent as get_module_and_parent,
        memory_optimization as memory_optimization,
        resolve_device as resolve_device,
    )
    from memopt_cli.apply import plan_of as plan_of, remove_plan as remove_plan
    from memopt_cli.batch_size.config import read_batch_shaping as read_batch_shaping
    from memopt_cli.batch_size.length_strategies import compare_length_strategies as compare_length_strategies
    from memopt_cli.batch_size.samplers import (
        LengthBucketSampler as LengthBucketSampler,
        TokenBudgetSampler as TokenBudgetSampler,
    )
    from memopt_cli.batching.conventions import (
        StatefulAdapter as StatefulAdapter,
        flatten_sequences as flatten_sequences,
        unflatten_sequences as unflatten_sequences,
    )
    from memopt_cli.batching.manager import BatchShapeManager as BatchShapeManager
    from memopt_cli.batching.monitor import PerformanceMonitor as PerformanceMonitor
    from memopt_cli.batching.sequences import (
        collate_nested as collate_nested,
        collate_packed as collate_packed,
        collate_padded as collate_padded,
    )
    from memopt_cli.batching.shape_optimizer import BatchShapeOptimizer as BatchShapeOptimizer
    from memopt_cli.batching.shaper import MemoryAwareShaper as MemoryAwareShaper
    from memopt_cli.batching.sizer import AdaptiveBatchSizer as AdaptiveBatchSizer
    from memopt_cli.batching.validator import BatchShapeValidator as BatchShapeValidator
    from memopt_cli.contents import read_plan as read_plan
    from memopt_cli.export import export_plan as export_plan
    from memopt_cli.live import (
        baseline as baseline,
        check as check,
        frontier as frontier,
        optimize as optimize,
        profile as profile,
        recommend_batch as recommend_batch,
    )
    from memopt_cli.loading import load as load
    from memopt_cli.model_batching import (
        AbstractBatchModule as AbstractBatchModule,
        BatchModule as BatchModule,
        batch_accuracy as batch_accuracy,
        batch_loss as batch_loss,
        batch_topk as batch_topk,
        clip_grad_norm_per_model as clip_grad_norm_per_model,
        inner_batch_size as inner_batch_size,
        merge_batch as merge_batch,
        register_batch_module as register_batch_module,
        split_batch as split_batch,
        test_batched_model as test_batched_model,
        test_model_batching as test_model_batching,
    )
    from memopt_cli.online import (
        Batching as Batching,
        CompiledStep as CompiledStep,
        D_RTRL as D_RTRL,
        DeltaProj as DeltaProj,
        ES_D_RTRL as ES_D_RTRL,
        ElementWise as ElementWise,
        ExplicitState as ExplicitState,
        HybridTrace as HybridTrace,
        LIF as LIF,
        LeakyRateReadout as LeakyRateReadout,
        Neuron as Neuron,
        OverTime as OverTime,
        Vmap as Vmap,
        accumulate_online as accumulate_online,
        accumulate_through_time as accumulate_through_time,
        declare_state as declare_state,
        environ as environ,
        init_all_states as init_all_states,
        traced as traced,
        untraced as untraced,
        vmap_new_states as vmap_new_states,
    )
    from memopt_cli.oom import explain_oom as explain_oom
    from memopt_cli.optimized_step import optimize_step as optimize_step
    from memopt_cli.predicted import (
        plan_rank as plan_rank,
        predict_rank as predict_rank,
        recommend_ranks as recommend_ranks,
    )
    from memopt_cli.proven import apply_plan as apply_plan
    from memopt_cli.records import (
        DeviceProfile as DeviceProfile,
        InputDimension as InputDimension,
        MemOptSummary as MemOptSummary,
        Plan as Plan,
        PlanRange as PlanRange,
        RankPrediction as RankPrediction,
        SegmentPlan as SegmentPlan,
        Trust as Trust,
    )
    from memopt_cli.runtime import (
        GCContainer as GCContainer,
        TCGCContainer as TCGCContainer,
        checkpoint as checkpoint,
        is_recomputing as is_recomputing,
        to_gc_function as to_gc_function,
    )
    from memopt_cli.user_step import Step as Step
    from memopt_cli.verified import verify as verify
    # isort: on

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
    "Neuron": "memopt_cli.online",
    "DeltaProj": "memopt_cli.online",
    "Batching": "memopt_cli.online",
    "ElementWise": "memopt_cli.online",
    "ExplicitState": "memopt_cli.online",
    "HybridTrace": "memopt_cli.online",
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


if not TYPE_CHECKING:  # a type checker would take any name for Any

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module 'memopt_cli' has no attribute {name!r}")
