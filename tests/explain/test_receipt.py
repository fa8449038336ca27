"""The receipt: what is counted of which graphs, and how it prints."""

import dataclasses
import json
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dcompile.capture.adapters.gradient_sync import GradientSync
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.call_state import Variant
from dcompile.capture.compiled_model import Settings
from dcompile.capture.train_step.deferred_backward import WITH_UPDATES
from dcompile.collectives.contract import ProgramReport
from dcompile.config import Config
from dcompile.errors import NotCompiledError
from dcompile.explain.receipt import OVER_BREAKS, make_receipt
from tests.subject import ROOT


def graph(number, trace=None, device="cpu", **reports):
    executables = {kind: SimpleNamespace(report=report, buckets=("b",) * 2) for kind, report in reports.items()}
    return SimpleNamespace(notes=[], fallbacks=Counter(), number=number, executables=executables, trace=trace,
        device=torch.device(device))  # fmt: skip


def model(newest, *graphs, adapter=None):
    variants = {newest.graphs: newest, (9,): Variant((9,), False)}
    return SimpleNamespace(
        shards=None,
        newest=newest, graphs=graphs, variants=variants, adapter=adapter or PlainAdapter(), graph_breaks=3,
        breaks=[], compile_seconds=1.5, eager_calls=2, inside=[], settings=Settings(Config()),
        sync=GradientSync(adapter or PlainAdapter()), name="Model", is_function=False, step=None,
    )  # fmt: skip


def test_counts_are_of_the_newest_variant_and_of_both_directions():
    forward = ProgramReport(kernels=2, kernel_calls=5, library_calls=1, fallbacks={"aten.sort": 1}, cache_hits=1)
    backward = ProgramReport(
        kernels=3, kernel_calls=3, collectives=2, built=4, fallbacks={"aten.sort": 2, "aten.topk": 1}
    )
    other = ProgramReport(kernels=100, built=7)
    made = model(Variant((0,), True), graph(0, forward=forward, backward=backward), graph(1, inference=other))
    receipt = make_receipt(made)
    assert (receipt.graphs, receipt.graph_breaks, receipt.kernels, receipt.kernel_calls) == (1, 3, 5, 8)
    assert (receipt.library_calls, receipt.collectives, receipt.buckets) == (1, 2, 4)
    assert (receipt.built, receipt.cache_hits) == (11, 1)  # all that was compiled, whatever for
    assert receipt.fallbacks == {"aten.sort": 3, "aten.topk": 1}
    assert [(v.graphs, v.training) for v in receipt.variants] == [(1, True), (1, False)]


def test_a_graph_that_runs_twice_is_compiled_once():
    made = model(Variant((0, 0), True), graph(0, forward=ProgramReport(kernels=2)))
    assert (make_receipt(made).graphs, make_receipt(made).kernels) == (2, 2)


def test_what_the_calls_themselves_leave_without_kernels_is_counted_with_the_operators():
    made = model(
        Variant((0, 1, 1), True), *(graph(n, forward=ProgramReport(fallbacks={"aten.sort": 1})) for n in range(2))
    )
    made.graphs[0].fallbacks["backward of batched gradients"] = 3
    made.graphs[1].fallbacks["loss that chunked_loss leaves whole"] = 1
    whole, batched = "loss that chunked_loss leaves whole", "backward of batched gradients"
    assert make_receipt(made).fallbacks == {"aten.sort": 2, batched: 3, whole: 1}
    lines = str(make_receipt(made)).splitlines()
    assert f"fallback: {batched} x3: correct, as slow as eager; programs are for one gradient" in lines
    assert f"fallback: {whole} x1: correct; a note says why" in lines


def test_calls_that_an_adapter_wants_eager_are_counted():
    adapter = PlainAdapter()
    adapter.eager = True
    assert make_receipt(model(Variant((), True), adapter=adapter)).fallbacks == {"call of the model, run eagerly": 2}


def test_print():
    adapter = PlainAdapter()
    adapter.reasons, adapter.notes = ("because",), ("by the way",)
    report = ProgramReport(
        kernels=1, kernel_calls=1, fallbacks={"aten.sort": 2}, notes=["given up", "for speed: gained"]
    )
    made = make_receipt(model(Variant((0,), False), graph(0, inference=report), adapter=adapter))
    assert str(made).split("\n") == [
        "Model: 1 graph, 3 graph breaks (dcompile.explain(model, *inputs) lists them)",
        "no collectives",
        "1 kernel in 1 call, 0 library calls; 0 built, 0 from the cache, in 1.5 s",
        "not eligible: because",
        "fallback: aten.sort x2: no rule for it yet, so ATen's kernel runs, as in eager mode; it fuses with nothing",
        "note: by the way", "note: given up",
    ]  # fmt: skip
    counts, gained = made.details().split("\n")
    assert gained == "note: for speed: gained" and made.notes[-1] in gained
    pairs = dict(pair.split("=") for pair in counts.split())
    assert pairs["adapter"] == "plain" and pairs["graphs"] == "1" and pairs["compile_seconds"] == "1.50"
    assert set(pairs) >= {"eligible", "graph_breaks", "kernels", "library_calls", "collectives", "buckets", "built"}


@pytest.mark.parametrize(
    ("adapter", "eligible", "collectives", "line"),
    [
        ("plain", True, 0, "no collectives"),
        ("plain", True, 1, "1 collective in the graphs, the model's own; predicted wait for them: 1.50 ms a step"),
        ("ddp", True, 3, "3 collectives in the graphs, DDP's; predicted wait for them: 1.50 ms a step"),
        ("ddp", True, 0, "no collectives"),
        ("fsdp2", False, 0, "collectives outside the graphs, by FSDP2 itself"),
        ("plain", False, 0, "collectives outside the graphs, by others"),
        ("ddp", None, 0, "collectives undecided until a training step, DDP's"),
    ],
)
def test_who_communicates(adapter, eligible, collectives, line):
    """Four states, each with its phrase, which the guide lists."""
    made = make_receipt(model(Variant((0,), False), graph(0, inference=ProgramReport())))
    made = replace(
        made, adapter=adapter, eligible=bool(eligible), decided=eligible is not None, collectives=collectives,
        graph_breaks=0, predicted_exposed_us=1500.0,
    )  # fmt: skip
    assert str(made).split("\n")[:2] == ["Model: 1 graph, no graph break", line]
    phrase = line.partition(",")[0].replace("1 collective ", "1 collectives ").lstrip("0123456789 ")
    assert re.search(rf"^\| `(\d )?{phrase}", (ROOT / "docs/guide/receipt.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("device", "predicted"), [("cpu", 0), ("cuda", 30)])
def test_waits_are_predicted_on_gpus_alone(device, predicted):
    report = ProgramReport(collectives=1, exposed_us=30)
    made = make_receipt(model(Variant((0,), True), graph(0, device=device, backward=report)))
    assert made.predicted_exposed_us == predicted
    assert ("predicted wait for them: 0.03 ms a step" in str(made)) == bool(predicted)


def test_of_a_function_it_is_one_line():
    made = make_receipt(model(Variant((0,), False), graph(0, inference=ProgramReport())))
    made = replace(made, name="loss", is_function=True, graph_breaks=0)
    counts = "0 kernels in 0 calls, 0 library calls; 0 built, 0 from the cache, in 1.5 s"
    assert str(made) == f"loss: 1 graph, no graph break; no collectives; {counts}"


def test_a_state_that_is_not_decided_is_no_reason():
    adapter = PlainAdapter()
    adapter.decided = adapter.eligible = False
    made = make_receipt(model(Variant((0,), False), graph(0, inference=ProgramReport()), adapter=adapter))
    assert not made.eligible and not made.decided and "no training step" in made.reasons[0]
    assert "not eligible" not in str(made)


@pytest.mark.parametrize(
    ("fallback", "why"),
    [
        ("aten.sort", "no rule for it yet"),
        ("aten.bernoulli", "draws eager's random numbers"),
        ("mine.op", "an operator of another library's"),
        ("gradient marked as negative, copied", "for the price of a copy"),
        ("call of the model, run eagerly", "a line above says why"),
    ],
)
def test_a_fallback_says_why_and_whether_it_matters(fallback, why):
    made = make_receipt(model(Variant((0,), False), graph(0, inference=ProgramReport(fallbacks={fallback: 1}))))
    assert f"fallback: {fallback} x1: " in str(made) and why in str(made)


def test_nothing_to_tell():
    with pytest.raises(NotCompiledError, match="was not compiled by dcompile"):
        make_receipt(None)
    with pytest.raises(NotCompiledError, match="no compiled step"):
        make_receipt(model(Variant((0,), False), graph(0)))


def test_of_a_step_of_which_nothing_was_compiled_it_says_why():
    found = make_receipt(model(Variant((), False)))
    assert (found.graphs, found.kernels, found.eligible) == (0, 0, False)
    assert found.fallbacks == {"call of the model, run eagerly": 2}
    assert "not eligible: a step has run, but nothing of it was compiled (calls so far: 2); TORCH_LOGS" in str(found)
    made = model(Variant((), False))
    made.adapter.eager_reason = "a mode observes operations"
    assert make_receipt(made).reasons[0].endswith("(calls so far: 2): a mode observes operations")


def test_traces_are_counted_and_what_cannot_be_kept_is_named():
    def trace(cached=None, objection=""):
        return SimpleNamespace(cached=cached, objection=objection)

    traces = (trace("kept"), trace(objection="a float is symbolic"), trace(objection="a float is symbolic"))
    report = ProgramReport(kernels=1)
    graphs = [graph(number, trace=trace, inference=report) for number, trace in enumerate(traces)]
    receipt = make_receipt(model(Variant((0,), False), *graphs))
    assert (receipt.traces_cached, receipt.traces_uncacheable) == (1, {"a float is symbolic": 2})
    assert "traced anew at each start: a float is symbolic x2" in str(receipt)


def test_loggers_and_notebooks_have_their_own_forms():
    made = make_receipt(model(Variant((0,), False), graph(0, inference=ProgramReport(kernels=1))))
    kept = made.as_dict()
    assert json.loads(json.dumps(kept)) == json.loads(json.dumps(dataclasses.asdict(made)))
    assert kept["graphs"] == made.graphs and isinstance(kept["notes"], list)
    assert made._repr_html_().startswith("<b>") and made._repr_html_().count("<br>") == len(str(made).splitlines()) - 1


def test_the_tier_of_numerics_is_a_line_unless_it_is_the_default():
    weaker = {"sums in another order": ["norm"], "functions that differ in their last places": ["exp"]}
    made = model(Variant((0,), True), graph(0, forward=ProgramReport(weaker=weaker), backward=ProgramReport()))
    assert "numerics" not in str(make_receipt(made)) and make_receipt(made).weaker == {"forward0": weaker}
    made.settings = Settings(Config(numerics="fast"))
    assert f"\nnumerics: fast; forward0: {', '.join(weaker)}" in str(make_receipt(made))


def test_the_program_of_a_step_with_updates_stands_for_the_backward_in_it():
    reports = {"backward": ProgramReport(weaker={"a": ["b"]}), WITH_UPDATES: ProgramReport(weaker={"c": ["d"]})}
    receipt = make_receipt(model(Variant((0,), True), graph(0, forward=ProgramReport(), **reports)))
    assert receipt.weaker == {f"{WITH_UPDATES}0": {"c": ["d"]}}


def test_graph_breaks_are_named_where_gradients_are_added_over_them():
    several = [graph(number, forward=ProgramReport(), backward=ProgramReport()) for number in (0, 1)]
    assert make_receipt(model(Variant((0, 1), True), *several)).weaker == {
        "graph breaks": {OVER_BREAKS: ["graph0", "graph1"]}
    }
    assert not make_receipt(model(Variant((0, 1), False), *several)).weaker, "nothing is added without a backward"
