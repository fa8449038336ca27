"""float32 GEMM for processors whose AVX-512 units ATen's library does not use.

ATen's float32 GEMM is MKL's, which does not use AVX-512 on processors other than Intel's. It reaches 105 GFLOP/s on one
core of an AMD EPYC (Zen 5), where the kernel below reaches 235 (`python -m benchmarks.gemm`). One function serves all
sizes and is compiled once per machine. The algorithm is that of Goto and van de Geijn, "Anatomy of high-performance
matrix multiplication", ACM TOMS 34 (2008). It packs a block of the left matrix for L2 and a panel of the right one for
L1. A tile of the result is held in registers over a whole panel. Each element is summed in the order of the inner
dimension, 256 products at a time. So its value does not depend on tiles and threads.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from dcompile.codegen.emit.target import Kernels, KernelSource, LibraryReplacement
from dcompile.device_traits import is_on_host
from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import matmul_of
from dcompile.ir.index import Size
from dcompile.ir.nodes import Extern, Program, View


def replace_matmuls(kernels: Kernels, program: Program) -> Kernels:
    """Compute float32 matmuls by dcompile's function instead of the library's."""
    steps = enumerate(program.steps if is_on_host(program.buffers) else ())
    return kernels.with_products({n: replace_matmul(s, program.table) for n, s in steps if isinstance(s, Extern)})


def replace_matmul(step: Extern, table: Mapping[str, Buffer]) -> LibraryReplacement | None:
    """Return the replacement of `step`; None for other dtypes, vectors, and strided results."""
    call = matmul_of(step)
    if call is None or call.op.wide or call.kwargs:
        return None
    target = table[call.out]
    views = (call.left, call.right, View(target.name, target.shape, target.strides), *filter(None, (call.added,)))
    if not all(_is_float_matrix(table[view.buffer]) for view in views):
        return None
    a, b, c, *start = (_Matrix.of(view, len(target.shape)) for view in views)
    if c.column != 1:  # a column-major result: the GEMM of the transposed matrices
        a, b, c, start = b.transposed(), a.transposed(), c.transposed(), [matrix.transposed() for matrix in start]
    if any(matrix.column != 1 for matrix in (c, *start)) or any(size == 1 for size in (c.rows, c.columns, a.columns)):
        return None
    plus = start[0] if start else _Matrix(None, 0, 0, 0, 0, 0)
    batch = target.shape[0] if call.op.batched else 1
    sizes = (batch, c.rows, c.columns, a.columns, a.batch, a.row, a.column, b.batch, b.row, b.column, c.batch, c.row)
    assert a.view is not None and b.view is not None and c.view is not None, "only what is added may be missing"
    return LibraryReplacement(source(), (a.view, b.view, c.view, plus.view), (*sizes, plus.batch, plus.row))


def _is_float_matrix(buffer: Buffer) -> bool:
    return buffer.dtype == "float32" and buffer.device == "cpu"


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Sizes, and the strides of a batch, of rows and of columns."""

    view: View | None
    rows: Size
    columns: Size
    batch: Size
    row: Size
    column: Size

    @classmethod
    def of(cls, view: View, dims: int) -> _Matrix:
        """Return `view` as matrices in `dims` dimensions: dimensions of one element, or none, are repeated."""
        lead = dims - len(view.shape)
        sizes = [*([1] * lead), *view.shape]
        steps = [0 if size == 1 else step for size, step in zip(sizes, [*([0] * lead), *view.strides], strict=True)]
        return cls(view, sizes[-2], sizes[-1], steps[0] if dims == 3 else 0, steps[-2], steps[-1])

    def transposed(self) -> _Matrix:
        """Return the transposed matrices, in the same memory."""
        return _Matrix(self.view, self.columns, self.rows, self.batch, self.column, self.row)


@functools.cache
def source() -> KernelSource:
    """Return the function; every graph that needs it has the same one."""
    text = _TEXT.replace("TILES_AND_PACKING\n", TILES)
    name = "sgemm_" + hashlib.sha256(text.encode()).hexdigest()[:24]
    return KernelSource(name, text.replace("NAME", name), (), cost=600, checked=False, origin=("matrix products",))


TILES = r"""
#ifdef __AVX512F__
enum { LANES = 16, TALL = 14 };
typedef float lanes __attribute__((vector_size(64)));
INLINE lanes fma_lanes(lanes a, lanes b, lanes c) { return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4); }
#else
enum { LANES = 8, TALL = 6 };
typedef float lanes __attribute__((vector_size(32)));
INLINE lanes fma_lanes(lanes a, lanes b, lanes c) {
  for (int i = 0; i < LANES; i++) c[i] = fma_(a[i], b[i], c[i]);
  return c;
}
#endif
typedef lanes loose_lanes __attribute__((aligned(4)));
/* a tile is TALL rows and WIDE columns; a panel is DEEP of the inner dimension */
enum { WIDE = 2 * LANES, DEEP = 256, PITCH = DEEP + 16 };

#pragma GCC push_options
#pragma GCC optimize ("O2") /* all loops that matter are unrolled by hand: O3 doubles the compiler's time for nothing */
/* c[r, :] = start[r, :] + sum over p of a[r, p] * b[p, :]. a lies in rows of STEP numbers, or upright, with STEP
   numbers for each p. `start` may be null, or c itself. */
template <int ROWS, int VECS, bool UPRIGHT, int STEP>
static void tile(int64 depth, const float* a, const float* b, float* c, int64 c_row, const float* start,
                 int64 start_row, int64 rows, int64 columns) {
  lanes sum[ROWS][VECS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) {
      sum[r][v] = lanes{};
      __builtin_prefetch(c + r * c_row + v * LANES, 1); /* the end of the tile would wait for these lines */
    }
#pragma GCC unroll 1
  for (int64 p = 0; p < depth; p++) {
    lanes right[VECS];
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) right[v] = *(const lanes*)(b + p * WIDE + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const lanes left = (UPRIGHT ? a[p * STEP + r] : a[r * STEP + p]) - lanes{};
#pragma GCC unroll 2
      for (int v = 0; v < VECS; v++) sum[r][v] = fma_lanes(left, right[v], sum[r][v]);
    }
  }
  if (columns == VECS * LANES) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
      if (r < rows)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
          lanes x = sum[r][v];
          if (start) x = *(const loose_lanes*)(start + r * start_row + v * LANES) + x;
          *(loose_lanes*)(c + r * c_row + v * LANES) = x;
        }
    return;
  }
  alignas(64) float held[ROWS][VECS * LANES];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) *(lanes*)(held[r] + v * LANES) = sum[r][v];
  for (int64 r = 0; r < rows; r++)
    for (int64 j = 0; j < columns; j++)
      c[r * c_row + j] = start ? start[r * start_row + j] + held[r][j] : held[r][j];
}

/* Tiles of upright rows follow each other in memory where STEP is TALL; otherwise all rows lie beside each other. */
template <int VECS, bool UPRIGHT, int STEP>
static void tiles(int64 depth, const float* a, const float* b, float* c, int64 c_row, const float* start,
                  int64 start_row, int64 rows, int64 columns) {
  for (int64 r = 0; r < rows; r += TALL) {
    const int64 left = rows - r < TALL ? rows - r : TALL;
    const float* const from = a + (UPRIGHT && STEP == PITCH ? r : r * PITCH);
    float* const to = c + r * c_row;
    const float* const plus = start ? start + r * start_row : start;
#define TILE(HEIGHT) tile<HEIGHT, VECS, UPRIGHT, STEP>(depth, from, b, to, c_row, plus, start_row, left, columns)
    if (left > TALL - 4) TILE(TALL);
    else if (TALL > 6 && left > 6) TILE(10);
    else if (TALL > 6 && left > 2) TILE(6);
    else TILE(2);
#undef TILE
  }
}
#pragma GCC pop_options

/* memory of this thread, kept for the next call */
static float* room(int64 count) {
  static __thread float* kept;
  static __thread int64 kept_count;
  if (kept_count < count) {
    __builtin_free(kept);
    kept = scratch<float>(count);
    kept_count = count;
  }
  return kept;
}

static void pack_right(const float* b, int64 row, int64 column, int64 depth, int64 columns, float* to) {
  if (column == 1 && columns == WIDE)
    for (int64 p = 0; p < depth; p++) __builtin_memcpy(to + p * WIDE, b + p * row, WIDE * 4);
  else if (row == 1)
    turn((const u32*)b, column, (u32*)to, WIDE, columns, depth);
  else
    for (int64 p = 0; p < depth; p++)
      for (int64 j = 0; j < columns; j++) to[p * WIDE + j] = b[p * row + j * column];
}
"""
"""Tiles of a product in registers, a thread's memory, and packing, for kernels that consist of products."""

_TEXT = r"""
namespace products {
TILES_AND_PACKING
/* a block of left rows fills half of L2; two hold the 1024 rows that batches often have */
enum { BLOCK = 37 * TALL, ROOM = DEEP * WIDE + 37 * TALL * PITCH };

struct Sizes {
  int64 batch, rows, columns, depth, a_batch, a_row, a_column, b_batch, b_row, b_column, c_batch, c_row;
  int64 start_batch, start_row;
};

static void pack_left(const float* a, int64 row, int64 column, int64 rows, int64 depth, float* to) {
  for (int64 r = 0; r < rows; r += TALL, to += TALL * PITCH, a += TALL * row) {
    const int64 left = rows - r < TALL ? rows - r : TALL;
    if (column == 1)
      for (int64 i = 0; i < left; i++) __builtin_memcpy(to + i * PITCH, a + i * row, depth * 4);
    else if (row == 1 && left == TALL)
      for (int64 p = 0; p < depth; p++) __builtin_memcpy(to + p * TALL, a + p * column, TALL * 4);
    else
      for (int64 p = 0; p < depth; p++)
        for (int64 i = 0; i < left; i++) to[p * TALL + i] = a[p * column + i * row];
  }
}

/* rows i_low to i_high and columns j_low to j_high of one product, by one thread */
static void part(const Sizes& s, const float* a, const float* b, float* c, const float* start, int64 i_low,
                 int64 i_high, int64 j_low, int64 j_high) {
  float *const right = room(ROOM), *const left = right + DEEP * WIDE;
  const bool upright = s.a_column != 1;
  for (int64 p = 0; p < s.depth || p == 0; p += DEEP) { /* once for empty sums, too */
    const int64 depth = s.depth - p < DEEP ? s.depth - p : DEEP;
    for (int64 i = i_low; i < i_high; i += BLOCK) {
      const int64 rows = i_high - i < BLOCK ? i_high - i : BLOCK;
      pack_left(a + i * s.a_row + p * s.a_column, s.a_row, s.a_column, rows, depth, left);
      for (int64 j = j_low; j < j_high; j += WIDE) {
        const int64 columns = j_high - j < WIDE ? j_high - j : WIDE;
        pack_right(b + p * s.b_row + j * s.b_column, s.b_row, s.b_column, depth, columns, right);
        float* const to = c + i * s.c_row + j;
        const float* const plus = p ? to : start ? start + i * s.start_row + j : start;
        const int64 plus_row = p ? s.c_row : s.start_row;
#define TILES(VECS, UPRIGHT) tiles<VECS, UPRIGHT, UPRIGHT ? TALL : PITCH>( \
    depth, left, right, to, s.c_row, plus, plus_row, rows, columns)
        if (columns > LANES && upright) TILES(2, true);
        else if (columns > LANES) TILES(2, false);
        else if (upright) TILES(1, true);
        else TILES(1, false);
#undef TILES
      }
    }
  }
}

/* Threads share out the batch first, then rows and columns, each packing what it needs: no thread waits for another. */
extern "C" int64 NAME(const Sizes* sizes, const float* a, const float* b, float* c, const float* start) {
  const Sizes s = *sizes;
  if (!s.batch || !s.rows || !s.columns) return 0;
  const int64 threads = s.batch * s.rows * s.columns * s.depth < 1 << 18 ? 1 : omp_get_max_threads();
  int64 down = 1, across = 1;
  while (s.batch * down * across < threads)
    if ((s.rows + down - 1) / down > (s.columns + across - 1) / across) down++;
    else across++;
  const int64 tall = ((s.rows + down - 1) / down + TALL - 1) / TALL * TALL;
  const int64 wide = ((s.columns + across - 1) / across + WIDE - 1) / WIDE * WIDE;
#pragma omp parallel for schedule(static) if (threads > 1)
  for (int64 task = 0; task < s.batch * down * across; task++) {
    const int64 n = task / (down * across), i = task / across % down * tall, j = task % across * wide;
    if (i < s.rows && j < s.columns)
      part(s, a + n * s.a_batch, b + n * s.b_batch, c + n * s.c_batch, start ? start + n * s.start_batch : start, i,
           i + tall < s.rows ? i + tall : s.rows, j, j + wide < s.columns ? j + wide : s.columns);
  }
  return 0;
}
extern "C" int64 NAME_at(const int64* const* a) {
  return NAME((const Sizes*)*a[0], (const float*)*a[1], (const float*)*a[2], (float*)*a[3], (const float*)*a[4]);
}
}
"""
