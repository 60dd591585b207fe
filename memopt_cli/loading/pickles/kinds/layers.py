"""Layers whose kernels trust that weights have the sizes that their settings say: PyTorch looks at few of them."""

from __future__ import annotations

import inspect
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from memopt_cli.loading.pickles.kinds.interface import Broken, plain_entries, quoted
from memopt_cli.loading.pickles.nodes import Built, entries_of
from memopt_cli.runtime.lifted.argument_checks import fits_weight_norm
from memopt_cli.runtime.private_torch import ParametrizedWeightNorm, WrappedHook, names_of_weights, weights_in_use

HOOKS: Final = (
    *("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""The dicts in which a module has its hooks."""


def check_layers_asked(kind: type, node: Built) -> str:
    """Why the state of a recurrent layer would take its code forever: it counts layers by a number in it."""
    if not issubclass(kind, nn.RNNBase):
        return ""
    entries = dict(plain_entries(node.state) or ())
    layers, parameters = entries.get("num_layers"), entries_of(entries.get("_parameters"))
    known = type(layers) is int and 0 < layers <= len(parameters)
    return "" if known else f"has {quoted(layers)} layers and {len(parameters)} parameters"


def check_weights(module: nn.Module) -> None:
    """Raises :class:`Broken` for a recurrent layer, or a weight norm, whose weights do not fit."""
    if isinstance(module, nn.RNNBase):
        _check_recurrent(module)
    if isinstance(module, nn.MultiheadAttention):
        _check_heads(module)
    for register in HOOKS:
        for hook in vars(module).get(register, {}).values():
            _check_hook(module, hook)
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        for norm in module:
            if isinstance(norm, ParametrizedWeightNorm):
                _check_norm(getattr(module, "original1", None), getattr(module, "original0", None), norm.dim, module)


def _check_hook(module: nn.Module, hook: Any) -> None:
    """What a hook of PyTorch's puts a tensor in the place of must be one, and no setting of the layer."""
    inner = hook
    while isinstance(inner, WrappedHook):
        inner = vars(inner).get("hook")
    if not isinstance(inner, _SETTING):
        return
    name = vars(inner).get("_tensor_name" if isinstance(inner, BasePruningMethod) else "name")
    if inner is not hook or not isinstance(name, str):
        raise Broken(f"a hook of {type(module).__name__} sets what nobody can tell")
    replaced = vars(module).get(name, inspect.getattr_static(type(module), name, None))
    if not (replaced is None or isinstance(replaced, Tensor)):
        raise Broken(f"a hook of {type(module).__name__} makes a tensor of its {name}")
    if isinstance(inner, WeightNorm):
        _check_norm(getattr(module, f"{name}_v", None), getattr(module, f"{name}_g", None), inner.dim, module)


_SETTING: Final = (WeightNorm, SpectralNorm, BasePruningMethod)
"""Hooks that set an attribute of their module."""
_MODES: Final = {nn.LSTM: ("LSTM",), nn.GRU: ("GRU",), nn.RNN: ("RNN_TANH", "RNN_RELU")}


def _check_heads(module: nn.MultiheadAttention) -> None:
    heads, width = module.num_heads, module.embed_dim
    if type(heads) is not int or type(width) is not int or heads < 1 or width % heads:
        raise Broken(f"{type(module).__name__} has {quoted(heads)} heads of {quoted(width)} features")


def _check_norm(v: Any, g: Any, dim: Any, module: nn.Module) -> None:
    tensors = isinstance(v, nn.Parameter) and isinstance(g, nn.Parameter)
    if not (tensors and type(dim) is int and fits_weight_norm(v, g, dim)):
        raise Broken(f"the weights of a weight norm of {type(module).__name__} do not fit its settings")


def _check_recurrent(module: nn.RNNBase) -> None:
    """As its constructor makes them: weights and biases of each layer and direction, and a projection."""
    numbers = (module.num_layers, module.input_size, module.hidden_size, module.proj_size)
    modes = next((modes for kind, modes in _MODES.items() if isinstance(module, kind)), ())
    if module.mode not in modes or not all(type(number) is int and number >= 0 for number in numbers):
        raise Broken(f"{type(module).__name__} has a mode or sizes that are none")
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    output = module.proj_size or module.hidden_size
    directions = 2 if module.bidirectional else 1
    names, expected = list[str](), dict[str, tuple[int, ...]]()
    for layer in range(module.num_layers):
        for suffix in ("", "_reverse")[:directions]:
            width, rows = module.input_size if layer == 0 else output * directions, gates * module.hidden_size
            shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, width), "weight_hh": (rows, output)}
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if module.bias else {}
            shapes |= {"weight_hr": (output, module.hidden_size)} if module.proj_size else {}
            names += [f"{name}_l{layer}{suffix}" for name in shapes]
            expected |= {f"{name}_l{layer}{suffix}": shape for name, shape in shapes.items()}
    held = {name: getattr(module, name, None) for name in names}
    # Hooks of weight norms and pruning put others in their place, made of these.
    sources = {f"{name}{suffix}": name for name in names for suffix in ("_orig", "_mask", "_v")}
    others = [(getattr(module, source, None), expected[name]) for source, name in sources.items()]
    if any(isinstance(tensor, Tensor) and tuple(tensor.shape) != shape for tensor, shape in others):
        raise Broken(f"the weights of {type(module).__name__} do not fit its settings")
    flat = weights_in_use(module)
    fits = list(names_of_weights(module)) == names and len(flat) == len(names)
    fits = fits and all(tensor is not None and tuple(tensor.shape) == expected[name] for name, tensor in held.items())
    if not (fits and all(used is held[name] for name, used in zip(names, flat, strict=True))):
        raise Broken(f"the weights of {type(module).__name__} do not fit its settings")
