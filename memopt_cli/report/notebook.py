"""Text reports in a notebook: the same lines, and tables that a browser draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from rich.table import Table


class NotebookPage:
    """Collects what a text report prints, as HTML without scripts; ``spelled`` turns options into Python arguments."""

    def __init__(self, spelled: Callable[[str], str]) -> None:
        self._spelled = spelled
        self._lines: list[str] = []
        """Lines since the last table."""
        self._parts: list[str] = []

    def print(
        self, part: Table | str = "", *, style: str | None = None, markup: bool = False, soft_wrap: bool = False
    ) -> None:
        """Add ``part``; text is shown in bold, or not, as ``style`` says.  No text has markup."""
        if isinstance(part, Table):
            self._end_lines()
            self._parts.append(self._table_html(part))
        else:
            self._lines.append(self._text_html(part, style))

    def html(self) -> str:
        """Return all that was printed."""
        self._end_lines()
        return "".join(self._parts)

    def _end_lines(self) -> None:
        # A plot needs letters of one width, and long lines should wrap.
        if text := "\n".join(self._lines).strip("\n"):
            self._parts.append(f'<pre style="white-space: pre-wrap">{text}</pre>')
        self._lines.clear()

    def _text_html(self, text: object, style: object) -> str:
        shown = escape(self._spelled(str(text)))
        return f"<b>{shown}</b>" if shown and style == "bold" else shown

    def _table_html(self, table: Table) -> str:
        sides = [column.justify for column in table.columns]
        head = self._row_html("th", [column.header for column in table.columns], sides, "bold")
        columns = zip(*(column.cells for column in table.columns), strict=True)
        rows = (self._row_html("td", cells, sides, row.style) for cells, row in zip(columns, table.rows, strict=True))
        return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"

    def _row_html(self, tag: str, cells: Sequence[object], sides: Sequence[str], style: object) -> str:
        # Spaces at the beginning of a cell show the depth of a module.
        shown = (
            f'<{tag} style="text-align: {side}; white-space: pre-wrap">{self._text_html(cell, style)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"
