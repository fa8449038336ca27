"""The kernel of small all-reduces: which collectives have one, its machine code, its values, its host program."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.target import Kernels
from dcompile.codegen.emit.triton import compile as triton_compile
from dcompile.codegen.emit.triton import one_shot_all_reduce, worker
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import as_index
from dcompile.ir.nodes import Collective, Extern, Program, View, Wait
from dcompile.machine_model import MAX_ONE_SHOT_BYTES
from dcompile.runtime.communication.peer_memory import one_shot
from dcompile.toolchain import triton_version
from tests import nursery
from tests.codegen.emit.triton.test_kernel import resources

LARGEST = MAX_ONE_SHOT_BYTES // 2
REDUCE = "_c10d_functional.all_reduce.default"


def summed(size=256, *, dtype="bfloat16", device="cuda", op="sum", part=None):
    """A program that sums its input over the ranks, in place."""
    buffer = Buffer("x", dtype, (size,), (1,), device=device)
    view = View("x", (part or size,), (1,))
    call = Extern(REDUCE, (view, op, "group"), (), ("x",), "alloc")
    start = Collective("all_reduce", "x", "own0", ("x",), call)
    return Program("summed", ("x",), (View("x", (size,), (1,)),), (buffer,), (start, Wait("x", ("x",), ())))


@pytest.mark.parametrize("how", [{}, {"size": LARGEST}, {"dtype": "float32", "size": 3}, {"dtype": "float16"}])
def test_small_sums_have_a_kernel(how):
    assert list(one_shot_all_reduce.sources(summed(**how))) == ["x"]


@pytest.mark.parametrize(
    "how",
    [{"size": LARGEST + 2}, {"size": 3}, {"dtype": "float64"}, {"dtype": "int32"}, {"op": "avg"}, {"part": 128}],
    ids=str,
)
def test_other_collectives_have_none(how):
    assert not one_shot_all_reduce.sources(summed(**how))


def test_a_size_that_only_a_run_tells_has_none():
    program = summed()
    assert not one_shot_all_reduce.sources(replace(program, buffers=(Buffer("x", "bfloat16", (as_index("s"),), (1,)),)))


def test_the_host_program_names_the_kernel_where_there_is_one():
    program = summed()
    kernels = one_shot_all_reduce.sources(program)
    (kernel,) = kernels.values()
    text = host_program.emit(program, Kernels((), {}, kernels))
    assert f"run.collective({REDUCE!r}, 'x', ({kernel.name!r}, {kernel.launches[0].function!r}))" in text
    assert f"run.collective({REDUCE!r}, 'x')" in host_program.emit(program, Kernels(()))


def test_run_time_and_kernel_agree_on_its_arguments():
    assert one_shot.BLOCK == one_shot_all_reduce.BLOCK
    assert len(one_shot_all_reduce.TYPES) == one_shot.OneShotLaunch.GRID


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
@pytest.mark.parametrize(("dtype", "arch"), [("bfloat16", 90), ("float32", 80)])
def test_words_of_64_bits_are_written_whole(dtype, arch, tmp_path, monkeypatch):
    source = one_shot_all_reduce.source(dtype)
    module = worker.load(source.name, source.text, arch, tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (launch,) = source.launches
    function = getattr(module, launch.function)
    made = worker.compile_function(function, list(launch.types), launch.warps, arch, dict(triton_compile.OPTIONS))
    used = resources(made.asm["cubin"], tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert ".b64" in made.asm["ptx"] and "ld.volatile.global" in made.asm["ptx"]


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
def test_ranks_get_the_same_sums_call_after_call():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [nursery.python(), "-m", "tests.codegen.emit.all_reduce_ranks"]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3 and not any(found.values()), found
