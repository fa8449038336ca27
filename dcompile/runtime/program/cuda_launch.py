"""Launch Triton's kernels without Triton: the CUDA driver loads cubins, and one call launches several kernels.

A launch table lists functions, grids and addresses. Addresses that are known when the host program prepares itself are
stored once. Other addresses, sizes and grids are filled in at each call. `LAUNCHER` is the C function that walks over
the table.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dcompile.compat.tensors import raw_stream
from dcompile.errors import BuildError
from dcompile.runtime.program.argument_table import ArgumentTable, address_of, bound

LAUNCHER = "gpu_launch"
"""Name of the C source in the cache; the host's compiler builds it once."""
METHOD = "launch_from_python"
"""`PyMethodDef` of the launcher."""
LAUNCHER_TEXT = """\
struct Kernel { void* function; u32 grid, threads, shared, count, early, padding; };
struct Attribute { u32 id, padding; int32 value[16]; };  // CUlaunchAttribute
struct Config { u32 grid[3], block[3], shared; void* stream; Attribute* attributes; u32 count; };  // CUlaunchConfig
typedef int (*Start)(const Config*, void*, void**, void**);
extern "C" int64 gpu_launch(Start start, void* stream, const Kernel* kernels, int64 count, void** arguments) {
  Attribute overlapping = {6, 0, {1}};  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
  Config config = {{1, 1, 1}, {1, 1, 1}, 0, stream, &overlapping, 0};
  for (int64 n = 0; n < count; n++) {
    const Kernel* k = kernels + n;
    config.grid[0] = k->grid;
    config.block[0] = k->threads;
    config.shared = k->shared;
    config.count = k->early;  // attributes: it starts while the kernel before it ends, and waits by itself
    const int failed = k->grid ? start(&config, k->function, arguments, 0) : 0;
    if (failed) return (n << 32) | failed;
    arguments += k->count;
  }
  return 0;
}
/* the table: how much is given, kernels, the driver's function, grids that are given; what is given and Triton's two
   scratch arguments; such grids (kernel, place); kernels; where arguments are */
static PyObject* launch_table(PyObject* table, PyObject* const* given, int64 count) {
  u64* const words = (u64*)PyLong_AsUnsignedLongLongMask(table);
  const int64 slots = words[0], kernels = words[1];
  const u64 stream = count ? PyLong_AsUnsignedLongLongMask(given[0]) : 0;
  if (!take_given(words + 4, given + 1, count - 1, slots)) return 0;
  const u64* const grids = words + 4 + slots + 2;
  Kernel* const first = (Kernel*)(grids + 2 * words[3]);
  for (u64 n = 0; n < words[3]; n++) first[grids[2 * n]].grid = words[4 + grids[2 * n + 1]];
  void* const lock = PyEval_SaveThread();
  const int64 failed = gpu_launch((Start)words[2], (void*)stream, first, kernels, (void**)(first + kernels));
  PyEval_RestoreThread(lock);
  return failed ? PyObject_CallMethod(table, "failed", "L", failed) : PyLong_FromLongLong(0);
}
extern "C" Method launch_from_python = {"launch", (void*)launch_table, FASTCALL, 0};
"""
SHARED_LIMIT = 48 << 10
"""Bytes of dynamic shared memory that a kernel may use without an attribute."""
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BuildError(f"dcompile: cannot load the CUDA driver: {error}") from error


_BOUND = threading.local()


def bind(device: int) -> None:
    """Make a device's primary context current on this thread, unless one is current already.

    PyTorch sets one only when a thread uses CUDA through it. On a thread of autograd's, a launch of ours may come
    first.
    """
    if getattr(_BOUND, "yes", False):
        return
    driver, context, number = _driver(), ctypes.c_void_p(), ctypes.c_int()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "asking for the current context")
    if not context.value:
        _check(driver.cuDeviceGet(ctypes.byref(number), device), f"looking for GPU {device}")
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), f"the context of GPU {device}")
        _check(driver.cuCtxSetCurrent(context), f"working on GPU {device}")
    _BOUND.yes = True


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"unknown error").decode()
        raise RuntimeError(f"dcompile: {what} failed: {said} (CUDA error {code})")


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """One function of an archive of cubins."""

    entry: str
    shared: int
    """Bytes of shared memory."""
    warps: int
    waits: bool
    """Whether it waits for the kernel before it (programmatic dependent launch)."""
    scratch: int
    """Bytes of private memory to which each program writes descriptors."""
    cubin: bytes


@cache
def read_archive(path: Path) -> dict[str, KernelFunction]:
    """Functions of an archive, by name."""
    head, _, rest = path.read_bytes().partition(b"\n")
    found: dict[str, KernelFunction] = {}
    at = 0
    for item in json.loads(head):
        cubin = rest[at : at + item["size"]]
        known = {name: item[name] for name in ("entry", "shared", "warps", "waits", "scratch")}
        found[item["function"]] = KernelFunction(**known, cubin=cubin)
        at += item["size"]
    return found


@cache
def _function(path: Path, name: str, device: int) -> int:
    """Load the CUfunction on a device and make its context current."""
    bind(device)
    code = read_archive(path)[name]
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), code.cubin), f"loading {path}")
    _check(
        driver.cuModuleGetFunction(ctypes.byref(function), module, code.entry.encode()),
        f"finding {code.entry} in {path}",
    )
    if code.shared > SHARED_LIMIT:
        set_to = driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, code.shared)
        _check(set_to, f"{code.shared} bytes of shared memory")
    return int(function.value or 0)


Argument = int
"""An `Address`, or a position among the values that a call passes."""


@dataclass(frozen=True, slots=True)
class SymbolicGrid:
    """Grid size that a call passes, at this position among its values. A grid of 0 launches nothing."""

    place: int


_ROW_WORDS = 4
"""Words of the launcher's `struct Kernel`."""


class LaunchTable(ArgumentTable):
    """Table of a sequence of kernel launches."""

    names: list[str]
    kept: tuple[Any, ...]
    """Objects whose addresses the table holds."""
    first_row: int
    """Position of the first kernel's words."""

    def start_in_turn(self) -> None:
        """Let no kernel start while the one before it runs."""
        for number in range(len(self.names)):
            self.words[self.first_row + _ROW_WORDS * number + _ROW_WORDS - 1] = 0

    def failed(self, where: int) -> None:
        """Raise the driver's error.

        `where`: number of the kernel in the upper 32 bits, error code in the lower ones.
        """
        _check(where & 0xFFFFFFFF, f"starting kernel {self.names[where >> 32]}")


def launches(
    launcher: ctypes.CDLL,
    device: int,
    count: int,
    kernels: Sequence[tuple[Path, str, int | SymbolicGrid, Sequence[Argument]]],
    tables: list[LaunchTable] | None = None,
) -> Callable[..., Any]:
    """Make a function that launches kernels.

    It takes a stream, and `count` values that change: addresses, sizes, grids. `launcher` is the library of
    `LAUNCHER_TEXT`. The function's table is added to `tables`.
    """
    codes = [(_function(path, name, device), read_archive(path)[name]) for path, name, _, _ in kernels]
    rows, grids, arguments = list[int](), list[int](), list[int]()
    for place, ((function, code), (_, _, grid, some)) in enumerate(zip(codes, kernels, strict=True)):
        grids += [place, grid.place] if isinstance(grid, SymbolicGrid) else []
        rows += _row(function, 0 if isinstance(grid, SymbolicGrid) else grid, code, len(some) + 2)
        arguments += [*some, count if code.scratch else count + 1, count + 1]  # Triton's two scratch arguments
    scratch, start = _scratch(kernels, device), _driver().cuLaunchKernelEx
    head = [count, len(kernels), address_of(start), len(grids) // 2]
    given = [0] * count + [0 if scratch is None else scratch.data_ptr(), 0]
    table = LaunchTable.laid_out(head, given, [*grids, *rows], arguments)
    table.names, table.kept = [f"{path.stem[:12]}:{name}" for path, name, _, _ in kernels], (scratch, start)
    table.first_row = len(head) + len(given) + len(grids)
    if tables is not None:
        tables.append(table)
    return bound(launcher, METHOD, table)


def _row(function: int, grid: int, code: KernelFunction, count: int) -> list[int]:
    """Words of the launcher's `struct Kernel`: an address, and pairs of 32-bit numbers."""
    return [function, grid | 32 * code.warps << 32, code.shared | count << 32, int(code.waits)]


def _scratch(
    kernels: Iterable[tuple[Path, str, int | SymbolicGrid, Sequence[Argument]]], device: int
) -> torch.Tensor | None:
    """Allocate memory for descriptors. Kernels share it, as one that uses it starts after the others have ended."""
    most = 0
    for path, name, grid, _ in kernels:
        if each := read_archive(path)[name].scratch:
            assert isinstance(grid, int), f"{name} needs memory for programs that only a call counts"
            most = max(most, each * grid)
    return torch.empty(most, dtype=torch.uint8, device=torch.device("cuda", device)) if most else None


def stream_of(device: int) -> int:
    """Current stream of a device as the driver's handle, for kernels that this thread launches."""
    bind(device)
    return raw_stream(device)


def device_of(args: Sequence[Any]) -> int:
    """GPU of the first argument on one, else the current one."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.is_cuda:
            return arg.get_device()
    return torch.cuda.current_device()
