"""Preparing the user's own step for the Python API, from the function that makes it.

Profiling subprocesses import the function by name; if they cannot, it is called in this process.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from memopt_cli.loading.factory import make_step
from memopt_cli.measure.jobs import Subject
from memopt_cli.measure.local import isolate_state
from memopt_cli.measure.reach import UserFunction, main_script, unreachable
from memopt_cli.measure.same_code import find_difference
from memopt_cli.pipeline.live.model import Arguments, prepare_here, save_inputs
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.records import STEP, InputSpec, ModelSource, StepSettings, Trust
from memopt_cli.training.user_step import Step, StepModels


@contextlib.contextmanager
def prepared_step(make: Callable[[], Step], inputs: Arguments, settings: StepSettings) -> Iterator[Prepared]:
    """Prepare, inside :func:`refuse_recursion`, the step that ``make`` makes, to be profiled.

    A new step is made, so that the user's own is not changed.  A function that a subprocess could not import is called
    in this process, and a note has the reason.
    Raises :class:`OptionError` for inputs that are not tensors or plain containers, and :class:`FileFormatError` if
    ``make`` does not return a step.
    """
    name = getattr(make, "__qualname__", type(make).__name__)
    obstacle = _why_not_importable(make, name) or _difference(make, name)
    make_again = functools.partial(make_step, make, name)
    with tempfile.TemporaryDirectory(prefix="memopt-") as folder:
        input_file = Path(folder) / "inputs.pt"
        save_inputs(inputs, input_file)
        source = ModelSource(location=_location(make, name, obstacle), trust=Trust(pickle=True))
        spec = InputSpec(data_file=str(input_file), source="inputs")
        with isolate_state():
            subject = Subject(source=source, spec=spec, settings=settings)
            prepared = prepare_here(subject, STEP, lambda: StepModels(make_again(), make_again), obstacle)
        yield prepared


def _why_not_importable(make: Callable[[], Step], name: str) -> str:
    module = getattr(make, "__module__", "__main__")
    if not all(part.isidentifier() for part in name.split(".")):
        return f"{name} is defined within a function"
    reason = unreachable(f"{module}.{name}")
    with contextlib.suppress(ImportError, AttributeError):
        if not reason and pkgutil.resolve_name(f"{module}.{name}") is not make:
            reason = "that is another object"
    return f"a subprocess cannot import {module}.{name} ({reason})" if reason else ""


def _difference(make: Callable[[], Step], name: str) -> str:
    """Return why a subprocess would run another function than ``make``; empty if it runs the same."""
    source = ModelSource(location=name, trust=Trust(pickle=True))
    if make.__module__ != "__main__":
        return find_difference(source, [f"{make.__module__}.{name}"])
    return find_difference(source, [], [UserFunction(reference=_location(make, name, ""), function=make)])


def _location(make: Callable[[], Step], name: str, obstacle: str) -> str:
    if obstacle:
        return name
    module = make.__module__
    return f"{main_script()}:{name}" if module == "__main__" else f"{module}:{name}"
