"""Gradients of embeddings on a GPU: which way is taken, and that groups of rows come to what eager computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcompile.codegen.lower.rules import scatter
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Extern
from dcompile.ir.verify import verify
from tests.codegen.emit import groups


def calls(program):
    return [step.op for step in program.steps if isinstance(step, Extern)]


@pytest.mark.parametrize("name", [name for name in groups.CASES if "outside" not in name])
def test_sums_of_groups_are_eagers_gradient(name):
    program, inputs = groups.case(name)
    verify(program)
    assert calls(program) == [scatter.GROUPED]
    _, rows, _, dtype, _, padding = groups.CASES[name]
    (found,) = interpret(program, inputs, groups.MEANINGS)
    values, index = (torch.from_numpy(np.asarray(array)) for array in inputs.values())
    wanted = torch.ops.aten.embedding_dense_backward(values.double(), index, rows, padding, False)
    loose = {"bfloat16": 2**-8, "float16": 2**-11}.get(dtype, 1e-6)
    torch.testing.assert_close(torch.from_numpy(np.asarray(found, np.float64)), wanted, rtol=loose, atol=loose)


def test_indices_outside_of_the_table_add_nothing():
    program, inputs = groups.case("float32 different 5x8 of 11")
    values, index = program.inputs
    outside = np.where(inputs[index] == 3, 11, np.where(inputs[index] == 4, -1, inputs[index]))
    (found,) = interpret(program, {values: inputs[values], index: outside}, groups.MEANINGS)
    (usual,) = interpret(program, inputs, groups.MEANINGS)
    usual[3:5] = 0
    np.testing.assert_array_equal(found, usual)


@pytest.mark.parametrize("deterministic", [False, True])
def test_which_way(deterministic):
    def way(count, rows, width):
        return calls(groups.gradient((count,), rows, width, deterministic=deterministic))

    assert way(20, 7, 8) == []  # each row looks at all indices
    assert way(8192, 32000, 2048) == way(4096, 151936, 896) == [scatter.GROUPED]
    many = way(65536, 32000, 64)
    assert many == (["aten.embedding_dense_backward.default"] if deterministic else [])
