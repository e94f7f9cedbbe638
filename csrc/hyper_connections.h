// Hyper-connections: n residual streams, read and written around each sublayer.
#pragma once

#include "build.h"
#include "kernels.h"

namespace vn {
namespace VN_BUILD {

constexpr int kMaxStreams = 8;

// Buffers that carry what reading learnt to the writing: projected [T, m], post [T, n],
// mix [T, n, n].
struct HyperState {
  Scratch& projected;
  Scratch& post;
  Scratch& mix;
};

// Makes a positive n x n matrix nearly doubly stochastic; the last pass is over columns.
inline void sinkhorn(float* matrix, int n, int iterations, float eps) {
  float sums[kMaxStreams];
  for (int pass = 0; pass < 2 * iterations - 1; ++pass) {
    if (pass % 2 == 0) {
      for (int j = 0; j < n; ++j) {
        sums[j] = eps;
        for (int i = 0; i < n; ++i) sums[j] += matrix[i * n + j];
      }
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < n; ++j) matrix[i * n + j] /= sums[j];
      }
    } else {
      for (int i = 0; i < n; ++i) {
        sums[i] = eps;
        for (int j = 0; j < n; ++j) sums[i] += matrix[i * n + j];
      }
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < n; ++j) matrix[i * n + j] /= sums[i];
      }
    }
  }
}

// The same for n = 4, the published model's: a matrix is one vector of sixteen lanes, and the
// compiler keeps the loops in registers.
inline void sinkhorn_four(float* matrix, int iterations, float eps) {
  float m[16], sums[4];
  std::memcpy(m, matrix, sizeof(m));
  for (int pass = 0; pass < iterations; ++pass) {
    if (pass > 0) {
      for (int i = 0; i < 4; ++i) {
        sums[i] = eps + m[4 * i] + m[4 * i + 1] + m[4 * i + 2] + m[4 * i + 3];
      }
      for (int i = 0; i < 16; ++i) m[i] /= sums[i / 4];
    }
    for (int j = 0; j < 4; ++j) sums[j] = eps + m[j] + m[4 + j] + m[8 + j] + m[12 + j];
    for (int i = 0; i < 16; ++i) m[i] /= sums[i % 4];
  }
  std::memcpy(matrix, m, sizeof(m));
}

inline void softmax_row(float* row, int n, float eps) {
  float top = row[0], total = 0.0f;
  for (int j = 1; j < n; ++j) top = std::max(top, row[j]);
  for (int j = 0; j < n; ++j) {
    row[j] = std::exp(row[j] - top);
    total += row[j];
  }
  for (int j = 0; j < n; ++j) row[j] = row[j] / total + eps;
}

// out = sum of weights[i] * streams[i].
inline void collapse(const float* weights, const float* streams, int n, int64_t width, float* out) {
  for (int64_t at = 0; at < width; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
    Vec total = zero();
    for (int i = 0; i < n; ++i) {
      total = fma(fill(weights[i]), load_some(streams + i * width + at, lanes), total);
    }
    store_some(out + at, total, lanes);
  }
}

// Reads a sublayer's normed input x [T, D] from streams [T, n, D].
inline void read_streams(ThreadPool& pool, const vn_v4_model& m, const vn_hyper& hyper,
                         const float* norm, const float* streams, int64_t t, HyperState& state,
                         float* x) {
  const int n = m.num_streams;
  const int64_t d = m.hidden_size, flat = n * d, width = (2 + n) * n;
  float* projected = state.projected.take(t * width);
  float* post = state.post.take(t * n);
  float* mix = state.mix.take(t * n * n);
  const vn_matrix fn = float_matrix(hyper.fn, width, flat);
  multiply(pool, streams, t, fn, projected);
  for_rows(pool, t, 8 * flat + 100 * m.sinkhorn_iterations, [&](int64_t row) {
    float* own = projected + row * width;
    const float inverse = inverse_rms(streams + row * flat, flat, m.norm_eps);
    for (int64_t i = 0; i < width; ++i) {
      const float scale = hyper.scale[i < n ? 0 : i < 2 * n ? 1 : 2];
      own[i] = own[i] * inverse * scale + hyper.base[i];
    }
    float weights[kMaxStreams];
    for (int i = 0; i < n; ++i) {
      weights[i] = sigmoid(own[i]) + m.hyper_eps;
      post[row * n + i] = sigmoid(own[n + i]) * 2.0f;
    }
    float* matrix = mix + row * n * n;
    std::memcpy(matrix, own + 2 * n, sizeof(float) * n * n);
    for (int i = 0; i < n; ++i) softmax_row(matrix + i * n, n, m.hyper_eps);
    if (n == 4) {
      sinkhorn_four(matrix, m.sinkhorn_iterations, m.hyper_eps);
    } else {
      sinkhorn(matrix, n, m.sinkhorn_iterations, m.hyper_eps);
    }
    collapse(weights, streams + row * flat, n, d, x + row * d);
    rms_norm(x + row * d, norm, 1.0f, d, m.norm_eps, x + row * d);
  });
}

// X'_j = post_j * output + sum over i of mix_ij * X_i, in place.
inline void write_streams(ThreadPool& pool, const vn_v4_model& m, const float* output, int64_t t,
                          HyperState& state, float* streams) {
  const int n = m.num_streams;
  const int64_t d = m.hidden_size;
  const float* post = state.post.take(t * n);
  const float* mix = state.mix.take(t * n * n);
  for_rows(pool, t, 2 * n * n * d, [&](int64_t row) {
    float* own = streams + row * n * d;
    for (int64_t at = 0; at < d; at += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, d - at));
      const Vec added = load_some(output + row * d + at, lanes);
      Vec old[kMaxStreams];
      for (int i = 0; i < n; ++i) old[i] = load_some(own + i * d + at, lanes);
      for (int j = 0; j < n; ++j) {
        Vec total = mul(fill(post[row * n + j]), added);
        for (int i = 0; i < n; ++i) {
          total = fma(fill(mix[(row * n + i) * n + j]), old[i], total);
        }
        store_some(own + j * d + at, total, lanes);
      }
    }
  });
}

// Collapses streams [M, n, D] after the last layer to normed rows [M, D].
inline void collapse_streams(ThreadPool& pool, const vn_v4_model& m, const vn_hyper& hyper,
                             const float* norm, const float* streams, int64_t rows,
                             Scratch& scratch, float* hidden) {
  const int n = m.num_streams;
  const int64_t d = m.hidden_size, flat = n * d;
  float* projected = scratch.take(rows * n);
  const vn_matrix fn = float_matrix(hyper.fn, n, flat);
  multiply(pool, streams, rows, fn, projected);
  for_rows(pool, rows, 8 * flat, [&](int64_t row) {
    const float inverse = inverse_rms(streams + row * flat, flat, m.norm_eps);
    float weights[kMaxStreams];
    for (int i = 0; i < n; ++i) {
      const float value = projected[row * n + i] * inverse * hyper.scale[0] + hyper.base[i];
      weights[i] = sigmoid(value) + m.hyper_eps;
    }
    collapse(weights, streams + row * flat, n, d, hidden + row * d);
    rms_norm(hidden + row * d, norm, 1.0f, d, m.norm_eps, hidden + row * d);
  });
}

}  // namespace VN_BUILD
}  // namespace vn
