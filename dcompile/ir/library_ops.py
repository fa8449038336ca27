"""The table of ops left to the library on purpose, and how many floating point operations a call of each does.

No loop is wanted for these ops, and none counts as a fallback. torch's decompositions leave them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from dcompile.ir.attention import FLEX, FLEX_BACKWARD
from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import MATMUL_OPS
from dcompile.ir.index import Index, typical
from dcompile.ir.nodes import Extern
from dcompile.ir.predicate import QUERIES_AT_ONCE, allowed_pairs, parse_predicate

COPY_EACH = "dcompile.copy_each"
"""Copy each view of the first argument to the output of the same place, and convert it."""


def packet_of(op: str) -> str:
    """Return the name of an op without its overload: `aten.mm` of `aten.mm.default`."""
    return ".".join(op.split(".")[:2])


def extern_flops(step: Extern, table: Mapping[str, Buffer], *, tile: int = 1) -> int:
    """Floating point operations of a library call; 0 where only its bytes are known.

    `tile`: products work on whole tiles of this many rows and columns.
    """
    packet = packet_of(step.op)
    count = _mm if packet in _MATMULS else LIBRARY_OPS.get(packet)
    shapes = [tuple(map(typical, view.shape)) for view in step.views]
    return count(step, shapes, table, tile) if count is not None else 0


_Shapes = list[tuple[int, ...]]
_Count = Callable[[Extern, _Shapes, Mapping[str, Buffer], int], int]


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _product(rows: int, inner: int, columns: int, tile: int) -> int:
    return 2 * _tiles(rows, tile) * inner * _tiles(columns, tile)


def _mm(_step: Extern, shapes: _Shapes, _table: Mapping[str, Buffer], tile: int) -> int:
    """Count the FLOPs of multiplying the last two tensors; a bias or an initial value comes before them."""
    left, right = [shape for shape in shapes if len(shape) in (2, 3)][-2:]
    batch = left[0] if len(left) == 3 else 1
    return batch * _product(left[-2], left[-1], right[-1], tile)


def _attention(step: Extern, shapes: _Shapes, _table: Mapping[str, Buffer], _tile: int) -> int:
    """Count two matmuls of queries by keys; five in the backward, whose first tensor is the result's gradient."""
    kind = packet_of(step.op).removeprefix(_ATTENTION)
    backward = kind.endswith("_backward")
    query, key, value = shapes[1:4] if backward else shapes[:3]
    *batch, length, width = query
    place = _CAUSAL[kind]
    causal = dict(step.kwargs).get("is_causal", step.args[place] if place < len(step.args) else False)
    pairs = prod(batch) * length * key[-2] // (2 if causal and length > 1 else 1)
    return pairs * (2 * (3 * width + 2 * value[-1]) if backward else 2 * (width + value[-1]))


_CAUSAL: Mapping[str, int] = {
    "flash_attention": 4,
    "flash_attention_backward": 11,
    "flash_attention_for_cpu": 4,
    "flash_attention_for_cpu_backward": 7,
    "efficient_attention": 6,
    "efficient_attention_backward": 11,
    "cudnn_attention": 6,
    "cudnn_attention_backward": 14,
}
"""Position of the argument `is_causal` of each attention operator."""


def _attention_in_blocks(step: Extern, shapes: _Shapes, _table: Mapping[str, Buffer], _tile: int) -> int:
    """Count the matmuls of attention under a predicate, for blocks of queries with the keys in their reach."""
    backward = ".backward." in step.op
    query, key, value = shapes[3:6] if backward else shapes[:3]
    text, sizes = next((arg, step.args[n - 1]) for n, arg in enumerate(step.args) if isinstance(arg, str))
    predicate = parse_predicate(text)
    given = sizes if isinstance(sizes, tuple) else ()
    numbers = [typical(size) for size in given if isinstance(size, (int, Index))]
    named: dict[str, int] = dict(zip(predicate.sizes, numbers, strict=True))
    pairs = prod(query[:2]) * allowed_pairs(predicate, query[2], key[2], QUERIES_AT_ONCE, named)
    return pairs * (2 * (3 * query[3] + 2 * value[3]) if backward else 2 * (query[3] + value[3]))


def _flex_attention(step: Extern, shapes: _Shapes, _table: Mapping[str, Buffer], _tile: int) -> int:
    """Count the matmuls of FlexAttention. How many blocks its tables name is known at run time only: half, say."""
    query, _, value = shapes[:3]
    pairs = prod(query[:3]) * value[2] // 2
    return pairs * (2 * (4 * query[3] + 3 * value[3]) if step.op == FLEX_BACKWARD else 2 * (query[3] + value[3]))


def _convolution(step: Extern, shapes: _Shapes, table: Mapping[str, Buffer], _tile: int) -> int:
    """Count the FLOPs of a convolution: each element of the result is a sum over one output channel's filter."""
    weight = shapes[1]
    out = next((table[name] for name in step.outs if name is not None), None)
    if out is None:
        return 0
    return 2 * prod(map(typical, out.shape)) * prod(weight[1:])


def _convolution_backward(step: Extern, shapes: _Shapes, _table: Mapping[str, Buffer], _tile: int) -> int:
    """Count the forward's FLOPs once for each requested gradient, of input and of weight."""
    gradient, _, weight = shapes[:3]
    wanted = sum(out is not None for out in step.outs[:2])
    return wanted * 2 * prod(gradient) * prod(weight[1:])


_MATMULS = frozenset(map(packet_of, MATMUL_OPS))
"""They have rules for small ones, and are fallbacks where the program has no place for their result."""
_ATTENTION = "aten._scaled_dot_product_"

LIBRARY_OPS: Mapping[str, _Count | None] = {
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    **{_ATTENTION + kind: _attention for kind in _CAUSAL},
    **dict.fromkeys(("dcompile_attention.forward", "dcompile_attention.backward"), _attention_in_blocks),
    **dict.fromkeys((FLEX, FLEX_BACKWARD), _flex_attention),
    **dict.fromkeys(("aten._int_mm", "aten._scaled_mm"), _mm),
    **{packet_of(name): _mm for name, op in MATMUL_OPS.items() if op.wide},
    **dict.fromkeys(("dcompile_grouped.mm", "dcompile_grouped.outer", "dcompile_grouped.ends")),
    **dict.fromkeys(("dcompile_host.offload", "dcompile_host.load")),
    **dict.fromkeys(f"aten.{name}" for name in (
        # matmuls whose FLOPs are not counted
        "_grouped_mm", "addbmm", "_trilinear",
        # pooling over overlapping windows, with indices
        "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices",
        "max_pool3d_with_indices_backward",
        # sorting, searching, counting: sizes or indices of results depend on data
        "sort", "topk", "kthvalue", "median", "nanmedian", "mode", "searchsorted", "bucketize", "unique_dim",
        "_unique2", "unique_consecutive", "nonzero", "nonzero_static", "masked_select", "histc", "histogram",
        "bincount", "_histogramdd_from_bin_tensors", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts",
        "repeat_interleave",
        # an input's complex numbers as pairs: loops have no complex dtype
        "view_as_real", "view_as_real_copy",
        # joining more tensors than a chain of selects pays for (rules/concat.py)
        "cat", "stack",
        # uninitialized memory, with gaps or overlapping elements
        "empty_strided", "new_empty_strided",
        # indices that depend on a count: a scan over the whole tensor, on one thread
        "masked_scatter", "masked_scatter_backward",
        # random generators, as eager draws from them
        "bernoulli", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal",
        "normal_functional", "uniform", "exponential", "geometric", "log_normal", "cauchy", "random", "multinomial",
        "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise",
        "rrelu_with_noise_functional",
        # linear algebra
        "cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "ormqr", "lu_unpack", "triangular_solve",
        "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "linalg_cholesky_ex",
        "linalg_eig", "linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve",
        "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_matrix_exp", "linalg_pinv",
        "linalg_qr", "linalg_solve_triangular",
        # checks on numbers of the host program
        "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size",
        # Fourier transforms
        "_fft_c2c", "_fft_c2r", "_fft_r2c",
        # checks that raise
        "_assert_async", "_linalg_check_errors",
    )),
}  # fmt: skip
"""Overload packet -> its count of FLOPs; None where a call takes the time of its bytes."""
