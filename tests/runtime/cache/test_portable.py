"""Entries of ours in torch's cache artifacts: a fresh cache builds nothing after them; what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.compiler._cache import CacheArtifactManager

import dcompile
from dcompile.config import Config
from dcompile.runtime.cache import portable
from dcompile.runtime.cache.disk import KernelCache
from tests.device import compute_exactly
from tests.job import run
from tests.nursery import python


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, float]:
    """Artifacts of a training step, and its loss."""
    compute_exactly()  # as other files of a worker have it; precision is part of keys
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2)), torch.randn(4, 8)
    options = {"receipt": False, "verify": False, "cache_dir": str(tmp_path_factory.mktemp("cache")), "matmul": "own"}
    with CacheArtifactManager.with_fresh_cache():
        dcompile.compile(model, options=options)
        loss = model(x).square().sum()
        loss.backward()
        found = torch.compiler.save_cache_artifacts()
    assert found is not None
    data, info = found
    kinds = sorted(name.rpartition(".")[2] for name in info.artifacts["dcompile"])
    assert kinds.count("graph") == 2 and kinds.count("trace") == 1 and "so" in kinds
    return data, loss.item()


LOADED = """
import torch, dcompile
from torch import nn
from tests.device import compute_exactly
with open({path!r}, "rb") as file:
    assert torch.compiler.load_cache_artifacts(file.read()).artifacts["dcompile"]
compute_exactly()
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2)), torch.randn(4, 8)
dcompile.compile(model, options={{"receipt": False, "verify": False, "matmul": "own"}})
loss = model(x).square().sum()
loss.backward()
receipt = dcompile.receipt(model)
print(receipt.built, receipt.graphs_cached, receipt.traces_cached, loss.item())
"""


def test_a_fresh_cache_builds_nothing_after_artifacts_were_loaded(saved: tuple[bytes, float], tmp_path: Path) -> None:
    data, loss = saved
    path, script = tmp_path / "artifacts", tmp_path / "loaded.py"
    path.write_bytes(data)
    script.write_text(LOADED.format(path=str(path)))
    status, text = run([python(), str(script)], tmp_path, DCOMPILE_CACHE_DIR=str(tmp_path / "cache"))
    assert status == 0, text
    built, cached, traces, found = text.strip().splitlines()[-1].split()
    assert (built, cached, traces) == ("0", "2", "1"), text
    assert float(found) == pytest.approx(loss)


@pytest.fixture
def entries(saved: tuple[bytes, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """Names and contents of what was saved; and a cache of its own to load it into."""
    monkeypatch.setenv("DCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    artifacts = CacheArtifactManager.deserialize(saved[0])
    assert artifacts is not None
    yield {artifact.key: artifact.content for artifact in artifacts["dcompile"]}


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.suffix for path in (tmp_path / "cache").glob("*") if path.suffix in (".graph", ".trace", ".so"))


def test_damaged_and_foreign_entries_are_refused(entries: dict[str, bytes], tmp_path: Path, capsys) -> None:
    graph = next(name for name in entries if name.endswith(".graph"))
    library = next(name for name in entries if name.endswith(".so"))

    def refused(name: str, content: bytes) -> str:
        portable.populate(name, content)
        assert kept(tmp_path) == []
        return capsys.readouterr().err

    damaged = bytearray(entries[library])
    damaged[len(damaged) // 2] ^= 1
    assert "does not match its checksum" in refused(library, bytes(damaged))
    outer = json.loads(entries[graph])
    assert "does not match its checksum" in refused(graph, json.dumps(outer | {"entry": outer["entry"] + " "}).encode())
    assert "not understood" in refused(graph, b"torch")
    trace = next(name for name in entries if name.endswith(".trace"))
    assert "does not match" in refused(trace, entries[trace].replace(b"trace", b"tracf", 1))
    assert "not understood" in refused(trace, entries[graph])
    assert "no name of ours" in refused("../../plan.so", entries[library])
    assert "its library" in refused(graph, entries[graph])
    for what, said in (("torch", "1.0"), ("processor", "0"), ("dcompile", "0.0"), ("format", 0)):
        text = json.dumps(json.loads(outer["entry"]) | {what: said})
        digest = portable.hashlib.sha256(text.encode()).hexdigest()
        assert f"made for {what}" in refused(graph, json.dumps({"sha256": digest, "entry": text}).encode())


def test_what_fits_is_found(entries: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in entries.items():
        portable.populate(name, content)
    cache = KernelCache.open(Config.make(None, None))
    graphs = [name.removesuffix(".graph") for name in entries if name.endswith(".graph")]
    assert all(cache.find_graph(key) is not None for key in graphs)
    (trace,) = (name.removesuffix(".trace") for name in entries if name.endswith(".trace"))
    assert cache.find_trace(trace)
