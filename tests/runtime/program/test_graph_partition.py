"""Host programs split where they cannot be recorded: which statements are where, and what crosses a cut."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dcompile.runtime.program.graph_partition import (
    MIN_LAUNCHES,
    HostPart,
    HostStatement,
    host_statements,
    parts_text,
    split_statements,
)

HEAD = '''"""made up"""

import torch


def make(run):
    _op0 = entry(torch.ops.aten.mm.default)
    _op1 = entry(torch.ops.lib.waits.default)
    _launch2 = run.launches(1, [
        # aten.add.Tensor
        ('a', 'a', 1, (0,)),
        ('b', 'b', 1, (0,)),
    ])
    _collective3 = run.collective('_c10d_functional.all_reduce.default', 'sum')

    def call(args, buckets=None, sync=False):
'''


def program(body: str) -> str:
    lines = [f"        {line}" for line in body.strip().splitlines()]
    return HEAD + "\n".join([*lines, "", "    return call", ""])


def split(body: str, learned: tuple[str, ...] = ()) -> tuple[HostPart, ...]:
    return split_statements(host_statements(program(body), learned))


def shown(parts: tuple[HostPart, ...]) -> list[tuple[bool, tuple[str, ...], tuple[str, ...]]]:
    return [(part.recorded, part.takes, part.gives) for part in parts]


def text_of(part: HostPart) -> str:
    return "\n".join(line.strip() for statement in part.statements for line in statement.lines)


START = "x, = args\n_p_x = x.data_ptr()"
CUT = "#: not recorded: a\n_op1(x)\n#: recorded again"
WORK = "_launch2(stream, _p_x)\n_launch2(stream, _p_x)"
"""Four launches: worth a graph."""


def test_a_program_without_marks_is_one_piece() -> None:
    (part,) = split("x, = args\nargs.clear()\ny = _op0(x)\ndel x\nreturn [y]")
    assert part.recorded and not part.reasons and (part.takes, part.gives) == ((), ())


def test_a_marked_call_lies_between_two_pieces() -> None:
    parts = split(
        f"x, w, = args\n_p_x = x.data_ptr()\nstream = run.stream()\nargs.clear()\n{WORK}\n"
        f"#: not recorded: lib.waits is tagged\ny = _op1(x)\ndel x\n#: recorded again\n"
        f"_p_y = y.data_ptr()\n{WORK.replace('_p_x', '_p_y')}\nz = _op0(y, w)\nreturn [z]"
    )
    assert shown(parts) == [(True, (), ("w", "x")), (False, ("x",), ("y",)), (True, ("w", "y"), ())]
    assert [part.reasons for part in parts] == [(), ("lib.waits is tagged",), ()]


def test_a_call_that_failed_takes_the_checks_of_its_result_along() -> None:
    fit = "if y.stride() != (1,):\n    y = run.fit(y, (1,))"
    body = f"{START}\n{WORK}\ny = _op1(x)\n{fit}\n{WORK}\nreturn [x]"
    assert len(split(body)) == 1
    before, between, after = split(body, ("_op1",))
    assert between.reasons == ("lib.waits failed in a recording",) and "run.fit" in text_of(between)
    assert before.launches == after.launches == 4


def test_a_name_that_a_part_may_write_comes_from_before() -> None:
    """Whether it is read in that part, or in a later one."""
    cut, maybe = f"{CUT}\n", "if x % 2:\n    y = 7\n"
    start = f"x, y, = args\n_p_x = x.data_ptr()\n{WORK}\n{cut}{WORK}\n{maybe}"
    assert shown(split(f"{start}_op0(y)\nreturn [x]"))[2] == (True, ("x", "y"), ())
    assert shown(split(f"{start}{cut}{WORK}\nreturn [y]"))[2] == (True, ("x", "y"), ("y",))


def test_addresses_are_looked_up_where_they_are_used() -> None:
    """One that was looked up outside of a piece would be a number that varies."""
    parts = split(
        f"{START}\n{WORK}\n#: not recorded: a\ny = _op1(x)\n_p_y = y.data_ptr()\n_launch2(stream, _p_y)\n"
        f"#: recorded again\n{WORK.replace('_p_x', '_p_y')}\n_launch2(stream, _p_x)\nreturn [y.shape[0]]"
    )
    before, _, after, last = parts
    assert text_of(after).startswith("_p_x = x.data_ptr()\n_p_y = y.data_ptr()\n") and after.takes == ("x", "y")
    assert not last.recorded and not any(
        name.startswith("_p_") for part in parts for name in (*part.takes, *part.gives)
    )
    assert before.gives == ("x",)


def test_pieces_of_few_launches_run_as_they_are() -> None:
    few = "_launch2(stream, _p_x)\ny = _op0(x)"  # three
    parts = split(f"{START}\n{few}\n{CUT}\n{few}\nreturn [y]")
    assert MIN_LAUNCHES == 4 and [part.recorded for part in parts] == [False] and parts[0].reasons == ("a",)


def test_new_results_are_returned_by_a_part_that_runs_as_it_is() -> None:
    """A copy to the CPU may be under way: the host must not read it."""
    cut = CUT.replace("_op1", "y = _op1")
    body = f"{START}\n{WORK}\n{cut}\n{WORK}\nreturn [%s]"
    assert [part.recorded for part in split(body % "x")] == [True, False, True]
    assert [part.recorded for part in split(body % "x, y")] == [True, False, True, False]


def test_a_wait_moves_before_the_cut() -> None:
    body = (
        f"{START}\nargs.clear()\n_collective3([x], [], 'sum', '0')\n{WORK}\n"
        f"{CUT}\n_collective3.wait()\n{WORK}\nreturn [x]"
    )
    before, _, after = split(body)
    assert text_of(before).endswith("_collective3.wait()") and ".wait()" not in text_of(after)


def test_a_collective_of_a_bucket_is_always_recorded() -> None:
    """Its source belongs to one call; only a graph may repeat it."""
    body = (
        f"x, = args\n_bucket_b = buckets.acquire('b')\nargs.clear()\n{CUT}\n"
        f"if sync:\n    buckets.start('b', _bucket_b)\n_op0(x)\n{CUT}\n"
        "if sync:\n    buckets.wait('b', _bucket_b)\nreturn [x]"
    )
    first, piece, last = split(body)
    assert [part.recorded for part in (first, piece, last)] == [False, True, False]
    assert "buckets.start" in text_of(piece) and "buckets.wait" in text_of(piece) and piece.takes == ("_bucket_b", "x")


def test_a_regions_list_of_arguments_is_filled_where_it_is_emptied() -> None:
    body = f"x, m, = args\n_p_x = x.data_ptr()\n{WORK}\n_given = [x]\ndel x\ny = _op1(m, _given)\nreturn [y]"
    parts = split(body, ("_op1",))
    assert shown(parts) == [(True, (), ("m", "x")), (False, ("m", "x"), ())]
    assert "_given = [x]\ndel x\n" in text_of(parts[1])


def test_the_text_of_parts_drops_only_what_a_part_has() -> None:
    body = f"{START}\n{WORK}\n{CUT}\ny = 1\n{WORK.replace('_p_x', 'y')}\ndel x, y\nreturn []"
    text = parts_text(program(body), split(body))
    assert "del y" in text and "del x" not in text and "return [part0, part1, part2]" in text
    ast.parse(text)


def test_a_call_that_would_be_repeated_on_copies_refuses() -> None:
    again = "if (_p_x) & 15:\n    return run.realigned(call, args, (), buckets, sync)"
    source = program(f"{START}\n{again}\nargs.clear()\nreturn [x]")
    assert "run.refuse('an input is not aligned to 16 bytes')" in parts_text(
        source, split_statements(host_statements(source))
    )


# --- any program ------------------------------------------------------------------------------------------------------


@st.composite
def bodies(draw: Any) -> str:
    """A straight-line program over numbers: calls of `f`, some of them marked or failed, starts, waits and `del`."""
    lines, alive, flying = ["a, b, = args", "args.clear()"], ["a", "b"], list[str]()
    for count in range(draw(st.integers(1, 24))):
        kind = draw(
            st.sampled_from(("call", "call", "call", "launch", "apart", "failed", "maybe", "drop", "start", "wait"))
        )
        one, other = draw(st.sampled_from(alive)), draw(st.sampled_from(alive))
        name = f"v{count}"
        if kind == "drop" and len(alive) > 1:
            alive.remove(one)
            lines.append(f"del {one}")
        elif kind == "start":
            lines.append(f"buckets.start_gather('{name}', [{one}])")
            flying.append(name)
        elif kind == "wait" and flying:
            lines.append(f"buckets.wait_gather('{flying.pop(0)}')")
        elif kind == "maybe":
            lines += [f"if {one} % 2:", f"    {other} = 7"]
        elif kind == "launch":
            lines.append(f"_launch2(stream, {one})")
        elif kind in ("call", "apart", "failed"):
            lines += ["#: not recorded: r"] if kind == "apart" else []
            lines.append(f"{name} = {'_op1' if kind == 'failed' else '_op0'}({one}, {other})")
            lines += ["#: recorded again"] if kind == "apart" else []
            alive.append(name)
    lines += [f"buckets.wait_gather('{name}')" for name in flying]
    return "\n".join([*lines, f"return [{', '.join(draw(st.lists(st.sampled_from(alive), max_size=4)))}]"])


class Log:
    """What a made-up program calls: each call is noted, with what was in flight at its begin."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.flying: set[str] = set()

    def call(self, one: int, other: int) -> int:
        self.events.append(("call", (one, other)))
        return (3 * one + 5 * other + len(self.events)) % 1009

    def start_gather(self, bucket: str, given: list[int]) -> None:
        self.events.append(("start", (bucket, *given)))
        self.flying.add(bucket)

    def wait_gather(self, bucket: str) -> None:
        self.flying.remove(bucket)


def namespace(source: str, log: Log) -> Any:
    names: dict[str, Any] = {}
    source = re.sub(r"^    _(op|collective)\d+ = .*$", "", source, flags=re.MULTILINE)
    source = re.sub(r"^    _launch2 = .*?\]\)$", "", source, flags=re.MULTILINE | re.DOTALL)
    names.update(_op0=log.call, _op1=log.call, _launch2=lambda stream, x: log.events.append(("launch", x)))
    exec(source, names)
    return names["make"](type("Run", (), {"stream": lambda self: 0})())


@settings(max_examples=300)
@given(bodies(), st.integers(0, 9))
def test_parts_compute_what_the_whole_does(body: str, x: int) -> None:
    body = body.replace("args.clear()", "args.clear()\nstream = run.stream()")
    source, whole, split_ = program(body), Log(), Log()
    expected = namespace(source, whole)([x, x + 1], whole)
    parts = split_statements(host_statements(source, ("_op1",)))
    functions, values, results = namespace(parts_text(source, parts), split_), {}, []
    for number, (part, function) in enumerate(zip(parts, functions, strict=True)):
        results = function([x, x + 1] if number == 0 else [values[name] for name in part.takes], split_)
        values.update(zip(part.gives, results, strict=False))
        assert len(parts) == 1 or not split_.flying, "a collective is in flight at a cut"
    assert results == expected and split_.events == whole.events


@settings(max_examples=300)
@given(bodies())
def test_each_statement_is_in_one_part_and_in_order(body: str) -> None:
    statements = host_statements(program(body), ("_op1",))
    parts = split_statements(statements)

    def kept(many: Any) -> list[tuple[str, ...]]:
        """Lines without what may move (waits), shrink (`del`) or be looked up twice (addresses)."""
        return [s.lines for s in many if not (s.waits or s.drops or s.address)]

    assert kept(s for part in parts for s in part.statements) == kept(statements)
    waits = [s.lines for s in statements if s.waits]
    assert sorted(s.lines for part in parts for s in part.statements if s.waits) == sorted(waits)
    for one, other in pairwise(parts):
        assert one.recorded != other.recorded
    for part in parts:
        assert not part.recorded or not any(s.unrecordable for s in part.statements)
        assert len(parts) == 1 or not part.recorded or part.worth


@settings(max_examples=200)
@given(bodies())
def test_what_a_part_takes_an_earlier_one_gives(body: str) -> None:
    given_: set[str] = set()
    for number, part in enumerate(split_statements(host_statements(program(body), ("_op1",)))):
        assert given_.issuperset(part.takes) and (number or not part.takes)
        given_ |= {*part.gives}


def test_statements_say_what_they_read_and_write() -> None:
    _, statement, last = host_statements(
        program("x, = args\nif x.stride() != (1,):\n    x = run.fit(x, (1,))\nreturn [x]")
    )
    assert statement == HostStatement(
        ("        if x.stride() != (1,):", "            x = run.fit(x, (1,))"),
        frozenset("x"),
        frozenset("x"),
        certain=False,
    )
    assert last.returns
