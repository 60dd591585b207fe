"""Writing the files of ``--html`` and ``--snapshot``, reports in addition to the one on stdout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memopt_cli.files.outputs import check_outputs
from memopt_cli.records import StepTrace
from memopt_cli.report.html import require_plotly
from memopt_cli.report.snapshot import snapshot_bytes
from memopt_cli.text.spelling import on_command_line
from memopt_cli.text.writing import Fill, content, write_all


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """Paths of the requested report files; ``None`` for each that was not."""

    html: str | None
    snapshot: str | None
    force: bool
    """Whether the files may replace existing ones."""

    @property
    def wanted(self) -> bool:
        """Whether a report is to be written."""
        return self.html is not None or self.snapshot is not None

    def check(self, model: str) -> None:
        """Raise the errors of :meth:`write` before minutes of work.  ``model``: the model's file, never overwritten."""
        paths = [Path(path) for path in (self.html, self.snapshot) if path is not None]
        check_outputs(paths, model, force=self.force)
        if self.html is not None:
            require_plotly()

    def write(self, page: Callable[[], str], trace: StepTrace | None = None) -> tuple[str, ...]:
        """Write all requested files or none, and return their paths.  ``trace``: the step of the snapshot."""
        contents: dict[Path, Fill] = {}
        if self.html is not None:
            contents[Path(self.html)] = content(on_command_line(page()).encode(errors="backslashreplace"))
        if self.snapshot is not None:
            assert trace is not None, "the caller passes the step if `--snapshot` is given"
            contents[Path(self.snapshot)] = content(snapshot_bytes(trace))
        return write_all(contents, force=self.force)
