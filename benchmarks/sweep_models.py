"""The models of gpu_sweep.py: architectures of timm, transformers and diffusers that no rule was written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.amp_models import CLASSES, DECODER, Batch, Classifier, Model, WithLoss, in_bfloat16, language, tokens

# --- images -----------------------------------------------------------------------------------------------------------


def timm_classifier(name: str, rows: int, side: int = 224) -> Model:
    """Return training of one of timm's classifiers."""

    def make(is_small: bool) -> nn.Module:
        import timm  # type: ignore[import-not-found, unused-ignore]

        return Classifier(timm.create_model(name, num_classes=CLASSES))

    def batch(is_small: bool) -> Batch:
        count = 2 if is_small else rows
        return {"x": torch.randn(count, 3, side, side), "labels": torch.randint(0, CLASSES, (count,))}

    return Model(make, batch)


class Segmenter(nn.Module):
    """A U-Net of 3-D convolutions and instance norms for medical volumes, with its Dice and cross-entropy loss."""

    def __init__(self, width: int, classes: int = 4) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(_double(before, after) for before, after in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * size, size, 2, 2) for size in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_double(2 * size, size) for size in reversed(widths[:-1]))
        self.last = nn.Conv3d(width, classes, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.max_pool3d(x, 2))
            kept.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(kept[:-1]), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        logits = self.last(x)
        shares, hot = logits.softmax(1), F.one_hot(labels, logits.shape[1]).movedim(-1, 1).to(logits.dtype)
        dice = 2 * (shares * hot).sum((2, 3, 4)) / (shares.sum((2, 3, 4)) + hot.sum((2, 3, 4)) + 1e-5)
        return F.cross_entropy(logits, labels) + 1 - dice.mean()


def _double(before: int, after: int) -> nn.Module:
    parts: list[nn.Module] = []
    for size in (before, after):
        parts += [nn.Conv3d(size, after, 3, padding=1), nn.InstanceNorm3d(after, affine=True), nn.LeakyReLU(0.01)]
    return nn.Sequential(*parts)


def _volumes(is_small: bool) -> Batch:
    rows, side = (1, 16) if is_small else (2, 96)
    return {"x": torch.randn(rows, 1, side, side, side), "labels": torch.randint(0, 4, (rows, side, side, side))}


class SuperResolution(nn.Module):
    """EDSR: residual blocks of convolutions without norms, and pixel shuffle."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.last = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return F.l1_loss(self.last(x), labels)


def _pairs(is_small: bool) -> Batch:
    rows, side = (1, 16) if is_small else (16, 96)
    return {"x": torch.randn(rows, 3, side, side), "labels": torch.randn(rows, 3, 2 * side, 2 * side)}


# --- diffusion --------------------------------------------------------------------------------------------------------


class Diffusers(nn.Module):
    """A denoising network of diffusers, which returns its result as a tensor."""

    def __init__(self, kind: str, **sizes: Any) -> None:
        super().__init__()
        import diffusers  # type: ignore[import-not-found, unused-ignore]

        self.model = getattr(diffusers, kind)(**sizes)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(**batch, return_dict=False)[0]
        return found


class Added(nn.Module):
    """SDXL's U-Net, whose added conditions are a dict."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        small = {"block_out_channels": (32, 64, 64), "cross_attention_dim": 64, "layers_per_block": 1,
                 "transformer_layers_per_block": 1, "attention_head_dim": 8}  # fmt: skip
        sizes = {"block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "layers_per_block": 2,
                 "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20)}  # fmt: skip
        self.inner = Diffusers(
            "UNet2DConditionModel", **(small if is_small else sizes), use_linear_projection=True,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), addition_embed_type="text_time",
            addition_time_embed_dim=256, projection_class_embeddings_input_dim=1536 + (64 if is_small else 1280),
        )  # fmt: skip

    def forward(
        self, sample: torch.Tensor, states: torch.Tensor, text: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        found: torch.Tensor = self.inner.model(
            sample, 500, states, added_cond_kwargs={"text_embeds": text, "time_ids": ids}, return_dict=False
        )[0]
        return found


def _sdxl(is_small: bool) -> Batch:
    side, width, text = (16, 64, 64) if is_small else (64, 2048, 1280)
    return {"sample": torch.randn(2, 4, side, side).half(), "states": torch.randn(2, 77, width).half(),
            "text": torch.randn(2, text).half(), "ids": torch.ones(2, 6).half()}  # fmt: skip


def _sd3(is_small: bool) -> nn.Module:
    heads, layers = (2, 1) if is_small else (24, 6)
    return Diffusers(
        "SD3Transformer2DModel", sample_size=64, num_layers=layers, num_attention_heads=heads, attention_head_dim=64,
        caption_projection_dim=64 * heads, joint_attention_dim=4096, pooled_projection_dim=2048,
    ).bfloat16().eval()  # fmt: skip


def _sd3_batch(is_small: bool) -> Batch:
    side = 16 if is_small else 128
    return {"hidden_states": torch.randn(2, 16, side, side).bfloat16(), "timestep": torch.full((2,), 500),
            "encoder_hidden_states": torch.randn(2, 154, 4096).bfloat16(),
            "pooled_projections": torch.randn(2, 2048).bfloat16()}  # fmt: skip


def _wan(is_small: bool) -> nn.Module:
    heads, layers = (2, 1) if is_small else (12, 6)
    return Diffusers(
        "WanTransformer3DModel", num_layers=layers, num_attention_heads=heads, attention_head_dim=128,
        ffn_dim=128 if is_small else 8960, text_dim=4096,
    ).bfloat16().eval()  # fmt: skip


def _wan_batch(is_small: bool) -> Batch:
    frames, side = (3, 16) if is_small else (9, 60)
    return {"hidden_states": torch.randn(1, 16, frames, side, side).bfloat16(), "timestep": torch.full((1,), 500),
            "encoder_hidden_states": torch.randn(1, 512, 4096).bfloat16()}  # fmt: skip


# --- sound, text, tables ----------------------------------------------------------------------------------------------


def _speech(is_small: bool) -> nn.Module:
    import transformers

    small = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}  # fmt: skip
    sizes = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
             "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}  # fmt: skip
    return WithLoss(transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**(small if is_small else sizes), use_cache=False)
    ))  # fmt: skip


def _spectra(is_small: bool) -> Batch:
    rows, length = (1, 8) if is_small else (8, 256)
    return {"input_features": torch.randn(rows, 80, 3000), "labels": torch.randint(0, 50000, (rows, length))}


def _waves(is_small: bool) -> Batch:
    rows, samples = (2, 4000) if is_small else (8, 160000)
    return {"input_values": torch.randn(rows, samples), "labels": torch.randint(1, 30, (rows, 8 if is_small else 100))}


def _wav2vec(is_small: bool) -> nn.Module:
    import transformers

    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.Wav2Vec2Config(**(small if is_small else {}), apply_spec_augment=False, layerdrop=0.0)
    return WithLoss(transformers.Wav2Vec2ForCTC(config))


class Clip(nn.Module):
    """Contrastive training of CLIP's two towers."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        import transformers

        small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
        self.model = transformers.CLIPModel(
            transformers.CLIPConfig(text_config=small, vision_config=small) if is_small else transformers.CLIPConfig()
        )

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch, return_loss=True).loss
        return loss


def _captions(is_small: bool) -> Batch:
    rows = 2 if is_small else 128
    return {"pixel_values": torch.randn(rows, 3, 224, 224), "input_ids": torch.randint(5, 49000, (rows, 77))}


def _segformer(is_small: bool) -> nn.Module:
    import transformers

    sizes = {"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768}
    config = transformers.SegformerConfig(num_labels=150, **({} if is_small else sizes))
    return WithLoss(transformers.SegformerForSemanticSegmentation(config))


def _scenes(is_small: bool) -> Batch:
    rows, side = (1, 64) if is_small else (8, 512)
    return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(0, 150, (rows, side, side))}


def _pictures(rows: int, classes: int = CLASSES, side: int = 224) -> Callable[[bool], Batch]:
    def batch(is_small: bool) -> Batch:
        count = 2 if is_small else rows
        return {"pixel_values": torch.randn(count, 3, side, side), "labels": torch.randint(0, classes, (count,))}

    return batch


class Ranking(nn.Module):
    """DLRM: embedding bags of categories, dense features, and products of all pairs."""

    def __init__(self, rows: int, width: int, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", first * (tables + 1) + second)

    def forward(self, dense: torch.Tensor, categories: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.dense(dense)
        found = torch.stack([x, *(table(categories[:, n]) for n, table in enumerate(self.tables))], 1)
        products = (found @ found.transpose(1, 2)).flatten(1)[:, self.pairs]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products], 1)).squeeze(1).float(), labels)


def _clicks(is_small: bool) -> Batch:
    rows, many = (8, 100) if is_small else (8192, 100_000)
    categories = torch.randint(0, many, (rows, 26, 4))
    return {"dense": torch.randn(rows, 13), "categories": categories, "labels": torch.rand(rows).round()}


class GraphNetwork(nn.Module):
    """Message passing: gather along edges, a network on each edge, and the sum at its end."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.edges = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.nodes = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.SiLU()) for _ in range(layers)
        )
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, ends: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for edge, node in zip(self.edges, self.nodes, strict=True):
            message = edge(torch.cat([x[ends[0]], x[ends[1]]], 1))
            total = torch.zeros_like(x).index_add(0, ends[1], message.to(x.dtype))
            x = x + node(torch.cat([x, total], 1))
        return F.mse_loss(self.last(x).squeeze(1).float(), labels)


def _graph(is_small: bool) -> Batch:
    nodes, edges = (20, 60) if is_small else (20_000, 200_000)
    return {"x": torch.randn(nodes, 64), "ends": torch.randint(0, nodes, (2, edges)), "labels": torch.randn(nodes)}


_VISION = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_BERT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
_BART = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 512,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}  # fmt: skip
_1024 = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "use_cache": False,
}
_TINY = {**DECODER, "head_dim": 32}

MODELS: Mapping[str, Model] = {
    "resnext50_32x4d": timm_classifier("resnext50_32x4d", 96),
    "regnety_032": timm_classifier("regnety_032", 96),
    "densenet121": timm_classifier("densenet121", 64),
    "efficientnetv2_s": timm_classifier("tf_efficientnetv2_s", 64),
    "hrnet_w18": timm_classifier("hrnet_w18", 64),
    "nfnet_f0": timm_classifier("dm_nfnet_f0", 64, 192),
    "vgg16_bn": timm_classifier("vgg16_bn", 64),
    "inception_v4": timm_classifier("inception_v4", 64, 299),
    "mixer_b16": timm_classifier("mixer_b16_224", 64),
    "deit3_small": timm_classifier("deit3_small_patch16_224", 128),
    "beit_base": timm_classifier("beit_base_patch16_224", 64),
    "swinv2_tiny": timm_classifier("swinv2_tiny_window8_256", 64, 256),
    "maxvit_tiny": timm_classifier("maxvit_tiny_tf_224", 32),
    "coatnet_0": timm_classifier("coatnet_0_rw_224", 64),
    "convnextv2_tiny": timm_classifier("convnextv2_tiny", 64),
    "xcit_small": timm_classifier("xcit_small_12_p16_224", 64),
    "cait_xxs24": timm_classifier("cait_xxs24_224", 64),
    "levit_256": timm_classifier("levit_256", 256),
    "poolformer_s12": timm_classifier("poolformer_s12", 64),
    "mobilenetv4": timm_classifier("mobilenetv4_conv_medium", 128),
    "ghostnetv2": timm_classifier("ghostnetv2_100", 128),
    "efficientvit_b1": timm_classifier("efficientvit_b1", 128),
    "segmenter_3d": Model(lambda small: Segmenter(8 if small else 32), _volumes),
    "super_resolution": Model(lambda small: SuperResolution(*((16, 2) if small else (128, 16))), _pairs),
    "sdxl_unet": Model(lambda small: Added(small).half().eval(), _sdxl, autocast=False, training=False),
    "sd3": Model(_sd3, _sd3_batch, autocast=False, training=False),
    "wan": Model(_wan, _wan_batch, autocast=False, training=False),
    "whisper_small": Model(_speech, _spectra),
    "wav2vec2": Model(_wav2vec, _waves),
    "clip": Model(Clip, _captions),
    "dinov2": Model(language("Dinov2", "Config", "ForImageClassification", _VISION, num_labels=CLASSES), _pictures(64)),
    "segformer_b2": Model(_segformer, _scenes),
    "dlrm": Model(lambda small: Ranking(*((100, 16, 26) if small else (100_000, 128, 26))), _clicks),
    "graph_network": Model(lambda small: GraphNetwork(*((32, 2) if small else (256, 6))), _graph),
    "deberta_v2": Model(
        language("DebertaV2", "Config", "ForMaskedLM", _BERT, hidden_size=768, num_hidden_layers=12,
                 num_attention_heads=12, intermediate_size=3072, relative_attention=True, position_buckets=256,
                 pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm", vocab_size=32000),
        tokens(16, 512, 32000),
    ),
    "albert": Model(language("Albert", "Config", "ForMaskedLM", {**_BERT, "embedding_size": 32}, hidden_size=768,
                             num_attention_heads=12, intermediate_size=3072), tokens(32, 512, 30000)),
    "bart": Model(language("Bart", "Config", "ForConditionalGeneration", _BART, d_model=768, encoder_layers=6,
                           decoder_layers=6, encoder_attention_heads=12, decoder_attention_heads=12,
                           encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False), tokens(16, 512, 50000)),
    "xlnet": Model(language("XLNet", "Config", "LMHeadModel", {"d_model": 64, "n_layer": 2, "n_head": 2,
                            "d_inner": 128, "vocab_size": 512}, d_model=768, n_layer=12, n_head=12, d_inner=3072),
                   tokens(16, 512, 32000)),
    "bloom": Model(language("Bloom", "Config", "ForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 2,
                            "vocab_size": 512}, hidden_size=1024, n_layer=12, n_head=16, vocab_size=32000,
                            use_cache=False), tokens(8, 1024, 32000)),
    "gpt_neox": Model(language("GPTNeoX", "Config", "ForCausalLM", _BERT, **_1024, intermediate_size=4096),
                      tokens(8, 1024, 32000)),
    "phi3": Model(in_bfloat16(language("Phi3", "Config", "ForCausalLM", {**DECODER, "pad_token_id": 0}, **_1024,
                  num_key_value_heads=16, intermediate_size=2816, pad_token_id=0)), tokens(8, 1024, 32000),
                  autocast=False),
    "gemma2": Model(in_bfloat16(language("Gemma2", "Config", "ForCausalLM", _TINY, **_1024, num_key_value_heads=8,
                    head_dim=64, intermediate_size=4096, sliding_window=512)), tokens(4, 2048, 32000),
                    autocast=False),
    "gemma3": Model(in_bfloat16(language("Gemma3", "TextConfig", "ForCausalLM", _TINY, **_1024, num_key_value_heads=8,
                    head_dim=64, intermediate_size=4096, sliding_window=512)), tokens(4, 2048, 32000),
                    autocast=False),
    "qwen3": Model(in_bfloat16(language("Qwen3", "Config", "ForCausalLM", _TINY, **_1024, num_key_value_heads=8,
                   head_dim=64, intermediate_size=2816)), tokens(8, 1024, 32000), autocast=False),
    "smollm3": Model(in_bfloat16(language("SmolLM3", "Config", "ForCausalLM", {**DECODER, "pad_token_id": 0}, **_1024,
                     num_key_value_heads=4, intermediate_size=2816, pad_token_id=0)), tokens(8, 1024, 32000),
                     autocast=False),
    "convbert": Model(language("ConvBert", "Config", "ForMaskedLM", {**_BERT, "embedding_size": 64}),
                      tokens(32, 512, 30000)),
}  # fmt: skip
