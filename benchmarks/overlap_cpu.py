"""Benchmark of overlapped communication on CPU ranks, against stock PyTorch and torch.compile.

python -m benchmarks.overlap_cpu [--kind fsdp2] [--rounds 15] [--timeline overlap.svg] [--json] [--save]
python -m benchmarks.overlap_cpu --picture docs/overlap.svg

The model is a Llama of ten million float32 parameters over Gloo, in DistributedDataParallel, or in FSDP2 with
fully_shard on blocks and root. Each rank is a process with one thread. Stock eager PyTorch, torch.compile (under FSDP2
of each block) and dcompile are in the same job and take turns, step by step. A step's time is its slowest rank's.
Ratios are medians over rounds of a peer's step over stock's in the same round, so that slow phases of the machine
affect both. Below 1, the peer is faster. CPU time is that of all threads of all ranks, including Gloo's.

--picture draws a step of torch.compile under DDP (--above stock: of eager DDP) above one of dcompile, after the rounds
and in turns again (`benchmarks.ddp_steps` says how a peer's step is measured). Of each, the step of median length is
drawn.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import environment, finish, table
from benchmarks.ddp_steps import HookRecorder, Marks, step_of, with_marks
from benchmarks.gpu_ddp_fsdp import spread
from benchmarks.ranks import Job, joined, run_job

MODULE = "benchmarks.overlap_cpu"
CONFIGS = Path(__file__).parent.parent / "launch" / "configs"
PEERS = ("stock", "torch.compile", "dcompile")
WARM_UP = 3
"""Steps before the first timing: the first compiles, and DDP rebuilds its buckets after it."""
TARGET, COMPILED_TARGET = 1.0, 0.85
"""Targets of dcompile's step over stock's, and over torch.compile's."""
DRAWN = 7
"""Steps of each peer of which the median is drawn."""


@dataclass(frozen=True)
class Sample:
    """Times of one step of one peer: seconds on the slowest rank, CPU seconds of all ranks."""

    wall: float
    cpu: float


class Training:
    """A peer on one rank."""

    def __init__(self, name: str, arguments: argparse.Namespace, job: Job) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        self.name, self.job = name, job
        self.loss_scale = 1.0
        self.marks: Marks | None = None
        torch.manual_seed(0)
        config = LlamaConfig.from_json_file(CONFIGS / f"{arguments.config}.json")
        model = LlamaForCausalLM(config)
        self.call = spread(model, arguments.kind, name, job.device, arguments.bucket_cap_mb)
        self.clip_norm = arguments.clip_norm
        self.optimizer = torch.optim.AdamW(self.call.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
        generator = torch.Generator().manual_seed(1 + job.rank)
        size = (arguments.rows, arguments.length)
        self.tokens = torch.randint(0, config.vocab_size, size, generator=generator)
        began = time.perf_counter()
        self.losses = [self.step() for _ in range(WARM_UP)]
        self.warm_up = time.perf_counter() - began

    def step(self) -> float:
        """Run forward, backward and update; return the loss."""
        now = time.perf_counter
        begin = now()
        loss = self.call(input_ids=self.tokens, labels=self.tokens).loss
        forward = now()
        (loss if self.loss_scale == 1.0 else loss * self.loss_scale).backward()
        backward = now()
        if self.clip_norm:
            float(self.clip())
        clip = now()
        self.optimizer.step()
        optimizer = now()
        self.optimizer.zero_grad(set_to_none=True)
        found = float(loss.detach())
        self.marks = Marks(begin, forward, backward, clip, optimizer, now())
        return found

    def clip(self) -> Any:
        """Clip gradients as launch/train.py does; return their norm."""
        import torch
        from torch.distributed.tensor import DTensor

        norm = torch.nn.utils.clip_grad_norm_(self.call.parameters(), self.clip_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def sample(self) -> Sample:
        """Time one step that all ranks start together."""
        self.job.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        found = self.job.all((time.perf_counter() - wall, time.process_time() - cpu))
        return Sample(max(took for took, _ in found), sum(used for _, used in found))


def be_rank(arguments: argparse.Namespace) -> int:
    """Run one rank of the job; rank 0 writes the result."""
    import torch

    torch.set_num_threads(arguments.threads)
    torch._dynamo.config.recompile_limit = 64  # the peers' models share the code of their class
    result: dict[str, Any] = {}
    with joined("cpu") as (job, after):
        peers = {name: Training(name, arguments, job) for name in arguments.peers}
        rounds = []
        gc.collect()
        gc.disable()
        for turn in range(arguments.rounds):
            shift = turn % len(peers)
            order = arguments.peers[shift:] + arguments.peers[:shift]
            taken = {name: peers[name].sample() for name in order}
            rounds.append(taken)
        gc.enable()
        result["peers"] = summary(rounds)
        for name, peer in peers.items():
            result["peers"][name] |= {"losses": peer.losses, "warm_up_s": peer.warm_up}
        if "dcompile" in peers:
            result |= _timeline(peers["dcompile"], arguments)
        if arguments.picture:
            result["drawn"] = draw(peers[arguments.above], peers["dcompile"], arguments.picture)
    if job.main:
        Path(arguments.child).write_text(json.dumps(result | after))
    return 0


def _timeline(peer: Training, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return dcompile.profile's measurements of a few steps of dcompile."""
    import dcompile

    receipt = dcompile.receipt(peer.call)
    with dcompile.profile(peer.call) as measured:
        for _ in range(6):
            peer.job.barrier()
            peer.step()
    for path in arguments.timeline if peer.job.main else ():
        measured.save(path)
    step = measured.timeline.typical
    return {
        "took_over": receipt.eligible and receipt.adapter == arguments.kind,
        "collectives": len(step.exchanges),
        "overlapped": step.overlapped / step.communication if step.communication else 0.0,
        "exposed": step.exposed / step.seconds,
        "profile": str(measured).splitlines(),
    }


def draw(above: Training, ours: Training, path: str) -> dict[str, Any]:
    """Measure steps of two peers in turn, and draw the one of median length of each; return what is drawn, in ms."""
    import dcompile
    from dcompile.explain.svg import draw_comparison
    from dcompile.explain.timeline import Timeline

    buckets = HookRecorder(above.call)
    above.loss_scale = 1 / above.job.size  # the hook only sums
    for _ in range(WARM_UP):  # the first with the hook may compile again
        above.step()
    theirs, mine = [], []
    for _ in range(DRAWN):
        buckets.begin_step()
        above.job.barrier()
        above.step()
        assert above.marks is not None
        latest = [max(times) for times in zip(*above.job.all(buckets.arrivals), strict=True)]
        theirs.append(step_of(above.marks, buckets, latest))
        with dcompile.profile(ours.call) as measured:
            for _ in range(2):  # the first prepares calls, and is left out
                ours.job.barrier()
                ours.step()
        assert ours.marks is not None
        mine.append(with_marks(measured.timeline.steps[-1], ours.marks))
    found = measured.timeline
    above_name = "DDP" if above.name == "stock" else f"DDP, {above.name}"
    note = f"Blocks of {above_name} include the host's gaps. Clipping of gradients is drawn as the optimizer's."
    shown = {
        above_name: Timeline(found.model, found.rank, found.world, found.device, tuple(theirs), (note,)),
        f"DDP, {ours.name}": Timeline(found.model, found.rank, found.world, found.device, tuple(mine)),
    }
    if ours.job.main:
        Path(path).write_text(draw_comparison(shown) + "\n")
    return {
        name: {
            "ms": timeline.typical.seconds * 1e3,
            "exposed_ms": timeline.typical.exposed * 1e3,
            "all_ms": [step.seconds * 1e3 for step in timeline.steps],
        }
        for name, timeline in shown.items()
    }


def summary(rounds: Sequence[dict[str, Sample]]) -> dict[str, Any]:
    """Return medians over rounds of times, and of ratios within each round."""
    found: dict[str, Any] = {}
    for name in rounds[0]:
        walls = [taken[name].wall for taken in rounds]
        middle = statistics.median(walls)
        found[name] = {
            "ms": middle * 1e3,
            "spread": (max(walls) - min(walls)) / middle,
            "cpu_ms": statistics.median(taken[name].cpu for taken in rounds) * 1e3,
        }
        if "stock" in rounds[0]:
            found[name] |= {
                "of_stock": statistics.median(taken[name].wall / taken["stock"].wall for taken in rounds),
                "cpu_of_stock": statistics.median(taken[name].cpu / taken["stock"].cpu for taken in rounds),
            }
        if "torch.compile" in rounds[0]:
            ratios = [taken[name].wall / taken["torch.compile"].wall for taken in rounds]
            found[name] |= {"of_compiled": statistics.median(ratios)}
    return found


def show(result: dict[str, Any]) -> None:
    """Print the table, the timeline's figures, and the verdict."""
    rows = []
    for name, found in result["peers"].items():
        keys = (("ms", 1), ("spread", 2), ("cpu_ms", 1), ("of_stock", 3), ("of_compiled", 3))
        keys += (("cpu_of_stock", 3), ("warm_up_s", 1))
        rows.append([name, *(f"{found[key]:.{digits}f}" if key in found else "" for key, digits in keys)])
    print(
        table(
            ["step", "ms", "spread", "CPU ms", "of stock's", "of torch.compile's", "CPU of stock's", "warm-up s"], rows
        )
    )
    print("\n".join(result.get("profile", ())))
    ours = result["peers"].get("dcompile", {})
    for key, peer, target in (("of_stock", "stock", TARGET), ("of_compiled", "torch.compile", COMPILED_TARGET)):
        if key in ours:
            verdict = "met" if ours[key] <= target else "MISSED"
            print(f"dcompile's step over {peer}'s: {ours[key]:.3f}, target {target}: {verdict}")
    for name, step in result.get("drawn", {}).items():
        print(f"drawn of {name}: {step['ms']:.1f} ms, {step['exposed_ms']:.1f} ms exposed")
    if "took_over" in result and not result["took_over"]:
        print("dcompile LEFT COMMUNICATION TO STOCK")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kind", choices=("ddp", "fsdp2"), default="ddp", help="fsdp2: fully_shard on blocks and root")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"some of {','.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each peer")
    parser.add_argument("--config", default="llama_10m", help="a file of launch/configs")
    parser.add_argument("--rows", type=int, default=4, help="sequences of each rank")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--bucket-cap-mb", type=float, default=25, help="of DDP, for all peers")
    parser.add_argument("--clip-norm", type=float, default=1.0, help="largest norm of gradients; 0 clips nothing")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank")
    parser.add_argument("--deadline", type=float, default=900, help="seconds that the job may take")
    parser.add_argument(
        "--timeline", nargs="+", default=[], metavar="FILE", help="save dcompile's: .svg .png .json .html"
    )
    parser.add_argument("--picture", metavar="FILE.svg", help="draw a step of --above's over one of dcompile")
    parser.add_argument("--above", choices=PEERS[:2], default="torch.compile", help="the upper step of --picture")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    arguments.peers = arguments.peers.split(",")
    if unknown := [name for name in arguments.peers if name not in PEERS]:
        parser.error(f"--peers {unknown[0]}: not one of {','.join(PEERS)}")
    if arguments.picture:
        if arguments.kind != "ddp":
            parser.error("--picture: DDP only")
        if missing := {arguments.above, "dcompile"} - set(arguments.peers):
            parser.error(f"--picture: needs {min(missing)} among --peers")
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else list(given)
    arguments = parse(given)
    if arguments.child:
        return be_rank(arguments)
    with tempfile.TemporaryDirectory(prefix="dcompile-bench-") as folder:
        out = Path(folder) / "result.json"
        found = environment(1)  # how busy the machine was before the job
        failed = run_job(MODULE, [*given, "--child", str(out)], arguments.ranks, arguments.deadline, _SETTINGS)
        if failed:
            print(failed, file=sys.stderr)
            return 1
        measured = json.loads(out.read_text())
    show(measured)
    kept = ("kind", "config", "rows", "length", "bucket_cap_mb", "clip_norm", "threads", "rounds", "ranks")
    settings = {key: getattr(arguments, key) for key in kept}
    result = {
        "benchmark": "overlap_cpu", "environment": found, "settings": settings, **measured, "complete": True,
    }  # fmt: skip
    return finish("overlap_cpu", "cpu", result, keep=arguments.save, as_json=arguments.json)


_SETTINGS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


if __name__ == "__main__":
    raise SystemExit(main())
