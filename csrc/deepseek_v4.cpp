// DeepSeek-V4's layers over a step. The maths is that of the torch modules of the same names in
// vllm/model_executor/models/deepseek_v4.
#include "build.h"
#include "entries.h"
#include "hyper_connections.h"
#include "kernels.h"
#include "layer_rows.h"
#include "products.h"
#include "v4_layers.h"
#include "wanted_rows.h"

namespace vn {
namespace VN_BUILD {

void v4_forward(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
                const vn_step& step, float* streams) {
  const int64_t d = m.hidden_size;
  float* embedded = space.embedded.take(step.num_tokens * d);
  embed_rows(pool, m, step, embedded);
  for (int64_t row = 0; row < step.num_tokens * m.num_streams; ++row) {
    std::memcpy(streams + row * d, embedded + row / m.num_streams * d, sizeof(float) * d);
  }
  LayerRows rows(pool, space, m, step, -1);
  for (int32_t i = 0; i < m.num_layers; ++i) {
    if (rows.can_narrow(i)) rows.narrow(i, streams, nullptr);
    if (rows.step().num_tokens == 0) break;
    const std::vector<int64_t> wanted = rows.find_wanted_behind(i);
    const V4Rows own = {rows.step(), rows.attention(), wanted, false};
    run_v4_layer(pool, space, m, m.layers[i], own, streams, nullptr);
  }
  rows.check();
  if (rows.is_narrow()) spread_rows(rows.rows(), step.num_tokens, m.num_streams * d, streams);
}

void v4_forward_mtp(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
                    const vn_step& step, const float* streams, float* output) {
  const int64_t d = m.hidden_size, n = m.num_streams, t = step.num_tokens;
  float* embedded = space.embedded.take(t * d);
  embed_rows(pool, m, step, embedded);
  float* normed = space.streams.take(t * n * d);
  for_rows(pool, t, 8 * n * d, [&](int64_t row) {
    float* own = embedded + row * d;
    rms_norm(own, m.mtp_enorm, 1.0f, d, m.norm_eps, own);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t at = (row * n + j) * d;
      rms_norm(streams + at, m.mtp_hnorm, 1.0f, d, m.norm_eps, normed + at);
    }
  });
  float* projected = space.output.take(t * d);
  const Product products[2] = {
      whole_product(embedded, d, t, m.mtp_e_proj, projected, d),
      whole_product(normed, d, t * n, m.mtp_h_proj, output, d),
  };
  multiply_all(pool, products, 2);
  for_rows(pool, t * n, d, [&](int64_t row) {
    for (int64_t i = 0; i < d; ++i) output[row * d + i] += projected[row / n * d + i];
  });
  V4Choices choices;
  V4Attention attention(pool, space, m, step, choices);
  const std::vector<int64_t> all = list_rows(t);
  run_v4_layer(pool, space, m, *m.mtp, {step, attention, all, false}, output, nullptr);
  attention.check();
}

void v4_logits(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
               const float* streams, int64_t num_rows, bool is_mtp, float* logits) {
  const int64_t d = m.hidden_size;
  float* hidden = space.input.take(num_rows * d);
  const vn_hyper& hyper = is_mtp ? m.mtp_head_hyper : m.head_hyper;
  collapse_streams(pool, m, hyper, is_mtp ? m.mtp_norm : m.norm, streams, num_rows, space.hyper,
                   hidden);
  multiply(pool, hidden, num_rows, m.head, logits);
}

}  // namespace VN_BUILD
}  // namespace vn
