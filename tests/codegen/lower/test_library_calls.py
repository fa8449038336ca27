"""Library calls: order of effects, custom ops, several results, collectives written into the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import dcompile
from dcompile.codegen.lower.lower import lower
from dcompile.ir.nodes import Collective, Extern, Loop, Program, View, Wait
from dcompile.ir.verify import verify
from tests.codegen.lower.lowered import run


@torch.library.custom_op("lower_test::halve", mutates_args=())
def halve(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return x / 2, x.sum().reshape(1)


@halve.register_fake
def _(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(1)


@torch.library.custom_op("lower_test::fill", mutates_args=("x",))
def fill(x: torch.Tensor, value: float) -> None:
    x.fill_(value)


def program_of(function: Any, *args: torch.Tensor) -> tuple[Program, dict[str, Any]]:
    lowered = lower(make_fx(lambda *a: function(*a), tracing_mode="fake")(*args), "graph")
    verify(lowered.program)
    return lowered.program, lowered.constants


def externs(program: Program) -> list[Extern]:
    return [step for step in program.steps if isinstance(step, Extern)]


def test_a_custom_op_with_two_results() -> None:
    def model(x: torch.Tensor) -> Any:
        half, _ = torch.ops.lower_test.halve(x.t() * 2, [3, 4])
        return (half + 1,)

    x = torch.randn(3, 4)
    program, constants = program_of(model, x)
    (call,) = externs(program)
    assert call.op == "lower_test.halve.default" and call.fallback and call.outs[1] is None
    assert call.args[1] == (3, 4)
    torch.testing.assert_close(run(program, constants, [x])[0], x.t() + 1)


@torch.library.custom_op("lower_test::spread", mutates_args=())
def spread(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.cpu() * 2, x + 1


@spread.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(x.shape), torch.empty_like(x)


def test_results_of_a_custom_op_on_two_devices_lie_where_each_is() -> None:
    """A kernel on the GPU that read the first by its address would be given one of the host's."""

    def model(x: torch.Tensor) -> Any:
        host, there = torch.ops.lower_test.spread(x)
        return host + 1, there * 2, there + torch.ops.aten._to_copy(host, device=torch.device("cuda:0"))

    with FakeTensorMode() as mode:
        gm = make_fx(model)(torch.empty(4, device="cuda"))
    with mode:
        program = lower(gm, "graph").program
    call = next(step for step in externs(program) if step.op == "lower_test.spread.default")
    assert [program.table[name].device for name in call.outs if name is not None] == ["cpu", "cuda"]
    assert [program.table[view.buffer].device for view in program.outputs if isinstance(view, View)] == [
        "cpu", "cuda", "cuda"
    ]  # fmt: skip
    loops = [step for step in program.steps if isinstance(step, Loop)]
    assert all(len({program.table[name].device for name in loop.writes | loop.reads}) == 1 for loop in loops)


def test_random_numbers_are_drawn_in_graph_order() -> None:
    def model(x: torch.Tensor) -> Any:
        late = torch.rand_like(x)
        torch.ops.aten.rand.default([2], device="cpu", pin_memory=False)
        early = torch.ops.aten.bernoulli.p(x, 0.5)
        return (early + late * 2,)

    x = torch.randn(5)
    program, constants = program_of(model, x)
    assert [call.op for call in externs(program)] == ["aten.rand_like.default", "aten.rand.default", "aten.bernoulli.p"]
    assert all(call.effect and not call.fallback for call in externs(program))
    torch.manual_seed(3)
    expected = model(x)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(run(program, constants, [x])[0], expected, rtol=0, atol=0)


def test_a_custom_op_that_changes_an_input() -> None:
    def model(x: torch.Tensor) -> Any:
        before = x + 1
        torch.ops.lower_test.fill(x, 2.0)
        return (before * 3,)

    program, _ = program_of(model, torch.randn(3))
    (call,) = externs(program)
    assert call.effect and program.steps.index(call) > 0, "what reads the input comes before the call"


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("two_ranks")
def test_collectives_keep_their_order() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        group = dist.group.WORLD
        first = collectives.all_reduce(x * 2, "sum", group)
        second = collectives.all_gather_tensor(y + 1, 0, group)
        return (second * 2, first + 1)

    program, _ = program_of(model, torch.randn(3), torch.randn(3))
    starts = [step for step in program.steps if isinstance(step, Collective)]
    assert [(start.kind, start.group) for start in starts] == [("all_reduce", "own0"), ("all_gather", "own0")]
    waits = [step for step in program.steps if isinstance(step, Wait)]
    assert [wait.bucket for wait in waits] == [start.bucket for start in starts]
    assert waits[1].sent == starts[1].sent != () == waits[0].sent, "an all-reduce works in place"
    assert not externs(program)


# --- attention of sequences in one tensor -----------------------------------------------------------------------------


def weights_of(query: torch.Tensor, key: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal weights of a sequence, (heads, queries, keys)."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def sequences(bounds: torch.Tensor, *tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield [tensor[first:last] for tensor in tensors]


def flash_implementation(factor: float) -> Any:
    """What a user may register in place of torch's kernels, for CPUs: attention, times a factor."""

    def forward(q: Any, k: Any, v: Any, bounds: Any, *_: Any, scale: Any = None, **more: Any) -> Any:
        found = [
            torch.einsum("hqk,khd->qhd", weights_of(q, k, scale), v) * factor for q, k, v in sequences(bounds, q, k, v)
        ]
        none = torch.empty(0)
        return torch.cat(found), torch.zeros(q.shape[1], q.shape[0]), none, none, none

    def backward(g: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, *_: Any, **more: Any) -> Any:
        found = []
        for grad, *rows, value in sequences(bounds, g * factor, q, k, v):
            weights, steps = weights_of(*rows, None), torch.einsum("qhd,khd->hqk", grad, value)
            steps = weights * (steps - (steps * weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
            by_query, by_key = (
                torch.einsum(f"hqk,{s}", steps, x) for s, x in zip(("khd->qhd", "qhd->khd"), rows[::-1], strict=True)
            )
            found.append((by_query, by_key, torch.einsum("hqk,qhd->khd", weights, grad)))
        return tuple(map(torch.cat, zip(*found, strict=True)))

    def register() -> Any:
        library = torch.library.Library("aten", "IMPL", "CPU")
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        library.remove = library._destroy  # type: ignore[attr-defined]
        return library

    return register


def test_attention_of_several_sequences_is_the_implementation_that_the_user_has_activated(monkeypatch: Any) -> None:
    """Forward and backward, and after a change of mind in the same program."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    for name, factor in (("one", 1.0), ("two", 2.0)):
        torch.nn.attention.register_flash_attention_impl(name, register_fn=flash_implementation(factor))
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)

    def function(q: Any, k: Any, v: Any) -> Any:
        return varlen.varlen_attn(q * 1.5, k, v, bounds, bounds, 7, 7, window_size=(-1, 0)).sin()

    inputs = [torch.randn(12, 2, 8, requires_grad=True) for _ in range(3)]
    compiled = dcompile.compile(function, options={"receipt": False})
    try:
        for name in ("one", "two"):
            torch.nn.attention.activate_flash_attention_impl(name)
            for mine, theirs in zip(*(gradients(call, inputs) for call in (compiled, function)), strict=True):
                torch.testing.assert_close(mine, theirs)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    receipt = dcompile.receipt(compiled)
    assert receipt.graphs == 1 and {name.partition(".")[2] for name in receipt.fallbacks} == {
        "_varlen_attn.default", "_varlen_attn_backward.default",
    }  # fmt: skip


def gradients(function: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    found = function(*inputs)
    return [found.detach(), *torch.autograd.grad(found.sum(), inputs)]


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
@pytest.mark.parametrize("count", [3, 40])
def test_joining_many_tensors_is_a_library_call_and_no_fallback(join: Any, count: int) -> None:
    program, _ = program_of(lambda x: join([x.unbind(0)[n % 4] * n for n in range(count)]), torch.ones(4, 5))
    calls = [step for step in program.steps if isinstance(step, Extern)]
    assert len(calls) == (count > 12) and not any(call.fallback for call in calls)
