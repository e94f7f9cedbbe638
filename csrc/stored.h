// Weights as they are stored: widened in registers, or a row at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vec.h"
#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

// A row of a matrix that is no VN_PARTS, and its scales.
struct StoredRow {
  const uint8_t* data;
  const uint8_t* scales;
};

// Sixteen values of a row, without their scale. kBits: of a value.
template <int Kind>
struct Reader;
template <>
struct Reader<VN_F32> {
  static constexpr int kBits = 32;
  static Vec load(const uint8_t* row, int64_t i) {
    return VN_BUILD::load(reinterpret_cast<const float*>(row) + i);
  }
  static Vec load_some(const uint8_t* row, int64_t i, int count) {
    return VN_BUILD::load_some(reinterpret_cast<const float*>(row) + i, count);
  }
};
template <>
struct Reader<VN_BF16> {
  static constexpr int kBits = 16;
  static Vec load(const uint8_t* row, int64_t i) {
    return load_bf16(reinterpret_cast<const uint16_t*>(row) + i);
  }
  static Vec load_some(const uint8_t* row, int64_t i, int count) {
    uint16_t lanes[kLanes] = {};
    std::memcpy(lanes, row + 2 * i, 2 * count);
    return load_bf16(lanes);
  }
};
template <>
struct Reader<VN_MXFP4> {
  static constexpr int kBits = 4;
  static Vec load(const uint8_t* row, int64_t i) { return load_e2m1(row + i / 2); }
};
template <>
struct Reader<VN_FP8> {
  static constexpr int kBits = 8;
  static Vec load(const uint8_t* row, int64_t i) { return load_e4m3(row + i); }
};

template <int Kind>
constexpr bool kHasScales = Kind != VN_F32 && Kind != VN_BF16;

inline int bits_of(int32_t kind) {
  return kind == VN_F32 ? 32 : kind == VN_BF16 ? 16 : kind == VN_MXFP4 ? 4 : 8;
}

inline float read_scale(const uint8_t* scales, int64_t index, bool are_bytes) {
  if (are_bytes) return widen_e8m0(scales[index]);
  float scale;
  std::memcpy(&scale, scales + sizeof(scale) * index, sizeof(scale));
  return scale;
}

inline StoredRow stored_row(const vn_matrix& m, int64_t row) {
  const uint8_t* data = static_cast<const uint8_t*>(m.data) + row * m.row_stride * bits_of(m.kind) / 8;
  if (m.scales == nullptr) return {data, nullptr};
  const int64_t groups = (m.cols + m.group - 1) / m.group;
  const int64_t size = m.has_byte_scales != 0 ? 1 : sizeof(float);
  return {data, m.scales + row / m.rows_per_scale * groups * size};
}

// Whether every step of sixteen values lies under one scale, so that registers suffice.
inline bool has_whole_steps(const vn_matrix& m) {
  return m.scales == nullptr || (m.cols % kLanes == 0 && m.group % kLanes == 0);
}

inline float widen_one(const vn_matrix& m, const uint8_t* row, int64_t i) {
  if (m.kind == VN_MXFP4) return widen_e2m1(row[i / 2] >> i % 2 * 4 & 15);
  return widen_e4m3(row[i]);
}

template <int Kind>
inline void decode_scaled(const vn_matrix& m, const StoredRow& row, int64_t from, int64_t count,
                          float* out) {
  for (int64_t at = from; at < from + count;) {
    const int64_t g = at / m.group, end = std::min(from + count, (g + 1) * m.group);
    const Vec scale = fill(read_scale(row.scales, g, m.has_byte_scales != 0));
    for (; at < end; at += kLanes) {
      store(out + at - from, mul(Reader<Kind>::load(row.data, at), scale));
    }
  }
}

inline float round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  // To nearest, ties to even; a NaN stays one.
  if ((bits & 0x7fffffffu) <= 0x7f800000u) bits += 0x7fffu + (bits >> 16 & 1u);
  bits &= 0xffff0000u;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline uint16_t bf16_bits(float x) {
  const float rounded = round_bf16(x);
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

// Values that halves hold: a number beyond the largest becomes that one.
inline Vec clamp_half(Vec x) {
  // In this order a NaN stays one.
  return max(fill(-65504.0f), min(fill(65504.0f), x));
}

inline void store_halves(uint16_t* out, const float* values, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_half(out + i, clamp_half(load(values + i)));
  if (const int rest = static_cast<int>(count - i); rest > 0) {
    uint16_t lanes[kLanes];
    store_half(lanes, clamp_half(load_some(values + i, rest)));
    std::memcpy(out + i, lanes, sizeof(uint16_t) * rest);
  }
}

inline void widen_halves(const uint16_t* halves, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_half(halves + i));
  if (const int rest = static_cast<int>(count - i); rest > 0) {
    uint16_t lanes[kLanes] = {};
    std::memcpy(lanes, halves + i, sizeof(uint16_t) * rest);
    store_some(out + i, load_half(lanes), rest);
  }
}

// Widens a stored row of plain values.
inline void decode_row(const void* data, int64_t offset, int32_t kind, int64_t count, float* out) {
  if (kind == VN_F32) {
    std::memcpy(out, static_cast<const float*>(data) + offset, sizeof(float) * count);
    return;
  }
  const uint16_t* source = static_cast<const uint16_t*>(data) + offset;
  if (kind == VN_F16) return widen_halves(source, count, out);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_bf16(source + i));
  for (; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(source[i]) << 16;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

// Widens `count` values from `from`, a multiple of kLanes, of a row; each is the one fp32 product of
// its code's value and its scale.
inline void decode_matrix_part(const vn_matrix& m, int64_t index, int64_t from, int64_t count,
                               float* out) {
  if (m.scales == nullptr) {
    decode_row(m.data, index * m.row_stride + from, m.kind, count, out);
    return;
  }
  const StoredRow row = stored_row(m, index);
  if (!has_whole_steps(m)) {
    for (int64_t i = from; i < from + count; ++i) {
      const float scale = read_scale(row.scales, i / m.group, m.has_byte_scales != 0);
      out[i - from] = widen_one(m, row.data, i) * scale;
    }
  } else if (m.kind == VN_MXFP4) {
    decode_scaled<VN_MXFP4>(m, row, from, count, out);
  } else {
    decode_scaled<VN_FP8>(m, row, from, count, out);
  }
}

// The matrix that holds a row, and the row's number in it.
struct FoundRow {
  const vn_matrix* matrix;
  int64_t row;
};

inline FoundRow find_row(const vn_matrix& m, int64_t row) {
  if (m.kind != VN_PARTS) return {&m, row};
  const vn_matrix* part = static_cast<const vn_matrix*>(m.data);
  while (row >= part->rows) row -= (part++)->rows;
  return {part, row};
}

}  // namespace VN_BUILD
}  // namespace vn
