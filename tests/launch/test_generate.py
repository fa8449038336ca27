"""launch/generate.py: tokens of transformers' own `generate`, on one process or two, from one decode graph."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attention import grouped_attention
from common import World, join_world, leave_world, load_config
from decoding import Decoder, Generated, generate
from errors import UserError
from generate import Session, find_stop_tokens, parse_arguments, print_results
from generate import run as run_script
from generation_checks import Checks, check
from inference_benchmark import Speed, weight_bytes
from inference_model import build
from kv_cache import FixedCache
from sampling import Sampling
from tensor_parallel import shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from weights import CheckpointWeights, RandomWeights

from tests.distributed.harness import Ranks
from tests.job import one_layer
from tests.launch import tiny_checkpoint
from tests.nursery import python
from tests.subject import BACKEND, IS_DCOMPILE, run, torchrun

CPU = torch.device("cpu")
GREEDY = Sampling()
PROMPTS = [[256, *text.encode()] for text in ("ab", "def main():", "x = 1\ny =")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def one_layer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("one"), num_hidden_layers=1)


@pytest.fixture
def world():
    yield join_world("cpu")
    leave_world()


def make_decoder(folder: Path, batch: int, slots: int, chunk: int = 256, **how) -> Decoder:
    config = load_config(str(folder), ("llama", "mistral", "qwen2", "qwen3"))
    model = build(config, CheckpointWeights(folder), "manual", 0, 1, torch.float32, CPU)
    cache = FixedCache(model.config, batch, slots, config.num_key_value_heads, torch.float32, CPU)
    return Decoder(model, cache, chunk, **how)


def tokens_of_transformers(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens by `generate`, each prompt for itself, so that nothing is padded."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    how = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([p]), **how)[0, len(p) :].tolist() for p in prompts]


# Mistral is a Llama with windows
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.full if f == "llama" else ()) for f in tiny_checkpoint.FAMILIES],
)
def test_padded_batches_in_chunks_give_the_tokens_of_transformers(family, tmp_path):
    folder = tiny_checkpoint.write(tmp_path, family)
    expected = tokens_of_transformers(folder, PROMPTS, 10)
    assert len({token for tokens in expected for token in tokens}) > 5, "a model that repeats itself proves little"
    ragged = make_decoder(folder, 3, 64, chunk=4)
    assert generate(ragged, PROMPTS, 10, GREEDY).tokens == expected
    # chunks of one size, as for a compiled prefill; then the conversation goes on from what the cache holds
    fixed = make_decoder(folder, 3, 64, chunk=5, compile_with=lambda function: function, compile_prefill=True)
    assert generate(fixed, PROMPTS, 10, GREEDY).tokens == expected
    longer = [prompt + tokens + [65, 66] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    taken = fixed.cache.filled
    assert generate(fixed, longer, 4, GREEDY).tokens == tokens_of_transformers(folder, longer, 4)
    assert fixed.cache.filled == taken + 5 + 3, "only what is new went in"
    assert generate(fixed, PROMPTS, 10, GREEDY).tokens == expected, "anew, over what lies in the cache"


@pytest.mark.parametrize("count", [1, 3])
def test_attention_shares_heads_as_if_they_were_repeated(count):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 8, count, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)
    mask = torch.rand(2, 1, count, 12) > 0.4
    mask[..., 0] = True
    got, _ = grouped_attention(None, query, key, value, mask, scaling=0.3)
    repeated = (tensor.repeat_interleave(4, 1) for tensor in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(got, expected.transpose(1, 2))


def test_prompts_of_any_length_go_through_two_graphs(one_layer_folder):
    folder = one_layer_folder
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_with(function):
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    torch._dynamo.reset()
    decoder = make_decoder(folder, 1, 64, chunk=8, compile_with=compile_with, compile_prefill=True)
    for length in (3, 9, 20):
        prompt = list(range(40, 40 + length))
        assert generate(decoder, [prompt], 4, GREEDY).tokens == tokens_of_transformers(folder, [prompt], 4)
    assert len(graphs) == 2


def test_each_rank_reads_its_slices_only(folder):
    whole = AutoModelForCausalLM.from_pretrained(folder)
    sources, parts = [], []
    for rank in range(2):
        sources.append(CheckpointWeights(folder))
        config = load_config(str(folder))
        parts.append(build(config, sources[-1], "manual", rank, 2, torch.float32, CPU))
    rows = torch.cat([part.model.layers[1].self_attn.k_proj.weight for part in parts], 0)
    columns = torch.cat([part.model.layers[1].mlp.down_proj.weight for part in parts], 1)
    assert torch.equal(rows, whole.model.layers[1].self_attn.k_proj.weight)
    assert torch.equal(columns, whole.model.layers[1].mlp.down_proj.weight)
    layers = sum(p.nbytes for n, p in whole.named_parameters() if "_proj" in n)
    rest = sum(p.nbytes for n, p in whole.named_parameters() if "_proj" not in n)
    assert [source.bytes_read for source in sources] == [rest + layers // 2] * 2
    assert parts[0].lm_head.weight is parts[0].model.embed_tokens.weight, "tied"


def test_sharding_in_place_is_the_same():
    config = LlamaConfig(**tiny_checkpoint.SHAPE)
    torch.manual_seed(0)
    part = LlamaForCausalLM(config)
    whole = part.model.layers[0].self_attn.o_proj.weight.clone()
    shard(part, 1, 2)
    assert torch.equal(part.model.layers[0].self_attn.o_proj.weight, whole[:, 16:])
    with pytest.raises(UserError, match="does not divide num_attention_heads = 4"):
        shard(LlamaForCausalLM(config), 0, 3)


def test_random_weights_are_the_same_for_any_number_of_ranks():
    config = LlamaConfig(**tiny_checkpoint.SHAPE)
    one = build(config, RandomWeights(3, CPU), "manual", 0, 1, torch.float32, CPU)
    two = [build(config, RandomWeights(3, CPU), "manual", rank, 2, torch.float32, CPU) for rank in range(2)]
    rows = torch.cat([part.model.layers[1].mlp.up_proj.weight for part in two])
    assert torch.equal(rows, one.model.layers[1].mlp.up_proj.weight)
    other = build(config, RandomWeights(4, CPU), "manual", 0, 1, torch.float32, CPU)
    assert not torch.equal(other.lm_head.weight, one.lm_head.weight)


@pytest.mark.timeout(200)
def test_two_ranks_generate_what_one_process_does(one_layer_folder):
    arguments = (f"--model={one_layer_folder}", "--tp", "2", "--backend", BACKEND, "--device", "cpu", "--check")
    arguments += ("--prompt=def main():", "--prompt=x", "--temperature=0.9", "--top-p=0.9", "--ignore-eos")
    result = torchrun(2, "launch/generate.py", *arguments, python=python())
    assert result.returncode == 0, result.stderr
    assert "1 decode graph, 0 recompiles, 2 all-reduces a decode step" in result.stdout
    tokens = [line.split()[1:] for line in re.findall(r"^tokens .*$", result.stdout, re.MULTILINE)]
    assert [len(row) for row in tokens] == [32, 32] and len(set(tokens[0])) > 10
    assert re.search(r"^\[0\] def main\(\):", result.stdout, re.MULTILINE)
    if IS_DCOMPILE:
        assert "\ndecode: 1 graph, no graph break; 2 collectives in the graphs, the model's own; " in result.stdout


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.mark.parametrize("route", ["manual", "dtensor", "hf"])
def test_every_route_gives_the_tokens_of_one_process(ranks, folder, route):
    arguments = [f"--model={folder}", f"--route={route}", "--backend=eager", "--check", "--max-new-tokens=6"]
    first, second = ranks.run("tests.launch.generate_cases:run_script", arguments=arguments)
    assert "check: tokens equal a single process's, not compiled" in first and second == ""


@pytest.mark.full  # each compiles for ten seconds
@pytest.mark.parametrize("route", ["manual", "dtensor", "hf"])
@pytest.mark.parametrize("family", tiny_checkpoint.FAMILIES)
def test_every_route_compiles_to_one_decode_graph(ranks, family, route, tmp_path):
    folder = tiny_checkpoint.write(tmp_path, family)
    arguments = [f"--model={folder}", f"--route={route}", f"--backend={BACKEND}", "--check", "--max-new-tokens=32"]
    first, _ = ranks.run("tests.launch.generate_cases:run_script", arguments=arguments)
    assert "check: tokens equal a single process's, 1 decode graph, 0 recompiles" in first


def test_random_weights_reach_the_route_of_transformers(ranks, tmp_path):
    arguments = [f"--config={one_layer(tmp_path)}", "--route=hf", "--backend=eager", "--check", "--max-new-tokens=4"]
    first, _ = ranks.run("tests.launch.generate_cases:run_script", arguments=arguments)
    assert "check: tokens equal a single process's" in first


@pytest.mark.timeout(200)
def test_one_process_compiles_its_prefill_too(tmp_path):
    arguments = ("--temperature=0.8", "--top-k=20", "--compile-prefill", "--max-new-tokens=8", "--prefill-chunk=8")
    arguments += (f"--config={one_layer(tmp_path)}", "--stop=ZZ", "--repetition-penalty=1.1", "--min-p=0.01")
    command = ("launch/generate.py", "--backend", BACKEND, "--device", "cpu", "--check", *arguments)
    result = run(python(), *command)  # without torchrun
    assert result.returncode == 0, result.stderr
    assert "1 decode graph, 0 recompiles, 0 all-reduces a decode step" in result.stdout


def test_a_benchmark_says_tokens_milliseconds_and_bandwidth(world, folder, capsys):
    arguments = [f"--model={folder}", "--backend=eager", "--benchmark", "--batch-size=2", "--max-new-tokens=4"]
    run_script(parse_arguments(arguments), world)
    prefill, decode, bandwidth = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"prefill: 2 x 12 tokens in [\d.]+ ms, \d+ tokens/s", prefill)
    assert re.fullmatch(r"decode: [\d.]+ ms a token \(median of 9 steps\), [\d.]+ tokens/s", decode)
    assert re.fullmatch(r"bandwidth: .* GB of weights and .* GB of cache a step, .* of a copy", bandwidth)
    speed = Speed(100, 1, 0.5, 0.01, 9, 8_000_000_000, 2_000_000_000, 2e12)
    assert "200 tokens/s" in speed.lines()[0] and "10.00 ms" in speed.lines()[1] and "50%" in speed.lines()[2]
    untied = LlamaForCausalLM(LlamaConfig(**tiny_checkpoint.SHAPE))
    table = untied.model.embed_tokens.weight.nbytes
    assert weight_bytes(untied) == sum(p.nbytes for p in untied.parameters()) - table
    tied = LlamaForCausalLM(LlamaConfig(**tiny_checkpoint.SHAPE, tie_word_embeddings=True))
    assert weight_bytes(tied) == sum(p.nbytes for p in tied.parameters())


def test_a_conversation_uses_the_template_and_goes_on_from_the_cache(world, folder, capsys, monkeypatch):
    arguments = [f"--model={folder}", "--backend=eager", "--chat", "--max-new-tokens=5", "--cache-len=60"]
    seen = []
    stock = Decoder.prefill

    def prefill(self, prompts):
        seen.append(bytes(token for token in prompts[0] if token < 256).decode(errors="replace"))
        return stock(self, prompts)

    monkeypatch.setattr(Decoder, "prefill", prefill)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nhow?\n/clear\nnew\n" + "x" * 80 + "\nlast\n"))
    run_script(parse_arguments(arguments), world)
    printed = capsys.readouterr()
    first, second, third, _, last = seen
    assert first == "user:hi\nsay:" and third == "user:new\nsay:" and last == "user:last\nsay:"
    assert second.startswith("user:hi\nassistant:") and second.endswith("\nuser:how?\nsay:")
    assert re.search("the key-value cache is full: the prompt needs 1.. slots, 60 of 60 are free", printed.err)


def test_a_cache_that_is_full_is_a_clear_error(folder):
    decoder = make_decoder(folder, 1, 8)
    generate(decoder, [[1, 2, 3]], 6, GREEDY)
    with pytest.raises(UserError, match="the next token needs 1 slots, 0 of 8 are free; raise --cache-len"):
        decoder.decode(torch.tensor([1]))
    with pytest.raises(UserError, match="the prompt needs 9 slots, 8 of 8 are free"):
        generate(decoder, [[5] * 9], 1, GREEDY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache-len=10"], "the prompt takes 12 slots, and --max-new-tokens 32 need as many more: give 44"),
        (["--max-new-tokens=200"], "prompt and new tokens are 212; the model has 128 positions"),
        (["--tp=2"], "give torchrun --nproc-per-node 2"),
        (["--prompt="], "--prompt must not be empty"),
        (["--prompt=a", "--prompt=b", "--batch-size=1"], "--batch-size 1: there are 2 prompts"),
        (["--check", "--max-new-tokens=2"], "at least 3"),
        (["--top-p=1.5"], "--top-p 1.5: must be over 0 and at most 1"),
        (["--temperature=-1"], "--temperature -1.0: must be 0 or more"),
        (["--top-k=0"], "--top-k 0: must be at least 1"),
    ],
)  # fmt: skip
def test_bad_requests(folder, arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        run_script(parse_arguments([f"--model={folder}", "--backend=eager", *arguments]), World(0, 0, 1, CPU))


def test_bad_folders(folder, tmp_path):
    config = load_config(str(folder))
    with pytest.raises(UserError, match=r"no model\.safetensors and no index"):
        CheckpointWeights(tmp_path)
    (tmp_path / "model.safetensors").write_text("broken")
    with pytest.raises(UserError, match=r"model\.safetensors: "):
        CheckpointWeights(tmp_path)
    config.intermediate_size = 52
    with pytest.raises(UserError, match=r"gate_proj.weight has shape \[48, 32\], its config.json says \[52, 32\]"):
        build(config, CheckpointWeights(folder), "manual", 0, 2, torch.float32, CPU)
    config.intermediate_size, config.num_hidden_layers = 48, 3
    with pytest.raises(UserError, match=r"have no tensor model.layers.2.self_attn.q_proj.weight"):
        build(config, CheckpointWeights(folder), "manual", 0, 2, torch.float32, CPU)
    with pytest.raises(UserError, match=r"no config\.json there; `make train` leaves a model in out/train/hf"):
        Session(parse_arguments([f"--model={tmp_path}"]), World(0, 0, 1, CPU))
    fields = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match="quantized; give a checkpoint in fp32, bf16 or fp16"):
        Session(parse_arguments([f"--model={tmp_path}"]), World(0, 0, 1, CPU))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match="not a Llama config"):
        Session(parse_arguments([f"--model={tmp_path}"]), World(0, 0, 1, CPU))


def test_the_dtype_is_the_checkpoints_on_a_gpu_and_float32_where_tokens_are_compared(tmp_path):
    folder = tiny_checkpoint.write(tmp_path, dtype=torch.float16)
    on_gpu, on_cpu = World(0, 0, 1, torch.device("cuda", 0)), World(0, 0, 1, CPU)
    for world, arguments, dtype in (
        (on_gpu, [f"--model={folder}"], torch.float16),
        (on_gpu, [f"--model={folder}", "--check"], torch.float32),
        (on_gpu, [], torch.bfloat16),
        (on_cpu, [f"--model={folder}"], torch.float32),
        (on_cpu, ["--dtype=bf16"], torch.bfloat16),
    ):
        assert Session(parse_arguments(arguments), world).dtype == dtype


def test_stop_tokens_are_those_of_config_tokenizer_and_generation_config(tmp_path):
    config = LlamaConfig(**{**tiny_checkpoint.SHAPE, "eos_token_id": [2, 3]})
    tokenizer = tiny_checkpoint.byte_tokenizer()
    assert find_stop_tokens(config, tokenizer, None) == {2, 3, 256}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert find_stop_tokens(config, tokenizer, str(tmp_path)) == {2, 3, 7, 256}


@pytest.mark.parametrize("checked", [False, True])
def test_tokens_are_printed_where_they_are_compared_alone(checked, capsys):
    args = SimpleNamespace(check=checked, model=None, backend="eager")
    print_results(SimpleNamespace(args=args), None, [[1]], ["x"], Generated([[200, 201]]))
    assert capsys.readouterr().out == "\n" + "tokens 200 201\n" * checked


def test_check_refuses_another_graph():
    def step(tokens):
        return torch.nn.functional.one_hot(tokens[0], 260).float() * scale[0]

    scale = [1.0]
    decode = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    checks = Checks(compiled=True)
    for call in range(3):
        with checks(call):
            decode(torch.tensor([3]))
    scale[0] = 2.0  # a value that the graph was specialised on
    with pytest.raises(RuntimeError, match="recompile"), checks(3):
        decode(torch.tensor([3]))


def test_check_refuses_other_tokens_and_missing_all_reduces(monkeypatch):
    monkeypatch.setattr("generation_checks.gather", lambda value, world: [value] * world.size)
    world = World(0, 0, 2, CPU)
    checks = Checks(compiled=True)
    checks.all_reduces = 4
    same = Generated([[1, 2]])
    assert "4 all-reduces" in check(same, same, checks, 2, True, world)
    with pytest.raises(UserError, match="rank 0 generated"):
        check(Generated([[1, 3]]), same, checks, 2, True, world)
    checks.all_reduces = 5
    assert "5 all-reduces" in check(same, same, checks, 2, False, world), "those of an embedding that is split, too"
    with pytest.raises(UserError, match="5 all-reduces in a decode step instead of 4"):
        check(same, same, checks, 2, True, world)
    checks.all_reduces = 3
    with pytest.raises(UserError, match="3 all-reduces in a decode step instead of 4"):
        check(same, same, checks, 2, False, world)
