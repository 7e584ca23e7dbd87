// Products of pairs of bfloat16 with sums in float, for attention on CPUs with AVX-512 BF16.
//
// A product of matrices sums in the order of the pairs, however many rows and columns are worked on at once.
//
// Included by attention.cpp. Knows no batch and no pages but as pointers.

#pragma once

#include <vector>

#include "pool.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PDSERVE_BFLOAT16_PRODUCTS

namespace {

constexpr int64_t kPairLanes = 16;

struct alignas(64) Line {
  uint32_t pairs[kPairLanes];
};

// Rows of pairs, each a whole number of lines.
struct PairRows {
  std::vector<Line> lines;
  int64_t stride = 0;  // Pairs of a row.

  void fit(int64_t rows, int64_t pairs) {
    stride = (pairs + kPairLanes - 1) / kPairLanes * kPairLanes;
    lines.resize(rows * stride / kPairLanes);
  }
  uint32_t* row(int64_t i) { return lines.data()->pairs + i * stride; }
};

// `count` floats, rounded. What is read and written is a multiple of 16 of them.
inline void round_to_pairs(const float* from, int64_t count, uint32_t* to) {
  for (int64_t i = 0; i < count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i / 2),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i))));
}

// to[d][i] = numbers 2 d and 2 d + 1 of keys[i], or zeros where that is null. Rows up to a multiple of 16 are written.
inline void pack_keys(const BFloat16* const keys[kPairLanes], int64_t dim, uint32_t* to, int64_t stride) {
  for (int64_t first = 0; first < dim / 2; first += kPairLanes) {
    const auto pairs = static_cast<__mmask16>((1 << std::min(dim / 2 - first, kPairLanes)) - 1);
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = keys[i] ? _mm512_maskz_loadu_epi32(pairs, keys[i] + 2 * first) : __m512i{};
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
      for (int n = 0; n < 2; ++n) {
        a[i + 2 * n] = _mm512_unpacklo_epi64(b[i + n], b[i + n + 2]);
        a[i + 2 * n + 1] = _mm512_unpackhi_epi64(b[i + n], b[i + n + 2]);
      }
    // Quarter l of a[4 k + n] has pair 4 l + n of keys 4 k to 4 k + 3.
    for (int n = 0; n < 4; ++n) {
      const __m512i c[] = {_mm512_shuffle_i32x4(a[n], a[n + 4], 0x88), _mm512_shuffle_i32x4(a[n], a[n + 4], 0xdd),
                           _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0x88),
                           _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0xdd)};
      for (int odd = 0; odd < 2; ++odd) {
        _mm512_storeu_si512(to + (first + 4 * odd + n) * stride, _mm512_shuffle_i32x4(c[odd], c[odd + 2], 0x88));
        _mm512_storeu_si512(to + (first + 8 + 4 * odd + n) * stride, _mm512_shuffle_i32x4(c[odd], c[odd + 2], 0xdd));
      }
    }
  }
}

// to[d] = number d of both values, or zero in place of one that is null. dim is a multiple of 16.
inline void pack_values(const BFloat16* const values[2], int64_t dim, uint32_t* to) {
  const auto load_words = [](const BFloat16* from, int64_t d) {
    return from ? _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + d))) : __m512i{};
  };
  for (int64_t d = 0; d < dim; d += kPairLanes)
    _mm512_storeu_si512(
        to + d, _mm512_or_si512(load_words(values[0], d), _mm512_slli_epi32(load_words(values[1], d), 16)));
}

// out[r][c] = (adds ? out[r][c] : 0) + sum over s of a[r][s] * b[s][c], for kCols vectors of columns.
template <int kRows, int kCols>
inline void multiply_pairs(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t steps,
                           float* out, int64_t out_stride, bool adds) {
  __m512 sum[kRows][kCols];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c)
      sum[r][c] = adds ? _mm512_loadu_ps(out + r * out_stride + c * kPairLanes) : __m512{};
  for (int64_t s = 0; s < steps; ++s, b += b_stride) {
    __m512i y[kCols];
    for (int c = 0; c < kCols; ++c) y[c] = _mm512_loadu_si512(b + c * kPairLanes);
    for (int r = 0; r < kRows; ++r) {
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(a[r * a_stride + s])));
      for (int c = 0; c < kCols; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], x, reinterpret_cast<__m512bh>(y[c]));
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c) _mm512_storeu_ps(out + r * out_stride + c * kPairLanes, sum[r][c]);
}

// Of `columns`, a multiple of 16, kCols vectors at a time and the rest in fewer.
template <int kRows, int kCols>
inline void multiply_pair_columns(int64_t columns, const uint32_t* a, int64_t a_stride, const uint32_t* b,
                                  int64_t b_stride, int64_t steps, float* out, int64_t out_stride, bool adds) {
  constexpr int64_t kWidth = kCols * kPairLanes;
  for (; columns >= kWidth; columns -= kWidth, b += kWidth, out += kWidth)
    multiply_pairs<kRows, kCols>(a, a_stride, b, b_stride, steps, out, out_stride, adds);
  if constexpr (kCols > 1)
    multiply_pair_columns<kRows, kCols / 2>(columns, a, a_stride, b, b_stride, steps, out, out_stride, adds);
}

}  // namespace

#endif
