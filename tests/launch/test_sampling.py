"""launch/sampling.py against transformers' logits processors."""

import pytest
import torch
from sampling import Sampler, Sampling, penalize, restrict
from transformers.generation import logits_process

SCORES = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (Sampling(top_k=5), [logits_process.TopKLogitsWarper(5)]),
        (Sampling(top_k=500), []),
        (Sampling(top_p=0.7), [logits_process.TopPLogitsWarper(0.7)]),
        (Sampling(top_p=1e-6), [logits_process.TopPLogitsWarper(1e-6)]),
        (Sampling(min_p=0.2), [logits_process.MinPLogitsWarper(0.2)]),
        (Sampling(top_k=20, top_p=0.9, min_p=0.05),
         [logits_process.TopKLogitsWarper(20), logits_process.TopPLogitsWarper(0.9),
          logits_process.MinPLogitsWarper(0.05)]),
    ],
)  # fmt: skip
def test_restrictions_are_those_of_transformers(sampling, processors):
    expected = SCORES
    for processor in processors:
        expected = processor(None, expected)
    assert torch.equal(restrict(SCORES, sampling), expected)


def test_the_repetition_penalty_is_that_of_transformers():
    said = torch.tensor([[3, 4, 3], [1, 1, 1], [7, 49, 0]])
    sampler = Sampler(Sampling(repetition_penalty=1.3), 3, 50, SCORES.device)
    sampler.note(torch.cat((torch.zeros(3, 1, dtype=torch.int64), said), 1), torch.tensor([[False, True, True, True]]))
    expected = logits_process.RepetitionPenaltyLogitsProcessor(1.3)(said, SCORES)
    assert torch.equal(penalize(SCORES, sampler.seen, 1.3), expected)
    chosen = sampler.choose(SCORES)
    assert sampler.seen[torch.arange(3), chosen].all(), "what is chosen is said"


def test_temperature_zero_is_greedy_and_a_seed_gives_the_same_tokens():
    assert torch.equal(Sampler(Sampling(), 3, 50, SCORES.device).choose(SCORES), SCORES.argmax(-1))

    def drawn(seed):
        sampler = Sampler(Sampling(temperature=2.0, top_k=4, seed=seed), 3, 50, SCORES.device)
        return [sampler.choose(SCORES).tolist() for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)
    best = SCORES.topk(4).indices.tolist()
    assert {row[0] for row in drawn(1)} == set(best[0])
