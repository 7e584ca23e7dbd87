// Paged attention over a ragged batch, for CPUs.
//
// Compiled by build.py on first use and called by attention.py, which checks every shape, length and block id
// before a call: nothing is checked here. Activations and arithmetic are float; head_dim is a multiple of 8. Where a rule
// asks for it and the CPU, a pool of bfloat16 and head_dim allow it, queries and weights are rounded to bfloat16, and
// sums are float.
//
// Attention is FlashAttention's online softmax (Dao et al. 2022, algorithm 1) with a few KV pages as the key tile, and
// long contexts are split (Dao et al. 2023, "Flash-Decoding"). Tiles and splits lie at fixed positions of the sequence,
// and every sum is taken in one order: a token's result depends on neither its chunk, its neighbours nor the threads.
//
// A key that a token does not see but that lies among those of its tile gets the weight 0. Pages that no token of a
// task sees are not read, and pages may hold anything past their last valid token. No -ffast-math.

#include <vector>

#include "pairs.h"
#include "pool.h"
#include "threads.h"
#include "tiles.h"

namespace {

constexpr int kTileRows = 96;  // Rows (token, query head of the group) of one task.
constexpr int kFewRows = 12;   // Up to here, as in decoding, memory is waited for rather than arithmetic.
// Keys at a time, in whole pages: about as many at most, and of about as many numbers.
constexpr int64_t kTileKeys = 128;
constexpr int64_t kTileValues = 8192;
constexpr int64_t kSplitKeys = 512;  // About, in whole tiles. Few rows share the splits of a long context.
constexpr float kLowest = -1e30f;
constexpr float kLog2e = 1.4426950408889634f;

// How a layer attends: operations.AttentionRule.
struct Rule {
  float scale;
  int64_t window;  // 0: no limit.
  float softcap;   // 0: none.
  const float* sinks;  // [num_heads]: one more score of each, of no key; or null.
  bool in_bfloat16;
};

// One row's query tokens [first_token, end_token) on one KV head against keys [first_key, end_key).
struct Task {
  int64_t row, head, first_token, end_token, first_key, end_key;
  int64_t partial;  // Index of the first of its rows in the partial results; -1 when it sees all keys.
};

// Sums of rows over some keys, and what they are in units of.
struct Sums {
  std::vector<float> out;       // [rows, dim]: values by weight.
  std::vector<float> max, sum;  // [rows]: the highest score, in powers of two, and the sum of the weights.

  void clear(int64_t rows, int64_t dim) {
    out.assign(rows * dim, 0.0f);
    max.assign(rows, kLowest);
    sum.assign(rows, 0.0f);
  }

  // Adds row `from_row` of other keys to row m. Not inlined: one piece of code rounds alike wherever it is used.
  __attribute__((noinline)) void add(int64_t m, const Sums& from, int64_t from_row, int64_t dim) {
    const float highest = std::max(max[m], from.max[from_row]);
    const float old_factor = exp2_float(max[m] - highest), factor = exp2_float(from.max[from_row] - highest);
    for (int64_t d = 0; d < dim; ++d)
      out[m * dim + d] = out[m * dim + d] * old_factor + from.out[from_row * dim + d] * factor;
    sum[m] = sum[m] * old_factor + from.sum[from_row] * factor;
    max[m] = highest;
  }
};

// The pages of neighbouring keys; the first ones of a task's first tile may be missing.
template <typename T>
struct Tile {
  std::vector<const T*> k, v;
  std::vector<const float*> scales;  // Of int8: of keys, then of values.

  void clear() {
    k.clear();
    v.clear();
    scales.clear();
  }
};

// Per-thread working memory, kept between calls. Its rows are those of a task, its keys those of a tile.
template <typename T>
struct Scratch {
  std::vector<float> q;                   // [rows, dim]
  Sums split, total;                      // Of the split that is worked on, and of all.
  std::vector<float> scores;              // [rows, stride], and then weights.
  std::vector<float> k;                   // [stride / kPanelKeys, dim, kPanelKeys]
  std::vector<float> k_scales, v_scales;  // [stride], of int8.
#ifdef PDSERVE_BFLOAT16_PRODUCTS
  PairRows q_pairs, weights;      // [rows, dim / 2] and, of keys, [rows, stride / 2].
  PairRows k_pairs, v_pairs;      // [dim / 2, stride] and, of keys, [stride / 2, dim].
  std::vector<const T*> numbers;  // Of each key.
#endif
  Tile<T> tile, next_tile;
  int64_t stride;  // Keys of a tile, rounded up to whole panels.

  void fit(int64_t rows, int64_t dim, int64_t tile_keys) {
    stride = (tile_keys + kPanelKeys - 1) / kPanelKeys * kPanelKeys;
    q.resize(rows * dim);
    total.clear(rows, dim);
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
  Sums partials;

  int64_t dim() const { return pool.head_dim; }
  int64_t num_heads() const { return pool.num_kv_heads * group; }
  int64_t num_new(int64_t row) const { return batch.query_starts[row + 1] - batch.query_starts[row]; }
  int64_t tile_keys() const {
    return std::max<int64_t>(1, std::min(kTileKeys, kTileValues / dim()) / pool.block_size) * pool.block_size;
  }
  int64_t split_keys() const { return std::max<int64_t>(1, kSplitKeys / tile_keys()) * tile_keys(); }
  bool in_pairs() const {
#ifdef PDSERVE_BFLOAT16_PRODUCTS
    return std::is_same_v<T, BFloat16> && rule.in_bfloat16 && dim() % kPairLanes == 0;
#else
    return false;
#endif
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
          const int64_t most = n <= tile_tokens ? split_keys() : end_key;
          const bool is_split = end_key > (first_key / most + 1) * most;
          for (int64_t key = first_key; key < end_key; key = (key / most + 1) * most) {
            const int64_t end_of_split = std::min(end_key, (key / most + 1) * most);
            tasks.push_back({row, head, first, end, key, end_of_split, is_split ? num_partials : -1});
            num_partials += is_split ? (end - first) * group : 0;
          }
          work += (end - first) * group * (end_key - first_key) * dim() * 2;
        }
    }
    partials.clear(num_partials, dim());
    return work;
  }

  void run(const Task& task) {
    thread_local Scratch<T> scratch;
    const int64_t rows = (task.end_token - task.first_token) * group, step = tile_keys();
    scratch.fit(rows, dim(), step);
    copy_queries(task, rows, scratch);
    int64_t key = task.first_key / step * step;
    find_tile(task, key, scratch.next_tile);
    while (key < task.end_key) {
      scratch.split.clear(rows, dim());
      const int64_t end_of_split = std::min(task.end_key, (key / split_keys() + 1) * split_keys());
      for (; key < end_of_split; key += step) {
        std::swap(scratch.tile, scratch.next_tile);
        find_tile(task, key + step, scratch.next_tile);
        add_tile(task, key, rows, scratch);
      }
      for (int64_t m = 0; m < rows; ++m) scratch.total.add(m, scratch.split, m, dim());
    }
    finish(task, rows, scratch.total);
  }

  void copy_queries(const Task& task, int64_t rows, Scratch<T>& scratch) {
    // Scores are in powers of two; before a cap they are in units of it.
    const float scale = rule.softcap > 0 ? rule.scale / rule.softcap : rule.scale * kLog2e;
    for (int64_t m = 0; m < rows; ++m) {
      const float* from = q + token_of(task, m) * q_stride + (task.head * group + m % group) * dim();
      for (int64_t d = 0; d < dim(); ++d) scratch.q[m * dim() + d] = from[d] * scale;
    }
#ifdef PDSERVE_BFLOAT16_PRODUCTS
    if (!in_pairs()) return;
    scratch.q_pairs.fit(rows, dim() / 2);
    for (int64_t m = 0; m < rows; ++m)
      round_to_pairs(scratch.q.data() + m * dim(), dim(), scratch.q_pairs.row(m));
#endif
  }

  int64_t token_of(const Task& task, int64_t m) const {
    return batch.query_starts[task.row] + task.first_token + m / group;
  }

  // The tile that begins at `key`, as far as the task has it.
  void find_tile(const Task& task, int64_t key, Tile<T>& tile) {
    tile.clear();
    const int64_t end_key = std::min(task.end_key, key + tile_keys());
    for (; key < end_key; key += pool.block_size) {
      const int32_t block = batch.block_ids[batch.block_starts[task.row] + key / pool.block_size];
      tile.k.push_back(page_at<T>(pool, block, task.head, layer));
      tile.v.push_back(tile.k.back() + pool.block_size * dim());
      if (std::is_same_v<T, int8_t>) tile.scales.push_back(scales_at(pool, block, task.head, layer));
    }
  }

  // Adds the tile that begins at `key` to the sums of its split.
  void add_tile(const Task& task, int64_t key, int64_t rows, Scratch<T>& scratch) {
    const int64_t first_page = std::max<int64_t>(0, task.first_key - key) / pool.block_size;
    const int64_t count = std::min(tile_keys(), task.end_key - key);
    copy_scales(first_page, scratch);
    if (in_pairs())
      score_pairs(first_page, count, rows, scratch);
    else if (rows <= kFewRows || pool.block_size % 8)
      score_few(first_page, count, rows, scratch);
    else
      score_many(first_page, count, rows, scratch);
    const int64_t first_position = batch.kv_lengths[task.row] - num_new(task.row) + task.first_token;
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t position = first_position + m / group;
      const int64_t from = std::max<int64_t>(0, first_seen(position) - key);
      weigh(m, from, std::min(count, position + 1 - key), count, scratch);
    }
    if (in_pairs())
      add_value_pairs(first_page, count, rows, scratch);
    else
      add_values(first_page, count, rows, scratch);
  }

  void copy_scales(int64_t first_page, Scratch<T>& scratch) {
    const int64_t size = pool.block_size;
    for (int64_t page = first_page; page < static_cast<int64_t>(scratch.tile.scales.size()); ++page) {
      std::copy_n(scratch.tile.scales[page], size, scratch.k_scales.data() + page * size);
      std::copy_n(scratch.tile.scales[page] + size, size, scratch.v_scales.data() + page * size);
    }
    for (const float* scales : scratch.next_tile.scales) prefetch(scales, 2 * size);
  }

  // Scores of a tile from pages as they lie, each read once for all rows.
  void score_few(int64_t first_page, int64_t count, int64_t rows, Scratch<T>& scratch) {
    const int64_t size = pool.block_size, stride = scratch.stride, num_next = scratch.next_tile.k.size();
    const float* queries = scratch.q.data();
    for (int64_t page = first_page; page * size < count; ++page) {
      const T* k = scratch.tile.k[page];
      float* scores = scratch.scores.data() + page * size;
      const int64_t num_keys = std::min(size, count - page * size);
      int64_t j = 0;
      for (; j < num_keys && j + 8 <= size; j += 8) {
        if (page < num_next) prefetch(scratch.next_tile.k[page] + j * dim(), 8 * dim());
        in_blocks<3>(0, rows, [&](auto block, int64_t m) {
          constexpr int kKeys = block.value == 1 ? 8 : 4;
          for (int64_t i = j; i < j + 8; i += kKeys)
            dot<block.value, kKeys>(queries + m * dim(), k + i * dim(), dim(), scores + m * stride + i, stride);
        });
      }
      for (; j < num_keys; ++j)
        for (int64_t m = 0; m < rows; ++m)
          dot<1, 1>(queries + m * dim(), k + j * dim(), dim(), scores + m * stride + j, stride);
    }
  }

  // Scores of a tile as a product of matrices. Pages are of whole half panels.
  void score_many(int64_t first_page, int64_t count, int64_t rows, Scratch<T>& scratch) {
    const int64_t size = pool.block_size, first = first_page * size;
    for (int64_t key = first; key < count; key += 8) {
      float* panel = scratch.k.data() + key / kPanelKeys * kPanelKeys * dim();
      pack_eight(scratch.tile.k[key / size] + key % size * dim(), dim(), panel + key % kPanelKeys);
    }
    for (int64_t key = first / kPanelKeys * kPanelKeys; key < count; key += kPanelKeys)
      in_blocks<6>(0, rows, [&](auto block, int64_t m) {
        dot_panel<block.value>(scratch.q.data() + m * dim(), scratch.k.data() + key * dim(), dim(),
                               scratch.scores.data() + m * scratch.stride + key, scratch.stride);
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
    Sums& sums = scratch.split;
    const float max = std::max(sums.max[m], max_lane(highest));
    if (max > sums.max[m]) {
      const float factor = exp2_float(sums.max[m] - max);
      for (int64_t d = 0; d < dim(); ++d) sums.out[m * dim() + d] *= factor;
      sums.sum[m] *= factor;
      sums.max[m] = max;
    }
    Vec sum = {};
    for (int64_t j = 0; j < padded; j += kLanes) {
      Vec p = exp2_vec(load(scores + j) - max);
      sum += p;
      if constexpr (std::is_same_v<T, int8_t>) p *= load(scratch.v_scales.data() + j);
      store(scores + j, p);
    }
    sums.sum[m] += sum_lanes(sum);
  }

  void add_values(int64_t first_page, int64_t count, int64_t rows, Scratch<T>& scratch) {
    const int64_t first = first_page * pool.block_size;
    const auto add = [&](auto block, auto cols, int64_t m) {
      multiply_columns<block.value, cols.value>(0, dim(), scratch.scores.data() + m * scratch.stride + first,
                                                scratch.stride, scratch.tile.v.data() + first_page, dim(),
                                                pool.block_size, count - first, scratch.split.out.data() + m * dim(),
                                                dim());
    };
    if (rows > kFewRows) {
      in_blocks<6>(0, rows, [&](auto block, int64_t m) { add(block, std::integral_constant<int, 2>{}, m); });
      return;
    }
    // One row takes more of each value at once, which suits memory; several convert it once.
    constexpr int kMost = std::is_same_v<T, float> ? 1 : 3;
    const int64_t num_next = scratch.next_tile.v.size();
    in_blocks<kMost>(0, rows, [&](auto block, int64_t m) {
      for (int64_t page = num_next * m / rows; page < num_next * (m + block.value) / rows; ++page)
        prefetch(scratch.next_tile.v[page], pool.block_size * dim());
      add(block, std::integral_constant<int, block.value == 1 ? 8 : 4>{}, m);
    });
  }

  // The numbers of each key of a tile's pages, rounded up to whole lines; null outside [first, count). Asks for those of
  // the next tile.
  void find_numbers(const std::vector<const T*>& pages, const std::vector<const T*>& next, int64_t first, int64_t count,
                    std::vector<const T*>& numbers) const {
    numbers.assign(count + 16, nullptr);
    for (int64_t page = first / pool.block_size; page * pool.block_size < count; ++page) {
      if (page < static_cast<int64_t>(next.size())) prefetch(next[page], pool.block_size * dim());
      const int64_t key = page * pool.block_size, end = std::min(count, key + pool.block_size);
      for (int64_t i = key; i < end; ++i) numbers[i] = pages[page] + (i - key) * dim();
    }
  }

  // Scores of a tile as a product of matrices in pairs.
  void score_pairs([[maybe_unused]] int64_t first_page, [[maybe_unused]] int64_t count, [[maybe_unused]] int64_t rows,
                   [[maybe_unused]] Scratch<T>& scratch) {
#ifdef PDSERVE_BFLOAT16_PRODUCTS
    if constexpr (std::is_same_v<T, BFloat16>) {
      scratch.k_pairs.fit((dim() / 2 + kPairLanes - 1) / kPairLanes * kPairLanes, scratch.stride);
      find_numbers(scratch.tile.k, scratch.next_tile.k, first_page * pool.block_size, count, scratch.numbers);
      int64_t columns = 0;
      for (; columns < count; columns += kPairLanes)
        pack_keys(scratch.numbers.data() + columns, dim(), scratch.k_pairs.row(0) + columns, scratch.k_pairs.stride);
      in_blocks<6>(0, rows, [&](auto block, int64_t m) {
        multiply_pair_columns<block.value, 4>(columns, scratch.q_pairs.row(m), scratch.q_pairs.stride,
                                              scratch.k_pairs.row(0), scratch.k_pairs.stride, dim() / 2,
                                              scratch.scores.data() + m * scratch.stride, scratch.stride, false);
      });
    }
#endif
  }

  void add_value_pairs([[maybe_unused]] int64_t first_page, [[maybe_unused]] int64_t count,
                       [[maybe_unused]] int64_t rows, [[maybe_unused]] Scratch<T>& scratch) {
#ifdef PDSERVE_BFLOAT16_PRODUCTS
    if constexpr (std::is_same_v<T, BFloat16>) {
      scratch.v_pairs.fit(scratch.stride / 2, dim());
      scratch.weights.fit(rows, scratch.stride / 2);
      const int64_t first_key = first_page * pool.block_size, first = first_key / 2, end = (count + 1) / 2;
      find_numbers(scratch.tile.v, scratch.next_tile.v, first_key, count, scratch.numbers);
      for (int64_t pair = first; pair < end; ++pair)
        pack_values(scratch.numbers.data() + 2 * pair, dim(), scratch.v_pairs.row(pair));
      for (int64_t m = 0; m < rows; ++m)
        round_to_pairs(scratch.scores.data() + m * scratch.stride, count, scratch.weights.row(m));
      in_blocks<6>(0, rows, [&](auto block, int64_t m) {
        multiply_pair_columns<block.value, 4>(dim(), scratch.weights.row(m) + first, scratch.weights.stride,
                                              scratch.v_pairs.row(first), scratch.v_pairs.stride, end - first,
                                              scratch.split.out.data() + m * dim(), dim(), true);
      });
    }
#endif
  }

  // Writes a task's result, or leaves it to be merged.
  void finish(const Task& task, int64_t rows, const Sums& sums) {
    for (int64_t m = 0; m < rows; ++m)
      if (task.partial < 0)
        write(task, m, sums, m);
      else
        partials.add(task.partial + m, sums, m, dim());
  }

  // Not inlined, as `Sums::add`.
  __attribute__((noinline)) void write(const Task& task, int64_t m, const Sums& sums, int64_t row) {
    float* to = out + (token_of(task, m) * num_heads() + task.head * group + m % group) * dim();
    float sum = sums.sum[row], kept = 1.0f;
    if (rule.sinks) {
      const float sink = rule.sinks[task.head * group + m % group] * kLog2e, highest = std::max(sums.max[row], sink);
      kept = exp2_float(sums.max[row] - highest);
      sum = sum * kept + exp2_float(sink - highest);
    }
    const float factor = kept / sum;
    for (int64_t d = 0; d < dim(); ++d) to[d] = sums.out[row * dim() + d] * factor;
  }

  // Joins the splits tasks[first, end) of one (row, KV head) in key order.
  void merge(int64_t first, int64_t end) {
    const Task& task = tasks[first];
    const int64_t rows = (task.end_token - task.first_token) * group;
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t i = first + 1; i < end; ++i) partials.add(task.partial + m, partials, tasks[i].partial + m, dim());
      write(task, m, partials, task.partial + m);
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
                     float softcap, const float* sinks, int64_t in_bfloat16, const Pool* pool, int64_t layer,
                     const int32_t* packed_batch) {
  const Batch batch(packed_batch);
  const int64_t group = num_heads / pool->num_kv_heads;
  const Rule rule{scale, window, softcap, sinks, in_bfloat16 != 0};
  with_dtype(*pool, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    Attention<T>{q, q_stride, out, group, *pool, layer, batch, rule, {}, {}}();
  });
}
}
