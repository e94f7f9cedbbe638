// One vector build: compiled once for each, with VN_BUILD naming it.
#include "build.h"

#include "decoder.h"
#include "deepseek_v4.h"
#include "sampling.h"

namespace vn {
namespace VN_BUILD {

void matmul(ThreadPool& pool, const vn_matrix& matrix, const float* x, int64_t num_rows,
            float* output) {
  multiply(pool, x, num_rows, matrix, output);
}

}  // namespace VN_BUILD

extern const Build VN_BUILD_TABLE;
const Build VN_BUILD_TABLE = {
    VN_BUILD::v4_forward,       VN_BUILD::v4_forward_mtp, VN_BUILD::v4_logits,
    VN_BUILD::decoder_forward,  VN_BUILD::decoder_logits, VN_BUILD::decoder_norm,
    VN_BUILD::decoder_draft,    VN_BUILD::decoder_settle, VN_BUILD::sample,
    VN_BUILD::forbid,           VN_BUILD::matmul,         VN_BUILD::gated_delta_scan,
};

}  // namespace vn
