"""Runs single loops as compiled C++ on NumPy memory, for comparison with the interpreter."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch  # also for the OpenMP run time that kernels are linked with

from dcompile.codegen.emit.cpp.compile import build
from dcompile.codegen.emit.target import KernelSource
from dcompile.config import Config
from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.float8 import BYTES
from dcompile.ir.interpret import GARBAGE, from_bfloat16, interpret, to_bfloat16
from dcompile.ir.nodes import Loop, Program, View
from dcompile.ir.ops import DTYPES
from dcompile.runtime.cache.disk import KernelCache
from tests import nursery
from tests.codegen.emit import cpp_kernel
from tests.codegen.emit.cases import random_inputs

Test = TypeVar("Test", bound=Callable[..., Any])
NONE: Mapping[str, int] = MappingProxyType({})
UNWRITTEN = (77, -77)
"""Integers that nobody has written, in turns, so that they show in maxima as in minima: bytes of `GARBAGE` would be -1,
which programs say for "none"."""


@cache
def store() -> KernelCache:
    """One cache for all tests of a process, removed at its end."""
    directory = tempfile.mkdtemp(prefix="dcompile-test-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return KernelCache(Path(directory))


def raw(values: np.ndarray, dtype: str) -> np.ndarray:
    """As the bytes lie in memory."""
    return to_bfloat16(values) if dtype == "bfloat16" else np.ascontiguousarray(values)


def placed(buffer: Buffer, values: np.ndarray | None) -> np.ndarray:
    """Flat memory of a buffer, filled with values or with garbage; 64 elements of guard behind."""
    kind = np.dtype("uint16" if buffer.dtype == "bfloat16" else "uint8" if buffer.dtype in BYTES else buffer.dtype)
    flat = np.full((buffer.nbytes // ITEMSIZE[buffer.dtype] + 64) * kind.itemsize, GARBAGE, np.uint8).view(kind)
    if DTYPES[buffer.dtype] == "int":
        flat[:-64] = np.resize(UNWRITTEN, len(flat) - 64).astype(kind)
    if values is not None and buffer.nbytes:
        strides = tuple(s * kind.itemsize for s in buffer.strides)
        np.lib.stride_tricks.as_strided(flat, buffer.shape, strides)[...] = raw(values, buffer.dtype)
    return flat


def read(buffer: Buffer, view: View, flat: np.ndarray) -> np.ndarray:
    if 0 in view.shape:
        return np.zeros(view.shape, np.float32 if buffer.dtype == "bfloat16" else flat.dtype)
    strides = tuple(s * flat.itemsize for s in view.strides)
    out = np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, strides)
    return from_bfloat16(out) if buffer.dtype == "bfloat16" else out.copy()


def source_of(made: Program, again: frozenset[str] = frozenset(), without: Collection[str] = ()) -> KernelSource:
    """The kernel of a program of one loop, behind which the buffers `again` are read once more.

    `without`: decisions (rows of `NEST_PASSES`) that are left out.
    """
    (loop,) = made.steps
    assert isinstance(loop, Loop)
    return cpp_kernel.emit(loop, made.table, again, without)


def execute(made: Program, source: KernelSource, inputs: dict[str, np.ndarray], same: str = "") -> list[np.ndarray]:
    """Results; `same`, if given, are a result's and an input's name of one letter each that have one memory."""
    path = build([source], Config(), store()).libraries[source.name]
    memory = {b.name: placed(b, inputs.get(b.name)) for b in made.buffers}
    if same:
        memory[same[0]] = memory[same[1]]
    assert call(source, {source.name: getattr(ctypes.CDLL(str(path)), source.name)}, memory) == 0
    for name, flat in memory.items():
        assert (flat[-64:].view(np.uint8) == GARBAGE).all(), f"{name}: written past its end"
    return [read(made.table[view.buffer], view, memory[view.buffer]) for view in made.outputs]


def compiled(programs: list[Program]) -> dict[str, object]:
    """All kernels of some programs, built together."""
    return loaded([cpp_kernel.emit(step, p.table) for p in programs for step in p.steps if isinstance(step, Loop)])


def loaded(sources: Sequence[KernelSource]) -> dict[str, object]:
    """Kernels by name, built together."""
    libraries = build(sources, Config(), store()).libraries
    return {name: getattr(ctypes.CDLL(str(path)), name) for name, path in libraries.items()}


def together(kernels: Callable[..., Sequence[KernelSource]]) -> Callable[[Test], Test]:
    """Have all cases of a test built in one file, by a fixture: half of what most cost is the start of a compiler.

    `kernels` is given each case's parameters.
    """

    def mark(test: Test) -> Test:
        test.kernels = kernels  # type: ignore[attr-defined]
        return test

    return mark


def call(
    source: KernelSource, functions: dict[str, object], memory: dict[str, np.ndarray], sizes: Mapping[str, int] = NONE
) -> int:
    """Run one kernel; `sizes` says what the symbols are that it takes."""
    function = functions[source.name]
    function.restype = ctypes.c_long
    addresses = (ctypes.c_void_p(memory[name].ctypes.data) for name in source.arguments)
    return function(*addresses, *(ctypes.c_int64(sizes[name]) for name in source.sizes))


def run(program: Program, inputs: dict[str, np.ndarray], functions: dict[str, object] | None = None):
    """Outputs of a program of loops, by compiled kernels."""
    functions = functions or compiled([program])
    table = program.table
    memory = {b.name: placed(b, inputs.get(b.name)) for b in program.buffers}
    for step in program.steps:
        assert call(cpp_kernel.emit(step, table), functions, memory) == 0
    for name, flat in memory.items():
        assert (flat[-64:].view(np.uint8) == GARBAGE).all(), f"{name}: written past its end"
    return [read(table[view.buffer], view, memory[view.buffer]) for view in program.outputs]


def assert_threads_change_nothing(program: Program) -> None:
    """The first output is the same, to the bit, with one, two and three threads."""
    inputs, threads, results = random_inputs(program), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(program, inputs)[0])
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


def without_vectors(text: str) -> str:
    """The text of a kernel as it is compiled where the prelude defines no vectors."""
    return re.sub(r"#ifdef VECTORS(_ROUND|_FAR)?\n.*?#(else|endif)\n", "", text, flags=re.DOTALL)


def program_of(loop: Loop, buffers: dict[str, Buffer], inputs: list[str]) -> Program:
    """A program of one loop whose outputs are all it stores."""
    outputs = [View(b.name, b.shape, b.strides) for n, b in buffers.items() if n in loop.writes]
    return Program("one", tuple(inputs), tuple(outputs), tuple(buffers.values()), (loop,))


__all__ = ["call", "compiled", "interpret", "os", "program_of", "replace", "run", "together", "without_vectors"]


def interpreted_by(module: str) -> dict[str, str]:
    """What is wrong with each case of a module, from a process of its own in which Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command, root = [nursery.python(), "-m", module], Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found
