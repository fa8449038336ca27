"""Kernels that sum rows by group: their machine code, and how a host program starts them. Values: `test_kernel.py`."""

from __future__ import annotations

import re

import pytest
import torch

from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.target import Kernels
from dcompile.codegen.emit.triton import compile as triton_compile
from dcompile.codegen.emit.triton import segment_sum, worker
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.ir.verify import verify
from dcompile.toolchain import triton_version
from tests.codegen.emit import groups
from tests.codegen.emit.all_kernels import of_loops, sources_of
from tests.codegen.emit.triton.test_kernel import resources

SHAPES = {
    "bfloat16": ((8192,), 32000, 2048, torch.bfloat16),
    "float32": ((8, 1024), 32000, 1024, torch.float32),
    "neither rows nor columns in whole blocks": ((4095,), 151936, 896, torch.bfloat16),
}


def kernel(shape):
    program = groups.gradient(*shape)
    verify(program)
    (source,) = sources_of(segment_sum.sum_groups(Kernels(), program))
    return source


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
@pytest.mark.parametrize(("name", "arch"), [*((name, 90) for name in SHAPES), ("bfloat16", 80), ("bfloat16", 100)])
def test_rows_are_read_16_bytes_at_a_time_and_nothing_is_spilled(name, arch, tmp_path, monkeypatch):
    source = kernel(SHAPES[name])
    module = worker.load(source.name, source.text, arch, tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for launch in source.launches:
        function = getattr(module, launch.function)
        made = worker.compile_function(function, list(launch.types), launch.warps, arch, dict(triton_compile.OPTIONS))
        assert f".target sm_{arch}" in made.asm["ptx"]
        used = resources(made.asm["cubin"], tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 255
        rows = re.findall(r"ld\.global[.\w]*\.v4\.b32", made.asm["ptx"])
        assert len(rows) >= (8 if "rank" not in launch.function else 0)


def test_a_host_program_starts_them_with_the_loops_behind():
    program = plan_memory(groups.gradient((4, 128), 32000, 64))
    verify(program)
    text = host_program.emit(program, segment_sum.sum_groups(of_loops(program), program))
    assert text.count("(stream, ") == 1
    started = re.findall(r"'(dcompile_(?:rank|collect|join)|fill)_\w+'", text)
    assert started == ["dcompile_rank", "dcompile_collect", "dcompile_join", "fill"]
    assert "sum_groups" not in text
    compile(text, "host", "exec")


def test_tables_of_the_same_sizes_share_their_kernel():
    first, second = kernel(SHAPES["bfloat16"]), kernel(((16, 512), 128256, 2048, torch.bfloat16))
    assert (first.name, first.text) == (second.name, second.text)
