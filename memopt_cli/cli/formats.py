"""``--format`` of the commands that judge: ``check``, ``compare`` and ``verify``."""

from __future__ import annotations

import os
from typing import Final

from memopt_cli.report.github import GithubReport
from memopt_cli.report.interface import VerdictReport
from memopt_cli.report.json import JsonReport
from memopt_cli.report.junit import JunitReport
from memopt_cli.report.markdown import MarkdownReport
from memopt_cli.report.text import TextReport
from memopt_cli.text.options import ReportFormat

SHOWN: Final = "memopt.shown"
"""Key in ``context.meta``, set once the report is shown, so that a failure does not print a second report."""


def report_in(
    name: ReportFormat, *, verdict_only: bool = False, baseline: str = "", command: str = "check"
) -> VerdictReport:
    """Return the report format ``name``; with ``verdict_only``, the table is a single line.

    ``baseline``: the file by which the answer is judged; GitHub may show the answer next to it.  ``command``: the name
    of the command, for a report of an error.
    """
    match name:
        case "json":
            return JsonReport()
        case "md":
            return MarkdownReport()
        case "github":
            return GithubReport(os.environ.get("GITHUB_STEP_SUMMARY"), baseline)
        case "junit":
            return JunitReport(command)
        case "table":
            return TextReport(verdict_only=verdict_only)
