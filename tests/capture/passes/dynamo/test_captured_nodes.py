"""Which graphs have the kernel of matrix products built while they are traced."""

from __future__ import annotations

import pytest
import torch

from dcompile.capture.passes.dynamo.captured_nodes import multiplies
from dcompile.codegen.emit.cpp import compile as cpp_compile
from dcompile.codegen.emit.cpp import sgemm
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config

x = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.nn.functional.linear(x, x), True),
        (lambda x: x @ x, True),
        (lambda x: x.matmul(x), True),
        (lambda x: torch.utils.checkpoint.checkpoint(lambda y: y @ y, x, use_reentrant=False), True),
        (lambda x: x.exp(), False),
        (lambda x: x.bfloat16() @ x.bfloat16(), False),
        (lambda x: torch.matmul(x.double(), x.double()), False),
    ],
)
def test_products_are_seen_before_a_graph_is_traced(function, expected):
    found = []

    def backend(gm, _):
        found.append(multiplies(gm))
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(x.clone().requires_grad_())
    assert found == [expected]


@pytest.fixture
def begun(monkeypatch):
    """Whether the kernel was begun, by setting."""
    calls = []
    monkeypatch.setattr(Pipeline, "begin_products", lambda self, cache: calls.append(cache))

    def asked(compiler):
        calls.clear()
        compiler.expect_products()
        return bool(calls)

    return asked


class Sharing:
    def __init__(self, first):
        self.claim = lambda key: first


def test_it_is_begun_where_it_is_built_alone(begun, tmp_path):
    config = {"cache_dir": str(tmp_path / "cache")}
    compiler = CachingCompiler(Config(matmul="own", **config))
    assert begun(compiler)
    for first in (True, False):  # who comes first builds for all
        compiler._sharing = Sharing(first)
        assert begun(compiler) == first
    assert not begun(CachingCompiler(Config(matmul="aten", **config)))
    assert not begun(CachingCompiler(Config(matmul="own", kernels="aten", **config)))


def test_it_is_built_once_and_found_without_the_compilers_stages(begun, monkeypatch, tmp_path):
    built = []

    def compiled(compiler, sources, timeout_s, cache, keys):
        (tmp_path / "made.so").write_bytes(b"a library")
        built.append([source.name for source in sources])
        return cache.put([key for source in sources for key in keys[source.name]], tmp_path / "made.so")

    monkeypatch.undo()
    monkeypatch.setattr(cpp_compile, "_compile", compiled)
    monkeypatch.setattr(cpp_compile, "workers", lambda: 2)
    compiler = CachingCompiler(Config(matmul="own", cache_dir=str(tmp_path / "cache")))
    compiler.expect_products()
    compiler._pipeline()._compilers._cpp.begin([sgemm.source()], None).result()
    assert len(built) == 1
    monkeypatch.setattr(CachingCompiler, "_pipeline", lambda self: pytest.fail("it is there"))
    CachingCompiler(compiler.config).expect_products()


def test_with_one_core_it_waits_for_its_turn(monkeypatch, tmp_path):
    monkeypatch.setattr(cpp_compile, "workers", lambda: 1)
    compiler = CachingCompiler(Config(matmul="own", cache_dir=str(tmp_path / "cache")))
    compiler.expect_products()
    assert not compiler._pipeline()._compilers._cpp._begun
