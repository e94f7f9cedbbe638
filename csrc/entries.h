// The functions of a build's table (build.h), each defined in the file that the comment names.
#pragma once

#include "build.h"

namespace vn {
namespace VN_BUILD {

// deepseek_v4.cpp
void v4_forward(ThreadPool& pool, Workspace& space, const vn_v4_model& m, const vn_step& step,
                float* streams);
void v4_forward_mtp(ThreadPool& pool, Workspace& space, const vn_v4_model& m, const vn_step& step,
                    const float* streams, float* output);
void v4_logits(ThreadPool& pool, Workspace& space, const vn_v4_model& m, const float* streams,
               int64_t num_rows, bool is_mtp, float* logits);

// deepseek_v41.cpp
void v41_forward(ThreadPool& pool, Workspace& space, const vn_v4_model& m, const vn_step& step,
                 const float* const* table_rows, float* stream);
void v41_logits(ThreadPool& pool, Workspace& space, const vn_v4_model& m, const float* stream,
                int64_t num_rows, float* logits);

// decoder.cpp
void decoder_forward(ThreadPool& pool, Workspace& space, const vn_decoder_model& m,
                     const vn_step& step, float* stream);
void decoder_logits(ThreadPool& pool, Workspace& space, const vn_decoder_model& m,
                    const float* stream, int64_t num_rows, bool is_normed, float* logits);
void decoder_norm(ThreadPool& pool, const vn_decoder_model& m, const float* stream,
                  int64_t num_rows, float* normed);
void decoder_draft(ThreadPool& pool, Workspace& space, const vn_decoder_drafter& drafter,
                   const vn_step& step, const float* streams, float* output);
void decoder_settle(ThreadPool& pool, Workspace& space, const vn_decoder_model& m,
                    const vn_step& step);

// sampling.cpp
void sample(ThreadPool& pool, float* logits, int64_t vocab_size, const vn_draws& draws,
            int64_t* token_ids);
void forbid(ThreadPool& pool, float* logits, int64_t vocab_size, const int64_t* rows,
            const uint32_t* masks, int64_t num_masks);

// products.cpp
void matmul(ThreadPool& pool, const vn_matrix& matrix, const float* x, int64_t num_rows,
            float* output);

// recurrent.cpp
void gated_delta_scan(ThreadPool& pool, const vn_delta_scan& s);

}  // namespace VN_BUILD
}  // namespace vn
