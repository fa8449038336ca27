"""Sound, and other series of numbers."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.architecture import TRACES_LAYERDROP, VOCABULARY, Architecture, Batch, pretrained, tokens


def waves(rows: int, length: int) -> Batch:
    """Sound as samples, and what was said (CTC)."""
    return {"input_values": torch.randn(rows, length), "labels": torch.randint(4, 16, (rows, 3))}


def spoken(rows: int, length: int) -> Batch:
    """Sound as samples, one class each."""
    return {"input_values": torch.randn(rows, length), "labels": torch.randint(0, 2, (rows,))}


def spectra(rows: int, length: int) -> Batch:
    """Spectrograms for an encoder, text for its decoder (Whisper)."""
    return {"input_features": torch.randn(rows, 8, length), "labels": tokens(rows, 5)}


def transposed(rows: int, length: int) -> Batch:
    """Spectrograms with time first."""
    return {"input_features": torch.randn(rows, length, 8), "labels": tokens(rows, 5)}


def pictures(rows: int, length: int) -> Batch:
    """Spectrograms as pictures (AST)."""
    return {"input_values": torch.randn(rows, length, 16), "labels": torch.randint(0, 2, (rows,))}


def series(rows: int, length: int) -> Batch:
    """Two channels over time, and how they go on."""
    return {"past_values": torch.randn(rows, length, 2), "future_values": torch.randn(rows, 4, 2)}


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL |= {"initializer_range": 0.1}
WAVES = {
    **SMALL, "fullgraph": False,  # CTC models look at the largest label, others lock to install hooks
    "vocab_size": 16, "conv_dim": [8, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "ctc_zero_infinity": True, "pad_token_id": 0,
}  # fmt: skip
SPEECH = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "use_cache": False,
    "init_std": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def audio(name: str, model: str, batch: Any, **more: Any) -> Architecture:
    """One over sound of 120 or 160 samples, unless `lengths` says otherwise."""
    return pretrained(name + model, f"{name}Config", {}, batch, **{"lengths": (120, 160), **more})


AUDIO = {
    "wav2vec2": audio("Wav2Vec2", "ForCTC", waves, **WAVES),
    "wav2vec2-stable": audio("Wav2Vec2", "ForSequenceClassification", spoken, **WAVES, do_stable_layer_norm=True,
                             feat_extract_norm="layer", conv_bias=True, classifier_proj_size=8),
    "hubert": audio("Hubert", "ForCTC", waves, **WAVES),
    "wavlm": audio("WavLM", "ForCTC", waves, **WAVES, num_buckets=8, max_bucket_distance=16),
    "sew": audio("SEW", "ForCTC", waves, **WAVES, squeeze_factor=2),
    "unispeech": audio("UniSpeech", "ForCTC", waves, **WAVES, num_ctc_classes=16),
    "data2vec-audio": audio("Data2VecAudio", "ForCTC", waves, **WAVES, conv_pos_kernel_size=3),
    "wav2vec2-bert": audio(
        "Wav2Vec2Bert", "ForCTC", transposed, **SMALL, fullgraph=False,
        vocab_size=VOCABULARY, feature_projection_input_dim=8,
        ctc_zero_infinity=True, lengths=(16, 20), conv_depthwise_kernel_size=5,
    ),
    "whisper": audio("Whisper", "ForConditionalGeneration", spectra, **SPEECH, num_mel_bins=8,
                     max_source_positions=8, max_target_positions=16, lengths=(16, 16), fullgraph=TRACES_LAYERDROP),
    "speech-to-text": audio(
        "Speech2Text", "ForConditionalGeneration", transposed, **SPEECH, input_feat_per_channel=8, conv_channels=16,
        max_source_positions=32, max_target_positions=16, lengths=(16, 20), fullgraph=TRACES_LAYERDROP,
    ),
    "moonshine": audio(
        "Moonshine", "ForConditionalGeneration",
        lambda rows, length: {"input_values": torch.randn(rows, length), "labels": tokens(rows, 5)},
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1, encoder_num_attention_heads=4, decoder_num_attention_heads=4, use_cache=False,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, lengths=(1200, 1600),
    ),
    "ast": audio("AST", "ForAudioClassification", pictures, **SMALL, patch_size=8, frequency_stride=8, time_stride=8,
                 max_length=32, num_mel_bins=16, lengths=(32, 32)),
    "patchtst": audio("PatchTST", "ForPrediction", series, num_input_channels=2, context_length=16, patch_length=4,
                      patch_stride=4, num_hidden_layers=1, d_model=16, num_attention_heads=2, ffn_dim=24,
                      prediction_length=4, lengths=(16, 16)),
}  # fmt: skip
"""Name -> architecture."""
