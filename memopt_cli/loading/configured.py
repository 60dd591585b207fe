"""Guessing the inputs of a model of transformers or timm from its configuration.

Attributes such as ``config.vocab_size`` are read by name, without importing the library, so a model of any other
library that has the same attributes works as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

from torch import nn

from memopt_cli.records import GUESS, PADDED, InputSpec, TensorSpec

_BATCH: Final = 2  # batch norms need more than one sample
_LONGEST: Final = 1024
"""Maximum number of tokens in a guessed input: some models take 100,000, but nobody begins with as many."""
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length")
"""Names under which configurations say how long a sequence may be."""


def guess_by_configuration(module: nn.Module) -> InputSpec | None:
    """Return the inputs of a training step of ``module``, labels included; ``None`` if its configuration has none."""
    tensors = _by_transformers(module) or _by_timm(module)
    if not tensors:
        return None
    dims = {"B": _BATCH}
    if any("S" in tensor.shape for tensor in tensors):
        dims["S"] = _length(getattr(module, "config", None))
    return InputSpec(tensors=tensors, dims=dims, source=f"{GUESS}the configuration of {type(module).__name__}")


def _by_transformers(module: nn.Module) -> tuple[TensorSpec, ...]:
    config, name = getattr(module, "config", None), getattr(module, "main_input_name", None)
    if name == "input_ids" and _is_size(vocabulary := getattr(config, "vocab_size", None)):
        first = TensorSpec(name=name, shape=("B", "S"), dtype="int64", values=f"0..{vocabulary}")
    elif name == "pixel_values" and _is_size(side := getattr(config, "image_size", None)):
        channels = getattr(config, "num_channels", 3)
        if not _is_size(channels):
            return ()
        first = TensorSpec(name=name, shape=("B", channels, side, side))
    else:
        return ()
    return (first, *_mask(module, name), *_labels(module, config))


def _mask(module: nn.Module, name: str) -> tuple[TensorSpec, ...]:
    """Return the mask of padding that every collator of tokens passes; none if ``module`` takes none.

    It has zeros, with which a step may take more memory: attention makes a mask of its own then.
    """
    if name != "input_ids" or "attention_mask" not in inspect.signature(module.forward).parameters:
        return ()
    return (TensorSpec(name="attention_mask", shape=("B", "S"), dtype="int64", values=PADDED),)


def _labels(module: nn.Module, config: Any) -> tuple[TensorSpec, ...]:
    """Return the labels with which the head of ``module`` returns a loss; none where they are not known."""
    kind, labels = type(module).__name__, getattr(config, "num_labels", None)
    if "labels" not in inspect.signature(module.forward).parameters:
        return ()
    if kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        return (TensorSpec(name="labels", shape=("B", "S"), dtype="int64", values=f"0..{config.vocab_size}"),)
    if not _is_size(labels):
        return ()
    if kind.endswith("ForTokenClassification"):
        return (TensorSpec(name="labels", shape=("B", "S"), dtype="int64", values=f"0..{labels}"),)
    if kind.endswith(("ForSequenceClassification", "ForImageClassification")) and labels > 1:
        return (TensorSpec(name="labels", shape=("B",), dtype="int64", values=f"0..{labels}"),)
    return ()


def _length(config: Any) -> int:
    """Return the largest power of two that ``config`` allows as a length, at most 1,024: for RoBERTa's 514, 512."""
    lengths: list[int] = [size for name in _LENGTHS if _is_size(size := getattr(config, name, None))]
    return 1 << (min([_LONGEST, *lengths]).bit_length() - 1)


def _by_timm(module: nn.Module) -> tuple[TensorSpec, ...]:
    made_for = getattr(module, "pretrained_cfg", None)
    sizes = made_for.get("input_size") if isinstance(made_for, Mapping) else None
    if not isinstance(sizes, tuple | list) or len(sizes) != 3 or not all(map(_is_size, sizes)):
        return ()
    return (TensorSpec(shape=("B", *sizes)),)


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
