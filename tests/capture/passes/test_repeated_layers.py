"""Trace a few of the layers that repeat; the graph is that of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile import compat
from dcompile.capture import captured_graph as capture
from dcompile.capture.passes.repeated_layers import RepeatedLayers, repeated_layers, unfold


class Block(nn.Module):
    """Normalisation, a product and a residual, with a mask and a parameter that all blocks share."""

    def __init__(
        self, kind: Callable[[torch.Tensor], torch.Tensor] = torch.relu, dropout: float = 0.0, norm: Any = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.norm, self.up = norm(8), nn.Linear(8, 8)
        self.kind, self.dropout = kind, nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        hidden = self.kind(self.up(self.norm(x)).transpose(0, 1)).transpose(0, 1)
        return x + self.dropout(hidden + shared).masked_fill(mask, 0.0)


class Checkpointed(Block):
    """Is computed again in the backward."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, mask, shared, use_reentrant=False)  # type: ignore[no-any-return]


class Region(Block):
    """Is traced once by TorchDynamo."""

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor, mask: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return super().forward(x, mask, shared)


class Stack(nn.Module):
    """Blocks between an input and an output layer; a parameter of 8 numbers is used by each."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.shared = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.arange(8) == 5
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask, self.shared)
        return self.last(x).sum()


class WithoutFirst(Stack):
    """Begins with a block, whose input needs no gradient: the trace of that lacks some operations."""

    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.arange(8) == 5
        x = torch.cat([x, x], -1)
        for block in self.blocks:
            x = block(x, mask, self.shared)
        return self.last(x).sum()


class PairsCheckpointed(Stack):
    """Computes two blocks at a time again in the backward."""

    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.arange(8) == 5

        def pair(x: torch.Tensor, number: int) -> torch.Tensor:
            x = self.blocks[number](x, mask, self.shared)
            return self.blocks[number + 1](x, mask, self.shared)  # type: ignore[no-any-return]

        x = self.first(x)
        for number in range(0, len(self.blocks), 2):
            x = checkpoint(pair, x, number, use_reentrant=False)
        return self.last(x).sum()


class EachShown(Stack):
    """Returns what each block has computed, or all of that in one tensor."""

    def __init__(self, blocks: list[nn.Module], together: bool = False) -> None:
        super().__init__(blocks)
        self.together = together

    def forward(self, x: torch.Tensor) -> Any:
        """A sum of all, and each."""
        mask = torch.arange(8) == 5
        x = self.first(x)
        found = [x]
        for block in self.blocks:
            x = block(x, mask, self.shared)
            found.append(x)
        return (self.last(x).sum(), torch.stack(found)) if self.together else (self.last(x).sum(), *found)


class Counting(Block):
    """Counts its calls in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return x + self.up(x) * shared


class Folded(Block):
    """Computes on rows of half the length, of which there are twice as many as sequences in the batch."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        rows = torch.tanh(x.reshape(2 * x.shape[0], 4)) / x.shape[0]
        return super().forward(x + rows.reshape(x.shape), mask, shared)


def stack(count: int = 8, **how: Any) -> Stack:
    """Blocks of one kind."""
    return Stack([Block(**how) for _ in range(count)])


def tied() -> Stack:
    """Two blocks, one of them early and one late, share a parameter."""
    model = stack()
    model.blocks[5].up.weight = model.blocks[2].up.weight  # type: ignore[union-attr, assignment]
    return model


def text(gm: Any) -> Iterator[str]:
    """All of a traced graph but names: operations, arguments, values, who shares memory, where it comes from."""
    names: dict[Any, str] = {}
    memory: dict[int, int] = {}
    regions: dict[Any, int] = {}

    def shown(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [shown(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        lies = memory.setdefault(compat.tensors.storage_key(value), len(memory))
        size = value.untyped_storage().nbytes()
        return value.dtype, value.shape, value.stride(), value.storage_offset(), lies, size

    for node in gm.graph.nodes:
        names[node] = f"%{len(names)}"
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda a: slice(names[a]))
        stacks = [node.meta.get(name) or {} for name in ("nn_module_stack", "fwd_nn_module_stack")]
        paths = [[path for path, _ in found.values()] for found in stacks]
        region = node.meta.get("ac_graph_id")
        again = None if region is None else (regions.setdefault(region, len(regions)), node.meta.get("recompute"))
        rest = (node.meta.get("partitioner_tag"), node.meta.get("custom"), paths, again)
        yield f"{names[node]} {node.op} {node.target} {arguments} {shown(node.meta.get('val'))} {rest}"


def traced(
    make: Callable[[], nn.Module], once: bool, training: bool, kernels: str = "aten", symbolic: bool = False
) -> tuple[list[str], list[RepeatedLayers], Any, list[Any]]:
    """(the graph, where it repeats, the model's result, its gradients). ATen's kernels compile in half the time."""
    torch.manual_seed(0)
    model, texts, found = make().train(training), list[str](), list[RepeatedLayers]()

    def run_passes(passes: Any, gm: Any, request: Any, stage: str) -> Any:
        if stage != "dynamo":  # the first to see a whole graph, behind unfold
            texts[:] = text(gm)
        return own(passes, gm, request, stage)

    def unfolded(gm: Any, whole: Any, layers: RepeatedLayers) -> None:
        found.append(layers)
        unfold(gm, whole, layers)

    own = capture.run_passes
    with (
        mock.patch.object(capture, "run_passes", run_passes),
        mock.patch.object(capture, "unfold", unfolded),
        torch.set_grad_enabled(training),
    ):
        compiled = dcompile.compile(model, options={"layers_once": once, "receipt": False, "kernels": kernels})
        x = torch.randn(2, 4)
        if symbolic:
            torch._dynamo.mark_dynamic(x, 0)
        result = compiled(x)
        if training:
            (sum(part.sum() for part in result) if isinstance(result, tuple) else result).backward()
    note = [note for note in dcompile.receipt(compiled).notes if "layers that repeat" in note]
    return texts, found, result, [*(p.grad for p in model.parameters()), *note]


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "layers": (lambda: stack(7), 7),
    "dropout": (lambda: stack(dropout=0.5), 8),
    "first alone": (lambda: WithoutFirst([Block(norm=nn.RMSNorm) for _ in range(7)]), 7),
    "two kinds": (lambda: Stack([Block(torch.relu if n % 2 else torch.tanh) for n in range(14)]), 7),
    "each shown": (lambda: EachShown([Block() for _ in range(8)]), 8),
    "checkpointed": (lambda: Stack([Checkpointed() for _ in range(8)]), 8),
    "pairs checkpointed": (lambda: PairsCheckpointed([Block() for _ in range(14)]), 7),
}
"""A model, and how many layers repeat in it."""
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "six": lambda: stack(6),
    "tied": tied,
    "each read by another": lambda: EachShown([Block() for _ in range(8)], together=True),
}
"""Models of too few layers, or of layers that are not alike."""
TRAINED = ("dropout", "two kinds", "checkpointed", "each shown", "first alone")
INFERRED = ("layers",)
"""Layers are looked for in the same graph with and without gradients; copied in another, which kinds do not change."""


def usual(names: tuple[str, ...], training: bool) -> Iterator[Any]:
    """Those that each test run has; what another of them says as well is for `make test-full`."""
    kind = "training" if training else "inference"
    for case in CASES:
        if "checkpointed" in case and not training:
            continue  # nothing is computed again
        yield pytest.param(case, training, id=f"{case}-{kind}", marks=() if case in names else pytest.mark.full)


@pytest.mark.parametrize(("case", "training"), [*usual(TRAINED, True), *usual(INFERRED, False)])
def test_the_graph_is_that_of_all_layers(case: str, training: bool) -> None:
    make, repeats = CASES[case]
    # a graph for kernels of ours, too, with random numbers as well
    kernels = "auto" if case == ("dropout" if training else "layers") else "aten"
    graph, found, result, gradients = traced(make, True, training, kernels)
    whole, never, other, theirs = traced(make, False, training, kernels)
    if found or training or case != "dropout":  # without gradients, nothing is dropped
        assert [layers.count for layers in found] == [repeats]
    assert not never
    assert graph == whole
    torch.testing.assert_close(result, other, rtol=0, atol=0)
    torch.testing.assert_close(gradients, theirs, rtol=0, atol=0)


def test_nested_regions_are_layers_that_repeat() -> None:
    graph, found, result, gradients = traced(lambda: Stack([Region() for _ in range(8)]), True, True)
    whole, _, other, theirs = traced(lambda: stack(8), True, True)
    assert [layers.count for layers in found] == [8]
    assert without_paths(graph) == without_paths(whole)
    torch.testing.assert_close((result, gradients), (other, theirs), rtol=0, atol=0)


def without_paths(graph: list[str]) -> list[str]:
    """A graph but for the modules that its operations come from: all regions are the first one's."""
    return [line.rpartition(" (")[0] for line in graph]


def looked_for(model: nn.Module, **how: Any) -> RepeatedLayers | None:
    """What is found in the graph that Dynamo makes of a model; what is found nowhere is traced as it is."""
    found = []

    def look(gm: Any, _: Any) -> Any:
        found.append(repeated_layers(gm))
        return gm.forward

    torch.compile(model, backend=look, **how)(torch.randn(3, 4))
    (layers,) = found
    return layers


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("case", WHOLE)
def test_layers_that_are_few_or_not_alike_are_not_found(case: str, training: bool) -> None:
    with torch.set_grad_enabled(training):
        assert looked_for(WHOLE[case]().train(training)) is None


def test_layers_that_change_a_buffer_of_theirs_are_traced_each() -> None:
    def make() -> nn.Module:
        return Stack([Counting() for _ in range(7)])

    graph, found, result, (*gradients, note) = traced(make, True, True)
    whole, _, other, theirs = traced(make, False, True)
    assert len(found) == 1
    assert note.startswith("layers that repeat are traced each by itself: ")
    assert graph == whole
    torch.testing.assert_close((result, gradients), (other, theirs), rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.full)])
def test_layers_of_symbolic_sizes_are_traced_once(training: bool) -> None:
    """Sizes that a layer computes from the batch's are nodes that all layers share."""
    graph, found, result, gradients = traced(lambda: Stack([Folded() for _ in range(7)]), True, training, symbolic=True)
    whole, _, other, theirs = traced(lambda: Stack([Folded() for _ in range(7)]), False, training, symbolic=True)
    assert [layers.count for layers in found] == [7]
    assert graph == whole
    torch.testing.assert_close((result, gradients), (other, theirs), rtol=0, atol=0)
