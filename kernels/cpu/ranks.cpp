// What processes exchange through memory that they share: collectives (sums and gathers), and messages from one to
// another. Compiled by build.py on first use and called by ranks.py, which checks every argument before a call: nothing
// is checked here.
//
// In a collective every rank has a turn, which it raises when a piece of its data is in its slot, and two slots, which
// it uses alternately. A rank that writes a slot again has met the others since, so all have read what it held. A
// waiting rank spins, then yields its core, until the others make the same call: the owner of the ranks ends them all
// if one is gone.

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "threads.h"

namespace {

constexpr int64_t kLineBytes = 64;  // Turns lie on cache lines of their own.

// Mirrored by ranks._Struct.
struct Ranks {
  char* memory;  // Turns, then slots [num_ranks, 2, slot_bytes].
  int64_t rank;
  int64_t num_ranks;
  int64_t slot_bytes;

  std::atomic<uint64_t>& turn(int64_t of) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(memory + of * kLineBytes);
  }

  char* slot(int64_t of, uint64_t at) const {
    return memory + num_ranks * kLineBytes + (2 * of + static_cast<int64_t>(at & 1)) * slot_bytes;
  }

  // Puts a piece into this rank's slot and waits for the pieces of all others; returns the turn they are found at.
  uint64_t exchange(const void* piece, int64_t num_bytes) const {
    const uint64_t now = turn(rank).load(std::memory_order_relaxed) + 1;
    std::memcpy(slot(rank, now), piece, num_bytes);
    turn(rank).store(now, std::memory_order_release);
    for (int64_t other = 0; other < num_ranks; ++other)
      pdserve::wait([&] { return turn(other).load(std::memory_order_acquire) >= now; }, [] { return false; });
    return now;
  }
};

// One process sends, one receives. A message goes in pieces through a ring of slots, from its first slot on, so that
// messages of like size stay in the same memory. The pieces sent and received are counted modulo 2^32. Waits may last
// as long as a step of the model, so a waiting process spins for a moment and then sleeps.
//
// Mirrored by ranks._ChannelStruct.
struct Channel {
  char* memory;  // Two counters, then slots [num_slots, slot_bytes].
  int64_t num_slots;
  int64_t slot_bytes;

  std::atomic<uint32_t>& sent() const { return *reinterpret_cast<std::atomic<uint32_t>*>(memory); }
  std::atomic<uint32_t>& received() const { return *reinterpret_cast<std::atomic<uint32_t>*>(memory + kLineBytes); }

  char* slot(uint32_t piece) const { return memory + 2 * kLineBytes + piece % num_slots * slot_bytes; }
};

// Waits until `done` holds for the counter. The operation is not FUTEX_WAIT_PRIVATE: the waker is another process.
template <typename Done>
void sleep_until(const std::atomic<uint32_t>& counter, Done done) {
  pdserve::wait([&] { return done(counter.load(std::memory_order_acquire)); }, [] { return true; });
  for (;;) {
    const uint32_t seen = counter.load(std::memory_order_acquire);
    if (done(seen)) return;
    syscall(SYS_futex, &counter, FUTEX_WAIT, seen, nullptr, nullptr, 0);
  }
}

void raise(std::atomic<uint32_t>& counter, uint32_t to) {
  counter.store(to, std::memory_order_release);
  syscall(SYS_futex, &counter, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace

extern "C" {

// Sends num_bytes, once the message before has been received.
void channel_send(const Channel* channel, const char* data, int64_t num_bytes) {
  const uint32_t start = channel->sent().load(std::memory_order_relaxed);
  sleep_until(channel->received(), [&](uint32_t received) { return received == start; });
  uint32_t piece = 0;
  for (int64_t offset = 0; offset < num_bytes; offset += channel->slot_bytes, ++piece) {
    sleep_until(channel->received(), [&](uint32_t received) {
      return static_cast<int64_t>(start + piece - received) < channel->num_slots;
    });
    std::memcpy(channel->slot(piece), data + offset, std::min(channel->slot_bytes, num_bytes - offset));
    raise(channel->sent(), start + piece + 1);
  }
}

// Receives a message of num_bytes.
void channel_receive(const Channel* channel, char* data, int64_t num_bytes) {
  const uint32_t start = channel->received().load(std::memory_order_relaxed);
  uint32_t piece = 0;
  for (int64_t offset = 0; offset < num_bytes; offset += channel->slot_bytes, ++piece) {
    sleep_until(channel->sent(), [&](uint32_t sent) { return static_cast<int32_t>(sent - start - piece) > 0; });
    std::memcpy(data + offset, channel->slot(piece), std::min(channel->slot_bytes, num_bytes - offset));
    raise(channel->received(), start + piece + 1);
  }
}

// Replaces x, [count] on every rank, by its sum, added in the order of the ranks.
void ranks_sum(const Ranks* ranks, float* x, int64_t count) {
  const int64_t room = ranks->slot_bytes / static_cast<int64_t>(sizeof(float));
  for (int64_t start = 0; start < count; start += room) {
    const int64_t length = std::min(room, count - start);
    const uint64_t now = ranks->exchange(x + start, length * sizeof(float));
    std::memcpy(x + start, ranks->slot(0, now), length * sizeof(float));
    for (int64_t rank = 1; rank < ranks->num_ranks; ++rank) {
      const float* piece = reinterpret_cast<const float*>(ranks->slot(rank, now));
      for (int64_t i = 0; i < length; ++i) x[start + i] += piece[i];
    }
  }
}

// Copies every rank's `part`, of num_bytes, to `all`: [num_ranks, num_bytes].
void ranks_gather(const Ranks* ranks, const char* part, char* all, int64_t num_bytes) {
  for (int64_t start = 0; start < num_bytes; start += ranks->slot_bytes) {
    const int64_t length = std::min(ranks->slot_bytes, num_bytes - start);
    const uint64_t now = ranks->exchange(part + start, length);
    for (int64_t rank = 0; rank < ranks->num_ranks; ++rank)
      std::memcpy(all + rank * num_bytes + start, ranks->slot(rank, now), length);
  }
}
}
