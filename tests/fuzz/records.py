"""Programs of loops and NumPy arrays as JSON, bit for bit, in their own text: seeds may come to mean others."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan
from typing import Any

import numpy as np

import dcompile.ir.buffers
import dcompile.ir.index
import dcompile.ir.nodes
from dcompile.ir.nodes import Program

Inputs = Mapping[str, np.ndarray]
Case = tuple[Program, Inputs]
Record = dict[str, Any]

NAMES = {**vars(dcompile.ir.index), **vars(dcompile.ir.buffers), **vars(dcompile.ir.nodes), "inf": inf, "nan": nan}
"""What the repr of a program is made of."""


def of_case(case: Case) -> Record:
    program, inputs = case
    return {"program": repr(program), "inputs": {name: of_array(array) for name, array in inputs.items()}}


def case_of(record: Record) -> Case:
    inputs = {name: array_of(saved) for name, saved in record["inputs"].items()}
    return eval(record["program"], dict(NAMES)), inputs


def of_array(array: np.ndarray) -> list[Any]:
    return [str(array.dtype), list(array.shape), array.ravel().tolist()]


def array_of(saved: list[Any]) -> np.ndarray:
    dtype, shape, values = saved
    return np.asarray(values, dtype).reshape(shape)
