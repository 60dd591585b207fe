"""Finding out whether a launcher such as ``torchrun`` started this process; only one rank prints a failure."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from memopt_cli.errors import MemoptError, RankLostError, Terminated, UsageError

_BASE_WAIT_S = 3.0
"""Wait in seconds of ranks other than the first before they print; ``torchrun`` stops them once the first has ended."""
_WAIT_PER_RANK_S = 0.5
"""Further wait in seconds for each rank before this one, so that lower ranks print first."""
_MAX_WAIT_S = 12.0
"""Maximum wait in seconds; a rank that only lost another rank always waits as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Rank of this process among those that its launcher started."""

    rank: int
    ranks: int
    local_rank: int
    """Rank among the processes of this machine."""


def find_launch() -> Launch | None:
    """Return the rank of this process among those of its launcher; ``None`` if no launcher set ``RANK``.

    Raises :class:`UsageError` for an environment variable that is not a number.
    """
    if "RANK" not in os.environ:
        return None
    rank, ranks = _number_in_environment("RANK"), _number_in_environment("WORLD_SIZE", 1)
    if rank >= ranks:
        raise UsageError(f"RANK is {rank}, and WORLD_SIZE {ranks}", hint="Ranks are numbered from 0.")
    return Launch(rank=rank, ranks=ranks, local_rank=_number_in_environment("LOCAL_RANK", rank))


def _number_in_environment(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r}, which is not a number", hint="A launcher such as torchrun sets it.")
    return int(text)


def await_turn_to_print(failure: MemoptError, err: BaseException) -> bool:
    """Wait for this rank's turn, and return whether it should print its failure.

    The launcher usually ends a waiting rank, which then prints nothing.  A single process and the first rank do not
    wait.
    """
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdigit() and ranks.isdigit() and int(ranks) > 1):
        return True
    if isinstance(err, Terminated):  # another rank failed first, and prints why
        return False

    if wait_s := _wait_s(failure, int(rank)):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: os._exit(failure.exit_code))
        time.sleep(wait_s)
    return True


def _wait_s(failure: MemoptError, rank: int) -> float:
    if isinstance(failure, RankLostError):
        return _MAX_WAIT_S
    return min(_BASE_WAIT_S + _WAIT_PER_RANK_S * rank, _MAX_WAIT_S) if rank else 0.0
