"""Kernels of few rows times a matrix: text, tiles, and machine code. Values: `test_kernel.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.nn.functional as F

from dcompile.codegen.emit.triton import compile as triton_compile
from dcompile.codegen.emit.triton import kernel as triton_kernel
from dcompile.codegen.emit.triton import worker
from dcompile.codegen.nest.gpu_tiling import make_plan
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.ir.nodes import Loop, Tile
from dcompile.toolchain import triton_version
from tests.codegen.emit import products, skinny
from tests.codegen.emit.all_kernels import kernels_of
from tests.codegen.emit.triton.test_kernel import resources

NEEDS_TRITON = pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
GATED = (skinny.gated, (8, 4096), (14336, 4096), (14336, 4096))
RESIDUAL = (skinny.residual, (16, 14336), (4096, 14336), (16, 4096))


def emitted(case, tile=None, constant=None):
    (step,) = (made := products.program(*case)).steps
    return triton_kernel.emit(replace(step, tile=tile), made.table, constant)


TEXT = """\
@triton.jit
def ENTRY(a0, a1, a2, a3):
    x = tl.program_id(0) * 64 + tl.arange(0, 64)[:, None]
    i1 = x
    y = tl.arange(0, 8)[None, :]
    i0 = y
    prefetch_(a0 + (i1 * 4096), 2048, x >= 0)
    prefetch_(a1 + (i1 * 4096), 2048, x >= 0)
    after_others_()
    sums0 = tl.zeros([64, 8], tl.float32)
    sums1 = tl.zeros([64, 8], tl.float32)
    for k in tl.range(0, 4096, 64, num_stages=5):
        ka = k + tl.arange(0, 64)[None, :]
        kd = k + tl.arange(0, 64)[:, None]
        left0 = tl.load(a2 + (kd + i0 * 4096))
        right0 = tl.load(a0 + (ka + i1 * 4096))
        sums0 = tl.dot(right0, left0, sums0)
        right1 = tl.load(a1 + (ka + i1 * 4096))
        sums1 = tl.dot(right1, left0, sums1)
    t0 = sums0
"""


def test_text():
    source = emitted(GATED, constant=frozenset(("gate_1", "up_1")))
    (launch,) = source.launches
    body = source.text.split("\n\n\n")[-1].replace(launch.function, "ENTRY")
    assert body.startswith(TEXT)
    assert source.arguments == ("gate_1", "up_1", "x_1", "mul")
    assert (launch.grid, launch.warps) == (224, 4)


def test_kernels_that_start_in_turn_ask_for_nothing_early():
    text = emitted(GATED).text
    assert "prefetch_" not in text and "after_others_" not in text


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "tile"),
    [
        (2, 128256, 4096, Tile(8, 64, 128, 4, 5)),
        (8, 4096, 14336, Tile(8, 32, 128, 4, 8)),
        (16, 1024, 4096, Tile(16, 16, 128, 4, 8)),
        (9, 4096, 4160, Tile(16, 32, 64, 4, 8)),
    ],
)
def test_a_tile_leaves_work_for_every_multiprocessor(rows, columns, depth, tile):
    (step,) = products.program(skinny.plain, (rows, depth), (columns, depth)).steps
    assert make_plan(step).skinny[1] == tile


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("case", "arch", "tile"),
    [
        (GATED, 90, None),
        (RESIDUAL, 80, None),
        pytest.param(GATED, 80, None, marks=pytest.mark.full),
        (RESIDUAL, 90, Tile(16, 64, 64, 4, 6)),
        pytest.param(RESIDUAL, 100, None, marks=pytest.mark.full),
    ],
)
def test_a_matrix_is_streamed_through_shared_memory_and_nothing_is_spilled(case, arch, tile, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    source = emitted(case, tile, frozenset(("gate_1", "up_1", "w_1")))
    (launch,) = source.launches
    module = worker.load(source.name, source.text, arch, tmp_path)
    function = getattr(module, launch.function)
    made = worker.compile_function(function, list(launch.types), launch.warps, arch, dict(triton_compile.OPTIONS))
    ptx = made.asm["ptx"]
    assert f".target sm_{arch}" in ptx
    assert ptx.count("cp.async.cg.shared.global") >= 8, "16 bytes at a time"
    assert "mma" in ptx
    early = ptx.index("cp.async.bulk.prefetch.L2") < ptx.index("griddepcontrol.wait") if arch >= 90 else True
    assert early and ("prefetch" in ptx) == (arch >= 90)
    used = resources(made.asm["cubin"], tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert made.metadata.shared <= 99 << 10, "GPUs of compute capability 8.6 have no more"


def projections(x, q, k, v):
    """Of a query, and of a key and a value with fewer heads."""
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def test_projections_of_the_same_rows_share_a_launch():
    made = plan_memory(products.program(projections, (8, 512), (1024, 512), (512, 512), (512, 512)))
    kernels = kernels_of(made)
    loops = [step for step in made.steps if isinstance(step, Loop)]
    assert len(loops) == len(made.steps) == 2, "key and value are one loop"
    assert [launch.grid for call in kernels.calls for launch in call.launches] == [0, 64 + 32]
    assert kernels.calls[-1].text.count("tl.dot(") == 3
    assert kernels.calls[-1].arguments.count("x_1") == 1, "the rows are one argument"
