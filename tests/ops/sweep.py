"""Runs the sweep: python -m tests.ops.sweep [--dtypes float32,...] [--kinds plain,...] [--only text] [--update].

Prints pass rates and what fails; with --json also writes every answer, one per line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.ops import record
from tests.ops.cases import DTYPES, KINDS, LIMIT, Case, all_cases
from tests.ops.pool import TIMEOUT_S, run_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--cases", type=Path, help="a file with one case a line")
    parser.add_argument("--limit", type=int, default=LIMIT, help="sample inputs of a case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--update", action="store_true", help="rewrite the list of fallbacks and of failures")
    options = parser.parse_args()
    dtypes, kinds = options.dtypes.split(","), options.kinds.split(",")
    cases = [c for c in all_cases() if c.dtype in dtypes and c.kind in kinds and options.only in c.entry]
    if options.cases:
        cases = [Case.parse(line) for line in options.cases.read_text().split("\n") if line]
    answers: list[dict[str, Any]] = []
    out = options.json.open("w") if options.json else None
    for answer in run_all(cases, options.jobs, limit=options.limit, timeout=options.timeout):
        answers.append(answer)
        if out:
            out.write(json.dumps(answer) + "\n")
            out.flush()
        if answer["status"] == "fail":
            print(f"FAIL {answer['case']}: {answer['detail'][:300]}", flush=True)
    print(summary(answers))
    if options.update:
        record.rewrite(answers)
    news = record.grown(answers)
    for line in news:
        print(line)
    return 1 if news else 0


def summary(answers: list[dict[str, Any]]) -> str:
    """Pass rates by dtype and kind, and fallbacks by name."""
    rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    fallbacks: Counter[str] = Counter()
    for answer in answers:
        case = Case.parse(answer["case"])
        kind = "forward and backward" if answer.get("backward") else case.kind
        rows[case.dtype, kind][answer["status"]] += 1
        fallbacks.update(answer.get("fallbacks", {}).keys())
    lines = [
        f"{dtype:9} {kind:21} {c['pass']:4} pass {c['fail']:3} fail {c['skip']:3} eager refuses"
        for (dtype, kind), c in sorted(rows.items())
    ]
    lines += [f"fallback {op}: {count} cases" for op, count in fallbacks.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
