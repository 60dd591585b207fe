"""Recipes for modules of PyTorch and of well-known model libraries, and for objects that these attach to their models.

An object is created without its constructor and given its attributes, which were audited before.  If its class has a
``__setstate__``, the library's code gets these attributes.  What is audited, for a ``torch.nn.Linear`` in the file::

    {"training": True, "in_features": 3, "_parameters": {"weight": …}, "_modules": {}, …}

Attributes that every module has, such as ``_parameters``, have their own check (:data:`REGISTERS`).  Any other is
refused if it has a special name, such as ``__class__``, or would hide a method (:func:`.interface.shadowing`).
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from memopt_cli.loading.pickles.kinds.interface import (
    BrokenError,
    Denied,
    Graph,
    Missing,
    Recipe,
    Role,
    Use,
    by_name,
    is_callable,
    is_inside,
    is_surrogate,
    plain_entries,
    quote,
    resolve,
    set_attributes,
    shadowing,
)
from memopt_cli.loading.pickles.names import MAX_ATTRIBUTE_LENGTH
from memopt_cli.loading.pickles.nodes import LIST, Built, Tuple, entries_of
from memopt_cli.records import Trust
from memopt_cli.runtime.module_state import RUNS_KEY, SEGMENT_KEY
from memopt_cli.runtime.runs import Run

LIBRARIES: Final = (
    "torch.nn",
    "torch.ao",
    "torch.distributions",
    "torch.optim",
    "torchvision",
    "timm",
    "transformers",
    "snntorch",
    "spikingjelly.activation_based",
    "spikingjelly.clock_driven",
    "norse",
    "memopt_cli.online",
    "memopt_cli.model_batching.module",
)
"""Packages whose ``nn.Module`` classes may be built without the user's trust."""

LAYER_PACKAGES: Final = (
    *(
        "torch.nn.modules",
        "timm.layers",
        "torchvision.ops",
        "torchvision.transforms",
        "snntorch",
        *(f"spikingjelly.activation_based.{name}" for name in ("layer", "neuron", "surrogate", "rnn")),
        "norse",
    ),
    "torch.optim",
)
"""Packages whose classes may be held as values: a model may call such a class to make a layer, with arguments from the
file.  Classes of whole models may not: their constructors read files and fetch weights."""

_MODELING: Final = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
_LAYER_BASES: Final = (nn.Module, torch.optim.Optimizer)
_REASONS: Final = {
    "created": "is not an nn.Module class",
    "called": "is called with arguments from the file",
    "held": "is not a layer, but is stored as something to call",
}
_PROGRAMS: Final = (torch.fx.GraphModule, torch.jit.ScriptModule)
_COPYING: Final = frozenset({"__reduce__", "__reduce_ex__", "__deepcopy__", "__copy__"})
"""Methods that run when an object is copied or saved, with content from the file."""
_PLAIN_COPIES: Final = ("builtins", "torch.ao.nn.quantized.modules.conv")
"""Modules in whose classes the :data:`_COPYING` methods only copy attributes."""
_TRAINING: Final = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Base classes of optimizers and schedulers, which some models keep as attributes."""
_KERNELS: Final = ("_use_kernels", "kernel_config")
"""Settings that make a model download code (kernels) from a hub."""


def imported_libraries(names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules in ``names`` that any process may import: model libraries, and their layers and models.

    The names may be made up by a hostile model.  Other modules of a library, such as examples, may run a training when
    they are imported.
    """
    importable = {name for name in (*LIBRARIES, *LAYER_PACKAGES) if not name.startswith(("torch.", "memopt_cli."))}
    return tuple(name for name in names if name in importable or _MODELING.fullmatch(name))


_CONFIGURATIONS: Final = frozenset(
    {
        "transformers.configuration_utils.PretrainedConfig",
        "transformers.configuration_utils.PreTrainedConfig",
        "transformers.generation.configuration_utils.GenerationConfig",
    }
)
"""Base classes of plain settings that libraries attach to their models."""

_HOOKS: Final = {
    "torch.nn.utils.weight_norm": ("WeightNorm",),
    "torch.nn.utils.spectral_norm": ("SpectralNorm", "SpectralNormStateDictHook", "SpectralNormLoadStateDictPreHook"),
    "torch.nn.utils.prune": (
        *("PruningContainer", "Identity", "RandomUnstructured", "L1Unstructured", "RandomStructured"),
        *("LnStructured", "CustomFromMask"),
    ),
    "torch.nn.modules.module": ("_WrappedHook",),
}
"""Module of PyTorch -> its classes of hooks on modules."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """Objects and classes of known libraries."""

    libraries: tuple[str, ...]

    def claims(self, use: Use) -> bool:
        """Return whether one of the libraries has the name of ``use``, outside its programs and examples."""
        is_program = {"__main__", "examples"} & {*use.name.module.split(".")}
        return any(is_inside(use.name.module, library) for library in self.libraries) and not is_program

    def recipe(self, use: Use) -> Recipe | Denied | Missing:
        """Return the recipe for ``use``: a module, hook, enum, named tuple, settings, or a class held as a value."""
        cls = resolve(use.name)
        if isinstance(cls, Denied | Missing):
            return cls
        remedy = by_name(use, cls)
        if not isinstance(cls, type):
            return Denied("is a function", remedy)
        if not any(is_inside(cls.__module__, library) for library in self.libraries):
            return Denied(f"is not defined in {use.name.package} but in {cls.__module__}", remedy)
        recipe = {"created": _recipe_for_object, "called": _recipe_for_call, "held": self._recipe_for_class}[use.how](
            cls
        )
        return recipe or Denied(_REASONS[use.how], remedy)

    def _recipe_for_class(self, cls: type) -> Recipe | None:
        own = (*LAYER_PACKAGES, *(library for library in self.libraries if library not in LIBRARIES))
        is_layer = issubclass(cls, _LAYER_BASES) and any(is_inside(cls.__module__, package) for package in own)
        if is_layer or is_surrogate(cls) or issubclass(cls, enum.Enum):
            return Recipe(make=lambda: cls, role="callable", kind=cls)
        is_named = issubclass(cls, nn.Module) or _is_settings(cls) or _is_named_tuple(cls)
        return Recipe(make=lambda: cls, role="named", kind=cls) if is_named else None


def _recipe_for_object(cls: type) -> Recipe | Denied | None:
    """Return the recipe for an object of ``cls``.

    A refusal if the class is known to be unsafe, ``None`` if memopt does not recognize it.
    """
    bases = [base for base in cls.__mro__ if base.__module__ not in _PLAIN_COPIES]
    if issubclass(cls, _PROGRAMS) or any(not _COPYING.isdisjoint(vars(base)) for base in bases):
        own = cls.__module__.partition(".")[0] == "torch"
        remedy = None if own else Trust(globals=(f"{cls.__module__}.{cls.__qualname__}",))
        return Denied("rebuilds itself from its attributes when it is copied or saved", remedy)
    if issubclass(cls, nn.Module):
        return module_recipe(cls)
    if cls.__name__ in _HOOKS.get(cls.__module__, ()):
        return Recipe(make=_make_without_init(cls), role="hook", kind=cls, fill=fill, check=_check_hook)
    if issubclass(cls, _TRAINING):
        return Recipe(make=_make_without_init(cls), kind=cls, fill=fill, check=_check_training)
    if _is_settings(cls):
        role: Role = "callable" if is_callable(cls) else "data"
        return Recipe(make=_make_without_init(cls), role=role, kind=cls, fill=set_attributes, check=_check_attributes)
    if _is_named_tuple(cls):
        return Recipe(make=lambda *items: _make_named_tuple(cls, items), kind=cls)
    return None


def _recipe_for_call(cls: type) -> Recipe | None:
    """Return the recipe for a call of ``cls`` if it is an enum, whose call returns a member; ``None`` otherwise."""
    return Recipe(make=lambda value: _enum_member(cls, value), kind=cls) if issubclass(cls, enum.Enum) else None


_HELPERS: Final = (
    *("torchvision.models.detection._utils", "torchvision.transforms", "timm.models._features"),
    *("torch.distributions", "transformers.core_model_loading"),
)
"""Modules and packages whose classes hold settings and tensors, and compute with them."""


def _is_settings(cls: type) -> bool:
    if any(is_inside(cls.__module__, package) for package in _HELPERS):
        return True
    bases = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    is_plain = dataclasses.is_dataclass(cls) and not is_callable(cls) and not hasattr(cls, "__setstate__")
    return bool(bases & _CONFIGURATIONS) or is_plain


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and cls.__bases__ == (tuple,)


def _make_named_tuple(cls: Any, items: tuple[Any, ...]) -> Any:
    if len(items) != len(cls._fields):
        raise BrokenError(f"an instance of {cls.__name__} has {len(items)} items")
    return tuple.__new__(cls, items)


def _enum_member(cls: type[enum.Enum], value: Any) -> enum.Enum:
    for member in cls:
        if type(member.value) is type(value) and member.value == value:
            return member
    raise BrokenError(f"{cls.__name__} has no member of this value")


def _make_without_init(cls: type) -> Callable[..., Any]:

    def make(*arguments: Any) -> Any:
        if arguments:
            raise BrokenError(f"an instance of {cls.__name__} is created with arguments")
        return object.__new__(cls)

    return make


def fill(target: Any, state: Any) -> None:
    """Give ``target`` its state; the ``__setstate__`` of its class does so if there is one."""
    takes = getattr(type(target), "__setstate__", None)
    set_attributes(target, state) if takes is None else takes(target, state)


def _check_attributes(node: Built, graph: Graph) -> str:
    if not node.has_state:
        return ""
    entries, kind = plain_entries(node.state), graph.class_of(node)
    assert kind is not None
    if entries is None:
        return "has a state of an unexpected type"
    # A dict of the class is a rule for all its settings, such as ``attribute_map``, which renames them.
    refused_names = [
        name for name, _ in entries if name in _KERNELS or isinstance(getattr(kind, str(name), None), dict)
    ]
    return f"has {refused_names[0]} among its attributes" if refused_names else shadowing(kind, entries, graph)


def _check_training(node: Built, graph: Graph) -> str:
    """Return the reason why an optimizer or scheduler must not get its state.

    An optimizer walks through its parameter groups when it gets its state, so these must be plain lists.
    """
    groups = dict(plain_entries(node.state) or ()).get("param_groups")
    group_list = [] if groups is None else _items_of(groups)
    are_lists = group_list is not None and all(
        _items_of(dict(entries_of(group)).get("params")) is not None for group in group_list
    )
    return _check_attributes(node, graph) if are_lists else "has groups of parameters that are not lists"


def _items_of(value: Any) -> list[Any] | None:
    """Return the items of ``value``, or ``None`` if it is not a plain list."""
    is_list = isinstance(value, Built) and value.how == "plain" and value.name == LIST
    return value.items if is_list else None


def _check_hook(node: Built, graph: Graph) -> str:
    roles = {name: graph.role_of(value) for name, value in plain_entries(node.state) or ()}
    wrong = [name for name, role in roles.items() if role == "callable" or (role == "module" and name != "module")]
    return f"calls its {wrong[0]}, which is not a hook" if wrong else _check_attributes(node, graph)


def module_recipe(cls: type[nn.Module]) -> Recipe:
    """Return the recipe for a module of the class ``cls``, which is created empty and given audited attributes."""
    return Recipe(make=_make_without_init(cls), role="module", kind=cls, fill=fill, check=check_module)


def check_module(node: Built, graph: Graph) -> str:
    """Return the reason why the module ``node`` must not be made from its state."""
    kind = graph.class_of(node)
    assert kind is not None
    if not node.has_state:
        return "has no state"
    entries = plain_entries(node.state)
    if entries is None:
        return "has a state of an unexpected type"
    return _check_layers(kind, entries) or check_attributes(kind, entries, graph)


def _check_layers(cls: type, entries: list[tuple[Any, Any]]) -> str:
    """Return the reason why a recurrent layer must not have this ``num_layers``.

    The layer loops over that number, so it must not exceed the number of its parameters.
    """
    if not issubclass(cls, nn.RNNBase):
        return ""
    state = dict(entries)
    layers = state.get("num_layers")
    parameters = entries_of(state.get("_parameters"))
    is_plausible = type(layers) is int and 0 < layers <= len(parameters)
    return "" if is_plausible else f"has {quote(layers)} layers and {len(parameters)} parameters"


def check_attributes(cls: type, entries: list[tuple[Any, Any]], graph: Graph) -> str:
    """Return the reason why a module of ``cls`` must not have the attributes ``entries``."""
    for name, value in entries:
        register = REGISTERS.get(name) if isinstance(name, str) else None
        reason = register(name, value, graph) if register else shadowing(cls, [(name, value)], graph)
        if reason:
            return reason
    return ""


Check = Callable[[str, Any, Graph], str]
"""Function ``check(name, value, graph)`` that returns why a module must not have this attribute."""


def _check_register(what: str, holds: Callable[[Any, Any, Graph], bool]) -> Check:
    """Return a check of a dict in which a module keeps its parts, such as ``_modules``; ``holds`` checks each entry.

    ``what``: the kind of part, for the reason.
    """

    def check(name: str, value: Any, graph: Graph) -> str:
        is_dict = isinstance(value, Built) and str(value.callee) in ("builtins.dict", "collections.OrderedDict")
        if not is_dict or value.items or value.argument_items():
            return f"has {name} that are none"
        pairs = value.entries
        longest = max((len(key) for key, _ in pairs if isinstance(key, str)), default=0)
        if longest > MAX_ATTRIBUTE_LENGTH:
            return f"has {what} with a name of {longest} characters"
        misnamed = next((key for key, _ in pairs if isinstance(key, str) and not _is_name(key)), None)
        if misnamed is not None:
            return f"has {what} named {quote(misnamed)}, which would become code where code is made from it"
        wrong = [key for key, item in pairs if not holds(key, item, graph)]
        return f"has {what} {quote(wrong[0])} that is not one" if wrong else ""

    return check


def _is_name(key: Any) -> bool:
    """Return whether ``key`` is a plain name: PyTorch and memopt generate code with such names in it."""
    return isinstance(key, str) and key.isprintable() and key != "" and not {*".\"'\\`${}"} & {*key}


def _is_tensor(value: Any) -> bool:
    """Return whether ``value`` is made by a function of tensors; :func:`check_made` checks the object itself later."""
    names = ("torch._utils._rebuild_", "torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Uninitialized")
    return isinstance(value, Built) and value.how == "called" and str(value.callee).startswith(names)


def _holds_tensor(key: Any, item: Any, graph: Graph) -> bool:
    kind = graph.class_of(item)
    is_trusted = kind is not None and graph.trusts(kind)
    return _is_name(key) and (item is None or _is_tensor(item) or is_trusted)


def _check_only(*allowed: Any, reason: str) -> Check:
    """Return a check that refuses all values but those ``allowed``, for a ``reason``."""
    return lambda name, value, _: "" if any(value is choice for choice in allowed) else f"has {name}, which {reason}"


def _check_names(name: str, value: Any, graph: Graph) -> str:
    given = value.argument_items() if isinstance(value, Built) else ()
    parts = [part for part in (value, *given) if isinstance(part, Built | Tuple)]
    are_names = all(_is_name(item) for part in parts for item in part.items)
    are_seen = not any(isinstance(part, Built) and part.argument_items() for part in given)
    return "" if are_names and are_seen else f"has {name} that are none"


def _check_flag(name: str, value: Any, graph: Graph) -> str:
    return "" if value is None or isinstance(value, bool) else f"has {name} that is neither true nor false"


REGISTERS: Final[Mapping[str, Check]] = {
    **dict.fromkeys(("_parameters", "_buffers"), _check_register("a tensor", _holds_tensor)),
    "_modules": _check_register(
        "a module",
        lambda key, item, graph: _is_name(key) and (item is None or graph.role_of(item) in ("module", "trusted")),
    ),
    "_non_persistent_buffers_set": _check_names,
    "training": _check_flag,
    RUNS_KEY: _check_register("a run", lambda key, item, graph: _is_name(key) and graph.class_of(item) is Run),
    SEGMENT_KEY: lambda *_: "has a segment's settings among its attributes, which only memopt's own segments have",
    "_compiled_call_impl": _check_only(None, reason="would be called in its place"),
    # Modules of transformers with these settings fetch kernels as soon as ``train()`` or ``eval()`` is called.  Each
    # module has the settings, and in most they are off.
    **dict.fromkeys(_KERNELS, _check_only(None, False, reason="asks for kernels of a hub")),
    "_is_full_backward_hook": _check_flag,
    # ``torch.jit.script(model)`` leaves this attribute on each module of the model: method -> the names of its
    # overloads.  Only another call of ``torch.jit.script`` reads it.
    "__overloads__": _check_register(
        "an overload", lambda key, item, graph: _is_name(key) and all(map(_is_name, _items_of(item) or (None,)))
    ),
    **dict.fromkeys(
        (
            *("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks"),
            *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        ),
        _check_register(
            "a hook", lambda key, item, graph: isinstance(key, int) and graph.role_of(item) in ("hook", "trusted")
        ),
    ),
    **dict.fromkeys(
        ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
        _check_register("a flag", lambda key, item, graph: isinstance(key, int) and isinstance(item, bool)),
    ),
}
"""Attribute that PyTorch, a library or memopt gives every module -> its check."""


_PARTS: Final = {"_parameters": Tensor, "_buffers": Tensor, "_modules": nn.Module}


def check_made(module: nn.Module) -> None:
    """Raise :class:`BrokenError` unless the registers of ``module``, such as ``_modules``, hold the right types."""
    kind, attributes = type(module), vars(module)
    for register, holds in _PARTS.items():
        parts = attributes.get(register)
        if not isinstance(parts, dict):
            raise BrokenError(f"an instance of {kind.__name__} has no {register}")
        for name, part in parts.items():
            if not isinstance(name, str) or not (part is None or isinstance(part, holds)):
                raise BrokenError(f"an instance of {kind.__name__} has values in {register} that do not belong there")


def check_apart(modules: Iterable[nn.Module]) -> None:
    """Raise :class:`BrokenError` if two of ``modules`` share a register: changing one would change the other."""
    owners: dict[int, nn.Module] = {}
    for module in modules:
        for register in REGISTERS:
            parts = vars(module).get(register)
            if isinstance(parts, dict) and owners.setdefault(id(parts), module) is not module:
                raise BrokenError(f"two modules have the same {register}")
