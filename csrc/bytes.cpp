// Products of packed codes with inputs of eight bits, by a build's own vectors: see bytes.h.
#include "bytes.h"

#include <algorithm>

#include "aligned.h"
#include "byte_tiles.h"
#include "panels.h"

namespace vn {
namespace VN_BUILD {

void dot_bytes_by_panels(const ByteInputs& x, int64_t row, int64_t rows, const vn_matrix& m,
                         int64_t output, int64_t count, float* const* y, int64_t y_stride,
                         int64_t first) {
  thread_local Floats planes;
  const bool is_sum = x.planes > 1;
  row *= x.planes;
  rows *= x.planes;
  if (is_sum) planes.resize(rows * kPanel);
  for (int64_t at = output; at < output + count;) {
    const int64_t panel = at / kPanel, start = at - panel * kPanel;
    const int64_t size = std::min(kPanel - start, output + count - at);
    float* const own = y[0] + first + at - output;
    const PanelPart part = {panel, start, size, is_sum ? planes.data() : own, is_sum ? kPanel : y_stride};
    if (x.units.byte_tables) {
      dot_byte_panel_vbmi(x, row, rows, m, part);
    } else if (x.units.byte_dots) {
      dot_byte_panel_vnni(x, row, rows, m, part);
    } else {
      dot_byte_panel(x, row, rows, m, part);
    }
    for (int64_t r = 0; is_sum && r < rows / 2; ++r) {
      const float *high = planes.data() + 2 * r * kPanel, *low = high + kPanel;
      for (int64_t i = 0; i < size; ++i) own[r * y_stride + i] = high[i] + low[i];
    }
    at += size;
  }
}

}  // namespace VN_BUILD
}  // namespace vn
