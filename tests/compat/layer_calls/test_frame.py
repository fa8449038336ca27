"""Copies of repeated layers' calls: the same graphs, guards and results; and none where layers differ."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dcompile.compat.patches.dynamo_frames import repeated_layers_once
from dcompile.compat.patches.torch_patch import installed_version
from tests.compat.layer_calls.capturing import captured, same_with_and_without

X = torch.randn(2, 8)


class Block(nn.Module):
    """Normalisation, two halves of a product, views of one another, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = 0.5

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        first, second = self.up(self.norm(x) * mask).chunk(2, -1)
        return x + self.down(torch.cat([torch.relu(first) + self.scale, second * pair[0]], -1))


class Net(nn.Module):
    """Five blocks in a loop."""

    def __init__(self, kind: Callable[[], nn.Module] = Block, depth: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> Any:
        x, mask = self.first(x), torch.ones(8)
        pair = mask.sin(), mask.cos()
        for block in self.blocks:
            x = block(x, mask=mask, pair=pair)
        return x.sum()


def test_copies_are_what_dynamo_captures() -> None:
    assert same_with_and_without(Net, X).copies == 3


def test_copies_without_gradients_and_of_changing_sizes() -> None:
    with torch.no_grad():
        assert same_with_and_without(Net, X).copies == 3
    x = torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    assert same_with_and_without(Net, x).copies == 3


class Checkpointed(Block):
    """Is computed again in the backward."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        return checkpoint(super().forward, x, mask, pair, use_reentrant=False)


def test_checkpointed_layers_are_copied() -> None:
    assert same_with_and_without(lambda: Net(Checkpointed), X).copies == 3


class Several(Block):
    """Returns a tuple: a result, an argument, a view and a constant."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        x = super().forward(x, mask, pair)
        return x, mask, x.transpose(0, 1), 3


class NetOfSeveral(Net):
    """Goes on with all that blocks return."""

    def forward(self, x: torch.Tensor) -> Any:
        mask, seen = torch.ones(8), []
        for block in self.blocks:
            x, mask, turned, number = block(x, mask, (mask, mask))
            seen.append(turned * number)
        return sum(one.sum() for one in seen) + x.sum()


def test_layers_that_return_several_results_are_copied() -> None:
    assert same_with_and_without(lambda: NetOfSeveral(Several), X).copies == 3


def test_layers_of_two_kinds_in_turn_are_copied() -> None:
    def make() -> nn.Module:
        net = Net(depth=8)
        for block in net.blocks[::2]:
            block.scale = 2.0  # type: ignore[assignment]
        return net

    assert same_with_and_without(make, X).copies == 5, "all but the first, and one of each kind"


def test_a_graph_break_in_a_frame_leaves_copies_as_they_were() -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = super().forward(x).detach() + 1
            torch._dynamo.graph_break()
            return x.cos()

    assert len(same_with_and_without(Broken, X).graphs) == 2


def test_an_attempt_that_copies_other_layers_is_given_up() -> None:
    torch._dynamo.reset()
    model, graphs = Net(), list[Any]()
    with repeated_layers_once() as frame:
        frame._copied += [False] * 4
        result = torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm, fullgraph=True)(X)
    assert not frame.copies and len(graphs) == 1
    assert torch.equal(result, model(X))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaModel(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=4, n_head=2, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2Model(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [llama, pytest.param(gpt2, marks=pytest.mark.full)])
def test_layers_of_transformers_are_copied(make: Callable[[], nn.Module]) -> None:
    tokens = torch.arange(12).view(2, 6)
    plain, copied = (captured(make, (tokens,), once, dynamic=False) for once in (False, True))
    assert copied.copies == 2 and copied.graphs == plain.graphs and copied.guards == plain.guards
    assert torch.equal(copied.result[0], plain.result[0])


class Holding(Block):
    """Calls a function that it has made for itself, or been given."""

    def __init__(self, make: Callable[[Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.call = make(self)

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 * self.scale

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        return self.call(super().forward(x, mask, pair))


def _with_a_method_for_forward(block: Any) -> Callable[..., Any]:
    block.up.forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, block.up)
    return torch.sin


def _with_a_default(factor: float) -> Callable[..., Any]:
    def scaled(x: torch.Tensor, by: float = factor) -> torch.Tensor:
        return x * by

    return scaled


OWN_FUNCTIONS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "lambda": lambda block: lambda x: x * 2,
    "closure over the layer": lambda block: lambda x: x * block.scale,
    "method": lambda block: block.doubled,
    "partial": lambda block: functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "default": lambda block: _with_a_default(3.0),
    "method for forward": _with_a_method_for_forward,
}


@pytest.mark.parametrize("name", OWN_FUNCTIONS)
def test_layers_with_functions_of_one_definition_are_copied(name: str) -> None:
    assert same_with_and_without(lambda: Net(lambda: Holding(OWN_FUNCTIONS[name])), X).copies == 3


class Single(Block):
    """Takes one tensor."""

    def forward(self, x: torch.Tensor, mask: Any = None, pair: Any = None) -> Any:
        return super().forward(x, torch.ones(8), (torch.ones(8),))


def _hook(module: Any, args: Any, result: Any) -> Any:
    return result * 2


def each_compiled() -> nn.Module:
    """A Sequential whose parts are compiled each, before it is. Without hooks, Dynamo looks past that."""
    model = nn.Sequential(*(Single() for _ in range(5)))
    for block in model:
        block.register_forward_hook(_hook)
        block.compile(backend="dcompile")
    return model


def test_layers_that_are_compiled_each_are_copied() -> None:
    assert same_with_and_without(each_compiled, X).copies == 3


def test_layers_of_sequentials_are_copied() -> None:
    def nested() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(Single(), nn.Tanh()) for _ in range(5)))

    assert same_with_and_without(nested, X).copies == 3


# --- what is asked of copied layers in later calls --------------------------------------------------------------------


def _forward_of_its_own(block: Any) -> None:
    block.up.forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, block.up)


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda block: setattr(block, "scale", 4.0),
    "attribute within": lambda block: setattr(block.norm, "eps", 0.5),
    "frozen": lambda block: block.up.weight.requires_grad_(False),
    "strides": lambda block: setattr(block.up.weight, "data", block.up.weight.detach().t().contiguous().t()),
    "kind": lambda block: setattr(block, "norm", nn.Identity()),
    "absent": lambda block: block.up.register_parameter("bias", None),
    "forward": _forward_of_its_own,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_copied_layer_is_noticed(change: str) -> None:
    if change in ("frozen", "strides") and installed_version() == (2, 11):
        pytest.skip("torch 2.11 does not notice it without copies either")
    torch._dynamo.reset()
    count, model = 0, Net()

    def backend(gm: Any, _inputs: Any) -> Any:
        nonlocal count
        count += 1
        return gm

    compiled = torch.compile(model, backend=backend)
    with repeated_layers_once() as frame:
        compiled(X)
        compiled(X)
        assert (frame.copies, count) == (3, 1)
        CHANGES[change](model.blocks[3])
        assert torch.equal(compiled(X), model(X))
    assert count == 2


class Asked(Block):
    """Asks for an attribute that it may not have."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        return super().forward(x, mask, pair) * (self.share if hasattr(self, "share") else 1)


@pytest.mark.parametrize(("which", "copies"), [((), 3), ((3,), 2)])
def test_layers_that_lack_an_attribute(which: tuple[int, ...], copies: int) -> None:
    """transformers asks a module for the number of its key and value heads."""

    def make() -> nn.Module:
        model = Net(Asked)
        for number in which:
            model.blocks[number].share = 0.5  # type: ignore[assignment, unused-ignore]
        return model

    assert same_with_and_without(make, X).copies == copies


# --- layers that are not equal ----------------------------------------------------------------------------------------

FACTORS: dict[nn.Module, float] = {}


class Looked(Block):
    """Finds a factor by its own identity."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        return super().forward(x, mask, pair) * FACTORS[self]


class Numbered(Block):
    """Reads its number."""

    number = 0

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        return super().forward(x, mask, pair) * self.number


class Constant(Numbered):
    """Takes its number as a constant, of which no guard asks."""

    @torch._dynamo.assume_constant_result
    def found(self) -> int:
        return self.number

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        return Block.forward(self, x, mask, pair) * self.found()


class Counting(Block):
    """Changes itself."""

    calls = 0

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        self.calls += 1
        return super().forward(x, mask, pair) * self.calls


class Told(Block):
    """Reads what the loop around it has stored in an object."""

    told: Any = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        return super().forward(x, mask, pair) + self.told.last


class Place:
    """Holds what was stored last."""

    last: Any = None


class Telling(Net):
    """Stores each layer's input where layers find it."""

    def __init__(self) -> None:
        super().__init__(Told)
        self.place = Place()
        for block in self.blocks:
            block.told = self.place  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.ones(8)
        for block in self.blocks:
            self.place.last = x * 2
            x = block(x, mask, (mask, mask))
        return x.sum()


class Last(Block):
    """Is told which layer is the last."""

    owner: Any = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any = None) -> Any:
        x = super().forward(x, mask, pair)
        return x * 3 if self is self.owner[0].last else x


def looked_up() -> nn.Module:
    net = Net(Looked)
    FACTORS.clear()
    FACTORS.update({block: float(number) for number, block in enumerate(net.blocks, 1)})
    return net


def numbered(kind: Callable[[], nn.Module]) -> nn.Module:
    net = Net(kind)
    for number, block in enumerate(net.blocks):
        block.number = number + 1  # type: ignore[assignment]
    return net


def of_one_weight(first: int) -> nn.Module:
    net = Net()
    net.blocks[4].up.weight = net.blocks[first].up.weight
    return net


def with_last() -> nn.Module:
    net = Net(Last)
    net.last = net.blocks[4]
    for block in net.blocks:
        block.owner = (net,)  # type: ignore[assignment]
    return net


def hooked() -> nn.Module:
    net = Net()
    net.blocks[3].register_forward_hook(lambda module, args, result: result * 2)
    return net


def holding(make: Callable[[int], Callable[..., Any]]) -> nn.Module:
    net = Net(lambda: Holding(lambda block: torch.sin))
    for number, block in enumerate(net.blocks):
        block.call = make(number + 1)  # type: ignore[assignment]
    return net


UNEQUAL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "by identity": (looked_up, 0),
    "by number": (lambda: numbered(Numbered), 0),
    "by a constant": (lambda: numbered(Constant), 0),
    "changing": (lambda: Net(Counting), 0),
    "told": (Telling, 0),
    "one of them known by another name": (with_last, 2),
    "one weight for two": (lambda: of_one_weight(1), 2),
    "one weight for two copies": (lambda: of_one_weight(2), 2),
    "one with a hook": (hooked, 2),
    "one with another function": (lambda: holding(lambda number: torch.sin if number == 3 else torch.cos), 2),
    "by numbers in closures": (lambda: holding(lambda number: lambda x: x * number), 0),
    "by defaults": (lambda: holding(_with_a_default), 0),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_layers_that_differ_are_traced(name: str) -> None:
    make, copies = UNEQUAL[name]
    torch.manual_seed(0)
    expected = make()(X)
    plain, copied = (captured(make, (X,), once) for once in (False, True))
    assert copied.graphs == plain.graphs and copied.guards == plain.guards
    assert copied.copies == copies, copied.refusals
    torch.testing.assert_close(copied.result, expected)
