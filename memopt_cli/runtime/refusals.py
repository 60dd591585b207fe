"""Finding the reason why a module cannot be a segment, at all or with the settings of a plan.

Every reason is a sentence about the module ("it is a ScriptModule"), which callers show as it is; it is
empty if there is no reason.
"""

from __future__ import annotations

import inspect
import reprlib
from dataclasses import fields
from typing import Final

import torch
from torch import nn
from torch.nn.utils import parametrize

from memopt_cli.runtime.batch_statistics import statistics_refusal
from memopt_cli.runtime.compressor import COMPRESSORS, OWN_COMPRESSOR, declared_compressor
from memopt_cli.runtime.lifted.module import LiftedModule, list_operators
from memopt_cli.runtime.module_state import uninitialized
from memopt_cli.runtime.norms import batch_norms
from memopt_cli.runtime.places.interface import PLACES
from memopt_cli.runtime.private_torch import InstanceNorm
from memopt_cli.runtime.runs import calls_in_turn
from memopt_cli.runtime.segment_config import Installed, SegmentConfig
from memopt_cli.runtime.selective import keep_refusal, why_misspelled

_KINDS: Final = {bool: "true or false", int: "a whole number", str: "text", tuple: "a tuple of names of operators"}


def refusal(module: nn.Module) -> str:
    """Return why ``module`` cannot be made a segment."""
    kind = type(module)
    if isinstance(module, Installed):
        return "it is a segment already"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "forward is set on the instance, not on its class, so it would bypass the segment"
    if kind.forward is nn.Module.forward:
        return f"{kind.__name__} has no forward"
    if uninitialized(module, recurse=False):
        return "its parameters are not initialized yet; run the model once"
    if overwriting := _overwriting(module):
        return (
            f"{overwriting} writes over the input, which recomputation needs: begin the segment after that layer, or "
            "set its inplace to False"
        )
    if parametrize.is_parametrized(module):
        return "it is parametrized; a module that contains it can be a segment"
    reducers = {kind.__reduce_ex__, kind.__reduce__}
    if reducers - {object.__reduce_ex__, object.__reduce__, LiftedModule.__reduce_ex__}:
        return f"{kind.__name__} has its own way of pickling"
    try:
        declared_compressor(module)
    except ValueError as reason:
        return str(reason)
    return ""


def _overwriting(module: nn.Module) -> str:
    """Return the first layer in ``module``, as text, if it is a PyTorch layer that works in place."""
    while isinstance(module, nn.Sequential) and calls_in_turn(module) and len(module):
        module = next(iter(module.children()))
    in_place = type(module).__module__.startswith("torch.nn.") and getattr(module, "inplace", False) is True
    return f"its first layer {module}" if in_place else ""


def settings_refusal(module: nn.Module, config: SegmentConfig) -> str:
    """Return the reason why ``config`` is wrong for ``module``."""
    return why_misplaced(module, config) or keep_refusal(config.keep) or _chunks_refusal(module, config)


def why_misplaced(module: nn.Module, config: SegmentConfig) -> str:
    """Return the reason why ``config`` is wrong for ``module``, whatever its mode and PyTorch's version.

    A module that is loaded gets only this check: it may have become a segment in another mode or version.
    """
    if reason := wrong_settings(config):
        return reason
    if config.compressor == OWN_COMPRESSOR and declared_compressor(module) != OWN_COMPRESSOR:
        return f"its compressor is own, but {type(module).__name__} has no x_compressor of its own class"
    if config.spatial_split and not callable(getattr(module, "__spatial_split__", None)):
        return f"spatial_split is on, but {type(module).__name__} has no method __spatial_split__"
    return _loss_refusal(module) if config.through_loss else ""


def wrong_settings(config: SegmentConfig) -> str:
    """Return the reason why ``config`` is wrong for any module."""
    if reason := _mistyped(config):
        return reason
    compressor_names = (*COMPRESSORS, OWN_COMPRESSOR)
    if config.compressor not in compressor_names:
        return f"unknown compressor {reprlib.repr(config.compressor)}; known: {', '.join(compressor_names)}"
    for name in ("chunks", "seq_inputs", "seq_outputs"):
        if getattr(config, name) < 1:
            return f"{name} must be 1 or more, not {getattr(config, name)}"
    if config.spatial_split and config.chunks > 1:
        return f"it can be split in space or run in {config.chunks} chunks, not both"
    recomputed = config.spatial_split or config.chunks > 1 or config.keep or config.compressor != "null"
    if not config.recompute and recomputed:
        return "only a recomputed module can be split, run in chunks, keep outputs, or store its input in a compressor"
    if config.place not in PLACES:
        return f"unknown place {reprlib.repr(config.place)}; known: {', '.join(PLACES)}"
    if config.through_loss:
        return _wrong_through_loss(config)
    if config.recompute_states and config.chunks < 2:
        return "recompute_states needs two chunks or more"
    if config.inexact and (config.batch_statistics or config.chunks < 2):
        return "inexact is for two chunks or more whose batch statistics are not gathered"
    return why_misspelled(config.keep)


def _mistyped(config: SegmentConfig) -> str:
    """Return which setting of ``config`` has a value of a wrong type."""
    for setting in fields(config):
        value, kind = getattr(config, setting.name), type(setting.default)
        is_of_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not is_of_kind or (kind is tuple and not all(isinstance(name, str) for name in value)):
            return f"{setting.name} must be {_KINDS[kind]}, not {reprlib.repr(value)}"
    return ""


def _chunks_refusal(module: nn.Module, config: SegmentConfig) -> str:
    if reason := norm_refusal(module, config, config.chunks):
        return reason
    kinds = (nn.Embedding, nn.EmbeddingBag)
    if config.chunks > 1 and any(isinstance(m, kinds) and m.scale_grad_by_freq for m in module.modules()):
        return "an embedding in it scales gradients by how often each row is used, which no chunk knows"
    return statistics_refusal(module, config.chunks) if config.batch_statistics else ""


def norm_refusal(module: nn.Module, config: SegmentConfig, chunks: int) -> str:
    """Return why the norms in ``module``, in their current mode, forbid chunks."""
    return _tracking_norm(module, config, chunks) or _mixing_norms(module, config, chunks)


def _tracking_norm(module: nn.Module, config: SegmentConfig, chunks: int) -> str:
    """Return why instance norms in ``module``, whose running statistics average over the batch, forbid chunks."""
    if chunks < 2 or config.inexact:
        return ""
    named = ((name, m) for name, m in module.named_modules() if isinstance(m, InstanceNorm) and m.training)
    name = next((name or "norm" for name, m in named if m.running_mean is not None), None)
    return "" if name is None else f"its {name}, an instance norm, would keep the statistics of each of {chunks} chunks"


def _mixing_norms(module: nn.Module, config: SegmentConfig, chunks: int) -> str:
    """Return why the batch norms in ``module``, in their current mode, forbid chunks."""
    if chunks < 2 or config.batch_statistics or config.inexact:
        return ""
    # A norm without running statistics (track_running_stats=False) uses the batch's statistics in eval mode as well.
    mixing = next((n for n in batch_norms(module) if n.training or getattr(n, "running_mean", n) is None), None)
    if mixing is None:
        return ""
    name = next(name for name, inner in module.named_modules() if inner is mixing)
    return (
        f"its {name or 'norm'}, a batch norm, would normalize each of {chunks} chunks by statistics "
        "of its own: set batch_statistics to true, or inexact to true if that is wanted"
    )


def _loss_refusal(module: nn.Module) -> str:
    is_lifted = list_operators(module) == ["aten::linear"] and not any(module.children())
    if inspect.unwrap(type(module).forward) is not nn.Linear.forward and not is_lifted:
        return f"only a linear layer runs in chunks through its loss, and it is a {type(module).__name__}"
    return ""


def _wrong_through_loss(config: SegmentConfig) -> str:
    if config.chunks < 2:
        return "through_loss needs two chunks or more"
    if config != SegmentConfig(chunks=config.chunks, through_loss=True):
        return "a linear layer that runs in chunks through its loss takes only the number of chunks"
    return ""
