// The products of bytes.h by AVX-512 VNNI: beside the builds, which run on processors without it too.
#define VN_BUILD vnni
#include "bytes.h"

namespace vn {

#if defined(__AVX512VNNI__)
void dot_byte_panel_vnni(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                         int64_t panel, float* sums) {
  vnni::dot_byte_panel(x, row, rows, m, panel, sums);
}
#else
void dot_byte_panel_vnni(const ByteInputs&, int64_t, int64_t, const vn_matrix&, int64_t, float*) {}
#endif

}  // namespace vn
