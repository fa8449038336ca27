"""Self-contained HTML pages, for browsers and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = """
body { font: 14px/1.4 sans-serif; margin: min(2em, 3vw); overflow-wrap: anywhere; }
code, pre, td { font: 12px/1.4 monospace; } svg { max-width: 100%; height: auto; }
.scroll, pre, .picture { overflow-x: auto; overflow-wrap: normal; } th[title] { cursor: help; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; } td, th { padding: 2px 12px 2px 0; text-align: left; }
.sortable th { cursor: pointer; } .sortable th::after { content: " \\2195"; color: #999999; }
td { vertical-align: top; }
tr:nth-child(even) { background: #f6f6f6; } .fallback td { background: #f8cecc; }
.picture svg { max-width: none; } td[data-key] { white-space: nowrap; }
"""

SORT = """
for (const table of document.querySelectorAll("table.sortable")) {
  table.rows[0].querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
    const down = head.dataset.down !== "1";
    head.dataset.down = down ? "1" : "";
    const rows = [...table.rows].slice(1);
    const key = row => row.cells[column].dataset.key;
    const order = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b);
    rows.sort((a, b) => down ? order(b, a) : order(a, b)).forEach(row => row.parentNode.append(row));
  }));
}
"""
"""Script: a click on a column's head sorts the table by it, and a second click reverses the order."""


def document(title: str, parts: Iterable[str]) -> str:
    """Page with its styles and scripts inside."""
    body, title = "\n".join(parts), escape(f"dcompile: {title}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n<script>{SORT}</script></body></html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[str], meanings: Mapping[str, str], kind: str = "") -> str:
    """Table of rows that are HTML, in a box that scrolls. `meanings`: head of a column -> what is shown over it."""
    cells = (
        f'<th title="{escape(meanings[name])}">{escape(name)}</th>' if name in meanings else f"<th>{escape(name)}</th>"
        for name in heads
    )
    of_kind = f' class="{kind}"' if kind else ""
    lines = "\n".join(rows)
    return f'<div class="scroll"><table{of_kind}><tr>{"".join(cells)}</tr>\n{lines}\n</table></div>'


def text_row(kind: str, cells: Iterable[str]) -> str:
    """Row of a table, of cells that are plain text. `kind`: its class in the styles."""
    return f'<tr class="{kind}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'


def framed(page: str, height_px: int = 480) -> str:
    """Page inside a notebook's cell, where its styles touch nothing else."""
    style = f"width: 100%; height: {height_px}px; border: 1px solid #cccccc; background: #ffffff"
    return f'<iframe srcdoc="{escape(page)}" style="{style}"></iframe>'
