"""The committed list of what falls back to ATen and what still fails: it may only shrink."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.ops.cases import Case

FILE = Path(__file__).with_name("counts.json")


def load() -> dict[str, Any]:
    """`fallbacks`: ATen op -> entries of torch's table that need it; `count` of those; `failures`: case -> why."""
    return json.loads(FILE.read_text()) if FILE.exists() else {"count": 0, "fallbacks": {}, "failures": {}}


def fallbacks_of(answers: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """ATen op -> entries whose compiled graphs call it although a loop of ours was wanted."""
    found: dict[str, set[str]] = defaultdict(set)
    for answer in answers:
        for op in answer.get("fallbacks", {}):
            found[op].add(Case.parse(answer["case"]).entry)
    return {op: sorted(entries) for op, entries in sorted(found.items())}


def grown(answers: list[dict[str, Any]]) -> list[str]:
    """What these answers hold that the list does not."""
    known = load()
    news = [
        f"new fallback: {entry} now calls {op}"
        for op, entries in fallbacks_of(answers).items()
        for entry in entries
        if entry not in known["fallbacks"].get(op, ())
    ]
    failed = [a for a in answers if a["status"] == "fail" and a["case"] not in known["failures"]]
    return news + [f"new failure: {a['case']}: {a['detail']}" for a in failed]


def rewrite(answers: list[dict[str, Any]]) -> None:
    """Write the list anew, from a full sweep."""
    fallbacks = fallbacks_of(answers)
    failures = {a["case"]: a["detail"][:160] for a in sorted(answers, key=lambda a: a["case"]) if a["status"] == "fail"}
    data = {"count": sum(map(len, fallbacks.values())), "fallbacks": fallbacks, "failures": failures}
    FILE.write_text(json.dumps(data, indent=1) + "\n")
