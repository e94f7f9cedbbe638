// The products of bytes.h by AVX-512 VNNI, and by the matrix unit where there is one: beside the
// builds, which run on processors without these too. Compiled twice: as `vnni`, and as `vbmi` for
// processors that look up bytes in a table of 128 at once, which codes with indexes do.
#include "byte_tiles.h"
#include "tiles.h"

namespace vn {

#if defined(__AVX512VNNI__)
namespace VN_BUILD {

// With fewer rows vectors are done as soon as the codes have come from memory.
constexpr int64_t kLeastTiledRows = 32;
// Bytes of a group's codes: in the second-level cache.
constexpr int64_t kMostGroupBytes = 1 << 19;

// Inputs that the matrix unit takes at once of a group; 0: none, groups are no whole steps.
inline int find_step(const PanelView& panel) {
  if (panel.cols % panel.m.group != 0 || panel.m.group * kPanel > kMostGroupBytes) return 0;
  for (int step : {64, 32, 16}) {
    if (panel.m.group % step == 0) return step;
  }
  return 0;
}

// decode_bytes of a panel's groups, with signs.
template <int Kind>
void decode_signed(const PanelView& panel, int64_t first, int64_t last, uint32_t* out) {
  constexpr int kParts = kUnitCodes<Kind> / 4;
  const int64_t group_units = panel.m.group / kUnitCodes<Kind>;
  const StoredBytes<Kind, kFetchLater> stored = {panel};
  const __m512i lift = _mm512_set1_epi8(static_cast<char>(kLift<Kind>));
  for (int64_t at = first * group_units; at < last * group_units; ++at) {
    for (int vec = 0; vec < kPanelVecs; ++vec) {
      stored.each_part(at, vec, [&](auto part, const auto& codes) VN_NOW {
        _mm512_storeu_si512(out + part * kPanel + vec * kLanes, _mm512_sub_epi8(codes.v, lift));
      });
    }
    out += kParts * kPanel;
  }
}
using DecodeSigned = void (*)(const PanelView&, int64_t, int64_t, uint32_t*);

// What a group's whole sums add to the sums of a row; `unit` is what a code of one stands for.
VN_INLINE void add_group(const int32_t* whole, const WidenedScales& widened, int64_t g, float unit,
                         bool has_offsets, float input_scale, int32_t total, float* sums) {
  const float inputs_of_group = input_scale * static_cast<float>(total);
  each<kPanelVecs>([&](auto c) VN_NOW {
    constexpr int at = c * kLanes;
    const Vec step = mul(load(widened.scales(g) + at), fill(unit));
    const Vec codes = {_mm512_cvtepi32_ps(_mm512_loadu_si512(whole + at))};
    const Vec before = g == 0 ? zero() : load(sums + at);
    Vec after = fused(codes, mul(step, fill(input_scale)), before);
    if (has_offsets) after = fused(load(widened.offsets(g) + at), fill(inputs_of_group), after);
    store(sums + at, after);
  });
}

// What a group's whole sums add to those of its span, and what these add to the sums of a row.
VN_INLINE void add_scaled_group(const int32_t* whole, const int32_t* scales, bool is_first, int32_t* all) {
  each<kPanelVecs>([&](auto c) VN_NOW {
    constexpr int at = c * kLanes;
    const Ints before = is_first ? fill_ints(0) : load_ints(all + at);
    store_ints(all + at, add_scaled(before, load_ints(whole + at), load_ints(scales + at)));
  });
}
VN_INLINE void close_span(const int32_t* all, const WholeScales& whole, int64_t first, int64_t end,
                          bool has_offsets, float input_scale, const int32_t* totals, float* sums) {
  each<kPanelVecs>([&](auto c) VN_NOW {
    constexpr int at = c * kLanes;
    Vec sum = first == 0 ? zero() : load(sums + at);
    sum = add_span(sum, load_ints(all + at), load(whole.factor(first) + at), input_scale);
    if (has_offsets) {
      Ints shift = fill_ints(0);
      for (int64_t g = first; g < end; ++g) {
        shift = add_scaled(shift, load_ints(whole.offsets(g) + at), fill_ints(totals[g]));
      }
      sum = add_span(sum, shift, load(whole.offset_factor(first) + at), input_scale);
    }
    store(sums + at, sum);
  });
}

// As dot_byte_panel_of; `step` is find_step's.
inline void dot_tiled_panel(const ByteInputs& x, int64_t row, int64_t rows, const PanelView& panel,
                            const PanelPart& part, int step, DecodeSigned decode) {
  thread_local WidenedScales widened;
  thread_local WholeScales scales;
  thread_local std::vector<uint32_t, CacheLines<uint32_t>> codes;
  thread_local Floats sums;
  alignas(64) int32_t whole[kMostByteRows * kPanel], all[kMostByteRows * kPanel];
  sums.resize(rows * kPanel);
  const int64_t span = find_span(panel.m), least = std::max<int64_t>(1, span);
  const int64_t group = panel.m.group, groups = std::max<int64_t>(1, kChain / group / least) * least;
  codes.resize(groups * group / 4 * kPanel);
  const bool has_offsets = panel.m.offsets != nullptr;
  const float unit = panel.m.code_kind == VN_CODE_E2M1 ? 0.5f : 1.0f;
  for (int64_t begin = 0; begin < panel.groups; begin += groups) {
    const int64_t end = std::min(panel.groups, begin + groups);
    if (span > 0) {
      scales.read(panel, begin, end);
    } else {
      widened.widen(panel, begin, end);
    }
    decode(panel, begin, end, codes.data());
    for (int64_t at = 0; at < rows; at += kMostByteRows) {
      const int count = static_cast<int>(std::min<int64_t>(kMostByteRows, rows - at));
      const int8_t* inputs = x.codes + (row + at) * x.stride;
      for (int64_t g = begin; g < end; ++g) {
        const ByteTileInputs own = {inputs + g * group, x.stride, count};
        dot_bytes_by_tiles(own, codes.data() + (g - begin) * group / 4 * kPanel, group, step, whole);
        for (int r = 0; r < count; ++r) {
          const int64_t place = (row + at + r) * x.groups + g;
          if (span > 0) {
            const int64_t first = g / span * span;
            add_scaled_group(whole + r * kPanel, scales.scales(g), g == first, all + r * kPanel);
            if (g + 1 < std::min(end, first + span)) continue;
            close_span(all + r * kPanel, scales, first, g + 1, has_offsets, x.scales[place],
                       x.sums + place - g, sums.data() + (at + r) * kPanel);
            continue;
          }
          add_group(whole + r * kPanel, widened, g, unit, has_offsets, x.scales[place], x.sums[place],
                    sums.data() + (at + r) * kPanel);
        }
      }
      if (end < panel.groups) continue;
      for (int64_t r = at; r < at + count; ++r) {
        std::memcpy(part.out + r * part.stride, sums.data() + r * kPanel + part.start,
                    sizeof(float) * part.count);
      }
    }
  }
  release_tiles();
}

}  // namespace VN_BUILD

void VN_DOT_BYTE_PANEL(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                         const PanelPart& part) {
  const VN_BUILD::PanelView panel(m, part.index);
  const int step = x.units.byte_tiles && rows >= VN_BUILD::kLeastTiledRows ? VN_BUILD::find_step(panel) : 0;
  if (step == 0) {
    VN_BUILD::dot_byte_panel(x, row, rows, m, part);
  } else {
    VN_BUILD::with_byte_kind(panel.m.code_kind, [&](auto kind) {
      VN_BUILD::dot_tiled_panel(x, row, rows, panel, part, step, VN_BUILD::decode_signed<kind>);
    });
  }
}
#else
void VN_DOT_BYTE_PANEL(const ByteInputs&, int64_t, int64_t, const vn_matrix&, const PanelPart&) {}
#endif

}  // namespace vn
