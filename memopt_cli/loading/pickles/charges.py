"""What reading a pickle may take: every opcode and every object is charged for before it would be made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from memopt_cli.loading.pickles.described import tensor_of
from memopt_cli.loading.pickles.nodes import Built, Global, Tuple, held_in

EXHAUSTING: Final = "reading it would take far more work than a model of its size does"
_LEAST_WORK, _MOST_WORK = 500_000, 8_000_000
"""Opcodes, and items that plain containers are made of: a module takes 150 in a few hundred bytes."""
_DENSE, _BYTES_PER_WORK, _BYTES_PER_MORE = 8 << 20, 8, 64
"""Bytes of a file that may all be opcodes and small weights, and for how many of these, and of those beyond, there is
one: a large file is large because of its weights."""
_COPIES, _LEAST_TAKEN = 4, 1 << 20
"""How often each byte of a file may be taken in by a call: bytes may stand in it once, and be used again and again."""


@dataclass(slots=True)
class PickleScan:
    """What the pickles of a file want, and what following them took."""

    size: int
    """Bytes of the file: the work that reading it may take grows with it."""
    wanted: set[Global] = field(default_factory=set)
    """Every name, whether the model can be reached from it or not."""
    called: set[Global] = field(default_factory=set)
    """Those that it calls, or makes objects of."""
    work: int = 0
    taken: int = 0
    """Bytes and characters that calls take in."""
    most_work: int = field(init=False)

    def __post_init__(self) -> None:
        self.most_work = min(
            _LEAST_WORK + min(self.size, _DENSE) // _BYTES_PER_WORK + self.size // _BYTES_PER_MORE, _MOST_WORK
        )

    def spend(self, work: int) -> None:
        """Raises :class:`ValueError` where unpickling would take far more work than a model of this size does."""
        self.work += work
        if self.work > self.most_work:
            raise ValueError(EXHAUSTING)

    def take(self, size: int) -> None:
        """Raises :class:`ValueError` where objects are made of far more bytes than the file has."""
        self.taken += size
        if self.taken > _COPIES * self.size + _LEAST_TAKEN:
            raise ValueError(EXHAUSTING)

    def take_copies(self, value: Any) -> None:
        """The same for the tensors in ``value``, each once, which whatever is made of them copies."""
        pending, seen = [value], set[int]()
        while pending:
            part = pending.pop()
            if not isinstance(part, Built | Tuple) or id(part) in seen:
                continue
            seen.add(id(part))
            tensor = tensor_of(part)
            held = [] if tensor else list(held_in(part))
            self.spend(1 + len(held))
            self.take(tensor.size_bytes if tensor else 0)
            pending += held


def hashed(value: Any) -> int:
    """Items that hashing it visits."""
    return value.weight if isinstance(value, Tuple | Built) and value.how != "plain" else 1


def hash_of(key: Any) -> int:
    """The hash of a number, or of a tuple of some; objects that are made of values may all have the same."""
    if isinstance(key, Tuple):
        return hash(tuple(map(hash_of, key.items)))
    return 0 if isinstance(key, Built) and not _is_itself(key) else hash(key)


def _is_itself(key: Built) -> bool:
    """Whether it equals no other object: a tensor, and what is created of no values."""
    return str(key.callee).startswith(_TENSORS) if key.how == "called" else not key.given()


_TENSORS: Final = ("torch._utils._rebuild_", "torch._tensor._rebuild_")


def amount_of(value: Any) -> int:
    """Items, or bytes, that an object takes in when it is made of ``value``."""
    if isinstance(value, Built):
        return value.weight + sum(map(hashed, value.items)) + len(value.entries)
    if isinstance(value, int):
        return min(abs(value), 2**63)
    return hashed(value)


def size_of(value: Any) -> int:
    """Bytes or characters of it."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return value.size if isinstance(value, Built) else 0
