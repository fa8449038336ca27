"""Graphs on a GPU that use tensors of the CPU: a kernel reads memory of its own device alone. Lowered, not run."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.lower import lower
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.ir.nodes import Apply, Extern, Loop
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


def lowered(function, *args):
    with FakeTensorMode(allow_non_fake_inputs=True):
        gm = make_fx(function, tracing_mode="real")(*args)
    return lower(gm, "inference").program


ROUNDING = "cast", "bfloat16"


@pytest.mark.parametrize("of", ["number", "element on the GPU", "element on the CPU"])
@pytest.mark.parametrize(
    ("function", "rounded"),
    [
        (lambda x, s: x * s, "element on the GPU"),
        (lambda x, s: s * x, "element on the GPU"),
        (lambda x, s: x + s, "element on the GPU"),
        (lambda x, s: s - x, "element on the GPU"),
        (lambda x, s: x / s, "element on the GPU"),
        (lambda x, s: torch.lerp(x, x, s), "element on the GPU, element on the CPU"),
    ],
    ids=["x*s", "s*x", "x+s", "s-x", "x/s", "lerp"],
)
def test_elements_of_the_gpu_are_rounded_as_eagers_kernels_round_them(function, rounded, of):
    """Factors of a model's layers are single elements: rounded in the forward alone, they bias the gradients."""
    with FakeTensorMode():
        x = torch.empty(64, dtype=torch.bfloat16, device="cuda")
        element = 0.7131 if of == "number" else torch.empty((), device="cuda" if "GPU" in of else "cpu")
    call = (lambda x: function(x, element)) if of == "number" else function
    program = lowered(call, x, *(() if of == "number" else (element,)))
    (loop,) = (step for step in program.steps if isinstance(step, Loop))
    roundings = [value for value in loop.body if isinstance(value, Apply) and (value.op, value.dtype) == ROUNDING]
    assert len(roundings) == 1 + (of in rounded), "each result is rounded once"


def test_an_element_of_the_cpu_is_copied_without_waiting_for_the_gpu():
    """The source is no memory of the user's, which could be pinned, and change before it is read."""
    with FakeTensorMode():
        x, rate = torch.empty(8, device="cuda"), torch.empty((), device="cpu")
    program = lowered(lambda x, rate: x * rate + (1 - rate), x, rate)
    copies = [step for step in program.steps if isinstance(step, Extern) and step.op == "aten._to_copy.default"]
    assert len(copies) == 2 and all(dict(step.kwargs)["non_blocking"] is True for step in copies)
    assert not any(step.args[0].buffer in program.inputs for step in copies)
