// Products of rounded inputs by the processor's matrix unit (AMX), where it has one.
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

}  // namespace vn
