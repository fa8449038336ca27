"""The receipt: what is counted of which graphs, and how it prints."""

from types import SimpleNamespace

import pytest

from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.model import Settings, Variant
from dcompile.collectives.params import Report
from dcompile.config import Config
from dcompile.errors import NotCompiledError
from dcompile.explain.receipt import make_receipt


def graph(number, **reports):
    executables = {kind: SimpleNamespace(report=report, buckets=("b",) * 2) for kind, report in reports.items()}
    return SimpleNamespace(notes=[], number=number, executables=executables)


def model(newest, *graphs, adapter=None):
    variants = {newest.graphs: newest, (9,): Variant((9,), False)}
    return SimpleNamespace(
        newest=newest, graphs=graphs, variants=variants, adapter=adapter or PlainAdapter(), graph_breaks=3,
        breaks=[], compile_seconds=1.5, settings=Settings(Config()),
    )  # fmt: skip


def test_counts_are_of_the_newest_variant_and_of_both_directions():
    forward = Report(kernels=2, kernel_calls=5, library_calls=1, fallbacks={"aten.sort": 1}, cache_hits=1)
    backward = Report(kernels=3, kernel_calls=3, collectives=2, built=4, fallbacks={"aten.sort": 2, "aten.topk": 1})
    other = Report(kernels=100, built=7)
    made = model(Variant((0,), True), graph(0, forward=forward, backward=backward), graph(1, inference=other))
    receipt = make_receipt(made)
    assert (receipt.graphs, receipt.graph_breaks, receipt.kernels, receipt.kernel_calls) == (1, 3, 5, 8)
    assert (receipt.library_calls, receipt.collectives, receipt.buckets) == (1, 2, 4)
    assert (receipt.built, receipt.cache_hits) == (11, 1)  # all that was compiled, whatever for
    assert receipt.fallbacks == {"aten.sort": 3, "aten.topk": 1}
    assert [(v.graphs, v.training) for v in receipt.variants] == [(1, True), (1, False)]


def test_a_graph_that_runs_twice_is_compiled_once():
    made = model(Variant((0, 0), True), graph(0, forward=Report(kernels=2)))
    assert (make_receipt(made).graphs, make_receipt(made).kernels) == (2, 2)


def test_print():
    adapter = PlainAdapter()
    adapter.reasons, adapter.notes = ("because",), ("by the way",)
    report = Report(kernels=1, kernel_calls=1, fallbacks={"aten.sort": 2}, notes=["given up"])
    first, *rest = str(make_receipt(model(Variant((0,), False), graph(0, inference=report), adapter=adapter))).split(
        "\n"
    )
    pairs = dict(pair.split("=") for pair in first.split())
    assert pairs["adapter"] == "plain" and pairs["graphs"] == "1" and pairs["compile_seconds"] == "1.50"
    assert set(pairs) >= {"eligible", "graph_breaks", "kernels", "library_calls", "collectives", "buckets", "built"}
    assert rest == ["not eligible: because", "fallback: aten.sort x2", "note: by the way", "note: given up"]


def test_nothing_to_tell():
    with pytest.raises(NotCompiledError, match="was not compiled by dcompile"):
        make_receipt(None)
    with pytest.raises(NotCompiledError, match="no compiled step"):
        make_receipt(model(Variant((0,), False), graph(0)))
    with pytest.raises(NotCompiledError, match="nothing of it was compiled"):
        make_receipt(model(Variant((), False)))
