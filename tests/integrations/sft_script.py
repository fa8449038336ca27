"""What a user's script for TRL's SFTTrainer looks like, full or with PEFT's LoRA. Prints one JSON line on rank 0."""

from __future__ import annotations

import argparse
import json
import os
import string
import sys
import warnings

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

warnings.simplefilter("ignore")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable character."""
    vocabulary = {character: number for number, character in enumerate(["<pad>", "<eos>", *string.printable])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--folder", required=True)
    arguments = parser.parse_args()
    if arguments.backend == "dcompile":
        import dcompile.integrations.transformers  # Accelerate knows the name from here on

    torch.manual_seed(0)
    words = tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=len(words), pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    settings = SFTConfig(
        output_dir=arguments.folder, max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, ddp_backend="gloo",
        disable_tqdm=True, seed=0, bf16=False, max_length=64, gradient_checkpointing=False,
        torch_compile_backend=None if arguments.backend == "eager" else arguments.backend,
    )  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if arguments.lora else None
    rows = Dataset.from_list([{"text": "hello world " * 4} for _ in range(32)])
    trainer = SFTTrainer(model, settings, train_dataset=rows, processing_class=words, peft_config=lora)
    trainer.train()
    trainer.save_model(f"{arguments.folder}/last")
    result = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    flat = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(everyone, flat)
    result["ranks_equal"] = torch.equal(*everyone)
    result["saved"] = sorted(name for name in os.listdir(f"{arguments.folder}/last") if name.endswith("safetensors"))
    if arguments.backend == "dcompile":
        import dcompile

        receipt = dcompile.receipt(trainer.model_wrapped)
        result["receipt"] = {name: getattr(receipt, name) for name in ("adapter", "eligible", "reasons", "graphs")}
        result["receipt"] |= {name: getattr(receipt, name) for name in ("collectives", "buckets", "notes")}
    if os.environ.get("RANK") == "0":
        sys.stdout.write("\nRESULT " + json.dumps(result) + "\n")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
