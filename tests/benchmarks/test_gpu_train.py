"""The GPU training benchmark: what its peers compile, on a small model and the CPU."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_train


class Small(torch.nn.Module):
    """Takes and gives what the Llama does."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(vocabulary, 16), torch.nn.Linear(16, vocabulary)

    def forward(self, input_ids, labels):
        found = self.head(self.table(input_ids))
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten()))


def small(shape, device):
    torch.manual_seed(0)
    return Small(shape.vocabulary).to(device)


@pytest.mark.parametrize("name", ["dcompile", "dcompile + optimizer"])
def test_a_peer_compiles_its_optimizer_if_it_says_so(name, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(gpu_train, "make", small)
    peer, eager = (gpu_train.Training(n, gpu_train.SHAPES["tiny"], "cpu") for n in (name, "eager"))
    assert peer.losses == pytest.approx(eager.losses, rel=1e-5) and len({*peer.losses}) == 4
    assert bool(peer.optimizer.defaults["fused"]) is name.startswith("dcompile"), "torch.compile cannot"
    assert (peer.update == peer.optimizer.step) is (name == "dcompile")


def test_a_model_that_waits_in_its_middle_computes_the_same():
    shape = gpu_train.SHAPES["tiny"]
    plain, waiting = (gpu_train.make(replace(shape, waits=waits), "cpu", torch.float32) for waits in (False, True))
    tokens = torch.randint(0, shape.vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (plain, waiting)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for one, other in zip(plain.parameters(), waiting.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert sum(isinstance(module, gpu_train.Wait) for module in waiting.modules()) == 1
    assert replace(gpu_train.SHAPES["160M-waiting"], waits=False) == gpu_train.SHAPES["160M"]


def test_peers_are_the_same_unless_others_are_asked_for():
    assert not gpu_train.PEERS.keys() & gpu_train.OPTIMIZERS.keys()
    assert not any("max-autotune" in name for name in gpu_train.DEFAULT_PEERS)
    assert all("," not in name for name in gpu_train.OPTIMIZERS), "--peers is separated by commas"


def peer(ms):
    return {"ms": ms, "spread": 0.0, "peak_mib": 1.0, "kernels": 1, "busy_ms": ms, "idle_ms": 0.0, "warm_up_s": 1.0}


def test_runs_are_merged_peer_by_peer_and_shown_as_one(tmp_path, capsys):
    runs = {
        "early": {"1B": {"torch.compile": peer(4.0), "dcompile": peer(9.0)}},
        "late": {"1B": {"dcompile": peer(3.0)}, "160M": {"dcompile": {"error": "OutOfMemoryError"}}},
    }
    for name, lines in runs.items():
        (tmp_path / name).write_text(json.dumps({"lines": lines, "device": f"a GPU, {name}", "complete": True}))
    files = [str(tmp_path / name) for name in runs]
    result = gpu_train.merged(files)
    assert result["lines"] == {"1B": {"torch.compile": peer(4.0), "dcompile": peer(3.0)}, "160M": runs["late"]["160M"]}
    assert result["device"] == "a GPU, late" and not result["complete"]
    assert gpu_train.main(["--merge", *files]) == 1
    shown = capsys.readouterr().out
    assert "0.75" in shown and "OutOfMemoryError" in shown


@pytest.mark.parametrize("text", ["no JSON", "[1]", '{"other": 1}'])
def test_a_file_that_is_no_result_is_named(text, tmp_path):
    (tmp_path / "log.txt").write_text(text)
    with pytest.raises(SystemExit, match=r"log\.txt is no result of a benchmark"):
        gpu_train.merged([str(tmp_path / "log.txt")])
