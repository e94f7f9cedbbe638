// What a vector build offers: the same functions, compiled once for each kind of processor.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "aligned.h"
#include "thread_pool.h"
#include "vllm_native.h"

namespace vn {

// A step that asks for what its tables do not hold, or sizes that no kernel takes.
class InvalidStep : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Grows, never shrinks; the contents are garbage after a call.
class Scratch {
 public:
  float* take(int64_t count) {
    if (static_cast<int64_t>(values_.size()) < count) values_.resize(count);
    return values_.data();
  }

 private:
  Floats values_;
};

// The buffers of a step, kept between calls.
struct Workspace {
  Scratch input, projected, hyper, post, mix, latent, key_values, rows, index_rows, index_weights,
      queries, index_queries, attended, grouped, output, scores, logits, hidden, parts, weights,
      streams, embedded, lag, turns, layer_inputs, beside, routed, shared_rows[2],
      coded_rows[3];
};

struct Build {
  void (*v4_forward)(ThreadPool&, Workspace&, const vn_v4_model&, const vn_step&, float* streams);
  void (*v4_forward_mtp)(ThreadPool&, Workspace&, const vn_v4_model&, const vn_step&,
                         const float* streams, float* output);
  void (*v4_logits)(ThreadPool&, Workspace&, const vn_v4_model&, const float* streams,
                    int64_t num_rows, bool is_mtp, float* logits);
  void (*v41_forward)(ThreadPool&, Workspace&, const vn_v4_model&, const vn_step&,
                      const float* const* table_rows, float* stream);
  void (*v41_logits)(ThreadPool&, Workspace&, const vn_v4_model&, const float* stream,
                     int64_t num_rows, float* logits);
  void (*decoder_forward)(ThreadPool&, Workspace&, const vn_decoder_model&, const vn_step&,
                          float* stream);
  void (*decoder_logits)(ThreadPool&, Workspace&, const vn_decoder_model&, const float* stream,
                         int64_t num_rows, bool is_normed, float* logits);
  void (*decoder_norm)(ThreadPool&, const vn_decoder_model&, const float* stream, int64_t num_rows,
                       float* normed);
  void (*decoder_draft)(ThreadPool&, Workspace&, const vn_decoder_drafter&, const vn_step&,
                        const float* streams, float* output);
  void (*decoder_settle)(ThreadPool&, Workspace&, const vn_decoder_model&, const vn_step&);
  void (*sample)(ThreadPool&, float* logits, int64_t vocab_size, const vn_draws&,
                 int64_t* token_ids);
  void (*forbid)(ThreadPool&, float* logits, int64_t vocab_size, const int64_t* rows,
                 const uint32_t* masks, int64_t num_masks);
  void (*matmul)(ThreadPool&, const vn_matrix&, const float* x, int64_t num_rows, float* output);
  void (*gated_delta)(ThreadPool&, const vn_delta_scan&);
};

#if defined(__x86_64__)
extern const Build kAvx512Build;
extern const Build kAvx2Build;
#endif
extern const Build kPortableBuild;

}  // namespace vn
