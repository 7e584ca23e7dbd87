// The threads of the C++ kernels: one team a process, which works on one loop at a time.
//
// OpenMP's threads are not used, because those of libgomp spin without ever yielding while they wait: on cores that
// something else uses, too, a loop then waits for whole scheduler ticks. A member of this team spins for a moment, then
// yields at every look, then sleeps. Steps of a model follow one another within microseconds, so it seldom sleeps
// between two loops, and an idle worker's team uses no time at all.

#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pdserve {

// Spins, then yields the core, until `done`, or until `tired` once it yields.
template <typename Done, typename Tired>
void wait(Done done, Tired tired) {
  constexpr int kSpins = 300;
  for (int spins = 0; !done(); ++spins) {
    if (spins >= kSpins) {
      sched_yield();
      if (tired()) return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

class Team {
 public:
  static Team& get() {
    static Team* const team = new Team;  // Never destroyed: its threads run until the process ends.
    return *team;
  }

  // From now on loops are shared by so many threads, the caller included, which may run on `cores` only; on any if
  // empty.
  void use(int num_threads, const int32_t* cores, int num_cores) {
    const std::lock_guard<std::mutex> lock(busy_);
    CPU_ZERO(&cores_);
    for (int i = 0; i < num_cores; ++i) CPU_SET(cores[i], &cores_);
    has_cores_ = num_cores > 0;
    ++placement_;
    num_threads_ = std::min<int>(num_threads, kRound);  // An order has no room for more helpers.
    while (static_cast<int>(threads_.size()) < num_threads_ - 1)
      threads_.emplace_back(&Team::serve, this, static_cast<uint32_t>(threads_.size()));
  }

  int num_threads() const { return num_threads_; }

  // body(i) for each i in [0, count), in any order; on the threads of the team if `is_worth_it`, for waking them takes
  // time. While the team is at work, a second caller works alone.
  template <typename Body>
  void run(int64_t count, bool is_worth_it, const Body& body) {
    std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
    const bool is_shared = is_worth_it && count > 1 && num_threads_ > 1 && lock.try_lock();
    const int helpers = is_shared ? static_cast<int>(std::min<int64_t>(num_threads_, count)) - 1 : 0;
    if (helpers == 0) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    call_ = [](const void* body, int64_t i) { (*static_cast<const Body*>(body))(i); };
    body_ = &body;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    working_.store(helpers, std::memory_order_relaxed);
    order_.store(((order_.load(std::memory_order_relaxed) / kRound + 1) * kRound) | static_cast<uint32_t>(helpers));
    if (sleeping_.load() > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
    work();
    wait([&] { return working_.load(std::memory_order_acquire) == 0; }, [] { return false; });
  }

 private:
  static constexpr uint32_t kRound = 256;  // An order is a round and, below it, how many helpers the round has.
  static constexpr std::chrono::microseconds kAwake{1000};  // A helper sleeps after waiting for so long.

  void serve(uint32_t index) {
    uint32_t seen = 0;
    int placement = 0;
    for (;;) {
      const auto since = std::chrono::steady_clock::now();
      wait([&] { return order_.load(std::memory_order_acquire) != seen; },
           [&] {
             if (std::chrono::steady_clock::now() - since < kAwake) return false;
             sleeping_.fetch_add(1);
             futex(FUTEX_WAIT_PRIVATE, seen);  // Returns at once if there is a new order already.
             sleeping_.fetch_sub(1);
             return false;
           });
      seen = order_.load(std::memory_order_acquire);
      if (index >= seen % kRound) continue;  // A helper that is not of the round must not look at anything else.
      if (placement != placement_) {
        placement = placement_;
        if (has_cores_) sched_setaffinity(0, sizeof cores_, &cores_);
      }
      work();
      working_.fetch_sub(1, std::memory_order_release);
    }
  }

  void work() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(body_, i);
  }

  void futex(int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&order_), operation, value, nullptr, nullptr, 0);
  }

  std::mutex busy_;
  std::vector<std::thread> threads_;
  int num_threads_ = 1;
  cpu_set_t cores_;
  bool has_cores_ = false;
  int placement_ = 0;
  // Of the round under way: written before the order, read by its helpers only.
  void (*call_)(const void*, int64_t) = nullptr;
  const void* body_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<uint32_t> order_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> working_{0};
};

}  // namespace pdserve
