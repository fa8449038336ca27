"""Benchmark of training steps on several GPUs: DDP and FSDP2 with torch.compile and with dcompile, in one job.

    python -m benchmarks.gpu_ddp_fsdp --ranks 2 --only 160M-ddp,160M-fsdp2 --json --save
    python -m benchmarks.gpu_ddp_fsdp --ranks 2 --only 1B-fsdp2-mixed --profile
    torchrun --standalone --nproc-per-node 4 -m benchmarks.gpu_ddp_fsdp --only 1B-ddp
    python -m benchmarks.gpu_ddp_fsdp --merge one.json two.json --save

A step is forward with loss, backward, fused AdamW, zero_grad; parameters are bfloat16. Parts of a line's name change
this. `float8`: torchao's float8 training in all linear layers but the head, with float8 all-gathers, for peers of
that word; torchao computes all scales behind the optimizer's step, or dcompile finds them (`own scales`). `mixed`:
float32 parameters under MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32), as torchtitan. `amp`:
float32 parameters under autocast. `checkpointed`: gradient_checkpointing_enable. `accumulate`: float32 parameters,
four batches a step, of which the last reduces, and clip_grad_norm_. 8B has SGD without momentum, to fit in memory.
`bitwise`: deterministic algorithms for all peers, and parameters after the first steps are compared with eager's by
checksums, and with those of torch.compile's backend aot_eager, for which transformers makes other masks.

All peers of a line are in one job and are timed in turn, round after round, by CUDA events; the slowest rank counts.
FSDP2 is fully_shard on each block and on the root. torch.compile compiles each block, as its users do, dcompile the
model, or each block as well in lines with `blocks`. Memory is a peer's addition to the job's: parameters, optimizer,
and the peak of a step. Kernels are from torch.profiler. Communication is NCCL's kernels, and copies between and inside
GPUs. It is exposed while no other kernel runs, and the GPU is idle while no kernel runs at all. Tokens a second and MFU
are those of one GPU (the formula is in `benchmarks.utilization`). --profile prints each peer's kernel time by kinds
instead of timing rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from benchmarks.common import environment, finish, last_peers, stored, table
from benchmarks.gpu_train import SHAPES, Shape, make
from benchmarks.peers import Peer, cell, first_line, time_in_turn
from benchmarks.ranks import Job, is_rank, joined, run_job
from benchmarks.utilization import by_kind, kinds_table, utilization

MODULE = "benchmarks.gpu_ddp_fsdp"
WARM_UP = 4
"""Steps before the first timing: they compile, and record CUDA graphs."""
DCOMPILE = {"receipt": False}
VARIABLES = {"NCCL_NVLS_ENABLE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment of the ranks; deterministic algorithms require the second."""
CLIP = 1.0
"""Norm to which gradients are clipped, in lines with several batches a step."""


@dataclass(frozen=True)
class Line:
    """A model and its data parallelism."""

    shape: Shape
    kind: str
    ratio: float | None = None
    """Targets: dcompile's step over the base's, exposed part of its step, its peak memory over the base's."""
    exposed: float | None = None
    memory: float | None = None
    whole: float | None = None
    """Target: the step of dcompile by blocks over that of the whole model; the other targets are then those of blocks.
    """
    float8: float | None = None
    """Target: dcompile's step in float8 over its step in bfloat16."""
    precision: str = "bf16"
    """bfloat16 parameters ("bf16"), or float32 ones with FSDP2's mixed precision ("mixed") or autocast ("amp")."""
    checkpointed: bool = False
    batches: int = 1
    """Batches of a step; gradients of several are accumulated and clipped."""
    clips: bool = False
    """Whether gradients of one batch are clipped, too."""
    momentum: bool = True
    """Whether the optimizer is AdamW; otherwise it is SGD without momentum, which needs no memory of its own."""
    deterministic: bool = False
    """Whether torch uses deterministic algorithms."""
    peers: tuple[str, ...] = ()
    """Default peers of the line; none: `DEFAULT_PEERS`."""


BASE = "torch.compile"
BOTH = (BASE, "dcompile")
RECORDED = (*BOTH, "dcompile reduce-overhead")
BLOCKS = ("eager", BASE, "dcompile by blocks", "dcompile")
STEPS = (
    BASE, "torch.compile reduce-overhead", "dcompile", "dcompile step", "dcompile train_step",
    "dcompile reduce-overhead", "dcompile reduce-overhead step", "dcompile reduce-overhead train_step",
)  # fmt: skip
BUDGETS = (BASE, "dcompile", "dcompile budget auto", "dcompile budget base")
CURVES = (
    BASE, "dcompile", "torch.compile budget 0.4", "dcompile budget 0.5", "dcompile budget 0.35",
    "torch.compile budget 0.2", "dcompile budget 0.75", "torch.compile budget 0.7",
)  # fmt: skip
BITWISE = ("eager", "torch.compile aot_eager", "dcompile bitwise", "dcompile")
FLOAT8 = (BASE, "dcompile", f"{BASE} float8", "dcompile float8", "dcompile float8 own scales")
TINY = SHAPES["tiny"]
LINES = {
    "160M-ddp": Line(SHAPES["160M"], "ddp", ratio=0.6),
    "160M-fsdp2": Line(SHAPES["160M"], "fsdp2", ratio=0.3),
    "1B-ddp": Line(SHAPES["1B"], "ddp", ratio=0.85, exposed=0.01),
    "1B-fsdp2": Line(SHAPES["1B"], "fsdp2", ratio=0.85, exposed=0.03, memory=0.9),
    "160M-fsdp2-mixed": Line(SHAPES["160M"], "fsdp2", ratio=0.2, precision="mixed", peers=RECORDED),
    "1B-fsdp2-mixed": Line(SHAPES["1B"], "fsdp2", ratio=0.82, precision="mixed", peers=RECORDED),
    "1B-fsdp2-mixed-checkpointed": Line(
        SHAPES["1B"], "fsdp2", ratio=0.85, memory=1.0, precision="mixed", checkpointed=True, peers=BOTH
    ),
    "3B-fsdp2-mixed-checkpointed": Line(
        SHAPES["3B"], "fsdp2", ratio=0.85, memory=1.0, precision="mixed", checkpointed=True, peers=BOTH
    ),
    "8B-fsdp2-mixed-checkpointed": Line(
        SHAPES["8B"], "fsdp2", 0.85, memory=1.0, precision="mixed", checkpointed=True, momentum=False, peers=BOTH
    ),
    "3B-fsdp2-budget": Line(SHAPES["3B"], "fsdp2", ratio=0.8, precision="mixed", checkpointed=True, peers=BUDGETS),
    "8B-fsdp2-budget": Line(
        SHAPES["8B"], "fsdp2", 0.8, precision="mixed", checkpointed=True, momentum=False, peers=BUDGETS
    ),
    "1B-budgets": Line(replace(SHAPES["1B"], rows=16), "plain", peers=CURVES),
    "160M-ddp-amp": Line(SHAPES["160M"], "ddp", precision="amp", peers=RECORDED),
    "1B-ddp-amp": Line(SHAPES["1B"], "ddp", precision="amp", peers=BOTH),
    "160M-fsdp2-accumulate": Line(SHAPES["160M"], "fsdp2", precision="mixed", batches=4, peers=BOTH),
    "160M-ddp-accumulate": Line(SHAPES["160M"], "ddp", precision="amp", batches=4, peers=BOTH),
    "160M-fsdp2-blocks": Line(
        SHAPES["160M"],
        "fsdp2",
        0.2,
        0.03,
        1.0,
        1.03,
        "mixed",
        peers=(*BLOCKS, "dcompile by blocks reduce-overhead", "dcompile reduce-overhead"),
    ),
    "1B-fsdp2-blocks": Line(SHAPES["1B"], "fsdp2", 0.9, 0.03, 1.0, 1.03, "mixed", peers=BLOCKS),
    "1B-fsdp2-blocks-checkpointed": Line(
        SHAPES["1B"], "fsdp2", 0.9, 0.03, 1.0, 1.03, "mixed", checkpointed=True, peers=BLOCKS
    ),
    "8B-fsdp2-blocks-checkpointed": Line(
        SHAPES["8B"], "fsdp2", 0.9, 0.03, 1.0, 1.03, "mixed", checkpointed=True, momentum=False, peers=BLOCKS
    ),
    "160M-ddp-step": Line(SHAPES["160M"], "ddp", ratio=0.28, peers=STEPS),
    "160M-fsdp2-step": Line(SHAPES["160M"], "fsdp2", ratio=0.14, precision="mixed", clips=True, peers=STEPS),
    "1B-fsdp2-step": Line(SHAPES["1B"], "fsdp2", exposed=0.01, precision="mixed", clips=True, peers=STEPS),
    "1B-ddp-step": Line(SHAPES["1B"], "ddp", peers=STEPS),
    "30M-step": Line(SHAPES["30M"], "plain", ratio=0.25, precision="amp", clips=True, peers=STEPS),
    "1B-ddp-bitwise": Line(SHAPES["1B"], "ddp", deterministic=True, peers=BITWISE),
    "1B-fsdp2-bitwise": Line(SHAPES["1B"], "fsdp2", deterministic=True, peers=BITWISE),
    "8B-layers-fsdp2-float8": Line(SHAPES["8B-layers"], "fsdp2", float8=0.77, peers=FLOAT8),
    "tiny-fsdp2-float8": Line(TINY, "fsdp2", float8=0.77, peers=FLOAT8),
    "tiny-ddp": Line(TINY, "ddp"),
    "tiny-ddp-step": Line(TINY, "ddp", clips=True, peers=(BASE, "dcompile step", "dcompile train_step")),
    "tiny-fsdp2": Line(TINY, "fsdp2"),
    "tiny-fsdp2-mixed": Line(TINY, "fsdp2", precision="mixed", checkpointed=True, batches=2),
    "tiny-fsdp2-blocks": Line(TINY, "fsdp2", whole=1.03, precision="mixed", peers=BLOCKS),
    "tiny-fsdp2-budget": Line(TINY, "fsdp2", precision="mixed", checkpointed=True, peers=BUDGETS),
    "tiny-budgets": Line(TINY, "plain", peers=CURVES),
    "tiny-ddp-bitwise": Line(TINY, "ddp", deterministic=True, peers=BITWISE),
    "tiny-ddp-amp": Line(TINY, "ddp", precision="amp", batches=2),
}
"""Name -> line. The tiny ones test the benchmark itself, also on CPU."""
PEERS = (
    "eager", BASE, "torch.compile reduce-overhead", "dcompile", "dcompile memory", "dcompile reduce-overhead",
    "dcompile collective", "dcompile collective reduce-overhead", "dcompile tuned", "dcompile tuned reduce-overhead",
    "dcompile by blocks", "dcompile by blocks reduce-overhead", "dcompile step", "dcompile reduce-overhead step",
    "dcompile train_step", "dcompile reduce-overhead train_step",
    "torch.compile + optimizer", "dcompile + optimizer", "dcompile reduce-overhead + optimizer",
    "torch.compile aot_eager", "dcompile bitwise", "dcompile sentinel",
    "dcompile budget auto", "dcompile budget base", "dcompile budget 0.75", "dcompile budget 0.5",
    "dcompile budget 0.35", "torch.compile budget 0.7", "torch.compile budget 0.4", "torch.compile budget 0.2",
    "eager float8", f"{BASE} float8", "dcompile float8", "dcompile float8 own scales",
    "dcompile float8 reduce-overhead", "dcompile float8 collective",
)  # fmt: skip
"""`memory` is dcompile's option recompute, `collective` its option gathers, `tuned` its option max_autotune.
`by blocks` compiles each block, as torch.compile's peers do. `bitwise` is its option numerics; `sentinel` checks one of
200 calls of each program. `budget` is its option memory_budget: auto, the peak of torch.compile's peer, or a part of
dcompile's own peak without a budget. For torch.compile it is the setting activation_memory_budget of its functorch.

`step` gives dcompile the optimizer, whose updates then run in the backward's program or in one of their own.
`train_step` is dcompile's function for a whole step: where it can be, forward, backward and update are one program.

Peers with `+ optimizer` compile AdamW's step, too. For torch.compile it has many small operations (`foreach`), since
torch.compile cannot compile the fused one."""
DEFAULT_PEERS = (BASE, "dcompile", "dcompile memory", "dcompile reduce-overhead")


# --- one peer ---------------------------------------------------------------------------------------------------------


def spread(
    model: Any,
    kind: str,
    name: str,
    device: Any,
    bucket_cap_mb: float | None = None,
    mixed: bool = False,
    budget: str = "",
) -> Any:
    """Wrap or shard the model, and compile it, as the peer's user writes it; with other names it stays eager."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    compiled = compiler(name, budget)
    if kind == "plain":
        return compiled(model)
    if kind == "ddp":
        ids = [device] if device.type == "cuda" else None
        return compiled(DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=bucket_cap_mb))
    by_block = name.startswith("torch.compile") or "by blocks" in name
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    layers = model.model.layers
    for number, layer in enumerate(layers):
        if by_block:
            layers[number] = compiled(layer)
        fully_shard(layers[number], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model if by_block else compiled(model)


def in_float8(model: Any, device: Any) -> Any:
    """Convert all linear layers but the head to torchao's float8 training, with float8 all-gathers under FSDP2."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found, unused-ignore]

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")


def memory_budget(word: str, job: Job, found: dict[str, Any]) -> str:
    """Return the option memory_budget: `auto`, torch.compile's peak, or a part of dcompile's, beside other peers."""
    import torch

    if word == "auto":
        return word
    alone = found["torch.compile" if word == "base" else "dcompile"].get("peak_mib", 64.0)
    held = torch.cuda.memory_allocated() / 2**20 if job.device.type == "cuda" else 0.0
    return f"{held + alone * (1.0 if word == 'base' else float(word)):.0f}MiB"


def compiler(name: str, budget: str = "") -> Callable[[Any], Any]:
    """Return the compiler of a peer, for its model, and for its optimizer's step if that is compiled."""
    import torch

    import dcompile

    words = name.split()
    recorded = "reduce-overhead" in words
    if words[0] == "torch.compile":
        named = "aot_eager" if "aot_eager" in words else "inductor"
        backend: Any = inductor_within(float(budget)) if budget else named
        return functools.partial(torch.compile, mode="reduce-overhead" if recorded else None, backend=backend)
    if words[0] != "dcompile":
        return lambda model: model
    more: dict[str, Any] = {"triton.cudagraphs": True} if recorded else {}
    more |= {"recompute": "memory"} if "memory" in words else {}
    more |= {"gathers": "collective"} if "collective" in words else {}
    more |= {"max_autotune": True} if "tuned" in words else {}
    more |= {"numerics": "bitwise"} if "bitwise" in words else {}
    more |= {"sentinel": 200} if "sentinel" in words else {}
    more |= {"memory_budget": budget} if budget else {}
    return functools.partial(dcompile.compile, options={**DCOMPILE, **more})


def inductor_within(budget: float) -> Callable[[Any, Any], Any]:
    """Return inductor as a backend of its own, with a part of the saved bytes as its budget.

    Dynamo gives equal models of one backend the same code, whatever this setting is by then.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx

    def compile_within(graph: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return compile_within


class Training(Peer):
    """A peer: its model, its optimizer, and measurements of its steps."""

    def __init__(self, name: str, line: Line, job: Job, found: dict[str, Any]) -> None:
        import torch

        super().__init__(name, job)
        words = name.split()
        budget = words[words.index("budget") + 1] if "budget" in words else ""
        self.budget = memory_budget(budget, job, found) if budget and words[0] == "dcompile" else budget
        self.line = line
        model = make(line.shape, job.device, torch.bfloat16 if line.precision == "bf16" else torch.float32)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        if line.checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.scales: Callable[[], Any] = lambda: None
        if "float8" in name.split():
            model = in_float8(model, job.device)
        given = name.endswith("step")
        first = "eager" if given else name
        mixed = line.precision == "mixed"
        self.call = spread(model, line.kind, first, job.device, mixed=mixed, budget=self.budget)
        whole = name.endswith("+ optimizer")
        many = not line.momentum or (whole and name.startswith("torch.compile"))  # DTensor has no fused SGD
        kind = {"foreach": True} if many else {"fused": True}
        optimizer = torch.optim.AdamW if line.momentum else torch.optim.SGD
        self.optimizer = optimizer(self.call.parameters(), lr=1e-4, **kind)
        self.whole: Callable[[Any], Any] | None = None
        """The function of a batch that makes a step, if the peer is one."""
        if name.endswith("train_step"):
            self.whole = self._train_step(name)
        elif given:
            self.call = compiler(name)(self.call, optimizer=self.optimizer)
        if "float8" in name.split() and "own" not in name.split():
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            self.scales = functools.partial(precompute_float8_dynamic_scale_for_fsdp, self.call)
        self.update = compiler(name)(self.optimizer.step) if whole else self.optimizer.step
        generator = torch.Generator().manual_seed(1 + job.rank)
        size = (line.shape.rows, line.shape.length)
        self.tokens = torch.randint(0, line.shape.vocabulary, size, generator=generator).to(job.device)
        began = time.perf_counter()
        self.warm_up(WARM_UP)
        self.warm_up_s = time.perf_counter() - began
        self.checksum = checksum(self.call.parameters()) if line.deterministic else None

    def _loss(self) -> Any:
        import torch

        with torch.autocast(self.job.device.type, torch.bfloat16, enabled=self.line.precision == "amp"):
            return self.call(input_ids=self.tokens, labels=self.tokens).loss

    def _train_step(self, name: str) -> Callable[[Any], Any]:
        import dcompile

        clips, settings = self.line.batches > 1 or self.line.clips, compiler(name).keywords  # type: ignore[attr-defined]
        return dcompile.train_step(
            self.call,
            lambda _model, _batch: self._loss(),
            self.optimizer,
            clip_norm=CLIP if clips else None,
            accumulate=self.line.batches,
            **settings,
        )

    def step(self) -> Any:
        """Run one step; return the loss."""
        import torch

        if self.whole is not None:
            loss = self.whole([None] * self.line.batches).loss
            self.scales()
            return loss
        for batch in range(self.line.batches):
            with self._reducing(batch + 1 == self.line.batches):
                loss = self._loss()
                (loss / self.line.batches).backward() if self.line.batches > 1 else loss.backward()
        if self.line.batches > 1 or self.line.clips:
            torch.nn.utils.clip_grad_norm_(self.call.parameters(), CLIP)
        self.update()
        self.scales()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @contextlib.contextmanager
    def _reducing(self, reduces: bool) -> Iterator[None]:
        """Enable or disable gradient reductions for one of several batches."""
        if reduces:
            yield
        elif self.line.kind == "ddp":
            with self.call.no_sync():
                yield
        else:
            self.call.set_requires_gradient_sync(False)
            yield
            self.call.set_requires_gradient_sync(True)

    def rate(self, ms: float, device: str) -> dict[str, float]:
        """Return the tokens a second of one GPU, and the MFU, from a step's milliseconds."""
        return utilization(self.line.shape, self.parameters, self.line.batches * self.tokens.numel(), ms, device)

    def look(self, steps: int, timelines: str) -> dict[str, Any]:
        """Measure memory, kernels, exposed communication and idle time on rank 0, with dcompile's own reports."""
        found: dict[str, Any] = {"warm_up_s": max(self.job.all(self.warm_up_s)), "losses": self.losses}
        found |= {} if self.checksum is None else {"checksums": self.job.all(self.checksum)}
        if self.gpu:
            found |= self.peak_memory() | self._kernels(steps)
        if self.name.startswith("dcompile"):
            found |= self._explained(timelines)
        self.job.barrier()
        return found

    def _kernels(self, steps: int) -> dict[str, Any]:
        events = self.kernel_events(steps)
        return lanes(events, steps) | {"longest": beside_communication(events, steps), "kinds": by_kind(events, steps)}

    def _steps(self) -> dict[str, Any]:
        """Return how many steps ran in which way, if dcompile has the optimizer."""
        from dcompile.capture.entry import find_model

        model = find_model(self.call)
        step = None if model is None else model.step
        if step is None:
            return {}
        found = {"whole": step.whole, "not whole": dict(step.forwards.separate)}
        return found | {
            "joined": step.joined,
            "updated": step.updated,
            "apart": dict(step.separate),
            "eager": dict(step.eager),
        }

    def _explained(self, timelines: str) -> dict[str, Any]:
        """Return the receipt, and dcompile.profile's figures of each collective; its timelines go to `timelines`."""
        import dcompile

        try:
            receipt = dcompile.receipt(self.call)
            taken = receipt.eligible and receipt.adapter != "plain"
            said: dict[str, Any] = {"took_over": taken, "adapter": receipt.adapter, "replays": receipt.replays}
            said |= {"reasons": list(receipt.reasons), "notes": list(receipt.notes)}
            said |= self._steps()
            said |= {"collectives_in_graphs": receipt.collectives, "kernels_own": receipt.kernel_calls}
            said |= {"bytes_gathered": receipt.bytes_gathered}
        except Exception as error:  # a missing receipt is a result, and no reason to lose the times
            return {"took_over": False, "reasons": [first_line(error)]}
        if receipt.replays or not taken:
            return said  # a profile of a replayed model would not use its CUDA graphs
        try:
            with dcompile.profile(self.call) as measured:
                for _ in range(4):
                    self.step()
            said["profile"] = str(measured).splitlines()
            if timelines and self.job.main:
                for ending in ("svg", "json"):
                    measured.save(Path(f"{timelines}.{ending}"))
        except Exception as error:
            said["profile"] = [f"failed: {first_line(error)}"]
        return said


def checksum(parameters: Iterable[Any]) -> list[int]:
    """Return two sums over the bits of all parameters, of which the second weights each element by its place."""
    import torch

    sums = [0, 0]
    for parameter in parameters:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        bits = local.detach().flatten().view({2: torch.int16, 4: torch.int32}[local.itemsize]).long()
        places = torch.arange(1, bits.numel() + 1, device=bits.device)
        for place, value in enumerate((bits.sum(), (bits * places).sum())):
            sums[place] += int(value)
    return sums


def lanes(events: Iterable[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """Return the kernels a step, and milliseconds a step: computation, communication, exposed communication, idle, all.

    `events`: kernels as (name, begin, end) in milliseconds.
    """
    from dcompile.explain.timeline import covered_seconds

    kernels = list(events)
    network = [(begin, end) for name, begin, end in kernels if is_communication(name)]
    work = [(begin, end) for name, begin, end in kernels if not is_communication(name)]
    busy, computing = covered_seconds([*network, *work]), covered_seconds(work)
    whole = max((end for *_, end in kernels), default=0.0) - min((begin for _, begin, _ in kernels), default=0.0)
    return {
        "kernels": round(len(kernels) / steps),
        "compute_ms": computing / steps,
        "comm_ms": covered_seconds(network) / steps,
        "exposed_ms": (busy - computing) / steps,
        "idle_ms": (whole - busy) / steps,
        "profiled_ms": whole / steps,
    }


def is_communication(name: str) -> bool:
    """Is a kernel communication? That is NCCL's kernels, and copies between GPUs or inside one, which gathers need."""
    return "nccl" in name.lower() or name.startswith(("Memcpy PtoP", "Memcpy DtoD"))


def beside_communication(
    events: Iterable[tuple[str, float, float]], steps: int, count: int = 30
) -> list[tuple[str, float, float, float | None, float | None]]:
    """Return (kernel, launches a step, ms a step, us of a launch alone, us of an overlapped one), longest first.

    A launch is overlapped if a collective runs in more than half of its time, and alone if it overlaps with none.
    """
    kernels = list(events)
    network = sorted((begin, end) for name, begin, end in kernels if is_communication(name))
    taken: dict[str, tuple[list[float], list[float], list[float]]] = {}
    at = 0
    for name, begin, end in sorted(kernels, key=lambda event: event[1]):
        if is_communication(name):
            continue
        while at < len(network) and network[at][1] < begin - 50:  # no collective takes 50 ms
            at += 1
        shared = 0.0
        for start, stop in network[at:]:
            if start > end:
                break
            shared += max(0.0, min(stop, end) - max(start, begin))
        every, alone, beside = taken.setdefault(name[:90], ([], [], []))
        every.append(end - begin)
        if shared == 0:
            alone.append(end - begin)
        elif shared > (end - begin) / 2:
            beside.append(end - begin)
    rows = [
        (
            name,
            len(every) / steps,
            sum(every) / steps,
            *(1e3 * statistics.mean(t) if t else None for t in (alone, beside)),
        )
        for name, (every, alone, beside) in taken.items()
    ]
    return sorted(rows, key=lambda row: -row[2])[:count]


# --- one line ---------------------------------------------------------------------------------------------------------


def measure(
    label: str, arguments: argparse.Namespace, job: Job, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure all peers of one line; `keep` gets the results so far after each part."""
    import torch

    torch._dynamo.config.recompile_limit = 64  # the peers' models share the code of their class
    torch._dynamo.config.accumulated_recompile_limit = 1024
    line, found = LINES[label], dict[str, Any]()
    torch.use_deterministic_algorithms(line.deterministic)
    peers = []
    device = torch.cuda.get_device_name() if job.device.type == "cuda" else "cpu"
    for name in arguments.peers or line.peers or DEFAULT_PEERS:
        try:
            peer, error = Training(name, line, job, found), ""
        except Exception as raised:  # a peer that fails is a result, and no reason to lose the others
            peer, error = None, first_line(raised)
        errors = [f"rank {rank}: {said}" for rank, said in enumerate(job.all(error)) if said]
        if errors or peer is None:
            found[name] = {"error": "; ".join(errors)[:400]}
            peer = None
        else:
            pictures = f"{arguments.timelines}/{label}-x{job.size}-{name}" if arguments.timelines else ""
            found[name] = peer.look(3, pictures)
            peers.append(peer)
        keep(found)
    time_in_turn(peers, 0 if arguments.profile else arguments.rounds, arguments.steps, device, found, keep)
    for peer in peers:
        values = (
            [float(p.detach().float().sum()) for p in list(peer.call.parameters())[:4]] if line.kind == "ddp" else []
        )
        found[peer.name]["ranks_equal"] = len({tuple(said) for said in job.all(values)}) == 1
    keep(found)
    return found


def be_rank(arguments: argparse.Namespace) -> int:
    """Measure all lines as one rank of a job; rank 0 writes each when it is done."""
    lines: dict[str, Any] = {}
    with joined(arguments.device) as (job, after):
        for label in arguments.only:

            def keep(found: dict[str, Any], label: str = label) -> None:
                lines[label] = found
                if job.main:
                    Path(arguments.out).write_text(json.dumps(_result(lines, arguments, job.size)))

            measure(label, arguments, job, keep)
            gc.collect()
            if job.device.type == "cuda":
                import torch

                torch.cuda.synchronize()
                torch.cuda.empty_cache()
    if job.main:
        result = _result(lines, arguments, job.size) | after
        Path(arguments.out).write_text(json.dumps(result))
        if not arguments.quiet:
            show(result, arguments.longest)
    return 0


def _result(lines: dict[str, Any], arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    return {
        "benchmark": "gpu_ddp_fsdp",
        "device": device,
        "ranks": ranks,
        "environment": {**environment(torch.get_num_threads()), "cuda": torch.version.cuda},
        "lines": lines,
        "complete": all(
            "ms" in found or (arguments.profile and "error" not in found)
            for line in lines.values()
            for found in line.values()
        ),
    }


# --- results ----------------------------------------------------------------------------------------------------------


def verdicts(label: str, line: dict[str, Any]) -> list[str]:
    """Compare the best of dcompile's modes with the line's targets."""
    base, line_ = line.get(BASE, {}), LINES[label]
    everything = {name: found for name, found in line.items() if name.startswith("dcompile") and "ms" in found}
    measured = {name: found for name, found in everything.items() if "float8" not in name}
    float8 = {name: found for name, found in everything.items() if "float8" in name}
    wholes = [found["ms"] for name, found in measured.items() if "by blocks" not in name]
    ours = {n: found for n, found in measured.items() if line_.whole is None or "by blocks" in n}
    if not ours or ("ms" not in base and not line_.deterministic):
        return [f"{label}: cannot be judged, a peer is missing"]
    name = min(ours, key=lambda n: ours[n]["ms"])
    best = ours[name]
    said = []

    def judge(what: str, value: float, target: float | None) -> None:
        if target is not None:
            said.append(
                f"{label}, {name}: {what} {value:.3f}, target {target}: {'met' if value <= target else 'MISSED'}"
            )

    if (limited := line.get("dcompile budget base", {})) and "ms" in base and "ms" in limited:
        judge("step within torch.compile's peak, over torch.compile's", limited["ms"] / base["ms"], 0.92)
        if "peak_mib" in limited and "peak_mib" in base:
            judge("its peak memory over torch.compile's", limited["peak_mib"] / base["peak_mib"], 1.0)
    said += over_budgets(label, line)
    if "ms" in base:
        judge("step over torch.compile's", best["ms"] / base["ms"], line_.ratio)
    if wholes and float8:
        quickest = min(float8.values(), key=lambda found: found["ms"])
        judge("float8's step over bfloat16's", quickest["ms"] / min(wholes), line_.float8)
        if "bytes_gathered" in quickest and best.get("bytes_gathered"):
            share = quickest["bytes_gathered"] / best["bytes_gathered"]
            said.append(f"{label}: float8 gathers {share:.3f} of bfloat16's bytes")
        said += [
            f"{label}, {n}: LEFT TO STOCK: {f.get('reasons')}" for n, f in float8.items() if not f.get("took_over")
        ]
    if wholes:
        judge("step over the whole model's", best["ms"] / min(wholes), line_.whole)
    if "exposed_ms" in best:
        judge("exposed part of the step", best["exposed_ms"] / best["profiled_ms"], line_.exposed)
        memory = "reserved_mib" if best.get("replays") else "peak_mib"
        if memory in base:
            judge("peak memory over torch.compile's", best[memory] / base[memory], line_.memory)
    bits = {n: found["checksums"] for n, found in line.items() if "checksums" in found}
    if "dcompile bitwise" in bits:
        for other in ("eager", f"{BASE} aot_eager"):
            if other in bits:
                equal = bits["dcompile bitwise"] == bits[other]
                said.append(
                    f"{label}: parameters after {WARM_UP} steps {'equal' if equal else 'DIFFER from'} {other}'s"
                )
        if "ms" in line.get("eager", {}):
            judge("bitwise step over eager's", measured["dcompile bitwise"]["ms"] / line["eager"]["ms"], 0.97)
    if not best.get("took_over"):
        why = "; ".join(best.get("reasons") or best.get("notes") or ["no reason given"])
        said.append(f"{label}, {name}: communication was LEFT TO STOCK: {why}")
    return said


def over_budgets(label: str, line: dict[str, Any]) -> list[str]:
    """Compare steps under memory budgets with torch.compile's at the same peak, between its nearest budgets' peaks."""
    held = {name: found for name, found in line.items() if "budget" in name and "ms" in found and found.get("peak_mib")}
    theirs = {name: found for name, found in held.items() if name.startswith(BASE)}
    if not theirs or "ms" not in line.get(BASE, {}):
        return []
    curve = sorted((found["peak_mib"], found["ms"]) for found in [line[BASE], *theirs.values()])
    said = []
    for name, found in held.items():
        if name in theirs:
            continue
        peak, ms = found["peak_mib"], found["ms"]
        part = peak / line["dcompile"]["peak_mib"] if line.get("dcompile", {}).get("peak_mib") else float("nan")
        head = f"{label}, {name}: peak {peak:.0f} MiB ({part:.2f}), {ms:.1f} ms"
        if peak < curve[0][0]:
            said.append(f"{head}; torch.compile needs more memory")
            continue
        other = float(numpy.interp(peak, *zip(*curve, strict=True)))
        verdict = "met" if ms / other <= 0.9 else "MISSED"
        said.append(f"{head}, {ms / other:.3f} of torch.compile's there, target 0.9: {verdict}")
    return said


def show(result: dict[str, Any], longest: bool = False) -> None:
    """Print tables and verdicts; `longest`: also each peer's longest kernels."""
    head = [
        "ms",
        "spread",
        "ratio",
        "compute",
        "comm",
        "exposed",
        "idle",
        "peak MiB",
        "reserved",
        "kernels",
        "warm-up s",
        "tokens/s",
        "MFU",
    ]
    for label, line in result["lines"].items():
        base = line.get(BASE, {}).get("ms")
        rows = []
        for name, found in line.items():
            if "error" in found:
                rows.append([name, found["error"][:60], *[""] * (len(head) - 1)])
                continue
            cells = [cell(found.get("ms"), 2), cell(found.get("spread"), 3)]
            cells.append(cell(found["ms"] / base, 3) if base and "ms" in found else "")
            cells += [cell(found.get(key), 2) for key in ("compute_ms", "comm_ms", "exposed_ms", "idle_ms")]
            cells += [cell(found.get(key), 0) for key in ("peak_mib", "reserved_mib", "kernels", "warm_up_s")]
            cells += [cell(found.get("tokens_per_s"), 0), cell(found.get("mfu"), 3)]
            rows.append([name, *cells])
        print(table([f"{label} x{result['ranks']}", *head], rows))
        for name, found in line.items():
            for note in found.get("profile", ()):
                print(f"  {name}: {note}")
        kinds = {name: found["kinds"] for name, found in line.items() if found.get("kinds")}
        if kinds and (longest or "ms" not in next(iter(line.values()))):
            print("\n" + table([f"{label}: ms a step (launches)", *kinds], kinds_table(kinds)))
        if longest:
            for name, found in line.items():
                cells = [
                    [k, cell(n, 0), cell(ms, 3), cell(a, 1), cell(b, 1)] for k, n, ms, a, b in found.get("longest", ())
                ]
                print("\n" + table([name, "launches", "ms", "us alone", "us beside"], cells))
        print("\n".join(verdicts(label, line)), flush=True)


def merge(paths: Sequence[str]) -> dict[str, Any]:
    """Merge several results: lines of all, the environment of the last."""
    results = stored(paths)
    ranks = {result["ranks"] for result in results}
    if len(ranks) > 1:
        raise SystemExit(f"--merge: results on {sorted(ranks)} ranks do not belong together")
    return {**results[-1], "lines": last_peers(results), "complete": all(result["complete"] for result in results)}


def launch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run each line as a separate job; print and write it when it is done."""
    lines: dict[str, Any] = {}
    last: dict[str, Any] = {"ranks": arguments.ranks, "complete": False}
    complete = True
    Path(arguments.out).unlink(missing_ok=True)
    for label in arguments.only:
        part = Path(f"{arguments.out}.{label}")
        part.unlink(missing_ok=True)
        given = ["--only", label, "--out", str(part), "--quiet", "--device", arguments.device]
        given += ["--timelines", arguments.timelines]
        given += ["--profile"] if arguments.profile else []
        given += [
            "--peers",
            ",".join(arguments.peers),
            "--rounds",
            str(arguments.rounds),
            "--steps",
            str(arguments.steps),
        ]
        failed = run_job(MODULE, given, arguments.ranks, arguments.deadline, VARIABLES)
        if failed:
            print(f"{label}: {failed}", file=sys.stderr, flush=True)
        found = (
            json.loads(part.read_text()) if part.exists() else {**last, "lines": {label: {"job": {"error": failed}}}}
        )
        if failed:
            found["failed"] = failed
        show(found, arguments.longest)
        if "teardown_s" in found:
            print(f"{label}: process groups ended in {found['teardown_s']:.1f} s", flush=True)
        lines |= found["lines"]
        complete = complete and bool(found["complete"]) and not failed
        last = {**found, "lines": lines, "complete": complete}
        Path(arguments.out).write_text(json.dumps(last))
        part.unlink(missing_ok=True)
    return last


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ",".join(label for label in LINES if not label.startswith("tiny"))
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, where no launcher has started the ranks")
    parser.add_argument("--only", default=default, help=f"lines, of {', '.join(LINES)}")
    parser.add_argument("--peers", default="", help=f"what to time in place of a line's own, of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps of each peer in a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: Gloo, to try the benchmark")
    parser.add_argument("--deadline", type=float, default=540, help="seconds that one line may take")
    parser.add_argument("--out", default="gpu_ddp_fsdp.json", help="written anew after each part of a line")
    parser.add_argument("--timelines", default="", metavar="FOLDER", help="save dcompile's timelines there")
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="join results in place of measuring")
    parser.add_argument("--longest", action="store_true", help="list kernels, alone and with a collective beside them")
    parser.add_argument("--profile", action="store_true", help="time by kinds of kernels in place of timing rounds")
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args(given)
    arguments.only = arguments.only.split(",")
    arguments.peers = arguments.peers.split(",") if arguments.peers else []
    for asked, known in ((arguments.only, LINES), (arguments.peers, PEERS)):
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"{unknown[0]}: not one of {', '.join(known)}")
    return arguments


def main() -> int:
    arguments = parse()
    if is_rank() and not arguments.merge:
        return be_rank(arguments)
    if arguments.merge:
        result = merge(arguments.merge)
        show(result, arguments.longest)
    else:
        import torch

        if arguments.device == "cuda" and torch.cuda.device_count() < arguments.ranks:
            raise SystemExit(f"this needs {arguments.ranks} CUDA GPUs, and there are {torch.cuda.device_count()}")
        result = launch(arguments)
    device = f"{result['ranks']}x-{str(result.get('device', 'none')).replace(' ', '-').lower()}"
    return finish("gpu_ddp_fsdp", device, result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
