/* The kernels of cpu_kernels.py as plain loops, by hand: what a careful C++ programmer gets from g++ with dcompile's
   flags. Appended to dcompile's prelude, whose types, roundings and polynomials (exp_, tanh_) it uses. Sizes are
   arguments, results go to memory that is there already. Each kernel is written once, for elements of type T: float, or
   u16 for bfloat16, which is widened when it is read and rounded where eager rounds it. */

#define FOR_ROWS _Pragma("omp parallel for schedule(static)") for (int64 r = 0; r < rows; r++)
#define FOR_ALL _Pragma("omp parallel for simd schedule(static)") for (int64 i = 0; i < count; i++)
#define BOTH(name, parameters, arguments) \
  extern "C" void name##_float32 parameters(float) { name<float> arguments; } \
  extern "C" void name##_bfloat16 parameters(u16) { name<u16> arguments; }

INLINE float get(float x) { return x; }
INLINE float get(u16 x) { return load_bfloat16(x); }
INLINE void put(float& to, float x) { to = x; }
INLINE void put(u16& to, float x) { to = store_bfloat16(round_bfloat16(x)); }
template <class T> INLINE float as(float x) { return sizeof(T) == 2 ? round_bfloat16(x) : x; }

template <class T> static void rms_norm_forward(const T* x, const T* w, T* y, int64 rows, int64 n) {
  FOR_ROWS {
    const T* a = x + r * n;
    T* b = y + r * n;
    float s = 0;
#pragma omp simd reduction(+:s)
    for (int64 i = 0; i < n; i++) s += get(a[i]) * get(a[i]);
    const float scale = 1 / sqrt_(s / n + 1e-6f);
#pragma omp simd
    for (int64 i = 0; i < n; i++) put(b[i], as<T>(get(a[i]) * scale) * get(w[i]));
  }
}
#define P(T) (const T* x, const T* w, T* y, int64 rows, int64 n)
BOTH(rms_norm_forward, P, (x, w, y, rows, n))
#undef P

template <class T>
static void rms_norm_backward(const T* dy, const T* x, const T* w, T* dx, T* dw, int64 rows, int64 n) {
  const int64 threads = omp_get_max_threads();
  float* all = scratch<float>(threads * n);
  for (int64 i = 0; i < threads * n; i++) all[i] = 0;
#pragma omp parallel num_threads(threads)
  {
    float* mine = all + omp_get_thread_num() * n;
#pragma omp for schedule(static)
    for (int64 r = 0; r < rows; r++) {
      const T *a = x + r * n, *d = dy + r * n;
      T* b = dx + r * n;
      float s = 0, t = 0;
#pragma omp simd reduction(+:s, t)
      for (int64 i = 0; i < n; i++) {
        s += get(a[i]) * get(a[i]);
        t += get(d[i]) * get(w[i]) * get(a[i]);
      }
      const float scale = 1 / sqrt_(s / n + 1e-6f), back = scale * scale * t / n;
#pragma omp simd
      for (int64 i = 0; i < n; i++) {
        put(b[i], scale * (get(d[i]) * get(w[i]) - get(a[i]) * back));
        mine[i] += get(d[i]) * get(a[i]) * scale;
      }
    }
  }
  for (int64 t = 1; t < threads; t++)
    for (int64 i = 0; i < n; i++) all[i] += all[t * n + i];
  for (int64 i = 0; i < n; i++) put(dw[i], all[i]);
  free(all);
}
#define P(T) (const T* dy, const T* x, const T* w, T* dx, T* dw, int64 rows, int64 n)
BOTH(rms_norm_backward, P, (dy, x, w, dx, dw, rows, n))
#undef P

template <class T> static void layer_norm_forward(const T* x, const T* w, const T* bias, T* y, int64 rows, int64 n) {
  FOR_ROWS {
    const T* a = x + r * n;
    T* b = y + r * n;
    float s = 0, q = 0;
#pragma omp simd reduction(+:s)
    for (int64 i = 0; i < n; i++) s += get(a[i]);
    const float mean = s / n;
#pragma omp simd reduction(+:q)
    for (int64 i = 0; i < n; i++) q += (get(a[i]) - mean) * (get(a[i]) - mean);
    const float scale = 1 / sqrt_(q / n + 1e-5f);
#pragma omp simd
    for (int64 i = 0; i < n; i++) put(b[i], (get(a[i]) - mean) * scale * get(w[i]) + get(bias[i]));
  }
}
#define P(T) (const T* x, const T* w, const T* bias, T* y, int64 rows, int64 n)
BOTH(layer_norm_forward, P, (x, w, bias, y, rows, n))
#undef P

template <class T> INLINE float largest(const T* a, int64 n) {
  float m = -__builtin_inff();
  int32 nan = 0;
#pragma omp simd reduction(max:m) reduction(|:nan)
  for (int64 i = 0; i < n; i++) {
    const float v = get(a[i]);
    m = v > m ? v : m;
    nan |= v != v;
  }
  return nan ? __builtin_nanf("") : m;
}

/* exponentials of a row, wherever the caller keeps them, and their sum */
template <class T> INLINE float exponentials(const T* a, float m, float* e, int64 n) {
  float s = 0;
#pragma omp simd reduction(+:s)
  for (int64 i = 0; i < n; i++) s += e[i] = exp_(get(a[i]) - m);
  return s;
}

/* a row of float32: the result itself, or memory of its own where the result is narrower */
INLINE float* room(float* b, int64) { return b; }
INLINE float* room(u16*, int64 n) { return scratch<float>(n); }
INLINE void leave(float*, float*) {}
INLINE void leave(u16*, float* e) { free(e); }

template <class T> static void softmax(const T* x, T* y, int64 rows, int64 n) {
  FOR_ROWS {
    const T* a = x + r * n;
    T* b = y + r * n;
    float* e = room(b, n);
    const float scale = 1 / exponentials(a, largest(a, n), e, n);
#pragma omp simd
    for (int64 i = 0; i < n; i++) put(b[i], e[i] * scale);
    leave(b, e);
  }
}
#define P(T) (const T* x, T* y, int64 rows, int64 n)
BOTH(softmax, P, (x, y, rows, n))
#undef P

template <class T> INLINE float log_sum_exp(const T* a, int64 n) {
  const float m = largest(a, n);
  float s = 0;
#pragma omp simd reduction(+:s)
  for (int64 i = 0; i < n; i++) s += exp_(get(a[i]) - m);
  return m + log_(s);
}

template <class T> static void cross_entropy_forward(const T* x, const int64* labels, T* loss, int64 rows, int64 n) {
  float total = 0;
#pragma omp parallel for schedule(static) reduction(+:total)
  for (int64 r = 0; r < rows; r++) total += as<T>(log_sum_exp(x + r * n, n) - get(x[r * n + labels[r]]));
  put(*loss, total / rows);
}
#define P(T) (const T* x, const int64* labels, T* loss, int64 rows, int64 n)
BOTH(cross_entropy_forward, P, (x, labels, loss, rows, n))
#undef P

template <class T>
static void cross_entropy_backward(const T* x, const int64* labels, const float* lse, T* dx, int64 rows, int64 n) {
  FOR_ROWS {
    const T* a = x + r * n;
    const float shift = lse[r], scale = 1.f / rows;
    T* b = dx + r * n;
#pragma omp simd
    for (int64 i = 0; i < n; i++) put(b[i], exp_(as<T>(get(a[i]) - shift)) * scale);
    put(b[labels[r]], get(b[labels[r]]) - scale);
  }
}
#define P(T) (const T* x, const int64* labels, const float* lse, T* dx, int64 rows, int64 n)
BOTH(cross_entropy_backward, P, (x, labels, lse, dx, rows, n))
#undef P

template <class T>
static void cross_entropy_both(const T* x, const int64* labels, T* loss, T* dx, int64 rows, int64 n) {
  float total = 0;
#pragma omp parallel for schedule(static) reduction(+:total)
  for (int64 r = 0; r < rows; r++) {
    const T* a = x + r * n;
    T* b = dx + r * n;
    float* e = room(b, n);
    const float m = largest(a, n), s = exponentials(a, m, e, n), once = 1.f / rows, scale = once / s;
#pragma omp simd
    for (int64 i = 0; i < n; i++) put(b[i], e[i] * scale);
    leave(b, e);
    put(b[labels[r]], get(b[labels[r]]) - once);
    total += as<T>(m + log_(s) - get(a[labels[r]]));
  }
  put(*loss, total / rows);
}
#define P(T) (const T* x, const int64* labels, T* loss, T* dx, int64 rows, int64 n)
BOTH(cross_entropy_both, P, (x, labels, loss, dx, rows, n))
#undef P

/* one element of AdamW, rounded after each operation as eager's foreach and in-place operations do */
template <class T> INLINE void adamw_element(T& p, float g, T& m, T& v, float correction1, float correction2) {
  const float a = as<T>(get(m) + 0.1f * (g - get(m))), b = as<T>(as<T>(get(v) * 0.999f) + 0.001f * g * g);
  put(m, a);
  put(v, b);
  const float root = as<T>(as<T>(sqrt_(as<T>(b / correction2))) + 1e-8f);
  put(p, as<T>(get(p) * (1 - 1e-3f * 0.01f)) - as<T>(as<T>(1e-3f / correction1 * a) / root));
}

template <class T>
static void adamw(T* p, const T* g, T* m, T* v, int64 count, float correction1, float correction2) {
  FOR_ALL adamw_element(p[i], get(g[i]), m[i], v[i], correction1, correction2);
}
#define P(T) (T* p, const T* g, T* m, T* v, int64 count, float correction1, float correction2)
BOTH(adamw, P, (p, g, m, v, count, correction1, correction2))
#undef P

/* the same in float32, rounded once, as eager's fused kernel does */
template <class T> INLINE void fused_adamw_element(T& p, float g, T& m, T& v, float correction1, float correction2) {
  const float a = 0.9f * get(m) + 0.1f * g, b = 0.999f * get(v) + 0.001f * g * g;
  put(m, a);
  put(v, b);
  put(p, get(p) * (1 - 1e-3f * 0.01f) - 1e-3f / correction1 * a / (sqrt_(b / correction2) + 1e-8f));
}

template <class T>
static void adamw_many(T* const* p, const T* const* g, T* const* m, T* const* v, int64 tensors, int64 count,
                       float correction1, float correction2) {
#pragma omp parallel for schedule(static)
  for (int64 t = 0; t < tensors; t++) {
    T *pt = p[t], *mt = m[t], *vt = v[t];
    const T* gt = g[t];
#pragma omp simd
    for (int64 i = 0; i < count; i++) fused_adamw_element(pt[i], get(gt[i]), mt[i], vt[i], correction1, correction2);
  }
}
#define P(T) (T* const* p, const T* const* g, T* const* m, T* const* v, int64 tensors, int64 count, float c1, float c2)
BOTH(adamw_many, P, (p, g, m, v, tensors, count, c1, c2))
#undef P

template <class T> static void bias_gelu(const T* x, const T* bias, T* y, int64 rows, int64 n) {
  FOR_ROWS {
#pragma omp simd
    for (int64 i = 0; i < n; i++) {
      const float a = as<T>(get(x[r * n + i]) + get(bias[i]));
      put(y[r * n + i], 0.5f * a * (1 + tanh_(0.7978845608f * (a + 0.044715f * a * a * a))));
    }
  }
}
#define P(T) (const T* x, const T* bias, T* y, int64 rows, int64 n)
BOTH(bias_gelu, P, (x, bias, y, rows, n))
#undef P

template <class T> static void swiglu(const T* gate, const T* up, T* y, int64 count) {
  FOR_ALL {
    const float g = get(gate[i]);
    put(y[i], as<T>(g / (1 + exp_(-g))) * get(up[i]));
  }
}
#define P(T) (const T* gate, const T* up, T* y, int64 count)
BOTH(swiglu, P, (gate, up, y, count))
#undef P

template <class T> static void pointwise(const T* a, const T* b, const T* c, T* y, int64 count) {
  FOR_ALL {
    const float t = as<T>(as<T>(get(a[i]) * get(b[i])) + get(c[i]));
    put(y[i], as<T>((t < 0 ? 0 : t) * get(a[i])) - get(b[i]));
  }
}
#define P(T) (const T* a, const T* b, const T* c, T* y, int64 count)
BOTH(pointwise, P, (a, b, c, y, count))
#undef P

template <class T> static void sum_columns(const T* x, T* y, int64 rows, int64 n) {
  const int64 threads = omp_get_max_threads();
  float* all = scratch<float>(threads * n);
  for (int64 i = 0; i < threads * n; i++) all[i] = 0;
#pragma omp parallel num_threads(threads)
  {
    float* mine = all + omp_get_thread_num() * n;
#pragma omp for schedule(static)
    for (int64 r = 0; r < rows; r++)
#pragma omp simd
      for (int64 i = 0; i < n; i++) mine[i] += get(x[r * n + i]);
  }
  for (int64 t = 1; t < threads; t++)
    for (int64 i = 0; i < n; i++) all[i] += all[t * n + i];
  for (int64 i = 0; i < n; i++) put(y[i], all[i]);
  free(all);
}
#define P(T) (const T* x, T* y, int64 rows, int64 n)
BOTH(sum_columns, P, (x, y, rows, n))

template <class T> static void sum_rows(const T* x, T* y, int64 rows, int64 n) {
  FOR_ROWS {
    float s = 0;
#pragma omp simd reduction(+:s)
    for (int64 i = 0; i < n; i++) s += get(x[r * n + i]);
    put(y[r], s);
  }
}
BOTH(sum_rows, P, (x, y, rows, n))

template <class T> static void transpose(const T* x, T* y, int64 rows, int64 n) {
#pragma omp parallel for collapse(2) schedule(static)
  for (int64 i0 = 0; i0 < n; i0 += 16)
    for (int64 r0 = 0; r0 < rows; r0 += 16)
      for (int64 i = i0; i < i0 + 16; i++)
        for (int64 r = r0; r < r0 + 16; r++) y[i * rows + r] = x[r * n + i];
}
BOTH(transpose, P, (x, y, rows, n))
#undef P

template <class T> static void argmax_rows(const T* x, int64* y, int64 rows, int64 n) {
  FOR_ROWS {
    const T* a = x + r * n;
    const float m = largest(a, n);
    int32 first = n;
#pragma omp simd reduction(min:first)
    for (int32 i = 0; i < n; i++) {
      const float v = get(a[i]);
      const int32 here = (v == m) | (v != v) ? i : int32(n);
      first = here < first ? here : first;
    }
    y[r] = first;
  }
}
#define P(T) (const T* x, int64* y, int64 rows, int64 n)
BOTH(argmax_rows, P, (x, y, rows, n))
