"""`python -m dcompile.simulate` on the smallest Llama: what it counts can be counted by hand."""

import json
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from dcompile.errors import OptionError
from dcompile.machine_model import FABRICS
from dcompile.simulate.__main__ import main
from dcompile.simulate.check import check
from dcompile.simulate.estimate import Setup, _reduced_bytes, estimate, extrapolate_layers
from dcompile.simulate.models import SHAPES, configuration, with_layers
from dcompile.simulate.trace import ParallelLayout, trace

ROWS, LENGTH = 2, 64
H100, SLOW = FABRICS["h100-ib400"], FABRICS["h100-eth100"]


@pytest.fixture(scope="module")
def tiny():
    """Traces by kind, made once, over eight ranks: one layer, and two that are sharded apart."""
    config = configuration("tiny", LENGTH)
    layouts = {"ddp": (1, ParallelLayout("ddp", 8)), "fsdp": (2, ParallelLayout("fsdp", 8, 8))}
    known = {"batch": ROWS, "length": LENGTH}
    found = {k: (layout, trace(with_layers(config, n), layout, **known)) for k, (n, layout) in layouts.items()}
    return SimpleNamespace(**found)


def count(traced):
    total = 0
    for parameter in traced.parameters:
        size = 1
        for n in parameter.shape:
            size *= n
        total += size
    return total


def test_ddp_keeps_everything_and_reduces_each_gradient_once(tiny):
    layout, traced = tiny.ddp
    found = estimate(traced, Setup(H100, layout))
    assert found.parameters == found.gradients == found.optimizer / 2 == 2 * count(traced)
    assert found.exchanged == 2 * count(traced)
    assert found.gathered == 0 and found.peak > 4 * found.parameters
    assert found.step == pytest.approx(found.compute + found.exposed + found.update)
    assert found.tail <= found.exposed


def test_fsdp_keeps_a_shard_and_gathers_layers_twice(tiny):
    layout, traced = tiny.fsdp
    found = estimate(traced, Setup(H100, layout))
    assert found.parameters == pytest.approx(2 * count(traced) / 8, rel=0.01)
    layers = 2 * sum(p.shard.numel for p in traced.parameters if "layers" in p.fqn)
    everything = 2 * sum(p.shard.numel for p in traced.parameters)
    # layers in forward and backward, the root's in the forward alone; every gradient once
    assert found.exchanged == pytest.approx(2 * everything + layers, rel=0.01)
    assert 0 < found.gathered <= everything


def test_gradients_are_there_from_when_they_are_reduced(tiny):
    layout, traced = tiny.fsdp
    shards = _reduced_bytes(traced.backward, Setup(H100, layout), 1000.0)
    assert shards[0] == 0 and shards[-1] == pytest.approx(1000.0)
    assert (shards[1:] >= shards[:-1]).all() and len(set(shards)) > 2
    layout, traced = tiny.ddp
    assert set(_reduced_bytes(traced.backward, Setup(H100, layout), 1000.0)) == {1000.0}


def test_a_slower_network_takes_longer_and_holds_no_more_than_the_budget(tiny):
    layout, traced = tiny.fsdp
    wide = ParallelLayout("fsdp", 64, 8)
    near, far = (estimate(traced, Setup(H100, s)) for s in (layout, wide))
    assert far.communication == pytest.approx(near.communication)
    assert far.exposed > near.exposed  # sums among eight replicas
    fast, slow = (estimate(traced, Setup(f, ParallelLayout("fsdp", 1024, 1024))) for f in (H100, SLOW))
    assert slow.step > fast.step and slow.exchanged == fast.exchanged
    two_nodes = ParallelLayout("fsdp", 16, 16)
    tight = estimate(traced, Setup(SLOW, two_nodes, early_bytes=0))
    assert tight.peak <= estimate(traced, Setup(SLOW, two_nodes)).peak


def test_gathers_of_one_node_are_copies_which_slow_nothing_down(tiny):
    layout, traced = tiny.fsdp
    copying, gathering = (estimate(traced, Setup(H100, layout, least_copied=least)) for least in (0, 1 << 30))
    assert copying.communication < gathering.communication and copying.step < gathering.step
    assert copying.exchanged == gathering.exchanged and copying.collectives == gathering.collectives


class ShortConfig(PretrainedConfig):
    """Of a model whose layers are traced in a fifth of the time that Llama's take."""

    model_type, num_hidden_layers, vocab_size = "dcompile_test_short", 2, 256


class Layer(nn.Module):
    """A product of two layers, beside what goes past it."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Short(PreTrainedModel):
    """A causal language model without attention."""

    config_class = ShortConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.head = nn.Embedding(config.vocab_size, 64), nn.Linear(64, config.vocab_size, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(config.num_hidden_layers))

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


AutoModelForCausalLM.register(ShortConfig, Short)


def test_what_each_further_layer_adds_is_the_same():
    layout, config = ParallelLayout("ddp", 8), ShortConfig()
    known = {"batch": ROWS, "length": LENGTH}
    setup = Setup(H100, layout)
    one, two, three = (estimate(trace(with_layers(config, n), layout, **known), setup) for n in (1, 2, 3))
    guessed = extrapolate_layers(one, two, (1, 2), 3)
    for name in ("parameters", "exchanged", "saved", "compute", "peak"):
        assert getattr(guessed, name) == pytest.approx(getattr(three, name), rel=0.02), name


def test_the_command_prints_a_row_for_each_size_and_fabric(tiny, capsys, monkeypatch):
    monkeypatch.setattr("dcompile.simulate.__main__.trace", lambda *_, **__: tiny.fsdp[1])
    arguments = ["--config", "tiny", "--length", "64", "--world-size", "8,16", "--shard", "8", "--layers", "2"]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["world"], row["shard"], row["fabric"]) for row in rows] == [
        (world, 8, fabric) for world in (8, 16) for fabric in ("h100-ib400", "h100-eth100")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "no-such"], "no configuration"),
        (["--config", "tiny", "--fabric", "string"], "unknown fabric"),
        (["--config", "tiny", "--world-size", "12", "--shard", "8"], "no whole number of groups"),
        (["--config", "tiny", "--layers", "1"], "--layers"),
    ],
)
def test_what_cannot_be_simulated_is_said(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_the_model_is_checked_against_measured_steps(tiny, monkeypatch):
    monkeypatch.setattr("dcompile.simulate.check.trace", lambda *_, **__: tiny.ddp[1])
    peers = {"torch.compile": {"ms": 3.0}, "dcompile": {"ms": 2.0, "exposed_ms": 0.1}, "dcompile x": {"error": "no"}}
    found = check({"device": "NVIDIA H200", "ranks": 2, "lines": {"tiny-ddp": peers, "unknown-ddp": peers}})
    assert [(row["line"], row["peer"], row["what"]) for row in found["rows"]] == [
        ("tiny-ddp", "dcompile", "ms"),
        ("tiny-ddp", "dcompile", "exposed_ms"),
    ]
    row = found["rows"][0]
    assert row["error"] == pytest.approx(row["predicted"] / 2.0 - 1)
    assert "reserved_mib" not in found["text"]
    with pytest.raises(OptionError, match="no measured step"):
        check({"device": "cpu", "ranks": 2, "lines": {"tiny-ddp": {"eager": {"ms": 1.0}}}})


def test_replayed_steps_are_compared_with_memory_that_has_their_graphs_in_it(tiny, monkeypatch):
    monkeypatch.setattr("dcompile.simulate.check.trace", lambda *_, **__: tiny.ddp[1])
    memory = {"peak_mib": 1.0, "reserved_mib": 4.0}
    peers = {"dcompile": {"ms": 2.0, **memory}, "dcompile recorded": {"ms": 2.0, "replays": 7, **memory}}
    found = check({"device": "NVIDIA H200", "ranks": 2, "lines": {"tiny-ddp": peers}})
    compared = {(row["peer"], row["what"], row["measured"]) for row in found["rows"] if row["what"] != "ms"}
    assert compared == {("dcompile", "peak_mib", 1.0), ("dcompile recorded", "reserved_mib", 4.0)}
    assert "leaves their memory out" in found["text"]


@pytest.mark.parametrize("text", ["", "step 1: 3 ms", "[]", '{"lines": {}}'])
def test_a_file_that_no_benchmark_wrote_is_named_with_what_is_expected(text, tmp_path, capsys):
    (tmp_path / "log.txt").write_text(text)
    assert main(["--check", str(tmp_path / "log.txt")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "log.txt") in said and "benchmarks.gpu_ddp_fsdp" in said


def test_help_names_every_model(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in SHAPES)
