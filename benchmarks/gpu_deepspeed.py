"""Benchmark of DeepSpeed's training steps on several GPUs: eager, inductor, DeepCompile and dcompile, in one job.

    python -m benchmarks.gpu_deepspeed --ranks 2 --only 160M-zero1,160M-zero3 --json --save
    torchrun --standalone --nproc-per-node 2 -m benchmarks.gpu_deepspeed --only 1B-zero3
    python -m benchmarks.gpu_deepspeed --device cpu --only tiny-zero1,tiny-zero3 --rounds 1 --steps 1

A step is engine(...), engine.backward, engine.step with torch's fused AdamW; parameters are bfloat16, master weights
float32, gradients clipped. ZeRO has overlap_comm. Peers: `deepspeed` is the stock engine, `inductor` engine.compile().
`deepcompile` is the same with compile.deepcompile in the config. `dcompile` leaves collectives to DeepSpeed, `dcompile
zero` has ZeRO's collectives in the graph. All peers of a line are in one job and are timed in turn, by CUDA events; the
slowest rank counts. Memory and kernels are measured as in `benchmarks.gpu_ddp_fsdp`. DeepSpeed, and DeepCompile above
all, builds C++ with ninja.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import environment, finish, table
from benchmarks.gpu_ddp_fsdp import lanes
from benchmarks.gpu_train import SHAPES, Shape, make
from benchmarks.peers import Peer, cell, first_line, time_in_turn
from benchmarks.ranks import Job, is_rank, joined, run_job
from benchmarks.utilization import by_kind, utilization

MODULE = "benchmarks.gpu_deepspeed"
WARM_UP = 4
"""Steps before the first timing: they compile."""
CLIP = 1.0
TARGET = 0.85
"""Target of dcompile's step over the best other peer's."""
PEERS = ("deepspeed", "inductor", "deepcompile", "dcompile", "dcompile zero")


@dataclass(frozen=True)
class Line:
    """A model and ZeRO's stage."""

    shape: Shape
    stage: int


LINES = {f"{size}-zero{stage}": Line(SHAPES[size], stage) for size in ("160M", "1B", "tiny") for stage in (0, 1, 2, 3)}
DEFAULT = ("160M-zero1", "160M-zero3", "1B-zero1", "1B-zero3")


# --- one peer ---------------------------------------------------------------------------------------------------------


def deepspeed_config(line: Line, name: str, gpu: bool) -> dict[str, Any]:
    """Return DeepSpeed's config as a user of this peer writes it."""
    return {
        "train_micro_batch_size_per_gpu": line.shape.rows,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": line.stage, "overlap_comm": gpu, "contiguous_gradients": True},
        **({"compile": {"deepcompile": True}} if name == "deepcompile" else {}),
    }


def make_engine(name: str, line: Line, job: Job) -> Any:
    """Make the engine of a peer, and compile it."""
    import deepspeed
    import torch

    model = make(line.shape, job.device)
    gpu = job.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(line, name, gpu))
    if name in ("inductor", "deepcompile"):
        engine.compile(backend="inductor")
    elif name.startswith("dcompile"):
        from dcompile.integrations.deepspeed import compile

        compile(engine, options={"receipt": False, "zero": "graph" if name.endswith("zero") else "off"})
    return engine


class Training(Peer):
    """A peer: its engine, and measurements of its steps."""

    def __init__(self, name: str, line: Line, job: Job) -> None:
        import torch

        super().__init__(name, job)
        self.line = line
        began = time.perf_counter()
        self.engine = make_engine(name, line, job)
        self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters())
        generator = torch.Generator().manual_seed(1 + job.rank)
        size = (line.shape.rows, line.shape.length)
        self.tokens = torch.randint(0, line.shape.vocabulary, size, generator=generator).to(job.device)
        self.warm_up(WARM_UP)
        self.warm_up_s = time.perf_counter() - began

    def step(self) -> Any:
        """Run one step; return the loss."""
        loss = self.engine(input_ids=self.tokens, labels=self.tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def rate(self, ms: float, device: str) -> dict[str, float]:
        """Return the tokens a second of one GPU, and the MFU, from a step's milliseconds."""
        return utilization(self.line.shape, self.parameters, self.tokens.numel(), ms, device)

    def look(self, steps: int) -> dict[str, Any]:
        """Measure memory, kernels, exposed communication and idle time, with dcompile's receipt."""
        found: dict[str, Any] = {"warm_up_s": max(self.job.all(self.warm_up_s)), "losses": self.losses}
        norm = self.engine.get_global_grad_norm()
        found["norm"] = None if norm is None else float(norm)
        if self.gpu:
            found |= self.peak_memory() | self._kernels(steps)
        if self.name.startswith("dcompile"):
            found |= self._receipt()
        self.job.barrier()
        return found

    def _kernels(self, steps: int) -> dict[str, Any]:
        events = self.kernel_events(steps)
        return lanes(events, steps) | {"kinds": by_kind(events, steps)}

    def _receipt(self) -> dict[str, Any]:
        import dcompile

        try:
            receipt = dcompile.receipt(self.engine)
        except Exception as error:  # a missing receipt is a result, and no reason to lose the times
            return {"took_over": False, "reasons": [first_line(error)]}
        return {
            "took_over": receipt.eligible,
            "adapter": receipt.adapter,
            "graphs": receipt.graphs,
            "graph_breaks": receipt.graph_breaks,
            "collectives_in_graphs": receipt.collectives,
            "reasons": list(receipt.reasons),
            "notes": list(receipt.notes),
        }


# --- one line ---------------------------------------------------------------------------------------------------------


def measure(
    label: str, arguments: argparse.Namespace, job: Job, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure all peers of one line; `keep` gets the results so far after each part."""
    import torch

    torch._dynamo.config.recompile_limit = 64  # the peers' models share the code of their class
    torch._dynamo.config.accumulated_recompile_limit = 1024
    line, found, peers = LINES[label], dict[str, Any](), list[Training]()
    device = torch.cuda.get_device_name() if job.device.type == "cuda" else "cpu"
    for name in arguments.peers:
        try:
            peer, error = Training(name, line, job), ""
        except Exception as raised:  # a peer that fails is a result, and no reason to lose the others
            peer, error = None, first_line(raised)
        errors = [f"rank {rank}: {said}" for rank, said in enumerate(job.all(error)) if said]
        if errors or peer is None:
            found[name] = {"error": "; ".join(errors)[:400]}
        else:
            found[name] = peer.look(3)
            peers.append(peer)
        keep(found)
    time_in_turn(peers, arguments.rounds, arguments.steps, device, found, keep)
    for peer in peers:
        peer.engine.destroy()
    return found


def be_rank(arguments: argparse.Namespace) -> int:
    """Measure all lines as one rank of a job; rank 0 writes each when it is done."""
    lines: dict[str, Any] = {}
    os.environ.setdefault("DS_ACCELERATOR", arguments.device)
    with joined(arguments.device) as (job, after):
        for label in arguments.only:

            def keep(found: dict[str, Any], label: str = label) -> None:
                lines[label] = found
                if job.main:
                    Path(arguments.out).write_text(json.dumps(_result(lines, arguments, job.size)))

            measure(label, arguments, job, keep)
            gc.collect()
    if job.main:
        result = _result(lines, arguments, job.size) | after
        Path(arguments.out).write_text(json.dumps(result))
        if not arguments.quiet:
            show(result)
    return 0


def _result(lines: dict[str, Any], arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    import deepspeed
    import torch

    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    versions = {"cuda": torch.version.cuda, "deepspeed": deepspeed.__version__}
    return {
        "benchmark": "gpu_deepspeed",
        "device": device,
        "ranks": ranks,
        "environment": {**environment(torch.get_num_threads()), **versions},
        "lines": lines,
        "complete": all("ms" in found or "error" in found for line in lines.values() for found in line.values()),
    }


# --- results ----------------------------------------------------------------------------------------------------------


def verdict(label: str, line: dict[str, Any]) -> str:
    """Compare dcompile's step with the best other peer's."""
    others = {name: found["ms"] for name, found in line.items() if not name.startswith("dcompile") and "ms" in found}
    ours = {name: found["ms"] for name, found in line.items() if name.startswith("dcompile") and "ms" in found}
    if not ours or not others:
        return f"{label}: cannot be judged, a peer is missing"
    name, best = min(ours, key=lambda n: ours[n]), min(others, key=lambda n: others[n])
    ratio = ours[name] / others[best]
    said = f"{label}, {name}: step over {best}'s {ratio:.3f}, target {TARGET}: {'met' if ratio <= TARGET else 'MISSED'}"
    zero = line.get("dcompile zero", {})
    if zero.get("took_over") is False:
        said += f"; ZeRO's collectives were LEFT TO DEEPSPEED: {'; '.join(zero.get('reasons', ()))}"
    return said


def show(result: dict[str, Any]) -> None:
    """Print a table and a verdict for each line."""
    head = ["ms", "spread", "compute", "comm", "exposed", "idle", "peak MiB", "reserved", "kernels", "warm-up s"]
    for label, line in result["lines"].items():
        rows = []
        for name, found in line.items():
            if "error" in found:
                rows.append([name, found["error"][:60], *[""] * (len(head) + 1)])
                continue
            cells = [cell(found.get("ms"), 2), cell(found.get("spread"), 3)]
            cells += [cell(found.get(key), 2) for key in ("compute_ms", "comm_ms", "exposed_ms", "idle_ms")]
            cells += [cell(found.get(key), 0) for key in ("peak_mib", "reserved_mib", "kernels", "warm_up_s")]
            rows.append([name, *cells, cell(found.get("tokens_per_s"), 0), cell(found.get("mfu"), 3)])
        print(table([f"{label} x{result['ranks']}", *head, "tokens/s", "MFU"], rows))
        print(verdict(label, line), flush=True)


def plain_architectures(environment: Mapping[str, str]) -> dict[str, str]:
    """Return TORCH_CUDA_ARCH_LIST as DeepSpeed 0.19 can read it: `9.0a` is a ValueError when it builds C++."""
    given = environment.get("TORCH_CUDA_ARCH_LIST")
    return {} if given is None else {"TORCH_CUDA_ARCH_LIST": re.sub(r"(\d)[a-z]", r"\1", given)}


def launch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run each line as a separate job; print and write it when it is done."""
    lines: dict[str, Any] = {}
    last: dict[str, Any] = {"ranks": arguments.ranks, "complete": False}
    complete = True
    for label in arguments.only:
        part = Path(f"{arguments.out}.{label}")
        part.unlink(missing_ok=True)
        given = ["--only", label, "--out", str(part), "--quiet", "--device", arguments.device]
        given += ["--peers", ",".join(arguments.peers)]
        given += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
        settings = {"NCCL_NVLS_ENABLE": "0", "DS_ACCELERATOR": arguments.device, **plain_architectures(os.environ)}
        failed = run_job(MODULE, given, arguments.ranks, arguments.deadline, settings)
        if failed:
            print(f"{label}: {failed}", file=sys.stderr, flush=True)
        nothing = {**last, "lines": {label: {"job": {"error": failed}}}}
        found = json.loads(part.read_text()) if part.exists() else nothing
        show(found)
        lines |= found["lines"]
        complete = complete and bool(found["complete"]) and not failed
        last = {**found, "lines": lines, "complete": complete}
        Path(arguments.out).write_text(json.dumps(last))
        part.unlink(missing_ok=True)
    return last


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, where no launcher has started the ranks")
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"lines, of {', '.join(LINES)}")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"what to time, of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps of each peer in a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: Gloo, to try the benchmark")
    parser.add_argument("--deadline", type=float, default=540, help="seconds that one line may take")
    parser.add_argument("--out", default="gpu_deepspeed.json", help="written anew after each part of a line")
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args(given)
    arguments.only, arguments.peers = arguments.only.split(","), arguments.peers.split(",")
    for asked, known in ((arguments.only, LINES), (arguments.peers, PEERS)):
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"{unknown[0]}: not one of {', '.join(known)}")
    return arguments


def main() -> int:
    arguments = parse()
    if is_rank():
        return be_rank(arguments)
    import torch

    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.ranks:
        raise SystemExit(f"this needs {arguments.ranks} CUDA GPUs, and there are {torch.cuda.device_count()}")
    result = launch(arguments)
    device = f"{result['ranks']}x-{str(result.get('device', 'none')).replace(' ', '-').lower()}"
    return finish("gpu_deepspeed", device, result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
