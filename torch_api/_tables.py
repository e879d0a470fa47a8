"""Tables as aligned text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence


def text_lines(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return one line for each row of cells, with aligned columns. The first row has the names of the columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def html_table(cells: Sequence[Sequence[str]]) -> str:
    """Return an HTML table of these cells. The first row has the names of the columns."""
    columns, *lines = cells
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
