"""Runs Triton's kernels without Triton: cubins are loaded by the CUDA driver, and a run of them is started in one call.

A launch table lists functions, grids and addresses. Addresses that are known when the host program prepares itself are
in it from the start; the others are filled in at each call, and so are sizes and grids that only the call tells.
`LAUNCHER` is the C that walks over the table.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dcompile.compat.tensors import raw_stream
from dcompile.errors import BuildError

LAUNCHER = "gpu_launch"
"""Name of the C function in the cache; the host's compiler builds it once."""
LAUNCHER_TEXT = """\
struct Kernel { void* function; u32 grid, threads, shared, count, early; };
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
"""
SHARED_LIMIT = 48 << 10
"""Bytes of shared memory that a kernel gets without asking."""
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("early", ctypes.c_uint32),
    )


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BuildError(f"dcompile: cannot load the CUDA driver: {error}") from error


_BOUND = threading.local()


def bind(device: int) -> None:
    """See that the driver knows on this thread which context it works in; what is current stays so.

    PyTorch asks the driver for one only when a thread does something itself, and of autograd's threads the first to do
    something may be ours.
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
class Code:
    """One function of an archive."""

    entry: str
    shared: int
    """Bytes of shared memory."""
    warps: int
    waits: bool
    """Whether it waits for the kernel before it."""
    scratch: int
    """Bytes of memory that each program writes descriptors to, and nobody else looks at."""
    cubin: bytes


@cache
def read_archive(path: Path) -> dict[str, Code]:
    """The functions of an archive, by name."""
    head, _, rest = path.read_bytes().partition(b"\n")
    found: dict[str, Code] = {}
    at = 0
    for item in json.loads(head):
        cubin = rest[at : at + item["size"]]
        known = {name: item[name] for name in ("entry", "shared", "warps", "waits", "scratch")}
        found[item["function"]] = Code(**known, cubin=cubin)
        at += item["size"]
    return found


@cache
def _function(path: Path, name: str, device: int) -> int:
    """The CUfunction on a device, whose context is current."""
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


class Address(int):
    """An address or a number that is known beforehand, where a plain int stands for an address given at each call."""


Argument = int
"""An `Address`, or the position among what a call gives."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How many programs a kernel has, where the call tells: a position among what it gives. 0 of them start nothing."""

    place: int


class Launches:
    """A run of kernels: called with a stream and with what changes from call to call: addresses, sizes, grids."""

    def __init__(
        self,
        launcher: Any,
        device: int,
        count: int,
        kernels: Sequence[tuple[Path, str, int | Grid, Sequence[Argument]]],
    ) -> None:
        self._launcher, self._names = launcher, [f"{path.stem[:12]}:{name}" for path, name, _, _ in kernels]
        slots = (ctypes.c_uint64 * (count + 2))()  # the last two are what Triton's scratch arguments get
        known: dict[int, ctypes.c_uint64] = {}
        pointers: list[int] = []
        base, room, null = (ctypes.addressof(slots) + 8 * place for place in (0, count, count + 1))
        self._scratch = _scratch(kernels, device)
        slots[count] = 0 if self._scratch is None else self._scratch.data_ptr()
        self._table = (_Kernel * len(kernels))()
        for place, (path, name, grid, arguments) in enumerate(kernels):
            function, code = _function(path, name, device), read_archive(path)[name]
            known_grid = 0 if isinstance(grid, Grid) else grid
            threads = 32 * code.warps
            self._table[place] = _Kernel(function, known_grid, threads, code.shared, len(arguments) + 2, code.waits)
            for argument in arguments:
                if isinstance(argument, Address):
                    kept = known.setdefault(argument, ctypes.c_uint64(argument))
                    pointers.append(ctypes.addressof(kept))
                else:
                    pointers.append(base + 8 * argument)
            pointers += [room if code.scratch else null, null]  # Triton's two scratch arguments
        self._known = known  # the driver reads them at each launch
        self._grids = [
            (self._table[n], grid.place) for n, (_, _, grid, _) in enumerate(kernels) if isinstance(grid, Grid)
        ]
        self._slots, self._count = slots, count
        self._pointers = (ctypes.c_uint64 * len(pointers))(*pointers)
        self._call = (ctypes.cast(_driver().cuLaunchKernelEx, ctypes.c_void_p).value,)

    def __call__(self, stream: int, *given: int) -> None:
        """Start all kernels on `stream`."""
        self._slots[: self._count] = given  # type: ignore[call-overload]
        for kernel, place in self._grids:
            kernel.grid = given[place]
        failed = self._launcher(self._call[0], stream, self._table, len(self._table), self._pointers)
        if failed:
            _check(failed & 0xFFFFFFFF, f"starting kernel {self._names[failed >> 32]}")


def _scratch(kernels: Iterable[tuple[Path, str, int | Grid, Sequence[Argument]]], device: int) -> torch.Tensor | None:
    """Memory for the descriptors of whichever of the kernels runs: one that has some starts when others have ended."""
    most = 0
    for path, name, grid, _ in kernels:
        if each := read_archive(path)[name].scratch:
            assert isinstance(grid, int), f"{name} needs memory for programs that only a call counts"
            most = max(most, each * grid)
    return torch.empty(most, dtype=torch.uint8, device=torch.device("cuda", device)) if most else None


def launcher(library: ctypes.CDLL) -> Any:
    """The C function that walks over a launch table."""
    function = getattr(library, LAUNCHER)
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return function


def stream_of(device: int) -> int:
    """The current stream of a device, as the driver knows it, for kernels that this thread will start."""
    bind(device)
    return raw_stream(device)


def device_of(args: Sequence[Any]) -> int:
    """The GPU on which arguments lie: that of the first tensor on one, else the current one."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.is_cuda:
            return arg.get_device()
    return torch.cuda.current_device()
