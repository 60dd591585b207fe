"""Parsing ``--optimizer``: a PyTorch name, ``adamw:fused``, or a user's function, ``train.py:make_optimizer``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from memopt_cli.errors import UsageError, shorten

Implementation = Literal["default", "for-loop", "foreach", "fused"]
"""Implementation of an optimizer's step; how much memory the step takes in addition to the state depends on it."""

_LOOPS: tuple[Implementation, ...] = ("default", "for-loop", "foreach")
_FUSED: tuple[Implementation, ...] = (*_LOOPS, "fused")
_CLASSES: Mapping[str, tuple[str, tuple[Implementation, ...]]] = {
    "sgd": ("SGD", _FUSED),
    "adam": ("Adam", _FUSED),
    "adamw": ("AdamW", _FUSED),
    "adagrad": ("Adagrad", _FUSED),
    "adadelta": ("Adadelta", _LOOPS),
    "adafactor": ("Adafactor", _LOOPS),
    "adamax": ("Adamax", _LOOPS),
    "muon": ("Muon", ("default",)),
    "nadam": ("NAdam", _LOOPS),
    "radam": ("RAdam", _LOOPS),
    "rmsprop": ("RMSprop", _LOOPS),
}
"""Name -> class in ``torch.optim`` and implementations.

Four classes are missing: LBFGS needs a closure, SparseAdam needs sparse gradients, Rprop moves parameters even at a
rate of zero, and the memory of ASGD's step depends on its numbers.
"""
IN_MEMORY = " (in memory)"
"""End of the reference of a function that cannot be found by name."""
_FUNCTION = re.compile(r".+\.py:[^\W\d]\w*")
_NOTEBOOK = re.compile(r"(.+\.ipynb)(:.*)?")
CLOSURE_REASON = (
    "{} takes a closure, so it runs forward and backward inside step(); memopt can only measure steps that run each of "
    "them once"
)
"""Reason why an optimizer of this name is refused."""
_OWN = "Or give `file.py:function`, which takes the model and returns its optimizer."


@dataclass(frozen=True, slots=True)
class NoOptimizer:
    """The choice of no optimizer."""


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """A class of ``torch.optim``."""

    class_name: str
    implementation: Implementation = "default"


@dataclass(frozen=True, slots=True)
class MadeOptimizer:
    """An optimizer that a user function makes for the model."""

    reference: str
    """``file.py:function``, or the name of a function in memory, which ends in :data:`IN_MEMORY`."""


OptimizerChoice = NoOptimizer | NamedOptimizer | MadeOptimizer


def optimizer_name(class_name: str) -> str:
    """Return the ``--optimizer`` name of ``torch.optim``'s class ``class_name``; empty if memopt has none."""
    return next((name for name, (known, _) in _CLASSES.items() if known == class_name), "")


def fused_form(text: str) -> tuple[str, str] | None:
    """Return the fused form of the optimizer ``text``, ``adamw:fused``, and its class; ``None`` if it has none.

    There is none for an optimizer that is already fused, nor for a user's function.
    """
    name, _, implementation = text.partition(":")
    class_name, implementations = _CLASSES.get(name, ("", ()))
    if implementation == "fused" or "fused" not in implementations:
        return None
    return f"{name}:fused", class_name


def is_function(text: str) -> bool:
    """Return whether ``text`` names a function in a file: ``train.py:make_optimizer``."""
    return _FUNCTION.fullmatch(text) is not None


def notebook_refusal(text: str) -> str:
    """Return the hint for a ``text`` that names a notebook where code is wanted; empty for any other text."""
    match = _NOTEBOOK.fullmatch(text)
    if match is None:
        return ""
    script = f"{match[1].removesuffix('.ipynb')}.py"
    return (
        f"'{match[1]}' is a notebook, not a Python file: export it with jupyter nbconvert --to script "
        f"{shlex.quote(match[1])} (or in its menu: File, Save and Export Notebook As, Executable Script), and name "
        f"{script}{match[2] or ''}"
    )


def parse_optimizer(text: str) -> OptimizerChoice:
    """Parse the name of an optimizer; an empty name and ``none`` give :class:`NoOptimizer`.

    Raises :class:`UsageError` for an unknown name or implementation.
    """
    if text in ("", "none"):
        return NoOptimizer()
    if is_function(text) or text.endswith(IN_MEMORY):
        return MadeOptimizer(text)
    name, colon, implementation = text.partition(":")
    if name == "lbfgs":
        raise UsageError(
            CLOSURE_REASON.format("lbfgs"),
            hint="Name an optimizer whose step needs no closure, such as `--optimizer adamw`.",
        )
    if name not in _CLASSES:
        raise UsageError(f"unknown optimizer {shorten(text)}", hint=f"Known: none, {', '.join(_CLASSES)}. {_OWN}")
    class_name, implementations = _CLASSES[name]
    for known in get_args(Implementation):
        if known == (implementation if colon else "default") and known in implementations:
            return NamedOptimizer(class_name, known)
    alternatives = ", ".join(f"{name}:{known}" for known in implementations[1:])
    raise UsageError(
        f"{name} has no implementation {shorten(implementation)}",
        hint=f"Use one of: {name}, {alternatives}." if alternatives else f"Use {name}.",
    )
