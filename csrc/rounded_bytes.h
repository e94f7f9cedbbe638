// Values as bytes under one scale: inputs of products, and heads of cached rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

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

// The nearest whole number of at most 127, ties to even.
inline int8_t nearest_byte(float x) {
  // Added to a small number it leaves the nearest whole one in the last bits.
  constexpr float kWhole = 12582912.0f;
  constexpr uint32_t kWholeBits = 0x4b400000u;
  const float moved = x + kWhole;
  uint32_t bits;
  std::memcpy(&bits, &moved, sizeof(bits));
  return static_cast<int8_t>(bits - kWholeBits);
}

// Rounds inputs to multiples of a scale, at most 127 of it, ties to even. With an input that is no
// number the scale is none either; inputs that are all next to nothing are zero.
inline float round_to_bytes(const float* x, int64_t count, uint32_t peak_bits, int8_t* codes) {
  constexpr float kLeast = 1e-30f;
  constexpr uint32_t kInfinity = 0x7f800000u;
  float peak;
  std::memcpy(&peak, &peak_bits, sizeof(peak));
  const bool has_codes = peak_bits < kInfinity && peak >= kLeast;
  if (!has_codes) {
    std::fill_n(codes, count, int8_t{0});
    return peak_bits < kInfinity ? 0.0f : NAN;
  }
  const float inverse = 127.0f / peak;
  for (int64_t i = 0; i < count; ++i) codes[i] = nearest_byte(x[i] * inverse);
  return peak / 127.0f;
}

// What codes of a scale leave of inputs, as multiples of a 254th of it: half of it is the most.
inline float round_rest_to_bytes(const float* x, int64_t count, float scale, const int8_t* codes,
                                 int8_t* rest) {
  if (!(scale > 0.0f)) {
    std::fill_n(rest, count, int8_t{0});
    return 0.0f;
  }
  const float inverse = 254.0f / scale;
  for (int64_t i = 0; i < count; ++i) {
    const float left = x[i] - static_cast<float>(codes[i]) * scale;
    rest[i] = nearest_byte(left * inverse);
  }
  return scale / 254.0f;
}

}  // namespace VN_BUILD
}  // namespace vn
