"""Self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = """
body { font: 14px/1.4 sans-serif; margin: 2em; } code, pre, td { font: 12px/1.4 monospace; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; } td, th { padding: 2px 12px 2px 0; text-align: left; }
.sortable th { cursor: pointer; } .sortable th::after { content: " \\2195"; color: #999999; }
td { vertical-align: top; }
tr:nth-child(even) { background: #f6f6f6; } .fallback td { background: #f8cecc; } .picture { overflow: auto; }
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
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n<script>{SORT}</script></body></html>\n"
    )
