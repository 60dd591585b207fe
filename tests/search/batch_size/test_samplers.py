"""Batches by length: every index once, within the budget, the same on every rank."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memopt_cli.batching.sequences import padding_report
from memopt_cli.errors import BatchShapeError, UsageError
from memopt_cli.search.batch_size.samplers import LengthBucketSampler, LengthSampler, TokenBudgetSampler, make_divisible

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def positions(sampler: LengthSampler, lengths: list[int]) -> int:
    return padding_report([lengths[i] for i in batch] for batch in sampler).positions


@pytest.mark.slow
@given(LENGTHS, st.integers(1, 99), st.booleans(), st.integers(0, 5), st.integers(0, 3))
def test_a_token_budget_is_kept_and_every_index_comes_once(
    lengths: list[int], budget: int, shuffle: bool, seed: int, epoch: int
) -> None:
    sampler = TokenBudgetSampler(lengths, budget, oversize="alone", shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    assert len(sampler) == len(batches)
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= budget


@pytest.mark.slow
@given(LENGTHS, st.integers(1, 20), st.integers(0, 5))
def test_buckets_have_their_size_and_every_index_comes_once(lengths: list[int], size: int, seed: int) -> None:
    batches = list(LengthBucketSampler(lengths, size, seed=seed))
    assert sorted(flat(batches)) == list(range(len(lengths)))
    sizes = sorted(map(len, batches))
    assert sizes[1:] == [size] * (len(batches) - 1)
    assert len(batches) == -(-len(lengths) // size)


@pytest.mark.slow
@given(LENGTHS, st.integers(1, 20), st.integers(0, 99))
def test_buckets_never_pad_more_than_random_batches(lengths: list[int], size: int, seed: int) -> None:
    indices = list(range(len(lengths)))
    random.Random(seed).shuffle(indices)
    drawn = [indices[i : i + size] for i in range(0, len(indices), size)]
    random_report = padding_report([lengths[i] for i in batch] for batch in drawn)
    assert positions(LengthBucketSampler(lengths, size), lengths) <= random_report.positions


@pytest.mark.slow
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_buckets_are_the_best_there_are(lengths: list[int], size: int) -> None:
    least = min(
        padding_report(order[i : i + size] for i in range(0, len(order), size)).positions
        for order in permutations(lengths)
    )
    assert positions(LengthBucketSampler(lengths, size), lengths) == least


@pytest.mark.slow
@given(LENGTHS, st.integers(30, 120), st.integers(1, 5), st.integers(0, 3))
def test_ranks_share_the_batches_equally(lengths: list[int], budget: int, ranks: int, epoch: int) -> None:
    samplers = [TokenBudgetSampler(lengths, budget, rank=rank, ranks=ranks) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert len({len(share) for share in shares}) == 1
    assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
    together = flat([batch for share in shares for batch in share])
    assert set(together) == set(range(len(lengths)))
    if len(lengths) >= ranks * len(shares[0]):  # enough sequences for a batch each: none is repeated
        assert sorted(together) == list(range(len(lengths)))
    for share in shares:
        for batch in share:
            assert max(lengths[i] for i in batch) * len(batch) <= budget


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 6))
def test_batches_are_halved_rather_than_repeated(sizes: list[int], ranks: int) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    batches = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    divided = make_divisible(batches, ranks)
    assert len(divided) % ranks == 0
    needed = -(-len(batches) // ranks) * ranks
    assert len(divided) == needed
    assert set(flat(divided)) == set(range(sum(sizes)))
    assert (len(flat(divided)) == sum(sizes)) == (sum(sizes) >= needed)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = [random.Random(0).randint(1, 9) for _ in range(300)]

    def epochs(seed: int) -> list[list[list[int]]]:
        sampler = TokenBudgetSampler(lengths, 40, seed=seed)
        found = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            found.append(list(sampler))
        return found

    first, second, again = epochs(1)
    assert first == again == epochs(1)[0]
    assert first != second
    assert first != epochs(2)[0]
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}


def test_the_order_is_known() -> None:
    """The same on every machine and in every process: ranks rely on it."""
    sampler = TokenBudgetSampler([3, 1, 2, 3, 1], 4, seed=5)
    sampler.set_epoch(2)
    assert list(sampler) == [[2, 4], [3], [1], [0]]


def test_without_shuffling_the_longest_come_first() -> None:
    assert list(TokenBudgetSampler([1, 5, 3, 5], 10, shuffle=False)) == [[1, 3], [2, 0]]
    assert list(LengthBucketSampler([1, 5, 3, 5], 2, shuffle=False)) == [[1, 3], [2, 0]]


def test_a_sequence_beyond_the_budget() -> None:
    with pytest.raises(BatchShapeError, match="a sequence of 9 steps does not fit into 8 tokens"):
        TokenBudgetSampler([1, 9], 8)
    assert [1] in list(TokenBudgetSampler([1, 9, 2], 8, oversize="alone"))


@pytest.mark.slow
@given(LENGTHS, st.integers(30, 200))
def test_a_batch_is_as_full_as_it_can_be(lengths: list[int], budget: int) -> None:
    assume(len(lengths) > 1)
    batches = list(TokenBudgetSampler(lengths, budget, shuffle=False))
    for batch, following in pairwise(batches):
        assert lengths[batch[0]] * (len(batch) + 1) > budget
        assert lengths[batch[-1]] >= lengths[following[0]]


def test_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match="rank 2 of 2"):
        TokenBudgetSampler([1], 4, rank=2, ranks=2)
    with pytest.raises(BatchShapeError, match="sequence 1 has 0 steps"):
        LengthBucketSampler([1, 0], 4)
    with pytest.raises(BatchShapeError, match="lengths is empty"):
        LengthBucketSampler([], 4)
    for oversize in ("alone", "error"):
        with pytest.raises(BatchShapeError, match=r"max_tokens is 0; it must be at least 1$"):
            TokenBudgetSampler([1], 0, oversize=oversize)
    with pytest.raises(UsageError, match="batch_size is 0"):
        LengthBucketSampler([1], 0)
    with pytest.raises(UsageError, match="oversize is 'drop'"):
        TokenBudgetSampler([1], 4, oversize="drop")  # type: ignore[arg-type]
