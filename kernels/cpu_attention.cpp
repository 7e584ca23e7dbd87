// Paged attention over a ragged batch, and the rotary write into the pool, for CPUs.
//
// Compiled by cpu_build.py on first use and called by cpu_attention.py, which checks every shape, length and block id
// before a call: nothing is checked here. Pools are [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim] of
// float, bfloat16, float16, or int8 with a float scale per token, head, layer and side; activations and arithmetic are
// float. head_dim is a multiple of 8.
//
// Attention is FlashAttention's online softmax (Dao et al. 2022, algorithm 1) with one KV page as the key tile. Masked
// keys are never computed with, so no infinities occur and pages may hold anything past their last valid token. No
// -ffast-math: vectors are written out with the compiler's portable vector type, which suits any instruction set.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu_threads.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

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

// How a layer attends: operations.AttentionRule.
struct Rule {
  float scale;
  int64_t window;  // 0: no limit.
  float softcap;   // 0: none.
};

constexpr int kLanes = 8;
constexpr int kTileRows = 32;  // Rows (token, query head of the group) of one task.
// A row with a single query tile is cut into runs of about this many keys. Constant, so that a row's result depends on
// neither its neighbours nor the number of threads.
constexpr int64_t kSplitKeys = 1024;
constexpr int64_t kSerialWork = 1 << 17;  // Multiply-adds below which waking threads costs more than it saves.
constexpr float kLowest = -1e30f;

using Vec = float __attribute__((vector_size(4 * kLanes)));
using IntVec = int32_t __attribute__((vector_size(4 * kLanes)));
using UnalignedVec = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a value is reinterpreted, not converted");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float to_float(int8_t x) { return x; }
inline float to_float(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }
inline float to_float(Float16 x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  uint32_t bits = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);  // Moves the exponent's bias.
  if (magnitude >= 0x0f800000) bits |= 0x7f800000;                            // Infinity and NaN.
  return bit_cast<float>(bits | (x.bits & 0x8000u) << 16);
#endif
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

// Sums of eight vectors, one per lane.
inline Vec sum_each(const Vec a[8]) {
  Vec b[4], c[2];
  for (int i = 0; i < 4; ++i)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  for (int i = 0; i < 2; ++i)
    c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(b[2 * i], b[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15);
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

// score[j] = q . k[j] for eight consecutive keys.
inline void score_eight(const float* q, const float* k, int64_t dim, float* score) {
  Vec sum[8] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec q_vec = load(q + d);
    for (int j = 0; j < 8; ++j) sum[j] += q_vec * load(k + j * dim + d);
  }
  store(score, sum_each(sum));
}

inline float score_one(const float* q, const float* k, int64_t dim) {
  Vec sum = {};
  for (int64_t d = 0; d < dim; d += kLanes) sum += load(q + d) * load(k + d);
  return sum_lanes(sum);
}

// out[0 .. 8 * kVecs) += sum over j of p[j] * v[j], with the sums held in registers.
template <int kVecs>
inline void accumulate(const float* p, const float* v, int64_t num_keys, int64_t dim, float* out) {
  Vec sum[kVecs];
  for (int i = 0; i < kVecs; ++i) sum[i] = load(out + i * kLanes);
  for (int64_t j = 0; j < num_keys; ++j)
    for (int i = 0; i < kVecs; ++i) sum[i] += p[j] * load(v + j * dim + i * kLanes);
  for (int i = 0; i < kVecs; ++i) store(out + i * kLanes, sum[i]);
}

inline void accumulate_row(const float* p, const float* v, int64_t num_keys, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64) accumulate<8>(p, v + d, num_keys, dim, out + d);
  for (; d + 32 <= dim; d += 32) accumulate<4>(p, v + d, num_keys, dim, out + d);
  for (; d + 16 <= dim; d += 16) accumulate<2>(p, v + d, num_keys, dim, out + d);
  for (; d < dim; d += 8) accumulate<1>(p, v + d, num_keys, dim, out + d);
}

// Asks for the next page while this one is worked on: pages are scattered, so the hardware does not foresee them.
template <typename T>
inline void prefetch(const T* page, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(page + i);
}

// A page as floats: itself, or converted into scratch.
inline const float* as_float(const float* page, int64_t, float*) { return page; }
template <typename T>
inline const float* as_float(const T* page, int64_t count, float* scratch) {
  for (int64_t i = 0; i < count; ++i) scratch[i] = to_float(page[i]);
  return scratch;
}
#ifdef __F16C__
inline const float* as_float(const Float16* page, int64_t count, float* scratch) {  // Whole vectors: head_dim has them.
  for (int64_t i = 0; i < count; i += kLanes)
    _mm256_storeu_ps(scratch + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(page + i))));
  return scratch;
}
#endif

// First element of the keys of a page; its values follow.
template <typename T>
T* page_at(const Pool& pool, int64_t block, int64_t head, int64_t layer) {
  char* keys_of_head = pool.data + (block * pool.num_kv_heads + head) * pool.head_bytes;
  return reinterpret_cast<T*>(keys_of_head) + layer * 2 * pool.block_size * pool.head_dim;
}

// Scales of the keys of a page, or null; those of its values follow. They lie behind all values of the (block, head).
template <typename T>
float* scales_at(const Pool& pool, int64_t block, int64_t head, int64_t layer) {
  if (!std::is_same_v<T, int8_t>) return nullptr;
  const int64_t num_vectors = pool.num_layers * 2 * pool.block_size;
  char* scales = pool.data + (block * pool.num_kv_heads + head) * pool.head_bytes + num_vectors * pool.head_dim;
  return reinterpret_cast<float*>(scales) + layer * 2 * pool.block_size;
}

// One row's query tokens [first_token, end_token) on one KV head against keys [first_key, end_key).
struct Task {
  int64_t row, head, first_token, end_token, first_key, end_key;
  int64_t partial;  // Index of the first of its rows in the partial results; -1 when it sees all keys.
};

// Running softmax of a task's rows: unnormalised output, maximum and sum, in powers of two.
struct Softmax {
  float* out;  // [rows, dim]
  float* max;  // [rows]
  float* sum;  // [rows, kLanes]: to be added up at the end
};

// Keys and values as floats, each to be multiplied by its scale unless those are null.
struct Keys {
  const float *k, *v, *k_scales, *v_scales;
  int64_t count;
  int64_t num_readable;  // As many are there to be read.
};

// Adds keys to row m of the softmax. `scores` has room for a page, rounded up to 8. `cap` is in powers of two, as scores
// are; scores are already divided by it.
inline void add_keys(const float* q, const Keys& keys, int64_t dim, float cap, float* scores, const Softmax& softmax,
                     int64_t m) {
  const int64_t num_keys = keys.count;
  int64_t j = 0;
  for (; j < num_keys && j + 8 <= keys.num_readable; j += 8) score_eight(q, keys.k + j * dim, dim, scores + j);
  for (; j < num_keys; ++j) scores[j] = score_one(q, keys.k + j * dim, dim);
  if (keys.k_scales)
    for (j = 0; j < num_keys; ++j) scores[j] *= keys.k_scales[j];
  if (cap > 0)
    for (j = 0; j < num_keys; j += kLanes) store(scores + j, cap * tanh_vec(load(scores + j)));
  const int64_t padded = (num_keys + kLanes - 1) / kLanes * kLanes;
  for (j = num_keys; j < padded; ++j) scores[j] = kLowest;

  Vec highest = load(scores);
  for (j = kLanes; j < padded; j += kLanes) highest = load(scores + j) > highest ? load(scores + j) : highest;
  const float max = std::max(softmax.max[m], max_lane(highest));
  Vec sum = load(softmax.sum + m * kLanes);
  if (max > softmax.max[m]) {
    const float scale = exp2_float(softmax.max[m] - max);
    for (int64_t d = 0; d < dim; ++d) softmax.out[m * dim + d] *= scale;
    sum *= scale;
    softmax.max[m] = max;
  }
  for (j = 0; j < padded; j += kLanes) {
    const Vec p = exp2_vec(load(scores + j) - max);
    store(scores + j, p);
    sum += p;
  }
  store(softmax.sum + m * kLanes, sum);
  if (keys.v_scales)
    for (j = 0; j < num_keys; ++j) scores[j] *= keys.v_scales[j];
  accumulate_row(scores, keys.v, num_keys, dim, softmax.out + m * dim);
}

// Per-thread working memory, kept between calls.
struct Scratch {
  std::vector<float> q, out, max, sum, k, v, scores;
  void fit(int64_t rows, int64_t dim, int64_t block_size) {
    q.resize(rows * dim);
    out.assign(rows * dim, 0.0f);
    max.assign(rows, kLowest);
    sum.assign(rows * kLanes, 0.0f);
    k.resize(block_size * dim);
    v.resize(block_size * dim);
    scores.resize(block_size + kLanes);
  }
};

template <typename T>
struct Attention {
  const float* q;  // [num_tokens, num_heads, head_dim], token stride q_stride
  int64_t q_stride;
  float* out;  // [num_tokens, num_heads, head_dim]
  int64_t group;
  const Pool& pool;
  int64_t layer;
  const Batch& batch;
  Rule rule;
  std::vector<Task> tasks;
  std::vector<float> partial_out, partial_max, partial_sum;

  int64_t num_heads() const { return pool.num_kv_heads * group; }
  int64_t num_new(int64_t row) const { return batch.query_starts[row + 1] - batch.query_starts[row]; }
  // First key that the token at `position` sees.
  int64_t first_seen(int64_t position) const {
    return rule.window ? std::max<int64_t>(0, position - rule.window + 1) : 0;
  }

  // Cuts the batch into tasks; returns their multiply-adds.
  int64_t plan() {
    const int64_t tile_tokens = std::max<int64_t>(1, kTileRows / group);
    int64_t work = 0, num_partials = 0;
    for (int64_t row = 0; row < batch.num_rows; ++row) {
      const int64_t n = num_new(row), cached = batch.kv_lengths[row] - n;
      const int64_t split_keys = std::max<int64_t>(1, kSplitKeys / pool.block_size) * pool.block_size;
      for (int64_t head = 0; head < pool.num_kv_heads; ++head)
        for (int64_t first = 0; first < n; first += tile_tokens) {
          const int64_t end = std::min(n, first + tile_tokens), end_key = cached + end;
          const int64_t first_key = first_seen(cached + first) / pool.block_size * pool.block_size;
          const bool split = n <= tile_tokens && end_key - first_key > split_keys;
          const int64_t step = split ? split_keys : end_key - first_key;
          for (int64_t key = first_key; key < end_key; key += step) {
            tasks.push_back({row, head, first, end, key, std::min(end_key, key + step), split ? num_partials : -1});
            num_partials += split ? (end - first) * group : 0;
          }
          work += (end - first) * group * (end_key - first_key) * pool.head_dim * 2;
        }
    }
    partial_out.resize(num_partials * pool.head_dim);
    partial_max.resize(num_partials);
    partial_sum.resize(num_partials);
    return work;
  }

  void run(const Task& task) {
    thread_local Scratch scratch;
    const int64_t dim = pool.head_dim, block_size = pool.block_size, rows = (task.end_token - task.first_token) * group;
    scratch.fit(rows, dim, block_size);
    const Softmax softmax{scratch.out.data(), scratch.max.data(), scratch.sum.data()};
    const int64_t start = batch.query_starts[task.row] + task.first_token;
    const float log2e = 1.4426950408889634f;  // Scores are in powers of two.
    const float scale = rule.softcap > 0 ? rule.scale / rule.softcap : rule.scale * log2e;
    const float cap = rule.softcap * log2e;
    for (int64_t m = 0; m < rows; ++m) {
      const float* from = q + (start + m / group) * q_stride + (task.head * group + m % group) * dim;
      for (int64_t d = 0; d < dim; ++d) scratch.q[m * dim + d] = from[d] * scale;
    }
    const int32_t* blocks = batch.block_ids + batch.block_starts[task.row];
    const int64_t first_position = batch.kv_lengths[task.row] - num_new(task.row) + task.first_token;
    for (int64_t key = task.first_key; key < task.end_key; key += block_size) {
      const T* page = page_at<T>(pool, blocks[key / block_size], task.head, layer);
      const int64_t count = std::min(block_size, task.end_key - key) * dim;
      if (key + block_size < task.end_key)
        prefetch(page_at<T>(pool, blocks[key / block_size + 1], task.head, layer), 2 * block_size * dim);
      const float* k = as_float(page, count, scratch.k.data());
      const float* v = as_float(page + block_size * dim, count, scratch.v.data());
      const float* scales = scales_at<T>(pool, blocks[key / block_size], task.head, layer);
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t position = first_position + m / group;
        const int64_t from = std::max<int64_t>(0, first_seen(position) - key);
        const int64_t to = std::min({task.end_key - key, position + 1 - key, block_size});
        if (from >= to) continue;
        const Keys keys{k + from * dim,
                        v + from * dim,
                        scales ? scales + from : nullptr,
                        scales ? scales + block_size + from : nullptr,
                        to - from,
                        block_size - from};
        add_keys(scratch.q.data() + m * dim, keys, dim, cap, scratch.scores.data(), softmax, m);
      }
    }
    if (task.partial < 0) {
      for (int64_t m = 0; m < rows; ++m)
        write(task, m, softmax.out + m * dim, 1.0f / sum_lanes(load(softmax.sum + m * kLanes)));
    } else {
      for (int64_t m = 0; m < rows; ++m) partial_sum[task.partial + m] = sum_lanes(load(softmax.sum + m * kLanes));
      std::copy_n(softmax.out, rows * dim, partial_out.data() + task.partial * dim);
      std::copy_n(softmax.max, rows, partial_max.data() + task.partial);
    }
  }

  void write(const Task& task, int64_t m, const float* from, float factor) {
    const int64_t token = batch.query_starts[task.row] + task.first_token + m / group;
    float* to = out + (token * num_heads() + task.head * group + m % group) * pool.head_dim;
    for (int64_t d = 0; d < pool.head_dim; ++d) to[d] = from[d] * factor;
  }

  // Joins the splits tasks[first, end) of one (row, KV head) in key order.
  void merge(int64_t first, int64_t end) {
    const Task& task = tasks[first];
    const int64_t dim = pool.head_dim, rows = (task.end_token - task.first_token) * group;
    std::vector<float> total(dim);
    for (int64_t m = 0; m < rows; ++m) {
      float max = kLowest, sum = 0;
      for (int64_t i = first; i < end; ++i) max = std::max(max, partial_max[tasks[i].partial + m]);
      std::fill(total.begin(), total.end(), 0.0f);
      for (int64_t i = first; i < end; ++i) {
        const int64_t partial = tasks[i].partial + m;
        const float weight = exp2_float(partial_max[partial] - max);
        sum += weight * partial_sum[partial];
        for (int64_t d = 0; d < dim; ++d) total[d] += weight * partial_out[partial * dim + d];
      }
      write(task, m, total.data(), 1.0f / sum);
    }
  }

  void operator()() {
    const bool is_worth_it = plan() >= kSerialWork;
    const int64_t num_tasks = static_cast<int64_t>(tasks.size());
    pdserve::Team::get().run(num_tasks, is_worth_it, [&](int64_t i) { run(tasks[i]); });
    for (int64_t i = 0; i < num_tasks;) {
      const int64_t first = i++;
      if (tasks[first].partial < 0) continue;
      while (i < num_tasks && tasks[i].row == tasks[first].row && tasks[i].head == tasks[first].head) ++i;
      merge(first, i);
    }
  }
};

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
void write_vector(const float* x, T* to, int64_t dim, float*, int64_t) {
  for (int64_t d = 0; d < dim; ++d) from_float(x[d], to[d]);
}

// The largest magnitude becomes 127. A vector with an infinity or NaN is NaN as a whole.
void write_vector(const float* x, int8_t* to, int64_t dim, float* scales, int64_t index) {
  Vec largest = {};
  IntVec finite = ~IntVec{};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec value = load(x + d), magnitude = value > 0.0f ? value : -value;
    finite &= magnitude < INFINITY;
    largest = magnitude > largest ? magnitude : largest;
  }
  bool is_finite = true;
  for (int i = 0; i < kLanes; ++i) is_finite &= finite[i] != 0;
  const float scale = is_finite ? max_lane(largest) / 127.0f : NAN;
  scales[index] = scale;
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
    float* scales = scales_at<T>(pool, block, head, layer);
    const int64_t v_offset = pool.block_size + offset;
    write_vector(k + head * dim, page + offset * dim, dim, scales, offset);
    write_vector(v + head * dim, page + v_offset * dim, dim, scales, v_offset);
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

extern "C" {

// q and out are [num_tokens, num_heads, head_dim]; q's token stride is q_stride elements, out is contiguous.
void paged_attention(const float* q, int64_t q_stride, float* out, int64_t num_heads, float scale, int64_t window,
                     float softcap, const Pool* pool, int64_t layer, const int32_t* packed_batch) {
  const Batch batch(packed_batch);
  const int64_t group = num_heads / pool->num_kv_heads;
  const Rule rule{scale, window, softcap};
  with_dtype(*pool, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    Attention<T>{q, q_stride, out, group, *pool, layer, batch, rule, {}, {}, {}, {}}();
  });
}

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
