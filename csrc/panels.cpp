// Products of packed codes with inputs as they are: see panels.h. Compiled once more, as `vbmi`, for codes
// with indexes alone.
#include <algorithm>
#include <cstring>

#include "panels.h"

namespace vn {
namespace VN_BUILD {

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

// Where sums of a panel go.
struct PanelSums {
  float* sums;        // rows of kPanel
  float* const* out;  // the last chain's, of each row; null: to the others
  bool is_first;

  // Adds a chain to what came before it.
  template <int R, int C>
  VN_INLINE void close_chain(const Vec* chain, int64_t row, int first) const {
    each<R>([&](auto r) VN_NOW {
      const float* before = sums + (row + r) * kPanel + first * kLanes;
      float* own = (out == nullptr ? sums + (row + r) * kPanel : out[row + r]) + first * kLanes;
      each<C>([&](auto c) VN_NOW {
        const Vec next = chain[r * C + c];
        store(own + c * kLanes, is_first ? next : add(load(before + c * kLanes), next));
      });
    });
  }
};

// Vectors whose codes are decoded side by side. With one row each has one chain, of which every step waits
// for the one before it: there they are as many as registers hold.
template <int R, int C>
constexpr int kBesideVecs = R == 1 && kPanelTileVecs == C ? C : C % 2 == 0 ? 2 : 1;

// One chain of sums[row + r] = x[r] . the outputs of C vectors, decoded in registers: for as many rows as
// one tile has.
template <int Kind, bool kHasOffset, int R, int C, CodeFetch kAsks>
inline void dot_coded(const float* const* x, const PanelView& panel, const WidenedScales& widened,
                      int64_t begin, int64_t end, int first, const PanelSums& sums, int64_t row) {
  constexpr int kCodes = kUnitCodes<Kind>;
  const int64_t group_units = panel.m.group / kCodes;
  const Codebook<Kind> codebook(panel.m.codebook);
  Vec chain[R * C], scales[C], offsets[C];
  each<R * C>([&](auto i) VN_NOW { chain[i] = zero(); });
  int64_t at = begin / kCodes, until = at, g = at / group_units;
  const int64_t last = ceil_div(end, kCodes);
  for (; at < last; ++at) {
    if (at == until) {
      load_group<kHasOffset, C>(widened, g, first, scales, offsets);
      until = ++g * group_units;
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
    constexpr int kBeside = kBesideVecs<R, C>, kRun = kRunCodes<Kind>;
    each<C / kBeside>([&](auto part) VN_NOW {
      Unit<Kind> units[kBeside];
      each<kBeside>([&](auto i) VN_NOW {
        units[i] = panel.template unit<Kind, kAsks>(codebook, at, first + part * kBeside + i);
      });
      each<kCodes / kRun>([&](auto run) VN_NOW {
        RunValues<Kind> values[kBeside];
        each<kBeside>([&](auto i) VN_NOW { values[i].template read<run>(units[i]); });
        each<kRun>([&](auto j) VN_NOW {
          each<kBeside>([&](auto i) VN_NOW {
            constexpr int c = part * kBeside + i;
            const Vec weight = weight_of<kHasOffset>(values[i].template of<j>(), scales[c], offsets[c]);
            each<R>([&](auto r) VN_NOW {
              chain[r * C + c] = fma(fill(inputs[r][run * kRun + j]), weight, chain[r * C + c]);
            });
          });
        });
      });
    });
  }
  sums.close_chain<R, C>(chain, row, first);
}

// Widens inputs begin .. end - 1 of C vectors: out [end - begin, C, 16].
template <int Kind, bool kHasOffset, int C>
inline void decode_panel(const PanelView& panel, const WidenedScales& widened, int first,
                         int64_t begin, int64_t end, float* out) {
  constexpr int kCodes = kUnitCodes<Kind>, kRun = kRunCodes<Kind>;
  const int64_t group_units = panel.m.group / kCodes;
  const Codebook<Kind> codebook(panel.m.codebook);
  Vec scales[C], offsets[C];
  int64_t until = -1;
  for (int64_t at = begin / kCodes; at * kCodes < end; ++at) {
    if (at >= until) {
      const int64_t g = at / group_units;
      load_group<kHasOffset, C>(widened, g, first, scales, offsets);
      until = (g + 1) * group_units;
    }
    for (int c = 0; c < C; ++c) {
      const Unit<Kind> unit = panel.template unit<Kind, kFetchNext>(codebook, at, first + c);
      each<kCodes / kRun>([&](auto run) VN_NOW {
        RunValues<Kind> values;
        values.template read<run>(unit);
        each<kRun>([&](auto j) VN_NOW {
          const int64_t input = at * kCodes + run * kRun + j - begin;
          store(out + (input * C + c) * kLanes,
                weight_of<kHasOffset>(values.template of<j>(), scales[c], offsets[c]));
        });
      });
    }
  }
}

// One chain over widened weights [count, C, 16].
template <int R, int C>
inline void dot_widened(const float* const* x, const float* weights, int64_t begin, int64_t count,
                        int first, const PanelSums& sums, int64_t row) {
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
  sums.close_chain<R, C>(chain, row, first);
}

// The same for any number of rows, of which a chain's weights are widened once for all.
template <int Kind, bool kHasOffset, int C>
inline void dot_decoded(const float* const* x, int64_t rows, const PanelView& panel,
                        const WidenedScales& widened, int64_t begin, int64_t end, const PanelSums& sums) {
  thread_local Floats weights;
  weights.resize((kChain + kUnitCodes<Kind>)*C * kLanes);
  for (int first = panel.first_vec; first < panel.end_vec; first += C) {
    decode_panel<Kind, kHasOffset, C>(panel, widened, first, begin, end, weights.data());
    each_tile<kPanelTileRows>(rows, [&](auto height, int64_t row) {
      dot_widened<height, C>(x + row, weights.data(), begin, end - begin, first, sums, row);
    });
  }
}

// Vectors of such a tile: the higher, the fewer, so that its sums stay in registers.
template <int R>
constexpr int kCodedVecs = R == 1               ? kFewVecs
                           : R == 2             ? std::max(kFewVecs / 2, kPanelTileVecs)
                           : R <= kFewPanelRows ? kPanelTileVecs
                                                : std::max(kPanelTileVecs / 2, 1);

// all [rows, 64] = x . the outputs of a panel that it is asked for, or of each row to out, if that is not
// null; at most kPanelRows rows.
template <int Kind, bool kHasOffset>
inline void dot_panel(const float* const* x, int64_t rows, const PanelView& panel, const Units& units,
                      float* all, float* const* out) {
  thread_local WidenedScales widened;
  for (int64_t begin = 0; begin < panel.cols; begin += kChain) {
    const int64_t end = std::min(panel.cols, begin + kChain);
    const PanelSums sums = {all, end == panel.cols ? out : nullptr, begin == 0};
    widened.widen(panel, begin / panel.m.group, ceil_div(end, panel.m.group));
    const auto run_few = [&](auto height, int64_t row) VN_NOW {
      constexpr int C = kCodedVecs<height>;
      for (int first = panel.first_vec; first < panel.end_vec; first += C) {
        const float* const* own = x + row;
        if constexpr (kMayFetchAlone && height == 1) {
          if (units.fetches_alone) {
            dot_coded<Kind, kHasOffset, height, C, kFetchNone>(own, panel, widened, begin, end, first, sums,
                                                               row);
            continue;
          }
        }
        dot_coded<Kind, kHasOffset, height, C, kFetchNext>(own, panel, widened, begin, end, first, sums, row);
      }
    };
    // What takes many steps to decode is decoded once for several rows.
    constexpr int kFew = kIsLow<Kind> ? 1 : kCodedRows;
    if (rows > (kIsLow<Kind> ? 1 : kMostCodedRows)) {
      constexpr int C = kPanelTileVecs;
      if (C > kLeastVecs && (panel.end_vec - panel.first_vec) % C != 0) {
        dot_decoded<Kind, kHasOffset, kLeastVecs>(x, rows, panel, widened, begin, end, sums);
      } else {
        dot_decoded<Kind, kHasOffset, C>(x, rows, panel, widened, begin, end, sums);
      }
      continue;
    }
    // Tiles of about the same height: one row alone takes as long as three among others.
    for (int64_t row = 0; row < rows;) {
      const int64_t left = rows - row, count = ceil_div(left, ceil_div(left, kFew));
      each_tile<kFew>(count, [&](auto height, int64_t) VN_NOW { run_few(height, row); });
      row += count;
    }
  }
}

// Calls body with the kind of a matrix's codes and whether it has offsets, both constants.
template <typename Body>
inline void with_panel_kind(const vn_panels& m, Body&& body) {
  const bool has_offset = m.offsets != nullptr;
  // Which of both a kind may have.
  [[maybe_unused]] const auto either = [&](auto kind) {
    if (has_offset) return body(kind, std::true_type{});
    body(kind, std::false_type{});
  };
  [[maybe_unused]] const auto always = [&](auto kind) { body(kind, std::true_type{}); };
  const auto never = [&](auto kind) { body(kind, std::false_type{}); };
  switch (m.code_kind) {
    case VN_CODE_IQ2_XXS:
      return never(std::integral_constant<int, VN_CODE_IQ2_XXS>{});
    case VN_CODE_IQ3_XXS:
      return never(std::integral_constant<int, VN_CODE_IQ3_XXS>{});
#if !defined(__AVX512VBMI__)
    case VN_CODE_INT4:
      return either(std::integral_constant<int, VN_CODE_INT4>{});
    case VN_CODE_UINT4:
      return always(std::integral_constant<int, VN_CODE_UINT4>{});
    case VN_CODE_IQ4:
      return never(std::integral_constant<int, VN_CODE_IQ4>{});
    case VN_CODE_E2M1:
      return never(std::integral_constant<int, VN_CODE_E2M1>{});
    case VN_CODE_NF4:
      return never(std::integral_constant<int, VN_CODE_NF4>{});
    case VN_CODE_ODD4:
      return never(std::integral_constant<int, VN_CODE_ODD4>{});
    case VN_CODE_E4M3:
      return never(std::integral_constant<int, VN_CODE_E4M3>{});
    case VN_CODE_INT6:
      return either(std::integral_constant<int, VN_CODE_INT6>{});
    case VN_CODE_UINT2:
      return always(std::integral_constant<int, VN_CODE_UINT2>{});
    case VN_CODE_INT2:
      return never(std::integral_constant<int, VN_CODE_INT2>{});
    case VN_CODE_INT3:
      return never(std::integral_constant<int, VN_CODE_INT3>{});
    case VN_CODE_IQ1:
      return never(std::integral_constant<int, VN_CODE_IQ1>{});
    case VN_CODE_IQ2:
      return never(std::integral_constant<int, VN_CODE_IQ2>{});
    default:
      return either(std::integral_constant<int, VN_CODE_INT8>{});
#endif
  }
}

// Products with outputs row .. row + count - 1 of a packed matrix; y[r][first + i] is output row + i.
void dot_panels(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row,
                       int64_t count, float* const* y, int64_t first, const Units& units) {
  const vn_panels& own = *static_cast<const vn_panels*>(m.data);
#if defined(__AVX512F__) && !defined(__AVX512VBMI__)
  if (units.byte_tables && has_indexes(own.code_kind)) {
    return vbmi::dot_panels(x, rows, m, row, count, y, first, units);
  }
#endif
  thread_local Floats sums, gathered;
  sums.resize(kPanelRows * kPanel);
  const float* inputs[kPanelRows];
  float* out[kPanelRows];
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
      PanelView view(m, panel);
      if (can_take_parts(rows)) {
        constexpr int64_t kLeast = kLeastVecs * kLanes;
        view.first_vec = static_cast<int>(start / kLeast) * kLeastVecs;
        view.end_vec = static_cast<int>(ceil_div(start + size, kLeast)) * kLeastVecs;
      }
      const bool is_whole =
          start == view.first_vec * kLanes && start + size == view.end_vec * kLanes;
      for (int64_t r = 0; r < rows; ++r) out[r] = y[r] + first + at - row - start;
      dot_panel<kind, has_offset>(inputs, rows, view, units, sums.data(), is_whole ? out : nullptr);
      for (int64_t r = 0; r < rows && !is_whole; ++r) {
        std::memcpy(out[r] + start, sums.data() + r * kPanel + start, sizeof(float) * size);
      }
      at += size;
    }
  });
}

// Widens the inputs of one output.
void decode_panel_row(const vn_matrix& m, int64_t index, float* out) {
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
