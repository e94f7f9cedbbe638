// A few threads that share loops. Each has a share of a loop's chunks and takes them one by one; who is done
// takes from the ends of the others' shares, so a thread that the system has put aside delays nobody but
// the chunk it holds. Shares lie apart: a cache line that one core writes and another reads takes a quarter of
// a microsecond to come over, as long as the least chunks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace vn {

// What a processor has beside its vector instructions.
struct Units {
  bool tiles = false;  // the matrix unit
  bool byte_dots = false;  // AVX-512 VNNI
  bool byte_tables = false;  // and VBMI
  bool byte_tiles = false;  // the matrix unit for inputs of eight bits
  // Reads a stream as fast as memory gives it, and slower where a program asks for lines ahead: AMD's
  // do. Intel's need to be asked.
  bool fetches_alone = false;
};

class ThreadPool {
 public:
  // num_threads counts the caller of run(). units: what its threads may use.
  explicit ThreadPool(int num_threads, Units units = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  Units units() const { return units_; }
  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }
  // Whether all but the caller sleep: to wake one takes some 50 us.
  bool rests() const { return num_asleep_.load(std::memory_order_relaxed) == num_threads() - 1; }

  // Whether this is a child of the process that made the threads: it has none of them, and must not
  // destroy the pool, which would wait for them.
  bool is_left_behind() const { return is_left_behind_; }
  // Asks the system for that; a pool that is left behind runs its loops in the caller alone.
  void look_for_fork();

  // Calls body(i) for 0 <= i < count and returns when all are done; throws what the first of them
  // threw, if any. One caller at a time.
  template <typename Body>
  void run(int64_t count, Body&& body) {
    if (count <= 1 || workers_.empty() || is_left_behind_) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    // The ticket has room for so many; beyond it neighbours share a chunk.
    const int64_t share = (count + kMaxChunks - 1) / kMaxChunks;
    auto chunk = [own = &body, share, count](int64_t index) {
      const int64_t end = (index + 1) * share < count ? (index + 1) * share : count;
      for (int64_t i = index * share; i < end; ++i) (*own)(i);
    };
    using Chunk = decltype(chunk);
    run_chunks((count + share - 1) / share,
               [](void* self, int64_t index) { (*static_cast<Chunk*>(self))(index); }, &chunk);
  }

 private:
  using Call = void (*)(void*, int64_t);
  // A ticket is | generation 24 | end 20 | next 20 |: one atomic word, so that a thread that comes late
  // can never take a chunk of another loop.
  static constexpr int kBits = 20;
  static constexpr int64_t kMaxChunks = (int64_t{1} << kBits) - 1;
  // A thread's chunks next .. end - 1 of a loop, and what they call.
  struct alignas(128) Share {
    std::atomic<uint64_t> ticket{0};
    Call call = nullptr;
    void* body = nullptr;

    bool is_empty() const;
  };

  void run_chunks(int64_t count, Call call, void* body);
  void run_chunk(const Share& share, int64_t index);
  void run_all(size_t index);
  void run_share(Share& share, bool is_own);
  void wait_until_done(int64_t count);
  void work(size_t index);

  std::vector<Share> shares_;  // by thread, the caller's first
  uint64_t generation_ = 0;
  // Written when a loop begins, and where threads have no more chunks.
  alignas(128) std::atomic<int64_t> num_done_{0};
  int64_t num_chunks_ = 0;

  std::exception_ptr thrown_;  // guarded by mutex_ while a loop runs
  std::atomic<bool> stops_{false};
  std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable wakes_;
  std::atomic<bool> caller_waits_{false};
  std::condition_variable finished_;
  const int64_t process_;
  const Units units_;
  bool is_left_behind_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace vn
