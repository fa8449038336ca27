"""Split a host program at statements that no CUDA graph can record.

A piece is a run of statements that one CUDA graph records. What lies between pieces runs as it is: operations on the
CPU, with sizes that depend on values, of another library that waits for the device. The compiler marks what it knows;
a recording that fails names the call at which it failed.

`split_statements` is a pure function of the list of statements. `HostParts` has the text in which each part is a
function: it takes the values that it reads of earlier parts, and returns those that later ones read. All parts work on
one arena, so temporaries may cross a cut. Collectives in flight are awaited before each cut, since a recording has to
end with all its streams joined.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dcompile.collectives.contract import APART, TOGETHER
from dcompile.runtime.measure.instrumentation import METHODS, call_of, own_collective, parse_statement, works

MIN_LAUNCHES = 4
"""Launches from which a piece is worth a CUDA graph. Starting one takes about 10 us, a launch 3 us."""
STREAM = "stream"
"""Name of the current stream in a host program. It differs between a recording and what runs between recordings."""
GIVEN = "_given"
"""Name of the list that a region's call empties. It is filled just before, in the same part."""


@dataclass(frozen=True, slots=True)
class HostStatement:
    """One statement of a host program, with the comments before it."""

    lines: tuple[str, ...]
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    """Names that it deletes."""
    launches: int = 0
    unrecordable: str = ""
    """Why it cannot be recorded; empty if it can."""
    starts: str = ""
    """Name of the collective that it starts, and of the one that it waits for."""
    waits: str = ""
    synchronizes: bool = False
    """Whether the collective is dcompile's own. Its source belongs to one call, so that only a graph may repeat it."""
    certain: bool = True
    """Whether it writes its names in each call."""
    returns: bool = False
    address: bool = False
    """Whether it only looks up a tensor's address, which each part does for itself."""

    def without(self, dead: Collection[str]) -> HostStatement | None:
        """Return a `del` statement without these names; None if no name is left."""
        left = sorted(self.drops.difference(dead))
        if len(left) == len(self.drops):
            return self
        return replace(self, lines=(f"        del {', '.join(left)}",), drops=frozenset(left)) if left else None


@dataclass(frozen=True, slots=True)
class HostPart:
    """Consecutive statements: a piece to be recorded, or what runs as it is, for these reasons."""

    statements: tuple[HostStatement, ...]
    recorded: bool
    reasons: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    """Names that it reads of earlier parts, and those that later parts read of it."""
    gives: tuple[str, ...] = ()

    @property
    def launches(self) -> int:
        return sum(statement.launches for statement in self.statements)

    @property
    def worth(self) -> bool:
        """Whether a CUDA graph pays, or is needed for a collective."""
        return self.launches >= MIN_LAUNCHES or any(statement.synchronizes for statement in self.statements)


# --- parsing ----------------------------------------------------------------------------------------------------------


def host_statements(source: str, learned: Collection[str] = ()) -> tuple[HostStatement, ...]:
    """Parse the body of `call`. `learned`: prepared functions that have failed in a recording -> see `called`."""
    return tuple(_joined(_statements(source, learned)))


def _statements(source: str, learned: Collection[str]) -> Iterator[HostStatement]:
    lines = source.split("\n")
    body = call_of(ast.parse(source)).body
    local = frozenset[str]().union(*(_names(node, ast.Store) for node in body))
    end, unrecordable, started = body[0].lineno - 1, "", set[str]()
    checked, failed = frozenset[str](), ""
    for node in body:
        first, end = min(end, node.lineno - 1), node.end_lineno or node.lineno
        for line in (line.strip() for line in lines[first : node.lineno - 1]):
            if line.startswith(APART):
                unrecordable = line.removeprefix(APART)
            elif line == TOGETHER:
                unrecordable = ""
        plain = HostStatement(
            tuple(lines[first:end]),
            (_names(node, ast.Load) & local) - {STREAM},
            _names(node, ast.Store) - {STREAM},
            _names(node, ast.Del),
            unrecordable=unrecordable,
            certain=not isinstance(node, ast.If),
            returns=isinstance(node, ast.Return),
            address=lines[node.lineno - 1].endswith(".data_ptr()"),
        )
        found = _working(node, lines, plain, started, learned) if works(node) else _synchronizing(node, plain)
        if checked and isinstance(node, ast.If) and not found.launches and not checked.isdisjoint(found.reads):
            # it checks the result of a call that failed
            found = replace(found, unrecordable=found.unrecordable or failed)
        elif found.launches:
            fails = found.unrecordable and not unrecordable
            checked, failed = (found.writes, found.unrecordable) if fails else (frozenset(), "")
        yield found


def _names(node: ast.stmt, kind: type[ast.expr_context]) -> frozenset[str]:
    """Names that a statement reads, writes or deletes, apart from those of `:=`, which it alone uses."""
    own = {leaf.target.id for leaf in ast.walk(node) if isinstance(leaf, ast.NamedExpr)}
    found = (leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, kind))
    return frozenset(found) - own


def _working(
    node: ast.stmt, lines: list[str], plain: HostStatement, started: set[str], learned: Collection[str]
) -> HostStatement:
    """Add what a statement computes, and the collective of the model that it starts or awaits."""
    parsed = own_collective(node, parse_statement(node, lines), started)
    started |= {parsed.starts} - {""}
    kernels = re.fullmatch(r"(\d+) kernels?", parsed.name)
    unrecordable = plain.unrecordable
    if not unrecordable and called(lines[node.lineno - 1]) in learned:
        unrecordable = f"{parsed.name.removesuffix('.default')} failed in a recording"
    launches = int(kernels[1]) if kernels else 1
    return replace(plain, launches=launches, unrecordable=unrecordable, starts=parsed.starts, waits=parsed.waits)


def called(line: str) -> str:
    """Prepared function of the library that a line calls; empty if it calls none. Kernels can always be recorded."""
    found = re.search(r"\b(_(?:op|fn|collective)\d+)\(", line)
    return found[1] if found else ""


def _synchronizing(node: ast.stmt, plain: HostStatement) -> HostStatement:
    """Add the collective of dcompile's own that a statement starts or awaits through the call's source."""
    for leaf in ast.walk(node):
        if isinstance(leaf, ast.Call) and (method := ast.unparse(leaf.func).removeprefix("buckets.")) in METHODS:
            bucket = ast.unparse(leaf.args[0])
            starts, waits = ("", bucket) if method.startswith("wait") else (bucket, "")
            return replace(plain, starts=starts, waits=waits, synchronizes=True)
    return plain


def _joined(statements: Iterator[HostStatement]) -> Iterator[HostStatement]:
    """Join what fills a region's list of arguments with the region's call, which empties that list."""
    open_: HostStatement | None = None
    for statement in statements:
        if open_ is not None:
            statement = replace(
                statement,
                lines=open_.lines + statement.lines,
                reads=open_.reads | statement.reads - open_.writes,
                writes=open_.writes | statement.writes,
                drops=open_.drops | statement.drops,
                unrecordable=open_.unrecordable or statement.unrecordable,
            )
        open_ = statement if GIVEN in statement.writes and not statement.launches else None
        if open_ is None:
            yield replace(statement, writes=statement.writes - {GIVEN}, reads=statement.reads - {GIVEN})


# --- splitting --------------------------------------------------------------------------------------------------------


def split_statements(statements: Sequence[HostStatement]) -> tuple[HostPart, ...]:
    """Split statements into pieces to be recorded and what runs between them, in their order.

    Each statement is in one part. Only waits for collectives move: to the end of the part that started them. A piece
    that is not worth a CUDA graph joins its neighbours.
    """
    outside = frozenset[str]().union(*(statement.writes for statement in statements if statement.unrecordable))

    def runs_as_it_is(statement: HostStatement) -> bool:
        # new results go to the caller as they are: a copy on the CPU may be under way
        return bool(statement.unrecordable) or (statement.returns and not outside.isdisjoint(statement.reads))

    runs = [HostPart(tuple(run), not unrecordable) for unrecordable, run in groupby(statements, runs_as_it_is)]
    if len(runs) > 1:
        runs = [replace(part, recorded=part.recorded and part.worth) for part in _awaited(runs)]
    parts: list[HostPart] = []
    for recorded, alike in groupby(runs, lambda part: part.recorded):
        inside = tuple(statement for part in alike for statement in part.statements)
        reasons = tuple(dict.fromkeys(statement.unrecordable for statement in inside if statement.unrecordable))
        parts.append(HostPart(inside, recorded, reasons))
    return _connected(parts)


def _awaited(parts: list[HostPart]) -> list[HostPart]:
    """Move waits to the end of the parts that started their collectives."""
    started: dict[str, int] = {}
    bodies: list[list[HostStatement]] = [[] for _ in parts]
    for number, part in enumerate(parts):
        for statement in part.statements:
            began = started.pop(statement.waits, number) if statement.waits else number
            if statement.starts:
                started[statement.starts] = number
            bodies[began].append(statement)
    return [replace(part, statements=tuple(body)) for part, body in zip(parts, bodies, strict=True)]


def _connected(parts: list[HostPart]) -> tuple[HostPart, ...]:
    """Find what each part takes of earlier ones, and gives to later ones; a part drops only what it has."""
    addresses = {name: s for part in parts for s in part.statements if s.address for name in s.writes}
    parts = [_with_addresses(part, addresses) for part in parts]
    needs = [_read_first(part.statements) | _unsure(part.statements) for part in parts]
    defined: set[str] = set()
    found: list[HostPart] = []
    for number, part in enumerate(parts):
        later = frozenset[str]().union(*needs[number + 1 :])
        written = frozenset[str]().union(*(statement.writes for statement in part.statements))
        takes = needs[number] & defined
        gives = written & later
        has = written | takes
        body = (statement.without(statement.drops - has) for statement in part.statements)
        kept = tuple(statement for statement in body if statement is not None)
        found.append(replace(part, statements=kept, takes=tuple(sorted(takes)), gives=tuple(sorted(gives))))
        defined |= written
    return tuple(found)


def _with_addresses(part: HostPart, addresses: Mapping[str, HostStatement]) -> HostPart:
    """Look up the addresses that a part uses, and that an earlier one has looked up."""
    used = sorted(_read_first(part.statements) & addresses.keys())
    return replace(part, statements=(*(addresses[name] for name in used), *part.statements)) if used else part


def _read_first(statements: Sequence[HostStatement]) -> frozenset[str]:
    """Names that are read before they are surely written."""
    read, written = set[str](), set[str]()
    for statement in statements:
        read |= statement.reads - written
        if statement.certain:
            written |= statement.writes
    return frozenset(read)


def _unsure(statements: Sequence[HostStatement]) -> frozenset[str]:
    """Names that may be written, and may keep an earlier value."""
    sure = frozenset[str]().union(*(statement.writes for statement in statements if statement.certain))
    return frozenset[str]().union(*(statement.writes for statement in statements)) - sure


# --- text -------------------------------------------------------------------------------------------------------------


def parts_text(source: str, parts: Sequence[HostPart]) -> str:
    """Text of a host program whose `make` returns a list of functions, one for each part."""
    lines = source.split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith("    def call("))
    text = lines[:start]
    for number, part in enumerate(parts):
        text.append(f"    def part{number}(args, buckets=None, sync=False):")
        if number:
            text += [f"        {''.join(f'{name}, ' for name in part.takes)}= args"] if part.takes else []
            text.append("        args.clear()")
        body = [line for statement in part.statements for line in statement.lines if not line.lstrip().startswith("#:")]
        if number and any(re.search(rf"\b{STREAM}\b", line) for line in body):
            text.append(f"        {STREAM} = run.stream()")
        text += [_refusing(line) for line in body]
        if not any(statement.returns for statement in part.statements):
            text.append(f"        return [{', '.join(part.gives)}]")
        text.append("")
    return "\n".join([*text, f"    return [{', '.join(f'part{number}' for number in range(len(parts)))}]", ""])


def _refusing(line: str) -> str:
    """A line that would repeat the whole call on copies of inputs refuses the recording instead."""
    return re.sub(r"return run\.realigned\(.*", "run.refuse('an input is not aligned to 16 bytes')", line)
