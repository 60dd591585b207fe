"""Estimates of the time that regular expressions of an adapter take, in steps of the engine of :mod:`re`.

PEFT matches expressions from a file with the names of all modules.  Python's engine tries alternatives one by one, and
a short expression can take forever.  The limits on a confined process (:mod:`memopt_cli.loading.bounds`) stop this only
after half a minute, and ``memopt_cli.load`` runs in the user's own process without such limits.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Final

MAX_NAME_LENGTH: Final = 80
"""Number of characters of a module's name, in estimates and in messages."""
_MAX_PATTERN_LENGTH: Final = 4000
"""Maximum number of characters of an expression that is analysed; a longer one counts as endless."""
_SHORTER: Final = (
    (r"\\\D|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|$)", "."),  # one character
    (r"\{\d*,?\d*\}", "*"),
    (r"([*+?])[?+]", r"\1"),  # the order in which the engine tries numbers of repetitions
    (r"\(\?:", "("),
    (r"\(\?[=!]", "(."),  # looks at characters without taking them
)
"""Expressions of parts of an expression, and what they are replaced by one after another; the ways to match stay."""
_MAX_DEPTH: Final = 10
"""Maximum depth of groups in groups."""
_PLAIN_GROUP: Final = re.compile(r"\(((?!\?)[^()|]*)\)(\??)(?![*+])")
_ALTERNATIVES: Final = re.compile(r"\(([\w.]*(?:\|[\w.]*)+)\)(\??)(?![*+])")


def ways_to_match(pattern: str, more_gaps: int = 0) -> float:
    """Return the largest number of ways in which ``pattern`` can match a name; infinite if unknown.

    The engine may try all of them.  A gap, such as ``.*``, takes any number of characters.  The two gaps in
    ``.*layer.*`` can share out the 80 characters of a name in ``comb(82, 2)`` = 3,321 ways.  A repetition of anything
    but single characters, as in ``(a+)+``, has exponentially many ways.  ``more_gaps``: gaps around the pattern.
    """
    if len(pattern) > _MAX_PATTERN_LENGTH or re.search(r"\\\d", pattern):  # a reference to a group
        return math.inf
    for part, replacement in _SHORTER:
        pattern = re.sub(part, replacement, pattern, flags=re.DOTALL)
    for _ in range(_MAX_DEPTH):
        pattern = _PLAIN_GROUP.sub(lambda group: group[1] + (".?" if group[2] else ""), pattern)
        pattern = _ALTERNATIVES.sub(lambda group: "." + ".?" * (_overlaps(group[1]) + len(group[2])), pattern)
    if "(" in pattern:
        return math.inf
    ways = 0
    for alternative in pattern.split("|"):
        gaps = more_gaps + len(re.findall(r"[*+]", alternative))
        ways += math.comb(MAX_NAME_LENGTH + gaps, gaps) << alternative.count("?")
    return ways


def _overlaps(alternatives: str) -> int:
    """Return how many of ``alternatives``, ``a|b|c``, may match where another one matches, too."""
    beginnings = sorted(text.partition(".")[0] for text in alternatives.split("|"))  # "." is any character
    return sum(other.startswith(text) for text, other in itertools.pairwise(beginnings))
