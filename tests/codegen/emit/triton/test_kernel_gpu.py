"""Triton kernels on a GPU, against the interpreter of programs. `pytest -m gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcompile.ir.interpret import interpret
from dcompile.ir.symbols import specialise
from tests.codegen.emit import cases, loops
from tests.ir.fuzz import random_program

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHARED = {
    "sum of a million": loops.row_sum(1, 1 << 20),
    "largest of a prime number": loops.row_sum(2, 100_003, "max"),
    "softmax of two rows": loops.softmax(2, 65536),
    "argmax of one row": loops.argmax(1, 50_001),
    "norm gradients": loops.rms_norm_backward(5000, 64),
    "column sums": loops.rms_norm_backward(3000, 1024, "bfloat16"),
}


@pytest.fixture(scope="module")
def results():
    """What the interpreter and the GPU make of each program; kernels are built together."""
    from tests.codegen.emit import on_gpu

    made = {name: (program, cases.random_inputs(program)) for name, program in {**cases.HAND, **SHARED}.items()}
    made |= {name: (p, cases.operands(p, name.split()[0])) for name, p in cases.operations().items()}
    made |= {f"cast {a} {b}": (cases.cast(a, b), cases.cast_inputs(a, b)) for a, b in cases.CASTS}
    made |= {f"exact {seed}": random_program(seed, 8, exact=True) for seed in range(40)}
    made |= {f"random {seed}": random_program(seed, 8) for seed in range(500, 530)}
    numbers = {f"symbolic {name}": sizes for name, (_, sizes) in cases.SYMBOLIC.items()}
    for name, (program, sizes) in cases.SYMBOLIC.items():
        made[f"symbolic {name}"] = program, cases.random_inputs(specialise(program, sizes))
    there = {name: on_gpu.for_gpu(program) for name, (program, _) in made.items()}
    libraries = on_gpu.compiled(list(there.values()))
    found = {}
    for name, (program, inputs) in made.items():
        sizes = numbers.get(name, {})
        program = specialise(program, sizes)
        try:
            found[name] = program, interpret(program, inputs), on_gpu.run(there[name], inputs, libraries, sizes)
        except RuntimeError as error:
            found[name] = error
    return found


def wrong(results, name: str, tolerance: float, atol: float = 1e-5) -> str:
    if isinstance(results[name], Exception):
        return f"{name}: {results[name]}"
    program, want, got = results[name]
    for view, a, b in zip(program.outputs, want, got, strict=True):
        wide = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.allclose(*wide, rtol=tolerance, atol=atol if tolerance else 0, equal_nan=True):
            worst = np.nanmax(np.abs(wide[0] - wide[1]))
            return f"{name}: {view.buffer} of {wide[0].shape} differs by up to {worst}"
    return ""


@pytest.mark.parametrize("name", [*cases.HAND, *SHARED])
def test_hand_built_loops(name, results):
    assert not wrong(results, name, 1.6e-2 if "16" in name else 2e-5, 1e-2 if name in SHARED else 1e-5)


@pytest.mark.parametrize("name", cases.SYMBOLIC)
def test_loops_with_symbolic_sizes(name, results):
    assert not wrong(results, f"symbolic {name}", 1.6e-2 if "16" in name else 2e-5)


@pytest.mark.parametrize("kind", ["exact", "random"])
def test_random_programs(kind, results):
    names = [name for name in results if name.split()[0] == kind]
    assert not [found for name in names if (found := wrong(results, name, 2e-2 if kind == "random" else 0))]


def test_operations(results):
    found = [text for name in cases.operations() if (text := wrong(results, name, 1e-5, 2e-6))]
    assert not found


def test_casts(results):
    assert not [text for a, b in cases.CASTS if (text := wrong(results, f"cast {a} {b}", 0))]


def test_the_same_run_gives_the_same_bits():
    from tests.codegen.emit import on_gpu

    program = loops.rms_norm_backward(5000, 64)
    there, inputs = on_gpu.for_gpu(program), cases.random_inputs(program)
    libraries = on_gpu.compiled([there])
    first, second = (on_gpu.run(there, inputs, libraries) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
