"""Blocks of a random model whose forwards do what users' own code does, rather than what PyTorch's layers do.

They keep state between calls, pass tensors through containers, write in place, wrap other blocks, and compute gradients
inside forward.  Each is a case that a segment, which runs its forward again in backward, could get wrong: a block that
counts its calls, for example, must not count the recomputation.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fuzz.layers import STEPS, WIDTH, Kind


class Mixing(nn.Module):
    """Base class of blocks that apply a linear layer first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Holding(nn.Module):
    """Base class of blocks that contain other blocks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


# ---------------------------------------------------------------------------------------------- spikes and state


class Spike(torch.autograd.Function):
    """Step function with a smooth surrogate gradient, as spiking neurons use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] / (1 + x.abs()).square()


class Neurons(Mixing):
    """Leaky integrate-and-fire neurons, whose state lasts for one call."""

    def forward(self, x: Tensor) -> Tensor:
        voltage = torch.zeros_like(x[:, 0])
        spikes = []
        for current in self.linear(x).unbind(1):
            voltage = 0.8 * voltage + current
            spikes.append(Spike.apply(voltage - 0.5))
            voltage = voltage * (1 - spikes[-1].detach())
        return torch.stack(spikes, 1)


class Membranes(Mixing):
    """Neurons that keep their voltage, and its graph, from call to call until ``reset``."""

    def __init__(self) -> None:
        super().__init__()
        self.voltage: Tensor | None = None

    def reset(self) -> None:
        self.voltage = None

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for current in self.linear(x).unbind(1):
            self.voltage = current if self.voltage is None else 0.8 * self.voltage + current
            outputs.append(self.voltage.sigmoid())
        return torch.stack(outputs, 1)


class Remembering(Mixing):
    """Layer that adds its output of the previous step, detached, to the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.zeros_like(x) if self.memory is None or self.memory.shape != x.shape else self.memory
        y = (self.linear(x) + 0.5 * memory.to(x.dtype)).tanh()
        self.memory = y.detach()
        return y


class InPlaceMemory(Mixing):
    """Layer with a plain tensor as memory (no buffer), which forward updates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(STEPS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x) + self.memory.to(x.dtype)).tanh()
        self.memory.mul_(0.5).add_(y.detach().sum(0).to(self.memory.dtype), alpha=0.1)
        return y


class RunningBuffer(Mixing):
    """Layer that updates a buffer in forward, in the way that ``how`` names, and reads it before and after."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("running", torch.full((STEPS, WIDTH), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            moved = 0.9 * self.running + 0.1 * y.detach().nan_to_num().sum(0)
        output = (y * self.running.clone()).sin()
        if self.how == "buffer through data":
            self.running.data.copy_(moved)
        elif self.how == "buffer assigned":
            self.running = moved
        else:
            self.running = self.running.clone()
            self.running.copy_(moved)
        return output * self.running.sum()


class Counting(Mixing):
    """Layer that counts its calls in a buffer, a number and a list, and keeps results in a deque and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.number, self.seen = 0, [0]
        self.history: deque[Tensor] = deque(maxlen=2)
        self.latest: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 1
        self.seen[0] += 2
        self.latest["mean"] = x.detach().mean()
        y = self.linear(x) * (self.number + self.seen[0] + int(self.calls))
        self.history.append(y.detach().mean())
        return y.sin() + sum(self.history)


class Drawing(Mixing):
    """Layer that multiplies by random numbers, or by the next item of an iterator, from ``source``."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self._factor(x)).sin()

    def _factor(self, x: Tensor) -> Any:
        match self.source:
            case torch.Generator():
                return torch.rand(x.shape, generator=self.source, dtype=x.dtype)
            case np.random.Generator() | random.Random():
                return float(self.source.random())
            case "NumPy":
                return float(np.random.rand())
            case "Python":
                return random.random()
            case "permutation":
                return x[torch.randperm(len(x))]
            case "noise":
                return torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.5))
            case "gumbel":
                return F.gumbel_softmax(x, hard=True)
        return float(next(self.source))


@dataclass
class Result:
    """Output of a forward as an object that is no container of PyTorch's pytrees."""

    main: Tensor
    aside: list[Tensor]
    nothing: None = None


class Pair(NamedTuple):
    """Output of a forward as a named tuple."""

    main: Tensor
    flag: Tensor
    nothing: Any


class SeveralOutputs(Mixing):
    """Layer that returns several tensors, some forms also flags and ``None``, in the container that ``form`` names."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, *, scale: float = 1.0, shift: Tensor | None = None) -> Any:
        y = self.linear(x) * scale + (0 if shift is None else shift)
        match self.form:
            case "tuple":
                return y, None, [y.sin(), (y > 0)], 3
            case "mapping":
                return {"main": y, "aside": {"deep": (y.cos(),)}, "nothing": None}
            case "named tuple":
                return Pair(y, y.detach() > 0, None)
            case "twice the same":
                return y, y, y.view_as(y)
            case "input beside":
                return x, y
            case "parameter":
                return y, self.linear.weight, self.linear.bias.sum()
        return Result(y.tanh(), [y, y.exp()])


class TakingApart(nn.Module):
    """Block that calls :class:`SeveralOutputs` and adds up all tensors of its output."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.several = SeveralOutputs(form)

    def forward(self, x: Tensor) -> Tensor:
        output = self.several(x, scale=1.5, shift=x.detach().mean())
        total = torch.zeros_like(x)
        for part in _tensors(output):
            total = total + (part if part.shape == x.shape else part.sum()).to(x.dtype)
        return total


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Result):
        value = (value.main, value.aside)
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, tuple | list) else []


class Expert(Mixing):
    """Layer that appends its auxiliary loss to a list among its arguments, and writes to a dict among them."""

    def forward(self, x: Tensor, losses: list[Tensor], seen: dict[str, Any]) -> Tensor:
        y = self.linear(x)
        losses.append(y.square().mean())
        seen["calls"] = seen.get("calls", 0) + 1
        seen["last"] = y.detach().mean()
        return y.tanh() * seen["calls"]


class Mixture(nn.Module):
    """Block that collects the losses of its experts in a list, and adds them to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(), Expert()])

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        seen: dict[str, Any] = {}
        for expert in self.experts:
            x = expert(x, losses, seen=seen)
        return x + sum(losses) * seen["last"]


class Box:
    """Plain object with a list of tensors, as the caches of language models are."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Cache(dict[str, Tensor]):
    """Subclass of ``dict`` that also has an attribute."""

    length = 0


def new_box() -> Box:
    return Box()


def new_cache() -> Cache:
    return Cache()


class Appending(Mixing):
    """Layer that stores its result in a cache among its arguments, and reads the earlier results there."""

    def forward(self, x: Tensor, cache: Box | Cache) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        if isinstance(cache, Box):
            before = cache.kept[-1] if cache.kept else y
            cache.kept.append(y)
            return x + before * len(cache.kept)
        before = cache.get("last", y)
        cache["last"] = y
        cache.length += 1
        return x + before * cache.length


class Caching(nn.Module):
    """Block that passes one new cache through several layers; if ``kept``, a list of the block also grows each step."""

    def __init__(self, make: Callable[[], Box | Cache], *, kept: bool = False) -> None:
        super().__init__()
        self.first, self.second = Appending(), Appending()
        self.make, self.log = make, list[float]()
        self.seen: list[float] | None = self.log if kept else None

    def forward(self, x: Tensor) -> Tensor:
        cache = self.make()
        y: Tensor = self.first(self.second(self.first(x, cache), cache), cache)
        if self.seen is not None:
            self.seen.append(float(len(self.seen)))
            y = y * (1 + 0.1 * self.seen[-1])
        return y


class Routed(nn.Module):
    """Mixture of experts that sends each row to the expert with the highest score, so that shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == number)
            output = output.index_add(0, places, (expert.linear(rows[places]) * weight[places, None]).to(rows.dtype))
        return x + output.view_as(x)


class Sum(Mixing):
    """Layer whose output lacks the dimension ``axis``, over which it sums."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum(self.axis)


class Summed(nn.Module):
    """Block that adds the output of :class:`Sum` to its input, along the whole of ``axis``."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.sum = Sum(axis)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sum(x).unsqueeze(self.sum.axis)


# ---------------------------------------------------------------------------------------------- in place and indices


class InPlace(Mixing):
    """Layer that writes in place to its own result, a view of it, or a copy of its input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        match self.how:
            case "arithmetic":
                return y.mul_(2).add_(1).tanh_()
            case "slice":
                y[:, 0] = 0
                y[:, 1:].add_(x[:, :-1])
            case "view of result":
                y.transpose(1, 2)[:, 2].zero_()
                y.flatten().relu_()
            case "mask":
                y.masked_fill_(y > 0.5, 0.5)
                y[y < -0.5] = 0
            case "index":
                y = y.index_add(0, torch.zeros(len(x), dtype=torch.long), x)
                y.index_put_((torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)), x[:, 1])
            case "input":
                x = x * 1
                x.add_(y)
                return x.sigmoid_()
            case "detached":
                y.detach().mul_(0.5)
        return y


class Overwriting(Mixing):
    """Layer that first adds to its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.add_(0.1)).tanh()


class Over(nn.Module):
    """Block that passes a fresh tensor to :class:`Overwriting`, which may be written to without harm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.overwriting = nn.Linear(WIDTH, WIDTH), Overwriting()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.overwriting(self.linear(x))
        return output


OPERATORS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gather": lambda x: x.gather(2, x.detach().argsort(2)),
    "sort": lambda x: x.sort(-1).values,
    "top": lambda x: F.pad(x.topk(3, -1).values, (0, WIDTH - 3)),
    "flip": lambda x: x.flip(1).roll(1, 2),
    "largest": lambda x: x - x.amax(-1, keepdim=True) + x.max(1, keepdim=True).values,
    "median": lambda x: x * x.median(-1, keepdim=True).values,
    "where": lambda x: torch.where(x > 0, x, x.exp() - 1),
    "chosen": lambda x: torch.zeros_like(x).masked_scatter(x > 0, x[x > 0].square()),
    "sum so far": lambda x: x.cumsum(1) + x.cumprod(2),
    "windows": lambda x: x.unfold(1, 2, 1).mean(-1).repeat_interleave(2, 1)[:, :STEPS],
    "spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 1j, n=STEPS, dim=1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(2, (-1, 2)).contiguous()).exp()).flatten(
        2
    ),
    "distance": lambda x: x + torch.cdist(x, x).sum(-1, keepdim=True),
    "products": lambda x: torch.einsum("btd,bsd->bts", x, x) @ x,
    "expanded": lambda x: x.mean(1, keepdim=True).expand(x.shape),
    "strided": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "normalized": lambda x: F.normalize(x, dim=-1) + x.std(-1, keepdim=True),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2.0, mode="linear")[..., ::2],
    "branch": lambda x: x.sin() if float(x.detach().nan_to_num().abs().sum()) > 20 else x.cos() * 2,
    "stopped": lambda x: x + (x.round() - x).detach(),
    "clamped": lambda x: x.clamp(-0.5, 0.5).clamp_(max=0.4),
    "identity": lambda x: x,
    "viewed": lambda x: x.view_as(x),
}
"""Name -> function of one tensor, without parameters."""


class Operators(nn.Module):
    """Block that applies the function ``name`` of :data:`OPERATORS`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return OPERATORS[self.name](x)


# ---------------------------------------------------------------------------------------------- around others


class Residual(Holding):
    """Block that adds its input to the output of its inner blocks."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.inner(x)
        return output


class Twice(Holding):
    """Block that calls its inner blocks twice in a row."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(self.inner(x).tanh())
        return output


class Concatenated(Holding):
    """Block that concatenates the input of its inner blocks with their output, as U-Nets and DenseNets do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.before, self.mixed = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        output: Tensor = self.mixed(torch.cat([x, self.inner(x)], dim=-1))
        return output


class Shared(Holding):
    """Block that holds one module under two names, and calls it by both."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.again = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x) + self.again(x.flip(0))
        return output


class Tied(Holding):
    """Block whose first and last layer share one weight."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.inner(self.first(x)))
        return output


class Checkpointed(Holding):
    """Block that calls ``torch.utils.checkpoint`` itself."""

    def __init__(self, inner: nn.Module, reentrant: bool = False) -> None:
        super().__init__(inner)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(lambda y: self.inner(y.sin()).square(), x, use_reentrant=self.reentrant)
        return output


class Precision(Holding):
    """Block that runs its inner blocks under autocast, and returns the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: Tensor = self.inner(x.float())
        return output.to(x.dtype)


class Teacher(Holding):
    """Block that runs its inner blocks once without gradients, and once with."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.inner(x)
        output: Tensor = (self.inner(x) - target.mean()).sin()
        return output


class Trying(Holding):
    """Block that calls its inner blocks on a wrong shape, suppresses the error, and calls them again."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):
            self.inner(x.unsqueeze(0).expand(2, -1, -1, -1)[..., :3])
        output: Tensor = self.inner(x)
        return output


class Evaluating(Holding):
    """Block that sets its inner blocks to eval mode while they run."""

    def forward(self, x: Tensor) -> Tensor:
        was = self.inner.training
        self.inner.eval()
        output: Tensor = self.inner(x)
        self.inner.train(was)
        return output


class Threaded(Holding):
    """Block that runs its inner blocks in another thread."""

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            enabled = torch.is_grad_enabled()
            return pool.submit(self._call, x, enabled).result()

    def _call(self, x: Tensor, enabled: bool) -> Tensor:
        with torch.set_grad_enabled(enabled):
            output: Tensor = self.inner(x)
        return output


class Hooked(Holding):
    """Block that registers on its inner blocks a hook of the kind that ``kind`` names."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__(inner)
        match kind:
            case "before":
                inner.register_forward_pre_hook(_scaled_input)
            case "after":
                inner.register_forward_hook(_scaled_output)
            case "backward":
                inner.register_full_backward_hook(_scaled_gradient)
            case _:
                inner.register_full_backward_pre_hook(_scaled_cotangent)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


def _scaled_input(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return (args[0] * 1.5,)


def _scaled_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output * 0.5


def _scaled_gradient(module: nn.Module, before: Any, after: Any) -> Any:
    return tuple(None if t is None else 2 * t for t in before)


def _scaled_cotangent(module: nn.Module, after: Any) -> Any:
    return tuple(None if t is None else 3 * t for t in after)


class Saving(Holding):
    """Block that runs its inner blocks under saved-tensor its own hooks."""

    def __init__(self, inner: nn.Module, on_cpu: bool) -> None:
        super().__init__(inner)
        self.on_cpu = on_cpu

    def forward(self, x: Tensor) -> Tensor:
        hooks = save_on_cpu() if self.on_cpu else saved_tensors_hooks(lambda t: (t.clone(),), lambda kept: kept[0])
        with hooks:
            output: Tensor = self.inner(x)
        return output


class Called(Holding):
    """Block that calls its inner blocks by ``functional_call``, with parameters computed from their own."""

    def forward(self, x: Tensor) -> Tensor:
        moved = {name: p * 0.9 for name, p in self.inner.named_parameters()}
        output: Tensor = functional_call(self.inner, moved, (x,))
        return output


class Mapped(Holding):
    """Block that runs its inner blocks by ``vmap`` over two versions of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.vmap(self.inner, randomness="different")(torch.stack([x, x.cos()]))
        return both.sum(0)


class Recursive(Mixing):
    """Layer whose forward calls the layer itself."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = self.linear(x).tanh()
        return y if depth == 0 else y + self(y, depth - 1)


# ---------------------------------------------------------------------------------------------- gradients within


class Force(nn.Module):
    """Block that returns the gradient of an energy by its input, so that training differentiates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.second(self.first(at).tanh()).sum(), at, create_graph=True)
        return force


class Differentiated(Mixing):
    """Layer that uses the transform of ``torch.func`` that ``how`` names: ``vmap``, ``grad``, ``jvp`` or ``vjp``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "map":
            return torch.vmap(self._curve)(x)
        if self.how == "gradient":
            return torch.func.grad(lambda t: self._curve(t).sum())(x)
        if self.how == "product":
            return torch.func.jvp(self._curve, (x,), (x.cos(),))[1]
        _, pulled = torch.func.vjp(self._curve, x)
        (gradient,) = pulled(x.sin())
        return gradient

    def _curve(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight).tanh()


class GradientHook(Mixing):
    """Layer with a hook on an intermediate tensor that halves its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y.sin()


class Leaf(Mixing):
    """Layer whose forward makes a leaf tensor and a new layer, and runs a part without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        start = torch.ones(WIDTH, dtype=x.dtype, requires_grad=True)
        self.made = nn.Linear(WIDTH, WIDTH, dtype=x.dtype)
        with torch.no_grad():
            gate = self.linear(x).sigmoid()
        return self.made(x * start) * gate + self.linear(x)


class Split(nn.Module):
    """Block whose ``__spatial_split__`` returns the modules that a plan may make segments of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Dropout(0.2))

    def __spatial_split__(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x))
        return output


@torch.jit.script
def _charge(x: Tensor) -> Tensor:
    y = torch.sigmoid(x + x / 2.0)
    return torch.tanh(y * 3.0) * x


class Scripted(Mixing):
    """Layer followed by a function compiled by TorchScript."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _charge(self.linear(x))
        return output


def _sparse(indices: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(indices, torch.ones(WIDTH), (WIDTH, WIDTH), check_invariants=False)


class Sparse(Mixing):
    """Layer that multiplies by a sparse matrix in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        indices = torch.arange(WIDTH).repeat(2, 1)
        self.register_buffer("matrix", _sparse(indices), False)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix.to(x.dtype)  # type: ignore[operator]
        return torch.sparse.mm(matrix, self.linear(x).flatten(0, 1).t()).t().reshape(x.shape)


class Weights(nn.Module):
    """Block with its parameters in a list and a dict; one of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.full((WIDTH,), 2.0)])
        self.shifts = nn.ParameterDict({"a": torch.zeros(WIDTH), "b": nn.Parameter(torch.ones(()), False)})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x + self.shifts["a"] * self.shifts["b"]


class Reweighted(Mixing):
    """Block that replaces the weight of its layer and removes the bias while the layer runs."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        self.linear.weight, self.linear.bias = nn.Parameter(weight.detach() * 0.9), None
        y = self.linear(x).tanh()
        self.linear.weight, self.linear.bias = weight, bias
        return y + weight.sum() + bias.sin()


class MakingParameters(Mixing):
    """Block that assigns a new random parameter in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.factor = nn.Parameter(torch.rand(WIDTH, dtype=x.dtype))
        return (self.linear(x) * self.factor).tanh()


class Copied(Mixing):
    """Block that copies its layer in forward, and runs both."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = copy.deepcopy(self.linear)(x).detach() + self.linear(x)
        return output


class Written(Mixing):
    """Block that moves the weights of a frozen layer towards those of a trained one, as a mean teacher does."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
        return (self.linear(x) * self.teacher(x)).sin()


def _each(make: Callable[[str], nn.Module], *names: str) -> dict[str, Kind]:
    return {name: Kind(functools.partial(make, name)) for name in names}


FORWARDS: Final[dict[str, Kind]] = {
    "neurons": Kind(Neurons, (0,)),
    "membranes": Kind(Membranes, (1,), hands_on=True),
    "remembering": Kind(Remembering),
    "memory in place": Kind(InPlaceMemory),
    "counting": Kind(Counting),
    "generator of PyTorch's": Kind(lambda: Drawing(torch.Generator(torch.get_default_device()).manual_seed(1))),
    "generator of NumPy's": Kind(lambda: Drawing(np.random.default_rng(3))),
    "generator of Python's": Kind(lambda: Drawing(random.Random(1))),
    "iterator": Kind(lambda: Drawing(itertools.count(1))),
    **_each(Drawing, "NumPy", "Python", "permutation", "noise", "gumbel"),
    **_each(RunningBuffer, "buffer assigned", "buffer copied", "buffer through data"),
    **_each(TakingApart, "tuple", "mapping", "named tuple", "twice the same", "input beside", "parameter", "object"),
    **_each(InPlace, "arithmetic", "slice", "view of result", "mask", "index", "input", "detached"),
    **_each(Differentiated, "map", "gradient", "product", "pullback"),
    **_each(Operators, *OPERATORS),
    "mixture": Kind(Mixture),
    "cache": Kind(lambda: Caching(new_box)),
    "cache of a dictionary": Kind(lambda: Caching(new_cache)),
    "cache and a list of all steps": Kind(lambda: Caching(new_box, kept=True)),
    "routed": Kind(Routed),
    "summed over time": Kind(lambda: Summed(1)),
    "summed over features": Kind(lambda: Summed(2)),
    "over": Kind(Over),
    "recursive": Kind(Recursive),
    "force": Kind(Force),
    "gradient hook": Kind(GradientHook),
    "leaf": Kind(Leaf),
    "split": Kind(Split),
    "scripted": Kind(Scripted),
    "sparse": Kind(Sparse),
    "weights": Kind(Weights, (0, 1)),
    "reweighted": Kind(Reweighted),
    "parameter made": Kind(MakingParameters),
    "copied": Kind(Copied),
    "written": Kind(Written),
    "residual": Kind(Residual, (0, 1), holds=True),
    "twice": Kind(Twice, (0, 1), holds=True, repeats=True),
    "concatenated": Kind(Concatenated, (0, 1), holds=True),
    "shared": Kind(Shared, holds=True),
    "tied": Kind(Tied, (0, 1), holds=True),
    "checkpointed": Kind(Checkpointed, (0, 1), holds=True),
    "checkpointed, reentrant": Kind(lambda inner: Checkpointed(inner, reentrant=True), holds=True),
    "autocast": Kind(Precision, holds=True),
    "teacher": Kind(Teacher, holds=True),
    "trying": Kind(Trying, holds=True),
    "evaluating": Kind(Evaluating, holds=True),
    "threaded": Kind(Threaded, holds=True),
    "called": Kind(Called, holds=True),
    "mapped": Kind(Mapped, holds=True),
    "saved on the CPU": Kind(lambda inner: Saving(inner, on_cpu=True), holds=True),
    "saved by hooks": Kind(lambda inner: Saving(inner, on_cpu=False), holds=True),
    "hook before": Kind(lambda inner: Hooked(inner, "before"), holds=True),
    "hook after": Kind(lambda inner: Hooked(inner, "after"), holds=True),
    "hook on gradients": Kind(lambda inner: Hooked(inner, "backward"), holds=True),
    "hook on cotangents": Kind(lambda inner: Hooked(inner, "backward pre"), holds=True),
}
"""Name of a block -> its kind."""
