"""Print the page of passes from the lists in `dcompile/pipeline.py`: `python -m tools.passes`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dcompile import pipeline
from tools import price_list

INTRODUCTION = """# Passes

This page is printed by `python -m tools.passes` from the lists in `dcompile/pipeline.py`.
A pass is a pure function from a graph, a program or the plan of a kernel to another; it measures nothing and asks for
no rank, clock or device.
A list runs from top to bottom. The reason for a place in the list stands in its last column.

`DCOMPILE_SKIP=name` leaves a pass out, `DCOMPILE_UNTIL=name` stops after it, and `DCOMPILE_DUMP=dir` writes the program
and the difference that each pass makes. [one-program.md](one-program.md) shows these texts for one model.
[../howto/pass.md](../howto/pass.md) says how to add one.

The price: how many of the planned models of tests and benchmarks a pass changes, on a CPU and on a GPU, and the share
of a step's time that it saves on a CPU, by case. `python -m tools.price_list` measures both.
Number of models that were planned: {planned}.
"""


LISTS = (
    "DYNAMO_PASSES", "JOINT_PASSES", "LOOP_PASSES", "NEST_PASSES", "LAUNCH_PASSES", "OUTPUT_STEPS", "GRAPH_WRAPPERS",
)  # fmt: skip
"""The lists of the pipeline, in the order of the stages."""


def pass_lists() -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield every list of passes in the pipeline: its name and its rows."""
    yield from ((name, getattr(pipeline, name)) for name in LISTS)


def _function_of(row: Any) -> Callable[..., Any] | None:
    values = (getattr(row, field.name) for field in dataclasses.fields(row))
    return next((value for value in values if inspect.isfunction(value)), None)


def implementation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a row's documented function: itself, or the one that a lambda or an undocumented helper calls."""
    if function.__doc__:
        return function
    for name in function.__code__.co_names:
        called = vars(sys.modules[function.__module__]).get(name)
        if inspect.isfunction(called) and called.__module__.startswith("dcompile."):
            return implementation(called)
    return function


def flags(row: Any) -> list[str]:
    """Return the names of a row's fields that are True."""
    return [field.name for field in dataclasses.fields(row) if getattr(row, field.name) is True]


def reasons() -> dict[str, list[str]]:
    """Return, for each list, the comment before each row."""
    source = inspect.getsource(pipeline)
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):  # a list that is created at first use
            name, value = node.name.upper(), getattr(node.body[-1], "value", None)
        else:
            name, value = getattr(getattr(node, "target", None), "id", ""), getattr(node, "value", None)
        if name in LISTS and isinstance(value, ast.Tuple):
            found[name] = [_comment_before(lines, element.lineno) for element in value.elts]
    return found


def _comment_before(lines: Sequence[str], number: int) -> str:
    words: list[str] = []
    at = number - 2
    while at >= 0 and lines[at].strip().startswith("#"):
        words.insert(0, lines[at].strip().removeprefix("#").strip())
        at -= 1
    return " ".join(words)


def first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").split("\n")[0].replace("|", "\\|")


def page() -> str:
    """Return the whole page: a table for each list."""
    comments, prices = reasons(), price_list.read()
    planned = price_list.describe(price_list.ALL, prices)
    lines = [INTRODUCTION.format(planned=planned)]
    for title, rows in pass_lists():
        lines += [
            f"## `{title}`",
            "",
            "| | pass | what it does | facts | price | why here |",
            "|---|---|---|---|---|---|",
        ]
        for number, row in enumerate(rows):
            function = _function_of(row)
            assert function is not None, "a row without a function is no pass"
            called = implementation(function)
            name = getattr(row, "name", "") or called.__name__
            where = f"{called.__module__.replace('.', '/')}.py"
            reason = comments.get(title, [""] * len(rows))[number]
            what = f"{first_line(called)} (`{where}`)"
            facts, price = ", ".join(flags(row)), price_list.describe(name, prices)
            lines.append(f"| {number + 1} | `{name}` | {what} | {facts} | {price} | {reason} |")
        lines.append("")
    lines += [
        "`reorders_sums`: results may differ in the order of a sum; every other pass is held to bitwise equality, but",
        "those over nests, whose sums are in the order that vectors and threads give.",
        "`needs_loops`: skipped where a program has no kernel of dcompile's. `required`: never skipped.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
