"""A note on language models whose forward fills a key-value cache: generating text needs it, but training does not."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any, Final

from torch import nn

_CACHES: Final = frozenset({"past_key_values", "past_key_value", "layer_past"})
"""Names of the argument that is the cache in the versions of transformers."""


def cache_notes(model: nn.Module) -> tuple[str, ...]:
    """Return a note if ``model`` fills a cache of keys and values in training: it keeps tensors of segments alive."""
    if not any(map(_fills_cache, model.modules())):
        return ()
    takers = sorted({type(module).__name__ for module in model.modules() if _takes_cache(module)})
    return (
        "use_cache is on, as it is by default: the cache (argument past_key_values) holds the keys and values of every "
        "layer through the whole step, so that no plan can free them, and modules with that argument "
        f"({', '.join(takers)}) do not run in chunks. Train without it: model.config.use_cache = False in the script, "
        'and "use_cache": false in config.json of a folder given to memopt.',
    )


def _takes_cache(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` is given the cache to fill, as in an attention, a block or a model."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if not isinstance(code, CodeType):
        return False
    return not _CACHES.isdisjoint(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _fills_cache(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` makes a cache if it is given none, and its configuration asks for one.

    Forwards of Hugging Face's decoders do so even where nothing is generated.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if not isinstance(code, CodeType) or not {"use_cache", "past_key_values"} <= set(code.co_varnames):
        return False
    if not any(name == "use_cache" or name.endswith("Cache") for name in code.co_names):
        return False
    # A class that can be an encoder or a decoder, such as BERT's, makes a cache only as a decoder.
    is_either = "is_decoder" in code.co_names
    decodes = not is_either or vars(module).get("is_decoder") is True or _makes_cache(module, "is_decoder")
    return decodes and _makes_cache(module, "use_cache")


def _makes_cache(module: nn.Module, name: str) -> bool:
    # Read from ``vars``: ``getattr`` would run a property, which may be the user's code.
    config: Any = getattr(vars(module).get("config"), "__dict__", {})
    return config.get(name) is True
