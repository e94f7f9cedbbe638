// Sixteen floats at once, in the widest registers of the build. All kernels are written over this
// type; the AVX-512 and AVX2 builds give the same bits, lane by lane.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "vllm_native.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vn {
namespace VN_BUILD {

constexpr int kLanes = 16;

// Arrays of vectors stay in registers only where every index is a constant of one function.
#define VN_NOW __attribute__((always_inline))
#define VN_INLINE inline VN_NOW
// A function of its own: what a compiler inlines unasked moves with how much else a file holds.
#define VN_APART __attribute__((noinline))

template <typename Body, int... I>
VN_INLINE void call_each(Body&& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}

// Calls body(i) for i = 0 .. N - 1, each i a constant.
template <int N, typename Body>
VN_INLINE void each(Body&& body) {
  call_each(body, std::make_integer_sequence<int, N>{});
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

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// bitsandbytes' "normal float" of four bits: quantiles of a normal distribution, of which the largest
// is 1.
constexpr float kNf4Values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
    0.7229568362236023f, 1.0f};

// The value of a four-bit code: minus zero (code 8) is zero.
inline float widen_e2m1(int code) {
  static constexpr float kValues[16] = {0.0f, 0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return kValues[code];
}

// 2^(code - 127), the lowest subnormal; the checkpoint's loader has refused 255.
inline float widen_e8m0(uint8_t code) {
  const uint32_t bits = code == 0 ? 0x00400000u : uint32_t{code} << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

// | sign | exponent 4, bias 7 | mantissa 3 |; the codes of NaN were refused at loading.
inline float widen_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude =
      exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

#if defined(__AVX2__)
// Sixteen codes as halves, 2^8 too small: the exponents' biases differ by that.
inline __m256i e4m3_as_half(const uint8_t* p) {
  const __m256i codes =
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i signs = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x7f)), 7);
  return _mm256_or_si256(signs, rest);
}

// Eight bytes as sixteen, the low nibble of each first.
inline __m128i split_nibbles(const uint8_t* p) {
  const __m128i wide =
      _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), _mm_set1_epi8(15));
}
#endif

#if defined(__AVX512F__)

// Rows and vectors of a tile of widened panels; rows that are decoded in registers, and the vectors
// of a tile of one.
constexpr int kPanelTileRows = 6, kPanelTileVecs = 4, kFewPanelRows = 4, kFewVecs = 4;
// Products of rounded inputs: sums of two chains that stay in registers, and rows whose tiles take
// whole panels.
constexpr int kRoundedSums = 24, kFewRoundedRows = 6;
// Rows and vectors of a tile of mixed values.
constexpr int kMixRows = 6, kMixVecs = 4;
// Rows of a tile of scores, of two vectors of keys.
constexpr int kScoreRows = 6;

// Rows of a tile of products where there are many inputs; the most where all are one tile; and the
// sums of a tile, which stay in registers.
constexpr int kTileRows = 6, kMostRows = 8, kTileSums = 24;

struct Vec {
  __m512 v;
};
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec fill(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load_some(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p)};
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store_some(float* p, Vec a, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), a.v);
}
inline Vec load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
// The even (0) or odd (1) values of sixteen pairs.
template <int Half>
VN_INLINE Vec bf16_half(const uint32_t* p) {
  const __m512i pairs = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(Half == 0 ? _mm512_slli_epi32(pairs, 16)
                                        : _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))};
}
inline Vec load_int8(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
}
inline Vec load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// To the nearest halves, ties to even; beyond the largest, infinity.
inline void store_half(uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Sixteen words of codes.
struct Words {
  __m512i v;
};
inline Words load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
// Whole numbers of kBits at bit `At` of words, less kLift: they lie in the mantissa of a float that is
// so much higher. Bits of kTop in them are turned over first.
template <int kBits, int At, int kTop, int kLift>
VN_INLINE __m512 mantissa_bits(__m512i w) {
  constexpr int kShift = At + kBits <= 23 ? 0 : kBits == 8 ? 16 : 8, kPlace = At - kShift;
  const __m512i moved = kShift == 0 ? w : _mm512_srli_epi32(w, kShift);
  const __m512i own = _mm512_set1_epi32(((1 << kBits) - 1) << kPlace);
  const __m512i base = _mm512_set1_epi32((127 + 23 - kPlace) << 23 | kTop << kPlace);
  // (moved & own) ^ base
  const __m512i bits = _mm512_ternarylogic_epi32(moved, own, base, 0x6a);
  return _mm512_sub_ps(_mm512_castsi512_ps(bits),
                       _mm512_set1_ps(static_cast<float>(1 << (23 - kPlace)) + kLift));
}
// The values of codes of four bits.
template <int Kind>
VN_INLINE __m512 nibble_values() {
  if constexpr (Kind == VN_CODE_INT4) {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  } else if constexpr (Kind == VN_CODE_UINT4) {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  } else if constexpr (Kind == VN_CODE_IQ4) {
    return _mm512_setr_ps(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
  } else if constexpr (Kind == VN_CODE_ODD4) {
    return _mm512_setr_ps(-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15);
  } else if constexpr (Kind == VN_CODE_NF4) {
    return _mm512_loadu_ps(kNf4Values);
  } else {
    return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, 0.0f, -0.5f, -1.0f, -1.5f,
                          -2.0f, -3.0f, -4.0f, -6.0f);
  }
}
template <int Kind, int J>
VN_INLINE Vec code_of(Words w) {
  if constexpr (Kind == VN_CODE_INT6) {
    // As six_bits leaves them, 32 too high.
    return {mantissa_bits<6, 8 * J, 0, 32>(w.v)};
  } else if constexpr (Kind == VN_CODE_INT8) {
    return {mantissa_bits<8, 8 * J, 128, 128>(w.v)};
  } else if constexpr (Kind == VN_CODE_E4M3) {
    // Sign, exponent and mantissa where a float has them; its exponent's bias is 120 more.
    const __m512i bits = _mm512_srai_epi32(_mm512_slli_epi32(w.v, 24 - 8 * J), 4);
    const __m512i own = _mm512_and_si512(bits, _mm512_set1_epi32(int(0x87f00000u)));
    return {_mm512_mul_ps(_mm512_castsi512_ps(own), _mm512_set1_ps(0x1p120f))};
  } else {
    // A permutation reads four bits of a place, and no more.
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(w.v, 4 * J), nibble_values<Kind>())};
  }
}
// Codes of six bits, 32 too high: of a unit's part (the even, then the odd inputs of eight, twice) four
// to a word, as bytes.
template <int Part>
VN_INLINE Words six_bits(Words low, Words high) {
  const __m512i nibbles = Part % 2 == 0 ? low.v : _mm512_srli_epi32(low.v, 4);
  const __m512i pairs = Part < 2    ? _mm512_slli_epi32(high.v, 4 - 2 * Part)
                        : Part == 2 ? high.v
                                    : _mm512_srli_epi32(high.v, 2);
  // Of each byte four bits of one and the rest of the other, of which two count.
  const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), nibbles, pairs, 0xca);
  return {_mm512_and_si512(both, _mm512_set1_epi8(63))};
}
inline Vec load_e4m3(const uint8_t* p) {
  return {_mm512_mul_ps(_mm512_cvtph_ps(e4m3_as_half(p)), _mm512_set1_ps(256.0f))};
}
// Powers of two by their exponents, biased by 127; the lowest is subnormal.
inline Vec load_e8m0(const uint8_t* p) {
  const __m512i codes =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_castsi512_ps(
      _mm512_max_epu32(_mm512_slli_epi32(codes, 23), _mm512_set1_epi32(0x00400000)))};
}
// What sixteen e4m3 codes stand for, given what the eight mantissas do: those times powers of two.
inline Vec load_steps(const uint8_t* p, const float* steps) {
  const __m512i bits = _mm512_castps_si512(load_e4m3(p).v);
  const __m512 table = _mm512_castpd_ps(
      _mm512_broadcast_f64x4(_mm256_castps_pd(_mm256_loadu_ps(steps))));
  // A permutation reads four bits of a place: the table is there twice.
  const __m512 own = _mm512_permutexvar_ps(_mm512_srli_epi32(bits, 20), table);
  const __m512i power = _mm512_and_si512(bits, _mm512_set1_epi32(int(0xff800000u)));
  return {_mm512_mul_ps(own, _mm512_castsi512_ps(power))};
}
inline Vec load_e2m1(const uint8_t* p) {
  return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(split_nibbles(p)),
                                nibble_values<VN_CODE_E2M1>())};
}
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^a for whole a within the exponent's range.
inline Vec power_of_two(Vec a) {
  const __m512i n = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
}
inline float sum(Vec a) {
  const __m256 low = _mm512_castps512_ps256(a.v);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 eight = _mm256_add_ps(low, high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
// Sums of several vectors at once, each in the order of sum(): two vectors are folded into one at
// every level, so that a lane more is work and not idle.
inline __m512 fold_halves(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, a.v, b.v),
                       _mm512_shuffle_f32x4(a.v, b.v, 0x4E));
}
inline __m512 fold_quarters(__m512 a, __m512 b) {
  const __m512 others = _mm512_mask_blend_ps(0x0F0F, a, b);
  return _mm512_add_ps(_mm512_mask_blend_ps(0xF0F0, a, b),
                       _mm512_shuffle_f32x4(others, others, 0xB1));
}
inline __m512 fold_pairs(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, a, b), _mm512_shuffle_ps(a, b, 0x4E));
}
inline __m512 fold_neighbours(__m512 a, __m512 b) {
  const __m512 others = _mm512_mask_blend_ps(0x5555, a, b);
  return _mm512_add_ps(_mm512_mask_blend_ps(0xAAAA, a, b), _mm512_permute_ps(others, 0xB1));
}
// out[i] = sum of vector i.
VN_INLINE void sum_sixteen(const Vec* v, float* out) {
  const __m512 a = fold_pairs(fold_quarters(fold_halves(v[0], v[8]), fold_halves(v[4], v[12])),
                              fold_quarters(fold_halves(v[2], v[10]), fold_halves(v[6], v[14])));
  const __m512 b = fold_pairs(fold_quarters(fold_halves(v[1], v[9]), fold_halves(v[5], v[13])),
                              fold_quarters(fold_halves(v[3], v[11]), fold_halves(v[7], v[15])));
  _mm512_storeu_ps(out, fold_neighbours(a, b));
}
VN_INLINE void sum_eight(const Vec* v, float* out) {
  const __m512 a = fold_pairs(fold_quarters(fold_halves(v[0], v[4]), fold_halves(v[2], v[6])),
                              fold_quarters(fold_halves(v[1], v[5]), fold_halves(v[3], v[7])));
  const __m512 sums = _mm512_add_ps(a, _mm512_permute_ps(a, 0xB1));
  _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x5555, sums)));
}
VN_INLINE void sum_four(const Vec* v, float* out) {
  const __m512 a =
      fold_quarters(fold_halves(v[0], v[2]), fold_halves(v[1], v[3]));
  const __m512 pairs = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4E));
  const __m512 sums = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xB1));
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
}

#elif defined(__AVX2__)

constexpr int kPanelTileRows = 6, kPanelTileVecs = 1, kFewPanelRows = 4, kFewVecs = 4;
constexpr int kRoundedSums = 4, kFewRoundedRows = 1;
constexpr int kMixRows = 6, kMixVecs = 1, kScoreRows = 3;
constexpr int kTileRows = 2, kMostRows = 2, kTileSums = 4;

struct Vec {
  __m256 a, b;
};
inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load_some(const float* p, int count) {
  alignas(32) float lanes[kLanes] = {};
  std::memcpy(lanes, p, sizeof(float) * count);
  return load(lanes);
}
inline void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store_some(float* p, Vec x, int count) {
  alignas(32) float lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, sizeof(float) * count);
}
inline Vec load_bf16(const uint16_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves));
  const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
template <int Half>
VN_INLINE __m256 bf16_half_of(__m256i pairs) {
  return _mm256_castsi256_ps(Half == 0 ? _mm256_slli_epi32(pairs, 16)
                                       : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
template <int Half>
VN_INLINE Vec bf16_half(const uint32_t* p) {
  const __m256i* pairs = reinterpret_cast<const __m256i*>(p);
  return {bf16_half_of<Half>(_mm256_loadu_si256(pairs)),
          bf16_half_of<Half>(_mm256_loadu_si256(pairs + 1))};
}
inline Vec load_int8(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}
inline Vec load_half(const uint16_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
// To the nearest halves, ties to even; beyond the largest, infinity.
inline void store_half(uint16_t* p, Vec x) {
  __m128i* halves = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(halves, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
struct Words {
  __m256i a, b;
};
inline Words load_words(const uint32_t* p) {
  const __m256i* words = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
// Whole numbers of kBits at bit `At` of words, less kLift: they lie in the mantissa of a float that is
// so much higher. Bits of kTop in them are turned over first. Shifts and conversions have one or two
// units of a core, these steps have all.
template <int kBits, int At, int kTop, int kLift>
VN_INLINE __m256 mantissa_bits(__m256i w) {
  // The lowest place that needs no shift, or one that others share.
  constexpr int kShift = At + kBits <= 23 ? 0 : kBits == 4 ? 12 : kBits == 8 ? 16 : 8;
  constexpr int kPlace = At - kShift;
  constexpr float kHigher = static_cast<float>(1 << (23 - kPlace));
  const __m256i moved = kShift == 0 ? w : _mm256_srli_epi32(w, kShift);
  const __m256i own = _mm256_and_si256(moved, _mm256_set1_epi32(((1 << kBits) - 1) << kPlace));
  const __m256i base = _mm256_set1_epi32((127 + 23 - kPlace) << 23 | kTop << kPlace);
  return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_xor_si256(own, base)),
                       _mm256_set1_ps(kHigher + kLift));
}
template <int Kind, int J>
VN_INLINE __m256 code_of_half(__m256i w) {
  if constexpr (Kind == VN_CODE_INT8) {
    return mantissa_bits<8, 8 * J, 128, 128>(w);
  } else if constexpr (Kind == VN_CODE_E4M3) {
    // Sign, exponent and mantissa where a float has them; its exponent's bias is 120 more.
    const __m256i bits = _mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * J), 4);
    const __m256i own = _mm256_and_si256(bits, _mm256_set1_epi32(int(0x87f00000u)));
    return _mm256_mul_ps(_mm256_castsi256_ps(own), _mm256_set1_ps(0x1p120f));
  } else if constexpr (Kind == VN_CODE_INT6) {
    // As six_bits leaves them, 32 too high.
    return mantissa_bits<6, 8 * J, 0, 32>(w);
  } else if constexpr (Kind == VN_CODE_INT4) {
    return mantissa_bits<4, 4 * J, 8, 8>(w);
  } else if constexpr (Kind == VN_CODE_UINT4) {
    return mantissa_bits<4, 4 * J, 0, 0>(w);
  } else {
    // A permutation reads three bits of its index; the fourth, brought to the top, is the half.
    const __m256i low = _mm256_srli_epi32(w, 4 * J);
    const __m256 top = _mm256_castsi256_ps(_mm256_slli_epi32(w, 28 - 4 * J));
    if constexpr (Kind == VN_CODE_IQ4) {
      const __m256 first = _mm256_setr_ps(-127, -104, -83, -65, -49, -35, -22, -10);
      const __m256 second = _mm256_setr_ps(1, 13, 25, 38, 53, 69, 89, 113);
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, low),
                              _mm256_permutevar8x32_ps(second, low), top);
    } else if constexpr (Kind == VN_CODE_ODD4) {
      const __m256 first = _mm256_setr_ps(-15, -13, -11, -9, -7, -5, -3, -1);
      const __m256 second = _mm256_setr_ps(1, 3, 5, 7, 9, 11, 13, 15);
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, low),
                              _mm256_permutevar8x32_ps(second, low), top);
    } else if constexpr (Kind == VN_CODE_NF4) {
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(kNf4Values), low),
                              _mm256_permutevar8x32_ps(_mm256_loadu_ps(kNf4Values + 8), low), top);
    } else {
      const __m256 first = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
      const __m256 second = _mm256_setr_ps(0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, low),
                              _mm256_permutevar8x32_ps(second, low), top);
    }
  }
}
template <int Kind, int J>
VN_INLINE Vec code_of(Words w) {
  return {code_of_half<Kind, J>(w.a), code_of_half<Kind, J>(w.b)};
}
// Codes of six bits, 32 too high: of a unit's part (the even, then the odd inputs of eight, twice) four
// to a word, as bytes.
template <int Part>
VN_INLINE __m256i six_bits_of_half(__m256i low, __m256i high) {
  const __m256i nibbles = Part % 2 == 0 ? low : _mm256_srli_epi32(low, 4);
  const __m256i pairs = Part < 2    ? _mm256_slli_epi32(high, 4 - 2 * Part)
                        : Part == 2 ? high
                                    : _mm256_srli_epi32(high, 2);
  return _mm256_or_si256(_mm256_and_si256(nibbles, _mm256_set1_epi8(15)),
                         _mm256_and_si256(pairs, _mm256_set1_epi8(48)));
}
template <int Part>
VN_INLINE Words six_bits(Words low, Words high) {
  return {six_bits_of_half<Part>(low.a, high.a), six_bits_of_half<Part>(low.b, high.b)};
}
inline Vec load_e4m3(const uint8_t* p) {
  const __m256i halves = e4m3_as_half(p);
  const __m256 factor = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor)};
}
// Powers of two by their exponents, biased by 127; the lowest is subnormal.
inline __m256 powers_of(__m128i codes) {
  return _mm256_castsi256_ps(_mm256_max_epu32(
      _mm256_slli_epi32(_mm256_cvtepu8_epi32(codes), 23), _mm256_set1_epi32(0x00400000)));
}
inline Vec load_e8m0(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {powers_of(codes), powers_of(_mm_srli_si128(codes, 8))};
}
// What e4m3 codes stand for, given what the eight mantissas do: those times powers of two.
inline __m256 in_steps(__m256 values, __m256 table) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256 own = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(bits, 20));
  const __m256i power = _mm256_and_si256(bits, _mm256_set1_epi32(int(0xff800000u)));
  return _mm256_mul_ps(own, _mm256_castsi256_ps(power));
}
inline Vec load_steps(const uint8_t* p, const float* steps) {
  const Vec values = load_e4m3(p);
  const __m256 table = _mm256_loadu_ps(steps);
  return {in_steps(values.a, table), in_steps(values.b, table)};
}
inline __m256 e2m1_values(__m128i codes) {
  const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i wide = _mm256_cvtepu8_epi32(codes);
  const __m256i signs = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(8)), 28);
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, wide), _mm256_castsi256_ps(signs));
}
inline Vec load_e2m1(const uint8_t* p) {
  const __m128i codes = split_nibbles(p);
  return {e2m1_values(codes), e2m1_values(_mm_srli_si128(codes, 8))};
}
inline Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Vec min(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Vec fma(Vec x, Vec y, Vec z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline __m256 round_half(__m256 x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec round(Vec x) { return {round_half(x.a), round_half(x.b)}; }
inline __m256 power_of_two_half(__m256 x) {
  const __m256i n = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
inline Vec power_of_two(Vec x) { return {power_of_two_half(x.a), power_of_two_half(x.b)}; }
inline float sum(Vec x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

#else

constexpr int kPanelTileRows = 1, kPanelTileVecs = 1, kFewPanelRows = 1, kFewVecs = 1;
constexpr int kRoundedSums = 2, kFewRoundedRows = 0;
constexpr int kMixRows = 4, kMixVecs = 2, kScoreRows = 2;
constexpr int kTileRows = 1, kMostRows = 1, kTileSums = 2;

struct Vec {
  float v[kLanes];
};
#define VN_EACH_LANE(expression)                     \
  Vec result;                                        \
  for (int i = 0; i < kLanes; ++i) result.v[i] = (expression); \
  return result
inline Vec fill(float x) { VN_EACH_LANE(x); }
inline Vec zero() { return fill(0.0f); }
inline Vec load(const float* p) { VN_EACH_LANE(p[i]); }
inline Vec load_some(const float* p, int count) { VN_EACH_LANE(i < count ? p[i] : 0.0f); }
inline void store(float* p, const Vec& a) { std::memcpy(p, a.v, sizeof(a.v)); }
inline void store_some(float* p, const Vec& a, int count) {
  std::memcpy(p, a.v, sizeof(float) * count);
}
inline float widen(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline Vec load_bf16(const uint16_t* p) { VN_EACH_LANE(widen(p[i])); }
template <int Half>
inline Vec bf16_half(const uint32_t* p) {
  VN_EACH_LANE(widen(static_cast<uint16_t>(p[i] >> 16 * Half)));
}
// The values of IQ4 codes.
constexpr int kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
inline float widen_half(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float magnitude = exponent == 31 ? (mantissa == 0 ? INFINITY : NAN)
                          : exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}
inline Vec load_half(const uint16_t* p) { VN_EACH_LANE(widen_half(p[i])); }
// To the nearest half, ties to even; beyond the largest, infinity.
inline uint16_t narrow_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  // A half's steps below 2^-14 are 2^-24 all; above, so many bits of a float's are cut off.
  const int exponent = static_cast<int>(rest >> 23);
  const uint32_t mantissa = (rest & 0x7fffffu) | (exponent > 0 ? 0x800000u : 0u);
  const int cut = exponent >= 113 ? 13 : 126 - exponent;
  if (cut > 25) return static_cast<uint16_t>(sign);
  const uint32_t kept = mantissa >> cut, lost = mantissa & ((1u << cut) - 1), half = 1u << (cut - 1);
  const uint32_t steps = kept + (lost > half || (lost == half && (kept & 1u) != 0) ? 1 : 0);
  return static_cast<uint16_t>(sign | (steps + (exponent >= 113 ? (exponent - 113u) << 10 : 0)));
}
inline void store_half(uint16_t* p, const Vec& a) {
  for (int i = 0; i < kLanes; ++i) p[i] = narrow_half(a.v[i]);
}
struct Words {
  uint32_t v[kLanes];
};
inline Words load_words(const uint32_t* p) {
  Words words;
  std::memcpy(words.v, p, sizeof(words.v));
  return words;
}
template <int Kind, int J>
inline float widen_code(uint32_t word) {
  if constexpr (Kind == VN_CODE_INT8) {
    return static_cast<float>(static_cast<int8_t>(word >> 8 * J & 255));
  } else if constexpr (Kind == VN_CODE_E4M3) {
    return widen_e4m3(static_cast<uint8_t>(word >> 8 * J));
  } else if constexpr (Kind == VN_CODE_INT6) {
    // As six_bits leaves them, 32 too high.
    return static_cast<float>(static_cast<int>(word >> 8 * J & 255) - 32);
  } else {
    const int code = word >> 4 * J & 15;
    if constexpr (Kind == VN_CODE_INT4) return static_cast<float>(code < 8 ? code : code - 16);
    if constexpr (Kind == VN_CODE_UINT4) return static_cast<float>(code);
    if constexpr (Kind == VN_CODE_IQ4) return static_cast<float>(kIq4Values[code]);
    if constexpr (Kind == VN_CODE_ODD4) return static_cast<float>(2 * code - 15);
    if constexpr (Kind == VN_CODE_NF4) return kNf4Values[code];
    return widen_e2m1(code);
  }
}
template <int Kind, int J>
inline Vec code_of(const Words& w) {
  constexpr auto widen_one_code = widen_code<Kind, J>;
  VN_EACH_LANE(widen_one_code(w.v[i]));
}
// Codes of six bits, 32 too high: of a unit's part (the even, then the odd inputs of eight, twice) four
// to a word, as bytes.
template <int Part>
inline Words six_bits(const Words& low, const Words& high) {
  Words words;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t nibbles = low.v[i] >> Part % 2 * 4 & 0x0f0f0f0fu;
    words.v[i] = nibbles | (high.v[i] >> 2 * Part & 0x03030303u) << 4;
  }
  return words;
}
inline Vec load_int8(const uint8_t* p) { VN_EACH_LANE(static_cast<float>(static_cast<int8_t>(p[i]))); }
inline Vec load_e4m3(const uint8_t* p) { VN_EACH_LANE(widen_e4m3(p[i])); }
inline Vec load_e8m0(const uint8_t* p) { VN_EACH_LANE(widen_e8m0(p[i])); }
// What an e4m3 code stands for, given what the eight mantissas do: one of those times a power of two.
inline float widen_steps(uint8_t code, const float* steps) {
  const float value = widen_e4m3(code);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t power_bits = bits & 0xff800000u;
  float power;
  std::memcpy(&power, &power_bits, sizeof(power));
  return steps[bits >> 20 & 7] * power;
}
inline Vec load_steps(const uint8_t* p, const float* steps) {
  VN_EACH_LANE(widen_steps(p[i], steps));
}
inline Vec load_e2m1(const uint8_t* p) { VN_EACH_LANE(widen_e2m1(p[i / 2] >> i % 2 * 4 & 15)); }
inline Vec add(const Vec& a, const Vec& b) { VN_EACH_LANE(a.v[i] + b.v[i]); }
inline Vec sub(const Vec& a, const Vec& b) { VN_EACH_LANE(a.v[i] - b.v[i]); }
inline Vec mul(const Vec& a, const Vec& b) { VN_EACH_LANE(a.v[i] * b.v[i]); }
inline Vec div(const Vec& a, const Vec& b) { VN_EACH_LANE(a.v[i] / b.v[i]); }
inline Vec max(const Vec& a, const Vec& b) { VN_EACH_LANE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Vec min(const Vec& a, const Vec& b) { VN_EACH_LANE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
// Without a fused instruction the product is rounded: a call per lane would cost far more.
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  VN_EACH_LANE(a.v[i] * b.v[i] + c.v[i]);
}
inline Vec round(const Vec& a) { VN_EACH_LANE(std::nearbyint(a.v[i])); }
inline Vec power_of_two(const Vec& a) { VN_EACH_LANE(std::ldexp(1.0f, static_cast<int>(a.v[i]))); }
#undef VN_EACH_LANE
inline float sum(const Vec& a) {
  float part[kLanes];
  store(part, a);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  }
  return part[0];
}

#endif

#if !defined(__AVX512F__)
// out[i] = sum of vector i.
VN_INLINE void sum_four(const Vec* v, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
}
#if defined(__AVX2__)
// The halves of two registers of eight lanes, added up: | four of x | four of y |.
inline __m256 add_halves(Vec x, Vec y) {
  const __m256 a = _mm256_add_ps(x.a, x.b), b = _mm256_add_ps(y.a, y.b);
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
// As sum(), lane by lane, of eight vectors at once.
VN_INLINE void sum_eight(const Vec* v, float* out) {
  __m256 four[4], two[2];
  for (int i = 0; i < 4; ++i) four[i] = add_halves(v[i], v[i + 4]);
  for (int i = 0; i < 2; ++i) {
    const __m256 a = four[2 * i], b = four[2 * i + 1];
    two[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x88),
                                      _mm256_shuffle_ps(two[0], two[1], 0xdd)));
}
#else
VN_INLINE void sum_eight(const Vec* v, float* out) {
  sum_four(v, out);
  sum_four(v + 4, out + 4);
}
#endif
VN_INLINE void sum_sixteen(const Vec* v, float* out) {
  sum_eight(v, out);
  sum_eight(v + 8, out + 8);
}
#endif

// Values of sixteen bits, as caches hold them.
struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};
inline Vec load_values(const float* p) { return load(p); }
inline Vec load_values(const Half* p) { return load_half(&p->bits); }
inline Vec load_values(const Brain* p) { return load_bf16(&p->bits); }
// Codes, without their scale.
inline Vec load_values(const int8_t* p) { return load_int8(reinterpret_cast<const uint8_t*>(p)); }
inline float widen_value(float x) { return x; }
inline float widen_value(int8_t x) { return static_cast<float>(x); }
inline float widen_value(Brain x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
#if defined(__AVX2__)
inline float widen_value(Half x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }
#else
inline float widen_value(Half x) { return widen_half(x.bits); }
#endif

// out[i * stride + k] = rows[k][i] for i and k of 0 .. 7.
#if defined(__AVX2__)
// Four values of each of two rows.
VN_INLINE __m256 join_rows(const float* low, const float* high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}
VN_INLINE __m128i join_halves(const void* low, const void* high) {
  return _mm_unpacklo_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(low)),
                            _mm_loadl_epi64(static_cast<const __m128i*>(high)));
}
VN_INLINE __m256 join_rows(const Half* low, const Half* high) {
  return _mm256_cvtph_ps(join_halves(low, high));
}
VN_INLINE __m256 join_rows(const Brain* low, const Brain* high) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(join_halves(low, high)), 16));
}
template <typename T>
inline void transpose_eight(const T* const* rows, float* out, int64_t stride) {
  for (int half = 0; half < 8; half += 4) {
    __m256 r[4], pairs[4];
    for (int k = 0; k < 4; ++k) r[k] = join_rows(rows[k] + half, rows[k + 4] + half);
    pairs[0] = _mm256_unpacklo_ps(r[0], r[1]);
    pairs[1] = _mm256_unpackhi_ps(r[0], r[1]);
    pairs[2] = _mm256_unpacklo_ps(r[2], r[3]);
    pairs[3] = _mm256_unpackhi_ps(r[2], r[3]);
    float* own = out + half * stride;
    _mm256_storeu_ps(own, _mm256_shuffle_ps(pairs[0], pairs[2], 0x44));
    _mm256_storeu_ps(own + stride, _mm256_shuffle_ps(pairs[0], pairs[2], 0xee));
    _mm256_storeu_ps(own + 2 * stride, _mm256_shuffle_ps(pairs[1], pairs[3], 0x44));
    _mm256_storeu_ps(own + 3 * stride, _mm256_shuffle_ps(pairs[1], pairs[3], 0xee));
  }
}
// Bytes change places before they are widened.
inline void transpose_eight(const int8_t* const* rows, float* out, int64_t stride) {
  __m128i pairs[4], fours[4];
  for (int i = 0; i < 4; ++i) {
    const auto* own = reinterpret_cast<const __m128i*>(rows[2 * i]);
    const auto* next = reinterpret_cast<const __m128i*>(rows[2 * i + 1]);
    pairs[i] = _mm_unpacklo_epi8(_mm_loadl_epi64(own), _mm_loadl_epi64(next));
  }
  for (int i = 0; i < 2; ++i) {
    fours[i] = _mm_unpacklo_epi16(pairs[2 * i], pairs[2 * i + 1]);
    fours[i + 2] = _mm_unpackhi_epi16(pairs[2 * i], pairs[2 * i + 1]);
  }
  for (int i = 0; i < 4; i += 2) {
    const __m128i both[2] = {_mm_unpacklo_epi32(fours[i], fours[i + 1]),
                             _mm_unpackhi_epi32(fours[i], fours[i + 1])};
    for (int k = 0; k < 2; ++k) {
      float* own = out + (2 * i + 2 * k) * stride;
      _mm256_storeu_ps(own, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(both[k])));
      const __m128i high = _mm_srli_si128(both[k], 8);
      _mm256_storeu_ps(own + stride, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)));
    }
  }
}
#else
template <typename T>
inline void transpose_eight(const T* const* rows, float* out, int64_t stride) {
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 8; ++k) out[i * stride + k] = widen_value(rows[k][i]);
  }
}
#endif

// out[i] = sum of vector i, for any number of them.
template <int N>
VN_INLINE void sum_all(const Vec* v, float* out) {
  if constexpr (N >= 16) {
    sum_sixteen(v, out);
    sum_all<N - 16>(v + 16, out + 16);
  } else if constexpr (N >= 8) {
    sum_eight(v, out);
    sum_all<N - 8>(v + 8, out + 8);
  } else if constexpr (N >= 4) {
    sum_four(v, out);
    sum_all<N - 4>(v + 4, out + 4);
  } else if constexpr (N > 0) {
    *out = sum(*v);
    sum_all<N - 1>(v + 1, out + 1);
  }
}

// e^x to about one unit in the last place: 2^n times a polynomial over [-ln2 / 2, ln2 / 2], by
// combine(a, b, c) = a * b + c.
template <typename Combine>
VN_INLINE Vec exp_with(Vec x, Combine&& combine) {
  // Below, the result is not normal; softmax has nothing to lose there.
  x = max(min(x, fill(88.0f)), fill(-87.0f));
  const Vec n = round(mul(x, fill(1.44269504088896341f)));
  // ln 2 in two parts, the first exact in few bits.
  x = combine(n, fill(-0.693359375f), x);
  x = combine(n, fill(2.12194440e-4f), x);
  // Taylor's series to the seventh power: the rest is below 2^-27 of the value.
  Vec p = fill(1.0f / 5040);
  p = combine(p, x, fill(1.0f / 720));
  p = combine(p, x, fill(1.0f / 120));
  p = combine(p, x, fill(1.0f / 24));
  p = combine(p, x, fill(1.0f / 6));
  p = combine(p, x, fill(0.5f));
  p = combine(p, x, fill(1.0f));
  p = combine(p, x, fill(1.0f));
  return mul(p, power_of_two(n));
}

inline Vec exp(Vec x) {
  return exp_with(x, [](Vec a, Vec b, Vec c) VN_NOW { return fma(a, b, c); });
}

inline Vec sigmoid(Vec x) { return div(fill(1.0f), add(fill(1.0f), exp(sub(zero(), x)))); }

}  // namespace VN_BUILD
}  // namespace vn
