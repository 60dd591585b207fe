"""Following a pickle opcode by opcode: nothing is imported, built or called.

The opcodes work on a stack of stand-ins, as the unpickler's do on real objects.  A list of the names in the bytes would
not show which of them are called: a name that is pushed early can be called much later, by way of the memo.

``opcodes.py`` has the effect of each opcode, ``stack.py`` the stack, its marks and the memo, ``making.py`` the
stand-ins for objects; ``charges.py`` bounds the work, and ``names.py`` notes the names that are imported and called.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import IO

from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.nodes import Pickle
from memopt_cli.loading.pickles.opcodes import Machine


def scan_pickle(stream: IO[bytes], scan: PickleScan) -> Pickle:
    """Follow the pickle at the position of ``stream`` to its end, and add the names that it uses to ``scan``.

    Raises :class:`ValueError` if the bytes are not a complete pickle, or unpickling them would take too long.
    """
    machine = Machine(scan)
    try:
        with suspend_collection():
            machine.run(stream)
        return Pickle(root=machine.result, steps=tuple(machine.maker.steps))
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as err:
        raise ValueError("its bytes are not a valid pickle") from err


@contextlib.contextmanager
def suspend_collection() -> Iterator[None]:
    """Suspend garbage collection inside a block that makes many objects and drops few: it would only cost time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
