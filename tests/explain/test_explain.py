"""dcompile.explain: what it tells of graphs, breaks, fallbacks and collectives, and that it leaves no trace."""

import copy
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcompile
from dcompile.errors import DcompileError, NotCompiledError, OptionError
from dcompile.explain.report_data import collapse_layers

# Dynamo looks at .grad of what comes out of the graph before a break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@torch.library.custom_op("dcompile_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """An op that no compiler has a kernel for."""
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda _, grad: double(grad))


class Net(nn.Module):
    """Layers, a state that training changes, random numbers, a graph break and an op without a kernel."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        x = self.drop(self.norm(x))
        torch._dynamo.graph_break()
        return double(x).sum()  # the line of the fallback


def net():
    torch.manual_seed(0)
    return Net()


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


@pytest.fixture(scope="module")
def report():
    return dcompile.explain(net(), torch.randn(4, 8))


def test_graphs_and_their_calls(report):
    assert [graph.name for graph in report.graphs] == ["forward0", "backward0", "forward1", "backward1"]
    forward, backward, *_ = report.graphs
    assert forward.kernels and backward.kernels and forward.operations > len(forward.kernels)
    calls = (*forward.kernels, *forward.library_calls)  # whose products are faster depends on the machine
    addmm = [call for call in calls if any("aten.addmm.default" in text for text in call.origin)]
    assert [call.modules for call in addmm] == [("layers.0",), ("layers.1",), ("layers.2",)]
    assert addmm[0].read == 4 * (4 * 8 + 8 * 8 + 8) and addmm[0].written == 4 * 4 * 8
    assert {"layers.2", "norm"} <= {module for call in backward.kernels for module in call.modules}
    assert forward.read > 0 and forward.written > 0 and not forward.fallbacks


def test_breaks_have_a_reason_and_the_users_line(report):
    (found,) = report.breaks
    assert "graph_break" in found.reason and found.source.path == __file__
    assert found.source.line == line_of("torch._dynamo.graph_break()")
    assert f"at {__file__}:{found.source.line} in forward: torch._dynamo.graph_break()" in str(report)


def test_fallbacks_have_their_op_and_the_users_line_in_both_directions(report):
    line = line_of("return double(x).sum()")
    assert [call.name for call in report.fallbacks] == ["dcompile_test.double.default"] * 2
    assert {(call.source.path, call.source.line) for call in report.fallbacks} == {(__file__, line)}
    assert "return double(x).sum()" in str(report)


def test_guards_are_named(report):
    assert any(guard.startswith("TENSOR_MATCH ") and "x" in guard for guard in report.guards)


def test_repeated_layers_are_one_line():
    assert collapse_layers(["layers.0.mlp", "layers.1.mlp", "head"]) == ("layers.0-1.mlp", "head")
    assert collapse_layers(["layers.0.mlp", "layers.0.mlp"]) == ("layers.0.mlp",)
    assert collapse_layers(["a.0.1", "a.1.1", "a.0"]) == ("a.0-1.1", "a.0")
    assert collapse_layers(["0", "2", "3", "4", "10"]) == ("{0,2-4,10}",)
    report = dcompile.explain(
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))), torch.ones(2, 4)
    )
    lines = str(report).splitlines()
    assert any(" x4 " in line and line.endswith(" 0-3.0") for line in lines)
    assert "entry.py" not in str(report)  # what is all torch's own has no line of the user's


def state_of(model):
    tensors = {name: (id(t), t.detach().clone()) for name, t in (*model.named_parameters(), *model.named_buffers())}
    generators = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    return tensors, generators


class Careless(nn.Module):
    """Changes whatever it has when it is called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.full((3,), float("nan")))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(2)
        self.count = self.count + 1
        return (x * self.weight).sum()


@pytest.mark.parametrize("make", [net, Careless])
def test_everything_is_afterwards_as_it_was(make):
    model, x = make(), torch.randn(4, 8) if make is net else torch.ones(3)
    model(x).backward()
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    before, modules = state_of(model), set(vars(model))
    versions = {name: p._version for name, p in model.named_parameters()}
    waiting = (model.layers[0].weight * 2).sum() if make is net else None
    assert dcompile.explain(model, x).graphs
    after = state_of(model)
    assert before[1] == after[1] and set(vars(model)) == modules and model.training
    for name, (identity, values) in before[0].items():
        assert after[0][name][0] == identity and torch.equal(after[0][name][1].nan_to_num(-1), values.nan_to_num(-1))
    for name, p in model.named_parameters():
        assert p.grad is grads[name][0] and torch.equal(p.grad, grads[name][1])
    if waiting is not None:
        assert versions == {name: p._version for name, p in model.named_parameters()}
        waiting.backward()  # what was written over could not be differentiated any more
    with pytest.raises(NotCompiledError, match="not compiled by dcompile"):
        dcompile.receipt(model)


def test_a_model_on_meta_is_explained_for_inputs_on_meta():
    model = nn.Linear(4, 2, device="meta")
    assert dcompile.explain(model, torch.empty(3, 4, device="meta")).graphs
    with pytest.raises(DcompileError, match=r"such as weight.*to_empty"):
        dcompile.explain(model, torch.ones(3, 4))


def test_a_compiled_model_is_explained_under_its_own_settings_and_goes_on():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4)
    expected = model(x)
    dcompile.compile(model, options={"kernels": "aten", "receipt": False})
    assert torch.equal(model(x), expected)
    before = dcompile.receipt(model)
    report = dcompile.explain(model, x)
    assert not any(graph.kernels for graph in report.graphs) and not report.fallbacks
    assert dcompile.receipt(model) == before
    assert dcompile.explain(torch.compile(copy.deepcopy(model), backend="dcompile"), x).model == "Sequential"


def test_functions_and_inference():
    with torch.no_grad():
        (graph,) = dcompile.explain(lambda x, *, n: x.exp() * n, torch.ones(4), n=3).graphs
    assert graph.kind == "inference" and len(graph.kernels) == 1 and graph.kernels[0].read == 16
    with pytest.raises(TypeError, match="module or a function, not int"):
        dcompile.explain(3)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_collectives_of_ddp_and_its_reducer_untouched():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    x = torch.randn(4, 8)
    report = dcompile.explain(model, x)
    (backward,) = [graph for graph in report.graphs if graph.kind == "backward"]
    (exchange,) = backward.exchanges
    assert (exchange.kind, exchange.group, exchange.nbytes) == ("all_reduce", "ddp", 4 * (64 + 8 + 16 + 2))
    assert set(exchange.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "all_reduce" in str(report) and "4 parameters" in str(report) and report.reasons == ()
    assert exchange.producer == "0" and exchange.consumer == "the end of the program"
    assert "starts after 0; the end of the program waits for it" in str(report)
    assert str(report).count("by the cost model") == 2, "of the graph, and of its collective"
    for _ in range(2):  # a reducer that had been left in the middle would refuse the second step
        model(x).sum().backward()
    dcompile.compile(model, options={"distributed": "stock", "receipt": False})
    assert dcompile.explain(model, x).reasons == ("option distributed='stock'",)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.found = [], set()

    def handle_starttag(self, tag, attrs):
        self.found |= {tag, *(value for name, value in attrs if name in ("src", "href"))}
        if tag not in ("meta", "rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "rect", "path"):
            assert self.open.pop() == tag


def test_saved_as_one_page_or_as_text(report, tmp_path):
    page = report.save(tmp_path / "report.html").read_text()
    parser = Links()
    parser.feed(page)
    assert not parser.open and "table" in parser.found
    assert not any("://" in found for found in parser.found)  # nothing is loaded from elsewhere
    assert "return double(x).sum()" in page and "layers.0" in page and "program forward0" in page
    assert report.save(tmp_path / "report.txt").read_text() == f"{report}\n"


def test_a_page_fits_its_window_and_folds_what_is_long(report, tmp_path):
    page = report.save(tmp_path / "report.html").read_text()
    assert 'name="viewport"' in page and "svg { max-width: 100%; height: auto; }" in page
    assert page.count("<table") == page.count('<div class="scroll"><table')
    assert f"<details><summary>Guards ({len(report.guards)})</summary>" in page
    assert 'title="Bytes that all of its calls read from memory">read</th>' in page


def test_a_page_begins_with_the_step_and_lists_kernels_by_time(report, tmp_path):
    page = report.save(tmp_path / "report.html").read_text()
    assert page.index("The step, by the cost model") < page.index("Kernels by time, by the cost model")
    for graph in report.graphs:
        assert all(f"<summary>{call.name}</summary>" in page for call in graph.kernels)
        assert all(graph.kernel_texts[call.name] for call in graph.kernels)
        assert all(call.seconds > 0 for call in graph.kernels)
        assert max(graph.held) >= sum(call.written for call in graph.kernels[:1]) and graph.memory
    assert any(call.lines and call.operations > 0 for call in report.graphs[0].kernels)
    assert "<pre>" in page and "of a copy" in page and "Held at the peak" in page
    times = [float(found) for found in re.findall(r"data-key='?\"?([\d.e-]+)\"?>[\d.]+ [um]s", page)]
    assert times[0] == max(times[:2])


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="needs a Chromium")
def test_a_browser_shows_the_page_and_sorts_its_tables(report, tmp_path):
    path = report.save(tmp_path / "report.html")
    click = "<script>document.querySelectorAll('table.sortable th')[0].click(); document.title = 'sorted'</script>"
    path.write_text(path.read_text().replace("</body>", f"{click}</body>"))
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "<title>sorted</title>" in done.stdout
    table = re.search(r"<table class=.sortable.>.*?</table>", done.stdout, re.DOTALL)
    names = re.findall(r"<summary>(\w+)</summary>", table[0])
    assert names == sorted(names) or names == sorted(names, reverse=True)


@pytest.mark.parametrize("picture", [None, "<svg><title>forward0</title></svg>"])
def test_a_page_shows_each_graph_as_a_picture_or_as_text_for_graphviz(report, tmp_path, monkeypatch, picture):
    monkeypatch.setattr("dcompile.explain.html.render", lambda text: picture)
    page = report.save(tmp_path / "report.html").read_text()
    parser = Links()
    parser.feed(page)
    assert not parser.open and ("<svg><title>forward0" in page) is (picture is not None)
    assert ("digraph {" in page and "Graphviz draws" in page) is (picture is None)


def test_the_name_is_the_function_whatever_was_imported_first():
    code = "import dcompile.explain.receipt, dcompile; dcompile.explain(3)"  # it is called, and traces nothing
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stderr.endswith("module or a function, not int\n"), found.stderr


def test_programs_show_themselves_after_each_pass(tmp_path):
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    programs = dcompile.explain(model, torch.randn(16, 8)).programs
    assert [*programs] == ["forward0", "backward0"]
    backward = programs["backward0"]
    assert {"lower", "fuse"} < {*backward.passes}
    loops = [text.count("loop ") for text in map(backward.after, ("lower", "fuse"))]
    assert loops[0] > loops[1], "fusion joins loops"
    assert backward.after("plan_memory_for_peak") == str(backward)
    assert "+++ fuse" in backward.change("fuse") and backward.change("lower") == ""
    assert backward.kernels and all(name in text for name, text in backward.kernels.items())
    with pytest.raises(OptionError, match="backward0 has no pass 'fusee', did you mean 'fuse'"):
        backward.after("fusee")
    call = dcompile.compile(model, options={"dump": str(tmp_path), "receipt": False})
    call(torch.randn(16, 8)).sum().backward()
    (kept,) = tmp_path.glob("rank0/backward0/*_fuse.txt")
    assert kept.read_text().strip() == backward.after("fuse").strip(), "what the compiler itself makes of it"
