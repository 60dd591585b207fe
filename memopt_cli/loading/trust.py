"""Which globals a pickle may use, and why not.

A verdict imports a module only if its name is on a list below or the user vouched for it: importing is running code.
Creating and filling an object of an allowed class is allowed; *calling* a class of a library is not, since its
constructor may do anything with its arguments (a saved module never needs that).
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import _weights_only_unpickler, nn

from memopt_cli.errors import UnsafeFileError, first_line
from memopt_cli.loading.pickle_scan import COMPUTED, Global
from memopt_cli.loading.user_code import UserCode
from memopt_cli.records import Trust

LIBRARIES = (
    "torch.nn",
    "torchvision",
    "timm",
    "transformers",
    "snntorch",
    "spikingjelly",
    "norse",
    "memopt_cli.online",
    "memopt_cli.model_batching.module",
)
"""Packages whose ``nn.Module`` classes may be built without asking."""

RUNTIME = "memopt_cli.runtime"
RESTORE_SEGMENT = Global(f"{RUNTIME}.container", "restore_segment")
RESTORE_LIFTED = Global(f"{RUNTIME}.lifted.module", "restore_lifted")

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

_SURROGATES = "snntorch.surrogate"
_KEPT_METHODS = ("_base_sub", "_base_zero", "_base_int", "_surrogate_bypass")
"""Methods that snnTorch's neurons keep as attributes."""
_FUNCTION_MODULES = ("torch.nn.functional", "torch._C._nn")
_GETATTR = Global("builtins", "getattr")
_TENSOR_FUNCTION_OWNER = Global("torch._C", "_VariableFunctionsClass")

_CONTAINERS = {
    "builtins": ("set", "frozenset", "list", "dict", "tuple", "int", "float", "bool", "str", "bytes", "slice", "range"),
    "collections": ("OrderedDict", "Counter", "defaultdict", "deque"),
    "functools": ("partial",),
}

_NEVER_CALLED = ("int", "float", "bool", "str")
"""Plain types that a saved module refers to and does not call: ``str(x)`` runs code of ``x``."""

_TOO_WIDE = frozenset({*sys.stdlib_module_names, "torch", "memopt_cli"})
"""Packages that cannot be vouched for as a whole, since some of their functions run what they are given."""

_RUN_CODE = frozenset(
    "runpy subprocess importlib shutil pty code codeop timeit cProfile profile pdb bdb trace doctest ctypes _ctypes "
    "multiprocessing socket pickle _pickle marshal types webbrowser asyncio torch.hub torch.utils.cpp_extension".split()
)
"""Modules, and packages, that no error suggests to allow: that is for people who know it by name."""

_NEVER_BY_NAME = ("os", "posix", "nt", "sys")
"""Modules that PyTorch's restricted unpickler refuses whatever it is told."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The object that the name stands for; ``native``: the restricted unpickler knows it by itself."""

    value: Any
    native: bool = False


@dataclass(frozen=True, slots=True)
class Denied:
    """Not allowed, for this reason."""

    reason: str
    remedy: Trust | None = None
    """The trust that would allow it; ``None`` if nothing should be suggested."""


@dataclass(frozen=True, slots=True)
class Missing:
    """It cannot be imported, for this reason."""

    reason: str


Verdict = Allowed | Denied | Missing

_NEEDS_SCRIPT = Denied("was defined in the script that saved the file", Trust(code_paths=("SCRIPT.py",)))


class Unvouched(UnsafeFileError):
    """A file that wants globals which nobody vouched for; ``remedy`` is the trust that would allow it, if any."""

    def __init__(self, message: str, *, hint: str, remedy: Trust) -> None:
        super().__init__(message, hint=hint)
        self.remedy = remedy


def as_flags(trust: Trust) -> str:
    """``--allow-package mymodels --code-path train.py``."""
    flags = {"--allow-package": trust.packages, "--allow-global": trust.globals, "--code-path": trust.code_paths}
    return " ".join(f"{flag} {value}" for flag, values in flags.items() for value in values)


def as_python(trust: Trust) -> str:
    """``Trust(packages=('mymodels',), code_paths=('train.py',))``."""
    given = {f.name: getattr(trust, f.name) for f in fields(trust) if getattr(trust, f.name) != f.default}
    return f"Trust({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def together(trusts: Iterable[Trust]) -> Trust:
    """What any of them vouches for."""
    all_of = tuple(trusts)
    return Trust(
        libraries=tuple(dict.fromkeys(name for trust in all_of for name in trust.libraries)),
        packages=tuple(dict.fromkeys(name for trust in all_of for name in trust.packages)),
        globals=tuple(dict.fromkeys(name for trust in all_of for name in trust.globals)),
        code_paths=tuple(dict.fromkeys(path for trust in all_of for path in trust.code_paths)),
        pickle=any(trust.pickle for trust in all_of),
    )


def verdict(wanted: Global, *, called: bool, trust: Trust, code: UserCode) -> Verdict:
    """Whether ``wanted`` may be used; ``called`` says that the pickle calls it."""
    if str(wanted) in _weights_only_unpickler._get_allowed_globals():
        return Allowed(None, native=True)
    if is_attack(wanted):
        computed = "computes what it calls while it is read, so it cannot be checked"
        return Denied(computed if wanted == COMPUTED else "reaches the operating system")
    if str(wanted) in trust.globals or (wanted.package in trust.packages and wanted.package not in _TOO_WIDE):
        return _vouched(wanted, trust, code, called=called)
    if code.defines(wanted.module):
        return _user_class(wanted, code, called=called)
    if wanted.module == "__main__":
        return _NEEDS_SCRIPT
    if _is_plain(wanted):
        return _plain(wanted, called=called)
    if _within(wanted.module, RUNTIME):
        return _runtime(wanted, called=called)
    libraries = (*LIBRARIES, *(name for name in trust.libraries if name not in _TOO_WIDE))
    if any(_within(wanted.module, name) for name in libraries) and "__main__" not in wanted.module:
        return _library_class(wanted, libraries, called=called)
    return _unknown(wanted, called=called)


def is_attack(wanted: Global) -> bool:
    """No model needs it, and no trust in it but ``Trust(pickle=True)`` helps."""
    return wanted == COMPUTED or wanted.module in _NEVER_BY_NAME


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _by_name(wanted: Global) -> Trust:
    return Trust(globals=(str(wanted),))


def _unknown(wanted: Global, *, called: bool) -> Denied | Missing:
    if wanted.package in _RUN_CODE or wanted.module in _RUN_CODE or _is_builtin_function(wanted):
        return Denied("runs code, or reaches out of this process")
    if wanted.package in _TOO_WIDE:
        return Denied("is not on memopt's list", _by_name(wanted))
    if not _installed(wanted.package):
        return Missing(f"no package {wanted.package} is installed")
    remedy = _by_name(wanted) if called else Trust(packages=(wanted.package,))
    return Denied("comes from a package that memopt does not know", remedy)


def _is_builtin_function(wanted: Global) -> bool:
    return wanted.module == "builtins" and not isinstance(getattr(builtins, wanted.name, None), type)


def _vouched(wanted: Global, trust: Trust, code: UserCode, *, called: bool) -> Verdict:
    """A package vouches for its classes, and for functions that the file does not itself call."""
    found = Allowed(code.find(wanted)) if code.defines(wanted.module) else _resolve(wanted)
    if isinstance(found, Missing):
        return _NEEDS_SCRIPT if wanted.module == "__main__" else found
    if str(wanted) in trust.globals:
        return found
    home = str(getattr(found.value, "__module__", "")).partition(".")[0]
    if home not in trust.packages:
        return Denied(f"is not defined in {wanted.package} but in {home or 'no package'}", _by_name(wanted))
    if called and not isinstance(found.value, type):
        return Denied("is a function that is called with arguments from the file", _by_name(wanted))
    return found


def _user_class(wanted: Global, code: UserCode, *, called: bool) -> Verdict:
    value = code.find(wanted)
    if called or not (isinstance(value, type) and issubclass(value, nn.Module)):
        return Denied(_why_not(value, called=called), _by_name(wanted))
    return Allowed(value)


def _library_class(wanted: Global, libraries: Sequence[str], *, called: bool) -> Verdict:
    found = _resolve(wanted)
    if isinstance(found, Missing):
        return found
    value = found.value
    if called or not isinstance(value, type) or not _is_part_of_a_model(value):
        return Denied(_why_not(value, called=called), _by_name(wanted))
    if not any(_within(value.__module__, name) for name in libraries):
        return Denied(f"is not defined in {wanted.package} but in {value.__module__}", _by_name(wanted))
    return found


def _runtime(wanted: Global, *, called: bool) -> Verdict:
    found = _resolve(wanted)
    if isinstance(found, Missing) or wanted in (RESTORE_SEGMENT, RESTORE_LIFTED):
        return found
    ours = isinstance(found.value, type) and _within(found.value.__module__, RUNTIME)
    return found if ours and not called else Denied("is no part of the format of memopt's files")


def _is_part_of_a_model(value: type) -> bool:
    """A module, its configuration, or a surrogate gradient."""
    if issubclass(value, torch.autograd.Function):
        return _within(value.__module__, _SURROGATES)
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
        return Allowed(_attribute)
    if called and (_is_tensor_function(wanted) or wanted == _TENSOR_FUNCTION_OWNER or wanted.name in _NEVER_CALLED):
        return Denied("is called with arguments from the file", _by_name(wanted))
    return _resolve(wanted)


def _attribute(owner: Any, name: str) -> Any:
    """What ``getattr`` may do in a model file.

    ``torch.relu`` is pickled as an attribute of an internal class, snnTorch's surrogate gradients as the ``apply`` of
    theirs, and the methods that its neurons keep as attributes as those of the neuron.  What is reached may be called
    while the file is read, by a ``__setstate__`` that the file itself puts on an object: so only what computes.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    home = kind.__module__.partition(".")[0]
    if f"{kind.__module__}.{kind.__name__}" == str(_TENSOR_FUNCTION_OWNER) and name in _TENSOR_FUNCTIONS:
        return getattr(owner, name)
    if kind is owner and issubclass(kind, torch.autograd.Function) and _within(kind.__module__, _SURROGATES):
        if name == "apply":
            return kind.apply
    elif kind is not owner and home == "snntorch" and name in _KEPT_METHODS:
        method = inspect.getattr_static(kind, name, None)
        if isinstance(method, types.FunctionType) and method.__module__.partition(".")[0] == "snntorch":
            return types.MethodType(method, owner)
    raise AttributeError(f"the file asks for the attribute {name!r} of {kind.__name__}")


def _resolve(wanted: Global) -> Allowed | Missing:
    try:
        module = importlib.import_module(wanted.module)
        return Allowed(functools.reduce(getattr, wanted.name.split("."), module))
    except Exception as err:  # importing runs the package's code, which may raise anything
        return Missing(first_line(err))


def _installed(package: str) -> bool:
    """Or in the current folder, which a model is loaded with: no folder has to be importable to be looked into."""
    try:
        found = package in sys.modules or importlib.util.find_spec(package)
        return bool(found or importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd())]))
    except (ImportError, ValueError):
        return False
