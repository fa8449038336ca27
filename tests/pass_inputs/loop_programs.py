"""Programs for the rows of `LOOP_PASSES`, as text, and what a request says besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dcompile.codegen.schedule.fusion.matmul_epilogue import LIBRARY, epilogues, skinny_loops
from dcompile.collectives.contract import BucketRule, ParamInfo, Request, Shard
from dcompile.ir.nodes import Loop, Program, Tile
from dcompile.ir.parse import parse
from dcompile.machine_model import TABLE, Figures, GroupSize, Link


@dataclass(frozen=True)
class LoopInput:
    """A program, and fields of the request that the pass is given something of."""

    text: str
    request: Mapping[str, Any] = field(default_factory=dict)

    epilogue_tile: Tile | None = None
    """Chosen for every matmul that can end in a loop."""
    skinny_choices: tuple[Tile, ...] = ()
    """Chosen for the kinds of products of few rows, in order."""

    @property
    def program(self) -> Program:
        """The program, read anew."""
        return parse(self.text)

    def requested(self) -> Request:
        """A request for a backward with these fields."""
        chosen: tuple[tuple[Loop, Tile], ...] = ()
        if self.epilogue_tile is not None:
            chosen = tuple((ending.kind, self.epilogue_tile) for ending in epilogues(self.program))
        if self.skinny_choices:
            chosen = tuple(zip(skinny_loops(self.program), self.skinny_choices, strict=True))
        return replace(Request("pass", "backward"), epilogues=chosen, **self.request)


def replicated(*shapes: tuple[int, ...]) -> tuple[ParamInfo, ...]:
    """Parameters under DDP."""
    return tuple(ParamInfo(n, f"p{n}", shape, "float32", "cpu") for n, shape in enumerate(shapes))


def sharded(*sizes: int) -> tuple[ParamInfo, ...]:
    """Vectors under FSDP2, each a unit of its own."""
    shards = [Shard(n, n, 0, size, "float32", reshard=True) for n, size in enumerate(sizes)]
    return tuple(
        ParamInfo(n, f"p{n}", (shard.numel,), "float32", "cpu", "sharded", f"fsdp{n}", shard)
        for n, shard in enumerate(shards)
    )


SCATTERED_UNIT = (
    "bucket scatter0: reduce_scatter float32[4] on cpu over fsdp0, params (1), buffers (h), offsets (0), units (1), "
    "holders (grads1), sizes (4)"
)
GATHERED_UNITS = (
    "bucket gather0: all_gather bfloat16[1050112] on cuda over fsdp0, params (0, 1, 2), buffers (weight, bias, norm), "
    "offsets (0, 0, 0), units (0, 1, 2), holders (weight, bias, norm), sizes (1048576, 768, 768)"
)
GATHERED_VECTOR = (
    "bucket gather0: all_gather float32[256] on cpu over g, params (0), buffers (full0), offsets (0), units (0), "
    "holders (full0), sizes (256)"
)
SLOW_LINK = Figures("test", 1e9, (("float32", 1e6),), 1.0, 1e9, 1.0, 1.0, (Link(1 << 20, 1.0, 0.0),))
"""A kernel takes a microsecond; a collective of 1000 bytes does, too."""
H200 = replace(TABLE["h200"], interference=0.35)

LOOP_INPUTS: Mapping[str, LoopInput] = {
    "remove_dead_steps": LoopInput("""
        program p(x)
          x: float32[8]
          unread: float32[8]
          y: float32[8]
        loop unread [8]
          unread[i0] = exp(x[i0])
        loop y [8]
          y[i0] = neg(x[i0])
        return (y)
    """),
    "accumulate_matmuls": LoopInput("""
        program p(x, w)
          x: float32[8, 8]
          w: float32[8, 8]
          a: float32[8, 8]
          b: float32[8, 8]
          c: float32[8, 8]
          y: float32[8, 8]
        a <- aten.mm.default(x, w) [out]
        b <- aten.mm.default(w, x) [out]
        c <- aten.mm.default(x, x) [out]
        loop total [8, 8]
          ab = add(a[i0, i1], b[i0, i1])
          y[i0, i1] = add(ab, c[i0, i1])
        return (y)
    """),
    "use_online_softmax": LoopInput("""
        program p(x)
          x: float32[512, 65536] on cuda
          y: float32[512] on cuda
        loop logsumexp [512] x [65536]
          logit = x[i0, j0]
          top = row_max(logit)
          total = row_sum(exp(sub(logit, top)))
          y[i0] = add(top, log(total))
        return (y)
    """),
    "interchange_reductions": LoopInput("""
        program p(x)
          x: float32[100, 64]
          y: float32[64]
        loop total [64] x [100]
          y[i0] = row_sum(x[j0, i0])
        return (y)
    """),
    "fuse": LoopInput("""
        program p(x, w)
          x: float32[6, 16]
          w: float32[16]
          squares: float32[6]
          y: float32[6, 16]
        loop squares [6] x [16]
          squares[i0] = row_sum(mul(x[i0, j0], x[i0, j0]))
        loop y [6, 16]
          scaled = mul(x[i0, i1], rsqrt(squares[i0]))
          y[i0, i1] = mul(scaled, w[i1])
        return (y)
    """),
    "narrow_buffers": LoopInput("""
        program p(x)
          x: float32[1024, 512] on cuda
          h: float32[1024, 512] on cuda
          total: float32[512] on cuda
          y: float32[1024, 512] on cuda
        loop h [1024, 512]
          h[i0, i1] = cast(cast(x[i0, i1], bfloat16), float32)
        loop total [1024, 512]
          total[i1] sum= h[i0, i1]
        loop y [1024, 512]
          y[i0, i1] = sub(h[i0, i1], total[i1])
        return (y)
    """),
    "rematerialize": LoopInput("""
        program p(dy, x)
          dy: bfloat16[1024, 512] on cuda
          x: bfloat16[1024, 512] on cuda
          product: float32[1024, 512] on cuda
          total: float32[512] on cuda
          g: bfloat16[1024, 512] on cuda
        loop product [1024, 512]
          product[i0, i1] = mul(cast(dy[i0, i1], float32), cast(x[i0, i1], float32))
        loop total [1024, 512]
          total[i1] sum= product[i0, i1]
        loop g [1024, 512]
          g[i0, i1] = cast(sub(product[i0, i1], total[i1]), bfloat16)
        return (g)
    """),
    "order_inner_loops": LoopInput("""
        program p(x)
          x: float32[50, 12] on cuda
          y: float32[3] on cuda
        loop groups [3] x [4, 50]
          y[i0] = row_sum(x[j1, 4*i0 + j0])
        return (y)
    """),
    "split_column_reductions": LoopInput("""
        program p(x)
          x: float32[5000, 64] on cuda
          y: float32[64] on cuda
        loop total [5000] x [64]
          y[j0] sum= x[i0, j0]
        return (y)
    """),
    "split_row_reductions": LoopInput("""
        program p(x)
          x: float32[2, 1048576] on cuda
          y: float32[2] on cuda
        loop total [2] x [1048576]
          y[i0] = row_sum(x[i0, j0])
        return (y)
    """),
    "refuse_after_split": LoopInput("""
        program p(parts)
          parts: float32[132, 64] on cuda
          total: float32[64] on cuda
          y: float32[64] on cuda
        loop total [64] x [132]
          total[i0] = row_sum(parts[j0, i0])
        loop y [64]
          y[i0] = mul(total[i0], 0.5)
        return (y)
    """),
    "recompute_rows": LoopInput("""
        program p(s, v)
          s: float32[6, 32] on cuda
          v: bfloat16[2, 32, 16] on cuda
          p: float32[6, 32] on cuda
          y: bfloat16[6, 16] on cuda
        loop softmax [6] x [32]
          e = exp(sub(s[i0, j0], row_max(s[i0, j0])))
          p[i0, j0] = div(e, row_sum(e))
        loop summed [2, 3, 16] x [32]
          y[i1 + 3*i0, i2] = cast(row_sum(mul(p[i1 + 3*i0, j0], cast(v[i0, j0, i2], float32))), bfloat16)
        return (y)
    """),
    "keep_wide_values": LoopInput("""
        program p(x)
          x: bfloat16[6, 16]
          y: bfloat16[6, 16]
        loop y [6, 16]
          wide = cast(x[i0, i1], float32)
          product = cast(mul(wide, 3.0), bfloat16)
          y[i0, i1] = cast(add(cast(product, float32), wide), bfloat16)
        return (y)
    """),
    "send_in_place": LoopInput("""
        program p(x, w)
          x: float32[2, 4]
          w: float32[4, 4]
          product: float32[2, 4]
          sum: float32[2, 4]
        product <- aten.mm.default(x, w) [out]
        loop copy [8]
          sum[i0] = product[i0]
        start all_reduce sum over own0: sum <- _c10d_functional.all_reduce.default(sum, 'sum', '0') [mutate]
        wait sum: sum
        return (sum)
    """),
    "return_gradients": LoopInput("""
        program backward0(x, p)
          x: float32[4]
          p: float32[4]
          g: float32[4]
          r: float32[4]
        loop g [4]
          g[i0] = neg(x[i0])
        r <- dcompile_step.reduced.default(g, 0) [alloc]
        loop p [4]
          p[i0] = add(p[i0], r[i0])
        return (None)
    """),
    "insert_ddp_buckets": LoopInput(
        """
        program backward0(x)
          gradients: output 0 of parameter 0, output 1 of parameter 1
          x: float32[4]
          g0: float32[4]
          g1: float32[4]
        loop g1 [4]
          g1[i0] = neg(x[i0])
        loop g0 [4]
          g0[i0] = exp(x[i0])
        return (g0, g1)
        """,
        {"params": replicated((4,), (4,)), "rule": BucketRule(1, 1)},
    ),
    "fold_average": LoopInput("""
        program backward0(x)
          gradients: output 0 of parameter 0
          bucket bucket0: all_reduce bfloat16[16] on cuda over ddp, params (0), buffers (weight), offsets (0)
          x: bfloat16[4, 4] on cuda
          weight: bfloat16[4, 4] on cuda @ bucket:bucket0+0
        weight <- aten.mm.default(x, x) [out]
        start all_reduce bucket0 over ddp: weight
        wait bucket0: weight
        return (weight)
    """),
    "insert_reduce_scatters": LoopInput(
        """
        program backward0(x)
          gradients: output 0 of parameter 0, output 1 of parameter 1
          x: float32[4]
          g0: float32[4]
          g1: float32[4]
        loop g1 [4]
          g1[i0] = neg(x[i0])
        loop g0 [4]
          g0[i0] = exp(x[i0])
        return (g0, g1)
        """,
        {"params": sharded(4, 4)},
    ),
    "update_after_reductions": LoopInput(f"""
        program backward0(x, p, q)
          gradients: output 2 of parameter 0
          bucket bucket0: all_reduce float32[4] on cpu over ddp, params (0), buffers (g), offsets (0)
          {SCATTERED_UNIT}
          x: float32[4]
          p: float32[4]
          q: float32[2]
          g: float32[4] @ bucket:bucket0+0
          h: float32[4] @ within:grads1+0
          grads1: float32[4]
          r: float32[4]
          s: float32[2]
        loop g [4]
          g[i0] = neg(x[i0])
        start all_reduce bucket0 over ddp: g
        loop h [4]
          h[i0] = exp(x[i0])
        start reduce_scatter scatter0 over fsdp0: h
        wait bucket0: g
        wait scatter0: h
        r <- dcompile_step.reduced.default(0) [alloc]
        s <- dcompile_step.reduced.default(1) [alloc]
        loop p [4]
          p[i0] = add(p[i0], r[i0])
        loop q [2]
          q[i0] = add(q[i0], s[i0])
        return (None, None, g)
    """),
    "insert_all_gathers": LoopInput(
        """
        program forward0(x, p0, p1)
          x: float32[4]
          p0: float32[4]
          p1: float32[4]
          h: float32[4]
          y: float32[4]
        loop h [4]
          h[i0] = add(x[i0], p0[i0])
        loop y [4]
          y[i0] = add(h[i0], p1[i0])
        return (y)
        """,
        {"params": sharded(4, 4), "gathers": ((1, 0), (2, 1)), "results": 1},
    ),
    "coalesce_small": LoopInput(
        """
        program forward0()
          """
        f"{GATHERED_UNITS}"
        """
          weight: bfloat16[1048576] on cuda
          bias: bfloat16[768] on cuda
          norm: bfloat16[768] on cuda
        start all_gather gather0 over fsdp0: weight, bias, norm
        wait gather0: weight, bias, norm
        return (weight, bias, norm)
        """,
        {"figures": replace(H200, member_us=50.0), "groups": (("fsdp0", GroupSize(2)),)},
    ),
    "start_early_wait_late": LoopInput("""
        program backward0(x)
          bucket bucket0: all_reduce float32[4] on cpu over ddp, params (0), buffers (g), offsets (0)
          x: float32[4]
          g: float32[4] @ bucket:bucket0+0
          other: float32[4]
          y: float32[4]
        loop g [4]
          g[i0] = neg(x[i0])
        loop other [4]
          other[i0] = exp(x[i0])
        start all_reduce bucket0 over ddp: g
        wait bucket0: g
        loop y [4]
          y[i0] = mul(other[i0], 2.0)
        return (g, y)
    """),
    "overlap_collectives": LoopInput(
        """
        program forward0(x)
          """
        f"{GATHERED_VECTOR}"
        """
          x: float32[256]
          h: float32[256]
          full0: float32[256]
          y: float32[256]
        loop h [256]
          h[i0] = exp(x[i0])
        start all_gather gather0 over g: full0
        wait gather0: full0
        loop y [256]
          y[i0] = add(h[i0], full0[i0])
        return (y)
        """,
        {"figures": SLOW_LINK, "groups": (("g", GroupSize(2, "wire")),)},
    ),
    "group_updates": LoopInput("""
        program optimizer(p0, g0, p1, g1, p2, g2)
          p0: float32[30] on cuda
          g0: float32[30] on cuda
          p1: float32[50] on cuda
          g1: float32[50] on cuda
          p2: float32[30] on cuda
          g2: float32[30] on cuda
        loop update0 [30]
          p0[i0] = sub(p0[i0], g0[i0])
        loop update1 [50]
          p1[i0] = sub(p1[i0], g1[i0])
        loop update2 [30]
          p2[i0] = sub(p2[i0], g2[i0])
        return (p0, p1, p2)
    """),
    "fuse_matmul_epilogues": LoopInput(
        """
        program p(x, w, r)
          x: bfloat16[2048, 512] on cuda
          w: bfloat16[512, 1024] on cuda
          r: bfloat16[2048, 1024] on cuda
          product: bfloat16[2048, 1024] on cuda
          y: bfloat16[2048, 1024] on cuda
        product <- aten.mm.default(x, w) [out]
        loop y [2048, 1024]
          total = add(cast(product[i0, i1], float32), cast(r[i0, i1], float32))
          y[i0, i1] = cast(total, bfloat16)
        return (y)
        """,
        epilogue_tile=Tile(128, 128, 64, 8, 3),
    ),
    "choose_skinny_matmuls": LoopInput(
        """
        program p(x, w, v, r)
          x: bfloat16[8, 256] on cuda
          w: bfloat16[512, 256] on cuda
          v: bfloat16[1024, 512] on cuda
          r: bfloat16[8, 1024] on cuda
          h: bfloat16[8, 512] on cuda
          y: bfloat16[8, 1024] on cuda
        loop h [8, 512] x [256]
          h[i0, i1] = cast(row_sum(mul(cast(x[i0, j0], float32), cast(w[i1, j0], float32))), bfloat16)
        loop y [8, 1024] x [512]
          m = cast(row_sum(mul(cast(h[i0, j0], float32), cast(v[i1, j0], float32))), bfloat16)
          y[i0, i1] = cast(add(cast(m, float32), cast(r[i0, i1], float32)), bfloat16)
        return (y)
        """,
        skinny_choices=(Tile(8, 16, 64, 4, 6), LIBRARY),
    ),
    "plan_memory_for_peak": LoopInput("""
        program p(x)
          x: float32[64]
          a: float32[64]
          b: float32[64]
          y: float32[64]
        loop a [64]
          a[i0] = exp(x[i0])
        loop b [64]
          b[i0] = neg(a[63 - i0])
        loop y [64]
          y[i0] = mul(b[i0], x[63 - i0])
        return (y)
    """),
}
"""By name of the pass."""
