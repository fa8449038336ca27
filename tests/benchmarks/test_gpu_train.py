"""The GPU training benchmark: what its peers compile, on a small model and the CPU."""

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
    assert (peer.optimizer.defaults["fused"], peer.update == peer.optimizer.step) == (
        (True, True) if name == "dcompile" else (None, False)
    )


def test_peers_are_the_same_unless_others_are_asked_for():
    assert not gpu_train.PEERS.keys() & gpu_train.OPTIMIZERS.keys()
    assert not any("max-autotune" in name for name in gpu_train.DEFAULT_PEERS)
    assert all("," not in name for name in gpu_train.OPTIMIZERS), "--peers is separated by commas"
