"""What a pickle says, read from its opcodes: nothing is imported, built or called.

The opcodes are followed on a stack of stand-ins, as the unpickler would with real objects: a name pushed early can
be called late, by way of the memo.

``opcodes.py`` says what each does, with ``stack.py`` (stack, marks, memo) and ``making.py`` (stand-ins of objects);
``charges.py`` bounds the work, ``names.py`` notes what is imported and called.
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
    """Follow the pickle at the stream's position to its end, and add what it wants to ``scan``.

    Raises :class:`ValueError` if the bytes there are no complete pickle, or unpickling them is made to take forever.
    """
    machine = Machine(scan)
    try:
        with uncollected():
            machine.run(stream)
        return Pickle(root=machine.result, steps=tuple(machine.maker.steps))
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as err:
        raise ValueError("its bytes are not a pickle, or a broken one") from err


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """What is made within stays, and would be looked through for garbage again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
