"""Making the stand-ins for the objects of a pickle, and charging each for the work that the object would cause.

The charges, in units of work and in bytes (:class:`~.charges.PickleScan`):

========================  =====================================================================================
a tuple of tuples         the items at every depth; they are charged again for each tuple around it
a call                    the bytes of its arguments; for constructors of Python and ``torch`` also their items
a call that hashes keys   hashing each key, and comparing it with the earlier keys of the same hash
setting a dict's entries  hashing and comparing, as above
adding to a set           hashing and comparing, as above
an object's state         its items and its bytes, and its tensors where the class copies them
========================  =====================================================================================
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from memopt_cli.loading.pickles.charges import PickleScan, amount_of, hash_cost, hash_of, size_of
from memopt_cli.loading.pickles.names import called_name, within_class
from memopt_cli.loading.pickles.nodes import DICTS, Built, Global, Tuple, UnpicklingStep

TENSOR_SUBCLASS_REBUILD: Final = Global("torch._tensor", "_rebuild_from_type_v2")
"""The function that rebuilds a tensor subclass; it calls its first argument."""

_DEEPEST_TUPLE = 200  # hashing and printing a tuple recurse into the tuples inside
_WORK_PER_CHARACTER: Final = 200
"""Units of work charged for each character of a regular expression to compile: ranges that ignore case are slow."""
HASHING: Final = ("set", "frozenset", "OrderedDict")
"""Classes whose constructors hash the given items or keys."""
_SAME_HASHES: Final = 8
"""Number of comparisons between keys of the same hash that count as one unit of work."""
_RECONSTRUCTOR, _NEWOBJ, _OBJECT = (
    Global("copyreg", "_reconstructor"),
    Global("copyreg", "__newobj__"),
    Global("builtins", "object"),
)
_PATTERN: Final = Global("re", "_compile")
_COPIED: Final = (Global("torch._utils", "_rebuild_sparse_tensor"), Global("torch._utils", "_rebuild_qtensor"))
"""Functions that copy tensors among their arguments: indices, and the scales of channels."""
_COPIED_STATES: Final = (Global("torch", "ScriptObject"), Global("memopt_cli.runtime.script", "ScriptLeaf"))
"""Classes that copy the tensors of their state: packed weights, and a TorchScript archive, which is read again."""
_CREATING: Final = (_RECONSTRUCTOR, _NEWOBJ)
"""Functions that create an empty object in the protocols before 2."""


class Maker:
    """Makes stand-ins; raises :class:`ValueError` if they take more than a model of the file's size does."""

    def __init__(self, scan: PickleScan) -> None:
        self.steps: list[UnpicklingStep] = []
        self._scan = scan
        self._hashes: Counter[tuple[int, int]] = Counter()
        """Identity of a container, and a hash -> the number of keys with this hash in the container."""
        self._states: set[int] = set()
        """Identities of dicts that became an object's state.  They must not change any more, since the object's class
        has read them."""

    def make(self, node: Built) -> Built:
        """Record the step that makes ``node``, and return ``node``."""
        self.steps.append(UnpicklingStep("make", node))
        return node

    def make_tuple(self, items: list[Any]) -> Tuple:
        inner = [item for item in items if isinstance(item, Tuple)]
        depth = 1 + max((item.depth for item in inner), default=0)
        if depth > _DEEPEST_TUPLE:
            raise ValueError(f"tuples are nested deeper than {_DEEPEST_TUPLE}")
        weight = len(items) + sum(item.weight for item in items if isinstance(item, Tuple | Built))
        node = Tuple(tuple(items), depth, weight)
        # A tuple may hold another tuple twice, which may do the same, and so on: hashing the outermost visits them all.
        self._scan.spend(node.weight if inner else 0)
        self.steps.append(UnpicklingStep("make", node))
        return node

    def create(self, kind: Any, arguments: Any, keywords: Any = None) -> Built:
        """Create an empty object of the class ``kind``."""
        built = Built("created", called_name(self._scan, kind), arguments, keywords)
        built.weight += sum(map(hash_cost, built.argument_items()))
        return self.make(built)

    def call(self, callee: Any, arguments: Any) -> Built:
        """Make the object that a call of ``callee`` returns."""
        if callee in _CREATING and isinstance(arguments, Tuple) and arguments.items:
            kind, *others = arguments.items
            if callee == _RECONSTRUCTOR and others != [_OBJECT, None]:
                raise ValueError("it rebuilds an object from parts of another object")
            return self.create(kind, self.make_tuple(others if callee == _NEWOBJ else []))
        callee = within_class(callee) or callee
        built = Built("called", callee, arguments)
        built.size = sum(map(size_of, built.argument_items()))
        self._scan.take(built.size)
        # Constructors of Python's containers and ``torch.Size`` walk their arguments; other calls keep them.
        if called_name(self._scan, callee).module in ("builtins", "collections", "torch"):
            self._charge_items(built)
        else:
            self._charge_bytes(built)
        if callee == TENSOR_SUBCLASS_REBUILD:
            called_name(self._scan, next(iter(built.argument_items()), None))
        return self.make(built)

    def _charge_items(self, built: Built) -> None:
        name = built.callee.name
        built.weight += sum(map(amount_of, built.argument_items()))
        if name not in ("range", "slice"):  # these only keep their arguments
            self._scan.spend(built.weight)
        if name in HASHING:
            parts = [part for part in built.argument_items() if isinstance(part, Tuple | Built)]
            self.charge_keys(built, [_key_of(item, name) for part in parts for item in part.items])

    def _charge_bytes(self, built: Built) -> None:
        """Charge for a call that only keeps its arguments, or reads their bytes."""
        built.weight += sum(map(hash_cost, built.argument_items()))
        if built.callee == _PATTERN:
            self._scan.spend(_WORK_PER_CHARACTER * built.size)
        if built.callee in _COPIED:
            self._scan.take_copies(built.arguments)

    def extend(self, node: Built, items: list[Any]) -> None:
        self._check_open(node)
        node.items.extend(items)
        self.steps.append(UnpicklingStep("extend", node, tuple(items)))

    def add(self, node: Built, items: list[Any]) -> None:
        """Add ``items`` to the set ``node``."""
        self.charge_keys(node, items)
        self.extend(node, items)

    def set_entries(self, node: Built, items: list[Any]) -> None:
        """Set entries of ``node``; ``items`` are keys and values in turn."""
        self._check_open(node)
        keys, values = items[::2], items[1::2]
        self.charge_keys(node, keys)
        node.entries.extend(zip(keys, values, strict=True))
        self.steps.append(UnpicklingStep("set", node, tuple(items)))

    def fill(self, node: Built, state: Any) -> None:
        """Give ``node`` its state, once."""
        self._check_open(node)
        if node.has_state:
            raise ValueError("it sets the state of an object twice")
        node.state, node.has_state = state, True
        parts = state.items if isinstance(state, Tuple) else (state,)
        self._states.update(id(part) for part in parts if isinstance(part, Built) and part.name in DICTS)
        self._scan.spend(sum(amount_of(part) for part in parts if isinstance(part, Built | Tuple)))
        self._scan.take(sum(map(size_of, parts)))
        if node.callee in _COPIED_STATES:
            self._scan.take_copies(state)
        node.weight += sum(hash_cost(value) for part in parts if isinstance(part, Built) for _, value in part.entries)
        self.steps.append(UnpicklingStep("fill", node))

    def _check_open(self, node: Built) -> None:
        if id(node) in self._states:
            raise ValueError("it changes the attributes of an object after it has taken its state")

    def charge_keys(self, node: Built, keys: list[Any]) -> None:
        """Charge for hashing ``keys``, and for comparing each with the keys of the same hash in ``node``."""
        for key in keys:
            self._scan.spend(hash_cost(key))
            # The n-th key of one hash is compared with n - 1 others.  Strings are left out: Python salts their hashes,
            # so no file can choose strings of the same hash.
            if not isinstance(key, str):
                self._hashes[id(node), hash_of(key)] += 1
                self._scan.spend(self._hashes[id(node), hash_of(key)] // _SAME_HASHES)


def _key_of(item: Any, name: str) -> Any:
    """Return the part of ``item`` that is hashed: all of it for a set, the key of a pair for a dict."""
    return item.items[0] if name == "OrderedDict" and isinstance(item, Tuple) and item.items else item
