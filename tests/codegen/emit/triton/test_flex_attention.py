"""FlexAttention's kernels: results in Triton's interpreter against float64, and machine code for each kind of GPU."""

from __future__ import annotations

import re

import pytest
import torch

from dcompile.codegen.emit.target import Kernels
from dcompile.codegen.emit.triton import flex_attention, worker
from dcompile.codegen.emit.triton.compile import OPTIONS
from dcompile.ir.attention import FLEX, FLEX_BACKWARD
from dcompile.ir.nodes import Extern
from dcompile.ir.parse import parse
from dcompile.ir.text import show
from dcompile.ir.verify import verify
from dcompile.toolchain import triton_version
from tests.codegen.emit import flex, harness
from tests.codegen.emit.all_kernels import sources_of
from tests.codegen.emit.triton.test_kernel import resources

with_triton = pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that a program may have; 99 KiB on GPUs of compute capabilities 8.6, 8.9 and 12.0."""

MAX_SPILLED_BYTES = {80: 64, 90: 288, 100: 288}
"""Registers of a thread in memory: on an H100, tiles of heads of 256 were fastest with that."""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What is wrong with each case, from a process in which Triton interprets."""
    return harness.interpreted_by("tests.codegen.emit.interpreted_flex")


@with_triton
@pytest.mark.parametrize("name", flex.CASES)
def test_results_and_gradients_are_eager_maths(name, interpreted):
    assert interpreted[name] == ""


def calls(case: flex.Case):
    lowered, _ = case.lowered()
    assert lowered.declined == ()
    verify(lowered.program)
    assert parse(show(lowered.program)) == lowered.program
    found = [step.op for step in lowered.program.steps if isinstance(step, Extern)]
    assert found == [FLEX, FLEX_BACKWARD]
    return lowered.program


def kernels_of(program, arch=None):
    """The kernels of its calls."""
    return sources_of(flex_attention.emit_flex_attention(Kernels(), program, arch))


@with_triton
@pytest.mark.parametrize(
    ("width", "arch"), [(64, 90), (128, 90), (256, 90), (64, 80), (128, 80), (256, 80), (128, 100)]
)
def test_every_gpu_has_machine_code_that_fits_it(width, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    case = flex.Case(
        flex.window, width=width, value_width=width, queries=512, keys=512, block=128, dtype=torch.bfloat16
    )
    for source in kernels_of(calls(case), arch):
        module = worker.load(source.name, source.text, arch, tmp_path)
        for launch in source.launches:
            function = getattr(module, launch.function)
            made = worker.compile_function(function, list(launch.types), launch.warps, arch, dict(OPTIONS))
            assert f".target sm_{arch}" in made.asm["ptx"]
            assert made.metadata.shared <= SHARED_BYTES[arch]
            used = resources(made.asm["cubin"], tmp_path)
            assert used["STACK"] <= MAX_SPILLED_BYTES[arch], (
                f"{launch.function} keeps {used['STACK']} bytes of each thread in memory"
            )


@with_triton
@pytest.mark.parametrize(("name", "arch"), [("trained biases and a factor", 90), ("trained rows and columns", 80)])
def test_additions_in_memory_have_machine_code(name, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    _, source = kernels_of(calls(flex.CASES[name]), arch)
    module = worker.load(source.name, source.text, arch, tmp_path)
    for launch in source.launches:
        function = getattr(module, launch.function)
        made = worker.compile_function(function, list(launch.types), launch.warps, arch, dict(OPTIONS))
        assert re.search(r"\b(red|atom)\.", made.asm["ptx"]) is not None or "_queries_" not in launch.function


def test_layers_share_their_kernels():
    texts = [[source.name for source in kernels_of(calls(flex.Case()))] for _ in range(2)]
    assert texts[0] == texts[1] and len({*texts[0]}) == 2


def test_rows_are_addressed_in_64_bits_where_a_head_may_be_that_long():
    long = "m0.to(tl.int64) * "
    assert all(long not in source.text for source in kernels_of(calls(flex.Case())))
    symbolic = calls(flex.CASES["symbolic sizes of documents"])
    assert all(long in source.text for source in kernels_of(symbolic))
    text = show(calls(flex.Case())).replace("96", str(1 << 26))  # of positions, and of strides made of them
    assert all(long in source.text for source in kernels_of(parse(text)))


def test_functions_are_applied_to_the_blocks_that_need_them():
    """The mask's function is in the loop over partial blocks alone, and what heads have in common before it."""
    forward, _ = kernels_of(calls(flex.CASES["capped with slopes"]))
    text = forward.text.partition("_forward_")[2]
    before, partial, whole = text.split("for step in ")
    assert (before.count(" >= "), partial.count(" >= "), whole.count(" >= ")) == (0, 1, 0)
    assert "tl.load(a3 + " in before and partial.count("tanh") == whole.count("tanh") == 1
