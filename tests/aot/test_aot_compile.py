"""`aot_compile` of torch.compile with this backend: equal to eager, saved, and loaded where there is no compiler."""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcompile.aot.aot_compile import AheadOfTimeBackend
from dcompile.api import make_services
from dcompile.config import Config
from dcompile.errors import ExportError
from dcompile.runtime.program.aot_callable import AheadOfTimeProgram, AheadOfTimeTraining
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


class Output(OrderedDict[str, Any]):
    """Results as transformers has them: building one takes a module that Dynamo imports."""


class Biased(nn.Module):
    """Two parameters with equal gradients, and results that are views of others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias, self.other = Counting(), *(nn.Parameter(torch.randn(16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        found = self.inner(x)
        y = found["y"] + self.bias + self.other
        return Output(found=found, y=y, view=y.view(-1, 4), constant=y[0].detach())


def ahead_of_time(fn: Any, *args: Any, trains: bool = False, **options: Any) -> Any:
    compiled = torch.compile(fn, backend="dcompile", fullgraph=True, **options)
    if isinstance(fn, nn.Module):
        compiled = compiled.forward
    with torch.set_grad_enabled(trains):
        return compiled.aot_compile((args, {}))


def reloaded(compiled: Any) -> Any:
    return torch.compiler.load_compiled_function(io.BytesIO(type(compiled).serialize(compiled).serialized_data))


def gradients(results: Any, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of some loss, which `leaves` no longer have afterwards."""
    learning = [x for x in torch.utils._pytree.tree_leaves(results) if getattr(x, "requires_grad", False)]
    sum(x.square().sum() for x in learning).backward()
    found = [leaf.grad for leaf in leaves]
    assert len({grad.data_ptr() for grad in found}) == len(found), "gradients share memory"
    for leaf in leaves:
        leaf.grad = None
    return found


LOADED = """
import shutil, sys, torch
assert not any(map(shutil.which, ("g++", "c++", "clang++", "cc", "gcc"))), "there is a compiler"
def load(path):
    with open(path, "rb") as file:
        return torch.compiler.load_compiled_function(file)
x, expected, weight, learned = torch.load({values!r})
with torch.no_grad():
    torch.testing.assert_close(load({path!r})(x, 3), expected)
loss, hidden = load({training!r})(x, weight)
loss.backward()
torch.testing.assert_close([hidden, weight.grad], learned)
heavy = ("dcompile.codegen", "dcompile.compiler.driver", "dcompile.capture")
assert not [name for name in heavy if name in sys.modules], "the compiler was loaded"
print("equal")
"""


def learn(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = nn.functional.gelu(x @ weight)
    return hidden.square().mean(), hidden.detach()


def test_functions_are_saved_and_run_where_there_is_no_compiler(tmp_path: Path) -> None:
    """With an operator that has an effect, a number among the arguments, and one among the results; and a backward."""

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
    weight, training = torch.randn(8, 8, requires_grad=True), tmp_path / "learn.pt"
    loss, hidden = learn(x, weight)
    loss.backward()  # its arguments have gradients when it is compiled
    ahead_of_time(learn, x, weight, trains=True).save_compiled_function(str(training))
    learned = [hidden, weight.grad]
    torch.save((x, expected, weight.detach().requires_grad_(), learned), values)
    compiled.save_compiled_function(str(path))
    script.write_text(LOADED.format(path=str(path), training=str(training), values=str(values)))
    threads = str(torch.get_num_threads())  # torch's guards compare it
    status, text = run([sys.executable, str(script)], tmp_path, PATH=str(tmp_path), CXX="", OMP_NUM_THREADS=threads)
    assert (status, text.strip().splitlines()[-1:]) == (0, ["equal"]), text


def test_a_module_with_a_dynamic_size_is_saved_and_loaded() -> None:
    model, x = Counting(), torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = ahead_of_time(model, x)
    loaded = reloaded(compiled)
    with torch.no_grad():
        for rows, calls in ((4, 1), (9, 3)):
            x = torch.randn(rows, 8)
            got = loaded(model, x)
            assert model.calls == calls, "the model's own buffer counts"
            torch.testing.assert_close(got, model(x))
            assert got["flat"].data_ptr() == x.data_ptr()


def test_a_module_trains_with_a_dynamic_size_before_and_after_loading() -> None:
    """A buffer that calls change, results that are views, and inputs that get equal gradients."""
    torch.manual_seed(0)
    model, x = Biased(), torch.randn(4, 8, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = ahead_of_time(model, x, trains=True)
    calls = 0
    for function in (compiled, reloaded(compiled)):
        for rows in (4, 9):
            x = torch.randn(rows, 8, requires_grad=True)
            got, calls = function(model, x), calls + 1
            assert model.inner.calls == calls
            expected, calls = model(x), calls + 1
            torch.testing.assert_close(got, expected)
            leaves = (x, *model.parameters())
            torch.testing.assert_close(
                gradients([*got.values()], *leaves), gradients([*expected.values()], *leaves), rtol=1e-4, atol=1e-4
            )
            assert not got["constant"].requires_grad and got["found"]["flat"].data_ptr() == x.data_ptr()


def test_what_a_saved_backward_cannot_do_is_an_error() -> None:
    """Arguments that are stored otherwise, batches of gradients, damaged files, and code of other compilers."""
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    compiled = ahead_of_time(learn, x, weight, trains=True)
    loss, _ = compiled(x, weight)
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True) for _ in range(2))
    torch.testing.assert_close((first, second), (torch.autograd.grad(learn(x, weight)[0], weight),) * 2)
    with pytest.raises(Exception, match="not for a batch of them"):
        torch.autograd.grad(loss, weight, torch.ones(2), is_grads_batched=True)
    data = bytearray(type(compiled).serialize(compiled).serialized_data)
    data[data.index(b"def make(run") + 5] ^= 1
    with pytest.raises(ExportError, match="damaged"):
        torch.compiler.load_compiled_function(io.BytesIO(bytes(data)))
    record = bytearray(AheadOfTimeTraining.serialize_compile_artifacts(compiled._artifacts.compiled_fn))
    record[-20] ^= 1
    with pytest.raises(ExportError, match="its checksum differs"):  # before torch unpickles it
        AheadOfTimeTraining.deserialize_compile_artifacts(bytes(record))
    other = AheadOfTimeTraining.serialize_compile_artifacts(compiled._artifacts.compiled_fn).replace(
        b"torch 2.", b"torch 1."
    )
    with pytest.raises(
        ExportError, match=r"compiled for 'dcompile \d+, torch 1.*, here is .*torch 2.*; compile it again"
    ):
        AheadOfTimeTraining.deserialize_compile_artifacts(other)
    compiled.disable_guard_check()
    with pytest.raises(ExportError, match=r"argument 0 has strides \(1, 4\), but was compiled with .* \(8, 1\)"):
        compiled(torch.randn(8, 4).t(), weight)
    with pytest.raises(Exception, match="kernels by inductor cannot be exported"):
        ahead_of_time(learn, x, weight, trains=True, options={"kernels": "inductor"})


def test_inference_under_gradients_and_graph_breaks_are_refused() -> None:
    """Programs for inference compute no gradients; and torch's own refusals."""
    model, x = Counting(), torch.randn(4, 8)
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
        program = AheadOfTimeBackend(Config(), make_services(Config()))(graph, [torch.randn(3)])
    data = AheadOfTimeProgram.serialize_compile_artifacts(program)
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)
    x = torch.randn(3)
    torch.testing.assert_close(AheadOfTimeProgram.deserialize_compile_artifacts(data)(x), [x.sin() + 1])
    damaged = bytearray(data)
    damaged[data.index(b"def make(run") + 5] ^= 1
    with pytest.raises(ExportError, match="damaged"):
        AheadOfTimeProgram.deserialize_compile_artifacts(bytes(damaged))
