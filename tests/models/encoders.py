"""Encoders, and models with an encoder and a decoder, over text."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.architecture import (
    VOCABULARY,
    Architecture,
    Batch,
    masked_language,
    padded_language,
    pretrained,
    translation,
)

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def encoder(name: str, model: str = "ForMaskedLM", batch: Any = masked_language, **more: Any) -> Architecture:
    """One with BERT's names of settings."""
    return pretrained(name + model, f"{name}Config", SMALL, batch, **more)


def classes(rows: int, length: int) -> Batch:
    """Two classes of padded sequences."""
    return {**padded_language(rows, length), "labels": torch.randint(0, 2, (rows,))}


def tags(rows: int, length: int) -> Batch:
    """A class for each token."""
    return {**padded_language(rows, length), "labels": torch.randint(0, 2, (rows, length))}


def spans(rows: int, length: int) -> Batch:
    """Question answering: where the answer starts and ends."""
    batch = padded_language(rows, length)
    del batch["labels"]
    return {**batch, "start_positions": torch.full((rows,), 1), "end_positions": torch.full((rows,), 3)}


def replaced(rows: int, length: int) -> Batch:
    """Which tokens were replaced (ELECTRA)."""
    return {**padded_language(rows, length), "labels": torch.randint(0, 2, (rows, length))}


def unmasked(rows: int, length: int) -> Batch:
    """With a mask that masks nothing, as it is added: the one that is made of a row of ones has no fitting shape."""
    batch = masked_language(rows, length)
    return {**batch, "attention_mask": torch.zeros(rows, 1, 1, length)}


def unpadded(rows: int, length: int) -> Batch:
    """Masked-token prediction for models that know no padding."""
    batch = masked_language(rows, length)
    del batch["attention_mask"]
    return batch


def inputs(rows: int, length: int) -> Batch:
    """Classes of sequences, under Perceiver's name of the argument."""
    batch = classes(rows, length)
    return {"inputs": batch.pop("input_ids"), **batch}


def bytes_(rows: int, length: int) -> Batch:
    """Classes of sequences of code points."""
    return {"input_ids": torch.randint(4, 200, (rows, length)), "labels": torch.randint(0, 2, (rows,))}


ENCODERS = {
    "bert": encoder("Bert"),
    "bert-tags": encoder("Bert", "ForTokenClassification", tags),
    "bert-spans": encoder("Bert", "ForQuestionAnswering", spans),
    "roberta": encoder("Roberta"),
    "distilbert": encoder(
        "DistilBert", "ForSequenceClassification", classes, dim=32, hidden_dim=48, n_layers=2, n_heads=4
    ),
    "electra": encoder("Electra", "ForPreTraining", replaced, embedding_size=16),
    "albert": encoder("Albert", embedding_size=16),
    "deberta": encoder(
        "Deberta", relative_attention=True, max_relative_positions=8, pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
    ),
    "deberta-v2": encoder(
        "DebertaV2", "ForSequenceClassification", classes, relative_attention=True, position_buckets=4,
        max_relative_positions=8, pos_att_type=["c2p", "p2c"], share_att_key=True, norm_rel_ebd="layer_norm",
        position_biased_input=False, fullgraph=False,
    ),
    "modernbert": encoder("ModernBert", local_attention=4, num_hidden_layers=2, global_attn_every_n_layers=2),
    "longformer": encoder("Longformer", attention_window=4, fullgraph=False),
    "big-bird": encoder("BigBird", attention_type="original_full"),
    "mpnet": encoder("MPNet"),
    "xlm-roberta": encoder("XLMRoberta", "ForSequenceClassification", classes),
    "convbert": encoder("ConvBert", embedding_size=32, head_ratio=2, conv_kernel_size=3),
    "squeezebert": encoder("SqueezeBert", embedding_size=32),
    "mobilebert": encoder(
        "MobileBert", "ForSequenceClassification", classes, embedding_size=16, intra_bottleneck_size=16,
    ),
    "fnet": encoder("FNet", batch=unpadded),
    "nystromformer": encoder(
        "Nystromformer", batch=unmasked, num_landmarks=4, segment_means_seq_len=8, lengths=(8, 8)
    ),
    "funnel": pretrained(
        "FunnelForMaskedLM", "FunnelConfig",
        {
            "vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 4,
            "d_head": 8, "d_inner": 48,
        },
        masked_language,
    ),
    "roformer": encoder("RoFormer", embedding_size=32),
    "rembert": encoder("RemBert", input_embedding_size=16, output_embedding_size=24),
    "megatron-bert": encoder("MegatronBert"),
    "ibert": encoder("IBert", quant_mode=False, fullgraph=False),
    "esm": encoder("Esm", position_embedding_type="rotary", mask_token_id=3),
    "eurobert": encoder("EuroBert", num_key_value_heads=2),
    "canine": encoder(
        "Canine", "ForSequenceClassification", bytes_, local_transformer_stride=4, num_hash_buckets=32,
        downsampling_rate=2, upsampling_kernel_size=2,
    ),
    "xlnet": pretrained(
        "XLNetForSequenceClassification", "XLNetConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}, classes,
    ),
    "xlm": encoder(
        "XLM", "ForSequenceClassification", classes, emb_dim=32, n_layers=2, n_heads=4,
    ),
    "nomic-bert": encoder("NomicBert"),
    "perceiver": encoder(
        "Perceiver", "ForSequenceClassification", inputs, num_latents=4, d_latents=16, d_model=32, num_blocks=1,
        num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2,
    ),
}  # fmt: skip
"""Name -> architecture."""

T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "use_cache": False}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48}
BART |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "use_cache": False}
BART |= {"max_position_embeddings": 64, "init_std": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART |= {"decoder_start_token_id": 2, "forced_eos_token_id": 2}


def bart(name: str, model: str = "ForConditionalGeneration", **more: Any) -> Architecture:
    """One with BART's names of settings."""
    return pretrained(name + model, f"{name}Config", BART, translation, **more)


def t5(name: str, **more: Any) -> Architecture:
    """One with T5's names of settings."""
    return pretrained(f"{name}ForConditionalGeneration", f"{name}Config", T5, translation, **more)


SEQ2SEQ = {
    "t5": t5("T5"),
    "t5-gated": t5("T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": t5("MT5"),
    "umt5": t5("UMT5"),
    "longt5": t5("LongT5", local_radius=3, encoder_attention_type="local"),
    "longt5-global": t5("LongT5", local_radius=3, encoder_attention_type="transient-global", global_block_size=4),
    "switch-transformers": t5(
        "SwitchTransformers", num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        expert_capacity=8, fullgraph=False,
    ),
    "bart": bart("Bart"),
    "mbart": bart("MBart", scale_embedding=True),
    "pegasus": bart("Pegasus"),
    "pegasus-x": bart("PegasusX", block_size=4, num_global_tokens=2),
    "marian": bart("Marian", "MTModel"),
    "m2m-100": bart("M2M100"),
    "blenderbot": bart("Blenderbot"),
    "blenderbot-small": bart("BlenderbotSmall"),
    "led": bart("LED", attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64,
                fullgraph=False),
    "bigbird-pegasus": bart("BigBirdPegasus", attention_type="original_full"),
    "nllb-moe": bart("NllbMoe", num_experts=4, encoder_sparse_step=1, decoder_sparse_step=1, expert_capacity=8,
                     fullgraph=False),
    "prophetnet": pretrained(
        "ProphetNetForConditionalGeneration", "ProphetNetConfig",
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "encoder_ffn_dim": 48, "num_encoder_layers": 1,
            "num_encoder_attention_heads": 4, "decoder_ffn_dim": 48, "num_decoder_layers": 1,
            "num_decoder_attention_heads": 4, "ngram": 2, "num_buckets": 8, "relative_max_distance": 16,
            "max_position_embeddings": 64, "pad_token_id": 0, "use_cache": False,
        },
        translation,
    ),
}  # fmt: skip
"""With an encoder and a decoder."""
