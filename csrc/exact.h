// Functions that give the same bits in every vector build, the portable one included: each product
// that is fused with a sum is rounded once there too.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace vn {
namespace VN_BUILD {

// a * b + c, rounded once.
#if defined(__AVX2__)
VN_INLINE Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
#else
inline Vec fused(const Vec& a, const Vec& b, const Vec& c) {
  Vec result;
  for (int i = 0; i < kLanes; ++i) result.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return result;
}
#endif

inline Vec exact_exp(Vec x) {
  return exp_with(x, [](Vec a, Vec b, Vec c) VN_NOW { return fused(a, b, c); });
}

inline Vec exact_sigmoid(Vec x) {
  return div(fill(1.0f), add(fill(1.0f), exact_exp(sub(zero(), x))));
}

inline Vec exact_silu(Vec x) { return mul(x, exact_sigmoid(x)); }

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), and log1p(y) = 2 atanh(y / (2 + y)): Taylor's series to
// the 17th power of at most 1/3, whose rest is below 2^-29 of the value.
inline Vec exact_softplus(Vec x) {
  const Vec y = exact_exp(min(x, sub(zero(), x)));
  const Vec z = div(y, add(y, fill(2.0f))), square = mul(z, z);
  Vec p = fill(1.0f / 17);
  for (int power = 15; power > 0; power -= 2) {
    p = fused(p, square, fill(1.0f / static_cast<float>(power)));
  }
  return fused(add(z, z), p, max(x, zero()));
}

// Four chains, joined in one order.
inline float exact_sum_of_squares(const float* x, int64_t count) {
  Vec totals[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0, chain = 0; i < count; i += kLanes, ++chain) {
    const Vec a = load_some(x + i, static_cast<int>(std::min<int64_t>(kLanes, count - i)));
    totals[chain % 4] = fused(a, a, totals[chain % 4]);
  }
  return sum(add(add(totals[0], totals[1]), add(totals[2], totals[3])));
}

}  // namespace VN_BUILD
}  // namespace vn
