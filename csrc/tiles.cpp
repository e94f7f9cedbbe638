#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace vn {
namespace {

constexpr int64_t kPanel = 64, kBlockInputs = 32, kBlockWords = kBlockInputs / 2 * kPanel;
constexpr int kHeight = 16;          // rows of a tile
constexpr int kPanelBytes = 4 * 64;  // from one pair of inputs to the next

struct alignas(64) Setup {
  uint8_t palette, start_row, unused[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// What the tiles of this thread are set up for: rows of inputs, and their bytes; 0: nothing.
struct Shape {
  int first, second, bytes;
  bool operator==(const Shape& o) const {
    return first == o.first && second == o.second && bytes == o.bytes;
  }
};
thread_local Shape current = {0, 0, 0};

// Tiles 0 to 3: sums; 4 and 5: inputs; 6 and 7: weights, four bytes of inputs to a row. Sums 0, 1
// belong to inputs 4; 2, 3 to inputs 5, or where `second` is 0 to inputs 4 as well.
void set_up(Shape shape) {
  if (current == shape) return;
  Setup setup = {};
  setup.palette = 1;
  const int first = shape.first, deep = shape.bytes / 4;
  const int lower = shape.second == 0 ? first : shape.second;
  const int rows[8] = {first, first, lower, lower, first, lower, deep, deep};
  for (int i = 0; i < 8; ++i) {
    setup.rows[i] = static_cast<uint8_t>(rows[i]);
    setup.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? shape.bytes : 64);
  }
  _tile_loadconfig(&setup);
  current = shape;
}

// Up to sixteen rows by all outputs: the panel is read once, as fast as memory gives it.
void dot_few(const uint16_t* x, int64_t x_bytes, const uint32_t* panel, int64_t blocks, float* y,
             int64_t y_bytes) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint32_t* block = panel + b * kBlockWords;
    _tile_loadd(4, x + b * kBlockInputs, x_bytes);
    _tile_loadd(6, block, kPanelBytes);
    _tile_loadd(7, block + 16, kPanelBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, block + 32, kPanelBytes);
    _tile_loadd(7, block + 48, kPanelBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, y, y_bytes);
  _tile_stored(1, y + 16, y_bytes);
  _tile_stored(2, y + 32, y_bytes);
  _tile_stored(3, y + 48, y_bytes);
}

// Up to 32 rows by half of the outputs.
void dot_two(const uint16_t* x, int64_t x_bytes, const uint32_t* panel, int64_t blocks, float* y,
             int64_t y_bytes) {
  const uint16_t* lower = x + kHeight * x_bytes / 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t b = 0; b < blocks; ++b) {
    const uint32_t* block = panel + b * kBlockWords;
    _tile_loadd(4, x + b * kBlockInputs, x_bytes);
    _tile_loadd(6, block, kPanelBytes);
    _tile_loadd(7, block + 16, kPanelBytes);
    _tile_loadd(5, lower + b * kBlockInputs, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  float* below = y + kHeight * y_bytes / 4;
  _tile_stored(0, y, y_bytes);
  _tile_stored(1, y + 16, y_bytes);
  _tile_stored(2, below, y_bytes);
  _tile_stored(3, below + 16, y_bytes);
}

// Up to sixteen rows of bytes by all outputs.
void dot_few_bytes(const ByteTileInputs& x, const uint32_t* codes, int64_t inputs, int step,
                   int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < inputs; k += step) {
    const uint32_t* block = codes + k / 4 * kPanel;
    _tile_loadd(4, x.rows + k, x.stride);
    _tile_loadd(6, block, kPanelBytes);
    _tile_loadd(7, block + 16, kPanelBytes);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(6, block + 32, kPanelBytes);
    _tile_loadd(7, block + 48, kPanelBytes);
    _tile_dpbssd(2, 4, 6);
    _tile_dpbssd(3, 4, 7);
  }
  _tile_stored(0, sums, kPanelBytes);
  _tile_stored(1, sums + 16, kPanelBytes);
  _tile_stored(2, sums + 32, kPanelBytes);
  _tile_stored(3, sums + 48, kPanelBytes);
}

// Up to 32 rows of bytes by half of the outputs.
void dot_two_bytes(const ByteTileInputs& x, const uint32_t* codes, int64_t inputs, int step,
                   int32_t* sums) {
  const int8_t* lower = x.rows + kHeight * x.stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < inputs; k += step) {
    const uint32_t* block = codes + k / 4 * kPanel;
    _tile_loadd(4, x.rows + k, x.stride);
    _tile_loadd(6, block, kPanelBytes);
    _tile_loadd(7, block + 16, kPanelBytes);
    _tile_loadd(5, lower + k, x.stride);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  int32_t* below = sums + kHeight * kPanel;
  _tile_stored(0, sums, kPanelBytes);
  _tile_stored(1, sums + 16, kPanelBytes);
  _tile_stored(2, below, kPanelBytes);
  _tile_stored(3, below + 16, kPanelBytes);
}

bool ask_for_tiles() {
  // XTILEDATA, one of the states that a process asks the system for.
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

}  // namespace

bool has_tiles() {
  static const bool found = ask_for_tiles();
  return found;
}

void dot_panel_by_tiles(const TileInputs& x, const uint32_t* panel, int64_t blocks, float* y,
                        int64_t y_stride) {
  const int64_t x_bytes = 2 * x.stride, y_bytes = 4 * y_stride;
  for (int64_t r = 0; r < x.count; r += 2 * kHeight) {
    const uint16_t* rows = x.rows + r * x.stride;
    float* out = y + r * y_stride;
    const int rest = static_cast<int>(std::min<int64_t>(2 * kHeight, x.count - r));
    if (rest <= kHeight) {
      set_up({rest, 0, 64});
      dot_few(rows, x_bytes, panel, blocks, out, y_bytes);
    } else {
      set_up({kHeight, rest - kHeight, 64});
      dot_two(rows, x_bytes, panel, blocks, out, y_bytes);
      dot_two(rows, x_bytes, panel + 32, blocks, out + 32, y_bytes);
    }
  }
}

void release_tiles() {
  if (current.first == 0) return;
  _tile_release();
  current = {0, 0, 0};
}

void dot_bytes_by_tiles(const ByteTileInputs& x, const uint32_t* codes, int64_t inputs, int step,
                        int32_t* sums) {
  if (x.count <= kHeight) {
    set_up({x.count, 0, step});
    dot_few_bytes(x, codes, inputs, step, sums);
  } else {
    set_up({kHeight, x.count - kHeight, step});
    dot_two_bytes(x, codes, inputs, step, sums);
    dot_two_bytes(x, codes + 32, inputs, step, sums + 32);
  }
}

}  // namespace vn

#else

namespace vn {

bool has_tiles() { return false; }
void dot_panel_by_tiles(const TileInputs&, const uint32_t*, int64_t, float*, int64_t) {}
void release_tiles() {}
void dot_bytes_by_tiles(const ByteTileInputs&, const uint32_t*, int64_t, int, int32_t*) {}

}  // namespace vn

#endif
