// Products of packed codes with inputs rounded to eight bits: sums of whole numbers, exact in any
// order, so that every build gives the same bits.
//
//   y = sum over groups of  sum(code * input) * (scale * input scale)  [+ offset * (input scale * inputs)]
//
// Groups add in order, each by fused steps. Four inputs of a row are a word, which meets the words
// of codes of sixteen outputs: of a word of eight codes first the even ones, then the odd ones.
#pragma once

#include <algorithm>
#include <cstring>

#include "exact.h"
#include "panels.h"
#include "vec.h"

namespace vn {

// Rows of rounded inputs, in the order of a matrix's codes.
struct ByteInputs {
  int8_t* codes;  // [rows, stride], whole words, filled up with zeros
  float* scales;  // [rows, groups]
  int32_t* sums;  // [rows, groups]: of the codes
  int64_t stride, groups;
  // Whether the processor has instructions for them (AVX-512 VNNI).
  bool has_instructions;
};

// dot_byte_panel of the build that has the instructions, for rows from `row` on.
void dot_byte_panel_vnni(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                         int64_t panel, float* sums);

namespace VN_BUILD {

// The values of four-bit codes; those of e2m1 doubled.
constexpr int8_t kNibbleValues[5][16] = {
    {},
    {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

#if defined(__AVX512VNNI__)

// The instruction takes one side without signs: codes are lifted, and sums begin as much lower.
constexpr int32_t kLift = 128;
constexpr int kByteRows = 6, kByteVecs = 4;
// A vector, not its intrinsic type: GCC 12 keeps arrays of the latter in memory.
typedef int32_t Int16s __attribute__((vector_size(64)));
struct Ints {
  Int16s v;
};
struct ByteCodes {
  __m512i v;
};
VN_INLINE Ints fill_ints(int32_t x) { return {reinterpret_cast<Int16s>(_mm512_set1_epi32(x))}; }
VN_INLINE Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a.v))}; }
template <int Kind, int Half>
VN_INLINE ByteCodes byte_codes(Words w) {
  const __m512i lift = _mm512_set1_epi8(-128);
  if constexpr (Kind == VN_CODE_INT8) {
    return {_mm512_xor_si512(w.v, lift)};
  } else {
    const __m128i* values = reinterpret_cast<const __m128i*>(kNibbleValues[Kind]);
    const __m512i table = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128(values)), lift);
    const __m512i nibbles =
        _mm512_and_si512(Half == 0 ? w.v : _mm512_srli_epi32(w.v, 4), _mm512_set1_epi8(15));
    return {_mm512_shuffle_epi8(table, nibbles)};
  }
}
VN_INLINE Ints dot_bytes(Ints sum, ByteCodes codes, int32_t inputs) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(codes.v), "v"(_mm512_set1_epi32(inputs)));
  return sum;
}

#elif defined(__AVX512F__)

constexpr int32_t kLift = 0;
constexpr int kByteRows = 4, kByteVecs = 4;
struct Ints {
  __m512i v;
};
struct ByteCodes {
  __m512i magnitudes;
  __mmask64 are_negative;
};
VN_INLINE Ints fill_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
VN_INLINE Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
template <int Kind, int Half>
VN_INLINE ByteCodes byte_codes(Words w) {
  __m512i codes = w.v;
  if constexpr (Kind != VN_CODE_INT8) {
    const __m128i* values = reinterpret_cast<const __m128i*>(kNibbleValues[Kind]);
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(values));
    codes = _mm512_shuffle_epi8(
        table, _mm512_and_si512(Half == 0 ? w.v : _mm512_srli_epi32(w.v, 4), _mm512_set1_epi8(15)));
  }
  return {_mm512_abs_epi8(codes), _mm512_movepi8_mask(codes)};
}
// Two products of 128 * 127 fit in sixteen bits; inputs take the codes' signs.
VN_INLINE Ints dot_bytes(Ints sum, const ByteCodes& codes, int32_t inputs) {
  const __m512i all = _mm512_set1_epi32(inputs);
  const __m512i turned =
      _mm512_mask_sub_epi8(all, codes.are_negative, _mm512_setzero_si512(), all);
  const __m512i pairs = _mm512_maddubs_epi16(codes.magnitudes, turned);
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}

#elif defined(__AVX2__)

constexpr int32_t kLift = 0;
constexpr int kByteRows = 4, kByteVecs = 1;
struct Ints {
  __m256i a, b;
};
struct ByteCodes {
  __m256i a, b;
};
VN_INLINE Ints fill_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
VN_INLINE Vec to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
template <int Kind, int Half>
VN_INLINE __m256i byte_codes_of_half(__m256i w) {
  if constexpr (Kind == VN_CODE_INT8) return w;
  const __m128i* values = reinterpret_cast<const __m128i*>(kNibbleValues[Kind]);
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(values));
  return _mm256_shuffle_epi8(
      table, _mm256_and_si256(Half == 0 ? w : _mm256_srli_epi32(w, 4), _mm256_set1_epi8(15)));
}
template <int Kind, int Half>
VN_INLINE ByteCodes byte_codes(Words w) {
  return {byte_codes_of_half<Kind, Half>(w.a), byte_codes_of_half<Kind, Half>(w.b)};
}
// Two products of 128 * 127 fit in sixteen bits; inputs take the codes' signs.
VN_INLINE __m256i dot_bytes_of_half(__m256i sum, __m256i codes, __m256i inputs) {
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
VN_INLINE Ints dot_bytes(Ints sum, const ByteCodes& codes, int32_t inputs) {
  const __m256i all = _mm256_set1_epi32(inputs);
  return {dot_bytes_of_half(sum.a, codes.a, all), dot_bytes_of_half(sum.b, codes.b, all)};
}

#else

constexpr int32_t kLift = 0;
constexpr int kByteRows = 1, kByteVecs = 1;
struct Ints {
  int32_t v[kLanes];
};
struct ByteCodes {
  int8_t v[kLanes][4];
};
inline Ints fill_ints(int32_t x) {
  Ints all;
  std::fill_n(all.v, kLanes, x);
  return all;
}
inline Vec to_floats(const Ints& a) {
  Vec wide;
  for (int i = 0; i < kLanes; ++i) wide.v[i] = static_cast<float>(a.v[i]);
  return wide;
}
template <int Kind, int Half>
inline ByteCodes byte_codes(const Words& w) {
  ByteCodes codes;
  for (int i = 0; i < kLanes; ++i) {
    for (int b = 0; b < 4; ++b) {
      codes.v[i][b] = Kind == VN_CODE_INT8 ? static_cast<int8_t>(w.v[i] >> 8 * b & 255)
                                           : kNibbleValues[Kind][w.v[i] >> (8 * b + 4 * Half) & 15];
    }
  }
  return codes;
}
inline Ints dot_bytes(Ints sum, const ByteCodes& codes, int32_t inputs) {
  int8_t four[4];
  std::memcpy(four, &inputs, sizeof(four));
  for (int i = 0; i < kLanes; ++i) {
    for (int b = 0; b < 4; ++b) sum.v[i] += codes.v[i][b] * four[b];
  }
  return sum;
}

#endif

// How the inputs of a packed matrix are rounded: matrices of one form share them.
struct ByteForm {
  int64_t cols, group;
  const int32_t* order;
  bool is_by_row;  // one scale for all groups
  bool is_split;   // even and odd inputs of eight apart

  explicit ByteForm(const vn_matrix& m) : cols(m.cols) {
    const vn_panels& own = *static_cast<const vn_panels*>(m.data);
    group = own.group;
    order = own.order;
    is_by_row = own.input_kind == VN_INPUT_BYTES_BY_ROW;
    is_split = own.code_kind != VN_CODE_INT8;
  }
  bool operator==(const ByteForm& other) const {
    return cols == other.cols && group == other.group && order == other.order &&
           is_by_row == other.is_by_row && is_split == other.is_split;
  }
  int64_t groups() const { return ceil_div(cols, group); }
  int64_t stride() const { return ceil_div(cols, 8) * 8; }
};

// Largest magnitude, as bits: what is no number is the largest of all.
inline uint32_t find_peak(const float* x, int64_t count) {
  uint32_t peak = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    peak = std::max(peak, bits & 0x7fffffffu);
  }
  return peak;
}

// Rounds inputs to multiples of a scale, at most 127 of it, ties to even. With an input that is no
// number the scale is none either; inputs that are all next to nothing are zero.
inline float round_to_bytes(const float* x, int64_t count, uint32_t peak_bits, int8_t* codes) {
  constexpr float kLeast = 1e-30f;
  // Added to a small number it leaves the nearest whole one in the last bits.
  constexpr float kWhole = 12582912.0f;
  constexpr uint32_t kWholeBits = 0x4b400000u, kInfinity = 0x7f800000u;
  float peak;
  std::memcpy(&peak, &peak_bits, sizeof(peak));
  const bool has_codes = peak_bits < kInfinity && peak >= kLeast;
  if (!has_codes) {
    std::fill_n(codes, count, int8_t{0});
    return peak_bits < kInfinity ? 0.0f : NAN;
  }
  const float inverse = 127.0f / peak;
  for (int64_t i = 0; i < count; ++i) {
    const float moved = x[i] * inverse + kWhole;
    uint32_t bits;
    std::memcpy(&bits, &moved, sizeof(bits));
    codes[i] = static_cast<int8_t>(bits - kWholeBits);
  }
  return peak / 127.0f;
}

// Rounds a row of inputs; see ByteInputs.
inline void round_row_to_bytes(const ByteForm& form, const float* x, int8_t* codes, float* scales,
                               int32_t* sums) {
  thread_local Floats gathered;
  if (form.order != nullptr) {
    gathered.resize(form.cols);
    for (int64_t k = 0; k < form.cols; ++k) gathered[k] = x[form.order[k]];
    x = gathered.data();
  }
  const uint32_t whole_peak = form.is_by_row ? find_peak(x, form.cols) : 0;
  for (int64_t g = 0; g < form.groups(); ++g) {
    const int64_t begin = g * form.group, count = std::min(form.group, form.cols - begin);
    const uint32_t peak = form.is_by_row ? whole_peak : find_peak(x + begin, count);
    scales[g] = round_to_bytes(x + begin, count, peak, codes + begin);
    int32_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += codes[begin + i];
    sums[g] = total;
  }
  std::fill(codes + form.cols, codes + form.stride(), int8_t{0});
  if (!form.is_split) return;
  for (int64_t k = 0; k < form.stride(); k += 8) {
    int8_t eight[8];
    std::memcpy(eight, codes + k, sizeof(eight));
    for (int i = 0; i < 4; ++i) {
      codes[k + i] = eight[2 * i];
      codes[k + 4 + i] = eight[2 * i + 1];
    }
  }
}

template <int Kind, int R>
inline void dot_byte_tile(const ByteInputs& x, int64_t row, const PanelView& panel, float* sums) {
  constexpr int C = kByteVecs, kHalves = kWordCodes<Kind> / 4;
  const int64_t group_words = panel.m.group / kWordCodes<Kind>;
  const int8_t* inputs[R];
  each<R>([&](auto r) VN_NOW { inputs[r] = x.codes + (row + r) * x.stride; });
  for (int first = 0; first < kPanelVecs; first += C) {
    for (int64_t g = 0; g < panel.groups; ++g) {
      const float* scales[R];
      const int32_t* totals[R];
      each<R>([&](auto r) VN_NOW {
        scales[r] = x.scales + (row + r) * x.groups + g;
        totals[r] = x.sums + (row + r) * x.groups + g;
      });
      Ints chains[R * C];
      each<R * C>([&](auto i) VN_NOW { chains[i] = fill_ints(-kLift * *totals[i / C]); });
      const int64_t end = std::min(panel.words, (g + 1) * group_words);
      for (int64_t word = g * group_words; word < end; ++word) {
        Words words[C];
        each<C>([&](auto c) VN_NOW {
          const uint32_t* line = panel.codes(word, first + c);
          if constexpr (R <= kFewPanelRows) __builtin_prefetch(line + kFetchWords, 0, 3);
          words[c] = load_words(line);
        });
        each<kHalves>([&](auto half) VN_NOW {
          ByteCodes codes[C];
          each<C>([&](auto c) VN_NOW { codes[c] = byte_codes<Kind, half>(words[c]); });
          each<R>([&](auto r) VN_NOW {
            int32_t four;
            std::memcpy(&four, inputs[r] + (word * kHalves + half) * 4, sizeof(four));
            each<C>([&](auto c) VN_NOW {
              chains[r * C + c] = dot_bytes(chains[r * C + c], codes[c], four);
            });
          });
        });
      }
      each<C>([&](auto c) VN_NOW {
        const Vec own = panel.scale(g, first + c);
        const Vec step = Kind == VN_CODE_E2M1 ? mul(own, fill(0.5f)) : own;
        each<R>([&](auto r) VN_NOW {
          float* out = sums + r * kPanel + (first + c) * kLanes;
          const Vec before = g == 0 ? zero() : load(out);
          store(out, fused(to_floats(chains[r * C + c]), mul(step, fill(*scales[r])), before));
        });
        if (panel.m.offsets != nullptr) {
          const Vec offset = panel.offset(g, first + c, own);
          each<R>([&](auto r) VN_NOW {
            float* out = sums + r * kPanel + (first + c) * kLanes;
            const float inputs_of_group = *scales[r] * static_cast<float>(*totals[r]);
            store(out, fused(offset, fill(inputs_of_group), load(out)));
          });
        }
      });
    }
  }
}

// sums [rows, 64] = rounded rows from `row` on . all outputs of a panel.
inline void dot_byte_panel(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                           int64_t index, float* sums) {
  const PanelView panel(m, index);
  const auto run = [&](auto kind) {
    each_tile<kByteRows>(rows, [&](auto height, int64_t at) {
      dot_byte_tile<kind, height>(x, row + at, panel, sums + at * kPanel);
    });
  };
  using std::integral_constant;
  switch (panel.m.code_kind) {
    case VN_CODE_INT4:
      return run(integral_constant<int, VN_CODE_INT4>{});
    case VN_CODE_UINT4:
      return run(integral_constant<int, VN_CODE_UINT4>{});
    case VN_CODE_IQ4:
      return run(integral_constant<int, VN_CODE_IQ4>{});
    case VN_CODE_E2M1:
      return run(integral_constant<int, VN_CODE_E2M1>{});
    default:
      return run(integral_constant<int, VN_CODE_INT8>{});
  }
}

// Products with outputs output .. output + count - 1 of a packed matrix; y as in dot_panels.
inline void dot_bytes_by_panels(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                                int64_t output, int64_t count, float* const* y, int64_t first) {
  thread_local Floats sums;
  sums.resize(rows * kPanel);
  for (int64_t at = output; at < output + count;) {
    const int64_t panel = at / kPanel, start = at - panel * kPanel;
    const int64_t size = std::min(kPanel - start, output + count - at);
    if (x.has_instructions) {
      dot_byte_panel_vnni(x, row, rows, m, panel, sums.data());
    } else {
      dot_byte_panel(x, row, rows, m, panel, sums.data());
    }
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(y[r] + first + at - output, sums.data() + r * kPanel + start,
                  sizeof(float) * size);
    }
    at += size;
  }
}

}  // namespace VN_BUILD
}  // namespace vn
