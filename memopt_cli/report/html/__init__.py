"""Reports to look at: one HTML file that needs no network, on a desk, on a phone and in the dark."""

from memopt_cli.report.html.page import optimize_page, profile_page, require_plotly

__all__ = ["optimize_page", "profile_page", "require_plotly"]
