"""Guessing the inputs of a model of transformers or timm from its configuration.

Attributes such as ``config.vocab_size`` are read by name, without importing the library, so a model of any other
library that has the same attributes works as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

from torch import nn

from memopt_cli.records import GUESS, PADDED, InputSpec, TensorSpec

_BATCH: Final = 2  # batch norms need more than one sample
_MAX_TOKENS: Final = 1024
"""Maximum number of tokens in a guessed input: some models take 100,000, but nobody begins with as many."""
_LENGTHS: Final = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "seq_length",
    "max_target_positions",
)
"""Names under which configurations hold the maximum length of a sequence."""
_SAMPLES: Final = 16_000
"""Number of samples of sound in a guessed input: one second at 16 kHz, the rate of the models of transformers."""
_WORDS: Final = 32
"""Length of the text spoken in that second, in tokens; longer text would have no alignment with the sound."""


def guess_by_configuration(module: nn.Module) -> InputSpec | None:
    """Return the inputs of a training step of ``module``, labels included; ``None`` if its configuration has none."""
    tensors = _by_transformers(module) or _by_timm(module)
    if not tensors:
        return None
    dims = {"B": _BATCH}
    if any("S" in tensor.shape for tensor in tensors):
        dims["S"] = _length(module)
    return InputSpec(tensors=tensors, dims=dims, source=f"{GUESS}the configuration of {type(module).__name__}")


def _by_transformers(module: nn.Module) -> tuple[TensorSpec, ...]:
    config = getattr(module, "config", None)
    names = [getattr(module, "main_input_name", None)]
    has_image_tokens = any(getattr(config, name, None) is not None for name in ("image_token_id", "image_token_index"))
    if _takes(module, "input_ids") and _takes(module, "pixel_values") and not has_image_tokens:
        names = ["input_ids", "pixel_values"]  # a text with an image, as in CLIP
    tensors = [tensor for name in names if (tensor := _input(name, _part_of(config, name))) is not None]
    if len(tensors) < len(names):
        return ()
    return (*tensors, *_mask(module, names), *_labels(module, config))


def _input(name: Any, config: Any) -> TensorSpec | None:
    """Return the input ``name`` of a model with ``config``; ``None`` if the shape does not follow from it."""
    match name:
        case "input_ids" if _is_size(vocabulary := getattr(config, "vocab_size", None)):
            return TensorSpec(name=name, shape=("B", "S"), dtype="int64", values=f"0..{vocabulary}")
        case "pixel_values" if _is_size(side := getattr(config, "image_size", None)):
            channels = getattr(config, "num_channels", 3)
            return TensorSpec(name=name, shape=("B", channels, side, side)) if _is_size(channels) else None
        case "input_values" if hasattr(config, "conv_stride"):
            return TensorSpec(name=name, shape=("B", _SAMPLES))
        case "input_features" if _is_size(bins := getattr(config, "num_mel_bins", None)):
            frames = getattr(config, "max_source_positions", None)  # the encoder halves them
            return TensorSpec(name=name, shape=("B", bins, 2 * frames)) if _is_size(frames) else None
    return None


def _part_of(config: Any, name: Any) -> Any:
    """Return the configuration that describes the input ``name``: of the text, of the image, or ``config`` itself."""
    part = {"input_ids": "text_config", "pixel_values": "vision_config"}.get(name, "")
    return getattr(config, part, config)


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(module.forward).parameters


def _mask(module: nn.Module, names: Sequence[str | None]) -> tuple[TensorSpec, ...]:
    """Return the mask of padding that every collator of tokens passes; none if ``module`` takes none.

    It has zeros, so a step may take more memory: attention then makes its own mask.
    """
    if "input_ids" not in names or not _takes(module, "attention_mask"):
        return ()
    return (TensorSpec(name="attention_mask", shape=("B", "S"), dtype="int64", values=PADDED),)


def _labels(module: nn.Module, config: Any) -> tuple[TensorSpec, ...]:
    """Return the labels that make the head of ``module`` return a loss; none where they are not known."""
    kind = type(module).__name__
    classes = getattr(config, "num_labels", None)
    if kind.endswith("ForQuestionAnswering"):
        ends = ("start_positions", "end_positions")
        length = _length(module)
        return tuple(
            TensorSpec(name=e, shape=("B",), dtype="int64", values=f"0..{length}") for e in ends if _takes(module, e)
        )
    shape: tuple[str | int, ...]
    if kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        shape, classes = ("B", "S"), getattr(config, "vocab_size", None)
    elif kind.endswith("ForCTC"):
        shape, classes = ("B", _WORDS), getattr(config, "vocab_size", None)
    elif kind.endswith("ForTokenClassification"):
        shape = ("B", "S")
    elif kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        shape = ("B",)
        classes = classes if _is_size(classes) and classes > 1 else None
    else:
        return ()
    if not _is_size(classes) or not _takes(module, "labels"):
        return ()
    return (TensorSpec(name="labels", shape=shape, dtype="int64", values=f"0..{classes}"),)


def _length(module: nn.Module) -> int:
    """Return the largest power of two that ``module`` allows as a length, at most 1,024: for RoBERTa's 514, 512.

    RoBERTa counts positions from the index after the padding index, which its position embedding holds.
    """
    config = _part_of(getattr(module, "config", None), "input_ids")
    tables = (part for name, part in module.named_modules() if name.endswith("position_embeddings"))
    paddings = (getattr(table, "padding_idx", None) for table in tables)
    unused = max((1 + padding for padding in paddings if type(padding) is int), default=0)
    lengths: list[int] = [size for name in _LENGTHS if _is_size(size := getattr(config, name, None))]
    return 1 << (min([_MAX_TOKENS, *(length - unused for length in lengths)]).bit_length() - 1)


def _by_timm(module: nn.Module) -> tuple[TensorSpec, ...]:
    made_for = getattr(module, "pretrained_cfg", None)
    sizes = made_for.get("input_size") if isinstance(made_for, Mapping) else None
    if not isinstance(sizes, tuple | list) or len(sizes) != 3 or not all(map(_is_size, sizes)):
        return ()
    return (TensorSpec(shape=("B", *sizes)),)


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
