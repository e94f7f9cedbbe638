// The matrix unit's products of bytes on a processor that has none: its instructions are written out
// here, with the rules whose breach is an invalid instruction, and products by tiles are compared with
// those by vectors (`make emulated-tiles`). The processor needs AVX-512 VNNI.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace emulated {

struct Tile {
  int rows = 0, row_bytes = 0;
  uint8_t bytes[16][64] = {};
};
Tile tiles[8];
long num_products = 0;

void require(bool holds, const char* rule) {
  if (holds) return;
  std::fprintf(stderr, "invalid instruction: %s\n", rule);
  std::exit(1);
}

int& dword(Tile& tile, int row, int column) {
  return *reinterpret_cast<int*>(tile.bytes[row] + 4 * column);
}

Tile& configured(int index) {
  require(tiles[index].rows > 0, "a tile that is not set up");
  return tiles[index];
}

void load_config(const void* memory) {
  const uint8_t* setup = static_cast<const uint8_t*>(memory);
  require(setup[0] == 1, "palette");
  for (int i = 1; i < 16; ++i) require(setup[i] == 0, "reserved bytes");
  for (int i = 0; i < 16; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, setup + 16 + 2 * i, sizeof(row_bytes));
    const int rows = setup[48 + i];
    require(i < 8 || (rows == 0 && row_bytes == 0), "more tiles than there are");
    require(rows <= 16 && row_bytes <= 64, "a tile too large");
    require((rows == 0) == (row_bytes == 0), "rows without columns");
    if (i >= 8) continue;
    tiles[i] = Tile();
    tiles[i].rows = rows;
    tiles[i].row_bytes = row_bytes;
  }
}

void release() {
  for (Tile& tile : tiles) tile = Tile();
}

void zero(int index) { std::memset(configured(index).bytes, 0, sizeof(Tile::bytes)); }

void load(int index, const void* memory, int64_t stride) {
  zero(index);
  Tile& tile = tiles[index];
  for (int r = 0; r < tile.rows; ++r) {
    std::memcpy(tile.bytes[r], static_cast<const char*>(memory) + r * stride, tile.row_bytes);
  }
}

void store(int index, void* memory, int64_t stride) {
  const Tile& tile = configured(index);
  for (int r = 0; r < tile.rows; ++r) {
    std::memcpy(static_cast<char*>(memory) + r * stride, tile.bytes[r], tile.row_bytes);
  }
}

void multiply_bytes(int sums, int left, int right) {
  Tile &c = configured(sums), &a = configured(left), &b = configured(right);
  require(sums != left && sums != right && left != right, "one tile twice");
  require(a.row_bytes % 4 == 0 && b.row_bytes % 4 == 0, "rows of no whole words");
  require(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes / 4 == b.rows, "shapes");
  ++num_products;
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      for (int k = 0; k < a.row_bytes; ++k) {
        const int input = static_cast<int8_t>(a.bytes[m][k]);
        dword(c, m, n) += input * static_cast<int8_t>(b.bytes[k / 4][4 * n + k % 4]);
      }
    }
  }
}

void multiply_bf16(int, int, int) { require(false, "only products of bytes are compared here"); }

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbssd emulated::multiply_bytes
#define _tile_dpbf16ps emulated::multiply_bf16

#define VN_BUILD vnni
#define VN_DOT_BYTE_PANEL dot_byte_panel_vnni
#include "../../csrc/bytes_vnni.cpp"
#include "../../csrc/tiles.cpp"

namespace {

using namespace vn;

struct Case {
  int kind, group;
  bool is_by_row, has_offsets;
  int64_t cols;
  bool is_tiled;
};

constexpr Case kCases[] = {
    {VN_CODE_INT4, 32, false, false, 1024, true},  {VN_CODE_INT4, 128, false, false, 512, true},
    {VN_CODE_INT4, 48, false, true, 480, true},    {VN_CODE_INT4, 24, false, false, 240, false},
    {VN_CODE_INT4, 32, false, false, 72, false},   {VN_CODE_UINT4, 32, false, true, 256, true},
    {VN_CODE_IQ4, 32, false, false, 256, true},    {VN_CODE_E2M1, 32, false, false, 256, true},
    {VN_CODE_INT6, 16, false, true, 512, true},    {VN_CODE_INT8, 32, false, false, 96, true},
    {VN_CODE_INT8, 3072, true, false, 3072, true}, {VN_CODE_INT8, 512, true, false, 515, false},
};

// Whether both ways give the same bits, and the unit was used where it is to be.
bool compare(const Case& own, int64_t rows) {
  std::mt19937 draw(static_cast<unsigned>(rows * 1000 + own.group));
  const auto between = [&](float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(draw);
  };
  constexpr int64_t kOutputs = 2 * vnni::kPanel;
  const int64_t units = vnni::ceil_div(own.cols, vnni::unit_shape(own.kind).codes);
  const int64_t words = vnni::count_words(own.kind, units);
  const int64_t groups = vnni::ceil_div(own.cols, own.group);
  std::vector<uint32_t> codes(words * kOutputs);
  std::vector<float> scales(groups * kOutputs), offsets(groups * kOutputs);
  for (uint32_t& code : codes) code = draw();
  for (float& scale : scales) scale = between(1e-4f, 0.1f);
  for (float& offset : offsets) offset = between(-0.1f, 0.1f);
  vn_panels panels = {};
  panels.codes = codes.data();
  panels.scales = scales.data();
  panels.offsets = own.has_offsets ? offsets.data() : nullptr;
  panels.code_kind = own.kind;
  panels.group = own.group;
  panels.factor_groups = 1;
  panels.scale_step = 1;
  panels.input_kind = own.is_by_row ? VN_INPUT_BYTES_BY_ROW : VN_INPUT_BYTES_BY_GROUP;
  vn_matrix matrix = {};
  matrix.data = &panels;
  matrix.rows = kOutputs;
  matrix.cols = own.cols;
  matrix.kind = VN_PANELS;

  const vnni::ByteForm form(matrix);
  std::vector<int8_t> inputs(rows * form.stride());
  std::vector<float> input_scales(rows * groups), x(own.cols);
  std::vector<int32_t> sums(rows * groups);
  for (int64_t r = 0; r < rows; ++r) {
    for (float& value : x) value = between(-1, 1);
    if (r == 3) x[5] = INFINITY;
    vnni::round_row_to_bytes(form, x.data(), inputs.data() + r * form.stride(),
                             input_scales.data() + r * groups, sums.data() + r * groups);
  }
  std::vector<float> outputs[2];
  bool used_unit = false;
  for (const bool has_unit : {false, true}) {
    Units processor;
    processor.byte_dots = true;
    processor.byte_tiles = has_unit;
    const ByteInputs all = {inputs.data(), input_scales.data(), sums.data(),
                            form.stride(), groups, processor};
    outputs[has_unit].assign(rows * 200, -1.0f);
    const long before = emulated::num_products;
    for (int64_t p = 0; p < 2; ++p) {
      const PanelPart part = {p, p * 10, 64 - p * 28, outputs[has_unit].data() + p * 64, 200};
      dot_byte_panel_vnni(all, 0, rows, matrix, part);
    }
    used_unit = emulated::num_products > before;
  }
  const size_t size = outputs[0].size() * sizeof(float);
  const bool is_same = std::memcmp(outputs[0].data(), outputs[1].data(), size) == 0;
  return is_same && used_unit == (own.is_tiled && rows >= vnni::kLeastTiledRows);
}

}  // namespace

int main() {
  int num_failed = 0, num_compared = 0;
  for (const Case& own : kCases) {
    for (const int64_t rows : {1, 31, 32, 33, 47, 48, 63, 64, 100, 300}) {
      ++num_compared;
      if (compare(own, rows)) continue;
      ++num_failed;
      std::printf("codes %d, groups of %d: %d rows differ\n", own.kind, own.group, int(rows));
    }
  }
  std::printf("%d products by %ld tiles, %d differ\n", num_compared, emulated::num_products,
              num_failed);
  return num_failed == 0 ? 0 : 1;
}
