"""Whole host programs: values, aliasing, memory that comes back, threads, re-entrance, buckets, library calls."""

from __future__ import annotations

import ctypes
import re
import threading
import traceback
import weakref
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dcompile
from dcompile.codegen.emit.cpp.compile import build
from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.target import KernelSource
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.collectives.contract import ProgramReport
from dcompile.collectives.ddp_all_reduce import fold_average
from dcompile.compat.storage_holders import storage_use_count
from dcompile.config import Config
from dcompile.errors import DcompileError
from dcompile.ir.buffers import Buffer
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Extern, Program, View
from dcompile.ir.parse import parse
from dcompile.runtime.program import cuda_launch
from dcompile.runtime.program.argument_table import Address, kernel, library
from dcompile.runtime.program.artifact import CompiledGraph, Loadable
from dcompile.runtime.program.executable import HostProgram
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.harness import store
from tests.ir.fuzz import random_program
from tests.traits import change_cpu


def load(program: Program, constants=None) -> HostProgram:
    kernels = cpp_kernel.emit_all(program)
    built = build(kernels.sources, Config(), store())
    constants = constants or {}
    source, names = host_program.emit(program, kernels), tuple(name for name in program.inputs if name in constants)
    graph = CompiledGraph(source, names, program.buckets, program.arena_bytes, built.keys, ProgramReport())
    return HostProgram(program.name, Loadable(graph, built.libraries, constants))


def tensor(buffer: Buffer, values: np.ndarray) -> torch.Tensor:
    made = torch.empty_strided(buffer.shape, buffer.strides, dtype=getattr(torch, buffer.dtype))
    return made.copy_(torch.from_numpy(np.array(values)))


def array(value: torch.Tensor) -> np.ndarray:
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def test_random_programs_run_as_interpreted_call_after_call():
    for seed in range(200, 212):
        program, inputs = random_program(seed, 8, exact=True)
        want = interpret(program, inputs)
        executable = load(plan_memory(program))
        for _ in range(3):
            args = [tensor(program.table[name], inputs[name]) for name in program.inputs]
            for expected, got in zip(want, executable(args), strict=True):
                assert np.array_equal(expected, array(got), equal_nan=True), program.name
            assert args == []


def chain(n: int) -> Program:
    """y = 6 x through a temporary t = 2 x."""
    return parse(f"""
        program chain(x)
          arena: {4 * n} bytes
          x: float32[{n}] @ input+0
          t: float32[{n}] @ arena+0
          y: float32[{n}] @ out+0
        loop double [{n}]  # model.double
          t[i0] = mul(x[i0], 2.0)
        loop triple [{n}]  # model.triple
          y[i0] = mul(t[i0], 3.0)
        return (y)
    """)


def test_inputs_come_back_as_themselves_and_views_of_them_as_aliases():
    program = parse("""
        program views(x)
          x: float32[3, 4] @ input+0
          y: float32[12] @ out+0
        loop double [12]
          y[i0] = mul(x[i0], 2.0)
        return (x, x[4, 3] strides [1, 4], x[2] from 5, y, y[3] strides [4] from 1, 7, None)
    """)
    base = torch.arange(20.0)
    given = base[8:].view(3, 4)
    same, turned, part, result, slice_, number, nothing = load(program)([given])
    assert same is given
    assert torch.equal(turned, given.t()) and turned.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert part.tolist() == [13, 14]
    assert result.tolist() == [2.0 * i for i in range(8, 20)]
    assert slice_.tolist() == [18, 26, 34] and slice_.untyped_storage()._cdata == result.untyped_storage()._cdata
    assert (number, nothing) == (7, None)


def test_a_dead_result_gives_its_memory_to_the_next_call_and_a_held_one_does_not():
    n = 1 << 17
    executable = load(chain(n))
    x = torch.ones(n)
    (first,) = executable([x])
    address = first.data_ptr()
    (second,) = executable([x])
    assert second.data_ptr() != address and first.sum() == 6 * n, "somebody holds the first result"
    kept = second.data_ptr()
    del first, second
    (third,) = executable([x])
    assert third.data_ptr() == kept, "nobody does any more"
    slice_ = third[5:7]
    del third
    (fourth,) = executable([2 * x])
    assert slice_.tolist() == [6, 6] and fourth[0] == 12, "a view holds its storage"
    shown = fourth.numpy()
    del fourth, slice_
    executable([x])
    assert shown[0] == 12, "so does a NumPy array"


def test_results_are_tensors_of_their_own():
    executable = load(chain(1 << 17))
    (y,) = executable([torch.ones(1 << 17)])
    version = y._version
    assert not y._is_view()
    y.add_(1)
    del y
    (y,) = executable([torch.ones(1 << 17)])
    assert y._version == version, "an older result's changes are not this one's"
    assert storage_use_count(y) == 3, "this one, who will give its memory to the next, and the object it asks with"


def test_gradients_may_be_on_around_a_call():
    x = torch.ones(8, requires_grad=True)
    (y,) = load(chain(8))([x])
    assert not y.requires_grad and y[0] == 6


def test_a_first_call_in_inference_mode_leaves_later_calls_free():
    executable = load(
        parse("""
            program modes(x)
              arena: 64 bytes
              x: float32[2, 2] @ input+0
              m: float32[2, 2] @ arena+0
              y: float32[4] @ out+0
            m <- aten.mm.default(x, x) [out]
            loop double [4]
              y[i0] = mul(m[i0], 2.0)
            return (y)
        """)
    )
    with torch.inference_mode():
        assert executable([torch.ones(2, 2)])[0].is_inference()
    (made,) = executable([torch.ones(2, 2, requires_grad=True)])
    assert made.tolist() == [4] * 4 and not made.is_inference()


def test_a_call_within_a_call_and_a_call_in_another_thread_have_arenas_of_their_own():
    n = 64
    program = chain(n)
    extern = Extern("test_launch.inside.default", (View("t", (n,), (1,)),), (), (), "mutate", effect=True)
    program = replace(program, steps=(program.steps[0], extern, program.steps[1]))
    depth = []
    executable: HostProgram

    def inside(t: torch.Tensor) -> None:
        if len(depth) < 2:
            depth.append(t.data_ptr())
            assert executable([torch.full((n,), 5.0)])[0][0] == 30

    with torch.library._scoped_library("test_launch", "DEF") as library:
        library.define("inside(Tensor t) -> ()")
        library.impl("inside", inside, "CPU")
        executable = load(program)
        for _ in range(2):
            depth.clear()
            assert executable([torch.ones(n)])[0][0] == 6
            assert depth[0] != depth[1]


def test_threads_do_not_share_temporaries():
    n = 5000
    executable = load(chain(n))
    wrong = []

    def work(value: float) -> None:
        for _ in range(100):
            (y,) = executable([torch.full((n,), value)])
            if not bool((y == 6 * value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(k),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_empty_tensor_is_no_address_to_follow():
    executable = load(chain(0))
    assert executable([torch.empty(0)])[0].shape == (0,)


def test_constants_are_appended_to_the_arguments():
    program = parse("""
        program constant(x, c)
          x: float32[4] @ input+0
          c: float32[4] @ input+0
          y: float32[4] @ out+0
        loop double [4]
          y[i0] = mul(c[i0], 2.0)
        return (y, c)
    """)
    constant = torch.arange(4.0)
    y_, c_ = load(program, {"c": constant})([torch.zeros(4)])
    assert y_.tolist() == [0, 2, 4, 6] and c_ is constant


def test_integer_division_by_zero_raises_as_eager_does():
    program = plan_memory(loops.binary("floordiv", 3, "int64"))
    executable = load(program)
    x = torch.tensor([7, 8, 9])
    assert executable([x, torch.tensor([2, 2, 2])])[0].tolist() == [3, 4, 4]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        executable([x, torch.tensor([1, 0, 1])])
    assert executable([x, torch.tensor([1, 2, 3])])[0].tolist() == [7, 4, 3], "and works afterwards"


def test_positions_outside_raise_index_errors():
    program = loops.picked(2, 3)
    (loop,) = program.steps
    executable = load(plan_memory(replace(program, steps=(replace(loop, origin=("table: aten.gather (m.py:7)",)),))))
    x = torch.arange(6.0).view(2, 3)
    assert executable([torch.tensor([[2, 0, -1], [0, 1, -3]]), x])[0].tolist() == [[2, 0, 2], [3, 4, 3]]
    for wrong in (3, -4, 2**40):
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds") as caught:
            executable([torch.tensor([[2, 0, 1], [0, wrong, 1]]), x])
        assert caught.value.__notes__ == ["dcompile: found by a kernel that does table: aten.gather (m.py:7)"]
    assert executable([torch.zeros(2, 3, dtype=torch.int64), x])[0].tolist() == [[0, 0, 0], [3, 3, 3]]


def test_library_calls_write_where_they_are_told_or_allocate():
    program = parse("""
        program library(x)
          arena: 192 bytes
          x: float32[4, 6] @ input+0
          m: float32[4, 4] @ arena+64
          t: float32[16] @ arena+128
          values: float32[4, 2] @ library+0
          places: int64[4, 2] @ library+0
          s: float32[4] @ out+0
        m <- aten.mm.default(x, x[6, 4] strides [1, 6]) [out]  # layer.q: mm
        loop double [16]
          t[i0] = mul(m[i0], 2.0)
        values, places <- aten.topk.default(t[4, 4], 2) [alloc]
        s <- aten.sum.dim_IntList(t[4, 4], (1,), dtype=torch.float32) [out]
        s <- aten.add_.Tensor(s, 1.0) [mutate]
        return (values, places, s)
    """)
    executable = load(program)
    given = torch.randn(4, 6)
    want = 2 * given @ given.t()
    for _ in range(2):
        values_, places_, sums = executable([given])
        assert torch.allclose(values_, want.topk(2)[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(places_, want.topk(2)[1])
        assert torch.allclose(sums, want.sum(1) + 1, rtol=1e-5, atol=1e-5)
    assert "torch.ops.aten.sum.IntList_out" in executable.source and "# layer.q: mm" in executable.source


def test_a_library_result_with_unforeseen_strides_is_brought_into_shape():
    program = parse("""
        program fit(x)
          x: float32[3, 4] @ input+0
          t: float32[4, 3] @ library+0
          y: float32[12] @ out+0
        t <- aten.t.default(x) [alloc]  # gives strides (1, 4)
        loop double [12]
          y[i0] = mul(t[i0], 2.0)
        return (y)
    """)
    given = torch.arange(12.0).view(3, 4)
    (got,) = load(program)([given])
    assert torch.equal(got, given.t().reshape(-1) * 2)


@torch.library.custom_op("launch_test::shorter", mutates_args=())
def shorter(x: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    return x[:count].to(dtype, copy=True)


@shorter.register_fake
def _(x: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x)  # wrong but for all of float32


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_custom_op_that_returns_other_than_its_fake_implementation_says_is_an_error(dynamic):
    """Kernels would read behind the end of it."""

    @dcompile.compile(dynamic=dynamic)
    def total(x, count, dtype):
        return (torch.ops.launch_test.shorter(x, count, dtype) + 1).sum()

    x = torch.ones(6)
    assert total(x, 6, torch.float32) == 12
    with pytest.raises(
        DcompileError, match=r"shorter.*test_executable.py.*returned shape \(2,\).*says shape \(6,\).*opcheck"
    ):
        total(x, 2, torch.float32)
    with pytest.raises(DcompileError, match=r"returned shape .*torch\.float64.*says shape .*torch\.float32"):
        total(x, 6, torch.float64)
    assert total(x, 6, torch.float32) == 12


def test_dynamic_sizes_of_programs_that_leave_everything_to_the_library():
    executable = load(
        parse("""
            program dynamic(x)
              x: float32[s0, 4] @ input+0
              y: float32[4, s0] @ library+0
            y <- aten.new_zeros.default(x, (4, 2*s0)) [alloc]
            return (y, 3*s0 + 1)
        """)
    )
    for n in (3, 5):
        made, number = executable([torch.ones(n, 4)])
        assert made.shape == (4, 2 * n) and number == 3 * n + 1


def test_a_number_read_from_a_tensor_is_a_result_by_itself():
    program = parse("""
        program scalar(x)
          x: int64[] @ input+0
          n: symint[] @ library+0
          y: float32[n] @ library+0
        n <- aten._local_scalar_dense.default(x) [alloc]
        y <- aten.zeros.default((n[],)) [alloc]
        return (y)
    """)
    (made,) = load(program)([torch.tensor(3)])
    assert made.tolist() == [0, 0, 0]


@dataclass
class Memory:
    flat: torch.Tensor
    tensors: dict = field(default_factory=dict)


@dataclass
class Source:
    """A BucketSource that writes down what happens."""

    memory: Memory
    log: list = field(default_factory=list)

    def acquire(self, bucket: str) -> Memory:
        return self.memory

    def scale(self, sync: bool) -> float:
        return 0.5 if sync else 1.0

    def start(self, bucket: str, memory: Memory) -> None:
        self.log.append(("start", bucket, memory.flat.clone()))

    def wait(self, bucket: str, memory: Memory) -> None:
        self.log.append(("wait", bucket))


def test_gradients_are_written_into_buckets_and_handed_out_as_fresh_views():
    program = parse("""
        program backward(x)
          gradients: output 0 of parameter 0, output 1 of parameter 1
          bucket b0: all_reduce float32[24] on cpu over ddp, params (0, 1), buffers (g, h), offsets (0, 16)
          x: float32[2, 3] @ input+0
          g: float32[3, 3] @ bucket:b0+0
          h: float32[6] @ bucket:b0+64
        g <- aten.mm.default(x[3, 2] strides [1, 3], x) [out]
        loop double [6]
          h[i0] = mul(x[i0], 2.0)
        start all_reduce b0 over ddp: g, h
        wait b0: g, h
        return (g, h[2, 3])
    """)
    executable = load(program)
    assert executable.buckets == program.buckets
    given = torch.randn(2, 3)
    source = Source(Memory(torch.zeros(24)))
    got = executable([given], buckets=source, sync=False)
    assert source.log == [] and torch.allclose(got[0], given.t() @ given) and torch.equal(got[1], 2 * given)
    again = executable([given], buckets=source, sync=True)
    assert [entry[:2] for entry in source.log] == [("start", "b0"), ("wait", "b0")]
    assert torch.equal(source.log[0][2][16:22], 2 * given.reshape(-1)), "all gradients are there when it starts"
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in zip(got, again, strict=True))
    del got, again
    source.log.clear()
    assert storage_use_count(source.memory.flat) == 1 + len(source.memory.tensors)


def test_a_product_writes_its_gradient_scaled_where_it_is_going_to_be_reduced(monkeypatch):
    program = parse("""
        program backward(x)
          gradients: output 0 of parameter 0
          bucket b0: all_reduce float32[16] on cpu over ddp, params (0), buffers (g), offsets (0)
          x: float32[2, 3] @ input+0
          g: float32[3, 3] @ bucket:b0+0
        g <- aten.mm.default(x[3, 2] strides [1, 3], x) [out]
        start all_reduce b0 over ddp: g
        wait b0: g
        return (g)
    """)
    change_cpu(monkeypatch, scales_matmul=True)
    executable = load(fold_average(program))
    assert executable.buckets[0].scaled == (0,)
    given, source = torch.randn(2, 3), Source(Memory(torch.full((16,), torch.nan)))
    product = given.t() @ given
    (got,) = executable([given], buckets=source, sync=False)
    assert torch.equal(got, product)
    executable([given], buckets=source, sync=True)
    assert torch.equal(source.log[0][2][:9].view(3, 3), product * 0.5)


def test_inputs_are_released_after_their_last_use():
    n = 64
    program = chain(n)
    extern = Extern("test_launch2.look.default", (View("t", (n,), (1,)),), (), (), "mutate", effect=True)
    program = replace(program, steps=(program.steps[0], extern, program.steps[1]))
    alive = []
    with torch.library._scoped_library("test_launch2", "DEF") as library:
        library.define("look(Tensor t) -> ()")
        x = torch.ones(n)
        watched = weakref.ref(x)
        library.impl("look", lambda t: alive.append(watched() is not None), "CPU")
        executable = load(program)
        args = [x]
        del x
        executable(args)
    assert alive == [False]


def test_tracebacks_show_the_line_of_the_host_program():
    executable = load(
        parse("""
            program shapes(x)
              x: float32[2, 3] @ input+0
              y: float32[2, 2] @ library+0
            y <- aten.mm.default(x, x) [alloc]  # head: mm
            return (y)
        """)
    )
    with pytest.raises(RuntimeError) as caught:
        executable([torch.ones(2, 3)])
    lines = "".join(traceback.format_exception(caught.value))
    assert "<dcompile shapes" in lines and "_op0(x, x)" in lines


def test_host_programs_read_well(golden):
    source = load(chain(8)).source
    source = re.sub(r"fused_\w+_[0-9a-f]{16}", "kHASH", source)
    golden(source)


class Driver:
    """As much of CUDA's driver as a thread needs to say which context it works in."""

    def __init__(self, current: int) -> None:
        self.current, self.set, self.asked = current, [], 0

    def cuCtxGetCurrent(self, context):
        self.asked += 1
        context._obj.value = self.current or None
        return 0

    def cuDeviceGet(self, number, device):
        number._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context, number):
        context._obj.value = 1000 + number.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.set.append(context.value)
        return 0


@pytest.mark.parametrize(("current", "set_to"), [(0, [1002]), (77, [])])
def test_a_thread_without_a_context_gets_its_gpus_once(current, set_to, monkeypatch):
    driver = Driver(current)
    monkeypatch.setattr(cuda_launch, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_launch, "_BOUND", threading.local())
    cuda_launch.bind(2)
    cuda_launch.bind(2)
    assert (driver.set, driver.asked) == (set_to, 1)


class LaunchConfig(ctypes.Structure):
    """As much of CUlaunchConfig as says how many programs there are."""

    _fields_ = (("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3))


def test_sizes_and_numbers_of_programs_may_be_given_at_each_call(monkeypatch):
    """Two kernels, the first with as many programs as the call says: none of them is no launch.

    The second one's programs have memory for descriptors, as much as all of them need.
    """
    started: list[tuple[int, int, list[int]]] = []

    def start(config, function, arguments, _):
        pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.c_uint64.from_address(pointers[n]).value for n in range(4)]
        started.append((function, ctypes.cast(config, ctypes.POINTER(LaunchConfig)).contents.grid[0], values))
        return 0

    pointers = (ctypes.c_void_p,) * 4
    driver = type("Driver", (), {"cuLaunchKernelEx": ctypes.CFUNCTYPE(ctypes.c_int, *pointers)(start)})
    monkeypatch.setattr(cuda_launch, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_launch, "_function", lambda path, name, device: int(name))
    scratch = {"a": 0, "b": 256}
    monkeypatch.setattr(
        cuda_launch,
        "read_archive",
        lambda path: defaultdict(lambda: cuda_launch.KernelFunction("k", 0, 4, False, scratch[path.name], b"")),
    )
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, device, **how: made.append((size, device)) or empty(size, **how))
    source = KernelSource(cuda_launch.LAUNCHER, cuda_launch.LAUNCHER_TEXT, (), 1, False)
    path = build([source], Config(), store()).libraries[cuda_launch.LAUNCHER]
    launcher = library(path)
    assert kernel(path, cuda_launch.LAUNCHER), "programs ask for each library by the name of its source"
    kernels = [(Path("a"), "7", cuda_launch.SymbolicGrid(2), (0, 1)), (Path("b"), "8", 5, (1, Address(9)))]
    launches = cuda_launch.launches(launcher, 0, 3, kernels)
    launches(0, 1000, 40, 3)
    launches(0, 2000, 0, 0)
    assert made == [(5 * 256, torch.device("cuda", 0))]
    room = launches.__self__.kept[0].data_ptr()
    assert started == [(7, 3, [1000, 40, 0, 0]), (8, 5, [40, 9, room, 0]), (8, 5, [0, 9, room, 0])]
