"""Plans that send tensors away: by the cost model, beside dry runs, and as the planner finds them."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from memopt_cli.records import Plan, SearchOptions, SegmentPlan
from memopt_cli.runtime import packing
from memopt_cli.runtime.places import schedule
from memopt_cli.search.plan import replay, sending
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.planner import Planner
from memopt_cli.search.plan.sending import (
    NEVER_NEEDED,
    SentParcel,
    SentTensor,
    fewer_sent,
    schedule_parcels,
    sending_variants,
    waits_s,
)
from sample_models import gpt
from tests.search.plan.subjects import Chain, Subject, segments

BLOCKS = [f"blocks.{i}" for i in range(6)]
FAST, SLOW = 1e12, 2e7


@functools.cache
def chain() -> Subject:
    return Subject(Chain(), torch.randn(4, 16, 24, 24))


@functools.cache
def transformer() -> Subject:
    return Subject(gpt.GPT(vocabulary=400, width=128, heads=2, blocks=6), torch.randint(0, 400, (64, 64)))


def planner(subject: Subject, rate: float, level: int = 2) -> Planner:
    trace = replace(subject.trace, out_bytes_per_s=rate, in_bytes_per_s=rate)
    return Planner(trace, subject.original, subject.probes(), SearchOptions(level=level), place="disk")


def test_a_parcel_is_given_up_by_the_next_and_fetched_by_the_one_that_backward_asks_for_before() -> None:
    first, empty, last = SentParcel(1, 20), SentParcel(3, NEVER_NEEDED), SentParcel(5, 12)
    schedule_parcels([last, first, empty])
    assert (first.given_up_at, first.fetch_at) == (3, 12)
    assert empty.given_up_at == 5
    assert last.given_up_at is None


def test_copies_that_compute_covers_cost_the_step_no_wait_and_late_ones_what_is_missing() -> None:
    elapsed = [float(second) for second in range(30)]
    parcel = SentParcel(complete_at=2, needed_at=20, given_up_at=4, fetch_at=18)
    sent = [SentTensor(parcel, 1, 6)]
    assert waits_s(sent, elapsed, 6.0, 6.0) == 0.0
    assert waits_s(sent, elapsed, 1.0, 6.0) == pytest.approx(3)  # 6 s out, of which 3 are covered
    assert waits_s(sent, elapsed, 6.0, 1.0) == pytest.approx(4)  # 6 s back, of which 2 are covered


def test_copies_go_one_after_another_and_a_wait_delays_what_comes_later() -> None:
    elapsed = [float(second) for second in range(30)]
    first = SentParcel(complete_at=2, needed_at=20, given_up_at=4, fetch_at=18)
    second = SentParcel(complete_at=4, needed_at=18, given_up_at=6, fetch_at=16)
    sent = [SentTensor(first, 1, 6), SentTensor(second, 3, 4)]
    # Out: the first ends at 7 and makes the step wait 3 s; the second ends at 11, and by then the step is at 9.
    assert waits_s(sent, elapsed, 1.0, 100.0) == pytest.approx(3 + 2)


@pytest.mark.parametrize("subject", [chain, transformer])
@pytest.mark.parametrize("base", [Plan(), segments(*BLOCKS), segments(*BLOCKS[::2])], ids=["none", "all", "half"])
def test_the_cost_model_follows_the_schedule(subject: object, base: Plan) -> None:
    found = subject()  # type: ignore[operator]
    for plan in sending_variants(base, "disk"):
        assert abs(found.error(plan)) < 0.15, plan  # views that are saved are not told apart in a trace
        elsewhere_bytes = found.count(plan).elsewhere_bytes
        assert found.model.predict(plan).elsewhere_bytes == pytest.approx(elsewhere_bytes, rel=0.15)


def test_waits_are_a_part_of_the_step_time() -> None:
    subject, plan = transformer(), replace(segments(*BLOCKS), place="disk")
    fast, slow = (
        CostModel(replace(subject.trace, out_bytes_per_s=r, in_bytes_per_s=r)).predict(plan) for r in (FAST, SLOW)
    )
    assert fast.waits_s < 1e-4 < slow.waits_s
    assert slow.step_s - slow.waits_s == pytest.approx(fast.step_s - fast.waits_s)
    assert subject.model.predict(segments(*BLOCKS)).waits_s == 0.0


def test_copies_of_the_cpu_take_time_from_the_step() -> None:
    subject, plan = transformer(), replace(segments(*BLOCKS), place="disk")
    busy, idle = (CostModel(replace(subject.trace, copying_s_per_byte=s)).predict(plan) for s in (1e-9, 0.0))
    assert busy.waits_s == idle.waits_s
    given_up_bytes = (busy.step_s - idle.step_s) / 1e-9
    assert 0.5 < given_up_bytes / busy.elsewhere_bytes <= 1  # the last parcels stay


def test_what_a_fast_disk_takes_beats_recomputation_and_what_a_slow_one_would_does_not() -> None:
    subject = transformer()
    budget = subject.original.allocated_peak_bytes * 2 // 3
    fast, slow = planner(subject, FAST).within(2, budget), planner(subject, SLOW).within(2, budget)
    plain = subject.planner(level=2).within(2, budget)
    assert fast is not None
    assert slow is not None
    assert plain is not None
    assert fast.plan.sends
    assert fast.peak_bytes == subject.dry_run(fast.plan) <= budget
    assert fast.slowdown < plain.slowdown
    assert slow.slowdown <= plain.slowdown


def test_nothing_is_sent_that_the_budget_does_not_need() -> None:
    subject = transformer()
    plans = planner(subject, FAST)
    budget = subject.original.allocated_peak_bytes * 2 // 3
    found = plans.within(2, budget)
    assert found is not None
    assert all(subject.model.predict(plan).allocated_peak_bytes > 0.98 * budget for plan in fewer_sent(found.plan))


@pytest.mark.parametrize("limit", ["host_memory", "room_bytes"])
def test_no_more_is_sent_than_there_is_room_for(limit: str) -> None:
    subject = transformer()
    every = replace(segments(*BLOCKS), segments=tuple(SegmentPlan(path=path, place="disk") for path in BLOCKS))
    room = subject.count(every).elsewhere_bytes // 2
    limits = dict.fromkeys(["host_memory", "room_bytes"], 4 * room) | {limit: room}
    trace = replace(subject.trace, out_bytes_per_s=FAST, in_bytes_per_s=FAST, room_bytes=limits["room_bytes"])
    options = SearchOptions(level=2, host_memory=limits["host_memory"])
    plans = Planner(trace, subject.original, subject.probes(), options, place="disk")
    least = plans.least(2)
    sending = [found for found in plans.dry_runs.up_to(2) if found.plan.sends]
    assert max(found.counted.elsewhere_bytes for found in sending) > room // 2
    assert all(found.counted.elsewhere_bytes <= room for found in sending)
    assert planner(subject, FAST).least(2).peak_bytes < least.peak_bytes


def test_only_the_level_that_is_asked_for_sends() -> None:
    plans = planner(chain(), FAST, level=2)
    assert not plans.least(1).plan.sends
    assert plans.least(2).peak_bytes < plans.dry_runs.smallest(1).peak_bytes
    assert plans.dry_runs.smallest(2).plan.sends


def test_variants_send_what_outer_whole_segments_store_and_never_beside_packing_outside_of_them() -> None:
    outer, inner = SegmentPlan(path="a"), SegmentPlan(path="a.b")
    cut = SegmentPlan(path="c", chunks=2)
    plan = Plan(segments=(outer, inner, cut), packed=True)
    sent = replace(plan, segments=(replace(outer, place="disk"), inner, cut))
    assert list(sending_variants(plan, "disk")) == [sent]
    unpacked = replace(plan, packed=False)
    assert list(sending_variants(unpacked, "disk")) == [
        replace(sent, packed=False),
        replace(unpacked, place="disk"),
        replace(sent, packed=False, place="disk"),
    ]
    assert set(fewer_sent(replace(sent, packed=False, place="disk"))) == {
        replace(sent, packed=False),
        replace(unpacked, place="disk"),
    }


def test_a_budget_is_met_that_recomputation_alone_does_not_meet() -> None:
    budget = chain().original.allocated_peak_bytes // 2
    assert chain().planner(level=2).within(2, budget) is None
    found = planner(chain(), FAST).within(2, budget)
    assert found is not None
    assert chain().dry_run(found.plan) <= budget


def test_the_search_counts_by_the_sizes_of_the_runtime() -> None:
    """It repeats them, since it works without torch."""
    assert (sending.MIN_SENT_BYTES, sending.SAVES_OF_A_PARCEL) == (schedule._MIN_SENT_BYTES, schedule._PARCEL_SAVES)
    assert replay.MIN_PACKED_BYTES == packing._MIN_PACKED_BYTES
