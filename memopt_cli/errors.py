"""The exceptions that memopt raises on purpose, and how text is made safe to print in them.

::

    MemoptError                     exit code 3, the base
    ├── UsageError                  2  a flag, spec or path that cannot be used, or code that cannot be imported
    │   ├── OptionError             2  a level, profile or limit out of its range (a ValueError, too)
    │   ├── OutputExistsError       2  a file that would be replaced
    │   └── BatchShapeError         2  a tensor shape that cannot be used as given (a ValueError, too)
    ├── FileError                   3  something is wrong with a file: its message is one line
    │   ├── FileFormatError         3  the file is not a model that memopt can read
    │   ├── UnsafeFileError         4  reading the file would run code that the user does not trust
    │   ├── PlanError               3  a plan that does not fit the model
    │   └── BaselineError           5  a baseline that is missing, or not comparable with this measurement
    ├── StepError                   3  the model's training step cannot be run
    │   └── LossError               3  the user's loss raised an error
    ├── MeasurementError            3  a profiling subprocess gave no answer
    │   └── RankLostError           3  another rank of a group is gone, or does not answer
    ├── ChangedFileError            3  the model's file has changed since the command began
    ├── MemoryBudgetError           3  not even the smallest batch, or one copy of a tensor, fits in memory
    │   └── NothingFitsError        6  of all that was asked about, nothing fits the budget
    ├── WriteError                  3  the results could not be written
    ├── VerificationError           1  the optimized model differs from the original
    └── Interrupted               130  the user stopped the run

A message says what failed and the values seen; ``hint`` says what to do next.  The one error boundary,
``cli/app.py``, prints both and exits with ``exit_code``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

CHECK_FAILED: Final = 1
"""Exit code of a command whose report is negative: a limit was exceeded, or two steps differ."""
_MAX_LINE_LENGTH = 2000
"""Maximum number of characters that a line quotes: an error's text may hold a whole file."""


class MemoptError(Exception):
    """Base of all expected failures.

    ``message`` is one sentence with the values seen; ``hint``, unless empty, is the next step for the user.  Values may
    come from an untrusted file, so both are made printable here: no caller has to escape them before printing.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message, self.hint = map(printable_lines, (message, hint))
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def reword(self, words: Callable[[str], str]) -> None:
        """Replace ``message`` and ``hint`` by what ``words`` returns for them, such as the spelling of Python."""
        self.message, self.hint = words(self.message), words(self.hint)
        self.args = (self.message,)


class UsageError(MemoptError):
    """A flag, input spec, configuration key or path that cannot be used as given, or code that cannot be imported."""

    exit_code = 2


class OptionError(UsageError, ValueError):
    """A level, profile, budget or limit of the search that is out of its range, or lacks what it needs."""


class OutputExistsError(UsageError):
    """A file would be replaced without ``--force``."""


class BatchShapeError(UsageError, ValueError):
    """A tensor's shape, or the size of a batch, that cannot be used as given."""


class FileError(MemoptError):
    """An error in a file.  The message quotes names from the file, so line breaks in it are escaped."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(printable(message), hint=hint)


class FileFormatError(FileError):
    """The file is not a model: empty, truncated, random bytes, or a bare ``state_dict``."""


class UnsafeFileError(FileError):
    """Reading the file would execute code that the user does not trust."""

    exit_code = 4
    trusted_with = ""
    """Flags that the user loaded the same file with before; empty if no such flags are known."""


class PlanError(FileError):
    """A plan names a module that is missing, or a segment that cannot be installed on it."""


class StepError(MemoptError):
    """One training step of the model cannot be run: inputs rejected, no gradient, NaN, failing backward."""


class LossError(StepError):
    """A loss function of the user that raised an error."""


class MeasurementError(MemoptError):
    """A profiling subprocess ended without an answer: time limit, signal, out of memory, crash."""


class RankLostError(MeasurementError):
    """Another rank of the group has ended or does not answer; that rank reports the cause."""


class ChangedFileError(MemoptError):
    """A file of the model changed between two reads: going on would mix results of two models."""


class MemoryBudgetError(MemoptError):
    """The smallest thing that can be tried, such as one copy of a tensor, takes more memory than is allowed."""


class NothingFitsError(MemoryBudgetError):
    """The smallest batch or plan that a command may propose does not fit its budget."""

    exit_code = 6
    least_bytes = 0
    """Peak of the smallest plan found, which is above the budget; 0 if it is not known."""


class WriteError(MemoptError):
    """The results could not be written; nothing partial was left."""


class BaselineError(FileError):
    """The baseline is missing, cannot be read, or was recorded under other conditions."""

    exit_code = 5


class VerificationError(MemoptError):
    """The optimized model does not compute what the original computes."""

    exit_code = CHECK_FAILED


class Interrupted(MemoptError):
    """The user interrupted the run; subprocesses were ended and partial files removed."""

    exit_code = 130


def _class_tree(base: type[MemoptError]) -> Iterator[type[MemoptError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _class_tree(kind)


ERRORS: Final[Mapping[str, type[MemoptError]]] = {kind.__name__: kind for kind in _class_tree(MemoptError)}
"""Name -> class, for each class of the tree: a subprocess sends the name, and the parent raises the class again."""


def nearest_known_class(error: MemoptError) -> type[MemoptError]:
    """Return the nearest class of ``error`` in :data:`ERRORS`: a class that is made elsewhere is not in it."""
    return next(kind for kind in type(error).__mro__ if ERRORS.get(kind.__name__) is kind)


class Terminated(KeyboardInterrupt):
    """Another process asked this one to end, as ``timeout``, Slurm and ``torchrun`` do."""


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, then the errors that caused it or that were handled when it was raised, each once."""
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            pending += [earlier for earlier in (current.__context__, current.__cause__) if earlier is not None]


def first_line(error: BaseException) -> str:
    """Return ``error`` as one line: its type and the first line of its text, cut to :data:`_MAX_LINE_LENGTH`.

    A line that ends with a colon is joined with the next: ``backend='tvm' raised:`` says nothing by itself.  The file
    of a SyntaxError is named with its folder, which its own text leaves out.
    """
    if isinstance(error, SystemExit):
        written = "".join(f": {note[:_MAX_LINE_LENGTH]}" for note in getattr(error, "__notes__", ()))
        return f"it called sys.exit({shorten(error.code)}){written}"
    whole, text = str(error), ""
    if isinstance(error, SyntaxError) and error.filename:
        whole = f"{error.msg} ({error.filename}, line {error.lineno})"
    for line in filter(None, map(str.strip, whole.splitlines())):
        text = f"{text} {line}".lstrip()
        if not line.endswith(":"):
            break
    return f"{type(error).__name__}: {text[:_MAX_LINE_LENGTH]}" if text else type(error).__name__


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, which a terminal would obey: ``\\x1b[2J`` clears the screen."""
    if text.isprintable():
        return text
    return text.translate(_SPELLED)


def printable_lines(text: str) -> str:
    """Return ``text`` with every line printable; line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


class _SpellingTable:
    """Table for :meth:`str.translate` that computes each entry: a dict of the characters of a file takes gigabytes."""

    def __getitem__(self, code: int) -> str:
        character = chr(code)
        return character if character.isprintable() else character.encode("unicode_escape").decode()


_SPELLED: Final = _SpellingTable()


def shorten(value: object, max_length: int = 60) -> str:
    """Return the ``repr`` of ``value``, from a file, cut to ``max_length`` characters for a message."""
    text = repr(value[: max_length + 1]) if isinstance(value, str | bytes) else _REPR.repr(value)
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def type_in_words(given: object) -> str:
    """Return the name of the type of ``given`` with its article: ``an int``, ``a Net``; ``nothing`` for ``None``."""
    if given is None:
        return "nothing"
    return with_article(type(given).__name__)


def with_article(name: str) -> str:
    """Return ``name``, of a type, with its indefinite article."""
    return f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}"


def for_message(given: object) -> str:
    """Quote ``given`` for a message if a user could have typed it (text, a number); otherwise name its type."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return shorten(given) if isinstance(given, str | bytes | int | float | None) else type_in_words(given)


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 60, 60
