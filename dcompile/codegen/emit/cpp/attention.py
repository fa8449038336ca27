"""float32 attention for the processors that `sgemm.py` serves: forward and backward without a matrix of all scores.

ATen's kernel for CPUs calls MKL for each pair of blocks, which takes half of the processor there, and more for small
matrices (`sgemm.py`). The kernels below consist of that file's tiles. Keys and values of a head are packed once; a
block of queries then goes over them, 256 keys at a time, with a running maximum and sum: Milakov and Gimelshein,
"Online normalizer calculation for softmax" (2018), and Dao, "FlashAttention-2" (2023), also for the backward. Blocks
without an allowed pair are left out. Values do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Mapping
from typing import Any

from dcompile.codegen.emit.cpp import sgemm
from dcompile.codegen.emit.target import Kernels, KernelSource, LibraryReplacement
from dcompile.device_traits import is_on_host
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Extern, Program, View

FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
MAX_WIDTH = 256
"""Width of a head that fits into a packed row."""
MIN_QUERIES = 32
"""Queries for which packing all keys pays; a decoding step has one."""
_PARAMETERS = {
    FORWARD: ("query", "key", "value", "dropout_p", "is_causal"),
    BACKWARD: ("grad", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal"),
}


def replace_attentions(kernels: Kernels, program: Program) -> Kernels:
    """Compute float32 attention by dcompile's kernels instead of the library's."""
    steps = enumerate(program.steps if is_on_host(program.buffers) else ())
    calls = ((n, step) for n, step in steps if isinstance(step, Extern) and step.op in _PARAMETERS)
    return kernels.with_products({position: _replace(step, program.table) for position, step in calls})


def _replace(step: Extern, table: Mapping[str, Buffer]) -> LibraryReplacement | None:
    """Return the replacement of `step`; None with a mask, dropout, other dtypes, few queries, or unused results."""
    given: dict[str, Any] = dict(zip(_PARAMETERS[step.op], step.args, strict=False)) | dict(step.kwargs)
    scale, causal = given.get("scale"), given.get("is_causal", False)
    if given.get("attn_mask") is not None or given.get("dropout_p", 0.0) != 0.0 or not isinstance(causal, bool):
        return None
    if not isinstance(scale, int | float | None):
        return None
    outs = [None if name is None else _whole(table[name]) for name in step.outs]
    sums = outs.pop() if step.op == FORWARD else given["logsumexp"]  # without a backward, a forward's is not used
    views = [given[name] for name in ("query", "key", "value")]
    views += outs if step.op == FORWARD else [given["out"], given["grad"], *outs]
    if not all(isinstance(view, View) for view in views) or not _fit(views, sums, table):
        return None
    (batch, heads, queries, width), keys = views[0].shape, views[1].shape[2]
    scale = width**-0.5 if scale is None else float(scale)
    bits = struct.unpack("q", struct.pack("d", scale))[0]
    shared = heads // views[1].shape[1]
    sizes = [batch, views[1].shape[1], shared, queries, keys, width, int(causal), bits]
    sizes += sums.strides if sums else (0, 0, 0)
    for view in views:
        sizes += view.strides[:3]
    return LibraryReplacement(_source(step.op == BACKWARD), (*views, sums), tuple(sizes))


def _whole(buffer: Buffer) -> View:
    return View(buffer.name, buffer.shape, buffer.strides)


def _fit(views: list[View], sums: View | None, table: Mapping[str, Buffer]) -> bool:
    """Whether the kernels serve these operands and results: float32, and rows without gaps."""
    query, key, value = views[:3]
    if any(len(view.shape) != 4 or view.strides[3] != 1 for view in views):
        return False
    buffers = [table[view.buffer] for view in (*views, sums) if view is not None]
    if any(buffer.dtype != "float32" or buffer.device != "cpu" for buffer in buffers):
        return False
    width, queries = query.shape[3], query.shape[2]
    if not isinstance(width, int) or width > MAX_WIDTH or width % 16:
        return False
    if not isinstance(queries, int) or queries < MIN_QUERIES:
        return False
    heads, shared = query.shape[1], key.shape[1]
    if not isinstance(heads, int) or not isinstance(shared, int) or shared == 0 or heads % shared:
        return False
    return key.shape == value.shape and query.shape[0] == key.shape[0] and key.shape[3] == width


@functools.cache
def _source(backward: bool) -> KernelSource:
    """Return the function for all sizes."""
    kind, part = ("backward", _BACKWARD) if backward else ("forward", _FORWARD)
    text = "namespace NAME_parts {" + sgemm.TILES + _SHARED + part
    name = f"attention_{kind}_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    return KernelSource(name, text.replace("NAME", name), (), cost=600, checked=False, origin=("attention",))


_SHARED = r"""
enum { QUERIES = TALL * (TALL > 6 ? 4 : 8), KEYS = DEEP };
struct Strides { int64 batch, head, row; };
struct Sizes {
  int64 batch, heads, shared, queries, keys, width, causal; /* heads of keys, each shared by some of queries */
  double scale;
  Strides sums, query, key, value, out, grad, grad_query, grad_key, grad_value;
};
static const float* at(const float* x, const Strides& s, int64 b, int64 h) { return x + b * s.batch + h * s.head; }
static float* at(float* x, const Strides& s, int64 b, int64 h) { return x + b * s.batch + h * s.head; }
static int64 panels(int64 columns) { return (columns + WIDE - 1) / WIDE; }

/* a matrix of rows without gaps, as panels of WIDE columns; turned: its transpose */
static void pack(const float* x, int64 row, int64 rows, int64 columns, float* to) {
  for (int64 j = 0; j < columns; j += WIDE, to += rows * WIDE)
    pack_right(x + j, row, 1, rows, columns - j < WIDE ? columns - j : WIDE, to);
}
static void pack_turned(const float* x, int64 row, int64 rows, int64 columns, float* to) {
  for (int64 r = 0; r < rows; r += WIDE, to += columns * WIDE)
    pack_right(x + r * row, 1, row, columns, rows - r < WIDE ? rows - r : WIDE, to);
}
static void copy_rows(const float* x, int64 row, int64 rows, int64 columns, float* to) {
  for (int64 r = 0; r < rows; r++) __builtin_memcpy(to + r * PITCH, x + r * row, columns * 4);
}

/* c = start + a * b: a in rows of PITCH, or its transpose (UPRIGHT); b in panels, `panel` numbers apart */
template <bool UPRIGHT>
static void multiply(int64 depth, const float* a, const float* b, int64 panel, float* c, int64 c_row,
                     const float* start, int64 rows, int64 columns) {
  for (int64 j = 0; j < columns; j += WIDE, b += panel) {
    const int64 n = columns - j < WIDE ? columns - j : WIDE;
    const float* const plus = start ? start + j : start;
    if (n > LANES) tiles<2, UPRIGHT, PITCH>(depth, a, b, c + j, c_row, plus, c_row, rows, n);
    else tiles<1, UPRIGHT, PITCH>(depth, a, b, c + j, c_row, plus, c_row, rows, n);
  }
}

/* keys that any of the queries before `end` may attend to */
static int64 key_limit(const Sizes& s, int64 end) { return s.causal && end < s.keys ? end : s.keys; }
/* of `n` keys from `low` on, those that a query may attend to */
static int64 allowed(const Sizes& s, int64 query, int64 low, int64 n) {
  if (!s.causal || query + 1 - low >= n) return n;
  return query + 1 > low ? query + 1 - low : 0;
}
"""

_FORWARD = r"""
/* scores of a row become exponentials under the running maximum; earlier results of the row are scaled to it */
static void soften(float* row, int64 n, int64 count, float scale, float* out, int64 width, bool first, float* top,
                   float* sum) {
  float most = -__builtin_inff(), total = 0;
#pragma omp simd reduction(max : most)
  for (int64 j = 0; j < count; j++) {
    row[j] *= scale;
    most = row[j] > most ? row[j] : most;
  }
  if (!first && *top > most) most = *top;
#pragma omp simd reduction(+ : total)
  for (int64 j = 0; j < count; j++) total += row[j] = exp_(row[j] - most);
  for (int64 j = count; j < n; j++) row[j] = 0;
  if (!first) {
    const float old = exp_(*top - most);
    total += *sum * old;
    if (old != 1)
#pragma omp simd
      for (int64 j = 0; j < width; j++) out[j] *= old;
  }
  *top = most;
  *sum = total;
}

/* for all heads of queries that share one of keys: every `step`th block of queries, from `first` on */
static void head(const Sizes& s, const float* queries, const float* k, const float* v, float* outs, float* all_sums,
                 int64 first, int64 step) {
  const int64 keys = s.keys, width = s.width, turned = panels(keys) * width * WIDE, plain = panels(width) * keys * WIDE;
  float* const packed_k = room(turned + plain + 3 * QUERIES * PITCH);
  float *const packed_v = packed_k + turned, *const left = packed_v + plain;
  float *const scores = left + QUERIES * PITCH, *const found = scores + QUERIES * PITCH;
  float top[QUERIES], sum[QUERIES];
  pack_turned(k, s.key.row, keys, width, packed_k);
  pack(v, s.value.row, keys, width, packed_v);
  const int64 blocks = (s.queries + QUERIES - 1) / QUERIES;
  for (int64 block = first; block < s.shared * blocks; block += step) {
    const int64 i = block % blocks * QUERIES, own = block / blocks;
    const float* const q = queries + own * s.query.head;
    float *const out = outs + own * s.out.head, *const sums = all_sums + own * s.sums.head;
    const int64 rows = s.queries - i < QUERIES ? s.queries - i : QUERIES, limit = key_limit(s, i + rows);
    copy_rows(q + i * s.query.row, s.query.row, rows, width, left);
    for (int64 low = 0; low < limit; low += KEYS) {
      const int64 n = limit - low < KEYS ? limit - low : KEYS;
      multiply<false>(width, left, packed_k + low * width, width * WIDE, scores, PITCH, nullptr, rows, n);
      for (int64 r = 0; r < rows; r++) {
        const int64 count = allowed(s, i + r, low, n);
        if (count) soften(scores + r * PITCH, n, count, s.scale, found + r * PITCH, width, !low, top + r, sum + r);
        else __builtin_memset(scores + r * PITCH, 0, n * 4);
      }
      multiply<false>(n, scores, packed_v + low * WIDE, keys * WIDE, found, PITCH, low ? found : nullptr, rows, width);
    }
    for (int64 r = 0; r < rows; r++) {
      float* const to = out + (i + r) * s.out.row;
      const float by = 1 / sum[r];
#pragma omp simd
      for (int64 j = 0; j < width; j++) to[j] = found[r * PITCH + j] * by;
      if (all_sums) sums[(i + r) * s.sums.row] = top[r] + log_(sum[r]);
    }
  }
}

/* Threads share out heads first, then blocks of queries, each packing the keys that it needs. */
extern "C" int64 NAME(const Sizes* sizes, const float* q, const float* k, const float* v, float* out, float* sums) {
  const Sizes s = *sizes;
  const int64 heads = s.batch * s.heads, threads = omp_get_max_threads();
  const int64 blocks = (s.queries + QUERIES - 1) / QUERIES * s.shared;
  if (!heads) return 0;
  const int64 wanted = (threads + heads - 1) / heads, parts = wanted < blocks ? wanted : blocks;
#pragma omp parallel for schedule(static) if (threads > 1)
  for (int64 task = 0; task < heads * parts; task++) {
    const int64 b = task / parts / s.heads, h = task / parts % s.heads;
    head(s, at(q, s.query, b, h * s.shared), at(k, s.key, b, h), at(v, s.value, b, h),
         at(out, s.out, b, h * s.shared), at(sums, s.sums, b, h * s.shared), task % parts, parts);
  }
  return 0;
}
extern "C" int64 NAME_at(const int64* const* a) {
  return NAME((const Sizes*)*a[0], (const float*)*a[1], (const float*)*a[2], (const float*)*a[3], (float*)*a[4],
              (float*)*a[5]);
}
}
"""

_BACKWARD = r"""
/* for all heads of queries that share one of keys */
static void head(const Sizes& s, const float* queries, const float* k, const float* v, const float* outs,
                 const float* grads, float* grad_queries, float* grad_k, float* grad_v, const float* all_sums) {
  const int64 keys = s.keys, width = s.width, turned = panels(keys) * width * WIDE, plain = panels(width) * keys * WIDE;
  const int64 block = panels(width) * QUERIES * WIDE, lines = QUERIES * PITCH;
  float* const turned_k = room(2 * turned + plain + 2 * block + 4 * lines);
  float *const turned_v = turned_k + turned, *const packed_k = turned_v + turned, *const packed_q = packed_k + plain;
  float *const packed_grad = packed_q + block, *const left_q = packed_grad + block, *const left_grad = left_q + lines;
  float *const weights = left_grad + lines, *const slopes = weights + lines; /* of scores: their gradients */
  const float scale = s.scale;
  pack_turned(k, s.key.row, keys, width, turned_k);
  pack_turned(v, s.value.row, keys, width, turned_v);
  pack(k, s.key.row, keys, width, packed_k);
  for (int64 j = 0; j < keys; j++) {
    __builtin_memset(grad_k + j * s.grad_key.row, 0, width * 4);
    __builtin_memset(grad_v + j * s.grad_value.row, 0, width * 4);
  }
  const int64 blocks = (s.queries + QUERIES - 1) / QUERIES;
  for (int64 step = 0; step < s.shared * blocks; step++) {
    const int64 i = step % blocks * QUERIES, own = step / blocks;
    const float *const q = queries + own * s.query.head, *const out = outs + own * s.out.head;
    const float *const grad = grads + own * s.grad.head, *const sums = all_sums + own * s.sums.head;
    float* const grad_q = grad_queries + own * s.grad_query.head;
    const int64 rows = s.queries - i < QUERIES ? s.queries - i : QUERIES, limit = key_limit(s, i + rows);
    copy_rows(q + i * s.query.row, s.query.row, rows, width, left_q);
    copy_rows(grad + i * s.grad.row, s.grad.row, rows, width, left_grad);
    pack(left_q, PITCH, rows, width, packed_q);
    pack(left_grad, PITCH, rows, width, packed_grad);
    float mean[QUERIES];
    for (int64 r = 0; r < rows; r++) {
      const float* const o = out + (i + r) * s.out.row;
      float total = 0;
#pragma omp simd reduction(+ : total)
      for (int64 j = 0; j < width; j++) total += o[j] * left_grad[r * PITCH + j];
      mean[r] = total;
    }
    for (int64 low = 0; low < limit; low += KEYS) {
      const int64 n = limit - low < KEYS ? limit - low : KEYS;
      multiply<false>(width, left_q, turned_k + low * width, width * WIDE, weights, PITCH, nullptr, rows, n);
      multiply<false>(width, left_grad, turned_v + low * width, width * WIDE, slopes, PITCH, nullptr, rows, n);
      for (int64 r = 0; r < rows; r++) {
        const int64 count = allowed(s, i + r, low, n);
        float *const w = weights + r * PITCH, *const d = slopes + r * PITCH;
        const float sum = sums[(i + r) * s.sums.row], average = mean[r];
#pragma omp simd
        for (int64 j = 0; j < count; j++) {
          w[j] = exp_(w[j] * scale - sum);
          d[j] = w[j] * (d[j] - average) * scale;
        }
        for (int64 j = count; j < n; j++) w[j] = d[j] = 0;
      }
      float *const to_v = grad_v + low * s.grad_value.row, *const to_k = grad_k + low * s.grad_key.row;
      float* const to_q = grad_q + i * s.grad_query.row;
      multiply<true>(rows, weights, packed_grad, rows * WIDE, to_v, s.grad_value.row, to_v, n, width);
      multiply<true>(rows, slopes, packed_q, rows * WIDE, to_k, s.grad_key.row, to_k, n, width);
      multiply<false>(n, slopes, packed_k + low * WIDE, keys * WIDE, to_q, s.grad_query.row, low ? to_q : nullptr,
                      rows, width);
    }
  }
}

/* Threads share out heads, as ATen's do: gradients of keys are sums over all queries. */
extern "C" int64 NAME(const Sizes* sizes, const float* q, const float* k, const float* v, const float* out,
                      const float* grad, float* grad_q, float* grad_k, float* grad_v, const float* sums) {
  const Sizes s = *sizes;
#pragma omp parallel for schedule(static) if (omp_get_max_threads() > 1)
  for (int64 task = 0; task < s.batch * s.heads; task++) {
    const int64 b = task / s.heads, h = task % s.heads;
    const int64 first = h * s.shared;
    head(s, at(q, s.query, b, first), at(k, s.key, b, h), at(v, s.value, b, h), at(out, s.out, b, first),
         at(grad, s.grad, b, first), at(grad_q, s.grad_query, b, first), at(grad_k, s.grad_key, b, h),
         at(grad_v, s.grad_value, b, h), at(sums, s.sums, b, first));
  }
  return 0;
}
extern "C" int64 NAME_at(const int64* const* a) {
  return NAME((const Sizes*)*a[0], (const float*)*a[1], (const float*)*a[2], (const float*)*a[3], (const float*)*a[4],
              (const float*)*a[5], (float*)*a[6], (float*)*a[7], (float*)*a[8], (const float*)*a[9]);
}
}
"""
