/* The kernels of cpu_kernels.py as plain loops, by hand: what a careful C++ programmer gets from g++ with dcompile's
   flags. Appended to dcompile's prelude, whose types, roundings and polynomials (exp_, tanh_) it uses. Sizes are
   arguments, results go to memory that is there already. */

#define FOR_ROWS _Pragma("omp parallel for schedule(static)") for (int64 r = 0; r < rows; r++)
#define FOR_ALL _Pragma("omp parallel for simd schedule(static)") for (int64 i = 0; i < count; i++)

extern "C" void rms_norm_forward(const float* x, const float* w, float* y, int64 rows, int64 n) {
  FOR_ROWS {
    const float* a = x + r * n;
    float* b = y + r * n;
    float s = 0;
#pragma omp simd reduction(+:s)
    for (int64 i = 0; i < n; i++) s += a[i] * a[i];
    const float scale = 1 / sqrt_(s / n + 1e-6f);
#pragma omp simd
    for (int64 i = 0; i < n; i++) b[i] = a[i] * scale * w[i];
  }
}

extern "C" void rms_norm_backward(const float* dy, const float* x, const float* w, float* dx, float* dw, int64 rows,
                                  int64 n) {
  const int64 threads = omp_get_max_threads();
  float* all = scratch<float>(threads * n);
  for (int64 i = 0; i < threads * n; i++) all[i] = 0;
#pragma omp parallel num_threads(threads)
  {
    float* mine = all + omp_get_thread_num() * n;
#pragma omp for schedule(static)
    for (int64 r = 0; r < rows; r++) {
      const float *a = x + r * n, *d = dy + r * n;
      float* b = dx + r * n;
      float s = 0, t = 0;
#pragma omp simd reduction(+:s, t)
      for (int64 i = 0; i < n; i++) {
        s += a[i] * a[i];
        t += d[i] * w[i] * a[i];
      }
      const float scale = 1 / sqrt_(s / n + 1e-6f), back = scale * scale * t / n;
#pragma omp simd
      for (int64 i = 0; i < n; i++) {
        b[i] = scale * (d[i] * w[i] - a[i] * back);
        mine[i] += d[i] * a[i] * scale;
      }
    }
  }
  for (int64 i = 0; i < n; i++) dw[i] = all[i];
  for (int64 t = 1; t < threads; t++)
    for (int64 i = 0; i < n; i++) dw[i] += all[t * n + i];
  free(all);
}

extern "C" void layer_norm_forward(const float* x, const float* w, const float* bias, float* y, int64 rows, int64 n) {
  FOR_ROWS {
    const float* a = x + r * n;
    float* b = y + r * n;
    float s = 0, q = 0;
#pragma omp simd reduction(+:s)
    for (int64 i = 0; i < n; i++) s += a[i];
    const float mean = s / n;
#pragma omp simd reduction(+:q)
    for (int64 i = 0; i < n; i++) q += (a[i] - mean) * (a[i] - mean);
    const float scale = 1 / sqrt_(q / n + 1e-5f);
#pragma omp simd
    for (int64 i = 0; i < n; i++) b[i] = (a[i] - mean) * scale * w[i] + bias[i];
  }
}

INLINE float largest(const float* a, int64 n) {
  float m = -__builtin_inff();
  int32 nan = 0;
#pragma omp simd reduction(max:m) reduction(|:nan)
  for (int64 i = 0; i < n; i++) {
    m = a[i] > m ? a[i] : m;
    nan |= a[i] != a[i];
  }
  return nan ? __builtin_nanf("") : m;
}

extern "C" void softmax(const float* x, float* y, int64 rows, int64 n) {
  FOR_ROWS {
    const float* a = x + r * n;
    float* b = y + r * n;
    const float m = largest(a, n);
    float s = 0;
#pragma omp simd reduction(+:s)
    for (int64 i = 0; i < n; i++) s += b[i] = exp_(a[i] - m);
    const float scale = 1 / s;
#pragma omp simd
    for (int64 i = 0; i < n; i++) b[i] *= scale;
  }
}

INLINE float log_sum_exp(const float* a, int64 n) {
  const float m = largest(a, n);
  float s = 0;
#pragma omp simd reduction(+:s)
  for (int64 i = 0; i < n; i++) s += exp_(a[i] - m);
  return m + log_(s);
}

extern "C" void cross_entropy_forward(const float* x, const int64* labels, float* loss, int64 rows, int64 n) {
  float total = 0;
#pragma omp parallel for schedule(static) reduction(+:total)
  for (int64 r = 0; r < rows; r++) total += log_sum_exp(x + r * n, n) - x[r * n + labels[r]];
  *loss = total / rows;
}

extern "C" void cross_entropy_backward(const float* x, const int64* labels, const float* lse, float* dx, int64 rows,
                                       int64 n) {
  FOR_ROWS {
    const float *a = x + r * n, shift = lse[r], scale = 1.f / rows;
    float* b = dx + r * n;
#pragma omp simd
    for (int64 i = 0; i < n; i++) b[i] = exp_(a[i] - shift) * scale;
    b[labels[r]] -= scale;
  }
}

extern "C" void cross_entropy_both(const float* x, const int64* labels, float* loss, float* dx, int64 rows, int64 n) {
  float total = 0;
#pragma omp parallel for schedule(static) reduction(+:total)
  for (int64 r = 0; r < rows; r++) {
    const float *a = x + r * n, m = largest(a, n), once = 1.f / rows;
    float* b = dx + r * n;
    float s = 0;
#pragma omp simd reduction(+:s)
    for (int64 i = 0; i < n; i++) s += b[i] = exp_(a[i] - m);
    const float scale = once / s;
#pragma omp simd
    for (int64 i = 0; i < n; i++) b[i] *= scale;
    b[labels[r]] -= once;
    total += m + log_(s) - a[labels[r]];
  }
  *loss = total / rows;
}

extern "C" void adamw(float* p, const float* g, float* m, float* v, int64 count, float correction1, float correction2) {
  FOR_ALL {
    const float a = m[i] + 0.1f * (g[i] - m[i]), b = v[i] * 0.999f + 0.001f * g[i] * g[i];
    m[i] = a;
    v[i] = b;
    p[i] = p[i] * (1 - 1e-3f * 0.01f) - 1e-3f / correction1 * a / (sqrt_(b / correction2) + 1e-8f);
  }
}

extern "C" void adamw_many(float* const* p, const float* const* g, float* const* m, float* const* v, int64 tensors,
                           int64 count, float correction1, float correction2) {
#pragma omp parallel for schedule(static)
  for (int64 t = 0; t < tensors; t++) {
    float *pt = p[t], *mt = m[t], *vt = v[t];
    const float* gt = g[t];
#pragma omp simd
    for (int64 i = 0; i < count; i++) {
      const float a = mt[i] + 0.1f * (gt[i] - mt[i]), b = vt[i] * 0.999f + 0.001f * gt[i] * gt[i];
      mt[i] = a;
      vt[i] = b;
      pt[i] = pt[i] * (1 - 1e-3f * 0.01f) - 1e-3f / correction1 * a / (sqrt_(b / correction2) + 1e-8f);
    }
  }
}

extern "C" void bias_gelu(const float* x, const float* bias, float* y, int64 rows, int64 n) {
  FOR_ROWS {
#pragma omp simd
    for (int64 i = 0; i < n; i++) {
      const float a = x[r * n + i] + bias[i];
      y[r * n + i] = 0.5f * a * (1 + tanh_(0.7978845608f * (a + 0.044715f * a * a * a)));
    }
  }
}

extern "C" void swiglu(const float* gate, const float* up, float* y, int64 count) {
  FOR_ALL y[i] = gate[i] / (1 + exp_(-gate[i])) * up[i];
}

extern "C" void pointwise(const float* a, const float* b, const float* c, float* y, int64 count) {
  FOR_ALL {
    const float t = a[i] * b[i] + c[i];
    y[i] = (t < 0 ? 0 : t) * a[i] - b[i];
  }
}

extern "C" void sum_columns(const float* x, float* y, int64 rows, int64 n) {
  const int64 threads = omp_get_max_threads();
  float* all = scratch<float>(threads * n);
  for (int64 i = 0; i < threads * n; i++) all[i] = 0;
#pragma omp parallel num_threads(threads)
  {
    float* mine = all + omp_get_thread_num() * n;
#pragma omp for schedule(static)
    for (int64 r = 0; r < rows; r++)
#pragma omp simd
      for (int64 i = 0; i < n; i++) mine[i] += x[r * n + i];
  }
  for (int64 i = 0; i < n; i++) y[i] = all[i];
  for (int64 t = 1; t < threads; t++)
    for (int64 i = 0; i < n; i++) y[i] += all[t * n + i];
  free(all);
}

extern "C" void sum_rows(const float* x, float* y, int64 rows, int64 n) {
  FOR_ROWS {
    float s = 0;
#pragma omp simd reduction(+:s)
    for (int64 i = 0; i < n; i++) s += x[r * n + i];
    y[r] = s;
  }
}

extern "C" void argmax_rows(const float* x, int64* y, int64 rows, int64 n) {
  FOR_ROWS {
    const float *a = x + r * n, m = largest(a, n);
    int32 first = n;
#pragma omp simd reduction(min:first)
    for (int32 i = 0; i < n; i++) {
      const int32 here = (a[i] == m) | (a[i] != a[i]) ? i : int32(n);
      first = here < first ? here : first;
    }
    y[r] = first;
  }
}

extern "C" void transpose(const float* x, float* y, int64 rows, int64 n) {
#pragma omp parallel for collapse(2) schedule(static)
  for (int64 i0 = 0; i0 < n; i0 += 16)
    for (int64 r0 = 0; r0 < rows; r0 += 16)
      for (int64 i = i0; i < i0 + 16; i++)
        for (int64 r = r0; r < r0 + 16; r++) y[i * rows + r] = x[r * n + i];
}

/* bfloat16: each operation rounds, as eager's do; 16 bits in memory, float in registers */

INLINE float bf(float x) { return round_bfloat16(x); }

extern "C" void rms_norm_bf16(const u16* x, const u16* w, u16* y, int64 rows, int64 n) {
  FOR_ROWS {
    const u16* a = x + r * n;
    u16* b = y + r * n;
    float s = 0;
#pragma omp simd reduction(+:s)
    for (int64 i = 0; i < n; i++) {
      const float v = load_bfloat16(a[i]);
      s += v * v;
    }
    const float scale = 1 / sqrt_(s / n + 1e-6f);
#pragma omp simd
    for (int64 i = 0; i < n; i++)
      b[i] = store_bfloat16(bf(bf(load_bfloat16(a[i]) * scale) * load_bfloat16(w[i])));
  }
}

extern "C" void swiglu_bf16(const u16* gate, const u16* up, u16* y, int64 count) {
  FOR_ALL {
    const float g = load_bfloat16(gate[i]);
    y[i] = store_bfloat16(bf(bf(g / (1 + exp_(-g))) * load_bfloat16(up[i])));
  }
}
