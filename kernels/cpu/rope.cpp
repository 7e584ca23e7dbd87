// Norms of queries and keys, the rotary embedding, and the write into the KV pool, for CPUs.
//
// Compiled by build.py on first use and called by attention.py, which checks every shape, length and block id
// before a call: nothing is checked here. Activations and arithmetic are float; head_dim is a multiple of 8.

#include "pool.h"
#include "threads.h"

namespace {

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a value is reinterpreted, not converted");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// To nearest, ties to even; NaN stays NaN.
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, BFloat16& y) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  y.bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void from_float(float x, Float16& y) {
#ifdef __F16C__
  y.bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t sign = bit_cast<uint32_t>(x) >> 16 & 0x8000;
  const uint32_t magnitude = bit_cast<uint32_t>(x) & 0x7fffffff;
  uint32_t bits;
  if (magnitude > 0x7f800000)
    bits = 0x7e00;
  else if (magnitude >= 0x477ff000)  // 65520 and more round to infinity.
    bits = 0x7c00;
  else if (magnitude >= 0x38800000)  // 2^-14 and more are normal.
    bits = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
  else  // Adding 0.5 leaves multiples of 2^-24, the step of subnormal numbers.
    bits = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  y.bits = static_cast<uint16_t>(sign | bits);
#endif
}

// Norms of the heads of one token; a null weight leaves them.
struct QkNorm {
  const float* q_weight;  // [head_dim]
  const float* k_weight;  // [head_dim]
  float eps;
};

inline void rms_normalise(float* x, const float* weight, float eps, int64_t dim) {
  Vec squares = {};
  for (int64_t d = 0; d < dim; d += kLanes) squares += load(x + d) * load(x + d);
  const float factor = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(dim) + eps);
  for (int64_t d = 0; d < dim; ++d) x[d] *= factor * weight[d];
}

inline void rotate(float* __restrict low, float* __restrict high, const float* cos, const float* sin, int64_t half) {
  for (int64_t d = 0; d < half; ++d) {
    const float x = low[d], y = high[d];
    low[d] = x * cos[d] - y * sin[d];
    high[d] = y * cos[d] + x * sin[d];
  }
}

template <typename T>
void write_vector(const float* x, T* to, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) from_float(x[d], to[d]);
}

// The largest magnitude becomes 127. A vector with an infinity or NaN is NaN as a whole.
void write_quantised(const float* x, int8_t* to, float& scale, int64_t dim) {
  Vec largest = {};
  IntVec finite = ~IntVec{};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec value = load(x + d), magnitude = value > 0.0f ? value : -value;
    finite &= magnitude < INFINITY;
    largest = magnitude > largest ? magnitude : largest;
  }
  bool is_finite = true;
  for (int i = 0; i < kLanes; ++i) is_finite &= finite[i] != 0;
  scale = is_finite ? max_lane(largest) / 127.0f : NAN;
  for (int64_t d = 0; d < dim; ++d) {
    const float value = std::nearbyint(x[d] / scale);
    // A scale of 0 or NaN gives 0; a subnormal one is so coarse that the quotient may pass 127.
    to[d] = static_cast<int8_t>(value == value ? std::min(std::max(value, -127.0f), 127.0f) : 0.0f);
  }
}

// Normalises and rotates the queries and keys of one token in place and writes its keys and values to their page.
template <typename T>
void rope_and_write_token(float* qkv, int64_t num_heads, const float* cos, const float* sin, const QkNorm& norm,
                          const Pool& pool, int64_t layer, int64_t block, int64_t offset) {
  const int64_t dim = pool.head_dim, half = dim / 2;
  for (int64_t head = 0; head < num_heads + pool.num_kv_heads; ++head) {
    float* x = qkv + head * dim;
    const float* weight = head < num_heads ? norm.q_weight : norm.k_weight;
    if (weight) rms_normalise(x, weight, norm.eps, dim);
    rotate(x, x + half, cos, sin, half);
  }
  const float* k = qkv + num_heads * dim;
  const float* v = k + pool.num_kv_heads * dim;
  for (int64_t head = 0; head < pool.num_kv_heads; ++head) {
    T* page = page_at<T>(pool, block, head, layer);
    const int64_t v_offset = pool.block_size + offset;
    if constexpr (std::is_same_v<T, int8_t>) {
      float* scales = scales_at(pool, block, head, layer);
      write_quantised(k + head * dim, page + offset * dim, scales[offset], dim);
      write_quantised(v + head * dim, page + v_offset * dim, scales[v_offset], dim);
    } else {
      write_vector(k + head * dim, page + offset * dim, dim);
      write_vector(v + head * dim, page + v_offset * dim, dim);
    }
  }
}

template <typename T>
void rope_and_write(float* qkv, int64_t num_heads, const float* cos, const float* sin, const QkNorm& norm,
                    const Pool& pool, int64_t layer, const Batch& batch) {
  const int64_t num_tokens = batch.query_starts[batch.num_rows], half = pool.head_dim / 2;
  const int64_t stride = (num_heads + 2 * pool.num_kv_heads) * pool.head_dim;
  pdserve::Team::get().run(num_tokens, num_tokens * stride >= kSerialWork, [&](int64_t token) {
    const int32_t* next = std::upper_bound(batch.query_starts, batch.query_starts + batch.num_rows + 1, token);
    const int64_t row = next - batch.query_starts - 1;
    const int64_t position = batch.kv_lengths[row] - (*next - token);
    const int32_t* blocks = batch.block_ids + batch.block_starts[row];
    rope_and_write_token<T>(qkv + token * stride, num_heads, cos + token * half, sin + token * half, norm, pool, layer,
                            blocks[position / pool.block_size], position % pool.block_size);
  });
}

}  // namespace

extern "C" {

// qkv is [num_tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous; cos and sin are [num_tokens, head_dim / 2].
// The norms' weights, [head_dim], are null where there are no norms.
void rope_and_write_kv(float* qkv, int64_t num_heads, const float* cos, const float* sin, const float* q_weight,
                       const float* k_weight, float eps, const Pool* pool, int64_t layer, const int32_t* packed_batch) {
  const Batch batch(packed_batch);
  const QkNorm norm{q_weight, k_weight, eps};
  with_dtype(*pool, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    rope_and_write<T>(qkv, num_heads, cos, sin, norm, *pool, layer, batch);
  });
}
}
