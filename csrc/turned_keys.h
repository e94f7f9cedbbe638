// Keys turned so that lanes are keys, and scores of them: a vector holds a value of sixteen keys, and no sum
// crosses its lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "aligned.h"
#include "rows_ahead.h"
#include "vec.h"

namespace vn {
namespace VN_BUILD {

// Values of keys that are turned while a multiply-add of vectors is done.
constexpr int64_t kTurnedAtOnce = 4;

// out[i * stride + k] = rows[k][i] for i of 0 .. 7 and k of 0 .. 15, values of sixteen bits as they are.
template <typename T>
inline void transpose_sixteen(const T* const* rows, T* out, int64_t stride) {
  static_assert(sizeof(T) == 2);
#if defined(__AVX2__)
  // Rows k and k + 8 in the two lanes: none of the steps crosses them.
  __m256i one[8], two[8];
  for (int k = 0; k < 8; ++k) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[k]));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[k + 8]));
    one[k] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  for (int k = 0; k < 8; k += 2) {
    two[k] = _mm256_unpacklo_epi16(one[k], one[k + 1]);
    two[k + 1] = _mm256_unpackhi_epi16(one[k], one[k + 1]);
  }
  for (int k = 0; k < 8; k += 4) {
    for (int i = 0; i < 2; ++i) {
      one[k + 2 * i] = _mm256_unpacklo_epi32(two[k + i], two[k + i + 2]);
      one[k + 2 * i + 1] = _mm256_unpackhi_epi32(two[k + i], two[k + i + 2]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    T* own = out + 2 * i * stride;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(own), _mm256_unpacklo_epi64(one[i], one[i + 4]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(own + stride),
                        _mm256_unpackhi_epi64(one[i], one[i + 4]));
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 16; ++k) out[i * stride + k] = rows[k][i];
  }
#endif
}

// Rows of queries, at most, for which keys of sixteen bits stay as they are while lanes are keys: each tile of
// rows widens them again. Without vectors that costs more than all the rest.
#if defined(__AVX512F__)
constexpr int64_t kUnwidenedRows = INT64_MAX;
#elif defined(__AVX2__)
constexpr int64_t kUnwidenedRows = 2 * kScoreRows;
#else
constexpr int64_t kUnwidenedRows = 0;
#endif

// A thread's room for so many values of turned keys.
template <typename T>
inline T* take_turned(int64_t count) {
  thread_local std::vector<T, CacheLines<T>> values;
  if (static_cast<int64_t>(values.size()) < count) values.resize(count);
  return values.data();
}

// Turns `count` rows of keys so that lanes are keys: turned [width, ceil(count / kLanes) * kLanes].
// What fills up a vector is the last key again.
template <typename T, typename Turned>
inline void turn_keys(const T* const* keys, int64_t count, int64_t width, Turned* turned,
                      RowsAhead& ahead) {
  constexpr bool kWidens = !std::is_same_v<T, Turned> || sizeof(T) != 2;
  constexpr int64_t kRows = kWidens ? 8 : kLanes;
  const int64_t stride = ceil_div(count, kLanes) * kLanes;
  for (int64_t k = 0; k < stride; k += kRows) {
    const T* own[kRows];
    for (int64_t i = 0; i < kRows; ++i) own[i] = keys[std::min(k + i, count - 1)];
    Turned* out = turned + k;
    int64_t at = 0;
    for (; at + 8 <= width; at += 8) {
      if constexpr (kWidens) {
        transpose_eight(own, out + at * stride, stride);
      } else {
        transpose_sixteen(own, out + at * stride, stride);
      }
      for (const T*& row : own) row += 8;
      ahead.ask(kRows * 8 / kTurnedAtOnce);
    }
    for (; at < width; ++at) {
      for (int64_t i = 0; i < kRows; ++i) {
        if constexpr (kWidens) {
          out[at * stride + i] = widen_value(*own[i]++);
        } else {
          out[at * stride + i] = *own[i]++;
        }
      }
    }
  }
}

// Scores of R rows and V vectors of turned keys: a chain each, along the width.
template <int R, int V, typename T>
inline void score_tile(const float* const* x, int64_t width, const T* turned, int64_t stride,
                       float* const* y, RowsAhead& ahead) {
  constexpr int64_t kStretch = 16;
  Vec sums[R * V];
  each<R * V>([&](auto i) VN_NOW { sums[i] = zero(); });
  for (int64_t begin = 0; begin < width; begin += kStretch) {
    const int64_t end = std::min(width, begin + kStretch);
    for (int64_t at = begin; at < end; ++at, turned += stride) {
      Vec keys[V];
      each<V>([&](auto v) VN_NOW { keys[v] = load_values(turned + v * kLanes); });
      each<R>([&](auto r) VN_NOW {
        const Vec query = fill(x[r][at]);
        each<V>([&](auto v) VN_NOW { sums[r * V + v] = fma(query, keys[v], sums[r * V + v]); });
      });
    }
    ahead.ask(kStretch * R * V);
  }
  each<R * V>([&](auto i) VN_NOW { store(y[i / V] + i % V * kLanes, sums[i]); });
}

// y[r][first + k] = x[r] . key k for turned keys, whole vectors of them.
template <typename T>
inline void score_keys(const float* const* x, int64_t rows, const T* turned, int64_t count,
                       int64_t width, float* const* y, int64_t first, RowsAhead& ahead) {
  const int64_t stride = ceil_div(count, kLanes) * kLanes;
  int64_t k = 0;
  const auto score = [&](auto rows_of_tile, auto vectors) {
    each_tile<rows_of_tile>(rows, [&](auto height, int64_t r) {
      float* out[height];
      for (int i = 0; i < height; ++i) out[i] = y[r + i] + first + k;
      score_tile<height, vectors>(x + r, width, turned + k, stride, out, ahead);
    });
    k += vectors * kLanes;
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  while (stride - k >= 2 * kLanes) score(std::integral_constant<int, kScoreRows>{}, Two{});
  if (k < stride) score(std::integral_constant<int, 2 * kScoreRows>{}, One{});
}

}  // namespace VN_BUILD
}  // namespace vn
