"""What g++ makes of vectors for processors with AVX-512, wherever tests run: its assembly is read."""

from __future__ import annotations

import re
import subprocess

import pytest

from dcompile.codegen.emit.cpp.compile import find_compiler, prune_prelude
from dcompile.ir.nodes import Loop, Program, Store
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.loops import I0, J0, Body, program


def assembly(made: Program, *, far: bool = False, again: frozenset[str] = frozenset(), cache: int = 0) -> str:
    """The kernel's own, of its vectors; `far`: where caches are; `again`: what is read again; `cache`: its bytes."""
    (loop,) = made.steps
    assert isinstance(loop, Loop)
    text = cpp_kernel.emit(loop, made.table, again).text
    compiler = find_compiler(30)
    if "clang" in compiler.version:
        pytest.skip("vectors are g++'s only")
    usual = (flag for flag in compiler.flags if not re.match("-march=native|-DFAR_CACHES|-DCACHE_BYTES", flag))
    flags = (*usual, "-march=sapphirerapids", *(("-DFAR_CACHES",) if far else ()), f"-DCACHE_BYTES={cache}")
    command = (*compiler.command, *flags, "-mprefer-vector-width=512", "-S", "-x", "c++", "-", "-o", "-")
    return subprocess.run(command, input=prune_prelude(text) + text, capture_output=True, text=True, check=True).stdout


def chain(n: int, dtype: str = "bfloat16") -> Program:
    """x * y + x; each value is rounded."""
    b = Body()
    x, y = (b.load(name, I0, dtype) for name in "xy")
    z = b.op("cast", b.narrow(b.op("mul", x, y), dtype))
    z = b.narrow(b.op("add", z, x), dtype)
    shape = (dtype, (n,))
    return program(b, (n,), (), [Store("z", I0, z)], x=shape, y=shape, z=shape)


def test_bfloat16_is_rounded_in_place() -> None:
    """No element changes its place: none is widened by a move, nor narrowed by one; four vectors are a step."""
    made = assembly(chain(1 << 16))
    assert made.count("vpdpwssd") % 4 == 0 and "vpternlogd" in made and "%zmm" in made
    assert not re.search("vpmovdw|vpmovzxwd|vpackusdw", made)
    assert len(re.findall(r"vmovdqu\d+\s+%zmm\d+, \S*\(|vmovups\s+%zmm\d+, \S*\(", made)) == 2


def test_float32_goes_by_sixteen() -> None:
    assert re.search(r"vaddps.*%zmm", assembly(loops.binary("add", 1 << 16)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_tiles_are_streamed_by_whole_lines(dtype: str) -> None:
    made = assembly(loops.transpose(2048, 4096, dtype))
    assert re.search(r"vmovnt(ps|dq)\s+%zmm", made) and "sfence" in made


@pytest.mark.parametrize("made", [loops.binary("add", 1 << 22), loops.unary("exp", 1 << 23, "float32")])
def test_what_is_read_again_is_streamed_where_it_would_not_stay(made: Program) -> None:
    """16 MB and more; what is not read again, or is of a cache not known, is streamed as well."""
    stream = re.compile(r"vmovntps\s+%zmm")
    none, y = frozenset[str](), frozenset({"y"})
    for again, cache, streamed in ((none, 1 << 30, True), (y, 0, True), (y, 32 << 20, True), (y, 1 << 28, False)):
        assert bool(stream.search(assembly(made, again=again, cache=cache))) == streamed, (again, cache)


def test_columns_of_bfloat16_are_added_up_a_row_at_a_time() -> None:
    """Two lines of a row, whose address is not read again behind each store."""
    rows, n = 512, 2048
    b = Body()
    x = b.load("x", I0 * n + J0, "bfloat16")
    made = assembly(
        program(b, (rows,), (n,), [Store("s", J0, x, "sum")], x=("bfloat16", (rows, n)), s=("float32", (n,)))
    )
    loops_of_it = [loop for loop in re.split(r"^\.L\d+:$", made, flags=re.MULTILINE) if "vpmovzxwd" in loop]
    (loop, *_) = [loop.split("jne")[0] for loop in loops_of_it if "%zmm" in loop]
    assert loop.count("vpmovzxwd") == 4 and len(re.findall(r"vmovups\s+%zmm\d+, ", loop)) == 4
    assert not re.search(r"movq\s+\S*\(", loop)


def test_each_line_of_a_step_is_asked_for() -> None:
    """Two vectors of float32 are two lines."""
    assert assembly(loops.softmax(256, 1024)).count("prefetcht0") == 2


def test_what_is_read_is_asked_for_where_caches_are_far() -> None:
    """All of it; elsewhere, of one tensor alone, what functions are made of and streamed: not that far ahead."""
    one, two, sums = loops.unary("exp", 1 << 22), loops.binary("pow", 1 << 22), loops.row_sum(4096, 1024, "max")
    assert [assembly(made).count("prefetcht0") for made in (one, two, sums)] == [2, 0, 0]
    assert assembly(one, far=True).count("prefetcht0") == 2
    assert assembly(two, far=True).count("prefetcht0") == 4
    assert "prefetcht0" in assembly(sums, far=True)
    assert "prefetch" not in assembly(loops.binary("pow", 4096), far=True)


def test_what_roots_and_quotients_are_made_of_is_asked_for_where_caches_are_far() -> None:
    """Also what is written in place; elsewhere the loop is g++'s."""
    made = loops.moved_by_roots(1 << 18)
    assert assembly(made, far=True).count("prefetcht0") == 4 and "prefetch" not in assembly(made)
    assert "prefetch" not in assembly(loops.moved_by_roots(1 << 16), far=True)


@pytest.mark.parametrize(
    ("made", "near", "far"), [(loops.row_sum(4096, 1024), {4}, {16}), (loops.narrow_row_sum(4096, 1024), set(), {2})]
)
def test_rows_that_are_added_up_are_read_side_by_side_where_caches_are_far(
    made: Program, near: set[int], far: set[int]
) -> None:
    """Four vectors of each row of a step, each asked for; of bfloat16 one row, asked for where caches are far."""
    for expected, text in ((near, assembly(made)), (far, assembly(made, far=True))):
        asked = [loop.count("prefetcht0") for loop in re.split(r"^\.L\d+:$", text, flags=re.MULTILINE)]
        assert {count for count in asked if count} == expected
