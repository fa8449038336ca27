"""Budget of the package's code: files and lines of each folder, which may only fall unless a reason is given.

python -m tools.code_budget                      fail if a folder has more than its budget
python -m tools.code_budget --update             lower the budget to what there is now
python -m tools.code_budget --update --reason "what the new code is for"

A line counts if it has a token that is neither a comment nor part of a docstring; a string of several lines counts with
all of them. Folders are those below `dcompile/`, and `.` for the modules beside them.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import io
import sys
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGET = Path(__file__).with_suffix(".txt")
RAISED = "# raised: "
_SILENT = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)


@dataclass(frozen=True, slots=True)
class Size:
    """Lines of code and files of a folder."""

    lines: int
    files: int

    def __add__(self, other: Size) -> Size:
        return Size(self.lines + other.lines, self.files + other.files)


def count_lines(text: str) -> int:
    """Return the lines of a module that have a token outside comments and docstrings, those of attributes included."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def measure(package: Path) -> dict[str, Size]:
    """Return the size of each folder of `package`, by name, in alphabetical order."""
    sizes: dict[str, Size] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        folder = parts[0] if len(parts) > 1 else "."
        sizes[folder] = sizes.get(folder, Size(0, 0)) + Size(count_lines(path.read_text()), 1)
    return dict(sorted(sizes.items()))


def read(text: str) -> tuple[dict[str, Size], list[str]]:
    """Return the budget of each folder, and the lines that say why it was raised."""
    lines = text.splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: Size(int(count), int(files)) for name, count, files in rows}, [
        x for x in lines if x.startswith(RAISED)
    ]


def write(sizes: Mapping[str, Size], reasons: list[str]) -> str:
    """Return the budget's file."""
    total = sum(sizes.values(), Size(0, 0))
    rows = [f"{name:20} {size.lines:7} {size.files:5}" for name, size in sizes.items()]
    head = "# folder             lines files, at most: python -m tools.code_budget --help"
    return "\n".join([head, *rows, f"# total              {total.lines:7} {total.files:5}", *reasons]) + "\n"


def exceeded(sizes: Mapping[str, Size], budget: Mapping[str, Size]) -> list[str]:
    """Return what each folder has more than its budget."""
    found = []
    for name, size in sizes.items():
        allowed = budget.get(name, Size(0, 0))
        for what, now, most in (("lines", size.lines, allowed.lines), ("files", size.files, allowed.files)):
            if now > most:
                found.append(f"dcompile/{name}: {now} {what}, its budget is {most}")
    return found


def main(given: list[str] | None = None, package: Path = ROOT / "dcompile", file: Path = BUDGET) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write what there is now")
    parser.add_argument("--reason", default="", help="what more code is for; without it, no budget is raised")
    arguments = parser.parse_args(given)
    sizes, (budget, reasons) = measure(package), read(file.read_text() if file.exists() else "")
    over = exceeded(sizes, budget)
    if over and not (arguments.update and arguments.reason):
        advice = 'shorten something, or say what it is for: python -m tools.code_budget --update --reason "..."'
        print(*over, advice, sep="\n", file=sys.stderr)
        return 1
    if arguments.update:
        today = datetime.date.today().isoformat()
        reasons += [f"{RAISED}{today} {'; '.join(over)}: {arguments.reason}"] if over else []
        file.write_text(write(sizes, reasons))
    total = sum(sizes.values(), Size(0, 0))
    print(f"dcompile: {total.lines} lines of code in {total.files} files, within the budget of each folder")
    return 0


if __name__ == "__main__":
    sys.exit(main())
