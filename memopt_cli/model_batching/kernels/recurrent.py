"""Recurrent layers: one batched product a time step for all models, instead of a whole recurrence per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.model_batching.kernels.linear import Kernels, linear, product_with

State = tuple[Tensor, ...]
"""Hidden state of one direction of a layer: h, and c for an LSTM; each (models, images, size)."""
Advance = Callable[[Tensor, State], State]
"""Function of the projected input of a time step, (models, images, gates), and the old state; returns the new state."""


def _lstm_step(w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None = None) -> Advance:
    def advance(projected: Tensor, state: State) -> State:
        h, c = state
        size = c.shape[-1]
        both, new, out = torch.split(torch.baddbmm(projected, h, w_hh.mT), [2 * size, size, size], dim=-1)
        inward, forget = both.sigmoid().chunk(2, dim=-1)
        c = torch.addcmul(forget * c, inward, new.tanh())
        h = out.sigmoid() * c.tanh()
        return (h if w_hr is None else torch.bmm(h, w_hr.mT)), c

    return advance


def _gru_step(w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None = None) -> Advance:
    def advance(projected: Tensor, state: State) -> State:
        (h,) = state
        sizes = [2 * h.shape[-1], h.shape[-1]]
        both_in, new_in = torch.split(projected, sizes, dim=-1)
        both_of_h, new_of_h = torch.split(product_with(h, w_hh, b_hh), sizes, dim=-1)
        reset, update = (both_in + both_of_h).sigmoid().chunk(2, dim=-1)
        new = torch.addcmul(new_in, reset, new_of_h).tanh()
        return (torch.lerp(new, h, update),)

    return advance


def _plain_step(nonlinearity: str) -> Callable[..., Advance]:
    squash = torch.tanh if nonlinearity == "tanh" else torch.relu

    def make(w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None = None) -> Advance:
        return lambda projected, state: (squash(torch.baddbmm(projected, state[0], w_hh.mT)),)

    return make


def _choose_step(module: Any) -> Callable[..., Advance]:
    match module:
        case nn.LSTM() | nn.LSTMCell():
            return _lstm_step
        case nn.GRU() | nn.GRUCell():
            return _gru_step
        case _:
            return _plain_step(module.nonlinearity)


def _input_bias(module: Any, b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor | None:
    """Return the bias of all time steps: ``b_ih`` plus ``b_hh``, or only ``b_ih`` for a GRU, which gates ``b_hh``."""
    if b_ih is None or b_hh is None or isinstance(module, nn.GRU | nn.GRUCell):
        return b_ih
    return b_ih + b_hh


def _recurrent(module: Any, x: Tensor, hx: Any = None) -> Any:
    """Run ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM`` on ``x``: (models, time, images, in), images first, or no images."""
    if x.dim() == 3:
        state = None if hx is None else _map_state(lambda t: t.unsqueeze(-2), hx)
        output, last = _recurrent(module, x.unsqueeze(1 if module.batch_first else 2), state)
        return output.squeeze(1 if module.batch_first else 2), _map_state(lambda t: t.squeeze(-2), last)
    x = x.transpose(1, 2) if module.batch_first else x
    states = _starting_states(module, x, hx)
    ends: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(1 + module.bidirectional):
            output, end = _run_layer(module, layer, direction, x, states[len(ends)])
            outputs.append(output)
            ends.append(end)
        x = torch.cat(outputs, dim=-1) if module.bidirectional else outputs[0]
        if module.dropout and layer < module.num_layers - 1:
            x = F.dropout(x, module.dropout, module.training)
    last = tuple(torch.stack(parts, dim=1) for parts in zip(*ends, strict=True))
    return (x.transpose(1, 2) if module.batch_first else x), last if isinstance(module, nn.LSTM) else last[0]


def _run_layer(module: Any, layer: int, direction: int, x: Tensor, state: State) -> tuple[Tensor, State]:
    suffix = f"_l{layer}_reverse" if direction else f"_l{layer}"
    w_ih, w_hh = getattr(module, f"weight_ih{suffix}"), getattr(module, f"weight_hh{suffix}")
    b_ih, b_hh, w_hr = (getattr(module, f"{name}{suffix}", None) for name in ("bias_ih", "bias_hh", "weight_hr"))
    advance = _choose_step(module)(w_hh, b_hh, w_hr)
    projected: Sequence[Tensor] = linear(x, w_ih, _input_bias(module, b_ih, b_hh)).unbind(1)
    state = tuple(t.to(projected[0].dtype) for t in state)  # under autocast, the product may be in float16
    outputs = []
    for step in reversed(projected) if direction else projected:
        state = advance(step, state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if direction else outputs, dim=1), state


def _starting_states(module: Any, x: Tensor, hx: Any) -> list[State]:
    """Return a state per layer and direction, zero or from ``hx``: (models, layers·directions, images, size)."""
    count = module.num_layers * (1 + module.bidirectional)
    models, _, images, _ = x.shape
    if hx is None:
        h = x.new_zeros(models, images, module.proj_size or module.hidden_size)
        c = x.new_zeros(models, images, module.hidden_size)
        return [(h, c) if isinstance(module, nn.LSTM) else (h,)] * count
    parts = hx if isinstance(module, nn.LSTM) else (hx,)
    return list(zip(*(part.unbind(1) for part in parts), strict=True))


def _map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    return tuple(map(function, state)) if isinstance(state, tuple) else function(state)


def _cell(module: Any, x: Tensor, hx: Any = None) -> Any:
    """Run ``nn.RNNCell``, ``nn.GRUCell`` or ``nn.LSTMCell`` on ``x``: (models, images, in), or without images."""
    if x.dim() == 2:
        state = None if hx is None else _map_state(lambda t: t.unsqueeze(1), hx)
        return _map_state(lambda t: t.squeeze(1), _cell(module, x.unsqueeze(1), state))
    zero = x.new_zeros(*x.shape[:2], module.hidden_size)
    is_lstm = isinstance(module, nn.LSTMCell)
    start: Any = hx
    if hx is None:
        start = (zero, zero) if is_lstm else zero
    projected = linear(x, module.weight_ih, _input_bias(module, module.bias_ih, module.bias_hh))
    states = tuple(t.to(projected.dtype) for t in (start if is_lstm else (start,)))
    after = _choose_step(module)(module.weight_hh, module.bias_hh)(projected, states)
    return after if is_lstm else after[0]


KERNELS: Kernels = {
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), _recurrent),
    **dict.fromkeys((nn.RNNCell, nn.GRUCell, nn.LSTMCell), _cell),
}
