"""FlexAttention as programs for a GPU, with what eager math has in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._dynamo.source import ConstantSource
from torch._higher_order_ops.flex_attention import flex_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._pytree import tree_map

from dcompile.codegen.lower.lower import Lowered, lower
from dcompile.ir.nodes import Program

OPTIONS = {
    "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": True,
}  # fmt: skip


def causal(b, h, q, k):
    return q >= k


def same(score, b, h, q, k, *_):
    return score


@dataclass(frozen=True)
class Case:
    """A call: sizes, a function of positions, one of scores, and the shapes of what that one reads."""

    mask: Callable[..., Any] = causal
    score: Callable[..., Any] = same
    reads: tuple[tuple[int, ...], ...] = ()
    batch: int = 1
    heads: int = 2
    shared: int = 2
    queries: int = 96
    keys: int = 96
    width: int = 32
    value_width: int = 32
    block: int | tuple[int, int] = 32
    dtype: torch.dtype = torch.float16
    scale: float = 0.25
    by_batch: bool = False
    is_turned: bool = False
    with_logarithm: bool = False
    only_logarithm: bool = False
    is_symbolic: bool = False
    trains: bool = False
    """Whether what the score function reads has gradients."""
    captures_length: bool = False
    """Whether the score function is also given the number of queries, as TorchDynamo captures a size."""

    def tensors(self) -> list[torch.Tensor]:
        """Queries, keys, values, the gradients of result and logarithm, and what the score function reads."""
        generator = torch.Generator().manual_seed(self.queries)
        shapes = [(self.batch, self.heads, self.queries, self.width), (self.batch, self.shared, self.keys, self.width)]
        shapes += [(self.batch, self.shared, self.keys, self.value_width)]
        shapes += [(self.batch, self.heads, self.queries, self.value_width), (self.batch, self.heads, self.queries)]
        made = [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes[:4]]
        if self.is_turned:  # heads inside of positions, as projections give them
            made = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in made]
        made.append(torch.randn(shapes[4], generator=generator))
        return [*made, *(torch.rand(shape, generator=generator) for shape in self.reads)]

    @property
    def block_mask(self) -> BlockMask:
        sizes = self.batch if self.by_batch else None, self.heads if self.by_batch else None
        if isinstance(self.block, int) and self.block >= 1 << 24:  # one block for all, as a call without a mask has it
            one = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
            lengths = self.queries, self.keys
            return BlockMask.from_kv_blocks(*one, BLOCK_SIZE=self.block, mask_mod=self.mask, seq_lengths=lengths)
        return create_block_mask(self.mask, *sizes, self.queries, self.keys, device="cpu", BLOCK_SIZE=self.block)

    def graph(self) -> tuple[GraphModule, list[torch.Tensor]]:
        """The forward and backward on a GPU, and its inputs: `tensors` and the mask's tables."""
        table, tensors = self.block_mask.as_tuple(), self.tensors()
        places = [place for place, item in enumerate(table) if isinstance(item, torch.Tensor)]
        inputs = [*tensors, *(table[place] for place in places)]

        def call(query, key, value, grad, grad_logarithm, *others):
            reads, given = others[: len(self.reads)], list(table)
            for place, tensor in zip(places, others[len(self.reads) :], strict=True):
                given[place] = tensor
            wanted = [tensor.requires_grad_() for tensor in (query, key, value, *(reads if self.trains else ()))]
            out, logarithm, largest = flex_attention(
                query, key, value, self.score, tuple(given), self.scale, OPTIONS, self._captured(reads, query), ()
            )
            results, grads = ((out, logarithm), (grad, grad_logarithm)) if self.with_logarithm else ((out,), (grad,))
            if self.only_logarithm:
                results, grads, wanted = (logarithm,), (grad_logarithm,), wanted[:2]
            return out, logarithm, largest, *torch.autograd.grad(results, wanted, grads)

        environment = ShapeEnv() if self.is_symbolic else None
        with FakeTensorMode(shape_env=environment) as mode:
            made = make_fx(call)(*(self._fake(mode, tensor) for tensor in inputs))
            _on_a_gpu(made, mode)
        return made, inputs

    def _captured(self, reads: list[torch.Tensor], query: torch.Tensor) -> tuple[Any, ...]:
        return (*reads, query.shape[2]) if self.captures_length else tuple(reads)

    def _fake(self, mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without values; batches, lengths and tables may have symbolic sizes."""
        free = {self.batch, self.queries, self.keys} if tensor.is_floating_point() else {*tensor.shape}
        kinds = [DimDynamic.DYNAMIC if size in free - {1} else DimDynamic.STATIC for size in tensor.shape]
        context = StatelessSymbolicContext(kinds) if self.is_symbolic else None
        return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"t{id(tensor)}"))

    def lowered(self) -> tuple[Lowered, list[torch.Tensor]]:
        """The program of `graph`, and its inputs."""
        graph, inputs = self.graph()
        return lower(graph, "flex"), inputs

    def exact(self) -> list[torch.Tensor]:
        """The results by eager math in float64; where a query has no key, its gradients are 0."""
        query, key, value, grad, grad_logarithm, *reads = (tensor.double() for tensor in self.tensors())
        wanted = [tensor.requires_grad_() for tensor in (query, key, value, *(reads if self.trains else ()))]
        group = self.heads // self.shared
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        sizes = self.batch, self.heads, self.queries, self.keys
        b, h, q, k = (torch.arange(n).view([-1 if d == e else 1 for e in range(4)]) for d, n in enumerate(sizes))
        captured = self._captured(reads, query)
        scores = self.score(query @ key.mT * self.scale, b, h, q, k, *captured).expand(sizes)
        scores = scores.masked_fill(~self.mask(b, h, q, k).expand(sizes), -torch.inf)
        logarithm = scores.logsumexp(-1, keepdim=True)
        weights = (scores - logarithm.masked_fill(logarithm.isinf(), 0)).exp()
        results = [weights @ value, logarithm.squeeze(-1) / np.log(2)]
        count = 1 + self.with_logarithm
        found = torch.autograd.grad(results[:count], wanted, [grad, grad_logarithm][:count])
        return [*(tensor.detach() for tensor in results), scores.amax(-1).detach() / np.log(2), *found]


def _on_a_gpu(graph: GraphModule, mode: FakeTensorMode) -> None:
    """Put the values of a graph on a GPU: autograd cannot trace there without one."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.kwargs = {name: cuda if value == cpu else value for name, value in node.kwargs.items()}
                if "val" in node.meta:
                    node.meta["val"] = tree_map(moved, node.meta["val"])
            module.recompile()


def sizes_of(program: Program, inputs: list[torch.Tensor]) -> dict[str, int]:
    """What the size symbols of a program are for these inputs."""
    found = {}
    for name, tensor in zip(program.inputs, inputs, strict=True):
        for size, number in zip(program.table[name].shape, tensor.shape, strict=True):
            found |= {} if isinstance(size, int) else {str(size): number}
    return found


def window(b, h, q, k):
    return (q >= k) & (q - k < 24)


def documents(b, h, q, k):
    return (q // 40 == k // 40) & (q >= k)


def capped(score, b, h, q, k, slopes):
    return torch.tanh(score / 2) * 2 + slopes[h] * (k - q)


def biased(score, b, h, q, k, bias):
    return score + bias[b, h, q, k]


def relative(score, b, h, q, k, bias, slopes, warmth):
    return (score + bias[h, q - k]) * warmth + slopes[h] * (k - q) + slopes[q % 2]


def by_distance(score, b, h, q, k, table):
    return score + table[h, (q - k).clamp(-3, 3)]


def by_query_and_key(score, b, h, q, k, rows, columns):
    return score * rows[b, q] + columns[k] * columns[q]


def by_length(score, b, h, q, k, slopes, length):
    return score + slopes[h] * (length - k) / length


def forbidding(score, b, h, q, k):
    return torch.where(q >= k, score, -torch.inf)


CASES = {
    "causal": Case(),
    "window of bfloat16": Case(mask=window, dtype=torch.bfloat16),
    "documents, two batches, heads shared": Case(mask=documents, batch=2, heads=4, shared=2),
    "capped with slopes": Case(score=capped, reads=((2,),)),
    "a bias of each pair": Case(score=biased, reads=((2, 2, 96, 96),), batch=2),
    "no table": Case(mask=lambda b, h, q, k: q >= -k, block=1 << 30, queries=70, keys=50),
    "lengths that are no multiple, queries without keys": Case(
        mask=lambda b, h, q, k: (q >= k) & (q < 60), queries=75, keys=90, heads=2, shared=1
    ),
    "a head of 24 and values of 40": Case(width=24, value_width=40, is_turned=True),
    "scores that forbid": Case(score=forbidding, mask=lambda b, h, q, k: q >= -k),
    "a gradient of the logarithm": Case(mask=window, with_logarithm=True, is_turned=True),
    "a mask of each head": Case(mask=lambda b, h, q, k: q >= k + 8 * h - 4 * b, by_batch=True, batch=2),
    "a negative scale": Case(scale=-0.5, mask=window),
    "a last block that is not full": Case(queries=192, keys=192, block=128, width=16, value_width=16),
    "a last block that is not full, trained": Case(
        score=biased,
        reads=((1, 2, 192, 320),),
        trains=True,
        mask=lambda b, h, q, k: q >= -k,
        queries=192,
        keys=320,
        block=128,
        width=16,
        value_width=16,
    ),
    "wide heads and a last block that is not full": Case(queries=160, keys=160, block=128, width=256, value_width=16),
    "blocks of other sides": Case(queries=160, keys=192, block=(64, 128), mask=lambda b, h, q, k: q >= k - 30),
    "a score that is a position": Case(score=lambda s, b, h, q, k: s * 0 + k),
    "trained slopes": Case(score=capped, reads=((2,),), trains=True, heads=2, batch=2, mask=window),
    "a trained bias of each pair": Case(score=biased, reads=((2, 2, 96, 96),), batch=2, trains=True),
    "trained biases and a factor": Case(score=relative, reads=((4, 192), (4,), ()), heads=4, queries=90, trains=True),
    "a trained bias of clamped distances": Case(score=by_distance, reads=((2, 7),), trains=True, queries=128, keys=150),
    "trained rows and columns": Case(score=by_query_and_key, reads=((2, 96), (96,)), batch=2, keys=75, trains=True),
    "symbolic sizes of what is trained": Case(
        score=by_query_and_key, reads=((3, 90), (90,)), batch=3, queries=90, keys=75, trains=True, is_symbolic=True
    ),
    "a captured size": Case(
        score=by_length,
        reads=((2,),),
        batch=3,
        queries=75,
        keys=90,
        is_symbolic=True,
        trains=True,
        captures_length=True,
    ),
    "a captured size that nothing reads": Case(batch=3, queries=75, is_symbolic=True, captures_length=True),
    "a captured size that is known": Case(score=by_length, reads=((2,),), captures_length=True),
    "symbolic sizes": Case(score=biased, reads=((3, 2, 75, 90),), batch=3, queries=75, keys=90, is_symbolic=True),
    "symbolic sizes without a table": Case(
        mask=lambda b, h, q, k: q >= -k, block=1 << 30, batch=3, heads=4, queries=70, keys=50, is_symbolic=True
    ),
    "symbolic sizes of documents": Case(
        mask=documents, score=capped, reads=((2,),), queries=81, keys=93, is_symbolic=True, is_turned=True
    ),
}
