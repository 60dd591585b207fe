"""Random ways to train a model: how it is called, what surrounds forward, how gradients are computed, and events.

Each table below gives names to one kind of choice; a :class:`Scenario` is a name, or several, from each.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fuzz.layers import STEPS, WIDTH

Forward = Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Training of a model; most fields are keys of the tables of this file, by default those of a plain training."""

    dtype: str = "float32"
    inputs: str = "normal"
    batch: int = 4
    """Samples in the batch; 0 is an empty batch."""
    call: str = "plainly"
    backward: str = "plainly"
    update: str = "sgd"
    around: tuple[str, ...] = ()
    """Contexts in which forward runs: keys of :data:`AROUND`."""
    before: tuple[str, ...] = ()
    """Events before the step: keys of :data:`EVENTS`."""
    between: tuple[str, ...] = ()
    """Events between forward and backward: keys of :data:`EVENTS`."""
    after: tuple[str, ...] = ()
    """Changes of the model after the step: keys of :data:`AFTER`."""


PLAIN: Final = Scenario()

# ---------------------------------------------------------------------------------------------- inputs


def _strided(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


INPUTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "normal": lambda x: x,
    "trained": lambda x: x.requires_grad_(),
    "spikes": lambda x: (x > 0.5).to(x.dtype),
    "counts": lambda x: x.abs().mul(2).floor(),
    "zeros": torch.zeros_like,
    "trained spikes": lambda x: (x > 0.5).to(x.dtype).requires_grad_(),
    "strided": lambda x: _strided(x).requires_grad_(),
    "expanded": lambda x: x[:1].expand(x.shape),
    "part": lambda x: torch.stack([x, x])[1].detach().requires_grad_(),
    "padded": lambda x: x * (torch.arange(STEPS) < 3).to(x.dtype)[:, None],
    "not a number": lambda x: x.index_fill(2, torch.tensor(1), float("nan")).requires_grad_(),
    "negative zero": lambda x: x.clamp(max=0).mul(0).requires_grad_(),
    "computed": lambda x: x.requires_grad_() * 1,
}
"""Form of a batch -> function that makes it of normal random numbers."""


def batch_of(scenario: Scenario, step: int) -> Tensor:
    """Return the inputs of step number ``step``; with "other sizes", every second batch is smaller."""
    size = scenario.batch
    if "other sizes" in scenario.before and step % 2:
        size = max(1, size - 1)
    x = torch.randn(size, STEPS, WIDTH, dtype=torch.float64).to(getattr(torch, scenario.dtype))
    return INPUTS[scenario.inputs](x)


# ---------------------------------------------------------------------------------------------- calls


def _in_thread(model: nn.Module, x: Tensor) -> Any:
    enabled = torch.is_grad_enabled()

    def call() -> Any:
        with torch.set_grad_enabled(enabled):
            return model(x)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def _with_others(model: nn.Module, x: Tensor) -> Any:
    """Call the model with parameters computed from its own."""
    return functional_call(model, {name: p * 0.9 for name, p in model.named_parameters()}, (x,))


def _with_a_twin(model: nn.Module, x: Tensor) -> Any:
    """Call the model and a second one that shares its parameters."""
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    return [model(x), twin(x.sin())]


def _perturbed(model: nn.Module, x: Tensor) -> Any:
    """Call the model on a shifted input without gradients, then as usual."""
    with torch.no_grad():
        model(x.detach() + 0.1)
    return model(x)


CALLS: Final[dict[str, Callable[[nn.Module, Tensor], Any]]] = {
    "plainly": lambda model, x: model(x),
    "by keyword": lambda model, x: model(x=x),
    "twice": lambda model, x: [model(x), model(x)],
    "with other inputs": lambda model, x: [model(x), model(x.detach().cos())],
    "in turn": lambda model, x: model(model(x)),
    "after one without gradients": _perturbed,
    "in a thread": _in_thread,
    "with other parameters": _with_others,
    "with a twin": _with_a_twin,
    "in a checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "mapped": lambda model, x: torch.vmap(model, randomness="different")(torch.stack([x, x.cos()])),
}
"""Way to call forward -> function of the model and the inputs."""


# ---------------------------------------------------------------------------------------------- around forward


@contextlib.contextmanager
def _hooks_of_the_users() -> Iterator[None]:
    with saved_tensors_hooks(lambda t: t.clone(), lambda kept: kept):
        yield


AROUND: Final[dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "autocast": lambda: _autocast(),
    "autocast without a cache": lambda: _autocast(cache_enabled=False),
    "saved on the CPU": save_on_cpu,
    "saved by hooks": _hooks_of_the_users,
    "gradients enabled": torch.enable_grad,
    "anomalies detected": lambda: torch.autograd.set_detect_anomaly(True),
    "a device": torch.get_default_device,
    "random numbers put back": lambda: torch.random.fork_rng(),
    "another default dtype": lambda: _default_dtype(torch.float64),
    "deterministic": lambda: _deterministic(),
}
"""Name of a context -> function that opens it; forward runs inside it, backward does not."""


def _autocast(**options: Any) -> torch.autocast:
    return torch.autocast(torch.get_default_device().type, torch.bfloat16, **options)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


# ---------------------------------------------------------------------------------------------- before and between


class Interrupted(Exception):
    """Error that a test hook raises in the middle of a forward, as running out of memory would."""


def _fail_within(model: nn.Module, x: Tensor) -> None:
    """Run a forward that fails about halfway through the model."""
    leaves = [m for m in model.modules() if not any(m.children())]

    def interrupt(*_: Any) -> None:
        raise Interrupted

    handle = leaves[len(leaves) // 2].register_forward_pre_hook(interrupt)
    try:
        model(x.detach().clone())
    except Interrupted:
        pass
    finally:
        handle.remove()


def _forget(model: nn.Module, x: Tensor) -> None:
    """Run a forward whose output is dropped, without backward."""
    model(x.detach().clone())


def _look(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x.detach().clone())


def _evaluate(model: nn.Module, x: Tensor) -> None:
    modes = {m: m.training for m in model.modules()}
    model.eval()
    with torch.inference_mode():
        model(x.detach().clone())
    for module, training in modes.items():
        module.training = training


def _freeze(model: nn.Module, x: Tensor) -> None:
    for p in list(model.parameters())[::2]:
        p.requires_grad_(False)


def _thaw(model: nn.Module, x: Tensor) -> None:
    model.requires_grad_(True)


def _draw(model: nn.Module, x: Tensor) -> None:
    torch.rand(3), np.random.rand(3), random.random()


def _change_inputs(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


def _drop_buffers(model: nn.Module, x: Tensor) -> None:
    """Reset the running statistics of batch norms, in place."""
    for module in model.modules():
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()


def _hook_parameters(model: nn.Module, x: Tensor) -> None:
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient * 0.5)


Event = Callable[[nn.Module, Tensor], object]

EVENTS: Final[dict[str, Event]] = {
    "other sizes": lambda model, x: None,
    "eval": lambda model, x: model.eval(),
    "train": lambda model, x: model.train(),
    "freeze": _freeze,
    "thaw": _thaw,
    "fail": _fail_within,
    "forget": _forget,
    "look": _look,
    "evaluate": _evaluate,
    "draw": _draw,
    "change the inputs": _change_inputs,
    "begin statistics anew": _drop_buffers,
    "hook parameters": _hook_parameters,
}
BEFORE: Final = (
    "other sizes",
    "eval",
    "train",
    "freeze",
    "thaw",
    "fail",
    "forget",
    "look",
    "evaluate",
    "hook parameters",
)
BETWEEN: Final = (
    "eval",
    "train",
    "freeze",
    "thaw",
    "look",
    "evaluate",
    "draw",
    "change the inputs",
    "begin statistics anew",
)


# ---------------------------------------------------------------------------------------------- backward

Roots = Sequence[Tensor]


def _plainly(roots: Roots, cotangents: Roots, leaves: Roots) -> None:
    torch.autograd.backward(roots, cotangents)


def _twice(roots: Roots, cotangents: Roots, leaves: Roots) -> None:
    torch.autograd.backward(roots, cotangents, retain_graph=True)
    torch.autograd.backward(roots, cotangents)


def _one_by_one(roots: Roots, cotangents: Roots, leaves: Roots) -> None:
    for index, (root, cotangent) in enumerate(zip(roots, cotangents, strict=True)):
        half = cotangent * 0.5
        torch.autograd.backward([root], [half], retain_graph=True)
        torch.autograd.backward([root], [half], retain_graph=index + 1 < len(roots))


def _penalized(roots: Roots, cotangents: Roots, leaves: Roots) -> None:
    """Add a penalty on the gradients, which is differentiated again."""
    total = sum((root * cotangent).sum() for root, cotangent in zip(roots, cotangents, strict=True))
    gradients = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    penalty = sum(g.square().sum() for g in gradients if g is not None and g.requires_grad)
    (total + 0.1 * penalty).backward()


def _asked_for(roots: Roots, cotangents: Roots, leaves: Roots) -> None:
    """Compute gradients by ``autograd.grad``, in two parts."""
    for some in (leaves[::2], leaves[1::2]):
        if some:
            found = torch.autograd.grad(roots, some, cotangents, retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(some, found, strict=True):
                leaf.grad = gradient


def _in_another_thread(roots: Roots, cotangents: Roots, leaves: Roots) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.autograd.backward, roots, cotangents).result()


def _scaled(roots: Roots, cotangents: Roots, leaves: Roots) -> None:
    """Scale the loss, and divide the gradients by the same factor, as a GradScaler does."""
    torch.autograd.backward(roots, [cotangent * 1024 for cotangent in cotangents])
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad = leaf.grad / 1024


def _broken_off(roots: Roots, cotangents: Roots, leaves: Roots) -> None:
    """Run backward once with an exception on the way, then again without it."""

    def interrupt(gradient: Tensor) -> Tensor:
        raise Interrupted

    handle = leaves[0].register_hook(interrupt)
    try:
        torch.autograd.backward(roots, cotangents, retain_graph=True)
    except Interrupted:
        pass
    finally:
        handle.remove()
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(roots, cotangents)


BACKWARDS: Final[dict[str, Callable[[Roots, Roots, Roots], None]]] = {
    "plainly": _plainly,
    "twice": _twice,
    "one by one": _one_by_one,
    "penalized": _penalized,
    "asked for": _asked_for,
    "in another thread": _in_another_thread,
    "scaled": _scaled,
    "broken off": _broken_off,
    "never": lambda roots, cotangents, leaves: None,
}
"""Way to compute gradients -> function of outputs, their gradients, and the leaves."""


# ---------------------------------------------------------------------------------------------- after the step


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def _state_loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return model


def _in_other_memory(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.data = p.data.clone()
    return model


AFTER: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {
    "copied": copy.deepcopy,
    "saved": _saved_and_loaded,
    "state loaded": _state_loaded,
    "moved": _in_other_memory,
}
"""Change after a step -> function that returns the changed model."""

UPDATES: Final[dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer | None]]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "accumulated": lambda parameters: None,
}
"""Update of the parameters -> function that makes the optimizer; ``None`` only accumulates gradients."""


# ---------------------------------------------------------------------------------------------- drawing one


def drawn_scenario(draws: random.Random, dtype: str) -> Scenario:
    """Draw a scenario that is plain in most respects."""

    def one(table: Sequence[str], share: float) -> str:
        return draws.choice(table) if draws.random() < share else table[0]

    def some(table: Sequence[str], share: float) -> tuple[str, ...]:
        return tuple(draws.sample(table, draws.choice([1, 1, 2]))) if draws.random() < share else ()

    return Scenario(
        dtype=dtype,
        inputs=one([*INPUTS], 0.7),
        batch=draws.choice([1, 2, 4, 4, 16, 0]) if draws.random() < 0.7 else 4,
        call=one([*CALLS], 0.35),
        backward=one([*BACKWARDS], 0.5),
        update=one([*UPDATES], 0.4),
        around=some([*AROUND], 0.25),
        before=some(BEFORE, 0.4),
        between=some(BETWEEN, 0.35),
        after=some([*AFTER], 0.25),
    )
