"""Train a byte-level Llama with DDP or FSDP2: torchrun --nproc-per-node 2 launch/train.py --backend dcompile"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint import find, load, save
from common import (
    UserError,
    World,
    clear_errors,
    compile_model,
    digest_of,
    gather,
    join_world,
    leave_world,
    load_config,
    parse_options,
    stop_on_signals,
    tell,
)
from data import END, Text, batch, load_text
from report import Reporter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

EVAL_BATCHES = 4


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--config", default="llama_10m", help="Llama config: a JSON file, or a name from launch/configs")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is cuda where there is a GPU")
    add("--wrap", choices=("ddp", "fsdp"), default="ddp", help="each rank holds all parameters, or a share of each")
    add("--backend", choices=("eager", "inductor", "dcompile"), default="dcompile", help="what compiles the model")
    add("--compile.mode", dest="compile_mode", metavar="MODE", help="mode of torch.compile")
    add("--compile.fullgraph", dest="compile_fullgraph", action="store_true", help="a graph break is an error")
    add("--compile.options", dest="compile_options", metavar="K=V", action="append", default=[], help="repeatable")
    add("--steps", type=positive, default=60, help="optimizer steps in all")
    add("--batch-size", type=positive, default=4, help="sequences per rank and micro-step")
    add("--seq-len", type=positive, default=256, help="bytes per sequence")
    add("--grad-accum", type=positive, default=1, help="micro-steps per optimizer step")
    add("--lr", type=float, default=1e-3, help="learning rate after warm-up")
    add("--warmup-steps", type=int, default=10, help="steps over which the learning rate rises")
    add("--clip-norm", type=float, default=1.0, help="largest gradient norm; 0 clips nothing")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 computes in it, parameters stay fp32")
    add("--seed", type=int, default=0, help="of parameters and batches")
    add("--data", metavar="PATH", help="a text file or a folder of them; without it the Python standard library")
    add("--max-data-mb", type=positive, default=64, help="text beyond this is not read")
    add("--log-freq", type=positive, default=10, help="steps between log lines where there is no terminal")
    add("--eval-freq", type=int, default=0, help="steps between evaluations on held-out text; 0: at the end only")
    add("--output-dir", type=Path, default=Path("out/train"), help="metrics, loss curve, checkpoints")
    add("--checkpoint-interval", type=int, default=0, help="steps between checkpoints; 0: at the end only")
    add("--resume", default="none", metavar="{auto,none,PATH}", help="auto: from the newest checkpoint, if any")
    add("--bucket-cap-mb", type=float, default=25, help="size of DDP's gradient buckets")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def build_model(args: argparse.Namespace, world: World) -> torch.nn.Module:
    """The model, as any script builds it: Hugging Face's Llama in stock DDP or FSDP2."""
    config = load_config(args.config)
    if config.vocab_size <= END:
        raise UserError(f"--config {args.config}: vocab_size {config.vocab_size} leaves no room for 257 tokens")
    if args.seq_len > config.max_position_embeddings:
        raise UserError(
            f"--seq-len {args.seq_len} is more than max_position_embeddings {config.max_position_embeddings}"
        )
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(config).to(world.device)
    if args.wrap == "fsdp":
        return shard(model, args, world)
    return DistributedDataParallel(
        model, device_ids=[world.device] if world.device.type == "cuda" else None, bucket_cap_mb=args.bucket_cap_mb
    )


def shard(model: LlamaForCausalLM, args: argparse.Namespace, world: World) -> torch.nn.Module:
    """FSDP2: one group of parameters for each layer, and one for the rest."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.dtype == "bf16" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@contextlib.contextmanager
def reducing(model: torch.nn.Module, wanted: bool) -> Iterator[None]:
    """Whether gradients of what runs inside are reduced over the ranks: after the last micro-step only."""
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if wanted else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(wanted)
        yield


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then constant, so that a run can be continued for longer than it was planned."""
    return float(args.lr * min(1.0, step / max(1, args.warmup_steps)))


def training_step(
    model: torch.nn.Module,
    wrapped: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Text,
    step: int,
    args: argparse.Namespace,
    world: World,
) -> tuple[float, float]:
    """Forward, backward and update; returns the loss, mean over ranks and micro-steps, and the gradient norm.

    `model` is what is called; `wrapped` is the DDP or FSDP module itself, without what torch.compile put around it.
    """
    loss_sum = torch.zeros((), device=world.device)
    for micro in range(args.grad_accum):
        tokens = batch(text.train, args.batch_size, args.seq_len, (args.seed, step, micro, world.rank))
        tokens = tokens.to(world.device, non_blocking=True)
        last = micro == args.grad_accum - 1
        with reducing(wrapped, last):
            with torch.autocast(world.device.type, torch.bfloat16, enabled=args.dtype == "bf16" and args.wrap == "ddp"):
                loss = model(input_ids=tokens, labels=tokens).loss / args.grad_accum
            loss.backward()
        loss_sum += loss.detach()
    losses = torch.zeros(world.size)
    losses[world.rank] = loss_sum.cpu()
    dist.all_reduce(losses)  # each rank has its own place, so this gathers them
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm or math.inf)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    check_finite(losses.tolist(), norm, step)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(losses.mean()), norm


def check_finite(losses: list[float], norm: float, step: int) -> None:
    """Stop before the optimizer moves anything. All ranks know all losses, so all of them stop, and say why."""
    for rank, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise UserError(f"step {step}: the loss of rank {rank} is {loss}; parameters are as after step {step - 1}")
    if not math.isfinite(norm):
        raise UserError(f"step {step}: the gradient norm is {norm}; parameters are as after step {step - 1}")


@torch.no_grad()
def evaluate(model: torch.nn.Module, text: Text, args: argparse.Namespace, world: World) -> float:
    """Mean loss on held-out text, always the same text."""
    total = torch.zeros(1)
    for index in range(EVAL_BATCHES):
        tokens = batch(text.held_out, args.batch_size, args.seq_len, (0, index, world.rank)).to(world.device)
        total += model(input_ids=tokens, labels=tokens).loss.cpu()
    dist.all_reduce(total)
    return float(total / (EVAL_BATCHES * world.size))


def train(args: argparse.Namespace, world: World) -> None:
    text = load_text(args.data, args.max_data_mb, args.seq_len)
    model = wrapped = build_model(args, world)
    plain = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    settings = {"seed": args.seed, "data": args.data, **plain.config.to_diff_dict()}
    del settings["transformers_version"]
    found = find(args.output_dir, args.resume)
    done = load(found, model, optimizer, settings) if found else 0
    report = Reporter(args.output_dir, done, args.steps, args.log_freq, world)
    count = sum(parameter.numel() for parameter in model.parameters())
    size = f"{count / 1e6:.1f} M parameters"
    report.say(f"{args.config}: {size}, {world.size} x {world.device.type}, {args.wrap}, {args.backend}")
    report.say(f"data: {text.description}")
    if found:
        report.say(f"continuing from {found}, step {done}")

    model = compile_model(
        model, args.backend, args.compile_mode, args.compile_fullgraph, parse_options(args.compile_options)
    )

    tokens_per_step = world.size * args.grad_accum * args.batch_size * args.seq_len
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(done + 1, args.steps + 1):
        started = time.perf_counter()
        loss, norm = training_step(model, wrapped, optimizer, text, step, args, world)
        losses.append(loss)
        seconds.append(time.perf_counter() - started)
        report.step(
            {
                "step": step,
                "loss": loss,
                "grad_norm": norm,
                "lr": learning_rate(args, step),
                "tokens_per_s": round(tokens_per_step / seconds[-1], 1),
                "time": time.time(),
            }
        )
        last = step == args.steps
        if last or (args.eval_freq and step % args.eval_freq == 0):
            report.held_out(step, evaluate(plain, text, args, world))
        if last or (args.checkpoint_interval and step % args.checkpoint_interval == 0):
            save(args.output_dir, step, model, optimizer, settings, world)
    report.close()
    finish(plain, losses, seconds, tokens_per_step, args, world)


def finish(
    model: torch.nn.Module,
    losses: list[float],
    seconds: list[float],
    tokens_per_step: int,
    args: argparse.Namespace,
    world: World,
) -> None:
    """The last lines: what was learnt, how fast, and that all ranks hold the same parameters."""
    digests = gather(digest_of(model), world)
    equal = len(set(digests)) == 1
    if world.is_main:
        tell(f"parameters equal on all ranks: {'yes ' + digests[0] if equal else f'NO {digests}'}", sys.stdout)
        tell(f"metrics, loss curve and checkpoints are in {args.output_dir}", sys.stdout)
        if len(seconds) > 1:
            typical = statistics.median(seconds[1:])
            speed = tokens_per_step * len(seconds[1:]) / sum(seconds[1:])
            compiling = f", {max(0.0, seconds[0] - typical):.1f} s of compiling in that one"
            tell(
                f"done: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, "
                f"{speed:.0f} tokens/s after the first step{compiling if args.backend != 'eager' else ''}",
                sys.stdout,
            )
    if not equal:
        raise SystemExit(1)


def main() -> None:
    args = parse_arguments()
    stop_on_signals()
    with clear_errors():
        world = join_world(args.device)
        train(args, world)
    leave_world()


if __name__ == "__main__":
    main()
