"""The numerics matrix: every way to distribute a model that is compared with stock PyTorch, as data.

A row names a case (`module:function`) that trains both ways and returns what `training.compare` returns, with the
receipt. `test_matrix.py` runs rows on two and four ranks, with ATen's kernels and with ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from dcompile.compat.versions import torch_version

SHARED = 1e-7
"""A parameter of two graphs is reduced in each, and the two are added: the same sum in another order."""

LLAMA = 0.0 if torch_version() >= "2.12" else 1e-6
"""How far eager's gradients of a Llama are from any compiler's with torch 2.11, aot_eager's too."""


@dataclass(frozen=True)
class Row:
    """One line of the matrix.

    `tolerance`: largest difference on two ranks with ATen's kernels; 0 is bit for bit. `reasons`: why it stays stock.
    """

    name: str
    case: str
    how: Mapping[str, Any]
    tolerance: float = 0
    graphs: int = 1
    reasons: tuple[str, ...] = ()
    needs: str = ""
    """A parameter of DDP's constructor that older versions of torch lack."""
    adapter: str = "ddp"
    always: bool = True
    """Whether every test run has it on two ranks, or `make dist-matrix` alone."""
    collectives: int | None = None
    """How many its programs have with ATen's kernels; None is at least one for each graph."""
    own_collectives: int | None = None
    """How many they have with ours, where faster kernels hide fewer of them; None is as many."""
    note: str = ""
    """What the receipt says beside it."""

    @property
    def missing(self) -> bool:
        return bool(self.needs) and self.needs not in inspect.signature(DistributedDataParallel).parameters


def _ddp(
    title: str, tolerance: float = 0, graphs: int = 1, reasons: tuple[str, ...] = (), needs: str = "", **how: Any
) -> Row:
    """A row whose model is the title's first word, unless `how` names one."""
    how = {"name": title.partition(",")[0]} | how
    always, collectives = how.pop("always", True), how.pop("collectives", None)
    case = "tests.distributed.cases:against_stock"
    return Row(f"DDP: {title}", case, how, tolerance, graphs, reasons, needs, always=always, collectives=collectives)


VIEW = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
DDP_ROWS = (
    # a usual run has less of what other rows do as well, and of groups what four ranks run
    _ddp("mlp", always=False),
    _ddp("mlp, static graph", static_graph=True, always=False),
    _ddp("mlp, no_sync", accumulate=True, always=False),
    _ddp("mlp, no_sync, bucket view", accumulate=True, **VIEW),
    _ddp("mlp, a limit for each bucket", bucket_cap_mb_list=[0.001, 0.002, 0.004], needs="bucket_cap_mb_list"),
    _ddp("mlp, a group of half the ranks", group="half", always=False),
    _ddp("mlp, fp16 hook", hook="fp16_compress_hook"),
    _ddp(
        "mlp, bf16 hook, no_sync, two buckets",
        hook="bf16_compress_hook",
        accumulate=True,
        bucket_cap_mb=0.002,
        always=False,
    ),
    _ddp("mlp, all-reduce hook, own group", hook="allreduce_hook", group="all"),
    _ddp("mlp, half precision, bf16 hook", name="mlp_bf16", hook="bf16_compress_hook", always=False),
    _ddp("layer shared over a graph break", SHARED, 2, name="shared", accumulate=True),
    _ddp("weights tied over a graph break", SHARED, 2, name="tied_break", accumulate=True, always=False),
    _ddp(
        "tied over a graph break, unused parameters, no_sync",
        SHARED,
        2,
        name="tied_break",
        accumulate=True,
        collectives=1,
        **UNUSED,
    ),
    _ddp(
        "graph break, unused parameters, small buckets",
        SHARED,
        2,
        name="shared",
        always=False,
        bucket_cap_mb=0.002,
        **UNUSED,
    ),
    _ddp("BatchNorm, unused parameters", name="norm", **UNUSED),
    _ddp("LoRA, no_sync", name="lora", accumulate=True),
    _ddp("LoRA, bf16 hook", name="lora", hook="bf16_compress_hook", always=False),
    _ddp("llama", name="llama_one"),
    _ddp("llama, bf16 hook", hook="bf16_compress_hook", always=False),
    _ddp("tied Llama, no_sync", LLAMA, name="llama_one_tied", accumulate=True),
)


def _fsdp1(title: str, tolerance: float = 0, reasons: tuple[str, ...] = (), **how: Any) -> Row:
    """A row of FullyShardedDataParallel, as `_ddp`."""
    how = {"name": title.partition(",")[0]} | how
    always, case = how.pop("always", True), "tests.distributed.fsdp1_cases:against_stock"
    graphs = 0 if reasons else 1
    return Row(f"FSDP1: {title}", case, how, tolerance, graphs, reasons, adapter="fsdp1", always=always)


MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
FSDP1_ROWS = (
    _fsdp1("mlp, root, no_sync", wrap="root", accumulate=True, always=False),
    _fsdp1("mlp, module.compile", order="module.compile", always=False),
    _fsdp1("mlp, SHARD_GRAD_OP, no_sync", sharding_strategy="SHARD_GRAD_OP", accumulate=True),
    _fsdp1("mlp, NO_SHARD, no_sync", sharding_strategy="NO_SHARD", accumulate=True),
    _fsdp1("mlp, HYBRID_SHARD", sharding_strategy="HYBRID_SHARD", always=False),
    _fsdp1("mlp, HYBRID_SHARD_ZERO2, no_sync", sharding_strategy="_HYBRID_SHARD_ZERO2", accumulate=True, always=False),
    _fsdp1("mlp, bfloat16, float32 reductions", precision=MIXED),
    _fsdp1("mlp, float16", precision={"param_dtype": "float16"}, always=False),
    _fsdp1("mlp, reduced in bfloat16", precision={"reduce_dtype": "bfloat16"}),
    _fsdp1("uneven, torch.compile, no_sync", order="torch.compile", accumulate=True),
    _fsdp1("LoRA", name="lora", wrap="root"),
    _fsdp1("BatchNorm, unused parameters", name="norm", wrap="root"),
    # capture of a Llama is the same under DDP; units and flat parameters are those of the rows above
    _fsdp1("llama", name="llama_one", always=False),
    _fsdp1("tied Llama, root, no_sync", name="llama_tied", wrap="root", accumulate=True, always=False),
    _fsdp1("flat parameters alone", 0, ("FullyShardedDataParallel has use_orig_params=False",), name="mlp",
           use_orig_params=False),
    _fsdp1("graph break", 0, (
        "a part of the model is not compiled (graph break), where parameters would be missing",
    ), name="shared", wrap="root", fullgraph=False),
)  # fmt: skip


def _fsdp2(
    title: str, gathers: int, again: int, reductions: int, always: bool = True, tolerance: float = 0,
    own: int | None = None, **how: Any,
) -> Row:  # fmt: skip
    """A row of `fully_shard`: gathers of its forward, those that its backward needs again, and reductions."""
    how = {"name": title.partition(",")[0]} | how
    case, graphs = "tests.distributed.fsdp_cases:against_stock", 1 if how.get("fullgraph", True) else 2
    collectives = gathers + again + reductions
    return Row(
        f"FSDP2: {title}", case, how, tolerance, graphs, adapter="fsdp2", always=always, collectives=collectives,
        own_collectives=own,
    )  # fmt: skip


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDE = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)
ROOT = {"wrap": "root"}
SHARED_LAYER = {"name": "shared", "fullgraph": False}
TIED_BREAK = {"name": "tied_break", "fullgraph": False} | ROOT
FSDP2_ROWS = (
    _fsdp2("mlp, torch.compile, not resharded, parts saved", 3, 0, 3, order="torch.compile", saved="parts",
           reshard_after_forward=False),
    _fsdp2("mlp, not resharded, no_sync", 3, 0, 3, reshard_after_forward=False, accumulate=True, always=False),
    _fsdp2("mlp, gradient checkpointing", 3, 2, 3, name="checkpointed"),
    _fsdp2("mlp, module.compile, from meta", 3, 1, 3, order="module.compile", wrap="meta"),
    _fsdp2("mlp, two layers as one", 2, 1, 2, wrap="grouped"),
    _fsdp2("mlp, replicas, no_sync, parts saved", 3, 1, 3, replicas=2, accumulate=True, saved="parts", always=False),
    _fsdp2("mlp, bfloat16", 3, 1, 3, mp_policy=BF16, always=False),
    _fsdp2("mlp, float16, no_sync", 1, 0, 1, mp_policy=FP16, accumulate=True, **ROOT),
    _fsdp2("mlp, replicas, float16", 1, 0, 1, replicas=2, mp_policy=FP16, always=False, **ROOT),
    _fsdp2("uneven, parts saved", 3, 1, 3, saved="parts", always=False),
    _fsdp2("uneven, root, no_sync", 1, 0, 1, accumulate=True, always=False, **ROOT),
    _fsdp2("uneven, in CPU memory, no_sync", 3, 1, 3, offload_policy=CPUOffloadPolicy(pin_memory=False),
           accumulate=True),
    _fsdp2("mlp, sharded columns, no_sync", 3, 1, 3, placement=1, accumulate=True),
    _fsdp2("llama, sharded columns", 3, 2, 3, placement=1, always=False),
    _fsdp2("uneven, all of a policy, no_sync", 1, 0, 1, mp_policy=WIDE, accumulate=True, **ROOT),
    _fsdp2("uneven, replicas", 3, 1, 3, replicas=2, always=False),
    _fsdp2("llama", 3, 2, 3, always=False),
    _fsdp2("Llama, parts saved, not resharded", 3, 0, 3, name="llama", saved="parts", reshard_after_forward=False,
           always=False),
    # the root's in two: the embedding, and the last projection with its norm; in one where little can hide the second
    _fsdp2("Llama, many tokens", 3, 1, 3, name="llama_one_wide", own=5, tolerance=LLAMA),
    _fsdp2("tied Llama, no_sync", 2, 1, 2, name="llama_one_tied", accumulate=True, always=False),
    _fsdp2("layer shared over a graph break", 4, 2, 4, **SHARED_LAYER),
    _fsdp2("weights tied over a graph break, no_sync", 2, 0, 2, accumulate=True, always=False, **TIED_BREAK),
    _fsdp2("graph break, not resharded", 4, 0, 4, reshard_after_forward=False, always=False, **SHARED_LAYER),
    _fsdp2("graph break, two layers as one", 4, 1, 4, wrap="grouped", always=False, **SHARED_LAYER),
    _fsdp2("graph break, replicas, no_sync", 2, 0, 2, replicas=2, accumulate=True, always=False, **SHARED_LAYER | ROOT),
    _fsdp2("graph break, sharded columns, no_sync", 2, 0, 2, placement=1, accumulate=True, always=False,
           **SHARED_LAYER | ROOT),
    _fsdp2("tied weights, graph break, bfloat16", 2, 0, 2, mp_policy=BF16, always=False, **TIED_BREAK),
    _fsdp2("graph break, in CPU memory, no_sync", 2, 0, 2, offload_policy=CPUOffloadPolicy(pin_memory=False),
           accumulate=True, always=False, **SHARED_LAYER | ROOT),
    # stock reduces a layer that is called twice by itself: first what an earlier step has left
    _fsdp2("layer shared over a graph break, no_sync", 4, 2, 4, tolerance=SHARED, accumulate=True, always=False,
           **SHARED_LAYER),
)  # fmt: skip


def _by_blocks(title: str, collectives: int, note: str = "", always: str = "whole", **how: Any) -> tuple[Row, ...]:
    """Rows of a stack that is compiled as a whole, and block by block, which is promoted. `always`: see `Row`."""
    case = "tests.distributed.by_blocks_cases:against_stock"
    return tuple(
        Row(f"FSDP2 {name}: {title}", case, {"by": by} | how, adapter="fsdp2", always=name == always,
            collectives=collectives, note=note or ("parts that were compiled each" if name == "by blocks" else ""))
        for name, by in (("whole", "whole"), ("by blocks", "block.compile"))
    )  # fmt: skip


# 5 gathers, 4 again, and 5 reductions
KEEPS = {"train": "keeping gathered", "accumulate": True}
BY_BLOCKS_ROWS = (
    *_by_blocks("plain, no_sync", 14, accumulate=True, always="by blocks"),
    *(row for by in ("dcompile.compile", "torch.compile", "regions")
      for row in _by_blocks(by, 14, always="", by=by)[1:]),
    *_by_blocks("compiled after sharding, no_sync", 14, by="late", accumulate=True, always="by blocks")[1:],
    *_by_blocks("replicas, no_sync", 14, replicas=2, accumulate=True, always="by blocks"),
    *_by_blocks("one replica of all shards", 14, replicas=1, always=""),
    *_by_blocks("resharded, the root too", 15, reshard_after_forward=True, always=""),
    *_by_blocks("not resharded, no_sync", 10, reshard_after_forward=False, accumulate=True, always="by blocks"),
    *_by_blocks("resharded to two ranks", 15, reshard_after_forward=2, always=""),
    *_by_blocks("forward prefetch", 14, "set_modules_to_forward_prefetch: compiled", setting="forward prefetch"),
    *_by_blocks("backward prefetch", 14, "set_modules_to_backward_prefetch: compiled", "",
                setting="backward prefetch"),
    *_by_blocks("unshard before the forward", 14, "by hand (unshard) or eagerly", train="unsharding"),
    *_by_blocks("kept gathered, no_sync", 14, "set_reshard_after_backward(False)", "by blocks", **KEEPS),
    *_by_blocks("not resharded, kept gathered, no_sync", 10, "set_reshard_after_backward(False)", "",
                reshard_after_forward=False, **KEEPS),
    *_by_blocks("checkpoints around blocks", 14, checkpointed="outside", always="by blocks"),
    *_by_blocks("checkpoints in blocks", 14, checkpointed="inside", always="by blocks"),
    *_by_blocks("checkpoint_wrapper, compiled", 14, checkpointed="wrapper", always=""),
    *_by_blocks("compiled, in checkpoint_wrapper", 14, checkpointed="wrapper around", always=""),
    *_by_blocks("checkpoint by hooks", 14, checkpointed="hooks", always=""),
    *_by_blocks("evaluation in between", 5, train="evaluating"),
    *_by_blocks("checkpoints, evaluation in between", 5, checkpointed="outside", train="evaluating", always=""),
    *_by_blocks("a block left out by the batch", 11, train="leaving out", always="by blocks"),
)  # fmt: skip


def _apart(title: str, collectives: int, by: str = "apart", always: bool = True, graphs: int = 1, **how: Any) -> Row:
    """A row of a stack of which each block is a program of its own: those of one of them."""
    case, how = "tests.distributed.by_blocks_cases:against_stock", {"by": by} | how
    return Row(f"FSDP2 apart: {title}", case, how, adapter="fsdp2", always=always, graphs=graphs,
               collectives=collectives, note="of them in vain")  # fmt: skip


APART_ROWS = (
    _apart("no_sync", 3, accumulate=True),
    _apart("replicas, no_sync", 3, replicas=2, accumulate=True, always=False),
    _apart("not resharded, no_sync", 2, reshard_after_forward=False, accumulate=True, always=False),
    _apart("unshard before the forward", 3, train="unsharding", always=False),
    _apart("checkpoints around blocks, evaluation in between", 1, checkpointed="outside", train="evaluating"),
    _apart("checkpoints in blocks", 3, checkpointed="inside", always=False),
    _apart("a block left out by the batch", 3, train="leaving out"),
    _apart("forwards that end early", 3, train="ending early"),
    _apart("breaks around blocks, no_sync", 3, "block.compile", setting="breaks", accumulate=True),
)
ROWS: tuple[Row, ...] = (*DDP_ROWS, *FSDP1_ROWS, *FSDP2_ROWS, *BY_BLOCKS_ROWS, *APART_ROWS)
