"""Notes on programs that ignore ``train()`` and ``eval()``, because tracing or export fixed their operators' mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memopt_cli.runtime.lifted.operators import EXPRESSIONS, find_operator
from memopt_cli.runtime.lifted.program import walk_nodes
from memopt_cli.runtime.private_torch import schema_of


def mode_notes(programs: Iterable[tuple[Any, ...]], owner: str) -> tuple[str, ...]:
    """Return a note if ``owner`` (``Tracing``, ``torch.export``) fixed the mode of operators in ``programs``."""
    modes = {mode for program in programs for method in (*program[2], *program[3]) for mode in _modes(method[3])}
    if not modes:
        return ()
    mode = "training" if True in modes else "evaluation"
    if len(modes) > 1:
        mode = "a mixed"
    return (f"{owner} kept {mode} mode: dropout and normalization do not change with train() and eval().",)


def _modes(block: tuple[Any, ...]) -> set[bool]:
    modes = set()
    for kind, key, operands, _, _ in walk_nodes(block):
        operator = find_operator(key) if kind == "operator" and key not in EXPRESSIONS else None
        for argument, operand in zip(schema_of(operator).arguments if operator else (), operands, strict=False):
            if argument.name in ("train", "training") and type(operand) is tuple:
                modes.add(bool(operand[0]))
    return modes
