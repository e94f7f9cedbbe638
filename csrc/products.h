// Matrix products whose every output has one chain of sums, whatever the tile it is in.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "aligned.h"
#include "stored.h"
#include "thread_pool.h"
#include "vec.h"
#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

// Rows of a matrix that are multiplied one after another: the most; and as many as stay in the
// first-level cache beside the inputs, where they are used again and again.
constexpr int kColumns = 12, kReusedColumns = 8;

// What a block of products has in common.
struct Columns {
  StoredRow rows[kColumns];
  int64_t size;   // of a row
  int64_t group;  // values under one scale
  bool has_byte_scales;
  // So many bytes on lie the rows of the next block: asked for early, as memory is the limit where
  // inputs are few.
  int64_t ahead;
};

// y[r][first + c] = x[r] . row c, for a register tile. One chain of sums per output, along k, then
// over the lanes: the same for every shape of tile.
template <int Kind, int R, int C>
inline void dot_tile(const float* const* x, const Columns& w, int column, bool fetches,
                     float* const* y, int64_t first) {
  Vec sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sums[r][c] = zero();
  }
  const StoredRow* rows = w.rows + column;
  const int64_t k = w.size, group = kHasScales<Kind> ? w.group : k, ahead = fetches ? w.ahead : 0;
  for (int64_t begin = 0, g = 0; begin < k; begin += group, ++g) {
    Vec scales[C];
    if constexpr (kHasScales<Kind>) {
      for (int c = 0; c < C; ++c) scales[c] = fill(read_scale(rows[c].scales, g, w.has_byte_scales));
    }
    const int64_t end = std::min(k, begin + group);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const auto read = [&](int c) {
        __builtin_prefetch(rows[c].data + i * Reader<Kind>::kBits / 8 + ahead);
        const Vec codes = Reader<Kind>::load(rows[c].data, i);
        return kHasScales<Kind> ? mul(codes, scales[c]) : codes;
      };
      // The fewer of both stay in registers.
      if constexpr (R < C) {
        Vec inputs[R];
        for (int r = 0; r < R; ++r) inputs[r] = load(x[r] + i);
        for (int c = 0; c < C; ++c) {
          const Vec weights = read(c);
          for (int r = 0; r < R; ++r) sums[r][c] = fma(inputs[r], weights, sums[r][c]);
        }
      } else {
        Vec weights[C];
        for (int c = 0; c < C; ++c) weights[c] = read(c);
        for (int r = 0; r < R; ++r) {
          const Vec input = load(x[r] + i);
          for (int c = 0; c < C; ++c) sums[r][c] = fma(input, weights[c], sums[r][c]);
        }
      }
    }
    if constexpr (!kHasScales<Kind>) {
      const int rest = static_cast<int>(end - i);
      for (int c = 0; rest > 0 && c < C; ++c) {
        const Vec weights = Reader<Kind>::load_some(rows[c].data, i, rest);
        for (int r = 0; r < R; ++r) {
          sums[r][c] = fma(load_some(x[r] + i, rest), weights, sums[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    int c = 0;
    for (; c + 4 <= C; c += 4) {
      sum_four(sums[r][c], sums[r][c + 1], sums[r][c + 2], sums[r][c + 3], y[r] + first + c);
    }
    for (; c < C; ++c) y[r][first + c] = sum(sums[r][c]);
  }
}

// Tiles of one height. Where there are several heights, one asks for half of the next block and
// another for the rest: what is fetched is spread over the work.
template <int Kind, int R>
inline void dot_rows(const float* const* x, const Columns& w, int columns, int64_t turn,
                     int64_t turns, float* const* y, int64_t first) {
  constexpr int kMost = kTileSums / R, kWide = kMost > kColumns ? kColumns : kMost;
  int c = 0;
  int64_t index = turn;
  for (; c + kWide <= columns; c += kWide, ++index) {
    dot_tile<Kind, R, kWide>(x, w, c, index % turns == 0, y, first + c);
  }
  for (; c < columns; ++c, ++index) {
    dot_tile<Kind, R, 1>(x, w, c, index % turns == 0, y, first + c);
  }
}

// Fewer inputs than a tile is high: those that lack are copies of the last, and go nowhere.
template <int Kind, int R>
inline void dot_padded(const float* const* x, int64_t rows, const Columns& w, int columns,
                       int64_t turn, int64_t turns, float* const* y, int64_t first) {
  if (rows == R) {
    dot_rows<Kind, R>(x, w, columns, turn, turns, y, first);
    return;
  }
  float nowhere[kColumns];
  const float* inputs[R];
  float* outputs[R];
  for (int r = 0; r < R; ++r) {
    inputs[r] = x[r < rows ? r : rows - 1];
    outputs[r] = r < rows ? y[r] + first : nowhere;
  }
  dot_rows<Kind, R>(inputs, w, columns, turn, turns, outputs, 0);
}

// y[r][first + c] = x[r] . row c for any number of inputs.
template <int Kind>
inline void dot_block(const float* const* x, int64_t rows, const Columns& w, int columns,
                      float* const* y, int64_t first) {
  const int64_t turns = rows <= kMostRows ? 1 : 2;
  int64_t r = 0, turn = 0;
  for (; rows - r > kMostRows; r += kTileRows, ++turn) {
    dot_rows<Kind, kTileRows>(x + r, w, columns, turn, turns, y + r, first);
  }
  const int64_t rest = rows - r;
  if constexpr (kMostRows > 4) {
    if (rest > 6) dot_padded<Kind, 8>(x + r, rest, w, columns, turn, turns, y + r, first);
    if (rest == 5 || rest == 6) {
      dot_padded<Kind, 6>(x + r, rest, w, columns, turn, turns, y + r, first);
    }
    if (rest == 3 || rest == 4) {
      dot_padded<Kind, 4>(x + r, rest, w, columns, turn, turns, y + r, first);
    }
  }
  if constexpr (kMostRows > 1) {
    if (rest == 2) dot_rows<Kind, 2>(x + r, w, columns, turn, turns, y + r, first);
  }
  if (rest == 1) dot_rows<Kind, 1>(x + r, w, columns, turn, turns, y + r, first);
}

// The same for rows of floats given one by one; at most kColumns.
inline void dot_floats(const float* const* x, int64_t rows, const float* const* w, int columns,
                       int64_t k, float* const* y, int64_t first) {
  Columns block = {};
  for (int c = 0; c < columns; ++c) block.rows[c].data = reinterpret_cast<const uint8_t*>(w[c]);
  block.size = k;
  dot_block<VN_F32>(x, rows, block, columns, y, first);
}

// One product: rows of x, by some rows of a matrix, into rows of y.
struct Product {
  const float* x;
  int64_t x_stride;
  const int32_t* x_rows;  // which rows of x, or null: 0, 1, ...
  int64_t num_rows;
  const vn_matrix* matrix;
  int64_t first_row, num_columns;  // rows first_row .. of the matrix
  float* y;
  int64_t y_stride;
};

// Inputs of one block stay in the second-level cache while the matrix streams by.
constexpr int64_t kBlockRows = 96;
// Multiply-adds worth a chunk of their own (some 10 us), and those not worth waking a thread.
constexpr int64_t kChunkWork = 1 << 17;


template <int Kind>
inline void dot_stored(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row,
                       int64_t count, float* const* y, int64_t first) {
  const int64_t step = rows > kMostRows ? kReusedColumns : kColumns;
  const int64_t ahead = step * m.row_stride * Reader<Kind>::kBits / 8;
  Columns block = {{}, m.cols, m.group, m.has_byte_scales != 0, ahead};
  for (int64_t c = 0; c < count; c += step) {
    const int columns = static_cast<int>(std::min<int64_t>(step, count - c));
    for (int i = 0; i < columns; ++i) block.rows[i] = stored_row(m, row + c + i);
    dot_block<Kind>(x, rows, block, columns, y, first + c);
  }
}

// Where inputs are many, a row is widened once for all of them.
inline void dot_decoded(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row,
                        int64_t count, float* const* y, int64_t first) {
  thread_local Floats decoded;
  decoded.resize(kReusedColumns * m.cols);
  const float* w[kReusedColumns];
  for (int64_t c = 0; c < count; c += kReusedColumns) {
    const int columns = static_cast<int>(std::min<int64_t>(kReusedColumns, count - c));
    for (int i = 0; i < columns; ++i) {
      float* out = decoded.data() + i * m.cols;
      decode_matrix_row(m, row + c + i, out);
      w[i] = out;
    }
    dot_floats(x, rows, w, columns, m.cols, y, first + c);
  }
}

// Products with rows row .. row + count - 1 of a matrix that is no VN_PARTS.
inline void dot_leaf(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row,
                     int64_t count, float* const* y, int64_t first) {
  if (m.kind == VN_F32) {
    dot_stored<VN_F32>(x, rows, m, row, count, y, first);
  } else if (rows > kMostRows || !has_whole_steps(m)) {
    dot_decoded(x, rows, m, row, count, y, first);
  } else if (m.kind == VN_BF16) {
    dot_stored<VN_BF16>(x, rows, m, row, count, y, first);
  } else if (m.kind == VN_MXFP4) {
    dot_stored<VN_MXFP4>(x, rows, m, row, count, y, first);
  } else if (m.kind == VN_FP8) {
    dot_stored<VN_FP8>(x, rows, m, row, count, y, first);
  } else {
    dot_stored<VN_INT8>(x, rows, m, row, count, y, first);
  }
}

inline void multiply_part(const Product& p, int64_t row, int64_t rows, int64_t column,
                          int64_t columns) {
  const float* x[kBlockRows];
  float* y[kBlockRows];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = p.x_rows == nullptr ? row + r : p.x_rows[row + r];
    x[r] = p.x + source * p.x_stride;
    y[r] = p.y + (row + r) * p.y_stride;
  }
  for (int64_t c = 0; c < columns;) {
    const FoundRow found = find_row(*p.matrix, p.first_row + column + c);
    const int64_t count = std::min(columns - c, found.matrix->rows - found.row);
    dot_leaf(x, rows, *found.matrix, found.row, count, y, column + c);
    c += count;
  }
}

// Runs products that do not depend on one another.
inline void multiply_all(ThreadPool& pool, const Product* products, size_t count) {
  struct Cut {
    int64_t row_blocks, columns, column_blocks, first_chunk;
  };
  thread_local std::vector<Cut> cuts;
  cuts.clear();
  int64_t num_chunks = 0, work = 0;
  for (size_t i = 0; i < count; ++i) {
    const Product& p = products[i];
    const int64_t rows = std::min(p.num_rows, kBlockRows);
    const int64_t per_column = std::max<int64_t>(1, rows * p.matrix->cols);
    int64_t columns = std::max<int64_t>(kColumns, kChunkWork / per_column);
    columns = (columns + kColumns - 1) / kColumns * kColumns;
    const Cut cut = {(p.num_rows + kBlockRows - 1) / kBlockRows, columns,
                     (p.num_columns + columns - 1) / columns, num_chunks};
    num_chunks += cut.row_blocks * cut.column_blocks;
    work += p.num_rows * p.matrix->cols * p.num_columns;
    cuts.push_back(cut);
  }
  const Cut* all = cuts.data();
  auto run = [products, all, count](int64_t chunk) {
    size_t i = count - 1;
    while (all[i].first_chunk > chunk) --i;
    const Product& p = products[i];
    const int64_t index = chunk - all[i].first_chunk;
    const int64_t row = index / all[i].column_blocks * kBlockRows;
    const int64_t column = index % all[i].column_blocks * all[i].columns;
    multiply_part(p, row, std::min(kBlockRows, p.num_rows - row), column,
                  std::min(all[i].columns, p.num_columns - column));
  };
  if (work <= kChunkWork) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) run(chunk);
  } else {
    pool.run(num_chunks, run);
  }
}

inline Product whole_product(const float* x, int64_t x_stride, int64_t rows, const vn_matrix& m,
                             float* y, int64_t y_stride) {
  return {x, x_stride, nullptr, rows, &m, 0, m.rows, y, y_stride};
}

inline vn_matrix float_matrix(const float* data, int64_t rows, int64_t cols) {
  return {data, nullptr, rows, cols, cols, VN_F32, 0, 0, 0};
}

inline void multiply(ThreadPool& pool, const float* x, int64_t rows, const vn_matrix& m, float* y) {
  const Product product = whole_product(x, m.cols, rows, m, y, m.rows);
  multiply_all(pool, &product, 1);
}

// Calls body(row) for all rows; `row_work` is about the floating-point operations of one.
template <typename Body>
inline void for_rows(ThreadPool& pool, int64_t rows, int64_t row_work, Body&& body) {
  const int64_t per_chunk = std::max<int64_t>(1, kChunkWork / std::max<int64_t>(1, row_work));
  const int64_t chunks = (rows + per_chunk - 1) / per_chunk;
  pool.run(chunks, [&](int64_t chunk) {
    const int64_t end = std::min(rows, (chunk + 1) * per_chunk);
    for (int64_t row = chunk * per_chunk; row < end; ++row) body(row);
  });
}

}  // namespace VN_BUILD
}  // namespace vn
