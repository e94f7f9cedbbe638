// Norms, rotary turns, softmax, choices and pages: what all models are made of, with products.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "build.h"
#include "products.h"
#include "rounded_bytes.h"
#include "stored.h"
#include "thread_pool.h"
#include "vec.h"
#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

// ---- vectors --------------------------------------------------------------------------------

inline float sum_of_squares(const float* x, int64_t count) {
  // Four chains: one would wait for each of its sums.
  Vec totals[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    for (int c = 0; c < 4; ++c) {
      const Vec a = load(x + i + c * kLanes);
      totals[c] = fma(a, a, totals[c]);
    }
  }
  for (; i < count; i += kLanes) {
    const Vec a = load_some(x + i, static_cast<int>(std::min<int64_t>(kLanes, count - i)));
    totals[0] = fma(a, a, totals[0]);
  }
  return sum(add(add(totals[0], totals[1]), add(totals[2], totals[3])));
}

inline float inverse_rms(const float* x, int64_t count, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(x, count) / static_cast<float>(count) + eps);
}

// out = x / rms(x) * weight; weight null: no weight, but one factor. out may be x.
inline void rms_norm(const float* x, const float* weight, float factor, int64_t count, float eps,
                     float* out) {
  const float inverse = inverse_rms(x, count, eps);
  if (weight == nullptr) {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] * inverse * factor;
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] * inverse * weight[i];
  }
}

// Cosines and sines of a position: turns[2 * i], turns[2 * i + 1].
inline void compute_turns(int64_t position, const float* frequencies, int32_t pairs, float* turns) {
  for (int32_t i = 0; i < pairs; ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    turns[2 * i] = std::cos(angle);
    turns[2 * i + 1] = std::sin(angle);
  }
}

// Turns the interleaved pairs at the end of a row; sign -1 turns back. Halves are kept apart on the
// way: where differences and sums alternate, GCC 12 fuses them with their products in spite of
// -ffp-contract=off, in as many lanes as a register has.
inline void rotate_tail(float* row, int64_t width, const float* turns, int32_t pairs, float sign) {
  float* tail = row + width - 2 * pairs;
  float first[kLanes], second[kLanes];
  for (int32_t begin = 0; begin < pairs; begin += kLanes) {
    const int32_t count = std::min<int32_t>(kLanes, pairs - begin);
    float* own = tail + 2 * begin;
    const float* turn = turns + 2 * begin;
    for (int32_t i = 0; i < count; ++i) {
      const float a = own[2 * i], b = own[2 * i + 1];
      const float cosine = turn[2 * i], sine = sign * turn[2 * i + 1];
      first[i] = a * cosine - b * sine;
      second[i] = a * sine + b * cosine;
    }
    for (int32_t i = 0; i < count; ++i) {
      own[2 * i] = first[i];
      own[2 * i + 1] = second[i];
    }
  }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline float find_highest(const float* scores, int64_t count, float least) {
  float top = least;
  int64_t i = 0;
  if (count >= kLanes) {
    Vec tops = load(scores);
    for (i = kLanes; i + kLanes <= count; i += kLanes) tops = max(tops, load(scores + i));
    float lanes[kLanes];
    store(lanes, tops);
    for (const float lane : lanes) top = std::max(top, lane);
  }
  for (; i < count; ++i) top = std::max(top, scores[i]);
  return top;
}

// Turns scores into e^(score - top) and returns their sum.
inline float exp_terms(float* scores, int64_t count, float top) {
  Vec total = zero();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec term = exp(sub(load(scores + i), fill(top)));
    store(scores + i, term);
    total = add(total, term);
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    store_some(scores + i, exp(sub(load_some(scores + i, rest), fill(top))), rest);
    total = add(total, load_some(scores + i, rest));
  }
  return sum(total);
}

// Turns scores into e^(score - max) and returns their sum, with `extra` as one score more.
inline float softmax_terms(float* scores, int64_t count, float extra) {
  const float top = find_highest(scores, count, extra);
  return exp_terms(scores, count, top) + std::exp(extra - top);
}

// What a mix adds up: values that are weighed. Sums rest in the output between two parts.
template <typename T>
struct MixPart {
  const T* const* rows;
  int64_t count;
  bool is_first, is_last;
};
template <typename T>
MixPart(const T* const*, int64_t, bool, bool) -> MixPart<T>;

// out[r] += sum over k of weights[r][k] * rows[k] for V vectors, and the whole times scale[r] in the
// end; sums run along k.
template <int R, int V, typename T>
inline void mix_tile(const float* const* weights, const MixPart<T>& part, int64_t at,
                     const float* scale, float* const* out) {
  Vec sums[R * V];
  each<R * V>([&](auto i) VN_NOW {
    sums[i] = part.is_first ? zero() : load(out[i / V] + at + i % V * kLanes);
  });
  for (int64_t k = 0; k < part.count; ++k) {
    Vec values[V];
    each<V>([&](auto v) VN_NOW { values[v] = load_values(part.rows[k] + at + v * kLanes); });
    each<R>([&](auto r) VN_NOW {
      const Vec weight = fill(weights[r][k]);
      each<V>([&](auto v) VN_NOW { sums[r * V + v] = fma(weight, values[v], sums[r * V + v]); });
    });
  }
  each<R * V>([&](auto i) VN_NOW {
    store(out[i / V] + at + i % V * kLanes,
          part.is_last ? mul(sums[i], fill(scale[i / V])) : sums[i]);
  });
}

template <int R, typename T>
inline void mix_rows(const float* const* weights, const MixPart<T>& part, int64_t width,
                     const float* scale, float* const* out) {
  constexpr int V = R == 1 ? 4 : R == 2 && kMixVecs < 2 ? 2 : kMixVecs;
  int64_t at = 0;
  for (; at + V * kLanes <= width; at += V * kLanes) {
    mix_tile<R, V>(weights, part, at, scale, out);
  }
  for (; at + kLanes <= width; at += kLanes) mix_tile<R, 1>(weights, part, at, scale, out);
  for (; at < width; ++at) {
    for (int r = 0; r < R; ++r) {
      float total = part.is_first ? 0.0f : out[r][at];
      for (int64_t k = 0; k < part.count; ++k) total += weights[r][k] * widen_value(part.rows[k][at]);
      out[r][at] = part.is_last ? total * scale[r] : total;
    }
  }
}

// Mixes for any number of rows of weights.
template <typename T>
inline void mix_all(int64_t rows, const float* const* weights, const MixPart<T>& part, int64_t width,
                    const float* scale, float* const* out) {
  each_tile<kMixRows>(rows, [&](auto height, int64_t r) {
    mix_rows<height>(weights + r, part, width, scale + r, out + r);
  });
}

// ---- choices --------------------------------------------------------------------------------

// Lists the `wanted` highest of `scores` in order, among equal ones the earliest; what is no number
// becomes the least, as it has no order.
inline void choose_highest(float* scores, int64_t count, int64_t wanted, Floats& scratch,
                           std::vector<int32_t>& chosen) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(scores[i])) scores[i] = -INFINITY;
  }
  scratch.assign(scores, scores + count);
  std::nth_element(scratch.begin(), scratch.begin() + (wanted - 1), scratch.end(),
                   [](float a, float b) { return a > b; });
  const float threshold = scratch[wanted - 1];
  int64_t num_above = 0;
  for (int64_t i = 0; i < count; ++i) num_above += scores[i] > threshold;
  int64_t num_equal = wanted - num_above;
  chosen.clear();
  for (int64_t i = 0; i < count; ++i) {
    if (scores[i] > threshold || (scores[i] == threshold && num_equal-- > 0)) {
      chosen.push_back(static_cast<int32_t>(i));
    }
  }
}

// ---- pages ----------------------------------------------------------------------------------

inline int64_t value_bytes(int32_t kind) { return kind == VN_F32 ? 4 : kind == VN_INT8 ? 1 : 2; }

// Where the scale of a head, counted through keys and values, lies in a row of VN_INT8.
inline int64_t scale_offset(const vn_cache& cache, int64_t head) {
  constexpr int64_t kScaleBytes = sizeof(float);
  const int64_t heads = cache.width / (cache.head_dim + kScaleBytes);
  return heads * cache.head_dim + head * kScaleBytes;
}

// Values of a head that are spread over each other, at most.
constexpr int64_t kMostSpread = 512;

// So many of a head's values are: a power of two that divides them.
inline int64_t spread_width(int64_t d) { return std::min(d & -d, kMostSpread); }

// Replaces each run of spread_width(d) values by all their sums and differences: by what a Hadamard
// matrix makes of it. Twice, that is the run times its length. A sum starts with values that lie half
// of a run apart.
inline void spread_head(float* head, int64_t d, float factor) {
  alignas(64) float mixed[kMostSpread];
  const int64_t width = spread_width(d), half = width / 2;
  for (float* run = head; run < head + d; run += width) {
    float *from = run, *to = mixed;
    for (int64_t i = 1; i < width; i *= 2, std::swap(from, to)) {
      const float* __restrict own = from;
      float* __restrict out = to;
      for (int64_t k = 0; k < half; ++k) {
        out[2 * k] = own[k] + own[half + k];
        out[2 * k + 1] = own[k] - own[half + k];
      }
    }
    for (int64_t i = 0; i < width; ++i) run[i] = from[i] * factor;
  }
}

// The same of what meets spread values, or is a mix of them.
inline void meet_spread(float* head, int64_t d) {
  spread_head(head, d, 1.0f / static_cast<float>(spread_width(d)));
}

// Makes a row of VN_INT8 of one of floats, which it spreads.
inline void encode_row(const vn_cache& cache, float* values, int8_t* row) {
  const int64_t d = cache.head_dim, heads = scale_offset(cache, 0) / d;
  for (int64_t h = 0; h < heads; ++h) {
    float* own = values + h * d;
    spread_head(own, d, 1.0f);
    const float scale = round_to_bytes(own, d, find_peak(own, d), row + h * d);
    std::memcpy(row + scale_offset(cache, h), &scale, sizeof(scale));
  }
}

// What a row of floats is once it has been stored.
inline void round_row(int32_t kind, float* row, int64_t width) {
  if (kind == VN_BF16) {
    for (int64_t i = 0; i < width; ++i) row[i] = round_bf16(row[i]);
  } else if (kind == VN_F16) {
    uint16_t halves[kLanes];
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, width - i);
      store_halves(halves, row + i, count);
      widen_halves(halves, count, row + i);
    }
  }
}

// The block tables of a step, asked by position.
class Pages {
 public:
  explicit Pages(const vn_step& step) : step_(step), request_of_row_(step.num_tokens) {
    for (int64_t r = 0; r < step.num_requests; ++r) {
      for (int64_t i = 0; i < step.counts[r]; ++i) {
        request_of_row_[step.row_starts[r] + i] = static_cast<int32_t>(r);
      }
    }
  }

  // The request of a flat row.
  int64_t request_of(int64_t row) const { return request_of_row_[row]; }

  // The id of the block of a position; 0: not stored.
  int64_t find_block(const vn_cache& cache, int64_t request, int64_t position) const {
    const int64_t at = cache.group * step_.num_requests + request;
    const int64_t index = position / cache.block_size - step_.table_bases[at];
    if (index < 0 || index >= step_.table_lengths[at]) return 0;
    return step_.block_ids[step_.table_offsets[at] + index];
  }

  // Offset of the row of a position in the cache, in values; -1: not stored.
  int64_t find_row(const vn_cache& cache, int64_t request, int64_t position) const {
    const int64_t block = find_block(cache, request, position);
    if (block == 0) return -1;
    const int64_t per_row = cache.block_size / cache.rows_per_block;
    return block * cache.block_stride + position % cache.block_size / per_row * cache.width;
  }

  // Calls body(row, offset) for rows first .. end - 1, numbered by position / tokens per row; the
  // offset is that in the cache, or -1 where a row is not stored.
  template <typename Body>
  void each_row(const vn_cache& cache, int64_t request, int64_t first, int64_t end,
                Body&& body) const {
    const int64_t per_block = cache.rows_per_block;
    const int64_t tokens_per_row = cache.block_size / per_block;
    for (int64_t row = first; row < end;) {
      const int64_t block = find_block(cache, request, row * tokens_per_row);
      const int64_t stop = std::min(end, row / per_block * per_block + per_block);
      int64_t offset = block * cache.block_stride + row % per_block * cache.width;
      for (; row < stop; ++row, offset += cache.width) body(row, block == 0 ? -1 : offset);
    }
  }

  bool writes(const vn_cache& cache, int64_t request, int64_t position) const {
    return position >= step_.write_from[cache.group * step_.num_requests + request];
  }

 private:
  const vn_step& step_;
  std::vector<int32_t> request_of_row_;
};

inline void write_row(const vn_cache& cache, int64_t offset, const float* row) {
  if (cache.kind == VN_F32) {
    std::memcpy(static_cast<float*>(cache.data) + offset, row, sizeof(float) * cache.width);
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(cache.data) + offset;
  if (cache.kind == VN_F16) return store_halves(out, row, cache.width);
  for (int32_t i = 0; i < cache.width; ++i) out[i] = bf16_bits(row[i]);
}

// Where a flat row is stored: where its table has room for it and the step is to write it; else -1.
inline int64_t find_place(const Pages& pages, const vn_cache& cache, int64_t row,
                          int64_t position) {
  const int64_t request = pages.request_of(row);
  return pages.writes(cache, request, position) ? pages.find_row(cache, request, position) : -1;
}

inline void store_row(const Pages& pages, const vn_cache& cache, int64_t row, int64_t position,
                      const float* values) {
  const int64_t offset = find_place(pages, cache, row, position);
  if (offset >= 0) write_row(cache, offset, values);
}

// The same of a row of VN_INT8 as the cache has it.
inline void store_coded_row(const Pages& pages, const vn_cache& cache, int64_t row,
                            int64_t position, const char* bytes) {
  const int64_t offset = find_place(pages, cache, row, position);
  if (offset >= 0) std::memcpy(static_cast<char*>(cache.data) + offset, bytes, cache.width);
}

// A row that attention needs and no table stores: noted in any thread, raised behind all of them.
class MissingRow {
 public:
  void note(const vn_cache& cache, int64_t request, int64_t position) {
    request_.store(request);
    group_.store(cache.group);
    position_.store(position);
  }

  // The row of a position that must be stored; row 0 of the cache, and a note, if it is not.
  int64_t need(const Pages& pages, const vn_cache& cache, int64_t request, int64_t position) {
    const int64_t offset = pages.find_row(cache, request, position);
    if (offset >= 0) return offset;
    note(cache, request, position);
    return 0;
  }

  void check() const {
    if (position_.load() < 0) return;
    throw InvalidStep("attention needs the row of position " + std::to_string(position_.load()) +
                      " of the step's request " + std::to_string(request_.load()) +
                      " in KV group " + std::to_string(group_.load()) +
                      ", but its table stores none");
  }

 private:
  std::atomic<int64_t> request_{-1}, group_{-1}, position_{-1};
};

// Rows of a cache as floats: pointers into the cache where it holds floats, else decoded copies.
class RowList {
 public:
  void clear() {
    rows_.clear();
    num_decoded_ = 0;
  }
  void reserve_decoded(int64_t rows, int64_t width) {
    if (static_cast<int64_t>(decoded_.size()) < rows * width) decoded_.resize(rows * width);
  }
  void add(const float* row) { rows_.push_back(row); }
  void add_stored(const vn_cache& cache, int64_t offset) {
    add_stored(cache, offset, cache.width);
  }
  // The same for the first `width` values at an offset.
  void add_stored(const vn_cache& cache, int64_t offset, int64_t width) {
    if (cache.kind == VN_F32) {
      rows_.push_back(static_cast<const float*>(cache.data) + offset);
      return;
    }
    float* out = decoded_.data() + num_decoded_++ * width;
    decode_row(cache.data, offset, cache.kind, width, out);
    rows_.push_back(out);
  }
  void remove(int64_t count) { rows_.resize(rows_.size() - count); }
  const float* const* data() const { return rows_.data(); }
  int64_t size() const { return static_cast<int64_t>(rows_.size()); }

 private:
  std::vector<const float*> rows_;
  Floats decoded_;
  int64_t num_decoded_ = 0;
};

}  // namespace VN_BUILD
}  // namespace vn
