// Sampling from rows of logits, for CPUs: the draws and the top-p thresholds of kernels/torch/sampling.py, without
// temporaries.
//
// Compiled by build.py on first use and called by sampling.py, which checks every shape and id: nothing is
// checked here.
//
// Noise costs two logarithms a token. Few tokens need them: a vectorised upper bound of a token's noise, out of its
// random word, tells nearly always that the token cannot beat the best one so far. Top-p needs a row's tokens in order,
// but only around its threshold: a histogram of the weight by logit finds the bucket of the threshold, and that is
// sorted.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "threads.h"

namespace {

struct Draw {
  uint64_t seed;
  uint32_t position;
  uint32_t choice;
  float best;         // The row's highest logit.
  float temperature;
  float lowest;       // Logits below it are not drawn,
  int32_t last_equal; // and of those equal to it the ones up to this id only.
};

struct TopP {
  double share;
  float best;         // The row's highest logit.
  float temperature;
  float lowest;       // Logits below it are left out.
};

struct Threshold {
  float lowest;
  int32_t last_equal;
};

constexpr uint32_t kTokenStream = 0;
constexpr int kWords = 4;    // Of one Philox counter.
constexpr int kGroups = 32;  // Counters at a time.
constexpr int kTokens = kWords * kGroups;
constexpr float kMaxNoise = 22.88f;   // -log(-log(1 - 2^-33)), rounded up.
constexpr double kMinNoise = -3.14;   // -log(-log(2^-33)), rounded down.
constexpr float kSlack = 1e-3f;       // Over the rounding of the bound's float arithmetic.

// Philox4x32-10 (Salmon et al. 2011) of kGroups consecutive counters: word i of the result belongs to token i.
void philox(const Draw& draw, uint32_t first_group, uint32_t* words) {
  uint32_t x[kWords][kGroups];
  for (int i = 0; i < kGroups; i++) {
    x[0][i] = draw.position;
    x[1][i] = draw.choice;
    x[2][i] = kTokenStream;
    x[3][i] = first_group + i;
  }
  uint32_t key_0 = static_cast<uint32_t>(draw.seed), key_1 = static_cast<uint32_t>(draw.seed >> 32);
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < kGroups; i++) {
      const uint64_t product_0 = uint64_t{x[0][i]} * 0xD2511F53u, product_1 = uint64_t{x[2][i]} * 0xCD9E8D57u;
      x[0][i] = static_cast<uint32_t>(product_1 >> 32) ^ x[1][i] ^ key_0;
      x[1][i] = static_cast<uint32_t>(product_1);
      x[2][i] = static_cast<uint32_t>(product_0 >> 32) ^ x[3][i] ^ key_1;
      x[3][i] = static_cast<uint32_t>(product_0);
    }
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kGroups; i++)
    for (int word = 0; word < kWords; word++) words[kWords * i + word] = x[word][i];
}

double noise_of(uint32_t word) { return -std::log(-std::log((word + 0.5) * 0x1p-32)); }

// At least the noise of a word: -log(-log(u)) <= -log(1 - u), and log2 of a float is at least its bits, read as a
// number of 8 integer and 23 fraction digits.
inline float noise_bound(uint32_t word) {
  const float half = static_cast<float>(static_cast<int32_t>(~word >> 1));  // At most 2^31 (1 - u), for u of the word.
  int32_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  const float log2_half = static_cast<float>(bits) * 0x1p-23f - 127.0f;
  return 0.69314718f * (31.0f - log2_half) + kSlack;
}

int64_t draw_token(const float* logits, int64_t vocab_size, const Draw& draw) {
  double best_score = kMinNoise;  // The most likely token reaches it whatever its noise.
  int64_t best_token = -1;
  float tail[kTokens];
  uint32_t words[kTokens];
  int32_t can_win[kTokens];
  for (int64_t start = 0; start < vocab_size; start += kTokens) {
    const float* tile = logits + start;
    if (vocab_size - start < kTokens) {
      std::fill(tail, tail + kTokens, -std::numeric_limits<float>::infinity());
      std::copy(tile, logits + vocab_size, tail);
      tile = tail;
    }
    const float wanted = static_cast<float>(best_score) - kSlack;
    int32_t any = 0;
    for (int i = 0; i < kTokens; i++)
      any |= (tile[i] >= draw.lowest) & ((tile[i] - draw.best) / draw.temperature + kMaxNoise >= wanted);
    if (!any) continue;
    philox(draw, static_cast<uint32_t>(start / kWords), words);
    any = 0;
    for (int i = 0; i < kTokens; i++) {
      const int32_t id = static_cast<int32_t>(start) + i;
      const int32_t is_kept = (tile[i] > draw.lowest) | ((tile[i] == draw.lowest) & (id <= draw.last_equal));
      can_win[i] = is_kept & ((tile[i] - draw.best) / draw.temperature + noise_bound(words[i]) >= wanted);
      any |= can_win[i];
    }
    if (!any) continue;
    for (int i = 0; i < kTokens; i++) {
      if (!can_win[i]) continue;
      const double score = (tile[i] - draw.best) / draw.temperature + noise_of(words[i]);
      if (score > best_score) {
        best_score = score;
        best_token = start + i;
      }
    }
  }
  return best_token;
}

constexpr int kBuckets = 2048;
constexpr float kBucketsPerUnit = 32;  // Of logit / temperature; the last bucket holds all that is beyond.
constexpr float kLeast = -80;          // exp of less counts as nothing.

// exp(x) for x in [kLeast, 0], to some 1e-6 of it: 2^n e^r with |r| <= ln(2) / 2.
inline float exp_of(float x) {
  const float scaled = x * 1.44269504f;
  const int32_t n = static_cast<int32_t>(scaled - 0.5f);
  const float r = (scaled - n) * 0.69314718f;
  const float series = 1 + r * (1 + r * (1.0f / 2 + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r / 720)))));
  const int32_t bits = (n + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power * series;
}

// The weights of up to kTokens tokens, 0 for those left out, and their buckets: the higher the logit, the lower.
void weigh(const float* logits, int64_t count, const TopP& top_p, float* weights, int32_t* buckets) {
  const float best = top_p.best, temperature = top_p.temperature, lowest = top_p.lowest;
  for (int64_t i = 0; i < count; i++) {
    const float scaled = (logits[i] - best) / temperature;
    const float clamped = std::max(scaled, kLeast);
    const int32_t counts = (logits[i] >= lowest) & (scaled >= kLeast);
    weights[i] = exp_of(clamped) * static_cast<float>(counts);
    buckets[i] = std::min(static_cast<int32_t>(clamped * -kBucketsPerUnit), kBuckets - 1);
  }
}

struct Candidate {
  float logit;
  int32_t id;
  float weight;
  bool operator<(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

Threshold find_threshold(const float* logits, int64_t vocab_size, const TopP& top_p) {
  if (!std::isfinite(top_p.best)) return {top_p.lowest, std::numeric_limits<int32_t>::max()};
  float weights[kTokens];
  int32_t buckets[kTokens];
  double bucket_weights[kBuckets] = {};
  for (int64_t start = 0; start < vocab_size; start += kTokens) {
    const int64_t count = std::min<int64_t>(kTokens, vocab_size - start);
    weigh(logits + start, count, top_p, weights, buckets);
    for (int64_t i = 0; i < count; i++) bucket_weights[buckets[i]] += weights[i];
  }
  double total = 0, before = 0;
  for (double weight : bucket_weights) total += weight;
  const double wanted = top_p.share * total;
  int last = 0;  // Where rounding lets no sum reach the share, the last bucket with any weight.
  double sum = 0;
  for (int bucket = 0; bucket < kBuckets && (bucket == 0 || sum < wanted); bucket++) {
    if (bucket_weights[bucket] == 0) continue;
    before = sum;
    sum += bucket_weights[bucket];
    last = bucket;
  }
  std::vector<Candidate> candidates;
  for (int64_t start = 0; start < vocab_size; start += kTokens) {
    const int64_t count = std::min<int64_t>(kTokens, vocab_size - start);
    weigh(logits + start, count, top_p, weights, buckets);
    for (int64_t i = 0; i < count; i++)
      if (buckets[i] == last && weights[i] > 0)
        candidates.push_back({logits[start + i], static_cast<int32_t>(start + i), weights[i]});
  }
  if (!std::is_sorted(candidates.begin(), candidates.end())) std::sort(candidates.begin(), candidates.end());
  size_t end = 0;
  for (sum = before + candidates[0].weight; sum < wanted && end + 1 < candidates.size(); sum += candidates[end].weight)
    end++;
  return {candidates[end].logit, candidates[end].id};
}

}  // namespace

// logits: rows of vocab_size floats, row_stride floats apart. All else: [num_draws].
extern "C" void draw_tokens(const float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_draws,
                            const int32_t* row, const uint64_t* seed, const uint32_t* position, const uint32_t* choice,
                            const float* best, const float* temperature, const float* lowest,
                            const int32_t* last_equal, int64_t* token) {
  pdserve::Team::get().run(num_draws, num_draws * vocab_size >= 1 << 15, [&](int64_t i) {
    const Draw draw = {seed[i], position[i], choice[i], best[i], temperature[i], lowest[i], last_equal[i]};
    token[i] = draw_token(logits + row[i] * row_stride, vocab_size, draw);
  });
}

// All but the logits: [num_rows].
extern "C" void find_top_p(const float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows,
                           const int32_t* row, const double* share, const float* best, const float* temperature,
                           const float* lowest, float* found_lowest, int32_t* found_last_equal) {
  pdserve::Team::get().run(num_rows, num_rows * vocab_size >= 1 << 15, [&](int64_t i) {
    const TopP top_p = {share[i], best[i], temperature[i], lowest[i]};
    const Threshold found = find_threshold(logits + row[i] * row_stride, vocab_size, top_p);
    found_lowest[i] = found.lowest;
    found_last_equal[i] = found.last_equal;
  });
}
