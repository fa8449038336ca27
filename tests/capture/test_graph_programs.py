"""What runs around the programs of one graph: with a compiler, a strategy and process groups that are made up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import dcompile
from dcompile.capture.capture_digest import own_collectives
from dcompile.capture.captured_graph import CapturedGraph
from dcompile.capture.dynamo_backend import RUN, Backend
from dcompile.capture.graph_programs import (
    BATCHED_GRADIENTS,
    BATCHED_NOTE,
    NEGATIVE_GRADIENTS,
    WHOLE_BACKWARD,
    GraphPrograms,
    OpaqueObjects,
    describe_machine,
    remove_opaque_objects,
    without_opaque_objects,
)
from dcompile.collectives.contract import BucketRule, ParamInfo, Shard
from dcompile.errors import DcompileError
from dcompile.ir.buffers import Bucket
from dcompile.machine_model import CPU, GroupSize
from tests.capture.made_up import MadeUp, MadeUpAdapter, made_up


def compiled(made: MadeUp, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its graphs compiled for this model."""

    def backend(gm: Any, inputs: Any) -> Any:
        return Backend(made.model)(gm, inputs)

    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)


def requests(made: MadeUp) -> list[str]:
    return [request.name for request in made.compiler.requests]


def sine(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).sin()


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 4))


X = torch.arange(4.0)


# --- plain graphs ---


def test_an_inference_graph_is_one_program_and_a_kind_of_call():
    made = made_up()
    function = compiled(made, lambda x: [x.sin(), x + 1])
    for _ in range(2):
        torch.testing.assert_close(function(X), [X.sin(), X + 1])
    (request,) = made.compiler.requests
    assert (request.name, request.kind, request.results, request.grads) == ("inference0", "inference", 2, ())
    assert made.model.newest.graphs == (0,) and not made.model.newest.training
    assert [graph.training for graph in made.model.graphs] == [False]


def test_a_backward_is_compiled_at_its_first_call_as_was_foreseen():
    made = made_up()
    function, w = compiled(made, sine), weight()
    y = function(X, w)
    assert requests(made) == ["forward0"] and made.model.graphs[0].training
    torch.testing.assert_close(torch.autograd.grad(y.sum(), w)[0], X * torch.cos(X * w))
    assert requests(made) == ["forward0", "backward0"]
    ((_, foreseen),) = made.compiler.foreseen
    backward = made.compiler.requests[1]
    assert foreseen == backward and backward.kind == "backward"
    inputs = made.compiler.modules[1].graph.find_nodes(op="placeholder")
    assert len(backward.saved) == len(inputs) - 1, "all but the gradient that comes in"
    assert made.sync.asked == ["before backward 0, sync False", "backward, sync 0, without []"]
    torch.autograd.grad(function(X, w).sum(), w)
    assert len(made.sync.asked) == 2, "all that is asked was answered for good"


def test_gradients_that_are_marked_as_negative_or_a_batch_are_counted():
    made = made_up()
    function, w = compiled(made, sine), weight()
    y = function(X, w)
    exact = X * torch.cos(X * w)
    (found,) = torch.autograd.grad(y, w, torch._neg_view(torch.ones(4)), retain_graph=True)
    torch.testing.assert_close(found, -exact)
    (found,) = torch.autograd.grad(y, w, torch.eye(4), is_grads_batched=True)
    torch.testing.assert_close(found, torch.diag(exact))
    (graph,) = made.model.graphs
    assert graph.fallbacks == {NEGATIVE_GRADIENTS: 1, BATCHED_GRADIENTS: 1} and graph.notes == [BATCHED_NOTE]


def two(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * v).sin(), (x * w).cos()


def test_a_program_does_without_gradients_that_the_first_backward_lacks_until_they_come():
    made = made_up()
    function, v, w = compiled(made, two), weight(), weight()
    first, _ = function(X, v, w)
    first.sum().backward()
    torch.testing.assert_close(v.grad, X * torch.cos(X * v))
    assert w.grad is None and requests(made) == ["forward0", "backward0"]
    lacking = len(made.compiler.modules[1].graph.find_nodes(op="placeholder"))
    first, second = function(X, v, w)
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(v.grad, 2 * X * torch.cos(X * v))
    torch.testing.assert_close(w.grad, -X * torch.sin(X * w))
    assert requests(made)[2:] == [f"{WHOLE_BACKWARD}0"]
    assert len(made.compiler.modules[2].graph.find_nodes(op="placeholder")) > lacking
    _, second = function(X, v, w)
    second.sum().backward()
    assert len(requests(made)) == 3, "the program that takes all serves every such call"
    torch.testing.assert_close(w.grad, -2 * X * torch.sin(X * w))


# --- gradients that are reduced ---


def test_a_token_tells_the_backward_to_reduce_and_buckets_are_made_once():
    w = weight()
    adapter = MadeUpAdapter(w)
    adapter.carries_sync = adapter.synchronizes = True
    adapter.rule = BucketRule(1 << 20, 1 << 20)
    made = made_up(adapter)
    made.sync.buckets = ()
    function = compiled(made, sine)
    buckets: list[Any] = []
    made.sync.make_buckets = lambda found: buckets.append(found) or SimpleNamespace()  # type: ignore[assignment, func-returns-value]
    for token in (1, 0, 2):
        made.sync.tokens[:] = [torch.tensor(token)]
        (found,) = torch.autograd.grad(function(X, w).sum(), w)
        torch.testing.assert_close(found, X * torch.cos(X * w))
    backward = made.compiler.requests[1]
    assert backward.grads == ((backward.grads[0][0], 0),) and backward.params == adapter.infos
    assert backward.rule == adapter.rule and len(requests(made)) == 2
    assert [len(found) for found in buckets] == [1], "one bucket, made with the program"
    asked = [asked for asked in made.sync.asked if asked.startswith("backward")]
    assert asked == [f"backward, sync {token}, without []" for token in (1, 0, 2)]
    assert made.compiler.foreseen == [None], "ranks agree on it first"
    assert [*made.model.graphs[0].params.values()] == [0]


def test_a_backward_that_waits_to_be_told_reduces_where_the_adapter_is_prepared():
    adapter = MadeUpAdapter()
    programs = GraphPrograms(CapturedGraph(made_up(adapter).model, [], RUN))
    assert [programs.syncs(token) for token in (1, 2, 0, -2)] == [1, 2, 0, 0]
    adapter.prepared = True
    assert [programs.syncs(token) for token in (1, 2, 0, -2)] == [1, 2, 1, 2]


# --- sharded parameters ---


def sharded(number: int, unit: int, *, reshard: bool) -> ParamInfo:
    return ParamInfo(
        number,
        f"p{number}",
        (4,),
        "float32",
        "cpu",
        "sharded",
        "fsdp0",
        Shard(unit, 0, 0, 8, "float32", reshard=reshard),
    )


def test_a_program_gathers_what_it_reads_and_a_backward_only_what_was_not_kept():
    adapter = MadeUpAdapter(*(torch.nn.Parameter(torch.zeros(4)) for _ in range(3)))
    adapter.infos = (sharded(0, 5, reshard=True), sharded(1, 6, reshard=False), sharded(2, 6, reshard=True))
    graph = CapturedGraph(made_up(adapter).model, [adapter.parameters[0], X, adapter.parameters[1]], RUN)
    assert graph.params == {0: 0, 2: 1} and not graph.gathers
    graph.sharded, graph.grads = {"a": 0, "c": 1}, ((0, 2),)
    gm = torch.fx.symbolic_trace(lambda a, b, c: a + b + c)
    programs = GraphPrograms(graph)
    forward, backward = programs.request(gm, "forward"), programs.request(gm, "backward")
    assert graph.gathers and forward.gathers == ((0, 0), (2, 1)) and forward.params == adapter.infos[:2]
    assert backward.gathers == ((0, 0),) and backward.grads == ((0, 2),)
    assert backward.params == (adapter.infos[0], adapter.infos[2])
    assert adapter.units_of([2]) == {6} and adapter.units_of([0, 1]) == {5, 6}


# --- process groups ---


@pytest.fixture
def ranks() -> Iterator[None]:
    """Four ranks, of which the others do nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def reducing(group: str, *kinds: str) -> torch.fx.GraphModule:
    """A graph with so many all-reduces over a group."""
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    for kind in kinds:
        value = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (value, kind, group))
        value = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (value,))
    graph.output((value,))
    return torch.fx.GraphModule({}, graph)


def test_the_cost_model_is_told_of_all_groups_and_which_share_a_communicator(ranks):
    whole, pair = dist.group.WORLD, dist.new_group([0, 1])
    adapter = MadeUpAdapter(groups={"ddp": whole, "again": whole, "pair": pair})
    adapter.replicas = lambda: {"pair": 2}  # type: ignore[method-assign]
    graph = CapturedGraph(made_up(adapter, overlap_mb=3).model, [], RUN)
    told = describe_machine(graph.model, reducing(pair.group_name, "sum"), graph.device, adapter.communicators(), set())
    assert told["figures"] is CPU and told["early_bytes"] == 3 << 20
    assert told["groups"] == (
        ("ddp", GroupSize(4, "ddp")), ("again", GroupSize(4, "ddp")), ("pair", GroupSize(2, "pair", 2)),
        ("own0", GroupSize(2, "pair")),
    )  # fmt: skip


def test_the_models_own_collectives_are_compared_before_they_start(ranks):
    made = made_up()
    graph = CapturedGraph(made.model, [X], RUN)
    pair = dist.new_group([0, 1])
    gm = reducing(pair.group_name, "sum", "avg")
    assert list(own_collectives(gm)) == [
        (pair.group_name, "all_reduce sum over 2 ranks"), (pair.group_name, "all_reduce avg over 2 ranks"),
    ]  # fmt: skip
    programs = GraphPrograms(graph)
    run = programs.gathering(programs.build(gm, "inference"))
    assert graph.has_own_collectives("inference") and made.agreed == []
    for _ in range(2):
        torch.testing.assert_close(run([X]), [X])
    lines = ["all_reduce sum over 2 ranks", "all_reduce avg over 2 ranks"]
    assert made.agreed == [(pair, "model collectives plan 1", lines)] and graph.plan("inference") == lines


def test_captures_are_compared_first_and_buckets_are_part_of_the_plan():
    adapter = MadeUpAdapter(torch.zeros(4), groups={"fsdp0": "group"})
    adapter.compares_in_forward = True
    made = made_up(adapter)
    graph = CapturedGraph(made.model, [], RUN)
    bucket = Bucket("b0", "float32", "cpu", "fsdp0", (0,), ("g",), (0,), 4)
    graph.executables["forward"] = SimpleNamespace(buckets=(bucket,))  # type: ignore[assignment]
    graph.note_own_collectives("forward", reducing("0"))
    graph.captured = [("mul", "model.py:1")]
    graph.agree("forward")
    graph.agree("forward")
    assert [subject for _, subject, _ in made.agreed] == ["captured graphs", "collectives plan 1"]
    assert made.agreed[1][2] == ["all_reduce b0 float32 4 elements of fsdp0: p0[4]"] and graph.captured == []


def test_the_shards_of_groups_that_could_be_copied_say_why_they_are_not(ranks):
    adapter = MadeUpAdapter(groups={"a": dist.group.WORLD, "b": dist.group.WORLD})
    made = made_up(adapter)
    made.model.sync.shards = SimpleNamespace(copied=lambda name: (True, "") if name == "a" else (False, "another node"))  # type: ignore[assignment]
    graph = CapturedGraph(made.model, [], RUN)
    request = GraphPrograms(graph).request(reducing("0"), "forward")
    assert [group.copies for _, group in request.groups] == [True, False]
    assert graph.notes == ["shards are gathered by collectives, not copied: another node"]


def test_a_graph_with_an_input_on_a_gpu_is_that_gpus():
    model = made_up().model
    meta = torch.empty(2, device="meta")
    assert CapturedGraph(model, [X, 3], RUN).device == torch.device("cpu")
    assert CapturedGraph(model, [X, meta], RUN).device == torch.device("meta")
    assert [graph.number for graph in model.graphs] == [0, 1]


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """Kernels of ours run here, as they read memory that a batch does not have."""
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")
    torch._dynamo.reset()


class Network(nn.Module):
    """Two results, a view among what is saved, and dropout, whose mask all gradients share."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.p = p

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = nn.functional.dropout(nn.functional.gelu(self.norm(self.first(x))), self.p)
        return self.second(hidden), hidden.t().exp()


def batched(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    result = model(x)[0]
    units = torch.eye(result.numel()).view(-1, *result.shape)
    wanted = [x, *model.first.parameters(), *model.second.parameters()]
    return [*torch.autograd.grad(result, wanted, units, is_grads_batched=True)]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_batched_gradients_are_eagers(trained, dynamic):
    torch.manual_seed(0)
    eager = Network()
    model = dcompile.compile(copy.deepcopy(eager), dynamic=dynamic)
    x = torch.randn(4, 6, requires_grad=True)
    if trained:  # the program is there already
        for network in (eager, model):
            network(x)[0].sum().backward()
    torch.testing.assert_close(batched(model, x), batched(eager, x))
    for network in (eager, model):  # and goes on to serve
        network.zero_grad()
        network(x)[0].square().sum().backward()
    torch.testing.assert_close([*model.parameters()], [*eager.parameters()])
    for own, stock in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, stock.grad)
    receipt = dcompile.receipt(model)
    assert any("batched gradients" in note for note in receipt.notes)
    assert receipt.fallbacks["backward of batched gradients"] == 1
    batched(model, x)
    assert dcompile.receipt(model).fallbacks["backward of batched gradients"] == 2


def test_a_batch_is_what_its_gradients_are_one_by_one():
    """Dropout's mask is computed again from its key in each of them."""
    torch.manual_seed(0)
    model, x = dcompile.compile(Network(0.5)), torch.randn(4, 6, requires_grad=True)
    result = model(x)[0]
    units = torch.eye(result.numel()).view(-1, *result.shape)
    single = [torch.autograd.grad(result, x, unit, retain_graph=True)[0] for unit in units]
    (together,) = torch.autograd.grad(result, x, units, is_grads_batched=True)
    torch.testing.assert_close(together, torch.stack(single))


def test_jacobians_by_vmap():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model, x = dcompile.compile(copy.deepcopy(eager)), torch.randn(4, 6)
    model(x).sum().backward()
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(model, x, vectorize=True), jacobian(eager, x))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_reduces_none_of_them(one_rank):
    torch.manual_seed(0)
    eager = Network()
    model = dcompile.compile(DistributedDataParallel(copy.deepcopy(eager)))
    x = torch.randn(4, 6, requires_grad=True)
    units = torch.eye(12).view(12, 4, 3)
    for _ in range(2):
        own, stock = (torch.autograd.grad(network(x)[0], x, units, is_grads_batched=True) for network in (model, eager))
        torch.testing.assert_close(own, stock)
        assert all(parameter.grad is None for parameter in model.parameters())
        model(x)[0].sum().backward()
        model.zero_grad()


def test_with_sharded_parameters_the_error_says_what_to_do(one_rank):
    torch.manual_seed(0)
    model = dcompile.compile(fully_shard(Network(), mesh=init_device_mesh("cpu", (1,))))  # not on a GPU that is there
    x = torch.randn(4, 6, requires_grad=True)
    model(x)[0].sum().backward()
    with pytest.raises(DcompileError, match="one by one"):
        torch.autograd.grad(model(x)[0], x, torch.eye(12).view(12, 4, 3), is_grads_batched=True)


def traced(*, taken=False):
    """a, mesh, b, group -> a + b, mesh, None, a, mesh; with `taken`, an operation is given the group."""
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("a", "mesh", "b", "group")}
    for name, node in nodes.items():
        opaque = name in ("mesh", "group")
        node.meta["val"] = FakeScriptObject(object(), name, None) if opaque else torch.empty(2)
    total = graph.call_function(torch.ops.aten.add.Tensor, (nodes["a"], nodes["b"]))
    total.meta["val"] = torch.empty(2)
    if taken:
        graph.call_function(print, (nodes["group"],))
    graph.output((total, nodes["mesh"], None, nodes["a"], nodes["mesh"]))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_a_graph_is_left_with_tensors_alone():
    gm = traced()
    removed = remove_opaque_objects(gm)
    assert removed == OpaqueObjects((1, 3), ((1, 0), (4, 0)))
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")] == ["a", "b"]
    total, nothing, a = gm.graph.output_node().args[0]
    assert (total.op, nothing, a.name) == ("call_function", None, "a")
    gm.graph.lint()


def test_the_caller_sees_them_where_they_were():
    gm = traced()
    removed, given = remove_opaque_objects(gm), []

    def program(args):
        given.extend(args)
        args.clear()
        return list(gm(*given))

    a, b, mesh, group = torch.ones(2), torch.full((2,), 3.0), object(), object()
    args = [a, mesh, b, group]
    results = removed.around(program)(args)
    assert not args and given[0] is a and given[1] is b and len(given) == 2
    assert results[0].tolist() == [4, 4]
    assert results[1] is mesh and results[2] is None and results[3] is a and results[4] is mesh


def test_positions_are_those_of_what_is_left():
    removed = remove_opaque_objects(traced())
    assert [removed.input_place(position) for position in (0, 2)] == [0, 1]
    assert removed.result_places([0, 1, 2, 3, 4]) == (0, 1, 2)
    assert removed.views({3: 0, 4: 1}) == {2: 0}, "a result that is an object is no view"


def test_what_an_operation_takes_stays():
    gm = traced(taken=True)
    assert remove_opaque_objects(gm).inputs == (1,)
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")] == ["a", "b", "group"]


def test_a_copy_is_made_only_of_graphs_that_have_some():
    gm = traced()
    copy = without_opaque_objects(gm)
    assert len(gm.graph.find_nodes(op="placeholder")) == 4 and len(copy.graph.find_nodes(op="placeholder")) == 2
    assert without_opaque_objects(copy) is copy


def test_a_program_of_tensors_alone_is_called_as_it_is():
    assert OpaqueObjects().around(len) is len
