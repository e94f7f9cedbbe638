// From logits to tokens: what masks forbid; temperature, min-p, top-k and top-p narrow a row's choice, and one uniform
// number picks by inverting the cumulative distribution over the vocabulary. What the torch path
// computes (vllm/v1/sample/), in a handful of passes over the row and none that sorts it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "aligned.h"
#include "entries.h"
#include "kernels.h"
#include "thread_pool.h"
#include "vec.h"
#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

// Logits whose highest one, and whose mass, are kept together.
constexpr int64_t kSpan = 4 * kLanes;

struct SampleScratch {
  Floats highs, picked;
  std::vector<double> masses;
  std::vector<int64_t> indices;
};

inline bool is_higher(float a, float b) { return a > b; }

// Divides a row and finds the highest of every span. Returns whether all values are numbers.
inline bool scale_logits(float* row, int64_t count, float temperature, Floats& highs) {
  const Vec divisor = fill(temperature);
  int num_nan = 0;
  highs.clear();
  for (int64_t begin = 0; begin < count; begin += kSpan) {
    float* span = row + begin;
    const int64_t width = std::min(kSpan, count - begin);
    for (int64_t i = 0; i < width; i += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - i));
      store_some(span + i, div(load_some(span + i, lanes), divisor), lanes);
    }
    for (int64_t i = 0; i < width; ++i) num_nan += span[i] != span[i];
    highs.push_back(find_highest(span, width, -std::numeric_limits<float>::infinity()));
  }
  return num_nan == 0;
}

// The k-th highest of a row. There are at least k values as high as the k-th highest of the spans'
// highest ones, so the others need not be looked at.
inline float find_kth_highest(const float* row, int64_t count, int64_t k, const Floats& highs,
                              Floats& picked) {
  if (k < static_cast<int64_t>(highs.size())) {
    picked = highs;
    std::nth_element(picked.begin(), picked.begin() + (k - 1), picked.end(), is_higher);
    const float least = picked[k - 1];
    picked.clear();
    for (size_t span = 0; span < highs.size(); ++span) {
      if (highs[span] < least) continue;
      const int64_t begin = static_cast<int64_t>(span) * kSpan;
      const int64_t end = std::min(begin + kSpan, count);
      for (int64_t i = begin; i < end; ++i) {
        if (row[i] >= least) picked.push_back(row[i]);
      }
    }
  } else {
    picked.assign(row, row + count);
  }
  std::nth_element(picked.begin(), picked.begin() + (k - 1), picked.end(), is_higher);
  return picked[k - 1];
}

// Moves the logits of at least `floor` to the front of the row and lists where they stood. Returns
// how many they are.
inline int64_t keep_above(float* row, int64_t count, float floor, const Floats& highs,
                          std::vector<int64_t>& indices) {
  indices.clear();
  for (size_t span = 0; span < highs.size(); ++span) {
    if (highs[span] < floor) continue;
    const int64_t begin = static_cast<int64_t>(span) * kSpan;
    const int64_t end = std::min(begin + kSpan, count);
    for (int64_t i = begin; i < end; ++i) {
      if (row[i] < floor) continue;
      row[indices.size()] = row[i];
      indices.push_back(i);
    }
  }
  return static_cast<int64_t>(indices.size());
}

// Turns logits into e^(logit - top).
inline void find_masses(float* row, int64_t count, float top) {
  const Vec highest = fill(top);
  // exp() ends at a small number instead of zero: a token that was ruled out must have no mass.
  const Vec least = exp(fill(-std::numeric_limits<float>::infinity()));
  for (int64_t i = 0; i < count; i += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
    store_some(row + i, sub(exp(sub(load_some(row + i, lanes), highest)), least), lanes);
  }
}

// The mass of every span; returns that of the row.
inline double sum_masses(const float* row, int64_t count, std::vector<double>& masses) {
  masses.clear();
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kSpan) {
    const int64_t end = std::min(begin + kSpan, count);
    Vec sums = zero();
    for (int64_t i = begin; i < end; i += kLanes) {
      sums = add(sums, load_some(row + i, static_cast<int>(std::min<int64_t>(kLanes, end - i))));
    }
    masses.push_back(sum(sums));
    total += masses.back();
  }
  return total;
}

// The least of the fewest highest masses that together reach `wanted`. Reorders them.
inline float find_nucleus_floor(Floats& masses, double wanted) {
  size_t first = 0, end = masses.size();
  while (end - first > 1) {
    const size_t middle = first + (end - first) / 2;
    std::nth_element(masses.begin() + first, masses.begin() + middle, masses.begin() + end,
                     is_higher);
    double upper = 0.0;
    for (size_t i = first; i < middle; ++i) upper += masses[i];
    if (upper >= wanted) {
      end = middle;
    } else {
      wanted -= upper;
      first = middle;
    }
  }
  return masses[first];
}

// Drops all masses but the highest that reach top_p of `total`, and those as high as the last one.
inline void keep_nucleus(float* row, int64_t count, float top_p, double total, Floats& picked) {
  // All that are lower than this together stay below what is left beside the nucleus. Half of it,
  // for what rounding may hide.
  const float least = static_cast<float>(0.5 * (1.0 - top_p) * total / static_cast<double>(count));
  picked.resize(count);
  size_t num_picked = 0;
  for (int64_t i = 0; i < count; ++i) {
    picked[num_picked] = row[i];
    num_picked += row[i] > least;
  }
  picked.resize(num_picked);
  const float floor = find_nucleus_floor(picked, top_p * total);
  for (int64_t i = 0; i < count; ++i) row[i] = row[i] < floor ? 0.0f : row[i];
}

// The first token whose cumulative mass exceeds uniform * total; it has mass itself.
inline int64_t invert_masses(const float* row, int64_t count, float uniform, double total,
                             const std::vector<double>& masses) {
  const double target = uniform * total;
  double before = 0.0;
  for (size_t span = 0; span < masses.size(); ++span) {
    if (before + masses[span] <= target) {
      before += masses[span];
      continue;
    }
    const int64_t begin = static_cast<int64_t>(span) * kSpan;
    const int64_t end = std::min(begin + kSpan, count);
    int64_t last = begin;
    for (int64_t i = begin; i < end; ++i) {
      if (row[i] > 0.0f) last = i;
      before += row[i];
      if (before > target) return i;
    }
    // The span's own sum was added in another order and came out higher.
    return last;
  }
  return count - 1;
}

inline int64_t sample_row(float* row, int64_t count, const vn_draws& draws, int64_t index) {
  thread_local SampleScratch scratch;
  const bool are_numbers = scale_logits(row, count, draws.temperature[index], scratch.highs);
  const float top = *std::max_element(scratch.highs.begin(), scratch.highs.end());
  // Such logits are a fault of the model's; the engine must outlive them.
  if (!are_numbers || !std::isfinite(top)) return count - 1;
  float floor = -std::numeric_limits<float>::infinity();
  if (draws.min_p[index] > 0.0f) floor = top + std::log(draws.min_p[index]);
  if (draws.top_k[index] < count) {
    floor = std::max(floor, find_kth_highest(row, count, draws.top_k[index], scratch.highs,
                                             scratch.picked));
  }
  const bool is_narrowed = std::isfinite(floor);
  if (is_narrowed) count = keep_above(row, count, floor, scratch.highs, scratch.indices);
  find_masses(row, count, top);
  double total = sum_masses(row, count, scratch.masses);
  if (draws.top_p[index] < 1.0f) {
    keep_nucleus(row, count, draws.top_p[index], total, scratch.picked);
    total = sum_masses(row, count, scratch.masses);
  }
  const int64_t found = invert_masses(row, count, draws.uniforms[index], total, scratch.masses);
  return is_narrowed ? scratch.indices[found] : found;
}

void sample(ThreadPool& pool, float* logits, int64_t vocab_size, const vn_draws& draws,
            int64_t* token_ids) {
  pool.run(draws.num_draws, [&](int64_t index) {
    token_ids[index] =
        sample_row(logits + draws.rows[index] * vocab_size, vocab_size, draws, index);
  });
}

// Most words of a mask allow all of their 32 tokens, or none.
inline void forbid_in_row(float* row, int64_t count, const uint32_t* mask) {
  constexpr float kForbidden = -std::numeric_limits<float>::infinity();
  for (int64_t begin = 0; begin < count; begin += 32, ++mask) {
    const uint32_t word = *mask;
    if (word == ~0u) continue;
    float* tokens = row + begin;
    const int64_t width = std::min<int64_t>(32, count - begin);
    if (word == 0) {
      std::fill(tokens, tokens + width, kForbidden);
    } else {
      for (int64_t i = 0; i < width; ++i) tokens[i] = word >> i & 1 ? tokens[i] : kForbidden;
    }
  }
}

void forbid(ThreadPool& pool, float* logits, int64_t vocab_size, const int64_t* rows,
            const uint32_t* masks, int64_t num_masks) {
  const int64_t num_words = (vocab_size + 31) / 32;
  pool.run(num_masks, [&](int64_t index) {
    forbid_in_row(logits + rows[index] * vocab_size, vocab_size, masks + index * num_words);
  });
}

}  // namespace VN_BUILD
}  // namespace vn
