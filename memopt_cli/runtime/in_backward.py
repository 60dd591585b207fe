"""The optimizer in backward: a parameter is updated as soon as its gradient is whole, which is then freed.

Each parameter takes the optimizer's own step alone: the optimizer sees one group of one parameter meanwhile, with the
settings that its group has, so state, ``state_dict`` and schedulers are as ever.  The training loop stays as it is:
``optimizer.step()`` finds no gradients, and ends the update.  (After PyTorch's tutorial "How to save memory by fusing
the optimizer step into the backward pass", which makes an optimizer for every parameter instead.)

What would be wrong is refused: an optimizer whose step of all parameters is another than that of each, when it is
installed; a second gradient before ``optimizer.step()``, settings that change after backward, scaled gradients and
several processes, as soon as they show.  What cannot be noticed is code that reads ``.grad`` after backward, as
``clip_grad_norm_`` does: there is none.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from memopt_cli.runtime.compressor import same_bits
from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.optimizer_state import StateOnDemand
from memopt_cli.runtime.private_torch import step_without_hooks
from memopt_cli.runtime.waiting import remake_with

_installed: MutableMapping[Optimizer, InBackward] = weakref.WeakKeyDictionary()
_thread = threading.local()


def install_in_backward(optimizer: Optimizer, model: nn.Module) -> None:
    """From now on the parameters of ``optimizer`` that require gradients are updated in backward.

    ``model``: names them in messages.  Raises :class:`ValueError` with a reason, a sentence about the optimizer
    without its subject, where that cannot be; then nothing has changed.
    """
    parameters = _parameters_of(optimizer)
    if not {*map(id, parameters)} & {*map(id, model.parameters())}:
        raise ValueError("updates no parameter of the model")
    taken = {index for other in _installed.values() for index in other.names}
    if any(id(parameter) in taken for parameter in parameters):
        raise ValueError("updates parameters that are updated in backward already")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _installed[optimizer] = InBackward(optimizer, parameters, names)


def remove_in_backward(model: nn.Module) -> None:
    """The optimizers that update parameters of ``model`` in backward do so in their step again."""
    for optimizer in list(optimizers_in_backward(model)):
        _installed.pop(optimizer).remove()


def is_in_backward(optimizer: Optimizer | None) -> bool:
    """Whether it updates in backward."""
    return optimizer is not None and optimizer in _installed


def updates_in_backward() -> bool:
    """Whether any optimizer does."""
    return bool(_installed)


def has_in_backward(model: nn.Module) -> bool:
    """Whether parameters of ``model`` are updated in backward."""
    return any(True for _ in optimizers_in_backward(model))


def is_updating() -> bool:
    """Whether an optimizer runs within backward, on this thread."""
    return getattr(_thread, "is_updating", False)


def optimizers_in_backward(model: nn.Module) -> Iterator[Optimizer]:
    """Those that update parameters of ``model`` in backward."""
    own = {*map(id, model.parameters())}
    return (optimizer for optimizer, installed in list(_installed.items()) if own & installed.names.keys())


class InBackward:
    """An optimizer whose parameters are updated by hooks.  It is held weakly: without it they are not updated."""

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], names: Mapping[int, str]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lock = threading.Lock()  # devices have threads of their own in backward
        self._groups: list[dict[str, Any]] = []
        self._group_of: dict[int, dict[str, Any]] = {}
        self._updated: set[int] = set()
        self._used: list[tuple[dict[str, Any], Any]] = []
        """Groups since the last ``step``, and their settings then."""
        self._held = 0
        """Parameters that had state when this update began."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.names = {id(parameter): names.get(id(parameter), "a parameter") for parameter in trained}
        self._handles: list[Any] = [optimizer.register_step_pre_hook(self._end)]
        for parameter in trained:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._update))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _update(self, parameter: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        remake_with(parameter)
        with self._lock, _updating():
            self._check(parameter, optimizer)
            step_alone(optimizer, self._used_group(optimizer, parameter), parameter)
            parameter.grad = None

    def _check(self, parameter: Tensor, optimizer: Optimizer) -> None:
        """Raises :class:`RuntimeError` for a gradient that is not all of a step's."""
        if not self._updated:
            self._held = len(optimizer.state)
            if (processes := _processes()) > 1:
                raise RuntimeError(
                    f"the optimizer cannot run in backward in {processes} processes: it would use gradients before "
                    f"those of the other processes are added; {_WITHOUT}"
                )
        if id(parameter) in self._updated:
            raise RuntimeError(
                f"'{self.names[id(parameter)]}' gets a second gradient before optimizer.step(), and the optimizer has "
                f"run in backward with the first: gradients cannot be accumulated so; call optimizer.step() after "
                f"every backward, or {_WITHOUT}"
            )
        self._updated.add(id(parameter))

    def _used_group(self, optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
        if self._groups is not optimizer.param_groups:  # the first time, and when a state was loaded
            self._groups = optimizer.param_groups
            self._group_of = {id(p): group for group in self._groups for p in group["params"]}
        group = self._group_of[id(parameter)]
        if all(used is not group for used, _ in self._used):
            self._used.append((group, _settings(group)))
        return group

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """``optimizer.step()`` was called: the update is complete.  Raises :class:`RuntimeError` if it was wrong."""
        if is_updating():
            return  # a class whose step calls that of its base, which has hooks of its own
        used, self._used = self._used, []
        updated, self._updated = self._updated, set()
        if updated:
            _order_state(optimizer, self._held)
        if updated and getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(f"the optimizer has run in backward with gradients that a GradScaler scales; {_WITHOUT}")
        if any(_settings(group) != before for group, before in used):
            raise RuntimeError(
                "settings of the optimizer, as its rate, changed between backward and optimizer.step(), and it had run "
                f"in backward with the old ones; change them before forward or after step, or {_WITHOUT}"
            )
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in updated and parameter.grad is not None:
                raise RuntimeError(
                    f"'{self.names[id(parameter)]}' was given a gradient after backward, in which the optimizer had "
                    f"used another; {_WITHOUT}"
                )


def _order_state(optimizer: Optimizer, held: int) -> None:
    """State that is new has the order of the parameters, as in a step of all: ``state_dict`` keeps it."""
    state = optimizer.state
    new = {id(parameter) for parameter in list(state)[held:]}
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in new):
        state[parameter] = state.pop(parameter)


_WITHOUT = "take in_backward out of the plan"


def _processes() -> int:
    """How many train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


@contextlib.contextmanager
def _updating() -> Iterator[None]:
    _thread.is_updating = True
    try:
        yield
    finally:
        _thread.is_updating = False


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says beside its parameters, to be compared."""
    others = ((name, value) for name, value in group.items() if name != "params")
    return {name: (id(v), version_of(v)) if isinstance(v, Tensor) else v for name, v in others}


def step_alone(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """The optimizer's own step for one parameter of a group."""
    groups, together = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        step_without_hooks(optimizer)
    finally:
        optimizer.param_groups, group["params"] = groups, together


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    if not hasattr(optimizer, "param_groups"):
        raise ValueError("is no torch.optim.Optimizer")
    if "param_groups" not in vars(optimizer):
        raise ValueError("wraps another optimizer: give that one")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len({*map(id, parameters)}) < len(parameters):
        raise ValueError("has a parameter twice")
    return parameters


# ---------------------------------------------------------------------------------------------- what can step alone

_STEPS = 3
_OF_A_KIND = 2
_MOST_SIZE = 4
"""Of a dimension of the parameters that are tried."""
_RATE = 0.01
"""Where the optimizer's own is zero, which would show nothing."""


def check_steps_alone(optimizer: Optimizer) -> None:
    """Try its steps on a few small parameters like its own: of each alone they must be those of all together.

    Raises :class:`ValueError` as :func:`install_in_backward` does, of an optimizer that wants a closure, that looks at
    several parameters at once, or that wants a gradient of every parameter.
    """
    _parameters_of(optimizer)
    together, alone = _small(optimizer), _small(optimizer)
    try:
        with torch.random.fork_rng(devices=[]):
            for seed in range(_STEPS):
                _take_both(together, alone, seed)
                if not _are_equal(together, alone):
                    raise ValueError("looks at several parameters at once: it updates them otherwise one by one")
            for group in alone.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            step_without_hooks(alone)
    except ValueError:
        raise
    except Exception as error:  # of a class of anybody's
        raise ValueError(f"cannot take a step of one parameter: {error}") from error


def _small(optimizer: Optimizer) -> Optimizer:
    """The same of few and small parameters, with what fits them of its state."""
    made: Optimizer = object.__new__(type(optimizer))
    likes: dict[Tensor, Tensor] = {}
    state = StateOnDemand(lambda small: _cut_state(optimizer.state, likes.get(small)))
    vars(made).update(vars(optimizer), state=state)
    made.param_groups = [_small_group(group, likes) for group in optimizer.param_groups]
    return made


def _small_group(group: Mapping[str, Any], likes: dict[Tensor, Tensor]) -> dict[str, Any]:
    """``likes``: is told of which parameter each small one is made."""
    settings = {name: v.clone() if isinstance(v, Tensor) else v for name, v in group.items()}
    if not isinstance(settings.get("lr"), Tensor) and settings.get("lr") == 0:
        settings["lr"] = _RATE
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        alike = kinds[parameter.dim(), parameter.dtype, parameter.device]
        if len(alike) < _OF_A_KIND:
            alike.append(_filled(parameter, len(alike)).requires_grad_())
            likes[alike[-1]] = parameter
    return {**settings, "params": [parameter for alike in kinds.values() for parameter in alike]}


def _filled(like: Tensor, seed: int) -> Tensor:
    shape = [min(size, _MOST_SIZE) for size in like.shape]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(like.device, like.dtype)


def _cut_state(state: Mapping[Any, dict[str, Any]], parameter: Tensor | None) -> dict[str, Any]:
    """What it has of a parameter, for one as small as :func:`_filled` makes."""
    return {name: _cut(value, parameter) for name, value in state.get(parameter, {}).items()}


def _cut(value: Any, parameter: Tensor | None) -> Any:
    if not isinstance(value, Tensor) or parameter is None or value.dim() != parameter.dim():
        return copy.deepcopy(value)
    if any(size not in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True)):
        return value.clone()
    return value[tuple(slice(_MOST_SIZE) for _ in value.shape)].clone()


def _take_both(together: Optimizer, alone: Optimizer, seed: int) -> None:
    for optimizer in (together, alone):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            parameter.grad = _filled(parameter, 1 + seed * len(parameters) + number)
    step_without_hooks(together)
    for group in reversed(alone.param_groups):
        for parameter in reversed(group["params"]):
            step_alone(alone, group, parameter)


def _are_equal(one: Optimizer, other: Optimizer) -> bool:
    for group, another in zip(one.param_groups, other.param_groups, strict=True):
        pairs = zip(group["params"], another["params"], strict=True)
        if not all(same_bits(a.detach(), b.detach()) for a, b in pairs) or _plain(group) != _plain(another):
            return False
    return True


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their values."""
    others = ((name, value) for name, value in group.items() if name != "params")
    return {name: v.tolist() if isinstance(v, Tensor) else v for name, v in others}
