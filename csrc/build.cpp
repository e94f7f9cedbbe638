// The table of a vector build: what its files offer.
#include "build.h"
#include "entries.h"

namespace vn {

extern const Build VN_BUILD_TABLE;
const Build VN_BUILD_TABLE = {
    VN_BUILD::v4_forward,       VN_BUILD::v4_forward_mtp, VN_BUILD::v4_logits,
    VN_BUILD::v41_forward,      VN_BUILD::v41_logits,
    VN_BUILD::decoder_forward,  VN_BUILD::decoder_logits, VN_BUILD::decoder_norm,
    VN_BUILD::decoder_draft,    VN_BUILD::decoder_settle, VN_BUILD::sample,
    VN_BUILD::forbid,           VN_BUILD::matmul,         VN_BUILD::gated_delta_scan,
};

}  // namespace vn
