"""`aot_compile` of torch.compile with this backend: equal to eager, saved, and loaded where there is no compiler."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcompile.aot_function import AheadOfTimeBackend
from dcompile.config import Config
from dcompile.errors import ExportError
from dcompile.runtime.program.aot_callable import AheadOfTimeProgram
from tests.job import run


class Counting(nn.Module):
    """A buffer that calls change, nested results, a view of an argument among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        return {"y": self.norm(self.linear(x)).relu() * scale, "flat": x.view(-1)}


def ahead_of_time(fn: Any, *args: Any, **options: Any) -> Any:
    compiled = torch.compile(fn, backend="dcompile", fullgraph=True, **options)
    if isinstance(fn, nn.Module):
        compiled = compiled.forward
    with torch.no_grad():
        return compiled.aot_compile((args, {}))


LOADED = """
import shutil, sys, torch
assert not any(map(shutil.which, ("g++", "c++", "clang++", "cc", "gcc"))), "there is a compiler"
with open({path!r}, "rb") as file:
    compiled = torch.compiler.load_compiled_function(file)
x, expected = torch.load({values!r})
with torch.no_grad():
    torch.testing.assert_close(compiled(x, 3), expected)
heavy = ("dcompile.codegen", "dcompile.driver", "dcompile.capture")
assert not [name for name in heavy if name in sys.modules], "the compiler was loaded"
print("equal")
"""


def test_a_function_is_saved_and_runs_where_there_is_no_compiler(tmp_path: Path) -> None:
    """With an operator that has an effect, a number among the arguments, and one among the results."""

    def solve(x: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
        inverse = torch.linalg.inv(x @ x.T + torch.eye(4))
        return (inverse + count).softmax(-1), x.shape[0]

    x = torch.randn(4, 8)
    compiled = ahead_of_time(solve, x, 3)
    with torch.no_grad():
        expected = solve(x, 3)
        torch.testing.assert_close(compiled(x, 3), expected)
    with pytest.raises(RuntimeError, match="GuardManager check failed"):
        compiled(torch.randn(5, 8), 3)
    values, path, script = tmp_path / "values.pt", tmp_path / "solve.pt", tmp_path / "loaded.py"
    torch.save((x, expected), values)
    compiled.save_compiled_function(str(path))
    script.write_text(LOADED.format(path=str(path), values=str(values)))
    threads = str(torch.get_num_threads())  # torch's guards compare it
    status, text = run([sys.executable, str(script)], tmp_path, PATH=str(tmp_path), CXX="", OMP_NUM_THREADS=threads)
    assert (status, text.strip().splitlines()[-1:]) == (0, ["equal"]), text


def test_a_module_with_a_dynamic_size_is_saved_and_loaded() -> None:
    model, x = Counting(), torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = ahead_of_time(model, x)
    data = type(compiled).serialize(compiled).serialized_data
    loaded = torch.compiler.load_compiled_function(io.BytesIO(data))
    with torch.no_grad():
        for rows, calls in ((4, 1), (9, 3)):
            x = torch.randn(rows, 8)
            got = loaded(model, x)
            assert model.calls == calls, "the model's own buffer counts"
            torch.testing.assert_close(got, model(x))
            assert got["flat"].data_ptr() == x.data_ptr()


def test_training_and_graph_breaks_are_refused() -> None:
    """Programs are for inference, when they are compiled and when they are called; and torch's own refusals."""
    model, x = Counting(), torch.randn(4, 8)
    with pytest.raises(Exception, match=r"call it under torch.no_grad\(\)"):
        torch.compile(model, backend="dcompile", fullgraph=True).forward.aot_compile(((x,), {}))
    compiled = ahead_of_time(model, x)
    compiled.disable_guard_check()
    with pytest.raises(ExportError, match=r"for inference; call it under torch.no_grad\(\)"):
        compiled(model, x)
    with torch.no_grad(), pytest.raises(ExportError, match=r"is torch.float32 of shape \[4, 9\], not float32"):
        compiled(model, torch.randn(4, 9))
    with pytest.raises(RuntimeError, match="fullgraph=True"):
        torch.compile(torch.sin, backend="dcompile").aot_compile(((x,), {}))


def test_what_torchs_container_holds_of_ours_is_no_pickle_and_is_checked() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (x.sin() + 1,))
    with torch.no_grad():
        program = AheadOfTimeBackend(Config())(graph, [torch.randn(3)])
    data = AheadOfTimeProgram.serialize_compile_artifacts(program)
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)
    x = torch.randn(3)
    torch.testing.assert_close(AheadOfTimeProgram.deserialize_compile_artifacts(data)(x), [x.sin() + 1])
    damaged = bytearray(data)
    damaged[data.index(b"def make(run") + 5] ^= 1
    with pytest.raises(ExportError, match="damaged"):
        AheadOfTimeProgram.deserialize_compile_artifacts(bytes(damaged))
