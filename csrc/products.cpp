// Products of rows of floats and of matrices of every kind: see products.h.
#include "products.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "aligned.h"
#include "bytes.h"
#include "entries.h"
#include "panels.h"
#include "rounded.h"
#include "stored.h"
#include "vec.h"

namespace vn {
namespace VN_BUILD {

void decode_matrix_row(const vn_matrix& m, int64_t index, float* out) {
  if (m.kind == VN_PANELS) return decode_panel_row(m, index, out);
  if (m.kind == VN_BF16_PANELS) return decode_rounded_row(m, index, out);
  decode_matrix_part(m, index, 0, m.cols, out);
}

// What a block of products has in common.
struct Columns {
  StoredRow rows[kColumns];
  int64_t size;   // of a row
  int64_t group;  // values under one scale
  bool has_byte_scales;
  // So many bytes on lies what is multiplied next: asked for early, as memory is the limit where
  // inputs are few.
  int64_t ahead;
};

// To which cache a tile asks for what comes next.
enum Fetch { kNoFetch = 0, kFetchNear = 3, kFetchFar = 2 };

// Sums of a tile by lane, between two parts of long rows.
struct Lanes {
  float* sums;  // [rows + 8, kColumns, kLanes] of a block
  bool continues, ends;
};
constexpr Lanes kWholeRows = {nullptr, false, true};

// y[r][first + c] = x[r] . row c, for a register tile. One chain of sums per output, along k, then
// over the lanes: the same for every shape of tile and however rows are cut into parts.
template <int Kind, int R, int C, Fetch kFetch>
inline void dot_tile(const float* const* x, const Columns& w, int column, Lanes lanes,
                     float* const* y, int64_t first) {
  Vec sums[R * C];
  each<R * C>([&](auto i) VN_NOW { sums[i] = zero(); });
  if (lanes.continues) {
    each<R * C>([&](auto i) VN_NOW { sums[i] = load(lanes.sums + i * kLanes); });
  }
  const StoredRow* rows = w.rows + column;
  const int64_t k = w.size, group = kHasScales<Kind> ? w.group : k;
  for (int64_t begin = 0, g = 0; begin < k; begin += group, ++g) {
    Vec scales[C];
    if constexpr (kHasScales<Kind>) {
      each<C>([&](auto c) VN_NOW {
        scales[c] = fill(read_scale(rows[c].scales, g, w.has_byte_scales));
      });
    }
    const int64_t end = std::min(k, begin + group);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const auto read = [&](auto c) VN_NOW {
        if constexpr (kFetch != kNoFetch) {
          __builtin_prefetch(rows[c].data + i * Reader<Kind>::kBits / 8 + w.ahead, 0, kFetch);
        }
        const Vec codes = Reader<Kind>::load(rows[c].data, i);
        return kHasScales<Kind> ? mul(codes, scales[c]) : codes;
      };
      // The fewer of both stay in registers.
      if constexpr (R < C) {
        Vec inputs[R];
        each<R>([&](auto r) VN_NOW { inputs[r] = load(x[r] + i); });
        each<C>([&](auto c) VN_NOW {
          const Vec weights = read(c);
          each<R>([&](auto r) VN_NOW {
            sums[r * C + c] = fma(inputs[r], weights, sums[r * C + c]);
          });
        });
      } else {
        Vec weights[C];
        each<C>([&](auto c) VN_NOW { weights[c] = read(c); });
        each<R>([&](auto r) VN_NOW {
          const Vec input = load(x[r] + i);
          each<C>([&](auto c) VN_NOW {
            sums[r * C + c] = fma(input, weights[c], sums[r * C + c]);
          });
        });
      }
    }
    if constexpr (!kHasScales<Kind>) {
      const int rest = static_cast<int>(end - i);
      if (rest > 0) {
        each<C>([&](auto c) VN_NOW {
          const Vec weights = Reader<Kind>::load_some(rows[c].data, i, rest);
          each<R>([&](auto r) VN_NOW {
            sums[r * C + c] = fma(load_some(x[r] + i, rest), weights, sums[r * C + c]);
          });
        });
      }
    }
  }
  if (!lanes.ends) {
    each<R * C>([&](auto i) VN_NOW { store(lanes.sums + i * kLanes, sums[i]); });
    return;
  }
  float totals[R * C];
  sum_all<R * C>(sums, totals);
  each<R>([&](auto r) VN_NOW {
    std::memcpy(y[r] + first, totals + r * C, sizeof(float) * C);
  });
}

// Tiles of one height.
template <int Kind, int R, Fetch kFetch>
inline void dot_rows(const float* const* x, const Columns& w, int columns, Lanes lanes,
                     float* const* y, int64_t first) {
  constexpr int kMost = kTileSums / R, kWide = kMost > kColumns ? kColumns : kMost, kNarrow = 4;
  const auto at = [&](int c) {
    return lanes.sums == nullptr
               ? lanes
               : Lanes{lanes.sums + c * R * kLanes, lanes.continues, lanes.ends};
  };
  int c = 0;
  for (; c + kWide <= columns; c += kWide) {
    dot_tile<Kind, R, kWide, kFetch>(x, w, c, at(c), y, first + c);
  }
  if constexpr (kWide > kNarrow) {
    for (; c + kNarrow <= columns; c += kNarrow) {
      dot_tile<Kind, R, kNarrow, kFetch>(x, w, c, at(c), y, first + c);
    }
  }
  for (; c < columns; ++c) dot_tile<Kind, R, 1, kFetch>(x, w, c, at(c), y, first + c);
}

// Fewer inputs than a tile is high: those that lack are copies of the last, and go nowhere.
template <int Kind, int R, Fetch kFetch>
inline void dot_padded(const float* const* x, int64_t rows, const Columns& w, int columns,
                       Lanes lanes, float* const* y, int64_t first) {
  if (rows == R) {
    dot_rows<Kind, R, kFetch>(x, w, columns, lanes, y, first);
    return;
  }
  float nowhere[kColumns];
  const float* inputs[R];
  float* outputs[R];
  for (int r = 0; r < R; ++r) {
    inputs[r] = x[r < rows ? r : rows - 1];
    outputs[r] = r < rows ? y[r] + first : nowhere;
  }
  dot_rows<Kind, R, kFetch>(inputs, w, columns, lanes, outputs, 0);
}

// y[r][first + c] = x[r] . row c for inputs of one tile.
template <int Kind, Fetch kFetch>
inline void dot_few(const float* const* x, int64_t rows, const Columns& w, int columns, Lanes lanes,
                    float* const* y, int64_t first) {
  if constexpr (kMostRows > 4) {
    if (rows > 6) return dot_padded<Kind, 8, kFetch>(x, rows, w, columns, lanes, y, first);
    if (rows > 4) return dot_padded<Kind, 6, kFetch>(x, rows, w, columns, lanes, y, first);
    if (rows > 2) return dot_padded<Kind, 4, kFetch>(x, rows, w, columns, lanes, y, first);
  }
  if constexpr (kMostRows > 1) {
    if (rows == 2) return dot_rows<Kind, 2, kFetch>(x, w, columns, lanes, y, first);
  }
  if (rows == 1) dot_rows<Kind, 1, kFetch>(x, w, columns, lanes, y, first);
}

// The same for any number of inputs and rows of floats; the first inputs fetch for all.
template <Fetch kFetch>
inline void dot_block(const float* const* x, int64_t rows, const Columns& w, int columns,
                      Lanes lanes, float* const* y, int64_t first) {
  if (rows <= kMostRows) {
    dot_few<VN_F32, kFetch>(x, rows, w, columns, lanes, y, first);
    return;
  }
  const auto at = [&](int64_t r) {
    return lanes.sums == nullptr
               ? lanes
               : Lanes{lanes.sums + r * kColumns * kLanes, lanes.continues, lanes.ends};
  };
  dot_rows<VN_F32, kTileRows, kFetch>(x, w, columns, lanes, y, first);
  int64_t r = kTileRows;
  for (; rows - r > kMostRows; r += kTileRows) {
    dot_rows<VN_F32, kTileRows, kNoFetch>(x + r, w, columns, at(r), y + r, first);
  }
  dot_few<VN_F32, kNoFetch>(x + r, rows - r, w, columns, at(r), y + r, first);
}

// Columns whose lanes are added up together, and those of a tile that stays in registers, where these
// hold few vectors.
constexpr int kNearColumns = 8, kNearTile = 2;

// y[r][first + c] = x[r] . w[c] for kNearColumns rows of floats.
template <int R>
inline void dot_near(const float* const* x, const float* const* w, int64_t k, float* const* y,
                     int64_t first) {
  constexpr int C = R == 1 ? 2 * kNearTile : kNearTile;
  Vec sums[R][kNearColumns];
  for (int column = 0; column < kNearColumns; column += C) {
    const float* const* rows = w + column;
    Vec own[R * C];
    each<R * C>([&](auto i) VN_NOW { own[i] = zero(); });
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) {
      Vec values[C];
      each<C>([&](auto c) VN_NOW { values[c] = load(rows[c] + i); });
      each<R>([&](auto r) VN_NOW {
        const Vec input = load(x[r] + i);
        each<C>([&](auto c) VN_NOW { own[r * C + c] = fma(input, values[c], own[r * C + c]); });
      });
    }
    if (const int rest = static_cast<int>(k - i); rest > 0) {
      each<C>([&](auto c) VN_NOW {
        const Vec values = load_some(rows[c] + i, rest);
        each<R>([&](auto r) VN_NOW {
          own[r * C + c] = fma(load_some(x[r] + i, rest), values, own[r * C + c]);
        });
      });
    }
    each<R>([&](auto r) VN_NOW {
      each<C>([&](auto c) VN_NOW { sums[r][column + c] = own[r * C + c]; });
    });
  }
  each<R>([&](auto r) VN_NOW { sum_eight(sums[r], y[r] + first); });
}

void dot_floats(const float* const* x, int64_t rows, const float* const* w, int64_t columns,
                int64_t k, float* const* y, int64_t first) {
  int64_t c = 0;
  if constexpr (kTileSums < kNearColumns) {
    for (; c + kNearColumns <= columns; c += kNearColumns) {
      int64_t r = 0;
      for (; rows - r >= 3 && rows - r != 4; r += 3) dot_near<3>(x + r, w + c, k, y + r, first + c);
      for (; rows - r >= 2; r += 2) dot_near<2>(x + r, w + c, k, y + r, first + c);
      if (r < rows) dot_near<1>(x + r, w + c, k, y + r, first + c);
    }
  }
  for (; c < columns; c += kColumns) {
    const int count = static_cast<int>(std::min<int64_t>(kColumns, columns - c));
    Columns block = {};
    for (int i = 0; i < count; ++i) block.rows[i].data = reinterpret_cast<const uint8_t*>(w[c + i]);
    block.size = k;
    dot_block<kNoFetch>(x, rows, block, count, kWholeRows, y, first + c);
  }
}

constexpr int64_t kChunksPerThread = 8;

// Inputs of one block stay in the second-level cache while the matrix streams by. Rounded ones are
// smaller, and done with before more weights have come: so many values of them.
constexpr int64_t kBlockRows = 96, kMostBlockRows = 512, kRoundedInputs = 1 << 19;
// With fewer rows vectors read panels faster than the unit: by a tenth on a Xeon of 2023.
constexpr int64_t kTiledRows = 3;
template <int Kind>
inline void dot_stored(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row,
                       int64_t count, float* const* y, int64_t first) {
  const int64_t ahead = kColumns * m.row_stride * Reader<Kind>::kBits / 8;
  Columns block = {{}, m.cols, m.group, m.has_byte_scales != 0, ahead};
  for (int64_t c = 0; c < count; c += kColumns) {
    const int columns = static_cast<int>(std::min<int64_t>(kColumns, count - c));
    for (int i = 0; i < columns; ++i) block.rows[i] = stored_row(m, row + c + i);
    dot_few<Kind, kFetchNear>(x, rows, block, columns, kWholeRows, y, first + c);
  }
}

// Values of rows that are multiplied at once: kColumns of them, and a tile of inputs, fit in the
// first-level cache.
constexpr int64_t kPartSize = 640;

// Where inputs are many, a part of some rows is multiplied by all of them; what is not stored as
// floats is widened once for all.
inline void dot_many(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row,
                     int64_t count, float* const* y, int64_t first) {
  const int64_t num_parts = (m.cols + kPartSize - 1) / kPartSize;
  const int64_t even = (m.cols + num_parts - 1) / num_parts;
  const int64_t part = (even + kLanes - 1) / kLanes * kLanes;
  const bool is_wide = m.kind == VN_F32;
  thread_local Floats sums, decoded;
  if (num_parts > 1) sums.resize((kBlockRows + 8) * kColumns * kLanes);
  if (!is_wide) decoded.resize(kColumns * (part + kLanes));
  const float* inputs[kBlockRows];
  for (int64_t c = 0; c < count; c += kColumns) {
    const int columns = static_cast<int>(std::min<int64_t>(kColumns, count - c));
    for (int64_t from = 0; from < m.cols; from += part) {
      const int64_t size = std::min(part, m.cols - from);
      const bool is_last = from + size == m.cols;
      const int64_t next = is_last ? kColumns * m.row_stride - from : size;
      Columns block = {{}, size, 0, false, next * static_cast<int64_t>(sizeof(float))};
      for (int i = 0; i < columns; ++i) {
        if (is_wide) {
          block.rows[i].data = stored_row(m, row + c + i).data + from * sizeof(float);
        } else {
          float* out = decoded.data() + i * part;
          decode_matrix_part(m, row + c + i, from, size, out);
          block.rows[i].data = reinterpret_cast<const uint8_t*>(out);
        }
      }
      for (int64_t r = 0; r < rows; ++r) inputs[r] = x[r] + from;
      const Lanes lanes = {num_parts > 1 ? sums.data() : nullptr, from > 0, is_last};
      if (is_wide) {
        dot_block<kFetchFar>(inputs, rows, block, columns, lanes, y, first + c);
      } else {
        dot_block<kNoFetch>(inputs, rows, block, columns, lanes, y, first + c);
      }
    }
  }
}

// Products with rows row .. row + count - 1 of a matrix that is no VN_PARTS.
inline void dot_leaf(const float* const* x, int64_t rows, const vn_matrix& m, int64_t row,
                     int64_t count, float* const* y, int64_t first, const Units& units) {
  if (m.kind == VN_PANELS) {
    dot_panels(x, rows, m, row, count, y, first, units);
  } else if (rows > kMostRows || !has_whole_steps(m)) {
    dot_many(x, rows, m, row, count, y, first);
  } else if (m.kind == VN_F32) {
    dot_stored<VN_F32>(x, rows, m, row, count, y, first);
  } else if (m.kind == VN_BF16) {
    dot_stored<VN_BF16>(x, rows, m, row, count, y, first);
  } else if (m.kind == VN_MXFP4) {
    dot_stored<VN_MXFP4>(x, rows, m, row, count, y, first);
  } else {
    dot_stored<VN_FP8>(x, rows, m, row, count, y, first);
  }
}

// What a matrix's products do to their inputs; a matrix of no parts.
enum InputForm { kAsTheyAre, kToBf16, kToBytes };

inline InputForm input_form(const vn_matrix& m) {
  if (m.kind == VN_BF16_PANELS) return kToBf16;
  if (m.kind != VN_PANELS) return kAsTheyAre;
  const bool is_whole = static_cast<const vn_panels*>(m.data)->input_kind == VN_INPUT_FLOATS;
  return is_whole ? kAsTheyAre : kToBytes;
}

// A product's inputs, rounded once for all outputs that want them so; `matrix` is the first.
struct PreparedInputs {
  InputForm form;
  bool is_tiled;
  const vn_matrix* matrix;
  int64_t num_rows;
  RoundedInputs rounded;
  ByteInputs bytes;

  bool serve(const vn_matrix& m) const {
    if (input_form(m) != form) return false;
    return form == kToBf16 || ByteForm(m) == ByteForm(*matrix);
  }
};

// All of a product.
struct Prepared {
  const PreparedInputs* begin;
  const PreparedInputs* end;

  const PreparedInputs& find(const vn_matrix& m) const {
    return *std::find_if(begin, end, [&](const PreparedInputs& own) { return own.serve(m); });
  }
};

inline void multiply_part(const Product& p, Prepared prepared, const Units& units, int64_t row,
                          int64_t rows, int64_t column, int64_t columns) {
  const float* x[kMostBlockRows];
  float* y[kMostBlockRows];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = p.x_rows == nullptr ? row + r : p.x_rows[row + r];
    x[r] = p.x + source * p.x_stride;
    y[r] = p.y + (row + r) * p.y_stride;
  }
  bool uses_tiles = false;
  for (int64_t c = 0; c < columns;) {
    const FoundRow found = find_row(*p.matrix, p.first_row + column + c);
    const vn_matrix& m = *found.matrix;
    const int64_t count = std::min(columns - c, m.rows - found.row);
    const InputForm form = input_form(m);
    if (form == kAsTheyAre) {
      dot_leaf(x, rows, m, found.row, count, y, column + c, units);
    } else if (form == kToBytes) {
      dot_bytes_by_panels(prepared.find(m).bytes, row, rows, m, found.row, count, y, p.y_stride,
                          column + c);
    } else {
      const RoundedInputs& rounded = prepared.find(m).rounded;
      uses_tiles = rounded.halves != nullptr;
      dot_rounded(rounded, row, rows, m, found.row, count, y, p.y_stride, column + c);
    }
    c += count;
  }
  if (uses_tiles) release_tiles();
}

// The parts of a matrix, or itself.
struct Parts {
  const vn_matrix *begin, *end;

  explicit Parts(const vn_matrix& m)
      : begin(m.kind == VN_PARTS ? static_cast<const vn_matrix*>(m.data) : &m),
        end(m.kind == VN_PARTS ? begin + m.group : begin + 1) {}

  template <typename Test>
  bool are_all(Test&& test) const { return std::all_of(begin, end, test); }
};

// Outputs that are multiplied together: chunks hold whole ones.
inline int64_t find_column_step(const vn_matrix& m) {
  const auto is_packed = [](const vn_matrix& part) {
    return part.kind == VN_PANELS || part.kind == VN_BF16_PANELS;
  };
  const Parts parts(m);
  if (parts.are_all(is_packed)) return kPanel;
  return std::any_of(parts.begin, parts.end, is_packed) ? 3 * kPanel : kColumns;  // and 16 times kColumns
}

// Whether all of a matrix is packed and meets inputs as they are.
inline bool is_coded(const vn_matrix& m) {
  return Parts(m).are_all([](const vn_matrix& part) {
    return part.kind == VN_PANELS && input_form(part) == kAsTheyAre;
  });
}

// The form of all parts of a matrix; of several, none.
inline InputForm common_form(const vn_matrix& m) {
  const Parts parts(m);
  const InputForm first = input_form(*parts.begin);
  const auto is_alike = [&](const vn_matrix& part) { return input_form(part) == first; };
  return parts.are_all(is_alike) ? first : kAsTheyAre;
}

// Whether threads share so many chunks better in halves, which take a little more than half as long.
inline bool shares_halves_better(const ThreadPool& pool, int64_t chunks) {
  const int64_t threads = pool.num_threads();
  return 33 * ceil_div(2 * chunks, threads) < 64 * ceil_div(chunks, threads);
}

// Rows of half a block of rounded inputs, at least.
constexpr int64_t kHalfBlockRows = 48;

// Rows of a product that are multiplied at a time.
inline int64_t find_block_rows(const ThreadPool& pool, const Product& p) {
  // Codes are made floats, or bytes, of once for a block: blocks are alike, in whole tiles.
  const auto cut = [&](int64_t blocks, int64_t tile) {
    return std::max<int64_t>(1, ceil_div(ceil_div(p.num_rows, std::max<int64_t>(1, blocks)), tile)) * tile;
  };
  if (is_coded(*p.matrix)) return cut(ceil_div(p.num_rows, kPanelRows), kPanelTileRows);
  const InputForm form = common_form(*p.matrix);
  const bool takes_more = form == kToBytes || (form == kToBf16 && pool.units().tiles);
  if (!takes_more) return kBlockRows;
  const int64_t most = std::clamp(kRoundedInputs / std::max<int64_t>(1, p.matrix->cols) / 32 * 32,
                                  kBlockRows, kMostBlockRows);
  if (form == kToBf16) return most;
  int64_t blocks = ceil_div(p.num_rows, most);
  const bool can_halve = p.num_rows >= 2 * kHalfBlockRows * blocks;
  if (can_halve && shares_halves_better(pool, ceil_div(p.num_columns, kPanel) * blocks)) blocks *= 2;
  return std::min(most, cut(blocks, 12));  // tiles of four and of six rows
}

// Outputs of a chunk that is a panel, or of half of one.
inline int64_t find_panel_columns(const ThreadPool& pool, const Product& p, int64_t row_blocks,
                                  int64_t block_rows) {
  if (!can_take_parts(std::min(p.num_rows, block_rows)) || !is_coded(*p.matrix)) return kPanel;
  return shares_halves_better(pool, ceil_div(p.num_columns, kPanel) * row_blocks) ? kPanel / 2 : kPanel;
}

// What it takes to round an input, in multiply-adds.
constexpr int64_t kRoundingWork = 16;

// The rounded inputs of products, in the memory of the thread that made them.
class Rounding {
 public:
  // Rounds the inputs of those products that want it.
  void run(ThreadPool& pool, const Product* products, size_t count) {
    inputs_.clear();
    firsts_.clear();
    rows_.clear();
    Sizes sizes = {};
    for (size_t i = 0; i < count; ++i) {
      firsts_.push_back(inputs_.size());
      list_forms(pool, products[i], sizes);
    }
    firsts_.push_back(inputs_.size());
    if (rows_.empty()) return;
    place(sizes);
    const Row* rows = rows_.data();
    const PreparedInputs* inputs = inputs_.data();
    const auto round = [=](int64_t i) {
      round_row(*rows[i].product, rows[i].index, inputs[rows[i].input]);
    };
    const int64_t num_rows = static_cast<int64_t>(rows_.size());
    if (is_short(pool, kRoundingWork * (sizes.halves + sizes.floats + sizes.codes))) {
      for (int64_t i = 0; i < num_rows; ++i) round(i);
    } else {
      pool.run(num_rows, round);
    }
  }

  // Of all products; those of one are firsts()[product] .. firsts()[product + 1] - 1.
  const PreparedInputs* inputs() const { return inputs_.data(); }
  const size_t* firsts() const { return firsts_.data(); }

 private:
  struct Row {
    const Product* product;
    int64_t index;
    size_t input;
  };
  // Values of each kind. What is prepared lies at the end of those before it: see place().
  struct Sizes {
    int64_t halves, floats, codes, groups;
  };

  void list_forms(const ThreadPool& pool, const Product& p, Sizes& sizes) {
    const size_t first = inputs_.size();
    for (int64_t at = p.first_row; at < p.first_row + p.num_columns;) {
      const FoundRow found = find_row(*p.matrix, at);
      const vn_matrix& m = *found.matrix;
      at += m.rows - found.row;
      const InputForm form = input_form(m);
      const auto serves = [&](const PreparedInputs& own) { return own.serve(m); };
      if (form == kAsTheyAre || std::any_of(inputs_.begin() + first, inputs_.end(), serves)) continue;
      PreparedInputs own = {form, false, &m, p.num_rows, {}, {}};
      if (form == kToBytes) {
        const ByteForm bytes(m);
        own.bytes = {nullptr,       nullptr,        nullptr,     bytes.stride(),
                     bytes.groups(), pool.units(), bytes.planes};
        sizes.codes += p.num_rows * bytes.planes * bytes.stride();
        sizes.groups += p.num_rows * bytes.planes * bytes.groups();
      } else {
        own.rounded.stride = count_blocks(m.cols) * kBlockInputs;
        own.is_tiled = pool.units().tiles && p.num_rows >= kTiledRows;
        (own.is_tiled ? sizes.halves : sizes.floats) += p.num_rows * own.rounded.stride;
      }
      for (int64_t r = 0; r < p.num_rows; ++r) rows_.push_back({&p, r, inputs_.size()});
      inputs_.push_back(own);
    }
  }

  void place(const Sizes& sizes) {
    halves_.resize(sizes.halves);
    floats_.resize(sizes.floats);
    codes_.resize(sizes.codes);
    scales_.resize(sizes.groups);
    sums_.resize(sizes.groups);
    Sizes at = {};
    for (PreparedInputs& own : inputs_) {
      if (own.form == kToBytes) {
        own.bytes.codes = codes_.data() + at.codes;
        own.bytes.scales = scales_.data() + at.groups;
        own.bytes.sums = sums_.data() + at.groups;
        at.codes += own.num_rows * own.bytes.planes * own.bytes.stride;
        at.groups += own.num_rows * own.bytes.planes * own.bytes.groups;
      } else if (own.is_tiled) {
        own.rounded.halves = halves_.data() + at.halves;
        at.halves += own.num_rows * own.rounded.stride;
      } else {
        own.rounded.floats = floats_.data() + at.floats;
        at.floats += own.num_rows * own.rounded.stride;
      }
    }
  }

  static void round_row(const Product& p, int64_t index, const PreparedInputs& own) {
    const float* x = p.x + (p.x_rows == nullptr ? index : p.x_rows[index]) * p.x_stride;
    const int64_t cols = p.matrix->cols, stride = own.rounded.stride;
    if (own.form == kToBytes) {
      const ByteInputs& b = own.bytes;
      const int64_t first = index * b.planes;
      round_row_to_bytes(ByteForm(*own.matrix), x, b.codes + first * b.stride,
                         b.scales + first * b.groups, b.sums + first * b.groups);
    } else if (own.is_tiled) {
      uint16_t* out = own.rounded.halves + index * stride;
      for (int64_t k = 0; k < cols; ++k) out[k] = bf16_bits(x[k]);
      std::fill(out + cols, out + stride, uint16_t{0});
    } else {
      float* out = own.rounded.floats + index * stride;
      for (int64_t k = 0; k < cols; ++k) out[k] = round_bf16(x[k]);
      std::fill(out + cols, out + stride, 0.0f);
    }
  }

  std::vector<PreparedInputs> inputs_;
  std::vector<size_t> firsts_;  // of each product, and the end
  std::vector<Row> rows_;
  std::vector<uint16_t, CacheLines<uint16_t>> halves_;
  std::vector<int8_t, CacheLines<int8_t>> codes_;
  std::vector<int32_t, CacheLines<int32_t>> sums_;
  Floats floats_, scales_;
};

// Runs products that do not depend on one another.
void multiply_all(ThreadPool& pool, const Product* products, size_t count) {
  struct Cut {
    int64_t block_rows, row_blocks, columns, column_blocks, first_chunk;
  };
  thread_local std::vector<Cut> cuts;
  thread_local Rounding rounding;
  rounding.run(pool, products, count);
  cuts.clear();
  int64_t num_chunks = 0, work = 0;
  for (size_t i = 0; i < count; ++i) {
    work += products[i].num_rows * products[i].matrix->cols * products[i].num_columns;
  }
  const int64_t threads = pool.num_threads();
  const int64_t chunk_work =
      threads == 1 ? work : std::clamp(work / (kChunksPerThread * threads), kChunkWork, kLargeChunkWork);
  for (size_t i = 0; i < count; ++i) {
    const Product& p = products[i];
    const int64_t block_rows = find_block_rows(pool, p);
    const int64_t rows = std::min(p.num_rows, block_rows);
    const int64_t per_column = std::max<int64_t>(1, rows * p.matrix->cols);
    int64_t columns = std::max<int64_t>(kColumns, chunk_work / per_column);
    const int64_t step = find_column_step(*p.matrix);
    columns = (columns + step - 1) / step * step;
    const int64_t row_blocks = ceil_div(p.num_rows, block_rows);
    if (columns == kPanel && count == 1) columns = find_panel_columns(pool, p, row_blocks, block_rows);
    const Cut cut = {block_rows, row_blocks, columns,
                     (p.num_columns + columns - 1) / columns, num_chunks};
    num_chunks += cut.row_blocks * cut.column_blocks;
    cuts.push_back(cut);
  }
  const Cut* all = cuts.data();
  const PreparedInputs* inputs = rounding.inputs();
  const size_t* firsts = rounding.firsts();
  const Units units = pool.units();
  auto run = [=](int64_t chunk) {
    // Another core wrote these: they come over together.
    __builtin_prefetch(all);
    __builtin_prefetch(firsts);
    __builtin_prefetch(products);
    __builtin_prefetch(&products->y_stride);
    __builtin_prefetch(inputs);
    __builtin_prefetch(&inputs->bytes);
    size_t i = count - 1;
    while (all[i].first_chunk > chunk) --i;
    const Product& p = products[i];
    const int64_t index = chunk - all[i].first_chunk;
    const int64_t row = index / all[i].column_blocks * all[i].block_rows;
    const int64_t column = index % all[i].column_blocks * all[i].columns;
    const Prepared prepared = {inputs + firsts[i], inputs + firsts[i + 1]};
    multiply_part(p, prepared, units, row, std::min(all[i].block_rows, p.num_rows - row), column,
                  std::min(all[i].columns, p.num_columns - column));
  };
  if (is_short(pool, work)) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) run(chunk);
  } else {
    pool.run(num_chunks, run);
  }
}

void matmul(ThreadPool& pool, const vn_matrix& matrix, const float* x, int64_t num_rows,
            float* output) {
  multiply(pool, x, num_rows, matrix, output);
}

}  // namespace VN_BUILD
}  // namespace vn
