"""Write a trained model as a Hugging Face folder (config, tokenizer, safetensors) that `from_pretrained` loads."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from common import ARCHITECTURES, World
from data import END
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

PAD = 257
"""Padding token of short sequences in a batch; text never contains it."""


def byte_tokenizer() -> Any:
    """Make a Hugging Face tokenizer for launch/data.py's tokens: bytes as ids, followed by `<|end|>` and `<|pad|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = _letters_of_bytes()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|pad|>"])
    # every file of the training text begins with this token
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _letters_of_bytes() -> list[str]:
    """Return the printable letter of each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def write_hf_folder(folder: Path, model: nn.Module, config: Any, world: World) -> None:
    """Write `folder`, whole or not at all. Every rank calls it: sharded parameters are gathered on rank 0.

    `model` may be in DDP or FSDP, compiled or not: names in the folder are the plain model's.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    tensors = get_model_state_dict(model, options=options)
    if world.is_main:
        write_complete_folder(folder, tensors, config)


def write_complete_folder(folder: Path, tensors: dict[str, torch.Tensor], config: Any) -> None:
    """Write `folder` from whole tensors, by the plain model's names; one rank calls it."""
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_tensors(aside, tensors, config)
    byte_tokenizer().save_pretrained(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], config: Any) -> None:
    """Write config.json for byte tokens, and safetensors files of at most 5 GB, with an index if there are several."""
    from huggingface_hub import save_torch_state_dict

    described = copy.deepcopy(config)
    described.use_cache = True
    described.bos_token_id = described.eos_token_id = END
    described.pad_token_id = PAD
    described.architectures = [ARCHITECTURES[config.model_type]]
    described.dtype = next(iter(tensors.values())).dtype
    described.save_pretrained(folder)
    save_torch_state_dict({name: tensor.contiguous() for name, tensor in tensors.items()}, folder)
