"""Ranks of a real group that agree: on what each found, and on whether any failed."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from memopt_cli.errors import (
    Interrupted,
    MeasurementError,
    MemoptError,
    RankLostError,
    StepError,
    UsageError,
    first_line,
)
from memopt_cli.records import to_data
from memopt_cli.runtime.private_torch import is_of_lost_rank
from memopt_cli.training.step import is_out_of_memory

Found = TypeVar("Found")


class Ranks:
    """Those of a group.  Whatever one of them is to do, all are to do; each of these calls is a collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.count: int = dist.get_world_size(group)

    def each(self, do: Callable[[], Found]) -> Found:
        """What ``do`` gives here, once it is done on all ranks.  ``do`` waits for no other rank.

        Raises on every rank what the first raises on which it fails: a :class:`MemoptError` of the same class, or a
        :class:`MeasurementError` where it is another exception, but for that rank itself.
        """
        error: BaseException | None = None
        try:
            found = do()
        except BaseException as err:  # an interrupt, too: the others would wait for this rank
            error = err
        failures = {rank: told for rank, told in enumerate(self._gathered(_as_told(error))) if told is not None}
        if error is not None and (self.rank == min(failures) or not isinstance(error, Exception)):
            raise error
        if failures:
            first, failure = next(iter(failures.items()))
            alike = len(failures) == self.count and len({other.message for other in failures.values()}) == 1
            raise failure if alike else _named(failure, first, self.count)
        return found

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within, this rank waits for others, who learn nothing of what fails here but that it is gone.

        What is raised says which rank it was, as a :class:`MemoptError`; lack of memory stays as it is.
        """
        try:
            yield
        except RankLostError:
            raise
        except MemoptError as err:
            raise _named(err, self.rank, self.count) from err
        except Exception as err:
            if is_out_of_memory(err) or _is_of_lost_rank(err):
                raise
            raise _named(StepError(first_line(err)), self.rank, self.count) from err

    def all(self, do: Callable[[], Found]) -> list[Found]:
        """What ``do`` gives on each rank, which can be pickled.  Raises as :meth:`each`."""
        return self._gathered(self.each(do))

    def _gathered(self, mine: Found) -> list[Found]:
        told: list[Any] = [None] * self.count
        with lost_ranks_told():
            dist.all_gather_object(told, mine, group=self._group)
        return told

    def first(self, do: Callable[[], Found]) -> Found:
        """What ``do`` gives on the first rank, which alone does it.  Raises as :meth:`all`."""
        return self.all(lambda: do() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def require_same(self, what: str, value: Any) -> str:
        """The digest of a value that is to be the same on all ranks.  Raises :class:`UsageError` where it is not."""
        digests = self.all(lambda: digest_of(value))
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise UsageError(
                f"rank {other} has another {what} than rank 0: its digest is {digests[other][:12]}, "
                f"not {digests[0][:12]}",
                hint="Give every rank the same files and flags, and the same version of them.",
            )
        return digests[0]


@contextlib.contextmanager
def ranks_of(group: dist.ProcessGroup | None, limit: timedelta) -> Iterator[Ranks]:
    """The ranks of a group; ``None``: of all.

    All talk through a group of gloo's for this alone, in which one waits for another as long as ``limit``; those of
    another group through that, whose backend has a limit of its own.
    """
    if group is not None and group is not dist.group.WORLD:
        yield Ranks(group)
        return
    with lost_ranks_told():
        ours = dist.new_group(timeout=limit, backend="gloo")
    assert isinstance(ours, dist.ProcessGroup), "all are in it"
    try:
        yield Ranks(ours)
    finally:
        dist.destroy_process_group(ours)


@contextlib.contextmanager
def lost_ranks_told() -> Iterator[None]:
    """Within, what a backend raises because another rank is gone becomes a :class:`RankLostError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RankLostError) or not _is_of_lost_rank(error):
            raise
        raise RankLostError(
            f"another rank has ended, or does not answer: {first_line(error)}",
            hint="What that rank says, or the log of its process, tells why.",
        ) from error


def _named(error: MemoptError, rank: int, ranks: int) -> MemoptError:
    return type(error)(f"rank {rank} of {ranks}: {error.message}", hint=error.hint)


def parameters_of(model: nn.Module) -> list[tuple[str, str, str]]:
    """Name, shape and dtype of each: what ranks must have alike, or they would wait for each other without end."""
    return [(name, str(tuple(p.shape)), str(p.dtype)) for name, p in model.named_parameters()]


def digest_of(value: Any) -> str:
    """Of records and plain values: the same in every process."""
    return hashlib.sha256(json.dumps(to_data(value), sort_keys=True).encode()).hexdigest()


def _is_of_lost_rank(error: BaseException) -> bool:
    """Or of what follows from it: code of the user's, and ours, may raise something else on top."""
    chain: BaseException | None = error
    while chain is not None:
        if is_of_lost_rank(chain):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _as_told(error: BaseException | None) -> MemoptError | None:
    """To the other ranks, which may not know its class."""
    if error is None or isinstance(error, MemoptError):
        return error and type(error)(error.message, hint=error.hint)
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    return MeasurementError(first_line(error))
