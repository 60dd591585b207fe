"""Modules that only run another one, such as ``nn.DataParallel`` and the result of ``torch.compile``.

A plan is installed on the wrapped model and names its modules; the wrapper then trains it under the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from memopt_cli.runtime.private_torch import is_compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A class of modules that run another module and change nothing in its results."""

    attribute: str
    """Attribute that holds the wrapped model."""
    call: str
    """Code that wraps a model; ``{}`` is the place of the model."""
    stands_alone: bool
    """Whether the wrapper can be read from a file; others belong to the process that made them."""


_COMPILED: Final = Wrapper(attribute="_orig_mod", call="torch.compile({})", stands_alone=False)
WRAPPERS: Final = {
    "torch._dynamo.eval_frame.OptimizedModule": _COMPILED,
    "torch.nn.parallel.distributed.DistributedDataParallel": Wrapper(
        attribute="module", call="DistributedDataParallel({})", stands_alone=False
    ),
    "torch.nn.parallel.data_parallel.DataParallel": Wrapper(
        attribute="module", call="nn.DataParallel({})", stands_alone=True
    ),
    "torch.optim.swa_utils.AveragedModel": Wrapper(attribute="module", call="AveragedModel({})", stands_alone=True),
}
"""Qualified name of a class -> the wrapper.  FSDP2 is not among them: it changes the model itself."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of ``model``; ``model`` itself if it is not a wrapper."""
    return split_wrappers(model)[1]


def split_wrappers(model: nn.Module, *, keep_compiled: bool = False) -> tuple[tuple[Wrapper, ...], nn.Module]:
    """Return the wrappers of ``model``, the outermost first, and the model inside of them.

    With ``keep_compiled``, the result of ``torch.compile`` does not count as a wrapper.
    """
    wrappers: list[Wrapper] = []
    while (wrapper := _find_wrapper(model)) is not None and not (keep_compiled and wrapper is _COMPILED):
        wrappers.append(wrapper)
        model = getattr(model, wrapper.attribute)
    return tuple(wrappers), model


def _find_wrapper(model: Any) -> Wrapper | None:
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__)
    return next((WRAPPERS[name] for name in names if name in WRAPPERS), None)


def wrapping_code(wrappers: Sequence[Wrapper]) -> str:
    """Return code that puts ``wrappers`` around ``model``: ``torch.compile(nn.DataParallel(model))``."""
    code = "model"
    for wrapper in reversed(wrappers):
        code = wrapper.call.format(code)
    return code


def wrapper_notes(wrappers: Sequence[Wrapper]) -> tuple[str, ...]:
    """Return a note on the ``wrappers`` around a model that was read or returned by a callable, if there are any."""
    if not wrappers:
        return ()
    return (
        f"The model is wrapped, {wrapping_code(wrappers)}. memopt measures and writes it without the wrapper, whose "
        "own memory is not counted. Wrap it again to train; memopt_cli.apply_plan also takes the wrapped model.",
    )


def compiled_notes(model: nn.Module) -> tuple[str, ...]:
    """Return a note if parts of ``model`` are compiled, since they are measured without compilation."""
    if not any(map(is_compiled, model.modules())):
        return ()
    return ("Parts of the model are compiled (torch.compile): the step is measured without compilation.",)


@contextlib.contextmanager
def suspend_compilation(model: nn.Module) -> Iterator[None]:
    """Run compiled parts of ``model`` eagerly in the ``with`` block: the compiler cannot run a step without data."""
    if not any(map(is_compiled, model.modules())):  # setting a stance imports the compiler, which is slow
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
