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

#include "aligned.h"
#include "vec.h"
#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

constexpr int kPanel = 64, kPanelVecs = kPanel / kLanes;
// Inputs of one chain of sums: kept short, as a chain's rounding errors grow with it.
constexpr int64_t kChain = 256;
// Mantissas of e4m3.
constexpr int64_t kSteps = 8;
// Rows of inputs whose sums of a panel are kept at a time.
constexpr int64_t kPanelRows = 96;
// So many words on lies what is multiplied next: one stream, of which pages begin unasked.
constexpr int64_t kFetchWords = 1024;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body with what reads sixteen scales (or offsets) at a place, of a type of its own for each
// kind of them. steps: of e4m3 ones, what the eight mantissas stand for.
template <typename Body>
VN_INLINE void with_scales(int32_t kind, const void* values, const float* steps, Body&& body) {
  const uint8_t* bytes = static_cast<const uint8_t*>(values);
  const uint16_t* halves = static_cast<const uint16_t*>(values);
  const float* floats = static_cast<const float*>(values);
  if (kind == VN_SCALE_F16) return body([=](int64_t at) VN_NOW { return load_half(halves + at); });
  if (kind == VN_SCALE_BF16) return body([=](int64_t at) VN_NOW { return load_bf16(halves + at); });
  if (kind == VN_SCALE_INT8) return body([=](int64_t at) VN_NOW { return load_int8(bytes + at); });
  if (kind == VN_SCALE_F32) return body([=](int64_t at) VN_NOW { return load(floats + at); });
  if (kind == VN_SCALE_E8M0) return body([=](int64_t at) VN_NOW { return load_e8m0(bytes + at); });
  body([=](int64_t at) VN_NOW { return load_steps(bytes + at, steps); });
}

inline int unit_codes(int32_t kind) {
  if (kind == VN_CODE_INT6) return kUnitCodes<VN_CODE_INT6>;
  return kind == VN_CODE_INT8 || kind == VN_CODE_E4M3 ? 4 : 8;
}

// A panel of a matrix, with what its groups are read by.
struct PanelView {
  const vn_panels& m;
  int64_t cols, units, words, groups, factors, index;

  PanelView(const vn_matrix& matrix, int64_t panel)
      : m(*static_cast<const vn_panels*>(matrix.data)),
        cols(matrix.cols),
        units(ceil_div(matrix.cols, unit_codes(m.code_kind))),
        words(units * (m.code_kind == VN_CODE_INT6 ? kUnitWords<VN_CODE_INT6> : 1)),
        groups(ceil_div(matrix.cols, m.group)),
        factors(ceil_div(groups, m.factor_groups)),
        index(panel) {}

  const uint32_t* codes(int64_t word, int vec) const {
    return m.codes + ((index * words + word) * kPanel + vec * kLanes);
  }
  // With kFetches asks for what comes later in the stream.
  template <int Kind, bool kFetches>
  VN_INLINE Unit<Kind> unit(int64_t at, int vec) const {
    Unit<Kind> unit;
    each<kUnitWords<Kind>>([&](auto w) VN_NOW {
      const uint32_t* line = codes(at * kUnitWords<Kind> + w, vec);
      if constexpr (kFetches) __builtin_prefetch(line + kFetchWords, 0, 3);
      unit.words[w] = load_words(line);
    });
    return unit;
  }
  // Widens the scales, and what is added to weights, of some groups: out [count, 64].
  void widen_scales(int64_t g, int64_t count, float* out) const {
    with_scales(m.scale_kind, m.scales, steps(), [&](auto read) VN_NOW {
      each_sixteen(g, count, [&](int64_t i, int64_t at, int64_t factor_at) VN_NOW {
        const Vec own = read(at);
        const bool is_whole = m.scale_factors == nullptr;
        store(out + i, is_whole ? own : mul(own, load_half(m.scale_factors + factor_at)));
      });
    });
  }
  void widen_offsets(int64_t g, int64_t count, const float* scales, float* out) const {
    with_scales(m.offset_kind, m.offsets, nullptr, [&](auto read) VN_NOW {
      each_sixteen(g, count, [&](int64_t i, int64_t at, int64_t factor_at) VN_NOW {
        const Vec own = read(at);
        if (m.offset_factors != nullptr) {
          store(out + i, mul(own, load_half(m.offset_factors + factor_at)));
        } else {
          // Zero points: (code - zero) * scale.
          const bool is_zero = m.offset_kind == VN_SCALE_INT8;
          store(out + i, is_zero ? mul(sub(zero(), own), load(scales + i)) : own);
        }
      });
    });
  }

 private:
  const float* steps() const {
    return m.scale_steps == nullptr ? nullptr : m.scale_steps + index * kSteps;
  }
  // Calls body with the places of sixteen scales: among those of the groups, of all, and of factors.
  template <typename Body>
  VN_INLINE void each_sixteen(int64_t g, int64_t count, Body&& body) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (index * groups + g + i) * kPanel;
      const int64_t factor_at = (index * factors + (g + i) / m.factor_groups) * kPanel;
      for (int lane = 0; lane < kPanel; lane += kLanes) {
        body(i * kPanel + lane, at + lane, factor_at + lane);
      }
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
    panel.widen_scales(first, end - first, scales_.data());
    if (panel.m.offsets == nullptr) return;
    offsets_.resize((end - first) * kPanel);
    panel.widen_offsets(first, end - first, scales_.data(), offsets_.data());
  }
  const float* scales(int64_t g) const { return scales_.data() + (g - first_) * kPanel; }
  const float* offsets(int64_t g) const { return offsets_.data() + (g - first_) * kPanel; }

 private:
  Floats scales_, offsets_;
  int64_t first_ = 0;
};

template <bool kHasOffset>
VN_INLINE Vec weight_of(Vec code, Vec scale, Vec offset) {
  return kHasOffset ? fma(code, scale, offset) : mul(code, scale);
}

// The scales of C vectors, read when a group begins.
template <bool kHasOffset, int C>
VN_INLINE void load_group(const WidenedScales& widened, int64_t g, int first, Vec* scales,
                          Vec* offsets) {
  each<C>([&](auto c) VN_NOW {
    const int at = (first + c) * kLanes;
    scales[c] = load(widened.scales(g) + at);
    if constexpr (kHasOffset) offsets[c] = load(widened.offsets(g) + at);
  });
}

// Adds a chain to what came before it; sums: rows of kPanel.
template <int R, int C>
VN_INLINE void close_chain(const Vec* chain, bool is_first, int first, float* sums) {
  each<R * C>([&](auto i) VN_NOW {
    float* own = sums + (i / C) * kPanel + (first + i % C) * kLanes;
    store(own, is_first ? chain[i] : add(load(own), chain[i]));
  });
}

// One chain of sums[r] = x[r] . the outputs of C vectors, decoded in registers: for as many rows as
// one tile has.
template <int Kind, bool kHasOffset, int R, int C>
inline void dot_coded(const float* const* x, const PanelView& panel, const WidenedScales& widened,
                      int64_t begin, int64_t end, int first, float* sums) {
  constexpr int kCodes = kUnitCodes<Kind>;
  const int64_t group_units = panel.m.group / kCodes;
  Vec chain[R * C], scales[C], offsets[C];
  each<R * C>([&](auto i) VN_NOW { chain[i] = zero(); });
  int64_t at = begin / kCodes, until = at;
  const int64_t last = ceil_div(end, kCodes);
  for (; at < last; ++at) {
    if (at == until) {
      const int64_t g = at / group_units;
      load_group<kHasOffset, C>(widened, g, first, scales, offsets);
      until = (g + 1) * group_units;
    }
    const float* inputs[R];
    float padded[R][kCodes];
    each<R>([&](auto r) VN_NOW { inputs[r] = x[r] + at * kCodes; });
    if ((at + 1) * kCodes > end) {
      // Codes beyond the row's end are zero, and so are their inputs.
      each<R>([&](auto r) VN_NOW {
        for (int j = 0; j < kCodes; ++j) {
          padded[r][j] = at * kCodes + j < end ? inputs[r][j] : 0.0f;
        }
        inputs[r] = padded[r];
      });
    }
    constexpr int kBeside = C % 2 == 0 ? 2 : 1;
    each<C / kBeside>([&](auto pair) VN_NOW {
      Unit<Kind> units[kBeside];
      each<kBeside>([&](auto i) VN_NOW {
        units[i] = panel.template unit<Kind, true>(at, first + pair * kBeside + i);
      });
      each<kCodes>([&](auto j) VN_NOW {
        each<kBeside>([&](auto i) VN_NOW {
          constexpr int c = pair * kBeside + i;
          const Vec weight = weight_of<kHasOffset>(value_of<Kind, j>(units[i]), scales[c], offsets[c]);
          each<R>([&](auto r) VN_NOW {
            chain[r * C + c] = fma(fill(inputs[r][j]), weight, chain[r * C + c]);
          });
        });
      });
    });
  }
  close_chain<R, C>(chain, begin == 0, first, sums);
}

// Widens inputs begin .. end - 1 of C vectors: out [end - begin, C, 16].
template <int Kind, bool kHasOffset, int C>
inline void decode_panel(const PanelView& panel, const WidenedScales& widened, int first,
                         int64_t begin, int64_t end, float* out) {
  constexpr int kCodes = kUnitCodes<Kind>;
  const int64_t group_units = panel.m.group / kCodes;
  Vec scales[C], offsets[C];
  int64_t until = -1;
  for (int64_t at = begin / kCodes; at * kCodes < end; ++at) {
    if (at >= until) {
      const int64_t g = at / group_units;
      load_group<kHasOffset, C>(widened, g, first, scales, offsets);
      until = (g + 1) * group_units;
    }
    each<C>([&](auto c) VN_NOW {
      const Unit<Kind> unit = panel.template unit<Kind, true>(at, first + c);
      each<kCodes>([&](auto j) VN_NOW {
        store(out + ((at * kCodes + j - begin) * C + c) * kLanes,
              weight_of<kHasOffset>(value_of<Kind, j>(unit), scales[c], offsets[c]));
      });
    });
  }
}

// One chain over widened weights [count, C, 16].
template <int R, int C>
inline void dot_widened(const float* const* x, const float* weights, int64_t begin, int64_t count,
                        int first, float* sums) {
  Vec chain[R * C];
  const float* inputs[R];
  each<R>([&](auto r) VN_NOW { inputs[r] = x[r] + begin; });
  each<R * C>([&](auto i) VN_NOW { chain[i] = zero(); });
  for (int64_t k = 0; k < count; ++k) {
    Vec own[C];
    each<C>([&](auto c) VN_NOW { own[c] = load(weights + (k * C + c) * kLanes); });
    each<R>([&](auto r) VN_NOW {
      const Vec input = fill(inputs[r][k]);
      each<C>([&](auto c) VN_NOW { chain[r * C + c] = fma(input, own[c], chain[r * C + c]); });
    });
  }
  close_chain<R, C>(chain, begin == 0, first, sums);
}

// Calls body with the height of each tile of so many rows, a constant, and its first row: tiles of
// R, then one of the rest.
template <int R, typename Body>
VN_INLINE void each_tile(int64_t rows, Body&& body, int64_t row = 0) {
  for (; rows - row >= R; row += R) body(std::integral_constant<int, R>{}, row);
  if constexpr (R > 1) {
    if (row < rows) each_tile<R - 1>(rows, body, row);
  }
}

// The same for any number of rows, of which a chain's weights are widened once for all.
template <int Kind, bool kHasOffset>
inline void dot_decoded(const float* const* x, int64_t rows, const PanelView& panel,
                        const WidenedScales& widened, int64_t begin, int64_t end, float* sums) {
  constexpr int C = kPanelTileVecs;
  thread_local Floats weights;
  weights.resize((kChain + kUnitCodes<Kind>)*C * kLanes);
  for (int first = 0; first < kPanelVecs; first += C) {
    decode_panel<Kind, kHasOffset, C>(panel, widened, first, begin, end, weights.data());
    each_tile<kPanelTileRows>(rows, [&](auto height, int64_t row) {
      dot_widened<height, C>(x + row, weights.data(), begin, end - begin, first, sums + row * kPanel);
    });
  }
}

// sums [rows, 64] = x . all outputs of a panel; at most kPanelRows rows.
template <int Kind, bool kHasOffset>
inline void dot_panel(const float* const* x, int64_t rows, const PanelView& panel, float* sums) {
  thread_local WidenedScales widened;
  for (int64_t begin = 0; begin < panel.cols; begin += kChain) {
    const int64_t end = std::min(panel.cols, begin + kChain);
    widened.widen(panel, begin / panel.m.group, ceil_div(end, panel.m.group));
    const auto run_few = [&](auto height) VN_NOW {
      constexpr int C = height == 1                        ? kFewVecs
                        : kFewVecs / 2 > 0 && height == 2 ? kFewVecs / 2
                                                           : kPanelTileVecs;
      for (int first = 0; first < kPanelVecs; first += C) {
        dot_coded<Kind, kHasOffset, height, C>(x, panel, widened, begin, end, first, sums);
      }
    };
    if (rows > kFewPanelRows) {
      dot_decoded<Kind, kHasOffset>(x, rows, panel, widened, begin, end, sums);
    } else {
      each_tile<kFewPanelRows>(rows, [&](auto height, int64_t) VN_NOW { run_few(height); });
    }
  }
}

// Calls body with the kind of a matrix's codes and whether it has offsets, both constants.
template <typename Body>
inline void with_panel_kind(const vn_panels& m, Body&& body) {
  using std::integral_constant;
  using std::bool_constant;
  const bool has_offset = m.offsets != nullptr;
  if (m.code_kind == VN_CODE_INT4) {
    if (has_offset) return body(integral_constant<int, VN_CODE_INT4>{}, bool_constant<true>{});
    return body(integral_constant<int, VN_CODE_INT4>{}, bool_constant<false>{});
  }
  if (m.code_kind == VN_CODE_UINT4) {
    return body(integral_constant<int, VN_CODE_UINT4>{}, bool_constant<true>{});
  }
  if (m.code_kind == VN_CODE_IQ4) {
    return body(integral_constant<int, VN_CODE_IQ4>{}, bool_constant<false>{});
  }
  if (m.code_kind == VN_CODE_E2M1) {
    return body(integral_constant<int, VN_CODE_E2M1>{}, bool_constant<false>{});
  }
  if (m.code_kind == VN_CODE_E4M3) {
    return body(integral_constant<int, VN_CODE_E4M3>{}, bool_constant<false>{});
  }
  if (m.code_kind == VN_CODE_INT6) {
    if (has_offset) return body(integral_constant<int, VN_CODE_INT6>{}, bool_constant<true>{});
    return body(integral_constant<int, VN_CODE_INT6>{}, bool_constant<false>{});
  }
  if (has_offset) return body(integral_constant<int, VN_CODE_INT8>{}, bool_constant<true>{});
  body(integral_constant<int, VN_CODE_INT8>{}, bool_constant<false>{});
}

// Products with outputs row .. row + count - 1 of a packed matrix; y[r][first + i] is output row + i.
inline void dot_panels(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row,
                       int64_t count, float* const* y, int64_t first) {
  const vn_panels& own = *static_cast<const vn_panels*>(m.data);
  thread_local Floats sums, gathered;
  sums.resize(kPanelRows * kPanel);
  const float* inputs[kPanelRows];
  std::copy_n(x, rows, inputs);
  if (own.order != nullptr) {
    gathered.resize(rows * m.cols);
    for (int64_t r = 0; r < rows; ++r) {
      float* out = gathered.data() + r * m.cols;
      for (int64_t k = 0; k < m.cols; ++k) out[k] = x[r][own.order[k]];
      inputs[r] = out;
    }
  }
  with_panel_kind(own, [&](auto kind, auto has_offset) {
    for (int64_t at = row; at < row + count;) {
      const int64_t panel = at / kPanel, start = at - panel * kPanel;
      const int64_t size = std::min(kPanel - start, row + count - at);
      dot_panel<kind, has_offset>(inputs, rows, PanelView(m, panel), sums.data());
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(y[r] + first + at - row, sums.data() + r * kPanel + start, sizeof(float) * size);
      }
      at += size;
    }
  });
}

// Widens the inputs of one output.
inline void decode_panel_row(const vn_matrix& m, int64_t index, float* out) {
  const vn_panels& own = *static_cast<const vn_panels*>(m.data);
  with_panel_kind(own, [&](auto kind, auto has_offset) {
    thread_local Floats weights;
    thread_local WidenedScales widened;
    weights.resize((kChain + kUnitCodes<kind>)*kLanes);
    const PanelView panel(m, index / kPanel);
    const int vec = static_cast<int>(index % kPanel / kLanes), lane = index % kLanes;
    for (int64_t begin = 0; begin < m.cols; begin += kChain) {
      const int64_t end = std::min(m.cols, begin + kChain);
      widened.widen(panel, begin / own.group, ceil_div(end, own.group));
      decode_panel<kind, has_offset, 1>(panel, widened, vec, begin, end, weights.data());
      for (int64_t k = begin; k < end; ++k) {
        out[own.order == nullptr ? k : own.order[k]] = weights[(k - begin) * kLanes + lane];
      }
    }
  });
}

}  // namespace VN_BUILD
}  // namespace vn
