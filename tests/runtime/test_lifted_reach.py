"""Limits of a lifted program, between its check and its end: data, operators and the methods that were checked."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.runtime.lifted import module as lifted
from memopt_cli.runtime.lifted.allowed import is_allowed
from memopt_cli.runtime.lifted.module import LiftedModule
from memopt_cli.runtime.lifted.operators import ScriptError, checked_data
from memopt_cli.runtime.lifted.program import BadProgramError
from memopt_cli.runtime.lifted.source import generate
from memopt_cli.runtime.script import ScriptLeaf
from tests.runtime.test_lifted import RELU, operator, program, state_of
from tests.zoo.models import Parts

X = ((0, "x", ()),)


def method(name: str, nodes: Any = (), result: Any = 0, hints: int = 6, parameters: Any = X) -> tuple[Any, ...]:
    return name, parameters, tuple(("y", True) for _ in range(hints)), ((), tuple(nodes), (result,))


def program_of(*methods: Any, functions: Any = ()) -> tuple[Any, ...]:
    return 1, "Model", methods, tuple(functions)


def restored(made: tuple[Any, ...], **children: nn.Module) -> LiftedModule:
    state = state_of(nn.Module(), note="a text")
    state["_modules"].update(children)
    return lifted.restore_lifted(made, state)


def get(*path: str, output: int = 1) -> tuple[Any, ...]:
    return "get", path, (), (output,), ()


def put(*path: str, value: Any = 0) -> tuple[Any, ...]:
    return "set", path, (value,), (), ()


def call(path: tuple[str, ...], name: str, output: int = 2) -> tuple[Any, ...]:
    return "call", (path, name), (0,), (output,), ()


class Library(Parts, linear=lambda: nn.Linear(2, 2), width=2):
    """Stands for a library's module, with methods that write files."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def save_pretrained(self, path: Any) -> None:
        raise AssertionError("it was called")


WITH_METHOD = program_of(method("save_pretrained"))

REACHING = {
    "a child": [get("library")],
    "a child of a child": [get("inner", "library")],
    "a method": [get("save_pretrained")],
    "a method of a child": [get("inner", "save_pretrained")],
    "an attribute that is not there": [get("other")],
    "the children": [get("_modules")],
    "the hooks": [get("_forward_hooks")],
    "the constants": [get("_constants")],
    "a child replaced": [put("inner")],
    "a child of a child replaced": [put("inner", "library")],
    "the children replaced": [put("_modules")],
    "the hooks replaced": [put("_forward_hooks")],
    "the mode": [put("training")],
    "the home": [put("_home")],
    "the program": [put("_program")],
    "the device": [put("_device")],
    "a method replaced": [put("inner", "save_pretrained")],
    "a library's attribute": [get("library", "width")],
    "a library's attribute replaced": [put("library", "width")],
    "a library's method": [call(("library",), "save_pretrained")],
    "a method that is not there": [call(("inner",), "encode")],
    "the base's method": [call(("inner",), "_home")],
    "a script's own method": [call(("leaf",), "_push")],
    "a script": [get("leaf", "script")],
    "a script replaced": [put("leaf", "script")],
}


def leaf() -> ScriptLeaf:
    return ScriptLeaf(torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.parametrize("nodes", REACHING.values(), ids=REACHING)
def test_what_is_no_data_is_out_of_reach(nodes: list[Any]) -> None:
    inner = restored(WITH_METHOD, library=Library())
    with pytest.raises(BadProgramError):
        restored(program_of(method("forward", nodes)), library=Library(), inner=inner, leaf=leaf())


def test_data_is_in_reach() -> None:
    inner = restored(WITH_METHOD)
    inner.register_buffer("scale", torch.ones(1))
    nodes = [get("note"), put("fresh", value=1), get("inner", "scale", output=3), call(("library",), "forward")]
    nodes += [call(("inner",), "save_pretrained", output=4), get("leaf", "weight", output=5)]
    module = restored(program_of(method("forward", nodes, 4)), library=Library(), inner=inner, leaf=leaf())
    assert module(torch.ones(1)) == torch.ones(1)
    assert module.fresh == "a text"


def test_a_program_sets_no_module_that_it_was_given() -> None:
    module = restored(program_of(method("forward", [put("kept")])), library=Library())
    for value in (Library(), [Library()], {"a": (print,)}):
        with pytest.raises(ScriptError, match="which is not data"):
            module(value)
    module({"a": [torch.ones(1), None, 1.0]})
    assert module.kept["a"][1] is None


def test_a_method_never_stands_for_a_check() -> None:
    """Methods are found through the module, whatever is called as they are."""
    module = restored(program_of(method("forward", [put("kept")]), method("checked_data")), library=Library())
    with pytest.raises(ScriptError, match="which is not data"):
        module(Library())
    assert module.checked_data(1) == 1


def test_only_further_calls_are_run_as_forward() -> None:
    module = restored(program_of(method("forward"), method("forward_1"), method("other")))
    assert module(3, forward_as="forward_1") == 3
    for name in ("other", "load_state_dict", "__init__"):
        with pytest.raises(KeyError):
            module({}, forward_as=name)


def test_what_an_operator_gives_is_set_unchecked() -> None:
    text, _ = generate(program((operator("aten::relu", 0), put("kept", value=1), put("given")), 1))
    assert text.splitlines()[2:4] == ["    self.kept = y", "    self.given = checked_data(x)"]


def test_data_may_hold_itself() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert checked_data(endless) is endless


def test_an_attribute_in_the_place_of_a_method_is_refused() -> None:
    for name in ("forward", "_home", "_program", "state_dict"):
        with pytest.raises(BadProgramError, match="hides another"):
            lifted.restore_lifted(RELU, state_of(nn.Module(), **{name: torch.relu}))


def test_an_attribute_in_the_place_of_a_child_is_refused() -> None:
    library = Library()
    vars(library)["linear"] = restored(WITH_METHOD)
    with pytest.raises(BadProgramError, match="there is no module"):
        restored(program_of(method("forward", [call(("library", "linear"), "forward")])), library=library)


@pytest.mark.parametrize("state", [{"_constants": [print]}, {"_constants": (print,)}, {"_device": "cpu"}])
def test_constants_are_tensors(state: dict[str, Any]) -> None:
    with pytest.raises(BadProgramError):
        lifted.restore_lifted(RELU, state_of(nn.Module(), **state))


# ---------------------------------------------------------------------------------------------- names

CLASHES = {
    "a function and a method": program_of(method("forward"), functions=[method("forward")]),
    "a function and a library": program_of(method("forward"), functions=[method("aten")]),
    "a function and a built-in": program_of(method("forward"), functions=[method("range")]),
    "a function and an argument": program_of(method("forward"), functions=[method("x")]),
    "an argument and a tuple": program_of(
        method("forward", [("named", ("P", ("a",)), (0,), (1,), ())], parameters=((0, "PTuple", ()),))
    ),
    "a function and a check that gives way to an argument": program_of(
        method("forward", [put("kept")], parameters=((0, "checked_data", ()),)), functions=[method("checked_data_")]
    ),
}


@pytest.mark.parametrize("clash", CLASHES.values(), ids=CLASHES)
def test_what_is_called_has_a_name_of_its_own(clash: Any) -> None:
    with pytest.raises(BadProgramError, match="a name that is already in use"):
        lifted.lifted_class(clash)


def test_a_loop_counts_in_no_argument() -> None:
    body = (2, 3), (operator("aten::relu", 3, output=4),), ((True,), 4)
    loop = ("loop", None, ((2,), (True,), 0), (5,), (body,))
    module = restored(
        program_of(
            method("forward", [loop, operator("aten::mul.Tensor", 5, 1, output=6)], 6, 7, ((0, "x", ()), (1, "_", ())))
        )
    )
    assert module(torch.tensor([3.0]), torch.tensor([5.0])) == 15


def test_an_argument_never_stands_for_what_is_called() -> None:
    arguments = tuple((i, name, ()) for i, name in enumerate(("math", "math_", "ScriptError", "set_grad_enabled")))
    grad = ("grad", False, (), (5,), (((), (operator("aten::relu", 3, output=4),), (4,)),))
    raising = ("if", None, ((False,),), (), (((), (("raise", None, ((float("inf"),),), (), ()),), ()), ((), (), ())))
    text, names = generate(program_of(method("forward", [grad, raising], 5, parameters=arguments)))
    assert "with set_grad_enabled_(False):" in text
    assert "raise ScriptError_(math__.inf)" in text
    assert {"set_grad_enabled_", "ScriptError_", "math__"} <= names.keys()


# ---------------------------------------------------------------------------------------------- form

MALFORMED = {
    "a value made twice": program([operator("aten::relu", 0), operator("aten::relu", 0)], 1),
    "a value before it is made": program([operator("aten::relu", 2), operator("aten::relu", 0, output=2)], 1),
    "a value of another block": program(
        [("if", None, (0,), (), (((), (operator("aten::relu", 0),), ()), ((), (), ())))], 1
    ),
    "too few operands": program([operator("aten::linear", 0)], 1),
    "too few numbers": program([operator("aten::add.int", 0)], 1),
    "a long number": program((), (1 << 5000,)),
}


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_program_is_refused(bad: Any) -> None:
    with pytest.raises(BadProgramError):
        lifted.lifted_class((bad[0], bad[1], tuple((*m[:3], (m[3][0], tuple(m[3][1]), m[3][2])) for m in bad[2]), ()))


# ---------------------------------------------------------------------------------------------- recursion


def test_methods_and_functions_do_not_call_each_other_without_end() -> None:
    own = program_of(method("forward", [call((), "again")], 2), method("again", [call((), "forward")], 2))
    function = ("function", "again", (0,), (1,), ())
    for endless in (own, program_of(method("forward", [function]), functions=[method("again", [function], 1)])):
        with pytest.raises(BadProgramError, match="without end"):
            lifted.lifted_class(endless)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a crash must not end the tests")
def test_modules_that_hold_each_other_end_in_an_error() -> None:
    module = restored(program_of(method("forward", [call(("inner",), "forward")], 2)), inner=restored(RELU))
    module._modules["inner"] = module
    lifted.check_lifted(module)
    pid = os.fork()
    if pid == 0:
        try:
            module(torch.ones(1))
        except RecursionError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


# ---------------------------------------------------------------------------------------------- keys


def test_a_key_is_no_nest_of_tuples() -> None:
    nested: Any = ("tuple", None, (1,), (2,), ())
    made = program_of(method("forward", [("tuple", None, (), (1,), ()), nested, ("dict", None, (2, 0), (3,), ())], 3))
    with pytest.raises(ScriptError, match="uses a tuple as a key"):
        restored(made)(torch.ones(1))


@pytest.mark.parametrize(
    "key", ["aten::__getitem__.Dict_str", "aten::get.str", "aten::__contains__.str", "aten::__getitem__.t"]
)
def test_a_key_that_is_looked_up_is_none_either(key: str) -> None:
    nodes = [("tuple", None, (), (1,), ()), ("operator", key, (0, 1), (2,), ())]
    with pytest.raises(ScriptError, match="uses a tuple as a key"):
        restored(program_of(method("forward", nodes, 2)))({})


def test_a_dict_is_brought_up_to_date_by_a_dict_alone() -> None:
    nodes = [("dict", None, (), (1,), ()), ("operator", "aten::update.str", (1, 0), (), ())]
    with pytest.raises(ScriptError, match="uses a list as a dict"):
        restored(program_of(method("forward", nodes)))([((), 1)])


# ---------------------------------------------------------------------------------------------- the list of operators

LEFT_OUT = (
    "as_strided_ indices _indices _values crow_indices slow_conv3d slow_conv_dilated2d slow_conv_transpose2d "
    "thnn_conv2d _stack _transform_bias_rescale_qkv _autocast_to_reduced_precision _batch_norm_with_update "
    "_masked_softmax _thnn_fused_lstm_cell from_file save resize_ set_ _reshape_alias"
).split()


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_no_model_needs_is_not_on_the_list(name: str) -> None:
    assert not is_allowed(f"aten::{name}")


@pytest.mark.parametrize("name", ["as_strided", "add_", "__and__", "values"])
def test_what_models_need_is_on_the_list(name: str) -> None:
    assert is_allowed(f"aten::{name}")


@pytest.mark.parametrize("key", ["prim::data", "aten::data"])
def test_what_is_changed_through_its_data_is_noticed(key: str) -> None:
    """An exponential is saved for backward, and then changed through a tensor that shares its memory."""
    nodes = (
        operator("aten::sin", 0),
        operator("aten::exp", 1, output=2),
        operator(key, 2, output=3),
        operator("aten::add_.Scalar", 3, (1.0,), (1,), output=4),
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        restored(program(nodes, 2))(torch.ones(1, requires_grad=True)).backward()
