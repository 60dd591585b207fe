"""Docstrings can be read alone: none begins in the middle of a sentence, and those of functions with a verb.

Docstrings, messages and comments avoid turns of phrase that make one read twice.

Ruff's D401 sees a verb that is not imperative ("Returns"), but no noun or conjunction in its place.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "memopt_cli"
OPENERS = re.compile(r"\s*(What|That|Those|Of|As|The same|Within)\b")
NO_VERBS = re.compile(
    r"\s*(``|A|After|All|An|Around|Before|Both|By|Bytes|Each|For|From|How|Input|It|Names|No|Nothing|On|One|Paths|Shape"
    r"|The|There|This|To|Two|Whatever|Where|Whether|Why|With|Without)\b"
)
HABITS = re.compile(
    r"(?s).*(,\ssay[,.):;]|\b(the|its|their)\spresent\s[a-z]|equal\sto\sthe\sbit|an\sempty\stext|,\sor\sempty\."
    r"|Raises\s:class:`[\w.]+`(\sand\s:class:`[\w.]+`)?\.(\s|$)|,\salso\s(for|if|in|where|when)\b|``None``:\s"
    r"|(^|[.)]\s\s)(0|-1|Empty|Infinite):\s|^(Tell|Know|Mind)\s|\btells\swhether\b|\bRaises\s(what|as|whatever)\b"
    r"|[.)]\s\s(``None``|Empty|Infinite|0|-1)\s(if|for|where|until|without|with|to|by)\b"
    r"|\b(inside|for\sthe\stime\sof)\sthe\sblock\b|\bbeside\b|\binside\sthe\scontext\b|\bfewest\snumber)"
)
"""Turns of phrase that make one read twice, among them errors without the reason why they are raised."""
IN_MESSAGES = re.compile(r"(?is).*(\bbeside\b|,\stoo\b|\bmay\sbe\sdamaged\b)")
"""Turns that a message avoids: two of them read twice, and a hint that says no more than what may be wrong."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands alone: docstrings, and those of attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each other string of several words, and of each such part of an f-string."""
    stands_alone = {*docstrings(source)}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if " " in text and (node.lineno, text) not in stands_alone:
                yield node.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def functions(source: str) -> Iterator[tuple[int, str]]:
    """Line and docstring of each function that is no property."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not any("property" in ast.unparse(d) for d in node.decorator_list):
            yield node.lineno, ast.get_docstring(node) or ""


@pytest.mark.parametrize(
    ("texts", "refused"),
    [
        (docstrings, OPENERS),
        (functions, NO_VERBS),
        (docstrings, HABITS),
        (messages, HABITS),
        (messages, IN_MESSAGES),
        (comments, HABITS),
    ],
    ids=["openers", "verbs", "habits", "habits in messages", "messages", "comments"],
)
@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_what_is_written_reads_at_once(
    folder: Path, texts: Callable[[str], Iterator[tuple[int, str]]], refused: re.Pattern[str]
) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.strip().partition(chr(10))[0]}"
        for path in sorted(folder.glob("*.py"))
        for line, text in texts(path.read_text())
        if refused.match(text)
    ]
    assert found == []


def test_an_opener_is_found() -> None:
    assert [line for line, text in docstrings('x = 1\n"""Of those, why."""\n') if OPENERS.match(text)] == [2]
    assert not OPENERS.match("Asset whose bytes count.")
    assert [line for line, text in functions('def f():\n    """By half."""\n') if NO_VERBS.match(text)] == [1]
    assert not NO_VERBS.match("Bytesize the text.")
    assert HABITS.match("Read it.\n\nRaises :class:`ValueError`.")
    assert HABITS.match("Return why it fails, or empty.")
    assert HABITS.match("Base of a view.  ``None``: it is no view.")
    assert HABITS.match("Seconds of a step.  0: it was not timed.")
    assert HABITS.match("Tell whether the step fits.")
    assert HABITS.match("Base of a view.  ``None`` for a copy.")
    assert HABITS.match("Run it.  Raises what it raises.")
    assert HABITS.match("Keep the mode inside the block.")
    assert [text for _, text in messages('raise E(f"Beside {x}, it")') if IN_MESSAGES.match(text)] == ["Beside "]
    assert [line for line, text in comments("x = 1\n# beside y\n") if HABITS.match(text)] == [2]
    assert not HABITS.match("Base of a view; ``None`` for a copy.")
    assert not HABITS.match("Read it.  Raises :class:`ValueError` if it is damaged.")


def test_every_name_that_a_docstring_refers_to_exists() -> None:
    """``:data:`KEPT``` and the like, which a rename leaves behind."""
    files = sorted(PACKAGE.rglob("*.py"))
    defined: dict[str, set[Path]] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            for name in _bound_names(node):
                defined.setdefault(name, set()).add(file)
    roles = re.compile(r":(?:data|func|attr|class|meth):`~?\.?([\w.]+)`")
    dead = [
        (str(file.relative_to(PACKAGE)), name)
        for file in files
        for name in roles.findall(file.read_text())
        if not name.startswith("shutil.") and not _is_known(name.rpartition(".")[2], file, defined)
    ]
    assert dead == []


def _is_known(name: str, file: Path, defined: dict[str, set[Path]]) -> bool:
    """Return whether ``name`` is bound somewhere; a private one must be bound in ``file`` itself."""
    places = defined.get(name, set())
    return file in places if name.startswith("_") else bool(places)


def _bound_names(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Name(ctx=ast.Store()) | ast.Name(ctx=ast.Load()):
            return [node.id]
        case ast.Attribute():
            return [node.attr]
        case ast.alias():
            return [(node.asname or node.name).rpartition(".")[2]]
        case _:
            return []
