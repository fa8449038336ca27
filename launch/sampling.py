"""Sample tokens from logits. The steps and their order are those of Hugging Face's `generate`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from errors import UserError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of one request. Temperature 0 selects the likeliest token; None skips a step."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"--temperature {self.temperature}: must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k {self.top_k}: must be at least 1")
        for name, value in (("top-p", self.top_p), ("min-p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise UserError(f"--{name} {value}: must be over 0 and at most 1")
        if self.repetition_penalty <= 0:
            raise UserError(f"--repetition-penalty {self.repetition_penalty}: must be over 0")


class Sampler:
    """Draws the next tokens of a batch. Random numbers depend only on the seed, so all ranks draw the same ones.

    If logits differ between ranks, tokens may differ nevertheless; `generate.py` compares the ranks' tokens afterwards.
    """

    def __init__(self, sampling: Sampling, batch: int, vocabulary: int, device: torch.device) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device).manual_seed(sampling.seed)
        self.seen = torch.zeros(batch, vocabulary, dtype=torch.bool, device=device)

    def note(self, tokens: torch.Tensor, real: torch.Tensor) -> None:
        """Record tokens [batch, n] as generated where `real` is true, which the last of each row is."""
        if self.sampling.repetition_penalty != 1:
            self.seen.scatter_(1, torch.where(real, tokens, tokens[:, -1:]), True)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token of each sequence [batch], from logits [batch, vocabulary]."""
        scores = penalize(logits.float(), self.seen, self.sampling.repetition_penalty)
        if self.sampling.temperature == 0:
            tokens = scores.argmax(-1)
        else:
            kept = restrict(scores / self.sampling.temperature, self.sampling)
            tokens = torch.multinomial(kept.softmax(-1), 1, generator=self.generator)[:, 0]
        self.note(tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.bool))
        return tokens


def penalize(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make generated tokens less likely: positive scores are divided by the penalty, negative ones multiplied by it."""
    if penalty == 1:
        return scores
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def restrict(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return scores [batch, vocabulary] with -inf for tokens that top-k, top-p or min-p exclude, in this order."""
    if sampling.top_k is not None:
        worst = scores.topk(min(sampling.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < worst, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ascending, order = scores.sort(stable=True)
        left_out = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        left_out[:, -1] = False
        scores = scores.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)
    if sampling.min_p is not None:
        probabilities = scores.softmax(-1)
        least = sampling.min_p * probabilities.amax(-1, keepdim=True)
        scores = scores.masked_fill(probabilities < least, -torch.inf)
    return scores
