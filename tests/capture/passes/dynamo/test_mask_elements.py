"""Elements that are followed symbolically are those that torch computes, for random programs of masks."""

import math
import operator
import random

import pytest
import torch
from torch.fx import Graph, GraphModule

from dcompile.capture.passes.dynamo.attention_masks import ElementsOf, recognize_causal_masks
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.codegen.lower.elements import ElementTracer
from dcompile.ir.index import evaluate
from tests.ir.test_piecewise import evaluate_tree

MAX_ELEMENTS = 144
METHODS = (
    "tril", "triu", "unsqueeze", "transpose", "expand", "cumsum", "reshape", "clone", "masked_fill", "repeat", "t",
    "squeeze", "permute",
)  # fmt: skip
COMPARISONS = (operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne)
LOGIC = (operator.and_, operator.or_, operator.xor, torch.logical_and, torch.logical_or)
DTYPES = (torch.int64, torch.int32, torch.int8, torch.bool, torch.float32, torch.bfloat16)


class Program:
    """A graph as Dynamo would hand it over, whose values are real."""

    def __init__(self, seed):
        self.random, self.graph = random.Random(seed), Graph()
        self.nodes = []

    def add(self, kind, target, *args, **kwargs):
        """Append a call, unless torch refuses it or its result is large; returns its node."""
        real = lambda argument: argument.meta["example_value"]  # noqa: E731
        given, named = torch.fx.map_arg((args, kwargs), real)
        try:
            function = target if callable(target) else lambda first, *rest, **k: getattr(first, target)(*rest, **k)
            value = function(*given, **named)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return None
        if not isinstance(value, torch.Tensor) or not 0 < value.numel() <= MAX_ELEMENTS:
            return None
        node = getattr(self.graph, kind)(target, args, kwargs)
        node.meta["example_value"] = value
        self.nodes.append(node)
        return node

    def any(self):
        return self.random.choice(self.nodes[-6:] if self.random.random() < 0.7 else self.nodes)

    def number(self):
        return self.random.randint(-3, 4)

    def dims(self, node):
        return list(range(node.meta["example_value"].dim()))

    def source(self):
        """A tensor that is made of numbers."""
        function = self.random.choice(("arange", "arange", "arange", "ones", "zeros", "full"))
        if function == "arange":
            start = self.random.choice((0, 0, self.number()))
            end = start + self.random.randint(1, 6)
            return self.add("call_function", torch.arange, start, end, dtype=self.random.choice(DTYPES[:2]))
        size = [self.random.randint(1, 5) for _ in range(self.random.randint(1, 3))]
        dtype = self.random.choice(DTYPES)
        fill = [self.random.choice((0, 1, 2, -math.inf))] if function == "full" else []
        return self.add("call_function", getattr(torch, function), size, *fill, dtype=dtype)

    def index(self, node):
        parts = []
        for _ in self.dims(node)[: self.random.randint(1, 3)]:
            parts += [None] * (self.random.random() < 0.2)
            parts.append(
                self.random.choice(
                    (slice(None), slice(self.number(), None), slice(None, -1), slice(0, None, 2), self.number(), ...)
                    if self.random.random() < 0.6
                    else (self.any(),)
                )
            )
        return tuple(parts) if parts.count(...) < 2 else ...

    def step(self):
        """A random operation on what is there."""
        node, kind = self.any(), self.random.randint(0, 9)
        other = self.random.choice((self.any(), self.number()))
        if kind <= 1:
            self.add("call_function", self.random.choice(COMPARISONS), node, other)
        elif kind == 2:
            self.add("call_function", self.random.choice(LOGIC), node, self.any())
        elif kind == 3:
            self.add("call_function", self.random.choice((operator.add, operator.sub, operator.mul)), node, other)
        elif kind == 4:
            self.add("call_function", operator.getitem, node, self.index(node))
        elif kind == 5:
            self.add("call_method", "to", node, self.random.choice(DTYPES))
        elif kind == 6:
            other = self.random.choice((-math.inf, 0.0, self.any()))
            self.add("call_function", torch.where, node, other, self.any())
        elif kind == 7:
            parts = [node, self.any()]
            dim = self.random.choice((0, -1))
            self.add("call_function", torch.cat, parts, dim=dim)
            self.add("call_function", torch.diff, node, dim=dim)
        else:
            self.method(node)

    def method(self, node):
        name, shape = self.random.choice(METHODS), list(node.meta["example_value"].shape)
        arguments = {
            "tril": [self.number()], "triu": [self.number()], "unsqueeze": [self.random.choice((0, -1))],
            "transpose": [0, -1], "expand": [3, *([-1] * len(shape))], "cumsum": [-1],
            "reshape": [self.random.sample([*shape, 1], len(shape) + 1)], "clone": [],
            "masked_fill": [self.any(), self.random.choice((0, 1, -math.inf))],
            "repeat": [2, *([1] * len(shape))], "t": [], "squeeze": [],
            "permute": self.random.sample(range(len(shape)), len(shape)),
        }  # fmt: skip
        self.add("call_method", name, node, *arguments[name])

    def module(self, *results):
        self.graph.output(results)
        return GraphModule({}, self.graph)


def random_program(seed, steps=25):
    program = Program(seed)
    while len(program.nodes) < 3:
        program.source()
    for _ in range(steps):
        program.step()
        if program.random.random() < 0.15:
            program.source()
    return program


class Values(dict):
    """Positions, and reads of tensors at them, each computed when it is needed: others may be out of bounds."""

    def __init__(self, position, reads):
        super().__init__({f"i{n}": index for n, index in enumerate(position)})
        self.reads = reads

    def __missing__(self, name):
        read = self.reads.found(name)
        at = tuple(evaluate(index, self) for index in read.positions)
        value = read.source.meta["example_value"]
        assert all(0 <= place < size for place, size in zip(at, value.shape, strict=True))
        return int(value[at])


def computed(elements, value, reads):
    """All elements, as the tree has them, with those that it reads."""
    found = [
        evaluate_tree(elements.tree, Values(position, reads))
        for position in torch.cartesian_prod(*map(torch.arange, value.shape)).reshape(value.numel(), -1).tolist()
    ] if value.dim() else [evaluate_tree(elements.tree, Values((), reads))]  # fmt: skip
    return torch.tensor(found, dtype=value.dtype).reshape(value.shape)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_known_is_what_torch_computes(seed):
    known = 0
    for number in range(5):
        program = random_program(5 * seed + number)
        elements = ElementsOf(NestedGraphs(program.module()), lambda node: False, ElementTracer())
        for node in program.nodes:
            found = elements(node)
            if found is not None:
                known += 1
                value = node.meta["example_value"]
                assert found.dtype == str(value.dtype).removeprefix("torch.") and found.shape == tuple(value.shape)
                assert torch.equal(computed(found, value, elements.reads).nan_to_num(7.5), value.nan_to_num(7.5)), (
                    node.format_node()
                )
    assert known > 20


def test_an_error_is_not_taken_for_a_missing_rule(monkeypatch):
    def broken(*_):
        raise TypeError("a fault in a rule")

    monkeypatch.setattr(ElementTracer, "_traced", broken)
    program = Program(0)
    first = program.add("call_function", torch.arange, 4)
    elements = ElementsOf(NestedGraphs(program.module()), lambda node: False, ElementTracer())
    with pytest.raises(TypeError, match="a fault in a rule"):
        elements(program.add("call_function", torch.add, first, 1))


def attended(program, mask, queries, keys):
    """The verdict on a mask of an attention call: is_causal, or None if the mask stays."""
    q, k = (program.graph.placeholder(name) for name in "qk")
    for node, length in ((q, queries), (k, keys)):
        node.meta["example_value"] = torch.zeros(2, 3, length, 4)
    call = program.graph.call_function(ATTENTION, (q, k, k), {"attn_mask": mask})
    call.meta["example_value"] = torch.zeros(2, 3, queries, 4)
    gm = program.module(call)
    recognize_causal_masks(gm, ElementTracer)
    gm.graph.lint()
    return call.kwargs["is_causal"] if call.kwargs["attn_mask"] is None else None


def random_mask(program, queries, keys):
    """A mask of shape (queries, keys), or with more dimensions, as people write them and as they nearly write them."""
    pick, add = program.random.choice, program.add

    def positions(length):
        found = add("call_function", torch.arange, length)
        offset = pick((0, 0, 0, 1, -1))
        return add("call_function", operator.add, found, offset) if offset or pick((True, False)) else found

    def compared():
        rows = add("call_function", operator.getitem, positions(queries), (slice(None), None))
        columns = add("call_function", operator.getitem, positions(keys), (None, slice(None)))
        first, second = pick(((rows, columns), (columns, rows)))
        return add("call_function", pick(COMPARISONS[:4]), first, second)

    def triangular():
        ones = add("call_function", torch.ones, [queries, keys], dtype=pick((torch.bool, torch.float32, torch.int64)))
        name, diagonal = pick((("tril", 0), ("tril", 0), ("tril", 1), ("triu", 1), ("triu", 0), ("triu", -2)))
        mask = add("call_method", name, ones, diagonal)
        mask = add("call_method", "to", mask, torch.bool)
        return add("call_function", operator.invert, mask) if name == "triu" or pick((True, False, False)) else mask

    def square():
        """Of a square, as large as the longer side, what is needed of it: at the beginning, or at the end."""
        longer = max(queries, keys)
        ones = add("call_function", torch.ones, [longer, longer], dtype=torch.bool)
        lower = add("call_method", "tril", ones)
        lower = lower if pick((True, True, False)) else add("call_method", "transpose", lower, 0, 1)
        rows = slice(None, queries) if pick((True, False)) else slice(longer - queries, None)
        return add("call_function", operator.getitem, lower, (rows, slice(None, keys)))

    def window():
        rows = add("call_function", operator.getitem, positions(queries), (slice(None), None))
        columns = add("call_function", operator.getitem, positions(keys), (None, slice(None)))
        distance = add("call_function", operator.sub, rows, columns)
        return add("call_function", operator.lt, distance, pick((2, 5, 9)))

    def everything():
        return add("call_function", torch.ones, pick(([queries, keys], [1, 1], [])), dtype=torch.bool)

    mask = pick((compared, compared, triangular, triangular, square, everything))()
    if pick((True, False)):
        other = pick((compared, window, everything, everything))()
        mask = add("call_function", pick((operator.and_, operator.and_, torch.logical_and, operator.or_)), mask, other)
    for _ in range(pick((0, 1, 2))):
        mask = add("call_method", "unsqueeze", mask, 0)
    mask = add("call_method", "expand", mask, *[-1] * (mask.meta["example_value"].dim() - 2), queries, keys)
    if pick((True, False)):
        return mask
    hidden = add("call_function", operator.invert, mask)
    never = pick((-math.inf, torch.finfo(torch.float32).min))
    zeros = add("call_function", torch.zeros, [queries, keys])
    if pick((True, False)):
        return add("call_method", "masked_fill", zeros, hidden, never)
    return add("call_function", torch.where, mask, 0.0, never)


@pytest.mark.parametrize("seed", range(6))
def test_a_mask_is_replaced_exactly_where_its_elements_are_causal_or_all_allow(seed):
    seen = set()
    for number in range(40):
        program = Program(40 * seed + number)
        queries, keys = program.random.choice(((6, 6), (6, 6), (4, 7), (7, 4), (1, 6), (6, 1), (1, 1)))
        mask = random_mask(program, queries, keys)
        value = mask.meta["example_value"]
        allowed = value if value.dtype == torch.bool else value == 0
        lower = torch.ones(queries, keys, dtype=torch.bool).tril()
        expected = False if allowed.all() else True if bool((allowed == lower).all()) else None
        text = str(program.graph)
        assert attended(program, mask, queries, keys) is expected, text
        seen.add(expected)
    assert seen == {True, False, None}
