"""Turning the classes of a TorchScript file into programs of :mod:`memopt_cli.runtime.lifted`, method by method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memopt_cli.loading.script_nodes import LiftedGraph, Path, UnliftableError
from memopt_cli.runtime.lifted.program import VERSION, is_method, is_name, walk_nodes
from memopt_cli.runtime.private_torch import method_names, method_of, program_of


@dataclass(slots=True)
class ScriptClass:
    """The methods of a TorchScript class that could be lifted, and the reasons why others could not."""

    program: tuple[Any, ...]
    constants: tuple[Tensor, ...]
    failures: dict[str, str]
    """Method that could not be lifted -> the reason."""


def lift_class(script: torch.jit.ScriptModule, unit: Any, mutable: frozenset[str]) -> ScriptClass:
    """Lift the methods of the class of ``script``; ``mutable`` are the attributes that any method in the file sets."""
    constants: list[Tensor] = []
    functions = _Functions(unit, mutable)
    methods, failures = [], {}
    for name in sorted(method_names(script)):
        if is_method(name):
            try:
                method = method_of(script, name)
                lifting = LiftedGraph(method.graph, mutable, functions.name, script, constants)
                methods.append(lifting.method(name, method.schema, own=True))
            except UnliftableError as reason:
                failures[name] = str(reason)
    _, _, class_name = program_of(script).qualified_name.rpartition(".")
    program = (VERSION, class_name if is_name(class_name) else "Lifted", tuple(methods), functions.reached(methods))
    return ScriptClass(program, tuple(constants), failures)


def set_attributes(graphs: Iterator[Any]) -> frozenset[str]:
    """Return the names of the attributes that ``graphs`` set."""
    return frozenset(n.s("name") for graph in graphs for n in graph.findAllNodes("prim::SetAttr"))


def calls_of(program: tuple[Any, ...]) -> Iterator[tuple[Path, str]]:
    """Yield the path and the method of every call in ``program``."""
    for method in program[2]:
        for node in walk_nodes(method[3]):
            if node[0] == "call":
                yield node[1]


def attributes_of(program: tuple[Any, ...]) -> Iterator[Path]:
    """Yield the path of every attribute that ``program`` reads or sets, in its module or in one below it."""
    for method in program[2]:
        for node in walk_nodes(method[3]):
            if node[0] in ("get", "set", "parameter"):
                yield node[1]


@dataclass(slots=True)
class _Functions:
    """The free functions that the methods of one class call, lifted when they are first called."""

    unit: Any
    mutable: frozenset[str]
    names: dict[str, str] = field(default_factory=dict)
    """Qualified name -> name in the program."""
    lifted: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Name in the program -> how many functions have it, numbered ones included; keeps names unique."""

    def name(self, qualified: str) -> str:
        """Return the program's name for the function ``qualified``.  Raises :class:`UnliftableError` if it has none."""
        if qualified in self.failures:
            raise UnliftableError(self.failures[qualified])
        if qualified not in self.names:
            self.names[qualified] = name = self._free_name(qualified)
            function = self.unit.find_function(qualified)
            try:
                lifting = LiftedGraph(function.graph, self.mutable, self.name)
                self.lifted[name] = lifting.method(name, function.schema, own=False)
            except UnliftableError as reason:
                self.failures[qualified] = str(reason)
                raise
        return self.names[qualified]

    def reached(self, methods: list[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
        """Return the functions that ``methods`` call, directly or not, in the order of lifting."""
        wanted, queue = set(), list(methods)
        while queue:
            for node in walk_nodes(queue.pop()[3]):
                if node[0] == "function" and node[1] not in wanted:
                    wanted.add(node[1])
                    queue.append(self.lifted[node[1]])
        return tuple(function for name, function in self.lifted.items() if name in wanted)

    def _free_name(self, qualified: str) -> str:
        base = "_".join(part.strip("_") for part in qualified.split(".")[-2:])
        name = base
        while name in self.counts:
            name = f"{base}_{self.counts[base]}"
            self.counts[base] += 1
        self.counts[name] = 1
        return name
