"""The audit of a pickled file: all of its objects are checked together, before any of them is made.

Every object that the model reaches must be of a known kind, with parts allowed for that kind.  Only audited objects are
made.

A list of allowed names is not enough: the graph matters.  ``functools.partial`` of an allowed function is harmless as
an attribute, but as a forward hook, or in the place of the method ``forward``, it would be called with tensors.  Two
modules with one ``__dict__`` change each other.  A walk through a list that contains itself never ends, nor through a
tuple that holds the same tuple twice, sixty levels deep.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch import Tensor

from memopt_cli.loading.pickles.kinds.interface import Denied, Missing, ObjectKind, Recipe, Role, Use, plain_entries
from memopt_cli.loading.pickles.kinds.modules import REGISTERS
from memopt_cli.loading.pickles.kinds.own import RESTORE_LIFTED, RESTORE_SEGMENTS
from memopt_cli.loading.pickles.making import HASHING
from memopt_cli.loading.pickles.nodes import (
    DICTS,
    GETATTR,
    Built,
    Global,
    Tuple,
    Walk,
    depth_of,
    held_in,
    reachable,
)

_MAX_MODULES: Final = 100
_MAX_CONTAINERS: Final = 200
"""Maximum depth of nested modules, and of nested plain containers: Python walks them by recursion."""
_DEEPEST: Final = 400
"""Maximum depth of nested objects, with the dicts and tuples between them: ``copy.deepcopy`` takes two calls for
each, of the thousand that Python allows."""
_MAX_ITEMS: Final = 4_000_000
"""Maximum number of items of a container, or of modules in a module, each counted as often as it is reached: printing
or copying the container, or making a state dict, visits all of them."""


def uses_in(root: Any) -> list[Use]:
    """List every use of a name by the objects that ``root`` reaches."""
    return [
        Use(value, "held") if isinstance(value, Global) else Use(value.name, value.how, value)
        for value in reachable(root)
        if isinstance(value, Global | Built)
    ]


def assign_kinds(uses: Sequence[Use], kinds: Sequence[ObjectKind]) -> tuple[list[tuple[Use, ObjectKind]], list[Use]]:
    """Pair each of ``uses`` with the first of ``kinds`` that claims it by its name, and list the unclaimed uses."""
    claims, unclaimed = [], []
    cache: dict[object, ObjectKind | None] = {}
    for use in uses:
        # The key has everything that ``ObjectKind.claims`` looks at; for ``list[int]``, this includes ``list``.
        arguments = use.node.argument_items() if use.node and use.how == "called" else ()
        first = arguments[0] if arguments and isinstance(arguments[0], Global) else None
        key = use.name, use.how, first, len(arguments)
        if key not in cache:
            cache[key] = next((kind for kind in kinds if kind.claims(use)), None)
        kind = cache[key]
        if kind is None:
            unclaimed.append(use)
        else:
            claims.append((use, kind))
    return claims, unclaimed


class Audit:
    """The objects that a root reaches and their recipes; the :class:`~.kinds.interface.Graph` that kinds ask."""

    def __init__(self, root: Any, claims: Sequence[tuple[Use, ObjectKind]], trusts: Callable[[type], bool]) -> None:
        """Import the names in ``claims``, the uses from :func:`assign_kinds`, and collect their recipes."""
        self.trusts = trusts
        self.recipes: dict[Built | Global, Recipe] = {}
        """Object, or name that is held as a value -> its recipe."""
        self.refused: list[tuple[Global, Denied | Missing]] = []
        """Names that were refused by their kind after they were imported."""
        self._root = root
        self._nodes = list(reachable(root))
        self._uses = [use for use, _ in claims]
        cache: dict[tuple[Global, str], Recipe | Denied | Missing] = {}
        for use, kind in claims:
            key = use.name, use.how
            if key not in cache:
                cache[key] = kind.recipe(use)
            recipe = cache[key]
            if isinstance(recipe, Recipe):
                self.recipes[use.node or use.name] = recipe
            else:
                self.refused.append((use.name, recipe))

    def role_of(self, value: Any) -> Role:
        """Return the role of the object that ``value`` stands for."""
        recipe = self._recipe(value)
        if recipe is None:
            return "data"
        return recipe.role if isinstance(recipe.role, str) else recipe.role(value, self)

    def class_of(self, value: Any) -> type | None:
        """Return the class of the object ``value``, or ``value`` itself if it is a class; ``None`` for plain data."""
        recipe = self._recipe(value)
        kind = recipe.kind if recipe else None
        return kind if kind is None or isinstance(kind, type) else kind(value, self)

    def _fixed_role(self, value: Any) -> Role | None:
        """Return the role of ``value`` without recursion, or ``None`` if the role depends on the object's parts."""
        recipe = self._recipe(value)
        role = recipe.role if recipe else "data"
        return role if isinstance(role, str) else None

    def _recipe(self, value: Any) -> Recipe | None:
        return self.recipes.get(value) if isinstance(value, Global | Built) else None

    def objections(self) -> Iterator[tuple[Global, str]]:
        """Yield the name of each object that must not be made, and the reason; call it if no name was refused."""
        yield from self._shared_attributes()
        yield from self._slow_keys()
        for use in self._uses:
            if use.node is not None:
                recipe = self.recipes[use.node]
                reason = (recipe.check(use.node, self) if recipe.check else "") or _why_unfit(use.node, recipe)
                if reason:
                    yield use.name, reason
        yield from self._misplaced_classes()

    def why_exhausting(self) -> str:
        """Return the reason why a walk of the objects would never end or go too deep."""
        if depth_of(self._root) > _DEEPEST:
            return f"its objects are nested deeper than {_DEEPEST}"
        modules = Walk(self._children_of_module, _MAX_MODULES, _MAX_ITEMS)
        containers = Walk(self._items, _MAX_CONTAINERS, _MAX_ITEMS)
        for value in self._nodes:
            if reason := modules.why_endless(value):
                return f"its modules {reason}"
            if reason := containers.why_endless(value):
                return f"its containers {reason}"
        return ""

    def _misplaced_classes(self) -> Iterator[tuple[Global, str]]:
        """Yield the classes of whole models that are held as values, unless one of their segments needs the class."""
        built = (node for node in self._nodes if isinstance(node, Built))
        segments = {id(node.arguments) for node in built if node.callee in RESTORE_SEGMENTS}
        for node in self._nodes:
            if id(node) not in segments:
                for part in held_in(node):
                    if isinstance(part, Global) and self.role_of(part) == "named":
                        yield part, "is not a layer, but is stored as something to call"

    def _slow_keys(self) -> Iterator[tuple[Global, str]]:
        """Yield the keys of dicts and sets whose class computes a hash from attributes: this may take forever."""
        pending = [key for node in self._nodes if isinstance(node, Built) for key in _keys_of(node)]
        seen = set[int]()
        while pending:
            key = pending.pop()
            if not isinstance(key, Built | Tuple) or id(key) in seen:
                continue
            seen.add(id(key))
            kind = None if isinstance(key, Tuple) or key.callee == GETATTR else self.class_of(key)
            if isinstance(key, Built) and kind is not None and not (_has_plain_hash(kind) or self.trusts(kind)):
                yield key.name, "is a key whose class computes the hash from attributes"
            pending.extend(key.items if isinstance(key, Tuple) else key.argument_items())

    def _shared_attributes(self) -> Iterator[tuple[Global, str]]:
        """Yield the objects that share attributes: a change to one object would change the other."""
        owner_counts = Counter(id(part) for node in self._nodes for part in held_in(node))
        for node in self._nodes:
            if isinstance(node, Built) and any(owner_counts[id(own)] > 1 for own in self._own_parts(node)):
                yield node.name, "shares its attributes with another object"

    def _own_parts(self, node: Built) -> Iterator[Built]:
        """Yield the dicts that become the attributes of ``node``, and the registers of a module in them."""
        for attributes in _states_of(node):
            inner = attributes.items if isinstance(attributes, Tuple) else (attributes,)
            yield from (part for part in inner if isinstance(part, Built) and part.name in DICTS)
            if self.role_of(node) == "module":
                entries = plain_entries(attributes) or ()
                yield from (part for name, part in entries if name in REGISTERS and isinstance(part, Built))

    def _children_of_module(self, value: Any) -> Iterator[Any]:
        if not isinstance(value, Built) or self._fixed_role(value) != "module":
            return
        if value.callee in RESTORE_SEGMENTS:
            yield from (part for part in value.argument_items()[:1] if isinstance(part, Built))
        for attributes in _states_of(value):
            for name, part in plain_entries(attributes) or ():
                if name == "_modules" and isinstance(part, Built):
                    yield from (child for _, child in part.entries)

    def _items(self, value: Any) -> Sequence[Any]:
        """Return the items of containers, settings and callables.

        Other objects are not entered: their attributes may lead back to them, as a child does that knows its parent.
        """
        role = self._fixed_role(value)
        is_created = isinstance(value, Built) and value.how == "created"
        return held_in(value) if role == "data" or (role not in ("module", "trusted") and not is_created) else ()


def _keys_of(node: Built) -> Iterator[Any]:
    """Yield the values that are hashed when ``node`` is filled: keys, items of sets, and first items of pairs."""
    yield from (key for key, _ in node.entries)
    if node.name.name in HASHING:
        yield from node.items
        for part in node.argument_items():
            yield from held_in(part)


def _has_plain_hash(cls: type) -> bool:
    """Return whether objects of ``cls`` are hashed by identity, or by their items or names."""
    return issubclass(cls, enum.Enum) or cls.__hash__ in (object.__hash__, Tensor.__hash__, tuple.__hash__)


def _why_unfit(node: Built, recipe: Recipe) -> str:
    """Return why an object of its kind cannot hold what the file puts into ``node``."""
    if (node.items and recipe.extend is None) or (node.entries and recipe.set is None):
        return "is filled in a way that its class does not allow"
    if node.has_state and recipe.fill is None:
        return "has a state, which its class does not take"
    return "is created with keyword arguments" if node.keywords is not None and recipe.role != "trusted" else ""


def _states_of(node: Built) -> tuple[Any, ...]:
    return node.argument_items()[1:2] if node.callee == RESTORE_LIFTED else (node.state,)
