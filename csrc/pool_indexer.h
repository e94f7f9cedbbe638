// The choice of the keys that a query attends to, by pools of consecutive tokens (GLM 5.3 Flash), or of
// one (DeepSeek V3.2, GLM 5). The maths is that of decoder/indexed_attention.py.
#pragma once

#include <vector>

#include "build.h"
#include "compressor.h"
#include "kernels.h"
#include "turns.h"

namespace vn {
namespace VN_BUILD {

// Queries whose scores exist at a time, and pool keys that are scored in one chunk of work.
constexpr int64_t kIndexRows = 128, kPoolBlock = 512;

class PoolIndexer {
 public:
  PoolIndexer(ThreadPool& pool, Workspace& space, const vn_step& step, const Pages& pages,
              MissingRow& missing)
      : pool_(pool), space_(space), step_(step), pages_(pages), missing_(missing) {}

  // Keeps what the inputs x [T, D] leave in open pools, and the keys of pools that are complete.
  void keep(const vn_pool_indexer& l, const HeadTurns& turns, const float* x) {
    const int64_t t = step_.num_tokens, width = l.width, inputs_width = l.inputs.rows;
    float* inputs = space_.index_rows.take(t * inputs_width);
    float* gates = space_.index_queries.take(t * width);
    const bool has_pools = l.pool_size > 1;
    const Product products[2] = {
        whole_product(x, l.inputs.cols, t, l.inputs, inputs, inputs_width),
        whole_product(x, l.gate.cols, t, l.gate, gates, width),
    };
    multiply_all(pool_, products, has_pools ? 2 : 1);
    float* rows = space_.rows.take(t * 2 * width);
    for_rows(pool_, t, 20 * width, [&](int64_t row) {
      float* own = rows + row * 2 * width;
      norm_key(l, inputs + row * inputs_width, own);
      turn_heads(l, turns, row, own, 1);
      if (!has_pools) return store_row(pages_, l.keys, row, step_.positions[row], own);
      const float* bias = l.place_bias + step_.positions[row] % l.pool_size * width;
      for (int64_t i = 0; i < width; ++i) own[width + i] = gates[row * width + i] + bias[i];
      // Rounding here keeps the result independent of where chunks end.
      round_row(l.state.kind, own, 2 * width);
      store_row(pages_, l.state, row, step_.positions[row], own);
    });
    if (!has_pools) return;
    const std::vector<Entry> entries = list_entries(step_, l.keys, l.pool_size);
    for_rows(pool_, static_cast<int64_t>(entries.size()), 60 * l.pool_size * width, [&](int64_t i) {
      complete(l, entries[i], rows);
    });
  }

  // The pools that a query at a position chooses among; 0: it attends to all keys.
  static int64_t count_choices(const vn_pool_indexer& l, int64_t position) {
    const int64_t complete = (position + 1) / l.pool_size;
    return complete > l.num_chosen ? complete : 0;
  }

  // Lists the positions of the keys that each of some flat rows attends to, ascending, of those that
  // choose; latents [T, rank] of their queries are `stride` apart. keep() was called for the layer.
  void choose(const vn_pool_indexer& l, const HeadTurns& turns, const float* latents,
              int64_t stride, const std::vector<int64_t>& rows,
              std::vector<std::vector<int64_t>>& chosen) {
    chosen.resize(step_.num_tokens);
    for (auto& own : chosen) own.clear();
    std::vector<int64_t> choosing;
    for (const int64_t row : rows) {
      if (count_choices(l, step_.positions[row]) > 0) choosing.push_back(row);
    }
    for (size_t i = 0; i < choosing.size(); i += kIndexRows) {
      const int64_t count = std::min<int64_t>(kIndexRows, choosing.size() - i);
      choose_some(l, turns, latents, stride, choosing.data() + i, count, chosen);
    }
  }

 private:
  // Turns the first values of heads of a flat row, if the layer turns any.
  static void turn_heads(const vn_pool_indexer& l, const HeadTurns& turns, int64_t row,
                         float* heads, int64_t count) {
    if (turns.values == nullptr) return;
    const float* own = turns.values + row * turns.width;
    for (int64_t h = 0; h < count; ++h) {
      if (l.turns_pairs != 0) {
        rotate_pairs(heads + h * l.width, own, turns.width);
      } else {
        rotate_halves(heads + h * l.width, own, turns.width);
      }
    }
  }

  // The first values of a row of inputs, brought to a mean of 0 and a variance of 1, times weights,
  // and a bias.
  static void norm_key(const vn_pool_indexer& l, const float* values, float* out) {
    double total = 0.0, squares = 0.0;
    for (int32_t i = 0; i < l.width; ++i) total += values[i];
    const double mean = total / l.width;
    for (int32_t i = 0; i < l.width; ++i) squares += (values[i] - mean) * (values[i] - mean);
    const double inverse = 1.0 / std::sqrt(squares / l.width + 1e-6);
    for (int32_t i = 0; i < l.width; ++i) {
      out[i] = static_cast<float>((values[i] - mean) * inverse) * l.key_norm[i] +
               l.key_norm[l.width + i];
    }
  }

  void complete(const vn_pool_indexer& l, const Entry& entry, const float* rows) {
    const int64_t row_width = 2 * l.width, first = entry.index * l.pool_size;
    thread_local std::vector<const float*> values, scores;
    thread_local Floats decoded, key;
    values.clear();
    scores.clear();
    decoded.resize(l.pool_size * row_width);
    key.resize(l.width + kLanes);
    for (int64_t p = first; p < first + l.pool_size; ++p) {
      const float* row = rows + own_row(entry.request, p) * row_width;
      if (p < step_.starts[entry.request]) {
        float* copy = decoded.data() + (p - first) * row_width;
        decode_row(l.state.data, missing_.need(pages_, l.state, entry.request, p), l.state.kind,
                   row_width, copy);
        row = copy;
      }
      values.push_back(row);
      scores.push_back(row + l.width);
    }
    reduce_rows(values, scores, l.width, key.data());
    write_row(l.keys, missing_.need(pages_, l.keys, entry.request, first), key.data());
  }

  int64_t own_row(int64_t request, int64_t position) const {
    return step_.row_starts[request] + position - step_.starts[request];
  }

  void choose_some(const vn_pool_indexer& l, const HeadTurns& turns, const float* latents,
                   int64_t stride, const int64_t* rows, int64_t count,
                   std::vector<std::vector<int64_t>>& chosen) {
    const int64_t heads = l.num_heads, width = heads * l.width;
    std::vector<int32_t> sources(rows, rows + count);
    float* queries = space_.index_queries.take(count * width);
    const Product product = {latents,   stride,          sources.data(), count, &l.queries, 0,
                             l.queries.rows, queries, width};
    multiply_all(pool_, &product, 1);
    if (turns.values != nullptr) {
      for_rows(pool_, count, 10 * heads * turns.width, [&](int64_t i) {
        turn_heads(l, turns, rows[i], queries + i * width, heads);
      });
    }
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, choices_of(l, rows[i]));
    float* scores = space_.scores.take(count * most);
    const int64_t blocks = ceil_div(most, kPoolBlock);
    // All rows of the layer's inputs: keep() left them there.
    const float* inputs = space_.index_rows.take(step_.num_tokens * l.inputs.rows);
    pool_.run(count * blocks, [&](int64_t task) {
      const int64_t i = task / blocks, from = task % blocks * kPoolBlock;
      const int64_t end = std::min(choices_of(l, rows[i]), from + kPoolBlock);
      if (from >= end) return;
      const float* weights = inputs + rows[i] * l.inputs.rows + l.width;
      score(l, rows[i], queries + i * width, weights, from, end, scores + i * most);
    });
    for_rows(pool_, count, 4 * most, [&](int64_t i) {
      thread_local Floats scratch;
      thread_local std::vector<int32_t> pools;
      const int64_t num_pools = choices_of(l, rows[i]), size = l.pool_size;
      choose_highest(scores + i * most, num_pools, l.num_chosen, scratch, pools);
      std::vector<int64_t>& keys = chosen[rows[i]];
      for (const int64_t pool : pools) {
        for (int64_t p = pool * size; p < (pool + 1) * size; ++p) keys.push_back(p);
      }
      for (int64_t p = num_pools * size; p <= step_.positions[rows[i]]; ++p) keys.push_back(p);
    });
  }

  int64_t choices_of(const vn_pool_indexer& l, int64_t row) const {
    return count_choices(l, step_.positions[row]);
  }

  // Scores of pools from .. end - 1 for a row's queries [J, I].
  void score(const vn_pool_indexer& l, int64_t row, const float* queries, const float* weights,
             int64_t from, int64_t end, float* scores) {
    const int64_t heads = l.num_heads, count = end - from, request = pages_.request_of(row);
    thread_local RowList keys;
    thread_local Floats products;
    thread_local std::vector<const float*> x;
    thread_local std::vector<float*> y;
    keys.clear();
    keys.reserve_decoded(count, l.width);
    pages_.each_row(l.keys, request, from, end, [&](int64_t pool, int64_t offset) {
      if (offset < 0) offset = missing_.need(pages_, l.keys, request, pool * l.pool_size);
      keys.add_stored(l.keys, offset);
    });
    products.resize(heads * count);
    x.resize(heads);
    y.resize(heads);
    for (int64_t h = 0; h < heads; ++h) {
      x[h] = queries + h * l.width;
      y[h] = products.data() + h * count;
    }
    dot_floats(x.data(), heads, keys.data(), count, l.width, y.data(), 0);
    const float key_scale = 1.0f / std::sqrt(static_cast<float>(l.width));
    const float head_scale = 1.0f / std::sqrt(static_cast<float>(heads));
    float* own = scores + from;
    std::fill_n(own, count, 0.0f);
    for (int64_t h = 0; h < heads; ++h) {
      const float weight = weights[h] * head_scale;
      for (int64_t k = 0; k < count; ++k) own[k] += weight * std::max(y[h][k] * key_scale, 0.0f);
    }
  }

  ThreadPool& pool_;
  Workspace& space_;
  const vn_step& step_;
  const Pages& pages_;
  MissingRow& missing_;
};

}  // namespace VN_BUILD
}  // namespace vn
