"""DeepSpeed on two Gloo ranks, ZeRO 0 to 3: level 0 and ZeRO's collectives in the graph, against the same without us.

One pair of processes runs all cases: starting DeepSpeed takes longer than most of them. `make test-deepspeed`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.subject import run, torchrun

STAGES = (0, 1, 2, 3)
KINDS = {0: ["all_reduce"], 1: ["reduce_scatter"], 2: ["reduce_scatter"], 3: ["all_gather", "reduce_scatter"]}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
SHAPES: dict[str, dict[str, Any]] = {
    "groups": {"ga": 1, "clip": 0.5, "groups": True, "frozen": True},
    "tied": {"ga": 2, "clip": 0.5, "tied": True, "folder": "checkpoint", "steps": 2},
    "bf16": {"ga": 2, "clip": 0.5, "dtype": "bfloat16"},
}
"""What is asked of each stage: without dcompile, at level 0, and with ZeRO in the graph."""
IN_GRAPH: dict[str, dict[str, Any]] = {
    "outside": {"ga": 2, "outside": True, "unused": True},
    "second": {"ga": 2, "second": True},
    "torch": {"ga": 2, "style": "torch"},
    "no_sync": {"ga": 2, "no_sync": True},
    "round_robin": {"ga": 2, "round_robin": True},
}
"""What is asked of some stages, without dcompile and in the graph."""
STAGES_OF = {"outside": (0, 1, 2), "second": STAGES, "torch": (1, 2, 3), "no_sync": (0, 1), "round_robin": (1, 2)}
LEFT = {
    "predivide": (1, {"extra": {"gradient_predivide_factor": 2.0}}, "gradient_predivide_factor"),
    "fp32 sums": (1, {"dtype": "bfloat16", "extra": {"data_types": {"grad_accum_dtype": "fp32"}}}, "BF16_Optimizer"),
    "offload": (3, {"offload": True}, "optimizer states or parameters are offloaded"),
}
"""What DeepSpeed does itself: stage, case, reason."""


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        for name, shape in SHAPES.items():
            for zero in ("eager", "off", "graph"):
                made = {"stage": stage, "zero": zero, **shape}
                if "folder" in made:
                    made["folder"] = str(folder / f"{stage}{zero}")
                found[f"{name} {stage} {zero}"] = made
        for name, shape in IN_GRAPH.items():
            if stage in STAGES_OF[name]:
                for zero in ("eager", "graph"):
                    found[f"{name} {stage} {zero}"] = {"stage": stage, "zero": zero, **shape}
        found[f"breaks {stage} graph"] = {"stage": stage, "zero": "graph", "ga": 2, "breaks": True}
        found[f"breaks {stage} eager"] = {"stage": stage, "zero": "eager", "ga": 2}
        found[f"engine {stage} "] = {"stage": stage, "zero": "", "ga": 2, "door": "deepspeed"}
    for name, (stage, shape, _) in LEFT.items():
        for zero in ("eager", "graph"):
            found[f"{name} {stage} {zero}"] = {"stage": stage, "zero": zero, **shape}
    found["twice 1 graph"] = {"stage": 1, "zero": "graph", "ga": 2, "style": "twice"}
    found["twice 1 eager"] = {"stage": 0, "zero": "eager", "ga": 2, "style": "twice"}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("deepspeed")
    asked = cases(folder)
    path = folder / "cases.json"
    path.write_text(json.dumps(list(asked.values())))
    process = torchrun(2, "tests/integrations/deepspeed_script.py", str(path), timeout=1500, DS_ACCELERATOR="cpu")
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert process.returncode == 0 and len(lines) == len(asked), process.stderr[-20000:]
    return {name: json.loads(line.removeprefix("RESULT ")) for name, line in zip(asked, lines, strict=True)}


def assert_near(ours: list[Any], theirs: list[Any], rel: float) -> None:
    """Gradient norms; None where DeepSpeed keeps none."""
    assert [norm is None for norm in ours] == [norm is None for norm in theirs]
    assert [n for n in ours if n is not None] == pytest.approx([n for n in theirs if n is not None], rel=rel)


def assert_same(ours: dict[str, Any], eager: dict[str, Any], rel: float = 1e-5) -> None:
    for part in ("losses", "evaluated"):
        assert ours[part] == pytest.approx(eager[part], rel=rel, abs=rel), part
    assert_near(ours["norms"], eager["norms"], rel)
    assert ours["names"] == eager["names"] and not any("_orig_mod" in name for name in ours["names"])
    assert ours["ranks_equal"]
    assert ours["losses"][-1] != ours["losses"][0]


TOLERANCE = {"bf16": 1e-3}
pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(1600)]


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_level_0_trains_as_without_dcompile(results, shape, stage):
    ours = results[f"{shape} {stage} off"]
    assert_same(ours, results[f"{shape} {stage} eager"], TOLERANCE.get(shape, 1e-5))
    receipt = ours["receipt"]
    assert (receipt["adapter"], receipt["eligible"]) == (f"zero{stage}", False)
    assert "options={'zero': 'graph'}" in receipt["reasons"][0]
    assert receipt["collectives"] == 0
    if stage < 3:
        assert (receipt["graphs"], receipt["all_graphs"], receipt["graph_breaks"]) == (1, 1, 0)
    else:  # one break for each kind of frame, none for each of DeepSpeed's hooks
        assert receipt["graph_breaks"] < 8


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_zero_in_the_graph_trains_as_without_dcompile(results, shape, stage):
    ours = results[f"{shape} {stage} graph"]
    assert_same(ours, results[f"{shape} {stage} eager"], TOLERANCE.get(shape, 1e-5))
    receipt = ours["receipt"]
    assert (receipt["adapter"], receipt["eligible"], receipt["reasons"]) == (f"zero{stage}", True, [])
    assert (receipt["graphs"], receipt["all_graphs"], receipt["graph_breaks"]) == (1, 1, 0)
    assert receipt["kinds"] == KINDS[stage]
    assert receipt["collectives"] == receipt["buckets"] > (0 if stage == 0 else 1)
    assert receipt["bytes_copied"] == 0 or shape in ("tied", "bf16")


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("zero", ["off", "graph"])
def test_checkpoints_are_deepspeeds(results, zero, stage):
    ours, eager = results[f"tied {stage} {zero}"], results[f"tied {stage} eager"]
    assert ours["on"] == ours["again"], "a new engine has not gone on from the checkpoint"
    assert ours["on"] == ours["back"], "the engine itself has not gone back to it"
    assert ours["on"]["losses"] == pytest.approx(eager["on"]["losses"], rel=1e-5)
    assert ours["saved_names"] == eager["saved_names"]
    assert ours["fp32_names"] == eager["fp32_names"] and bool(ours["fp32_names"]) == (stage > 0)
    assert ours["fp32_equal"]


@needs_deepspeed
@pytest.mark.parametrize(("shape", "stage"), [(name, stage) for name, stages in STAGES_OF.items() for stage in stages])
def test_ways_to_call_an_engine_are_the_same_in_the_graph(results, shape, stage):
    ours = results[f"{shape} {stage} graph"]
    assert_same(ours, results[f"{shape} {stage} eager"])
    receipt = ours["receipt"]
    assert (receipt["eligible"], receipt["graphs"], receipt["kinds"]) == (True, 1, KINDS[stage])
    noted = [note for note in receipt["notes"] if "outside the compiled graphs" in note]
    assert len(noted) == (shape == "outside") and all("blocks.0.norm.weight" in note for note in noted)


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_several_graphs_reduce_what_is_theirs(results, stage):
    ours = results[f"breaks {stage} graph"]
    assert_same(ours, results[f"breaks {stage} eager"])
    assert ours["receipt"]["eligible"] and ours["receipt"]["graphs"] > 1
    assert ours["receipt"]["kinds"] == KINDS[stage]


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_the_engines_own_compile_leads_to_level_0(results, stage):
    ours = results[f"engine {stage} "]
    assert_same(ours, results[f"breaks {stage} eager"])
    assert (ours["receipt"]["adapter"], ours["receipt"]["eligible"]) == (f"zero{stage}", False)


@needs_deepspeed
@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_eligible_falls_back_and_says_why(results, name):
    stage, shape, reason = LEFT[name]
    ours = results[f"{name} {stage} graph"]
    assert_same(ours, results[f"{name} {stage} eager"], 1e-3 if "dtype" in shape else 1e-5)
    assert not ours["receipt"]["eligible"] and reason in " ".join(ours["receipt"]["reasons"])


@needs_deepspeed
def test_two_backwards_of_one_loss_are_added_up(results):
    """As in stage 0; DeepSpeed's own stage 1 keeps the last of them alone."""
    assert results["twice 1 graph"]["losses"] == pytest.approx(results["twice 1 eager"]["losses"], rel=1e-5)


@needs_deepspeed
def test_mistakes_are_errors_where_the_engine_is_compiled():
    code = (
        "import torch, deepspeed; from dcompile.integrations.deepspeed import compile\n"
        "def said(call):\n"
        "    try: call()\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
        "model = torch.nn.Linear(4, 4); said(lambda: compile(model))\n"
        "config = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': 1}}\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)\n"
        "said(lambda: compile(engine, options={'zeros': 'graph'}))\n"
        "said(lambda: compile(engine, options={'zero': 'on'}))\n"
        "assert compile(engine) is engine; said(lambda: compile(engine))\n"
    )
    process = torchrun_of_code(code)
    assert process.returncode == 0, process.stderr
    assert "TypeError dcompile: compile needs the engine" in process.stdout
    assert "OptionError" in process.stdout and "did you mean 'zero'" in process.stdout
    assert "zero='on'; valid values: off, graph" in process.stdout
    assert "this DeepSpeed engine is compiled already" in process.stdout


def torchrun_of_code(code: str) -> subprocess.CompletedProcess[str]:
    """One rank."""
    variables = {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return run(sys.executable, "-c", code, timeout=300, MASTER_PORT="29517", **variables)
