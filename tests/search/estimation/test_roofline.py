"""Times and peaks on a device that is not here, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt_cli.records import DeviceProfile, OpTrace, StepTrace, StorageTrace
from memopt_cli.search.estimation import Lifetime, add_seconds, estimate, needed_bytes, operator_s

MIB = 2**20
CARD = DeviceProfile(
    name="card",
    memory_bytes=100 * MIB,
    bandwidth_bytes_per_s=1e9,
    flops_per_s={"fp32": 1e12, "tf32": 8e12, "bf16": 16e12},
    launch_s=1e-6,
    library_bytes=8 * MIB,
)


def op(name: str = "aten::mm", *, flops: int = 0, moved: int = 0, dtype: str = "float32", **fields: object) -> OpTrace:
    made: dict[str, object] = {"module": "", "phase": "forward", "makes": (0,), **fields}
    return OpTrace(name=name, flops=flops, moved_bytes=moved, dtype=dtype, **made)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ran", "seconds"),
    [
        (op(flops=10**12, moved=10), 1.0),
        (op(flops=10**12, moved=2 * 10**9), 2.0),
        (op("aten::relu", moved=5 * 10**8), 0.5),
        (op("aten::add", moved=4), 1e-6),
        (op(flops=16 * 10**12, dtype="bfloat16"), 1.0),
        (op("aten::convolution", flops=8 * 10**12), 1.0),
        (op("aten::convolution_backward", flops=16 * 10**12, dtype="bfloat16"), 1.0),
        (op(flops=10**12, dtype="float16"), 1.0),  # a rate that the card does not say
        (op("aten::view", moved=10**9, makes=()), 0.0),
        (op("aten::add_", moved=10**9, makes=(), mutates=(0,)), 1.0),
    ],
)
def test_an_operator_takes_what_takes_longest(ran: OpTrace, seconds: float) -> None:
    assert operator_s(ran, CARD) == pytest.approx(seconds)


def step(*storages: tuple[int, int, int | None], ops: tuple[OpTrace, ...]) -> StepTrace:
    traced = (StorageTrace(nbytes=n, kind="activations", module="", born=b, died=d, freed=d) for n, b, d in storages)
    return StepTrace(
        modules=(), tensor_peak_bytes=sum(n for n, *_ in storages), resident_bytes=0, batch=1, ops=ops,
        storages=tuple(traced),
    )  # fmt: skip


def test_a_step() -> None:
    products = op(flops=10**12), op(flops=10**12, phase="backward"), op("aten::add", moved=10**8, phase="update")
    trace = add_seconds(step((20 * MIB, -1, None), (100, 0, 2), (3 * MIB, 1, None), ops=products), CARD)
    found = estimate(trace, CARD)
    assert found.step_s == pytest.approx(2.1)
    assert found.allocated_peak_bytes == (8 + 8 + 20 + 4) * MIB + 512  # 3 of the 4 that are left
    assert found.reserved_peak_bytes == (20 + 20 + 2) * MIB  # 8 + 8 + 3 of one, 20, and a small one
    assert found.fits


def test_without_products_the_library_keeps_nothing() -> None:
    found = estimate(step((512, 0, None), ops=(op("aten::add"),)), CARD)
    assert found.allocated_peak_bytes == 512


def test_kernels_of_this_machine_have_no_workspace_there() -> None:
    trace = step((512, 0, None), ops=(op(workspace_bytes=7, fixed_workspace_bytes=3),))
    there = add_seconds(replace(trace, allocated_peak_bytes=519), CARD)
    assert there.allocated_peak_bytes == 512
    assert (there.ops[0].workspace_bytes, there.ops[0].fixed_workspace_bytes) == (0, 0)


def test_a_step_fits_if_segments_can_be_given_back() -> None:
    lives = (60 * MIB, 0, 1), (80 * MIB, 1, None)
    found = estimate(step(*lives, ops=(op("aten::add"),) * 2), CARD)
    assert found.reserved_peak_bytes == 140 * MIB
    assert found.fits
    small = replace(CARD, memory_bytes=79 * MIB)
    assert not estimate(step(*lives, ops=(op("aten::add"),) * 2), small).fits


def test_a_step_without_room_needs_what_would_be_reserved() -> None:
    lives = [Lifetime(nbytes=60 * MIB, born=0, died=1), Lifetime(nbytes=80 * MIB, born=1, died=None)]
    assert needed_bytes(lives, CARD) == 80 * MIB
    assert needed_bytes(lives, replace(CARD, memory_bytes=79 * MIB)) == 140 * MIB
