"""Graphs on a GPU that use tensors of the CPU: a kernel reads memory of its own device alone. Lowered, not run."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.lower import lower
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.ir.verify import verify

aten = torch.ops.aten


def rows(count=2):
    """Row numbers that repeat, computed on the CPU."""
    return torch.arange(4, device="cpu").remainder(count)


FUNCTIONS = {
    "put a number, the rows returned too": lambda x, host: (
        aten.index_put(x * 2, [rows()], torch.scalar_tensor(1.0, device="cuda")),
        torch.arange(4, device="cpu"),
    ),
    "put in place": lambda x, host: aten.index_put_(x, [rows()], x.sum()),
    "add to rows": lambda x, host: aten.index_put(x * 2, [rows()], x.sum(), True),
    "read rows": lambda x, host: aten.index(x * 2, [rows()]).exp(),
    "rows given": lambda x, host: aten.index_put(x * 2, [host], x.sum()) + aten.index(x, [host]).sum(),
    "one row": lambda x, host: aten.index(x * 2, [torch.scalar_tensor(1, dtype=torch.int64, device="cpu")]),
    "a number of the CPU": lambda x, host: x * torch.scalar_tensor(3.0, device="cpu") + aten.select(host, 0, 0),
    "copied there": lambda x, host: (x + aten._to_copy(rows(), dtype=torch.float32, device="cuda"), rows() + 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_loops_read_memory_of_their_own_device(name):
    with FakeTensorMode():
        x, host = torch.empty(2, 4, device="cuda"), torch.empty(4, dtype=torch.int64, device="cpu")
        gm = make_fx(FUNCTIONS[name], tracing_mode="real")(x, host)
    program = lower(gm, "inference").program
    verify(program)
    verify(fuse(program), before=program)
