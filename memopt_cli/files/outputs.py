"""Names of the files that memopt writes; none of them may be the model that memopt reads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import file_of
from memopt_cli.text.writing import check_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPaths:
    """Paths of the four files of one optimization."""

    model: Path
    plan_only: bool = False
    """Whether the model is not written; the other files are named as if it were, or after the plan in its place."""

    @property
    def summary(self) -> Path:
        """Path of the summary: ``model.memopt.summary.json``."""
        return self._next_to_model("summary.json")

    @property
    def plan(self) -> Path:
        """Path of the plan: ``model.memopt.plan.yaml``."""
        return self.model if self._names_plan else self._next_to_model("plan.yaml")

    @property
    def batch(self) -> Path:
        """Path of the batch configuration: ``model.memopt.batch.yaml``."""
        return self._next_to_model("batch.yaml")

    @property
    def frontier(self) -> Path:
        """Path of the plans that ``--frontier`` showed: ``model.memopt.frontier.json``."""
        return self._next_to_model("frontier.json")

    @property
    def _names_plan(self) -> bool:
        return self.plan_only and self.model.suffix in (".yaml", ".yml")

    def _next_to_model(self, end: str) -> Path:
        stem = self.model.stem.removesuffix(".plan") if self._names_plan else self.model.stem
        return self.model.with_name(f"{stem}.{end}")

    def all(self) -> tuple[Path, ...]:
        """Return the paths that are written, the model's first."""
        others = self.summary, self.plan, self.batch
        return others if self.plan_only else (self.model, *others)

    def with_free_names(self) -> OutputPaths:
        """Return these paths or, if one is taken, the first free ones with a number: ``model.memopt-2.pt``."""
        numbered = (self.model.with_stem(f"{self.model.stem}-{number}") for number in itertools.count(2))
        candidates = (replace(self, model=model) for model in itertools.chain([self.model], numbered))
        return next(paths for paths in candidates if not any(map(os.path.lexists, paths.all())))


def pair_paths(location: str, output: str | None) -> tuple[Path, Path]:
    """Return the paths of a batch and of the plan that goes with it: ``fast.batch.yaml`` and ``fast.plan.yaml``.

    ``output`` is the path of the batch; ``None`` puts both next to the model.  Raises :class:`UsageError` as
    :func:`output_paths` does.
    """
    paths = output_paths(location, output)
    if output is None:
        return paths.batch, paths.plan
    batch = Path(output)
    return batch, batch.with_name(f"{batch.name.removesuffix(batch.suffix).removesuffix('.batch')}.plan.yaml")


def output_paths(location: str, output: str | None, *, plan_only: bool = False) -> OutputPaths:
    """Return the paths for an optimization of the model at ``location``.

    ``model.pt`` gives ``model.memopt.pt`` in its folder, ``package.module:build`` gives ``module.memopt.pt`` in the
    working directory, and ``train.py:Net``, one of several in a file, ``train.Net.memopt.pt``.  ``output`` names the
    model's file instead; the other three follow its stem.  Raises :class:`UsageError` if ``output`` names no file, or
    the original model.
    """
    file = file_of(location)
    model = _output_path(Path(file), location.removeprefix(file).removeprefix(":")) if output is None else Path(output)
    if not model.name:
        raise UsageError(f"'{output}' does not name a file", hint="For example: `-o model.memopt.pt`.")
    _require_other(file, model)
    return OutputPaths(model=model, plan_only=plan_only)


def check_outputs(paths: Iterable[Path], model: str, *, force: bool) -> None:
    """Raise :class:`UsageError` if one of ``paths`` is the ``model`` by whatever name; then :func:`check_targets`."""
    outputs = list(paths)
    for path in outputs:
        _require_other(file_of(model), path)
    check_targets(outputs, force=force)


def _require_other(file: str, path: Path) -> None:
    if os.path.exists(path) and os.path.exists(file) and os.path.samefile(path, file):
        raise UsageError(f"the output {path} is the model itself", hint="Name another file.")


def _output_path(file: Path, builder: str) -> Path:
    """Return the path of the optimized model: next to ``file``, or in the working directory if it has a ``builder``."""
    if builder:
        ending = "" if builder == "build" else f".{builder}"
        return Path(f"{file.stem if file.suffix == '.py' else file.name.rpartition('.')[2]}{ending}.memopt.pt")
    return file.parent / f"{file.resolve().name if file.is_dir() else file.stem}.memopt.pt"
