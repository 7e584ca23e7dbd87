// Vectors of floats as wide as the CPU's registers, in the compiler's portable vector type, and loads that make floats
// of narrower values. Who needs another width defines PDSERVE_LANES first; functions are static, so that sources of
// different widths can be linked.

#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef PDSERVE_LANES
#ifdef __AVX512F__
#define PDSERVE_LANES 16
#else
#define PDSERVE_LANES 8
#endif
#endif

namespace pdserve {

constexpr int kLanes = PDSERVE_LANES;

using Vec = float __attribute__((vector_size(4 * kLanes)));
using IntVec = int32_t __attribute__((vector_size(4 * kLanes)));
using UnalignedVec = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using UnalignedIntVec = int32_t __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));
using ShortVec = uint16_t __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
using ByteVec = int8_t __attribute__((vector_size(kLanes), aligned(1), may_alias));

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// Four bits of exponent and three of mantissa.
struct E4m3 {
  uint8_t bits;
};

static inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
static inline void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }

// kLanes values as integers, or as floats. Where the compiler makes poor code of the portable form, the instruction is
// named.
static inline IntVec load_integers(const int8_t* p) {
#if PDSERVE_LANES == 16
  return reinterpret_cast<IntVec>(_mm512_cvtepi8_epi32(*reinterpret_cast<const __m128i_u*>(p)));
#elif defined(__AVX2__)
  return reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const ByteVec*>(p), IntVec);
#endif
}

static inline Vec load(const int8_t* p) { return __builtin_convertvector(load_integers(p), Vec); }

static inline Vec load(const BFloat16* p) {
#if PDSERVE_LANES == 16
  const auto bits = reinterpret_cast<IntVec>(_mm512_cvtepu16_epi32(*reinterpret_cast<const __m256i_u*>(p)));
#elif defined(__AVX2__)
  const auto bits = reinterpret_cast<IntVec>(_mm256_cvtepu16_epi32(*reinterpret_cast<const __m128i_u*>(p)));
#else
  const auto bits = __builtin_convertvector(*reinterpret_cast<const ShortVec*>(p), IntVec);
#endif
  return reinterpret_cast<Vec>(bits << 16);
}

static inline Vec from_float16(ShortVec bits) {
#if PDSERVE_LANES == 16
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(bits)));
#elif defined(__F16C__)
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(bits)));
#else
  // A product brings the exponent to its place in a float, and makes subnormals right.
  const IntVec half = __builtin_convertvector(bits, IntVec);
  const IntVec special = (half & 0x7c00) == 0x7c00;
  const Vec scaled = reinterpret_cast<Vec>((half & 0x7fff) << 13) * 0x1p112f;
  const IntVec magnitude = reinterpret_cast<IntVec>(scaled) | (special & 0x7f800000);
  return reinterpret_cast<Vec>(magnitude | ((half & 0x8000) << 16));
#endif
}

static inline Vec load(const Float16* p) { return from_float16(*reinterpret_cast<const ShortVec*>(p)); }

// 2^-8 times the values: the bits of a float16 whose exponent has another bias. That of a float would do for a shift
// alone, but products with it are too small for a float where activations are. NaN becomes a number.
static inline Vec load(const E4m3* p) {
#if PDSERVE_LANES == 16
  const auto spread = reinterpret_cast<ShortVec>(_mm256_cvtepi8_epi16(*reinterpret_cast<const __m128i_u*>(p)));
#elif defined(__AVX2__)
  const auto spread = reinterpret_cast<ShortVec>(_mm_cvtepi8_epi16(_mm_loadu_si64(p)));
#else
  const auto spread = __builtin_convertvector(*reinterpret_cast<const ByteVec*>(p), ShortVec);
#endif
  return from_float16((spread << 7) & 0xbfff);  // Of the signs that were spread, the first stays.
}

}  // namespace pdserve
