"""The models of gpu_breadth.py: other workloads than language models under AMP, at the sizes people use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.amp_models import DECODER, Batch, Model, in_bfloat16, language, tokens

# --- custom attention -------------------------------------------------------------------------------------------------


class FlexBlock(nn.Module):
    """A transformer block whose attention is FlexAttention."""

    def __init__(self, width: int, heads: int, score: Callable[..., Any] | None) -> None:
        super().__init__()
        self.heads, self.score = heads, score
        self.norm, self.norm_two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        found: Any = flex_attention(parts[0], parts[1], parts[2], score_mod=self.score, block_mask=mask)
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, width))
        return x + self.inner(self.norm_two(x))


class Flex(nn.Module):
    """Blocks of FlexAttention: a causal window, causal documents, or causal with ALiBi's slopes."""

    def __init__(self, kind: str, width: int, heads: int, length: int, layers: int = 4) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import create_block_mask

        window, slopes = length // 4, torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads).cuda()
        documents = (torch.arange(length) // (length // 6)).cuda()

        def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
            return q >= k

        def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & (q - k < window)

        def documented(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & (documents[q] == documents[k])

        def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score + slopes[h] * (k - q)

        keeps = {"window": windowed, "document": documented, "alibi": causal}[kind]
        self.mask = create_block_mask(keeps, None, None, length, length, device="cuda")
        score = alibi if kind == "alibi" else None
        self.layers = nn.ModuleList(FlexBlock(width, heads, score) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.mask)
        return x.float().square().mean()


def _flex(kind: str, width_of_head: int) -> Model:
    def make(is_small: bool) -> nn.Module:
        width, length = (128, 512) if is_small else (1024, 4096)
        return Flex(kind, width, width // width_of_head, length).bfloat16()

    def batch(is_small: bool) -> Batch:
        rows, length, width = (1, 512, 128) if is_small else (2, 4096, 1024)
        return {"x": torch.randn(rows, length, width, dtype=torch.bfloat16)}

    return Model(make, batch, autocast=False)


# --- images -----------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Stable Diffusion's VAE from latents to images."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        from diffusers import AutoencoderKL  # type: ignore[import-not-found, unused-ignore]

        widths = (32, 32, 64, 64) if is_small else (128, 256, 512, 512)
        self.vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=widths, layers_per_block=1 if is_small else 2, latent_channels=4,
        )  # fmt: skip

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.vae.decode(latents, return_dict=False)[0]
        return found


class Denoiser(nn.Module):
    """Stable Diffusion 1.5's U-Net."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        from diffusers import UNet2DConditionModel

        small = {"block_out_channels": (32, 32, 64, 64), "cross_attention_dim": 64, "layers_per_block": 1}
        self.unet = UNet2DConditionModel(**({**small} if is_small else {"cross_attention_dim": 768}))

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.unet(sample, timestep, states, return_dict=False)[0]
        return found


class Generator(nn.Module):
    """DCGAN's generator for 64 x 64 images, with its loss."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        width, parts = 8 if is_small else 64, []
        before = 100
        for factor in (8, 4, 2, 1):
            first = factor == 8
            parts += [nn.ConvTranspose2d(before, width * factor, 4, 1 if first else 2, 0 if first else 1, bias=False),
                      nn.BatchNorm2d(width * factor), nn.ReLU()]  # fmt: skip
            before = width * factor
        self.layers = nn.Sequential(*parts, nn.ConvTranspose2d(before, 3, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layers(noise).square().mean()  # type: ignore[no-any-return]


class VideoBlock(nn.Module):
    """A residual block of 3-D convolutions with group norm, as video autoencoders have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_two = nn.GroupNorm(32, width), nn.GroupNorm(32, width)
        self.one, self.two = nn.Conv3d(width, width, 3, padding=1), nn.Conv3d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(F.silu(self.norm_two(self.one(F.silu(self.norm(x))))))  # type: ignore[no-any-return]


class VideoDecoder(nn.Module):
    """Blocks of 3-D convolutions, upsampled in between."""

    def __init__(self, is_small: bool) -> None:
        super().__init__()
        width = 32 if is_small else 128
        self.first, self.blocks = nn.Conv3d(16, width, 3, padding=1), nn.ModuleList(VideoBlock(width) for _ in range(4))
        self.last = nn.Conv3d(width, 3, 3, padding=1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        x = self.first(latents)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number < 2:
                x = F.interpolate(x, scale_factor=(1.0, 2.0, 2.0), mode="nearest")
        return self.last(x)  # type: ignore[no-any-return]


def _half(make: Callable[[bool], nn.Module]) -> Callable[[bool], nn.Module]:
    return lambda is_small: make(is_small).half().eval()


def _latents(rows: int, *shape: int, name: str = "latents") -> Callable[[bool], Batch]:
    def batch(is_small: bool) -> Batch:
        sizes = (*shape[:-2], *(size // 4 for size in shape[-2:])) if is_small else shape
        return {name: torch.randn(1 if is_small else rows, *sizes, dtype=torch.float16)}

    return batch


def _denoised(is_small: bool) -> Batch:
    rows, side, width = (1, 16, 64) if is_small else (4, 64, 768)
    return {"sample": torch.randn(rows, 4, side, side).half(), "timestep": torch.full((rows,), 500),
            "states": torch.randn(rows, 77, width).half()}  # fmt: skip


# --- language ---------------------------------------------------------------------------------------------------------


def _float8(is_small: bool, recipe: str = "tensorwise") -> nn.Module:
    """Make a model with one of torchao's float8 recipes in every linear layer."""
    width, inner = (64, 128) if is_small else (4096, 8192)
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)]

    class Linears(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float().square().mean()  # type: ignore[no-any-return]

    return _convert_to_float8(Linears(*parts).bfloat16(), recipe)


class Layers(nn.Module):
    """Decoder layers of Llama 8B in bfloat16, without the embedding and the head."""

    def __init__(self, is_small: bool, recipe: str | None) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        small = DECODER if is_small else {}
        config = LlamaConfig(**{**sizes, **small, "num_hidden_layers": 4, "vocab_size": 512, "use_cache": False})
        self.model = LlamaModel(config).bfloat16()
        if recipe:
            _convert_to_float8(self.model, recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(inputs_embeds=x).last_hidden_state
        return found.float().square().mean()


def _convert_to_float8(model: nn.Module, recipe: str) -> nn.Module:
    """Convert all linear layers of a model to one of torchao's recipes for float8 training."""
    from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = Float8LinearConfig.from_recipe_name(recipe)
    found: nn.Module = convert_to_float8_training(model, config=config)
    return found


def _layers_8b(recipe: str | None = None) -> Model:
    def batch(is_small: bool) -> Batch:
        return {"x": torch.randn(1, *((64, 64) if is_small else (8192, 4096)), dtype=torch.bfloat16)}

    return Model(lambda is_small: Layers(is_small, recipe), batch, autocast=False)


def _rows(is_small: bool) -> Batch:
    return {"x": torch.randn(*((64, 64) if is_small else (8192, 4096)), dtype=torch.bfloat16)}


_long = in_bfloat16(language(
    "Llama", "Config", "ForCausalLM", DECODER, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=16384, use_cache=False,
))  # fmt: skip
_llama_8b = in_bfloat16(language(
    "Llama", "Config", "ForCausalLM", DECODER, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, use_cache=False,
))  # fmt: skip


_window = in_bfloat16(language(
    "Mistral", "Config", "ForCausalLM", {**DECODER, "sliding_window": 8}, hidden_size=2048, intermediate_size=8192,
    num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, sliding_window=1024,
    max_position_embeddings=16384, use_cache=False,
))  # fmt: skip
_padded = in_bfloat16(language(
    "Llama", "Config", "ForCausalLM", DECODER, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, max_position_embeddings=4096, use_cache=False,
))  # fmt: skip


def _padded_tokens(is_small: bool) -> Batch:
    """Make four sequences of other lengths, padded on the right, as a tokenizer returns them."""
    found = dict(tokens(4, 4096, 32000)(is_small))
    length = found["input_ids"].shape[1]
    lengths = torch.linspace(length, length // 4, found["input_ids"].shape[0]).long()
    found["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    found["labels"] = torch.where(found["attention_mask"].bool(), found["input_ids"], -100)
    return found


class Head(nn.Module):
    """The last layer of a language model and its plain loss."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).float(), labels)


def _head(is_small: bool) -> nn.Module:
    return Head(*((64, 512) if is_small else (2048, 248320))).bfloat16()


def _classified(is_small: bool) -> Batch:
    rows, width, words = (64, 64, 512) if is_small else (16384, 2048, 248320)
    return {"x": torch.randn(rows, width, dtype=torch.bfloat16), "labels": torch.randint(0, words, (rows,))}


# --- language models as people write them -----------------------------------------------------------------------------


@torch.compiler.allow_in_graph
class Float8Product(torch.autograd.Function):
    """The three products of a linear layer in 8 bits, with one scale for each tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (x8, of_x), (w8, of_w) = (_in_8_bits(tensor, torch.float8_e4m3fn) for tensor in (x, weight))
        ctx.save_for_backward(x8, of_x, w8, of_w)
        return torch._scaled_mm(x8, w8.t(), of_x, of_w, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, by_result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x8, of_x, w8, of_w = ctx.saved_tensors
        by8, of_by = _in_8_bits(by_result, torch.float8_e5m2)
        by_columns = [tensor.t().contiguous().t() for tensor in (w8, x8)]
        by_x = torch._scaled_mm(by8, by_columns[0], of_by, of_w, out_dtype=by_result.dtype)
        by_weight = torch._scaled_mm(by8.t().contiguous(), by_columns[1], of_by, of_x, out_dtype=by_result.dtype)
        return by_x, by_weight


def _in_8_bits(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor that fills the range of an 8-bit dtype, and the factor that undoes its scale."""
    most = torch.finfo(dtype).max
    with torch.no_grad():
        scale = (most / x.float().abs().max().double().clamp(min=1e-12)).float()
        return (x.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


class CastLinear(nn.Linear):
    """A linear layer of float32 weights, which computes in its input's dtype or in 8 bits."""

    def __init__(self, inputs: int, outputs: int, in_8_bits: bool = False) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.in_8_bits = in_8_bits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_8_bits:
            return F.linear(x, self.weight.to(x.dtype))
        found: Any = Float8Product.apply(x.flatten(0, -2), self.weight)
        return found.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def _unit(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class ChatBlock(nn.Module):
    """Attention of a window, with normalized queries and keys and a gated value embedding; and a squared ReLU."""

    def __init__(self, width: int, heads: int, in_8_bits: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(CastLinear(width, width, in_8_bits) for _ in range(3))
        self.out, self.gate = CastLinear(width, width, in_8_bits), CastLinear(16, heads)
        self.up, self.down = CastLinear(width, 4 * width, in_8_bits), CastLinear(4 * width, width, in_8_bits)

    def forward(self, x: torch.Tensor, extra: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = _unit(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)) for part in self.qkv)
        v = v + 2 * torch.sigmoid(self.gate(y[..., :16])).unsqueeze(-1) * extra.unflatten(-1, (self.heads, -1))
        q, k = (_unit(_turned(part, turns)) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(_unit(x))).square())  # type: ignore[no-any-return]


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    (one, two), (cos, sin) = x.chunk(2, -1), turns
    return torch.cat((one * cos + two * sin, two * cos - one * sin), -1)


class Chat(nn.Module):
    """A small language model as nanochat's: bare norms, factors of layers in float32, and capped logits."""

    def __init__(self, is_small: bool, in_8_bits: bool) -> None:
        super().__init__()
        width, heads, layers, words = (64, 2, 2, 512) if is_small else (768, 6, 12, 32768)
        self.words, self.head_width = words, width // heads
        self.tokens = nn.Embedding(words, width, dtype=torch.bfloat16)
        self.extras = nn.ModuleList(nn.Embedding(words, width, dtype=torch.bfloat16) for _ in range(layers // 2))
        self.blocks = nn.ModuleList(ChatBlock(width, heads, in_8_bits) for _ in range(layers))
        self.factors = nn.Parameter(torch.stack((torch.linspace(1.1, 1.0, layers), torch.linspace(0.2, 0.05, layers))))
        self.head = CastLinear(width, words + 64, in_8_bits)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        speed = 1e5 ** -torch.linspace(0, 1, self.head_width // 2, device=place.device)
        angle = (place[:, None] * speed).unsqueeze(1)
        turns = torch.stack((angle.cos(), angle.sin())).bfloat16()
        behind = place[:, None] - place
        mask = (behind >= 0) & (behind <= 768)
        x = first = _unit(self.tokens(input_ids))
        for number, block in enumerate(self.blocks):
            x = self.factors[0, number] * x + self.factors[1, number] * first
            x = block(x, self.extras[number // 2](input_ids), turns, mask)
        logits = 15 * torch.tanh(self.head(_unit(x))[..., : self.words].float() / 15)
        return F.cross_entropy(logits.view(-1, self.words), labels.view(-1), ignore_index=-1)


def _lora(is_small: bool) -> nn.Module:
    """Make a checkpointed Llama of 8B shape with PEFT's float32 adapters of rank 16 at all linear layers."""
    made: Any = _llama_8b(is_small)
    made.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.model.enable_input_require_grads()
    return _with_adapters(made)


def _short_lora(is_small: bool) -> nn.Module:
    """Make the same with adapters in bfloat16, without checkpoints."""
    return _with_adapters(_llama_8b(is_small), autocast_adapter_dtype=False)


def _with_adapters(made: Any, **settings: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found, unused-ignore]

    made.model = get_peft_model(made.model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"), **settings)
    return made  # type: ignore[no-any-return]


MODELS: Mapping[str, Model] = {
    "flex_window": _flex("window", 64),
    "flex_document": _flex("document", 64),
    "flex_alibi": _flex("alibi", 128),
    "vae": Model(_half(Decoder), _latents(2, 4, 64, 64), autocast=False, training=False),
    "unet": Model(_half(Denoiser), _denoised, autocast=False, training=False),
    "video_decoder": Model(_half(VideoDecoder), _latents(1, 16, 8, 32, 32), autocast=False, training=False),
    "dcgan": Model(Generator, lambda small: {"noise": torch.randn(4 if small else 128, 100, 1, 1)}),
    "float8": Model(_float8, _rows, autocast=False),
    "float8_rowwise": Model(functools.partial(_float8, recipe="rowwise"), _rows, autocast=False),
    "layers_8b": _layers_8b(),
    "layers_8b_float8": _layers_8b("tensorwise"),
    "layers_8b_float8_rowwise": _layers_8b("rowwise"),
    "long_context": Model(_long, tokens(1, 16384, 128256), autocast=False),
    "window_16k": Model(_window, tokens(1, 16384, 32000), autocast=False),
    "padded": Model(_padded, _padded_tokens, autocast=False),
    "logits": Model(_head, _classified, autocast=False),
    "chat": Model(lambda is_small: Chat(is_small, False), tokens(16, 2048, 32768), autocast=False),
    "chat_float8": Model(lambda is_small: Chat(is_small, True), tokens(16, 2048, 32768), autocast=False),
    "lora_8b": Model(_lora, tokens(1, 4096, 128256), autocast=False),
    "lora_8b_bfloat16": Model(_short_lora, tokens(1, 4096, 128256), autocast=False),
}
