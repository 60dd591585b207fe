"""Model files made to do harm, built by code: name -> bytes, exit code, and a word of the message.

Each one that could run something would create the file ``canary``.
"""

from __future__ import annotations

import builtins
import collections
import copy
import enum
import functools
import importlib
import io
import logging
import operator
import os
import pickle
import pickletools
import runpy
import struct
import subprocess
import types
import typing
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from spikingjelly.activation_based.neuron.flexsn import FlexSN
from torch import Tensor, nn
from torch.ao.quantization.fx.graph_module import ObservedGraphModule
from torch.nn.parallel import distributed
from transformers import BertConfig, BertModel, GenerationConfig

from memopt_cli.loading.interface import ModelFile
from memopt_cli.loading.torchscript import TorchScript
from memopt_cli.records import Trust
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.lifted.module import restore_lifted
from memopt_cli.runtime.module_state import RUNS_KEY, SEGMENT_KEY
from memopt_cli.runtime.script import ScriptLeaf
from memopt_cli.runtime.segment_run import SegmentRun
from tests.loading.archives import Call, Created, archive, exported, saved, scripted, unzipped
from tests.zoo.models import GIVEN, Parts

REFUSED, NO_MODEL = 4, 3


@dataclass(frozen=True)
class Hostile:
    """A file, and how ``memopt optimize`` ends on it."""

    data: bytes
    code: int
    says: str


class _Entry:
    """Pickles as a dict of one key."""

    def __init__(self, key: Any) -> None:
        self._key = key

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter([(self._key, None)])


def corpus(canary: str) -> dict[str, Hostile]:
    """Every hostile file."""
    groups = _calls(canary), _opcodes(canary), _objects(canary), _archives(canary), _scripts(canary)
    return {name: hostile for group in (*groups, _endless(), _exhausting()) for name, hostile in group}


def payloads(canary: str) -> dict[str, Any]:
    """Objects whose unpickling runs something."""
    touch = f"open({canary!r}, 'w').close()"
    system = Call(os.system, f"touch {canary}")
    module = nn.Sequential(nn.Linear(1, 1))
    module.extra = Call(builtins.exec, touch)  # type: ignore[assignment]
    hooked = nn.Linear(1, 1)
    hooked._forward_hooks[0] = Call(builtins.eval, touch)  # type: ignore[assignment]
    filled = Call(nn.Module.__new__, nn.Linear, state={"training": system})
    return {
        "os.system": system,
        "eval": Call(builtins.eval, touch),
        "runpy": Call(runpy.run_path, canary),
        "torch.hub": Call(torch.hub.load, "someone/something", "net"),
        "torch.load": Call(torch.load, canary),
        "torch.save": Call(torch.save, {}, canary),
        "importlib": Call(importlib.import_module, "antigravity"),
        "subprocess": Call(subprocess.Popen, ["touch", canary]),
        "nested": collections.OrderedDict(a=[Call(dict, [("k", Call(map, eval, [touch]))])]),
        "aliased": [system, system, {"again": system}],
        "in a module": module,
        "in a hook": hooked,
        "in a state": filled,
        "getattr of a class": Call(getattr, Call(getattr, nn.Linear, "forward"), "__globals__"),
        "a tensor rebuilt by eval": Call(torch._tensor._rebuild_from_type_v2, eval, torch.Tensor, (touch,), None),
        "a constructor": Call(nn.Linear, 10**6, 10**6),
    }


def _calls(canary: str) -> Iterator[tuple[str, Hostile]]:
    for name, value in payloads(canary).items():
        for form, is_zip in (("zip", True), ("legacy", False)):
            data = saved(value, _use_new_zipfile_serialization=is_zip)
            yield f"{name}, {form}", Hostile(data, REFUSED, "model.pt")
        if not isinstance(value, nn.Module):
            yield f"{name}, plain", Hostile(pickle.dumps(value, 4), REFUSED, "model.pt")


def _opcodes(canary: str) -> Iterator[tuple[str, Hostile]]:
    """Globals hidden behind the memo, the stack and the older opcodes; each is tried plain and in an archive."""
    command = f"touch {canary}".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    posix, system = b"\x8c\x05posix", b"\x8c\x06system"
    refused = {
        "names from the memo": posix + b"\x940" + system + b"\x940" + b"h\x00h\x01\x93" + text + b"\x85R.",
        "names from a long memo": posix + b"r\x00\x01\x00\x000j\x00\x01\x00\x00" + system + b"\x93" + text + b"\x85R.",
        "names behind a duplicate": posix + b"2" + system + b"\x93" + text + b"\x85R.",
        "a callable from the memo": b"cposix\nsystem\nq\x070]h\x07" + text + b"\x85Ra.",
        "a call as a key": b"}cposix\nsystem\n" + text + b"\x85RNs.",
        "a call that is dropped": b"cposix\nsystem\n" + text + b"\x85R0N.",
        "a name of Python 2": b"c__builtin__\neval\n" + text + b"\x85R.",
        "INST": b"(" + text + b"iposix\nsystem\n.",
        "OBJ": b"(cposix\nsystem\n" + text + b"o.",
        "NEWOBJ": b"cposix\nsystem\n" + text + b"\x85\x81.",
        "NEWOBJ_EX": b"cposix\nsystem\n" + text + b"\x85}\x92.",
        "a computed name": posix + b"cbuiltins\nstr\n" + system + b"\x85R\x93" + text + b"\x85R.",
        "a computed callable": b"cbuiltins\ngetattr\ncos\nsystem\n" + system + b"\x86R" + text + b"\x85R.",
        "a class note": b"(X\x06\x00\x00\x00modulecposix\nsystem\nNNtQ" + text + b"\x85R.",
        "a new class": b"ctorch.nn.modules.linear\nLinear\n)\x81}X\x09\x00\x00\x00__class__cposix\nsystem\nsb.",
    }
    for name, code in refused.items():
        yield f"{name}, plain", Hostile(b"\x80\x04" + code, REFUSED, "was not loaded")
        yield f"{name}, zip", Hostile(archive({"data.pkl": b"\x80\x02" + code}), REFUSED, "was not loaded")
    for name, code in {"a code of copyreg": b"\x82\x01)R.", "a text identity": b"Posix.system\n."}.items():
        yield name, Hostile(archive({"data.pkl": b"\x80\x02" + code}), NO_MODEL, "model.pt")


_ARRAY = np.ones(1).__reduce_ex__(5)[0]


def _objects(canary: str) -> Iterator[tuple[str, Hostile]]:
    """Objects of classes that a file may name, which would run something for what they are given."""
    system = pickle.dumps(Call(os.system, f"touch {canary}"))
    generators = Created(Generators, state={"python": system, "numpy": system, "torch": torch.zeros(1)})
    yield "random generators that unpickle", _layer("memopt_cli.runtime.generators.Generators", start=generators)
    run = Created(SegmentRun, state={"hook": True, "start": generators})
    yield "a hook of the runtime", _layer("memopt_cli.runtime.segment_run.SegmentRun", _forward_pre_hooks={0: run})

    layer = nn.LSTM(3, 8)
    layer.num_layers = 0
    yield "an LSTM of no layers", _of(layer, "0 layers")

    yield "a __setstate__ among attributes", _layer("__setstate__", __setstate__=nn.functional.gelu)
    yield "a method among attributes", _layer("forward", forward=nn.functional.gelu)
    called = Created(nn.Linear, state=vars(_linear(_compiled_call_impl=nn.functional.gelu)))
    yield "a call in the place of the module's", _layer("_compiled_call_impl", _modules={"a": called})
    yield "another class among attributes", _layer("__class__", __class__=nn.ReLU)
    yield "a hook that is a function", _layer("a hook 0", _forward_hooks={0: nn.functional.gelu})
    yield "a hook that is a module", _layer("a hook 0", _forward_hooks={0: nn.ReLU()})
    yield "a parameter that is a function", _layer("'weight'", _parameters={"weight": nn.functional.gelu})
    yield "a module that is a class", _layer("'a'", _modules={"a": nn.ReLU})

    for name in ('a"', "a'", "a\\", "a.b", "a`", "a{b}"):
        yield f"a child named {name}", _layer("has a module", _modules={name: nn.ReLU()})

    inner = _linear(forward=nn.functional.gelu)
    for made in (Call(dict, vars(inner)), Call(collections.OrderedDict, list(vars(inner).items()))):
        hidden = Created(nn.Linear, state=made)
        yield f"a state made by {made.reduced[0].__name__}", _layer("of an unexpected type", _modules={"a": hidden})
    alias = types.GenericAlias(BertConfig, (int,))
    yield "a type that makes settings, as a method", _layer("GenericAlias", forward=alias)
    yield "settings as something to call", _layer("stored as something to call", act=BertConfig)
    composed = functools.partial(round, ndigits=nn.functional.gelu)
    yield "a partial that is handed a function", _layer("passes a callable to a function", act=composed)
    for made in (Call(dict, {"ndigits": nn.functional.gelu}), collections.OrderedDict(ndigits=nn.functional.gelu)):
        state = (round, (), made, {})
        handed = Call(functools.partial, round, state=state)
        yield f"a partial that is handed a function in a {type(made).__name__}", _layer("partial", act=handed)
    names = _linear(_non_persistent_buffers_set=Call(set, ("a.b",)))
    yield "names that are none, in a tuple", _of(names, "_non_persistent_buffers_set that are none")
    asked = Call(collections.defaultdict, None, types.SimpleNamespace(keys=functools.partial(len, "")))
    yield "a defaultdict of an object", _layer("defaultdict", extra=asked)
    compiled = Call(operator.getitem, typing.List, "not " * 1000)  # noqa: UP006
    yield "a type named by an expression", _layer("a text that names no type", extra=compiled)
    program = Created(ObservedGraphModule, state=vars(nn.Linear(1, 1)))
    yield "a module that compiles itself", _layer("rebuilds itself", _modules={"a": program})
    renamed = Created(BertConfig, state={"attribute_map": {"unflatten": "to_json_file"}})
    yield "settings with other names", _layer("attribute_map", extra=renamed)
    yield "an item of something", _layer("getitem", act=functools.partial(operator.getitem, [1]))
    yield "data in the place of a method", _layer("its method named_modules", named_modules=[1])
    logger = Call(logging.getLogger, ".a" * 5000)
    yield "a logger of five thousand parts", _layer("a logger's name", NO_MODEL, extra=logger)
    yield (
        "a name of the runtime without it",
        Hostile(b"\x80\x02cscript\nScriptPart\n)\x81}b.", NO_MODEL, "script.ScriptPart"),
    )
    for setting in ("_use_kernels", "kernel_config"):
        asking = Created(BertModel, state=vars(_linear(**{setting: True})))
        yield f"a model with {setting}", _layer("kernels of a hub", _modules={"a": asking})
    hidden = Created(BertConfig, state={"to_dict": 1})
    yield "data in the place of a method of settings", _layer("its method to_dict", extra=hidden)
    neuron = Created(FlexSN, state=vars(nn.Linear(1, 1)))
    yield "a module that copies itself", _layer("rebuilds itself", _modules={"a": neuron})
    tensors = [torch.ones(1), torch.ones(1), torch.ones(1, dtype=torch.int32)]
    cell = ("quantized", tensors, [1.0], [1], [])
    packed = Created(torch.ScriptObject, state=(cell, "__torch__.torch.classes.rnn.CellParamsBase"))
    yield "a recurrent cell that reads beyond its columns", _layer("in a form that PyTorch does not write", cell=packed)
    deep = Call(_ARRAY, bytes(8), np.dtype("f8"), (1,) * 40, "C")
    yield "an array of forty dimensions", _layer("an array has a shape that is too large", NO_MODEL, extra=deep)
    vast = Call(_ARRAY, b"", np.dtype("f8"), (0, 2**62, 2**62), "C")
    yield "an array of nothing, far too wide", _layer("an array has a shape that is too large", NO_MODEL, extra=vast)
    wide = torch.zeros(1, dtype=torch.int64).expand(1 << 20)
    often = [torch.sparse_coo_tensor(wide[None], wide, (1,), check_invariants=True) for _ in range(9)]
    yield "indices expanded often", _layer("far more work", NO_MODEL, extra=often)
    for key, says in {
        SEGMENT_KEY: "a segment's settings among its",
        RUNS_KEY: "has _memopt_runs that are none",
    }.items():
        yield f"{key} of the file's own", _layer(says, **{key: 5})
    yield "runs that are none", _layer("a run '0-1' that is not one", **{RUNS_KEY: {"0-1": nn.Linear(1, 1)}})
    slots = Created(BertConfig, state=(None, {"num_labels": 8_000_000}))
    yield "a property set as a slot", _layer("no slot", NO_MODEL, extra=slots)
    empty = Call(_ARRAY, b"", Call(np.dtype, "S0", False, True), (1 << 40,), "C")
    yield "an array of nothing", _layer("values other than numbers", NO_MODEL, extra=empty)
    wide = Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, torch.ones(1), torch.complex128, "xla", False)
    yield "a tensor made wider", _layer("is stored as", NO_MODEL, extra=wide)

    own = collections.OrderedDict(vars(nn.Linear(1, 1)))
    parts = {"a": Created(nn.Linear, state=own), "b": Created(nn.Linear, state=own)}
    yield "two modules of one ordered state", _layer("shares", _modules=parts)
    shared = nn.Linear(1, 1)
    yield "two modules with one state", _layer("shares", a=shared, b=Created(nn.Linear, state=vars(shared)))
    loaded = TorchScript().load(ModelFile(path="model.ts", data=scripted(nn.Linear(1, 1))), Trust())
    _, (program, attributes) = loaded.module.__reduce_ex__(2)  # type: ignore[misc]
    lifted = Call(restore_lifted, program, attributes)
    yield "a lifted module whose state is changed", _layer("shares", late=attributes, first=lifted)
    holder = scripted(Holder())  # not an ``nn.Sequential``, which is one again when it is loaded
    loaded = TorchScript().load(ModelFile(path="model.ts", data=holder), Trust())
    yield (
        "a lifted module whose child is taken away later",
        _changed_later(loaded.module, "_modules", b"X\x01\x00\x00\x000N", REFUSED, "a child that is not a module"),
    )
    for key, value in {"num_layers": b"K\x01", "_all_weights": b"N"}.items():
        layer = nn.LSTM(3, 8)
        layer.num_layers, layer._all_weights = 2**40, [[1]]  # type: ignore[list-item]
        change = b"X" + struct.pack("<I", len(key)) + key.encode() + value
        yield (
            f"an LSTM whose {key} is another later",
            _changed_later(layer, "", change, NO_MODEL, "after it has taken its state"),
        )

    url = "http://127.0.0.1:9/model"
    for name, made in {
        "a partial of a constructor": functools.partial(torch.optim.lr_scheduler.LambdaLR, url),
        "a partial of a whole model": functools.partial(BertModel.from_pretrained, url),
        "settings called": Call(BertConfig, url),
        "an enum that is filled": Created(enum.Enum, state={"a": 1}),
    }.items():
        yield name, _layer("was not loaded", extra=made)
    yield "settings created of arguments", _layer("created with arguments", NO_MODEL, extra=Created(BertConfig, url))


def _endless() -> Iterator[tuple[str, Hostile]]:
    """Objects of known classes, whose own code would go on forever, or become another class that nobody looks at."""
    named = nn.Sequential(nn.ReLU())
    for _ in range(90):
        named = nn.Sequential(collections.OrderedDict({"n" * 10_000: named}))
    yield "modules of very long names", _of(named, "a name of 10000 characters")
    groups = [{"params": range(10**15)}]
    for kind in (torch.optim.Adam, torch.optim.SGD):
        training = Created(kind, state={"defaults": {}, "state": {}, "param_groups": groups})
        yield f"{kind.__name__} of parameters without an end", _layer("parameters that are not lists", extra=training)
    keys = {"settings": Created(GenerationConfig, state={"extra": [1]})}
    if hasattr(distributed, "_BucketCapacityConfig"):  # newer than PyTorch 2.8
        sizes = Created(distributed._BucketCapacityConfig, state={"bucket_bytes_cap": 1})
        keys["an object that is told apart by its attributes"] = sizes
    for name, key in keys.items():
        for where, made in (("a key", _Entry(key)), ("in a key", _Entry((1, (key,)))), ("in a set", Call(set, [key]))):
            yield f"{name} as {where}", _layer("is a key", extra=made)
    lazy = Call(getattr, Created(nn.LazyLinear, state=vars(nn.Linear(1, 1))), "_infer_parameters")
    becoming = _linear(_forward_pre_hooks={0: lazy}, cls_to_become=nn.LSTM)
    yield "a layer that becomes another, unchecked", _of(becoming, "cls_to_become among its attributes")


def _changed_later(module: nn.Module, register: str, change: bytes, code: int, says: str) -> Hostile:
    """``change`` sets an entry in the dict of that name, or in the module's attributes, when the module is made."""
    records = unzipped(saved(module))
    opcodes = list(pickletools.genops(records["data.pkl"]))
    start = next(i for i, (_, argument, _) in enumerate(opcodes) if argument == register or not register)
    made = next(i for i in range(start, len(opcodes)) if opcodes[i][0].name == "EMPTY_DICT")
    again = b"j" + struct.pack("<I", opcodes[made + 1][1])
    records["data.pkl"] = records["data.pkl"][:-1] + again + change + b"s0."
    return Hostile(archive(records), code, says)


def _linear(**attributes: Any) -> nn.Module:
    module = nn.Linear(1, 1)
    vars(module).update(attributes)
    return module


def _layer(says: str, code: int = REFUSED, /, **attributes: Any) -> Hostile:
    return _of(_linear(**attributes), says, code)


def _of(value: Any, says: str, code: int = REFUSED) -> Hostile:
    return Hostile(saved(value), code, says)


def _exhausting() -> Iterator[tuple[str, Hostile]]:
    """Few bytes that stand for much work or memory."""
    pickles = {
        "a list of a range": b"cbuiltins\nlist\ncbuiltins\nrange\nJ\xff\xff\xff\x7f\x85R\x85R.",
        "a set of a bytearray": b"cbuiltins\nset\ncbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R\x85R.",
        "a key of nested pairs": b"}K\x01" + b"q\x00h\x00\x86" * 60 + b"Ns.",
        "deep tuples": b"}K\x01" + b"\x85" * 1_000_000 + b"Ns.",
        "deep lists": b"]" * 90_000 + b"a" * 89_999 + b".",
        "many lists": b"]" * 5_000_000 + b".",
        "many marks": b"(" * 5_000_000 + b".",
        "many pops": b"]0" * 1_000_000 + b"N.",
        "a list copied often": b"]("
        + b"K\x01" * 50_000
        + b"eq\x00cbuiltins\nlist\nq\x01"
        + b"h\x01h\x00\x85R0" * 50_000
        + b".",
        "bytes copied often": b"cbuiltins\nbytearray\nq\x01B"
        + struct.pack("<I", 1 << 20)
        + bytes(1 << 20)
        + b"q\x000]"
        + b"h\x01h\x00\x85R0" * 2000
        + b".",
        "a state given often": b"ctypes\nSimpleNamespace\nq\x01}q\x00("
        + b"".join(b"X\x06\x00\x00\x00%06dN" % i for i in range(20_000))
        + b"u0]"
        + b"h\x01)Rh\x00b0" * 20_000
        + b".",
        "a large place in the memo": b"Nr\x80\xd1\xf0\x08.",
        "a text decoded as punycode": b"c_compressors\nencode\nX\x40\x00\x00\x00"
        + b"a" * 64
        + b"X\x08\x00\x00\x00punycode\x86R.",
    }
    for name, code in pickles.items():
        yield name, Hostile(archive({"data.pkl": b"\x80\x02" + code}), NO_MODEL, "model.pt")
    alias, pair = b"ctypes\nGenericAlias\ncbuiltins\nlist\n", b"h\xffh\xff\x86\x86Rq\xff"
    attribute, deep = b"X\x01\x00\x00\x00a", 3000
    aliases = (alias + b"(") * deep + b"K\x01" + b"t\x86R" * deep
    nested = {
        "aliases within each other": aliases,
        "a key of aliases": b"}" + aliases + b"Ns",
        "a key of pairs of aliases": b"}K\x01q\xff" + (b"0" + alias + pair) * 60 + b"Ns",
        "partials within each other": b"cfunctools\npartial\n" * deep
        + b"ctorch.nn.functional\nrelu\n"
        + b"\x85R" * deep,
        "calls of many names of one module": _names(b"sympy.core.numbers\nB%d\n)R"),
        "names of many packages": _names(b"package%d\nNet\n"),
        "names of many modules of a library": _names(b"transformers.models.m%d\nNet\n", 200),
        "very many names": _names(b"torch.nn.functional\nf%d\n", 5000),
        "many regular expressions": b"]" + b"".join(map(_pattern, range(100))),
        "a number of layers that is modules in modules": b"ctorch.nn.modules.rnn\nLSTM\n)\x81}"
        + b"X\x0a\x00\x00\x00num_layers"
        + _doubled(b"X\x01\x00\x00\x00a", b"X\x01\x00\x00\x00b")
        + b"sb",
        "modules in modules, each twice": b"N"
        + (
            b"q\xfe0ctorch.nn.modules.linear\nIdentity\n)\x81}"
            + b"".join(b"X" + struct.pack("<I", len(name)) + name + b"}s" for name in _REGISTERS[:2])
            + b"X\x08\x00\x00\x00_modules}X\x01\x00\x00\x00ah\xfesX\x01\x00\x00\x00bh\xfessb"
        )
        * 40,
        "attributes of attributes": (
            b"cbuiltins\ngetattr\n" * deep + b"ctorch.nn.modules.linear\nLinear\n" + (attribute + b"\x86R") * deep
        ),
        "keys of one hash": b"}(" + b"".join(map(_same_hash, range(30_000))) + b"u",
        "decimal numbers of one hash": b"}(" + b"".join(map(_decimal, range(1, 30_000))) + b"u",
        "complex numbers of one hash": b"}(" + b"".join(map(_complex, range(30_000))) + b"u",
        "a type of very many parts": b"coperator\ngetitem\nctyping\nLiteral\n("
        + b"".join(_same_hash(n)[:-1] for n in range(30_000))
        + b"t\x86R",
        "a type of very many alternatives": b"cfunctools\nreduce\ncoperator\nor_\n]("
        + b"".join(alias + b"M" + struct.pack("<H", n) + b"\x86R" for n in range(5000))
        + b"e\x86R",
        "one unknown name used very often": b"csympy.core.numbers\nFloat\nq\xff0](" + b"h\xff)\x81" * 80_000 + b"e",
        "a set of one hash": b"cbuiltins\nset\n](" + b"".join(_same_hash(n)[:-1] for n in range(30_000)) + b"e\x85R",
        **{
            f"{what} within each other": (made + b"}" + attribute) * deep + b"K\x01" + b"sb" * deep
            for what, made in {
                "settings": b"ctypes\nSimpleNamespace\n)R",
                "layers": b"ctorch.nn.modules.linear\nIdentity\n)\x81",
            }.items()
        },
    }
    text = b"%01000000000d"  # of which Python makes a number, as long as it says, in states of its version 2
    code = b"crandom\nRandom\n)R(K\x02(" + 3 * (b"X" + struct.pack("<I", len(text)) + text) + b"tNtb"
    yield "a random generator of an older version", Hostile(holding(code), NO_MODEL, "random generator")
    for name, code in nested.items():
        judged = name in _JUDGED
        refused = REFUSED if judged else NO_MODEL
        yield name, Hostile(holding(code), refused, "model.pt")
    code = b"\x80\x02cbuiltins\ntuple\ncbuiltins\nrange\nJ\x80\xc3\xc9\x01\x85R\x85\x81."
    yield "a tuple created of a range", Hostile(archive({"data.pkl": code}), REFUSED, "builtins.tuple")


_JUDGED = (
    "calls of many names of one module",
    "a number of layers that is modules in modules",
    "a type of very many parts",
    "a type of very many alternatives",
    "one unknown name used very often",
)
"""Of those that are refused: as what nobody vouches for, or as no file of a model."""
_REGISTERS = (b"_parameters", b"_buffers", b"_modules")


def _doubled(*names: bytes) -> bytes:
    """A module that has another one under each of the names, which has another one …: few that are met very often."""
    registers = b"".join(b"X" + struct.pack("<I", len(name)) + name + b"}s" for name in _REGISTERS)
    held = b"".join(name + b"h\xfes" for name in names)
    return b"K\x01" + (b"q\xfe0ctorch.nn.modules.linear\nIdentity\n)\x81}" + held + registers + b"b") * 40


def _names(one: bytes, count: int = 1900) -> bytes:
    """A list of as many names, or of what they return."""
    return b"](" + b"".join(b"c" + one % number for number in range(count)) + b"e"


def _pattern(number: int) -> bytes:
    text = b"%d" % number + rb"(?:[\0-\uffff])" * 26
    return b"cre\n_compile\nX" + struct.pack("<I", len(text)) + text + b"K\x02\x86Ra"


def _decimal(number: int) -> bytes:
    """A decimal number whose hash is 0, and a value for it."""
    text = str((2**61 - 1) * number).encode()
    return b"cdecimal\nDecimal\nX" + struct.pack("<I", len(text)) + text + b"\x85RN"


def _complex(number: int) -> bytes:
    """A complex number whose hash is 0, and a value for it."""
    parts = struct.pack(">cdcd", b"G", -1000003.0 * number, b"G", float(number))
    return b"cbuiltins\ncomplex\n" + parts + b"\x86RN"


def _same_hash(number: int) -> bytes:
    """A number whose hash is 0, and a value for it."""
    data = ((2**61 - 1) * (number + 1)).to_bytes(12, "little")
    return b"\x8a" + bytes([len(data)]) + data + b"N"


def holding(code: bytes) -> bytes:
    """A layer with an attribute that ``code`` makes: opcodes that leave one value on the stack."""
    layer = nn.Linear(1, 1)
    layer.kept = "PLACE"  # type: ignore[assignment]
    records = unzipped(saved(layer))
    place = b"X\x05\x00\x00\x00PLACE"
    assert records["data.pkl"].count(place) == 1
    return archive({**records, "data.pkl": records["data.pkl"].replace(place, code)})


def _archives(canary: str) -> Iterator[tuple[str, Hostile]]:
    """Archives that readers read differently, that reach out of their folder, or that unpack to far more."""
    good = unzipped(saved(nn.Linear(3, 4)))
    bad = unzipped(saved(payloads(canary)["in a module"]))
    for name in ("../../escaped", "/tmp/escaped", "some\\folder", "C:/escaped", "escape\x1b[2J"):
        yield f"a record named {name!r}", Hostile(_renamed(good, "data/0", name), REFUSED, "a record named")
    yield "a bomb", Hostile(archive({"data.pkl": b"]" * (64 << 20)}, compressed=True), REFUSED, "unpack to")
    bombs = {f"data/{i}": bytes(8 << 20) for i in range(8)}
    yield "a bomb in parts", Hostile(archive({**good, **bombs}, compressed=True), REFUSED, "unpack to")
    yield (
        "two pickles of one name",
        Hostile(_renamed({**bad, "other": good["data.pkl"]}, "other", "model/data.pkl"), REFUSED, "two records"),
    )
    yield "two pickles but for case", Hostile(archive({**good, "DATA.PKL": bad["data.pkl"]}), REFUSED, "two records")
    yield "two archives", Hostile(archive(good) + archive(bad), NO_MODEL, "damaged")
    yield "an archive behind a pickle", Hostile(b"\x80\x02N." + archive(bad), NO_MODEL, "not a model")
    yield "bytes behind the archive", Hostile(archive(good) + b"more", NO_MODEL, "damaged")
    yield "a long comment", Hostile(archive(good)[:-2] + b"\x04\x00more", NO_MODEL, "damaged")
    yield "shared bytes", Hostile(_sharing(good), REFUSED, "overlap")
    yield "a storage larger than its record", Hostile(_edited(good, b"K\x0ct", b"M\xff\xfft"), NO_MODEL, "storage '0'")
    yield (
        "a tensor larger than its storage",
        Hostile(_edited(good, b"K\x04K\x03\x86", b"M\xff\xffK\x03\x86"), NO_MODEL, "beyond"),
    )
    yield "a negative size", Hostile(_edited(good, b"K\x04K\x03\x86", b"J\xff\xff\xff\xffK\x03\x86"), NO_MODEL, "shape")
    values = b"[" + b'{"a":0},' * 5_000_000 + b"0]"
    many = archive({"models/model.json": values, "extra/more": os.urandom(2 << 20)}, compressed=True)
    yield "a program of very many values", Hostile(many, NO_MODEL, "far more values")
    for kind in (WritesWhenLoaded, WritesWhenCalled):
        yield kind.__name__, Hostile(scripted(kind(canary)), REFUSED, "torch.save")

    records = unzipped(exported(nn.Linear(3, 4), torch.ones(2, 3)))
    assert "data/sample_inputs/model.pt" in records
    bad_inputs = archive({"data.pkl": pickle.dumps(Call(os.system, f"touch {canary}"), 2)})
    program = archive({**records, "data/sample_inputs/model.pt": bad_inputs})
    yield "example inputs that call", Hostile(program, REFUSED, "posix.system")


def _scripts(canary: str) -> Iterator[tuple[str, Hostile]]:
    """TorchScript that does more than compute, and archives whose parts do not fit."""
    writes = unzipped(scripted(WritesWhenLoaded(canary)))
    code = next(name for name in writes if name.startswith("code/") and name.endswith(".py"))
    upper = {name.replace(".py", ".PY") if name == code else name: data for name, data in writes.items()}
    yield "code in capitals", Hostile(archive(upper), REFUSED, "torch.save")
    elsewhere = {name.replace(code, "code/more.txt"): data for name, data in writes.items()}
    yield "code in a record of another kind", Hostile(archive(elsewhere), REFUSED, "more.txt")

    for kind, says in (
        (LoopsWhenLoaded, "__setstate__"),
        (Reshapes, "_reshape_alias"),
        (ResizesInPlace, "resize_"),
        (ReadsAFile, "from_file"),
    ):
        yield kind.__name__, Hostile(archive(unzipped(scripted(kind()))), REFUSED, says)

    linear = unzipped(scripted(nn.Linear(3, 4)))
    data = linear["data.pkl"]
    larger = data.replace(b"(K\x04K\x03t", b"(M\xff\xffK\x03t", 1)
    assert larger != data
    yield (
        "a script's tensor larger than its storage",
        Hostile(archive({**linear, "data.pkl": larger}), NO_MODEL, "beyond"),
    )
    (source,) = (name for name in linear if name.startswith("code/") and name.endswith(".py"))
    long = {**linear, source: linear[source] + b"    y = input\n" * 300_000}
    yield "a script of millions of lines", Hostile(archive(long, compressed=True), NO_MODEL, "far more code")
    short = {name: b"" if name == "data/0" else record for name, record in linear.items()}
    yield "a script's storage without its bytes", Hostile(archive(short), NO_MODEL, "storage '0'")
    place = data[:2] + b"Nr\x80\xd1\xf0\x080" + data[2:]
    yield "a script with a large place in the memo", Hostile(archive({**linear, "data.pkl": place}), NO_MODEL, "work")
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as file:
        for name, record in linear.items():
            entry = zipfile.ZipInfo(f"model/{name}")
            if name == "data/0":
                entry.extra = struct.pack("<HHQQ", 1, 16, 1 << 32, 1 << 32) + struct.pack("<HHQQ", 1, 16, 48, 48)
            file.writestr(entry, record)
    yield "two sizes of one record", Hostile(twice.getvalue(), REFUSED, "model.pt")

    leaf = ScriptLeaf(torch.jit.script(WritesWhenCalled(canary)))
    yield "a script within a pickle", _of(nn.Sequential(leaf), "torch.save")


def _renamed(records: dict[str, bytes], old: str, new: str) -> bytes:
    """The archive with another name for a record, in its directory as well."""
    placeholder = "x" * (len(new.encode()) - len("model/"))
    data = archive({placeholder if name == old else name: data for name, data in records.items()})
    return data.replace(f"model/{placeholder}".encode(), new.encode())


def _sharing(records: dict[str, bytes]) -> bytes:
    """The archive with a hundred more entries for the bytes of one record."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in {**records, "data/0": bytes(4096)}.items():
            file.writestr(f"model/{name}", data)
        shared = file.getinfo("model/data/0")
        for i in range(100):
            again = copy.copy(shared)
            again.filename = again.orig_filename = f"model/data/{100 + i}"
            file.filelist.append(again)
    return buffer.getvalue()


def _edited(records: dict[str, bytes], old: bytes, new: bytes) -> bytes:
    assert old in records["data.pkl"]
    return archive({**records, "data.pkl": records["data.pkl"].replace(old, new, 1)})


class WritesWhenLoaded(Parts, path=GIVEN):
    """Its script writes a file in ``__setstate__``."""

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path, self.training = state
        torch.save(torch.zeros(1), self.path)

    def forward(self, x: Tensor) -> Tensor:
        return x


class WritesWhenCalled(Parts, path=GIVEN):
    """Its script writes a file in ``forward``."""

    def forward(self, x: Tensor) -> Tensor:
        torch.save(x, self.path)
        return x


class LoopsWhenLoaded(nn.Module):
    """Its script never ends in ``__setstate__``."""

    @torch.jit.export
    def __getstate__(self) -> bool:
        return self.training

    @torch.jit.export
    def __setstate__(self, state: bool) -> None:
        self.training = state
        while True:
            self.training = not self.training

    def forward(self, x: Tensor) -> Tensor:
        return x


class Holder(nn.Module):
    """Holds a child and runs none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Reshapes(nn.Module):
    """Reads beyond a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten._reshape_alias(x, [100_000], [1])


class ResizesInPlace(nn.Module):
    """Shows memory that nothing has written."""

    def forward(self, x: Tensor) -> Tensor:
        return x.resize_([1 << 20])


class ReadsAFile(nn.Module):
    """Maps a file, which it may write to."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_file("/etc/hostname", False, 4)
