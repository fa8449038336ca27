"""Train a byte-level Llama with Hugging Face's Trainer: torchrun --nproc-per-node 2 launch/train_hf_trainer.py"""

from __future__ import annotations

import argparse

from flags import Parser, add_compile_flags, add_model_flags, add_training_flags, add_wrapper_flags


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__file__, __doc__)
    add_model_flags(parser, "llama_10m")
    add_wrapper_flags(parser, "GPUs only")
    add_compile_flags(parser)
    add_training_flags(parser, "out/train_hf_trainer")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse_arguments()  # here for --help and wrong flags, since the imports below take seconds

import math
import signal
import time
from typing import Any

import numpy as np
import torch
from checkpoint import lock
from common import World, load_config, parse_options
from data import Text, batch, load_text
from errors import UserError
from hf_folder import write_hf_folder
from interruption import Interruption, run_training
from report import Reporter, say_result
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import Dataset
from train import evaluate, is_due
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments


class Windows(Dataset):  # type: ignore[type-arg]
    """Sequences of text at random positions; an index always gives the same sequence."""

    def __init__(self, tokens: np.ndarray, count: int, seq_len: int, seed: int) -> None:
        self.tokens, self.count, self.seq_len, self.seed = tokens, count, seq_len, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (row,) = batch(self.tokens, 1, self.seq_len, (self.seed, index))
        return {"input_ids": row, "labels": row}


class Progress(TrainerCallback):
    """Reports Trainer's metrics as other scripts do: a line of metrics.jsonl for each step, and held-out loss."""

    def __init__(
        self, report: Reporter, text: Text, args: argparse.Namespace, world: World, interruption: Interruption
    ) -> None:
        self.report, self.text, self.args, self.world = report, text, args, world
        self.interruption, self.stopped = interruption, 0
        self.tokens_per_step = world.size * args.grad_accum * args.batch_size * args.seq_len
        self.last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step = state.global_step
        self.stopped = self.interruption.agreed()
        if self.stopped and step < self.args.steps:
            control.should_save = control.should_training_stop = True
        elif step == self.args.steps or is_due(step, self.args.eval_freq):
            with self.report.doing("evaluation"):
                held_out = evaluate(model, self.text, self.args, self.world)
            self.report.held_out(step, held_out)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        now = time.perf_counter()
        speed, self.last = self.tokens_per_step / (now - self.last), now
        fields = {"step": state.global_step, "loss": float(logs["loss"]), "lr": float(logs["learning_rate"])}
        fields |= {"grad_norm": float(logs.get("grad_norm", math.nan)), "tokens_per_s": round(speed, 1)}
        self.report.step(fields | {"time": time.time()})


def make_arguments(args: argparse.Namespace, world: World) -> TrainingArguments:
    """Convert these scripts' flags to Trainer's. `torch_compile_backend` is the only one that is about dcompile."""
    on_cpu, options = world.device.type == "cpu", args.compile_options or args.compile_fullgraph
    if args.wrap == "fsdp" and on_cpu:
        raise UserError("--wrap fsdp: Accelerate shards on GPUs only; use --wrap ddp, or launch/train.py")
    if args.backend == "eager" and (args.compile_mode or options):
        raise UserError("--compile.* settings need --backend inductor or dcompile")
    if args.backend == "inductor" and options:
        raise UserError("--compile.options and --compile.fullgraph: Trainer takes --compile.mode only for inductor")
    by_name = args.backend != "eager" and not (args.backend == "dcompile" and options)
    if args.backend == "dcompile":
        import dcompile.integrations.transformers  # noqa: F401  registers the name with Accelerate
    return TrainingArguments(
        output_dir=str(args.output_dir),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.grad_accum,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup_steps,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=args.clip_norm,
        bf16=args.dtype == "bf16",
        seed=args.seed,
        logging_steps=1,
        save_strategy="steps",
        save_steps=args.checkpoint_interval or args.steps,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
        ddp_bucket_cap_mb=int(args.bucket_cap_mb) or 1,
        fsdp="full_shard auto_wrap" if args.wrap == "fsdp" else None,
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        if args.wrap == "fsdp"
        else None,
        torch_compile_backend=args.backend if by_name else None,
        torch_compile_mode=args.compile_mode if by_name else None,
        report_to=[],
        disable_tqdm=True,
    )


def find_checkpoint(args: argparse.Namespace) -> str | None:
    """Return the checkpoint for --resume; Trainer's own folders are checkpoint-10, checkpoint-20, ..."""
    if args.resume != "auto":
        return None if args.resume == "none" else args.resume
    found = sorted(args.output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return str(found[-1]) if found else None


def train(args: argparse.Namespace, world: World, interruption: Interruption) -> int:
    """Run training; return the exit status, as launch/train.py does."""
    text = load_text(args.data, args.max_data_mb, args.seq_len)
    args.claim = lock(args.output_dir, world)  # kept until the process ends
    arguments = make_arguments(args, world)
    torch.manual_seed(args.seed)
    sequences = args.steps * args.grad_accum * args.batch_size * world.size
    data = Windows(text.train, sequences, args.seq_len, args.seed)
    trainer = Trainer(LlamaForCausalLM(load_config(args.config)), arguments, train_dataset=data)
    if args.backend == "dcompile" and not arguments.torch_compile:
        from dcompile.integrations.transformers import compile_trainer

        try:
            compile_trainer(trainer, mode=args.compile_mode, fullgraph=args.compile_fullgraph,
                            options=parse_options(args.compile_options))  # fmt: skip
        except ValueError as error:
            raise UserError(str(error)) from error
    found = find_checkpoint(args)
    done = int(found.rpartition("-")[2]) if found else 0
    report = Reporter(args.output_dir, done, args.steps, args.log_freq, world)
    report.say(f"{args.config}: {world.size} x {world.device.type}, {args.wrap} by Trainer, {args.backend}")
    trainer.remove_callback(PrinterCallback)
    progress = Progress(report, text, args, world, interruption)
    trainer.add_callback(progress)
    trainer.train(resume_from_checkpoint=found)
    report.close()
    if progress.stopped and trainer.state.global_step < args.steps:
        report.say(f"stopped by {signal.Signals(progress.stopped).name}; go on with --resume auto")
        return 128 + progress.stopped
    write_hf_folder(args.output_dir / "hf", trainer.model_wrapped, trainer.model.config, world)
    return say_result(report, trainer.model, args.output_dir, world)


@record
def main() -> None:
    run_training(train, parse_arguments())


if __name__ == "__main__":
    main()
