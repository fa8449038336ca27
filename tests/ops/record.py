"""The committed list of what falls back to ATen, what fails and what is not captured: it may only shrink."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.device import device
from tests.ops.cases import Case

FILES = {"cpu": Path(__file__).with_name("counts.json"), "cuda": Path(__file__).with_name("counts_cuda.json")}
LISTS = {"fail": "failures", "torch": "torch", "uncaptured": "uncaptured"}
"""Status of a case -> the list of such cases in the file."""


def load() -> dict[str, Any]:
    """What the file holds.

    `fallbacks`: ATen op -> entries of torch's table that need it; `count` of those. `failures`, `torch` (torch's own
    tracing gives something else than eager), `uncaptured`: case -> why. `cases`: how many cases ended how.
    """
    return json.loads(FILES[device()].read_text())  # type: ignore[no-any-return]


def fallbacks_of(answers: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """ATen op -> entries whose compiled graphs call it although a loop of ours was wanted."""
    found: dict[str, set[str]] = defaultdict(set)
    for answer in answers:
        for op in answer.get("fallbacks", {}):
            found[op].add(Case.parse(answer["case"]).entry)
    return {op: sorted(entries) for op, entries in sorted(found.items())}


def grown(answers: Sequence[dict[str, Any]]) -> list[str]:
    """What these answers hold that the list does not."""
    known = load()
    news = [
        f"new fallback: {entry} now calls {op}"
        for op, entries in fallbacks_of(answers).items()
        for entry in entries
        if entry not in known["fallbacks"].get(op, ())
    ]
    for answer in answers:
        name = LISTS.get(answer["status"])
        if name is not None and answer["case"] not in known[name]:
            news.append(f"new in {name}: {answer['case']}: {answer['detail']}")
    return news


def rewrite(answers: Sequence[dict[str, Any]]) -> None:
    """Write the list anew, from a full sweep."""
    fallbacks = fallbacks_of(answers)
    ordered = sorted(answers, key=lambda answer: answer["case"])
    data = {
        "torch_version": torch.__version__,
        "cases": dict(sorted(Counter(answer["status"] for answer in answers).items())),
        "count": sum(map(len, fallbacks.values())),
        "fallbacks": fallbacks,
        **{
            name: {a["case"]: _in_order(a["detail"])[:160] for a in ordered if a["status"] == s}
            for s, name in LISTS.items()
        },
    }
    FILES[device()].write_text(json.dumps(data, indent=1) + "\n")


def _in_order(text: str) -> str:
    """A message that says the same each time: torch writes sets of symbols in the order in which they come."""
    return re.sub(r"\{(u\d+(?:, u\d+)+)\}", lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", text)
