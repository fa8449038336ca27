"""A graph whose trace was cached computes the same without tracing."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile import compat
from dcompile.capture.warm_start.records import RecordReader, node_numbers, op_of
from dcompile.capture.warm_start.size_symbols import DATA_DEPENDENT, SizeSymbols
from dcompile.capture.warm_start.trace_cache import graph_of, graph_record
from dcompile.compat.process_state import NotKeepable


class Model(nn.Module):
    """Layers in a row, between an embedding and a loss; its second result is not used by the step."""

    def __init__(self, *layers, checkpointed=False):
        super().__init__()
        self.embedding, self.layers, self.checkpointed = nn.Embedding(9, 8), nn.Sequential(*layers), checkpointed

    def forward(self, tokens):
        x = self.embedding(tokens) * torch.tensor(2.0)
        x = checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)
        return F.cross_entropy(x, tokens), x.t()


MODELS = {
    "layers": lambda: Model(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 9)),
    "repeated layers": lambda: Model(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(8)), nn.Linear(8, 9)),
    "random numbers": lambda: Model(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 9), nn.Dropout(0.5)),
    "buffers that change": lambda: Model(nn.BatchNorm1d(8), nn.Linear(8, 9)),
    "checkpointed": lambda: Model(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 9), checkpointed=True),
}


@pytest.fixture(autouse=True)
def compilers():
    """In place of the double that keeps no traces: compile with dcompile's own compiler."""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("DCOMPILE_VERIFY", "0")
    return {"kernels": "aten", "cache_dir": str(tmp_path / "cache"), "receipt": False}


def traces(settings):
    return sorted(Path(settings["cache_dir"]).glob("*.trace"))


def steps(module, call, tokens):
    """Two training steps and an evaluation: losses, gradients, buffers."""
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        module.zero_grad()
        loss, logits = call(tokens)
        loss.backward()
        found += [loss.detach(), logits.detach(), *(p.grad.clone() for p in module.parameters())]
    module.eval()
    with torch.no_grad():
        found += call(tokens)
    return found + [buffer.clone() for buffer in module.buffers()]


def start(make, settings, seed=0):
    """A module under the compiler, in eager mode beside it, and the receipt."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    module = make()
    torch.manual_seed(seed)
    eager = make()
    call = torch.compile(module, backend="dcompile", options=settings, dynamic=False)
    tokens = torch.arange(6) + 1
    return steps(module, call, tokens), steps(eager, eager, tokens), dcompile.receipt(call)


# other rows have these layers, too
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "layers" else ()) for name in MODELS]
)
def test_kept_traces_compute_the_same(name, settings, monkeypatch):
    make = MODELS[name]
    cold, eager, first = start(make, settings)
    assert (first.traces_cached, first.traces_uncacheable) == (0, {}) and len(traces(settings)) == 2
    monkeypatch.setattr(compat.aot, "min_cut_partition", None)  # nothing is cut, so nothing was traced
    warm, _, second = start(make, settings)
    assert (second.traces_cached, second.traces_uncacheable) == (2, {})
    assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True))
    assert (first.notes, first.fallbacks) == (second.notes, second.fallbacks)
    if name != "random numbers":  # ours are drawn otherwise than eager's
        torch.testing.assert_close(warm, eager)
        other, eager, third = start(make, settings, seed=5)
        torch.testing.assert_close(other, eager)
        assert third.traces_cached == 2, "values of parameters are not looked at"


def test_graphs_come_back_as_they_were(settings):
    start(MODELS["checkpointed"], settings)
    for entry in traces(settings):
        found = json.loads(entry.read_text().partition("\n")[2])
        for record in filter(None, (found["forward"], found["backward"])):
            symbols = SizeSymbols(FakeTensorMode())
            made = graph_of(record, symbols)
            again = json.loads(json.dumps(graph_record(made, symbols)))
            assert json.loads(json.dumps(graph_record(copy.deepcopy(made), symbols))) == again
            assert layouts(again) == layouts(record) and memory_at_boundary(again) == memory_at_boundary(record)
            assert len(again["tensors"]) < len(record["tensors"]), "one tensor stands for all of a layout"


def layouts(record):
    """A graph's record with the layouts of tensors, and without the memory that they share."""

    def shown(value):
        if isinstance(value, list):
            return [*map(shown, value)]
        if not isinstance(value, dict):
            return value
        if [*value] == ["x"]:
            storage, *layout = record["tensors"][value["x"]]
            return [record["storages"][storage], *layout]
        return {key: shown(item) for key, item in value.items()}

    return shown({key: item for key, item in record.items() if key not in ("tensors", "storages")})


def memory_at_boundary(record):
    """Storages of a graph's inputs and results, numbered by first use."""
    nodes, numbers = record["nodes"], {}
    returned = [number for node in nodes if node[2] == "output" for number in node_numbers(node[3])]
    given = [number for number, node in enumerate(nodes) if node[0] == 0]
    rows = [record["tensors"][nodes[number][5]["val"]["x"]] for number in (*given, *returned)]
    return [numbers.setdefault(row[0], len(numbers)) for row in rows]


def test_a_change_of_the_model_is_traced_anew(settings):
    class Scaled(Model):
        factor = 1.0

        def forward(self, tokens):
            loss, logits = super().forward(tokens)
            return loss * self.factor, logits

    def make():
        return Scaled(nn.Linear(8, 9))

    start(make, settings)
    Scaled.factor = 3.0
    warm, eager, receipt = start(make, settings)
    assert receipt.traces_cached == 0
    torch.testing.assert_close(warm, eager)


def test_inputs_that_change_and_results_that_look_at_them(settings):
    def change(x):
        x.add_(1)
        return x * 2, x.relu()[1:]

    def seen(x):
        return x * 2, x[1:]

    for function, kept in ((change, True), (seen, False)):
        for start in (0, 1):
            torch._dynamo.reset()
            call = torch.compile(function, backend="dcompile", options=settings, dynamic=False)
            given, expected = torch.arange(4.0), torch.arange(4.0)
            with torch.no_grad():
                results, wanted = call(given), function(expected)
            assert torch.equal(given, expected) and all(map(torch.equal, results, wanted))
            assert results[1]._is_view() == wanted[1]._is_view()
            receipt = dcompile.receipt(call)
            assert receipt.traces_cached == (start if kept else 0)
            assert list(receipt.traces_uncacheable) == ([] if kept else ["a result is a view that is made anew"])


class Lengths(Model):
    """Layers whose backward needs sizes: a mean over a length, its attention, and a result without the last place."""

    def forward(self, tokens):
        x = self.layers(self.embedding(tokens))
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        logits = x + x.mean(1, keepdim=True)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 8), tokens[:, 1:].reshape(-1)), logits


def lengths(settings, *given):
    """Training steps with batches of these lengths under the compiler, each compared with eager; the receipt."""
    torch._dynamo.reset()
    counters.clear()
    module, eager = (Lengths(nn.Linear(8, 8), nn.SiLU()) for _ in range(2))
    eager.load_state_dict(module.state_dict())
    call = torch.compile(module, backend="dcompile", options=settings)
    for length in given:
        tokens = torch.arange(2 * length).view(2, length) % 8
        for model in (call, eager):
            model(tokens)[0].backward()
        torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in eager.parameters()])
    assert counters["stats"]["unique_graphs"] == 2
    return dcompile.receipt(call)


def test_a_trace_of_symbolic_sizes_serves_other_sizes(settings, monkeypatch):
    first = lengths(settings, 6, 9, 5)
    assert (first.traces_cached, first.traces_uncacheable, len(traces(settings))) == (0, {}, 2)
    monkeypatch.setattr(compat.aot, "min_cut_partition", None)  # nothing is cut, so nothing was traced
    second = lengths(settings, 6, 13, 4)
    assert (second.traces_cached, second.traces_uncacheable, len(traces(settings))) == (2, {}, 2)
    assert first.notes == second.notes


def test_guards_of_a_trace_are_guards_of_each_start(settings):
    def thirds(x):
        return sum(part.sin().sum() * n for n, part in enumerate(x.chunk(3, 1)))

    def start(*lengths):
        """After each call: how many graphs there are, and whether AOTAutograd has traced the newest one."""
        torch._dynamo.reset()
        counters.clear()
        call, found = torch.compile(thirds, backend="dcompile", options=settings), []
        for length in lengths:
            x = torch.ones(2, length, requires_grad=True)
            torch._dynamo.maybe_mark_dynamic(x, 1)
            torch.testing.assert_close(torch.autograd.grad(call(x), x), torch.autograd.grad(thirds(x), x))
            found.append((counters["stats"]["unique_graphs"], dcompile.receipt(call).traces_cached == 0))
        return found

    assert start(12) == [(1, True)]
    assert start(7) == [(1, True)], "its last third is one column, which a guard of the first trace excludes"
    assert start(7) == [(1, False)] and len(traces(settings)) == 2
    (first, other, last) = start(15, 12, 7)
    assert first == other == (1, False) and last[0] == 2, "the guard of a trace from the cache holds for later calls"


def test_what_cannot_be_kept_is_counted_and_named(settings):
    call = torch.compile(lambda x, y: (x * y, x.nonzero()), backend="dcompile", options=settings)
    call(torch.ones(4), 2.0)
    receipt = dcompile.receipt(call)
    assert receipt.traces_uncacheable == {DATA_DEPENDENT: 1} and not traces(settings)
    assert f"traced anew at each start: {DATA_DEPENDENT} x1" in str(receipt)


def test_whoever_looks_at_the_compilers_work_has_it_traced(settings, monkeypatch):
    for name, value in (("TRACE_CACHE", "0"), ("VERIFY", "1")):
        monkeypatch.setenv(f"DCOMPILE_{name}", value)
        _, _, receipt = start(MODELS["layers"], settings)
        assert (receipt.traces_cached, receipt.traces_uncacheable) == (0, {}) and not traces(settings)


def _forge(text):
    """An entry of another format, whose checksum is right."""
    key, _, text = text.partition("\n")
    text = text.replace('"aten.', '"antes.')
    digest = hashlib.sha256(f"{key.split()[0]}\n{text}".encode()).hexdigest()
    return f"{key.split()[0]} {digest}\n{text}"


def _is_whole(entry):
    """Does an entry have its own key, a checksum that is right, and operators that exist?"""
    head, _, text = entry.read_text().partition("\n")
    digest = hashlib.sha256(f"{entry.stem}\n{text}".encode()).hexdigest()
    return head == f"{entry.stem} {digest}" and '"antes.' not in text


DAMAGES = {
    "another format": _forge,
    "cut off": lambda text: text[: len(text) // 2],
    "one letter": lambda text: text.replace("aten.addmm", "aten.admmm", 1),
    "empty": lambda _: "",
    "another's": lambda text: "0" + text[1:] if text[0] != "0" else "1" + text[1:],
}


def test_damaged_entries_are_told_and_made_anew(settings, capsys):
    """Of a model of one layer: it is traced again for each damage."""

    def make():
        return Model(nn.Linear(8, 9))

    cold, _, _ = start(make, settings)
    for name, damage in DAMAGES.items():
        for entry in traces(settings):
            entry.write_text(damage(entry.read_text()))
            entry.chmod(0o600)
        warm, _, receipt = start(make, settings)
        assert receipt.traces_cached == 0, name
        assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True)), name
        assert capsys.readouterr().err.count("is damaged") == 2, name
        assert all(map(_is_whole, traces(settings))), name
    assert start(make, settings)[2].traces_cached == 2


def test_records_name_nothing_but_operators_and_what_describes_graphs():
    reader = RecordReader({"tensors": [], "texts": [], "storages": [], "sizes": []}, SizeSymbols(None))
    for record in ({"op": "os.system.default"}, {"eval": "1"}, {"dtype": "load"}, {"op": "aten.add"}):
        with pytest.raises(NotKeepable):
            reader.value(record)
    assert op_of("aten.add.Tensor") is torch.ops.aten.add.Tensor
