"""Runs: consecutive children of an ``nn.Sequential`` that act as one module, so that they can be one segment.

In a flat Sequential (convolution, norm, activation, convolution, …), no single layer is worth recomputing, and there is
no module between the Sequential and its layers.  A run is such a module.  It is not a child of the Sequential: children
and their parameters keep their names, and the Sequential its length; only its forward uses the runs.  Paths name a run
by its first and last child, ``features.0-2``, and a child in it below that: ``features.0-2.1``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from memopt_cli.runtime.module_state import RUNS_KEY
from memopt_cli.runtime.private_torch import children_of

_MIN_LAYERS = 2
"""Minimum number of layers with weights in a Sequential that is divided.  Two, for a U-Net's pairs of convolutions: as
whole blocks they gave no plan at half of the activation peak; divided, they gave a plan that takes 1.40 times as long
(``benchmarks/storage.py``)."""


class Run(nn.Sequential):
    """Consecutive children of a Sequential, under the names that they have there.

    Saved models name this class: do not rename it.
    """


class GroupedSequential(nn.Sequential):
    """A Sequential with runs.  A child that is replaced is also replaced in its run.

    Saved models name this class and the attribute ``RUNS_KEY``, which has its runs: do not rename either.
    """

    def forward(self, input: Any) -> Any:
        """Return the output of the last part, each part taking the output of the one before."""
        for part in _children_and_runs(self).values():
            input = part(input)
        return input


GroupedSequential.__name__ = "Sequential"  # for people; files know it by its qualified name
GroupedSequential.forward.__qualname__ = "Sequential.forward"


class Chain(nn.Sequential):
    """A Sequential in which a tuple from one module becomes the arguments of the next.

    Saved models name this class: do not rename it.
    """

    def forward(self, *inputs: Any) -> Any:
        """Return the output of the last module."""
        output: Any = inputs
        for module in self:
            output = module(*output) if isinstance(output, tuple) else module(output)
        return output


def group_layers(model: nn.Module) -> None:
    """Divide every flat Sequential in ``model`` in place into runs: a layer with weights and what follows it.

    A Sequential that holds a layer twice stays whole, since a module has one path.
    """
    for module in list(model.modules()):
        if type(module) is nn.Sequential and len(set(module.children())) == len(module):  # no child twice, or none
            for run in list(_layer_runs(module)):
                first, *_, last = children_of(run)
                _add_run(module, f"{first}-{last}", run)


def add_runs(model: nn.Module, path: str) -> list[Run]:
    """Make the runs in ``path`` part of ``model``, in place, and return those that were not part of it before.

    Raises :class:`ValueError` if that is not possible, :class:`AttributeError` if there is no such path.
    """
    parent, added = model, []
    for name in path.split(".") if path else ():
        part = _child_or_run(parent, name)
        if isinstance(part, Run) and name not in _update_runs(parent):
            _add_run(parent, name, part)
            added.append(part)
        parent = part
    return added


def remove_runs(model: nn.Module, only: Sequence[Run] | None = None) -> None:
    """Remove the runs from ``model``, in place: all, or ``only`` these; a Sequential without runs is a plain one."""
    for module in model.modules():
        rest = {name: run for name, run in _update_runs(module).items() if only is not None and run not in only}
        if vars(module).pop(RUNS_KEY, None) is not None and not rest and type(module) is GroupedSequential:
            module.__class__ = nn.Sequential  # type: ignore[assignment]
        if rest:
            vars(module)[RUNS_KEY] = rest


def calls_in_turn(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` is a Sequential's, with runs or without, even if it is a segment."""
    return inspect.unwrap(type(module).forward) in (nn.Sequential.forward, GroupedSequential.forward, Chain.forward)


def find_part(model: nn.Module, path: str) -> nn.Module:
    """Return the module at ``path`` in ``model``; a run that ``model`` does not have is made, but not added to it.

    Raises :class:`AttributeError` if there is no such module.
    """
    for name in path.split(".") if path else ():
        model = _child_or_run(model, name)
    return model


def child_path(path: str, name: str) -> str:
    """Return the path of ``name``, a child, parameter or buffer of the module at ``path``."""
    return f"{path}.{name}" if path else name


def named_parts(
    module: nn.Module, path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module like ``named_modules``, with runs between a Sequential and their children."""
    seen = set() if seen is None else seen
    if module not in seen:
        seen.add(module)
        yield path, module
        for name, part in _children_and_runs(module).items():
            yield from named_parts(part, child_path(path, name), seen)


def _update_runs(module: nn.Module) -> dict[str, Run]:
    """Return the runs of ``module`` by name, brought up to date with its current children."""
    runs: dict[str, Run] = vars(module).get(RUNS_KEY, {})
    for run in runs.values():
        now = {name: children_of(module)[name] for name in children_of(run) if name in children_of(module)}
        if now != children_of(run):
            children_of(run).clear()
            children_of(run).update(now)
    return runs


def _children_and_runs(module: nn.Module) -> dict[str, nn.Module]:
    run_of = {child: name for name, run in _update_runs(module).items() for child in children_of(run)}
    parts: dict[str, nn.Module] = {}
    for name, child in children_of(module).items():
        run = run_of.get(name)
        if run is not None:
            parts[run] = _update_runs(module)[run]
        elif child is not None:
            parts[name] = child
    return parts


def _child_or_run(parent: nn.Module, name: str) -> nn.Module:
    # Not ``get_submodule``: for an empty name it returns the module itself, and it evaluates properties.
    known = {**children_of(parent), **_update_runs(parent)}
    part = known[name] if name in known else _run_by_name(parent, name)
    if part is None:
        raise AttributeError(f"{type(parent).__name__} has no module {name!r}")
    return part


def _run_by_name(parent: nn.Module, name: str) -> Run | None:
    """Return the run named ``name``, ``first-last`` by its first and last child, or ``None`` without such a run."""
    names = list(children_of(parent)) if calls_in_turn(parent) else []
    for first in sorted(names, key=len):  # a name may have its own hyphens
        last = name.removeprefix(f"{first}-")
        if last != name and last in names[names.index(first) + 1 :]:
            return _make_run(parent, names[names.index(first) : names.index(last) + 1])
    return None


def _make_run(parent: nn.Module, names: list[str]) -> Run:
    run = Run()
    children_of(run).update((name, parent.get_submodule(name)) for name in names)
    run.training = parent.training  # not ``run.train()``, which would set the mode of the children as well
    return run


def _add_run(parent: nn.Module, name: str, run: Run) -> None:
    for existing_name, existing_run in _update_runs(parent).items():
        if children_of(existing_run).keys() & children_of(run).keys():
            raise ValueError(f"it shares children with the run {existing_name}")
    if type(parent) is nn.Sequential:
        parent.__class__ = GroupedSequential
    if not isinstance(parent, GroupedSequential):
        raise ValueError(f"{type(parent).__name__} is not a plain Sequential")
    vars(parent).setdefault(RUNS_KEY, {})[name] = run


def _layer_runs(parent: nn.Sequential) -> Iterator[Run]:
    runs: list[list[str]] = [[]]
    layers = 0
    for name, child in children_of(parent).items():
        assert child is not None
        weighted = any(p.dim() > 1 for p in child.parameters())
        layers += weighted
        if weighted:
            runs.append([])
        if weighted and any(child.children()):  # its own block
            runs.append([])
        else:
            runs[-1].append(name)
    for names in runs:
        if len(names) > 1 and layers >= _MIN_LAYERS:
            yield _make_run(parent, names)
