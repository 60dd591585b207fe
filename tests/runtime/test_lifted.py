"""Lifted programs: what is generated from them, what is refused before anything is generated, and the file format."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.loading import load
from memopt_cli.loading.pickles.kinds.own import RESTORE_LIFTED
from memopt_cli.runtime import GCContainer, SegmentConfig, install_segment, remove_segment
from memopt_cli.runtime.lifted import module as lifted
from memopt_cli.runtime.lifted.operators import DTYPES, EXPRESSIONS, dtype_code, format_text
from memopt_cli.runtime.lifted.program import BadProgramError
from memopt_cli.runtime.lifted.source import generate

Nodes = tuple[tuple[Any, ...], ...]


def program(nodes: Nodes, result: Any = 0, hints: int = 6, **other: Any) -> tuple[Any, ...]:
    """``forward(x)``: ``x`` is value 0."""
    parameters = other.get("parameters", ((0, "x", ()),))
    names = other.get("names", tuple((other.get("hint", "y"), True) for _ in range(hints)))
    method = (other.get("method", "forward"), parameters, names, ((), nodes, (result,)))
    return other.get("version", 1), other.get("name", "Model"), (method,), ()


def operator(key: str, *operands: Any, output: int = 1) -> tuple[Any, ...]:
    return "operator", key, operands, (output,), ()


RELU = program((operator("aten::relu", 0),), 1)


def state_of(model: nn.Module, **attributes: Any) -> dict[str, Any]:
    return {**vars(model), "_constants": (), "_device": None, **attributes}


# ---------------------------------------------------------------------------------------------- the file format

LIFTED_IN_VERSION_1 = (
    1,
    "Gate",
    (
        (
            "forward",
            ((0, "x", ()), (1, "factor", (2.0,))),
            (
                ("x", True),
                ("factor", False),
                ("weight", True),
                ("y", True),
                ("positive", False),
                ("y", True),
                ("", True),
            ),
            (
                (),
                (
                    ("parameter", ("weight",), (), (2,), ()),
                    ("operator", "aten::mul.Tensor", (0, 2), (3,), ()),
                    ("operator", "aten::gt.float", (1, (0.0,)), (4,), ()),
                    (
                        "if",
                        None,
                        (4,),
                        (5,),
                        (
                            ((), (("operator", "aten::mul.Scalar", (3, 1), (6,), ()),), (6,)),
                            ((), (), (3,)),
                        ),
                    ),
                ),
                (5,),
            ),
        ),
    ),
    (),
)


def test_a_program_of_version_1_still_runs() -> None:
    assert (str(RESTORE_LIFTED), lifted.restore_lifted.__qualname__) == (
        "memopt_cli.runtime.lifted.module.restore_lifted",
        "restore_lifted",
    )
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    module = lifted.restore_lifted(LIFTED_IN_VERSION_1, state_of(holder))
    assert module(torch.tensor([3.0, 4.0])).tolist() == [6.0, 16.0]
    assert module(torch.tensor([3.0, 4.0]), factor=-1.0).tolist() == [3.0, 8.0]
    assert str(inspect.signature(module.forward)) == "(x, factor=2.0)"


def test_generated_source_is_readable_and_in_tracebacks() -> None:
    text, _ = generate(LIFTED_IN_VERSION_1)
    assert text == (
        "def forward(self, x, factor=2.0):\n"
        "    y = aten.mul_Tensor(x, self.weight)\n"
        "    del x\n"
        "    if factor > 0.0:\n"
        "        return aten.mul_Scalar(y, factor)\n"
        "    else:\n"
        "        return y\n"
    )
    module = lifted.make_module(program((operator("aten::mm", 0, 0),), 1), ())
    with pytest.raises(RuntimeError) as error:
        module(torch.ones(2, 3))
    assert "return aten.mm(x, x)" in "".join(traceback.format_exception(error.value))
    assert inspect.getsource(type(module).forward).startswith("def forward(self, x):")


def test_equal_but_different_constants_are_different_programs() -> None:
    classes = {lifted.lifted_class(program((), (constant,))) for constant in (1, 1.0, True, 0.0, -0.0)}
    assert len(classes) == 5
    assert lifted.lifted_class(copy.deepcopy(RELU)) is lifted.lifted_class(RELU)


@pytest.mark.parametrize("text", ["it's", 'a"b', "\\", "\n", "{0.__class__}", "'); import os; ('", "\ud800", "%s{}"])
def test_a_string_constant_is_only_a_string(text: str) -> None:
    assert lifted.make_module(program((), (text,)), ())(None) == text


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), -0.0, 1e-300, 2**70, -1, True, None])
def test_a_constant_is_itself(number: Any) -> None:
    got = lifted.make_module(program((), (number,)), ())(None)
    assert repr(got) == repr(number)


def test_not_a_number_is_a_constant_too() -> None:
    got = lifted.make_module(program((), (float("nan"),)), ())(None)
    assert got != got


# ---------------------------------------------------------------------------------------------- hostile programs


BAD_PROGRAMS = {
    "nothing": None,
    "version": program((), version=2),
    "class name": program((), name="A: pass\nimport os\nclass B"),
    "method name": program((), method="register_forward_hook"),
    "dunder method": program((), method="__init__"),
    "parameter": program((), parameters=((0, "x=__import__('os')", ()),)),
    "default": program((), parameters=((0, "x", (object(),)),)),
    "keyword": program((), parameters=((0, "lambda", ()),)),
    "file operator": program((operator("aten::from_file", 0, (None,), (None,), (None,), (None,), (None,), (None,)),)),
    "saving": program((operator("aten::save", 0, ("f",)),)),
    "other library": program((operator("c10d::send", 0),)),
    "system": program((operator("os::system", ("true",)),)),
    "no operator": program((operator("aten::__class__", 0),)),
    "overload": program((operator("aten::add.__init__", 0, 0),)),
    "kind": program((("exec", "x", (), (), ()),)),
    "dunder attribute": program((("get", ("__class__",), (), (1,), ()),)),
    "method as attribute": program((("get", ("to",), (), (1,), ()),)),
    "attribute set by text": program((("set", ("x or open",), (0,), (), ()),)),
    "hidden attribute": program((("get", ("__dict__",), (), (1,), ()),)),
    "line in an attribute": program((("get", ("a\nb",), (), (1,), ()),)),
    "attribute set": program((("set", ("forward",), (0,), (), ()),)),
    "call of a method": program((("call", ((), "register_module"), (0,), (1,), ()),)),
    "call of nothing": program((("call", ((), "encode"), (0,), (1,), ()),)),
    "call text": program((("call", (("a",), "x().y"), (0,), (1,), ()),)),
    "function": program((("function", "print", (0,), (1,), ()),)),
    "constant": program((), ([1],)),
    "constant object": program((), (torch.relu,)),
    "value": program((), 99),
    "truth as a value": program((), True),
    "named tuple": program((("named", ("P", ("__class__",)), (0,), (1,), ()),)),
    "blocks": program((("if", None, (0,), (), ()),)),
    "loop": program((("loop", None, (0,), (), (((), (), ()),)),)),
    "string for a tuple": program((("tuple", None, "0", (1,), ()),)),
    "device": program((("device", 3, (), (1,), ()),)),
}


@pytest.mark.parametrize("bad", BAD_PROGRAMS.values(), ids=BAD_PROGRAMS)
def test_a_bad_program_is_refused_before_code_is_made(bad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifted, "generate", lambda _: pytest.fail("code was generated"))
    with pytest.raises(BadProgramError):
        lifted.restore_lifted(bad, state_of(nn.Module()))


def test_a_hint_is_only_a_hint() -> None:
    text, _ = generate(
        program((operator("aten::relu", 0), operator("aten::relu", 1, output=2)), 2, hint="a\nimport os;")
    )
    assert "import" not in text.replace("a_import_os", "")


def test_what_a_program_does_not_read_is_nobodys_business() -> None:
    assert lifted.restore_lifted(RELU, state_of(nn.Module(), note=Storing()))(torch.ones(1)).tolist() == [1.0]


class Storing:
    """Stands for an object whose methods do harm."""

    def from_file(self, path: str) -> None:
        raise AssertionError("it was called")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.update(helper=Storing()),
        lambda state: state.update(helper=[{"a": (torch.relu,)}]),
        lambda state: state["_modules"].update(child=Storing()),
        lambda state: state["_buffers"].update(child=Storing()),
        lambda state: state["_parameters"].update(child=torch.zeros(1)),
        lambda state: state.update(child=1, _buffers={"child": torch.zeros(1)}),
        lambda state: state.pop("_modules"),
    ],
)
def test_a_state_that_is_not_data_is_refused(spoil: Callable[[dict[str, Any]], Any]) -> None:
    state = state_of(nn.Module(), helper=None)
    reads = program((("get", ("helper",), (), (1,), ()),), 1)
    assert lifted.restore_lifted(reads, state)(0) is None
    spoil(state)
    with pytest.raises(BadProgramError):
        lifted.restore_lifted(reads, state)


def test_a_program_calls_only_modules_that_are_there() -> None:
    for path in (("storage",), ("child", "deeper")):
        calls = program((("call", (path, "from_file"), (("f",),), (1,), ()),), 1)
        state = state_of(nn.Module(), storage=torch.zeros(1))
        state["_modules"]["child"] = lifted.make_module(RELU, ())
        with pytest.raises(BadProgramError, match="there is no module"):
            lifted.restore_lifted(calls, state)


def test_of_a_module_that_is_not_lifted_a_program_uses_only_forward() -> None:
    state = state_of(nn.Module())
    state["_modules"]["child"] = nn.Linear(2, 2)
    calls = {
        name: program((("call", (("child",), name), (0,), (1,), ()),), 1) for name in ("forward", "reset_parameters")
    }
    assert lifted.restore_lifted(calls["forward"], state)(torch.ones(1, 2)).shape == (1, 2)
    reads = program((("get", ("child", "in_features"), (), (1,), ()),), 1)
    for bad in (calls["reset_parameters"], reads):
        with pytest.raises(BadProgramError, match="child is not lifted"):
            lifted.restore_lifted(bad, state)


@pytest.mark.parametrize(
    "text",
    [
        "def forward(self, x):\n    return eval(x)",
        "def forward(self, x=open):\n    return x",
        "def forward(self, x):\n    import os",
        "def forward(self, x):\n    global evil\n    evil = x",
        "def forward(self, x):\n    return [__import__(y) for y in x]",
        "import os\ndef forward(self, x):\n    return x",
        "def forward(self, x):\n    return __builtins__",
    ],
)
def test_generated_code_names_no_built_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Whatever the generator might be brought to write: it is found before any of it runs."""
    monkeypatch.setattr(lifted, "generate", lambda program: (text, {}))
    with pytest.raises(BadProgramError, match="which no program may"):
        lifted.lifted_class(program((), (f"never seen before {text}",)))


# ---------------------------------------------------------------------------------------------- modules


def test_an_operator_on_lists_means_what_torchscript_means() -> None:
    names = {f"{s.name}.{s.overload_name}".rstrip(".") for s in torch._C._jit_get_all_schemas()}
    assert EXPRESSIONS.keys() <= names
    assert format_text("{} of {}", 1, "{}") == "1 of {}"
    assert format_text("{0.__class__}", 1) == "{0.__class__}"


def test_dtypes_have_torchscripts_numbers() -> None:
    for name in ("uint8", "int64", "float16", "float32", "float64", "complex64", "bool", "bfloat16"):
        assert torch.jit.CompilationUnit(f"def f():\n    return torch.{name} + 0\n").f() == DTYPES.index(name)
        assert dtype_code(torch.empty(0, dtype=getattr(torch, name))) == DTYPES.index(name)


def test_a_segment_is_put_on_and_taken_off(tmp_path: Any) -> None:
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    module = lifted.restore_lifted(LIFTED_IN_VERSION_1, state_of(holder))
    kind = type(module)
    install_segment(module, SegmentConfig(chunks=2))
    assert isinstance(module, GCContainer)
    torch.save(nn.ModuleList([module, module]), tmp_path / "m.pt")
    first, second = load(tmp_path / "m.pt")
    assert first is second
    assert type(first) is type(module)
    x = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    first(x).sum().backward()
    assert first.weight.grad.tolist() == [8.0, 10.0]
    remove_segment(module)
    assert type(module) is kind


def test_constants_follow_the_module_and_keep_their_dtype() -> None:
    module = lifted.make_module(program((("tensor", 0, (), (1,), ()),), 1), (torch.arange(3),))
    assert module.double()(None).dtype == torch.int64
    assert module.to("meta")(None).device.type == "meta"
    with pytest.raises(BadProgramError, match="constant tensor"):
        lifted.restore_lifted(module._program, state_of(nn.Module()))


def test_home_is_where_the_module_is() -> None:
    home = program((("home", "cpu", (), (1,), ()),), 1)
    module = lifted.make_module(home, ())
    assert module(None) == torch.device("cpu")
    assert module.to("meta")(None) == torch.device("meta")
    module = lifted.make_module(home, ())
    module.register_buffer("b", torch.zeros(1, device="meta"))
    assert module(None) == torch.device("meta")


def test_a_value_is_let_go_after_its_last_use() -> None:
    nodes = (operator("aten::relu", 0), operator("aten::neg", 1, output=2), operator("aten::relu", 2, output=3))
    text, _ = generate(program(nodes, 3))
    assert text.splitlines()[1:] == [
        "    y = aten.relu(x)",
        "    del x",
        "    y = aten.neg(y)",
        "    return aten.relu(y)",
    ]
