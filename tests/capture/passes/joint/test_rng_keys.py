"""Keys of random operations: one for each graph that draws, which alone is saved for the backward."""

import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_function, make_boxed_func

from dcompile.capture.joint_graph import partition_joint
from dcompile.capture.passes.joint.rng_keys import assign_rng_keys
from dcompile.codegen.lower import registry
from dcompile.codegen.lower.decompositions.table import table


def layers(x, w):
    for _ in range(3):
        x = F.dropout(torch.relu(x @ w), 0.4)
    return x.sum()


def partitioned(function, *args, keys=True):
    """(forward, backward) of a function, as capture cuts it."""
    graphs = []

    def keep(gm, _):
        graphs.append(gm)
        return make_boxed_func(gm)

    def cut(joint, *args, **keywords):
        assign_rng_keys(joint)
        return partition_joint(joint, *args, carries_sync=False, fusible=registry.fusible_ops(), **keywords)

    run = aot_function(function, keep, keep, partition_fn=cut, decompositions=table(fallback_random=not keys))
    run(*args).backward()
    return graphs


def test_a_forward_saves_its_key_and_no_mask():
    args = torch.randn(8, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    forward, backward = partitioned(layers, *args)
    saved = [node.meta["val"] for node in forward.graph.output_node().args[0][1:]]
    assert [tuple(v.shape) for v in saved if v.dtype == torch.int64] == [(1,)]
    drawn = [n for n in backward.graph.nodes if "dcompile_random" in str(n.target)]
    assert len(drawn) == 3 and sorted(n.kwargs["draw"] for n in drawn) == [0, 1, 2]
    assert sum(n.target is torch.ops.aten.randint.low for n in (*forward.graph.nodes, *backward.graph.nodes)) == 1
    assert not [v for v in saved if v.dtype == torch.bool]
    forward, _ = partitioned(layers, *args, keys=False)
    assert sum(n.meta["val"].dtype == torch.bool for n in forward.graph.output_node().args[0]) == 3


def test_a_graph_without_random_numbers_stays_as_it_is():
    gm = torch.fx.symbolic_trace(lambda x: x * 2)
    before = str(gm.graph)
    assert not assign_rng_keys(gm).changes and str(gm.graph) == before


def test_a_key_that_is_given_by_place_stays():
    graph = torch.fx.Graph()
    key = graph.placeholder("key")
    drawn = graph.call_function(torch.ops.dcompile_random.less.default, ([4], 0.5, torch.device("cpu"), key, 3))
    graph.output((drawn,))
    assert not assign_rng_keys(torch.fx.GraphModule({}, graph)).changes and drawn.args[3] is key
