"""More models of gpu_sweep.py: timm, transformers and diffusers, and plain torch of other fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.amp_models import DECODER, Batch, Model, WithLoss, in_bfloat16, language, tokens
from benchmarks.sweep_models import Diffusers, timm_classifier
from benchmarks.sweep_plain_models import MODELS as PLAIN

# --- transformers -----------------------------------------------------------------------------------------------------


class Regressed(nn.Module):
    """A model of images, and the mean square of the difference of one of its results from the labels."""

    def __init__(self, model: nn.Module, result: str) -> None:
        super().__init__()
        self.model, self.result = model, result

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(getattr(self.model(pixel_values), self.result).float(), labels)


class Paired(nn.Module):
    """Contrastive training of SigLIP's two towers."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        import transformers

        sizes = _layers(64, 1, 2) if is_small else {}
        self.model = transformers.SiglipModel(_config("Siglip", text_config=sizes, vision_config=sizes))

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch, return_loss=True).loss
        return loss


class Detector(nn.Module):
    """Deformable DETR with a loss for known pairs of queries and boxes."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        import transformers

        small = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]} if is_small else {}
        backbone = _config("ResNet", **small, out_features=["stage2", "stage3", "stage4"])
        sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
                 "num_queries": 20} if is_small else {"encoder_layers": 3, "decoder_layers": 3}  # fmt: skip
        config = _config("DeformableDetr", **sizes, num_labels=91, backbone_config=backbone)
        self.model = transformers.DeformableDetrForObjectDetection(config)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        found = self.model(pixel_values)
        classes = F.cross_entropy(found.logits.flatten(0, 1).float(), labels.flatten())
        return classes + 5 * F.l1_loss(found.pred_boxes.float(), boxes)


def _street(is_small: bool) -> Batch:
    rows, side, queries = (1, 128, 20) if is_small else (4, 512, 300)
    return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(0, 91, (rows, queries)),
            "boxes": torch.rand(rows, queries, 4)}  # fmt: skip


class Codec(nn.Module):
    """The encoder and the decoder of DAC with a loss on waves and on their spectra, without quantization."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        import transformers

        sizes = {"encoder_hidden_size": 8, "decoder_hidden_size": 64, "downsampling_ratios": (2, 4),
                 "upsampling_ratios": (4, 2), "n_codebooks": 1}  # fmt: skip
        whole: Any = transformers.DacModel(_config("Dac", **(sizes if is_small else {"n_codebooks": 1})))
        whole.apply_weight_norm()
        self.encoder, self.decoder = whole.encoder, whole.decoder

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        found = self.decoder(self.encoder(waves))[..., : waves.shape[-1]].flatten(0, 1).float()
        wanted = waves.flatten(0, 1)[:, : found.shape[1]]
        loss = F.l1_loss(found, wanted)
        for size in (128, 512):
            window = torch.hann_window(size, device=waves.device)
            first, second = (
                torch.stft(x, size, size // 4, window=window, return_complex=True).abs().clamp(min=1e-5)
                for x in (found, wanted)
            )
            loss = loss + F.l1_loss(first, second) + F.l1_loss(first.log10(), second.log10())
        return loss


def _config(kind: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, f"{kind}Config")(**sizes)


def _layers(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": 4 * width}  # fmt: skip


def _depth(is_small: bool) -> nn.Module:
    import transformers

    width, layers, heads, taps = (64, 4, 2, [1, 2, 3, 4]) if is_small else (384, 12, 6, [3, 6, 9, 12])
    backbone = _config(
        "Dinov2", hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, out_indices=taps,
        image_size=224, apply_layernorm=True, reshape_hidden_states=False,
    )  # fmt: skip
    config = _config("DepthAnything", backbone_config=backbone, reassemble_hidden_size=width)
    return Regressed(transformers.DepthAnythingForDepthEstimation(config), "predicted_depth")


def _segment(is_small: bool) -> nn.Module:
    import transformers

    sizes = {**_layers(64, 2, 2), "image_size": 64, "window_size": 2, "global_attn_indexes": [1], "output_channels": 32}
    config = _config("SamVision", **(sizes if is_small else {"image_size": 512}), initializer_range=0.02)
    return Regressed(transformers.SamVisionModel(config), "last_hidden_state")


def _mapped(rows: int, side: int, result: list[int], small_side: int, small: list[int]) -> Callable[[bool], Batch]:
    def batch(is_small: bool) -> Batch:
        count, size = (1, small_side) if is_small else (rows, side)
        labels = torch.randn(count, *(small if is_small else result))
        return {"pixel_values": torch.randn(count, 3, size, size), "labels": labels}

    return batch


def _captions(is_small: bool) -> Batch:
    rows = 2 if is_small else 48
    return {"pixel_values": torch.randn(rows, 3, 224, 224), "input_ids": torch.randint(5, 32000, (rows, 64))}


def _vision_language(is_small: bool) -> nn.Module:
    import transformers

    vision, text = (_layers(64, 1, 2), _layers(64, 1, 2)) if is_small else (_layers(768, 6, 12), _layers(960, 8, 15))
    text |= {"model_type": "llama", "vocab_size": 512 if is_small else 49280, "pad_token_id": 0, "use_cache": False}
    text |= {"num_key_value_heads": 1 if is_small else 5}
    return WithLoss(transformers.SmolVLMForConditionalGeneration(_config(
        "SmolVLM", vision_config={**vision, "image_size": 224, "patch_size": 16}, text_config=text,
        image_token_id=1, use_cache=False, scale_factor=2, pad_token_id=0,
    )))  # fmt: skip


def _illustrated(is_small: bool) -> Batch:
    found = dict(tokens(8, 512, 49280)(is_small))
    found["input_ids"] = torch.cat([torch.ones(found["labels"].shape[0], 49, dtype=torch.long), found["input_ids"]], 1)
    found["labels"] = torch.where(found["input_ids"] == 1, -100, found["input_ids"])
    return {**found, "pixel_values": torch.randn(found["labels"].shape[0], 1, 3, 224, 224)}


def _videomae(is_small: bool) -> nn.Module:
    import transformers

    small = {**_layers(64, 1, 2), "image_size": 32, "num_frames": 4, "decoder_hidden_size": 32,
             "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}  # fmt: skip
    return WithLoss(transformers.VideoMAEForPreTraining(_config("VideoMAE", **(small if is_small else {}))))


def _clips(is_small: bool) -> Batch:
    rows, frames, side = (2, 4, 32) if is_small else (16, 16, 224)
    patches = frames // 2 * (side // 16) ** 2
    masked = torch.rand(rows, patches).argsort(1) < patches * 9 // 10
    return {"pixel_values": torch.randn(rows, frames, 3, side, side), "bool_masked_pos": masked}


def _series(is_small: bool) -> Batch:
    rows, channels = (2, 3) if is_small else (64, 21)
    return {"past_values": torch.randn(rows, 512, channels), "future_values": torch.randn(rows, 96, channels)}


# --- diffusion --------------------------------------------------------------------------------------------------------


class Denoising(nn.Module):
    """A network of diffusers with its mean-square loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, target: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.inner(**batch).float(), target)


class Controlled(nn.Module):
    """A ControlNet that is trained beside a frozen U-Net."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        import diffusers  # type: ignore[import-not-found, unused-ignore]

        sizes = {"block_out_channels": (32, 64, 64) if is_small else (256, 512, 512), "layers_per_block": 1,
                 "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
                 "cross_attention_dim": 64 if is_small else 768}  # fmt: skip
        ups = ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")
        kinds: Any = diffusers
        self.unet = kinds.UNet2DConditionModel(**sizes, up_block_types=ups).requires_grad_(False)
        self.control = kinds.ControlNetModel(**sizes)

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, states: torch.Tensor, hint: torch.Tensor
    ) -> torch.Tensor:
        down, middle = self.control(sample, timestep, states, controlnet_cond=hint, return_dict=False)
        found: torch.Tensor = self.unet(
            sample, timestep, states, down_block_additional_residuals=down, mid_block_additional_residual=middle,
            return_dict=False,
        )[0]  # fmt: skip
        return found


def _hinted(is_small: bool) -> Batch:
    rows, side, width = (1, 16, 64) if is_small else (8, 64, 768)
    return {"sample": torch.randn(rows, 4, side, side), "timestep": torch.randint(0, 1000, (rows,)),
            "states": torch.randn(rows, 77, width), "hint": torch.rand(rows, 3, 8 * side, 8 * side),
            "target": torch.randn(rows, 4, side, side)}  # fmt: skip


def _pixart(is_small: bool) -> nn.Module:
    heads, layers = (2, 1) if is_small else (16, 8)
    return Denoising(Diffusers(
        "PixArtTransformer2DModel", sample_size=64, num_layers=layers, num_attention_heads=heads, caption_channels=4096,
        cross_attention_dim=72 * heads,
    ))  # fmt: skip


def _pixart_batch(is_small: bool) -> Batch:
    rows, side, words = (1, 16, 8) if is_small else (8, 64, 120)
    lengths = torch.linspace(words, words // 4, rows).long()
    return {"hidden_states": torch.randn(rows, 4, side, side), "timestep": torch.randint(0, 1000, (rows,)),
            "encoder_hidden_states": torch.randn(rows, words, 4096), "target": torch.randn(rows, 8, side, side),
            "encoder_attention_mask": (torch.arange(words) < lengths[:, None]).float()}  # fmt: skip


def _flux(is_small: bool) -> nn.Module:
    heads, layers = (1, 1) if is_small else (12, 3)
    return Denoising(Diffusers(
        "FluxTransformer2DModel", num_layers=layers, num_single_layers=2 * layers, num_attention_heads=heads
    ))  # fmt: skip


def _flux_batch(is_small: bool) -> Batch:
    rows, side, words = (1, 4, 8) if is_small else (2, 32, 256)
    places = torch.stack([torch.zeros(side, side), *torch.meshgrid([torch.arange(side)] * 2, indexing="ij")], -1)
    states = {"hidden_states": torch.randn(rows, side * side, 64),
              "encoder_hidden_states": torch.randn(rows, words, 4096)}  # fmt: skip
    return {**states, "pooled_projections": torch.randn(rows, 768), "timestep": torch.rand(rows),
            "txt_ids": torch.zeros(words, 3), "img_ids": places.flatten(0, 1),
            "target": torch.randn(rows, side * side, 64)}  # fmt: skip


_BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
         "vocab_size": 512}  # fmt: skip
_FNET = {name: size for name, size in _BERT.items() if name != "num_attention_heads"}
_ENDS = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0)
_EXPERTS = {**DECODER, "moe_intermediate_size": 64, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 64}  # fmt: skip
_1024 = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "vocab_size": 32000,
         "use_cache": False}  # fmt: skip

MODELS: Mapping[str, Model] = {
    "edgenext_small": timm_classifier("edgenext_small", 64),
    "mobilevit_s": timm_classifier("mobilevit_s", 64, 256),
    "repvgg_a2": timm_classifier("repvgg_a2", 96),
    "res2net50": timm_classifier("res2net50_26w_4s", 64),
    "resnest50d": timm_classifier("resnest50d", 64),
    "hiera_tiny": timm_classifier("hiera_tiny_224", 64),
    "davit_tiny": timm_classifier("davit_tiny", 64),
    "focalnet_tiny": timm_classifier("focalnet_tiny_srf", 64),
    "volo_d1": timm_classifier("volo_d1_224", 64),
    "crossvit_small": timm_classifier("crossvit_small_240", 64, 240),
    "twins_svt_small": timm_classifier("twins_svt_small", 64),
    "gcvit_xtiny": timm_classifier("gcvit_xtiny", 64),
    "mamba2": Model(language("Mamba2", "Config", "ForCausalLM", {"hidden_size": 64, "num_heads": 4, "head_dim": 32,
                             "num_hidden_layers": 2, "state_size": 16, "chunk_size": 16, "vocab_size": 512},
                             hidden_size=1024, num_heads=32, n_groups=1, state_size=64, chunk_size=64,
                             num_hidden_layers=3, vocab_size=32000, use_cache=False), tokens(2, 1024, 32000)),
    "mamba": Model(language("Mamba", "Config", "ForCausalLM", {"hidden_size": 64, "num_hidden_layers": 1,
                            "vocab_size": 512}, hidden_size=768, num_hidden_layers=2, vocab_size=32000,
                            use_cache=False), tokens(8, 64, 32000)),
    "qwen3_next": Model(in_bfloat16(language("Qwen3Next", "Config", "ForCausalLM", {**_EXPERTS,
                        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
                        "linear_num_value_heads": 4}, **{**_1024, "num_hidden_layers": 2}, num_key_value_heads=4,
                        layer_types=["linear_attention", "full_attention"], head_dim=64, num_experts=16,
                        num_experts_per_tok=4, moe_intermediate_size=384, shared_expert_intermediate_size=384,
                        linear_num_key_heads=8, linear_num_value_heads=16)), tokens(4, 1024, 32000), autocast=False),
    "gpt_oss": Model(in_bfloat16(language("GptOss", "Config", "ForCausalLM", {**_EXPERTS, "num_local_experts": 4},
                     **_1024, num_key_value_heads=4, intermediate_size=1024, num_local_experts=16)),
                     tokens(4, 1024, 32000), autocast=False),
    "llama4": Model(in_bfloat16(language("Llama4", "TextConfig", "ForCausalLM", {**DECODER, "head_dim": 32,
                    "intermediate_size_mlp": 128, "num_local_experts": 4}, **_1024, num_key_value_heads=4, head_dim=64,
                    intermediate_size=1024, intermediate_size_mlp=4096, num_local_experts=8,
                    interleave_moe_layer_step=2)), tokens(4, 1024, 32000), autocast=False),
    "falcon": Model(language("Falcon", "Config", "ForCausalLM", _BERT, **_1024), tokens(4, 1024, 32000)),
    "mpt": Model(language("Mpt", "Config", "ForCausalLM", {"d_model": 64, "n_layers": 2, "n_heads": 2,
                          "vocab_size": 512}, d_model=1024, n_layers=4, vocab_size=32000), tokens(4, 1024, 32000)),
    "glm4": Model(in_bfloat16(language("Glm4", "Config", "ForCausalLM", {**_EXPERTS, "pad_token_id": 0}, **_1024,
                  num_key_value_heads=2, head_dim=64, intermediate_size=2816, pad_token_id=0)),
                  tokens(8, 1024, 32000), autocast=False),
    "olmo2": Model(language("Olmo2", "Config", "ForCausalLM", {**DECODER, "pad_token_id": 0}, **_1024,
                   intermediate_size=2816, pad_token_id=0), tokens(4, 1024, 32000)),
    "modernbert": Model(language("ModernBert", "Config", "ForMaskedLM", {**_BERT, **_ENDS}, num_hidden_layers=11),
                        tokens(6, 1024, 50000)),
    "longformer": Model(language("Longformer", "Config", "ForMaskedLM", {**_BERT, "attention_window": 16},
                        num_hidden_layers=4, attention_window=512, max_position_embeddings=4098),
                        tokens(4, 2048, 30000)),
    "esm2": Model(language("Esm", "Config", "ForMaskedLM", _BERT, vocab_size=33, hidden_size=640,
                           num_hidden_layers=8, num_attention_heads=20, intermediate_size=2560, token_dropout=True,
                           position_embedding_type="rotary", mask_token_id=32, pad_token_id=1), tokens(8, 512, 30)),
    "fnet": Model(language("FNet", "Config", "ForMaskedLM", _FNET), tokens(16, 512, 32000)),
    "funnel": Model(language("Funnel", "Config", "ForMaskedLM", {"d_model": 64, "n_head": 2, "d_head": 32,
                             "d_inner": 128, "block_sizes": [1, 1], "vocab_size": 512}, block_sizes=[4, 4],
                             initializer_std=0.02),
                    tokens(8, 512, 30000)),
    "perceiver": Model(language("Perceiver", "Config", "ForMaskedLM", {"d_latents": 64, "d_model": 32,
                       "num_latents": 16, "vocab_size": 512, "num_self_attends_per_block": 2, "qk_channels": 32,
                       "v_channels": 64, "num_self_attention_heads": 2, "num_cross_attention_heads": 2,
                       "max_position_embeddings": 32}, num_self_attends_per_block=8, qk_channels=256,
                       v_channels=1280), tokens(16, 2048, 262)),
    "patchtst": Model(language("PatchTST", "Config", "ForPrediction", {"d_model": 32, "ffn_dim": 64,
                      "num_input_channels": 3}, context_length=512, prediction_length=96, num_input_channels=21,
                      patch_length=16, patch_stride=8, d_model=256, num_attention_heads=8, num_hidden_layers=6,
                      ffn_dim=512, dropout=0.1), _series),
    "siglip": Model(Paired, _captions),
    "sam_vision": Model(_segment, _mapped(4, 512, [256, 32, 32], 64, [32, 4, 4])),
    "depth_anything": Model(_depth, _mapped(16, 518, [518, 518], 224, [224, 224])),
    "deformable_detr": Model(Detector, _street),
    "vision_language": Model(_vision_language, _illustrated),
    "videomae": Model(_videomae, _clips),
    "audio_codec": Model(Codec, lambda small: {"waves": torch.randn(*((1, 1, 1600) if small else (8, 1, 16000)))}),
    "pixart": Model(_pixart, _pixart_batch),
    "flux": Model(_flux, _flux_batch),
    "controlnet": Model(lambda small: Denoising(Controlled(small)), _hinted),
    **PLAIN,
}  # fmt: skip
