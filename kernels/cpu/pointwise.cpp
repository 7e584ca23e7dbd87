// RMS norm, gate and weighted sums of experts for CPUs. Compiled by build.py on first use and called by dense.py, which
// checks every shape before a call: nothing is checked here. A row's result does not depend on its neighbours.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "threads.h"
#include "vectors.h"

namespace {

using namespace pdserve;

constexpr int64_t kSerialValues = 1 << 17;  // Normalised values below which waking threads costs more than it saves.
constexpr int64_t kGateValues = 8;          // A gate takes as long as so many of them.

// e^x, relative error under 2e-7; infinite above 88.73, 0 below -104, NaN for NaN. Cody and Waite's reduction to
// [-ln 2 / 2, ln 2 / 2], then the Taylor series of degree 7.
inline Vec exp_vec(Vec x) {
  x = x > 89.0f ? Vec{} + 89.0f : x;
  x = x < -105.0f ? Vec{} - 105.0f : x;
  const Vec magic = Vec{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits.
  const Vec shifted = x * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec y = f * 1.98412698e-4f + 1.38888889e-3f;
  y = y * f + 8.33333333e-3f;
  y = y * f + 4.16666667e-2f;
  y = y * f + 1.66666667e-1f;
  y = y * f + 0.5f;
  y = y * f + 1.0f;
  y = y * f + 1.0f;
  const IntVec exponent = reinterpret_cast<IntVec>(shifted) - reinterpret_cast<IntVec>(magic);
  const IntVec half = exponent >> 1;  // Applied in two steps, so that results may overflow and be subnormal.
  return y * reinterpret_cast<Vec>((half + 127) << 23) * reinterpret_cast<Vec>((exponent - half + 127) << 23);
}

struct Silu {
  Vec operator()(Vec x, Vec up) const { return x / (1.0f + exp_vec(-x)) * up; }
};

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^(-2 u)).
struct GeluTanh {
  Vec operator()(Vec x, Vec up) const {
    return x / (1.0f + exp_vec(x * (x * x * -0.0713548163f - 1.59576912f))) * up;
  }
};

// gate * sigmoid(1.702 gate) * (up + 1) of limited values.
struct SwigluOai {
  Vec operator()(Vec gate, Vec up) const {
    const Vec limit = Vec{} + 7.0f;
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + exp_vec(gate * -1.702f)) * (up + 1.0f);
  }
};

template <typename Activation>
void gate_rows(const float* gate_up, float* out, int64_t num_rows, int64_t width) {
  const Activation activation;
  Team::get().run(num_rows, num_rows * width * kGateValues >= kSerialValues, [&](int64_t row) {
    const float* gate = gate_up + 2 * row * width;
    const float* up = gate + width;
    float* to = out + row * width;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(to + i, activation(load(gate + i), load(up + i)));
    float rest[2][kLanes] = {};
    std::copy(gate + i, gate + width, rest[0]);
    std::copy(up + i, up + width, rest[1]);
    const Vec last = activation(load(rest[0]), load(rest[1]));
    for (int j = 0; i < width; ++i, ++j) to[i] = last[j];
  });
}

void normalise_row(const float* x, const float* weight, float eps, float* out, int64_t width) {
  Vec sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes)
    for (int j = 0; j < 2; ++j) sums[j] += load(x + i + j * kLanes) * load(x + i + j * kLanes);
  sums[0] += sums[1];
  float total = 0;
  for (int j = 0; j < kLanes; ++j) total += sums[0][j];
  for (; i < width; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
  for (i = 0; i + kLanes <= width; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
  for (; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

void combine_row(const float* y, const int64_t* places, const float* weights, float* out, int64_t num_slots,
                 int64_t width) {
  std::fill(out, out + width, 0.0f);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (places[slot] < 0) continue;
    const float* row = y + places[slot] * width;
    const float weight = weights[slot];
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(out + i, load(out + i) + load(row + i) * weight);
    for (; i < width; ++i) out[i] += row[i] * weight;
  }
}

}  // namespace

extern "C" {

// out[num_rows, width] = x / rms(x) * weight, row by row.
void dense_rms_normalise(const float* x, const float* weight, float eps, float* out, int64_t num_rows, int64_t width) {
  Team::get().run(num_rows, num_rows * width >= kSerialValues, [&](int64_t row) {
    normalise_row(x + row * width, weight, eps, out + row * width, width);
  });
}

// out[num_rows, width] = sum over slots, in their order, of weights[row, slot] * y[places[row, slot]]; none where the
// place is negative.
void dense_combine(const float* y, const int64_t* places, const float* weights, float* out, int64_t num_rows,
                   int64_t num_slots, int64_t width) {
  Team::get().run(num_rows, num_rows * num_slots * width >= kSerialValues, [&](int64_t row) {
    combine_row(y, places + row * num_slots, weights + row * num_slots, out + row * width, num_slots, width);
  });
}

// out[num_rows, width] = activation(gate) * up, where gate_up is [num_rows, 2 * width], gates first.
void dense_gate_silu(const float* gate_up, float* out, int64_t num_rows, int64_t width) {
  gate_rows<Silu>(gate_up, out, num_rows, width);
}

void dense_gate_gelu_tanh(const float* gate_up, float* out, int64_t num_rows, int64_t width) {
  gate_rows<GeluTanh>(gate_up, out, num_rows, width);
}

void dense_gate_swiglu_oai(const float* gate_up, float* out, int64_t num_rows, int64_t width) {
  gate_rows<SwigluOai>(gate_up, out, num_rows, width);
}
}
