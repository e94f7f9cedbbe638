// Matrices packed for products: 64 outputs to a panel, outputs in lanes, codes widened in registers.
//
//   codes   [panels, words, 64]   32 bits each: the codes of 8 (or 4) inputs of one output
//   scales  [panels, groups, 64]  a group: so many inputs, whole words
//
// An output is one lane of one register, and its sum meets the inputs in one order: a chain over
// kChain inputs, then a sum over chains. Rows, tiles, threads and builds choose only which lanes run
// together. Every weight is the one value of its code, scale and offset, rounded once, so a packed
// matrix gives the bits of its decoded twin, packed as floats.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "aligned.h"
#include "thread_pool.h"
#include "units.h"
#include "vec.h"
#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

constexpr int kPanel = 64, kPanelVecs = kPanel / kLanes;
// Inputs of one chain of sums: kept short, as a chain's rounding errors grow with it.
constexpr int64_t kChain = 256;
// Mantissas of e4m3.
constexpr int64_t kSteps = 8;
// Rows of inputs that meet the same decoded weights: their part of a chain stays in the second-level cache.
constexpr int64_t kPanelRows = 252;
// Rows of a tile whose weights are decoded in registers, of which wide tiles find 32, and of all such tiles:
// weights for more rows are decoded once, to memory.
constexpr bool kHasWideTiles = kPanelTileVecs > 1;
constexpr int kCodedRows = kHasWideTiles ? 2 * kFewPanelRows : kPanelTileRows;
constexpr int kMostCodedRows = kHasWideTiles ? 2 * kCodedRows : kCodedRows;

// Vectors of which a part of a panel is a whole number, and whether one takes less time than the panel: few rows
// read codes as one stream.
constexpr int kLeastVecs = std::min(kPanelTileVecs, kPanelVecs / 2);
constexpr bool can_take_parts(int64_t rows) {
  if (rows <= kFewPanelRows) return false;
  return rows > kMostCodedRows || rows / ceil_div(rows, kCodedRows) > kFewPanelRows;
}

// What a product asks for beside the codes that it reads, which are one stream: nothing, what is
// multiplied next, or what comes long after that, into the second-level cache. Then pages begin unasked.
enum CodeFetch { kFetchNone, kFetchNext, kFetchLater };
constexpr int64_t kNextWords = 1024, kLaterWords = 4096;
// Whether there are processors that read a stream fastest unasked: AMD's with AVX-512 do, those before them
// read codes of six bits half as fast then.
#if defined(__AVX512F__)
constexpr bool kMayFetchAlone = true;
#else
constexpr bool kMayFetchAlone = false;
#endif

// Where the word that holds a scale lies, of those in codes.
VN_INLINE int64_t find_line(int64_t at, int64_t unit_words) {
  return at / kPanel * kPanel * unit_words + at % kPanel;
}

// Calls body with what reads sixteen scales (or offsets) at a place, of a type of its own for each
// kind of them. steps: of e4m3 ones, what the eight mantissas stand for. unit_words: of those in codes.
template <typename Body>
VN_INLINE void with_scales(int32_t kind, const void* values, const float* steps, int64_t unit_words,
                           Body&& body) {
  const uint8_t* bytes = static_cast<const uint8_t*>(values);
  const uint16_t* halves = static_cast<const uint16_t*>(values);
  const float* floats = static_cast<const float*>(values);
  if (kind == VN_SCALE_F16) return body([=](int64_t at) VN_NOW { return load_half(halves + at); });
  if (kind == VN_SCALE_BF16) return body([=](int64_t at) VN_NOW { return load_bf16(halves + at); });
  if (kind == VN_SCALE_INT8) return body([=](int64_t at) VN_NOW { return load_int8(bytes + at); });
  if (kind == VN_SCALE_F32) return body([=](int64_t at) VN_NOW { return load(floats + at); });
  if (kind == VN_SCALE_E8M0) return body([=](int64_t at) VN_NOW { return load_e8m0(bytes + at); });
  if (kind == VN_SCALE_LOW4) return body([=](int64_t at) VN_NOW { return floats_of(load_nibbles<0>(bytes + at)); });
  if (kind == VN_SCALE_HIGH4) return body([=](int64_t at) VN_NOW { return floats_of(load_nibbles<1>(bytes + at)); });
  if (kind == VN_SCALE_IN_CODES) {
    const uint32_t* lines = static_cast<const uint32_t*>(values);
    return body([=](int64_t at) VN_NOW {
      return floats_of(load_odd_numbers(lines + find_line(at, unit_words)));
    });
  }
  body([=](int64_t at) VN_NOW { return load_steps(bytes + at, steps); });
}

// The same for scales that are whole numbers (is_whole_scale), as these.
template <typename Body>
VN_INLINE void with_whole_scales(int32_t kind, const void* values, int64_t unit_words, Body&& body) {
  const uint8_t* bytes = static_cast<const uint8_t*>(values);
  if (kind == VN_SCALE_LOW4) return body([=](int64_t at) VN_NOW { return load_nibbles<0>(bytes + at); });
  if (kind == VN_SCALE_HIGH4) return body([=](int64_t at) VN_NOW { return load_nibbles<1>(bytes + at); });
  if (kind == VN_SCALE_INT8) return body([=](int64_t at) VN_NOW { return load_signed_bytes(bytes + at); });
  const uint32_t* lines = static_cast<const uint32_t*>(values);
  body([=](int64_t at) VN_NOW { return load_odd_numbers(lines + find_line(at, unit_words)); });
}

inline int scale_bytes(int32_t kind) {
  return kind == VN_SCALE_F32 ? 4 : kind == VN_SCALE_F16 || kind == VN_SCALE_BF16 ? 2 : 1;
}

// A panel of a matrix, with what its groups are read by.
struct PanelView {
  const vn_panels& m;
  int64_t cols, units, words, groups, factors, index;
  // Vectors of outputs that somebody asks for, from first_vec on.
  int first_vec = 0, end_vec = kPanelVecs;

  PanelView(const vn_matrix& matrix, int64_t panel)
      : m(*static_cast<const vn_panels*>(matrix.data)),
        cols(matrix.cols),
        units(ceil_div(matrix.cols, unit_shape(m.code_kind).codes)),
        words(count_words(m.code_kind, units)),
        groups(ceil_div(matrix.cols, m.group)),
        factors(ceil_div(groups, m.factor_groups)),
        index(panel) {}

  const uint32_t* codes(int64_t word, int vec) const {
    return m.codes + ((index * words + word) * kPanel + vec * kLanes);
  }
  // kOdd: of those that share a word, which of both, where that is known.
  template <int Kind, CodeFetch kAsks, int kOdd = -1>
  VN_INLINE Unit<Kind> unit(const Codebook<Kind>& codebook, int64_t at, int vec) const {
    Words stored[kUnitWords<Kind>];
    if constexpr (unit_shape(Kind).shares_word && kOdd >= 0) {
      const int64_t first = static_cast<int64_t>(static_cast<uint64_t>(at) / 2 * 3);
      stored[0] = line<kAsks>(first + kOdd, vec);
      stored[1] = shifted<4 * kOdd>(line<kOdd == 0 ? kAsks : kFetchNone>(first + 2, vec));
    } else if constexpr (unit_shape(Kind).shares_word) {
      const int64_t first = at / 2 * 3;
      stored[0] = line<kAsks>(first + at % 2, vec);
      stored[1] = shifted_by(line<kAsks>(first + 2, vec), static_cast<int>(at % 2) * 4);
    } else {
      each<kUnitWords<Kind>>([&](auto w) VN_NOW {
        stored[w] = line<kAsks>(at * kUnitWords<Kind> + w, vec);
      });
    }
    return make_unit<Kind>(stored, codebook);
  }
  // Widens the scales, and what is added to weights, of some groups: out [count, 64].
  void widen_scales(int64_t g, int64_t count, float* out) const {
    const int64_t unit_words = unit_shape(m.code_kind).words;
    with_scales(m.scale_kind, m.scales, steps(), unit_words, [&](auto read) VN_NOW {
      each_sixteen(m.scale_factors, g, count, [&](int64_t i, int64_t at, Vec factor) VN_NOW {
        const Vec own = mul(read(at), fill(m.scale_step));
        store(out + i, m.scale_factors == nullptr ? own : mul(own, factor));
      });
    });
  }
  // Asks for the scales (or offsets) behind some groups, of which the codes come before theirs do.
  void fetch_next(const void* values, int32_t kind, int64_t g, int64_t count) const {
    if (kind == VN_SCALE_IN_CODES) return;
    const int64_t group_bytes = kPanel * scale_bytes(kind);
    const char* next = static_cast<const char*>(values) + (index * groups + g + count) * group_bytes;
    for (int64_t at = 0; at < count * group_bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
  }
  void widen_offsets(int64_t g, int64_t count, const float* scales, float* out) const {
    with_scales(m.offset_kind, m.offsets, nullptr, 1, [&](auto read) VN_NOW {
      each_sixteen(m.offset_factors, g, count, [&](int64_t i, int64_t at, Vec factor) VN_NOW {
        const Vec own = read(at);
        if (m.offset_factors != nullptr) {
          store(out + i, mul(own, factor));
        } else {
          // Zero points: (code - zero) * scale.
          const bool is_zero = m.offset_kind == VN_SCALE_INT8;
          store(out + i, is_zero ? mul(sub(zero(), own), load(scales + i)) : own);
        }
      });
    });
  }
  // Scales (or offsets) that are whole numbers, of some groups: out [count, 64].
  void read_whole(const void* values, int32_t kind, int64_t g, int64_t count, int32_t* out) const {
    fetch_next(values, kind, g, count);
    const int64_t first = (index * groups + g) * kPanel;
    with_whole_scales(kind, values, unit_shape(m.code_kind).words, [&](auto read) VN_NOW {
      for (int64_t i = 0; i < count * kPanel; i += kLanes) store_words(out + i, read(first + i));
    });
  }
  // Factors of scales (or offsets), times `step`: out [count, 64].
  void widen_factors(const uint16_t* values, float step, int64_t factor, int64_t count,
                     float* out) const {
    const uint16_t* own = values + (index * factors + factor) * kPanel;
    for (int64_t i = 0; i < count * kPanel; i += kLanes) {
      store(out + i, mul(load_half(own + i), fill(step)));
    }
  }

 private:
  template <CodeFetch kAsks>
  VN_INLINE Words line(int64_t word, int vec) const {
    const uint32_t* own = codes(word, vec);
    if constexpr (kAsks == kFetchNext) __builtin_prefetch(own + kNextWords, 0, 3);
    if constexpr (kAsks == kFetchLater) __builtin_prefetch(own + kLaterWords, 0, 2);
    return load_words(own);
  }
  const float* steps() const {
    return m.scale_steps == nullptr ? nullptr : m.scale_steps + index * kSteps;
  }
  // Calls body with the places of sixteen scales, among those of the groups and of all, and their factors
  // if there are any: what takes longest to widen, so that each is widened once.
  template <typename Body>
  VN_INLINE void each_sixteen(const uint16_t* own, int64_t g, int64_t count, Body&& body) const {
    for (int64_t begin = 0; begin < count;) {
      const int64_t factor = own == nullptr ? 0 : (g + begin) / m.factor_groups;
      const int64_t end = own == nullptr ? count : std::min(count, (factor + 1) * m.factor_groups - g);
      for (int vec = first_vec; vec < end_vec; ++vec) {
        const int lane = vec * kLanes;
        const int64_t factor_at = (index * factors + factor) * kPanel + lane;
        const Vec wide = own == nullptr ? zero() : load_half(own + factor_at);
        for (int64_t i = begin; i < end; ++i) {
          body(i * kPanel + lane, (index * groups + g + i) * kPanel + lane, wide);
        }
      }
      begin = end;
    }
  }
};

// Scales of consecutive groups of a panel as floats [groups, 64], and what is added to weights.
class WidenedScales {
 public:
  // Groups first .. end - 1.
  void widen(const PanelView& panel, int64_t first, int64_t end) {
    first_ = first;
    scales_.resize((end - first) * kPanel);
    panel.fetch_next(panel.m.scales, panel.m.scale_kind, first, end - first);
    panel.widen_scales(first, end - first, scales_.data());
    if (panel.m.offsets == nullptr) return;
    offsets_.resize((end - first) * kPanel);
    panel.fetch_next(panel.m.offsets, panel.m.offset_kind, first, end - first);
    panel.widen_offsets(first, end - first, scales_.data(), offsets_.data());
  }
  const float* scales(int64_t g) const { return scales_.data() + (g - first_) * kPanel; }
  const float* offsets(int64_t g) const { return offsets_.data() + (g - first_) * kPanel; }

 private:
  Floats scales_, offsets_;
  int64_t first_ = 0;
};

// Scales of consecutive groups of a panel that are whole numbers [groups, 64], what is added to weights
// likewise, and the factors of both as floats [factors, 64].
class WholeScales {
 public:
  // Groups first .. end - 1; first is the first of a factor, or of a part of one.
  void read(const PanelView& panel, int64_t first, int64_t end) {
    first_ = first;
    fan_ = panel.m.factor_groups;
    first_factor_ = first / fan_;
    const int64_t factors = (end - 1) / fan_ + 1 - first_factor_;
    scales_.resize((end - first) * kPanel);
    factors_.resize(factors * kPanel);
    panel.read_whole(panel.m.scales, panel.m.scale_kind, first, end - first, scales_.data());
    panel.widen_factors(panel.m.scale_factors, panel.m.scale_step, first_factor_, factors,
                        factors_.data());
    if (panel.m.offsets == nullptr) return;
    offsets_.resize((end - first) * kPanel);
    offset_factors_.resize(factors * kPanel);
    panel.read_whole(panel.m.offsets, panel.m.offset_kind, first, end - first, offsets_.data());
    panel.widen_factors(panel.m.offset_factors, 1.0f, first_factor_, factors, offset_factors_.data());
  }
  const int32_t* scales(int64_t g) const { return scales_.data() + (g - first_) * kPanel; }
  const int32_t* offsets(int64_t g) const { return offsets_.data() + (g - first_) * kPanel; }
  // Of the factor of a group.
  const float* factor(int64_t g) const { return factors_.data() + (g / fan_ - first_factor_) * kPanel; }
  const float* offset_factor(int64_t g) const {
    return offset_factors_.data() + (g / fan_ - first_factor_) * kPanel;
  }

 private:
  std::vector<int32_t, CacheLines<int32_t>> scales_, offsets_;
  Floats factors_, offset_factors_;
  int64_t first_ = 0, first_factor_ = 0, fan_ = 1;
};

// Products with outputs row .. row + count - 1 of a packed matrix, at most kPanelRows rows of inputs;
// y[r][first + i] is output row + i.
void dot_panels(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row, int64_t count,
                float* const* y, int64_t first, const Units& units);

// Widens the inputs of one output.
void decode_panel_row(const vn_matrix& m, int64_t index, float* out);

}  // namespace VN_BUILD

#if defined(__AVX512F__)
// The same of codes with indexes, by processors that look up bytes in a table of 128 at once: Units.
namespace vbmi {
void dot_panels(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row, int64_t count,
                float* const* y, int64_t first, const Units& units);
}  // namespace vbmi
#endif

}  // namespace vn
