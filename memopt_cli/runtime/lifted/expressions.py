"""The text of values in generated code: the name of a value's variable, or the value's expression where it has none.

:mod:`memopt_cli.runtime.lifted.layout` decides which values have none: those that only one node uses, and
parameters and constants.
"""

from __future__ import annotations

import ast
import collections
import re
import types
from collections.abc import Callable
from typing import Any, Final

from memopt_cli.runtime.lifted.layout import Block, Node, first_output
from memopt_cli.runtime.lifted.operators import DTYPES, EXPRESSIONS, FUNCTIONS, find_operator
from memopt_cli.runtime.lifted.program import FURTHER_CALL, is_further_call, is_name, tuple_name
from memopt_cli.runtime.lifted.variables import Variables
from memopt_cli.runtime.private_torch import schema_of

Names = dict[str, Any]
"""Name in generated code, besides its own variables and :data:`FUNCTIONS` -> the object it stands for."""

_SIMPLE: Final = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript, ast.Tuple, ast.List, ast.Dict)


class Expressions:
    """The expressions of one function or method."""

    def __init__(self, names: Names, arguments: set[str], variables: Variables) -> None:
        """Write the expressions of a function with these ``arguments``.

        ``names``: the global names of the whole program; those used by the expressions are added.
        """
        self._names = names
        self._arguments = arguments
        self._variables = variables
        self._inline: dict[int, Callable[[], str]] = {}
        """Value without a variable -> a function that returns its text.  It is called where the text is written, since
        the variables of its operands are known only then."""

    def write_inline(self, node: Node) -> None:
        """Write the value of ``node`` inline wherever it is used, without a variable."""
        self._inline[first_output(node)] = self.renderer(node)

    def is_inline(self, operand: Any) -> bool:
        """Return whether ``operand`` is a value that has no variable."""
        return operand in self._inline

    def global_name(self, name: str) -> str:
        """Return the text that refers to ``name``, a name in :data:`FUNCTIONS` or a library.

        For example, it is ``len``, or ``len_`` if an argument of the function is called ``len``.
        """
        function = FUNCTIONS.get(name, self._names.get(name))
        if function is None or name not in self._arguments:
            return name
        while name in self._arguments:
            name = f"{name}_"
        self._names[name] = function
        return name

    def text(self, operand: Any) -> str:
        """Return the text of ``operand`` where it stands alone."""
        if type(operand) is tuple:
            return literal(operand[0], self.global_name("math"))
        if operand in self._inline:
            return self._inline[operand]()
        name = self._variables.name(operand)
        assert name is not None, "the program was checked"
        return name

    def _operand_text(self, operand: Any) -> str:
        """Return the text of ``operand`` as part of a larger expression."""
        text = self.text(operand)
        return text if isinstance(ast.parse(text, mode="eval").body, _SIMPLE) else f"({text})"

    def renderer(self, node: Node) -> Callable[[], str]:
        """Return a function that returns the text of ``node`` as an expression, once its operands have variables."""
        kind, detail, operands, _, blocks = node

        def listed() -> str:
            return ", ".join(map(self.text, operands))

        def pairs() -> str:
            texts = list(map(self.text, operands))
            check_key = self.global_name("check_key")
            return ", ".join(f"{check_key}({key}): {value}" for key, value in zip(texts[::2], texts[1::2], strict=True))

        forms: dict[str, Callable[[], str]] = {
            "operator": lambda: self._operator_text(detail, operands),
            "call": lambda: self._call_text(detail[0], detail[1], operands),
            "function": lambda: f"{detail}({listed()})",
            "get": lambda: self.attribute(detail),
            "parameter": lambda: self.attribute(detail),
            "tensor": lambda: f"self._constants[{detail}]",
            "device": lambda: f"{self.global_name('device')}({detail!r})",
            "home": lambda: f"self._home({detail!r})",
            "tuple": lambda: f"({listed()},)" if len(operands) == 1 else f"({listed()})",
            "list": lambda: f"[{listed()}]",
            "dict": lambda: f"{{{pairs()}}}",
            "named": lambda: self._named_tuple(detail, operands),
            "unpack": listed,
            "item": lambda: f"{self._operand_text(operands[0])}[{detail}]",
            "slice": lambda: f"{self._operand_text(operands[0])}[{detail[0]}:{detail[1]}]",
            "none": lambda: "None",
            "if": lambda: self._choice_text(operands[0], blocks),
        }
        return forms[kind]

    # ------------------------------------------------------------------------------------------ operators

    def _operator_text(self, key: str, operands: tuple[Any, ...]) -> str:
        if key not in EXPRESSIONS:
            return self._tensor_operator(key, operands)

        template = re.sub(r"\b[a-z_]+(?=[(.])", lambda name: self.global_name(name[0]), EXPRESSIONS[key].template)

        def fill(slot: re.Match[str]) -> str:
            if slot[1] == "...":
                return ", ".join(map(self.text, operands))
            # ``len({0})`` needs no parentheses around the operand ``a + b``, but ``{0} * {1}`` does.
            enclosed = template[slot.start() - 1] in "([, :" and template[slot.end() : slot.end() + 1] in tuple(")],:")
            return (self.text if enclosed else self._operand_text)(operands[int(slot[1])])

        return re.sub(r"\{(\d+|\.\.\.)\}", fill, template)

    def _tensor_operator(self, key: str, operands: tuple[Any, ...]) -> str:
        operator = find_operator(key)
        assert operator is not None, "the program was checked"
        namespace, _, name = key.partition("::")
        name = name.replace(".", "_")
        setattr(self._names.setdefault(namespace, types.SimpleNamespace()), name, operator)
        arguments = list(zip(schema_of(operator).arguments, operands, strict=True))
        while arguments and not arguments[-1][0].kwarg_only and _is_default(*arguments[-1]):
            arguments.pop()
        texts = [
            f"{a.name}={self._argument_text(a, o)}" if a.kwarg_only else self._argument_text(a, o)
            for a, o in arguments
            if not (a.kwarg_only and _is_default(a, o))
        ]
        return f"{self.global_name(namespace)}.{name}({', '.join(texts)})"

    def _argument_text(self, argument: Any, operand: Any) -> str:
        code = operand[0] if type(operand) is tuple and argument.name == "dtype" else None
        if type(code) is int and 0 <= code < len(DTYPES):
            return f"{self.global_name('dtypes')}.{DTYPES[code]}"
        return self.text(operand)

    def _choice_text(self, condition: Any, blocks: tuple[Block, ...]) -> str:
        """Return ``a and b``, ``a or b`` or ``b if a else c``."""
        for block in blocks:
            self._inline |= {first_output(node): self.renderer(node) for node in block[1]}
        then, otherwise = (result for _, _, (result, *_) in blocks)
        first = self._operand_text(condition)
        if repr(otherwise) == "(False,)":  # 0 equals False
            return first if repr(then) == "(True,)" else f"{first} and {self._operand_text(then)}"
        if repr(then) == "(True,)":
            return f"{first} or {self._operand_text(otherwise)}"
        return f"{self._operand_text(then)} if {first} else {self._operand_text(otherwise)}"

    def _call_text(self, path: tuple[str, ...], method: str, operands: tuple[Any, ...]) -> str:
        arguments = [*map(self.text, operands)]
        if path and is_further_call(method):  # as a call, so that hooks and segments see it
            method, arguments = "forward", [*arguments, f"{FURTHER_CALL}={method!r}"]
        name = "" if path and method == "forward" else f".{method}"
        return f"{_module_text(path)}{name}({', '.join(arguments)})"

    def _named_tuple(self, detail: tuple[str, tuple[str, ...]], operands: tuple[Any, ...]) -> str:
        name, fields = detail
        self._names[tuple_name(name)] = collections.namedtuple(name, fields)
        return f"{tuple_name(name)}({', '.join(map(self.text, operands))})"

    def attribute(self, path: tuple[str, ...]) -> str:
        """Return the text of the attribute at ``path``, of the module or of a module in it."""
        owner, name = _module_text(path[:-1]), path[-1]
        return f"{owner}.{name}" if is_name(name) else f"{self.global_name('parameter_of')}({owner}, {name!r})"


def _module_text(path: tuple[str, ...]) -> str:
    """Return the text of the module at ``path``; a name that is not an identifier, such as ``0``, is looked up."""
    return "self" + "".join(f".{name}" if is_name(name) else f"._modules[{name!r}]" for name in path)


def literal(value: Any, math: str = "math") -> str:
    """Return the text of the constant ``value``; ``math``: the name of that module in the code."""
    if type(value) is tuple:
        return f"[{', '.join(literal(item, math) for item in value)}]"
    if type(value) is float and (value != value or value in (float("inf"), -float("inf"))):
        return str(value).replace("inf", f"{math}.inf").replace("nan", f"{math}.nan")
    return repr(value)


def _is_default(argument: Any, operand: Any) -> bool:
    if type(operand) is not tuple or not argument.has_default_value():
        return False
    default = argument.default_value
    return type(default) is type(operand[0]) and default == operand[0]
