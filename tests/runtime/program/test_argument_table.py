"""A run of kernels as one call: known addresses and given ones."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch

from dcompile.codegen.emit.cpp.compile import build
from dcompile.codegen.emit.target import KernelSource
from dcompile.config import Config
from dcompile.ir.nodes import Loop, Program
from dcompile.runtime.program.argument_table import Address, kernel_calls
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.harness import store


def kernel_of(program: Program) -> KernelSource:
    (loop,) = program.steps
    assert isinstance(loop, Loop)
    return cpp_kernel.emit(loop, program.table)


def test_kernels_run_in_order_over_what_is_known_and_what_is_given() -> None:
    kernel = kernel_of(loops.binary("add", 4))
    libraries = build([kernel], Config(), store()).libraries
    x, z, y = torch.arange(4.0), torch.full((4,), 2.0), torch.empty(4)
    run = kernel_calls(libraries, 2, [(kernel.name, (0, Address(z.data_ptr()), 1)), (kernel.name, (1, 1, 1))])
    assert kernel.arguments == ("x", "z", "y")
    for _ in range(2):
        y.fill_(7)
        run(x.data_ptr(), y.data_ptr())
        assert y.tolist() == [4, 6, 8, 10]
    other = torch.zeros(4)
    run(other.data_ptr(), y.data_ptr())
    assert y.tolist() == [4, 4, 4, 4], "the second call's addresses are its own"


def test_what_fails_is_told_and_what_comes_behind_it_does_not_run() -> None:
    """By a kernel that divides integers: 1 is a division by zero."""
    dividing, adding = kernel_of(loops.binary("floordiv", 4, dtype="int64")), kernel_of(loops.binary("add", 4))
    assert dividing.checked
    libraries = build([dividing, adding], Config(), store()).libraries
    x, z, y = torch.arange(4), torch.tensor([1, 2, 0, 3]), torch.empty(4, dtype=torch.int64)
    a, b = torch.ones(4), torch.zeros(4)
    both = kernel_calls(libraries, 5, [(dividing.name, (0, 1, 2)), (adding.name, (3, 3, 4))])
    given = [tensor.data_ptr() for tensor in (x, z, y, a, b)]
    assert both(*given) == 1 and b.tolist() == [0, 0, 0, 0]
    z[2] = 1
    assert both(*given) == 0 and b.tolist() == [2, 2, 2, 2] and y.tolist() == [0, 0, 2, 1]


def test_what_is_no_number_or_one_too_many_is_an_error_and_nothing_runs() -> None:
    kernel = kernel_of(loops.binary("add", 4))
    run = kernel_calls(build([kernel], Config(), store()).libraries, 3, [(kernel.name, range(3))])
    x, y = torch.ones(4), torch.zeros(4)
    for given in ((x.data_ptr(), x.data_ptr()), (x.data_ptr(),) * 4, ("x", x.data_ptr(), y.data_ptr())):
        with pytest.raises(TypeError):
            run(*given)
    assert y.tolist() == [0, 0, 0, 0]
    assert run(x.data_ptr(), x.data_ptr(), y.data_ptr()) == 0 and y.tolist() == [2, 2, 2, 2]


def test_a_table_lives_as_long_as_what_is_bound_to_it() -> None:
    kernel = kernel_of(loops.binary("add", 4))
    libraries = build([kernel], Config(), store()).libraries
    x, y = torch.ones(4), torch.zeros(4)
    runs = [kernel_calls(libraries, 1, [(kernel.name, (Address(x.data_ptr()),) * 2 + (0,))]) for _ in range(100)]
    gc.collect()
    rubbish = [bytes(64) for _ in range(1000)]
    for run in runs:
        y.zero_()
        assert run(y.data_ptr()) == 0 and y.tolist() == [2, 2, 2, 2]
    assert len(rubbish) == 1000


def test_other_threads_run_while_a_kernel_does() -> None:
    n = 1 << 24
    kernel = kernel_of(loops.unary("sin", n))
    x, y, count, ended = torch.rand(n), torch.empty(n), itertools.count(), threading.Event()
    run = kernel_calls(build([kernel], Config(), store()).libraries, 2, [(kernel.name, range(2))])
    seen = [0]

    def work() -> None:
        while not ended.wait(0.0005):
            seen[0] = next(count)

    thread = threading.Thread(target=work)
    thread.start()
    before = seen[0]
    for _ in range(5):
        run(x.data_ptr(), y.data_ptr())
    during = seen[0] - before
    ended.set()
    thread.join()
    assert during > 0
    torch.testing.assert_close(y, x.sin())
