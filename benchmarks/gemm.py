"""Benchmark of dcompile's float32 GEMM against ATen's and oneDNN's.

python -m benchmarks.gemm [--threads N] [--sizes 512x512x1376,...] [--clock cpu] [--json] [--save]

For a linear layer of `rows x inner x outer`: the output, the input's gradient and the weight's gradient, in GFLOP/s.
oneDNN's are for comparison: it is called through the operator that inductor uses for frozen weights.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common

SIZES = "512x512x512,512x512x1376,512x1376x512,256x384x2048,256x1536x384,256x1024x1024,32x256x1024,1024x48x192,64x64x64"
PEERS = ("aten", "onednn", "own")


def products(rows: int, inner: int, outer: int) -> dict[str, tuple[Any, Any]]:
    """Return the operands of each matmul, with the strides that they have when a linear layer is trained."""
    import torch

    x, weight, gradient = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
    return {"output": (x, weight.t()), "input's gradient": (gradient, weight), "weight's gradient": (gradient.t(), x)}


def own_function() -> Callable[[Any, Any, Any], object]:
    """Return dcompile's kernel as a function of left, right and result."""
    from dcompile.codegen.emit.cpp import compile as cpp_compile
    from dcompile.codegen.emit.cpp import sgemm
    from dcompile.config import Config
    from dcompile.runtime.cache.disk import KernelCache
    from dcompile.runtime.program.argument_table import kernel

    source = sgemm.source()
    built = cpp_compile.build([source], Config(), KernelCache.open(Config()))
    function = kernel(built.libraries[source.name], source.name)
    function.argtypes = [ctypes.c_void_p] * 5

    def call(a: Any, b: Any, out: Any) -> object:
        sizes = (1, *out.shape, a.shape[1], 0, *a.stride(), 0, *b.stride(), 0, out.stride(0), 0, 0)
        return function((ctypes.c_int64 * len(sizes))(*sizes), a.data_ptr(), b.data_ptr(), out.data_ptr(), None)

    return call


def calls(own: Callable[[Any, Any, Any], object], left: Any, right: Any) -> dict[str, Callable[[], object]]:
    """Return one matmul by each peer."""
    import torch

    linear = torch.ops.mkldnn._linear_pointwise.default
    out = torch.empty(left.shape[0], right.shape[1])
    own(left, right, out)
    torch.testing.assert_close(out, left @ right, rtol=1e-4, atol=1e-3)
    return {
        "aten": lambda: torch.mm(left, right, out=out),
        "onednn": lambda: linear(left, right.t(), None, "none", [], ""),
        "own": lambda: own(left, right, out),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--sizes", default=SIZES, help=f"default: {SIZES}")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each product")
    parser.add_argument("--clock", choices=common.CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/gemm-cpu-DATE.json")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse_arguments()
    import torch

    torch.set_num_threads(arguments.threads)
    own, lines = own_function(), []
    for text in arguments.sizes.split(","):
        rows, inner, outer = map(int, text.split("x"))
        for name, (left, right) in products(rows, inner, outer).items():
            found = common.time_interleaved(
                calls(own, left, right), arguments.seconds, 0.002, clock=common.CLOCKS[arguments.clock]
            )
            rates = {peer: 2e-9 * rows * inner * outer / timing.median for peer, timing in found.items()}
            lines.append({"sizes": text, "product": name, "gflops": rates})
    rows_of_text = [[f"{line['sizes']} {line['product']}", *(f"{line['gflops'][p]:.0f}" for p in PEERS),
                     f"{line['gflops']['own'] / line['gflops']['aten']:.2f}"] for line in lines]  # fmt: skip
    print(common.table(["GFLOP/s", *PEERS, "over aten"], rows_of_text))
    result = {"benchmark": "gemm", "complete": True, "environment": common.environment(arguments.threads),
              "geomean_over_aten": common.geomean([line["gflops"]["own"] / line["gflops"]["aten"] for line in lines]),
              "lines": lines}  # fmt: skip
    print(f"geometric mean over ATen: {result['geomean_over_aten']:.2f}")
    return common.finish("gemm", "cpu", result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
