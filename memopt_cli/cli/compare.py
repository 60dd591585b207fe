"""``memopt compare``: two baselines, or two summaries, side by side."""

from __future__ import annotations

import sys

from memopt_cli.cli.formats import report_in
from memopt_cli.cli.options import with_options
from memopt_cli.text.options import TableFormat


@with_options
def compare(
    before: str,
    after: str,
    *,
    format: TableFormat = "table",
    json: bool = False,
    verbose: bool = False,
) -> None:
    """Show what changed between two baselines or summaries.

    Nothing is measured, and nothing fails on a limit.
    """
    from memopt_cli import pipeline  # not before the arguments are known to be right

    comparison = pipeline.compare_files(before, after)
    report_in("json" if json else format).show(comparison, sys.stdout)
