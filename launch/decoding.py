"""Generation with a fixed cache: prompts are processed in chunks, then one token of each sequence at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from errors import UserError
from kv_cache import FixedCache
from sampling import Sampler, Sampling
from torch import nn

AroundCall = Callable[[int], contextlib.AbstractContextManager[Any]]
"""(number of a decode call) -> context manager around that call."""


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens of each sequence, and their times."""

    tokens: list[list[int]]
    prefill_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """Seconds of each decode step."""


class Decoder:
    """A model, its cache, and the two calls of generation: prefill and decode.

    `compile_with` compiles the decode call, and with `compile_prefill` the prefill call, too. A compiled prefill gets
    chunks of one size, and the first chunk is padded. Otherwise only short prompts of a batch are padded.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: FixedCache,
        chunk: int,
        compile_with: Callable[[Any], Any] | None = None,
        compile_prefill: bool = False,
    ) -> None:
        self.model, self.cache, self.chunk = model, cache, chunk
        self.fixed_chunks = compile_with is not None and compile_prefill
        self.batch = cache.slot_positions.shape[0]
        self.fed: list[list[int]] = [[] for _ in range(self.batch)]
        """Tokens of each sequence in the cache."""
        step = _make_step(model, cache)

        def prefill(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return step(tokens, positions)

        def decode(tokens: torch.Tensor) -> torch.Tensor:
            logits = step(tokens, cache.next_positions)
            cache.next_positions.add_(1)
            return logits

        self.prefill_call = compile_with(prefill) if compile_with and compile_prefill else prefill
        self.decode_call = compile_with(decode) if compile_with else decode

    def slots_of(self, lengths: list[int]) -> int:
        """Return the number of slots for prompts of these lengths."""
        longest = max(lengths)
        return -(-longest // self.chunk) * self.chunk if self.fixed_chunks else longest

    def forget(self) -> None:
        """Clear the cache."""
        self.cache.clear()
        self.fed = [[] for _ in range(self.batch)]

    def prefill(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits after the prompts [batch, vocabulary], and the padded prompts: tokens and positions [batch, n].

        If all prompts continue the cached sequences, only their new tokens are processed.
        """
        if not all(
            prompt[: len(fed)] == fed and len(prompt) > len(fed) for prompt, fed in zip(prompts, self.fed, strict=True)
        ):
            self.forget()
        rest = [prompt[len(fed) :] for prompt, fed in zip(prompts, self.fed, strict=True)]
        count = self.slots_of([len(tokens) for tokens in rest])
        self.cache.reserve(count, "the prompt")
        tokens, positions = _pad_left(rest, [len(fed) for fed in self.fed], count)
        device = self.cache.all_slots.device
        tokens, positions = tokens.to(device), positions.to(device)
        logits = None
        first = count % self.chunk or self.chunk
        for start, end in [(0, first), *((at, at + self.chunk) for at in range(first, count, self.chunk))]:
            logits = self.prefill_call(_columns(tokens, start, end), _columns(positions, start, end))
        self.cache.next_positions.copy_(positions[:, -1:] + 1)
        self.fed = [list(prompt) for prompt in prompts]
        assert logits is not None, "a prompt has at least one token"
        return logits, tokens, positions

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Process one token of each sequence [batch]; return the logits after them [batch, vocabulary]."""
        self.cache.reserve(1, "the next token")
        torch.compiler.cudagraph_mark_step_begin()  # the memory of the last logits may be reused now
        logits: torch.Tensor = self.decode_call(tokens[:, None])
        return logits


def _make_step(model: Any, cache: FixedCache) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function (tokens, positions [batch, n]) -> logits after the last tokens [batch, vocabulary]."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"sliding_attention" if window is not None else "full_attention"}
    mixed = len(kinds) > 1

    def step(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        slots = cache.place(positions)
        sees = {kind: cache.mask(positions, slots, window if kind == "sliding_attention" else None) for kind in kinds}
        result = model(
            tokens,
            attention_mask=sees if mixed else next(iter(sees.values())),
            position_ids=positions.clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.advance(tokens.shape[1])
        return result.logits[:, -1]

    return step


def _columns(rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return a contiguous copy of columns: a compiled graph guards on strides, which vary in a slice."""
    return rows[:, start:end].clone(memory_format=torch.contiguous_format)


def _pad_left(rows: list[list[int]], starts: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and positions [batch, count], padded at the left with token 0 at position -1."""
    tokens = torch.zeros(len(rows), count, dtype=torch.int64)
    positions = torch.full((len(rows), count), -1)
    for row, (new, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[row, count - len(new) :] = torch.tensor(new)
        positions[row, count - len(new) :] = torch.arange(start, start + len(new))
    return tokens, positions


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompts: list[list[int]],
    count: int,
    sampling: Sampling,
    add: Callable[[int, int], bool] = lambda row, token: False,
    around_call: AroundCall = lambda call: contextlib.nullcontext(),
) -> Generated:
    """Process the prompts, then at most `count - 1` decode steps.

    `add(row, token)` is called with each new token, and returns whether that sequence is done. Others continue.
    """
    if len(prompts) != decoder.batch or not all(prompts):
        raise UserError(f"{len(prompts)} prompts for a batch of {decoder.batch}: none may be missing or empty")
    began = time.perf_counter()
    logits, tokens, positions = decoder.prefill(prompts)
    sampler = Sampler(sampling, decoder.batch, logits.shape[-1], logits.device)
    sampler.note(tokens, positions >= 0)
    chosen = sampler.choose(logits)
    new = chosen.tolist()
    prefill_seconds = time.perf_counter() - began
    result: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    seconds: list[float] = []
    for call in range(count):
        for row, token in enumerate(new):
            if not done[row]:
                result[row].append(token)
                done[row] = add(row, token)
        if all(done) or call == count - 1:
            break
        start = time.perf_counter()
        with around_call(call):
            logits = decoder.decode(chosen)
        for fed, token in zip(decoder.fed, new, strict=True):
            fed.append(token)
        chosen = sampler.choose(logits)
        new = chosen.tolist()
        seconds.append(time.perf_counter() - start)
    return Generated(result, prefill_seconds, seconds)
