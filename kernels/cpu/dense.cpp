// Linear layers for CPUs. Compiled by build.py on first use and called by dense.py, which checks every shape
// before a call: nothing is checked here.
//
// A weight [outputs, inputs] is held in panels of kPanel outputs, [panel][input][kPanel], the last one filled up
// with zeros, as float, bfloat16, float16, or quantised as int8, int4, e4m3 or e2m1. Outputs of a bfloat16 panel are
// in the order 0, kLanes, 1, kLanes + 1 ...; byte i of an int4 panel's input is output i, 8, and 16 times output
// kLanes + i, added up; that of an e2m1 panel has their codes in its low and its high bits. Quantised weights have a
// scale per output, or a scale and perhaps a zero point per output and block of inputs. Activations and arithmetic are
// float.
//
// Where the CPU multiplies pairs of bfloat16 (AVX-512 BF16), weights may be held for that instead: in steps of two
// inputs, [panel][step][kPanel][2], the last one filled up with a zero; byte i of a step of int4 or e2m1 is input i % 2
// of output i / 2, and in its high bits of output kLanes + i / 2. Activations are rounded to bfloat16, the weights of
// a block become bfloat16, which is exact, and sums are float.
//
// An output is the sum, over blocks of `depth` inputs in order, of that block's products added up in order, less the
// zero point times the sum of the inputs, times the scale. Every path here keeps to that, so that a row's result
// depends on neither its neighbours nor the number of threads. The blocking is that of Goto and van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication" (2008): a block of weights lies in the L1 cache as floats and
// a block of rows in L2, while a tile of results stays in registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "threads.h"
#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PDSERVE_BFLOAT16_PRODUCTS
#endif

namespace {

using namespace pdserve;

constexpr int kTileRows = kLanes == 16 ? 12 : 6;  // What the registers of AVX-512, and of AVX2, hold.
constexpr int kPanel = 2 * kLanes;
constexpr int kFewRows = 4 * kTileRows;  // Up to here, making floats of weights beforehand does not pay.
constexpr int kBlockRows = 32 * kTileRows;
constexpr int kMaxDepth = 256;            // Inputs of a block, at most.
constexpr int kBlockPanels = 16;          // Panels that one block of rows is multiplied with, at most.
constexpr int kAheadBytes = 4096;         // Prefetched: what memory sends while a core waits for its first byte.
constexpr int kTasksOfThread = 8;         // Of several products, so that all threads end together.
constexpr int64_t kSerialWork = 1 << 17;  // Multiply-adds below which waking threads costs more than it saves.

enum Kind : int64_t { kFloat32, kBFloat16, kFloat16, kInt8, kInt4, kE4m3, kE2m1, kFirstOfPairs };

// Of one input: the weight of an output of a panel's first half, 8, and 16 times that of its counterpart of the second.
struct Int4Pair {
  int8_t sum;
};

// Of one input: the codes of an output of a panel's first half, and of its counterpart of the second.
struct E2m1Pair {
  int8_t codes;
};

// Of two inputs: a row's, or the weights of an output.
struct BFloat16x2 {
  uint32_t bits;
};
template <typename T>  // int8_t or E4m3.
struct Bytesx2 {
  T values[2];
};
// Of one of two inputs: the codes of an output of a panel's first half, and of its counterpart of the second.
struct Int4x2 {
  uint8_t codes;
};
struct E2m1x2 {
  uint8_t codes;
};

// Inputs of a step, and what rows and blocks hold of them.
template <typename W>
constexpr int kInputs = 1;
template <>
constexpr int kInputs<BFloat16x2> = 2;
template <typename T>
constexpr int kInputs<Bytesx2<T>> = 2;
template <>
constexpr int kInputs<Int4x2> = 2;
template <>
constexpr int kInputs<E2m1x2> = 2;
template <typename W>
using Operand = std::conditional_t<kInputs<W> == 2, BFloat16x2, float>;

// Values that hold the weights of a step for a panel.
template <typename W>
constexpr int kStep = kPanel;
template <>
constexpr int kStep<Int4Pair> = kLanes;
template <>
constexpr int kStep<E2m1Pair> = kLanes;

// Whether blocks of such values may have scales: those made of quantised ones are floats or pairs of bfloat16.
template <typename W>
constexpr bool kMayScale = !std::is_same_v<W, BFloat16> && !std::is_same_v<W, Float16>;

// What `load_panel` makes of a weight w in a panel's first half, and in its second: units * w + offsets, and in the
// second what it makes of the first besides. All is linear, so that it is made up for later and once, with the sums of
// the inputs.
struct Coding {
  bool is_paired;
  float units[2];
  float offsets[2];
};
template <typename W>
constexpr Coding kCoding = {false, {1, 1}, {0, 0}};
template <>
constexpr Coding kCoding<Int4Pair> = {true, {1, 16}, {kLanes == 16 ? 0.0f : 8.0f, kLanes == 16 ? 8.0f : 0.0f}};

// Mirrored by dense._Weight.
struct Weight {
  int64_t kind;
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t depth;       // Inputs of a block.
  int64_t num_scales;  // Blocks that have scales and zeros of their own; 1: all have the same.
  const void* panels;
  const float* scales;             // [panel][kPanel], or null.
  const float* block_scales;       // [panel][num_scales][kPanel], or null.
  const uint8_t* block_exponents;  // Of scales that are powers of two, as floats have them, in their place; or null.
  const int8_t* zeros;             // As block_scales, or null; only with scales of blocks, and not of e4m3 and e2m1.
  const float* bias;               // [num_outputs], or null.

  int64_t num_blocks() const { return (num_inputs + depth - 1) / depth; }
};

// Some inputs of some rows.
template <typename X>
struct Rows {
  const X* x;
  int64_t stride;       // Values between rows.
  const float* sums;    // Of each row's inputs; null where nothing is made up for with them.
  int64_t sums_stride;

  Rows from(int64_t row) const { return {x + row * stride, stride, sums + row * sums_stride, sums_stride}; }
};

// Weights of some inputs for one panel or several.
template <typename W>
struct Block {
  const W* weights;
  int64_t stride;       // Values between panels.
  int64_t depth;        // Steps.
  const float* scales;  // Of the block's sums, [kPanel] for the first panel, or null.
  const uint8_t* exponents;  // Of scales, in their place, or null.
  const int8_t* zeros;  // Beside the scales, or null.
  int64_t scale_stride;
  const Coding& coding;
};

// The weights of a step for the outputs of a panel, as floats or pairs of bfloat16: first half, second half.
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

inline void load_panel(const Int4Pair* p, Vec& low, Vec& high) {
  const IntVec pairs = load_integers(&p->sum);
#if PDSERVE_LANES == 16
  constexpr Vec first = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};  // In one instruction.
  low = reinterpret_cast<Vec>(
      _mm512_permutexvar_ps(reinterpret_cast<__m512i>(pairs), reinterpret_cast<__m512>(first)));
#else
  low = __builtin_convertvector(pairs & 15, Vec);
#endif
  high = __builtin_convertvector(pairs, Vec);
}

// Twice the values of e2m1 whose codes are in the lowest four bits: integers.
inline Vec twice_e2m1(IntVec codes) {
#if PDSERVE_LANES == 16
  constexpr Vec values = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return reinterpret_cast<Vec>(
      _mm512_permutexvar_ps(reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512>(values)));
#else
  const IntVec low = codes & 7, sign = (codes & 8) << 28;
#if defined(__AVX2__)
  constexpr Vec values = {0, 1, 2, 3, 4, 6, 8, 12};
  const auto magnitude = reinterpret_cast<IntVec>(
      _mm256_permutevar8x32_ps(reinterpret_cast<__m256>(values), reinterpret_cast<__m256i>(low)));
#else
  const IntVec integers = low < 4 ? low : (2 + (low & 1)) * (2 + (low & 2));
  const auto magnitude = reinterpret_cast<IntVec>(__builtin_convertvector(integers, Vec));
#endif
  return reinterpret_cast<Vec>(magnitude | sign);
#endif
}

inline void load_panel(const E2m1Pair* p, Vec& low, Vec& high) {
  const IntVec pairs = load_integers(&p->codes);
  low = twice_e2m1(pairs);
  high = twice_e2m1(pairs >> 4);
}

// sum + x * w.
inline Vec add_product(Vec sum, float x, Vec w) { return sum + x * w; }

#ifdef PDSERVE_BFLOAT16_PRODUCTS
inline Vec add_product(Vec sum, BFloat16x2 x, Vec w) {
  const auto pairs = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(x.bits)));
  return reinterpret_cast<Vec>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), pairs, reinterpret_cast<__m512bh>(w)));
}

inline void load_panel(const BFloat16x2* p, Vec& low, Vec& high) {
  low = load(reinterpret_cast<const float*>(p));
  high = load(reinterpret_cast<const float*>(p + kLanes));
}

// 2 * kLanes values, of at most eight digits, as bfloat16.
template <typename T>
inline Vec load_pairs(const T* p) {
  return reinterpret_cast<Vec>(
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(load(p + kLanes)), reinterpret_cast<__m512>(load(p))));
}

template <typename T>
inline void load_panel(const Bytesx2<T>* p, Vec& low, Vec& high) {
  low = load_pairs(p->values);
  high = load_pairs(p[kLanes].values);
}

// Values of codes of four bits, `table` having the bfloat16 of each twice: five bits choose one.
inline void look_up(__m512i table, const uint8_t* codes, Vec& low, Vec& high) {
  const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  low = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(both, table));
  high = reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table));
}

// The bfloat16 of 16 integers, twice.
inline __m512i table_of(Vec values) {
  return reinterpret_cast<__m512i>(
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(values), reinterpret_cast<__m512>(values)));
}

inline void load_panel(const Int4x2* p, Vec& low, Vec& high) {
  look_up(table_of(Vec{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}), &p->codes, low, high);
}

inline void load_panel(const E2m1x2* p, Vec& low, Vec& high) {
  look_up(table_of(Vec{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}), &p->codes, low, high);
}
#endif

// Keeps a value in a register: left alone, the compiler reads weights from memory again for every row.
inline void keep([[maybe_unused]] Vec& x) {
#if defined(__AVX2__)
  asm("" : "+v"(x));
#endif
}

// from - a * b, rounded once wherever the CPU can; the compiler joins the two in some places and not in others.
inline Vec less_product(Vec from, Vec a, Vec b) {
#if PDSERVE_LANES == 16
  return reinterpret_cast<Vec>(_mm512_fnmadd_ps(
      reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(from)));
#elif defined(__FMA__)
  return reinterpret_cast<Vec>(_mm256_fnmadd_ps(
      reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(from)));
#else
  return from - a * b;
#endif
}

// Scales, also by their exponents.
inline Vec load_scales(const float* p) { return load(p); }
inline Vec load_scales(const uint8_t* p) {
  return reinterpret_cast<Vec>((load_integers(reinterpret_cast<const int8_t*>(p)) & 255) << 23);
}

// Sums times their scales.
template <typename S>
inline void scale_sums(const S* scales, Vec& low, Vec& high) {
  low *= load_scales(scales);
  high *= load_scales(scales + kLanes);
  keep(low);  // Rounded here, and not joined with an addition wherever the compiler finds that it can be.
  keep(high);
}

// total[p][r][f] = (is_first ? 0 : total[p][r][f]) + the scaled sum over d of x[r][d] * w[p][d][f], where the block and
// total are of kPanels panels, in total kRows * kPanel values apart.
template <int kRows, int kPanels, int kAhead, typename W>
inline void add_tile(const Rows<Operand<W>>& rows, const Block<W>& block, float* total, bool is_first) {
  Vec sum[kPanels][kRows][2] = {};
  if (kMayScale<W> && block.scales)
    for (int p = 0; p < kPanels; ++p) __builtin_prefetch(block.scales + p * block.scale_stride);
  for (int64_t d = 0; d < block.depth; ++d) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const W* from = block.weights + p * block.stride + d * kStep<W>;
      if constexpr (kAhead > 0)
        for (size_t byte = 0; byte < kStep<W> * sizeof(W); byte += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead + byte);
      Vec low, high;
      load_panel(from, low, high);
      keep(low);
      keep(high);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        sum[p][r][0] = add_product(sum[p][r][0], rows.x[r * rows.stride + d], low);
        sum[p][r][1] = add_product(sum[p][r][1], rows.x[r * rows.stride + d], high);
      }
    }
  }
  if (kMayScale<W> && rows.sums)
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const Coding& coding = block.coding;
      Vec low = Vec{} + coding.offsets[0], high = Vec{} + coding.offsets[1];
      if (block.zeros) {
        low += coding.units[0] * load(block.zeros + p * block.scale_stride);
        high += coding.units[1] * load(block.zeros + p * block.scale_stride + kLanes);
      }
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        if (coding.is_paired) sum[p][r][1] -= sum[p][r][0];
        const Vec x_sum = Vec{} + rows.sums[r * rows.sums_stride];
        sum[p][r][0] = less_product(sum[p][r][0], x_sum, low);
        sum[p][r][1] = less_product(sum[p][r][1], x_sum, high);
      }
    }
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      if (kMayScale<W> && block.scales) scale_sums(block.scales + p * block.scale_stride, sum[p][r][0], sum[p][r][1]);
      if (kMayScale<W> && block.exponents)
        scale_sums(block.exponents + p * block.scale_stride, sum[p][r][0], sum[p][r][1]);
      float* to = total + (p * kRows + r) * kPanel;
      store(to, is_first ? sum[p][r][0] : load(to) + sum[p][r][0]);
      store(to + kLanes, is_first ? sum[p][r][1] : load(to + kLanes) + sum[p][r][1]);
    }
}

// add_tile of one panel, for 1 to kRows rows.
template <int kAhead, int kRows = kTileRows, typename W>
inline void add_small_tile(int64_t num_rows, const Rows<Operand<W>>& rows, const Block<W>& block, float* total,
                           bool is_first) {
  if (num_rows == kRows) return add_tile<kRows, 1, kAhead>(rows, block, total, is_first);
  if constexpr (kRows > 1) add_small_tile<kAhead, kRows - 1>(num_rows, rows, block, total, is_first);
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
inline void add_rows(int64_t num_rows, const Rows<Operand<W>>& rows, const Block<W>& block, float* total,
                     bool is_first, Prefetch next = {}) {
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile) {
    next.ask(tile, num_tiles);
    const int64_t end = num_rows * (tile + 1) / num_tiles;
    add_small_tile<kAhead>(end - row, rows.from(row), block, total + row * kPanel, is_first);
    row = end;
  }
}

template <typename W>
inline const Operand<W>* as_operands(const W* from, int64_t depth, Operand<W>* scratch) {
  if constexpr (std::is_same_v<W, Operand<W>>) return from;
  float* to = reinterpret_cast<float*>(scratch);
  for (int64_t d = 0; d < depth; ++d) {
    Vec low, high;
    load_panel(from + d * kStep<W>, low, high);
    store(to + d * kPanel, low);
    store(to + d * kPanel + kLanes, high);
  }
  return scratch;
}

// Tasks that a product is cut into: so many parts of its rows times so many of its panels.
struct Tasks {
  int64_t of_rows;
  int64_t of_panels;
};

template <typename W>
struct Product {
  using X = Operand<W>;
  const Weight& weight;
  const X* x;         // [num_rows, steps]
  float* y;           // [num_rows, num_outputs]
  int64_t num_rows;
  bool adds;          // To what y holds.
  const float* sums;  // [num_rows, blocks] of x, or null.

  int64_t steps() const { return (weight.num_inputs + kInputs<W> - 1) / kInputs<W>; }
  int64_t depth() const { return weight.depth / kInputs<W>; }  // Steps of a block.
  int64_t num_panels() const { return (weight.num_outputs + kPanel - 1) / kPanel; }

  // From a step on, which begins a block, of a row and those behind it.
  Rows<X> rows_at(int64_t row, int64_t step) const {
    const int64_t blocks = sums ? weight.num_blocks() : 0;
    return {x + row * steps() + step, steps(), sums + row * blocks + (sums ? step / depth() : 0), blocks};
  }

  // From a step on, of a panel and those behind it.
  Block<W> block_at(int64_t panel, int64_t step) const {
    const int64_t stride = steps() * kStep<W>, scales = weight.num_scales;
    const int64_t at = (panel * scales + (scales > 1 ? step / depth() : 0)) * kPanel;
    return {static_cast<const W*>(weight.panels) + panel * stride + step * kStep<W>,
            stride,
            std::min(depth(), steps() - step),
            weight.block_scales ? weight.block_scales + at : nullptr,
            weight.block_exponents ? weight.block_exponents + at : nullptr,
            weight.zeros ? weight.zeros + at : nullptr,
            scales * kPanel,
            kCoding<W>};
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
      for (int64_t d = 0; d < steps(); d += depth())
        add_tile<kRows, kPanels, kAheadBytes / kPanels>(rows_at(0, d), block_at(first, d), total, d == 0);
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
      for (int64_t d = 0; d < steps(); d += depth())
        add_rows<kAheadBytes>(num_rows, rows_at(0, d), block_at(panel, d), total, d == 0);
      finish(total, 0, num_rows, panel);
    }
  }

  // Many rows: a block of weights becomes floats, or pairs of bfloat16, once for a block of rows.
  void multiply_block(int64_t first_row, int64_t rows, int64_t first_panel, int64_t panels) const {
    static thread_local std::vector<X> x_block(kBlockRows * kMaxDepth), w_block(kMaxDepth * kPanel);
    static thread_local std::vector<float> total(kBlockPanels * kBlockRows * kPanel);
    for (int64_t d = 0; d < steps(); d += depth()) {
      const int64_t count = block_at(first_panel, d).depth;
      Rows<X> block_rows = rows_at(first_row, d);
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(block_rows.x + r * steps(), count, x_block.data() + r * depth());
      block_rows.x = x_block.data();
      block_rows.stride = depth();
      for (int64_t p = 0; p < panels; ++p) {
        const Block<W> held = block_at(first_panel + p, d);
        const Block<X> block{as_operands(held.weights, count, w_block.data()), 0, count, held.scales, held.exponents,
                             held.zeros, 0, held.coding};
        const W* next = p + 1 < panels ? held.weights + held.stride : block_at(first_panel, d + depth()).weights;
        add_rows<0>(rows, block_rows, block, total.data() + p * kBlockRows * kPanel, d == 0,
                    {reinterpret_cast<const char*>(next), count * kStep<W> * static_cast<int64_t>(sizeof(W))});
      }
    }
    for (int64_t p = 0; p < panels; ++p)
      finish(total.data() + p * kBlockRows * kPanel, first_row, rows, first_panel + p);
  }

  int64_t work() const { return num_rows * weight.num_inputs * weight.num_outputs; }
  bool has_few_rows() const { return num_rows <= kFewRows; }

  // Enough tasks for each of `num_threads` to have its share, even if some are slow, and as many for each.
  Tasks tasks(int64_t num_threads) const {
    const int64_t panels = num_panels();
    if (has_few_rows()) return {1, num_threads};
    const int64_t row_tasks = (num_rows + kBlockRows - 1) / kBlockRows;
    const int64_t width = std::clamp<int64_t>(panels * row_tasks / (4 * num_threads), 4, kBlockPanels);
    const int64_t rounds = (panels + width * num_threads - 1) / (width * num_threads);
    return {row_tasks, std::min(panels, rounds * num_threads)};
  }

  void run(const Tasks& tasks, int64_t i) const {
    const int64_t of_rows = i / tasks.of_panels, of_panels = i % tasks.of_panels;
    const int64_t row = num_rows * of_rows / tasks.of_rows, panel = num_panels() * of_panels / tasks.of_panels;
    const int64_t end = num_panels() * (of_panels + 1) / tasks.of_panels;
    if (has_few_rows()) return multiply_few(panel, end);
    multiply_block(row, num_rows * (of_rows + 1) / tasks.of_rows - row, panel, end - panel);
  }
};

// [num_rows, steps]: rows as they are multiplied.
template <typename W>
const Operand<W>* as_rows(const Weight& weight, const float* x, int64_t num_rows) {
  if constexpr (kInputs<W> == 1) return x;
#ifdef PDSERVE_BFLOAT16_PRODUCTS
  static thread_local std::vector<BFloat16x2> held;
  const int64_t inputs = weight.num_inputs, steps = (inputs + 1) / 2;
  held.resize(num_rows * steps);
  BFloat16x2* const rows = held.data();
  Team::get().run(num_rows, num_rows > kFewRows, [&](int64_t row) {
    for (int64_t d = 0; d < inputs; d += kLanes) {
      const auto values = static_cast<__mmask16>((1 << std::min<int64_t>(inputs - d, kLanes)) - 1);
      const auto pairs = static_cast<__mmask8>((1 << std::min<int64_t>(steps - d / 2, kLanes / 2)) - 1);
      const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(values, x + row * inputs + d));
      _mm256_mask_storeu_epi32(rows + row * steps + d / 2, pairs, reinterpret_cast<__m256i>(rounded));
    }
  });
  return reinterpret_cast<const Operand<W>*>(rows);
#endif
}

inline float sum_of(float x) { return x; }
inline float sum_of(BFloat16x2 x) {
  const Vec both = reinterpret_cast<Vec>(IntVec{static_cast<int32_t>(x.bits << 16), static_cast<int32_t>(x.bits & 0xffff0000)});
  return both[0] + both[1];
}
constexpr float one(float) { return 1; }
constexpr BFloat16x2 one(BFloat16x2) { return {0x3f803f80}; }

// [num_rows, blocks]: the sums of each block's inputs; null where they are not needed.
template <typename W>
const float* sum_inputs(const Product<W>& of) {
  const Weight& weight = of.weight;
  if (!weight.zeros && !kCoding<W>.is_paired) return nullptr;
  static thread_local std::vector<float> held;
  const int64_t blocks = weight.num_blocks(), steps = of.steps();
  held.resize(of.num_rows * blocks);
  float* const sums = held.data();
  Team::get().run(of.num_rows, of.num_rows > kFewRows, [&](int64_t row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const Operand<W>* from = of.x + row * steps + block * of.depth();
      const int64_t depth = std::min(of.depth(), steps - block * of.depth());
      Vec lanes{};
      int64_t d = 0;
      for (; d + kLanes <= depth; d += kLanes)
        lanes = add_product(lanes, one(Operand<W>{}), load(reinterpret_cast<const float*>(from + d)));
      float sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
      for (; d < depth; ++d) sum += sum_of(from[d]);
      sums[row * blocks + block] = sum;
    }
  });
  return sums;
}

// Rows starts[i] to starts[i + 1] times weights[i], which are of equal shape and form, for i in [0, count).
template <typename W>
void multiply(const Weight* weights, int64_t count, const int64_t* starts, const float* x, float* y, bool adds) {
  struct Part {
    Product<W> product;
    Tasks tasks;
    int64_t end;  // Of its tasks among all.
  };
  static thread_local std::vector<Part> held;
  std::vector<Part>& parts = held;  // Those of this thread, for the team, too.
  parts.clear();
  Team& team = Team::get();
  const Product<W> all{weights[0], as_rows<W>(weights[0], x, starts[count]), y, starts[count], adds, nullptr};
  const float* sums = sum_inputs(all);
  int64_t work = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = starts[i], rows = starts[i + 1] - start, blocks = sums ? weights[i].num_blocks() : 0;
    if (rows == 0) continue;
    const Product<W> product{weights[i], all.x + start * all.steps(), y + start * weights[i].num_outputs, rows, adds,
                             sums + start * blocks};
    parts.push_back({product, {1, 1}, 0});
    work += product.work();
  }
  const bool is_worth_it = work >= kSerialWork;
  const int64_t touched = parts.size(), num_threads = is_worth_it ? team.num_threads() : 1;
  int64_t num_tasks = 0;
  for (Part& part : parts) {
    // Threads take tasks of several products in turns and need no share of each, but panels to stream side by side.
    const int64_t share = (kTasksOfThread * num_threads + touched - 1) / touched;
    const int64_t most = std::max<int64_t>(part.product.num_panels() / 4, 1);
    part.tasks = part.product.tasks(touched > 1 ? std::min(share, most) : num_threads);
    part.end = num_tasks += part.tasks.of_rows * part.tasks.of_panels;
  }
  team.run(num_tasks, is_worth_it, [&](int64_t i) {
    const auto part = std::upper_bound(parts.begin(), parts.end(), i,
                                       [](int64_t task, const Part& other) { return task < other.end; });
    part->product.run(part->tasks, i - (part->end - part->tasks.of_rows * part->tasks.of_panels));
  });
}

template <typename W>
void copy_rows(const Weight& weight, const int64_t* ids, int64_t num_ids, float* out) {
  const Product<W> product{weight, nullptr, nullptr, 0, false, nullptr};
  for (int64_t i = 0; i < num_ids; ++i) {
    const int64_t panel = ids[i] / kPanel, place = ids[i] % kPanel;
    for (int64_t d = 0; d < weight.num_inputs; ++d) {
      const Block<W> block = product.block_at(panel, d / kInputs<W>);
      Vec halves[2];
      load_panel(block.weights, halves[0], halves[1]);
      if (block.coding.is_paired) halves[1] -= halves[0];
      if constexpr (kInputs<W> == 2)
        for (Vec& half : halves) {
          const auto pairs = reinterpret_cast<IntVec>(half);
          half = reinterpret_cast<Vec>(d % 2 ? pairs & static_cast<int32_t>(0xffff0000) : pairs << 16);
        }
      const int half = place / kLanes;
      const float zero = block.zeros ? block.zeros[place] : 0.0f;
      const float value = halves[half][place % kLanes] - block.coding.offsets[half] - block.coding.units[half] * zero;
      float scale = block.scales ? block.scales[place] : weight.scales ? weight.scales[ids[i]] : 1.0f;
      if (block.exponents) scale = load_scales(block.exponents + place / kLanes * kLanes)[place % kLanes];
      out[i * weight.num_inputs + d] = value * scale;
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
    case kE4m3: return call(E4m3{});
    case kE2m1: return call(E2m1Pair{});
#ifdef PDSERVE_BFLOAT16_PRODUCTS
    case kFirstOfPairs + kBFloat16: return call(BFloat16x2{});
    case kFirstOfPairs + kInt8: return call(Bytesx2<int8_t>{});
    case kFirstOfPairs + kInt4: return call(Int4x2{});
    case kFirstOfPairs + kE4m3: return call(Bytesx2<E4m3>{});
    case kFirstOfPairs + kE2m1: return call(E2m1x2{});
#endif
  }
}

}  // namespace

extern "C" {

// Outputs of one panel.
int64_t dense_panel_width() { return kPanel; }

// Whether weights may be held for products of bfloat16.
int64_t dense_multiplies_bfloat16() {
#ifdef PDSERVE_BFLOAT16_PRODUCTS
  return 1;
#else
  return 0;
#endif
}

// y[num_rows, num_outputs] = x[num_rows, num_inputs] W^T + b, or y += that; all contiguous.
void dense_multiply(const Weight* weight, const float* x, float* y, int64_t num_rows, int64_t adds) {
  const int64_t starts[] = {0, num_rows};
  with_kind(weight->kind, [&](auto value) { multiply<decltype(value)>(weight, 1, starts, x, y, adds != 0); });
}

// The same of `count` weights, each with the rows from its start up to the next one's.
void dense_multiply_grouped(const Weight* weights, int64_t count, const int64_t* starts, const float* x, float* y) {
  with_kind(weights->kind, [&](auto value) { multiply<decltype(value)>(weights, count, starts, x, y, false); });
}

// out[num_ids, num_inputs]: rows of W.
void dense_rows(const Weight* weight, const int64_t* ids, int64_t num_ids, float* out) {
  with_kind(weight->kind, [&](auto value) { copy_rows<decltype(value)>(*weight, ids, num_ids, out); });
}
}
