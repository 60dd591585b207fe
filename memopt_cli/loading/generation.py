"""What a language model does for generating text, and a training step pays for."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from torch import nn


def cache_notes(model: nn.Module) -> tuple[str, ...]:
    """One note if the model fills a cache of keys and values in training: what a segment computes, that holds on to."""
    if not any(map(_fills_cache, model.modules())):
        return ()
    return (
        "use_cache is on, as it is by default: the cache (argument past_key_values) holds the keys and values of every "
        "layer through the whole step, so that no plan can free them, and stands in the way of chunks. Train with "
        "use_cache=False (model.config.use_cache = False, or that argument of forward).",
    )


def _fills_cache(module: nn.Module) -> bool:
    """Whether its forward makes a cache where none is given, as those of Hugging Face's decoders do, whatever their
    output is for, and its configuration says so.

    The configuration is read as it lies there: no property of the file's is asked.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if not isinstance(code, CodeType) or not _makes_cache(code) or not _configured(module, "use_cache"):
        return False
    # What encodes in one configuration and decodes in another makes one in the second alone.
    is_either = "is_decoder" in code.co_names
    return not is_either or vars(module).get("is_decoder") is True or _configured(module, "is_decoder")


def _makes_cache(code: CodeType) -> bool:
    makes = any(name == "use_cache" or name.endswith("Cache") for name in code.co_names)
    return makes and {"use_cache", "past_key_values"} <= set(code.co_varnames)


def _configured(module: nn.Module, name: str) -> bool:
    config: Any = getattr(vars(module).get("config"), "__dict__", {})
    return config.get(name) is True
