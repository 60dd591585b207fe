"""Which costly outputs a segment keeps, and how a plan names them."""

from __future__ import annotations

from memopt_cli.records import OpTrace, StepTrace, StorageTrace
from memopt_cli.search.plan.keeping import CostlyCall, candidate_sets, costly_calls, keep_names, kept_calls

CONV, MM, RELU = "aten::convolution", "aten::mm", "aten::relu_"


def call(op: int, nbytes: int = 8, seconds: float = 1.0, name: str = CONV, module: str = "") -> CostlyCall:
    return CostlyCall(op=op, name=name, module=module, nbytes=nbytes, seconds=seconds)


def storage(nbytes: int, born: int) -> StorageTrace:
    return StorageTrace(nbytes=nbytes, kind="activations", module="", born=born, died=None, freed=None)


def step(*ops: OpTrace, sizes: tuple[int, ...]) -> StepTrace:
    storages = tuple(storage(size, born) for born, size in enumerate(sizes))
    return StepTrace(modules=(), tensor_peak_bytes=0, resident_bytes=0, batch=1, ops=ops, storages=storages)


def test_costly_are_those_that_compute_and_what_is_written_later_is_not_kept() -> None:
    trace = step(
        OpTrace(name=CONV, module="a", phase="forward", makes=(0,), flops=9),
        OpTrace(name="aten::add", module="a", phase="forward", makes=(1,)),
        OpTrace(name=MM, module="b", phase="forward", makes=(2,), flops=9),
        OpTrace(name=RELU, module="c", phase="forward", mutates=(2,)),
        OpTrace(name=MM, module="b", phase="backward", makes=(3,), flops=9),
        sizes=(16, 4, 8, 8),
    )
    calls = costly_calls(trace, [0.5, 0.1, 0.25, 0.1, 1.0])
    assert calls == [call(0, 16, 0.5, CONV, "a"), call(2, 0, 0.25, MM, "b")]
    assert candidate_sets(calls) == [{0}]


def test_first_what_saves_most_time_for_a_byte() -> None:
    calls = [call(0, 8, 1.0), call(1, 2, 1.0), call(2, 8, 3.0), call(3, 0, 9.0), call(4, 8, 0.0)]
    assert candidate_sets(calls) == [{1}, {1, 2}, {1, 2, 0}]


def test_few_choices_of_many_calls_and_none_of_very_many() -> None:
    assert [len(kept) for kept in candidate_sets([call(i) for i in range(12)])] == [2, 4, 6, 8, 10, 12]
    assert candidate_sets([call(i) for i in range(25)]) == []


def test_names_count_the_calls_outside_of_inner_segments() -> None:
    calls = [call(0, module="a"), call(1, module="b.0"), call(2, name=MM, module="a"), call(3, module="c")]
    assert keep_names(calls, {0, 1, 3}, []) == (CONV,)
    assert keep_names(calls, {0, 1, 2}, []) == (f"{CONV}#1", f"{CONV}#2", MM)
    assert keep_names(calls, {1, 3}, ["b"]) == (f"{CONV}#2",)
    assert keep_names(calls, {1}, ["b"]) == ()


def test_names_mean_the_same_calls_again() -> None:
    trace = step(
        *(OpTrace(name=name, module="", phase="forward", flops=1) for name in (CONV, MM, CONV, CONV)), sizes=()
    )
    calls = costly_calls(trace, [1.0] * 4)
    for kept in ({0}, {2, 3}, {0, 1, 2, 3}, {1, 3}):
        assert set(kept_calls(trace, range(4), keep_names(calls, kept, []))) == kept
    assert set(kept_calls(trace, [1, 2, 3], [f"{CONV}#1"])) == {2}
