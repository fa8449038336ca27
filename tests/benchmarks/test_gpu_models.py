"""The GPU models' benchmark: its script on a small model, and what it makes of lines and spans."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_models
from benchmarks.amp_models import MODELS, Model, WithLoss, without_dropout
from tests.small_llama import SmallLlama

EXPERTS = ("olmoe", "olmoe_bfloat16", "mixtral", "qwen3_moe", "deepseek_v3")


def test_the_models_are_the_fourteen_and_mixtures_of_experts():
    assert len(MODELS) == 14 + len(EXPERTS) and set(EXPERTS) <= MODELS.keys()


def test_a_small_model_is_built_compared_and_timed_on_the_cpu():
    torch.compiler.reset()
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    small = Model(lambda _: WithLoss(SmallLlama(SimpleNamespace(**sizes))), MODELS["llama"].batch)
    arguments = gpu_models.parse(
        ["--only", "llama", "--peers", "eager,dcompile", "--device", "cpu", "--small", "--no-dropout"]
    )
    peers, line = gpu_models.build(small, arguments)
    assert [peer.peer for peer in peers] == ["eager", "dcompile"]
    assert line["dcompile"]["loss_difference"] < 1e-3 and line["dcompile"]["gradient_difference"] < 2e-2
    line = gpu_models.measure(peers, line, rounds=2, steps=1)
    assert line["dcompile"]["ms"] > 0 and line["dcompile"]["own_kernels"] > 10 and not line["dcompile"]["fallbacks"]


def test_without_dropout_nothing_is_drawn():
    module = without_dropout(MODELS["gpt2"].make(True).train())
    batch = MODELS["gpt2"].batch(True)
    assert module(**batch) == module(**batch)


def test_idle_time_is_what_no_span_covers():
    assert gpu_models.busy_of([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == (4.0, 6.0)
    assert gpu_models.busy_of([]) == (0.0, 0.0)


def test_gradients_that_differ_show():
    assert gpu_models.difference([torch.ones(4)], [torch.ones(4)]) == 0
    assert gpu_models.difference([torch.ones(4) * 2], [torch.ones(4)]) == 1


def line(ms: float, mib: float) -> dict[str, float]:
    return {"ms": ms, "peak_mib": mib, "warm_up_s": 1.0, "spread": 0.0}


def test_merging_takes_the_last_line_of_each_model_and_forms_the_means(tmp_path, capsys):
    early, late = tmp_path / "early.json", tmp_path / "late.jsonl"
    both = {
        "bert": {"eager": line(4, 10), "dcompile": line(4, 10)},
        "opt": {"eager": line(8, 10), "dcompile": line(2, 12)},
    }
    early.write_text(json.dumps({"lines": both, "device": "a GPU"}, indent=1))
    late.write_text(
        json.dumps({"lines": {"bert": {"eager": line(4, 10), "dcompile": line(1, 10), "torch.compile": line(2, 9)}}})
    )
    found = gpu_models.merged([str(early), str(late)])
    assert found["geomean_over_eager"] == pytest.approx(4) and found["slower_than_eager"] == []
    assert found["more_memory_than_torch_compile"] == ["bert"] and found["device"] == "a GPU"
    gpu_models.show("bert", found["lines"]["bert"], False)
    assert "4.00" in capsys.readouterr().out


def test_an_unknown_model_is_refused():
    with pytest.raises(SystemExit):
        gpu_models.parse(["--only", "gpt5"])
