"""cuBLASLt bindings without its headers: its algorithms for a GEMM, and GEMM calls with one of them.

ATen takes the first algorithm that the library proposes. That one is the fastest on a GPU at its full clock, but not
under a power limit. Another one takes 0.94 of the time for the first GEMMs of a 1B Llama's MLPs on an H200.
"""

from __future__ import annotations

import ctypes
import functools
import glob
from pathlib import Path
from typing import Any

import torch

from dcompile.compat.tensors import raw_stream
from dcompile.errors import DcompileError
from dcompile.ir.gemm import ALIGNMENT, Algorithm, Geometry

MAX_PROPOSALS = 16
"""Number of algorithms that the library is asked for."""
_FLOAT32, _COMPUTE = 0, 68
"""CUDA_R_32F and CUBLAS_COMPUTE_32F."""
_TYPES = {"bfloat16": 14, "float16": 2}
"""CUDA_R_16BF and CUDA_R_16F."""
_TURNED = (3, 4)
"""CUBLASLT_MATMUL_DESC_TRANSA and TRANSB."""
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
"""CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES; MIN_ALIGNMENT_A_BYTES, and of B, C and D."""


_MATMUL = (*(ctypes.c_void_p,) * 14, ctypes.c_size_t, ctypes.c_void_p)
"""Argument types of cublasLtMatmul: handle, description; alpha, A, B and layouts; beta, C and D; algorithm, workspace,
stream.
"""


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """cuBLASLt with a handle for one GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.functions = _load_library()
        self.functions.cublasLtMatmul.argtypes = _MATMUL
        self.handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            self.call("Create", ctypes.byref(self.handle))

    def call(self, name: str, *arguments: Any) -> None:
        """Call one function. Raises DcompileError if its status is not success."""
        status = getattr(self.functions, f"cublasLt{name}")(*arguments)
        if status:
            raise DcompileError(f"dcompile: cuBLASLt refuses cublasLt{name} (status {status})")

    def version(self) -> int:
        self.functions.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(self.functions.cublasLtGetVersion())


@functools.cache
def library(device: int) -> CublasLt:
    """The library's handle of a GPU. It has no other state, and any thread may use it."""
    return CublasLt(device)


def _load_library() -> ctypes.CDLL:
    """Load the library that torch has loaded already."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"
    beside = Path(torch.__file__).parent.parent / "nvidia"
    for path in (name, *sorted(glob.glob(f"{beside}/**/{name}", recursive=True))):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise DcompileError(f"dcompile: max_autotune needs {name}, which is neither loaded nor in {beside}")


class GemmDescription:
    """Description of GEMMs of one geometry for the library."""

    def __init__(self, geometry: Geometry, device: int) -> None:
        self.geometry, self.library = geometry, library(device)
        g, kind = geometry, _TYPES[geometry.dtype]
        self.how = ctypes.c_void_p()
        self.library.call("MatmulDescCreate", ctypes.byref(self.how), _COMPUTE, _FLOAT32)
        for attribute, turned in zip(_TURNED, (g.transposed_a, g.transposed_b), strict=True):
            value = ctypes.c_int32(turned)
            self.library.call(
                "MatmulDescSetAttribute", self.how, attribute, ctypes.byref(value), ctypes.c_size_t(4)
            )  # fmt: skip
        sizes_a, sizes_b = (
            ((g.k, g.m) if g.transposed_a else (g.m, g.k)),
            ((g.n, g.k) if g.transposed_b else (g.k, g.n)),
        )
        self.a = self._layout(kind, *sizes_a, g.lead_a)
        self.b = self._layout(kind, *sizes_b, g.lead_b)
        self.out = self._layout(kind, g.m, g.n, g.lead_out)

    def _layout(self, kind: int, rows: int, columns: int, lead: int) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(lead)
        self.library.call("MatrixLayoutCreate", ctypes.byref(found), kind, *sizes)
        return found

    def algorithms(self) -> list[Algorithm]:
        """Algorithms that need no workspace, in the library's order of expected speed."""
        preference = ctypes.c_void_p()
        self.library.call("MatmulPreferenceCreate", ctypes.byref(preference))
        none, aligned = ctypes.c_uint64(0), ctypes.c_uint32(ALIGNMENT)
        self.library.call(
            "MatmulPreferenceSetAttribute", preference, _WORKSPACE, ctypes.byref(none), ctypes.c_size_t(8)
        )  # fmt: skip
        for attribute in _ALIGNMENTS:
            self.library.call(
                "MatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(aligned), ctypes.c_size_t(4)
            )
        found, count = (_Proposal * MAX_PROPOSALS)(), ctypes.c_int()
        matrices = self.a, self.b, self.out, self.out
        self.library.call(
            "MatmulAlgoGetHeuristic", self.library.handle, self.how, *matrices, preference, MAX_PROPOSALS, found,
            ctypes.byref(count),
        )  # fmt: skip
        self.library.call("MatmulPreferenceDestroy", preference)
        return [tuple(p.algorithm.data) for p in found[: count.value] if p.state == 0]

    def __del__(self) -> None:
        for name in ("a", "b", "out"):
            if hasattr(self, name):
                self.library.functions.cublasLtMatrixLayoutDestroy(getattr(self, name))
        if hasattr(self, "how"):
            self.library.functions.cublasLtMatmulDescDestroy(self.how)


class GemmCall:
    """`torch.mm(left, right, out=out)` with one algorithm, times a factor.

    Tensors have the geometry's layout and start at multiples of 16 bytes.
    """

    def __init__(self, products: GemmDescription, algorithm: Algorithm) -> None:
        self._products, self._algorithm = products, _Algorithm((ctypes.c_uint64 * 8)(*algorithm))
        self._factor, self._nothing = ctypes.c_float(1.0), ctypes.c_float(0.0)
        matmul, p, address = products.library.functions.cublasLtMatmul, products, ctypes.addressof
        handle, how, a, b, out = (v.value for v in (p.library.handle, p.how, p.a, p.b, p.out))
        factor, nothing, chosen = address(self._factor), address(self._nothing), address(self._algorithm)

        def run(left: int, right: int, result: int, stream: int) -> int:
            status: int = matmul(
                handle, how, factor, right, a, left, b, nothing, result, out, result, out, chosen, None, 0, stream
            )
            return status

        self._run, self._device = run, products.library.device

    def __call__(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        self._factor.value = factor
        status = self._run(left.data_ptr(), right.data_ptr(), out.data_ptr(), raw_stream(self._device))
        if status:
            raise DcompileError(
                f"dcompile: cuBLASLt {self._products.library.version()} refuses an algorithm that max_autotune had "
                f"chosen (status {status}); clear the cache, or turn max_autotune off"
            )
