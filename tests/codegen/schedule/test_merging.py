"""What was merged or written for one loop serves all that differ from it in names alone, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcompile.codegen.schedule.fusion import fuse as fusing
from dcompile.codegen.schedule.fusion.merge import LoopMerger, merge
from dcompile.ir.canonical_names import rename_buffers
from dcompile.ir.nodes import Loop, Program
from tests.codegen.emit import cpp_kernel
from tests.ir.fuzz import random_program
from tests.ir.test_canonical_names import scaled


def test_pairs_merge_as_by_themselves_whatever_was_merged_before():
    merging = LoopMerger()
    for x, y, z in (("x", "y", "z"), ("y", "z", "x"), ("p", "q", "p"), ("x", "y", "y")):
        for by in (0.0, -0.0, 2.0):
            first, second = scaled(x, y, 2.0, f"{x} first"), scaled(y, z, by, f"{y} second")
            assert repr(merging(first, second)) == repr(merge(first, second)), (x, y, z, by)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_fuse_and_are_written_the_same(seed, monkeypatch):
    program, _ = random_program(seed)
    fused = fusing.fuse(program)
    monkeypatch.setattr(fusing, "LoopMerger", lambda: merge)
    assert repr(fused) == repr(fusing.fuse(program))
    twice = doubled(fused)
    alone = [cpp_kernel.emit(step, twice.table) for step in twice.steps if isinstance(step, Loop)]
    together = cpp_kernel.emit_all(twice).calls
    assert [(k, k.arguments, k.sizes, k.origin) for k in together] == [
        (k, k.arguments, k.sizes, k.origin) for k in alone
    ]


def doubled(program: Program) -> Program:
    """Each loop once more, on other buffers."""
    other = {buffer.name: f"{buffer.name}_2" for buffer in program.buffers}
    steps = [step for step in program.steps if isinstance(step, Loop)]
    copies = [replace(rename_buffers(step, other), name=f"{step.name}_2", origin=("again",)) for step in steps]
    buffers = (*program.buffers, *(replace(buffer, name=other[buffer.name]) for buffer in program.buffers))
    return replace(program, steps=(*steps, *copies), buffers=buffers)
