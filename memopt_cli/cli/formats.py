"""``--format`` of the commands that judge: ``check``, ``compare`` and ``verify``."""

from __future__ import annotations

import os
from typing import Literal

from memopt_cli.report.github import GithubReport
from memopt_cli.report.interface import VerdictReport
from memopt_cli.report.json import JsonReport
from memopt_cli.report.junit import JunitReport
from memopt_cli.report.markdown import MarkdownReport
from memopt_cli.report.text import TextReport

TableFormat = Literal["table", "json", "md"]
ReportFormat = Literal[TableFormat, "github", "junit"]


def report_in(name: ReportFormat, *, verdict_only: bool = False, baseline: str = "") -> VerdictReport:
    """Return the report format ``name``; with ``verdict_only``, the table is a single line.

    ``baseline``: the file that the answer is judged by, beside which GitHub may show it.
    """
    match name:
        case "json":
            return JsonReport()
        case "md":
            return MarkdownReport()
        case "github":
            return GithubReport(os.environ.get("GITHUB_STEP_SUMMARY"), baseline)
        case "junit":
            return JunitReport()
        case "table":
            return TextReport(verdict_only=verdict_only)
