"""Texts and metrics that torch writes while it compiles: for readers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils as utils
from torch._dynamo import output_graph, symbolic_convert
from torch.fx import Graph, GraphModule

import dcompile
from dcompile.compat import aot
from dcompile.compat.patches.quiet_dumps import quiet_metrics

pytestmark = pytest.mark.usefixtures("compiled_anew")
WRITER = "_scrubbed_inductor_config_for_logging"


def metrics(compile_: Any) -> Any:
    utils.clear_compilation_metrics()
    compile_(lambda x: x.sin() + 1)(torch.ones(3))
    return utils.get_compilation_metrics()[0]


@pytest.mark.skipif(not hasattr(utils, WRITER), reason="this torch writes none")
def test_settings_of_inductor_are_written_for_others_alone() -> None:
    ours = metrics(lambda f: dcompile.compile(f, options={"receipt": False}))
    theirs = metrics(lambda f: torch.compile(f, backend="aot_eager"))
    assert ours.inductor_config is None and theirs.inductor_config
    assert theirs.co_name == "<lambda>" and not ours.fail_type
    assert ours.dynamo_config is None or '"optimize_ddp": false' in ours.dynamo_config


def test_a_torch_that_writes_none_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, WRITER, raising=False)
    with quiet_metrics():
        assert not hasattr(utils, WRITER)


def _is_backward(graph: Graph) -> bool:
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))


def _step(model: Any) -> Any:
    model(torch.ones(3, 4)).square().sum().backward()
    return model.weight.grad


def test_no_text_of_traced_graphs_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 5)
    expected = _step(model)
    model.weight.grad = None
    written: list[Graph] = []
    own = Graph.python_code

    def python_code(graph: Graph, *args: Any, **keywords: Any) -> Any:
        written.append(graph)
        return own(graph, *args, **keywords)

    monkeypatch.setattr(Graph, "python_code", python_code)
    torch.testing.assert_close(_step(dcompile.compile(model)), expected)
    assert len(written) == 1, "the captured graph, which Dynamo writes: it is 0.5 % of planning"


def test_who_asks_for_a_backward_gets_its_text_and_may_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[GraphModule] = []
    own = aot.min_cut_partition

    def partition(*args: Any, **keywords: Any) -> tuple[Any, Any]:
        pair = own(*args, **keywords)
        found.append(pair[1])
        return pair

    monkeypatch.setattr(aot, "min_cut_partition", partition)
    _step(dcompile.compile(torch.nn.Linear(4, 5)))
    (backward,) = found
    assert "def forward(self, primals_" in backward.code
    assert _is_backward(backward.graph)
    shapes = [node.meta["val"].shape for node in backward.graph.find_nodes(op="placeholder")]
    gradients = [x for x in backward(*map(torch.ones, shapes)) if x is not None]
    assert gradients and all(torch.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("heard", [False, True])
def test_no_file_is_taken_apart_for_names_that_no_log_says(heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []
    monkeypatch.setattr(symbolic_convert, "get_funcname", lambda filename, line: files.append(filename))
    monkeypatch.setattr(output_graph.trace_call_log, "isEnabledFor", lambda level: heard)
    monkeypatch.setattr(output_graph.trace_call_log, "debug", lambda *text: None)
    torch._dynamo.reset()
    dcompile.compile(lambda x: x.sin() + 1, options={"receipt": False})(torch.ones(3))
    assert (__file__ in files) == heard
    assert symbolic_convert.get_funcname(__file__, 1) is None and files, "restored behind the compilation"
