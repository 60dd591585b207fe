"""``memopt_cli.explain_oom``: what ``memopt explain`` needs, kept where a training script runs out of memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from memopt_cli.api.arguments import path_given
from memopt_cli.runtime.private_torch import memory_history, memory_snapshot
from memopt_cli.text.documents import quoted_path
from memopt_cli.text.optimizer_text import name_of
from memopt_cli.text.writing import content, write_all
from memopt_cli.training.step import is_out_of_memory

_OWN_LOSS = "--loss train.py:loss"


@contextlib.contextmanager
def explain_oom(path: str | os.PathLike[str] = "memopt-oom") -> Iterator[None]:
    """Write what explains an out-of-memory error inside the block to the disk, and let the error go on.

    ``with memopt_cli.explain_oom(): train()``, or ``@memopt_cli.explain_oom()`` above a function.  ``path``: of the
    files, without their endings: ``.log`` has the traceback, and ``.snapshot.pickle``, on a GPU, who held what, by the
    lines that made it, whose stacks are recorded meanwhile.  Files of these names are replaced.  The error has a note
    that says what to type.  Raises :class:`OptionError` for a path of another type.
    """
    base = path_given("path", path)
    with memory_history() if torch.cuda.is_available() else contextlib.nullcontext():
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(_kept(error, base))
            raise


def _kept(error: Exception, base: Path) -> str:
    """Write the files of ``error``, and return the command to type, or why they could not be written."""
    try:
        files = _files(error, base)
        write_all({path: content(data) for path, (_, data) in files.items()}, force=True)
    except Exception as failed:  # no other error is to take this one's place
        return f"memopt could not write the files that explain it: {failed}"
    told = " ".join(f"{flag} {quoted_path(str(path))}" for path, (flag, _) in files.items())
    command = " ".join(filter(None, ["memopt explain MODEL -i SHAPE", _script(), _optimizer(error), told]))
    return (
        f"memopt explain {told}\n"
        f"and to find what would fit: {command}\n"
        "MODEL is a saved model, or net.py:build for a function that makes it; SHAPE that of a batch, 64x3x224x224 or "
        f"64x128@int64=0..32000; add {_OWN_LOSS} if it has a loss of its own"
    )


def _script() -> str:
    """Return the flag that lets classes of the running script be imported; empty in a notebook."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return f"--code-path {quoted_path(path)}" if path else ""


def _optimizer(error: Exception) -> str:
    """Return the flag for the first optimizer among the local variables on the way to ``error``; empty if none is."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, torch.optim.Optimizer) and (name := name_of(type(value).__name__)):
                return f"--optimizer {name}"
    return ""


def _files(error: Exception, base: Path) -> dict[Path, tuple[str, bytes]]:
    """Return the contents of every file by its path, each with the flag that reads it."""
    log, snapshot = base.with_name(f"{base.name}.log"), base.with_name(f"{base.name}.snapshot.pickle")
    files = {log: ("--log", "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))}
    if torch.cuda.is_available():
        files[snapshot] = ("--snapshot", pickle.dumps(memory_snapshot()))
    return files
