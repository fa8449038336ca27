"""Runs the sweep: python -m tests.ops.sweep [--shard 1/4] [--json answers.jsonl] [--only text] [--update].

Prints pass rates, what fails and what is not captured. With --json every answer is appended to a file, and what that
file holds already, for the same source, is not run again: a sweep that was cut off goes on where it was, and shards
that ran elsewhere are put together by joining their files. Cases come in an order drawn from a seed, so that a part of
the sweep is a sample of all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dcompile.toolchain import own_source
from tests.ops import record
from tests.ops.cases import DTYPES, KINDS, Case, all_cases, grouped
from tests.ops.pool import TIMEOUT_S, run_all

SEED = 20


def main() -> int:
    options = _parser().parse_args()
    os.environ["TEST_DEVICE"] = options.device
    cases = _wanted(options)
    answers = known_answers(options.json, cases) if options.json else []
    done = {answer["case"] for answer in answers}
    todo = [case for case in cases if str(case) not in done]
    print(f"{len(cases)} cases, {len(done)} of them known", flush=True)
    for answer in run_all(todo, options.jobs, limit=options.limit, timeout=options.timeout):
        answers.append(answer)
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps({**answer, "source": own_source()}) + "\n")
        if answer["status"] == "fail":
            print(f"FAIL {answer['case']}: {answer['detail'][:300]}", flush=True)
    print(summary(answers))
    if options.update:
        missing = len(list(all_cases())) - len(answers)
        if missing:
            print(f"{missing} cases were not run: the list stays as it is")
            return 1
        record.rewrite(answers)
    news = record.grown(answers)
    for line in news:
        print(line)
    return 1 if news else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--cases", type=Path, help="a file with one case a line")
    parser.add_argument("--shard", default="1/1", help="n/count: this part of the cases")
    parser.add_argument("--limit", type=int, help="sample inputs of a case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S)
    parser.add_argument("--json", type=Path, help="where answers are kept, one a line")
    parser.add_argument("--update", action="store_true", help="rewrite the list of fallbacks and of failures")
    return parser


def _wanted(options: argparse.Namespace) -> list[Case]:
    dtypes, kinds = options.dtypes.split(","), options.kinds.split(",")
    cases = [c for c in all_cases() if c.dtype in dtypes and c.kind in kinds and options.only in c.entry]
    if options.cases:
        cases = [Case.parse(line) for line in options.cases.read_text().split("\n") if line]
    return shard(cases, *map(int, options.shard.split("/")))


def shard(cases: Iterable[Case], number: int, count: int) -> list[Case]:
    """Part `number` (from 1) of `count`: all cases of an entry are in one part, the same one on every machine."""
    if not 1 <= number <= count:
        raise ValueError(f"--shard {number}/{count}: the first number is from 1 to the second")
    groups = sorted(grouped(sorted(cases)))
    random.Random(SEED).shuffle(groups)
    return [case for group in groups[number - 1 :: count] for case in group]


def known_answers(file: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Answers in `file` for these cases, given by the present source; the last one where there are several."""
    lines = file.read_text().splitlines() if file.exists() else []
    wanted, version = set(map(str, cases)), own_source()
    found = [answer for line in lines if (answer := json.loads(line))["source"] == version]
    return list({answer["case"]: answer for answer in found if answer["case"] in wanted}.values())


def summary(answers: Sequence[dict[str, Any]]) -> str:
    """Pass rates by dtype and kind, what was not captured, and fallbacks by name."""
    rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    fallbacks: Counter[str] = Counter()
    lines: list[str] = []
    for answer in sorted(answers, key=lambda a: a["case"]):
        case = Case.parse(answer["case"])
        kind = "forward and backward" if answer.get("backward") else case.kind
        rows[case.dtype, kind][answer["status"]] += 1
        fallbacks.update(answer.get("fallbacks", {}).keys())
        if answer["status"] == "uncaptured":
            lines.append(f"not captured: {case}: {answer['detail']}")
        if answer["status"] == "torch":
            lines.append(f"torch's tracing differs from eager: {case}: {answer['detail'][:200]}")
        lines += [f"captured in part: {case}: {broken}" for broken in answer.get("broken", ())[:1]]
    lines += [
        f"{dtype:9} {kind:21} {c['pass']:4} pass {c['fail']:3} fail {c['torch']:3} torch's tracing fails "
        f"{c['uncaptured']:3} not captured {c['skip']:3} eager refuses"
        for (dtype, kind), c in sorted(rows.items())
    ]
    lines += [f"fallback {op}: {count} cases" for op, count in fallbacks.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
