"""``--format`` of the commands that judge: ``check`` and ``verify``."""

from __future__ import annotations

import os
from typing import Literal, Protocol

from memopt_cli.report.github import GithubReport
from memopt_cli.report.interface import ComparisonReport, EquivalenceReport
from memopt_cli.report.json import JsonJudgement
from memopt_cli.report.junit import JunitReport
from memopt_cli.report.markdown import MarkdownReport
from memopt_cli.report.text import TextJudgement

ReportFormat = Literal["table", "json", "md", "github", "junit"]


class Judgement(ComparisonReport, EquivalenceReport, Protocol):
    """A report format that supports check, compare and verify."""


def report_in(name: str) -> Judgement:
    """Return the form of report of that ``name``."""
    match name:
        case "json":
            return JsonJudgement()
        case "md":
            return MarkdownReport()
        case "github":
            return GithubReport(os.environ.get("GITHUB_STEP_SUMMARY"))
        case "junit":
            return JunitReport()
        case _:
            return TextJudgement()
