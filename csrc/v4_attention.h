// DeepSeek-V4's and V4.1's attention over a step: the window's rows and compressed entries, all of them
// or those that an indexer chooses. Prefill and decode are one path, row by row.
#pragma once

#include "build.h"
#include "compressor.h"
#include "kernels.h"

namespace vn {
namespace VN_BUILD {

// Queries that are projected and attended together: bounds the scratch of a long prefill.
constexpr int64_t kQueryBlock = 128;
// Index keys scored in one chunk of work.
constexpr int64_t kKeyBlock = 512;
// Queries, by head, that share one pass over their keys, at most so many; fewer where their scores
// would leave the second-level cache.
constexpr int64_t kTileQueries = 24;
constexpr int64_t kMaxTileScores = 1 << 16;

// What indexers chose for the rows of a step, for the layers that share it.
struct V4Choices {
  std::vector<std::vector<int32_t>> entries;     // ascending; none: the row attends all it sees
  std::vector<std::vector<int32_t>> candidates;  // blocks, ascending; none: all
};

class V4Attention {
 public:
  V4Attention(ThreadPool& pool, Workspace& space, const vn_v4_model& model, const vn_step& step,
              V4Choices& choices)
      : pool_(pool),
        space_(space),
        m_(model),
        step_(step),
        pages_(step),
        t_(step.num_tokens),
        num_turns_(t_),
        choices_(choices) {
    choices_.entries.resize(t_);
    choices_.candidates.resize(t_);
    const int32_t pairs = m_.rope_dim / 2;
    turns_ = space_.turns.take(2 * t_ * m_.rope_dim);
    for_rows(pool_, t_, 40 * m_.rope_dim, [&](int64_t row) {
      compute_turns(step_.positions[row], m_.main_frequencies, pairs, main_turns(row));
      compute_turns(step_.positions[row], m_.compress_frequencies, pairs, compress_turns(row));
    });
  }

  // The same for some rows of a step, those that `rows` lists.
  V4Attention(const V4Attention& whole, const vn_step& step, const std::vector<int64_t>& rows)
      : pool_(whole.pool_),
        space_(whole.space_),
        m_(whole.m_),
        step_(step),
        pages_(step),
        t_(step.num_tokens),
        num_turns_(whole.num_turns_),
        choices_(whole.choices_),
        turns_(whole.turns_),
        rows_of_whole_(rows.data()) {}

  // Writes the entries that a step completes from the normed inputs x [T, D] of a layer that makes
  // some for others, nothing else.
  void make_entries(const vn_v4_layer& layer, const float* x) {
    const int64_t width = layer.in_proj.rows;
    float* projected = space_.projected.take(t_ * width);
    multiply(pool_, x, t_, layer.in_proj, projected);
    make_shared(layer, projected + m_.q_lora_rank + m_.head_dim, width);
  }

  // output [T, D] of normed inputs x [T, D]; writes the layer's caches. wanted: flat rows whose
  // output is read, ascending. has_entries: make_entries came before.
  void attend(const vn_v4_layer& layer, const float* x, const std::vector<int64_t>& wanted,
              float* output, bool has_entries = false) {
    const int64_t d = m_.head_dim, width = layer.in_proj.rows;
    float* projected = space_.projected.take(t_ * width);
    multiply(pool_, x, t_, layer.in_proj, projected);
    float* latent = space_.latent.take(t_ * m_.q_lora_rank);
    float* kv = space_.key_values.take(t_ * d);
    const bool compresses = layer.kind != VN_WINDOW;
    for_rows(pool_, t_, 8 * (d + m_.q_lora_rank), [&](int64_t row) {
      const float* own = projected + row * width;
      rms_norm(own, layer.q_norm, 1.0f, m_.q_lora_rank, m_.norm_eps,
               latent + row * m_.q_lora_rank);
      float* key = kv + row * d;
      rms_norm(own + m_.q_lora_rank, layer.kv_norm, 1.0f, d, m_.norm_eps, key);
      const float* turns = compresses ? compress_turns(row) : main_turns(row);
      rotate_tail(key, d, turns, m_.rope_dim / 2, 1.0f);
      store_row(pages_, layer.window, row, step_.positions[row], key);
      // Rounding here too keeps the result independent of where chunks end.
      round_row(layer.window.kind, key, d);
    });
    int64_t at = m_.q_lora_rank + d;
    if (layer.sharing != nullptr) {
      if (layer.sharing->makes_entries != 0) {
        if (!has_entries) make_shared(layer, projected + at, width);
        at += layer.ratio > 1 ? 2 * d : d;
      }
    } else if (compresses) {
      const vn_compressor& c = layer.compressor;
      compress(layer, c, projected + at, width, space_.rows.take(t_ * 2 * c.row_width));
      at += 2 * c.row_width;
    }
    const float* head_weights = nullptr;
    if (layer.sharing != nullptr) {
      if (layer.sharing->chooses != 0) head_weights = projected + at;
    } else if (layer.kind == VN_CHOSEN_ENTRIES) {
      const vn_compressor& c = layer.index_compressor;
      compress(layer, c, projected + at, width, space_.index_rows.take(t_ * 2 * c.row_width));
      head_weights = projected + at + 2 * c.row_width;
    }
    for (size_t i = 0; i < wanted.size();) {
      const int64_t first = wanted[i];
      std::vector<int64_t> own;  // counted from the block's first row
      for (; i < wanted.size() && wanted[i] < first + kQueryBlock; ++i) {
        own.push_back(wanted[i] - first);
      }
      attend_block(layer, first, own, latent, kv, head_weights, width, output);
    }
  }

  // Raises what went wrong in any thread.
  void check() const { missing_.check(); }

 private:
  // The number of a row in the whole step.
  int64_t whole_row(int64_t row) const {
    return rows_of_whole_ == nullptr ? row : rows_of_whole_[row];
  }

  float* main_turns(int64_t row) { return turns_ + whole_row(row) * m_.rope_dim; }
  float* compress_turns(int64_t row) {
    return turns_ + (num_turns_ + whole_row(row)) * m_.rope_dim;
  }

  int64_t own_row(int64_t request, int64_t position) const {
    return step_.row_starts[request] + position - step_.starts[request];
  }

  int64_t need_row(const vn_cache& cache, int64_t request, int64_t position) {
    return missing_.need(pages_, cache, request, position);
  }

  // ---- compressor ---------------------------------------------------------------------------

  void compress(const vn_v4_layer& layer, const vn_compressor& c, const float* projected,
                int64_t stride, float* rows) {
    const int64_t row_width = c.row_width, ratio = layer.ratio;
    for_rows(pool_, t_, 4 * row_width, [&](int64_t row) {
      float* own = rows + row * 2 * row_width;
      std::memcpy(own, projected + row * stride, sizeof(float) * 2 * row_width);
      const float* bias = c.ape + step_.positions[row] % ratio * row_width;
      for (int64_t i = 0; i < row_width; ++i) own[row_width + i] += bias[i];
      store_row(pages_, c.state, row, step_.positions[row], own);
    });
    const std::vector<Entry> entries = list_entries(step_, c.entries, ratio);
    const int64_t num_rows = layer.overlap ? 2 * ratio : ratio;
    for_rows(pool_, static_cast<int64_t>(entries.size()), 60 * num_rows * c.width, [&](int64_t i) {
      make_entry(layer, c, entries[i].request, entries[i].index, rows);
    });
  }

  void make_entry(const vn_v4_layer& layer, const vn_compressor& c, int64_t request,
                  int64_t index, const float* rows) {
    thread_local Floats entry;
    entry.resize(c.width);
    reduce_window(layer, c, request, index, rows, 2 * c.row_width, entry.data());
    store_entry(layer, c, request, index, entry.data());
  }

  // entry [width], normed, of the tokens of a window; rows of this step lie `stride` apart.
  void reduce_window(const vn_v4_layer& layer, const vn_compressor& c, int64_t request,
                     int64_t index, const float* rows, int64_t stride, float* entry) {
    const int64_t ratio = layer.ratio, first = index * ratio;
    thread_local std::vector<const float*> values, scores;
    thread_local Floats decoded;
    values.clear();
    scores.clear();
    const int64_t stored_width = 2 * c.row_width;
    decoded.resize(2 * ratio * stored_width);
    const int64_t begin = layer.overlap && index > 0 ? first - ratio : first;
    for (int64_t p = begin; p < first + ratio; ++p) {
      const float* row;
      if (p >= step_.starts[request]) {
        row = rows + own_row(request, p) * stride;
      } else {
        float* copy = decoded.data() + (p - begin) * stored_width;
        decode_row(c.state.data, need_row(c.state, request, p), c.state.kind, stored_width, copy);
        row = copy;
      }
      // With overlap a row's first half serves the next entry, its second half its own.
      const int64_t half = layer.overlap && p >= first ? c.width : 0;
      values.push_back(row + half);
      scores.push_back(row + c.row_width + half);
    }
    reduce_rows(values, scores, c.width, entry);
    rms_norm(entry, c.norm, 1.0f, c.width, m_.norm_eps, entry);
  }

  // Turns an entry by the position of its first token and stores it.
  void store_entry(const vn_v4_layer& layer, const vn_compressor& c, int64_t request, int64_t index,
                   float* entry) {
    const int64_t first = index * layer.ratio;
    thread_local Floats turns;
    turns.resize(m_.rope_dim);
    compute_turns(first, m_.compress_frequencies, m_.rope_dim / 2, turns.data());
    rotate_tail(entry, c.width, turns.data(), m_.rope_dim / 2, 1.0f);
    write_row(c.entries, need_row(c.entries, request, first), entry);
  }

  // Entries that layers share, and of each its index key, from rows c | g of a window's tokens; of one
  // token c alone.
  void make_shared(const vn_v4_layer& layer, const float* projected, int64_t stride) {
    const vn_compressor &c = layer.compressor, &keys = layer.index_compressor;
    if (layer.ratio > 1) {
      for_rows(pool_, t_, 4 * c.row_width, [&](int64_t row) {
        store_row(pages_, c.state, row, step_.positions[row], projected + row * stride);
      });
    }
    const std::vector<Entry> entries = list_entries(step_, c.entries, layer.ratio);
    const int64_t count = static_cast<int64_t>(entries.size());
    if (count == 0) return;
    float* latents = space_.index_rows.take(count * c.width);
    for_rows(pool_, count, 60 * layer.ratio * c.width, [&](int64_t i) {
      const auto [request, index] = entries[i];
      float* latent = latents + i * c.width;
      if (layer.ratio > 1) {
        reduce_window(layer, c, request, index, projected, stride, latent);
      } else {
        const float* own = projected + own_row(request, index) * stride;
        rms_norm(own, c.norm, 1.0f, c.width, m_.norm_eps, latent);
      }
    });
    float* found = space_.index_queries.take(count * keys.width);
    multiply(pool_, latents, count, layer.sharing->key_proj, found);
    for_rows(pool_, count, 40 * c.width, [&](int64_t i) {
      const auto [request, index] = entries[i];
      float* key = found + i * keys.width;
      rms_norm(key, layer.sharing->key_norm, 1.0f, keys.width, m_.norm_eps, key);
      store_entry(layer, keys, request, index, key);
      store_entry(layer, c, request, index, latents + i * c.width);
    });
  }

  // ---- attention ----------------------------------------------------------------------------

  int64_t count_entries(const vn_v4_layer& layer, int64_t row) const {
    return layer.kind == VN_WINDOW ? 0 : (step_.positions[row] + 1) / layer.ratio;
  }

  void attend_block(const vn_v4_layer& layer, int64_t first, const std::vector<int64_t>& wanted,
                    const float* latent, const float* kv, const float* head_weights, int64_t stride,
                    float* output) {
    const int64_t d = m_.head_dim, all_heads = m_.num_heads * d, rows = wanted.back() + 1;
    float* queries = space_.queries.take(rows * all_heads);
    const float* block_latent = latent + first * m_.q_lora_rank;
    multiply(pool_, block_latent, rows, layer.wq_b, queries);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    for_rows(pool_, rows, 10 * all_heads, [&](int64_t i) {
      const float* turns = turns_of(layer, first + i);
      for (int64_t h = 0; h < m_.num_heads; ++h) {
        float* query = queries + i * all_heads + h * d;
        if (m_.has_plain_queries != 0) {
          for (int64_t at = 0; at < d; ++at) query[at] *= scale;
        } else {
          rms_norm(query, nullptr, scale, d, m_.norm_eps, query);
        }
        rotate_tail(query, d, turns, m_.rope_dim / 2, 1.0f);
      }
    });
    if (head_weights != nullptr) {
      choose_entries(layer, first, wanted, block_latent, head_weights, stride);
    }
    float* attended = space_.attended.take(rows * all_heads);
    const std::vector<Tile> tiles = tile_rows(first, wanted, m_.num_heads, [&](int64_t row) {
      if (find_list(layer, row) != nullptr) return int64_t{1};
      return kMaxTileScores / (m_.window + count_entries(layer, row));
    });
    const int64_t num_tiles = static_cast<int64_t>(tiles.size());
    const int64_t entries = std::min(count_entries(layer, first + rows - 1), listed_entries(layer));
    const int64_t tile_work = 2 * all_heads * (m_.window + entries);
    const bool is_whole = num_tiles >= 2 * pool_.num_threads() || is_short(pool_, tile_work);
    const int64_t parts =
        is_whole ? 1 : std::min<int64_t>(pool_.num_threads(), m_.num_heads);
    const int64_t heads = (m_.num_heads + parts - 1) / parts;
    pool_.run(num_tiles * parts, [&](int64_t task) {
      const Tile tile = tiles[task / parts];
      const int64_t head = task % parts * heads;
      const int64_t count = std::min<int64_t>(heads, m_.num_heads - head);
      if (count <= 0) return;
      const int64_t at = tile.first * all_heads + head * d;
      attend_tile(layer, first, tile, queries + at, head, count, kv, attended + at);
    });
    project_output(layer, rows, attended, output + first * m_.hidden_size);
  }

  // Consecutive rows of one request; `first` counts from the block's first row.
  struct Tile {
    int64_t first, rows;
  };

  // Cuts a block's wanted rows into tiles of `heads` queries a row; find_most(row): the most queries of
  // a tile that ends with a row.
  template <typename FindMost>
  std::vector<Tile> tile_rows(int64_t first, const std::vector<int64_t>& wanted, int64_t heads,
                              FindMost&& find_most) const {
    std::vector<Tile> tiles;
    for (const int64_t i : wanted) {
      const int64_t request = pages_.request_of(first + i);
      if (!tiles.empty()) {
        Tile& last = tiles.back();
        const int64_t queries = (last.rows + 1) * heads;
        if (last.first + last.rows == i && pages_.request_of(first + last.first) == request &&
            queries <= kTileQueries && queries <= find_most(first + i)) {
          ++last.rows;
          continue;
        }
      }
      tiles.push_back({i, 1});
    }
    return tiles;
  }

  const float* turns_of(const vn_v4_layer& layer, int64_t row) {
    return layer.kind == VN_WINDOW ? main_turns(row) : compress_turns(row);
  }

  // How an indexer chooses for one row.
  struct Choice {
    int64_t num_visible = 0;
    bool names = false;              // names candidates
    bool chooses = false;            // some of the visible entries, or of those listed
    std::vector<int32_t> listed;     // the candidates' entries, ascending; none: all visible ones
    int64_t num_scored() const {
      if (!names && !chooses) return 0;
      return listed.empty() ? num_visible : static_cast<int64_t>(listed.size());
    }
  };

  // Fills the choices of a block's rows: where more is seen than the indexer lets through, or named.
  void choose_entries(const vn_v4_layer& layer, int64_t first, const std::vector<int64_t>& wanted,
                      const float* latent, const float* head_weights, int64_t stride) {
    const int64_t rows = wanted.back() + 1;
    std::vector<Choice> choices(rows);
    int64_t most = 0;
    for (const int64_t i : wanted) {
      choices[i] = begin_choice(layer, first + i);
      most = std::max(most, choices[i].num_scored());
    }
    if (most == 0) return;
    const int64_t heads = m_.index_heads, width = m_.index_dim;
    float* queries = space_.index_queries.take(rows * heads * width);
    multiply(pool_, latent, rows, layer.index_wq_b, queries);
    float* weights = space_.index_weights.take(rows * heads);
    const float scale = 1.0f / std::sqrt(static_cast<float>(heads * width));
    for_rows(pool_, rows, 8 * heads * width, [&](int64_t i) {
      for (int64_t h = 0; h < heads; ++h) {
        rotate_tail(queries + (i * heads + h) * width, width, compress_turns(first + i),
                    m_.rope_dim / 2, 1.0f);
        weights[i * heads + h] = head_weights[(first + i) * stride + h] * scale;
      }
    });
    float* scores = space_.scores.take(rows * most);
    const int64_t blocks = (most + kKeyBlock - 1) / kKeyBlock;
    const std::vector<Tile> tiles = tile_rows(first, wanted, heads, [&](int64_t row) {
      return choices[row - first].listed.empty() ? kTileQueries : int64_t{1};
    });
    pool_.run(static_cast<int64_t>(tiles.size()) * blocks, [&](int64_t task) {
      const Tile tile = tiles[task / blocks];
      const int64_t i = tile.first, from = task % blocks * kKeyBlock;
      const Choice& last = choices[i + tile.rows - 1];
      const int64_t to = std::min(last.num_scored(), from + kKeyBlock);
      if (from >= to) return;
      thread_local RowList keys;
      const vn_cache& cache = layer.index_compressor.entries;
      const int64_t request = pages_.request_of(first + i);
      keys.clear();
      keys.reserve_decoded(to - from, width);
      if (last.listed.empty()) {
        add_rows(cache, request, from, to, keys);
      } else {
        for (int64_t k = from; k < to; ++k) {
          const int64_t position = int64_t{last.listed[k]} * layer.ratio;
          keys.add_stored(cache, need_row(cache, request, position));
        }
      }
      score_keys(keys, tile.rows, queries + i * heads * width, weights + i * heads,
                 scores + i * most + from, most);
    });
    for_rows(pool_, rows, 4 * most, [&](int64_t i) {
      if (choices[i].num_scored() == 0) return;
      finish_choice(choices[i], whole_row(first + i), scores + i * most);
    });
  }

  // Looks at what a row sees; where nothing has to be scored its choice is made.
  Choice begin_choice(const vn_v4_layer& layer, int64_t row) {
    Choice choice;
    const int64_t visible = count_entries(layer, row), size = m_.candidate_block_size;
    const int32_t candidates = layer.sharing == nullptr ? 0 : layer.sharing->candidates;
    std::vector<int32_t>& chosen = choices_.entries[whole_row(row)];
    std::vector<int32_t>& blocks = choices_.candidates[whole_row(row)];
    chosen.clear();
    choice.num_visible = visible;
    choice.chooses = visible > m_.index_topk;
    if (candidates == VN_NAMES_CANDIDATES) {
      blocks.clear();
      choice.names = visible > m_.candidate_blocks * size;
    } else if (candidates == VN_WITHIN_CANDIDATES && !blocks.empty()) {
      for (const int64_t block : blocks) {
        const int64_t end = std::min(visible, (block + 1) * size);
        for (int64_t e = block * size; e < end; ++e) {
          choice.listed.push_back(static_cast<int32_t>(e));
        }
      }
      choice.chooses = static_cast<int64_t>(choice.listed.size()) > m_.index_topk;
      if (!choice.chooses) chosen = choice.listed;
    }
    return choice;
  }

  // Changes the scores.
  void finish_choice(const Choice& choice, int64_t whole_row, float* scores) {
    thread_local Floats best, scratch;
    if (choice.names) {
      // The best entry stands for its block, and the newest block is always among them.
      const int64_t size = m_.candidate_block_size, visible = choice.num_visible;
      best.assign((visible + size - 1) / size, -INFINITY);
      for (int64_t e = 0; e < visible; ++e) best[e / size] = std::max(best[e / size], scores[e]);
      best.back() = INFINITY;
      choose_highest(best.data(), static_cast<int64_t>(best.size()), m_.candidate_blocks, scratch,
                     choices_.candidates[whole_row]);
    }
    if (!choice.chooses) return;
    std::vector<int32_t>& chosen = choices_.entries[whole_row];
    choose_highest(scores, choice.num_scored(), m_.index_topk, scratch, chosen);
    if (choice.listed.empty()) return;
    for (int32_t& place : chosen) place = choice.listed[place];
  }

  // Scores of keys for some rows of one request, also of those that a row does not see.
  void score_keys(const RowList& keys, int64_t rows, const float* queries, const float* weights,
                  float* scores, int64_t stride) {
    const int64_t width = m_.index_dim, total = rows * m_.index_heads, count = keys.size();
    thread_local Floats products;
    thread_local std::vector<const float*> x;
    thread_local std::vector<float*> y;
    products.resize(total * count);
    x.resize(total);
    y.resize(total);
    for (int64_t q = 0; q < total; ++q) {
      x[q] = queries + q * width;
      y[q] = products.data() + q * count;
    }
    dot_floats(x.data(), total, keys.data(), count, width, y.data(), 0);
    for (int64_t i = 0; i < rows; ++i) {
      float* own = scores + i * stride;
      std::fill_n(own, count, 0.0f);
      for (int64_t q = i * m_.index_heads; q < (i + 1) * m_.index_heads; ++q) {
        const float weight = weights[q];
        for (int64_t k = 0; k < count; ++k) own[k] += weight * std::max(y[q][k], 0.0f);
      }
    }
  }

  // First position whose window row a row sees.
  int64_t find_window(int64_t row) const {
    return std::max(step_.read_from[pages_.request_of(row)], step_.positions[row] - m_.window + 1);
  }

  // Attends some heads of a tile's queries; output and queries [rows, H, d], turned back.
  void attend_tile(const vn_v4_layer& layer, int64_t block, const Tile& tile, const float* queries,
                   int64_t head, int64_t heads, const float* kv, float* output) {
    const int64_t d = m_.head_dim, stride = m_.num_heads * d, row = block + tile.first;
    thread_local RowList keys;
    const int64_t num_entries = gather_keys(layer, row, tile, kv, keys);
    const int64_t count = keys.size(), padded = (count + kLanes - 1) / kLanes * kLanes;
    thread_local Floats scores, scale;
    thread_local std::vector<const float*> x, weights;
    thread_local std::vector<float*> y, out;
    const int64_t total = tile.rows * heads;
    scores.resize(total * padded);
    scale.resize(total);
    x.resize(total);
    weights.resize(total);
    y.resize(total);
    out.resize(total);
    for (int64_t q = 0; q < total; ++q) {
      const int64_t at = q / heads * stride + q % heads * d;
      x[q] = queries + at;
      out[q] = output + at;
      y[q] = scores.data() + q * padded;
      weights[q] = y[q];
    }
    dot_floats(x.data(), total, keys.data(), count, d, y.data(), 0);
    const int64_t from = find_window(row);
    for (int64_t q = 0; q < total; ++q) {
      const int64_t own = row + q / heads;
      const int64_t seen = std::min(num_entries, count_entries(layer, own));
      const int64_t low = num_entries + find_window(own) - from;
      const int64_t high = num_entries + step_.positions[own] + 1 - from;
      scale[q] = weigh(y[q], seen, low, high, count, layer.sinks[head + q % heads]);
    }
    const MixPart part = {keys.data(), count, true, true};
    mix_all(total, weights.data(), part, d, scale.data(), out.data());
    for (int64_t q = 0; q < total; ++q) {
      rotate_tail(out[q], d, turns_of(layer, row + q / heads), m_.rope_dim / 2, -1.0f);
    }
  }

  // Turns the scores that a query sees into softmax terms, hides the others and returns what the
  // mix is scaled by:
  //   | entries 0 .. seen - 1 | hidden | window low .. high - 1 | hidden .. count - 1 |
  // The sums of entries and window begin with their own first lanes, whoever shares the tile.
  static float weigh(float* scores, int64_t seen, int64_t low, int64_t high, int64_t count,
                     float sink) {
    float top = find_highest(scores, seen, sink);
    top = find_highest(scores + low, high - low, top);
    const float entries = exp_terms(scores, seen, top);
    const float window = exp_terms(scores + low, high - low, top);
    std::fill(scores + seen, scores + low, 0.0f);
    std::fill(scores + high, scores + count, 0.0f);
    return 1.0f / (entries + window + std::exp(sink - top));
  }

  // Lists the entries that a tile sees, then the window rows; returns how many entries.
  int64_t gather_keys(const vn_v4_layer& layer, int64_t row, const Tile& tile, const float* kv,
                      RowList& keys) {
    const int64_t d = m_.head_dim, request = pages_.request_of(row);
    const int64_t first = find_window(row), end = step_.positions[row] + tile.rows;
    const int64_t num_entries = count_entries(layer, row + tile.rows - 1);
    keys.clear();
    keys.reserve_decoded(m_.window + tile.rows + std::min(num_entries, listed_entries(layer)), d);
    add_entries(layer, row, num_entries, keys);
    const int64_t listed = keys.size(), start = step_.starts[request];
    add_rows(layer.window, request, first, std::min(start, end), keys);
    for (int64_t p = std::max(first, start); p < end; ++p) keys.add(kv + own_row(request, p) * d);
    return listed;
  }

  int64_t listed_entries(const vn_v4_layer& layer) const {
    return layer.kind == VN_CHOSEN_ENTRIES ? m_.index_topk : INT64_MAX / 2;
  }

  // The entries that were chosen for a row; null: it attends all it sees.
  const std::vector<int32_t>* find_list(const vn_v4_layer& layer, int64_t row) const {
    if (layer.kind != VN_CHOSEN_ENTRIES) return nullptr;
    const std::vector<int32_t>& chosen = choices_.entries[whole_row(row)];
    return chosen.empty() ? nullptr : &chosen;
  }

  // Those of a tile's rows, which see no more than `num_entries`; a row with a list is alone in its.
  void add_entries(const vn_v4_layer& layer, int64_t row, int64_t num_entries, RowList& keys) {
    const vn_cache& cache = layer.compressor.entries;
    const int64_t request = pages_.request_of(row);
    if (const std::vector<int32_t>* chosen = find_list(layer, row)) {
      for (const int32_t e : *chosen) {
        keys.add_stored(cache, need_row(cache, request, int64_t{e} * layer.ratio));
      }
      return;
    }
    add_rows(cache, request, 0, num_entries, keys);
  }

  // Adds stored rows that must be there, numbered by position / tokens per row.
  void add_rows(const vn_cache& cache, int64_t request, int64_t first, int64_t end, RowList& keys) {
    if (first >= end) return;  // a window layer has no cache of entries
    const int64_t tokens_per_row = cache.block_size / cache.rows_per_block;
    pages_.each_row(cache, request, first, end, [&](int64_t row, int64_t offset) {
      if (offset < 0) offset = need_row(cache, request, row * tokens_per_row);
      keys.add_stored(cache, offset);
    });
  }

  // wo_b of wo_a's groups, each over its own slice of the heads.
  void project_output(const vn_v4_layer& layer, int64_t rows, const float* attended,
                      float* output) {
    const int64_t in_width = int64_t{m_.num_heads} * m_.head_dim, groups = m_.o_groups;
    const int64_t out_width = groups * m_.o_lora_rank;
    float* grouped = space_.grouped.take(rows * out_width);
    std::vector<Product> products;
    for (int64_t g = 0; g < groups; ++g) {
      products.push_back({attended + g * layer.wo_a.cols, in_width, nullptr, rows, &layer.wo_a,
                          g * m_.o_lora_rank, m_.o_lora_rank, grouped + g * m_.o_lora_rank,
                          out_width});
    }
    multiply_all(pool_, products.data(), products.size());
    multiply(pool_, grouped, rows, layer.wo_b, output);
  }

  ThreadPool& pool_;
  Workspace& space_;
  const vn_v4_model& m_;
  const vn_step& step_;
  const Pages pages_;
  const int64_t t_, num_turns_;
  V4Choices& choices_;
  float* turns_ = nullptr;
  const int64_t* rows_of_whole_ = nullptr;
  MissingRow missing_;
};

}  // namespace VN_BUILD
}  // namespace vn
