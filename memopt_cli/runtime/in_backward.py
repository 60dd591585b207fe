"""Running the optimizer in backward: it updates each parameter once its gradient is complete, and frees the gradient.

The optimizer's own step runs for one parameter at a time: for that time, the optimizer has a single group with this
parameter and the settings of its group, so state, ``state_dict`` and schedulers work as usual.  The training loop need
not change: ``optimizer.step()`` finds no gradients, and ends the update.  (After PyTorch's tutorial "How to save memory
by fusing the optimizer step into the backward pass", which makes an optimizer for every parameter instead.)

Cases with another result are refused.  An optimizer whose joint step differs from steps one by one is refused when it
is installed.  A second gradient before ``optimizer.step()``, settings that change after backward, scaled gradients and
several processes raise an error when they occur.  Code that reads ``.grad`` after backward, as ``clip_grad_norm_``
does, finds no gradient there, and nothing notices that.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from memopt_cli.runtime.compressor import same_bits
from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.private_torch import step_without_hooks
from memopt_cli.runtime.this_thread import set_in_block, this_thread
from memopt_cli.runtime.waiting import recompute_before_update

_installed: MutableMapping[Optimizer, InBackward] = weakref.WeakKeyDictionary()
"""Optimizer that runs in backward -> its hooks."""
_WITHOUT = "take in_backward out of the plan"
_TRIAL_STEPS = 3
_PARAMETERS_OF_A_KIND = 2
"""Number of parameters in a trial of each kind (dimensions, dtype, device) in a group: two show a coupling."""
_MAX_SIZE = 4
"""Maximum size of a dimension of the parameters in a trial."""
_TRIAL_RATE = 0.01
"""Learning rate in a trial if the optimizer's own is zero, which would show nothing."""


def install_in_backward(optimizer: Optimizer, model: nn.Module) -> None:
    """Install ``optimizer`` in backward: from now on it updates each parameter that requires a gradient there.

    ``model`` has the parameters' names, for messages.  Raises :class:`ValueError` if that is not possible, with a
    predicate about the optimizer ("has a parameter twice"); then nothing has changed.
    """
    parameters = _check_parameters(optimizer)
    if not {*map(id, parameters)} & {*map(id, model.parameters())}:
        raise ValueError("updates no parameter of the model")
    used_names = {index for other in _installed.values() for index in other.names}
    if any(id(parameter) in used_names for parameter in parameters):
        raise ValueError("updates parameters that are updated in backward already")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _installed[optimizer] = InBackward(optimizer, parameters, names)


def remove_in_backward(model: nn.Module) -> None:
    """Remove optimizers of parameters of ``model`` from backward: they update in ``optimizer.step()`` again."""
    for optimizer in list(optimizers_in_backward(model)):
        _installed.pop(optimizer).remove()


def is_in_backward(optimizer: Optimizer | None) -> bool:
    """Return whether ``optimizer`` updates its parameters in backward."""
    return optimizer is not None and optimizer in _installed


def updates_in_backward() -> bool:
    """Return whether any optimizer updates parameters in backward."""
    return bool(_installed)


def has_in_backward(model: nn.Module) -> bool:
    """Return whether parameters of ``model`` are updated in backward."""
    return any(True for _ in optimizers_in_backward(model))


def is_updating() -> bool:
    """Return whether an optimizer runs inside backward, on this thread."""
    return this_thread.updates_in_backward


def optimizers_in_backward(model: nn.Module) -> Iterator[Optimizer]:
    """Return the optimizers that update parameters of ``model`` in backward."""
    parameters = {*map(id, model.parameters())}
    return (optimizer for optimizer, installed in list(_installed.items()) if parameters & installed.names.keys())


class InBackward:
    """The hooks that update the parameters of an optimizer, which is held weakly: without it they do nothing."""

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], names: Mapping[int, str]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lock = threading.Lock()  # backward runs a thread for each device
        self._groups: list[dict[str, Any]] = []
        self._group_of: dict[int, dict[str, Any]] = {}
        self._updated: set[int] = set()
        """``id`` of each parameter that was updated since the last ``step``."""
        self._used: list[tuple[dict[str, Any], Any]] = []
        """The groups with an update since the last ``step``, and their settings then."""
        self._earlier_states = 0
        """Number of parameters that had state when this update began."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.names = {id(parameter): names.get(id(parameter), "a parameter") for parameter in trained}
        self._handles: list[Any] = [optimizer.register_step_pre_hook(self._end_update)]
        for parameter in trained:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._update_parameter))

    def remove(self) -> None:
        """Remove the hooks from the optimizer and the parameters."""
        for handle in self._handles:
            handle.remove()

    def _update_parameter(self, parameter: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        recompute_before_update(parameter)
        with self._lock, set_in_block("updates_in_backward", True):
            self._check_gradient(parameter, optimizer)
            step_alone(optimizer, self._used_group(optimizer, parameter), parameter)
            parameter.grad = None

    def _check_gradient(self, parameter: Tensor, optimizer: Optimizer) -> None:
        """Raise :class:`RuntimeError` if the gradient of ``parameter`` is not the whole gradient of the step."""
        if not self._updated:
            self._earlier_states = len(optimizer.state)
            has_group = distributed.is_available() and distributed.is_initialized()
            if has_group and (processes := distributed.get_world_size()) > 1:
                raise RuntimeError(
                    f"the optimizer cannot run in backward in {processes} processes: it would use gradients before the "
                    f"gradients of the other processes are added; {_WITHOUT}"
                )
        if id(parameter) in self._updated:
            raise RuntimeError(
                f"'{self.names[id(parameter)]}' gets a second gradient before optimizer.step(), but the optimizer has "
                "run in backward with the first, so gradients cannot be accumulated; call optimizer.step() after every "
                f"backward, or {_WITHOUT}"
            )
        self._updated.add(id(parameter))

    def _used_group(self, optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
        if self._groups is not optimizer.param_groups:  # the first time, and after ``load_state_dict``
            self._groups = optimizer.param_groups
            self._group_of = {id(p): group for group in self._groups for p in group["params"]}
        group = self._group_of[id(parameter)]
        if all(used is not group for used, _ in self._used):
            self._used.append((group, _comparable_settings(group)))
        return group

    def _end_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End the update when ``optimizer.step()`` is called.  Raises :class:`RuntimeError` if an update was wrong."""
        if is_updating():
            return  # a subclass's ``step``, called by ``step_alone``, calls its base's, which runs this hook
        used, self._used = self._used, []
        updated, self._updated = self._updated, set()
        if updated:
            _order_state(optimizer, self._earlier_states)
        if updated and getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(f"the optimizer has run in backward with gradients that a GradScaler scales; {_WITHOUT}")
        if any(_comparable_settings(group) != before for group, before in used):
            raise RuntimeError(
                "settings of the optimizer, such as its learning rate, changed between backward and optimizer.step(), "
                f"and it had run in backward with the old ones; change them before forward or after step, or {_WITHOUT}"
            )
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in updated and parameter.grad is not None:
                raise RuntimeError(
                    f"'{self.names[id(parameter)]}' got a new gradient after backward, in which the optimizer had "
                    f"already used the old one; {_WITHOUT}"
                )


def _order_state(optimizer: Optimizer, earlier_states: int) -> None:
    """Sort new state by the order of the parameters, as a joint step makes it: ``state_dict`` keeps that order."""
    state = optimizer.state
    new = {id(parameter) for parameter in list(state)[earlier_states:]}
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in new):
        state[parameter] = state.pop(parameter)


def _comparable_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``group`` for comparison, with a tensor's identity and version in place of the tensor."""
    settings = ((name, value) for name, value in group.items() if name != "params")
    return {name: (id(v), version_of(v)) if isinstance(v, Tensor) else v for name, v in settings}


def step_alone(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """Call the step of ``optimizer`` only for ``parameter``, one of those in ``group``."""
    groups, together = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        step_without_hooks(optimizer)
    finally:
        optimizer.param_groups, group["params"] = groups, together


def _check_parameters(optimizer: Optimizer) -> list[Tensor]:
    if not hasattr(optimizer, "param_groups"):
        raise ValueError("is not a torch.optim.Optimizer")
    if "param_groups" not in vars(optimizer):
        raise ValueError("wraps another optimizer: pass the wrapped optimizer")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len({*map(id, parameters)}) < len(parameters):
        raise ValueError("has a parameter twice")
    return parameters


# ---------------------------------------------------------------------------------------------- what can step alone


def check_steps_alone(optimizer: Optimizer) -> None:
    """Try whether ``optimizer`` updates parameters one by one as it does together, on a few small ones like its own.

    Raises :class:`ValueError`, as :func:`install_in_backward` does, for an optimizer that needs a closure, looks at
    several parameters at once, or needs a gradient of every parameter.
    """
    _check_parameters(optimizer)
    together, alone = _small_copy(optimizer), _small_copy(optimizer)
    try:
        with torch.random.fork_rng(devices=[]):
            for seed in range(_TRIAL_STEPS):
                _take_both(together, alone, seed)
                if not _are_equal(together, alone):
                    raise ValueError("looks at several parameters at once: it updates them otherwise one by one")
            for group in alone.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            step_without_hooks(alone)
    except ValueError:
        raise
    except Exception as error:  # the optimizer may be the user's own class, and raise anything
        raise ValueError(f"cannot take a step of one parameter: {error}") from error


class StateOnDemand(defaultdict[Any, Any]):
    """The state of each parameter, which ``make`` makes when it is first read.

    Some optimizers, such as PyTorch 2.8's Adagrad, make state in their constructor, and fail without it.
    """

    def __init__(self, make: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__(dict)
        self._make = make

    def __missing__(self, parameter: Any) -> dict[str, Any]:
        self[parameter] = state = self._make(parameter)
        return state


def _small_copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy of ``optimizer`` with a few small parameters, and those parts of its state that fit them."""
    small: Optimizer = object.__new__(type(optimizer))
    likes: dict[Tensor, Tensor] = {}
    state = StateOnDemand(lambda parameter: _cut_state(optimizer.state, likes.get(parameter)))
    vars(small).update(vars(optimizer), state=state)
    small.param_groups = [_small_group(group, likes) for group in optimizer.param_groups]
    return small


def _small_group(group: Mapping[str, Any], likes: dict[Tensor, Tensor]) -> dict[str, Any]:
    """Return a copy of ``group`` with a few small parameters; map each in ``likes`` to the parameter that it mimics."""
    settings = {name: v.clone() if isinstance(v, Tensor) else v for name, v in group.items()}
    if not isinstance(settings.get("lr"), Tensor) and settings.get("lr") == 0:
        settings["lr"] = _TRIAL_RATE
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        likenesses = kinds[parameter.dim(), parameter.dtype, parameter.device]
        if len(likenesses) < _PARAMETERS_OF_A_KIND:
            likenesses.append(_filled_tensor(parameter, len(likenesses)).requires_grad_())
            likes[likenesses[-1]] = parameter
    return {**settings, "params": [parameter for likenesses in kinds.values() for parameter in likenesses]}


def _filled_tensor(like: Tensor, seed: int) -> Tensor:
    shape = [min(size, _MAX_SIZE) for size in like.shape]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(like.device, like.dtype)


def _cut_state(state: Mapping[Any, dict[str, Any]], parameter: Tensor | None) -> dict[str, Any]:
    return {name: _cut(value, parameter) for name, value in state.get(parameter, {}).items()}


def _cut(value: Any, parameter: Tensor | None) -> Any:
    if not isinstance(value, Tensor) or parameter is None or value.dim() != parameter.dim():
        return copy.deepcopy(value)
    if any(size not in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True)):
        return value.clone()
    return value[tuple(slice(_MAX_SIZE) for _ in value.shape)].clone()


def _take_both(together: Optimizer, alone: Optimizer, seed: int) -> None:
    for optimizer in (together, alone):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            parameter.grad = _filled_tensor(parameter, 1 + seed * len(parameters) + number)
    step_without_hooks(together)
    for group in reversed(alone.param_groups):
        for parameter in reversed(group["params"]):
            step_alone(alone, group, parameter)


def _are_equal(a: Optimizer, b: Optimizer) -> bool:
    for group_a, group_b in zip(a.param_groups, b.param_groups, strict=True):
        pairs = zip(group_a["params"], group_b["params"], strict=True)
        if not all(same_bits(p.detach(), q.detach()) for p, q in pairs):
            return False
        if _settings_by_value(group_a) != _settings_by_value(group_b):
            return False
    return True


def _settings_by_value(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = ((name, value) for name, value in group.items() if name != "params")
    return {name: v.tolist() if isinstance(v, Tensor) else v for name, v in settings}
