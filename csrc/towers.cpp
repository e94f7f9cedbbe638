// A layer of a tower: rows of one picture, all of which see each other. Products are those of
// pairs.h, attention's too; norms, softmax and sums are floats.
//
//   project   block of 96 rows, of queries, keys or values:  norm -> product -> norm, turn -> pack
//   attend    block of queries and head:  for each 96 keys  scores -> weights -> sums
//   finish    some rows:  product -> stream;  norm -> MLP, 96 values at a time -> stream
//
// A block's keys are one group of the values' product. How rows are cut among threads moves no bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pairs.h"
#include "towers.h"

namespace vn {
namespace VN_BUILD {
namespace {

constexpr int64_t kBlockRows = kPairGroup, kChunk = kPairGroup, kChunkPanels = kChunk / kLanes;
constexpr int64_t kTasksPerThread = 4;

// Rows of inputs, which grow and are not given back.
template <typename N>
class KeptRows {
 public:
  InputRows<N> shape(int64_t cols, int64_t rows) {
    const int64_t count = count_groups(cols) * rows;
    if (static_cast<int64_t>(scales_.size()) < count) {
      values_.resize(count * kPairGroup);
      scales_.resize(count);
    }
    return {values_.data(), scales_.data(), rows};
  }

 private:
  std::vector<typename N::Input, CacheLines<typename N::Input>> values_;
  Floats scales_;
};

bool is_bounded(const vn_bounds& bounds) {
  return bounds.low > -INFINITY || bounds.high < INFINITY;
}

void clamp_row(const vn_bounds& bounds, const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::min(std::max(x[i], bounds.low), bounds.high);
}

template <typename N>
void keep_row(const vn_bounds& bounds, const float* x, int64_t cols, const InputRows<N>& out,
              int64_t row) {
  float bounded[kPairGroup];
  for (int64_t g = 0; g * kPairGroup < cols; ++g) {
    const float* own = x + g * kPairGroup;
    const int64_t count = std::min(kPairGroup, cols - g * kPairGroup);
    if (is_bounded(bounds)) {
      clamp_row(bounds, own, count, bounded);
      own = bounded;
    }
    out.put(g, row, own, count);
  }
}

// Outputs first .. of some rows of x: out [rows, 96]; returns how many outputs there are.
template <typename N>
int64_t map_chunk(const InputRows<N>& x, int64_t row, int64_t rows, const vn_tower_matrix& m,
                  int64_t first, float* out) {
  const int64_t count = std::min(kChunk, m.rows - first);
  const Panels<N> panels = {static_cast<const typename N::Word*>(m.words), m.scales, m.cols};
  multiply_panels(x, row, rows, panels, first / kLanes, ceil_div(count, kLanes), out, kChunk);
  for (int64_t r = 0; r < rows; ++r) {
    float* own = out + r * kChunk;
    if (m.bias != nullptr) {
      for (int64_t i = 0; i < count; ++i) own[i] += m.bias[first + i];
    }
    if (is_bounded(m.outputs)) clamp_row(m.outputs, own, count, own);
  }
  return count;
}

// Calls body(first, count, chunk) for all outputs, chunk [rows, 96].
template <typename N, typename Body>
void map_chunks(const InputRows<N>& x, int64_t row, int64_t rows, const vn_tower_matrix& m, Body&& body) {
  thread_local Floats chunk;
  chunk.resize(kBlockRows * kChunk);
  for (int64_t first = 0; first < m.rows; first += kChunk) {
    const int64_t count = map_chunk(x, row, rows, m, first, chunk.data());
    body(first, count, chunk.data());
  }
}

// Products of some rows of x: out [rows, m.rows].
template <typename N>
void map_block(const InputRows<N>& x, int64_t row, int64_t rows, const vn_tower_matrix& m, float* out) {
  map_chunks(x, row, rows, m, [&](int64_t first, int64_t count, const float* chunk) {
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(out + r * m.rows + first, chunk + r * kChunk, sizeof(float) * count);
    }
  });
}

// Rows of a task, so that there are several for each thread.
int64_t find_block_rows(const ThreadPool& pool, int64_t rows) {
  const int64_t wanted = pool.num_threads() == 1 ? 1 : kTasksPerThread * pool.num_threads();
  int64_t block = kBlockRows;
  while (block > kPairRows && ceil_div(rows, block) < wanted) block /= 2;
  return block;
}

void layer_norm(const float* x, const float* weight, const float* bias, int64_t count, float eps,
                float* out) {
  Vec total = zero();
  for (int64_t i = 0; i < count; i += kLanes) total = add(total, load_upto(x + i, count - i));
  const float mean = sum(total) / static_cast<float>(count);
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] - mean;
  const float inverse = inverse_rms(out, count, eps);
  for (int64_t i = 0; i < count; ++i) out[i] = out[i] * inverse * weight[i] + bias[i];
}

// gelu by the tanh formula, times what lies beside it if there is any.
void activate(float* gates, const float* ups, int64_t count) {
  const Vec cubic = fill(0.044715f), factor = fill(1.5957691216057308f);  // 2 * sqrt(2 / pi)
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec gate = load(gates + i), cube = mul(mul(gate, gate), gate);
    const Vec own = mul(gate, sigmoid(mul(factor, fma(cubic, cube, gate))));
    store(gates + i, ups == nullptr ? own : mul(own, load(ups + i)));
  }
}

// Buffers for numbers of both kinds.
int16_t* take_codes(TowerSpace& space, int64_t count, Whole) { return space.codes.take(count); }
float* take_codes(TowerSpace& space, int64_t count, Exact) { return space.plain_codes.take(count); }
int32_t* take_keys(TowerSpace& space, int64_t count, Whole) { return space.keys.take(count); }
float* take_keys(TowerSpace& space, int64_t count, Exact) { return space.plain_keys.take(count); }
int32_t* take_values(TowerSpace& space, int64_t count, Whole) { return space.values.take(count); }
float* take_values(TowerSpace& space, int64_t count, Exact) {
  return space.plain_values.take(count);
}

template <typename N>
class TowerLayer {
  using Rows = InputRows<N>;

 public:
  TowerLayer(ThreadPool& pool, TowerSpace& space, const vn_tower& tower,
             const vn_tower_layer& layer, const float* turns, int64_t rows, float* stream)
      : pool_(pool),
        space_(space),
        t_(tower),
        layer_(layer),
        turns_(turns),
        n_(rows),
        d_(tower.head_dim),
        stream_(stream),
        blocks_(ceil_div(rows, kBlockRows)),
        head_groups_(count_groups(d_)),
        key_panels_(ceil_div(rows, kLanes)),
        value_panels_(ceil_div(d_, kLanes)) {}

  void run() {
    const int64_t heads = t_.num_heads, kv_heads = t_.num_kv_heads;
    queries_ = take_codes(space_, heads * head_groups_ * n_ * kPairGroup, N{});
    query_scales_ = space_.query_scales.take(heads * head_groups_ * n_);
    keys_ = take_keys(space_, kv_heads * key_words(), N{});
    key_scales_ = space_.key_scales.take(kv_heads * key_panels_ * head_groups_ * kLanes);
    values_ = take_values(space_, kv_heads * value_words(), N{});
    value_scales_ = space_.value_scales.take(kv_heads * value_panels_ * blocks_ * kLanes);
    attended_ = space_.attended.take(n_ * heads * d_);
    pool_.run(3 * blocks_, [&](int64_t i) { project(i / 3, static_cast<int>(i % 3)); });
    pool_.run(heads * blocks_, [&](int64_t i) { attend(i / blocks_, i % blocks_ * kBlockRows); });
    const int64_t size = find_block_rows(pool_, n_);
    pool_.run(ceil_div(n_, size),
              [&](int64_t i) { finish(i * size, std::min(size, n_ - i * size)); });
  }

 private:
  int64_t key_words() const { return key_panels_ * ceil_div(d_, N::kInputs) * kLanes; }
  int64_t value_words() const { return value_panels_ * ceil_div(n_, N::kInputs) * kLanes; }

  Rows queries_of(int64_t head) const {
    const int64_t rows = head * head_groups_ * n_;
    return {queries_ + rows * kPairGroup, query_scales_ + rows, n_};
  }
  Panels<N> keys_of(int64_t head) const {
    return {keys_ + head * key_words(), key_scales_ + head * key_panels_ * head_groups_ * kLanes, d_};
  }
  Panels<N> values_of(int64_t head) const {
    return {values_ + head * value_words(),
            value_scales_ + head * value_panels_ * blocks_ * kLanes, n_};
  }

  void norm(int which, const float* x, float* out) const {
    if (t_.is_rms) return rms_norm(x, layer_.norms[which], 1.0f, t_.width, t_.eps, out);
    layer_norm(x, layer_.norms[which], layer_.norm_biases[which], t_.width, t_.eps, out);
  }

  // ---- queries, keys and values ---------------------------------------------------------------

  void project(int64_t block, int part) {
    thread_local Floats normed, made;
    thread_local KeptRows<N> rounded;
    const vn_tower_matrix& m =
        part == 0 ? layer_.queries : part == 1 ? layer_.keys : layer_.values;
    const int64_t first = block * kBlockRows, rows = std::min(kBlockRows, n_ - first);
    normed.resize(t_.width);
    made.resize(kBlockRows * m.rows);
    const Rows x = rounded.shape(m.cols, kBlockRows);
    for (int64_t r = 0; r < rows; ++r) {
      norm(0, stream_ + (first + r) * t_.width, normed.data());
      keep_row(m.inputs, normed.data(), m.cols, x, r);
    }
    map_block(x, 0, rows, m, made.data());
    const int64_t heads = m.rows / d_;
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t r = 0; r < rows; ++r) {
        prepare_head(part, first + r, made.data() + r * m.rows + head * d_);
      }
      const float* own = made.data() + head * d_;
      if (part == 0) pack_queries(head, first, rows, own, m.rows);
      if (part == 1) pack_keys(head, block, rows, own, m.rows);
      if (part == 2) pack_values(head, block, rows, own, m.rows);
    }
  }

  // Norms and turns a row's head in place.
  void prepare_head(int part, int64_t row, float* head) const {
    if (part == 2) {
      if (t_.norms_values) rms_norm(head, nullptr, 1.0f, d_, t_.eps, head);
      return;
    }
    const float* weight = part == 0 ? layer_.query_norm : layer_.key_norm;
    if (weight != nullptr) rms_norm(head, weight, 1.0f, d_, t_.eps, head);
    if (t_.num_turned_parts == 0) return;
    const int64_t half = d_ / t_.num_turned_parts / 2;
    const float* cosines = turns_ + row * d_;
    const float* sines = cosines + d_ / 2;
    for (int64_t at = 0; at < d_; at += 2 * half, cosines += half, sines += half) {
      for (int64_t i = 0; i < half; ++i) {
        const float a = head[at + i], b = head[at + half + i];
        head[at + i] = a * cosines[i] - b * sines[i];
        head[at + half + i] = b * cosines[i] + a * sines[i];
      }
    }
  }

  void pack_queries(int64_t head, int64_t first, int64_t rows, const float* x, int64_t stride) {
    const Rows own = queries_of(head);
    for (int64_t r = 0; r < rows; ++r) {
      keep_row({-INFINITY, INFINITY}, x + r * stride, d_, own, first + r);
    }
  }

  // A key is a lane of a panel.
  void pack_keys(int64_t head, int64_t block, int64_t rows, const float* x, int64_t stride) {
    const int64_t all = ceil_div(d_, N::kInputs), first = block * kBlockRows;
    typename N::Word* words = keys_ + head * key_words();
    float* scales = key_scales_ + head * key_panels_ * head_groups_ * kLanes;
    typename N::Input inputs[kPairGroup];
    const int64_t end = std::min(kBlockRows, key_panels_ * kLanes - first);
    for (int64_t r = 0; r < end; ++r) {
      const int64_t panel = (first + r) / kLanes, lane = (first + r) % kLanes;
      for (int64_t g = 0; g < head_groups_; ++g) {
        const int64_t at = g * kPairGroup, count = r < rows ? std::min(kPairGroup, d_ - at) : 0;
        scales[(panel * head_groups_ + g) * kLanes + lane] =
            keep_group(x + (r < rows ? r * stride + at : 0), count, inputs);
        const int64_t from = at / N::kInputs, own = std::min(kPairGroup / N::kInputs, all - from);
        typename N::Word* out = words + (panel * all + from) * kLanes + lane;
        for (int64_t k = 0; k < own; ++k) out[k * kLanes] = N::word_of(inputs + N::kInputs * k);
      }
    }
  }

  // A value of a head is a lane.
  void pack_values(int64_t head, int64_t block, int64_t rows, const float* x, int64_t stride) {
    const int64_t all = ceil_div(n_, N::kInputs), from = block * kBlockRows / N::kInputs;
    typename N::Word* words = values_ + head * value_words();
    float* scales = value_scales_ + head * value_panels_ * blocks_ * kLanes;
    for (int64_t panel = 0; panel < value_panels_; ++panel) {
      const float* own = x + panel * kLanes;
      const int64_t lanes = std::min<int64_t>(kLanes, d_ - panel * kLanes);
      pack_panel(own, rows, stride, lanes, words + (panel * all + from) * kLanes,
                 scales + (panel * blocks_ + block) * kLanes);
    }
  }

  static void pack_panel(const float* x, int64_t rows, int64_t stride, int64_t lanes, float* words,
                         float*) {
    for (int64_t r = 0; r < rows; ++r) store(words + r * kLanes, load_upto(x + r * stride, lanes));
  }

  // Two keys are a word.
  static void pack_panel(const float* x, int64_t rows, int64_t stride, int64_t lanes,
                         int32_t* words, float* scales) {
    Vec peak = zero(), square = zero();
    for (int64_t r = 0; r < rows; ++r) {
      const Vec value = load_upto(x + r * stride, lanes);
      peak = max(peak, magnitude(value));
      square = fma(value, value, square);
    }
    float peaks[kLanes], squares[kLanes], inverses[kLanes];
    store(peaks, peak);
    store(squares, square);
    for (int64_t i = 0; i < kLanes; ++i) {
      const GroupScale own(peaks[i], squares[i]);
      scales[i] = own.scale;
      inverses[i] = own.inverse;
    }
    const Vec inverse = load(inverses);
    for (int64_t r = 0; r < rows; r += 2, words += kLanes) {
      int16_t low[kLanes], high[kLanes];
      store_codes(low, mul(load_upto(x + r * stride, lanes), inverse));
      const bool is_last = r + 1 == rows;
      store_codes(high, is_last ? zero() : mul(load_upto(x + (r + 1) * stride, lanes), inverse));
      for (int64_t i = 0; i < kLanes; ++i) {
        words[i] = static_cast<int32_t>(static_cast<uint16_t>(low[i]) |
                                        static_cast<uint32_t>(high[i]) << 16);
      }
    }
  }

  // ---- attention ------------------------------------------------------------------------------

  // What the rows of a tile have found so far, a row to a lane.
  struct Found {
    float tops[kLanes], totals[kLanes];
  };

  void attend(int64_t head, int64_t first) {
    thread_local Floats sums;
    const int64_t rows = std::min(kBlockRows, n_ - first), width = value_panels_ * kLanes;
    const int64_t kv_head = head / (t_.num_heads / t_.num_kv_heads);
    const Rows queries = queries_of(head);
    const Panels<N> keys = keys_of(kv_head), values = values_of(kv_head);
    sums.resize(kBlockRows * width);
    Found found[kBlockRows / kPairRows];
    for (Found& own : found) {
      std::fill_n(own.tops, kLanes, -INFINITY);
      std::fill_n(own.totals, kLanes, 0.0f);
    }
    // A unit's keys and values stay near while the block's rows pass.
    for (int64_t unit = 0; unit < blocks_; ++unit) {
      each_tile<kPairRows>(rows, [&](auto height, int64_t r) {
        attend_tile<height>(queries, first + r, keys, values, unit, found[r / kPairRows],
                            sums.data() + r * width, width);
      });
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float share = 1.0f / found[r / kPairRows].totals[r % kPairRows];
      float* out = attended_ + ((first + r) * t_.num_heads + head) * d_;
      for (int64_t i = 0; i < d_; ++i) out[i] = sums[r * width + i] * share;
    }
  }

  template <int R>
  void attend_tile(const Rows& queries, int64_t row, const Panels<N>& keys,
                   const Panels<N>& values, int64_t unit, Found& found, float* sums,
                   int64_t width) {
    alignas(64) float scores[R * kBlockRows];
    alignas(64) typename N::Input weights[R * kPairGroup];
    float shares[kLanes];
    const int64_t count = std::min(kBlockRows, n_ - unit * kBlockRows);
    multiply_panels(queries, row, R, keys, unit * kChunkPanels, ceil_div(count, kLanes), scores,
                    kBlockRows);
    for (int r = 0; r < R && count < kBlockRows; ++r) {
      std::fill(scores + r * kBlockRows + count, scores + (r + 1) * kBlockRows, -INFINITY);
    }
    weigh<R>(scores, weights, found, sums, width, shares);
    const auto add = [&](auto panels, int64_t p) VN_NOW {
      add_group<R, panels, N>(weights, shares, unit, values, p, unit == 0, sums + p * kLanes, width);
    };
    each_tile<kPairPanels>(value_panels_, add);
  }

  // Turns a unit's scores into rounded terms of a softmax; shares: what these are multiplied by to be
  // in one measure with those of the units before, whose sums move there.
  template <int R>
  void weigh(float* scores, typename N::Input* weights, Found& found, float* sums, int64_t width,
             float* shares) const {
    const float factor = t_.scale * 1.44269504088896341f;  // log2(e)
    float tops[kLanes] = {}, totals[kLanes] = {}, scales[kLanes] = {}, moves[kLanes];
    for (int r = 0; r < R; ++r) {
      Vec top = load(scores + r * kBlockRows);
      for (int64_t i = kLanes; i < kBlockRows; i += kLanes) {
        top = max(top, load(scores + r * kBlockRows + i));
      }
      tops[r] = highest(top) * factor;
    }
    for (int r = 0; r < R; ++r) {
      const Vec slope = fill(factor), below = fill(-tops[r]), least = fill(-110.0f);
      Vec total = zero(), squares = zero();
      float* terms = scores + r * kBlockRows;
      for (int64_t i = 0; i < kBlockRows; i += kLanes) {
        const Vec term = power_of(max(fma(load(terms + i), slope, below), least));
        store(terms + i, term);
        total = add(total, term);
        squares = fma(term, term, squares);
      }
      totals[r] = sum(total);
      scales[r] = keep_terms(terms, sum(squares), weights + r * kPairGroup);
    }
    const Vec own = load(tops), before = load(found.tops), top = max(own, before);
    const Vec log = fill(0.693147180559945309f);
    const Vec share = exp(mul(sub(own, top), log)), move = exp(mul(sub(before, top), log));
    store(found.tops, top);
    store(found.totals, fma(load(found.totals), move, mul(load(totals), share)));
    store(shares, mul(share, load(scales)));
    store(moves, move);
    for (int r = 0; r < R; ++r) {
      if (moves[r] == 1.0f) continue;
      float* row = sums + r * width;
      for (int64_t i = 0; i < width; i += kLanes) store(row + i, mul(load(row + i), fill(moves[r])));
    }
  }

  // Rounds terms whose highest is 1; returns their scale.
  static float keep_terms(const float* terms, float squares, int16_t* weights) {
    const GroupScale own(1.0f, squares);
    const Vec inverse = fill(own.inverse);
    for (int64_t i = 0; i < kPairGroup; i += kLanes) {
      store_codes(weights + i, mul(load(terms + i), inverse));
    }
    return own.scale;
  }
  static float keep_terms(const float* terms, float, float* weights) {
    std::memcpy(weights, terms, sizeof(float) * kPairGroup);
    return 1.0f;
  }

  // ---- behind attention -----------------------------------------------------------------------

  void finish(int64_t first, int64_t rows) {
    thread_local KeptRows<N> rounded, other;
    thread_local Floats normed;
    normed.resize(t_.width);
    const Rows x = rounded.shape(layer_.output.cols, rows);
    for (int64_t r = 0; r < rows; ++r) {
      keep_row(layer_.output.inputs, attended_ + (first + r) * layer_.output.cols,
                layer_.output.cols, x, r);
    }
    add_mapped(x, first, rows, layer_.output, 1);
    const bool is_gated = layer_.gate.words != nullptr;
    const Rows to_gate = rounded.shape(t_.width, rows);
    const Rows to_up = is_gated ? other.shape(t_.width, rows) : to_gate;
    for (int64_t r = 0; r < rows; ++r) {
      norm(2, stream_ + (first + r) * t_.width, normed.data());
      if (is_gated) keep_row(layer_.gate.inputs, normed.data(), t_.width, to_gate, r);
      keep_row(layer_.up.inputs, normed.data(), t_.width, to_up, r);
    }
    run_mlp(to_gate, to_up, first, rows);
  }

  // A group of the MLP's values is made and rounded at a time.
  void run_mlp(const Rows& to_gate, const Rows& to_up, int64_t first, int64_t rows) {
    thread_local KeptRows<N> rounded;
    thread_local Floats gates, ups;
    const bool is_gated = layer_.gate.words != nullptr;
    gates.resize(kBlockRows * kChunk);
    ups.resize(kBlockRows * kChunk);
    const int64_t inner = layer_.down.cols;
    const Rows x = rounded.shape(inner, rows);
    for (int64_t at = 0; at < inner; at += kChunk) {
      const int64_t count =
          map_chunk(to_gate, 0, rows, is_gated ? layer_.gate : layer_.up, at, gates.data());
      if (is_gated) map_chunk(to_up, 0, rows, layer_.up, at, ups.data());
      for (int64_t r = 0; r < rows; ++r) {
        float* own = gates.data() + r * kChunk;
        activate(own, is_gated ? ups.data() + r * kChunk : nullptr, count);
        if (is_bounded(layer_.down.inputs)) clamp_row(layer_.down.inputs, own, count, own);
        x.put(at / kChunk, r, own, count);
      }
    }
    add_mapped(x, first, rows, layer_.down, 3);
  }

  // Adds a product's rows to the stream, by way of a norm if there is one.
  void add_mapped(const Rows& x, int64_t first, int64_t rows, const vn_tower_matrix& m,
                  int norm_behind) {
    thread_local Floats made;
    made.resize(kBlockRows * m.rows);
    map_block(x, 0, rows, m, made.data());
    for (int64_t r = 0; r < rows; ++r) {
      float* own = made.data() + r * m.rows;
      float* out = stream_ + (first + r) * m.rows;
      if (layer_.norms[norm_behind] != nullptr) norm(norm_behind, own, own);
      for (int64_t i = 0; i < m.rows; ++i) out[i] += own[i];
    }
  }

  ThreadPool& pool_;
  TowerSpace& space_;
  const vn_tower& t_;
  const vn_tower_layer& layer_;
  const float* turns_;
  const int64_t n_, d_;
  float* stream_;
  const int64_t blocks_, head_groups_, key_panels_, value_panels_;
  typename N::Input* queries_ = nullptr;
  typename N::Word *keys_ = nullptr, *values_ = nullptr;
  float *query_scales_ = nullptr, *key_scales_ = nullptr, *value_scales_ = nullptr;
  float* attended_ = nullptr;
};

void run_layer(ThreadPool& pool, TowerSpace& space, const vn_tower& tower,
               const vn_tower_layer& layer, const float* turns, int64_t rows, float* stream) {
  if (layer.queries.scales == nullptr) {
    TowerLayer<Exact>(pool, space, tower, layer, turns, rows, stream).run();
  } else {
    TowerLayer<Whole>(pool, space, tower, layer, turns, rows, stream).run();
  }
}

template <typename N>
void map_all(ThreadPool& pool, const vn_tower_matrix& m, const float* x, int64_t rows, float* out) {
  KeptRows<N> rounded;
  const InputRows<N> own = rounded.shape(m.cols, rows);
  for_rows(pool, rows, 4 * m.cols,
           [&](int64_t r) { keep_row(m.inputs, x + r * m.cols, m.cols, own, r); });
  const int64_t blocks = ceil_div(rows, kBlockRows), chunks = ceil_div(m.rows, kChunk);
  pool.run(blocks * chunks, [&](int64_t i) {
    thread_local Floats chunk;
    chunk.resize(kBlockRows * kChunk);
    const int64_t row = i % blocks * kBlockRows, first = i / blocks * kChunk;
    const int64_t height = std::min(kBlockRows, rows - row);
    const int64_t count = map_chunk(own, row, height, m, first, chunk.data());
    for (int64_t r = 0; r < height; ++r) {
      std::memcpy(out + (row + r) * m.rows + first, chunk.data() + r * kChunk,
                  sizeof(float) * count);
    }
  });
}

void map_rows(ThreadPool& pool, const vn_tower_matrix& m, const float* x, int64_t rows, float* out) {
  if (m.scales == nullptr) return map_all<Exact>(pool, m, x, rows, out);
  map_all<Whole>(pool, m, x, rows, out);
}

}  // namespace

const TowerBuild kTowers = {run_layer, map_rows};

}  // namespace VN_BUILD
}  // namespace vn
