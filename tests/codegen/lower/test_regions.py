"""Where a graph is cut for another compiler, and that what comes of it computes the same."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.compiler.compute_regions import Region, RegionPlan, can_compile_in_region, with_calls
from dcompile.kernel_backends.compile_region import RegionCall


def cut(function, *inputs, gathers=None, reductions=None) -> tuple[RegionPlan, list[Region]]:
    """The regions of a function as `make_fx` traces it."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    plan = RegionPlan(gm, lambda node: can_compile_in_region(node, False))
    return plan, plan.regions((gathers or {}, reductions or {}))


def check(plan: RegionPlan, regions: list[Region], inputs, left: tuple[int, ...] = ()) -> list[str]:
    """Run the graph with calls in place of its regions but those `left`; compare, and return its calls in order."""
    calls = {}
    for region in regions:
        if region.number not in left:
            values = [node.meta["val"] for node in region.outputs]
            layouts = [(tuple(v.shape), tuple(v.stride()), v.dtype) for v in values]

            def run(given, graph=region.graph):
                return graph(*given)

            calls[region.number] = RegionCall(region.number, "eager", run, layouts, "")
    made = with_calls(plan, regions, calls)
    made.graph.lint()
    for node in made.graph.nodes:
        if isinstance(node.target, RegionCall):  # programs give a list
            node.args = (list(node.args),)
    made.recompile()
    expected = plan.gm(*(value.clone() for value in inputs))
    got = made(*(value.clone() for value in inputs))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, expected, strict=True))
    names = (getattr(node.target, "__name__", str(node.target)) for node in made.graph.nodes)
    return [name.removeprefix("dcompile_") for name in names if name.startswith("dcompile_region") or "_c10d" in name]


def ops(region: Region) -> list[str]:
    return [str(node.target).split(".")[1] for node in region.nodes if "." in str(node.target)]


def matrices(count: int) -> list[torch.Tensor]:
    return [torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in range(count)]


def test_graph_without_collectives_is_one_region_with_its_views() -> None:
    def f(x, w):
        values, places = (x @ w.t()).relu().t().max(0)
        return values.view(2, 2), places, w.t()

    inputs = matrices(2)
    plan, regions = cut(f, *inputs)
    (region,) = regions
    assert [node.name for node in region.inputs] == [node.name for node in plan.inputs]
    assert ops(region) == ["mm", "relu", "max"]
    assert check(plan, regions, inputs) == ["region0"]
    assert check(plan, regions, inputs, left=(0,)) == []


def backward(dy, saved1, saved2, w1, w2):
    """Two layers, last one first: (gradients of w2, of w1, of x); `saved` are recomputed."""
    h2, h1 = saved2.sigmoid(), saved1.sigmoid()
    d = dy * h2
    g2, d = h2.t() @ d, d @ w2.t()
    d = d * h1
    return g2, h1.t() @ d, d @ w1.t()


def counts(regions: list[Region]) -> list[tuple[int, int]]:
    """(products, recomputed values) of each region."""
    return [(ops(region).count("mm"), ops(region).count("sigmoid")) for region in regions]


def test_region_ends_where_a_reduction_can_start() -> None:
    inputs = matrices(5)
    plan, regions = cut(backward, *inputs, reductions={0: 0, 1: 1})
    assert counts(regions) == [(1, 1), (2, 1), (1, 0)]  # what comes behind the last start runs beside it
    assert check(plan, regions, inputs) == ["region0", "region1", "region2"]
    assert check(plan, regions, inputs, left=(1,)) == ["region0", "region2"]


def test_gradients_reduced_together_are_one_region() -> None:
    plan, regions = cut(backward, *matrices(5), reductions={0: 0, 1: 0})
    assert counts(regions) == [(3, 2), (1, 0)]
    assert check(plan, regions, matrices(5)) == ["region0", "region1"]


def test_region_waits_for_one_gather_and_recomputes_late() -> None:
    """w2 comes first, then w1. What the first layer recomputes is not at the start, where it would be kept."""
    inputs = matrices(5)
    plan, regions = cut(backward, *inputs, gathers={4: 1, 3: 2}, reductions={0: 0, 1: 1})
    assert counts(regions) == [(1, 1), (2, 1), (1, 0)]
    assert check(plan, regions, inputs) == ["region0", "region1", "region2"]


def norm_weight(dy, saved, w, x):
    """A layer whose weight is gathered: gradients of it and of a bias, which needs no gather, and of x."""
    d = dy * saved.sigmoid()
    return x.t() @ d, (d @ w.t() * x).sum(0), d @ w.t()


def test_gradients_of_one_reduction_come_with_the_last_one() -> None:
    inputs = matrices(4)
    plan, regions = cut(norm_weight, *inputs, gathers={2: 1}, reductions={0: 0, 1: 0})
    assert [ops(region).count("mm") for region in regions] == [2, 1]
    assert check(plan, regions, inputs) == ["region0", "region1"]


def test_forward_is_cut_at_each_gather() -> None:
    def f(x, w1, w2):
        y = (x @ w1).relu()
        return (y @ w2).relu(), y

    inputs = matrices(3)
    plan, regions = cut(f, *inputs, gathers={1: 1, 2: 2})
    assert [ops(region) for region in regions] == [["mm", "relu"], ["mm", "relu"]]
    assert check(plan, regions, inputs) == ["region0", "region1"]


def test_effects_stay_outside_and_keep_their_order() -> None:
    def f(x, running):
        noise = torch.rand_like(x)
        y = x.relu() + noise
        before = running * 2
        running.copy_(y.mean(0))
        return torch.rand_like(y) * y + before + running

    inputs = [torch.ones(4, 4), torch.zeros(4)]
    plan, regions = cut(f, *inputs)
    assert all("rand_like" not in ops(region) and "copy_" not in ops(region) for region in regions)
    gm = with_calls(plan, regions, {})
    torch.manual_seed(0)
    expected = f(*(value.clone() for value in inputs))
    torch.manual_seed(0)
    assert torch.equal(gm(*(value.clone() for value in inputs)), expected)
    copies = [n for n, node in enumerate(gm.graph.nodes) if "copy_" in str(node.target)]
    draws = [n for n, node in enumerate(gm.graph.nodes) if "rand_like" in str(node.target)]
    assert len(copies) == 1 and draws[0] < copies[0] < draws[1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_is_handed_over_if_it_drops_nothing(dropout: float) -> None:
    def f(q):
        return torch.nn.functional.scaled_dot_product_attention(q.relu(), q, q, dropout_p=dropout).relu()

    _, regions = cut(f, torch.randn(1, 2, 8, 4))
    handed = any("attention" in name for region in regions for name in ops(region))
    assert handed == (dropout == 0) and len(regions) == (1 if handed else len(regions))
