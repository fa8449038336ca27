"""A run of kernels as one call: known addresses and given ones."""

from __future__ import annotations

import torch

from dcompile.codegen.emit import cpp
from dcompile.codegen.emit.build import build
from dcompile.config import Config
from dcompile.ir.nodes import Loop, Program
from dcompile.runtime.calls import Calls
from dcompile.runtime.gpu import Address
from tests.codegen.emit import loops
from tests.codegen.emit.harness import store


def kernel_of(program: Program) -> cpp.KernelSource:
    (loop,) = program.steps
    assert isinstance(loop, Loop)
    return cpp.emit(loop, program.table)


def test_kernels_run_in_order_over_what_is_known_and_what_is_given() -> None:
    kernel = kernel_of(loops.binary("add", 4))
    libraries = build([kernel], Config(), store()).libraries
    x, z, y = torch.arange(4.0), torch.full((4,), 2.0), torch.empty(4)
    calls = Calls(libraries, 2, [(kernel.name, (0, Address(z.data_ptr()), 1)), (kernel.name, (1, 1, 1))])
    assert kernel.arguments == ("x", "z", "y")
    for _ in range(2):
        y.fill_(7)
        calls(x.data_ptr(), y.data_ptr())
        assert y.tolist() == [4, 6, 8, 10]
    other = torch.zeros(4)
    calls(other.data_ptr(), y.data_ptr())
    assert y.tolist() == [4, 4, 4, 4], "the second call's addresses are its own"
