"""Checking the arguments of Python calls such as ``memopt_cli.optimize``, and turning them into what requests hold.

The rules are those of the command line (``text/options.py``), so that a value is refused in both or in neither.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memopt_cli.errors import OptionError, for_message, type_in_words
from memopt_cli.inputs.spec_text import check_inputs, parse_device, parse_tensor, require_used
from memopt_cli.measure.devices import process_device, resolve_device
from memopt_cli.measure.importable import UserFunction, locate_function
from memopt_cli.model_batching.module import refuse_batched
from memopt_cli.records import (
    Budget,
    DeviceProfile,
    DimRange,
    InputSpec,
    Precision,
    ResolvedSearch,
    SearchOverrides,
    StepSettings,
)
from memopt_cli.search.estimation.cards import device_profile
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.options import check_option, check_option_if_given
from memopt_cli.text.values import Whole
from memopt_cli.training.user_step import Step

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | str | Sequence[str]
"""The one argument of ``forward``, its positional or keyword arguments, or text as for ``-i``: ``"Bx3x64x64"``."""
Loss = str | Callable[[Any], Tensor]
"""Function of the model's output, or the name of a function, as for ``--loss``."""
Optimizer = str | Callable[[nn.Module], torch.optim.Optimizer] | None
"""Function that makes the optimizer of a model; or text as for ``--optimizer``: ``"adamw:fused"``."""
Named = str | type[nn.Module]
"""A class of modules, or text as for ``--target``."""
Lengths = str | os.PathLike[str] | Mapping[int, int] | Iterable[int]
"""A file as for ``--lengths``, how often each length occurs, or the length of each input."""
Given = tuple[Any, ...] | Mapping[str, Any] | InputSpec
"""Inputs as positional or keyword values, or a description of their shapes."""

_Function = TypeVar("_Function", bound="str | Callable[..., Any] | None")
_ONE_SIZE_HINT = "Only memopt_cli.optimize takes a range, such as (64, 2048)."
_LENGTHS_HINT = (
    "Pass the length of each input, [64, 80, 64], how often each occurs, {64: 2, 80: 1}, or the path of a file."
)
_LOSS_HINT = 'Pass a function of the model\'s output, or the name of one, "file.py:function".'
_OPTIMIZER_HINT = (
    'Pass text such as "adamw:fused", or a function that makes one for a model: '
    "lambda model: torch.optim.AdamW(model.parameters())."
)


def check_model(model: nn.Module) -> nn.Module:
    """Return ``model`` if it is a model in memory.

    Raises :class:`OptionError` for any other object, and :class:`UsageError` for a BatchModule.
    """
    if isinstance(model, Step):
        raise OptionError("model is a Step", hint="memopt_cli.optimize_step takes the function that makes it.")
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"model is {for_message(model)}, not a torch.nn.Module",
            hint="Pass the model itself; for a saved one, memopt_cli.load(path).",
        )
    refuse_batched(model)
    return model


def check_functions(loss: Loss | None, optimizer: Optimizer) -> tuple[UserFunction, UserFunction]:
    """Return ``loss`` and ``optimizer`` as profiling jobs refer to them.

    Raises :class:`OptionError` for an object that cannot be called.
    """
    return locate_function(check_function("loss", loss), "loss"), locate_function(
        check_function("optimizer", optimizer), "optimizer"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArguments:
    """Settings of a step, and the user's functions that it calls: loss and optimizer."""

    settings: StepSettings
    functions: tuple[UserFunction, UserFunction]


def check_step(
    loss: Loss | None,
    optimizer: Optimizer,
    accumulate: int,
    clip_norm: float | None,
    precision: Precision,
    device: str | torch.device | None,
    seed: int,
) -> StepArguments:
    """Return the settings and functions of a step with these arguments.

    Raises :class:`OptionError` for a value of a wrong type or out of its range, :class:`UsageError` for an unknown
    device.
    """
    functions = check_functions(loss, optimizer)
    settings = StepSettings(
        device=process_device() if device is None else resolve_device(parse_device(str(device))),
        precision=check_option("precision", precision),
        loss=functions[0].reference or None,
        optimizer=functions[1].reference,
        micro_batches=check_option("accumulate", accumulate),
        clip_norm=check_option_if_given("clip_norm", clip_norm),
        seed=check_option("seed", seed),
    )
    return StepArguments(settings=settings, functions=functions)


def check_card(
    for_device: str | os.PathLike[str] | DeviceProfile | None, device: str | torch.device | None
) -> DeviceProfile | None:
    """Return the card that ``for_device`` names, which need not be in this machine; ``None`` if it is ``None``.

    Raises :class:`UsageError` for an unknown card; :class:`OptionError` if ``for_device`` has the wrong type, or
    if ``device`` names a device to run on.
    """
    if for_device is None or isinstance(for_device, DeviceProfile):
        card = for_device
    elif isinstance(for_device, str | os.PathLike):
        card = device_profile(os.fspath(for_device))
    else:
        raise OptionError(
            f"for_device is {for_message(for_device)}, not the name of a card", hint='For example: "a100-40gb".'
        )
    if card is not None and device is not None and str(device) not in ("cpu", "auto"):
        raise OptionError(f"device cannot be combined with for_device ({card.name})", hint="Remove one of them.")
    return card


def resolve_search(
    *,
    level: int | None,
    max_slowdown: float | None = None,
    target: Named | Sequence[Named] = (),
    allow_inexact: bool = False,
    offload: str = "none",
    host_memory: str | int | None = None,
    optimizer_in_backward: bool = False,
) -> ResolvedSearch:
    """Return the resolved limits of a search with these arguments.  Raises :class:`OptionError` for a wrong value."""
    return resolve(
        SearchOverrides(
            level=level,
            targets=check_names("target", target),
            allow_inexact=bool(allow_inexact),
            max_slowdown=max_slowdown,
            offload=offload,
            host_memory=check_option_if_given("host_memory", host_memory),
            optimizer_in_backward=bool(optimizer_in_backward),
        )
    )


def check_inputs_argument(inputs: Inputs, dims: Mapping[str, int] | None) -> Given:
    """Return ``inputs`` as arguments of ``forward``, or, if they are text, as a description with the sizes ``dims``.

    Raises :class:`OptionError` for values of other types, :class:`UsageError` for text that is not a description.
    """
    texts = [inputs] if isinstance(inputs, str) else inputs
    if isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
        tensors = tuple(parse_tensor(str(text)) for text in texts)
        sizes = _check_dims(dims)
        check_inputs(tensors, sizes)
        require_used(sizes, tensors, "inputs")
        return InputSpec(tensors=tensors, dims=sizes, source="inputs")
    if dims:
        raise OptionError(
            "dims are given, but the inputs are tensors, which have sizes already", hint='Describe them: "Bx3x64x64".'
        )
    if isinstance(inputs, Tensor):
        return (inputs,)
    if isinstance(inputs, tuple | Mapping):
        return inputs
    raise OptionError(
        f"inputs is {for_message(inputs)}",
        hint='Pass a tensor, a tuple or a dict of the arguments of forward, or text such as "16x3x64x64".',
    )


def _check_dims(dims: Mapping[str, int] | None) -> dict[str, int]:
    if not isinstance(dims, Mapping | None):
        raise OptionError(f"dims is {for_message(dims)}", hint='Pass the size of each symbol: {"B": 16}.')
    return {name: _check_dim(name, size) for name, size in (dims or {}).items()}


def _check_dim(name: str, given: object) -> int:
    if isinstance(given, tuple | list):
        raise OptionError(f"dims[{name!r}] is {type_in_words(given)}; it must be one size", hint=_ONE_SIZE_HINT)
    size: int = check_option(f"dims[{name!r}]", given, Whole(1))
    return size


def split_range(dims: Mapping[str, Any] | None) -> tuple[Mapping[str, int] | None, DimRange | None]:
    """Return ``dims`` with the upper end in place of a range, and that range; ``None`` if there is no range.

    ``{"B": 16, "S": (64, 2048)}`` gives ``{"B": 16, "S": 2048}`` and the range of S.
    Raises :class:`OptionError` for two ranges, and for a range that is not a smallest and a largest size.
    """
    if not isinstance(dims, Mapping):
        return dims, None
    ranges = {name: tuple(size) for name, size in dims.items() if isinstance(size, tuple | list)}
    if len(ranges) > 1:
        raise OptionError(
            f"two dimensions have a range: {' and '.join(ranges)}", hint="Use a range for one of them only."
        )
    for name, ends in ranges.items():
        if len(ends) != 2:
            raise OptionError(f"the range of {name} has {len(ends)} sizes; it must have two", hint="Write (64, 2048).")
        low, high = (check_option(f"an end of the range of {name}", end, Whole(1)) for end in ends)
        if low > high:
            raise OptionError(f"the range of {name}, ({low}, {high}), is empty", hint="Write the smaller size first.")
        return {**dims, name: high}, DimRange(symbol=name, low=low, high=high)
    return dict(dims), None


def check_lengths(given: Lengths | None) -> str | dict[int, int] | None:
    """Return ``given`` as the path of a file, or as the number of inputs of each length.

    Raises :class:`OptionError` if it is neither a path nor whole numbers.
    """
    if given is None or isinstance(given, str | os.PathLike):
        return None if given is None else os.fspath(given)
    if not isinstance(given, Iterable) or isinstance(given, bytes) or (isinstance(given, Tensor) and not given.dim()):
        raise OptionError(f"lengths is {for_message(given)}", hint=_LENGTHS_HINT)
    if isinstance(given, Mapping):
        occurs = {length: check_option(f"lengths[{length!r}]", count, Whole(0)) for length, count in given.items()}
        counts = {check_option("a length", length, Whole(1)): count for length, count in occurs.items() if count}
    else:
        lengths = given.tolist() if isinstance(given, Tensor) else given
        counts = Counter(check_option("a length", length, Whole(1)) for length in lengths)
    if not counts:
        raise OptionError("lengths has no length that occurs", hint=_LENGTHS_HINT)
    return dict(sorted(counts.items()))


def check_budget(given: str | float | None) -> Budget | None:
    """Return ``given`` as a budget; ``None`` if it is ``None``."""
    return None if given is None else Budget.from_amount(check_option("budget", given))


def check_path(name: str, given: str | os.PathLike[str]) -> Path:
    """Return ``given``, the argument ``name``, as a path.  Raises :class:`OptionError` if it cannot be one."""
    if not isinstance(given, str | os.PathLike):
        raise OptionError(f"{name} is {for_message(given)}", hint="Pass the path of a file.")
    return Path(given)


def check_names(name: str, given: object) -> tuple[str, ...]:
    """Return the name or names in ``given``, where a class gives its own name.

    Raises :class:`OptionError` for other types.
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return tuple(check_text(name, text) for text in several)


def check_text(name: str, given: object) -> str:
    """Return ``given`` if it is text, or its name if it is a class.  Raises :class:`OptionError` for anything else."""
    text = given.__name__ if isinstance(given, type) else given
    if not isinstance(text, str):
        raise OptionError(f"{name} is {for_message(given)}", hint="Pass text, or a list of it.")
    return text


def check_function(name: str, given: _Function) -> _Function:
    """Return ``given`` if it is a function, text that names one, or ``None``.

    Raises :class:`OptionError` for anything else, even a model or a class of optimizers: ``torch.optim.AdamW`` can
    be called, but not with a model.
    """
    is_class = isinstance(given, type) and issubclass(given, torch.optim.Optimizer | nn.Module)
    is_wrong = given is not None and not isinstance(given, str) and (is_class or not callable(given))
    if is_wrong or (name == "loss" and isinstance(given, str) and ":" not in given):
        hint = _OPTIMIZER_HINT if name == "optimizer" else _LOSS_HINT
        raise OptionError(f"{name} is {for_message(given)}", hint=hint)
    return given
