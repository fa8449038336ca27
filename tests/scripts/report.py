"""What one side of a script did, the verdict on three sides, and the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

SLACK = 2.0
"""Losses may be this many times as far from eager's as TorchInductor's are: both are one sample of rounding."""
NOISE = 1.05
"""Times and memory of one run differ by this much from those of the next."""
SKIPPED = 1
"""Later steps that still compile: the second step often meets other gradients or a learning rate that is not 0."""
ROUNDING = {"float32": 2e-5, "bfloat16": 4e-3, "float8": 4e-3}
"""Relative difference of losses that nobody can call wrong, for scripts on which TorchInductor repeats eager's."""

HEAD = """# Public scripts

Written by `python -m tests.scripts`; do not edit. It runs public training code from checkouts, each with eager mode,
TorchInductor and dcompile, and the smallest edit. A run replaces the sections of what it has run.

- losses: those of the first and of the last step; the largest relative difference from eager's over all steps.
- first step: from the start of the script's process to the end of the first optimizer step, imports included, with
  empty caches; behind the comma in a second start, which finds them filled. CPU seconds are those of all threads and
  compilers.
- later: median of the steps behind it. peak: on a CPU the process's resident set, on a GPU torch's allocator.
- graphs, breaks: those of TorchDynamo. lines: those that dcompile has printed, of all.
- A script passes if its losses are as far from eager's as TorchInductor's, up to a factor of 2; if no break is its own
  and unexplained; and if neither times nor memory exceed TorchInductor's by over 5 %.
"""


@dataclass(frozen=True)
class Run:
    """One side: what its first rank has recorded and printed."""

    failure: str = ""
    losses: tuple[float, ...] = ()
    first: float = 0.0
    again: float = 0.0
    """The first step of a second start; 0 where there was none."""
    later: tuple[float, ...] = ()
    peak: float = 0.0
    breaks: Mapping[str, int] = field(default_factory=dict)
    graphs: int = 0
    unit: str = "CPU"
    own_lines: tuple[str, ...] = ()
    lines: int = 0

    @property
    def step(self) -> float:
        """Median of later steps, in seconds."""
        return median(self.later[SKIPPED:] or self.later or (0.0,))


def own_lines(log: str) -> tuple[str, ...]:
    """Lines of a log that dcompile has printed, whatever stands before its name: its receipt, notes and warnings."""
    lines = map(plain, log.splitlines())
    return tuple(line.rstrip() for line in lines if re.match(r".{,60}?\bdcompile(\.\w+)*(:| - )", line))


def plain(line: str) -> str:
    """A line without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def last_words(log: str) -> str:
    """The line that says why a script died: the last one that names an error, else the last one."""
    lines = [plain(line).strip() for line in log.splitlines() if line.strip()]
    named = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]:? *)?[\w.]*(?<!ChildFailed)(Error|Exception|Unsupported)\b", line)
    ]
    return (named or lines or ["no output"])[-1][:300]


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest relative difference of two lists of losses; infinite if one is shorter or not finite."""
    if len(losses) != len(others) or not losses:
        return float("inf")
    pairs = zip(losses, others, strict=True)
    found = [abs(a - b) / max(abs(b), 1e-6) for a, b in pairs]
    return max(float("inf") if value != value else value for value in found)


def verdict(runs: Mapping[str, Run], precision: str) -> list[str]:
    """What dcompile's side does worse than TorchInductor's. Without a side to compare with, that is left out."""
    own, eager, peer = runs["dcompile"], runs.get("eager"), runs.get("inductor")
    if own.failure:
        also = "; TorchInductor fails as well" if peer is not None and peer.failure else ""
        return [f"fails: {own.failure}{also}"]
    if peer is not None and peer.failure:
        peer = None
    found = []
    if eager is not None and not eager.failure:
        allowed = max(ROUNDING[precision], SLACK * distance(peer.losses, eager.losses) if peer else 0.0)
        if (off := distance(own.losses, eager.losses)) > allowed:
            found.append(f"losses differ from eager's by {off:.1e}, allowed are {allowed:.1e}")
    if peer is None:
        return found
    unexplained = sum(own.breaks.values()) > sum(peer.breaks.values()) and not explained(own)
    if unexplained:
        found.append(f"{sum(own.breaks.values())} graph breaks, TorchInductor has {sum(peer.breaks.values())}")
    for name in ("first", "again", "step", "peak"):
        mine, its = getattr(own, name), getattr(peer, name)
        if mine > NOISE * its > 0:
            found.append(f"{NAMES[name]} {mine / its:.2f} of TorchInductor's")
    return found


NAMES = {"first": "first step", "again": "first step of a second start", "step": "later steps", "peak": "peak memory"}


def explained(run: Run) -> bool:
    """Whether lines of dcompile's own name a break."""
    return any("graph break" in line and "no graph break" not in line for line in run.own_lines)


def section(title: str, facts: Sequence[str], runs: Mapping[str, Run], problems: Sequence[str]) -> str:
    """Heading, verdict, what was run, a row for each side, and what dcompile has printed."""
    rows = [row(side, run, runs.get("eager")) for side, run in runs.items()]
    unit = next(iter(runs.values())).unit
    printed = "\n".join(runs["dcompile"].own_lines[:12]) if "dcompile" in runs else ""
    return "\n".join(
        [
            f"## {title}",
            "",
            f"Does not pass: {'; '.join(problems)}." if problems else passed(runs),
            "",
            *(f"- {fact}" for fact in facts),
            "",
            f"| side | losses | off | first step, {unit} s | later, {unit} ms | peak, MiB | graphs, breaks | lines |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            *(["", "```text", printed, "```"] if printed else []),
            "",
        ]
    )


def passed(runs: Mapping[str, Run]) -> str:
    """The verdict where nothing is worse; it says so if there was nothing to compare with."""
    peer = runs.get("inductor")
    return "Passes." if peer is not None and not peer.failure else "Losses as eager's; not compared with TorchInductor."


def row(side: str, run: Run, eager: Run | None) -> str:
    """One side's row of the table."""
    if run.failure:
        return f"| {side} | {cell(run.failure)} | | | | | | |"
    off = "" if eager is None or eager.failure or side == "eager" else f"{distance(run.losses, eager.losses):.1e}"
    losses = f"{run.losses[0]:.6f}, {run.losses[-1]:.6f} ({len(run.losses)})" if run.losses else "none"
    first = f"{run.first:.1f}" + (f", {run.again:.1f}" if run.again else "")
    counts = f"{run.graphs}, {sum(run.breaks.values())} | {len(run.own_lines)} of {run.lines}"
    return f"| {side} | {losses} | {off} | {first} | {1e3 * run.step:.1f} | {run.peak / 2**20:.0f} | {counts} |"


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def page(old: str, sections: Mapping[str, str]) -> str:
    """The page with these sections in place of, or behind, those that it has; a table of verdicts first."""
    parts = re.split(r"(?m)^(?=## )", old)[1:]
    kept = {part.splitlines()[0][3:]: part for part in parts if not part.startswith("## Verdicts")}
    kept |= sections
    verdicts = [f"| {title} | {cell(text.splitlines()[2])} |" for title, text in kept.items()]
    table = "\n".join(["## Verdicts", "", "| script | verdict |", "|---|---|", *verdicts])
    return "\n".join([HEAD, table, "", *(text.rstrip() + "\n" for text in kept.values())])


def write(path: Path, sections: Mapping[str, str]) -> None:
    """Bring the page up to date."""
    path.write_text(page(path.read_text() if path.exists() else "", sections))
