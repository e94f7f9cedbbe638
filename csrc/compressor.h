// Compressed rows: consecutive tokens of a cache's rows become one entry of another.
#pragma once

#include <algorithm>
#include <vector>

#include "build.h"
#include "kernels.h"

namespace vn {
namespace VN_BUILD {

// The index-th entry of a request.
struct Entry {
  int64_t request, index;
};

// The entries of `ratio` tokens that a step completes and is to write.
inline std::vector<Entry> list_entries(const vn_step& step, const vn_cache& cache, int64_t ratio) {
  std::vector<Entry> entries;
  for (int64_t r = 0; r < step.num_requests; ++r) {
    const int64_t start = step.starts[r], end = start + step.counts[r];
    const int64_t from = std::max(start, step.write_from[cache.group * step.num_requests + r]);
    for (int64_t e = from / ratio; e < end / ratio; ++e) entries.push_back({r, e});
  }
  return entries;
}

// out = sum of values, weighted per channel by a softmax of the scores over the rows.
inline void reduce_rows(const std::vector<const float*>& values,
                        const std::vector<const float*>& scores, int64_t width, float* out) {
  for (int64_t at = 0; at < width; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
    Vec top = load_some(scores[0] + at, lanes);
    for (const float* row : scores) top = max(top, load_some(row + at, lanes));
    Vec total = zero(), mixed = zero();
    for (size_t i = 0; i < scores.size(); ++i) {
      const Vec term = exp(sub(load_some(scores[i] + at, lanes), top));
      total = add(total, term);
      mixed = fma(term, load_some(values[i] + at, lanes), mixed);
    }
    store_some(out + at, div(mixed, total), lanes);
  }
}

}  // namespace VN_BUILD
}  // namespace vn
