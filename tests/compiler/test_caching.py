"""What comes from the cache: the same bits as when it was compiled, no compiler stage, and never a damaged entry."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.collectives.contract import BucketRule, ParamInfo, Request
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import PendingGraph, Pipeline
from dcompile.config import Config
from dcompile.runtime.cache import disk as cache_module
from tests import compiled_once, nursery
from tests.distributed.harness import Ranks
from tests.subject import ROOT

GRADS = ((0, 0), (1, 1))
PARAMS = tuple(ParamInfo(n, f"p{n}", (8, 8), "float32", "cpu") for n in range(2))
BACKWARD = Request("backward0", "backward", GRADS, PARAMS, BucketRule(1, 1))


@pytest.fixture
def config(tmp_path):
    """An empty cache; without products of ours, which take the compiler 0.7 s, but where both are to come back."""
    return Config(cache_dir=str(tmp_path / "cache"), matmul="aten")


@pytest.fixture(autouse=True)
def nothing_refused_before(monkeypatch):
    monkeypatch.setattr(cache_module, "_refused", {})
    monkeypatch.setenv("CXX", compiled_once.compiler())


def body(x, y):
    return (x * 2 + y).tanh(), x.softmax(-1) @ y


def graph(function=body, n=8):
    x = torch.randn(n, n, generator=torch.Generator().manual_seed(0))
    return make_fx(function, tracing_mode="fake")(x, x.clone()), [x, x + 1]


def run(config, gm=None, name="inference0"):
    """Compile in a new compiler; (outputs, report)."""
    gm = gm or graph()[0]
    executable = CachingCompiler(config).compile_graph(gm, Request(name, "inference"))
    return executable(list(graph()[1])), executable.report


def test_cuda_graphs_on_a_processor_say_that_there_are_none(config):
    _, report = run(dataclasses.replace(config, triton_cudagraphs=True))
    assert report.notes == ["a graph (inference) runs without a CUDA graph: it does not run on a GPU"]


class Several(torch.nn.Module):
    """Gives a loss, which a step goes on from, and what it was computed of."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x).tanh()
        return y.square().mean(), y


@pytest.mark.parametrize(
    ("go_on", "begun"),
    [
        (lambda loss, y: loss, ["forward0", "backward0"]),
        (lambda loss, y: loss + y.sum(), ["forward0", "backward0", "backward0"]),
    ],
    ids=["as foreseen", "otherwise"],
)
def test_a_backward_is_planned_while_the_forward_is_built(go_on, begun, tmp_path, monkeypatch):
    """Where others build it; and if it is another backward that comes, that one is compiled."""
    events: list[str] = []
    own = Pipeline.begin, Pipeline.finish

    def begin(self, gm, request, cache):
        events.append(request.name)
        return own[0](self, gm, request, cache)

    def finish(self, begun, gm, request, cache):
        events.append(f"built {request.name}")
        return own[1](self, begun, gm, request, cache)

    monkeypatch.setattr(Pipeline, "begin", begin)
    monkeypatch.setattr(Pipeline, "finish", finish)
    monkeypatch.setattr(PendingGraph, "waits", True)
    torch.manual_seed(0)
    model, x = Several(), torch.randn(4, 8)
    go_on(*model(x)).backward()
    wanted, model.layer.weight.grad = model.layer.weight.grad, None
    options = {"receipt": False, "verify": False, "matmul": "aten", "cache_dir": str(tmp_path)}
    go_on(*dcompile.compile(model, options=options)(x)).backward()
    torch.testing.assert_close(model.layer.weight.grad, wanted)
    assert [event for event in events if not event.startswith("built")] == begun
    assert events.index("backward0") < events.index("built forward0") < events.index("built backward0")


def entries(config):
    return sorted(Path(config.cache_dir).glob("*.graph"))


def test_a_graph_from_the_cache_gives_the_same_bits_and_the_same_report(config, capsys):
    config = dataclasses.replace(config, matmul="auto")
    cold, first = run(config)
    warm, second = run(config, name="inference5")
    assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True))
    assert (first.graphs_cached, first.built) == (0, first.kernels) and first.kernels > 0
    assert (second.graphs_cached, second.built, second.cache_hits) == (1, 0, second.kernels)
    counts = ("kernels", "kernel_calls", "library_calls", "fallbacks", "collectives", "notes")
    assert [getattr(first, c) for c in counts] == [getattr(second, c) for c in counts]
    assert len(entries(config)) == 1 and capsys.readouterr().err == ""
    assert not list(Path(config.cache_dir).glob("tmp-*"))


def test_a_program_with_buckets_comes_back_whole(config):
    gm = graph(lambda x, y: (x * y, x + y))[0]
    cold = CachingCompiler(config).compile_graph(gm, BACKWARD)
    warm = CachingCompiler(config).compile_graph(gm, BACKWARD)
    assert warm.report.graphs_cached == 1 and len(cold.buckets) == 2
    assert warm.buckets == cold.buckets and hash(warm.buckets) == hash(cold.buckets)
    assert warm.source == cold.source
    other = CachingCompiler(config).compile_graph(gm, Request("b", "backward", GRADS, PARAMS, BucketRule(1, 1 << 20)))
    assert other.report.graphs_cached == 0


def test_constants_are_those_of_the_live_graph(config):
    def holding(value):
        gm = graph(lambda x, y: (x + y,))[0]
        gm.register_buffer("held", torch.full((8, 8), value))
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            held = gm.graph.get_attr("held")
            held.meta["val"] = gm.held
            total = gm.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0][0], held))
            total.meta["val"] = output.args[0][0].meta["val"]
        output.args = ((total,),)
        return gm

    x, y = graph()[1]
    for value, cached in ((2.0, 0), (3.0, 1)):
        (out,), report = run(config, holding(value))
        assert torch.equal(out, (x + y) * value) and report.graphs_cached == cached


def test_what_runs_a_python_function_is_compiled_each_time_and_counted(config):
    def branches(x, y):
        return (torch.ops.higher_order.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)),)

    gm = graph(branches)[0]
    for _ in range(2):
        (out,), report = run(config, gm)
        torch.testing.assert_close(out, branches(*graph()[1])[0])
        assert (report.graphs_cached, report.graphs_uncacheable) == (0, 1)
        assert any("is compiled at each start: it" in note for note in report.notes)
    assert entries(config) == []


def test_whoever_verifies_or_dumps_has_it_compiled_and_leaves_no_entry(config, tmp_path):
    looks = [{"verify": True}, {"dump": str(tmp_path / "dump")}]
    for looking in looks:
        run(dataclasses.replace(config, **looking))
    assert entries(config) == []
    run(config)
    for looking in looks:
        report = run(dataclasses.replace(config, **looking))[1]
        assert (report.graphs_cached, report.built) == (0, 0)
    assert (tmp_path / "dump/rank0/inference0/host.py").exists()


# --- damage -----------------------------------------------------------------------------------------------------------


def _forge(path: Path) -> None:
    """Code planted without a new checksum."""
    entry = json.loads(path.read_text())
    entry["graph"]["source"] = "raise SystemExit('planted')\n" + entry["graph"]["source"]
    path.write_text(json.dumps(entry))


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "emptied": lambda path: path.write_bytes(b""),
    "random bytes": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "one letter": lambda path: path.write_text(path.read_text().replace("call", "call ", 1)),
    "other code": _forge,
    "other json": lambda path: path.write_text("[1, 2]"),
    "a pickle": lambda path: path.write_bytes(b"cos\nsystem\n(S'touch /tmp/dcompile-planted'\ntR."),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_again_with_one_line(config, capsys, damage):
    cold, _ = run(config)
    (path,) = entries(config)
    DAMAGES[damage](path)
    again, report = run(config)
    said = capsys.readouterr().err
    assert report.graphs_cached == 0 and said.count("\n") == 1 and "damaged" in said and path.name in said
    assert all(torch.equal(a, b) for a, b in zip(cold, again, strict=True))
    assert run(config)[1].graphs_cached == 1 and capsys.readouterr().err == "", "the next start is clean"
    assert not Path("/tmp/dcompile-planted").exists()


def test_entries_swapped_with_one_another_are_noticed(config, capsys):
    other = graph(lambda x, y: (x - y, x))[0]
    run(config), run(config, other)
    a, b = entries(config)
    texts = a.read_text(), b.read_text()
    a.write_text(texts[1]), b.write_text(texts[0])
    assert run(config)[1].graphs_cached == run(config, other)[1].graphs_cached == 0
    assert capsys.readouterr().err.count("belongs to another graph") == 2


@pytest.mark.parametrize("pattern", ["*.json", "*.so"])
def test_a_graph_whose_kernel_is_lost_is_compiled_again(config, pattern):
    run(config)
    for path in Path(config.cache_dir).glob(pattern):
        path.unlink()
    report = run(config)[1]
    assert report.graphs_cached == 0 and report.built == report.kernels


def test_a_graph_that_cannot_be_kept_runs_all_the_same(config, capsys, monkeypatch):
    def full(self, path, text):
        if path.suffix == ".graph":
            raise OSError(28, "No space left on device")
        return write(self, path, text)

    write = cache_module.KernelCache._write
    monkeypatch.setattr(cache_module.KernelCache, "_write", full)
    assert run(config)[1].built > 0
    assert "No space left" in capsys.readouterr().err


# --- other processes --------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
import torch
import dcompile

def train(directory):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    dcompile.compile(model, options={"receipt": False, "cache_dir": directory})
    x = torch.randn(4, 8)
    results = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        results += [loss.item()] + [p.grad.sum().item() for p in model.parameters()]
    receipt = dcompile.receipt(model)
    return {
        "results": [value.hex() for value in results],
        "cached": receipt.graphs_cached, "built": receipt.built, "kernels": receipt.kernels,
        "hash": hash("a"),
        "starts": open(os.environ["STARTS"]).read() if "STARTS" in os.environ else "",
        "stages": sorted(n for n in sys.modules if n.startswith(("dcompile.codegen.", "dcompile.compiler.driver"))),
    }

torch.set_num_threads(1)
print("RESULT " + json.dumps([train(directory) for directory in sys.argv[1:]]))
"""
"""Trains once with each cache that it is given."""


def start(*directories, python=sys.executable, **environment):
    # products of ours are one kernel that both graphs share: the second would find what the first has built
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DCOMPILE_MATMUL": "aten"}
    return subprocess.Popen(
        [python, "-c", SCRIPT, *map(str, directories)],
        env={**variables, "DCOMPILE_VERIFY": "0", "CXX": "g++", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(process):
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""
    return json.loads(output.rpartition("RESULT ")[2])


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(caches; what a first process came to, with the first, and a second one, as another rank, with each).

    Python goes through sets in another order in each. The second has imported nothing of a compiler before.
    """
    folder = tmp_path_factory.mktemp("started")
    caches, starts, compiler = (folder / "cache", folder / "other"), folder / "starts", folder / "g++"
    compiler.write_text(f'#!/bin/sh\necho started >> {starts}\nPATH={os.environ["PATH"]} exec g++ "$@"\n')
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "STARTS": str(starts)}
    (cold,) = results(start(caches[0], python=nursery.python(), **environment))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    ranks = {"RANK": "1", "LOCAL_RANK": "1"}
    warm, other = results(start(*caches, **environment, **ranks, PYTHONHASHSEED=seed))
    return caches, cold, warm, other


def test_a_second_process_loads_no_compiler_stage_and_starts_no_compiler(started):
    """Also when started as another rank."""
    _, cold, warm, _ = started
    assert cold["cached"] == 0 and cold["built"] == cold["kernels"] > 0 and "dcompile.compiler.driver" in cold["stages"]
    assert warm["cached"] == 2 and warm["built"] == 0
    assert warm["stages"] == [], "nor is anything traced, so that nothing is decomposed"
    assert warm["results"] == cold["results"]
    assert warm["starts"] == cold["starts"] != ""


def test_two_processes_write_the_same_entries(started):
    """Whatever the order in which Python goes through sets there: ranks run one program, each its own copy."""
    caches, cold, _, found = started
    assert found["hash"] != cold["hash"]
    assert found["cached"] == 0 and found["built"] == cold["built"] and found["starts"] != cold["starts"]
    one, other = ({path.name: path.read_text() for path in folder.glob("*.graph")} for folder in caches)
    assert one == other and len(one) == 2


def test_two_processes_on_one_cold_cache(tmp_path):
    python, cache = nursery.python(), tmp_path / "cache"
    (one,), (other,) = map(results, [start(cache, python=python), start(cache, python=python)])
    (warm,) = results(start(cache, python=python))
    assert one["results"] == other["results"] == warm["results"]
    assert warm["cached"] == 2 and not list(cache.glob("tmp-*"))


def test_two_ranks_start_warm(tmp_path):
    """Gradients, buckets and all: what the second pair of processes gets from the cache of the first."""
    found = []
    for _ in range(2):
        pair = Ranks(environment={"DCOMPILE_CACHE_DIR": str(tmp_path / "cache"), "DCOMPILE_VERIFY": "0"})
        try:
            found.append(pair.run("tests.distributed.cases:train_from_cache", 100))
        finally:
            pair.stop()
    cold, warm = found
    assert all(rank["graphs_cached"] == 2 and rank["built"] == 0 for rank in warm)
    assert all(rank["eligible"] and rank["collectives"] > 1 for rank in (*cold, *warm))
    assert warm[0]["gradients"] == warm[1]["gradients"] == cold[0]["gradients"]


def test_the_receipt_says_what_was_loaded(tmp_path):
    options = {"receipt": False, "verify": False, "matmul": "aten", "cache_dir": str(tmp_path / "cache")}
    for cached in (0, 2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = dcompile.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), options=options)
        model(torch.ones(2, 4)).sum().backward()
        receipt = dcompile.receipt(model)
        assert receipt.graphs_cached == cached and f"graphs_cached={cached}" in receipt.details()
        assert (receipt.built > 0) == (cached == 0)


@pytest.mark.parametrize("on", [True, False])
def test_the_garbage_collector_is_as_it_was_after_a_failed_compile(on, monkeypatch):
    seen = []

    def failing(*_):
        seen.append(gc.isenabled())
        raise RuntimeError("no luck")

    monkeypatch.setattr(Pipeline, "begin", failing)
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(Exception, match="no luck"):
            dcompile.compile(lambda x: x + 1, options={"receipt": False})(torch.ones(3))
        assert seen == [False] and gc.isenabled() == on
    finally:
        gc.enable()
