"""Making the objects of a pickled file in the order of its opcodes: only audited ones, and only by their recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from memopt_cli.errors import MemoptError, first_line, type_in_words
from memopt_cli.loading.pickles.kinds.interface import BrokenError, Recipe
from memopt_cli.loading.pickles.kinds.modules import check_apart, check_made
from memopt_cli.loading.pickles.kinds.own import check_segment
from memopt_cli.loading.pickles.nodes import Built, Global, Pickle, Tuple, UnpicklingStep, reachable
from memopt_cli.loading.watch import suspend_watch
from memopt_cli.runtime.lifted.module import LiftedModule, check_lifted
from memopt_cli.runtime.lifted.program import BadProgramError
from memopt_cli.runtime.script_code import UnsafeScriptError
from memopt_cli.training.step import is_out_of_memory


def build(pickle: Pickle, root: Any, recipes: Mapping[Built | Global, Recipe]) -> Any:
    """Make the object for the stand-in ``root``, and all objects that it reaches.

    Raises :class:`BrokenError` if the parts of an object do not fit together, and
    :class:`~memopt_cli.runtime.lifted.program.BadProgramError` for a lifted module that does not suit its program.
    """
    builder = _Builder(recipes, {id(value) for value in reachable(root)})
    for step in pickle.steps:
        builder.take(step)
    # Checked at the end, when no step can change them any more.
    for module in builder.modules:
        check_made(module)
        check_segment(module)
        if isinstance(module, LiftedModule):
            check_lifted(module)
    check_apart(builder.modules)
    return builder.value(root)


class _Builder:
    def __init__(self, recipes: Mapping[Built | Global, Recipe], wanted: set[int]) -> None:
        self.modules: list[nn.Module] = []
        self._recipes = recipes
        self._wanted = wanted
        self._made: dict[int, Any] = {}

    def take(self, step: UnpicklingStep) -> None:
        """Take ``step``, if its object is wanted."""
        node = step.node
        if id(node) not in self._wanted:
            return
        if isinstance(node, Tuple):
            self._made[id(node)] = tuple(map(self.value, node.items))
            return
        try:
            recipe = self._recipes[node]
            with suspend_watch() if recipe.is_trusted else contextlib.nullcontext():
                self._take_step(step, node, recipe)
        except (BrokenError, MemoptError, BadProgramError, UnsafeScriptError):
            raise
        except Exception as err:  # a class takes its state by its own code, which may raise anything
            if is_out_of_memory(err):
                raise
            raise BrokenError(f"{node.callee} cannot be made ({first_line(err)})") from err

    def _take_step(self, step: UnpicklingStep, node: Built, recipe: Recipe) -> None:
        if step.action == "make":
            keywords = {} if node.keywords is None else self.value(node.keywords)
            arguments = (node.arguments,) if node.how == "stored" else node.argument_items()
            self._made[id(node)] = built = recipe.make(*map(self.value, arguments), **keywords)
            if recipe.role == "data" and callable(built):
                raise BrokenError(f"{type_in_words(built)} can be called")
            if isinstance(built, nn.Module):
                self.modules.append(built)
            return
        target = self._made[id(node)]
        values = [self.value(value) for value in step.values]
        if step.action == "extend":
            assert recipe.extend is not None, "the audit refuses items of an object that takes none"
            recipe.extend(target, values)
        elif step.action == "set":
            assert recipe.set is not None, "the audit refuses entries of an object that takes none"
            for key, value in zip(values[::2], values[1::2], strict=True):
                recipe.set(target, key, value)
        else:
            assert recipe.fill is not None, "the audit refuses the state of an object that takes none"
            recipe.fill(target, self.value(node.state))

    def value(self, value: Any) -> Any:
        """Return the object that ``value`` stands for, or ``value`` if it is not a stand-in."""
        if isinstance(value, Global):
            return self._recipes[value].make()
        if isinstance(value, Built | Tuple):
            if id(value) not in self._made:
                raise BrokenError("it uses an object before making the object")
            return self._made[id(value)]
        return value
