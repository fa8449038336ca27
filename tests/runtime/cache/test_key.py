"""What tells graphs apart in the cache, and what must not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.collectives.contract import BucketRule, ParamInfo, Request, Shard
from dcompile.config import Config
from dcompile.machine_model import GroupSize
from dcompile.runtime.cache import key as module
from dcompile.runtime.cache.key import (
    NotCacheable,
    device_numbers,
    graph_key,
    group_names,
    with_groups,
    with_numbers,
    without_groups,
    without_numbers,
)

PARAMS = tuple(ParamInfo(n, f"layer.{n}.weight", (4, 8), "float32", "cpu") for n in range(2))
REQUEST = Request("backward0", "backward", ((0, 0), (1, 1)), PARAMS, BucketRule(1024, 4096))


def body(x, y):
    return (x * 2.0 + y).sum(-1), x.to(torch.float64)


def traced(function=body, x=None, y=None):
    x = torch.zeros(4, 8) if x is None else x
    return make_fx(function, tracing_mode="fake")(x, torch.zeros(4, 8) if y is None else y)


def key(gm=None, request=REQUEST, config=None):
    return graph_key(traced() if gm is None else gm, request, config or Config())


def test_the_same_graph_has_the_same_key_traced_twice():
    assert key() == key(traced())


def traced_symbolic(rows, columns, function=body):
    return make_fx(function, tracing_mode="symbolic")(torch.zeros(rows, columns), torch.zeros(rows, columns))


def test_sizes_met_while_tracing_are_not_in_the_key_of_a_symbolic_graph():
    assert key(traced_symbolic(4, 8)) == key(traced_symbolic(5, 9)) != key()


def test_what_is_known_of_a_size_is_in_the_key(monkeypatch):
    known = key(traced_symbolic(4, 8))
    monkeypatch.setattr(module.compat.sizes, "known_divisor", lambda shape_env, symbol: 2)
    assert key(traced_symbolic(4, 8)) != known
    monkeypatch.undo()
    monkeypatch.setattr(module.compat.sizes, "least_value", lambda shape_env, symbol: 0)
    assert key(traced_symbolic(4, 8)) != known


def test_where_an_input_lies_in_its_storage_is_in_the_key_of_what_counts_from_there():
    def counting(x, y):
        return x.as_strided((2,), (1,), 1), y

    parts = [torch.zeros(6, 8)[start : start + 4] for start in (0, 1, 2)]
    assert len({key(traced(counting, x)) for x in (torch.zeros(4, 8), *parts)}) == 4
    assert len({key(traced(lambda x, y: (x.as_strided((2,), (1,)), y), x)) for x in parts}) == 1


OTHER_GRAPHS = {
    "shape": lambda: traced(x=torch.zeros(5, 8), y=torch.zeros(5, 8)),
    "dtype": lambda: traced(x=torch.zeros(4, 8, dtype=torch.float16)),
    "strides": lambda: traced(x=torch.zeros(8, 4).t()),
    "a number": lambda: traced(lambda x, y: ((x * 3.0 + y).sum(-1), x.to(torch.float64))),
    "a number of another type": lambda: traced(lambda x, y: ((x * 2 + y).sum(-1), x.to(torch.float64))),
    "the sign of zero": lambda: traced(lambda x, y: ((x * -0.0 + y).sum(-1), x.to(torch.float64))),
    "an op": lambda: traced(lambda x, y: ((x * 2.0 - y).sum(-1), x.to(torch.float64))),
    "a dim": lambda: traced(lambda x, y: ((x * 2.0 + y).sum(-2), x.to(torch.float64))),
    "a dtype argument": lambda: traced(lambda x, y: ((x * 2.0 + y).sum(-1), x.to(torch.float16))),
    "the order of outputs": lambda: traced(lambda x, y: body(x, y)[::-1]),
    "an operand": lambda: traced(lambda x, y: ((x * 2.0 + x).sum(-1), x.to(torch.float64))),
}


def test_whatever_changes_the_code_changes_the_key():
    keys = {name: key(make()) for name, make in OTHER_GRAPHS.items()}
    assert key() not in keys.values() and len(set(keys.values())) == len(keys)


def test_the_sign_of_zero_and_not_a_number_are_told_apart():
    def times(value):
        return lambda x, y: (x * value,)

    values = (0.0, -0.0, float("nan"), float("inf"), 0, False)
    assert len({key(traced(times(value))) for value in values}) == len(values)


@pytest.mark.parametrize(
    "change",
    [
        {"rule": BucketRule(1024, 8192)},
        {"rule": None},
        {"grads": ((0, 1), (1, 0))},
        {"kind": "inference"},
        {"params": (PARAMS[0], replace(PARAMS[1], shape=(8, 4)))},
        {"params": (PARAMS[0], replace(PARAMS[1], dtype="bfloat16"))},
        {"params": PARAMS[::-1]},
    ],
)
def test_the_request_is_part_of_the_key(change):
    assert key(request=replace(REQUEST, **change)) != key()


def test_the_number_of_ranks_is_part_of_the_key_of_a_program_with_collectives_alone():
    def among(ranks, **change):
        return key(request=replace(REQUEST, groups=(("ddp", GroupSize(ranks)),), **change))

    assert among(2) != among(1024) == among(1024)
    assert among(2, rule=None) == among(1024, rule=None)
    shard = Shard(unit=0, together=0, offset=0, numel=32, reduce_dtype="float32", reshard=True)
    sharded = (replace(PARAMS[0], kind="sharded", shard=shard), PARAMS[1])
    assert among(2, rule=None, params=sharded) != among(1024, rule=None, params=sharded)


def test_options_that_code_depends_on_are_part_of_the_key_and_others_are_not():
    assert key(config=Config(kernels="aten")) != key()
    assert key(config=Config(skip="fuse")) != key()
    assert key(config=Config(log="passes", receipt=False, cache_dir="/elsewhere")) == key()


@pytest.mark.parametrize(
    "name",
    [
        "cache_bytes", "compiler_stamp", "cpu_features", "openmp_library", "own_source", "own_version",
        "precision_settings",
    ],
)  # fmt: skip
def test_versions_and_settings_of_all_that_writes_code_are_part_of_the_key(monkeypatch, name):
    before = key()
    monkeypatch.setattr(module, name, lambda: "another")
    assert key() != before


def test_the_version_of_torch_is_part_of_the_key(monkeypatch):
    before = key()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert key() != before


def test_the_implementation_of_flash_attention_is_part_of_the_key(monkeypatch):
    before = key()
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    assert key() != before


def test_ranks_names_and_modules_are_not_part_of_the_key(monkeypatch):
    before = key()
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    gm = traced()
    for node in gm.graph.nodes:
        node.meta["nn_module_stack"] = {"": ("L['self'].other.layer", torch.nn.Linear)}
        node.meta["stack_trace"] = 'File "other.py", line 3, in forward'
    renamed = tuple(replace(param, fqn=f"other.{param.fqn}") for param in PARAMS)
    assert key(gm, replace(REQUEST, name="backward7", params=renamed)) == before


def test_values_of_constants_are_not_part_of_the_key_but_their_shapes_are():
    def holding(constant):
        gm = traced()
        gm.held = constant
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.get_attr("held")
        return gm

    with pytest.warns(UserWarning, match="get_attr|does not reference"):
        one, other, longer = (holding(torch.full((n,), v)) for n, v in ((3, 1.0), (3, 2.0), (4, 1.0)))
        two, three = (holding(torch.tensor(number)) for number in (2.0, 3.0))
    assert key(one) == key(other) != key(longer)
    assert key(two) != key(three), "a single number may be a part of kernels"
    with pytest.raises(NotCacheable, match="it holds a dict"), pytest.warns(UserWarning):
        key(holding({}))


def test_what_has_no_text_is_refused_by_name():
    def python(x, y):
        return x

    gm = traced()
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(python, next(iter(gm.graph.nodes)).args)
    with pytest.raises(NotCacheable, match="it calls <function"):
        key(gm)


def test_an_op_of_the_users_is_known_by_its_schema():
    def with_default(value):
        with torch.library._scoped_library("test_graph_key", "DEF") as library:
            library.define(f"scaled(Tensor x, float by={value}) -> Tensor")
            library.impl("scaled", lambda x, by=1.0: x * by, "CompositeExplicitAutograd")
            library.impl("scaled", lambda x, by=1.0: torch.empty_like(x), "Meta")
            return key(traced(lambda x, y: torch.ops.test_graph_key.scaled(x)))

    assert with_default(1.0) != with_default(2.0)


def on_device(*numbers):
    """A graph that names CUDA devices, as AOTAutograd writes it: it needs none to be looked at."""
    device = [torch.device("cuda", number) for number in numbers]
    value = torch.zeros(2)
    node = SimpleNamespace
    full = torch.ops.aten.full.default
    nodes = [
        node(op="call_function", name=f"f{n}", target=full, args=([2], n), kwargs={"device": d}, meta={"val": value})
        for n, d in enumerate(device)
    ]
    return SimpleNamespace(graph=SimpleNamespace(nodes=nodes))


def test_ranks_share_a_graph_whatever_their_devices_numbers():
    assert key(on_device(0, 0)) == key(on_device(3, 3))
    assert key(on_device(0, 1)) != key(on_device(1, 0)) != key(on_device(0, 0))
    source = "f0 = _op0([2], 0, device=torch.device('cuda:3'))"
    kept = without_numbers(source, device_numbers(on_device(3)))
    assert "cuda:3" not in kept
    assert with_numbers(kept, device_numbers(on_device(0))) == source.replace("3", "0")
    both = device_numbers(on_device(0, 1))
    assert both == {} and with_numbers(without_numbers(source, both), both) == source


def over_groups(*names, operation="sum"):
    """A graph that sums over process groups: none has to be there to look at it."""
    import torch.distributed._functional_collectives

    node, target = SimpleNamespace, torch.ops._c10d_functional.all_reduce.default
    nodes = [
        node(op="call_function", name=f"f{n}", target=target, args=(f"x{n}", operation, name), kwargs={}, meta={})
        for n, name in enumerate(names)
    ]
    return SimpleNamespace(graph=SimpleNamespace(nodes=nodes))


PROGRAM = """
    _op0 = entry(torch.ops._c10d_functional.all_reduce.default)
    _op1 = entry(torch.ops.aten.div.Tensor_mode)
    f0 = _op0(x0, 'sum', '3')
    f1 = _op0(x1, 'sum', '12')
    y = _op1(f0, f1, '3')
"""


def test_ranks_share_a_graph_whatever_their_groups_names():
    assert key(over_groups("3", "12")) == key(over_groups("4", "7"))
    assert key(over_groups("3", "3")) != key(over_groups("3", "12")) != key(over_groups("3", "12", operation="max"))
    kept = without_groups(PROGRAM, group_names(over_groups("3", "12")))
    assert "_op0(x0, 'sum', '*0')" in kept and "_op0(x1, 'sum', '*1')" in kept and "_op1(f0, f1, '3')" in kept
    assert with_groups(kept, group_names(over_groups("3", "12"))) == PROGRAM
    swapped = with_groups(kept, group_names(over_groups("12", "3")))
    assert "_op0(x0, 'sum', '12')" in swapped and "_op0(x1, 'sum', '3')" in swapped


def test_a_group_named_like_another_argument_keeps_its_name():
    assert group_names(over_groups("sum")) == {} and key(over_groups("sum")) != key(over_groups("3"))
