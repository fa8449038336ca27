"""Kernels that multiply and end in a loop: text, machine code, and how they are started. Values: `test_kernel.py`."""

from __future__ import annotations

import json
import re

import pytest

from dcompile.codegen.emit.host import program
from dcompile.codegen.emit.target import Kernels
from dcompile.codegen.emit.triton import compile as triton_compile
from dcompile.codegen.emit.triton import matmul_epilogue, worker
from dcompile.codegen.schedule.fusion import matmul_epilogue as fusion_matmul_epilogue
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.compiler.autotune import tiles
from dcompile.ir.nodes import Loop
from dcompile.ir.verify import verify
from dcompile.toolchain import triton_version
from tests.codegen.emit import products
from tests.codegen.emit.triton.test_kernel import PASSED, resources

SHAPES = {
    "residual": (products.residual, (8192, 2048), (2048, 2048), (8192, 2048)),
    "bias and relu": (products.linear_relu, (8192, 768), (3072, 768), (3072,)),
    "gradient of a weight": (products.weight, (8192, 768), (8192, 3072)),
    "sizes of no whole tiles": (products.residual, (8000, 1048), (1048, 776), (8000, 776)),
}
NEEDS_TRITON = pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")


def kernel(name, tile):
    (step,) = (planned := products.ended(products.program(*SHAPES[name]), tile)).steps
    return matmul_epilogue.emit(step, planned.table)


TEXT = """\
@triton.jit
def ENTRY(a0, a1, a2, a3):
    left = tl.make_tensor_descriptor(a0, [8192, 768], [768, 1], [128, 64])
    right = tl.make_tensor_descriptor(a1, [3072, 768], [768, 1], [256, 64])
    for tile in tl.range(tl.program_id(0), 768, 132, flatten=True):
        top = tile // 96 * 8
        y0 = (top + tile % 96 % 8) * 128
        x0 = tile % 96 // 8 * 256
        sums = tl.zeros([128, 256], tl.float32)
        for k in tl.range(0, 768, 64, num_stages=3):
            sums = tl.dot(left.load([y0, k]), right.load([x0, k]).T, sums)
        sums_0, sums_1 = tl.split(tl.permute(tl.reshape(sums, [128, 2, 128]), [0, 2, 1]))
        y = y0 + tl.arange(0, 128)[:, None]
        i0 = y
        x = x0 + tl.arange(0, 128)[None, :]
        j0 = x
        bias = tl.load(a2 + x).to(tl.float32)
        product = (sums_0 + bias).to(tl.bfloat16).to(tl.float32)
        t0 = product
        t1 = t0
        t2 = tl.full([], 0.0, tl.float32)
        t3 = max_(t1, t2)
        t4 = to_bfloat16(t3)
        tl.store(a3 + (j0 + i0 * 3072), t4.to(tl.bfloat16))
        x0 += 128
        x = x0 + tl.arange(0, 128)[None, :]
        j0 = x
        bias = tl.load(a2 + x).to(tl.float32)
        product = (sums_1 + bias).to(tl.bfloat16).to(tl.float32)
        t0 = product
        t1 = t0
        t2 = tl.full([], 0.0, tl.float32)
        t3 = max_(t1, t2)
        t4 = to_bfloat16(t3)
        tl.store(a3 + (j0 + i0 * 3072), t4.to(tl.bfloat16))
"""


def test_text():
    source = kernel("bias and relu", tiles(90, 132)[0])
    (launch,) = source.launches
    assert source.text.split("\n\n\n")[-1].replace(launch.function, "ENTRY") == TEXT
    assert (launch.grid, launch.warps, source.arguments) == (132, 8, ("x_1", "w_1", "b_1", "relu"))


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("name", "arch", "number"),
    [
        *(("residual", arch, number) for arch in (80, 90) for number in range(len(tiles(arch, 132)))),
        *((name, 90, 0) for name in SHAPES if name != "residual"),
        *(("sizes of no whole tiles", arch, number) for arch, number in ((80, 0), (90, 3), (100, 0), (100, 3))),
    ],
)
def test_tensor_cores_multiply_and_nothing_is_spilled(name, arch, number, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    tile = tiles(arch, 132)[number]
    source = kernel(name, tile)
    (launch,) = source.launches
    module = worker.load(source.name, source.text, arch, tmp_path)
    function = getattr(module, launch.function)
    made = worker.compile_function(function, list(launch.types), launch.warps, arch, dict(triton_compile.OPTIONS))
    ptx = made.asm["ptx"]
    assert f".target sm_{arch}" in ptx
    assert {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch] in ptx
    assert ("cp.async.bulk.tensor" in ptx) == tile.descriptors
    assert re.search(r"st\.global[.\w]*\.v4", ptx), "results are written 16 bytes at a time"
    used = resources(made.asm["cubin"], tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert made.metadata.shared <= {80: 99, 90: 227, 100: 227}[arch] << 10
    assert made.metadata.global_scratch_size == (256 if tile.descriptors else 0)
    head = ptx[ptx.index(f".entry {made.metadata.name}") :].split("{")[0]
    taken = [*(PASSED["*"] for _ in launch.types), "u64", "u64"]  # by Triton 3.6 and 3.7 alike
    assert re.findall(r"\.param \.(\w+)", head) == taken


@NEEDS_TRITON
def test_an_archive_says_how_much_memory_its_programs_need(tmp_path):
    for tile, scratch in zip(tiles(90, 132)[::3], (256, 0), strict=True):
        source = kernel("residual", tile)
        functions = [{"name": x.function, "warps": x.warps, "types": list(x.types)} for x in source.launches]
        job = {"name": source.name, "text": source.text, "functions": functions}
        archive = worker.compile_kernel(job, 90, dict(triton_compile.OPTIONS), tmp_path)
        (head,) = json.loads(archive.partition(b"\n")[0])
        assert head["scratch"] == scratch


def test_a_host_program_starts_it_in_place_of_both(monkeypatch):
    monkeypatch.setattr(fusion_matmul_epilogue, "MIN_EPILOGUE_FLOPS", 0)

    def layers(x, w, v):
        x = (x @ w).relu() * 2
        return (x @ v).relu() * 2

    before = products.program(layers, (64, 96), (96, 64), (64, 96))
    planned = plan_memory(products.ended(before, products.HALVED))
    verify(planned)
    loops = [step for step in planned.steps if isinstance(step, Loop)]
    kernels = Kernels(tuple(matmul_epilogue.emit(loop, planned.table) for loop in loops))
    text = program.emit(planned, kernels)
    assert text.count("(stream, ") == 1 and "torch.mm" not in text
    assert len(re.findall(r"'dcompile_product_\w+', 3, \(", text)) == 2
    assert "realigned" in text, "factors begin at whole 16 bytes"
    compile(text, "host", "exec")


def test_kernels_that_differ_in_names_are_one():
    tile = tiles(90, 132)[0]
    other = products.ended(products.program(lambda a, b, c: c + a @ b, *SHAPES["residual"][1:]), tile)
    assert matmul_epilogue.emit(other.steps[0], other.table) == kernel("residual", tile)
