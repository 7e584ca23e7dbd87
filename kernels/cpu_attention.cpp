// Paged attention over a ragged batch, for CPUs.
//
// Compiled by cpu_build.py on first use and called by cpu_attention.py, which checks every shape, length and block id
// before a call: nothing is checked here. Activations and arithmetic are float; head_dim is a multiple of 8.
//
// Attention is FlashAttention's online softmax (Dao et al. 2022, algorithm 1) with a few KV pages as the key tile. Few
// rows, as in decoding, take each page as it lies in memory, once for all rows. Many rows, as in prefilling, multiply
// with keys that were laid out anew, a key a lane, so that a tile of results stays in registers.
//
// A key that a token does not see but that lies among those of its tile gets the weight 0. Pages that no token of a task
// sees are not read, and pages may hold anything past their last valid token. No -ffast-math.

#include <vector>

#include "cpu_pool.h"
#include "cpu_threads.h"
#include "cpu_tiles.h"

namespace {

constexpr int kTileRows = 48;  // Rows (token, query head of the group) of one task.
constexpr int kFewRows = 12;   // Up to here, laying out keys costs more than it saves.
// Keys at a time, in whole pages: about as many at most, and of about as many bytes.
constexpr int64_t kTileKeys = 64;
constexpr int64_t kTileBytes = 1 << 14;
constexpr int64_t kFewTileBytes = 1 << 13;  // With few rows memory is waited for, and more is asked of it meanwhile.
// A row with a single query tile is cut into runs of at most about this many keys. Constant, so that a row's result
// depends on neither its neighbours nor the number of threads.
constexpr int64_t kSplitKeys = 512;
constexpr float kLowest = -1e30f;
constexpr float kLog2e = 1.4426950408889634f;

// How a layer attends: operations.AttentionRule.
struct Rule {
  float scale;
  int64_t window;  // 0: no limit.
  float softcap;   // 0: none.
};

// One row's query tokens [first_token, end_token) on one KV head against keys [first_key, end_key).
struct Task {
  int64_t row, head, first_token, end_token, first_key, end_key;
  int64_t partial;  // Index of the first of its rows in the partial results; -1 when it sees all keys.
};

// The pages of a few neighbouring keys.
template <typename T>
struct Tile {
  std::vector<const T*> k, v;
  std::vector<const float*> scales;  // Of int8: of keys, then of values.
};

// Per-thread working memory, kept between calls. Its rows are those of a task, its keys those of a tile.
template <typename T>
struct Scratch {
  std::vector<float> q, out;              // [rows, dim]; out is the unnormalised sum.
  std::vector<float> max, sum;            // [rows], in powers of two.
  std::vector<float> scores;              // [rows, stride], and then weights.
  std::vector<float> k;                   // [dim, stride]: keys laid out anew.
  std::vector<float> k_scales, v_scales;  // [stride], of int8.
  Tile<T> tile, next_tile;
  int64_t stride;  // Keys of a tile, rounded up to whole vectors.

  void fit(int64_t rows, int64_t dim, int64_t tile_keys) {
    stride = (tile_keys + kLanes - 1) / kLanes * kLanes;
    q.resize(rows * dim);
    out.assign(rows * dim, 0.0f);
    max.assign(rows, kLowest);
    sum.assign(rows, 0.0f);
    scores.resize(rows * stride);
    k.resize(rows > kFewRows ? dim * stride : 0);
    k_scales.resize(stride);
    v_scales.resize(stride);
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

  int64_t dim() const { return pool.head_dim; }
  int64_t num_heads() const { return pool.num_kv_heads * group; }
  int64_t num_new(int64_t row) const { return batch.query_starts[row + 1] - batch.query_starts[row]; }
  // Whole pages.
  int64_t tile_keys(int64_t rows) const {
    const int64_t fitting = (rows <= kFewRows ? kFewTileBytes : kTileBytes) / (dim() * static_cast<int64_t>(sizeof(T)));
    return std::max<int64_t>(1, std::min(kTileKeys, fitting) / pool.block_size) * pool.block_size;
  }
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
      for (int64_t head = 0; head < pool.num_kv_heads; ++head)
        for (int64_t first = 0; first < n; first += tile_tokens) {
          const int64_t end = std::min(n, first + tile_tokens), end_key = cached + end;
          const int64_t first_key = first_seen(cached + first) / pool.block_size * pool.block_size;
          const int64_t num_keys = end_key - first_key;
          const int64_t num_splits = n <= tile_tokens ? (num_keys + kSplitKeys - 1) / kSplitKeys : 1;
          const int64_t pages = (num_keys + pool.block_size - 1) / pool.block_size;
          const int64_t step = (pages + num_splits - 1) / num_splits * pool.block_size;
          for (int64_t key = first_key; key < end_key; key += step) {
            const bool is_split = step < num_keys;
            tasks.push_back({row, head, first, end, key, std::min(end_key, key + step), is_split ? num_partials : -1});
            num_partials += is_split ? (end - first) * group : 0;
          }
          work += (end - first) * group * num_keys * dim() * 2;
        }
    }
    partial_out.resize(num_partials * dim());
    partial_max.resize(num_partials);
    partial_sum.resize(num_partials);
    return work;
  }

  void run(const Task& task) {
    thread_local Scratch<T> scratch;
    const int64_t rows = (task.end_token - task.first_token) * group, step = tile_keys(rows);
    const int64_t first_position = batch.kv_lengths[task.row] - num_new(task.row) + task.first_token;
    scratch.fit(rows, dim(), step);
    copy_queries(task, rows, scratch);
    find_tile(task, task.first_key, step, scratch.next_tile);
    for (int64_t key = task.first_key; key < task.end_key; key += step) {
      const int64_t count = std::min(step, task.end_key - key);
      std::swap(scratch.tile, scratch.next_tile);
      find_tile(task, key + step, step, scratch.next_tile);
      copy_scales(scratch);
      if (rows <= kFewRows)
        score_few(count, rows, scratch);
      else
        score_many(count, rows, scratch);
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t position = first_position + m / group;
        const int64_t from = std::max<int64_t>(0, first_seen(position) - key);
        weigh(m, from, std::min(count, position + 1 - key), count, scratch);
      }
      add_values(count, rows, scratch);
    }
    finish(task, rows, scratch);
  }

  void copy_queries(const Task& task, int64_t rows, Scratch<T>& scratch) {
    // Scores are in powers of two; before a cap they are in units of it.
    const float scale = rule.softcap > 0 ? rule.scale / rule.softcap : rule.scale * kLog2e;
    for (int64_t m = 0; m < rows; ++m) {
      const float* from = q + token_of(task, m) * q_stride + (task.head * group + m % group) * dim();
      for (int64_t d = 0; d < dim(); ++d) scratch.q[m * dim() + d] = from[d] * scale;
    }
  }

  int64_t token_of(const Task& task, int64_t m) const {
    return batch.query_starts[task.row] + task.first_token + m / group;
  }

  // The tile of `keys` keys from `key` on; no page of it lies past the task's end.
  void find_tile(const Task& task, int64_t key, int64_t keys, Tile<T>& tile) {
    tile.k.clear();
    tile.v.clear();
    tile.scales.clear();
    const int64_t end_key = std::min(task.end_key, key + keys);
    for (; key < end_key; key += pool.block_size) {
      const int32_t block = batch.block_ids[batch.block_starts[task.row] + key / pool.block_size];
      tile.k.push_back(page_at<T>(pool, block, task.head, layer));
      tile.v.push_back(tile.k.back() + pool.block_size * dim());
      if (std::is_same_v<T, int8_t>) tile.scales.push_back(scales_at(pool, block, task.head, layer));
    }
  }

  void copy_scales(Scratch<T>& scratch) {
    for (size_t page = 0; page < scratch.tile.scales.size(); ++page) {
      const float* scales = scratch.tile.scales[page];
      std::copy_n(scales, pool.block_size, scratch.k_scales.data() + page * pool.block_size);
      std::copy_n(scales + pool.block_size, pool.block_size, scratch.v_scales.data() + page * pool.block_size);
    }
  }

  // Scores of a tile, from pages as they lie.
  void score_few(int64_t count, int64_t rows, Scratch<T>& scratch) {
    const int64_t block_size = pool.block_size;
    for (size_t page = 0; page < scratch.next_tile.scales.size(); ++page)
      prefetch(scratch.next_tile.scales[page], 2 * block_size);
    for (int64_t page = 0, start = 0; start < count; ++page, start += block_size) {
      const T* k = scratch.tile.k[page];
      const bool has_next = page < static_cast<int64_t>(scratch.next_tile.k.size());
      const int64_t num_keys = std::min(block_size, count - start);
      float* scores = scratch.scores.data() + start;
      int64_t j = 0;
      for (; j < num_keys && j + 8 <= block_size; j += 8) {
        if (has_next) prefetch(scratch.next_tile.k[page] + j * dim(), 8 * dim());
        in_blocks<3>(0, rows, [&](auto block, int64_t m) {
          constexpr int kKeys = block.value == 1 ? 8 : 4;
          for (int i = 0; i < 8; i += kKeys)
            dot<block.value, kKeys>(scratch.q.data() + m * dim(), k + (j + i) * dim(), dim(),
                                    scores + m * scratch.stride + j + i, scratch.stride);
        });
      }
      for (; j < num_keys; ++j)
        in_blocks<1>(0, rows, [&](auto, int64_t m) {
          dot<1, 1>(scratch.q.data() + m * dim(), k + j * dim(), dim(), scores + m * scratch.stride + j, 0);
        });
    }
  }

  // Scores of a tile as a product of matrices.
  void score_many(int64_t count, int64_t rows, Scratch<T>& scratch) {
    const int64_t block_size = pool.block_size, stride = scratch.stride;
    for (int64_t page = 0, start = 0; start < count; ++page, start += block_size) {
      const T* k = scratch.tile.k[page];
      const int64_t num_keys = std::min(block_size, count - start);
      int64_t j = 0;
      for (; j < num_keys && j + 8 <= block_size; j += 8)
        transpose_eight(k + j * dim(), dim(), scratch.k.data() + start + j, stride);
      for (; j < num_keys; ++j) transpose_one(k + j * dim(), dim(), scratch.k.data() + start + j, stride);
    }
    const float* k = scratch.k.data();
    in_blocks<6>(0, rows, [&](auto block, int64_t m) {
      multiply_columns<block.value, 2, false>(0, stride, scratch.q.data() + m * dim(), dim(), &k, stride, dim(), dim(),
                                              scratch.scores.data() + m * stride, stride);
    });
  }

  // Turns the scores of row m into weights, 0 but for keys [from, to) of the tile, and scales what was summed before.
  void weigh(int64_t m, int64_t from, int64_t to, int64_t count, Scratch<T>& scratch) {
    float* scores = scratch.scores.data() + m * scratch.stride;
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    if (from >= to) {
      std::fill_n(scores, padded, 0.0f);
      return;
    }
    const float cap = rule.softcap * kLog2e;
    for (int64_t j = 0; j < padded; j += kLanes) {
      Vec x = load(scores + j);
      if constexpr (std::is_same_v<T, int8_t>) x *= load(scratch.k_scales.data() + j);
      if (cap > 0) x = cap * tanh_vec(x);
      store(scores + j, x);
    }
    std::fill_n(scores, from, kLowest);
    std::fill(scores + to, scores + padded, kLowest);

    Vec highest = load(scores);
    for (int64_t j = kLanes; j < padded; j += kLanes)
      highest = load(scores + j) > highest ? load(scores + j) : highest;
    const float max = std::max(scratch.max[m], max_lane(highest));
    if (max > scratch.max[m]) {
      const float factor = exp2_float(scratch.max[m] - max);
      for (int64_t d = 0; d < dim(); ++d) scratch.out[m * dim() + d] *= factor;
      scratch.sum[m] *= factor;
      scratch.max[m] = max;
    }
    Vec sum = {};
    for (int64_t j = 0; j < padded; j += kLanes) {
      Vec p = exp2_vec(load(scores + j) - max);
      sum += p;
      if constexpr (std::is_same_v<T, int8_t>) p *= load(scratch.v_scales.data() + j);
      store(scores + j, p);
    }
    scratch.sum[m] += sum_lanes(sum);
  }

  void add_values(int64_t count, int64_t rows, Scratch<T>& scratch) {
    const auto add = [&](auto block, auto cols, int64_t m) {
      multiply_columns<block.value, cols.value, true>(0, dim(), scratch.scores.data() + m * scratch.stride,
                                                      scratch.stride, scratch.tile.v.data(), dim(), pool.block_size,
                                                      count, scratch.out.data() + m * dim(), dim());
    };
    // One row takes more of each value at once, which suits memory; several convert it once.
    constexpr int kMost = std::is_same_v<T, float> ? 1 : 3;
    const int64_t num_next = scratch.next_tile.v.size();
    if (rows <= kFewRows)
      in_blocks<kMost>(0, rows, [&](auto block, int64_t m) {
        for (int64_t page = num_next * m / rows; page < num_next * (m + block.value) / rows; ++page)
          prefetch(scratch.next_tile.v[page], pool.block_size * dim());
        add(block, std::integral_constant<int, block.value == 1 ? 8 : 4>{}, m);
      });
    else
      in_blocks<6>(0, rows, [&](auto block, int64_t m) { add(block, std::integral_constant<int, 2>{}, m); });
  }

  // Writes a task's result, or leaves it to be merged.
  void finish(const Task& task, int64_t rows, const Scratch<T>& scratch) {
    if (task.partial < 0) {
      for (int64_t m = 0; m < rows; ++m) write(task, m, scratch.out.data() + m * dim(), 1.0f / scratch.sum[m]);
      return;
    }
    std::copy_n(scratch.out.data(), rows * dim(), partial_out.data() + task.partial * dim());
    std::copy_n(scratch.max.data(), rows, partial_max.data() + task.partial);
    std::copy_n(scratch.sum.data(), rows, partial_sum.data() + task.partial);
  }

  void write(const Task& task, int64_t m, const float* from, float factor) {
    float* to = out + (token_of(task, m) * num_heads() + task.head * group + m % group) * dim();
    for (int64_t d = 0; d < dim(); ++d) to[d] = from[d] * factor;
  }

  // Joins the splits tasks[first, end) of one (row, KV head) in key order.
  void merge(int64_t first, int64_t end) {
    const Task& task = tasks[first];
    const int64_t rows = (task.end_token - task.first_token) * group;
    std::vector<float> total(dim());
    for (int64_t m = 0; m < rows; ++m) {
      float max = kLowest, sum = 0;
      for (int64_t i = first; i < end; ++i) max = std::max(max, partial_max[tasks[i].partial + m]);
      std::fill(total.begin(), total.end(), 0.0f);
      for (int64_t i = first; i < end; ++i) {
        const int64_t partial = tasks[i].partial + m;
        const float weight = exp2_float(partial_max[partial] - max);
        sum += weight * partial_sum[partial];
        for (int64_t d = 0; d < dim(); ++d) total[d] += weight * partial_out[partial * dim() + d];
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
}
