"""What is stored and what is computed where it is used; where steps say they come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.fx_nodes import origin_of
from dcompile.codegen.lower.lazy_tensor import MAX_LOADS, MAX_OPS
from dcompile.codegen.lower.lower import lower
from dcompile.ir.nodes import Apply, Extern, Load, Loop, Program, View
from tests.traits import change_cpu

aten = torch.ops.aten


def program_of(function: Any, *args: torch.Tensor) -> Program:
    return lower(make_fx(lambda *a: function(*a), tracing_mode="fake")(*args), "graph").program


def loops(program: Program) -> list[Loop]:
    return [step for step in program.steps if isinstance(step, Loop)]


X = torch.randn(4, 6)


def test_a_value_with_one_user_is_computed_there() -> None:
    (loop,) = loops(program_of(lambda x: ((x + 1).exp() * 3).t().sum(0), X))
    assert (loop.outer, loop.inner) == ((4,), (6,))


def test_a_costly_value_with_two_users_is_stored() -> None:
    stored = program_of(lambda x: (x.exp() + 1, x.exp().sum()), X)
    assert len(loops(stored)) == 2
    shared = program_of(lambda x: [(e := x.exp()) + 1, e.sum()], X)
    assert len(loops(shared)) == 3


def test_a_cheap_value_is_computed_again() -> None:
    assert len(loops(program_of(lambda x: [(e := x * 2).exp(), e.sum()], X))) == 2


def test_a_value_that_is_spread_out_is_stored_first() -> None:
    program = program_of(lambda x: x.sum(1).exp().sin().unsqueeze(1) * x, X)
    assert [loop.outer for loop in loops(program)] == [(4,), (4,), (4, 6)]


def test_one_element_of_little_work_is_worked_out_by_its_readers() -> None:
    def scaled(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [x * (scale := -(a / b)), (x + scale).sum(1)]

    one = torch.rand(())
    assert len(loops(program_of(scaled, X, one, one))) == 2
    costly = program_of(lambda x, a: x * a.exp(), X, one)
    assert [loop.outer for loop in loops(costly)] == [(), (4, 6)]


def test_a_result_is_read_rather_than_worked_out_again_where_it_is_picked_from() -> None:
    def picked(x: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
        total = x.sum(1, keepdim=True)
        log = total.log()
        return [log, (x - log).gather(1, at)]

    gathering = loops(program_of(picked, torch.rand(4, 64), torch.zeros(4, 1, dtype=torch.int64)))[-1]
    assert "log" in gathering.reads
    assert not any(isinstance(value, Apply) and value.op == "log" for value in gathering.body)


def test_what_a_library_call_reads_lies_in_memory() -> None:
    program = program_of(lambda x, y: torch.mm((x + y).relu(), y.t()), X, X)
    assert [type(step) for step in program.steps] == [Loop, Extern]


def test_bodies_stay_within_limits() -> None:
    def many_loads(*xs: torch.Tensor) -> torch.Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return total

    def many_ops(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3 * MAX_OPS):
            x = (x + 1).abs()
        return x

    for program in (program_of(many_loads, *(torch.randn(3) for _ in range(40))), program_of(many_ops, X)):
        assert len(loops(program)) > 1
        for loop in loops(program):
            assert sum(isinstance(v, Load) for v in loop.body) <= MAX_LOADS + 1
            assert sum(isinstance(v, Apply) for v in loop.body) <= MAX_OPS + 1


def test_masks_keep_a_joined_piece_from_being_read_outside() -> None:
    (loop,) = loops(program_of(lambda x, y: torch.cat([x, y]), X, X))
    loads = [v for v in loop.body if isinstance(v, Load)]
    assert len(loads) == 2 and all(v.mask is not None for v in loads)


def test_gradients_are_passed_on() -> None:
    gm = make_fx(lambda x: (x * 2, x + 1), tracing_mode="fake")(X)
    assert lower(gm, "graph", ((1, 7),)).program.grads == ((1, 7),)


def test_equal_layers_differ_only_in_names_and_origin() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.softmax(x * 2, -1), w)

    def anonymous(loop: Loop) -> Loop:
        body = tuple(replace(v, buffer="x") if isinstance(v, Load) else v for v in loop.body)
        return replace(loop, name="", body=body, stores=tuple(replace(s, buffer="y") for s in loop.stores), origin=())

    first, second = loops(program_of(lambda x, w: layer(layer(x, w), w), X, torch.randn(6, 6)))
    assert anonymous(first) == anonymous(second)


def test_origin_names_module_op_and_line() -> None:
    gm = make_fx(lambda x: x * 2, tracing_mode="fake")(X)
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    node.meta["nn_module_stack"] = {"a": ("L['self'].model", object), "b": ("L['self'].model.layers[3].mlp", object)}
    node.meta["stack_trace"] = '  File "/a/b/model.py", line 88, in forward\n    return x * 2\n'
    assert origin_of(node) == ("model.layers.3.mlp: aten.mul.Tensor (model.py:88)",)
    device = torch.utils._device.__file__
    node.meta["stack_trace"] += f'  File "{device}", line 9, in __torch_function__\n    return f()\n'
    assert origin_of(node) == ("model.layers.3.mlp: aten.mul.Tensor (model.py:88)",), "under a default device"
    node.meta.clear()
    assert origin_of(node) == ("aten.mul.Tensor",)


def test_modules_that_are_compiled_inside_keep_the_users_names() -> None:
    """torch 2.11 names them by the entry's wrapper, which it traces through."""
    gm = make_fx(lambda a: a * 2)(torch.ones(2))
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    inner = "_compiled_call_impl._torchdynamo_inline.__closure__[2].cell_contents()"
    for path in (f"L['target'].model.layers[3].{inner}.mlp", "L['self'].model.layers[3]._orig_mod.mlp"):
        node.meta = {"nn_module_stack": {"mlp": (path, torch.nn.Module)}}
        assert origin_of(node) == ("model.layers.3.mlp: aten.mul.Tensor",)


def test_decompositions_keep_whole_what_has_one_rule() -> None:
    names = {str(op) for op in table()}
    for kept in ("aten._softmax.default", "aten.native_layer_norm.default", "aten.gelu.default", "aten.silu.default",
                 "aten.embedding.default", "aten.addmm.default", "aten.baddbmm.default",
                 "aten._scaled_dot_product_flash_attention_for_cpu.default"):  # fmt: skip
        assert kept not in names
    for split in ("aten.nll_loss_forward.default", "aten.native_layer_norm_backward.default",
                  "aten.native_batch_norm_backward.default", "aten.mse_loss.default"):  # fmt: skip
        assert split in names
    changed = table()
    changed.clear()
    assert table()


def test_a_bias_is_added_apart_from_its_convolution_on_gpus_alone() -> None:
    x, weight, bias = (torch.empty(size, device="meta") for size in ((2, 3, 8, 8), (4, 3, 3, 3), (4,)))
    how = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    rule = table()[torch.ops.aten.convolution.default]
    graph = make_fx(lambda *given: rule(*given, *how))(x, weight, bias).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names == ["aten.convolution.default", "aten.view.default", "aten.add.Tensor"]
    assert rule(x, weight, None, *how) is NotImplemented
    assert rule(*(torch.empty(t.shape) for t in (x, weight, bias)), *how) is NotImplemented


def test_what_reads_no_memory_is_stored_on_its_own_device() -> None:
    """Positions that a model counts on the CPU, saved for a backward: its kernels read them there."""

    def places(weights: torch.Tensor) -> Any:
        distance = (torch.arange(4) - 2).abs().clamp_max(1)
        there = aten._to_copy(distance, device=torch.device("cuda:0"))
        return distance, torch.cumsum(distance + 1, 0), aten.embedding(weights, there)

    with FakeTensorMode() as mode:
        gm = make_fx(places, decomposition_table=table())(torch.empty(2, 3, device="cuda"))
    with mode:
        program = lower(gm, "graph").program
    devices = [program.table[view.buffer].device for view in program.outputs if isinstance(view, View)]
    assert devices == ["cpu", "cpu", "cuda"]
    assert all(len({program.table[name].device for name in loop.writes | loop.reads}) == 1 for loop in loops(program))


def test_division_by_what_lies_on_the_cpu_is_a_product_on_gpus() -> None:
    """ATen multiplies by the reciprocal there: a logarithm that is rounded up to a bucket shows the difference."""

    def quotients(x: torch.Tensor, scale: torch.Tensor) -> Any:
        return x / 3.0, x / scale.log(), 3.0 / x, x / x

    def operations(device: str) -> list[list[str]]:
        with FakeTensorMode() as mode:
            gm = make_fx(quotients)(torch.empty(8, device=device), torch.empty(()))
        with mode:
            found = loops(lower(gm, "graph").program)
        return [[v.op for v in loop.body if isinstance(v, Apply)] for loop in found]

    assert operations("cpu") == [["div"], ["log"], ["div"], ["reciprocal", "mul"], ["div"]]
    assert operations("cuda") == [["mul"], ["log"], ["div", "mul"], ["reciprocal", "mul"], ["div"]]


@pytest.mark.parametrize("many_threads", [True, False])
def test_a_long_function_of_positions_is_a_table_for_many_readers_on_gpus(many_threads: bool, monkeypatch: Any) -> None:
    """Biases of ALiBi: each program of a large loop would compute the powers again."""
    change_cpu(monkeypatch, many_threads=many_threads)

    def biased(x: torch.Tensor) -> torch.Tensor:
        slopes = torch.pow(0.7, torch.arange(1, x.shape[0] + 1))
        return x + slopes[:, None, None] * torch.arange(x.shape[2])

    def powers(*shape: int) -> list[bool]:
        with FakeTensorMode():
            x = torch.empty(shape)
        found = loops(program_of(biased, x))
        return ["pow" in (v.op for v in loop.body if isinstance(v, Apply)) for loop in found]

    assert powers(16, 512, 1024) == ([True, False] if many_threads else [True])
    assert powers(16, 512, 64) == [True], "few readers take less time than another kernel"
    assert powers(16, 8, 65536) == [True], "a table that is hardly smaller costs its bytes"
