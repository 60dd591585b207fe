"""Segments under ``torch.compile``: which of them a compiler may trace, and how the others run.

A compiler that derives backward ahead of time takes a checkpoint apart; any other runs the inner part twice, with other
random numbers and on the same buffers.  Where ``WRITES_TWICE``, PyTorch's own do that to the buffers as well.  And that
a module must not run in chunks, because of state that moves once a call or rows that depend on one another, is found
by running it, not by tracing it.  A segment that may not be traced runs as without a compiler, between two graphs.
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
    asked_while_compiling,
    differentiates_ahead,
    not_compiled,
    wants_one_graph,
)
from memopt_cli.runtime.running import taking_turns

Run = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def run_compiled(
    run: Run, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the segment ``module`` where a compiler traces it; elsewhere its forward is ``run``."""
    if _is_exported():
        return forward(*args, **kwargs)
    config = config_of(module)
    if differentiates_ahead() and not WRITES_TWICE and config.chunks < 2:
        return run(module, forward, args, kwargs)
    return run_plainly_or(functools.partial(uncompiled, run), config.path, module, forward, args, kwargs)


def run_plainly_or(
    run: Run, path: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``run`` between two graphs where a compiler traces ``module``; ``forward`` where there may be one graph."""
    if _is_exported():
        return forward(*args, **kwargs)
    if wants_one_graph():
        _tell_that_it_runs_plainly(name_at(module, path))
        return forward(*args, **kwargs)
    return run(module, forward, args, kwargs)


def _is_exported() -> bool:
    """Tell whether Python itself runs the forward that is traced, as for ``torch.export`` unless that is strict."""
    return not torch.compiler.is_dynamo_compiling()


@not_compiled
def uncompiled(
    run: Run, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``run`` without a compiler, which would trace the functions inside ``run`` if it gave up on the whole."""
    with taking_turns(module):
        return run(module, forward, args, kwargs)


@asked_while_compiling
def _tell_that_it_runs_plainly(name: str) -> None:
    warnings.warn(
        f"{name} runs without recomputation: it cannot be part of the one graph that fullgraph=True asks for",
        stacklevel=1,
    )
