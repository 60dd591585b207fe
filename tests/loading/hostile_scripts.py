"""TorchScript archives, exported programs and weights made to do harm, each a sound one with one thing changed."""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.loading.archives import (
    WEIGHTS_CONFIG,
    Records,
    exported,
    scripted,
    unzipped,
    with_record_by_weight,
    zipped,
)
from tests.zoo.models import Parts

CODE = "code/__torch__/tests/loading/hostile_scripts.py"
CLASS = "__torch__.tests.loading.hostile_scripts"


class Inner(nn.Linear):
    """Of a name that is the same whatever else was scripted before."""


class Plain(nn.Module):
    """The model that is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Inner(3, 4)
        self.pair = (5, 6)
        self.text = "abc"
        self.names = ["a", "b"]
        self.register_buffer("steps", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.pair
        return self.linear(x) * first + self.steps.sum() * second + len(self.text) + len(self.names)


class Restored(Parts, text="abc"):
    """Its code takes its state when it is loaded."""

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.text, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.text = state[0]
        self.training = state[1]

    def forward(self, x: Tensor) -> Tensor:
        return x * len(self.text)


class PerChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.qint8)
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.dequantize().sum()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.quantize_per_channel(torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint8)
        self.packed = torch.ops.quantized.embedding_bag_prepack(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Change:
    """One edit of one record: ``old``, which is there, becomes ``new``; or a record's name does."""

    record: str
    old: bytes
    new: bytes
    says: str
    make: type[nn.Module] = Plain

    def archive(self) -> bytes:
        records = dict(script_of(self.make))
        assert self.old in records[self.record], self.says
        records[self.record] = records[self.record].replace(self.old, self.new, 1)
        return zipped(records)


@functools.cache
def script_of(make: type[nn.Module]) -> Records:
    return unzipped(scripted(make()))


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


_SHAPE = b"(K\x08t(K\x01t"
_FIRST = b"    linear = self.linear\n"
_SET_TEXT = b"    self.text = (state)[0]\n"
_LINEAR = f"  linear : {CLASS}.Inner\n".encode()
_DOUBLING = b'    z0 = "aa"\n' + b"".join(b"    z%d = torch.add(z%d, z%d)\n" % (i + 1, i, i) for i in range(31))
_DEEP = "List[" * 100_000 + "int" + "]" * 100_000

_CHANGES = {
    "a class of the archive as a storage": Change(
        "data.pkl", b"ctorch\nFloatStorage\n", b"c__torch__\nFloatStorage\n", "identity"
    ),
    "an object without a state": Change("data.pkl", b")\x81}", b")\x81q\xf0}", "BINPUT"),
    "a tuple that is too short": Change("data.pkl", b"K\x05K\x06\x86", b"K\x05\x85", "pair"),
    "a number in the place of a text": Change("data.pkl", _text("abc"), b"K\x01", "text"),
    "a tag of another type": Change("data.pkl", _text("List[str]"), _text("List[Tuple[int, int]]"), "type"),
    "a deep tag": Change("data.pkl", _text("List[str]"), _text(_DEEP), "type"),
    "a deep comment": Change(CODE, _FIRST, b"    # type: " + _DEEP.encode() + b"\n" + _FIRST, "comment"),
    "a chain of comparisons": Change(CODE, _FIRST, b"    z = x " + b"< x " * 20_000 + b"\n" + _FIRST, "deeper"),
    "a chain of conditions": Change(CODE, _FIRST, b"    z = True " + b"and True " * 20_000 + b"\n" + _FIRST, "deeper"),
    "a character of Python's own": Change(CODE, _FIRST, b"\r" + _FIRST, "characters"),
    "an object of another class": Change(CODE, _LINEAR, f"  linear : {CLASS}.Big\n".encode(), "linear"),
    "a cast to a larger class": Change(
        CODE, _FIRST, _FIRST + f"    b = unchecked_cast({CLASS}.Big, self)\n".encode(), "cast"
    ),
    "a cast of one tuple to another": Change(
        CODE, _FIRST, _FIRST + b"    p = self.pair\n    q = unchecked_cast(Tuple[int, int, int], p)\n", "cast"
    ),
    "a cast of an assigned argument": Change(
        CODE, _FIRST, _FIRST + b"    y = (1,)\n    q = unchecked_cast(Tuple[int, int], y)\n", "cast"
    ),
    "a cast by another name": Change(CODE, _FIRST, _FIRST + b"    c = unchecked_cast\n", "unchecked_cast"),
    "results that are not counted": Change(
        CODE, _FIRST, _FIRST + b"    p = self.pair\n    q = ops.prim.TupleUnpack(p)\n", "TupleUnpack"
    ),
    "a text that doubles when it is loaded": Change(CODE, _SET_TEXT, _DOUBLING + _SET_TEXT, "__setstate__", Restored),
    "a list that repeats when it is loaded": Change(
        CODE, _SET_TEXT, b'    z = ("a").ljust(1000000000)\n' + _SET_TEXT, "__setstate__", Restored
    ),
    "lists of lists when it is loaded": Change(
        CODE, _SET_TEXT, b"    a = [1, 1]\n    b = [a, a]\n" + _SET_TEXT, "__setstate__", Restored
    ),
    "a call of itself when it is loaded": Change(
        CODE, _SET_TEXT, b"    z = (self).__setstate__(state, )\n" + _SET_TEXT, "__setstate__", Restored
    ),
    "channels without a scale": Change(
        "data.pkl", b"(K\x03K\x02t(K\x02K\x01t", b"(K\x02K\x03t(K\x03K\x01t", "channels", PerChannel
    ),
    "embeddings packed by columns": Change("data.pkl", b"RtRK\x00t", b"RtRK\x01t", "channels", Rows),
}
CASES = (
    *_CHANGES,
    "a pickle in capitals",
    "a pickle outside the folder",
    "a tensor created and filled",
    "source lines that are not there",
    "source lines of no length",
    "a class that is there twice",
)


def scripts() -> dict[str, tuple[bytes, str]]:
    """Each hostile script, and a word of what is said of it."""
    found = {name: (change.archive(), change.says) for name, change in _CHANGES.items()}
    records = dict(script_of(Plain))
    assert _SHAPE in records["data.pkl"]
    wide = records["data.pkl"].replace(_SHAPE, b"(M\x00\x20t(K\x01t")
    capitals = {"DATA.pkl" if name == "data.pkl" else name: data for name, data in records.items()}
    found["a pickle in capitals"] = zipped({**capitals, "DATA.pkl": wide}), "data.pkl"
    found["a pickle outside the folder"] = _beside(records, wide), "two records"
    found["a tensor created and filled"] = (
        zipped({**records, "data.pkl": _filled(wide)}),
        f"steps of {CLASS}.Plain is not of type Tensor",
    )
    lines = next(name for name in records if name.endswith(".debug_pkl"))
    found["source lines that are not there"] = zipped({**records, lines: _lines(7)}), "source lines"
    found["source lines of no length"] = zipped({**records, lines: _lines(None)}), "source lines"
    twice = records[CODE].replace(_LINEAR, b"") + b"\n" + records[CODE]
    found["a class that is there twice"] = zipped({**records, CODE: twice}), "two classes"
    return found


def _filled(data: bytes) -> bytes:
    """Its wide tensor made by ``NEWOBJ`` and ``BUILD`` in place of ``REDUCE``."""
    wide = data.index(b"(M\x00\x20t(K\x01t")
    start = data.rindex(b"((", 0, wide)
    end = re.compile(rb"R(q.)?tR").search(data, wide)
    return data[:start] + b")\x81" + data[start : end.end() - 1] + b"b" + data[end.end() :]


def _beside(records: Records, wide: bytes) -> bytes:
    """PyTorch reads the pickle in the folder, and not the one next to the folder."""
    inside = {f"model/{name}": data for name, data in {**records, "data.pkl": wide}.items()}
    return zipped({**inside, "data.pkl": records["data.pkl"]}, folder="")


def _lines(index: int | None) -> bytes:
    """A table of source lines whose only row is made of the text of that number; or has no source."""
    texts = b"(" + _text("") + _text("def f():\n") + b"t"
    build = b"ctorch.jit._pickle\nbuild_intlist\n"
    source = b"(" + build + b"(](K%cetRK\x00K\x00t" % index if index is not None else b"("
    source = source if index is not None else b"(t"
    row = b"(K\x00(" + source + b"K\x00K\x01tK\x00t"
    return b"\x80\x02(" + _text("FORMAT_WITH_STRING_TABLE") + texts + b"(" + row + b"tt."


PROGRAM = "models/model.json"


def program(change: Callable[[Any], object]) -> bytes:
    """An exported program, its JSON changed."""
    records = unzipped(exported(nn.Sequential(nn.Linear(3, 4)), torch.ones(2, 3)))
    data = json.loads(records[PROGRAM])
    change(data["graph_module"]["graph"])
    return zipped({**records, PROGRAM: json.dumps(data).encode()})


def with_deep_path(graph: Any) -> None:
    graph["nodes"][0]["metadata"]["nn_module_stack"] = "k," + "a." * 8000 + "a,torch.nn.Linear"


def with_sizes(sizes: list[Any]) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        next(iter(graph["tensor_values"].values()))["sizes"] = [{"as_int": size} for size in sizes]

    return change


def programs() -> dict[str, tuple[bytes, str]]:
    return {
        "a deep path": (program(with_deep_path), "nested deeper"),
        "huge sizes": (program(with_sizes([1e308] * 1000)), "sizes"),
        "a size that is no whole number": (program(with_sizes([2.5])), "sizes"),
        "many sizes": (program(with_sizes([2**62] * 100_000)), "sizes"),
    }


class Buffers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        for i in range(count):
            self.register_buffer(f"copy{i}", torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.buffers():
            x = x + buffer
        return x


def sharing(count: int) -> bytes:
    """A program with many buffers, each another view of one record."""
    records = unzipped(with_record_by_weight(exported(Buffers(count), torch.ones(4, 4))))
    config = json.loads(records[WEIGHTS_CONFIG])
    for i, entry in enumerate(config["config"].values()):
        entry["path_name"] = "weight_0"
        entry["tensor_meta"]["strides"] = [{"as_int": 0}, {"as_int": i % 4}]
        entry["tensor_meta"]["storage_offset"] = {"as_int": i % 5}
    return zipped({**records, WEIGHTS_CONFIG: json.dumps(config).encode()})
