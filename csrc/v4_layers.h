// DeepSeek-V4's and V4.1's layers: attention and experts, each between hyper-connections.
#pragma once

#include "build.h"
#include "hyper_connections.h"
#include "kernels.h"
#include "mixture.h"
#include "v4_attention.h"
#include "wanted_rows.h"

namespace vn {
namespace VN_BUILD {

// What one layer is run over.
struct V4Rows {
  const vn_step& step;
  V4Attention& attention;
  const std::vector<int64_t>& wanted;  // rows whose streams are read behind it, ascending
  bool has_entries;                    // the layer's were made of more rows than these
};

// streams [T, n, D] before and after the layer; of rows that are not wanted they may be anything
// behind it. All rows' caches are written. lag: see read_streams.
inline void run_v4_layer(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
                         const vn_v4_layer& layer, const V4Rows& rows, float* streams, float* lag) {
  const int64_t d = m.hidden_size, n = m.num_streams;
  const std::vector<int64_t>& wanted = rows.wanted;
  int64_t t = rows.step.num_tokens;
  float* x = space.input.take(t * d);
  HyperState hyper{space.hyper, space.post, space.mix};
  read_streams(pool, m, layer.attn_hyper, layer.attn_norm, streams, t, hyper, x, lag);
  float* output = space.output.take(t * d);
  rows.attention.attend(layer, x, wanted, output, rows.has_entries);
  const int64_t* token_ids = rows.step.token_ids;
  std::vector<int64_t> wanted_ids;
  const bool is_whole = static_cast<int64_t>(wanted.size()) == t;
  if (!is_whole) {
    if (wanted.empty()) return;
    gather_rows(wanted, d, output);
    gather_rows(wanted, n * d, streams);
    gather_rows(wanted, n, hyper.post.take(t * n));
    gather_rows(wanted, n * n, hyper.mix.take(t * n * n));
    if (lag != nullptr) gather_rows(wanted, n, lag);
    for (const int64_t row : wanted) wanted_ids.push_back(token_ids[row]);
    token_ids = wanted_ids.data();
    t = static_cast<int64_t>(wanted.size());
  }
  write_streams(pool, m, output, t, hyper, streams);
  read_streams(pool, m, layer.ffn_hyper, layer.ffn_norm, streams, t, hyper, x, lag);
  mix_v4_experts(pool, space, m, layer, token_ids, x, t, output);
  write_streams(pool, m, output, t, hyper, streams);
  if (!is_whole) {
    scatter_rows(wanted, n * d, streams);
    if (lag != nullptr) scatter_rows(wanted, n, lag);
  }
}

inline void embed_rows(ThreadPool& pool, const vn_v4_model& m, const vn_step& step, float* out) {
  for_rows(pool, step.num_tokens, m.hidden_size, [&](int64_t row) {
    decode_matrix_row(m.embed, step.token_ids[row], out + row * m.hidden_size);
  });
}

}  // namespace VN_BUILD
}  // namespace vn
