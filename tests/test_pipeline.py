"""The pipeline as a whole: switches that bisect it, what it dumps, what it counts, and what it leaves to ATen."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

import dcompile
from dcompile.codegen.emit.host import program as host_program
from dcompile.collectives.contract import Request
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.ir.diagram import COLOURS
from dcompile.pipeline import DYNAMO_PASSES, JOINT_PASSES, launch_passes, loop_passes, nest_passes
from dcompile.runtime.program.executable import HostProgram
from tests.codegen.emit import reduced_rows
from tests.codegen.emit.all_kernels import kernels_of


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))


def loss_and_gradients(model, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def against_eager(**options):
    model, x = net(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    expected = loss_and_gradients(model, x)
    dcompile.compile(model, options={"receipt": False, **options})
    actual = loss_and_gradients(model, x)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return dcompile.receipt(model)


def test_every_pass_has_its_own_name():
    rows = [*DYNAMO_PASSES, *JOINT_PASSES, *loop_passes(), *nest_passes(), *launch_passes()]
    assert len({row.name for row in rows}) == len(rows)


@dataclass
class Graph:
    """A graph of the net, with what it was called with and what it gave."""

    module: torch.fx.GraphModule
    request: Request
    given: list = field(default_factory=list)
    returned: list = field(default_factory=list)


def cloned(values):
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


@pytest.fixture(scope="module")
def graphs():
    """Forward and backward, traced once for all passes that are left out, and right by eager."""
    found, compile_graph, call = {}, CachingCompiler.compile_graph, HostProgram.__call__

    def compile_and_keep(compiler, module, request, foreseen=None):
        program = compile_graph(compiler, module, request, foreseen)
        found[id(program)] = Graph(module, request)
        return program

    def call_and_keep(program, args, **more):
        given = cloned(args)
        results = call(program, args, **more)
        found[id(program)].given, found[id(program)].returned = given, cloned(results)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachingCompiler, "compile_graph", compile_and_keep)
        patch.setattr(HostProgram, "__call__", call_and_keep)
        against_eager(verify=True)
    assert [graph.request.kind for graph in found.values()] == ["forward", "backward"]
    return list(found.values())


@pytest.mark.parametrize("name", [row.name for row in loop_passes() if not row.required])
def test_any_pass_may_be_left_out_and_the_answer_stays_right(name, graphs):
    compiler = CachingCompiler(Config.make(options={"receipt": False, "skip": name, "verify": True}))
    for graph in graphs:
        results = compiler.compile_graph(graph.module, graph.request)(cloned(graph.given))
        assert len(results) == len(graph.returned) > 1
        for actual, expected in zip(results, graph.returned, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_stopping_before_fusion_gives_more_kernels_and_the_same_answer():
    few = against_eager(verify=True)
    many = against_eager(until="remove_dead_steps", verify=True)
    assert many.kernel_calls > few.kernel_calls


def test_left_to_aten_there_is_no_kernel_and_no_fallback():
    receipt = against_eager(kernels="aten")
    assert receipt.kernels == receipt.kernel_calls == 0 and receipt.fallbacks == {}
    assert receipt.library_calls > 0


def test_decisions_about_nests_are_left_out_and_stopped_after():
    def decisions(**options):
        return [decide.__name__ for decide in Pipeline(Config.make(options=options))._decisions]

    names, required = [row.name for row in nest_passes()], [row.name for row in nest_passes() if row.required]
    assert decisions() == names
    assert decisions(skip="vectorize") == [name for name in names if name != "vectorize"]
    assert decisions(until="fuse") == required, "what stops earlier leaves plain loops"
    assert decisions(until="hoist_values")[-2:] == ["hoist_values", "block_scans"]


def test_any_launch_pass_may_be_left_out_and_every_loop_has_a_kernel():
    program, names = reduced_rows.program("rms", 1, 4096), [row.name for row in launch_passes() if not row.required]
    whole = kernels_of(program)
    assert whole.epilogues and len(names) == 7
    for name in names:
        kernels = kernels_of(program, skip=name)
        assert len(kernels.calls) == len(whole.calls) and host_program.emit(program, kernels)
        unchanged = name.startswith("replace") or name == "fuse_launches"
        assert (kernels == whole) == unchanged, "rows for CPUs, and no neighbours that run side by side"
    assert not kernels_of(program, until="fuse").all_reduces


@pytest.mark.usefixtures("forks")
def test_a_dump_shows_every_program_its_changes_and_the_host_code(tmp_path):
    against_eager(dump=str(tmp_path))
    for graph in ("forward0", "backward0"):
        names = {path.name for path in (tmp_path / "rank0" / graph).iterdir()}
        number = {row.name: n for n, row in enumerate(loop_passes(), 1)}
        fuse, last = f"{number['fuse']:02}_fuse", f"{number['plan_memory_for_peak']:02}_plan_memory_for_peak"
        assert {"00_lower.txt", f"{last}.txt", f"{last}.diff", "host.py", "graph.py"} <= names
        unchanged = [row.name for row in loop_passes() if f"{number[row.name]:02}_{row.name}.txt" not in names]
        assert "insert_all_gathers" in unchanged and not any(name in path for name in unchanged for path in names)
        assert "graph_diagram.dot" not in names
    fused = (tmp_path / f"rank0/backward0/{fuse}.txt").read_text()
    assert "row_sum" in fused and "return (" in fused
    (launches,) = (tmp_path / "rank0/backward0/launches").glob("*_emit_loops.txt")
    assert "loop 0: fused_" in launches.read_text()
    kernels = list((tmp_path / "rank0/backward0/kernels").glob("*.cpp"))
    assert kernels and all("for (" in path.read_text() for path in kernels)
    assert any("// kept: {" in path.read_text() or "// vectors: {" in path.read_text() for path in kernels)
    repro = tmp_path / "rank0/backward0/repro.py"
    shown = subprocess.run([sys.executable, repro], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "program backward0(" in shown


def test_a_dump_that_cannot_be_written_is_said_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    against_eager(dump=str(tmp_path / "file"))
    said = [line for line in capsys.readouterr().err.splitlines() if "cannot write" in line]
    assert len(said) == 1 and "DCOMPILE_DUMP" in said[0]


def test_a_second_model_leaves_the_dump_of_the_first_alone(tmp_path):
    against_eager(dump=str(tmp_path))
    first = {path: path.read_text() for path in (tmp_path / "rank0").rglob("*.txt")}
    doubled = torch.compile(lambda x: x * 2, backend="dcompile", options={"receipt": False, "dump": str(tmp_path)})
    doubled(torch.ones(3))
    assert first and all(path.read_text() == text for path, text in first.items())
    assert (tmp_path / "model2/rank0/inference0/host.py").exists()


def test_tracing_writes_to_its_own_directory_and_describes_each_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    against_eager(**{"trace.enabled": True, "trace.graph_diagram": True})
    for graph in ("forward0", "backward0"):
        folder = tmp_path / "dcompile_dump/rank0" / graph
        assert {"graph.py", "00_lower.txt", "host.py"} <= {path.name for path in folder.iterdir()}
        text = (folder / "graph_diagram.dot").read_text()
        assert f'label="{graph}: ' in text and COLOURS["kernel"] in text


class TwoNorms(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.LayerNorm(16) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) @ torch.ones(16, 16)
        return x


def test_kernels_say_which_modules_they_came_from_in_both_directions(tmp_path):
    model = TwoNorms()
    dcompile.compile(model, options={"receipt": False, "dump": str(tmp_path)})
    model(torch.randn(4, 16)).sum().backward()
    for graph in ("forward0", "backward0"):
        folder = tmp_path / "rank0" / graph
        kernels = [path.read_text() for path in (folder / "kernels").glob("*.cpp")]
        comments = [[line for line in text.splitlines() if line.startswith("// ")] for text in kernels]
        assert kernels and all(comments)
        said = "\n".join(line for lines in comments for line in lines)
        assert "layers.0: aten." in said and "layers.1: aten." in said and "(test_pipeline.py:" in said
        shared = [lines for lines in comments if any("layers.0:" in line for line in lines)]
        assert any(any("layers.1:" in line for line in lines) for lines in shared)
        host = (folder / "host.py").read_text().splitlines()
        begin = host.index("    def call(args, buckets=None, sync=False):")
        alone = [n for n, line in enumerate(host) if n > begin and line.strip().startswith("_k") and "(" in line]
        together = [n for n, line in enumerate(host) if line.startswith("        ('fused_")]
        assert alone + together and all("# " in "\n".join(host[n - 3 : n]) for n in alone + together)


def test_passes_and_kernels_are_logged_on_their_channels(capfd):
    against_eager(log="passes,kernels=INFO")
    said = capfd.readouterr().err
    assert "[passes] backward0 fuse:" in said
    (line,) = (line for line in said.splitlines() if "[kernels] backward0: " in line)
    assert " kernel calls of " in line and "Report(" not in line


def test_symbolic_sizes_become_arguments_of_kernels():
    model = net()
    dcompile.compile(model, dynamic=True, options={"receipt": False})
    for rows in (8, 5):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(model(x), net()(x), rtol=1e-5, atol=1e-6)
    model(torch.randn(6, 16)).sum().backward()
    receipt = dcompile.receipt(model)
    assert receipt.kernels and not receipt.fallbacks and not receipt.notes


def test_a_second_model_of_the_same_layers_builds_nothing():
    first = against_eager()
    second = against_eager()
    assert first.kernels == second.kernels == second.cache_hits
    assert second.built == 0
