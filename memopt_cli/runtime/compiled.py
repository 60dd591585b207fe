"""Deciding which segments ``torch.compile`` may trace, and running the others without a compiler, between two graphs.

Three things forbid tracing.  A backend that does not derive backward ahead of time runs the inside of a checkpoint
twice, with other random numbers and on the same buffers.  In versions of PyTorch that are ``WRITES_TWICE``, its own
backends also write buffers twice.  And whether a module may run in chunks (no state that changes once a call, no rows
that depend on one another) shows only when it runs, not when it is traced.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt_cli.runtime.lengths import config_of
from memopt_cli.runtime.module_state import name_at
from memopt_cli.runtime.private_torch import (
    WRITES_TWICE,
    backend_is_aot,
    constant_while_compiling,
    not_compiled,
    wants_one_graph,
)
from memopt_cli.runtime.running import taking_turns

Run = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def run_compiled(
    run: Run, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the segment ``module`` while a compiler traces it; ``run`` is the function that runs it without one."""
    if _is_exported():
        return forward(*args, **kwargs)
    config = config_of(module)
    if backend_is_aot() and not WRITES_TWICE and config.chunks < 2:
        return run(module, forward, args, kwargs)
    return run_plainly_or(functools.partial(uncompiled, run), config.path, module, forward, args, kwargs)


def run_plainly_or(
    run: Run, path: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``run`` between two graphs while a compiler traces ``module``; if only one graph is allowed, ``forward``."""
    if _is_exported():
        return forward(*args, **kwargs)
    if wants_one_graph():
        _tell_that_it_runs_plainly(name_at(module, path))
        return forward(*args, **kwargs)
    return run(module, forward, args, kwargs)


def _is_exported() -> bool:
    """Return whether Python itself runs the traced forward, as in ``torch.export`` (with ``strict=False``)."""
    return not torch.compiler.is_dynamo_compiling()


@not_compiled
def uncompiled(
    run: Run, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``run`` uncompiled: a compiler that gives up on a function goes on with the functions called there."""
    with taking_turns(module):
        return run(module, forward, args, kwargs)


@constant_while_compiling
def _tell_that_it_runs_plainly(name: str) -> None:
    warnings.warn(
        f"{name} runs without recomputation: it cannot be part of the one graph that fullgraph=True asks for",
        stacklevel=1,
    )
