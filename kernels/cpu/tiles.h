// What attention on CPUs is computed with: exponentials and products of small matrices.
//
// However many rows and columns are worked on at once, each result is summed in the same order.
//
// Included by attention.cpp. Knows no batch and no pages but as pointers.

#pragma once

#include "pool.h"

namespace {

// 2^x for x <= 0 as power * (1 + fraction). Taylor series of degree 6 on [-0.5, 0.5]: relative error under 2e-7.
// Powers below 2^-126 are meaningless.
struct Exp2 {
  Vec power, fraction;
};

inline Exp2 exp2_parts(Vec x) {
  const Vec magic = Vec{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits.
  const Vec shifted = x + magic;
  const Vec f = x - (shifted - magic);
  Vec y = f * 1.540353039338161e-4f + 1.333355814642844e-3f;
  y = y * f + 9.618129107628477e-3f;
  y = y * f + 5.550410866482158e-2f;
  y = y * f + 2.402265069591007e-1f;
  y = y * f + 6.931471805599453e-1f;
  const IntVec one = IntVec{} + 0x3f800000;
  return {reinterpret_cast<Vec>(one + (reinterpret_cast<IntVec>(shifted) << 23)), y * f};
}

// 2^x for x <= 0, and 0 below 2^-126.
inline Vec exp2_vec(Vec x) {
  const Exp2 e = exp2_parts(x);
  const Vec y = e.power * e.fraction + e.power;
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(y) & ~(x < -126.0f));
}

// tanh |x| = (1 - t) / (1 + t) with t = exp(-2 |x|), and 1 - t is summed so that no digit of a small one is lost.
inline Vec tanh_vec(Vec x) {
  const IntVec sign = reinterpret_cast<IntVec>(x) & INT32_MIN;
  const Vec magnitude = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(x) ^ sign);
  const Vec limited = magnitude > 20.0f ? Vec{} + 20.0f : magnitude;  // Keeps NaN.
  const Exp2 e = exp2_parts(limited * -2.8853900817779268f);          // -2 log2(e)
  const Vec less_one = (e.power - 1.0f) + e.power * e.fraction;       // t - 1
  const Vec y = -less_one / (less_one + 2.0f);
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(y) ^ sign);
}

inline float exp2_float(float x) { return exp2_vec(Vec{} + x)[0]; }

// Sums of four vectors, in the lower lanes those of their lower halves.
inline Vec sum_halves(const Vec a[4]) {
  Vec b[2];
  for (int i = 0; i < 2; ++i)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  return __builtin_shufflevector(b[0], b[1], 0, 1, 8, 9, 4, 5, 12, 13) +
         __builtin_shufflevector(b[0], b[1], 2, 3, 10, 11, 6, 7, 14, 15);
}

// to[i] = sum of the lanes of a[i].
template <int kCount>
inline void store_sums(const Vec a[kCount], float* to) {
  if constexpr (kCount == 8) {
    const Vec low = sum_halves(a), high = sum_halves(a + 4);
    store(to, __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
                  __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15));
  } else if constexpr (kCount == 4) {
    const Vec halves = sum_halves(a);
    const HalfVec sums = __builtin_shufflevector(halves, halves, 0, 1, 2, 3) +
                         __builtin_shufflevector(halves, halves, 4, 5, 6, 7);
    std::memcpy(to, &sums, sizeof sums);
  } else {
    for (int i = 0; i < kCount; ++i) to[i] = sum_lanes(a[i]);
  }
}

// scores[r][j] = q[r] . k[j], of dim numbers each.
template <int kRows, int kKeys, typename T>
inline void dot(const float* q, const T* k, int64_t dim, float* scores, int64_t stride) {
  Vec sum[kRows][kKeys];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kKeys; ++j) sum[r][j] = load(q + r * dim) * load(k + j * dim);
  for (int64_t d = kLanes; d < dim; d += kLanes) {
    Vec x[kRows];
    for (int r = 0; r < kRows; ++r) keep(x[r] = load(q + r * dim + d));
    for (int j = 0; j < kKeys; ++j) {
      Vec y = load(k + j * dim + d);
      if (kRows > 1) keep(y);
      for (int r = 0; r < kRows; ++r) sum[r][j] += x[r] * y;
    }
  }
  for (int r = 0; r < kRows; ++r) store_sums<kKeys>(sum[r], scores + r * stride);
}

// Sixteen keys as `dot_panel` reads them: number d of all of them behind one another, and d in the order 0, 8, 16, ..,
// 1, 9, 17, ..
constexpr int kPanelKeys = 2 * kLanes;

// Lays eight keys out in one half of a panel.
template <typename T>
inline void pack_eight(const T* k, int64_t dim, float* half_panel) {
  for (int64_t d = 0; d < dim; d += 8) {
    Vec a[8], b[8], c[8];
    for (int i = 0; i < 8; ++i) a[i] = load(k + i * dim + d);
    for (int i = 0; i < 8; i += 2) {
      b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
      b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
      for (int n = 0; n < 2; ++n) {
        c[i + 2 * n] = __builtin_shufflevector(b[i + n], b[i + n + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        c[i + 2 * n + 1] = __builtin_shufflevector(b[i + n], b[i + n + 2], 2, 3, 10, 11, 6, 7, 14, 15);
      }
    for (int i = 0; i < 4; ++i) {
      float* to = half_panel + (i * dim / 8 + d / 8) * kPanelKeys;
      store(to, __builtin_shufflevector(c[i], c[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
      store(to + dim / 2 * kPanelKeys, __builtin_shufflevector(c[i], c[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
  }
}

// scores[r][j] = q[r] . k[j] for the keys of a panel. Every eighth product is summed up, and these sums are joined in
// the order of `store_sums`, so that results are those of `dot`.
template <int kRows>
inline void dot_panel(const float* q, const float* panel, int64_t dim, float* scores, int64_t stride) {
  using Sums = Vec[kRows][2];
  const auto every_eighth = [&](int first, Sums& sum) {
    const float* k = panel + first * dim / 8 * kPanelKeys;
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < 2; ++c) sum[r][c] = q[r * dim + first] * load(k + c * kLanes);
    for (int64_t d = first + 8; d < dim; d += 8) {
      k += kPanelKeys;
      const Vec y[2] = {load(k), load(k + kLanes)};
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < 2; ++c) sum[r][c] += q[r * dim + d] * y[c];
    }
  };
  const auto join = [](Sums& sum, const Sums& other) {
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < 2; ++c) sum[r][c] += other[r][c];
  };
  Sums halves[2], pair, sum;
  for (int half = 0; half < 2; ++half) {
    every_eighth(4 * half, halves[half]);
    every_eighth(4 * half + 1, sum);
    join(halves[half], sum);
    every_eighth(4 * half + 2, pair);
    every_eighth(4 * half + 3, sum);
    join(pair, sum);
    join(halves[half], pair);
  }
  join(halves[0], halves[1]);
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < 2; ++c) store(scores + r * stride + c * kLanes, halves[0][r][c]);
}

// Calls function(number of rows, first row) until all rows are done: kMost at a time, and then in fewer.
template <int kMost, typename Function>
inline void in_blocks(int64_t first, int64_t rows, Function function) {
  for (; rows - first >= kMost; first += kMost) function(std::integral_constant<int, kMost>{}, first);
  if constexpr (kMost > 1) in_blocks<(kMost > 3 ? 3 : kMost - 1)>(first, rows, function);
}

// out[r][c] += sum over j of a[r][j] * b[j][column + c], for kCols vectors of columns. The rows of b, b_stride apart,
// lie in pages of page_depth.
template <int kRows, int kCols, typename T>
inline void multiply(const float* a, int64_t a_stride, const T* const* pages, int64_t column, int64_t b_stride,
                     int64_t page_depth, int64_t depth, float* out, int64_t out_stride) {
  Vec sum[kRows][kCols];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c) sum[r][c] = load(out + r * out_stride + c * kLanes);
  for (int64_t start = 0; start < depth; start += page_depth, ++pages) {
    const T* b = *pages + column;
    const int64_t end = std::min(depth, start + page_depth);
    for (int64_t j = start; j < end; ++j, b += b_stride) {
      Vec y[kCols];
      for (int c = 0; c < kCols; ++c) y[c] = load(b + c * kLanes);
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kCols; ++c) sum[r][c] += a[r * a_stride + j] * y[c];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c) store(out + r * out_stride + c * kLanes, sum[r][c]);
}

// Columns from `first` on, kCols vectors at a time and the rest in fewer.
template <int kRows, int kCols, typename T>
inline void multiply_columns(int64_t first, int64_t columns, const float* a, int64_t a_stride, const T* const* pages,
                             int64_t b_stride, int64_t page_depth, int64_t depth, float* out, int64_t out_stride) {
  for (; columns - first >= kCols * kLanes; first += kCols * kLanes)
    multiply<kRows, kCols>(a, a_stride, pages, first, b_stride, page_depth, depth, out + first, out_stride);
  if constexpr (kCols > 1)
    multiply_columns<kRows, kCols / 2>(first, columns, a, a_stride, pages, b_stride, page_depth, depth, out,
                                       out_stride);
}

// Asks memory for what will be read soon: pages are scattered, so the hardware does not foresee them.
template <typename T>
inline void prefetch(const T* from, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i);
}

}  // namespace
