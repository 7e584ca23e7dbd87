// What the kernels over a KV pool share: the pool, the step's batch, and vectors of eight floats.
//
// Included by attention.cpp and rope.cpp. Pools are [num_blocks, num_kv_heads, num_layers, 2, block_size,
// head_dim] of float, bfloat16, float16, or int8 with a float scale per token, head, layer and side.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define PDSERVE_LANES 8  // Sums of lanes and the order of sums are written for eight.
#include "vectors.h"

namespace {

using namespace pdserve;

constexpr int64_t kSerialWork = 1 << 17;  // Multiply-adds below which waking threads costs more than it saves.

using HalfVec = float __attribute__((vector_size(2 * kLanes)));

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

// Mirrors kv_pool._DTYPES but for float8, of which no pool comes here.
enum Dtype : int64_t { kFloat32, kBFloat16, kFloat16, kInt8 };

// A KV pool. Mirrored by kv_pool.PoolStruct.
struct Pool {
  char* data;
  int64_t dtype;
  int64_t num_kv_heads;
  int64_t num_layers;
  int64_t block_size;
  int64_t head_dim;
  int64_t head_bytes;   // Of one KV head in one block.
  int64_t block_bytes;  // Between blocks, which may have heads of other ranks.
};

// First element of the keys of a page; its values follow.
template <typename T>
T* page_at(const Pool& pool, int64_t block, int64_t head, int64_t layer) {
  char* keys_of_head = pool.data + block * pool.block_bytes + head * pool.head_bytes;
  return reinterpret_cast<T*>(keys_of_head) + layer * 2 * pool.block_size * pool.head_dim;
}

// Scales of the keys of a page of int8; those of its values follow. They lie behind all values of the (block, head).
inline float* scales_at(const Pool& pool, int64_t block, int64_t head, int64_t layer) {
  const int64_t num_values = pool.num_layers * 2 * pool.block_size * pool.head_dim;
  char* scales = pool.data + block * pool.block_bytes + head * pool.head_bytes + num_values;
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
