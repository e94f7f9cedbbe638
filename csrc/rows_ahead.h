// Rows that are brought near while something else is computed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace vn {
namespace VN_BUILD {

// Rows that are needed soon. Their lines are asked for beside arithmetic over what is near already, evenly: a
// burst of them waits for memory as reading does. What is left when that is done is read.
class RowsAhead {
 public:
  // Rows, of which two pieces of so many bytes are needed, and the line at `tail`. The second piece and the
  // tail are not there at offset 0.
  struct Pieces {
    const char* const* rows;
    int64_t count, first, second, bytes, tail;

    int64_t row_bytes() const { return second == 0 ? bytes : 2 * bytes; }
  };

  // work: multiply-adds of vectors that there are to do meanwhile, or what takes as long.
  void start(const Pieces& pieces, int64_t work) {
    own_ = pieces;
    row_ = due_ = 0;
    const int64_t wanted = std::max<int64_t>(0, own_.count) * own_.row_bytes() * kParts;
    rate_ = std::min(ceil_div(wanted, std::max<int64_t>(1, work)), kMostBytes * kParts);
  }

  // Asks for what is due when so much more has been done, by whole rows. Nothing is called here: where sums
  // are kept in all registers, a call would move them to memory and back.
  VN_INLINE void ask(int64_t work) {
    due_ += work * rate_;
    for (; due_ > 0 && row_ < own_.count; due_ -= own_.row_bytes() * kParts) {
      const char* row = own_.rows[row_++];
      for (int64_t i = 0; i < own_.bytes; i += kLine) __builtin_prefetch(row + own_.first + i, 0, 2);
      if (own_.second == 0) continue;
      for (int64_t i = 0; i < own_.bytes; i += kLine) __builtin_prefetch(row + own_.second + i, 0, 2);
      if (own_.tail != 0) __builtin_prefetch(row + own_.tail, 0, 2);
    }
  }

  // Reads a byte of each line of the rows not asked for, in the order in which lines lie, as processors
  // foresee.
  void read_rest() {
    for (; row_ < own_.count; ++row_) {
      const char* row = own_.rows[row_];
      touch(row + own_.first, own_.bytes);
      if (own_.second == 0) continue;
      touch(row + own_.second, own_.bytes);
      if (own_.tail != 0) touch(row + own_.tail, 1);
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  // Rates are in parts of a byte; a core gets no more than so many bytes in a multiply-add.
  static constexpr int64_t kParts = 16, kMostBytes = 16;

  static void touch(const char* data, int64_t bytes) {
    const volatile char* own = data;
    for (int64_t i = 0; i < bytes; i += kLine) static_cast<void>(own[i]);
  }

  Pieces own_ = {};
  int64_t row_ = 0, due_ = 0, rate_ = 0;
};

}  // namespace VN_BUILD
}  // namespace vn
