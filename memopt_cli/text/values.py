"""Values that options take: numbers, amounts of memory, names.  The command line and Python check them alike.

A kind parses the text of the command line, and checks the value of a Python argument.  It refuses a value with a
:class:`ValueError` whose message is a noun phrase, "a whole number from 0 to 4"; the caller, who knows the option's
name, makes the sentence.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any

from memopt_cli.text.units import parse_amount


class ValueKind:
    """A kind of value that options take."""

    def parse(self, text: str) -> Any:
        """Return the value that ``text`` spells.  Raises :class:`ValueError` if options do not take it."""
        return self.check(text)

    def check(self, value: object) -> Any:
        """Return ``value`` as a plain value.  Raises :class:`ValueError` if options do not take it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Whole(ValueKind):
    """A whole number from ``minimum`` to ``maximum``."""

    minimum: int = -(2**63)
    maximum: int = 2**63 - 1

    def parse(self, text: str) -> int:
        """Return the number that ``text`` spells."""
        try:
            number = int(text)
        except ValueError:
            raise ValueError(self._number_in_words()) from None
        return self.check(number)

    def check(self, value: object) -> int:
        """Return ``value``, a whole number of any library (NumPy, PyTorch), as an ``int``; ``True`` is refused."""
        number = whole_number(value)
        if number is None or not self.minimum <= number <= self.maximum:
            raise ValueError(self._number_in_words(number or 0))
        return number

    def _number_in_words(self, found: int = 0) -> str:
        if found >= 2**63:
            return "a whole number below 2**63"
        if self.maximum < 2**63 - 1:
            return f"a whole number from {self.minimum} to {self.maximum}"
        return "a whole number" if self.minimum == -(2**63) else f"a whole number of at least {self.minimum}"


@dataclass(frozen=True, slots=True)
class Real(ValueKind):
    """A number from ``minimum`` to ``maximum``, in a ``unit``."""

    minimum: float = -math.inf
    maximum: float = math.inf
    unit: str = ""
    above: bool = False
    """Whether numbers must be above ``minimum``, and not only at least that."""
    unlimited: bool = False
    """Whether infinity is also taken; on the command line it is spelled ``none``."""

    def parse(self, text: str) -> float:
        """Return the number that ``text`` spells."""
        try:
            return self.check(math.inf if self.unlimited and text == "none" else float(text))
        except ValueError:
            raise ValueError(f"{self._number_in_words()}{', or none' if self.unlimited else ''}") from None

    def check(self, value: object) -> float:
        """Return ``value``, a number of any library, as a ``float``; ``True`` is refused."""
        number = real_number(value)
        if number is None or not (self.minimum <= number <= self.maximum and (self.unlimited or math.isfinite(number))):
            raise ValueError(f"{self._number_in_words()}{', or math.inf' if self.unlimited else ''}")
        if self.above and number == self.minimum:
            raise ValueError(self._number_in_words())
        return number

    def _number_in_words(self) -> str:
        if self.above:
            return f"a finite number above {self.minimum:g}"
        kind = f"a number of {self.unit}" if self.unit else "a number"
        if math.isinf(self.maximum):
            return f"{kind} of at least {self.minimum:g}"
        return (
            f"{kind} of at most {self.maximum:g}"
            if math.isinf(self.minimum)
            else f"{kind} from {self.minimum:g} to {self.maximum:g}"
        )


@dataclass(frozen=True, slots=True)
class Amount(ValueKind):
    """An amount of memory: an ``int`` of bytes, or a ``float`` up to 1, the share of some memory."""

    def parse(self, text: str) -> int | float:
        """Return the bytes of ``8GiB``, or the share of ``60%``.

        Raises :class:`UsageError` for other text, and :class:`ValueError` for 0.
        """
        if not (amount := parse_amount(text)):
            raise ValueError("an amount that something fits into: 24GiB, 512MB or 60%")
        return amount

    def check(self, value: object) -> int | float:
        """Return the bytes or the share that ``value`` is, or spells."""
        if isinstance(value, str):
            return self.parse(value)
        size = whole_number(value)
        amount = real_number(value) if size is None else size
        if amount is None or not amount > 0 or (isinstance(amount, float) and amount > 1):
            raise ValueError('bytes or a share up to 1: "24GiB", "60%" or 0.6')
        return amount


@dataclass(frozen=True, slots=True)
class Size(Amount):
    """An amount of memory in bytes; a share is refused."""

    def parse(self, text: str) -> int:
        """Return the bytes of ``8GiB``.  Raises :class:`UsageError` for other text, :class:`ValueError` for a share."""
        return self.check(parse_amount(text))

    def check(self, value: object) -> int:
        """Return the bytes that ``value`` is, or spells."""
        try:
            amount = Amount.check(self, value)
        except ValueError:  # its message would also offer shares
            amount = 0.0
        if isinstance(amount, float):
            raise ValueError("a size that something fits into: 64GiB or 512MB")
        return amount


@dataclass(frozen=True, slots=True)
class Choice(ValueKind):
    """One of a few names."""

    names: tuple[str, ...]

    def check(self, value: object) -> str:
        """Return ``value`` if it is one of the names."""
        if not isinstance(value, str) or value not in self.names:
            raise ValueError(f"one of {', '.join(self.names)}")
        return value


@dataclass(frozen=True, slots=True)
class Offload(ValueKind):
    """A place where stored tensors wait: ``host``, ``disk`` or ``disk:FOLDER``; or ``auto`` or ``none``."""

    def check(self, value: object) -> str:
        """Return ``value`` if it names a place."""
        name, has_folder, folder = value.partition(":") if isinstance(value, str) else ("", "", "")
        if name not in ("auto", "none", "host", "disk") or (has_folder and not (name == "disk" and folder)):
            raise ValueError("auto, none, host, disk or disk:FOLDER")
        return str(value)


def whole_number(value: object) -> int | None:
    """Return ``value`` as an ``int``; ``None`` if it is not a whole number, or is a truth value."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tensor of several numbers, or of numbers that are not whole
        return None


def real_number(value: object) -> float | None:
    """Return ``value`` as a ``float``; ``None`` if it is not a number, or is a truth value."""
    is_scalar = callable(getattr(value, "numel", None)) and value.numel() == 1  # type: ignore[attr-defined]
    is_number = isinstance(value, numbers.Real) or is_scalar
    return float(value) if is_number and not isinstance(value, bool) else None  # type: ignore[arg-type]
