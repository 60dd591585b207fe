"""Exchange among the ranks of a real group, so that all have the same results, and all stop if one fails.

A rank that raises while others wait in a collective would leave them waiting until the time limit.  So each job ends
with an exchange of results or errors (:meth:`Ranks.on_each`).
"""

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
    error_chain,
    first_line,
)
from memopt_cli.records import to_data
from memopt_cli.runtime.private_torch import means_lost_rank
from memopt_cli.training.step import is_out_of_memory

Result = TypeVar("Result")


class Ranks:
    """The ranks of a group.  All methods but :meth:`alone` are collectives, which every rank must call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.count: int = dist.get_world_size(group)

    def on_each(self, do: Callable[[], Result]) -> Result:
        """Call ``do`` on all ranks, and return this rank's result; ``do`` itself must not wait for other ranks.

        If it fails on any rank, all ranks raise.  The first rank that failed raises its own exception; the others raise
        a :class:`MemoptError` of the same class, or a :class:`MeasurementError` for an exception of any other kind.
        """
        error: BaseException | None = None
        try:
            result = do()
        except BaseException as err:  # also Ctrl-C: the other ranks would wait for this one
            error = err
        failures = {rank: sent for rank, sent in enumerate(self._gather(_sendable(error))) if sent is not None}
        if error is not None and (self.rank == min(failures) or not isinstance(error, Exception)):
            raise error
        if failures:
            first, failure = next(iter(failures.items()))
            is_common = len(failures) == self.count and len({other.message for other in failures.values()}) == 1
            # all ranks failed alike, so no rank is named
            raise failure if is_common else _with_rank(failure, first, self.count)
        return result

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Name this rank in errors of the block, in which ranks wait for each other and so cannot exchange errors.

        Any error becomes a :class:`MemoptError` that names the rank, except an out-of-memory error.  Other ranks only
        notice that this one is gone.
        """
        try:
            yield
        except RankLostError:
            raise
        except MemoptError as err:
            raise _with_rank(err, self.rank, self.count) from err
        except Exception as err:
            if is_out_of_memory(err) or _comes_from_lost_rank(err):
                raise
            raise _with_rank(StepError(first_line(err)), self.rank, self.count) from err

    def all(self, do: Callable[[], Result]) -> list[Result]:
        """Call ``do`` on all ranks, and return all results, which must be picklable.  Raises like :meth:`on_each`."""
        return self._gather(self.on_each(do))

    def _gather(self, mine: Result) -> list[Result]:
        results: list[Any] = [None] * self.count
        with reporting_lost_ranks():
            dist.all_gather_object(results, mine, group=self._group)
        return results

    def on_first(self, do: Callable[[], Result]) -> Result:
        """Call ``do`` only on rank 0, and return its result on all ranks.  Raises like :meth:`on_each`."""
        return self.all(lambda: do() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def require_same(self, what: str, value: Any) -> str:
        """Return the digest of ``value``.  Raises :class:`UsageError` unless it is the same on all ranks."""
        digests = self.all(lambda: compute_digest(value))
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise UsageError(
                f"rank {other} has a different {what} from rank 0: its digest is {digests[other][:12]}, "
                f"not {digests[0][:12]}",
                hint="Use the same files, in the same version, and the same flags on every rank.",
            )
        return digests[0]


@contextlib.contextmanager
def ranks_of(group: dist.ProcessGroup | None, limit: timedelta) -> Iterator[Ranks]:
    """Yield the ranks of ``group``, or all ranks for ``None``.

    All ranks exchange through a gloo group made for this, whose collectives time out after ``limit``.  A smaller group
    is used itself, with the time limit of its backend.
    """
    if group is not None and group is not dist.group.WORLD:
        yield Ranks(group)
        return
    with reporting_lost_ranks():
        group = dist.new_group(timeout=limit, backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank is in a group made for all"
    try:
        yield Ranks(group)
    finally:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def reporting_lost_ranks() -> Iterator[None]:
    """Raise a :class:`RankLostError` where a backend's error in the ``with`` block means that a rank is gone."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RankLostError) or not _comes_from_lost_rank(error):
            raise
        raise RankLostError(
            f"another rank has ended, or does not answer: {first_line(error)}",
            hint="The output of that rank, or the log of its process, has the reason.",
        ) from error


def _with_rank(error: MemoptError, rank: int, ranks: int) -> MemoptError:
    return type(error)(f"rank {rank} of {ranks}: {error.message}", hint=error.hint)


def parameter_signatures(model: nn.Module) -> list[tuple[str, str, str]]:
    """List name, shape and dtype of every parameter of ``model``; ranks that differ in them would wait forever."""
    return [(name, str(tuple(p.shape)), str(p.dtype)) for name, p in model.named_parameters()]


def compute_digest(value: Any) -> str:
    """Return a digest of ``value``, a record or plain values; equal values have equal digests in all processes."""
    return hashlib.sha256(json.dumps(to_data(value), sort_keys=True).encode()).hexdigest()


def _comes_from_lost_rank(error: BaseException) -> bool:
    """Return whether ``error``, or an error that caused it, means that a rank is gone."""
    return any(map(means_lost_rank, error_chain(error)))


def _sendable(error: BaseException | None) -> MemoptError | None:
    """Return ``error`` as a :class:`MemoptError` for other ranks, which may not be able to unpickle its own class."""
    if error is None or isinstance(error, MemoptError):
        return error and type(error)(error.message, hint=error.hint)
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    return MeasurementError(first_line(error))
