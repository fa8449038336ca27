"""An HTML page that stands alone."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = """
body { font: 14px/1.4 sans-serif; margin: 2em; } code, pre, td { font: 12px/1.4 monospace; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; } td, th { padding: 2px 12px 2px 0; text-align: left; }
tr:nth-child(even) { background: #f6f6f6; } .fallback td { background: #f8cecc; } .picture { overflow: auto; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A page that needs nothing else."""
    body, title = "\n".join(parts), escape(f"dcompile: {title}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
