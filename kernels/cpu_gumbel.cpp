// Drawing tokens by Gumbel-max from rows of logits, for CPUs: what torch_gumbel.py defines, without its temporaries.
//
// Compiled by cpu_build.py on first use and called by cpu_gumbel.py, which checks every shape and id: nothing is checked
// here. Noise costs two logarithms a token. Few tokens need them: a vectorised upper bound of a token's noise, out of its
// random word, tells nearly always that the token cannot beat the best one so far.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

// Mirrored by cpu_gumbel.DrawStruct.
struct Draw {
  int64_t row;
  uint64_t seed;
  uint32_t position;
  uint32_t choice;
  float best;         // The row's highest logit.
  float temperature;
  float lowest;       // Logits below it are not drawn,
  int32_t last_equal; // and of those equal to it the ones up to this id only.
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

}  // namespace

// logits: rows of vocab_size floats, row_stride floats apart. tokens: [num_draws].
extern "C" void draw_tokens(const float* logits, int64_t row_stride, int64_t vocab_size, const Draw* draws,
                            int64_t num_draws, int64_t* tokens, int num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_draws * vocab_size >= 1 << 15)
  for (int64_t i = 0; i < num_draws; i++)
    tokens[i] = draw_token(logits + draws[i].row * row_stride, vocab_size, draws[i]);
}
