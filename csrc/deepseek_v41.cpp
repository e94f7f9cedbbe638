// DeepSeek-V4.1's layers over a step. The maths is that of the torch modules of the same names in
// vllm/model_executor/models/deepseek_v41.
#include <chrono>
#include <cstdint>
#include <thread>

#include "build.h"
#include "entries.h"
#include "layer_rows.h"
#include "ngram_gate.h"
#include "products.h"
#include "v4_layers.h"

namespace vn {
namespace VN_BUILD {

namespace {

// The entries of a layer, of all rows, before some are left out of it.
void make_entries(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
                  const vn_v4_layer& layer, LayerRows& rows, const float* streams,
                  const float* lag) {
  const int64_t d = m.hidden_size, n = m.num_streams, t = rows.step().num_tokens;
  float* x = space.input.take(t * d);
  for_rows(pool, t, 4 * n * d, [&](int64_t row) {
    collapse(lag + row * n, streams + row * n * d, n, d, x + row * d);
    rms_norm(x + row * d, layer.attn_norm, 1.0f, d, m.norm_eps, x + row * d);
  });
  rows.attention().make_entries(layer, x);
}

// Python has a table's rows read while the layers before run: their address is 0 until they are there.
// 1: they could not be read.
const float* wait_for_rows(const float* const* table_rows, int32_t index) {
  const auto* place = reinterpret_cast<const uintptr_t*>(table_rows) + index;
  uintptr_t address = 0;
  while ((address = __atomic_load_n(place, __ATOMIC_ACQUIRE)) == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  if (address == 1) throw InvalidStep("the rows of a table of n-grams could not be read");
  return reinterpret_cast<const float*>(address);
}

}  // namespace

void v41_forward(ThreadPool& pool, Workspace& space, const vn_v4_model& m, const vn_step& step,
                 const float* const* table_rows, float* stream) {
  const int64_t d = m.hidden_size, n = m.num_streams, t = step.num_tokens;
  float* embedded = space.embedded.take(t * d);
  float* streams = space.streams.take(t * n * d);
  float* lag = space.lag.take(t * n);
  embed_rows(pool, m, step, embedded);
  for (int64_t row = 0; row < t * n; ++row) {
    std::memcpy(streams + row * d, embedded + row / n * d, sizeof(float) * d);
    lag[row] = row % n == 0 ? 1.0f : 0.0f;
  }
  LayerRows rows(pool, space, m, step, m.cut);
  for (int32_t i = 0; i < m.num_layers && rows.step().num_tokens > 0; ++i) {
    const vn_v4_layer& layer = m.layers[i];
    if (layer.ngrams != nullptr) {
      const float* found = wait_for_rows(table_rows, layer.ngrams->index);
      add_ngrams(pool, space, m, *layer.ngrams, found, rows.step(), rows.rows(), streams);
    }
    const bool has_entries = i == m.cut && rows.can_narrow(i);
    if (has_entries) make_entries(pool, space, m, layer, rows, streams, lag);
    if (rows.can_narrow(i)) rows.narrow(i, streams, lag);
    const std::vector<int64_t> wanted = rows.find_wanted_behind(i);
    const V4Rows own = {rows.step(), rows.attention(), wanted, has_entries};
    run_v4_layer(pool, space, m, layer, own, streams, lag);
  }
  rows.check();
  if (rows.is_narrow()) std::fill_n(stream, t * d, 0.0f);
  for_rows(pool, rows.step().num_tokens, 2 * n * d, [&](int64_t row) {
    collapse(lag + row * n, streams + row * n * d, n, d, stream + rows.rows()[row] * d);
  });
}

void v41_logits(ThreadPool& pool, Workspace& space, const vn_v4_model& m, const float* stream,
                int64_t num_rows, float* logits) {
  const int64_t d = m.hidden_size;
  float* hidden = space.input.take(num_rows * d);
  for_rows(pool, num_rows, 4 * d, [&](int64_t row) {
    rms_norm(stream + row * d, m.norm, 1.0f, d, m.norm_eps, hidden + row * d);
  });
  multiply(pool, hidden, num_rows, m.head, logits);
}

}  // namespace VN_BUILD
}  // namespace vn
