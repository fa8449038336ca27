"""The kernel of small all-reduces: which collectives have one, its machine code, its values, its host program."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.target import Kernels
from dcompile.codegen.emit.triton import compile as triton_compile
from dcompile.codegen.emit.triton import one_shot_all_reduce, worker
from dcompile.codegen.emit.triton.library import START_NEXT_FIRST, WAIT_FIRST
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import as_index
from dcompile.ir.nodes import Collective, Extern, Program, View, Wait
from dcompile.machine_model import MAX_ONE_SHOT_BYTES
from dcompile.runtime.communication.peer_memory import one_shot
from dcompile.runtime.measure.instrumentation import instrument
from dcompile.toolchain import triton_version
from tests import nursery
from tests.codegen.emit import reduced_rows
from tests.codegen.emit.all_kernels import kernels_of
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


def small_sums(program):
    return one_shot_all_reduce.sum_in_one_kernel(Kernels(), program).all_reduces


@pytest.mark.parametrize("how", [{}, {"size": LARGEST}, {"dtype": "float32", "size": 3}, {"dtype": "float16"}])
def test_small_sums_have_a_kernel(how):
    assert list(small_sums(summed(**how))) == ["x"]


@pytest.mark.parametrize(
    "how",
    [{"size": LARGEST + 2}, {"size": 3}, {"dtype": "float64"}, {"dtype": "int32"}, {"op": "avg"}, {"part": 128}],
    ids=str,
)
def test_other_collectives_have_none(how):
    assert not small_sums(summed(**how))


def test_a_size_that_only_a_run_tells_has_none():
    program = summed()
    buffers = (Buffer("x", "bfloat16", (as_index("s"),), (1,), "cuda"),)
    assert not small_sums(replace(program, buffers=buffers))


def test_the_host_program_names_the_kernel_where_there_is_one():
    program = summed()
    kernels = small_sums(program)
    source = kernels["x"].source
    text = host_program.emit(program, Kernels((), {}, kernels))
    described = f"({source.name!r}, {source.launches[0].function!r}, {one_shot_all_reduce.BLOCK}, False, 0, ())"
    assert f"run.collective({REDUCE!r}, 'x', {described})" in text
    assert f"run.collective({REDUCE!r}, 'x')" in host_program.emit(program, Kernels(()))


def test_run_time_and_kernel_agree_on_its_arguments():
    assert len(one_shot_all_reduce.TYPES) == len(one_shot_all_reduce.NAMES) == one_shot.EXCHANGED
    assert one_shot_all_reduce.TYPES[0].endswith(f":{one_shot.ALIGNMENT}")


def compiled(source, arch, folder, monkeypatch):
    """Its machine code, after checks that no value is in local memory."""
    module = worker.load(source.name, source.text, arch, folder)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    (launch,) = source.launches
    function = getattr(module, launch.function)
    made = worker.compile_function(function, list(launch.types), launch.warps, arch, dict(triton_compile.OPTIONS))
    used = resources(made.asm["cubin"], folder)
    assert used["STACK"] == used["LOCAL"] == 0
    return made.asm["ptx"]


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
@pytest.mark.parametrize(("dtype", "arch"), [("bfloat16", 90), ("float32", 80)])
def test_words_of_64_bits_are_written_whole(dtype, arch, tmp_path, monkeypatch):
    ptx = compiled(one_shot_all_reduce.source(dtype), arch, tmp_path, monkeypatch)
    assert ".b64" in ptx and "ld.volatile.global" in ptx


# --- with the loop behind it ---


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
def test_a_row_is_exchanged_in_wide_accesses(tmp_path, monkeypatch):
    kernel = kernels_of(reduced_rows.program("rms", 32, 4096)).all_reduces["p"]
    assert (kernel.words, kernel.source.launches[0].warps) == (2048, 16)
    ptx = compiled(kernel.source, 90, tmp_path, monkeypatch)
    assert "st.global.v2.b64" in ptx and "ld.volatile.global.v2.b64" in ptx


def test_the_kernel_lets_its_successor_start_and_reads_weights_early():
    text = kernels_of(reduced_rows.program("rms", 1, 4096)).all_reduces["p"].source.text
    assert START_NEXT_FIRST in text
    weight, waits = re.search(r"tl.load\(a0 \+ \(j0\)\)", text), text.index("    after_others_()")
    assert weight is not None and weight.start() < waits
    trained = kernels_of(reduced_rows.program("rms", 1, 4096), "forward").all_reduces["p"].source.text
    assert WAIT_FIRST in trained
    sent, loaded, looked = (trained.index(text) for text in ("tl.store(inbox", "tl.load(a1", "volatile=True"))
    assert sent < loaded < looked  # what else the row reads arrives while the words do


def test_the_first_kernel_of_a_program_waits_before_others_start():
    program = reduced_rows.program("rms", 1, 4096)
    _, *steps = program.steps
    text = kernels_of(replace(program, inputs=("p", "r", "w"), steps=tuple(steps))).all_reduces["p"].source.text
    assert WAIT_FIRST in text and "tl.store(words" in text  # the caller sees its argument changed


def test_the_loop_stays_for_ranks_that_use_the_groups_own_collective():
    program = reduced_rows.program("rms", 1, 4096)
    kernels = kernels_of(program)
    assert kernels.epilogues == {1: "p"} and {*kernels.all_reduces} == {"p"}
    lines = [line.strip() for line in host_program.emit(program, kernels).splitlines()]
    start = next(n for n, line in enumerate(lines) if "given=" in line)
    exchange = lines[start].split("(")[0]
    assert lines[start + 1] == f"{exchange}.wait()" and len(kernels.calls) == 2
    assert lines[start + 2].startswith(f"{exchange}.run_epilogue(_launch")
    _, statements = instrument(host_program.emit(program, kernels))
    assert [(found.name, found.starts, found.waits) for found in statements] == [
        ("1 kernel", "", ""), (REDUCE, "p", ""), (REDUCE, "", "p"), ("1 kernel", "", "")]  # fmt: skip
    made = next(line for line in lines if line.startswith(f"{exchange} = run.collective("))
    assert f"{kernels.all_reduces['p'].words}, True, " in made


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
def test_ranks_get_the_same_sums_call_after_call():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [nursery.python(), "-m", "tests.codegen.emit.all_reduce_ranks"]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6 and not any(found.values()), found
