"""Train a byte-level Llama with Hugging Face Accelerate: torchrun --nproc-per-node 2 launch/train_accelerate.py"""

from __future__ import annotations

import argparse

from flags import Parser, add_compile_flags, add_model_flags, add_training_flags, add_wrapper_flags


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__file__, __doc__)
    add_model_flags(parser, "llama_10m")
    add_wrapper_flags(parser, "GPUs only")
    add_compile_flags(parser)
    add_training_flags(parser, "out/train_accelerate")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse_arguments()  # here for --help and wrong flags, since the imports below take seconds

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from checkpoint import find, lock
from common import World, gather, load_config, parse_options
from data import Text, batch, load_text
from errors import UserError
from hf_folder import write_hf_folder
from interruption import Interruption, run_training
from report import Reporter, say_result
from torch.distributed.elastic.multiprocessing.errors import record
from train import check_finite, evaluate, is_due, learning_rate
from transformers import LlamaForCausalLM


def make_plugin(args: argparse.Namespace) -> Any:
    """Make Accelerate's plugin for the compiler: the one line that differs between backends."""
    options: dict[str, Any] = parse_options(args.compile_options)
    if args.backend == "eager":
        if args.compile_mode or args.compile_fullgraph or options:
            raise UserError("--compile.* settings need --backend inductor or dcompile")
        return TorchDynamoPlugin(backend="no")
    if args.backend == "dcompile":
        from dcompile.integrations.accelerate import DcompilePlugin

        try:
            return DcompilePlugin(mode=args.compile_mode, fullgraph=args.compile_fullgraph, options=options)
        except ValueError as error:
            raise UserError(str(error)) from error
    return TorchDynamoPlugin(
        backend=args.backend, mode=args.compile_mode, fullgraph=args.compile_fullgraph, options=options or None
    )


def make_accelerator(args: argparse.Namespace, world: World) -> Accelerator:
    """Make the Accelerator; it uses the process group that `join_world` has made."""
    on_cpu = world.device.type == "cpu"
    if args.wrap == "fsdp" and on_cpu:
        raise UserError("--wrap fsdp: Accelerate shards on GPUs only; use --wrap ddp, or launch/train.py")
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    return Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if args.dtype == "bf16" else "no",
        gradient_accumulation_steps=args.grad_accum,
        dynamo_plugin=make_plugin(args),
        fsdp_plugin=sharding if args.wrap == "fsdp" else None,
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=args.bucket_cap_mb)],
    )


def training_step(
    accelerator: Accelerator, model: Any, optimizer: Any, text: Text, step: int, args: argparse.Namespace, world: World
) -> tuple[float, float]:
    """Run micro-steps, clipping and update; return the loss, averaged over ranks and micro-steps, and the norm."""
    loss_sum, norm = torch.zeros((), device=world.device), torch.zeros(())
    for micro in range(args.grad_accum):
        tokens = batch(text.train, args.batch_size, args.seq_len, (args.seed, step, micro, world.rank))
        tokens = tokens.to(world.device, non_blocking=True)
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            loss_sum += loss.detach() / args.grad_accum
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), args.clip_norm or float("inf"))
                check_finite(gather(loss_sum.item(), world), float(norm), step)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(args, step)
            optimizer.step()
            optimizer.zero_grad()
    return float(accelerator.reduce(loss_sum, "mean")), float(norm)


def save(accelerator: Accelerator, folder: Path, step: int) -> Path:
    """Write `folder/step-000030` in Accelerate's format, whole or not at all."""
    final, aside = folder / f"step-{step:06d}", folder / f".step-{step:06d}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(aside))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (aside / "train.json").write_text(json.dumps({"step": step}))
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        pointer = folder / "LATEST.tmp"
        pointer.write_text(final.name)
        os.replace(pointer, folder / "LATEST")
    accelerator.wait_for_everyone()
    return final


def train(args: argparse.Namespace, world: World, interruption: Interruption) -> int:
    """Run training; return the exit status, as launch/train.py does."""
    text = load_text(args.data, args.max_data_mb, args.seq_len)
    args.claim = lock(args.output_dir, world)  # kept until the process ends
    accelerator = make_accelerator(args, world)
    torch.manual_seed(args.seed)
    model: Any = LlamaForCausalLM(load_config(args.config))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = find(args.output_dir, args.resume)
    if found:
        accelerator.load_state(str(found))
    done = int(json.loads((found / "train.json").read_text())["step"]) if found else 0
    report = Reporter(args.output_dir, done, args.steps, args.log_freq, world)
    report.say(f"{args.config}: {world.size} x {world.device.type}, {args.wrap} by Accelerate, {args.backend}")
    tokens_per_step = world.size * args.grad_accum * args.batch_size * args.seq_len
    for step in range(done + 1, args.steps + 1):
        started = time.perf_counter()
        loss, norm = training_step(accelerator, model, optimizer, text, step, args, world)
        speed = tokens_per_step / (time.perf_counter() - started)
        fields = {"step": step, "loss": loss, "grad_norm": norm, "lr": learning_rate(args, step)}
        report.step(fields | {"tokens_per_s": round(speed, 1), "time": time.time()})
        last, stopped = step == args.steps, interruption.agreed()
        if not stopped and (last or is_due(step, args.eval_freq)):
            with report.doing("evaluation"):
                held_out = evaluate(accelerator.unwrap_model(model), text, args, world)
            report.held_out(step, held_out)
        if last or stopped or is_due(step, args.checkpoint_interval):
            with report.doing("checkpoint"):
                saved = save(accelerator, args.output_dir, step)
        if stopped and not last:
            report.close()
            report.say(f"stopped by {signal.Signals(stopped).name}: {saved} has step {step}; go on with --resume auto")
            return 128 + stopped
    report.close()
    return finish(accelerator, model, args, report, world)


def finish(accelerator: Accelerator, model: Any, args: argparse.Namespace, report: Reporter, world: World) -> int:
    """Write the model for `from_pretrained`, and report whether all ranks have the same parameters; return 1 if not."""
    plain = accelerator.unwrap_model(model)
    write_hf_folder(args.output_dir / "hf", model, plain.config, world)
    return say_result(report, plain, args.output_dir, world)


@record
def main() -> None:
    run_training(train, parse_arguments())


if __name__ == "__main__":
    main()
