"""The files memopt writes: their names, their content, and how they reach the disk, all or none."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from memopt_cli.documents import MOST_BYTES, json_text, printable_data, read_bytes, read_json, read_mapping, yaml_text
from memopt_cli.errors import BaselineError, UsageError, WriteError, shortened
from memopt_cli.optimizer_text import is_function
from memopt_cli.records import (
    SCHEMA_VERSION,
    Baseline,
    BatchAdvice,
    FileHeader,
    Measurement,
    MemOptSummary,
    Plan,
    ReplicaAdvice,
    StepMemory,
    from_data,
    refuse_unknown,
    to_data,
)
from memopt_cli.spec_text import check_spec, parse_factory

Fill = Callable[[BinaryIO], object]
"""Writes one file's content to an open binary file."""


# ---------------------------------------------------------------------------------------------- names


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPaths:
    """Where the four files of one optimization go."""

    model: Path
    plan_only: bool = False
    """The model is not written; its name is the one that the others follow."""

    @property
    def summary(self) -> Path:
        """``model.memopt.summary.json``."""
        return self.model.with_name(f"{self.model.stem}.summary.json")

    @property
    def plan(self) -> Path:
        """``model.memopt.plan.yaml``."""
        return self.model.with_name(f"{self.model.stem}.plan.yaml")

    @property
    def batch(self) -> Path:
        """``model.memopt.batch.yaml``."""
        return self.model.with_name(f"{self.model.stem}.batch.yaml")

    def all(self) -> tuple[Path, ...]:
        """Those that are written, the model first."""
        others = self.summary, self.plan, self.batch
        return others if self.plan_only else (self.model, *others)

    def free(self) -> OutputPaths:
        """The same, or if one of them has come to exist the first with a number: ``model.memopt-2.pt``."""
        numbered = (self.model.with_stem(f"{self.model.stem}-{number}") for number in itertools.count(2))
        candidates = (replace(self, model=model) for model in itertools.chain([self.model], numbered))
        return next(paths for paths in candidates if not any(map(os.path.lexists, paths.all())))


def output_paths(location: str, output: str | None, *, plan_only: bool = False) -> OutputPaths:
    """``model.pt`` -> ``model.memopt.pt`` beside it; ``package.module:callable`` -> ``module.memopt.pt`` here.

    ``output`` names the model's file instead; the other three follow its stem.
    Raises :class:`UsageError` if ``output`` names no file, or that of the model.
    """
    model = _beside(location) if output is None else Path(output)
    if not model.name:
        raise UsageError(f"'{output}' does not name a file", hint="Write for example -o model.memopt.pt.")
    if os.path.exists(model) and os.path.exists(location) and os.path.samefile(model, location):
        raise UsageError(f"the output {model} is the model itself", hint="Name another file with -o.")
    return OutputPaths(model=model, plan_only=plan_only)


def _beside(location: str) -> Path:
    factory = parse_factory(location)
    if factory and not os.path.exists(location):
        module = factory[0]
        stem = Path(module).stem if is_function(location) else module.rpartition(".")[2]
        return Path(f"{stem}.memopt.pt")
    path = Path(location)
    return path.parent / f"{path.resolve().name if path.is_dir() else path.stem}.memopt.pt"


# ---------------------------------------------------------------------------------------------- to the disk

_MODE = 0o666
"""Permissions of a new file, less what the process's mask takes."""
_LONGEST_STEM = 60
"""Characters of a name that stay in a temporary one: 255 bytes are the most, and a character may take four."""


def check_targets(paths: Iterable[Path], *, force: bool) -> None:
    """Raise now what writing would raise later.

    :class:`UsageError` for a path that is a folder, or exists and may not be replaced; :class:`WriteError` for a folder
    that is missing or not writable.
    """
    for path in paths:
        if os.path.isdir(path):
            raise UsageError(
                f"the output {path} is a folder", hint="Name a file with -o, for example -o model.memopt.pt."
            )
        if os.path.lexists(path) and not force:
            raise UsageError(f"{path} exists", hint="Replace it with --force, or name another file.")
        if not os.path.isdir(path.parent):
            raise WriteError(
                f"cannot write {path}: there is no folder {path.parent}", hint="Make it, or choose another."
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise WriteError(
                f"cannot write {path}: the folder {path.parent} is not writable", hint="Choose another folder with -o."
            )


def content(data: bytes) -> Fill:
    """Fills a file with bytes that are known already."""
    return lambda file: file.write(data)


def write_all(files: Mapping[Path, Fill], *, force: bool) -> tuple[str, ...]:
    """Write every file or none, and return their paths.

    Each is filled under a temporary name in its own folder and flushed to the disk; only then are all renamed.
    Whatever goes wrong, Ctrl-C included, temporary files are removed and files that were there before are as before.
    Raises as :func:`check_targets`, and :class:`WriteError` when the disk is full or fails.
    """
    check_targets(files, force=force)
    staged: dict[Path, Path] = {}
    try:
        for path, fill in files.items():
            with _os_errors(path):
                staged[path] = _sibling(path)
                _fill(staged[path], fill)
        check_targets(files, force=force)  # someone else may have written there meanwhile
        try:
            _rename_all(staged, force=force)
        except FileExistsError:
            check_targets(files, force=force)  # between then and now
            raise
    finally:
        for temporary in staged.values():
            if os.path.lexists(temporary):
                temporary.unlink()
    return tuple(str(path) for path in files)


def _fill(path: Path, fill: Fill) -> None:
    # A new file of this process's own: nobody can have put a link in its place.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, _MODE), "wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def _rename_all(staged: Mapping[Path, Path], *, force: bool) -> None:
    """Raises :class:`FileExistsError` for a file that is there and may not be replaced."""
    backups = {path: _sibling(path) for path in staged}
    begun: list[Path] = []
    try:
        for path, temporary in staged.items():
            begun.append(path)
            if not force:
                _rename_to_new(temporary, path)
                continue
            with _os_errors(path):
                if os.path.lexists(path):
                    os.replace(path, backups[path])
                os.replace(temporary, path)
    except BaseException:
        for path in begun:
            _restore(path, backups[path], renamed=not os.path.lexists(staged[path]))
        raise
    for backup in backups.values():
        backup.unlink(missing_ok=True)


def _rename_to_new(temporary: Path, path: Path) -> None:
    """Unlike a rename, a link replaces nothing that has come to be there a moment ago."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a disk without hard links
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        with _os_errors(path):
            os.replace(temporary, path)
    else:
        temporary.unlink()


def _restore(path: Path, backup: Path, *, renamed: bool) -> None:
    if os.path.lexists(backup):
        os.replace(backup, path)
    elif renamed:
        path.unlink()


def _sibling(path: Path) -> Path:
    """A name in the same folder that nobody can foresee."""
    return path.with_name(f".{path.name[:_LONGEST_STEM]}.{secrets.token_hex(8)}.memopt")


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Turn a failing disk into :class:`WriteError`, also where ``torch.save`` raises something else on top of it."""
    try:
        yield
    except Exception as err:
        cause: BaseException | None = err
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise WriteError(
            f"cannot write {path}: {cause.strerror or cause}",
            hint="Make room, or choose another folder with -o.",
        ) from err


# ---------------------------------------------------------------------------------------------- contents


def summary_json(header: FileHeader, summary: MemOptSummary) -> bytes:
    """The content of ``*.summary.json``: the header's keys, then ``summary``."""
    return json_text({**to_data(header), "summary": to_data(summary)}).encode()


def plan_yaml(header: FileHeader, plan: Plan, level: int) -> bytes:
    """The content of ``*.plan.yaml``: the header's keys, the ``level`` that the plan was made at, and the plan."""
    segments = [{"path": segment.path, **_short(segment)} for segment in plan.segments]
    return yaml_text({**_header(header), "level": level, **_short(plan), "segments": segments}).encode()


def read_plan(path: str | os.PathLike[str]) -> tuple[FileHeader, Plan]:
    """The inverse of :func:`plan_yaml`.

    Raises :class:`UsageError` for a file that cannot be read, is no plan, has an unknown or missing key or a value of
    the wrong type, or was written by a later memopt.
    """
    data = read_mapping(Path(path), _PLAN)
    version = data.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"{path} is not a plan: its schema_version is {shortened(version)}", hint=_PLAN)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema_version {version}; this memopt reads up to {SCHEMA_VERSION}", hint="Upgrade memopt."
        )
    of_plan = [f.name for f in fields(Plan)]
    refuse_unknown(data, [*_HEADER_KEYS, "level", *of_plan], str(path))
    header = _read_header({key: data[key] for key in data if key in _HEADER_KEYS}, str(path))
    return header, from_data(Plan, {key: data[key] for key in data if key in of_plan}, where=str(path))


_PLAN = "Give a *.plan.yaml that memopt optimize wrote; its header belongs to it."


def _read_header(data: Mapping[str, Any], where: str) -> FileHeader:
    """Where a file says that it comes from; its inputs are looked at as those that a user types."""
    header = from_data(FileHeader, data, where=where)
    try:
        check_spec(header.spec)
    except UsageError as err:
        raise UsageError(f"{where}: {err.message}", hint=err.hint) from err
    return header


def baseline_json(baseline: Baseline) -> bytes:
    """The content of a baseline: the header's keys, ``conditions`` and ``memory``; :func:`read_measured` reads it."""
    parts = {"conditions": to_data(baseline.conditions), "memory": to_data(baseline.memory)}
    return json_text({**to_data(baseline.header), **parts}).encode()


def read_measured(path: str | os.PathLike[str]) -> Baseline:
    """What a step needed, from a baseline or from a ``*.summary.json``.

    Raises :class:`BaselineError` for a file that is missing, is neither, or was written by a later memopt.
    """
    try:
        data = printable_data(read_json(read_bytes(path, MOST_BYTES)))
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version not in (1, SCHEMA_VERSION) or isinstance(version, bool | float):
            raise UsageError(f"its schema_version is {shortened(version)}, and this memopt reads 1 to {SCHEMA_VERSION}")
        data = _as_of_today(data) if version == 1 else data
        header = _read_header({key: data[key] for key in data if key in _HEADER_KEYS}, "the file")
        if "summary" in data:
            memory = _summarized(from_data(MemOptSummary, data["summary"], where="summary"))
            return Baseline(header=header, conditions=None, memory=memory)
        parts = {key: data[key] for key in data if key not in _HEADER_KEYS}
        return _checked(from_data(Baseline, {"header": to_data(header), **parts}, where="the file"))
    except FileNotFoundError as err:
        raise BaselineError(f"there is no baseline at {path}", hint=_RECORD) from err
    except (OSError, ValueError, UsageError) as err:
        reason = err.message if isinstance(err, UsageError) else getattr(err, "strerror", None) or err
        raise BaselineError(f"{path} is not a baseline: {reason}", hint=_RECORD) from err


def _checked(found: Baseline) -> Baseline:
    """Renames are looked for at every level of every path: thousands of levels would keep memopt busy for minutes."""
    deepest = max((module.path.count(".") for module in found.memory.modules), default=0)
    if deepest > _MOST_LEVELS:
        raise UsageError(f"its modules lie {deepest} levels within each other; memopt compares {_MOST_LEVELS}")
    return found


def _as_of_today(data: Any) -> Any:
    """JSON of version 1 by the keys of today; nothing depended on those that are gone."""
    if isinstance(data, list):
        return [_as_of_today(item) for item in data]
    if not isinstance(data, dict):
        return data
    values = {key: _as_of_today(value) for key, value in data.items()}
    if "segments" in values:  # a plan
        values.pop("level", None)
    if "predicted_tensor_peak_bytes" in values:  # a level
        values.pop("note", None)
        values = {"dry_runs" if key == "candidates" else key: value for key, value in values.items()}
    if "accumulates" in values:  # the settings of a step
        values["micro_batches"] = 2 if values.pop("accumulates") is True else 1
    return values


_MOST_LEVELS = 200
_RECORD = "Record one with memopt baseline MODEL -o FILE."
_HEADER_KEYS = [f.name for f in fields(FileHeader)]


def _summarized(summary: MemOptSummary) -> StepMemory:
    """What the step of the applied level needs; raises :class:`UsageError` if it was not measured."""
    outcomes = (row.outcome for row in summary.levels if row.level == summary.applied_level)
    measured = next((outcome for outcome in outcomes if isinstance(outcome, Measurement)), None)
    if measured is None:
        raise UsageError(f"it is a summary whose level {summary.applied_level} has no measurement")
    return StepMemory(
        plan=summary.plan or Plan(),
        tensor_peak_bytes=measured.tensor_peak_bytes,
        allocated_peak_bytes=measured.allocated_peak_bytes,
        step_s=measured.step_s,
        breakdown=measured.breakdown,
    )


def batch_yaml(header: FileHeader, *, shaping: Mapping[str, Any], recommended: Mapping[str, Any]) -> bytes:
    """The content of ``*.batch.yaml``: ``batch_shaping``, the configuration, and ``recommended``, what it rests on."""
    return yaml_text({**_header(header), "batch_shaping": dict(shaping), "recommended": dict(recommended)}).encode()


def recommended_data(advice: BatchAdvice) -> dict[str, Any]:
    """Advice as it stands below ``recommended``; sizes in bytes, times in seconds."""
    return {
        "batch_size": advice.recommended_batch,
        "verified": True,  # by a run: memopt recommends nothing else
        "fastest_batch_size": advice.fastest_batch,
        "estimated_batch_size": advice.estimated_batch,
        "limited_by": advice.limited_by,
        "budget_bytes": advice.budget_bytes,
        "device_bytes": advice.device_bytes,
        "peak_fit": {"intercept_bytes": advice.intercept_bytes, "bytes_per_sample": advice.slope_bytes},
        "probes": _short(advice.probes),
    }


def replicas_data(advice: ReplicaAdvice) -> dict[str, Any]:
    """How many copies, as it stands below ``recommended``; ``route`` is what ran them."""
    route = next(probe.route for probe in advice.probes if probe.replicas == advice.fastest)
    return {
        "replicas": advice.fastest,
        "route": route,
        "replicas_limited_by": advice.limited_by,
        "replica_probes": _short(advice.probes),
    }


def _header(header: FileHeader) -> dict[str, Any]:
    return {**to_data(header), "spec": _short(header.spec)}


def _short(record: Any) -> Any:
    """As :func:`to_data`, less the fields that hold their default: a file for people."""
    if isinstance(record, list | tuple):
        return [_short(item) for item in record]
    if not is_dataclass(record):
        return to_data(record)
    values = {f.name: (getattr(record, f.name), f) for f in fields(record)}
    return {
        name: _short(value)
        for name, (value, f) in values.items()
        if value != (f.default if f.default_factory is MISSING else f.default_factory())
    }
