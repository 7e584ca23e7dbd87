// What the kernels over a KV pool share: vectors of eight floats, the pool and the step's batch.
//
// Included by cpu_attention.cpp and cpu_rope.cpp. Pools are [num_blocks, num_kv_heads, num_layers, 2, block_size,
// head_dim] of float, bfloat16, float16, or int8 with a float scale per token, head, layer and side. Vectors are
// written out with the compiler's portable vector type, which suits any instruction set; where it makes poor code of a
// conversion, the instruction is named.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 8;
constexpr int64_t kSerialWork = 1 << 17;  // Multiply-adds below which waking threads costs more than it saves.

using Vec = float __attribute__((vector_size(4 * kLanes)));
using IntVec = int32_t __attribute__((vector_size(4 * kLanes)));
using HalfVec = float __attribute__((vector_size(2 * kLanes)));
using UnalignedVec = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using ShortVec = uint16_t __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
using ByteVec = int8_t __attribute__((vector_size(kLanes), aligned(1), may_alias));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }

// Eight values as floats.
inline Vec load(const BFloat16* p) {
#ifdef __AVX2__
  const auto bits = reinterpret_cast<IntVec>(_mm256_cvtepu16_epi32(*reinterpret_cast<const __m128i_u*>(p)));
#else
  const auto bits = __builtin_convertvector(*reinterpret_cast<const ShortVec*>(p), IntVec);
#endif
  return reinterpret_cast<Vec>(bits << 16);
}
inline Vec load(const int8_t* p) {
#ifdef __AVX2__
  const auto integers = reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
  const auto integers = __builtin_convertvector(*reinterpret_cast<const ByteVec*>(p), IntVec);
#endif
  return __builtin_convertvector(integers, Vec);
}
inline Vec load(const Float16* p) {
#ifdef __F16C__
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(*reinterpret_cast<const __m128i_u*>(p)));
#else
  // A product brings the exponent to its place in a float, and makes subnormals right.
  const IntVec half = __builtin_convertvector(*reinterpret_cast<const ShortVec*>(p), IntVec);
  const IntVec special = (half & 0x7c00) == 0x7c00;  // Infinity and NaN.
  const Vec scaled = reinterpret_cast<Vec>((half & 0x7fff) << 13) * 0x1p112f;
  const IntVec magnitude = reinterpret_cast<IntVec>(scaled) | (special & 0x7f800000);
  return reinterpret_cast<Vec>(magnitude | ((half & 0x8000) << 16));
#endif
}

// Keeps a value in a register: left alone, the compiler reads it from memory again for every use.
inline void keep(Vec& x) {
#ifdef __AVX2__
  asm("" : "+v"(x));
#endif
}

inline float sum_lanes(Vec x) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

inline float max_lane(Vec x) {
  Vec y = __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x = x > y ? x : y;
  y = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
  x = x > y ? x : y;
  return std::max(x[0], x[1]);
}

// One step's ragged batch, as AttentionMetadata.packed has it.
struct Batch {
  explicit Batch(const int32_t* packed)
      : num_rows(packed[0]),
        query_starts(packed + 1),
        kv_lengths(query_starts + num_rows + 1),
        block_starts(kv_lengths + num_rows),
        block_ids(block_starts + num_rows + 1) {}
  int64_t num_rows;
  const int32_t* query_starts;  // [num_rows + 1], into tokens
  const int32_t* kv_lengths;    // [num_rows], new tokens included
  const int32_t* block_starts;  // [num_rows + 1], into block_ids
  const int32_t* block_ids;
};

// Mirrors kv_pool._DTYPES.
enum Dtype : int64_t { kFloat32, kBFloat16, kFloat16, kInt8 };

// A KV pool. Mirrored by kv_pool.PoolStruct.
struct Pool {
  char* data;
  int64_t dtype;
  int64_t num_kv_heads;
  int64_t num_layers;
  int64_t block_size;
  int64_t head_dim;
  int64_t head_bytes;  // Of one KV head in one block.
};

// First element of the keys of a page; its values follow.
template <typename T>
T* page_at(const Pool& pool, int64_t block, int64_t head, int64_t layer) {
  char* keys_of_head = pool.data + (block * pool.num_kv_heads + head) * pool.head_bytes;
  return reinterpret_cast<T*>(keys_of_head) + layer * 2 * pool.block_size * pool.head_dim;
}

// Scales of the keys of a page of int8; those of its values follow. They lie behind all values of the (block, head).
inline float* scales_at(const Pool& pool, int64_t block, int64_t head, int64_t layer) {
  const int64_t num_values = pool.num_layers * 2 * pool.block_size * pool.head_dim;
  char* scales = pool.data + (block * pool.num_kv_heads + head) * pool.head_bytes + num_values;
  return reinterpret_cast<float*>(scales) + layer * 2 * pool.block_size;
}

// Calls `function` with a null pointer to the type of the pool's values.
template <typename Function>
void with_dtype(const Pool& pool, Function function) {
  switch (pool.dtype) {
    case kFloat32: return function(static_cast<float*>(nullptr));
    case kBFloat16: return function(static_cast<BFloat16*>(nullptr));
    case kFloat16: return function(static_cast<Float16*>(nullptr));
    case kInt8: return function(static_cast<int8_t*>(nullptr));
  }
}

}  // namespace
