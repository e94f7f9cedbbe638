// The tiles of bytes.h, in the instructions that a compilation has: a build's, or VNNI's.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "aligned.h"
#include "bytes.h"
#include "exact.h"
#include "panels.h"
#include "vec.h"

namespace vn {
namespace VN_BUILD {

// The values of four-bit codes; those of e2m1 doubled.
constexpr int8_t kNibbleValues[5][16] = {
    {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15},
    {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};
constexpr int nibble_value(int kind, int code) {
  return kNibbleValues[kind == VN_CODE_ODD4 ? 0 : kind][code];
}

// Instructions take one side without signs: codes are lifted so that none is negative, and sums begin
// as much lower.
template <int Kind>
constexpr int32_t kLeastLift = Kind == VN_CODE_INT4   ? 8
                               : Kind == VN_CODE_E2M1 ? 12
                               : Kind == VN_CODE_INT6 ? 32
                               : Kind == VN_CODE_ODD4 ? 15
                               : kIsLow<Kind>         ? low_lift(Kind)
                                                      : 0;
// The largest lifted code.
template <int Kind>
constexpr int kLargestCode = Kind == kNarrowBytes   ? 7
                             : Kind == kWideBytes   ? 2 * low_lift(VN_CODE_IQ3_XXS)
                             : Kind == VN_CODE_INT6 ? 63
                             : Kind == VN_CODE_E2M1 ? 24
                             : Kind == VN_CODE_ODD4 ? 30
                             : Kind == VN_CODE_UINT2 || Kind == VN_CODE_INT2 ? 3
                             : Kind == VN_CODE_INT3                          ? 7
                             : kIsLow<Kind> ? 2 * low_lift(Kind)
                                            : 15;
// Codes that fill a byte.
template <int Kind>
constexpr bool kIsFullByte = Kind == VN_CODE_INT8 || Kind == VN_CODE_IQ4;

// The table of lifted values of a kind.
template <int Kind>
struct LiftedValues {
  alignas(16) int8_t values[16];
  constexpr explicit LiftedValues(int lift) : values{} {
    for (int i = 0; i < 16; ++i) values[i] = static_cast<int8_t>(nibble_value(Kind, i) + lift);
  }
};

template <int Kind>
struct ByteCodes;
// Of builds that have it.
template <int Kind, int Part>
ByteCodes<Kind> placed_codes(const Unit<Kind>& unit);

inline int32_t four_of(const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof(four));
  return four;
}

#if defined(__AVX512VNNI__)

constexpr bool kDecodesAll = false, kHasPlacedCodes = true;
template <int Kind>
constexpr int32_t kLift = kIsFullByte<Kind> ? 128 : kLeastLift<Kind>;
// Steps of four inputs whose sums fit in sixteen bits, where they are not added to those of 32 at once.
template <int Kind>
constexpr int kShortSteps = 0;
constexpr int kByteRows = 6, kByteVecs = 4;
// A vector, not its intrinsic type: GCC 12 keeps arrays of the latter in memory.
typedef int32_t Int16s __attribute__((vector_size(64)));
struct Ints {
  Int16s v;
};
struct Shorts {};
template <int Kind>
struct ByteCodes {
  __m512i v;
};
VN_INLINE Ints fill_ints(int32_t x) { return {reinterpret_cast<Int16s>(_mm512_set1_epi32(x))}; }
VN_INLINE Ints load_ints(const int32_t* p) { return {reinterpret_cast<Int16s>(_mm512_loadu_si512(p))}; }
VN_INLINE void store_ints(int32_t* p, Ints a) { _mm512_storeu_si512(p, reinterpret_cast<__m512i>(a.v)); }
VN_INLINE Ints add_scaled(Ints sum, Ints a, Ints scale) { return {sum.v + a.v * scale.v}; }
VN_INLINE Ints add_short_scaled(Ints sum, Ints a, Ints scale) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(scale.v));
  return sum;
}
template <int N>
VN_INLINE Ints add_shifted(Ints a, Ints b) { return {a.v + (b.v >> N)}; }
VN_INLINE Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a.v))}; }
VN_INLINE Ints to_ints(Words w) { return {reinterpret_cast<Int16s>(w.v)}; }
template <int Kind, int Part>
VN_INLINE ByteCodes<Kind> byte_codes(const Unit<Kind>& unit) {
  if constexpr (kIsLow<Kind>) {
    return {four_codes<Kind, Part>(unit).v};
  } else if constexpr (Kind == VN_CODE_INT8) {
    return {_mm512_xor_si512(unit.words[0].v, _mm512_set1_epi8(-128))};
  } else if constexpr (Kind == VN_CODE_INT6) {
    return {six_bits<Part>(unit.words[Part / 2], unit.words[2]).v};
  } else {
    const __m512i w = unit.words[0].v, own = _mm512_set1_epi8(15);
    const __m512i moved = Part == 0 ? w : _mm512_srli_epi32(w, 4);
    // (moved & own) ^ 8
    if constexpr (Kind == VN_CODE_INT4) {
      return {_mm512_ternarylogic_epi32(moved, own, _mm512_set1_epi8(8), 0x6a)};
    }
    const __m512i nibbles = _mm512_and_si512(moved, own);
    if constexpr (Kind == VN_CODE_UINT4) return {nibbles};
    static constexpr LiftedValues<Kind> kTable(kLift<Kind>);
    const __m128i* values = reinterpret_cast<const __m128i*>(kTable.values);
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(values));
    return {_mm512_shuffle_epi8(table, nibbles)};
  }
}
// Bytes of codes of two and three bits where they lie: those of odd parts are four times as much.
template <int Kind, int Part>
VN_INLINE ByteCodes<Kind> placed_codes(const Unit<Kind>& unit) {
  constexpr int kPlace = Part % 2 * 2;
  const Words pairs = masked(shifted<Part / 2 * 4>(unit.words[0]), 0x03030303u << kPlace);
  if constexpr (Kind == VN_CODE_UINT2) return {pairs.v};
  const Words thirds = shifted<Part - 2 - kPlace>(unit.words[1]);
  return {joined(pairs, masked(thirds, 0x04040404u << kPlace)).v};
}
// Four inputs, beside every output.
struct Fours {
  __m512i v;
};
VN_INLINE Fours fill_fours(const int8_t* inputs) { return {_mm512_set1_epi32(four_of(inputs))}; }
template <int Kind>
VN_INLINE Ints dot_bytes(Ints sum, ByteCodes<Kind> codes, Fours inputs) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(codes.v), "v"(inputs.v));
  return sum;
}
template <int Kind>
VN_INLINE Shorts add_short(Shorts, ByteCodes<Kind>, const int8_t*) { return {}; }
VN_INLINE Shorts no_shorts() { return {}; }
VN_INLINE Ints add_shorts(Ints sum, Shorts) { return sum; }

#elif defined(__AVX2__)

constexpr bool kDecodesAll = false, kHasPlacedCodes = false;
template <int Kind>
constexpr int32_t kLift = kLeastLift<Kind>;
// A pair of products of full bytes fits in sixteen bits; of lower codes so many steps do.
template <int Kind>
constexpr int kShortSteps = kIsFullByte<Kind>                    ? 0
                            : kLargestCode<Kind> > 63             ? 1
                            : kLargestCode<Kind> > 31             ? 2
                            : kLargestCode<Kind> > 15             ? 4
                            : kUnitCodes<Kind> / 4 <= 2           ? 8
                                                                  : 16;

#if defined(__AVX512F__)

constexpr int kByteRows = 4, kByteVecs = 4;
struct Ints {
  __m512i v;
};
struct Shorts {
  __m512i v;
};
// Of full bytes the magnitudes: inputs take the codes' signs.
template <int Kind>
struct ByteCodes {
  __m512i v;
  __mmask64 are_negative;
};
VN_INLINE Ints fill_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
VN_INLINE Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
VN_INLINE void store_ints(int32_t* p, Ints a) { _mm512_storeu_si512(p, a.v); }
VN_INLINE Ints add_scaled(Ints sum, Ints a, Ints scale) {
  return {_mm512_add_epi32(sum.v, _mm512_mullo_epi32(a.v, scale.v))};
}
VN_INLINE Ints add_short_scaled(Ints sum, Ints a, Ints scale) {
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, scale.v))};
}
template <int N>
VN_INLINE Ints add_shifted(Ints a, Ints b) {
  return {_mm512_add_epi32(a.v, _mm512_srai_epi32(b.v, N))};
}
VN_INLINE Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
VN_INLINE Ints to_ints(Words w) { return {w.v}; }
template <int Kind, int Part>
VN_INLINE ByteCodes<Kind> byte_codes(const Unit<Kind>& unit) {
  const __m512i w = unit.words[0].v;
  if constexpr (kIsLow<Kind>) {
    return {four_codes<Kind, Part>(unit).v, 0};
  } else if constexpr (Kind == VN_CODE_INT8) {
    return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
  } else if constexpr (Kind == VN_CODE_INT6) {
    return {six_bits<Part>(unit.words[Part / 2], unit.words[2]).v, 0};
  } else {
    const __m512i nibbles =
        _mm512_and_si512(Part == 0 ? w : _mm512_srli_epi32(w, 4), _mm512_set1_epi8(15));
    if constexpr (Kind == VN_CODE_UINT4) return {nibbles, 0};
    if constexpr (Kind == VN_CODE_INT4) return {_mm512_xor_si512(nibbles, _mm512_set1_epi8(8)), 0};
    static constexpr LiftedValues<Kind> kTable(kLift<Kind>);
    const __m128i* values = reinterpret_cast<const __m128i*>(kTable.values);
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(values));
    const __m512i codes = _mm512_shuffle_epi8(table, nibbles);
    if constexpr (kLift<Kind> > 0) return {codes, 0};
    return {_mm512_abs_epi8(codes), _mm512_movepi8_mask(codes)};
  }
}
struct Fours {
  __m512i v;
};
VN_INLINE Fours fill_fours(const int8_t* inputs) { return {_mm512_set1_epi32(four_of(inputs))}; }
template <int Kind>
VN_INLINE __m512i pair_products(ByteCodes<Kind> codes, Fours inputs) {
  __m512i all = inputs.v;
  if constexpr (kIsFullByte<Kind>) {
    all = _mm512_mask_sub_epi8(all, codes.are_negative, _mm512_setzero_si512(), all);
  }
  return _mm512_maddubs_epi16(codes.v, all);
}
VN_INLINE Ints add_shorts(Ints sum, Shorts pairs) {
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs.v, _mm512_set1_epi16(1)))};
}
VN_INLINE Shorts no_shorts() { return {_mm512_setzero_si512()}; }
template <int Kind>
VN_INLINE Ints dot_bytes(Ints sum, ByteCodes<Kind> codes, Fours inputs) {
  return add_shorts(sum, {pair_products(codes, inputs)});
}
template <int Kind>
VN_INLINE Shorts add_short(Shorts sum, ByteCodes<Kind> codes, const int8_t* inputs) {
  return {_mm512_add_epi16(sum.v, pair_products(codes, fill_fours(inputs)))};
}

#else

constexpr int kByteRows = 4, kByteVecs = 1;
struct Ints {
  __m256i a, b;
};
struct Shorts {
  __m256i a, b;
};
template <int Kind>
struct ByteCodes {
  __m256i a, b;
};
VN_INLINE Ints fill_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
VN_INLINE Ints load_ints(const int32_t* p) {
  const __m256i* ints = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(ints), _mm256_loadu_si256(ints + 1)};
}
VN_INLINE void store_ints(int32_t* p, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, x.b);
}
VN_INLINE Ints add_scaled(Ints sum, Ints x, Ints scale) {
  return {_mm256_add_epi32(sum.a, _mm256_mullo_epi32(x.a, scale.a)),
          _mm256_add_epi32(sum.b, _mm256_mullo_epi32(x.b, scale.b))};
}
VN_INLINE Ints add_short_scaled(Ints sum, Ints x, Ints scale) {
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, scale.a)),
          _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, scale.b))};
}
template <int N>
VN_INLINE Ints add_shifted(Ints x, Ints y) {
  return {_mm256_add_epi32(x.a, _mm256_srai_epi32(y.a, N)),
          _mm256_add_epi32(x.b, _mm256_srai_epi32(y.b, N))};
}
VN_INLINE Vec to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
VN_INLINE Ints to_ints(Words w) { return {w.a, w.b}; }
template <int Kind, int Part>
VN_INLINE __m256i byte_codes_of_half(__m256i w) {
  if constexpr (Kind == VN_CODE_INT8) return w;
  const __m256i nibbles =
      _mm256_and_si256(Part == 0 ? w : _mm256_srli_epi32(w, 4), _mm256_set1_epi8(15));
  if constexpr (Kind == VN_CODE_UINT4) return nibbles;
  if constexpr (Kind == VN_CODE_INT4) return _mm256_xor_si256(nibbles, _mm256_set1_epi8(8));
  if constexpr (Kind == VN_CODE_IQ4 || Kind == VN_CODE_E2M1 || Kind == VN_CODE_ODD4) {
    static constexpr LiftedValues<Kind> kTable(kLift<Kind>);
    const __m128i* values = reinterpret_cast<const __m128i*>(kTable.values);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(values)), nibbles);
  }
}
template <int Kind, int Part>
VN_INLINE ByteCodes<Kind> byte_codes(const Unit<Kind>& unit) {
  if constexpr (kIsLow<Kind>) {
    const Words codes = four_codes<Kind, Part>(unit);
    return {codes.a, codes.b};
  } else if constexpr (Kind == VN_CODE_INT6) {
    const Words codes = six_bits<Part>(unit.words[Part / 2], unit.words[2]);
    return {codes.a, codes.b};
  } else {
    const Words& w = unit.words[0];
    return {byte_codes_of_half<Kind, Part>(w.a), byte_codes_of_half<Kind, Part>(w.b)};
  }
}
// Where it stands: GCC 12 else reads the inputs of all rows first, and sums are spilled.
VN_INLINE __m256i fill_four(const int8_t* inputs) {
  __m256i all;
  asm volatile("vpbroadcastd %1, %0" : "=x"(all) : "m"(*reinterpret_cast<const char(*)[4]>(inputs)));
  return all;
}
struct Fours {
  __m256i v;
};
VN_INLINE Fours fill_fours(const int8_t* inputs) { return {fill_four(inputs)}; }
// Inputs take the signs of full bytes.
template <int Kind>
VN_INLINE __m256i pair_products(__m256i codes, __m256i inputs) {
  if constexpr (!kIsFullByte<Kind>) return _mm256_maddubs_epi16(codes, inputs);
  return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
}
VN_INLINE Ints add_shorts(Ints sum, Shorts pairs) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, ones)),
          _mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, ones))};
}
VN_INLINE Shorts no_shorts() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
template <int Kind>
VN_INLINE Ints dot_bytes(Ints sum, ByteCodes<Kind> codes, Fours inputs) {
  return add_shorts(
      sum, {pair_products<Kind>(codes.a, inputs.v), pair_products<Kind>(codes.b, inputs.v)});
}
template <int Kind>
VN_INLINE Shorts add_short(Shorts sum, ByteCodes<Kind> codes, const int8_t* inputs) {
  const __m256i all = fill_four(inputs);
  return {_mm256_add_epi16(sum.a, pair_products<Kind>(codes.a, all)),
          _mm256_add_epi16(sum.b, pair_products<Kind>(codes.b, all))};
}

#endif

#else

// Nobody waits for these: a tile of each kind would only be compiled.
constexpr bool kDecodesAll = true, kHasPlacedCodes = false;
template <int Kind>
constexpr int32_t kLift = 0;
template <int Kind>
constexpr int kShortSteps = 0;
constexpr int kByteRows = 1, kByteVecs = 1;
struct Ints {
  int32_t v[kLanes];
};
struct Shorts {};
template <int Kind>
struct ByteCodes {
  int8_t v[kLanes][4];
};
inline Ints fill_ints(int32_t x) {
  Ints all;
  std::fill_n(all.v, kLanes, x);
  return all;
}
inline Ints load_ints(const int32_t* p) {
  Ints all;
  std::copy_n(p, kLanes, all.v);
  return all;
}
inline void store_ints(int32_t* p, const Ints& a) { std::copy_n(a.v, kLanes, p); }
inline Ints add_scaled(Ints sum, const Ints& a, const Ints& scale) {
  for (int i = 0; i < kLanes; ++i) sum.v[i] += a.v[i] * scale.v[i];
  return sum;
}
inline Ints add_short_scaled(Ints sum, const Ints& a, const Ints& scale) {
  return add_scaled(sum, a, scale);
}
template <int N>
inline Ints add_shifted(Ints a, const Ints& b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] += b.v[i] >> N;
  return a;
}
inline Vec to_floats(const Ints& a) {
  Vec wide;
  for (int i = 0; i < kLanes; ++i) wide.v[i] = static_cast<float>(a.v[i]);
  return wide;
}
inline Ints to_ints(const Words& w) {
  Ints all;
  std::memcpy(all.v, w.v, sizeof(all.v));
  return all;
}
template <int Kind, int Part>
inline ByteCodes<Kind> byte_codes(const Unit<Kind>& unit) {
  Words w = unit.words[0];
  if constexpr (Kind == VN_CODE_INT6) {
    w = six_bits<Part>(unit.words[Part / 2], unit.words[2]);
  } else if constexpr (kIsLow<Kind>) {
    w = four_codes<Kind, Part>(unit);
  }
  ByteCodes<Kind> codes;
  for (int i = 0; i < kLanes; ++i) {
    for (int b = 0; b < 4; ++b) {
      if constexpr (Kind == VN_CODE_INT8 || Kind == VN_CODE_INT6 || kIsLow<Kind>) {
        const int raised = Kind == VN_CODE_INT8 ? 0 : kLeastLift<Kind>;
        codes.v[i][b] = static_cast<int8_t>((w.v[i] >> 8 * b & 255) - raised);
      } else {
        codes.v[i][b] = static_cast<int8_t>(nibble_value(Kind, w.v[i] >> (8 * b + 4 * Part) & 15));
      }
    }
  }
  return codes;
}
struct Fours {
  const int8_t* v;
};
inline Fours fill_fours(const int8_t* inputs) { return {inputs}; }
template <int Kind>
inline Ints dot_bytes(Ints sum, const ByteCodes<Kind>& codes, Fours inputs) {
  for (int i = 0; i < kLanes; ++i) {
    for (int b = 0; b < 4; ++b) sum.v[i] += codes.v[i][b] * inputs.v[b];
  }
  return sum;
}
template <int Kind>
inline Shorts add_short(Shorts, const ByteCodes<Kind>&, const int8_t*) { return {}; }
inline Shorts no_shorts() { return {}; }
inline Ints add_shorts(Ints sum, Shorts) { return sum; }

#endif

// add_scaled's two numbers may be so small that sixteen bits of each are multiplied: add_short_scaled, for
// scales whose upper sixteen are zero. This is one step, or one that takes less time.
//
// Of codes of two and three bits sums over sixteen inputs are as small, and with VNNI are even kept in two
// parts: see placed_codes.
template <int Kind>
constexpr bool kHasShortSums = Kind == VN_CODE_UINT2 || Kind == VN_CODE_INT3;
template <int Kind>
constexpr int kSumParts = kHasShortSums<Kind> && kHasPlacedCodes ? 2 : 1;

// Vectors of a tile: of few rows whole panels, so that codes are one stream; of more, as many as leave registers
// for sums beside the chains.
constexpr int kSumsOfPlace = kByteVecs > 1 ? 2 : 1;
template <int R>
constexpr int kByteTileVecs = kSumsOfPlace * R * kPanelVecs <= kByteRows * kByteVecs ? kPanelVecs
                              : 2 * R <= kByteRows * kByteVecs                       ? 2
                                                                                     : kByteVecs;

// The same where whole sums lie beside the chains in registers.
template <int R>
constexpr int kSpanTileVecs = kByteVecs == 1 ? 1 : kByteTileVecs<R>;

// Codes as they are stored, which each tile makes bytes of.
template <int Kind, CodeFetch kAsks>
struct StoredBytes {
  static constexpr bool kIsDecoded = false;
  static constexpr int kKind = Kind;
  static constexpr CodeFetch kFetch = kAsks;
  const PanelView& panel;
  Codebook<Kind> codebook{panel.m.codebook};

  static constexpr int32_t lift() { return kLift<Kind>; }
  int64_t units() const { return panel.units; }

  // Calls body(part, bytes) for the parts of a unit. kParts: of sums.
  template <int kOdd = -1, int kParts = 1, typename Body>
  VN_INLINE void each_part(int64_t at, int vec, Body&& body) const {
    const Unit<Kind> unit = panel.template unit<Kind, kAsks, kOdd>(codebook, at, vec);
    each<kUnitCodes<Kind> / 4>([&](auto part) VN_NOW {
      if constexpr (kParts > 1) {
        body(part, placed_codes<Kind, part>(unit));
      } else {
        body(part, byte_codes<Kind, part>(unit));
      }
    });
  }
};

// The same, made bytes of once for many tiles: units from `begin` on. Of one kind of bytes for several
// kinds of codes, which differ by what they are lifted by.
template <int Kind>
struct DecodedBytes {
  static constexpr bool kIsDecoded = true;
  static constexpr int kKind = Kind;
  const ByteCodes<Kind>* all;  // [units, parts, 64 / 16]
  int64_t begin;
  int32_t own_lift;
  int64_t num_units;  // of the panel; those of kinds with indexes are two

  int64_t units() const { return num_units; }

  VN_INLINE int32_t lift() const {
    return Kind == kNarrowBytes || Kind == kWideBytes ? own_lift : kLift<Kind>;
  }

  template <typename Body>
  VN_INLINE void each_part(int64_t at, int vec, Body&& body) const {
    each<kUnitCodes<Kind> / 4>([&](auto part) VN_NOW { body(part, codes<part>(at, vec)); });
  }
  template <int Part>
  VN_INLINE const ByteCodes<Kind>& codes(int64_t at, int vec) const {
    return all[((at - begin) * (kUnitCodes<Kind> / 4) + Part) * kPanelVecs + vec];
  }
};

template <typename Decoded, int Kind>
VN_INLINE Decoded as_kind(const ByteCodes<Kind>& codes) {
  if constexpr (std::is_same_v<Decoded, ByteCodes<Kind>>) {
    return codes;
  } else {
    Decoded result;
    static_assert(sizeof(result) == sizeof(codes));
    std::memcpy(&result, &codes, sizeof(codes));
    return result;
  }
}

template <int Kind, typename Decoded>
inline void decode_bytes(const PanelView& panel, int64_t begin, int64_t end, Decoded* out) {
  constexpr int kParts = kUnitCodes<Kind> / 4;
  const StoredBytes<Kind, kFetchLater> stored = {panel};
  const auto decode = [&](int64_t at, int vec) VN_NOW {
    stored.each_part(at, vec, [&](auto part, const auto& codes) VN_NOW {
      out[((at - begin) * kParts + part) * kPanelVecs + vec] = as_kind<Decoded>(codes);
    });
  };
  for (int64_t at = begin; at < end; ++at) {
    if constexpr (kIsLow<Kind>) {
      // Many steps each.
      for (int vec = 0; vec < kPanelVecs; ++vec) decode(at, vec);
    } else {
      each<kPanelVecs>([&](auto vec) VN_NOW { decode(at, vec); });
    }
  }
}

// Sums of so many steps of units at .. end - 1 as fit in sixteen bits.
template <int Kind, int R, int C, typename Source>
VN_INLINE void add_steps(const Source& source, const int8_t* const* inputs, int64_t at, int64_t end,
                         int first, Shorts* shorts) {
  constexpr int kParts = kUnitCodes<Kind> / 4;
  each<R * C>([&](auto i) VN_NOW { shorts[i] = no_shorts(); });
  for (; at < end; ++at) {
    each<C>([&](auto c) VN_NOW {
      source.each_part(at, first + c, [&](auto part, const auto& codes) VN_NOW {
        each<R>([&](auto r) VN_NOW {
          const int8_t* four = inputs[r] + (at * kParts + part) * 4;
          shorts[r * C + c] = add_short<Kind>(shorts[r * C + c], codes, four);
        });
      });
    });
  }
}

// The products of units at .. end - 1: chains, of which begin_chain(i) is what i begins with.
template <int Kind, int R, int C, typename Source, typename Begin>
VN_INLINE void dot_units(const Source& source, const int8_t* const* inputs, int64_t at, int64_t end,
                         int first, Begin&& begin_chain, Ints* chains) {
  constexpr int kParts = kUnitCodes<Kind> / 4, kSteps = kShortSteps<Kind>;
  if constexpr (kSteps == 0 && Source::kIsDecoded) {
    each<R * C>([&](auto i) VN_NOW { chains[i] = begin_chain(i); });
    for (; at < end; ++at) {
      each<kParts>([&](auto part) VN_NOW {
        // One input at a time stands beside the chains and these in registers.
        ByteCodes<Kind> codes[C];
        each<C>([&](auto c) VN_NOW { codes[c] = source.template codes<part>(at, first + c); });
        each<R>([&](auto r) VN_NOW {
          const Fours four = fill_fours(inputs[r] + (at * kParts + part) * 4);
          each<C>([&](auto c) VN_NOW {
            chains[r * C + c] = dot_bytes<Kind>(chains[r * C + c], codes[c], four);
          });
        });
      });
    }
  } else if constexpr (kSteps < kParts) {
    each<R * C>([&](auto i) VN_NOW { chains[i] = begin_chain(i); });
    for (; at < end; ++at) {
      each<C>([&](auto c) VN_NOW {
        Shorts shorts[R];
        source.each_part(at, first + c, [&](auto part, const auto& codes) VN_NOW {
          each<R>([&](auto r) VN_NOW {
            const int8_t* four = inputs[r] + (at * kParts + part) * 4;
            Ints& chain = chains[r * C + c];
            if constexpr (kSteps == 0) {
              chain = dot_bytes<Kind>(chain, codes, fill_fours(four));
            } else {
              shorts[r] = add_short<Kind>(part % kSteps == 0 ? no_shorts() : shorts[r], codes, four);
              if constexpr (part % kSteps == kSteps - 1) chain = add_shorts(chain, shorts[r]);
            }
          });
        });
      });
    }
  } else {
    // Most groups are so short: no chains lie in registers while their steps are added.
    const int64_t stop = std::min(end, at + kSteps / kParts);
    Shorts shorts[R * C];
    add_steps<Kind, R, C>(source, inputs, at, stop, first, shorts);
    each<R * C>([&](auto i) VN_NOW { chains[i] = add_shorts(begin_chain(i), shorts[i]); });
    for (at = stop; at < end; at += kSteps / kParts) {
      add_steps<Kind, R, C>(source, inputs, at, std::min(end, at + kSteps / kParts), first, shorts);
      each<R * C>([&](auto i) VN_NOW { chains[i] = add_shorts(chains[i], shorts[i]); });
    }
  }
}

// Adds groups begin .. end - 1 to sums, rows of kPanel.
template <int R, typename Source>
VN_APART void dot_byte_tile(const ByteInputs& x, int64_t row, const PanelView& panel,
                            const Source& source, const WidenedScales& widened, int64_t begin,
                            int64_t end, float* sums) {
  constexpr int C = kByteTileVecs<R>, Kind = Source::kKind;
  const int64_t group_units = panel.m.group / kUnitCodes<Kind>;
  const int64_t units = source.units();
  const int8_t* inputs[R];
  const float* input_scales[R];
  const int32_t* totals[R];
  each<R>([&](auto r) VN_NOW {
    inputs[r] = x.codes + (row + r) * x.stride;
    input_scales[r] = x.scales + (row + r) * x.groups;
    totals[r] = x.sums + (row + r) * x.groups;
  });
  const bool has_offsets = panel.m.offsets != nullptr;
  for (int first = 0; first < kPanelVecs; first += C) {
    // Sums of few rows stay in registers from group to group.
    constexpr bool kIsNear = 2 * R * C <= kByteRows * kByteVecs;
    Vec near[kIsNear ? R * C : 1];
    const auto place = [&](auto i) VN_NOW {
      return sums + (i / C) * kPanel + (first + i % C) * kLanes;
    };
    if constexpr (kIsNear) {
      each<R * C>([&](auto i) VN_NOW { near[i] = begin == 0 ? zero() : load(place(i)); });
    }
    for (int64_t g = begin; g < end; ++g) {
      Ints chains[R * C];
      dot_units<Kind, R, C>(
          source, inputs, g * group_units, std::min(units, (g + 1) * group_units), first,
          [&](auto i) VN_NOW { return fill_ints(-source.lift() * totals[i / C][g]); }, chains);
      each<C>([&](auto c) VN_NOW {
        const int64_t at = (first + c) * kLanes;
        const Vec own = load(widened.scales(g) + at);
        const Vec step = Kind == VN_CODE_E2M1 ? mul(own, fill(0.5f)) : own;
        const Vec offset = has_offsets ? load(widened.offsets(g) + at) : zero();
        each<R>([&](auto r) VN_NOW {
          constexpr int i = r * C + c;
          Vec sum = kIsNear ? near[kIsNear ? i : 0] : g == 0 ? zero() : load(sums + r * kPanel + at);
          sum = fused(to_floats(chains[i]), mul(step, fill(input_scales[r][g])), sum);
          if (has_offsets) {
            const float inputs_of_group = input_scales[r][g] * static_cast<float>(totals[r][g]);
            sum = fused(offset, fill(inputs_of_group), sum);
          }
          if constexpr (kIsNear) {
            near[i] = sum;
          } else {
            store(sums + r * kPanel + at, sum);
          }
        });
      });
    }
    if constexpr (kIsNear) {
      each<R * C>([&](auto i) VN_NOW { store(place(i), near[i]); });
    }
  }
}

// Whether matrices of a kind of codes may have spans: see find_span.
template <int Kind>
constexpr bool kHasSpans = kIsLow<Kind> ? Kind != VN_CODE_INT2 : Kind == VN_CODE_ODD4;

// What a span's whole sums, at its first group, add to those of a row.
VN_INLINE Vec add_span(Vec sum, Ints all, Vec factors, float input_scale) {
  return fused(to_floats(all), mul(factors, fill(input_scale)), sum);
}

// Adds groups begin .. end - 1, whole spans, to sums: rows of kPanel.
template <int R, typename Source>
VN_APART void dot_span_tile(const ByteInputs& x, int64_t row, const PanelView& panel,
                            const Source& source, const WholeScales& whole, int64_t span,
                            int64_t begin, int64_t end, float* sums) {
  constexpr int C = kSpanTileVecs<R>, Kind = Source::kKind;
  const int64_t group_units = panel.m.group / kUnitCodes<Kind>;
  const int64_t units = source.units();
  const int8_t* inputs[R];
  const int32_t* totals[R];
  each<R>([&](auto r) VN_NOW {
    inputs[r] = x.codes + (row + r) * x.stride;
    totals[r] = x.sums + (row + r) * x.groups;
  });
  for (int first = 0; first < kPanelVecs; first += C) {
    for (int64_t at = begin; at < end; at += span) {
      const int64_t stop = std::min(end, at + span);
      Ints all[R * C], shifts[R * C];
      each<R * C>([&](auto i) VN_NOW { all[i] = shifts[i] = fill_ints(0); });
      for (int64_t g = at; g < stop; ++g) {
        Ints chains[R * C];
        dot_units<Kind, R, C>(
            source, inputs, g * group_units, std::min(units, (g + 1) * group_units), first,
            [&](auto i) VN_NOW { return fill_ints(-source.lift() * totals[i / C][g]); }, chains);
        each<R * C>([&](auto i) VN_NOW {
          const Ints scale = load_ints(whole.scales(g) + (first + i % C) * kLanes);
          all[i] = add_scaled(all[i], chains[i], scale);
        });
      }
      if (panel.m.offsets != nullptr) {
        for (int64_t g = at; g < stop; ++g) {
          each<R * C>([&](auto i) VN_NOW {
            const Ints offset = load_ints(whole.offsets(g) + (first + i % C) * kLanes);
            shifts[i] = add_scaled(shifts[i], offset, fill_ints(totals[i / C][g]));
          });
        }
      }
      each<R * C>([&](auto i) VN_NOW {
        constexpr int r = i / C;
        const int64_t lane = (first + i % C) * kLanes;
        const float input_scale = x.scales[(row + r) * x.groups + at];
        float* place = sums + r * kPanel + lane;
        Vec sum = at == 0 ? zero() : load(place);
        sum = add_span(sum, all[i], load(whole.factor(at) + lane), input_scale);
        if (panel.m.offsets != nullptr) {
          sum = add_span(sum, shifts[i], load(whole.offset_factor(at) + lane), input_scale);
        }
        store(place, sum);
      });
    }
  }
}

// Units of a group, in files, of codes that have spans.
template <int Kind>
constexpr int kGroupUnits = Kind == VN_CODE_ODD4 ? 4 : 1;

// Vectors of outputs that a row alone meets at a time: where a group has one unit, registers that hold its
// sums are worth more than one pass.
template <int Kind>
constexpr int kSpanAloneVecs = kByteVecs == 1 && kGroupUnits<Kind> == 1 ? (kUnitCodes<Kind> == 32 ? 1 : 2)
                                                                 : kPanelVecs;

// The product of a group of one row and some vectors of outputs: chains [kSumParts, C].
template <int Kind, int C, int kOdd, typename Source>
VN_INLINE void dot_group(const Source& source, const int8_t* inputs, int64_t at, int first,
                         Ints* chains) {
  constexpr int kParts = kUnitCodes<Kind> / 4, kUnits = kGroupUnits<Kind>, kAll = kUnits * kParts;
  constexpr int kSteps = kShortSteps<Kind>;
  // In the order in which codes lie in memory.
  Shorts shorts[C];
  each<kUnits>([&](auto unit) VN_NOW {
    each<C>([&](auto c) VN_NOW {
      const auto add = [&](auto part, const auto& codes) VN_NOW {
        constexpr int step = unit * kParts + part, i = part % kSumParts<Kind> * C + c;
        const int8_t* four = inputs + (at * kParts + step) * 4;
        if constexpr (kSteps == 0) {
          chains[i] = dot_bytes<Kind>(chains[i], codes, fill_fours(four));
        } else {
          shorts[c] = add_short<Kind>(step % kSteps == 0 ? no_shorts() : shorts[c], codes, four);
          if constexpr (step % kSteps == kSteps - 1 || step == kAll - 1) {
            chains[c] = add_shorts(chains[c], shorts[c]);
          }
        }
      };
      source.template each_part<kOdd, kSumParts<Kind>>(at + unit, first + c, add);
    });
  });
}

// The kind of scales that files give codes that have spans; those of two bits have offsets beside them.
template <int Kind>
constexpr int32_t kFiledScales = has_indexes(Kind)        ? VN_SCALE_IN_CODES
                                 : Kind == VN_CODE_UINT2 ? VN_SCALE_LOW4
                                                         : VN_SCALE_INT8;
template <int Kind>
constexpr bool kHasFiledOffsets = Kind == VN_CODE_UINT2;

// Whether all groups are whole and as files have them.
template <int Kind>
inline bool is_as_filed(const PanelView& panel, int64_t span) {
  constexpr int kGroup = kGroupUnits<Kind> * kUnitCodes<Kind>;
  const vn_panels& m = panel.m;
  if (m.group != kGroup || span % 2 != 0 || panel.cols % (span * kGroup) != 0) return false;
  if (m.scale_kind != kFiledScales<Kind>) return false;
  // Scales and offsets are nibbles of the same bytes.
  return kHasFiledOffsets<Kind> ? m.offsets == m.scales && m.offset_kind == VN_SCALE_HIGH4
                                : m.offsets == nullptr;
}

// Sixteen scales of a group, and sixteen times its offsets if it has any.
struct FiledScales {
  Ints scales, offsets;
};
template <int Kind>
VN_INLINE FiledScales read_filed(const PanelView& panel, int64_t g, int64_t lane) {
  const int64_t at = (panel.index * panel.groups + g) * kPanel + lane;
  const uint8_t* bytes = static_cast<const uint8_t*>(panel.m.scales) + at;
  if constexpr (kFiledScales<Kind> == VN_SCALE_IN_CODES) {
    const uint32_t* lines = static_cast<const uint32_t*>(panel.m.scales);
    return {to_ints(load_odd_numbers(lines + find_line(at, kUnitWords<Kind>))), fill_ints(0)};
  } else if constexpr (kFiledScales<Kind> == VN_SCALE_LOW4) {
    const Words both = load_bytes(bytes);
    return {to_ints(masked(both, 0x0f)), to_ints(masked(both, 0xf0))};
  } else if constexpr (kHasShortSums<Kind>) {
    return {to_ints(masked(load_signed_bytes(bytes), 0xffff)), fill_ints(0)};
  } else {
    return {to_ints(load_signed_bytes(bytes)), fill_ints(0)};
  }
}

// Processors that read a stream unasked follow one that is read line by line. Where a vector's words lie apart they
// fall behind, and are asked for the lines of two groups at a time: so many lines on, into the second-level
// cache; of two bits, whose lines are done with fastest, into the first.
constexpr int64_t kFarLines = 128, kNearLines = 72;
template <int Kind>
VN_INLINE void fetch_groups(const PanelView& panel, int64_t g) {
  // Its indexes take longer to look up than to read.
  if constexpr (Kind == VN_CODE_IQ2_XXS) return;
  constexpr bool kIsNear = Kind == VN_CODE_UINT2;
  constexpr int64_t kWords = count_words(Kind, 2 * kGroupUnits<Kind>);
  const int64_t first = count_words(Kind, g * kGroupUnits<Kind>);
  const uint32_t* next = panel.codes(first, 0) + (kIsNear ? kNearLines : kFarLines) * kLanes;
  each<kWords * kPanelVecs>([&](auto i) VN_NOW { __builtin_prefetch(next + i * kLanes, 0, kIsNear ? 3 : 2); });
}

// sums [64] of one row, of a panel as files have it: scales go from where they lie to their sums.
template <typename Source>
VN_APART void dot_filed_panel(const ByteInputs& x, int64_t row, const PanelView& panel,
                              const Source& stored, int64_t span, float* sums) {
  constexpr int Kind = Source::kKind, C = kSpanAloneVecs<Kind>, P = kSumParts<Kind>;
  // A copy: what indexes are looked up in then stays in registers.
  const Source source = stored;
  const int8_t* inputs = x.codes + row * x.stride;
  const int32_t* totals = x.sums + row * x.groups;
  for (int64_t at = 0; at < panel.groups; at += span) {
    panel.fetch_next(panel.m.scales, panel.m.scale_kind, at, span);
    const float input_scale = x.scales[row * x.groups + at];
    const int64_t factor_at = (panel.index * panel.factors + at / panel.m.factor_groups) * kPanel;
    for (int first = 0; first < kPanelVecs; first += C) {
      Ints all[P * C], shifts[C];
      each<P * C>([&](auto i) VN_NOW { all[i] = fill_ints(0); });
      each<C>([&](auto c) VN_NOW { shifts[c] = fill_ints(0); });
      for (int64_t g = at; g < at + span; g += 2) {
        if constexpr (Source::kFetch == kFetchNone) fetch_groups<Kind>(panel, g);
        each<2>([&](auto odd) VN_NOW {
          const int32_t total = totals[g + odd];
          Ints chains[P * C];
          each<P * C>([&](auto i) VN_NOW {
            chains[i] = fill_ints(i < C ? -source.lift() * total : 0);
          });
          dot_group<Kind, C, odd>(source, inputs, (g + odd) * kGroupUnits<Kind>, first, chains);
          each<C>([&](auto c) VN_NOW {
            const FiledScales own = read_filed<Kind>(panel, g + odd, (first + c) * kLanes);
            each<P>([&](auto p) VN_NOW {
              Ints& sum = all[p * C + c];
              if constexpr (kHasShortSums<Kind>) {
                sum = add_short_scaled(sum, chains[p * C + c], own.scales);
              } else {
                sum = add_scaled(sum, chains[p * C + c], own.scales);
              }
            });
            if constexpr (kHasFiledOffsets<Kind>) {
              shifts[c] = add_short_scaled(shifts[c], fill_ints(total), own.offsets);
            }
          });
        });
      }
      each<C>([&](auto c) VN_NOW {
        const int lane = (first + c) * kLanes;
        const Vec halves = load_half(panel.m.scale_factors + factor_at + lane);
        const Vec factors = mul(halves, fill(panel.m.scale_step));
        const Ints whole = P > 1 ? add_shifted<2>(all[c], all[P > 1 ? C + c : 0]) : all[c];
        Vec own = add_span(at == 0 ? zero() : load(sums + lane), whole, factors, input_scale);
        if constexpr (kHasFiledOffsets<Kind>) {
          const Ints shift = add_shifted<4>(fill_ints(0), shifts[c]);
          own = add_span(own, shift, load_half(panel.m.offset_factors + factor_at + lane), input_scale);
        }
        store(sums + lane, own);
      });
    }
  }
}

#if defined(__AVX512VNNI__)
// A line of sixteen words. Where it stands: GCC moves reads to where they are used, and memory is read fastest
// line by line.
VN_INLINE Words load_line(const uint32_t* p) {
  Words line;
  asm volatile("vmovdqu64 %1, %0" : "=v"(line.v) : "m"(*reinterpret_cast<const char(*)[64]>(p)));
  return line;
}

// Groups of GGUF's blocks as they are met: scales are widened there, so that codes come from memory without a pause.
// Scales, and offsets if there are any, are bytes, of which those of a block have a factor (Q5_K, Q6_K), or halves.
template <int Kind, int kGroup, int kNumbers, bool kOffsets>
struct FiledBlocks {
  static constexpr int kKind = Kind, kUnits = kGroup / kUnitCodes<Kind>;
  static constexpr bool kHasOffsets = kOffsets, kHasFactors = kNumbers == VN_SCALE_INT8;
  // Groups whose halves are asked for together.
  static constexpr int64_t kAhead = 8;
  const PanelView& panel;
  Vec factors[kHasFactors ? kPanelVecs : 1], offset_factors[kHasFactors && kOffsets ? kPanelVecs : 1];

  static bool fit(const PanelView& panel) {
    const vn_panels& m = panel.m;
    const auto is_own = [](int32_t kind, const uint16_t* factors) {
      return kind == kNumbers && (factors != nullptr) == kHasFactors;
    };
    if (m.group != kGroup || panel.cols % kGroup != 0 || (m.offsets != nullptr) != kOffsets) return false;
    return is_own(m.scale_kind, m.scale_factors) && (!kOffsets || is_own(m.offset_kind, m.offset_factors));
  }
  VN_INLINE void begin(int64_t g) {
    const vn_panels& m = panel.m;
    const int64_t ahead = kHasFactors ? m.factor_groups : kAhead;
    if (g % ahead != 0) return;
    panel.fetch_next(m.scales, kNumbers, g, ahead);
    if constexpr (kOffsets) panel.fetch_next(m.offsets, kNumbers, g, ahead);
    if constexpr (kHasFactors) {
      const int64_t at = (panel.index * panel.factors + g / ahead) * kPanel;
      each<kPanelVecs>([&](auto c) VN_NOW {
        factors[c] = load_half(m.scale_factors + at + c * kLanes);
        if constexpr (kOffsets) offset_factors[c] = load_half(m.offset_factors + at + c * kLanes);
      });
    }
  }
  template <int C>
  VN_INLINE Vec scale(int64_t g) const {
    const Vec own = mul(read<C>(panel.m.scales, g), fill(panel.m.scale_step));
    if constexpr (kHasFactors) return mul(own, factors[C]);
    return own;
  }
  template <int C>
  VN_INLINE Vec offset(int64_t g) const {
    const Vec own = read<C>(panel.m.offsets, g);
    if constexpr (kHasFactors) return mul(own, offset_factors[C]);
    return own;
  }

 private:
  template <int C>
  VN_INLINE Vec read(const void* values, int64_t g) const {
    const int64_t at = (panel.index * panel.groups + g) * kPanel + C * kLanes;
    if constexpr (kHasFactors) return load_int8(static_cast<const uint8_t*>(values) + at);
    return load_half(static_cast<const uint16_t*>(values) + at);
  }
};

// dot_byte_tile of one row over such groups.
template <typename Blocks, CodeFetch kAsks>
VN_APART void dot_blocks(const ByteInputs& x, int64_t row, const PanelView& panel, float* sums) {
  constexpr int Kind = Blocks::kKind, C = kPanelVecs, kWords = kUnitWords<Kind>;
  const int8_t* four = x.codes + row * x.stride;
  const float* input_scales = x.scales + row * x.groups;
  const int32_t* totals = x.sums + row * x.groups;
  const uint32_t* codes = panel.codes(0, 0);
  Blocks blocks = {panel};
  Vec own[C];
  each<C>([&](auto c) VN_NOW { own[c] = zero(); });
  for (int64_t g = 0; g < panel.groups; ++g) {
    blocks.begin(g);
    Ints chains[C];
    each<C>([&](auto c) VN_NOW { chains[c] = fill_ints(-kLift<Kind> * totals[g]); });
    each<Blocks::kUnits>([&](auto) VN_NOW {
      Words lines[kWords * C];
      each<kWords * C>([&](auto i) VN_NOW {
        if constexpr (kAsks == kFetchNext) __builtin_prefetch(codes + i * kLanes + kNextWords, 0, 3);
        lines[i] = load_line(codes + i * kLanes);
      });
      each<C>([&](auto c) VN_NOW {
        Unit<Kind> unit;
        each<kWords>([&](auto w) VN_NOW { unit.words[w] = lines[w * C + c]; });
        each<kUnitCodes<Kind> / 4>([&](auto part) VN_NOW {
          chains[c] = dot_bytes<Kind>(chains[c], byte_codes<Kind, part>(unit), fill_fours(four + 4 * part));
        });
      });
      codes += kWords * kPanel;
      four += kUnitCodes<Kind>;
    });
    each<C>([&](auto c) VN_NOW {
      const Vec step = mul(blocks.template scale<c>(g), fill(input_scales[g]));
      own[c] = fused(to_floats(chains[c]), step, own[c]);
      if constexpr (Blocks::kHasOffsets) {
        const float inputs_of_group = input_scales[g] * static_cast<float>(totals[g]);
        own[c] = fused(blocks.template offset<c>(g), fill(inputs_of_group), own[c]);
      }
    });
  }
  each<C>([&](auto c) VN_NOW { store(sums + c * kLanes, own[c]); });
}

template <typename Blocks>
inline bool try_blocks(const ByteInputs& x, int64_t row, const PanelView& panel, float* sums) {
  if (!Blocks::fit(panel)) return false;
  (x.units.fetches_alone ? dot_blocks<Blocks, kFetchNone> : dot_blocks<Blocks, kFetchNext>)(x, row, panel, sums);
  return true;
}

// Whether a row met a panel so: of Q6_K, Q5_K, Q5_0, Q5_1 and Q4_1. Q4_K, and codes of few steps without offsets,
// gain nothing.
template <int Kind>
inline bool dot_as_blocks(const ByteInputs& x, int64_t row, const PanelView& panel, float* sums) {
  if constexpr (Kind == VN_CODE_INT6) {
    return try_blocks<FiledBlocks<Kind, 16, VN_SCALE_INT8, false>>(x, row, panel, sums) ||
           try_blocks<FiledBlocks<Kind, 32, VN_SCALE_INT8, true>>(x, row, panel, sums) ||
           try_blocks<FiledBlocks<Kind, 32, VN_SCALE_F16, false>>(x, row, panel, sums) ||
           try_blocks<FiledBlocks<Kind, 32, VN_SCALE_F16, true>>(x, row, panel, sums);
  } else if constexpr (Kind == VN_CODE_UINT4) {
    return try_blocks<FiledBlocks<Kind, 32, VN_SCALE_F16, true>>(x, row, panel, sums);
  }
  return false;
}
#endif

// Rows of which each meets codes by itself, faster than together: bytes of two bits are made in few steps.
template <int Kind>
constexpr int64_t kAloneRows = kByteVecs == 1 && Kind == VN_CODE_UINT2 ? 2 : 1;

// One row: memory is the limit.
template <int Kind, typename Body>
VN_INLINE void run_alone(const ByteInputs& x, const PanelView& panel, int64_t at, Body&& run_tile) {
  const std::integral_constant<int, 1> one;
  if (kMayFetchAlone && x.units.fetches_alone) {
    run_tile(one, at, StoredBytes<Kind, kMayFetchAlone ? kFetchNone : kFetchNext>{panel});
  } else {
    run_tile(one, at, StoredBytes<Kind, kFetchNext>{panel});
  }
}

// The scales of either form, and the tiles over them.
template <bool kSpans>
struct PanelScales;
template <>
struct PanelScales<false> {
  WidenedScales widened;

  void read(const PanelView& panel, int64_t begin, int64_t end) { widened.widen(panel, begin, end); }
  template <int R, typename Source>
  void dot(const ByteInputs& x, int64_t row, const PanelView& panel, const Source& source, int64_t,
           int64_t begin, int64_t end, float* sums) const {
    dot_byte_tile<R>(x, row, panel, source, widened, begin, end, sums);
  }
};
template <>
struct PanelScales<true> {
  WholeScales whole;

  void read(const PanelView& panel, int64_t begin, int64_t end) { whole.read(panel, begin, end); }
  template <int R, typename Source>
  void dot(const ByteInputs& x, int64_t row, const PanelView& panel, const Source& source,
           int64_t span, int64_t begin, int64_t end, float* sums) const {
    dot_span_tile<R>(x, row, panel, source, whole, span, begin, end, sums);
  }
};

// Rounded rows from `row` on . all outputs of a panel, of which so many groups are a span.
template <int Kind, bool kSpans>
inline void dot_byte_panel_of(const ByteInputs& x, int64_t row, int64_t rows,
                              const PanelView& panel, const PanelPart& part, int64_t span) {
  using Decoded = ByteCodes<kind_of_bytes(Kind)>;
  thread_local PanelScales<kSpans> scales;
  thread_local std::vector<Decoded, CacheLines<Decoded>> codes;
  thread_local Floats sums;
  sums.resize(rows * kPanel);
  const int64_t group_units = panel.m.group / kUnitCodes<Kind>;
  const int64_t step = std::max<int64_t>(1, kChain / panel.m.group / span) * span;
  // Where tiles are many, or codes take many steps; else where a group's bytes stay in the first-level
  // cache.
  const bool decodes = kIsLow<Kind> ? kDecodesAll || rows > kAloneRows<Kind>
                                    : kUnitCodes<Kind> > 4 && rows > kByteRows && panel.m.group <= kChain;
  if constexpr (kSpans && !kDecodesAll) {
    if (!decodes && (kIsLow<Kind> || rows == 1) && is_as_filed<Kind>(panel, span)) {
      for (int64_t r = 0; r < rows; ++r) {
        run_alone<Kind>(x, panel, r, [&](auto, int64_t, const auto& source) VN_NOW {
          dot_filed_panel(x, row + r, panel, source, span, sums.data());
        });
        std::memcpy(part.out + r * part.stride, sums.data() + part.start, sizeof(float) * part.count);
      }
      return;
    }
  }
#if defined(__AVX512VNNI__)
  if (rows == 1 && dot_as_blocks<Kind>(x, row, panel, sums.data())) {
    std::memcpy(part.out, sums.data() + part.start, sizeof(float) * part.count);
    return;
  }
#endif
  if (decodes) codes.resize(std::max<int64_t>(kChain, step * panel.m.group) / 4 * kPanelVecs);
  for (int64_t begin = 0; begin < panel.groups; begin += step) {
    const int64_t end = std::min(panel.groups, begin + step);
    scales.read(panel, begin, end);
    const auto run_tile = [&](auto height, int64_t at, const auto& source) VN_NOW {
      float* own = sums.data() + at * kPanel;
      scales.template dot<height>(x, row + at, panel, source, span, begin, end, own);
      if (end < panel.groups) return;
      // Sums lie near one another until they are whole: rows of the output share places in caches.
      for (int r = 0; r < height; ++r) {
        std::memcpy(part.out + (at + r) * part.stride, own + r * kPanel + part.start,
                    sizeof(float) * part.count);
      }
    };
    if (decodes) {
      decode_bytes<Kind>(panel, begin * group_units, std::min(panel.units, end * group_units),
                         codes.data());
      constexpr int kOwn = kind_of_bytes(Kind);
      const int64_t first = begin * panel.m.group / kUnitCodes<kOwn>;
      const int64_t units = panel.units * (kUnitCodes<Kind> / kUnitCodes<kOwn>);
      const DecodedBytes<kOwn> source = {codes.data(), first, kLift<Kind>, units};
      each_tile<kByteRows>(rows, [&](auto height, int64_t at) { run_tile(height, at, source); });
    } else if constexpr (kIsLow<Kind>) {
      if constexpr (!kDecodesAll) {
        for (int64_t r = 0; r < rows; ++r) run_alone<Kind>(x, panel, r, run_tile);
      }
    } else if (rows == 1) {
      run_alone<Kind>(x, panel, 0, run_tile);
    } else {
      const StoredBytes<Kind, kFetchLater> source = {panel};
      each_tile<kByteRows>(rows, [&](auto height, int64_t at) { run_tile(height, at, source); });
    }
  }
}

// Calls body with the kind of codes, a constant.
template <typename Body>
inline void with_byte_kind(int32_t kind, Body&& body) {
  using std::integral_constant;
  switch (kind) {
    case VN_CODE_INT4:
      return body(integral_constant<int, VN_CODE_INT4>{});
    case VN_CODE_UINT4:
      return body(integral_constant<int, VN_CODE_UINT4>{});
    case VN_CODE_IQ4:
      return body(integral_constant<int, VN_CODE_IQ4>{});
    case VN_CODE_E2M1:
      return body(integral_constant<int, VN_CODE_E2M1>{});
    case VN_CODE_INT6:
      return body(integral_constant<int, VN_CODE_INT6>{});
    case VN_CODE_ODD4:
      return body(integral_constant<int, VN_CODE_ODD4>{});
    case VN_CODE_UINT2:
      return body(integral_constant<int, VN_CODE_UINT2>{});
    case VN_CODE_INT2:
      return body(integral_constant<int, VN_CODE_INT2>{});
    case VN_CODE_INT3:
      return body(integral_constant<int, VN_CODE_INT3>{});
    case VN_CODE_IQ1:
      return body(integral_constant<int, VN_CODE_IQ1>{});
    case VN_CODE_IQ2:
      return body(integral_constant<int, VN_CODE_IQ2>{});
    case VN_CODE_IQ2_XXS:
      return body(integral_constant<int, VN_CODE_IQ2_XXS>{});
    case VN_CODE_IQ3_XXS:
      return body(integral_constant<int, VN_CODE_IQ3_XXS>{});
    default:
      return body(integral_constant<int, VN_CODE_INT8>{});
  }
}

inline void dot_byte_panel(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                           const PanelPart& part) {
  const PanelView panel(m, part.index);
  const int64_t span = find_span(panel.m);
  with_byte_kind(panel.m.code_kind, [&](auto kind) {
    dot_byte_panel_of<kind, kHasSpans<kind>>(x, row, rows, panel, part, std::max<int64_t>(1, span));
  });
}

}  // namespace VN_BUILD
}  // namespace vn
