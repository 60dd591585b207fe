"""Choosing and checking the place of ``--offload``, where plans may send tensors to wait for backward."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from memopt_cli.errors import UsageError
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import OptimizeRequest, PlaceName, Plan, SearchOptions, StepTrace
from memopt_cli.text.units import exact_bytes, format_bytes

_MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs")
"""File systems that hold their files in memory, where offloading would save nothing."""
_NAME_FOLDER_HINT: Final = "Name a folder on a disk: `--offload disk:FOLDER`."


def with_place(request: OptimizeRequest, prepared: PreparedModel) -> PreparedModel:
    """Return ``prepared`` with the place where plans may send tensors, by default host memory for a step on a GPU.

    Raises :class:`UsageError` for a place that cannot be written to, or where tensors would save no memory.
    """
    options = request.search.options
    place, folder = options.sends_to
    if options.host_memory is not None and place in ("device", "disk"):
        raise UsageError(
            f"`--host-memory {exact_bytes(options.host_memory)}` limits what is sent to host memory, and "
            "nothing is sent there",
            hint="Use `--offload host`, or remove `--host-memory`.",
        )
    device, notes = prepared.subject.settings.device, prepared.notes
    if place is None:
        place = "host" if request.runs and device != "cpu" else "device"
    elif place != "device" and not request.runs:
        raise UsageError(
            f"`--offload {place}` needs a step that runs here: how fast tensors go elsewhere is measured",
            hint="Leave `--offload` out where `--for` or `--ranks` is given.",
        )
    elif place == "host" and device == "cpu":
        note = (
            "`--offload host` sends nothing: the tensors of the CPU are in host memory already. `--offload disk` does."
        )
        place, notes = "device", (*notes, note)
    elif place == "disk":
        if device != "cpu":
            raise UsageError(
                f"`--offload disk` sends tensors in host memory, and the step runs on {device}",
                hint="Use `--offload host`.",
            )
        _check_folder(folder or tempfile.gettempdir())
    subject = replace(prepared.subject, place=place, offload_folder=folder)
    return replace(prepared, subject=subject, notes=notes)


def offload_folder_notes(plan: Plan, folder: str | None) -> list[str]:
    """Return a note that tells the training script to set ``folder``, if ``plan`` sends tensors to files there."""
    if folder is None or not plan.sends:
        return []
    return [f"Set memopt_cli.offload_folder = {folder!r} in the training script: tensors wait in a file there."]


def room_notes(options: SearchOptions, trace: StepTrace, place: PlaceName) -> Iterator[str]:
    """Yield a note on how many bytes plans may send, and on the limit that says so, if ``place`` is host memory."""
    limits = {"half of the free memory": trace.room_bytes, "`--host-memory`": options.host_memory}
    named_limits = {nbytes: name for name, nbytes in limits.items() if nbytes is not None}
    if place == "host" and named_limits:
        limit_bytes = min(named_limits)
        yield f"Plans may send up to {format_bytes(limit_bytes)} to host memory: {named_limits[limit_bytes]}."


def _check_folder(folder: str) -> None:
    if not os.path.isdir(folder):
        raise UsageError(f"there is no folder '{folder}' for tensors to wait in", hint=_NAME_FOLDER_HINT)
    try:
        tempfile.TemporaryFile(dir=folder).close()  # /proc has all permissions, and takes no files
    except OSError as error:
        raise UsageError(f"'{folder}' cannot be written to: {error.strerror}", hint=_NAME_FOLDER_HINT) from error
    file_system = _file_system(os.path.realpath(folder))
    if file_system in _MEMORY_FILE_SYSTEMS:
        raise UsageError(
            f"'{folder}' lies in memory ({file_system}): tensors that wait there would save nothing",
            hint=_NAME_FOLDER_HINT,
        )


def _file_system(path: str) -> str:
    """Return the type of the file system of ``path``, by Linux's list of mounts; empty if there is no such list."""
    longest_mount = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, mounted, kind, *_ = line.split(" ")
        mount_point = mounted.encode().decode("unicode_escape")  # the list writes a space as \040
        if (path == mount_point or path.startswith(mount_point.rstrip("/") + "/")) and len(mount_point) >= len(
            longest_mount[0]
        ):
            longest_mount = mount_point, kind
    return longest_mount[1]
