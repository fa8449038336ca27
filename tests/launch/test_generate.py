"""launch/generate.py: tensor-parallel tokens are a single process's, from one decode graph."""

import json
import re

import pytest
import torch
from common import UserError, World
from generate import Checks, Generated, Sampling, check, generate, sample
from tensor_parallel import shard
from transformers import LlamaConfig, LlamaForCausalLM

from tests.job import one_layer
from tests.nursery import python
from tests.subject import BACKEND, IS_DCOMPILE, run, torchrun

TINY = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tokens_of(output: str) -> list[int]:
    return [int(t) for t in re.search(r"^tokens (.*)$", output, re.MULTILINE)[1].split()]


@pytest.mark.timeout(200)
def test_two_ranks_generate_what_one_process_does(tmp_path):
    arguments = (f"--config={one_layer(tmp_path)}", "--tp", "2", "--backend", BACKEND, "--device", "cpu", "--check")
    result = torchrun(2, "launch/generate.py", *arguments, python=python())
    assert result.returncode == 0, result.stderr
    assert "1 decode graph, 0 recompiles, 2 all-reduces a decode step" in result.stdout
    assert len(set(tokens_of(result.stdout))) > 10, "a model that repeats itself would prove little"
    if IS_DCOMPILE:
        assert "adapter=plain" in result.stdout and "graphs=1 " in result.stdout


@pytest.mark.timeout(200)
def test_one_rank_samples_the_same_tokens_compiled_prefill_and_all(tmp_path):
    arguments = ("--temperature=0.8", "--top-k=20", "--compile-prefill", "--max-new-tokens=8")
    arguments += (f"--config={one_layer(tmp_path)}",)
    command = ("launch/generate.py", "--backend", BACKEND, "--device", "cpu", "--check", *arguments)
    result = torchrun(1, *command, python=python())
    assert result.returncode == 0, result.stderr
    assert "1 decode graph, 0 recompiles, 0 all-reduces a decode step" in result.stdout
    assert len(tokens_of(result.stdout)) == 8


def test_more_ranks_than_asked_for_is_an_error():
    result = torchrun(1, "launch/generate.py", "--tp", "2", "--backend", "eager", "--device", "cpu", python=python())
    assert result.returncode != 0
    assert "give torchrun --nproc-per-node 2" in result.stderr


def test_shards_are_parts_of_the_whole():
    torch.manual_seed(0)
    whole = LlamaForCausalLM(LlamaConfig(**TINY))
    parts = []
    for rank in range(2):
        part = LlamaForCausalLM(LlamaConfig(**TINY))
        part.load_state_dict(whole.state_dict())
        shard(part, rank, 2)
        parts.append(part.model.layers[0])
    layer = whole.model.layers[0]
    rows = torch.cat([part.self_attn.k_proj.weight for part in parts], 0)
    columns = torch.cat([part.mlp.down_proj.weight for part in parts], 1)
    assert torch.equal(rows, layer.self_attn.k_proj.weight)
    assert torch.equal(columns, layer.mlp.down_proj.weight)


def test_a_size_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(UserError, match="does not divide num_attention_heads = 4"):
        shard(LlamaForCausalLM(LlamaConfig(**TINY)), 0, 3)


def test_sampling_is_greedy_at_zero_and_stays_within_top_k():
    logits = torch.tensor([0.0, 5.0, 4.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    assert sample(logits, Sampling(0.0, None, 0), generator) == 1
    drawn = {sample(logits, Sampling(2.0, 2, 0), generator) for _ in range(50)}
    assert drawn == {1, 2}


def test_check_refuses_another_graph():
    def step(tokens, positions):
        return torch.nn.functional.one_hot(tokens[0, 0], 260).float() * scale[0]

    scale = [1.0]
    decode = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    sampling, device = Sampling(0.0, None, 0), torch.device("cpu")
    checks = Checks(compiled=True)
    generate(step, decode, [1, 2], 4, sampling, device, around_call=checks)
    scale[0] = 2.0  # a value that the graph was specialised on
    with pytest.raises(RuntimeError, match="recompile"):
        for call in range(1, 3):
            with checks(call):
                decode(torch.tensor([[3]]), torch.tensor([[4]]))


def test_check_refuses_other_tokens_and_missing_all_reduces(monkeypatch):
    monkeypatch.setattr("generate.gather", lambda value, world: [value] * world.size)
    world = World(0, 0, 2, torch.device("cpu"))
    checks = Checks(compiled=True)
    checks.all_reduces = 4
    same = Generated([1, 2], [])
    assert "4 all-reduces" in check(same, same, checks, 2, world)
    with pytest.raises(UserError, match="rank 0 generated"):
        check(Generated([1, 3], []), same, checks, 2, world)
    checks.all_reduces = 3
    with pytest.raises(UserError, match="3 all-reduces in a decode step instead of 4"):
        check(same, same, checks, 2, world)


def test_config_files_are_llamas(tmp_path):
    path = tmp_path / "bert.json"
    path.write_text(json.dumps({"model_type": "bert"}))
    # without torchrun
    result = run(python(), "launch/generate.py", "--config", str(path), "--backend", "eager", "--device", "cpu")
    assert result.returncode != 0
    assert "not a Llama config" in result.stderr
