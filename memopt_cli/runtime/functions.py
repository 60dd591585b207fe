"""Functions as segments: the tensors that a call saves for backward are recomputed instead of being kept."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from memopt_cli.runtime.compressor import declared_compressor
from memopt_cli.runtime.container import install_segment
from memopt_cli.runtime.norms import batch_norms
from memopt_cli.runtime.segment_config import SegmentConfig


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    compressor: Any = None,
    chunks: int = 1,
    chunked_args: Sequence[int] = (0,),
    time_dim: int = 0,
    **kwargs: Any,
) -> Any:
    """Return ``function(*args, **kwargs)``, and recompute it in backward instead of keeping its saved tensors.

    The state of modules that the function uses advances only once, as in a segment: batch statistics, hidden states.
    Such modules are the function itself, the object of a method, and modules in variables that the function refers to.

    Parameters
    ----------
    function:
        The function to run; ``args`` and ``kwargs`` are its arguments.
    compressor:
        The compressor that stores tensors among the arguments until backward, or the name of its class; ``None``
        stores them raw.
    chunks:
        Number of pieces into which the arguments at ``chunked_args`` are cut along ``time_dim``; the function runs on
        one after the other.  It must then return a tensor, or a tuple of tensors, which are concatenated along
        ``time_dim``.
    chunked_args:
        Positions of the arguments that are cut.
    time_dim:
        The dimension along which they are cut.

    Returns
    -------
    Any
        The function's own output.

    Raises
    ------
    ValueError
        If the arguments cannot be cut into chunks.
    TypeError
        If ``function`` is not callable, or its output cannot be joined.
    """
    segment = _segment(function, compressor, chunks=chunks, chunked_args=chunked_args, axis=time_dim)
    return segment(*segment.chunked_first(args), **kwargs)


def to_gc_function(x_compressor: Any = None, f_forward: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that runs ``f_forward`` like :func:`checkpoint`.

    Parameters
    ----------
    x_compressor:
        The compressor of the stored arguments, as ``compressor`` in :func:`checkpoint`.  If it is a function, that is
        taken for ``f_forward``, so that ``@to_gc_function`` works as a decorator.
    f_forward:
        The function to recompute in backward; ``None`` returns a decorator.

    Returns
    -------
    Callable
        The function, or the decorator that makes it.

    Raises
    ------
    TypeError
        If ``f_forward`` is not callable.
    """
    if isinstance(x_compressor, FunctionType | MethodType):
        return to_gc_function(None, x_compressor)
    if f_forward is None:
        return functools.partial(to_gc_function, x_compressor)
    segment = _segment(f_forward, x_compressor)

    @functools.wraps(f_forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return segment(*args, **kwargs)

    return call


class FunctionModule(nn.Module):
    """A function as a module, with the modules that it uses as children."""

    may_use_parameters_of_others = True

    def __init__(self, function: Callable[..., Any], chunked_args: Sequence[int], axis: int) -> None:
        super().__init__()
        for number, module in enumerate(dict.fromkeys(_find_modules(function))):
            self.add_module(str(number), module)
        vars(self)["function"] = function
        self.chunked_args = tuple(chunked_args)
        self.axis = axis

    def chunked_first(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments in the order in which :meth:`forward` takes them: first the ones that are cut.

        Raises :class:`ValueError` if these are not tensors of one length.
        """
        if not all(0 <= index < len(args) for index in self.chunked_args):
            raise ValueError(f"chunked_args={self.chunked_args}, but there are {len(args)} positional arguments")
        chunked = [args[index] for index in self.chunked_args]
        lengths = {t.shape[self.axis] if _has_dimension(t, self.axis) else None for t in chunked}
        if len(lengths) > 1 or None in lengths:
            shapes = ", ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in chunked)
            raise ValueError(
                f"chunked_args={self.chunked_args} must be tensors of one length along time_dim={self.axis}, "
                f"but are {shapes}"
            )
        return tuple(args[index] for index in self._order(len(args)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function; ``args`` are its arguments in the order of :meth:`chunked_first`."""
        position_values = dict(zip(self._order(len(args)), args, strict=True))
        output = vars(self)["function"](*(position_values[index] for index in range(len(args))), **kwargs)
        parts = output if isinstance(output, tuple) else (output,)
        if self.chunked_args and not all(_has_dimension(part, self.axis) for part in parts):
            kinds = ", ".join(f"{p.dim()}-D tensor" if isinstance(p, Tensor) else type(p).__name__ for p in parts)
            raise TypeError(
                "in chunks a function must return a tensor, or a tuple of tensors, with the dimension "
                f"time_dim={self.axis}, but it returned: {kinds}"
            )
        return output

    def _order(self, count: int) -> list[int]:
        return [*self.chunked_args, *(index for index in range(count) if index not in self.chunked_args)]


def _has_dimension(value: Any, axis: int) -> bool:
    return isinstance(value, Tensor) and -value.dim() <= axis < value.dim()


def _segment(
    function: Callable[..., Any],
    compressor: Any,
    *,
    chunks: int = 1,
    chunked_args: Sequence[int] = (),
    axis: int = 0,
) -> FunctionModule:
    if not callable(function):
        raise TypeError(f"{function!r} is not a function")
    if len(set(chunked_args)) < len(chunked_args) or (chunks != 1 and not chunked_args):
        raise ValueError(f"chunked_args={tuple(chunked_args)} must name at least one argument, and none twice")
    module = FunctionModule(function, chunked_args if chunks != 1 else (), axis)
    if compressor is not None:
        module.x_compressor = compressor
    config = SegmentConfig(
        compressor=declared_compressor(module) or "null",
        chunks=chunks,
        axis=axis,
        seq_inputs=max(1, len(module.chunked_args)),
        seq_outputs=sys.maxsize,
        batch_statistics=chunks != 1 and bool(batch_norms(module)),
        path=getattr(function, "__qualname__", type(function).__name__),
    )
    install_segment(module, config)
    return module


def _referents(value: Any) -> list[Any]:
    """Return the values to which a method, partial, function or collection refers: object, arguments, items."""
    if isinstance(value, tuple | frozenset):
        return [*value]
    if isinstance(value, MethodType | BuiltinMethodType):
        return [value.__self__, getattr(value, "__func__", None)]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return []


def _find_modules(function: Any) -> Iterator[nn.Module]:
    """Yield the modules to which ``function`` refers, and which a call of it may run."""
    pending, seen = [function], set[int]()
    while pending:
        value = pending.pop(0)
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
            continue
        pending += _referents(value)
        attributes = getattr(value, "__dict__", {})
        pending += [attribute for attribute in attributes.values() if isinstance(attribute, nn.Module)]
        if isinstance(value, FunctionType):
            variables = (value.__globals__.get(name) for name in value.__code__.co_names)
            pending += [variable for variable in variables if isinstance(variable, nn.Module | FunctionType)]
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell has no contents
                    pending.append(cell.cell_contents)
