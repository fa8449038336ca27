"""Every operation of the table at the ends of each dtype is eager's, in kernels and by its reference meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcompile.ir.interpret import interpret
from tests.codegen.emit import extremes
from tests.codegen.emit.harness import compiled, run

CASES = extremes.operations((*extremes.INTEGERS, *extremes.FLOATS))


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    return compiled([extremes.program(*case) for case in CASES])


@pytest.mark.parametrize("dtype", (*extremes.INTEGERS, *extremes.FLOATS))
def test_kernels_give_what_eager_gives(dtype: str, kernels: dict[str, Any]) -> None:
    wrong = {}
    for op, kind in CASES:
        if kind == dtype:
            (got,) = run(extremes.program(op, dtype), extremes.operands(op, dtype), kernels)
            wrong[op] = extremes.difference(op, dtype, got)
    assert not {op: text for op, text in wrong.items() if text}


@pytest.mark.parametrize("dtype", extremes.INTEGERS)
def test_the_reference_meaning_is_eagers(dtype: str) -> None:
    wrong = {}
    for op, kind in CASES:
        if kind == dtype:
            with np.errstate(all="ignore"):
                (got,) = interpret(extremes.program(op, dtype), extremes.operands(op, dtype))
            wrong[op] = extremes.difference(op, dtype, np.asarray(got))
    assert not {op: text for op, text in wrong.items() if text}
