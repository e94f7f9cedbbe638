// Products, norms, rotary turns, softmax and choices: what all models are made of.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "thread_pool.h"
#include "vec.h"
#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

// ---- products -------------------------------------------------------------------------------

// y[r][c] = x[r] . w[c] for a register tile. One chain of sums per output, along k, then over the
// lanes: the same for every shape of tile. `ahead` values further on lie weights of a later tile,
// asked for early where rows are few and memory is the limit; 0: none.
template <int R, int C>
inline void dot_tile(const float* const* x, const float* const* w, int64_t k, int64_t ahead,
                     float* const* y, int64_t first) {
  Vec sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sums[r][c] = zero();
  }
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    Vec weights[C];
    for (int c = 0; c < C; ++c) {
      weights[c] = load(w[c] + i);
      __builtin_prefetch(w[c] + i + ahead);
    }
    for (int r = 0; r < R; ++r) {
      const Vec values = load(x[r] + i);
      for (int c = 0; c < C; ++c) sums[r][c] = fma(values, weights[c], sums[r][c]);
    }
  }
  if (i < k) {
    const int rest = static_cast<int>(k - i);
    for (int c = 0; c < C; ++c) {
      const Vec weights = load_some(w[c] + i, rest);
      for (int r = 0; r < R; ++r) {
        sums[r][c] = fma(load_some(x[r] + i, rest), weights, sums[r][c]);
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

template <int R>
inline void dot_rows(const float* const* x, const float* const* w, int columns, int64_t k,
                     int64_t ahead, float* const* y, int64_t first) {
  int c = 0;
  // A single row has too few sums to keep the units busy: it takes more columns at once.
  constexpr int kWide = R == 1 ? 8 : kTileColumns;
  for (; c + kWide <= columns; c += kWide) dot_tile<R, kWide>(x, w + c, k, ahead, y, first + c);
  if constexpr (kWide > 4) {
    for (; c + 4 <= columns; c += 4) dot_tile<R, 4>(x, w + c, k, ahead, y, first + c);
  }
  if constexpr (kWide > 2) {
    for (; c + 2 <= columns; c += 2) dot_tile<R, 2>(x, w + c, k, ahead, y, first + c);
  }
  for (; c < columns; ++c) dot_tile<R, 1>(x, w + c, k, ahead, y, first + c);
}

// y[r][first + c] = x[r] . w[c] for any number of rows and columns.
inline void dot_block(const float* const* x, int64_t rows, const float* const* w, int columns,
                      int64_t k, int64_t ahead, float* const* y, int64_t first) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) {
    dot_rows<kTileRows>(x + r, w, columns, k, ahead, y + r, first);
  }
  const int rest = static_cast<int>(rows - r);
  if constexpr (kTileRows > 4) {
    if (rest == 5) dot_rows<5>(x + r, w, columns, k, ahead, y + r, first);
    if (rest == 4) dot_rows<4>(x + r, w, columns, k, ahead, y + r, first);
    if (rest == 3) dot_rows<3>(x + r, w, columns, k, ahead, y + r, first);
    if (rest == 2) dot_rows<2>(x + r, w, columns, k, ahead, y + r, first);
  }
  if (rest == 1) dot_rows<1>(x + r, w, columns, k, ahead, y + r, first);
}

// e8m0: 2^(byte - 127); the checkpoint's loader has refused 255.
inline float widen_scale(uint8_t byte) { return std::ldexp(1.0f, int{byte} - 127); }

// out = the e2m1 codes of a row, each the fp32 product of its value and its group's scale.
inline void decode_mxfp4(const uint8_t* codes, const uint8_t* scales, int64_t group, int64_t count,
                         float* out) {
  static constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (int64_t first = 0; first < count; first += group) {
    const float scale = widen_scale(scales[first / group]);
    float scaled[16];
    for (int i = 0; i < 16; ++i) scaled[i] = kValues[i] * scale;
    const int64_t end = std::min(count, first + group);
    for (int64_t i = first; i < end; i += 2) {
      const uint8_t pair = codes[i / 2];
      out[i] = scaled[pair & 15];
      out[i + 1] = scaled[pair >> 4];
    }
  }
}

// Widens a stored row of values.
inline void decode_row(const void* data, int64_t offset, int32_t kind, int64_t count, float* out) {
  if (kind == VN_F32) {
    std::memcpy(out, static_cast<const float*>(data) + offset, sizeof(float) * count);
    return;
  }
  const uint16_t* source = static_cast<const uint16_t*>(data) + offset;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_bf16(source + i));
  for (; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(source[i]) << 16;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

inline void decode_matrix_row(const vn_matrix& m, int64_t row, float* out) {
  if (m.kind == VN_MXFP4) {
    const uint8_t* codes = static_cast<const uint8_t*>(m.data) + row * (m.cols / 2);
    decode_mxfp4(codes, m.scales + row * (m.cols / m.group), m.group, m.cols, out);
  } else {
    decode_row(m.data, row * m.row_stride, m.kind, m.cols, out);
  }
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
constexpr int kDecodedRows = 8;

inline void multiply_part(const Product& p, int64_t row, int64_t rows, int64_t column,
                          int64_t columns) {
  const float* x[kBlockRows];
  float* y[kBlockRows];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = p.x_rows == nullptr ? row + r : p.x_rows[row + r];
    x[r] = p.x + source * p.x_stride;
    y[r] = p.y + (row + r) * p.y_stride;
  }
  const vn_matrix& m = *p.matrix;
  thread_local std::vector<float> decoded;
  const float* w[kDecodedRows];
  for (int64_t c = 0; c < columns; c += kDecodedRows) {
    const int count = static_cast<int>(std::min<int64_t>(kDecodedRows, columns - c));
    if (m.kind != VN_F32) decoded.resize(kDecodedRows * m.cols);
    for (int i = 0; i < count; ++i) {
      const int64_t row = p.first_row + column + c + i;
      if (m.kind == VN_F32) {
        w[i] = static_cast<const float*>(m.data) + row * m.row_stride;
      } else {
        decode_matrix_row(m, row, decoded.data() + i * m.cols);
        w[i] = decoded.data() + i * m.cols;
      }
    }
    const int64_t ahead = m.kind == VN_F32 ? kDecodedRows * m.row_stride : 0;
    dot_block(x, rows, w, count, m.cols, ahead, y, column + c);
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
    int64_t columns = std::max<int64_t>(kDecodedRows, kChunkWork / per_column);
    columns = (columns + kDecodedRows - 1) / kDecodedRows * kDecodedRows;
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

// ---- vectors --------------------------------------------------------------------------------

inline float sum_of_squares(const float* x, int64_t count) {
  Vec total = zero();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec a = load(x + i);
    total = fma(a, a, total);
  }
  if (i < count) {
    const Vec a = load_some(x + i, static_cast<int>(count - i));
    total = fma(a, a, total);
  }
  return sum(total);
}

inline float inverse_rms(const float* x, int64_t count, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(x, count) / static_cast<float>(count) + eps);
}

// out = x / rms(x) * weight; weight null: no weight, but one factor. out may be x.
inline void rms_norm(const float* x, const float* weight, float factor, int64_t count, float eps,
                     float* out) {
  const float inverse = inverse_rms(x, count, eps);
  if (weight == nullptr) {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] * inverse * factor;
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] * inverse * weight[i];
  }
}

// Cosines and sines of a position: turns[2 * i], turns[2 * i + 1].
inline void compute_turns(int64_t position, const float* frequencies, int32_t pairs, float* turns) {
  for (int32_t i = 0; i < pairs; ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    turns[2 * i] = std::cos(angle);
    turns[2 * i + 1] = std::sin(angle);
  }
}

// Turns the interleaved pairs at the end of a row; sign -1 turns back.
inline void rotate_tail(float* row, int64_t width, const float* turns, int32_t pairs, float sign) {
  float* tail = row + width - 2 * pairs;
  for (int32_t i = 0; i < pairs; ++i) {
    const float a = tail[2 * i], b = tail[2 * i + 1];
    const float cosine = turns[2 * i], sine = sign * turns[2 * i + 1];
    tail[2 * i] = a * cosine - b * sine;
    tail[2 * i + 1] = a * sine + b * cosine;
  }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Turns scores into e^(score - max) and returns their sum, with `extra` as one score more.
// Lanes past the end take part as zeros, so the buffer has room for a whole vector.
inline float softmax_terms(float* scores, int64_t count, float extra) {
  float top = extra;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, scores[i]);
  Vec total = zero();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec term = exp(sub(load(scores + i), fill(top)));
    store(scores + i, term);
    total = add(total, term);
  }
  float tail = 0.0f;
  for (; i < count; ++i) {
    float lane[kLanes];
    store(lane, exp(fill(scores[i] - top)));
    scores[i] = lane[0];
    tail += lane[0];
  }
  return sum(total) + tail + std::exp(extra - top);
}

// out[r] = sum over k of weights[r][k] * rows[k], times scale[r]; sums run along k.
template <int R, int V>
inline void mix_tile(const float* const* weights, const float* const* rows, int64_t count,
                     int64_t at, const float* scale, float* const* out) {
  Vec sums[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sums[r][v] = zero();
  }
  for (int64_t k = 0; k < count; ++k) {
    Vec values[V];
    for (int v = 0; v < V; ++v) values[v] = load(rows[k] + at + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec weight = fill(weights[r][k]);
      for (int v = 0; v < V; ++v) sums[r][v] = fma(weight, values[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      store(out[r] + at + v * kLanes, mul(sums[r][v], fill(scale[r])));
    }
  }
}

template <int R>
inline void mix_rows(const float* const* weights, const float* const* rows, int64_t count,
                     int64_t width, const float* scale, float* const* out) {
  int64_t at = 0;
  for (; at + 2 * kLanes <= width; at += 2 * kLanes) {
    mix_tile<R, 2>(weights, rows, count, at, scale, out);
  }
  for (; at + kLanes <= width; at += kLanes) {
    mix_tile<R, 1>(weights, rows, count, at, scale, out);
  }
  for (; at < width; ++at) {
    for (int r = 0; r < R; ++r) {
      float total = 0.0f;
      for (int64_t k = 0; k < count; ++k) total += weights[r][k] * rows[k][at];
      out[r][at] = total * scale[r];
    }
  }
}

// mix_rows for any number of rows of weights.
inline void mix_all(int64_t rows, const float* const* weights, const float* const* values,
                    int64_t count, int64_t width, const float* scale, float* const* out) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) mix_rows<4>(weights + r, values, count, width, scale + r, out + r);
  for (; r + 2 <= rows; r += 2) mix_rows<2>(weights + r, values, count, width, scale + r, out + r);
  for (; r < rows; ++r) mix_rows<1>(weights + r, values, count, width, scale + r, out + r);
}

// ---- choices --------------------------------------------------------------------------------

// Marks the `wanted` highest of `scores`, among equal ones the earliest, and lists them in order.
inline void choose_highest(const float* scores, int64_t count, int64_t wanted,
                           std::vector<float>& scratch, std::vector<int32_t>& chosen) {
  scratch.assign(scores, scores + count);
  std::nth_element(scratch.begin(), scratch.begin() + (wanted - 1), scratch.end(),
                   [](float a, float b) { return a > b; });
  const float threshold = scratch[wanted - 1];
  int64_t num_above = 0;
  for (int64_t i = 0; i < count; ++i) num_above += scores[i] > threshold;
  int64_t num_equal = wanted - num_above;
  chosen.clear();
  for (int64_t i = 0; i < count; ++i) {
    if (scores[i] > threshold || (scores[i] == threshold && num_equal-- > 0)) {
      chosen.push_back(static_cast<int32_t>(i));
    }
  }
}

// ---- pages ----------------------------------------------------------------------------------

inline float round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  // To nearest, ties to even; a NaN stays one.
  if ((bits & 0x7fffffffu) <= 0x7f800000u) bits += 0x7fffu + (bits >> 16 & 1u);
  bits &= 0xffff0000u;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// What a row is once it has been stored.
inline void round_row(int32_t kind, float* row, int64_t width) {
  if (kind == VN_BF16) {
    for (int64_t i = 0; i < width; ++i) row[i] = round_bf16(row[i]);
  }
}

// The block tables of a step, asked by position.
class Pages {
 public:
  explicit Pages(const vn_step& step) : step_(step), request_of_row_(step.num_tokens) {
    for (int64_t r = 0; r < step.num_requests; ++r) {
      for (int64_t i = 0; i < step.counts[r]; ++i) {
        request_of_row_[step.row_starts[r] + i] = static_cast<int32_t>(r);
      }
    }
  }

  // The request of a flat row.
  int64_t request_of(int64_t row) const { return request_of_row_[row]; }

  // The id of the block of a position; 0: not stored.
  int64_t find_block(const vn_cache& cache, int64_t request, int64_t position) const {
    const int64_t at = cache.group * step_.num_requests + request;
    const int64_t index = position / cache.block_size - step_.table_bases[at];
    if (index < 0 || index >= step_.table_lengths[at]) return 0;
    return step_.block_ids[step_.table_offsets[at] + index];
  }

  // Offset of the row of a position in the cache, in values; -1: not stored.
  int64_t find_row(const vn_cache& cache, int64_t request, int64_t position) const {
    const int64_t block = find_block(cache, request, position);
    if (block == 0) return -1;
    const int64_t per_row = cache.block_size / cache.rows_per_block;
    return block * cache.block_stride + position % cache.block_size / per_row * cache.width;
  }

  // Calls body(row, offset) for rows first .. end - 1, numbered by position / tokens per row; the
  // offset is that in the cache, or -1 where a row is not stored.
  template <typename Body>
  void each_row(const vn_cache& cache, int64_t request, int64_t first, int64_t end,
                Body&& body) const {
    const int64_t per_block = cache.rows_per_block;
    const int64_t tokens_per_row = cache.block_size / per_block;
    for (int64_t row = first; row < end;) {
      const int64_t block = find_block(cache, request, row * tokens_per_row);
      const int64_t stop = std::min(end, row / per_block * per_block + per_block);
      int64_t offset = block * cache.block_stride + row % per_block * cache.width;
      for (; row < stop; ++row, offset += cache.width) body(row, block == 0 ? -1 : offset);
    }
  }

  bool writes(const vn_cache& cache, int64_t request, int64_t position) const {
    return position >= step_.write_from[cache.group * step_.num_requests + request];
  }

 private:
  const vn_step& step_;
  std::vector<int32_t> request_of_row_;
};

inline void write_row(const vn_cache& cache, int64_t offset, const float* row) {
  if (cache.kind == VN_F32) {
    std::memcpy(static_cast<float*>(cache.data) + offset, row, sizeof(float) * cache.width);
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(cache.data) + offset;
  for (int32_t i = 0; i < cache.width; ++i) {
    const float rounded = round_bf16(row[i]);
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof(bits));
    out[i] = static_cast<uint16_t>(bits >> 16);
  }
}

// Stores a flat row where its table has room for it and the step is to write it.
inline void store_row(const Pages& pages, const vn_cache& cache, int64_t row, int64_t position,
                      const float* values) {
  const int64_t request = pages.request_of(row);
  if (!pages.writes(cache, request, position)) return;
  const int64_t offset = pages.find_row(cache, request, position);
  if (offset >= 0) write_row(cache, offset, values);
}

// Rows of a cache as floats: pointers into the cache where it holds floats, else decoded copies.
class RowList {
 public:
  void clear() {
    rows_.clear();
    num_decoded_ = 0;
  }
  void reserve_decoded(int64_t rows, int64_t width) {
    if (static_cast<int64_t>(decoded_.size()) < rows * width) decoded_.resize(rows * width);
  }
  void add(const float* row) { rows_.push_back(row); }
  void add_stored(const vn_cache& cache, int64_t offset) {
    add_stored(cache, offset, cache.width);
  }
  // The same for the first `width` values at an offset.
  void add_stored(const vn_cache& cache, int64_t offset, int64_t width) {
    if (cache.kind == VN_F32) {
      rows_.push_back(static_cast<const float*>(cache.data) + offset);
      return;
    }
    float* out = decoded_.data() + num_decoded_++ * width;
    decode_row(cache.data, offset, cache.kind, width, out);
    rows_.push_back(out);
  }
  void remove(int64_t count) { rows_.resize(rows_.size() - count); }
  const float* const* data() const { return rows_.data(); }
  int64_t size() const { return static_cast<int64_t>(rows_.size()); }

 private:
  std::vector<const float*> rows_;
  std::vector<float> decoded_;
  int64_t num_decoded_ = 0;
};

}  // namespace VN_BUILD
}  // namespace vn
