// Linear layers for CPUs. Compiled by build.py on first use and called by dense.py, which checks every shape
// before a call: nothing is checked here.
//
// A weight [outputs, inputs] is held in panels of kPanel outputs, [panel][input][kPanel], the last one filled up with
// zeros, as float, bfloat16, float16, int8 with one scale per output, or int4 with one per output and group of inputs,
// [panel][group][kPanel]. Outputs of a bfloat16 panel are in the order 0, kLanes, 1, kLanes + 1 ...; byte i of an int4
// panel's input is output i and 16 times output kLanes + i, added up. Activations and arithmetic are float.
//
// An output is the sum, over blocks of kDepth inputs in order, of that block's products added up in order; blocks of
// int4 are its groups, and their sums are multiplied with the scales. Every path here keeps to that, so that a row's
// result depends on neither its neighbours nor the number of threads. The blocking is that of Goto and van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication" (2008): a block of weights lies in the L1 cache as floats and a
// block of rows in L2, while a tile of results stays in registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace {

using namespace pdserve;

constexpr int kTileRows = kLanes == 16 ? 12 : 6;  // What the registers of AVX-512, and of AVX2, hold.
constexpr int kPanel = 2 * kLanes;
constexpr int kFewRows = 4 * kTileRows;  // Up to here, making floats of weights beforehand does not pay.
constexpr int kBlockRows = 32 * kTileRows;
constexpr int kBlockPanels = 16;          // Panels that one block of rows is multiplied with, at most.
constexpr int kAheadBytes = 4096;         // Prefetched: what memory sends while a core waits for its first byte.
constexpr int64_t kSerialWork = 1 << 17;  // Multiply-adds below which waking threads costs more than it saves.

enum Kind : int64_t { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

// Of one input: the weight of an output of a panel's first half, and 16 times that of its counterpart of the second.
struct Int4Pair {
  int8_t sum;
};

// Inputs of one block.
template <typename W>
constexpr int kDepth = 256;
template <>
constexpr int kDepth<Int4Pair> = 128;

// Values that hold the weights of one input for a panel.
template <typename W>
constexpr int kStep = kPanel;
template <>
constexpr int kStep<Int4Pair> = kLanes;

// Mirrored by dense._Weight.
struct Weight {
  int64_t kind;
  int64_t num_outputs;
  int64_t num_inputs;
  const void* panels;
  const float* scales;        // [num_outputs], or null.
  const float* group_scales;  // [panel][group][kPanel], of the halves over 2^28 and over 16, or null.
  const float* bias;          // [num_outputs], or null.
};

// Weights of some inputs for one panel or several.
template <typename W>
struct Block {
  const W* weights;
  int64_t stride;       // Values between panels.
  const float* scales;  // Of int4, or null: of the block's sums, [kPanel] for the first panel.
  int64_t scale_stride;
  int64_t depth;  // Inputs.
};

// The weights of one input for the outputs of a panel, as floats: first half, second half.
template <typename W>
inline void load_panel(const W* p, Vec& low, Vec& high) {
  low = load(p);
  high = load(p + kLanes);
}

// A bfloat16 is the upper half of a float. A weight of the first half lies beside its counterpart of the second, so
// that a shift makes floats of the one and a mask of the other.
inline void load_panel(const BFloat16* p, Vec& low, Vec& high) {
  const IntVec pairs = reinterpret_cast<const UnalignedIntVec&>(*p);
  low = reinterpret_cast<Vec>(pairs << 16);
  high = reinterpret_cast<Vec>(pairs & static_cast<int32_t>(0xffff0000));
}

// In the fewest instructions: 2^28 times the weights of the first half, whose bits have their sign at a lane's top, and
// the pairs themselves. What is made of them is linear, so that `part` makes up for it later and once.
inline void load_panel(const Int4Pair* p, Vec& low, Vec& high) {
  const IntVec pairs = load_integers(&p->sum);
  low = __builtin_convertvector(pairs << 28, Vec);
  high = __builtin_convertvector(pairs, Vec);
}

// Takes the first half of int4 pairs from them: 2^28 and 16 times the halves are left, and scales make up for that.
inline void part(const Vec& low, Vec& high) { high -= low * 0x1p-28f; }

// Keeps a value in a register: left alone, the compiler reads weights from memory again for every row.
inline void keep([[maybe_unused]] Vec& x) {
#if defined(__AVX2__)
  asm("" : "+v"(x));
#endif
}

// Sums of a block of int4 pairs times their scales.
inline void scale_sums(const float* scales, Vec& low, Vec& high) {
  part(low, high);
  low *= load(scales);
  high *= load(scales + kLanes);
  keep(low);  // Rounded here, and not joined with an addition wherever the compiler finds that it can be.
  keep(high);
}

// total[p][r][f] = (is_first ? 0 : total[p][r][f]) + scale[p][f] * sum over d of x[r][d] * w[p][d][f], where the block
// and total are of kPanels panels, in total kRows * kPanel values apart.
template <int kRows, int kPanels, int kAhead, typename W>
inline void add_tile(const float* x, int64_t x_stride, const Block<W>& block, float* total, bool is_first) {
  Vec sum[kPanels][kRows][2] = {};
  if (block.scales)
    for (int p = 0; p < kPanels; ++p) __builtin_prefetch(block.scales + p * block.scale_stride);
  for (int64_t d = 0; d < block.depth; ++d) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const W* from = block.weights + p * block.stride + d * kStep<W>;
      if constexpr (kAhead > 0) __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead);
      Vec low, high;
      load_panel(from, low, high);
      keep(low);
      keep(high);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        sum[p][r][0] += x[r * x_stride + d] * low;
        sum[p][r][1] += x[r * x_stride + d] * high;
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      if (block.scales) scale_sums(block.scales + p * block.scale_stride, sum[p][r][0], sum[p][r][1]);
      float* to = total + (p * kRows + r) * kPanel;
      store(to, is_first ? sum[p][r][0] : load(to) + sum[p][r][0]);
      store(to + kLanes, is_first ? sum[p][r][1] : load(to + kLanes) + sum[p][r][1]);
    }
}

// add_tile of one panel, for 1 to kRows rows.
template <int kAhead, int kRows = kTileRows, typename W>
inline void add_small_tile(int64_t rows, const float* x, int64_t x_stride, const Block<W>& block, float* total,
                           bool is_first) {
  if (rows == kRows) return add_tile<kRows, 1, kAhead>(x, x_stride, block, total, is_first);
  if constexpr (kRows > 1) add_small_tile<kAhead, kRows - 1>(rows, x, x_stride, block, total, is_first);
}

// Memory that the next block needs, asked for bit by bit while this one is worked on.
struct Prefetch {
  const char* from = nullptr;
  int64_t num_bytes = 0;

  void ask(int64_t step, int64_t num_steps) const {
    const int64_t end = num_bytes * (step + 1) / num_steps;
    for (int64_t byte = num_bytes * step / num_steps; byte < end; byte += 64) __builtin_prefetch(from + byte);
  }
};

// add_tile of one panel, for any number of rows, cut into tiles of much the same size.
template <int kAhead, typename W>
inline void add_rows(int64_t rows, const float* x, int64_t x_stride, const Block<W>& block, float* total, bool is_first,
                     Prefetch next = {}) {
  const int64_t num_tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile) {
    next.ask(tile, num_tiles);
    const int64_t end = rows * (tile + 1) / num_tiles;
    add_small_tile<kAhead>(end - row, x + row * x_stride, x_stride, block, total + row * kPanel, is_first);
    row = end;
  }
}

inline const float* as_floats(const float* from, int64_t, float*) { return from; }

template <typename W>
inline const float* as_floats(const W* from, int64_t depth, float* scratch) {
  for (int64_t d = 0; d < depth; ++d) {
    Vec low, high;
    load_panel(from + d * kStep<W>, low, high);
    store(scratch + d * kPanel, low);
    store(scratch + d * kPanel + kLanes, high);
  }
  return scratch;
}

// The scales of a panel's outputs in the group of an input, or null.
inline const float* group_scales(const Weight& weight, int64_t panel, int64_t input) {
  constexpr int64_t kGroup = kDepth<Int4Pair>;
  const int64_t num_groups = (weight.num_inputs + kGroup - 1) / kGroup;
  return weight.group_scales ? weight.group_scales + (panel * num_groups + input / kGroup) * kPanel : nullptr;
}

template <typename W>
struct Product {
  const Weight& weight;
  const float* x;  // [num_rows, num_inputs]
  float* y;        // [num_rows, num_outputs]
  int64_t num_rows;
  bool adds;       // To what y holds.

  int64_t inputs() const { return weight.num_inputs; }
  int64_t num_panels() const { return (weight.num_outputs + kPanel - 1) / kPanel; }

  // From an input on, of a panel and those behind it.
  Block<W> block_at(int64_t panel, int64_t input) const {
    const int64_t stride = inputs() * kStep<W>;
    return {static_cast<const W*>(weight.panels) + panel * stride + input * kStep<W>, stride,
            group_scales(weight, panel, input), group_scales(weight, 1, 0) - group_scales(weight, 0, 0),
            std::min<int64_t>(kDepth<W>, inputs() - input)};
  }

  // y = total * scale + bias, or that more, for rows of one panel. total is [rows][kPanel].
  void finish(const float* total, int64_t first_row, int64_t rows, int64_t panel) const {
    const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, weight.num_outputs - first);
    float scale[kPanel], bias[kPanel];
    for (int64_t f = 0; f < count; ++f) scale[f] = weight.scales ? weight.scales[first + f] : 1.0f;
    for (int64_t f = 0; f < count; ++f) bias[f] = weight.bias ? weight.bias[first + f] : 0.0f;
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = total + r * kPanel;
      float* to = y + (first_row + r) * weight.num_outputs + first;
      if (adds)
        for (int64_t f = 0; f < count; ++f) to[f] += from[f] * scale[f] + bias[f];
      else
        for (int64_t f = 0; f < count; ++f) to[f] = from[f] * scale[f] + bias[f];
    }
  }

  // One or two rows: several panels at a time, for their sums to keep the multipliers busy.
  template <int kRows, int kPanels>
  void stream(int64_t first, int64_t end) const {
    float total[kPanels * kRows * kPanel];
    for (; first + kPanels <= end; first += kPanels) {
      for (int64_t d = 0; d < inputs(); d += kDepth<W>)
        add_tile<kRows, kPanels, kAheadBytes / kPanels>(x + d, inputs(), block_at(first, d), total, d == 0);
      for (int p = 0; p < kPanels; ++p) finish(total + p * kRows * kPanel, 0, kRows, first + p);
    }
    if constexpr (kPanels > 1) stream<kRows, kPanels / 2>(first, end);
  }

  // Few rows: weights are read from memory once, and become floats in registers.
  void multiply_few(int64_t first, int64_t end) const {
    if (num_rows == 1) return stream<1, 4>(first, end);
    if (num_rows == 2) return stream<2, 2>(first, end);
    float total[kFewRows * kPanel];
    for (int64_t panel = first; panel < end; ++panel) {
      for (int64_t d = 0; d < inputs(); d += kDepth<W>)
        add_rows<kAheadBytes>(num_rows, x + d, inputs(), block_at(panel, d), total, d == 0);
      finish(total, 0, num_rows, panel);
    }
  }

  // Many rows: a block of weights becomes floats once for a block of rows.
  void multiply_block(int64_t first_row, int64_t rows, int64_t first_panel, int64_t panels) const {
    static thread_local std::vector<float> x_block(kBlockRows * kDepth<W>), w_block(kDepth<W> * kPanel),
        total(kBlockPanels * kBlockRows * kPanel);
    for (int64_t d = 0; d < inputs(); d += kDepth<W>) {
      const int64_t depth = block_at(first_panel, d).depth;
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(x + (first_row + r) * inputs() + d, depth, x_block.data() + r * kDepth<W>);
      for (int64_t p = 0; p < panels; ++p) {
        const Block<W> held = block_at(first_panel + p, d);
        const Block<float> block{as_floats(held.weights, depth, w_block.data()), 0, held.scales, 0, depth};
        const W* next = p + 1 < panels ? held.weights + held.stride : block_at(first_panel, d + kDepth<W>).weights;
        add_rows<0>(rows, x_block.data(), kDepth<W>, block, total.data() + p * kBlockRows * kPanel, d == 0,
                    {reinterpret_cast<const char*>(next), depth * kStep<W> * static_cast<int64_t>(sizeof(W))});
      }
    }
    for (int64_t p = 0; p < panels; ++p)
      finish(total.data() + p * kBlockRows * kPanel, first_row, rows, first_panel + p);
  }

  void operator()() const {
    Team& team = Team::get();
    const bool is_worth_it = num_rows * inputs() * weight.num_outputs >= kSerialWork;
    const int64_t num_threads = is_worth_it ? team.num_threads() : 1;
    const int64_t panels = num_panels();
    if (num_rows <= kFewRows) {
      team.run(num_threads, is_worth_it,
               [&](int64_t i) { multiply_few(panels * i / num_threads, panels * (i + 1) / num_threads); });
      return;
    }
    // Enough tasks for every thread to have its share, even if some are slow.
    const int64_t row_tasks = (num_rows + kBlockRows - 1) / kBlockRows;
    const int64_t width = std::clamp<int64_t>(panels * row_tasks / (4 * num_threads), 4, kBlockPanels);
    const int64_t panel_tasks = (panels + width - 1) / width;
    team.run(row_tasks * panel_tasks, is_worth_it, [&](int64_t i) {
      const int64_t row = num_rows * (i / panel_tasks) / row_tasks;
      const int64_t panel = panels * (i % panel_tasks) / panel_tasks;
      multiply_block(row, num_rows * (i / panel_tasks + 1) / row_tasks - row, panel,
                     panels * (i % panel_tasks + 1) / panel_tasks - panel);
    });
  }
};

template <typename W>
void copy_rows(const Weight& weight, const int64_t* ids, int64_t num_ids, float* out) {
  const int64_t inputs = weight.num_inputs;
  for (int64_t i = 0; i < num_ids; ++i) {
    const int64_t panel = ids[i] / kPanel, place = ids[i] % kPanel;
    const W* from = static_cast<const W*>(weight.panels) + panel * inputs * kStep<W>;
    for (int64_t d = 0; d < inputs; ++d) {
      Vec halves[2];
      load_panel(from + d * kStep<W>, halves[0], halves[1]);
      const float* of_group = group_scales(weight, panel, d);
      if (of_group) part(halves[0], halves[1]);
      const float scale = of_group ? of_group[place] : weight.scales ? weight.scales[ids[i]] : 1.0f;
      out[i * inputs + d] = halves[place / kLanes][place % kLanes] * scale;
    }
  }
}

template <typename Call>
void with_kind(int64_t kind, Call call) {
  switch (kind) {
    case kFloat32: return call(float{});
    case kBFloat16: return call(BFloat16{});
    case kFloat16: return call(Float16{});
    case kInt8: return call(int8_t{});
    case kInt4: return call(Int4Pair{});
  }
}

}  // namespace

extern "C" {

// Outputs of one panel.
int64_t dense_panel_width() { return kPanel; }

// y[num_rows, num_outputs] = x[num_rows, num_inputs] W^T + b, or y += that; all contiguous.
void dense_multiply(const Weight* weight, const float* x, float* y, int64_t num_rows, int64_t adds) {
  with_kind(weight->kind, [&](auto value) { Product<decltype(value)>{*weight, x, y, num_rows, adds != 0}(); });
}

// out[num_ids, num_inputs]: rows of W.
void dense_rows(const Weight* weight, const int64_t* ids, int64_t num_ids, float* out) {
  with_kind(weight->kind, [&](auto value) { copy_rows<decltype(value)>(*weight, ids, num_ids, out); });
}
}
