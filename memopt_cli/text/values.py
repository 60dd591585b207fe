"""Numbers, amounts of memory and names that options take: as text on the command line, as values in Python.

A kind refuses what it does not take with a :class:`ValueError` that says what it takes, as a noun phrase: "a whole
number from 0 to 4".  Whoever asks knows the option's name and makes the sentence.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any

from memopt_cli.text.units import parse_amount


class Kind:
    """One way to say what an option takes."""

    def parse(self, text: str) -> Any:
        """Return the value that ``text`` stands for; raise :class:`ValueError` for what it does not take."""
        return self.of(text)

    def of(self, given: object) -> Any:
        """Return ``given`` as a plain value; raise :class:`ValueError` for what it does not take."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number from ``least`` to ``most``."""

    least: int = -(2**63)
    most: int = 2**63 - 1

    def parse(self, text: str) -> int:
        """Return the number that ``text`` spells."""
        try:
            number = int(text)
        except ValueError:
            raise ValueError(self._words()) from None
        return self.of(number)

    def of(self, given: object) -> int:
        """Return ``given``, a whole number of whatever library, as an ``int``; a truth value is none."""
        found = whole_number(given)
        if found is None or not self.least <= found <= self.most:
            raise ValueError(self._words(found or 0))
        return found

    def _words(self, found: int = 0) -> str:
        if found >= 2**63:
            return "a whole number below 2**63"
        if self.most < 2**63 - 1:
            return f"a whole number from {self.least} to {self.most}"
        return "a whole number" if self.least == -(2**63) else f"a whole number of at least {self.least}"


@dataclass(frozen=True, slots=True)
class Real(Kind):
    """A number from ``least`` to ``most``, in a ``unit``."""

    least: float = -math.inf
    most: float = math.inf
    unit: str = ""
    above: bool = False
    """``least`` itself is too small."""
    unlimited: bool = False
    """Infinity is taken, too: on the command line ``none``."""

    def parse(self, text: str) -> float:
        """Return the number that ``text`` spells."""
        try:
            return self.of(math.inf if self.unlimited and text == "none" else float(text))
        except ValueError:
            raise ValueError(f"{self._words()}{', or none' if self.unlimited else ''}") from None

    def of(self, given: object) -> float:
        """Return ``given``, a number of whatever library, as a ``float``; a truth value is none."""
        found = real_number(given)
        if found is None or not (self.least <= found <= self.most and (self.unlimited or math.isfinite(found))):
            raise ValueError(self._words())
        if self.above and found == self.least:
            raise ValueError(self._words())
        return found

    def _words(self) -> str:
        if self.above:
            return f"a finite number above {self.least:g}"
        kind = f"a number of {self.unit}" if self.unit else "a number"
        if math.isinf(self.most):
            return f"{kind} of at least {self.least:g}"
        return (
            f"{kind} of at most {self.most:g}"
            if math.isinf(self.least)
            else f"{kind} from {self.least:g} to {self.most:g}"
        )


@dataclass(frozen=True, slots=True)
class Amount(Kind):
    """An amount of memory: bytes are an ``int``, a share of what there is a ``float`` up to 1."""

    def parse(self, text: str) -> int | float:
        """Return the bytes of ``8GiB``, or the share of ``60%``; raise :class:`UsageError` for other text."""
        if not (found := parse_amount(text)):
            raise ValueError("an amount that something fits into: 24GiB, 512MB or 60%")
        return found

    def of(self, given: object) -> int | float:
        """Return the bytes or the share that ``given`` is, or spells."""
        if isinstance(given, str):
            return self.parse(given)
        size = whole_number(given)
        found = real_number(given) if size is None else size
        if found is None or not found > 0 or (isinstance(found, float) and found > 1):
            raise ValueError('bytes or a share up to 1: "24GiB", "60%" or 0.6')
        return found


@dataclass(frozen=True, slots=True)
class Size(Amount):
    """An amount of memory in bytes, and no share."""

    def parse(self, text: str) -> int:
        """Return the bytes of ``8GiB``; raise :class:`UsageError` for other text."""
        return self.of(parse_amount(text))

    def of(self, given: object) -> int:
        """Return the bytes that ``given`` is, or spells."""
        try:
            found = Amount.of(self, given)
        except ValueError:  # which would offer shares, too
            found = 0.0
        if isinstance(found, float):
            raise ValueError("a size that something fits into: 64GiB or 512MB")
        return found


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of a few names."""

    names: tuple[str, ...]

    def of(self, given: object) -> str:
        """Return ``given``."""
        if not isinstance(given, str) or given not in self.names:
            raise ValueError(f"one of {', '.join(self.names)}")
        return given


@dataclass(frozen=True, slots=True)
class Offload(Kind):
    """A place where tensors wait, or a choice of one, and for the disk perhaps a folder."""

    def of(self, given: object) -> str:
        """Return ``given``."""
        name, has_folder, folder = given.partition(":") if isinstance(given, str) else ("", "", "")
        if name not in ("auto", "none", "host", "disk") or (has_folder and not (name == "disk" and folder)):
            raise ValueError("auto, none, host, disk or disk:FOLDER")
        return str(given)


def whole_number(given: object) -> int | None:
    """Return ``given`` as an ``int``; ``None`` if it is no whole number, or a truth value."""
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        return None
    try:
        return operator.index(given)
    except TypeError:  # a tensor of several, or of other numbers
        return None


def real_number(given: object) -> float | None:
    """Return ``given`` as a ``float``; ``None`` if it is no number, or a truth value."""
    is_scalar = callable(getattr(given, "numel", None)) and given.numel() == 1  # type: ignore[attr-defined]
    is_number = isinstance(given, numbers.Real) or is_scalar
    return float(given) if is_number and not isinstance(given, bool) else None  # type: ignore[arg-type]
