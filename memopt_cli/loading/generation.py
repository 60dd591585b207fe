"""What a language model does for generating text, and a training step pays for."""

from __future__ import annotations

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
    """Whether it is of a class of Hugging Face's that generates text, and its configuration says so.

    The configuration is read as it lies there: no property of the file's is asked.
    """
    if all(kind.__name__ != "GenerationMixin" for kind in type(module).__mro__):
        return False
    return getattr(vars(module).get("config"), "__dict__", {}).get("use_cache") is True
