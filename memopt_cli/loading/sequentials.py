"""Turning lifted modules that are an ``nn.Sequential`` back into one, whose layers can be grouped into segments."""

from __future__ import annotations

from typing import Any

from torch import nn

from memopt_cli.loading.script_graph import attributes_of
from memopt_cli.runtime.lifted.module import LiftedModule
from memopt_cli.runtime.private_torch import buffers_of, children_of, parameters_of


def restore_sequentials(model: nn.Module) -> nn.Module:
    """Return ``model``, changed in place, with an ``nn.Sequential`` for each lifted one.

    A program reads attributes of lifted modules only, so a Sequential stays lifted if one of its attributes is read.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    lifted = {path: module for path, module in modules.items() if isinstance(module, LiftedModule)}
    read = {
        modules.get(".".join(filter(None, (path, *attribute[:-1]))))
        for path, module in lifted.items()
        for attribute in attributes_of(module._program)
    }
    plain: dict[nn.Module | None, nn.Module] = {
        module: _sequential(module) or module for module in lifted.values() if module not in read
    }
    for module in {*lifted.values(), *plain.values()}:
        children = children_of(module)
        children.update({name: plain.get(child, child) for name, child in children.items()})
    return plain.get(model, model)


def _sequential(module: LiftedModule) -> nn.Sequential | None:
    """Return ``module`` as an ``nn.Sequential``, or ``None`` if its forward is another one."""
    match module._program:
        case (_, "Sequential", (("forward", ((value, _, _),), _, (_, nodes, results)),), _):
            names = _called_in_turn(nodes, value, results)
        case _:
            return None
    children = children_of(module)
    if sorted(names) != sorted(children) or parameters_of(module) or buffers_of(module):
        return None
    sequential = nn.Sequential()
    sequential.training = module.training
    children_of(sequential).update((name, children[name]) for name in names)
    return sequential


def _called_in_turn(nodes: tuple[Any, ...], value: int, results: tuple[Any, ...]) -> list[str]:
    """List the children that ``nodes`` call in turn, from ``value`` to ``results``; none if they do more than that."""
    names = []
    for node in nodes:
        match node:
            case ("call", ((name,), "forward"), (argument,), (output,), _) if argument == value:
                names.append(name)
                value = output
            case _:
                return []
    return names if results == (value,) and not any(hasattr(nn.Sequential, name) for name in names) else []
