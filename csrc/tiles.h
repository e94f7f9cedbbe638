// Products of rounded inputs, bf16 or bytes, by the processor's matrix unit (AMX), where it has one.
#pragma once

#include <cstdint>

namespace vn {

// Whether this process may use the unit; asked of the system once.
bool has_tiles();

// Rows of inputs, rounded to bf16, of whole blocks of 32.
struct TileInputs {
  const uint16_t* rows;
  int64_t stride;
  int64_t count;
};

// y[r * y_stride + i] = x[r] . output i of a panel of bf16 pairs [blocks * 16, 64], for 64 outputs.
// The unit keeps what it was set up for until release_tiles().
void dot_panel_by_tiles(const TileInputs& x, const uint32_t* panel, int64_t blocks, float* y,
                        int64_t y_stride);
void release_tiles();

// Rows of inputs of eight bits, at most kMostByteRows, that meet the same codes.
constexpr int kMostByteRows = 32;
struct ByteTileInputs {
  const int8_t* rows;
  int64_t stride;
  int count;
};

// sums [count, 64] = x . codes [inputs / 4, 64], a word four inputs of an output: sums of whole
// numbers. step: 16, 32 or 64, which divides inputs: so many are multiplied at once.
void dot_bytes_by_tiles(const ByteTileInputs& x, const uint32_t* codes, int64_t inputs, int step,
                        int32_t* sums);

}  // namespace vn
