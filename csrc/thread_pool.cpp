#include "thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace vn {
namespace {

using Clock = std::chrono::steady_clock;

// For how long a thread that finds no chunk looks for the next loop. Beside busy neighbours each moment of it
// counts as work done, for which the thread loses its core later, in the midst of a chunk: with 50 us a step
// between ten processes took 1.9 times as long as with 10.
constexpr std::chrono::microseconds kWait{10};
// The caller waits for longer: another thread's chunk is soon done unless that thread has lost its core.
constexpr std::chrono::microseconds kCallerWait{100};

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Pauses until a time is over, by the clock: processors differ by four times in how long a pause is.
class Waiting {
 public:
  explicit Waiting(Clock::duration time) : end_(Clock::now() + time) {}

  // Whether there was time left for another pause.
  bool pause() {
    constexpr int kPausesPerLook = 8;
    pause_briefly();
    return ++num_pauses_ % kPausesPerLook != 0 || Clock::now() < end_;
  }

 private:
  Clock::time_point end_;
  int num_pauses_ = 0;
};

}  // namespace

ThreadPool::ThreadPool(int num_threads, Units units)
    : shares_(std::max(1, num_threads)), process_(getpid()), units_(units) {
  try {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    // The system gave fewer threads: those that started do the work.
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stops_.store(true);
  }
  wakes_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::look_for_fork() { is_left_behind_ = getpid() != process_; }

bool ThreadPool::Share::is_empty() const {
  const uint64_t own = ticket.load(), mask = static_cast<uint64_t>(kMaxChunks);
  return (own & mask) >= (own >> kBits & mask);
}

void ThreadPool::run_chunks(int64_t count, Call call, void* body) {
  num_done_.store(0, std::memory_order_relaxed);
  num_chunks_ = count;
  generation_ = (generation_ + 1) & ((uint64_t{1} << (64 - 2 * kBits)) - 1);
  const int64_t num_shares = static_cast<int64_t>(shares_.size());
  for (int64_t i = num_shares - 1; i >= 0; --i) {
    // The caller, who begins first, has no fewer than the others.
    const int64_t next = (count * i + num_shares - 1) / num_shares;
    const int64_t end = (count * (i + 1) + num_shares - 1) / num_shares;
    Share& share = shares_[i];
    share.call = call;
    share.body = body;
    share.ticket.store(generation_ << (2 * kBits) | static_cast<uint64_t>(end) << kBits |
                       static_cast<uint64_t>(next));
  }
  if (num_asleep_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wakes_.notify_all();
  }
  run_all(0);
  wait_until_done(count);
  if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
}

void ThreadPool::run_chunk(const Share& share, int64_t index) {
  try {
    share.call(share.body, index);
  } catch (...) {
    // A worker has nobody to tell, and a caller that left now would take the body from the others.
    std::lock_guard<std::mutex> lock(mutex_);
    if (!thrown_) thrown_ = std::current_exception();
  }
}

// A thread's own share, then what others have not come to.
void ThreadPool::run_all(size_t index) {
  run_share(shares_[index], true);
  for (size_t i = 1; i < shares_.size(); ++i) {
    run_share(shares_[(index + i) % shares_.size()], false);
  }
}

void ThreadPool::run_share(Share& share, bool is_own) {
  const uint64_t mask = static_cast<uint64_t>(kMaxChunks);
  int64_t num_run = 0;
  uint64_t ticket = share.ticket.load(std::memory_order_acquire);
  for (;;) {
    const uint64_t next = ticket & mask, end = ticket >> kBits & mask;
    if (next >= end) break;
    const uint64_t left = is_own ? ticket + 1 : ticket - (uint64_t{1} << kBits);
    if (!share.ticket.compare_exchange_weak(ticket, left, std::memory_order_acq_rel)) continue;
    // The loop cannot end before this chunk is counted, so what it calls stands.
    run_chunk(share, static_cast<int64_t>(is_own ? next : end - 1));
    ++num_run;
    ticket = share.ticket.load(std::memory_order_acquire);
  }
  if (num_run == 0) return;
  const int64_t count = num_chunks_;
  if (num_done_.fetch_add(num_run) + num_run == count && caller_waits_.load()) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    finished_.notify_one();
  }
}

void ThreadPool::wait_until_done(int64_t count) {
  Waiting waiting(kCallerWait);
  do {
    if (num_done_.load(std::memory_order_acquire) == count) return;
  } while (waiting.pause());
  // The thread that holds the last chunk may wait for this core. Sleeping keeps this thread's
  // claim to run the moment it is woken; a yield gives it up, to a neighbour that never rests.
  std::unique_lock<std::mutex> lock(mutex_);
  caller_waits_.store(true);
  finished_.wait(lock, [&] { return num_done_.load() == count; });
  caller_waits_.store(false);
}

void ThreadPool::work(size_t index) {
  const auto is_wanted = [&] { return stops_.load() || !shares_[index].is_empty(); };
  while (!stops_.load(std::memory_order_relaxed)) {
    Waiting waiting(kWait);
    while (!is_wanted() && waiting.pause()) {
    }
    if (!is_wanted()) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_asleep_.fetch_add(1);
      wakes_.wait(lock, is_wanted);
      num_asleep_.fetch_sub(1);
    }
    run_all(index);
  }
}

}  // namespace vn
