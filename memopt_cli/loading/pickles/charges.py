"""A bound on the work of reading a pickle: each opcode and each object is charged before the unpickler would make it.

A file of 200 bytes can keep the unpickler busy for years: each of sixty tuples may hold the one before it twice, and
hashing the last visits 2^60 items.  In a larger file, a dict may get a million keys of the same hash, and
Python compares each with all others.  Only stand-ins are made here, so the work can be counted first, in two sums:

- *work*: one unit for each opcode, each item that is visited, and every few comparisons of keys.  A file of 1 kB may
  cause 500,000 units, one of 100 MB about 3.1 million, and none more than 8 million.
- *bytes taken*: bytes and characters among the arguments of calls, at most four for each byte of the file, plus 1 MiB.

:mod:`.making` determines what each step of a pickle is charged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from memopt_cli.loading.pickles.described import tensor_of
from memopt_cli.loading.pickles.nodes import Built, Global, Tuple, held_in

EXCESSIVE_WORK_REASON: Final = "reading it would take far more work than a model of its size needs"
_MIN_WORK = 500_000
"""Units of work that a file may cause however small it is.  For scale: a module of a model takes about 150 units, and a
few hundred bytes in the file."""
_MAX_WORK = 8_000_000
"""Maximum units of work that any file may cause."""
_DENSE = 8 << 20
"""Size in bytes of the part of a file that may be all opcodes; the rest of a large file is mostly weights."""
_BYTES_PER_WORK = 8
"""Number of bytes that allow one further unit of work, as long as they are among the first :data:`_DENSE` of a file."""
_BYTES_PER_MORE = 64
"""Number of bytes of the whole file that allow one further unit of work, in addition."""
_COPIES = 4
"""Maximum bytes of all arguments of calls for each byte of the file: a memo lets calls use a value several times."""
_MIN_TAKEN = 1 << 20
"""Bytes of arguments that calls may take in addition, however small the file is."""
_TENSORS: Final = ("torch._utils._rebuild_", "torch._tensor._rebuild_")


@dataclass(slots=True)
class PickleScan:
    """The names in the pickles of a file, and the work so far of reading them."""

    size: int
    """Bytes of the file; the larger it is, the more work it may cause."""
    wanted: set[Global] = field(default_factory=set)
    """Names that the pickles import, whether the model uses them or not."""
    called: set[Global] = field(default_factory=set)
    """Names of the functions called and of the classes of created objects."""
    work: int = 0
    """Units of work so far."""
    taken: int = 0
    """Bytes and characters among the arguments of calls."""
    max_work: int = field(init=False)
    """Maximum units of work that the file may cause."""

    def __post_init__(self) -> None:
        self.max_work = min(
            _MIN_WORK + min(self.size, _DENSE) // _BYTES_PER_WORK + self.size // _BYTES_PER_MORE, _MAX_WORK
        )

    def spend(self, work: int) -> None:
        """Charge ``work`` units.  Raises :class:`ValueError` if the sum exceeds the needs of a model of this size."""
        self.work += work
        if self.work > self.max_work:
            raise ValueError(EXCESSIVE_WORK_REASON)

    def take(self, size: int) -> None:
        """Charge ``size`` bytes of arguments.  Raises :class:`ValueError` if the sum is far larger than the file."""
        self.taken += size
        if self.taken > _COPIES * self.size + _MIN_TAKEN:
            raise ValueError(EXCESSIVE_WORK_REASON)

    def take_copies(self, value: Any) -> None:
        """Charge for a copy of each tensor in ``value``."""
        pending, counted = [value], set[int]()
        while pending:
            part = pending.pop()
            if not isinstance(part, Built | Tuple) or id(part) in counted:
                continue
            counted.add(id(part))
            tensor = tensor_of(part)
            parts = [] if tensor else list(held_in(part))
            self.spend(1 + len(parts))
            self.take(tensor.size_bytes if tensor else 0)
            pending += parts


def hash_cost(value: Any) -> int:
    """Return the number of items that hashing ``value`` visits."""
    # A plain list, dict or set cannot be hashed: Python raises an exception immediately.
    return value.weight if isinstance(value, Tuple | Built) and value.how != "plain" else 1


def hash_of(key: Any) -> int:
    """Return the hash that ``key`` will have; 0 for an object whose class may give every object the same hash."""
    if isinstance(key, Tuple):
        return hash(tuple(map(hash_of, key.items)))
    if isinstance(key, Built):
        # Tensors, and objects that are created without values, are hashed by identity.
        is_by_identity = str(key.callee).startswith(_TENSORS) if key.how == "called" else not key.argument_items()
        return hash(key) if is_by_identity else 0
    return hash(key)


def amount_of(value: Any) -> int:
    """Return the number of items, or bytes, of an object made from ``value``: 9 for ``bytearray(9)``."""
    if isinstance(value, Built):
        return value.weight + sum(map(hash_cost, value.items)) + len(value.entries)
    if isinstance(value, int):
        return min(abs(value), 2**63)
    return hash_cost(value)


def size_of(value: Any) -> int:
    """Return the bytes or characters of ``value``."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return value.size if isinstance(value, Built) else 0
