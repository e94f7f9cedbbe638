// Products of bf16 panels, whose inputs are rounded to bf16 too.
//
//   words  [panels, blocks * 16, 64]  a word: two inputs of one output, the even one low
//
// Their order of sums is that of the matrix unit (AMX): of each block of 32 inputs the even and the odd
// ones are a chain each, fused and from zero, and the sum of both is added to what came before.
// Numbers that are not normal count as zero. The unit is several times as fast as vectors; these give
// its bits.
#pragma once

#include <algorithm>
#include <cstring>

#include "panels.h"
#include "tiles.h"
#include "vec.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace vn {
namespace VN_BUILD {

constexpr int64_t kBlockInputs = 32, kBlockPairs = kBlockInputs / 2;

inline int64_t count_blocks(int64_t cols) { return ceil_div(cols, kBlockInputs); }

// While it lives, numbers that are not normal count as zero in this thread's vectors.
class NormalsOnly {
 public:
#if defined(__x86_64__)
  NormalsOnly() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~NormalsOnly() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#else
  NormalsOnly() {}
#endif
};

// The inputs of a product, rounded once for all its outputs: whole blocks, filled up with zeros; as
// bf16 for the matrix unit, else as floats.
struct RoundedInputs {
  uint16_t* halves;
  float* floats;
  int64_t stride;
};

// The even (0) or odd (1) chains of a block, of C vectors from a line on.
template <int Half, int R, int C>
VN_INLINE void add_pair(const float* const* inputs, const uint32_t* line, int pair, Vec* chains) {
  Vec weights[C];
  each<C>([&](auto c) VN_NOW { weights[c] = bf16_half<Half>(line + c * kLanes); });
  each<R>([&](auto r) VN_NOW {
    const Vec input = fill(inputs[r][2 * pair + Half]);
    each<C>([&](auto c) VN_NOW { chains[r * C + c] = fma(input, weights[c], chains[r * C + c]); });
  });
}

// Adds block b to sums, rows of kPanel; x: rounded.
template <int R, int C>
inline void dot_block_of(const float* const* x, const uint32_t* block, int64_t b, int first,
                         float* sums) {
  const float* inputs[R];
  each<R>([&](auto r) VN_NOW { inputs[r] = x[r] + b * kBlockInputs; });
  const uint32_t* lines = block + first * kLanes;
  Vec even[R * C], odd[R * C];
  each<R * C>([&](auto i) VN_NOW { even[i] = odd[i] = zero(); });
  // Both chains at once where registers hold them: each line is read once.
  if constexpr (2 * R * C <= kRoundedSums) {
    for (int pair = 0; pair < kBlockPairs; ++pair) {
      add_pair<0, R, C>(inputs, lines + pair * kPanel, pair, even);
      add_pair<1, R, C>(inputs, lines + pair * kPanel, pair, odd);
    }
  } else {
    for (int pair = 0; pair < kBlockPairs; ++pair) {
      add_pair<0, R, C>(inputs, lines + pair * kPanel, pair, even);
    }
    for (int pair = 0; pair < kBlockPairs; ++pair) {
      add_pair<1, R, C>(inputs, lines + pair * kPanel, pair, odd);
    }
  }
  each<R * C>([&](auto i) VN_NOW {
    float* own = sums + (i / C) * kPanel + (first + i % C) * kLanes;
    const Vec before = b == 0 ? zero() : load(own);
    store(own, add(before, add(even[i], odd[i])));
  });
}

// sums [rows, 64] = x . all outputs of a panel.
__attribute__((noinline)) inline void dot_rounded_panel(const float* const* x, int64_t rows,
                                                        const uint32_t* panel, int64_t blocks,
                                                        float* sums) {
  const NormalsOnly guard;
  // As many blocks as stay in the first-level cache for all rows.
  const int64_t step = rows <= kPanelTileRows ? 1 : 8;
  for (int64_t first_block = 0; first_block < blocks; first_block += step) {
    const int64_t end = std::min(blocks, first_block + step);
    each_tile<kPanelTileRows>(rows, [&](auto height, int64_t row) {
      constexpr int C = height <= kFewRoundedRows ? kPanelVecs : kPanelTileVecs;
      for (int64_t b = first_block; b < end; ++b) {
        for (int first = 0; first < kPanelVecs; first += C) {
          dot_block_of<height, C>(x + row, panel + b * kBlockPairs * kPanel, b, first,
                                  sums + row * kPanel);
        }
      }
    });
  }
}

// Products with outputs row .. row + count - 1 for the inputs from `input` on; y as in dot_panels,
// rows y_stride apart.
inline void dot_rounded(const RoundedInputs& x, int64_t input, int64_t rows, const vn_matrix& m,
                        int64_t row, int64_t count, float* const* y, int64_t y_stride,
                        int64_t first) {
  thread_local Floats sums;
  sums.resize(rows * kPanel);
  const float* inputs[kPanelRows];
  if (x.floats != nullptr) {
    for (int64_t r = 0; r < rows; ++r) inputs[r] = x.floats + (input + r) * x.stride;
  }
  const int64_t blocks = count_blocks(m.cols);
  for (int64_t at = row; at < row + count;) {
    const int64_t index = at / kPanel, start = at - index * kPanel;
    const int64_t size = std::min(kPanel - start, row + count - at);
    const uint32_t* panel =
        static_cast<const uint32_t*>(m.data) + index * blocks * kBlockPairs * kPanel;
    float* out = sums.data();
    const bool is_direct = x.halves != nullptr && size == kPanel;
    if (x.halves != nullptr) {
      if (is_direct) out = y[0] + first + at - row;
      const TileInputs own = {x.halves + input * x.stride, x.stride, rows};
      dot_panel_by_tiles(own, panel, blocks, out, is_direct ? y_stride : kPanel);
    } else {
      dot_rounded_panel(inputs, rows, panel, blocks, out);
    }
    if (!is_direct) {
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(y[r] + first + at - row, out + r * kPanel + start, sizeof(float) * size);
      }
    }
    at += size;
  }
}

// Widens the inputs of one output.
inline void decode_rounded_row(const vn_matrix& m, int64_t index, float* out) {
  const int64_t blocks = count_blocks(m.cols);
  const uint32_t* words = static_cast<const uint32_t*>(m.data) +
                          index / kPanel * blocks * kBlockPairs * kPanel + index % kPanel;
  for (int64_t k = 0; k < m.cols; ++k) {
    const uint32_t word = words[k / 2 * kPanel];
    const uint32_t bits = k % 2 == 0 ? word << 16 : word & 0xffff0000u;
    std::memcpy(out + k, &bits, sizeof(bits));
  }
}

}  // namespace VN_BUILD
}  // namespace vn
