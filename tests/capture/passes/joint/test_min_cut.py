"""Cuts are networkx's, node by node."""

from __future__ import annotations

import math
import random

import networkx
import pytest

from dcompile.capture.passes.joint.min_cut import minimum_cut


def random_graph(seed: int) -> networkx.DiGraph:
    """In the manner of the partitioner: nodes in halves, joined by what may be cut; other edges mostly cannot be."""
    draw = random.Random(seed)
    graph = networkx.DiGraph()
    count = draw.randint(1, 30)
    for n in range(count):
        graph.add_edge(f"{n}_in", f"{n}_out", capacity=draw.choice([1, 2, 2, 3, 5, 8.0, math.inf]))
        for later in range(n + 1, min(n + 6, count)):
            if draw.random() < 0.4:
                graph.add_edge(f"{n}_out", f"{later}_in", **({"capacity": math.inf} if draw.random() < 0.8 else {}))
        if draw.random() < 0.3:
            graph.add_edge("source", f"{n}_in", capacity=math.inf)
        if draw.random() < 0.3:
            graph.add_edge(f"{n}_out", "sink", capacity=draw.choice([math.inf, 4]))
    graph.add_nodes_from(("source", "sink"))
    return graph


@pytest.mark.parametrize("seed", range(200))
def test_the_same_cut_as_networkx(seed):
    graph = random_graph(seed)
    try:
        value, (near, far) = networkx.minimum_cut(graph, "source", "sink")
    except networkx.NetworkXUnbounded:
        with pytest.raises(networkx.NetworkXUnbounded):
            minimum_cut(graph, "source", "sink", networkx.minimum_cut)
        return
    found, (mine, theirs) = minimum_cut(graph, "source", "sink", lambda *_: pytest.fail("there is a finite cut"))
    assert (found, mine, theirs) == (value, near, far)


def test_both_kinds_of_graph_occur():
    finite = 0
    for seed in range(200):
        try:
            value, _ = networkx.minimum_cut(random_graph(seed), "source", "sink")
        except networkx.NetworkXUnbounded:
            continue
        finite += value > 0
    assert 20 < finite < 180
