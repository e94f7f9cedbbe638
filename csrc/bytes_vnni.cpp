// The products of bytes.h by AVX-512 VNNI: beside the builds, which run on processors without it too.
#define VN_BUILD vnni
#include "bytes.h"

namespace vn {

#if defined(__AVX512VNNI__)
void dot_byte_panel_vnni(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                         const PanelPart& part) {
  vnni::dot_byte_panel(x, row, rows, m, part);
}
#else
void dot_byte_panel_vnni(const ByteInputs&, int64_t, int64_t, const vn_matrix&, const PanelPart&) {}
#endif

}  // namespace vn
