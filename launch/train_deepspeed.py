"""Train a byte-level Llama with DeepSpeed: torchrun --nproc-per-node 2 launch/train_deepspeed.py --deepspeed zero2"""

from __future__ import annotations

import argparse

from flags import Parser, add_compile_flags, add_model_flags, add_training_flags


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__file__, __doc__)
    add_model_flags(parser, "llama_10m")
    add = parser.add_argument
    add("--deepspeed", default="zero2", help="DeepSpeed's config: a JSON file, or a name from launch/configs/deepspeed")
    add("--zero", choices=("off", "graph"), default="graph", help="graph: dcompile runs ZeRO's collectives")
    add_compile_flags(parser)
    add_training_flags(parser, "out/train_deepspeed")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse_arguments()  # here for --help and wrong flags, since the imports below take seconds

import json
import math
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import drop_old, lock
from common import CONFIGS, World, load_config, parse_options
from data import END, Text, batch, load_text
from errors import UserError
from hf_folder import write_complete_folder
from interruption import Interruption, run_training
from report import Reporter
from torch.distributed.elastic.multiprocessing.errors import record
from train import check_finite, evaluate, is_due, learning_rate
from transformers import LlamaForCausalLM

DEEPSPEED = CONFIGS / "deepspeed"
INSTALL = "pip install 'deepspeed>=0.18'"


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's JSON config; "auto" becomes --batch-size, --grad-accum, --clip-norm or --dtype."""
    path = Path(args.deepspeed) if Path(args.deepspeed).suffix == ".json" else DEEPSPEED / f"{args.deepspeed}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in DEEPSPEED.glob("*.json")))
        raise UserError(f"--deepspeed {args.deepspeed}: no such file {path}; give a JSON file or one of: {known}")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"--deepspeed {path}: not JSON: {error}") from None
    flags = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": args.grad_accum,
        "gradient_clipping": args.clip_norm,
    }
    for name, value in flags.items():
        if config.get(name, "auto") == "auto":
            config[name] = value
    if config.get("bf16", {}).get("enabled") == "auto":
        config["bf16"] = {**config["bf16"], "enabled": args.dtype == "bf16"}
    return config


def make_engine(args: argparse.Namespace, world: World) -> Any:
    """Make the engine as any script does, and compile it: the one line that differs between backends."""
    try:
        import deepspeed
    except ImportError:
        raise UserError(f"DeepSpeed is not installed: {INSTALL}") from None
    shape = load_config(args.config)
    if shape.vocab_size <= END:
        raise UserError(f"--config {args.config}: vocab_size {shape.vocab_size} leaves no room for 257 tokens")
    config = deepspeed_config(args)
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(shape).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    options = parse_options(args.compile_options)
    if args.backend == "inductor":
        given = {"mode": args.compile_mode, "options": options or None, "fullgraph": args.compile_fullgraph}
        engine.compile(backend="inductor", compile_kwargs={name: value for name, value in given.items() if value})
    elif args.backend == "dcompile":
        from dcompile.integrations.deepspeed import compile

        try:
            compile(engine, args.compile_mode, {"zero": args.zero, **options}, fullgraph=args.compile_fullgraph)
        except ValueError as error:
            raise UserError(str(error)) from error
    return engine


def training_step(engine: Any, text: Text, step: int, args: argparse.Namespace, world: World) -> tuple[float, float]:
    """Run micro-steps of forward, backward and step; DeepSpeed updates in the last one. Returns mean loss and norm."""
    total = torch.zeros((), device=world.device)
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(args, step)
    for micro in range(engine.gradient_accumulation_steps()):
        size = engine.train_micro_batch_size_per_gpu()
        tokens = batch(text.train, size, args.seq_len, (args.seed, step, micro, world.rank)).to(world.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / engine.gradient_accumulation_steps()
    losses = torch.zeros(world.size, device=world.device)
    losses[world.rank] = total
    dist.all_reduce(losses)  # each rank fills its own element, so the sum gathers them
    check_finite(losses.tolist(), 0.0, step)
    return float(losses.mean()), norm_of(engine)


def norm_of(engine: Any) -> float:
    """Return the gradient norm of the last step; DeepSpeed has none at stage 0 in float32."""
    norm = engine.get_global_grad_norm()
    return math.nan if norm is None else float(norm)


def resume(engine: Any, folder: Path, asked: str) -> int:
    """Load DeepSpeed's newest checkpoint of a folder; return the step after which it was saved, 0 without one."""
    if asked not in ("auto", "none"):
        folder = Path(asked)
    if asked == "none" or (asked == "auto" and not (folder / "latest").is_file()):
        return 0
    path, state = engine.load_checkpoint(str(folder))
    if path is None:
        raise UserError(f"--resume {asked}: {folder} has no checkpoint of this engine; --resume none starts anew")
    return int(state["step"])


def save(engine: Any, folder: Path, step: int, world: World) -> Path:
    """Write DeepSpeed's checkpoint `folder/step-000030` and drop all but the newest few."""
    final = folder / f"step-{step:06d}"
    engine.save_checkpoint(str(folder), tag=final.name, client_state={"step": step})
    if world.is_main:
        drop_old(folder, final)
    return final


def write_model(engine: Any, folder: Path, world: World) -> None:
    """Write the trained model as a Hugging Face folder. Every rank calls it: ZeRO 3 gathers one parameter at a time."""
    from deepspeed.runtime.zero import GatheredParameters

    tensors = {}
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            if world.is_main:  # a copy: ZeRO 1 and 2 keep all parameters in one storage
                tensors[name] = parameter.detach().cpu().clone()
    if world.is_main:
        write_complete_folder(folder, tensors, engine.module.config)


def train(args: argparse.Namespace, world: World, interruption: Interruption) -> int:
    """Run training; return the exit status: 0, or 128 + the signal that ended the run early."""
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
    text = load_text(args.data, args.max_data_mb, args.seq_len)
    args.claim = lock(args.output_dir, world)  # kept until the process ends
    engine = make_engine(args, world)
    folder = args.output_dir / "checkpoints"
    done = resume(engine, folder, args.resume)
    report = Reporter(args.output_dir, done, args.steps, args.log_freq, world)
    stage = engine.zero_optimization_stage()
    report.say(f"{args.config}: {world.size} x {world.device.type}, ZeRO {stage}, {args.backend}")
    report.say(f"data: {text.description}")
    per_step = engine.train_batch_size() * args.seq_len
    seconds: list[float] = []
    losses: list[float] = []
    for step in range(done + 1, args.steps + 1):
        started = time.perf_counter()
        loss, norm = training_step(engine, text, step, args, world)
        losses.append(loss)
        seconds.append(time.perf_counter() - started)
        fields = {"step": step, "loss": loss, "grad_norm": norm, "lr": learning_rate(args, step)}
        report.step({**fields, "tokens_per_s": round(per_step / seconds[-1], 1), "time": time.time()})
        last, stopped = step == args.steps, interruption.agreed()
        if not stopped and (last or is_due(step, args.eval_freq)):
            with report.doing("evaluation"):
                held_out = evaluate(engine, text, args, world)
            report.held_out(step, held_out)
        if last or stopped or is_due(step, args.checkpoint_interval):
            with report.doing("checkpoint"):
                saved = save(engine, folder, step, world)
        if stopped and not last:
            report.close()
            report.say(f"stopped by {signal.Signals(stopped).name}: {saved} has step {step}; go on with --resume auto")
            return 128 + stopped
    with report.doing("model"):
        write_model(engine, args.output_dir / "hf", world)
    report.close()
    report.say(f"metrics, loss curve and checkpoints are in {args.output_dir}, the model in {args.output_dir / 'hf'}")
    if seconds:
        speed = f"{per_step / statistics.median(seconds[1:] or seconds):.0f} tokens/s after the first step"
        report.say(f"done: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, {speed}")
    return 0


@record
def main() -> None:
    run_training(train, parse_arguments())


if __name__ == "__main__":
    main()
