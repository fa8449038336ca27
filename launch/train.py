"""Train a byte-level Llama with DDP or FSDP2: torchrun --nproc-per-node 2 launch/train.py --backend dcompile"""

from __future__ import annotations

import argparse

from flags import Parser, add_compile_flags, add_model_flags, add_training_flags, add_wrapper_flags


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__file__, __doc__)
    add_model_flags(parser, "llama_10m")
    add_wrapper_flags(parser)
    add_compile_flags(parser)
    add_training_flags(parser, "out/train")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse_arguments()  # here for --help and wrong flags, since the imports below take seconds

import contextlib
import math
import signal
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from checkpoint import find, load, lock, save
from common import World, compile_model, load_config, parse_options
from data import END, Text, batch, load_text
from errors import UserError
from hf_folder import write_hf_folder
from interruption import Interruption, run_training
from report import Reporter, say_next, say_result
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

EVAL_BATCHES = 4


def build_model(args: argparse.Namespace, world: World) -> torch.nn.Module:
    """Build the model as any script does: Hugging Face's Llama in stock DDP or FSDP2."""
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
    """Apply FSDP2, with one group of parameters for each layer, and one for the rest."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.dtype == "bf16" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@contextlib.contextmanager
def reducing(model: torch.nn.Module, wanted: bool) -> Iterator[None]:
    """Enable or disable gradient reductions for backwards inside: they are wanted only after the last micro-step."""
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if wanted else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(wanted)
        yield


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate: linear warm-up, then constant, so that a run can continue beyond its planned end."""
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
    """Run forward, backward and update; return the loss, averaged over ranks and micro-steps, and the gradient norm.

    `model` is the callable; `wrapped` is the DDP or FSDP module itself, without the wrapper of torch.compile.
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
    dist.all_reduce(losses)  # each rank fills its own element, so the sum gathers them
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm or math.inf)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    check_finite(losses.tolist(), norm, step)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(losses.mean()), norm


def check_finite(losses: list[float], norm: float, step: int) -> None:
    """Raise before the optimizer's update if a loss or the norm is not finite; all ranks have all losses and raise."""
    for rank, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise UserError(f"step {step}: the loss of rank {rank} is {loss}; parameters are as after step {step - 1}")
    if not math.isfinite(norm):
        raise UserError(f"step {step}: the gradient norm is {norm}; parameters are as after step {step - 1}")


@torch.no_grad()
def evaluate(model: torch.nn.Module, text: Text, args: argparse.Namespace, world: World) -> float:
    """Return the mean loss on held-out text, which is the same text each time."""
    total = torch.zeros(1)
    for index in range(EVAL_BATCHES):
        tokens = batch(text.held_out, args.batch_size, args.seq_len, (0, index, world.rank)).to(world.device)
        total += model(input_ids=tokens, labels=tokens).loss.cpu()
    dist.all_reduce(total)
    return float(total / (EVAL_BATCHES * world.size))


def train(args: argparse.Namespace, world: World, interruption: Interruption) -> int:
    """Run training: build, load, compile, steps with evaluations and checkpoints, and the trained model's folder.

    Returns the exit status: 0, 1 if parameters differ between ranks, 128 + the signal that ended the run early.
    """
    text = load_text(args.data, args.max_data_mb, args.seq_len)
    args.claim = lock(args.output_dir, world)  # kept until the process ends
    model = wrapped = build_model(args, world)
    plain = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    settings = {"seed": args.seed, "data": args.data, **plain.config.to_diff_dict()}
    settings.pop("transformers_version", None)
    found = find(args.output_dir, args.resume)
    done = load(found, model, optimizer, settings) if found else 0
    report = Reporter(args.output_dir, done, args.steps, args.log_freq, world)
    introduce(report, plain, text, args, world)
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
        last, stopped = step == args.steps, interruption.agreed()
        if not stopped and (last or is_due(step, args.eval_freq)):
            with report.doing("evaluation"):
                held_out = evaluate(plain, text, args, world)
            report.held_out(step, held_out)
        if last or stopped or is_due(step, args.checkpoint_interval):
            with report.doing("checkpoint"):
                saved = save(args.output_dir, step, model, optimizer, settings, world)
        if stopped and not last:
            report.close()
            report.say(f"stopped by {signal.Signals(stopped).name}: {saved} has step {step}; go on with --resume auto")
            return 128 + stopped
    with report.doing("model"):
        write_hf_folder(args.output_dir / "hf", wrapped, plain.config, world)
    report.close()
    return finish(report, plain, losses, seconds, tokens_per_step, args, world)


def is_due(step: int, interval: int) -> bool:
    """Is an event of every `interval` steps due after this step? 0 means never."""
    return interval > 0 and step % interval == 0


def introduce(report: Reporter, model: torch.nn.Module, text: Text, args: argparse.Namespace, world: World) -> None:
    """Report the model, data and ranks at the start."""
    size = f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters"
    report.say(f"{args.config}: {size}, {world.size} x {world.device.type}, {args.wrap}, {args.backend}")
    report.say(f"data: {text.description}")


def finish(
    report: Reporter,
    model: torch.nn.Module,
    losses: list[float],
    seconds: list[float],
    tokens_per_step: int,
    args: argparse.Namespace,
    world: World,
) -> int:
    """Report losses and speed at the end, and whether all ranks have the same parameters; return 1 if they do not."""
    status = say_result(report, model, args.output_dir, world)
    if len(seconds) > 1:
        typical = statistics.median(seconds[1:])
        speed = tokens_per_step * len(seconds[1:]) / sum(seconds[1:])
        compiling = f", {max(0.0, seconds[0] - typical):.1f} s of compiling in that one"
        report.say(
            f"done: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, "
            f"{speed:.0f} tokens/s after the first step{compiling if args.backend != 'eager' else ''}"
        )
    if world.is_main:
        say_next(report, args.backend, args.output_dir)
    return status


@record
def main() -> None:
    run_training(train, parse_arguments())


if __name__ == "__main__":
    main()
