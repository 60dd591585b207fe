"""Reports to look at: one HTML file that needs no network, on a desk, on a phone and in the dark."""

from memopt_cli.report.html.page import fastest_page, optimize_page, profile_page, require_plotly

__all__ = ["fastest_page", "optimize_page", "profile_page", "require_plotly"]
