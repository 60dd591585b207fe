"""Where this process is one of several that a launcher such as ``torchrun`` started: of all, one says what failed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from memopt_cli.errors import MemoptError, RankLostError, Terminated, UsageError

_OTHERS_S, _EACH_S, _MOST_S = 3.0, 0.5, 12.0
"""A rank that fails lets those before it speak first: the first rank, and so much longer for each; one that only lost
another lets all.  ``torchrun`` ends the others when one has ended, so that they never speak.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Place of this process among those of its launcher."""

    rank: int
    ranks: int
    local_rank: int
    """Among those of this machine."""


def launched() -> Launch | None:
    """``None``: by no launcher, as far as the environment tells.  Raises :class:`UsageError` for what is no number."""
    if "RANK" not in os.environ:
        return None
    rank, ranks = _number("RANK"), _number("WORLD_SIZE", 1)
    if rank >= ranks:
        raise UsageError(f"RANK is {rank}, and WORLD_SIZE {ranks}", hint="Ranks are numbered from 0.")
    return Launch(rank=rank, ranks=ranks, local_rank=_number("LOCAL_RANK", rank))


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r}, which is not a number", hint="A launcher such as torchrun sets it.")
    return int(text)


def speaks(failure: MemoptError, err: BaseException) -> bool:
    """Whether this process is to print a failure: not if its launcher ends it before its turn, as one that failed too.

    Alone, or on the first rank, it is at once.
    """
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdigit() and ranks.isdigit() and int(ranks) > 1):
        return True
    if isinstance(err, Terminated):  # another rank failed first, and says so
        return False

    if patience_s := _patience_s(failure, int(rank)):
        for wanted in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(wanted, lambda *_: os._exit(failure.exit_code))
        time.sleep(patience_s)
    return True


def _patience_s(failure: MemoptError, rank: int) -> float:
    if isinstance(failure, RankLostError):
        return _MOST_S
    return min(_OTHERS_S + _EACH_S * rank, _MOST_S) if rank else 0.0
