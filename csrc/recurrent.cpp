// Recurrent layers by the gated delta rule: projections, a short causal convolution, the scan
// (gated_delta.h) and a gated norm; and where states lie in their blocks. The maths is that of
// decoder/gated_delta.py, the blocks those of kv_cache_specs/recurrent.py:
//
//   blocks of a state   | heads 0..5 of layer 0 | 6..11 | ... | last heads | columns 0..c | ... |
//   a head              a matrix [K, V], whole in one block
//   columns             the last W - 1 inputs of the convolutions, by channel: [W - 1, channels]
//
// A layer without heads is a gated convolution alone: of the projection b, c and x, each [C], it gives
// c * conv(b * x), without an activation (decoder/short_convolution.py).
#include "recurrent.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "build.h"
#include "entries.h"
#include "gated_delta.h"
#include "kernels.h"

namespace vn {
namespace VN_BUILD {

// The blocks of the state behind `position` tokens; null: there are none.
inline const int64_t* find_state(const vn_step& step, const vn_recurrence& layer, int64_t request,
                                 int64_t position) {
  const int64_t at = layer.states.group * step.num_requests + request;
  const int64_t unit = layer.states.block_size, pieces = layer.num_pieces;
  const int64_t first = (position - 1) / unit * pieces - step.table_bases[at];
  if (first < 0 || first + pieces > step.table_lengths[at]) return nullptr;
  const int64_t* blocks = step.block_ids + step.table_offsets[at] + first;
  return std::find(blocks, blocks + pieces, 0) == blocks + pieces ? blocks : nullptr;
}

inline const int64_t* require_state(const vn_step& step, const vn_recurrence& layer,
                                    int64_t request, int64_t position) {
  const int64_t* blocks = find_state(step, layer, request, position);
  if (blocks != nullptr) return blocks;
  const int64_t at = layer.states.group * step.num_requests + request;
  throw InvalidStep("I5: the step's request " + std::to_string(request) +
                    " needs the recurrent state behind " + std::to_string(position) +
                    " tokens, but its table (" + std::to_string(step.table_lengths[at]) +
                    " blocks from number " + std::to_string(step.table_bases[at]) +
                    ") stores no block there");
}

std::vector<StateRun> find_runs(const vn_step& step, const vn_recurrence& layer) {
  const int64_t unit = layer.states.block_size;
  std::vector<StateRun> runs;
  for (int64_t r = 0; r < step.num_requests; ++r) {
    const int64_t start = step.starts[r], count = step.counts[r];
    const int64_t end = start + count - (step.num_drafts == nullptr ? 0 : step.num_drafts[r]);
    StateRun run = {step.row_starts[r], count, nullptr, {}};
    if (start > 0) run.source = require_state(step, layer, r, start);
    for (int64_t boundary = (start / unit + 1) * unit; boundary < end; boundary += unit) {
      const int64_t* blocks = find_state(step, layer, r, boundary);
      if (blocks != nullptr) run.stores.push_back({boundary - start, blocks});
    }
    run.stores.push_back({end - start, require_state(step, layer, r, end)});
    runs.push_back(run);
  }
  return runs;
}

// What rows do to states: inputs of the convolution [C], factors of decay [F], rates of writing [H].
struct StateInputs {
  const float* channels;
  int64_t channels_stride;
  const float* factors;
  int64_t factors_stride;
  const float* rates;
  int64_t rates_stride;
};

// Factors of decay of a head in one row.
inline int64_t factors_per_head(const vn_recurrence& layer) {
  return layer.has_channel_decays != 0 ? layer.key_dim : 1;
}

inline int64_t count_factors(const vn_recurrence& layer) {
  return layer.num_heads * factors_per_head(layer);
}

// Values of a row that are kept for a draft.
inline int64_t draft_width(const vn_recurrence& layer) {
  return layer.num_channels + count_factors(layer) + layer.num_heads;
}

// One layer's states, over the rows of some requests.
class StateScan {
 public:
  StateScan(ThreadPool& pool, const vn_recurrence& layer, const std::vector<StateRun>& runs,
            StateInputs inputs)
      : pool_(pool), l_(layer), runs_(runs), in_(inputs) {
    for (const StateRun& run : runs) num_rows_ += run.count;
    for (const StateRun& run : runs) {
      if (run.source == nullptr) zeros_.resize(l_.num_channels);
    }
  }

  // mixed [rows, C] and outputs [rows, H * V] hold the requests' rows one behind the other. Outputs
  // are the scan's, of all rows; states are stored.
  void run(float* mixed, float* outputs) {
    std::vector<int64_t> firsts;  // of each request among these rows
    for (int64_t r = 0, first = 0; r < num_runs(); ++r) {
      firsts.push_back(first);
      first += runs_[r].count;
    }
    for_rows(pool_, num_rows_, 12 * l_.num_channels, [&](int64_t row) {
      const int64_t r = std::upper_bound(firsts.begin(), firsts.end(), row) - firsts.begin() - 1;
      mix_row(runs_[r], row - firsts[r], mixed + row * l_.num_channels);
    });
    // Columns are read by all rows above and written below; heads are each task's own.
    const int64_t heads = l_.num_heads, tasks = num_runs() * (heads + 1);
    const auto run_task = [&](int64_t task) {
      const int64_t r = task / (heads + 1), head = task % (heads + 1);
      if (head == heads) {
        for (size_t s = runs_[r].stores.size(); s-- > 0;) store_columns(runs_[r], runs_[r].stores[s]);
      } else {
        scan(runs_[r], head, mixed + firsts[r] * l_.num_channels,
             outputs + firsts[r] * heads * l_.value_dim);
      }
    };
    const int64_t work = num_rows_ * heads * l_.key_dim * l_.value_dim * 4;
    if (is_short(pool_, work)) {
      for (int64_t task = 0; task < tasks; ++task) run_task(task);
    } else {
      pool_.run(tasks, run_task);
    }
  }

 private:
  int64_t num_runs() const { return static_cast<int64_t>(runs_.size()); }

  const float* channels_of(const StateRun& run, int64_t i) const {
    return in_.channels + (run.first_row + i) * in_.channels_stride;
  }

  float* page(int64_t block) const {
    return static_cast<float*>(l_.states.data) + block * l_.states.block_stride;
  }

  float* head_of(const int64_t* blocks, int64_t head) const {
    const int64_t index = l_.number * l_.num_heads + head;
    return page(blocks[index / l_.heads_per_block]) +
           index % l_.heads_per_block * l_.key_dim * l_.value_dim;
  }

  // Calls body(c, end, at): channels c .. end - 1 lie together; column j of them at
  // at + j * channels_per_block.
  template <typename Body>
  void each_piece(const int64_t* blocks, Body&& body) const {
    for (int64_t c = 0; c < l_.num_channels;) {
      const int64_t index = l_.number * l_.num_channels + c, slot = index % l_.channels_per_block;
      const int64_t end = std::min<int64_t>(l_.num_channels, c + l_.channels_per_block - slot);
      body(c, end, page(blocks[l_.num_head_pieces + index / l_.channels_per_block]) + slot);
      c = end;
    }
  }

  // The input of a request's row i, which is negative before its part of the step: channels c .. of
  // a piece whose columns stand at `at`.
  const float* input_of(const StateRun& run, int64_t i, int64_t c, const float* at) const {
    if (i >= 0) return channels_of(run, i) + c;
    if (run.source == nullptr) return zeros_.data() + c;
    return at + (i + l_.conv_width - 1) * l_.channels_per_block;
  }

  void mix_row(const StateRun& run, int64_t i, float* out) const {
    const int64_t width = l_.conv_width;
    thread_local std::vector<const float*> rows;
    rows.resize(width);
    const auto mix = [&](int64_t c, int64_t end, const float* at) {
      for (int64_t j = 0; j < width; ++j) rows[j] = input_of(run, i - width + 1 + j, c, at);
      convolve(rows.data(), c, end, out);
    };
    if (i >= width - 1 || run.source == nullptr) {
      mix(0, l_.num_channels, nullptr);
    } else {
      each_piece(run.source, mix);
    }
    const int64_t key_heads = l_.num_key_heads, d = l_.key_dim;
    const float factor = 1.0f / std::sqrt(static_cast<float>(d));
    for (int64_t h = 0; h < key_heads; ++h) scale_to_unit(out + h * d, d, factor, out + h * d);
    out += key_heads * d;
    for (int64_t h = 0; h < key_heads; ++h) scale_to_unit(out + h * d, d, 1.0f, out + h * d);
  }

  // Channels c .. end - 1 of the rows, weighed, the oldest first; with heads, silu of it.
  void convolve(const float* const* rows, int64_t c, int64_t end, float* out) const {
    for (int64_t k = c; k < end; k += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, end - k));
      const float* weights = l_.conv + k;
      Vec total = mul(load_some(rows[0] + k - c, lanes), load_some(weights, lanes));
      for (int64_t j = 1; j < l_.conv_width; ++j) {
        weights += l_.num_channels;
        total = fused(load_some(rows[j] + k - c, lanes), load_some(weights, lanes), total);
      }
      store_some(out + k, l_.num_heads == 0 ? total : exact_silu(total), lanes);
    }
  }

  // The columns of a state are the W - 1 inputs before it. Where a store lies in the source's
  // blocks, each column is read before it is written, as columns move down; later stores were
  // written first.
  void store_columns(const StateRun& run, const StateStore& store) const {
    const int64_t columns = l_.conv_width - 1;
    const auto move = [&](int64_t c, int64_t end, const float* from, float* to) {
      for (int64_t j = 0; j < columns; ++j) {
        const float* own = input_of(run, store.end - columns + j, c, from);
        std::memmove(to + j * l_.channels_per_block, own, sizeof(float) * (end - c));
      }
    };
    if (run.source == nullptr || store.end >= columns) {
      each_piece(store.blocks, [&](int64_t c, int64_t end, float* to) { move(c, end, nullptr, to); });
      return;
    }
    std::vector<const float*> sources;
    each_piece(run.source, [&](int64_t, int64_t, float* at) { sources.push_back(at); });
    size_t piece = 0;
    each_piece(store.blocks,
               [&](int64_t c, int64_t end, float* to) { move(c, end, sources[piece++], to); });
  }

  void scan(const StateRun& run, int64_t head, const float* mixed, float* outputs) const {
    const int64_t key_head = head / (l_.num_heads / l_.num_key_heads);
    const float* query = mixed + key_head * l_.key_dim;
    const float* key = query + l_.num_key_heads * l_.key_dim;
    const float* value = mixed + 2 * l_.num_key_heads * l_.key_dim + head * l_.value_dim;
    const HeadTokens tokens = {key,
                               query,
                               value,
                               in_.factors + run.first_row * in_.factors_stride +
                                   head * factors_per_head(l_),
                               in_.rates + run.first_row * in_.rates_stride + head,
                               outputs + head * l_.value_dim,
                               l_.num_channels,
                               l_.num_channels,
                               in_.rates_stride,
                               l_.num_heads * l_.value_dim,
                               l_.key_dim,
                               l_.value_dim,
                               in_.factors_stride};
    std::vector<HeadStore> stores;
    for (const StateStore& store : run.stores) {
      stores.push_back({store.end, head_of(store.blocks, head)});
    }
    if (stores.back().end < run.count) stores.push_back({run.count, nullptr});  // drafts
    const auto scan_all = l_.has_channel_decays != 0 ? scan_head<true> : scan_head<false>;
    scan_all(tokens, run.source == nullptr ? nullptr : head_of(run.source, head), stores.data(),
             static_cast<int64_t>(stores.size()));
  }

  ThreadPool& pool_;
  const vn_recurrence& l_;
  const std::vector<StateRun>& runs_;
  const StateInputs in_;
  int64_t num_rows_ = 0;
  Floats zeros_;
};

// A row of the projection by key head, as | channels | gates | betas | decays |.
inline void split_heads(const vn_recurrence& l, const float* by_head, float* out) {
  const int64_t heads = l.num_key_heads, d = l.key_dim, repeats = l.num_heads / heads;
  const int64_t values = repeats * l.value_dim, key_width = heads * d;
  float* gates = out + l.num_channels;
  float* betas = gates + l.num_heads * l.value_dim;
  const auto take = [&](float* to, int64_t count) {
    std::memcpy(to, by_head, sizeof(float) * count);
    by_head += count;
  };
  for (int64_t h = 0; h < heads; ++h) {
    take(out + h * d, d);
    take(out + key_width + h * d, d);
    take(out + 2 * key_width + h * values, values);
    take(gates + h * values, values);
  }
  for (int64_t h = 0; h < heads; ++h) {
    take(betas + h * repeats, repeats);
    take(betas + l.num_heads + h * repeats, repeats);
  }
}

// Factors of decay [H], then rates of writing [H], of a row's betas, then decays.
inline void find_gates(const vn_recurrence& l, const float* betas, float* gates) {
  const int64_t heads = l.num_heads;
  for (int64_t h = 0; h < heads; h += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, heads - h));
    const Vec input = add(load_some(betas + heads + h, lanes), load_some(l.dt_bias + h, lanes));
    const Vec log = mul(exact_softplus(input), load_some(l.decay_rates + h, lanes));
    store_some(gates + h, exact_exp(sub(zero(), log)), lanes);
    store_some(gates + heads + h, exact_sigmoid(load_some(betas + h, lanes)), lanes);
  }
}

// As find_gates with a decay for each channel: factors [H, K] of inputs [H, K], which they may be.
inline void find_channel_factors(const vn_recurrence& l, const float* inputs, float* factors) {
  const int64_t d = l.key_dim;
  for (int64_t h = 0; h < l.num_heads; ++h) {
    const Vec rate = fill(l.decay_rates[h]);
    for (int64_t i = 0; i < d; i += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, d - i));
      const Vec input =
          add(load_some(inputs + h * d + i, lanes), load_some(l.dt_bias + h * d + i, lanes));
      const Vec log = l.decay_bound > 0.0f
                          ? mul(exact_sigmoid(mul(rate, input)), fill(l.decay_bound))
                          : mul(exact_softplus(input), rate);
      store_some(factors + h * d + i, exact_exp(sub(zero(), log)), lanes);
    }
  }
}

// x / rms(x) * weight * activation(gate), head by head; out may be x.
inline void gated_norm(const vn_recurrence& l, const float* x, const float* gate, float eps,
                       float* out) {
  const int64_t width = l.value_dim;
  const float mean = exact_sum_of_squares(x, width) / static_cast<float>(width);
  const Vec inverse = fill(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - i));
    const Vec own = load_some(gate + i, lanes);
    const Vec factor = l.has_sigmoid_gate != 0 ? exact_sigmoid(own) : exact_silu(own);
    const Vec normed = mul(mul(load_some(x + i, lanes), inverse), load_some(l.norm + i, lanes));
    store_some(out + i, mul(normed, factor), lanes);
  }
}

// What drafts would do to the states of layer `number`: [drafts, draft_width].
inline float* find_drafts(const vn_step& step, const vn_recurrence& layer) {
  return step.drafts + layer.number * step.total_drafts * draft_width(layer);
}

// Keeps what the step's drafts would do, one behind the other.
inline void keep_drafts(const vn_step& step, const vn_recurrence& l, const StateInputs& in) {
  if (step.total_drafts == 0) return;
  float* out = find_drafts(step, l);
  for (int64_t r = 0; r < step.num_requests; ++r) {
    const int64_t end = step.row_starts[r] + step.counts[r];
    for (int64_t row = end - step.num_drafts[r]; row < end; ++row) {
      std::memcpy(out, in.channels + row * in.channels_stride, sizeof(float) * l.num_channels);
      out += l.num_channels;
      std::memcpy(out, in.factors + row * in.factors_stride, sizeof(float) * count_factors(l));
      out += count_factors(l);
      std::memcpy(out, in.rates + row * in.rates_stride, sizeof(float) * l.num_heads);
      out += l.num_heads;
    }
  }
}

// What a layer's inputs are projected to: what they do to states, and gates [H * V].
struct RecurrentParts {
  StateInputs inputs;
  const float* gates;
  int64_t gates_stride;
};

// Parts with a decay for each channel; product [T, width] has been computed.
inline RecurrentParts project_by_channel(ThreadPool& pool, Workspace& space, const vn_recurrence& l,
                                         float* product, int64_t t) {
  const int64_t width = l.in_proj.rows, heads = l.num_heads, channels = l.num_channels;
  const int64_t num_factors = count_factors(l), inner = heads * l.value_dim;
  float* factors = space.rows.take(t * num_factors);
  float* gates = space.index_rows.take(t * inner);
  const float* narrow = product + channels + heads;
  const Product products[2] = {
      whole_product(narrow, width, t, l.decays, factors, num_factors),
      whole_product(narrow + l.decays.cols, width, t, l.gates, gates, inner),
  };
  multiply_all(pool, products, 2);
  for_rows(pool, t, 40 * num_factors, [&](int64_t row) {
    find_channel_factors(l, factors + row * num_factors, factors + row * num_factors);
    float* betas = product + row * width + channels;
    for (int64_t h = 0; h < heads; h += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, heads - h));
      store_some(betas + h, exact_sigmoid(load_some(betas + h, lanes)), lanes);
    }
  });
  return {{product, width, factors, num_factors, product + channels, width}, gates, inner};
}

inline RecurrentParts project_by_head(ThreadPool& pool, Workspace& space, const vn_recurrence& l,
                                      float* product, int64_t t) {
  const int64_t width = l.in_proj.rows, heads = l.num_heads, inner = heads * l.value_dim;
  float* gates = space.scores.take(t * 2 * heads);
  float* rows = l.is_interleaved != 0 ? space.grouped.take(t * width) : product;
  for_rows(pool, t, 60 * heads + width, [&](int64_t row) {
    float* own = rows + row * width;
    if (own != product + row * width) split_heads(l, product + row * width, own);
    find_gates(l, own + l.num_channels + inner, gates + row * 2 * heads);
  });
  return {{rows, width, gates, 2 * heads, gates + heads, 2 * heads}, rows + l.num_channels, width};
}

// A row's product of its parts: out may be one of them.
inline void multiply_parts(const float* one, const float* other, int64_t width, float* out) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - i));
    store_some(out + i, mul(load_some(one + i, lanes), load_some(other + i, lanes)), lanes);
  }
}

inline float* run_convolution(ThreadPool& pool, Workspace& space, const vn_recurrence& l,
                              const vn_step& step, const std::vector<StateRun>& runs,
                              const float* x, int64_t t, KeptRows kept) {
  const int64_t channels = l.num_channels, width = l.in_proj.rows;
  float* product = space.queries.take(t * width);
  multiply(pool, x, t, l.in_proj, product);
  for_rows(pool, t, channels, [&](int64_t row) {
    float* own = product + row * width;
    multiply_parts(own, own + 2 * channels, channels, own);
  });
  // Nothing else is done to a state.
  const StateInputs inputs = {product, width, product, width, product, width};
  keep_drafts(step, l, inputs);
  float* mixed = space.key_values.take(t * channels);
  StateScan(pool, l, runs, inputs).run(mixed, nullptr);
  float* gated = space.hidden.take(kept.count * channels);
  for_rows(pool, kept.count, channels, [&](int64_t i) {
    const int64_t row = kept.rows == nullptr ? i : kept.rows[i];
    multiply_parts(product + row * width + channels, mixed + row * channels, channels,
                   gated + i * channels);
  });
  return gated;
}

float* run_recurrence(ThreadPool& pool, Workspace& space, const vn_recurrence& l,
                      const vn_step& step, const std::vector<StateRun>& runs, const float* x,
                      int64_t t, float eps, KeptRows kept) {
  if (l.num_heads == 0) return run_convolution(pool, space, l, step, runs, x, t, kept);
  const int64_t heads = l.num_heads, inner = heads * l.value_dim;
  float* product = space.queries.take(t * l.in_proj.rows);
  multiply(pool, x, t, l.in_proj, product);
  const auto project = l.has_channel_decays != 0 ? project_by_channel : project_by_head;
  const RecurrentParts parts = project(pool, space, l, product, t);
  keep_drafts(step, l, parts.inputs);
  float* outputs = space.attended.take(t * inner);
  StateScan(pool, l, runs, parts.inputs).run(space.key_values.take(t * l.num_channels), outputs);
  float* normed = space.hidden.take(kept.count * inner);
  for_rows(pool, kept.count, 40 * inner, [&](int64_t i) {
    const int64_t row = kept.rows == nullptr ? i : kept.rows[i];
    for (int64_t h = 0; h < heads; ++h) {
      gated_norm(l, outputs + row * inner + h * l.value_dim,
                 parts.gates + row * parts.gates_stride + h * l.value_dim, eps,
                 normed + i * inner + h * l.value_dim);
    }
  });
  return normed;
}

// The scan alone, of one request's tokens: queries and keys are brought to their lengths first.
void gated_delta_scan(ThreadPool& pool, const vn_delta_scan& s) {
  const int64_t t = s.num_tokens, d = s.key_dim, key_width = s.num_key_heads * d;
  const int64_t num_factors = t * s.num_heads * (s.has_channel_decays != 0 ? d : 1);
  Floats unit(2 * t * key_width), factors(num_factors);
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  for_rows(pool, t * s.num_key_heads, 4 * d, [&](int64_t i) {
    scale_to_unit(s.queries + i * d, d, factor, unit.data() + i * d);
    scale_to_unit(s.keys + i * d, d, 1.0f, unit.data() + t * key_width + i * d);
  });
  for (int64_t i = 0; i < num_factors; i += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, num_factors - i));
    store_some(factors.data() + i, exact_exp(load_some(s.logs + i, lanes)), lanes);
  }
  pool.run(s.num_heads, [&](int64_t head) {
    const int64_t key_head = head / (s.num_heads / s.num_key_heads);
    const int64_t by_head = s.has_channel_decays != 0 ? d : 1;
    const float* query = unit.data() + key_head * d;
    const HeadTokens tokens = {query + t * key_width,
                               query,
                               s.values + head * s.value_dim,
                               factors.data() + head * by_head,
                               s.betas + head,
                               s.outputs + head * s.value_dim,
                               key_width,
                               s.num_heads * s.value_dim,
                               s.num_heads,
                               s.num_heads * s.value_dim,
                               d,
                               s.value_dim,
                               s.num_heads * by_head};
    float* state = s.state + head * d * s.value_dim;
    const HeadStore store = {t, state};
    (s.has_channel_decays != 0 ? scan_head<true> : scan_head<false>)(tokens, state, &store, 1);
  });
}

void settle_recurrence(ThreadPool& pool, Workspace& space, const vn_recurrence& l,
                       const vn_step& step, const std::vector<StateRun>& runs) {
  const float* own = find_drafts(step, l);
  const int64_t width = draft_width(l);
  const float* factors = own + l.num_channels;
  const StateInputs inputs = {own, width, factors, width, factors + count_factors(l), width};
  int64_t rows = 0;
  for (const StateRun& run : runs) rows += run.count;
  StateScan(pool, l, runs, inputs)
      .run(space.key_values.take(rows * l.num_channels),
           space.attended.take(rows * l.num_heads * l.value_dim));
}

}  // namespace VN_BUILD
}  // namespace vn
