"""torch.compile(..., backend="dcompile"): the same preparation behind torch's own call, and nothing else changed."""

import copy
import functools
import importlib.metadata
import subprocess
import sys

import pytest
import torch
from torch import nn

import dcompile
from dcompile.backend import dcompile_backend
from dcompile.compat.versions import register_backend
from tests.capture.conftest import compilers  # noqa: F401  a fixture
from tests.capture.double import kinds

pytestmark = pytest.mark.usefixtures("compilers")


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_modules_come_back_as_torch_returns_them(compilers):  # noqa: F811
    module = make()
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="dcompile", fullgraph=True)
    assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule) and compiled._orig_mod is module
    x = torch.randn(3, 4)
    assert torch.equal(compiled(x), eager(x))
    compiled(x).sum().backward()
    eager(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), eager.parameters(), strict=True))
    assert kinds(compilers) == ["forward", "backward"]
    assert module._compiled_call_impl is None  # calling the module itself stays eager
    assert dcompile.receipt(compiled).graphs == dcompile.receipt(module).graphs == 1


@pytest.mark.parametrize("module", [nn.Linear(4, 2), make()], ids=["Linear", "Sequential"])
def test_module_compile_reaches_the_compiler_for_bare_classes(module, compilers):  # noqa: F811
    module.compile(backend="dcompile")
    module(torch.randn(3, 4)).sum().backward()
    assert kinds(compilers) == ["forward", "backward"]
    assert dcompile.receipt(module).graphs == 1


def test_functions(compilers):  # noqa: F811
    @torch.compile(backend="dcompile")
    def double(x):
        return x * 2

    assert double(torch.ones(2)).tolist() == [2.0, 2.0] and double.__name__ == "double"
    assert kinds(compilers) == ["inference"]
    assert dcompile.receipt(double).graphs == 1


def test_options_reach_the_compiler(compilers):  # noqa: F811
    torch.compile(make(), backend="dcompile", options={"kernels": "aten"})
    torch.compile(make(), backend="dcompile", mode="reduce-overhead")
    assert [c.config.kernels for c in compilers] == ["aten", "auto"]


@pytest.mark.parametrize("arguments", [{"options": {"colour": 1}}, {"mode": "fastest"}])
@pytest.mark.parametrize("target", [make(), abs], ids=["module", "function"])
def test_bad_settings_raise_the_same_text_at_torch_compile(arguments, target):
    with pytest.raises(ValueError) as ours:
        dcompile.compile(make(), **copy.deepcopy(arguments))
    with pytest.raises(ValueError) as theirs:
        torch.compile(target, backend="dcompile", **arguments)
    assert str(theirs.value) == str(ours.value)


def test_disable():
    module = make()
    assert torch.compile(module, backend="dcompile", disable=True) is module


def test_other_backends_pass_through(compilers):  # noqa: F811
    seen = []

    def other(gm, _inputs):
        seen.append(gm)
        return gm

    x = torch.randn(3, 4)
    module = make()
    torch.compile(module, backend=other)(x)
    torch.compile(lambda x: x + 1, backend="eager")(x)
    assert len(seen) == 1 and not compilers
    with pytest.raises(dcompile.errors.NotCompiledError):
        dcompile.receipt(module)


def test_no_setting_of_dynamo_stays_changed():
    before = torch._dynamo.config.save_config()
    compiled = torch.compile(make(), backend="dcompile")
    compiled(torch.randn(3, 4)).sum().backward()
    assert torch._dynamo.config.save_config() == before


def test_a_copy_compiles_on_its_own(compilers):  # noqa: F811
    compiled = torch.compile(make(), backend="dcompile")
    x = torch.randn(3, 4)
    expected = compiled(x)
    twin = copy.deepcopy(compiled)
    assert torch.equal(twin(x), expected) and len(compilers) == 2
    assert kinds(compilers[1:]) == ["forward"]


def test_the_state_dict_is_as_torch_makes_it():
    keys = [f"_orig_mod.{key}" for key in make().state_dict()]
    assert list(torch.compile(make(), backend="dcompile").state_dict()) == keys


def test_as_a_plain_backend(compilers):  # noqa: F811
    """Callers that go past torch.compile, such as torch._dynamo.optimize, and graphs from elsewhere."""
    module = torch.nn.Tanh()
    graph = torch.fx.symbolic_trace(nn.Sequential(module))
    output = graph.graph.output_node()
    output.args = ((output.args[0],),)  # Dynamo's graphs return tuples
    graph.recompile()
    x = torch.randn(3, 4, requires_grad=True)
    (found,) = dcompile_backend(graph, [x], options={"kernels": "aten"})(x)
    found.sum().backward()
    assert torch.equal(found, x.tanh()) and torch.allclose(x.grad, 1 - found.detach() ** 2)
    assert kinds(compilers) == ["forward", "backward"]


def test_a_fresh_process_needs_no_import_of_dcompile():
    code = """
import sys, torch
assert "dcompile" in torch.compiler.list_backends() and "dcompile" not in sys.modules
m = torch.nn.Linear(4, 4)
f = torch.compile(m, backend="dcompile", options={"mode": "default"})
torch.testing.assert_close(f(torch.ones(2, 4)), m(torch.ones(2, 4)))
try:
    torch.compile(m, backend="dcompile", options={"skipp": 1})
except ValueError as error:
    assert "did you mean 'skip'" in str(error), error
else:
    raise AssertionError("a bad option was accepted")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("loaded", [True, False])
def test_torch_finds_a_backend_without_an_installed_package(loaded, monkeypatch):
    """As for a checkout or a zip archive on the path, which has no entry point."""
    name, known = torch._dynamo.backends.registry.__name__, [*sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", [*known])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints())
    if not loaded:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(torch._dynamo.backends, "registry", None)
    else:
        monkeypatch.setattr(torch._dynamo.backends.registry, "_BACKENDS", {})
        monkeypatch.setattr(torch._dynamo.backends.registry, "_COMPILER_FNS", {})
    for _ in range(2):
        register_backend("ours", "dcompile.backend:dcompile_backend")
    assert loaded or len(sys.meta_path) == len(known) + 1
    registry = importlib.import_module(name)
    assert registry.lookup_backend("ours") is dcompile_backend and sys.meta_path == known


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="torch 2.13 has it first")
def test_the_default_backend_of_torch(compilers):  # noqa: F811
    torch.compiler.set_default_backend("dcompile")
    try:
        torch.compile(make())(torch.randn(3, 4)).sum().backward()
        (module := make()).compile(mode="max-autotune", dynamic=False)
        module(torch.randn(3, 4)).sum().backward()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    finally:
        torch.compiler.set_default_backend(None)
    assert kinds(compilers) == ["forward", "backward"] * 2 and compilers[1].config.max_autotune


def test_a_default_for_torch_without_one(compilers, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="dcompile"))

    @torch.compile(dynamic=False)
    def double(x):
        return x * 2

    (module := make()).compile()
    assert double(torch.ones(1)) == 2 and module(torch.ones(1, 4)).shape == (1, 2) and len(compilers) == 2


def test_a_number_read_from_a_tensor_is_returned():
    compiled = dcompile.compile(lambda x: (x * 2).item(), fullgraph=True, options={"receipt": False})
    assert compiled(torch.tensor(5)) == 10 and compiled(torch.tensor(7)) == 14


def test_guards_and_their_failures_reach_the_callers_hooks(compilers):  # noqa: F811
    exported, failed = [], []
    hooks = {"guard_export_fn": exported.append, "guard_fail_fn": failed.append}
    double = torch._dynamo.optimize("dcompile", **hooks)(lambda x: x * 2)
    double(torch.ones(2))
    assert len(exported) == 1 and not failed
    double(torch.ones(2, dtype=torch.float64))
    assert len(exported) == 2 and "dtype mismatch" in failed[0].reason


def test_torch_fx_traces_no_compiled_function_unless_torch_allows_it(compilers):  # noqa: F811
    double = torch.compile(lambda x: x * 2, backend="dcompile")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="using FX to symbolically trace"):
            torch.fx.symbolic_trace(lambda x: double(x) + 1)
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        assert torch.fx.symbolic_trace(double)(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
