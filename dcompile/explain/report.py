"""Report that `dcompile.explain` returns: text to read, and files to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dcompile.explain.export import PICTURES, check_path, save_timeline
from dcompile.explain.html import page
from dcompile.explain.html_document import framed
from dcompile.explain.program_stages import ProgramStages
from dcompile.explain.report_data import ReportData, text_lines


@dataclass(frozen=True)
class Report(ReportData):
    """Report on a model, from `dcompile.explain`. `str` is a page to read, `save` writes it as text or as HTML."""

    programs: Mapping[str, ProgramStages] = field(default_factory=dict, repr=False)
    """Programs by name: `report.programs["backward0"].after("fuse")` is one's text after a pass."""

    def __str__(self) -> str:
        return "\n".join(text_lines(self))

    def _repr_html_(self) -> str:
        return framed(page(self))

    def save(self, path: str | Path) -> Path:
        """Write the report: an HTML page with pictures for the suffix .html, text for .txt.

        A measured timeline can be written alone: as a trace for Perfetto (.json), or as a picture (.svg, .png). Raises
        ValueError if there is none, and for other endings.
        """
        path = Path(path)
        check_path(path)
        if path.suffix in PICTURES:
            if self.timeline is None:
                raise ValueError(
                    f"dcompile: {path.name} would show measured steps, and none were; run some inside "
                    "`with dcompile.profile(model):` and explain the model again"
                )
            return save_timeline(self.timeline, path)
        path.write_text(page(self) if path.suffix in (".html", ".htm") else f"{self}\n")
        return path
