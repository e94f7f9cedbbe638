// What a table knows of a step's last tokens, added to the streams where they agree with it (Engram).
// The maths is that of deepseek_v41/engram.py.
#pragma once

#include <cmath>
#include <vector>

#include "build.h"
#include "kernels.h"

namespace vn {
namespace VN_BUILD {

// Rows whose keys and values are made together: bounds the scratch of a long prefill.
constexpr int64_t kGateBlock = 256;

// The sum of (x * a) * (y * b).
inline float dot_weighted(const float* x, const float* a, const float* y, const float* b,
                          int64_t count) {
  Vec total = zero();
  for (int64_t at = 0; at < count; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - at));
    const Vec left = mul(load_some(x + at, lanes), load_some(a + at, lanes));
    const Vec right = mul(load_some(y + at, lanes), load_some(b + at, lanes));
    total = fma(left, right, total);
  }
  return sum(total);
}

// Streams [T, n, D] of a step whose flat rows are `rows` of the whole one; table_rows [whole T, cols].
inline void add_ngrams(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
                       const vn_ngram_gate& gate, const float* table_rows, const vn_step& step,
                       const std::vector<int64_t>& rows, float* streams) {
  const int64_t d = m.hidden_size, n = m.num_streams, width = (n + 1) * d;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  const std::vector<int32_t> sources(rows.begin(), rows.end());
  for (int64_t first = 0; first < step.num_tokens; first += kGateBlock) {
    const int64_t count = std::min(kGateBlock, step.num_tokens - first);
    float* mixed = space.hidden.take(count * width);
    const Product product = {table_rows, gate.wkv.cols, sources.data() + first, count, &gate.wkv, 0,
                             width,      mixed,         width};
    multiply_all(pool, &product, 1);
    for_rows(pool, count, 10 * width, [&](int64_t i) {
      if (step.token_ids[first + i] == m.image_token_id) return;
      const float *keys = mixed + i * width, *value = keys + n * d;
      for (int64_t j = 0; j < n; ++j) {
        float* stream = streams + ((first + i) * n + j) * d;
        const float* key = keys + j * d;
        const float norms =
            inverse_rms(stream, d, m.norm_eps) * inverse_rms(key, d, m.norm_eps) * scale;
        const float agreement =
            dot_weighted(stream, gate.q_weight + j * d, key, gate.k_weight + j * d, d) * norms;
        // A square root of either sign.
        const float root = std::sqrt(std::max(std::abs(agreement), 1e-6f));
        const float share = sigmoid(agreement > 0 ? root : agreement < 0 ? -root : 0.0f);
        for (int64_t k = 0; k < d; ++k) stream[k] += share * value[k];
      }
    });
  }
}

}  // namespace VN_BUILD
}  // namespace vn
