// Products for towers, of floats or of whole numbers of sixteen bits. Values fall into groups of 96:
//
//   inputs    [groups, rows, 96]   Exact: floats; Whole: multiples of the group's scale
//   words     [panels, words of all inputs, 16]   a word is an input of an output, or two
//   y = sum over groups, in their order, of a group's chain; or of its sum * weight scale * input scale
//
// A scale is so small that the codes of a group, as a vector, are as long as 32 bits allow: no sum of
// products exceeds the product of two lengths, and sums are exact in any order. So values are four to
// five bits finer than those of bf16, and an instruction has twice as many products as with floats.
// Rows, tiles and threads choose only which sums run together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "aligned.h"
#include "vec.h"
#include "towers.h"

namespace vn {
namespace VN_BUILD {

constexpr int64_t kPairGroup = VN_PAIR_GROUP;
// The length of a group's codes before they are rounded, and the largest of them.
constexpr float kLength = 46330.0f, kLargest = 32760.0f;
constexpr int64_t kRounded = 46335;  // no longer once they are rounded, by half a step each
static_assert(kRounded * kRounded < (1LL << 31), "a group's sum fits");
// Rows of a tile, whose sums stay in registers, and panels side by side.
constexpr int kPairRows = 6;

// ---- sums of pairs --------------------------------------------------------------------------

VN_INLINE int32_t pair_of(const int16_t* inputs) {
  int32_t pair;
  std::memcpy(&pair, inputs, sizeof(pair));
  return pair;
}

// Vectors, not their intrinsic types: GCC 12 keeps arrays of the latter in memory. Steps are written
// out: it would load the inputs of all rows first, for which no register is left.
#if defined(__AVX512F__)
constexpr int kPairPanels = 2;
typedef int32_t Int16s __attribute__((vector_size(64)));
struct PairSums {
  Int16s v;
};
VN_INLINE PairSums no_pairs() { return {Int16s{}}; }
VN_INLINE PairSums load_pairs(const int32_t* p) {
  return {reinterpret_cast<Int16s>(_mm512_loadu_si512(p))};
}
// Adds the products of a pair of inputs with those of a panel.
VN_INLINE PairSums add_pair(PairSums sum, const int16_t* x, PairSums panel) {
  Int16s made;
  const __m512i input = _mm512_set1_epi32(pair_of(x));
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
      : "+v"(sum.v), "=&v"(made)
      : "v"(input), "v"(panel.v));
  return sum;
}
VN_INLINE Vec to_floats(PairSums a) {
  return {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a.v))};
}
// Whole numbers within sixteen bits.
VN_INLINE void store_codes(int16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
VN_INLINE float highest(Vec a) { return _mm512_reduce_max_ps(a.v); }
// p * 2^n for whole n, of which `moved` is n + kWhole, while the product is normal.
VN_INLINE Vec times_power(Vec p, Vec moved) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(
      _mm512_castps_si512(p.v), _mm512_slli_epi32(_mm512_castps_si512(moved.v), 23)))};
}
#elif defined(__AVX2__)
constexpr int kPairPanels = 1;
typedef int32_t Int8s __attribute__((vector_size(32)));
struct PairSums {
  Int8s a, b;
};
VN_INLINE PairSums no_pairs() { return {Int8s{}, Int8s{}}; }
VN_INLINE PairSums load_pairs(const int32_t* p) {
  const __m256i* own = reinterpret_cast<const __m256i*>(p);
  return {reinterpret_cast<Int8s>(_mm256_loadu_si256(own)),
          reinterpret_cast<Int8s>(_mm256_loadu_si256(own + 1))};
}
VN_INLINE PairSums add_pair(PairSums sum, const int16_t* x, PairSums panel) {
  Int8s input, made;
  asm("vpbroadcastd %4, %2\n\t"
      "vpmaddwd %5, %2, %3\n\tvpaddd %3, %0, %0\n\t"
      "vpmaddwd %6, %2, %2\n\tvpaddd %2, %1, %1"
      : "+x"(sum.a), "+x"(sum.b), "=&x"(input), "=&x"(made)
      : "m"(*reinterpret_cast<const int32_t*>(x)), "x"(panel.a), "x"(panel.b));
  return sum;
}
VN_INLINE Vec to_floats(PairSums s) {
  return {_mm256_cvtepi32_ps(reinterpret_cast<__m256i>(s.a)),
          _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(s.b))};
}
VN_INLINE void store_codes(int16_t* p, Vec x) {
  const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
VN_INLINE float highest(Vec x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
VN_INLINE __m256 times_power_half(__m256 p, __m256 moved) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p),
                                              _mm256_slli_epi32(_mm256_castps_si256(moved), 23)));
}
VN_INLINE Vec times_power(Vec p, Vec moved) {
  return {times_power_half(p.a, moved.a), times_power_half(p.b, moved.b)};
}
#else
constexpr int kPairPanels = 1;
struct PairSums {
  int32_t v[kLanes];
};
inline PairSums no_pairs() { return {}; }
inline PairSums load_pairs(const int32_t* p) {
  PairSums result;
  std::memcpy(result.v, p, sizeof(result.v));
  return result;
}
inline PairSums add_pair(PairSums sum, const int16_t* x, const PairSums& panel) {
  for (int i = 0; i < kLanes; ++i) {
    sum.v[i] += x[0] * static_cast<int16_t>(panel.v[i]) + x[1] * (panel.v[i] >> 16);
  }
  return sum;
}
inline Vec to_floats(const PairSums& a) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(a.v[i]);
  return load(lanes);
}
inline void store_codes(int16_t* p, const Vec& a) {
  float lanes[kLanes];
  store(lanes, round(a));
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(lanes[i]);
}
inline float highest(const Vec& a) { return *std::max_element(a.v, a.v + kLanes); }
inline Vec times_power(const Vec& p, const Vec& moved) {
  Vec result;
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits, power;
    std::memcpy(&bits, p.v + i, sizeof(bits));
    std::memcpy(&power, moved.v + i, sizeof(power));
    bits += power << 23;
    std::memcpy(result.v + i, &bits, sizeof(bits));
  }
  return result;
}
#endif

// Added to a small number it leaves the nearest whole one in the last bits.
constexpr float kWhole = 12582912.0f;

// 2^x over [-1/2, 1/2].
constexpr float kPower[5] = {0.99999926f, 0.69312181f, 0.24024745f, 0.05591786f, 0.0095701f};

// 2^x for x of -110 to 0, to 3e-6 of it.
VN_INLINE Vec power_of(Vec x) {
  const Vec moved = add(x, fill(kWhole));
  x = sub(x, sub(moved, fill(kWhole)));
  Vec p = fill(kPower[4]);
  for (int i = 3; i >= 0; --i) p = fma(p, x, fill(kPower[i]));
  return times_power(p, moved);
}

// ---- numbers --------------------------------------------------------------------------------

// What inputs and words are made of.
struct Whole {
  using Input = int16_t;
  using Word = int32_t;
  static constexpr int64_t kInputs = 2;  // of a word
  static Word word_of(const Input* inputs) { return pair_of(inputs); }
};
struct Exact {
  using Input = float;
  using Word = float;
  static constexpr int64_t kInputs = 1;
  static Word word_of(const Input* inputs) { return *inputs; }
};

// What a group's values are multiples of, and by what they become so. Values next to nothing are
// zero; where one is no number, neither is the scale.
struct GroupScale {
  float scale, inverse;

  GroupScale(float peak, float squares) {
    constexpr float kLeast = 1e-15f;
    const bool is_finite = std::isfinite(squares), has_codes = is_finite && peak >= kLeast;
    inverse = has_codes ? std::min(kLength / std::sqrt(squares), kLargest / peak) : 0.0f;
    scale = has_codes ? 1.0f / inverse : is_finite ? 0.0f : NAN;
  }
};

VN_INLINE Vec magnitude(Vec x) { return max(x, sub(zero(), x)); }

// Up to sixteen values, zeros behind them.
VN_INLINE Vec load_upto(const float* p, int64_t count) {
  return count >= kLanes ? load(p) : load_some(p, static_cast<int>(std::max<int64_t>(0, count)));
}

// Keeps at most a group of values, filled up with zeros; returns its scale.
inline float keep_group(const float* x, int64_t count, float* values) {
  for (int64_t i = 0; i < kPairGroup; i += kLanes) store(values + i, load_upto(x + i, count - i));
  return 1.0f;
}
inline float keep_group(const float* x, int64_t count, int16_t* codes) {
  Vec peak = zero(), squares = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec value = load_upto(x + i, count - i);
    peak = max(peak, magnitude(value));
    squares = fma(value, value, squares);
  }
  const GroupScale own(highest(peak), sum(squares));
  if (own.inverse == 0.0f) {
    std::fill_n(codes, kPairGroup, int16_t{0});
    return own.scale;
  }
  const Vec inverse = fill(own.inverse);
  for (int64_t i = 0; i < kPairGroup; i += kLanes) {
    store_codes(codes + i, mul(load_upto(x + i, count - i), inverse));
  }
  return own.scale;
}

// Rows of inputs: [groups, capacity, 96], and scales [groups, capacity].
template <typename N>
struct InputRows {
  typename N::Input* values;
  float* scales;
  int64_t capacity;

  typename N::Input* group(int64_t g, int64_t row) const {
    return values + (g * capacity + row) * kPairGroup;
  }
  float* scale(int64_t g, int64_t row) const { return scales + g * capacity + row; }
  void put(int64_t g, int64_t row, const float* x, int64_t count) const {
    *scale(g, row) = keep_group(x, count, group(g, row));
  }
};

inline int64_t count_groups(int64_t cols) { return ceil_div(cols, kPairGroup); }

// ---- products -------------------------------------------------------------------------------

// A matrix as the products read it; of keys, too.
template <typename N>
struct Panels {
  const typename N::Word* words;  // [panels, words, 16]
  const float* scales;            // [panels, groups, 16]; of Exact, none
  int64_t cols;

  int64_t count_words() const { return ceil_div(cols, N::kInputs); }
};

// What R rows make of some words of P panels, `next` words apart: calls end(i, sum), i = row * P + panel.
template <int R, int P, typename End>
VN_INLINE void sum_words(const int16_t* inputs, const int32_t* words, int64_t next, int64_t count,
                         End&& end) {
  PairSums sums[R * P];
  each<R * P>([&](auto i) VN_NOW { sums[i] = no_pairs(); });
  for (int64_t k = 0; k < count; ++k, words += kLanes, inputs += 2) {
    PairSums own[P];
    each<P>([&](auto p) VN_NOW { own[p] = load_pairs(words + p * next); });
    each<R>([&](auto r) VN_NOW {
      each<P>([&](auto p) VN_NOW {
        sums[r * P + p] = add_pair(sums[r * P + p], inputs + r * kPairGroup, own[p]);
      });
    });
  }
  each<R * P>([&](auto i) VN_NOW { end(i, to_floats(sums[i])); });
}
template <int R, int P, typename End>
VN_INLINE void sum_words(const float* inputs, const float* words, int64_t next, int64_t count,
                         End&& end) {
  Vec sums[R * P];
  each<R * P>([&](auto i) VN_NOW { sums[i] = zero(); });
  for (int64_t k = 0; k < count; ++k, words += kLanes) {
    Vec own[P];
    each<P>([&](auto p) VN_NOW { own[p] = load(words + p * next); });
    each<R>([&](auto r) VN_NOW {
      const Vec input = fill(inputs[r * kPairGroup + k]);
      each<P>([&](auto p) VN_NOW { sums[r * P + p] = fma(input, own[p], sums[r * P + p]); });
    });
  }
  each<R * P>([&](auto i) VN_NOW { end(i, sums[i]); });
}

// Adds what R rows make of group g of P panels: out [R][P * 16] at `stride`. inputs: of the rows' group,
// which have the scales.
template <int R, int P, typename N>
VN_INLINE void add_group(const typename N::Input* inputs, const float* scales, int64_t g,
                         const Panels<N>& w, int64_t panel, bool is_first, float* out,
                         int64_t stride) {
  constexpr int64_t kWords = kPairGroup / N::kInputs;
  const int64_t groups = count_groups(w.cols), next = w.count_words() * kLanes;
  sum_words<R, P>(inputs, w.words + panel * next + g * kWords * kLanes, next,
                  std::min(kWords, w.count_words() - g * kWords), [&](auto i, Vec sum) VN_NOW {
                    constexpr int r = i / P, p = i % P;
                    float* own = out + r * stride + p * kLanes;
                    if constexpr (N::kInputs > 1) {
                      sum = mul(sum, load(w.scales + ((panel + p) * groups + g) * kLanes));
                    }
                    store(own, fma(sum, fill(scales[r]), is_first ? zero() : load(own)));
                  });
}

// out[r][p * 16 + lane] = row + r of x . panels first .. first + count - 1. A panel's part of a group
// stays in the first-level cache while the rows pass.
template <typename N>
inline void multiply_panels(const InputRows<N>& x, int64_t row, int64_t rows, const Panels<N>& w,
                            int64_t first, int64_t count, float* out, int64_t stride) {
  const int64_t groups = count_groups(w.cols);
  each_tile<kPairPanels>(count, [&](auto panels, int64_t p) {
    for (int64_t g = 0; g < groups; ++g) {
      each_tile<kPairRows>(rows, [&](auto height, int64_t r) {
        add_group<height, panels, N>(x.group(g, row + r), x.scale(g, row + r), g, w, first + p,
                                     g == 0, out + r * stride + p * kLanes, stride);
      });
    }
  });
}

}  // namespace VN_BUILD
}  // namespace vn
