"""How kernels are shared out and linked; what can go wrong with compilers and caches is in tests/runtime/test_cache."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcompile.codegen.emit.cpp.compile import Compilers, balance, build, find_compiler, text_of
from dcompile.codegen.emit.target import KernelSource
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program.argument_table import kernel
from dcompile.toolchain import cache_bytes, cpu_features, openmp_library
from tests.codegen.emit import cpp_kernel, loops


def source(name: str, cost: int) -> KernelSource:
    return KernelSource(name, f'extern "C" int64 {name}() {{ return {cost}; }}\n', (), cost, False, (f"layer.{name}",))


def test_parts_cost_about_the_same_whatever_the_order():
    sources = [source(f"k{n}", cost) for n, cost in enumerate((9, 1, 1, 1, 5, 1, 3, 3))]
    parts = balance(sources, 2)
    assert sorted(sum(s.cost for s in part) for part in parts) == [12, 12]
    assert balance(sources[::-1], 2) == parts
    assert balance(sources[:1], 8) == [sources[:1]] and balance([], 4) == []


def test_nothing_to_build_needs_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nowhere")
    assert build([], Config(), KernelCache(tmp_path)).built == 0


CRASHING = """#!/bin/sh
case "$*" in *--version*|*-fno-tree-slp-vectorize*) exec g++ "$@";; esac
echo "during GIMPLE pass: slp: internal compiler error: Segmentation fault"
exit 1
"""


def test_a_compiler_that_crashes_while_optimising_is_asked_for_less(monkeypatch, tmp_path, capfd):
    compiler = tmp_path / "crashing"
    compiler.write_text(CRASHING)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    made = build([source("seven", 7)], Config(), KernelCache(tmp_path))
    assert kernel(made.libraries["seven"], "seven")() == 7
    assert "crashed on 1 kernels; they are built again with -fno-tree-slp-vectorize" in capfd.readouterr().err


def loaded_openmp():
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "libgomp" in line}


def test_one_thread_pool_serves_torch_and_kernels(tmp_path):
    assert openmp_library() is not None, "torch brings an OpenMP run time"
    before_building = loaded_openmp()
    text = 'extern "C" int64 threads() { return omp_get_max_threads(); }\n'
    made = build([KernelSource("threads", text, (), 1, False)], Config(), KernelCache(tmp_path))
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert kernel(made.libraries["threads"], "threads")() == count
    finally:
        torch.set_num_threads(before)
    assert loaded_openmp() == before_building, "kernels brought a run time of their own"


def test_the_file_for_people_names_modules_and_compiles(tmp_path):
    program = loops.rms_norm(4, 8)
    kernels = replace(cpp_kernel.emit(program.steps[0], program.table), origin=("layers.3.norm: mul */", "back\\slash"))
    text = text_of([kernels])
    assert "/* layers.3.norm: mul * /, back\\slash */" in text
    path = tmp_path / "kernels.cpp"
    path.write_text(text)
    assert os.system(f"g++ -fopenmp -fsyntax-only '{path}'") == 0


def test_the_compiler_is_asked_for_this_processor():
    compiler = find_compiler(30)
    assert "-march=native" in compiler.flags and "-ffp-contract=off" in compiler.flags
    assert ("-mprefer-vector-width=512" in compiler.flags) == ("avx512f" in cpu_features().split())


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two cores")
def test_ranks_share_the_cores(monkeypatch):
    from dcompile.codegen.emit.cpp import compile as module

    monkeypatch.delenv("MAX_JOBS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert module.workers() == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    assert module.workers() == 1
    for name in ("LOCAL_WORLD_SIZE", "MAX_JOBS"):
        monkeypatch.setenv(name, "garbage")
    assert module.workers() == cores
    for most in (1, cores + 1):
        monkeypatch.setenv("MAX_JOBS", str(most))
        assert module.workers() == min(most, cores)


@pytest.fixture
def counting(monkeypatch, tmp_path):
    """A compiler that notes each start, and refuses to go on while there is a file `wrong` beside it."""
    compiler, starts = tmp_path / "counting", tmp_path / "starts"
    lines = f'case "$*" in *--version*) exec g++ "$@";; esac\necho x >> {starts}\n'
    compiler.write_text(f'#!/bin/sh\n{lines}[ -e {tmp_path}/wrong ] && echo no luck && exit 1\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MAX_JOBS", "2")
    return lambda: len(starts.read_text().splitlines())


def test_graphs_wait_for_what_was_begun_for_others(counting, tmp_path):
    cache, compilers, sources = KernelCache(tmp_path), Compilers(Config()), [source("one", 1), source("two", 2)]
    compilers.begin(sources[:1], cache, early=True, aliases={"one": "1" * 64, "two": "2" * 64})
    first, second = compilers.begin(sources, cache), compilers.begin(sources, cache)
    found = [second.result(), first.result()]
    assert [(made.built, made.cache_hits) for made in found] == [(0, 2), (2, 0)] and counting() == 2
    assert found[0].libraries == found[1].libraries and not first.waits
    assert cache.find("1" * 64) == found[0].libraries["one"] and cache.find("2" * 64) is None
    again = compilers.begin(sources, cache).result()
    assert (again.built, again.cache_hits) == (0, 2) and counting() == 2


def test_what_goes_wrong_is_said_where_the_kernel_is_needed(counting, tmp_path):
    (tmp_path / "wrong").touch()
    cache, compilers = KernelCache(tmp_path), Compilers(Config())
    compilers.begin([source("one", 1)], cache, early=True)
    assert compilers.begin([source("two", 2)], cache, early=True).waits or counting() == 2  # nobody asks for it
    with pytest.raises(BuildError, match="no luck"):
        compilers.begin([source("one", 1)], cache).result()
    (tmp_path / "wrong").unlink()
    made = compilers.begin([source("one", 1)], cache).result()
    assert made.built == 1 and kernel(made.libraries["one"], "one")() == 1


def test_the_largest_cache_counts(tmp_path):
    assert cache_bytes(tmp_path) == 0 == cache_bytes(tmp_path / "none")
    for number, size in enumerate(["48K", "2048K", "32M", "odd"]):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    (tmp_path / "index9").mkdir()  # without a size
    assert cache_bytes.__wrapped__(tmp_path) == 32 << 20
    assert f"-DCACHE_BYTES={cache_bytes()}" in find_compiler(30).flags
