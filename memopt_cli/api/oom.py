"""``memopt_cli.explain_oom``: save what ``memopt explain`` reads when a training script runs out of memory."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import resource
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from memopt_cli.api.arguments import check_path
from memopt_cli.batching.memory import status_bytes
from memopt_cli.pipeline.out_of_memory.oom_text import read_oom
from memopt_cli.pipeline.out_of_memory.process_limits import ProcessLimit, limits_line
from memopt_cli.runtime.private_torch import memory_history, memory_snapshot
from memopt_cli.runtime.segment_config import Installed
from memopt_cli.runtime.variables import is_library
from memopt_cli.search.batch_size.capacity import device_capacity
from memopt_cli.text.documents import from_here, quoted_path
from memopt_cli.text.optimizer_text import optimizer_name
from memopt_cli.text.writing import content, write_all
from memopt_cli.training.step import is_out_of_memory

_OWN_LOSS = "--loss train.py:loss"


@contextlib.contextmanager
def explain_oom(path: str | os.PathLike[str] = "memopt-oom") -> Iterator[None]:
    """Write files that explain an out-of-memory error in the ``with`` block, and raise the error again.

    Use it as ``with memopt_cli.explain_oom(): train()`` under ``if __name__ == "__main__":``, or as
    ``@memopt_cli.explain_oom()`` above a function.

    ``path``: the files' path without ending.  ``.log`` gets the traceback, and on Linux the process's size and limits
    if the CPU's memory ran out.  On a GPU, ``.snapshot.pickle`` gets the allocator's snapshot: which line of code
    allocated what, since stacks are recorded in the ``with`` block.  Existing files are replaced.  A note on the error
    has the command to type.  Raises ``OptionError`` for a path of the wrong type.
    """
    base = check_path("path", path)
    if not torch.cuda.is_available():
        # An optimizer loads much of PyTorch. Loaded here, it counts as held before the block, not as tensors' memory.
        torch.optim.SGD([torch.zeros(1, requires_grad=True, device="cpu")])
    sizes_before = _process_sizes()
    with memory_history() if torch.cuda.is_available() else contextlib.nullcontext():
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) or _came_from_data_loader(error):
                error.add_note(_keep_files(error, base, sizes_before))
            raise


def _came_from_data_loader(error: BaseException | None) -> bool:
    """Return whether ``error``, or an error that it was raised from, is of a DataLoader's workers without memory."""
    while error is not None:
        report = read_oom(str(error))
        if report is not None and report.is_of_loading:
            return True
        error = error.__cause__
    return False


def _keep_files(error: Exception, base: Path, sizes_before: dict[str, int]) -> str:
    """Write the files that explain ``error``, and return a note with the command to type, or why writing failed."""
    try:
        files = _files_by_path(error, base, sizes_before)
        write_all({path: content(data) for path, (_, data) in files.items()}, force=True)
    except Exception as failed:  # such as a full disk, which must not hide the out-of-memory error
        return f"memopt could not write the files that explain it: {failed}"
    flags = " ".join(f"{flag} {quoted_path(str(path))}" for path, (flag, _) in files.items())
    if _came_from_data_loader(error):
        return f"memopt explain {flags}"
    # The frame of an ``__init__`` may hold a module that cannot list its parameters yet: ``nn.Module``'s has not run.
    models = [v for v in _local_values(error) if isinstance(v, torch.nn.Module) and "_modules" in vars(v)]
    network = max(models, key=lambda module: sum(1 for _ in module.parameters()), default=None)
    model, inputs = (_builder(_kind_of(network)), _inputs_of(network)) if network else ("", "-i SHAPE")
    paths = _code_paths(models)
    trust = " ".join(f"--code-path {quoted_path(path)}" for path in paths)
    words = (f"memopt explain {model or 'MODEL'} {inputs}", trust, _optimizer(error), flags)
    command = " ".join(filter(None, words))
    placeholders = "MODEL is a saved model, or net.py:build for a function that makes it"
    if model:
        placeholders = f"{model} is built without arguments: if it needs some, name a function that builds it"
    plan = ""
    if any(isinstance(part, Installed) for model in models for part in model.modules()):
        plan = "\nthe model carried a plan when memory ran out: the command looks for changes of the step without it"
    return (
        f"memopt explain {flags}\n"
        f"and to find what would fit: {command}\n"
        f"{placeholders}; SHAPE is the shape of a batch, such as 64x3x224x224 or 64x128@int64=0..32000; "
        f"add {_OWN_LOSS} if it has its own loss"
        f"{plan}{_missing_guard_line(paths)}"
    )


def _missing_guard_line(paths: Sequence[str]) -> str:
    """Return a line that asks for a guard in the running script if it is in ``paths``, since the command imports it.

    Empty if it has one.
    """
    path = _running_script()
    try:
        is_guarded = path not in paths or "__main__" in Path(path or "").read_text(errors="replace")
    except OSError:  # for example, the script lies in an archive
        is_guarded = True
    if is_guarded:
        return ""
    return f'\nthe command imports {path}: first put what trains there under if __name__ == "__main__":'


def _running_script() -> str | None:
    """Return the path of the running script; ``None`` in a notebook."""
    return getattr(sys.modules.get("__main__"), "__file__", None)


def _kind_of(module: torch.nn.Module) -> type:
    """Return the class of ``module`` as its user wrote it, below that of a segment."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, Installed))


def _builder(kind: type) -> str:
    """Return ``train.py:Net`` for the class ``kind`` of a model, if its file can make one; else empty.

    The file can if it is the user's own, in no package, and defines the class at top level, without required arguments.
    """
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    if path is None or not _is_own(kind) or "." in kind.__module__:
        return ""
    if any(map(_is_needed, inspect.signature(kind).parameters.values())):
        return ""
    is_named = vars(module).get(kind.__name__) is kind
    return (
        quoted_path(f"{path if kind.__module__ == '__main__' else from_here(path)}:{kind.__name__}") if is_named else ""
    )


def _is_own(kind: type) -> bool:
    return kind.__module__ == "__main__" or not is_library(kind.__module__)


def _code_paths(models: Sequence[torch.nn.Module]) -> list[str]:
    """Return the script and folders from which ``memopt explain`` can import the user's classes in ``models``.

    Without models, return the running script, which probably has the class.
    """
    script = _running_script()
    kinds = {_kind_of(part): None for model in models for part in model.modules()}
    paths: list[str | None] = [] if models else [script]
    for kind in filter(_is_own, kinds):
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if kind.__module__ == "__main__" or file is None:
            paths.append(script)
        else:
            paths.append(from_here(Path(file).parents[kind.__module__.count(".") + (Path(file).name == "__init__.py")]))
    return list(filter(None, dict.fromkeys(paths)))


def _inputs_of(model: torch.nn.Module) -> str:
    """Return one ``-i`` for each argument that forward of ``model`` needs, by name if it needs several."""
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [each.name for each in parameters if _is_needed(each)]
    return " ".join(f"-i {name}:SHAPE" for name in needed) if len(needed) > 1 else "-i SHAPE"


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _local_values(error: Exception) -> Iterator[object]:
    """Yield the values of the local variables in the frames of ``error``, outermost frame first."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield from list(frame.f_locals.values())


def _optimizer(error: Exception) -> str:
    """Return the flag for the first optimizer among the local variables of the frames of ``error``; empty if none."""
    for value in _local_values(error):
        if isinstance(value, torch.optim.Optimizer) and (name := optimizer_name(type(value).__name__)):
            return f"--optimizer {name}"
    return ""


def _files_by_path(error: Exception, base: Path, sizes_before: dict[str, int]) -> dict[Path, tuple[str, bytes]]:
    """Return the files to write for ``error``, by path: the flag of ``memopt explain`` for each, and its contents."""
    log, snapshot = base.with_name(f"{base.name}.log"), base.with_name(f"{base.name}.snapshot.pickle")
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, torch.OutOfMemoryError):  # the CPU's memory ran out
        text += _limits_line(sizes_before)
    files = {log: ("--log", text.encode(errors="backslashreplace"))}
    if torch.cuda.is_available():
        files[snapshot] = ("--snapshot", pickle.dumps(memory_snapshot()))
    return files


def _process_sizes() -> dict[str, int]:
    """Return the sizes of this process in bytes, as a dictionary by Linux's names; empty on other systems."""
    names = ("VmSize", "VmPeak", "VmRSS", "VmHWM") if sys.platform == "linux" else ()
    return {name: status_bytes(name) for name in names}


def _limits_line(sizes_before: dict[str, int]) -> str:
    """Return a line with this process's limits and sizes, now and before the block, that ``memopt explain`` reads."""
    if not sizes_before:
        return ""
    sizes = _process_sizes()
    memory = device_capacity("cpu")
    (space, _) = resource.getrlimit(resource.RLIMIT_AS)

    def limit(name: str, limit_bytes: int, size: str, peak: str) -> ProcessLimit:
        # The error has freed memory on its way here, so the peak counts, unless it was reached before the block.
        largest = peak if sizes[peak] > sizes_before[peak] else size
        return ProcessLimit(
            name=name,
            limit_bytes=limit_bytes,
            before_bytes=sizes_before[size],
            size=largest,
            size_bytes=sizes[largest],
        )

    return limits_line(
        None if space == resource.RLIM_INFINITY else limit("RLIMIT_AS (ulimit -v)", space, "VmSize", "VmPeak"),
        limit(memory.limited_by, memory.device_bytes, "VmRSS", "VmHWM"),
    )
