"""Bytes that a recorded step holds at each of its operators: the sums from which ``block_tree.py`` makes its blocks.

Several operators may keep one storage for backward.  The first that takes it as an input pays for it; the docstring of
``block_tree.py`` has an example.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from itertools import accumulate

from memopt_cli.records import ModuleCall, StepTrace


class OperatorBytes:
    """Lists of bytes with an entry for each operator of a step."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._is_forward = [op.phase == "forward" for op in trace.ops]
        self._backward_starts = [
            op for op, ran in enumerate(trace.ops) if ran.phase == "backward" and trace.ops[op - 1].phase != "backward"
        ]
        """Operators at which a backward begins; several in a user's own step."""
        self.payer: dict[int, int] = {}
        """Storage kept for backward -> the operator that pays for it."""
        self.paid, self.paid_packed = self._compute_payments()
        """Prefix sums of the bytes that forward operators pay for: without packing, and with it."""
        self.base, self.entry, self.resident = self._levels()
        """Three lists of bytes alive that are not kept for backward: while an operator runs, with its workspace; before
        it runs; and the part that no plan changes (parameters, gradients, inputs)."""
        self.whole = self._compute_whole()
        """At every operator, bytes of packable tensors that exist unpacked: in forward, or where backward uses them."""

    def _compute_payments(self) -> tuple[list[int], list[int]]:
        """Compute :attr:`payer`, :attr:`paid` and :attr:`paid_packed`."""
        count = len(self._trace.ops) + 1
        paid, packed = [0] * count, [0] * count
        for index, storage in enumerate(self._trace.storages):
            savers = [op for op in storage.saved_by if self._is_forward[op]]
            if savers and storage.born >= 0:
                readers = (op for op in savers if op != storage.born and index not in self._trace.ops[op].mutates)
                payer = min(readers, default=savers[0])
                self.payer[index] = payer
                paid[payer + 1] += storage.nbytes
                packed[payer + 1] += storage.nbytes if storage.compressor == "null" else storage.packed_bytes
        return list(accumulate(paid)), list(accumulate(packed))

    def _levels(self) -> tuple[list[int], list[int], list[int]]:
        """Compute :attr:`base`, :attr:`entry` and :attr:`resident`."""
        count = len(self._trace.ops)
        base, entry, resident = [0] * (count + 1), [0] * (count + 2), [0] * (count + 1)
        for index, storage in enumerate(self._trace.storages):
            born = max(0, storage.born)
            died = count if storage.died is None else storage.died
            is_kept = index in self.payer
            is_resident = storage.born < 0 or storage.kind in ("gradients", "optimizer", "parameters", "buffers")
            for level, is_counted in ((base, not is_kept), (resident, is_resident)):
                if is_counted and died > born:
                    level[born] += storage.nbytes
                    level[died] -= storage.nbytes
            if not is_kept and died > born + 1:  # exists before the operator after its maker runs, and later ones
                entry[born + 1 if storage.born >= 0 else 0] += storage.nbytes
                entry[died] -= storage.nbytes
        levels = list(accumulate(base[:-1]))
        for index, op in enumerate(self._trace.ops):
            levels[index] += op.workspace_bytes
        return levels, list(accumulate(entry[:-2])), list(accumulate(resident[:-1]))

    def _compute_whole(self) -> list[int]:
        level = [0] * (len(self._trace.ops) + 1)
        for index in self.payer:
            storage = self._trace.storages[index]
            end = self._end_of_forward(storage.born)
            freed = end if storage.freed is None else min(storage.freed, end)
            # Backward, if it uses the storage at all, does so unpacked, in the operator right before it dies.
            use_end = storage.died if storage.died is not None and storage.died > end else 0
            for start, stop in ((storage.born, freed), (use_end - 1, use_end)):
                if storage.compressor != "null" and stop > start >= 0:
                    level[start] += storage.nbytes
                    level[stop] -= storage.nbytes
        return list(accumulate(level[:-1]))

    def _end_of_forward(self, op: int) -> int:
        """Return the operator at which the first backward after ``op`` begins."""
        if not self._backward_starts:
            return len(self._is_forward)
        index = bisect.bisect_left(self._backward_starts, op)
        return self._backward_starts[min(index, len(self._backward_starts) - 1)]

    def bytes_paid_later(self, forward: range, backward: range) -> tuple[dict[int, int], dict[int, int]]:
        """Return, by operator, the bytes made in ``forward`` and paid for later: all, and those that are not packed."""
        changes: tuple[dict[int, int], dict[int, int]] = defaultdict(int), defaultdict(int)
        for index in range(*self._born_in(forward)):
            storage = self._trace.storages[index]
            if self.payer.get(index, -1) < forward.stop:
                continue
            for change in changes if storage.compressor == "null" else changes[:1]:
                change[storage.born] += storage.nbytes
                if storage.died is None or storage.died > backward.start:
                    change[backward.start] += storage.nbytes
                    change[backward.stop if storage.died is None else storage.died] -= storage.nbytes

        def levels(change: dict[int, int]) -> dict[int, int]:
            sums = ((ops, accumulate(change[op] for op in ops)) for ops in (forward, backward))
            return {op: level for ops, alive in sums for op, level in zip(ops, alive, strict=True)}

        return levels(changes[0]), levels(changes[1])

    def forward_alone(self, call: ModuleCall) -> int:
        """Return the most bytes at any instant of the forward of ``call`` if autograd saves nothing in it."""
        level: dict[int, int] = defaultdict(int)
        for index in range(*self._born_in(call.forward)):
            storage = self._trace.storages[index]
            freed = call.end if storage.freed is None else min(storage.freed, call.end)
            if index in self.payer and freed > storage.born:
                level[storage.born] += storage.nbytes
                level[freed] -= storage.nbytes
        alive = highest = 0
        for op in call.forward:
            alive += level.get(op, 0)
            highest = max(highest, alive + self.base[op])
        return highest

    def _born_in(self, ops: range) -> tuple[int, int]:
        """Return the range of storages that the operators ``ops`` make; storages are in the order of birth."""
        storages = self._trace.storages
        return (
            bisect.bisect_left(storages, ops.start, key=lambda s: s.born),
            bisect.bisect_left(storages, ops.stop, key=lambda s: s.born),
        )
