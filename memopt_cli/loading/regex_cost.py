"""Estimates of the time that names and regular expressions of an adapter take, in steps of the engine of :mod:`re`.

PEFT matches expressions from a file with the names of all modules.  Python's engine tries alternatives one by one, and
a short expression can take forever.  The limits on a confined process (:mod:`memopt_cli.loading.bounds`) stop this only
after half a minute, and ``memopt_cli.load`` runs in the user's own process without such limits.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any, Final

MAX_NAME_LENGTH: Final = 80
"""Number of characters of a module's name, in estimates and in messages."""
_MAX_PATTERN_LENGTH: Final = 4000
"""Maximum number of characters of an expression that is analysed; a longer one counts as endless."""
_PARSE_STEPS: Final = 50
"""Steps to parse an expression here."""
_COMPARE_STEPS: Final = 10
"""Steps to compare two names."""
_SUFFIX_STEPS: Final = 10
"""Steps to keep a character of a suffix: PEFT keeps all suffixes of a name that begin after a dot."""
_COMPILE_STEPS = 10_000
"""Steps to compile any expression."""
_COMPILE_STEPS_PER_CHARACTER = 250
"""Further steps for each of its characters."""
_CACHED_EXPRESSIONS: Final = 400
"""Number of expressions that Python's cache is sure to hold: the whole process shares its 512 places."""
_SINGLE_CHARACTER: Final = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
"""Parts of a parsed expression that match one character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCost:
    """The cost of comparing a list of names with the modules of a model."""

    places: int
    """Number of module and parameter names in the model."""
    listed: int
    """Number of names in all lists together."""
    recompiles: bool
    """Whether PEFT compiles expressions that are not in Python's cache again for each name of the model."""

    def steps_for(self, text: str, *, is_expression: bool) -> float:
        """Return the number of steps for ``text``, one name of a list, which may be a regular expression."""
        steps = _COMPARE_STEPS * (self.listed + self.places) + _SUFFIX_STEPS * len(text) * (1 + text.count("."))
        if not is_expression:
            return steps
        compilations = self.places if self.recompiles and self.listed > _CACHED_EXPRESSIONS else 1
        compiling = compilations * (_COMPILE_STEPS + _COMPILE_STEPS_PER_CHARACTER * len(text))
        return steps + self.places * _ways_to_match(rf"(.*\.)?({text})$") + compiling


def matching_steps(pattern: str) -> float:
    """Return the largest number of steps to parse ``pattern`` and match it with one name; infinite if unknown."""
    return _PARSE_STEPS + _ways_to_match(pattern)


def _ways_to_match(pattern: str) -> float:
    """Return the largest number of ways in which ``pattern`` can match a name; infinite if unknown.

    The engine may try all of them.  A gap, such as ``.*``, takes any number of characters.  The two gaps in
    ``.*layer.*`` can share out the 80 characters of a name in ``comb(82, 2)`` = 3,321 ways.  A repetition of anything
    but single characters, as in ``(a+)+``, has exponentially many ways.
    """
    if len(pattern) > _MAX_PATTERN_LENGTH:
        return math.inf
    try:
        gaps, ways = _sequence(sre_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError):
        return math.inf
    return ways * math.comb(MAX_NAME_LENGTH + gaps, gaps)


def _sequence(parts: Iterable[tuple[Any, Any]]) -> tuple[int, float]:
    """Return the number of gaps in the sequence ``parts``, and the number of ways to match the other parts."""
    gaps, ways = 0, 1.0
    for kind, value in parts:
        more_gaps, factor = _part_cost(str(kind), value)
        gaps, ways = gaps + more_gaps, ways * factor
    return gaps, ways


def _part_cost(kind: str, value: Any) -> tuple[int, float]:
    """Return the number of gaps in one part of an expression, and the number of ways to match the rest of it."""
    if kind in _SINGLE_CHARACTER or kind == "AT":
        return 0, 1
    if kind == "SUBPATTERN":
        return _sequence(value[-1])
    if kind in ("ASSERT", "ASSERT_NOT"):
        return _sequence(value[1])
    if kind == "BRANCH":
        return _branches(value[1])
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        _, max_count, repeated = value
        if max_count <= 1:
            gaps, ways = _sequence(repeated)
            return gaps, 1 + ways
        is_simple = [str(part) for part, _ in repeated] in [[single] for single in _SINGLE_CHARACTER]
        return (1, 1) if is_simple else (0, math.inf)
    return 0, math.inf


def _branches(alternatives: Iterable[Any]) -> tuple[int, float]:
    """Return the largest number of gaps in one of ``alternatives``, and the number of ways to match any of them.

    Alternatives that begin with different characters exclude each other, so their ways do not add up.
    """
    gaps, ways = 0, Counter[Any]()
    for alternative in alternatives:
        more_gaps, factor = _sequence(alternative)
        gaps = max(gaps, more_gaps)
        first = str(alternative[0]) if len(alternative) and str(alternative[0][0]) == "LITERAL" else ""
        ways[first] += factor  # type: ignore[assignment]
    return gaps, ways.pop("", 0) + max(ways.values(), default=0)
