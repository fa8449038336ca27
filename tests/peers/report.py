"""What became of each test, and the page that says so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["passed", "skipped", "failed", "deadline"]


@dataclass(frozen=True)
class Run:
    """One test under one backend."""

    status: Status
    text: str = ""
    """Why it was skipped, or the last line of the error."""

    def fails_like(self, other: Run) -> bool:
        """Whether both failed, and with an exception of one class: another one may hide an own failure."""
        kinds = [(run.status, run.text.partition(":")[0]) for run in (self, other)]
        return self.status in ("failed", "deadline") and kinds[0] == kinds[1]


@dataclass(frozen=True)
class Outcome:
    """One test, with the runs that were made of it, and what receipts of its ranks said."""

    test: str
    runs: Mapping[str, Run]
    """Backend -> run: dcompile; if that failed, others as far as they are asked (see `session.outcomes`)."""
    receipts: tuple[Mapping[str, Any], ...] = ()
    watches: tuple[str, ...] = ()
    """Functions of FSDP2's that the test puts its own in the place of, to see them called; or events that it counts."""

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        own = self.runs["dcompile"]
        if own.status in ("passed", "skipped"):
            return own.status if own.status == "skipped" else self._passed()
        for backend in WITHOUT_US:
            if fails_as_well(self.runs, backend):
                return f"fails with {backend} as well"
        if self.runs.get("aten_kernels") == Run("passed"):
            return "rounds otherwise"
        if own.status == "failed" and self.watches and self.runs.get("left_to_torch") == Run("passed"):
            return "watches the wrapper"
        return "not done in time" if own.status == "deadline" else "own"

    def _passed(self) -> str:
        if any(receipt["eligible"] and receipt["graphs"] for receipt in self.receipts):
            return "taken over"
        return "stays stock" if self.receipts else "nothing compiled"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a test that passed is not taken over, each reason once."""
        found = (reason for receipt in self.receipts for reason in receipt["reasons"])
        return tuple(dict.fromkeys(found)) or ("no gradients were asked for",)


WITHOUT_US = ("stock", "aot_eager", "inductor")
"""Backends without dcompile, in the order in which they are asked."""


def fails_as_well(runs: Mapping[str, Run], backend: str) -> bool:
    """Whether a test fails with another backend, too: stock PyTorch anyhow, compilers with the same class of error."""
    run = runs.get(backend)
    if run is None or run.status in ("passed", "skipped"):
        return False
    return backend == "stock" or run.fails_like(runs["dcompile"])


TAKEN = ("taken over", "rounds otherwise")
VERDICTS = (
    ("taken over", "passed, parameters and gradients in the compiled programs, as a receipt of its ranks says"),
    ("stays stock", "passed, compiled, and parameters and gradients left to PyTorch for a reason in the receipt"),
    ("nothing compiled", "passed, and no compiled step ran (checks of constructors, states, errors)"),
    (
        "watches the wrapper",
        "fails since it counts or checks calls of FSDP2's own functions, or events of DDP's reducer, of which programs "
        "make none; passes compiled with parameters and gradients left to it (distributed='stock')",
    ),
    ("own", "fails with dcompile and passes with stock PyTorch and with aot_eager"),
    (
        "not done in time",
        "takes longer than its deadline with dcompile, on this busy machine; a hang would look like it",
    ),
    ("fails with stock as well", "fails on this machine without any compiler"),
    ("fails with aot_eager as well", "passes eagerly, fails in the same way with any backend of torch.compile"),
    (
        "fails with inductor as well",
        "compares gradients to a few units in the last place, which no kernels but eager's keep: fails with "
        "TorchInductor as well",
    ),
    (
        "rounds otherwise",
        "compares sums to a few units in the last place; passes with ATen's kernels between the same collectives "
        "(kernels='aten')",
    ),
    ("skipped", "asks for what this machine lacks"),
)


BY_DESIGN = (
    "ranks are threads of one process",
    "a mode that observes operations is on",
    "option distributed='stock'",
    "a communication hook ",
    "the Join context manager ",
    "no gradients were asked for",
)
"""Parts of reasons for which nothing is to be taken over: the test itself asks for what programs cannot give.

A user's communication hook gets buckets that only DDP's reducer makes, and ranks under Join may have no input to run.
"""


def share(outcomes: Iterable[Outcome]) -> str:
    """Tests that are taken over, of those that can be: also those that fail, and those that stay stock needlessly."""
    taken = could = 0
    for outcome in outcomes:
        stays = outcome.verdict == "stays stock" and not all(map(_is_by_design, outcome.reasons))
        taken += outcome.verdict in TAKEN
        could += outcome.verdict in (*TAKEN, "own", "not done in time") or stays
    return f"{taken} of {could}" + (f" ({taken / could:.0%})" if could else "")


def _is_by_design(reason: str) -> bool:
    return any(part in reason for part in BY_DESIGN)


def general(text: str) -> str:
    """A reason without the names and numbers that are one model's own, so that like reasons are counted together."""
    text = re.sub(r"/\S*/site-packages/", "", text)
    return re.sub(r"parameters? [\w.]+", "parameter ...", re.sub(r"\b\d+\b", "N", text))


def table(suites: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """A line for each suite, a column for each verdict."""
    names = [name for name, _ in VERDICTS]
    lines = ["| suite | tests | of those that can be | " + " | ".join(names) + " |", "|---" * (len(names) + 3) + "|"]
    for suite, outcomes in suites.items():
        counts = Counter(outcome.verdict for outcome in outcomes)
        counted = " | ".join(str(counts[name]) for name in names)
        lines.append(f"| {suite} | {len(outcomes)} | {share(outcomes)} | {counted} |")
    return lines


def page(suites: Mapping[str, Sequence[Outcome]], made_with: str) -> str:
    """The page docs/lab/peer-suites.md."""
    lines = [
        "# PyTorch's own tests",
        "",
        "Written by `python -m tests.peers`; do not edit. It runs PyTorch's test files from a checkout, on CPU and",
        "with two ranks; roots of `fully_shard`, DDP or `replicate`, and each torch.compile, go through dcompile.",
        f"Made with {made_with}.",
        "",
        *table(suites),
        "",
        *(f"- {name}: {meaning}." for name, meaning in VERDICTS),
        "- of those that can be: tests taken over, of these, own failures and tests that stay stock for other reasons",
        "  than threads as ranks, a mode that observes each operation, Join, a communication hook of the test's own,",
        "  or evaluation alone.",
    ]
    for suite, outcomes in suites.items():
        lines += ["", f"## {suite}", "", *_counted("Stays stock because", _stock_reasons(outcomes))]
        for verdict in (
            name for name, _ in VERDICTS if name.startswith(("own", "not done", "watches", "fails", "rounds"))
        ):
            lines += _listed(verdict, [outcome for outcome in outcomes if outcome.verdict == verdict])
        lines += _counted("Skipped because", (o.runs["dcompile"].text for o in outcomes if o.verdict == "skipped"))
    return "\n".join(_single_blanks(lines)) + "\n"


def _stock_reasons(outcomes: Iterable[Outcome]) -> Iterable[str]:
    stock = (outcome for outcome in outcomes if outcome.verdict == "stays stock")
    return (reason for outcome in stock for reason in outcome.reasons)


def _counted(title: str, reasons: Iterable[str]) -> list[str]:
    counts = Counter(map(general, reasons))
    if not counts:
        return []
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"{title}:", "", *(f"- {count} x {reason}" for reason, count in ordered), ""]


def _listed(verdict: str, outcomes: Sequence[Outcome]) -> list[str]:
    if not outcomes:
        return []
    shown = [f"- `{outcome.test}`: {_why(outcome)}" for outcome in sorted(outcomes, key=lambda o: o.test)]
    return [f"{verdict[0].upper()}{verdict[1:]}:", "", *shown, ""]


def _why(outcome: Outcome) -> str:
    run = outcome.runs["dcompile"]
    return "not done within the deadline" if run.status == "deadline" else run.text[:200].replace("|", "/")


def _single_blanks(lines: Sequence[str]) -> list[str]:
    kept = [line for place, line in enumerate(lines) if line or (place and lines[place - 1])]
    while kept and not kept[-1]:
        kept.pop()
    return kept
