"""Run passes over a captured graph; each is timed, logged and, with `dump`, written as text and as a difference."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dcompile.config import Config
from dcompile.logs import dump_change, log
from dcompile.machine_model import Figures, table_figures
from dcompile.passes import GraphPass, PassReport

DONATED = "dcompile_donated"
"""The mark of a backward's inputs that its program may overwrite."""


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """Arguments of passes over FX graphs, in addition to the graph."""

    config: Config
    name: str
    """The graph's name in logs and dumps."""
    planned_for: str | None = None
    """Type of the device that a graph is planned for, if it was captured on another."""
    sharded_parameters: Callable[[Any], Iterable[Any]] = lambda gm: ()
    """Function from a graph to its placeholders of sharded parameters."""
    figures: Callable[[str], Figures] = table_figures
    """Function from a device type to the figures of this machine's device."""


def run_passes(passes: Sequence[GraphPass], gm: Any, request: GraphRequest, stage: str) -> PassReport:
    """Run the passes of a list that are on in this stage and these settings, in order; return their joint report."""
    notes: list[str] = []
    fallbacks: Counter[str] = Counter()
    changes = 0
    config = request.config
    for number, row in enumerate(passes, 1):
        if stage not in row.stages or not row.when(config):
            continue
        before = _text(gm) if config.dump else ""
        began = time.perf_counter()
        report = row.run(gm, *row.given(request))
        took_ms = (time.perf_counter() - began) * 1e3
        did = f"{took_ms:.1f} ms, {report.changes} changes"
        level = logging.INFO if report.changes else logging.DEBUG
        log(config, "passes", level, f"{request.name} {stage} {row.name}: {did}")
        if config.dump:
            dump_change(config, f"{request.name}/{stage}_{number:02d}_{row.name}", before, _text(gm))
        notes += report.notes
        fallbacks.update(report.fallbacks)
        changes += report.changes
    return PassReport(changes, tuple(notes), fallbacks)


def _text(gm: Any) -> str:
    return str(gm.graph)
