"""All-gathers and reduce-scatters put into hand-built programs: places, orders, memory, values."""

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.collectives import ddp_all_reduce
from dcompile.collectives.contract import ParamInfo, Shard
from dcompile.collectives.fsdp_all_gather import insert_all_gathers
from dcompile.collectives.fsdp_reduce_scatter import copied_bytes, insert_reduce_scatters
from dcompile.errors import VerifyError
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import contiguous_strides, var
from dcompile.ir.interpret import interpret
from dcompile.ir.library_ops import COPY_EACH
from dcompile.ir.nodes import Apply, Collective, Extern, Load, Loop, Program, Store, View, Wait
from dcompile.ir.verify import verify


def buffer(name, size=4):
    return Buffer(name, "float32", (size,), (1,))


def add(a, b, out, size=4):
    body = (Load(a, var("i0"), "float32"), Load(b, var("i0"), "float32"), Apply("add", (0, 1), "float32"))
    return Loop(f"make_{out}", (size,), (), body, (Store(out, var("i0"), 2),))


def whole(name, size=4):
    return View(name, (size,), contiguous_strides((size,)))


def param(number, together=0, unit=None, offset=0, padded=6, reshard=True, reduce_dtype="float32"):
    shard = Shard(number if unit is None else unit, together, offset, padded, reduce_dtype, reshard)
    return ParamInfo(number, f"p{number}", (4,), "float32", "cpu", "sharded", f"fsdp{together}", shard)


def chain(count=2):
    """x + p0 + p1 + ..., which also returns every parameter, as a forward that saves them."""
    names = [f"p{n}" for n in range(count)]
    sums = ["x", *(f"s{n}" for n in range(count))]
    steps = [add(sums[n], names[n], sums[n + 1]) for n in range(count)]
    buffers = tuple(map(buffer, ("x", *names, *sums[1:])))
    outputs = (whole(sums[-1]), *map(whole, names))
    return Program("forward", ("x", *names), outputs, buffers, tuple(steps))


def words(program):
    """Steps as short words: + a start, - a wait, else what is made."""
    signs = {Collective: "+", Wait: "-"}
    return " ".join(
        f"{signs[type(s)]}{s.bucket}" if type(s) in signs else ",".join(sorted(s.writes)) for s in program.steps
    )


GATHERS = ((1, 0), (2, 1))


def test_the_next_group_is_gathered_when_one_has_arrived():
    program = insert_all_gathers(chain(), (param(0), param(1, together=1)), GATHERS, 1)
    verify(program)
    assert words(program) == "+gather0 -gather0 +gather1 s0 -gather1 s1"
    assert program.table["full0"].shape == (6,) and program.outputs[1] == whole("p0")


def test_what_is_kept_is_saved_as_it_was_gathered():
    params = (param(0, reshard=False), param(1, together=1))
    program = plan_memory(insert_all_gathers(chain(), params, GATHERS, 1))
    verify(program)
    assert program.outputs[1:] == (whole("full0"), whole("p1"))
    assert (program.table["full0"].storage, program.table["full1"].storage) == ("out", "arena")


@pytest.mark.parametrize("units", [(None, None), (0, 0)], ids=["a unit each", "slices of one unit"])
def test_values_are_those_of_the_parameters(units):
    slices = units[0] is not None
    params = (param(0, unit=units[0], padded=8), param(1, unit=units[1], offset=4 if slices else 0, padded=8))
    program = plan_memory(insert_all_gathers(chain(), params, GATHERS, 1))
    verify(program)
    p0, p1, x = (np.arange(4, dtype=np.float32) * k for k in (1, 10, 100))
    full = [np.concatenate((p0, p1))] if slices else [np.concatenate((p, np.zeros(4, np.float32))) for p in (p0, p1)]
    empty = np.zeros(4, np.float32)
    found = interpret(program, {"x": x, "p0": empty, "p1": empty}, {"all_gather": lambda _: full})
    assert (found[0] == x + p0 + p1).all()


def test_memory_of_one_group_serves_the_next_but_one():
    params = tuple(param(n, together=n, padded=64) for n in range(4))
    gathers = tuple((n + 1, n) for n in range(4))
    program = plan_memory(insert_all_gathers(chain(4), params, gathers, 1))
    verify(program)
    assert program.arena_bytes < 3 * 64 * 4 + 256


def test_a_librarys_view_keeps_the_gathered_parameter():
    """`t` may look at the parameter: nothing else may lie there until `t` was read."""
    look = Extern("aten.t.default", (whole("p0"),), (), ("t",), "alloc", aliases=True)
    program = chain()
    steps = (look, add("x", "p1", "s0"), add("s0", "t", "s1"))
    program = replace(program, steps=steps, buffers=(*program.buffers, buffer("t")))
    params = (param(0), param(1, together=1))
    planned = plan_memory(insert_all_gathers(program, params, GATHERS, 1))
    verify(planned)
    lost = replace(planned, buffers=tuple(replace(b, offset=0) if b.storage == "arena" else b for b in planned.buffers))
    with pytest.raises(VerifyError, match="full"):
        verify(lost)


def test_a_parameter_that_is_written_is_a_bug():
    program = replace(chain(), steps=(*chain().steps, Extern("aten.mul_", (whole("p0"),), (), ("p0",), "mutate")))
    with pytest.raises(AssertionError, match="writes a sharded parameter"):
        insert_all_gathers(program, (param(0), param(1)), GATHERS, 1)


def backward(count=2):
    """Gradients of the last parameter first, as a backward makes them."""
    steps = [add("x", "x", f"g{n}") for n in reversed(range(count))]
    buffers = tuple(map(buffer, ("x", *(f"g{n}" for n in range(count)))))
    grads = tuple((n, n) for n in range(count))
    return Program("backward", ("x",), tuple(whole(f"g{n}") for n in range(count)), buffers, tuple(steps), grads)


def test_gradients_are_written_where_they_are_sent_from():
    program = plan_memory(insert_reduce_scatters(backward(), (param(0), param(1, together=1))))
    verify(program)
    assert words(program) == "g1 +scatter0 g0 -scatter0 +scatter1 -scatter1"
    assert program.outputs == (None, None) and copied_bytes(program) == 0
    assert program.table["g0"].holder == "grads0" and program.table["grads0"].storage == "arena"


def test_gradients_of_another_dtype_are_converted_on_the_way():
    program = plan_memory(insert_reduce_scatters(backward(1), (param(0, reduce_dtype="float64"),)))
    verify(program)
    assert words(program) == "g0 grad0 +scatter0 -scatter0" and copied_bytes(program) == 4 * 8


def test_small_gradients_of_a_unit_are_converted_by_one_call_once_all_are_there():
    params = (param(0, reduce_dtype="float64"), param(1, reduce_dtype="float64"), param(2, 1, reduce_dtype="float64"))
    program = plan_memory(insert_reduce_scatters(backward(3), params))
    verify(program)
    assert words(program) == "g2 grad2 +scatter0 g1 g0 grad0,grad1 -scatter0 +scatter1 -scatter1"
    assert [s.op for s in program.steps if isinstance(s, Extern)] == ["aten.cat.default", COPY_EACH]
    assert copied_bytes(program) == 3 * 4 * 8


def test_large_gradients_are_converted_one_by_one_so_that_they_are_freed_early(monkeypatch):
    monkeypatch.setattr(ddp_all_reduce, "JOINED_BYTES", 4 * 4)
    params = tuple(param(number, reduce_dtype="float64") for number in range(2))
    program = insert_reduce_scatters(backward(), params)
    assert words(program) == "g1 grad1 g0 grad0 +scatter0 -scatter0"


def test_values_of_a_unit_of_several_gradients():
    params = (param(0, unit=0, padded=8), param(1, unit=0, offset=4, padded=8))
    program = plan_memory(insert_reduce_scatters(backward(), params))
    verify(program)
    seen = []
    interpret(program, {"x": np.ones(4, np.float32)}, {"reduce_scatter": lambda sent: seen.extend(sent) or sent})
    assert all((sent == 2).all() for sent in seen) and len(seen) == 2
    assert [program.table[name].offset for name in ("g0", "g1")] == [0, 16]
