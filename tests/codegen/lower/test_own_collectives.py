"""Functional collectives of a model as steps: what they read and write, and those that stay library calls."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcompile.codegen.lower.lower import Lowered, lower
from dcompile.ir.nodes import Collective, Extern, Loop, Wait
from dcompile.ir.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore")
OPS = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def lowered(function: Any, *args: torch.Tensor, aten: bool = False) -> Lowered:
    found = lower(make_fx(function, tracing_mode="fake")(*args), "graph", aten=aten)
    verify(found.program)
    return found


def world() -> Any:
    return dist.group.WORLD


KINDS: dict[str, tuple[Any, str, int]] = {
    "all_reduce": (lambda x: collectives.all_reduce(x * 2, "sum", world()), "all_reduce", 1),
    "all_gather": (lambda x: collectives.all_gather_tensor(x * 2, 0, world()), "all_gather", 1),
    "reduce_scatter": (lambda x: collectives.reduce_scatter_tensor(x * 2, "sum", 0, world()), "reduce_scatter", 1),
    "all_to_all": (lambda x: collectives.all_to_all_single(x * 2, [3, 1], [2, 2], world()), "all_to_all", 1),
    "broadcast": (lambda x: collectives.broadcast(x * 2, 0, world()), "broadcast", 1),
    "coalesced": (lambda x: collectives.all_reduce_coalesced([x * 2, x + 1], "avg", world()), "all_reduce", 2),
}


@pytest.mark.parametrize("case", KINDS)
def test_each_kind_is_a_start_and_a_wait(case: str) -> None:
    function, kind, count = KINDS[case]
    program = lowered(
        lambda x: torch.utils._pytree.tree_map(collectives.wait_tensor, function(x)), torch.ones(4, 2)
    ).program
    (start,) = [step for step in program.steps if isinstance(step, Collective)]
    (wait,) = [step for step in program.steps if isinstance(step, Wait)]
    assert (start.kind, start.group, len(start.buffers)) == (kind, "own0", count)
    assert wait == Wait(start.bucket, start.buffers, start.sent)
    in_place = kind in ("all_reduce", "broadcast")
    assert bool(start.sent) != in_place and (start.writes <= start.reads) == in_place
    assert not any(isinstance(step, Extern) for step in program.steps)


def test_the_wait_stands_where_the_model_waits() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        pending = OPS.all_reduce(x * 2, "sum", world().group_name)
        other = y.sin() @ y
        return OPS.wait_tensor(pending) + other

    program = lowered(model, torch.ones(4, 4), torch.ones(4, 4)).program
    kinds = [type(step).__name__ for step in program.steps]
    assert kinds.index("Collective") < kinds.index("Extern") < kinds.index("Wait")


def test_its_argument_is_left_alone() -> None:
    """A functional collective is: what is summed up in place is a copy, if somebody else reads the argument."""
    program = lowered(lambda x: (collectives.all_reduce(x, "sum", world()) + 1, x * 2), torch.ones(3)).program
    (start,) = [step for step in program.steps if isinstance(step, Collective)]
    assert start.writes.isdisjoint(program.inputs)
    assert any(isinstance(step, Loop) and step.writes == start.writes for step in program.steps)


def test_a_result_that_nobody_looks_at_is_exchanged_all_the_same() -> None:
    def model(x: torch.Tensor) -> Any:
        OPS.all_reduce(x, "sum", world().group_name)
        return x * 2

    steps = lowered(model, torch.ones(3)).program.steps
    assert [type(step).__name__ for step in steps if not isinstance(step, Loop)] == ["Collective", "Wait"]


def test_what_is_returned_without_a_wait_stays_a_call() -> None:
    found = lowered(lambda x: OPS.all_reduce(x * 2, "sum", world().group_name), torch.ones(3))
    (call,) = [step for step in found.program.steps if isinstance(step, Extern)]
    assert call.op == "_c10d_functional.all_reduce.default" and call.effect and not call.fallback
    assert found.declined == (
        f"{call.op} is a library call, which nothing hides: its result is used without a wait in this graph",
    )


def test_where_aten_runs_everything_they_are_calls() -> None:
    program = lowered(lambda x: collectives.all_reduce(x, "sum", world()), torch.ones(3), aten=True).program
    assert [step.op.split(".")[1] for step in program.steps if isinstance(step, Extern)] == [
        "all_reduce",
        "wait_tensor",
    ]
