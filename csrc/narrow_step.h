// A step without the first rows of its requests.
#pragma once

#include <vector>

#include "build.h"

namespace vn {
namespace VN_BUILD {

class NarrowStep {
 public:
  // dropped: of each request how many of its first rows are left out.
  NarrowStep(const vn_step& whole, const std::vector<int64_t>& dropped) : step_(whole) {
    std::vector<int64_t> requests;
    for (int64_t r = 0; r < whole.num_requests; ++r) {
      if (dropped[r] == whole.counts[r]) continue;
      requests.push_back(r);
      row_starts_.push_back(static_cast<int64_t>(rows_.size()));
      starts_.push_back(whole.starts[r] + dropped[r]);
      counts_.push_back(whole.counts[r] - dropped[r]);
      for (int64_t i = dropped[r]; i < whole.counts[r]; ++i) {
        const int64_t row = whole.row_starts[r] + i;
        rows_.push_back(row);
        token_ids_.push_back(whole.token_ids[row]);
        positions_.push_back(whole.positions[row]);
      }
    }
    step_.num_tokens = static_cast<int64_t>(rows_.size());
    step_.num_requests = static_cast<int64_t>(requests.size());
    step_.token_ids = token_ids_.data();
    step_.positions = positions_.data();
    step_.row_starts = row_starts_.data();
    step_.starts = starts_.data();
    step_.counts = counts_.data();
    pick(whole.read_from, 1, whole, requests, read_from_, step_.read_from);
    pick(whole.wanted_from, 1, whole, requests, wanted_from_, step_.wanted_from);
    pick(whole.output_from, 1, whole, requests, output_from_, step_.output_from);
    const int64_t groups = whole.num_groups;
    pick(whole.write_from, groups, whole, requests, write_from_, step_.write_from);
    pick(whole.table_offsets, groups, whole, requests, offsets_, step_.table_offsets);
    pick(whole.table_lengths, groups, whole, requests, lengths_, step_.table_lengths);
    pick(whole.table_bases, groups, whole, requests, bases_, step_.table_bases);
  }
  NarrowStep(const NarrowStep&) = delete;
  NarrowStep& operator=(const NarrowStep&) = delete;

  const vn_step& step() const { return step_; }
  // Its flat rows in the whole step, ascending.
  const std::vector<int64_t>& rows() const { return rows_; }

 private:
  // Takes some requests' columns of [groups, R].
  static void pick(const int64_t* values, int64_t groups, const vn_step& whole,
                   const std::vector<int64_t>& requests, std::vector<int64_t>& kept,
                   const int64_t*& target) {
    for (int64_t g = 0; g < groups; ++g) {
      for (const int64_t r : requests) kept.push_back(values[g * whole.num_requests + r]);
    }
    target = kept.data();
  }

  vn_step step_;
  std::vector<int64_t> rows_, token_ids_, positions_, row_starts_, starts_, counts_, read_from_,
      wanted_from_, output_from_, write_from_, offsets_, lengths_, bases_;
};

}  // namespace VN_BUILD
}  // namespace vn
