"""Whatever changes a trace changes its key, and a graph whose trace was kept computes the same without tracing."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
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
from dcompile.capture.trace_cache import graph_of, graph_record, trace_key
from dcompile.compat import aot_trace
from dcompile.compat.trace_records import NotKeepable, RecordReader, node_numbers, op_of
from dcompile.compat.trace_symbols import DATA_DEPENDENT, SizeSymbols
from dcompile.config import Config

FACTOR = 2.0
CONFIG = Config()


def scaled(x):
    return x * FACTOR


def key_of(function, *inputs, config=CONFIG, facts=(), dynamic=False):
    """The name of a function's trace, as Dynamo captures it here and now; or why there is none."""
    found = []

    def backend(gm, example_inputs):
        try:
            symbols = SizeSymbols(aot_trace.tracing_mode())
            found.append(trace_key(gm, example_inputs, config, facts, symbols))
        except NotKeepable as reason:
            found.append(str(reason))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return found[0]


def x(*shape, **more):
    return torch.ones(*(shape or (4, 6)), **more)


BASE = functools.cache(lambda: key_of(scaled, x()))


def is_key(text):
    return len(text) == 64


def test_the_same_graph_has_the_same_name():
    assert is_key(BASE()) and key_of(scaled, x()) == BASE()
    assert key_of(lambda renamed: scaled(renamed), torch.zeros(4, 6)) == BASE(), "values and names are not looked at"
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    assert key_of(layers[0], x()) == key_of(layers[1], x()) != BASE()


INPUTS = {
    "dtype": lambda: x(dtype=torch.float64),
    "shape": lambda: x(6, 4),
    "strides": lambda: x(6, 4).t(),
    "gradient": lambda: x(requires_grad=True),
    "parameter": lambda: nn.Parameter(x()),
    "no leaf": lambda: x(requires_grad=True) + 0,
    "offset": lambda: x(5, 6)[1:],
    "storage": lambda: x(5, 6)[:4],
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_change_the_name(name):
    key = key_of(scaled, INPUTS[name]())
    assert is_key(key) and key != BASE()


def test_inputs_that_share_memory_change_the_name():
    whole = x(8, 6)

    def added(a, b):
        return a + b

    apart, shared = key_of(added, x(), x()), key_of(added, whole[:4], whole[4:])
    assert is_key(apart) and is_key(shared) and apart != shared
    other = x(8, 6)
    assert key_of(added, whole[:4], other[4:]) not in (apart, shared)


def test_a_constant_and_the_code_of_what_is_called_change_the_name(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert is_key(key := key_of(scaled, x())) and key != BASE()
    monkeypatch.setitem(globals(), "FACTOR", 2)
    assert key_of(scaled, x()) not in (key, BASE()), "a whole number is no float"
    monkeypatch.setitem(globals(), "scaled", lambda x: x + 2.0)
    assert key_of(lambda x: scaled(x), x()) not in (key, BASE())


def test_numbers_of_a_tensor_that_a_graph_holds_change_the_name():
    def table(number):
        held = torch.tensor([1.0, number])
        known = torch._dynamo.assume_constant_result(lambda: held)
        return lambda x: x.sum() * known()

    keys = {key_of(table(number), x()) for number in (2.0, 3.0)}
    assert len(keys) == 2 and all(map(is_key, keys))


@contextlib.contextmanager
def _setting(owner, name, value):
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


@contextlib.contextmanager
def _default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast in another dtype": lambda: torch.autocast("cpu", torch.float16),
    "deterministic": _deterministic,
    "default dtype": _default_dtype,
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "partitioner": lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
}


def test_settings_of_the_process_change_the_name():
    keys = {"none": BASE()}
    for name, state in STATES.items():
        with state():
            keys[name] = key_of(scaled, x())
    assert all(map(is_key, keys.values())) and len(set(keys.values())) == len(keys), keys


def test_settings_and_facts_change_the_name():
    for changes in ({"recompute": "memory"}, {"layers_once": False}, {"kernels": "aten"}, {"skip": "remove_clones"}):
        assert key_of(scaled, x(), config=dataclasses.replace(CONFIG, **changes)) != BASE(), changes
    assert key_of(scaled, x(), facts=("sharded",)) != BASE()
    assert key_of(scaled, x(), config=dataclasses.replace(CONFIG, receipt=False, cache_dir="elsewhere")) == BASE()


def test_hooks_and_buffers_change_the_name():
    def model():
        return nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    plain, hooked, watched = model(), model(), model()
    hooked[0].register_forward_hook(lambda module, args, result: result * 2)
    watched[0].weight.requires_grad_(False)
    keys = {key_of(module, x()) for module in (plain, hooked, watched)}
    assert len(keys) == 3 and all(map(is_key, keys))


def test_bodies_of_checkpointed_layers_are_part_of_the_name():
    def run(layer, **more):
        return key_of(lambda x: checkpoint(layer, x, use_reentrant=False, **more), x(requires_grad=True))

    keys = [run(torch.sin), run(torch.cos), run(lambda x: x.sin() * 2)]
    assert len(set(keys)) == 3 and all(map(is_key, keys))


def test_functions_that_choose_among_torchs_own_have_names():
    pools = (lambda x: F.max_pool2d(x, 2), lambda x: F.adaptive_max_pool2d(x, 2), lambda x: F.max_pool2d(x, 3))
    keys = {key_of(pool, torch.ones(1, 2, 6, 6)) for pool in pools}
    assert len(keys) == 3 and all(map(is_key, keys)), keys


def sized(*shape, of=scaled, dim=1, whole=None, **limits):
    """The key of a graph with one symbolic size. `whole` makes the input from a tensor of that shape."""
    given = x(*shape) if whole is None else whole(x(*shape))
    torch._dynamo.mark_dynamic(given, dim, **limits)
    return key_of(of, given, dynamic=None)


def test_the_value_of_a_symbolic_size_is_not_part_of_the_key():
    keys = {sized(4, length) for length in (6, 9, 640)}
    assert len(keys) == 1 and all(map(is_key, keys)) and BASE() not in keys
    halves = {sized(4, length, whole=lambda x: x[:, ::2]) for length in (6, 10)}
    assert len(halves) == 1 and all(map(is_key, halves)), "a view's strides are those of its whole"


def _long(bound):
    """The same graph, whatever the bound. Dynamo guards on it."""
    return lambda x: x * 2.0 if x.shape[1] > bound else x


SIZES = {
    "another dimension": lambda: sized(4, 6, dim=0),
    "strides": lambda: sized(6, 4, whole=lambda x: x.t()),
    "strides of a view": lambda: sized(4, 12, whole=lambda x: x[:, ::2]),
    "offset": lambda: sized(5, 6, whole=lambda x: x[1:]),
    "a range": lambda: sized(4, 6, min=3, max=64),
    "another maximum": lambda: sized(4, 6, min=3, max=128),
    "another minimum": lambda: sized(4, 6, min=4, max=64),
    "a guard": lambda: sized(4, 6, of=_long(4)),
    "another guard": lambda: sized(4, 6, of=_long(5)),
}


def test_facts_about_symbolic_sizes_change_the_key():
    keys = {name: make() for name, make in SIZES.items()} | {"a symbol": sized(4, 6), "numbers": BASE()}
    assert all(map(is_key, keys.values())) and len(set(keys.values())) == len(keys), keys


def test_sizes_that_are_one_symbol_have_another_key_than_two_symbols():
    def both(a, b):
        return a.sin(), b.sin()

    same, others = (
        [key_of(both, x(n), x(m), dynamic=True) for n, m in pairs] for pairs in (((5, 5), (7, 7)), ((5, 7),))
    )
    assert same[0] == same[1] and is_key(same[0]) and is_key(others[0]) and others[0] != same[0]


def test_settings_of_symbolic_sizes_change_the_key():
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        key = sized(4, 6)
    assert is_key(key) and key != sized(4, 6)


def test_sizes_without_a_value_leave_no_key():
    given = x(4, 6)
    torch._dynamo.decorators.mark_unbacked(given, 1)
    assert key_of(scaled, given, dynamic=None) == DATA_DEPENDENT
    whole = x(9, 6)
    parts = whole[:4], whole[4:]
    torch._dynamo.mark_dynamic(parts[0], 0)
    assert "share memory" in key_of(lambda a, b: (a.sin(), b.sin()), *parts, dynamic=None)


def _told(x):
    return x + 1


def test_what_text_cannot_tell_has_no_name():
    told = torch.compiler.allow_in_graph(_told)
    assert "_told, whose code is not in the graph" in key_of(lambda x: told(x), x())
    assert key_of(scaled, x(), dynamic=True) == "a float is symbolic"

    @torch.library.custom_op("tracecache::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    assert "tracecache.twice" in key_of(lambda x: twice(x), x())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert "hooks for saved tensors" in key_of(scaled, x(requires_grad=True))
    with torch._functorch.config.patch(activation_memory_budget_solver=lambda *_: None):
        assert "activation_memory_budget_solver is a function" in key_of(scaled, x())


def test_what_is_registered_for_torchs_own_operators_leaves_no_name():
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("hardshrink", lambda x, lambd=0.5: x, "CompositeImplicitAutograd")
        assert "aten/hardshrink/CompositeImplicitAutograd" in key_of(scaled, x())
    finally:
        library._destroy()
    assert key_of(scaled, x()) == BASE()


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
