// Products of packed codes with inputs of eight bits, by a build's own vectors: see bytes.h.
#include "bytes.h"

#include <algorithm>

#include "byte_tiles.h"
#include "panels.h"

namespace vn {
namespace VN_BUILD {

void dot_bytes_by_panels(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                         int64_t output, int64_t count, float* const* y, int64_t y_stride,
                         int64_t first) {
  for (int64_t at = output; at < output + count;) {
    const int64_t panel = at / kPanel, start = at - panel * kPanel;
    const int64_t size = std::min(kPanel - start, output + count - at);
    const PanelPart part = {panel, start, size, y[0] + first + at - output, y_stride};
    if (x.units.byte_tables) {
      dot_byte_panel_vbmi(x, row, rows, m, part);
    } else if (x.units.byte_dots) {
      dot_byte_panel_vnni(x, row, rows, m, part);
    } else {
      dot_byte_panel(x, row, rows, m, part);
    }
    at += size;
  }
}

}  // namespace VN_BUILD
}  // namespace vn
