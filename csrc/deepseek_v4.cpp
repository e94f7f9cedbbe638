// DeepSeek-V4's layers over a step. The maths is that of the torch modules of the same names in
// vllm/model_executor/models/deepseek_v4.
#include "build.h"
#include "entries.h"
#include "hyper_connections.h"
#include "kernels.h"
#include "mixture.h"
#include "products.h"
#include "v4_attention.h"
#include "wanted_rows.h"

namespace vn {
namespace VN_BUILD {

class V4Layers {
 public:
  V4Layers(ThreadPool& pool, Workspace& space, const vn_v4_model& model, const vn_step& step)
      : pool_(pool),
        space_(space),
        m_(model),
        step_(step),
        attention_(pool, space, model, step) {}

  // streams [T, n, D] before and after the layer; of the last layer those of `wanted` rows alone,
  // ascending flat ones. All rows' caches are written.
  void run(const vn_v4_layer& layer, const std::vector<int64_t>& wanted, float* streams) {
    const int64_t d = m_.hidden_size, n = m_.num_streams;
    int64_t t = step_.num_tokens;
    float* x = space_.input.take(t * d);
    HyperState hyper{space_.hyper, space_.post, space_.mix};
    read_streams(pool_, m_, layer.attn_hyper, layer.attn_norm, streams, t, hyper, x);
    float* output = space_.output.take(t * d);
    attention_.attend(layer, x, wanted, output);
    const int64_t* token_ids = step_.token_ids;
    std::vector<int64_t> wanted_ids;
    const bool is_whole = static_cast<int64_t>(wanted.size()) == t;
    if (!is_whole) {
      if (wanted.empty()) return;
      gather_rows(wanted, d, output);
      gather_rows(wanted, n * d, streams);
      gather_rows(wanted, n, hyper.post.take(t * n));
      gather_rows(wanted, n * n, hyper.mix.take(t * n * n));
      for (const int64_t row : wanted) wanted_ids.push_back(token_ids[row]);
      token_ids = wanted_ids.data();
      t = static_cast<int64_t>(wanted.size());
    }
    write_streams(pool_, m_, output, t, hyper, streams);
    read_streams(pool_, m_, layer.ffn_hyper, layer.ffn_norm, streams, t, hyper, x);
    mix_v4_experts(pool_, space_, m_, layer, token_ids, x, t, output);
    write_streams(pool_, m_, output, t, hyper, streams);
    if (!is_whole) scatter_rows(wanted, n * d, streams);
  }

  // Raises what went wrong in any thread.
  void check() const { attention_.check(); }

 private:
  ThreadPool& pool_;
  Workspace& space_;
  const vn_v4_model& m_;
  const vn_step& step_;
  V4Attention attention_;
};

inline void embed_rows(ThreadPool& pool, const vn_v4_model& m, const vn_step& step, float* out) {
  for_rows(pool, step.num_tokens, m.hidden_size, [&](int64_t row) {
    decode_matrix_row(m.embed, step.token_ids[row], out + row * m.hidden_size);
  });
}

void v4_forward(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
                const vn_step& step, float* streams) {
  const int64_t d = m.hidden_size;
  float* embedded = space.embedded.take(step.num_tokens * d);
  embed_rows(pool, m, step, embedded);
  for (int64_t row = 0; row < step.num_tokens * m.num_streams; ++row) {
    std::memcpy(streams + row * d, embedded + row / m.num_streams * d, sizeof(float) * d);
  }
  V4Layers layers(pool, space, m, step);
  const std::vector<int64_t> all = list_rows(step.num_tokens), wanted = find_wanted(step);
  for (int32_t i = 0; i < m.num_layers; ++i) {
    layers.run(m.layers[i], i + 1 < m.num_layers ? all : wanted, streams);
  }
  layers.check();
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
  V4Layers layers(pool, space, m, step);
  layers.run(*m.mtp, list_rows(t), output);
  layers.check();
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
