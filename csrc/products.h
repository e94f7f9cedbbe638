// Matrix products whose every output has one chain of sums, whatever the tile it is in.
#pragma once

#include <algorithm>

#include "thread_pool.h"
#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

// Rows of a matrix that are multiplied one after another, while they are in the first-level cache:
// whole tiles of every height.
constexpr int kColumns = 12;

// y[r][first + c] = x[r] . w[c] for any number of rows of floats given one by one, which are near.
void dot_floats(const float* const* x, int64_t rows, const float* const* w, int64_t columns,
                int64_t k, float* const* y, int64_t first);

// Widens a row of a matrix of any kind but VN_PARTS.
void decode_matrix_row(const vn_matrix& m, int64_t index, float* out);

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

// Multiply-adds not worth waking a thread (some 3 us), and those of a chunk where there is enough to
// share: rows of a matrix are fetched ahead within a chunk only.
constexpr int64_t kChunkWork = 1 << 17, kLargeChunkWork = 1 << 19;

// Whether so much work is done before another thread would have come to help.
inline bool is_short(const ThreadPool& pool, int64_t work) {
  return work <= (pool.rests() ? 2 : 1) * kChunkWork;
}

// Runs products that do not depend on one another.
void multiply_all(ThreadPool& pool, const Product* products, size_t count);

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
