// Products of packed codes with inputs rounded to eight bits: sums of whole numbers, exact in any
// order, so that every build gives the same bits.
//
//   y = sum over groups of  sum(code * input) * (scale * input scale)  [+ offset * (input scale * inputs)]
//
// Groups add in order, each by fused steps. Where scales are whole numbers under a factor of several
// groups, a span of these is rounded as one, and its sum is a whole number too:
//
//   y = sum over spans of  sum over groups(scale * sum(code * input)) * (factor * input scale)
//                        [+ sum over groups(offset * inputs) * (offset factor * input scale)]
//
// Inputs of two bytes are two rows: the inputs in eight bits, and what that leaves of them. Each is multiplied
// as if it were alone, and an output is their sum.
//
// Four inputs of a row are a word, which meets the words of codes of sixteen outputs: of a word of
// eight codes first the even ones, then the odd ones.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "aligned.h"
#include "rounded_bytes.h"
#include "thread_pool.h"
#include "units.h"
#include "vec.h"
#include "vllm_native.h"

namespace vn {

// Rows of rounded inputs, in the order of a matrix's codes; a row of two bytes is two.
struct ByteInputs {
  int8_t* codes;  // [rows, stride], whole words, filled up with zeros
  float* scales;  // [rows, groups]
  int32_t* sums;  // [rows, groups]: of the codes
  int64_t stride, groups;
  // What the processor has for them.
  Units units;
  int64_t planes = 1;  // rows that an input row is
};

// Where a panel's outputs start .. start + count - 1 go: of rows `stride` values apart.
struct PanelPart {
  int64_t index, start, count;
  float* out;
  int64_t stride;
};

// dot_byte_panel of the builds that have the instructions, for rows from `row` on.
void dot_byte_panel_vnni(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                         const PanelPart& part);
void dot_byte_panel_vbmi(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                         const PanelPart& part);

namespace VN_BUILD {

// Inputs of a span: sums of so many codes times scales are whole numbers of 32 bits.
constexpr int64_t kSpanInputs = 1024;
// Groups of a span: those of a factor, or of an even part of them; 0 where scales are no whole numbers
// under factors, and of codes of four bits and more: beside their errors those of inputs that are rounded
// by 256 count. `PackedRows.find_span` is the same rule.
inline int64_t find_span(const vn_panels& m) {
  if (m.code_kind < VN_CODE_ODD4) return 0;
  if (m.scale_factors == nullptr || !is_whole_scale(m.scale_kind)) return 0;
  if (m.offsets != nullptr && (m.offset_factors == nullptr || !is_whole_scale(m.offset_kind))) return 0;
  int64_t span = std::min<int64_t>(m.factor_groups, kSpanInputs / m.group);
  while (span > 0 && m.factor_groups % span != 0) --span;
  return span;
}

// How the inputs of a packed matrix are rounded: matrices of one form share them.
struct ByteForm {
  int64_t cols, group;
  int64_t span;  // groups that are rounded as one
  const int32_t* order;
  bool is_by_row;  // one scale for all groups
  int64_t planes;
  int spread;      // how far apart the four inputs of a word lie (units.h)

  explicit ByteForm(const vn_matrix& m) : cols(m.cols) {
    const vn_panels& own = *static_cast<const vn_panels*>(m.data);
    group = own.group;
    span = std::max<int64_t>(1, find_span(own));
    order = own.order;
    is_by_row = own.input_kind == VN_INPUT_BYTES_BY_ROW;
    planes = own.input_kind == VN_INPUT_TWO_BYTES_BY_GROUP ? 2 : 1;
    spread = input_spread(own.code_kind);
  }
  bool operator==(const ByteForm& other) const {
    return cols == other.cols && group == other.group && span == other.span && order == other.order &&
           is_by_row == other.is_by_row && planes == other.planes && spread == other.spread;
  }
  int64_t groups() const { return ceil_div(cols, group); }
  int64_t stride() const { return ceil_div(cols, 32) * 32; }
};

// The even bytes of eight, side by side.
inline uint64_t even_bytes(uint64_t eight) {
  const uint64_t pairs = eight & 0x00ff00ff00ff00ffu;
  const uint64_t fours = (pairs | pairs >> 8) & 0x0000ffff0000ffffu;
  return (fours | fours >> 16) & 0xffffffffu;
}

// Fills a row up with zeros, and moves four inputs that meet in a word together.
inline void order_inputs(const ByteForm& form, int8_t* codes) {
  std::fill(codes + form.cols, codes + form.stride(), int8_t{0});
  if (form.spread == 1) return;
  if (form.spread == 2) {
    // Whole words: compilers do several at a time.
    for (int64_t k = 0; k < form.stride(); k += 8) {
      uint64_t own;
      std::memcpy(&own, codes + k, sizeof(own));
      own = even_bytes(own) | even_bytes(own >> 8) << 32;
      std::memcpy(codes + k, &own, sizeof(own));
    }
    return;
  }
  const int run = 4 * form.spread;
  for (int64_t k = 0; k < form.stride(); k += run) {
    int8_t own[32];
    std::memcpy(own, codes + k, run);
    for (int i = 0; i < run; ++i) codes[k + i] = own[i % 4 * form.spread + i / 4];
  }
}

// Rounds a row of inputs, to as many rows as the form has planes; see ByteInputs.
inline void round_row_to_bytes(const ByteForm& form, const float* x, int8_t* codes, float* scales,
                               int32_t* sums) {
  thread_local Floats gathered;
  if (form.order != nullptr) {
    gathered.resize(form.cols);
    for (int64_t k = 0; k < form.cols; ++k) gathered[k] = x[form.order[k]];
    x = gathered.data();
  }
  const uint32_t whole_peak = form.is_by_row ? find_peak(x, form.cols) : 0;
  for (int64_t first = 0; first < form.groups(); first += form.span) {
    const int64_t begin = first * form.group, count = std::min(form.span * form.group, form.cols - begin);
    const uint32_t peak = form.is_by_row ? whole_peak : find_peak(x + begin, count);
    float scale = round_to_bytes(x + begin, count, peak, codes + begin);
    for (int64_t plane = 0; plane < form.planes; ++plane) {
      int8_t* own = codes + plane * form.stride();
      if (plane > 0) scale = round_rest_to_bytes(x + begin, count, scale, codes + begin, own + begin);
      for (int64_t g = first; g * form.group < begin + count; ++g) {
        const int64_t at = plane * form.groups() + g, end = std::min(begin + count, (g + 1) * form.group);
        scales[at] = scale;
        sums[at] = std::accumulate(own + g * form.group, own + end, int32_t{0});
      }
    }
  }
  for (int64_t plane = 0; plane < form.planes; ++plane) {
    order_inputs(form, codes + plane * form.stride());
  }
}

// Products with outputs output .. output + count - 1 of a packed matrix; y as in dot_panels, rows
// y_stride apart.
void dot_bytes_by_panels(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                         int64_t output, int64_t count, float* const* y, int64_t y_stride,
                         int64_t first);

}  // namespace VN_BUILD
}  // namespace vn
