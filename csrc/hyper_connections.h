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

// Divides n vectors, so far from one another, by their sum.
inline void normalise(Vec* values, int n, int stride, float eps) {
  Vec total = fill(eps);
  for (int i = 0; i < n; ++i) total = add(total, values[i * stride]);
  const Vec inverse = div(fill(1.0f), total);
  for (int i = 0; i < n; ++i) values[i * stride] = mul(values[i * stride], inverse);
}

inline void softmax_lanes(Vec* values, int n, float eps) {
  Vec top = values[0], total = zero();
  for (int j = 1; j < n; ++j) top = max(top, values[j]);
  for (int j = 0; j < n; ++j) {
    values[j] = exp(sub(values[j], top));
    total = add(total, values[j]);
  }
  for (int j = 0; j < n; ++j) values[j] = add(div(values[j], total), fill(eps));
}

// Sixteen rows at once, a row in each lane: values [(2 + n) * n, kLanes] become the weights to read
// by [n], those to write by [n] and the mixing matrix [n, n]. N: n, or 0 for any.
template <int N>
inline void learn_lanes(int num_streams, int iterations, float eps, float* values) {
  constexpr int kMost = N != 0 ? N : kMaxStreams;
  const int n = N != 0 ? N : num_streams;
  for (int i = 0; i < n; ++i) {
    float *read = values + i * kLanes, *post = values + (n + i) * kLanes;
    store(read, add(sigmoid(load(read)), fill(eps)));
    store(post, mul(sigmoid(load(post)), fill(2.0f)));
  }
  float* matrix = values + 2 * n * kLanes;
  Vec mix[kMost * kMost];
  for (int i = 0; i < n * n; ++i) mix[i] = load(matrix + i * kLanes);
  for (int i = 0; i < n; ++i) softmax_lanes(mix + i * n, n, eps);
  // Sinkhorn: nearly doubly stochastic; the last pass is over columns.
  for (int pass = 0; pass < iterations; ++pass) {
    for (int i = 0; pass > 0 && i < n; ++i) normalise(mix + i * n, n, 1, eps);
    for (int j = 0; j < n; ++j) normalise(mix + j, n, n, eps);
  }
  for (int i = 0; i < n * n; ++i) store(matrix + i * kLanes, mix[i]);
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

// Model: any with num_streams, hidden_size, sinkhorn_iterations, hyper_eps and norm_eps.
//
// Reads a sublayer's normed input x [T, D] from streams [T, n, D]. lag: null, or the weights [T, n] to
// read by, which become those that this sublayer would have read by: the next one does.
template <typename Model>
inline void read_streams(ThreadPool& pool, const Model& m, const vn_hyper& hyper,
                         const float* norm, const float* streams, int64_t t, HyperState& state,
                         float* x, float* lag = nullptr) {
  const int n = m.num_streams;
  const int64_t d = m.hidden_size, flat = n * d, width = (2 + n) * n;
  float* projected = state.projected.take(t * width);
  float* post = state.post.take(t * n);
  float* mix = state.mix.take(t * n * n);
  const vn_matrix fn = float_matrix(hyper.fn, width, flat);
  multiply(pool, streams, t, fn, projected);
  // Full vectors of rows where there are enough for all threads.
  const int64_t least = std::max(t / pool.num_threads(), kChunkWork / (8 * flat));
  const int64_t group = std::clamp<int64_t>(least, 1, kLanes);
  pool.run((t + group - 1) / group, [&](int64_t task) {
    const int64_t first = task * group, rows = std::min(group, t - first);
    float values[(2 + kMaxStreams) * kMaxStreams * kLanes];
    std::fill_n(values, width * kLanes, 0.0f);  // lanes without a row too
    for (int64_t lane = 0; lane < rows; ++lane) {
      const int64_t row = first + lane;
      const float inverse = inverse_rms(streams + row * flat, flat, m.norm_eps);
      for (int64_t i = 0; i < width; ++i) {
        const float scale = hyper.scale[i < n ? 0 : i < 2 * n ? 1 : 2];
        values[i * kLanes + lane] =
            projected[row * width + i] * inverse * scale + hyper.base[i];
      }
    }
    if (n == 4) {
      learn_lanes<4>(n, m.sinkhorn_iterations, m.hyper_eps, values);
    } else {
      learn_lanes<0>(n, m.sinkhorn_iterations, m.hyper_eps, values);
    }
    for (int64_t lane = 0; lane < rows; ++lane) {
      const int64_t row = first + lane;
      float weights[kMaxStreams];
      for (int i = 0; i < n; ++i) {
        weights[i] = values[i * kLanes + lane];
        post[row * n + i] = values[(n + i) * kLanes + lane];
      }
      for (int i = 0; i < n * n; ++i) {
        mix[row * n * n + i] = values[(2 * n + i) * kLanes + lane];
      }
      if (lag != nullptr) std::swap_ranges(weights, weights + n, lag + row * n);
      collapse(weights, streams + row * flat, n, d, x + row * d);
      rms_norm(x + row * d, norm, 1.0f, d, m.norm_eps, x + row * d);
    }
  });
}

// X'_j = post_j * output + sum over i of mix_ij * X_i, in place.
template <typename Model>
inline void write_streams(ThreadPool& pool, const Model& m, const float* output, int64_t t,
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
