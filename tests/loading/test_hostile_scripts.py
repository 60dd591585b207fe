"""Hostile scripts, programs and weights: each is refused by what is read of it, before PyTorch or Python suffer."""

from __future__ import annotations

import ast
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from memopt_cli.errors import MemoptError
from memopt_cli.loading import exported_graph, load_model, read_file
from memopt_cli.loading.archive import Archive
from memopt_cli.loading.description import describe_file
from memopt_cli.loading.exported_graph import Call, GraphReader, Op, settle_sizes
from memopt_cli.loading.exported_modules import Builder, Method, Scope
from memopt_cli.loading.pickles.described import MAX_SIZE, items_in
from memopt_cli.loading.script_archive import check_script_file
from memopt_cli.loading.script_objects import ScriptObjects
from memopt_cli.records import ModelSource
from memopt_cli.runtime.lifted.program import is_pure
from tests.loading import hostile_scripts
from tests.loading.archives import scripted, unzipped, zipped
from tests.loading.hostile_scripts import PerChannel, Plain, Restored, Rows, programs, scripts


@functools.cache
def hostile() -> dict[str, tuple[bytes, str]]:
    return scripts()


@pytest.mark.parametrize("make", [Plain, Restored, PerChannel, Rows])
def test_the_scripts_that_are_changed_are_sound(make: type) -> None:
    check_script_file(zipped(unzipped(scripted(make()))), "model.ts")


@pytest.mark.parametrize("case", hostile_scripts.CASES)
def test_a_hostile_script_is_refused_before_it_is_loaded(case: str) -> None:
    data, says = hostile()[case]
    with pytest.raises(MemoptError, match=says):
        check_script_file(data, "model.ts")


def test_inspecting_says_of_a_damaged_script_what_loading_says(tmp_path: Path) -> None:
    path = tmp_path / "model.ts"
    path.write_bytes(hostile()["a pickle in capitals"][0])
    said = []
    for use in (lambda: describe_file(read_file(str(path))), lambda: load_model(ModelSource(location=str(path)))):
        with pytest.raises(MemoptError) as error:
            use()
        said.append(error.value.message)
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a deep path", "huge sizes", "a size that is no whole number", "many sizes"])
def test_a_program_of_impossible_sizes_is_refused(case: str, tmp_path: Path) -> None:
    data, says = programs()[case]
    (tmp_path / "model.pt2").write_bytes(data)
    with pytest.raises(MemoptError, match=says) as error:
        describe_file(read_file(str(tmp_path / "model.pt2")))
    assert len(error.value.message) < 300


@pytest.mark.parametrize("sizes", [[-1], [2**63], [1.0], [True], [1] * 65, [2**62, 0, 2]])
def test_no_tensor_has_such_sizes(sizes: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="sizes"):
        items_in(sizes)


def test_names_of_a_script_s_parts_are_bounded() -> None:
    """Written once, such a name is in the paths of all modules below."""

    def declared(length: int) -> ScriptObjects:
        return ScriptObjects({"code/__torch__.py": ast.parse(f"class A(Module):\n  {'m' * length} : int\n")})

    declared(500)
    with pytest.raises(ValueError, match="a name of 501 characters"):
        declared(501)


def test_items_are_bounded() -> None:
    assert items_in([2**62] * 64) == MAX_SIZE
    assert items_in([2**62, 0]) == 0
    assert items_in([]) == 1
    assert items_in([3, 4]) == 12


def _operators(count: int) -> list[Op]:
    return [
        Op(kind="operator", detail="aten::add.int", operands=((1,), (1,)), outputs=(f"s{i}",)) for i in range(count)
    ]


def _calls(count: int) -> list[Op]:
    call = [(Call(key=str(i), path=("a",), class_name="A"),) for i in range(2)]
    return [
        Op(kind="operator", detail="aten::relu", operands=(f"v{i}",), outputs=(f"v{i + 1}",), stack=call[i % 2])
        for i in range(count)
    ]


def _sequence(ops: list[Op]) -> None:
    builder = Builder(GraphReader(), {}, frozenset())
    method = Method(builder, (), Scope("A"))
    method.value("v0", "x")
    method.sequence(ops, 0, set())


def _scope(numbers: Sequence[int]) -> None:
    scope = Scope("A")
    for i in numbers:
        scope.add((), (), i)


def test_operators_on_sizes_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted(kind: str, detail: object) -> bool:
        looks.append(kind)
        return is_pure(kind, detail)

    monkeypatch.setattr(exported_graph, "is_pure", counted)
    assert len(settle_sizes(_operators(1000))) == 1000
    assert len(looks) == 1000


@pytest.mark.slow
@pytest.mark.parametrize(("make", "work"), [(_calls, _sequence), (range, _scope)], ids=["sequence", "methods"])
def test_twice_as_many_take_twice_as_long(make: Callable[[int], Any], work: Callable[[Any], None]) -> None:
    fewer, more = make(4000), make(8000)
    assert statistics.median(_time(work, more) / _time(work, fewer) for _ in range(5)) < 3


def _time(work: Callable[[Any], None], items: Any) -> float:
    gc.collect()
    gc.disable()
    start = time.process_time()
    work(items)
    taken = time.process_time() - start
    gc.enable()
    return taken


@pytest.mark.slow
def test_weights_that_share_a_record_share_its_memory(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(hostile_scripts.sharing(100))
    module = load_model(ModelSource(location=str(tmp_path / "model.pt2"))).module
    assert len({t.untyped_storage().data_ptr() for n, t in module.named_buffers() if n.startswith("copy")}) == 1


def test_an_archive_has_one_record_of_each_name_with_and_without_its_folder() -> None:
    with pytest.raises(MemoptError, match="two records"):
        Archive(hostile()["a pickle outside the folder"][0], "model.ts")


def test_casts_of_real_models_are_kept() -> None:
    data = scripted(nn.LSTM(2, 3))
    assert any(b"unchecked_cast(Tuple[Tensor, Tensor], " in record for record in unzipped(data).values())
    check_script_file(data, "model.ts")
