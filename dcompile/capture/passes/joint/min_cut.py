"""Minimum cut between the values that a forward computes and those that its backward needs, for torch's partitioner.

torch uses networkx, whose push-relabel in Python took a fifth of a warm start of 32 Llama layers. In the partitioner's
graphs most edges have infinite capacity, so the side of most nodes is known. The rest falls into small components.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

Partition = tuple[set[Any], set[Any]]
SOURCE_SIDE, SINK_SIDE = 0, 1
"""Numbers of all nodes that no finite cut separates from the source, and from the sink."""


def minimum_cut(graph: Any, source: Any, sink: Any, otherwise: Callable[..., Any]) -> tuple[float, Partition]:
    """Return `networkx.minimum_cut(graph, source, sink)`: (value, (nodes on the source's side, nodes on the sink's)).

    Of several minimum cuts it returns the one nearest the sink, as networkx does. The sink's side has all nodes from
    which the residual graph reaches the sink. That set is the same for every maximum flow (Ford and Fulkerson). The
    flow is found by Dinic's algorithm (1970). An edge without a capacity cannot be cut. If no finite cut exists, the
    result is that of `otherwise`.
    """
    near = _closure(source, lambda node: (v for v, data in graph.succ[node].items() if _capacity(data) == inf))
    far = _closure(sink, lambda node: (u for u, data in graph.pred[node].items() if _capacity(data) == inf))
    if not near.isdisjoint(far):
        return otherwise(graph, source, sink)  # type: ignore[no-any-return]
    number: dict[Any, int] = {**dict.fromkeys(near, SOURCE_SIDE), **dict.fromkeys(far, SINK_SIDE)}
    for node in graph:
        number.setdefault(node, len(number) - len(near) - len(far) + 2)
    between: dict[tuple[int, int], float] = {}
    for u, v, data in graph.edges(data=True):
        pair = number[u], number[v]
        if pair[0] != pair[1] and pair[0] != SINK_SIDE and pair[1] != SOURCE_SIDE:
            between[pair] = between.get(pair, 0) + _capacity(data)
    flow = _Flow(len(number) - len(near) - len(far) + 2, between)
    value = flow.most()
    reaching = flow.reaching_the_sink()
    there = {node for node in graph if reaching[number[node]]}
    return value, (set(graph) - there, there)


def _capacity(data: dict[str, Any]) -> float:
    return data.get("capacity", inf)  # type: ignore[no-any-return]


def _closure(start: Any, after: Callable[[Any], Any]) -> set[Any]:
    found, waiting = {start}, [start]
    while waiting:
        new = [node for node in after(waiting.pop()) if node not in found]
        found.update(new)
        waiting += new
    return found


class _Flow:
    """A flow network with residual capacities; edge k ^ 1 is the reverse of edge k."""

    def __init__(self, nodes: int, between: dict[tuple[int, int], float]) -> None:
        self.edges: list[list[int]] = [[] for _ in range(nodes)]
        self.ends: list[int] = []
        self.left: list[float] = []
        for (u, v), capacity in between.items():
            for start, end, left in ((u, v, capacity), (v, u, 0)):
                self.edges[start].append(len(self.ends))
                self.ends.append(end)
                self.left.append(left)

    def most(self) -> float:
        """Find a maximum flow, along shortest paths whose length grows from phase to phase; return its value."""
        total: float = 0
        while (level := self._levels())[SINK_SIDE] >= 0:
            turn = [0] * len(self.edges)
            while sent := self._send(level, turn):
                total += sent
        return total

    def _levels(self) -> list[int]:
        level = [-1] * len(self.edges)
        level[SOURCE_SIDE] = 0
        row = [SOURCE_SIDE]
        while row and level[SINK_SIDE] < 0:
            following = []
            for node in row:
                for k in self.edges[node]:
                    end = self.ends[k]
                    if level[end] < 0 and self.left[k]:
                        level[end] = level[node] + 1
                        following.append(end)
            row = following
        return level

    def _send(self, level: list[int], turn: list[int]) -> float:
        """Send flow along one shortest path; return its amount, 0 if there is no path.

        `turn`: for each node, the number of its edges that are exhausted in this phase.
        """
        path: list[int] = []
        node = SOURCE_SIDE
        while node != SINK_SIDE:
            edges = self.edges[node]
            while turn[node] < len(edges):
                k = edges[turn[node]]
                if self.left[k] and level[self.ends[k]] == level[node] + 1:
                    break
                turn[node] += 1
            if turn[node] < len(edges):
                path.append(k)
                node = self.ends[k]
            elif path:
                node = self.ends[path.pop() ^ 1]
                turn[node] += 1
            else:
                return 0
        sent = min(self.left[k] for k in path)
        for k in path:
            self.left[k] -= sent
            self.left[k ^ 1] += sent
        return sent

    def reaching_the_sink(self) -> list[bool]:
        """Return for each node whether the residual graph reaches the sink from it."""
        found = [False] * len(self.edges)
        found[SINK_SIDE] = True
        waiting = [SINK_SIDE]
        while waiting:
            for k in self.edges[waiting.pop()]:
                if self.left[k ^ 1] and not found[self.ends[k]]:
                    found[self.ends[k]] = True
                    waiting.append(self.ends[k])
        return found
