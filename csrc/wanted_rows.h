// Rows of a step whose streams somebody reads. The last layer stores what all rows leave in the
// caches and computes the rest for these alone: of a prompt its last row, of most chunks none.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "build.h"

namespace vn {
namespace VN_BUILD {

inline std::vector<int64_t> list_rows(int64_t count) {
  std::vector<int64_t> rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// How many of a request's first rows nobody wants.
inline int64_t count_unwanted(const vn_step& step, int64_t request) {
  const int64_t count = step.wanted_from[request] - step.starts[request];
  return std::clamp<int64_t>(count, 0, step.counts[request]);
}

// Flat rows, ascending.
inline std::vector<int64_t> find_wanted(const vn_step& step) {
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < step.num_requests; ++r) {
    for (int64_t i = count_unwanted(step, r); i < step.counts[r]; ++i) {
      rows.push_back(step.row_starts[r] + i);
    }
  }
  return rows;
}

// Moves rows of `width` values, given ascending, to the front.
inline void gather_rows(const std::vector<int64_t>& rows, int64_t width, float* values) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const float* own = values + rows[i] * width;
    if (own != values + i * width) std::memcpy(values + i * width, own, sizeof(float) * width);
  }
}

// Moves them back from the front.
inline void scatter_rows(const std::vector<int64_t>& rows, int64_t width, float* values) {
  for (size_t i = rows.size(); i-- > 0;) {
    float* own = values + rows[i] * width;
    if (own != values + i * width) std::memcpy(own, values + i * width, sizeof(float) * width);
  }
}

// The same, with zeros in all other rows of `total`.
inline void spread_rows(const std::vector<int64_t>& rows, int64_t total, int64_t width,
                        float* values) {
  scatter_rows(rows, width, values);
  size_t next = 0;
  for (int64_t row = 0; row < total; ++row) {
    if (next < rows.size() && rows[next] == row) {
      ++next;
    } else {
      std::fill_n(values + row * width, width, 0.0f);
    }
  }
}

}  // namespace VN_BUILD
}  // namespace vn
