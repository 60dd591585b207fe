"""Hooks on the calls of a model's modules, and the message about a module that rejected its input.

When forward fails, the error names the innermost module still running, with the shape that it takes.
"""

from __future__ import annotations

import contextlib
import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from memopt_cli.errors import StepError, first_line
from memopt_cli.records.progress import Report
from memopt_cli.runtime import named_parts
from memopt_cli.runtime.private_torch import reserve_hook_numbers
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.text.units import dtype_name, format_shape

_HINTS: Final = {
    "more than 1 value per channel": "Batch normalization trains on several samples: use a batch of at least 2.",
    "positional arguments but": "Each input is an argument of forward: leave targets out, and use them in the loss, "
    "`--loss file.py:function`.",
    "Sizes of tensors must match except in dimension": "The model joins tensors of different sizes. If it "
    "halves its input n times, as a U-Net does, the sides must be multiples of 2 to the power of n, such as 8 for 3; "
    "else check the sizes of the inputs.",
}
"""Words of an error -> the hint on it."""
GIVE_ACCEPTED: Final = "Use inputs that the model accepts, one for each argument of forward."
_OF_INPUTS: Final = re.compile(
    r"shape|size|d-?type|scalar type|dimension|argument|input|out of range|channels|\b\dD\b|expected", re.IGNORECASE
)
"""Words in errors about a forward's arguments, by PyTorch, by Python and by libraries of models."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_INSTALLED: Final = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
"""Beginnings of the paths of Python's own modules and of installed packages."""


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call of a module in which an exception was raised."""

    path: str
    module: nn.Module
    inputs: Any


@contextlib.contextmanager
def module_hooks(
    model: nn.Module,
    enter: Callable[[str, nn.Module, Any], None],
    leave: Callable[[str, nn.Module, Any], None],
    *,
    always_leave: bool = False,
) -> Iterator[None]:
    """Call ``enter(path, module, (args, kwargs))`` and ``leave(path, module, output)`` around every module's forward.

    With ``always_leave``, ``leave`` is called even if forward raised.  ScriptModules run in their own interpreter
    and are not seen.
    """
    # A segment that recomputes after the block still runs the hooks that its first forward saw: is_over ends them.
    handles, is_over = [], False
    reserve_hook_numbers(model)
    for path, module in named_parts(model):
        if isinstance(module, torch.jit.ScriptModule):
            continue

        def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            if not is_over:
                enter(path, module, (args, kwargs))

        def after(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
            if not is_over:
                leave(path, module, output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after, always_call=always_leave))
    try:
        yield
    finally:
        is_over = True
        for handle in handles:
            handle.remove()


def skipped_layers(model: nn.Module) -> list[str]:
    """Return each group of layers of ``model`` where some have gradients and others have none, such as ``blocks.*``.

    A step with layer drop or stochastic depth skips layers at random, and one with experts those without tokens, so
    the peak of the step that was run is not the peak of every step.  Gradients show it without watching any call.
    """
    ran = {name: p.grad is not None for name, p in model.named_parameters() if p.requires_grad}
    with_gradients = [name for name, has_gradient in ran.items() if has_gradient]
    like_ran = {_NUMBER.sub("*", name) for name in with_gradients}
    groups: dict[str, None] = {}
    for name, has_gradient in ran.items():
        if has_gradient or _NUMBER.sub("*", name) not in like_ran:
            continue
        layers = (name[: number.end()] for number in _NUMBER.finditer(name))
        outermost = next((p for p in layers if not any(name.startswith(f"{p}.") for name in with_gradients)), "")
        if outermost:
            groups.setdefault(_NUMBER.sub("*", outermost))
    return list(groups)


def called_modules(model: nn.Module, forward: Callable[[], object]) -> frozenset[str]:
    """Return the paths of the modules of ``model`` that ``forward`` calls."""
    called: set[str] = set()
    with module_hooks(model, lambda path, _module, _inputs: called.add(path), lambda *_: None):
        forward()
    return frozenset(called)


def calls_of_all_layers(model: nn.Module, groups: Collection[str], called: Collection[str]) -> frozenset[str]:
    """Return the paths of the modules that a forward calls if it runs all layers of the ``groups`` of ``model``.

    ``called``: modules that were called in several forwards, which skip layers.  If one layer of a group calls
    ``blocks.0.conv``, each layer that has such a part calls it when it runs.
    """
    paths = {path for path, _ in model.named_modules()}
    calls: set[str] = set()
    for group in groups:
        layers = [path for path in paths if _NUMBER.sub("*", path) == group]
        parts = {path.removeprefix(layer) for layer in layers for path in called if f"{path}.".startswith(f"{layer}.")}
        calls.update(layer + part for layer in layers for part in parts)
    return frozenset(calls & paths)


@contextlib.contextmanager
def one_step_noted(model: nn.Module, report: Report) -> Iterator[None]:
    """Call ``report`` with a note if the ``with`` block, one step, calls neurons that run one time step only once each.

    The loop over time steps is then probably in the user's script, and memopt does not see it.
    """
    calls: Counter[nn.Module] = Counter()
    handles = [
        module.register_forward_pre_hook(lambda module, _: calls.update([module]))
        for module in model.modules()
        if _runs_one_time_step(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if calls and max(calls.values()) == 1:
        report(
            "The step that was run is of one time step: it calls each spiking neuron once. If your script loops over "
            "time steps, memory, time and the batch that fits are those of one turn of the loop, not of training. Pass "
            "memopt the whole loop as your own step, as docs/spiking.md shows."
        )


def _runs_one_time_step(module: nn.Module) -> bool:
    """Return whether a call of ``module`` is one time step: a neuron in SpikingJelly's step mode s, or one of snnTorch
    that keeps its membrane (``init_hidden``)."""
    attributes = vars(module)  # ``getattr`` would run a property, which may be the user's code
    in_mode_s = attributes.get("_step_mode") == "s" and "v" in attributes.get("_memories", ())
    return in_mode_s or attributes.get("init_hidden") is True


class InputsRejectedError(StepError):
    """A forward that failed on an argument, or on its shape or dtype."""


def running_calls(error: BaseException, model: nn.Module) -> list[RunningCall]:
    """Return the calls of modules of ``model`` in which ``error`` was raised, outermost first.

    They are read from its traceback, so nothing watches a forward that does not fail.
    """
    paths = {module: path for path, module in named_parts(model)}
    calls = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "_call_impl")
    values = (frame.f_locals for frame in calls)
    return [
        RunningCall(paths[local["self"]], local["self"], (local["args"], local["kwargs"]))
        for local in values
        if local.get("self") in paths
    ]


def failed_step(error: Exception, model: nn.Module) -> StepError:
    """Return the exception to raise for ``error``, which the user's code raised in a step of ``model``.

    The message names the module that rejected its input, and says which input it takes.  An error that speaks of
    no input, such as a ``raise`` in the user's code, is reported as such, with the line that raised it.
    """
    stack = running_calls(error, model)
    if not stack:
        return StepError(
            f"the step failed: {first_line(error)}{raised_at(error)}",
            hint="Use one `-i` for each argument of forward, or of run.",
        )
    last = stack[-1]
    path, kind = _own_path(last, model), type(last.module).__name__
    if not (_OF_INPUTS.search(str(error)) or _is_in_torch(type(last.module).__module__)):
        where = f"module '{path}' ({kind})" if path else kind
        return StepError(
            f"forward of {where} raised {first_line(error)}{raised_at(error)}",
            hint="The same error appears when the model is called with these inputs in plain Python.",
        )
    where = f"module '{path}' ({kind})" if path else f"the model itself ({kind})"
    reason = f"{first_line(error)}{_expected_input(last.module, last.inputs)}{raised_at(error)}"
    hint = next((hint for words, hint in _HINTS.items() if words in str(error)), GIVE_ACCEPTED)
    hint = _dtype_hint(last, stack[0].inputs) or _mapping_hint(error, stack[0].inputs) or hint
    return InputsRejectedError(f"{where} rejected its input {_shapes(last.inputs)}: {reason}", hint=hint)


def _mapping_hint(error: Exception, model_inputs: Any) -> str:
    """Return the hint on a batch of ``(inputs, targets)`` whose inputs are a dictionary; empty if there is none."""
    positional, _ = model_inputs
    if not (isinstance(error, TypeError) and len(positional) > 1 and isinstance(positional[0], Mapping)):
        return ""
    return (
        f"The inputs are {len(positional)} positional arguments, and the first is a dictionary. Pass that alone, and "
        "its entries are passed by name; leave targets out, and use them in the loss, `--loss file.py:function`."
    )


def _dtype_hint(call: RunningCall, model_inputs: Any) -> str:
    """Return the hint if the module of ``call`` has weights and an input of different floating dtypes, else "".

    ``model_inputs``: the inputs of the whole model.
    """
    weight, first = next(call.module.parameters(recurse=False), None), next(iter(tensors_of(call.inputs)), None)
    model_input = next((tensor for tensor in tensors_of(model_inputs) if tensor.is_floating_point()), None)
    if weight is None or first is None or model_input is None or weight.dtype == first.dtype:
        return ""
    if not (weight.is_floating_point() and first.is_floating_point()):
        return ""
    dtype = dtype_name(weight.dtype)
    spec = f"{'x'.join(map(str, model_input.shape))}@{dtype}"
    return f"Its weights are {dtype}: give such inputs, `-i {spec}`, or run the step in float32, `--precision fp32`."


def _own_path(call: RunningCall, model: nn.Module) -> str:
    """Return the module's own path: the path of ``call`` goes through a run of layers, if it is in one."""
    return next((path for path, module in model.named_modules() if module is call.module), call.path)


def raised_at(error: BaseException) -> str:
    """Return the innermost line of ``error`` in the user's own code: `` (net.py, line 8)``.

    If there is none, return the innermost line outside torch and memopt; empty for a SyntaxError, whose text names
    its line.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_ours(frame)]
    if not frames or isinstance(error, SyntaxError):
        return ""
    own = [(frame, line) for frame, line in frames if not frame.f_code.co_filename.startswith(_INSTALLED)]
    frame, line = (own or frames)[-1]
    return f" ({frame.f_code.co_filename}, line {line})"


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return _is_in_torch(name) or name.partition(".")[0] in ("memopt_cli", "importlib")


def _is_in_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _expected_input(module: nn.Module, inputs: Any) -> str:
    """Return words for the input that ``module``, a layer of PyTorch, takes; empty if its attributes do not show it."""
    takes = _taken_shape(module)
    first = next(iter(tensors_of(inputs)), None)
    if isinstance(module, nn.Embedding):
        return f"; it takes integers below {module.num_embeddings} (@int64=0..{module.num_embeddings})"
    if not takes or first is None:
        return ""
    missing = takes[0] == "N" and first.dim() == len(takes) - 1
    return f"; it takes ({', '.join(map(str, takes))}){': is the batch dimension missing?' if missing else ''}"


def _taken_shape(module: nn.Module) -> tuple[Any, ...]:
    """Return the shape that ``module`` takes, with letters for free sizes; empty if it is not known."""
    match module:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d() | nn.ConvTranspose1d() | nn.ConvTranspose2d():
            return ("N", module.in_channels, *"DHW"[-len(module.kernel_size) :])
        case nn.BatchNorm2d():
            return ("N", module.num_features, "H", "W")
        case nn.BatchNorm3d():
            return ("N", module.num_features, "D", "H", "W")
        case nn.Linear():
            return ("…", module.in_features)
        case nn.LayerNorm():
            return ("…", *module.normalized_shape)
        case nn.RNNBase():
            return (*("NT" if module.batch_first else "TN"), module.input_size)
        case _:
            return ()


def _shapes(value: Any) -> str:
    tensors = tensors_of(value)
    return ", ".join(f"{format_shape(t.shape)}@{dtype_name(t.dtype)}" for t in tensors) or "(no tensor)"
