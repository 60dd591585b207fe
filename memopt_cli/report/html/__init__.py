"""HTML reports, each in one file that needs no network; they adapt to phones and to dark mode."""

from memopt_cli.report.html.page import fastest_page, optimize_page, profile_page, require_plotly

__all__ = ["fastest_page", "optimize_page", "profile_page", "require_plotly"]
