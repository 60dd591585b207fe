"""A note on language models whose forward fills a key-value cache for generating text, which training does not need."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from torch import nn


def cache_notes(model: nn.Module) -> tuple[str, ...]:
    """Return a note if ``model`` fills a cache of keys and values in training: it keeps tensors of segments alive."""
    if not any(map(_fills_cache, model.modules())):
        return ()
    return (
        "use_cache is on, as it is by default: the cache (argument past_key_values) holds the keys and values of every "
        "layer through the whole step, so that no plan can free them, and modules cannot run in chunks. Train with "
        "use_cache=False (model.config.use_cache = False, or that argument of forward).",
    )


def _fills_cache(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` makes a cache if it is given none, and its configuration asks for one.

    Forwards of Hugging Face's decoders do so, also where nothing is generated.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if not isinstance(code, CodeType) or not {"use_cache", "past_key_values"} <= set(code.co_varnames):
        return False
    if not any(name == "use_cache" or name.endswith("Cache") for name in code.co_names):
        return False
    # A class that can be an encoder or a decoder, such as BERT's, makes a cache only as a decoder.
    is_either = "is_decoder" in code.co_names
    decodes = not is_either or vars(module).get("is_decoder") is True or _configured(module, "is_decoder")
    return decodes and _configured(module, "use_cache")


def _configured(module: nn.Module, name: str) -> bool:
    # Read from ``vars``: ``getattr`` would run a property, which may be code of the user's file.
    config: Any = getattr(vars(module).get("config"), "__dict__", {})
    return config.get(name) is True
