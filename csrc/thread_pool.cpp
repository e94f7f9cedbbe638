#include "thread_pool.h"

#include <unistd.h>

#include <utility>

namespace vn {
namespace {

// About 20 us: longer than the gap between two loops of a step, shorter than a neighbour would
// notice.
constexpr int kSpins = 400;
// The caller spins for longer, about 100 us: another thread's chunk is soon done unless that
// thread has lost its core, and to sleep and be woken takes as long as a chunk.
constexpr int kCallerSpins = 2000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, Units units) : process_(getpid()), units_(units) {
  try {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
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

void ThreadPool::run_chunks(int64_t count, Call call, void* body) {
  call_ = call;
  body_ = body;
  num_done_.store(0, std::memory_order_relaxed);
  generation_ = (generation_ + 1) & ((uint64_t{1} << (64 - 2 * kBits)) - 1);
  ticket_.store(generation_ << (2 * kBits) | static_cast<uint64_t>(count) << kBits);
  if (num_asleep_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wakes_.notify_all();
  }
  while (take_and_run()) {
  }
  wait_until_done(count);
  if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
}

void ThreadPool::run_chunk(int64_t index) {
  try {
    call_(body_, index);
  } catch (...) {
    // A worker has nobody to tell, and a caller that left now would take the body from the others.
    std::lock_guard<std::mutex> lock(mutex_);
    if (!thrown_) thrown_ = std::current_exception();
  }
}

void ThreadPool::wait_until_done(int64_t count) {
  for (int spins = 0; spins < kCallerSpins; ++spins) {
    if (num_done_.load(std::memory_order_acquire) == count) return;
    pause_briefly();
  }
  // The thread that holds the last chunk may wait for this core. Sleeping keeps this thread's
  // claim to run the moment it is woken; a yield gives it up, to a neighbour that never rests.
  std::unique_lock<std::mutex> lock(mutex_);
  caller_waits_.store(true);
  finished_.wait(lock, [&] { return num_done_.load() == count; });
  caller_waits_.store(false);
}

bool ThreadPool::take_and_run() {
  const uint64_t mask = static_cast<uint64_t>(kMaxChunks);
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while ((ticket & mask) < (ticket >> kBits & mask)) {
    if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
      // The loop cannot end before this chunk is counted, so call_ and body_ stand.
      run_chunk(static_cast<int64_t>(ticket & mask));
      const int64_t count = static_cast<int64_t>(ticket >> kBits & mask);
      if (num_done_.fetch_add(1) + 1 == count && caller_waits_.load()) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        finished_.notify_one();
      }
      return true;
    }
  }
  return false;
}

void ThreadPool::work() {
  int spins = 0;
  while (!stops_.load(std::memory_order_relaxed)) {
    if (take_and_run()) {
      spins = 0;
    } else if (spins < kSpins) {
      ++spins;
      pause_briefly();
    } else {
      const uint64_t mask = static_cast<uint64_t>(kMaxChunks);
      std::unique_lock<std::mutex> lock(mutex_);
      num_asleep_.fetch_add(1);
      wakes_.wait(lock, [&] {
        const uint64_t ticket = ticket_.load();
        return stops_.load() || (ticket & mask) < (ticket >> kBits & mask);
      });
      num_asleep_.fetch_sub(1);
      spins = 0;
    }
  }
}

}  // namespace vn
