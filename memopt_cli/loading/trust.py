"""Which globals a pickle may use, and why not.

A verdict imports a module only if its name is on a list below or the user vouched for it: importing is running code.
Creating and filling an object of an allowed class is allowed; *calling* a class of a library is not, since its
constructor may do anything with its arguments (a saved module never needs that).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from torch import _weights_only_unpickler, nn

from memopt_cli.loading.pickle_scan import COMPUTED, Global
from memopt_cli.loading.user_code import UserCode
from memopt_cli.records import Trust

LIBRARIES = ("torch.nn", "torchvision", "timm", "transformers", "snntorch", "spikingjelly", "norse")
"""Packages whose ``nn.Module`` classes may be built without asking."""

RUNTIME = "memopt_cli.runtime"
RESTORE_SEGMENT = Global(f"{RUNTIME}.container", "restore_segment")

CONFIGURATIONS = frozenset(
    {
        "transformers.configuration_utils.PretrainedConfig",
        "transformers.configuration_utils.PreTrainedConfig",
        "transformers.generation.configuration_utils.GenerationConfig",
    }
)
"""Base classes of plain settings that libraries attach to their models."""

_TENSOR_FUNCTIONS = (
    "celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid log_softmax logsigmoid mish "
    "normalize prelu relu relu6 rrelu selu sigmoid silu softmax softmin softplus softshrink softsign tanh tanhshrink "
    "threshold dropout max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d layer_norm interpolate "
    "cross_entropy mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits nll_loss "
    "scaled_dot_product_attention sin cos exp square sqrt abs clamp add mul matmul cat stack"
).split()
"""Pure tensor functions that modules keep as attributes."""

_FUNCTION_MODULES = ("torch.nn.functional", "torch._C._nn")
_GETATTR = Global("builtins", "getattr")
_TENSOR_FUNCTION_OWNER = Global("torch._C", "_VariableFunctionsClass")

_CONTAINERS = {
    "builtins": ("set", "frozenset", "list", "dict", "tuple", "int", "float", "bool", "str", "bytes", "slice", "range"),
    "collections": ("OrderedDict", "Counter", "defaultdict", "deque"),
    "functools": ("partial",),
}

_NEVER_BY_NAME = ("os", "posix", "nt", "sys")
"""Modules that PyTorch's restricted unpickler refuses whatever it is told."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The object that the name stands for; ``native``: the restricted unpickler knows it by itself."""

    value: Any
    native: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """Not allowed, for this reason."""

    reason: str
    flag: str = ""
    """What to add to the command line to allow it; empty if nothing should be suggested."""


@dataclass(frozen=True, slots=True)
class Missing:
    """It cannot be imported, for this reason."""

    reason: str


Verdict = Allowed | Refused | Missing


def verdict(wanted: Global, *, called: bool, trust: Trust, code: UserCode) -> Verdict:
    """Whether ``wanted`` may be used; ``called`` says that the pickle calls it."""
    if str(wanted) in _weights_only_unpickler._get_allowed_globals():
        return Allowed(None, native=True)
    if wanted == COMPUTED:
        return Refused("computes what it calls while it is read, so it cannot be checked")
    if wanted.module in _NEVER_BY_NAME:
        return Refused("reaches the operating system")
    if str(wanted) in trust.globals or wanted.package in trust.packages:
        return _vouched(wanted, trust, code)
    if code.defines(wanted.module):
        return _user_class(wanted, code, called=called)
    if wanted.module == "__main__":
        return Refused("was defined in the script that saved the file", "--code-path SCRIPT.py")
    if _is_plain(wanted):
        return _plain(wanted, called=called)
    if _within(wanted.module, RUNTIME):
        return _runtime(wanted, called=called)
    library = next((name for name in LIBRARIES if _within(wanted.module, name)), None)
    if library and "__main__" not in wanted.module:
        return _library_class(wanted, library, called=called)
    return _unknown(wanted)


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _unknown(wanted: Global) -> Refused | Missing:
    if wanted.package in (*sys.stdlib_module_names, "torch", "memopt_cli"):
        return Refused("is not on memopt's list", f"--allow-global {wanted}")
    if not _installed(wanted.package):
        return Missing(f"no package {wanted.package} is installed")
    return Refused("comes from a package that memopt does not know", f"--allow-package {wanted.package}")


def _vouched(wanted: Global, trust: Trust, code: UserCode) -> Verdict:
    found = Allowed(code.find(wanted)) if code.defines(wanted.module) else _resolve(wanted)
    if isinstance(found, Missing) or str(wanted) in trust.globals:
        return found
    home = str(getattr(found.value, "__module__", "")).partition(".")[0]
    if home in trust.packages:
        return found
    return Refused(f"is not defined in {wanted.package} but in {home or 'no package'}", f"--allow-global {wanted}")


def _user_class(wanted: Global, code: UserCode, *, called: bool) -> Verdict:
    value = code.find(wanted)
    if called or not (isinstance(value, type) and issubclass(value, nn.Module)):
        return Refused(_why_not(value, called=called), f"--allow-global {wanted}")
    return Allowed(value)


def _library_class(wanted: Global, library: str, *, called: bool) -> Verdict:
    found = _resolve(wanted)
    if isinstance(found, Missing):
        return found
    value = found.value
    if called or not isinstance(value, type) or not _is_module_or_configuration(value):
        return Refused(_why_not(value, called=called), f"--allow-global {wanted}")
    if not any(_within(value.__module__, name) for name in LIBRARIES):
        return Refused(f"is not defined in {library} but in {value.__module__}", f"--allow-global {wanted}")
    return found


def _runtime(wanted: Global, *, called: bool) -> Verdict:
    found = _resolve(wanted)
    if isinstance(found, Missing) or wanted == RESTORE_SEGMENT:
        return found
    ours = isinstance(found.value, type) and _within(found.value.__module__, RUNTIME)
    return found if ours and not called else Refused("is no part of the format of memopt's files")


def _is_module_or_configuration(value: type) -> bool:
    bases = {f"{base.__module__}.{base.__qualname__}" for base in value.__mro__}
    return issubclass(value, nn.Module) or bool(bases & CONFIGURATIONS)


def _why_not(value: Any, *, called: bool) -> str:
    if not isinstance(value, type):
        return "is a function"
    return "is called with arguments from the file" if called else "is no nn.Module class"


def _is_plain(wanted: Global) -> bool:
    if wanted in (_GETATTR, _TENSOR_FUNCTION_OWNER):
        return True
    return _is_tensor_function(wanted) or wanted.name in _CONTAINERS.get(wanted.module, ())


def _is_tensor_function(wanted: Global) -> bool:
    return wanted.module in _FUNCTION_MODULES and wanted.name in _TENSOR_FUNCTIONS


def _plain(wanted: Global, *, called: bool) -> Verdict:
    if wanted == _GETATTR:
        return Allowed(_tensor_function)
    if called and (_is_tensor_function(wanted) or wanted == _TENSOR_FUNCTION_OWNER):
        return Refused("is called with arguments from the file", f"--allow-global {wanted}")
    return _resolve(wanted)


def _tensor_function(owner: Any, name: str) -> Any:
    """What ``getattr`` may do in a model file: ``torch.relu`` is pickled as an attribute of an internal class."""
    if f"{owner.__module__}.{owner.__name__}" != str(_TENSOR_FUNCTION_OWNER) or name not in _TENSOR_FUNCTIONS:
        raise AttributeError(f"the file asks for the attribute {name!r} of {owner!r}")
    return getattr(owner, name)


def _resolve(wanted: Global) -> Allowed | Missing:
    try:
        module = importlib.import_module(wanted.module)
        return Allowed(functools.reduce(getattr, wanted.name.split("."), module))
    except Exception as err:  # importing runs the package's code, which may raise anything
        return Missing(f"{type(err).__name__}: {err}")


def _installed(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
