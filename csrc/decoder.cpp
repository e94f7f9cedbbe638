// Decoders of grouped-query attention (Llama, Qwen 3, Gemma 3 and 4, gpt-oss), and of recurrent layers
// and latent attention (Qwen 3.5, Kimi Linear, DeepSeek V3.2, GLM 5). The maths is that of the torch modules in
// vllm/model_executor/models/decoder.
#include "build.h"
#include "entries.h"
#include "hyper_connections.h"
#include "kernels.h"
#include "latents.h"
#include "layer_parts.h"
#include "mixture.h"
#include "pool_indexer.h"
#include "recurrent.h"
#include "turns.h"
#include "unit_attention.h"
#include "wanted_rows.h"

namespace vn {
namespace VN_BUILD {

inline void silu_row(const float* gate_up, int64_t width, float* out) {
  for (int64_t at = 0; at < width; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
    const Vec gate = load_some(gate_up + at, lanes);
    store_some(out + at, mul(mul(gate, sigmoid(gate)), load_some(gate_up + width + at, lanes)),
               lanes);
  }
}

inline void clamped_row(const float* pairs, int64_t width, float alpha, float limit, float* out) {
  for (int64_t at = 0; at < width; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
    float gates[kLanes] = {}, ups[kLanes] = {};
    for (int i = 0; i < lanes; ++i) {
      gates[i] = pairs[2 * (at + i)];
      ups[i] = pairs[2 * (at + i) + 1];
    }
    const Vec gate = min(load(gates), fill(limit));
    const Vec up = max(min(load(ups), fill(limit)), fill(-limit));
    const Vec share = sigmoid(mul(gate, fill(alpha)));
    store_some(out + at, mul(mul(share, gate), add(up, fill(1.0f))), lanes);
  }
}

inline void activate_row(const vn_decoder_layer& layer, const float* gate_up, int64_t inner,
                         float* out) {
  if (layer.activation == VN_SILU) {
    silu_row(gate_up, inner, out);
  } else if (layer.activation == VN_GELU_TANH) {
    gelu_times(gate_up, gate_up + inner, inner, out);
  } else if (layer.activation == VN_LIMITED_SILU) {
    clamped_silu_row(gate_up, inner, layer.limit, out);
  } else {
    clamped_row(gate_up, inner, layer.alpha, layer.limit, out);
  }
}

inline void add_bias(float* row, const float* bias, int64_t count) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < count; ++i) row[i] += bias[i];
}

class DecoderLayers {
 public:
  // inputs: of all layers, [T, L * w], or null.
  DecoderLayers(ThreadPool& pool, Workspace& space, const vn_decoder_model& model,
                const vn_step& step, const float* inputs)
      : pool_(pool), space_(space), m_(model), step_(step), pages_(step),
        indexer_(pool, space, step, pages_, missing_), units_(pool, space, step, pages_, missing_),
        inputs_(inputs), wanted_(find_wanted(step)),
        t_(step.num_tokens) {
    for (int32_t i = 0; i < model.num_layers && runs_.empty(); ++i) {
      if (model.layers[i].recurrence != nullptr) runs_ = find_runs(step, *model.layers[i].recurrence);
    }
    for (int64_t r = 0, first = 0; r < step.num_requests; ++r) {
      narrow_starts_.push_back(first);
      first += step.counts[r] - count_unwanted(step, r);
    }
  }

  // stream [T, D] before and after layer `index`. The last layer with rows of its own leaves the
  // wanted rows' streams alone, at the front; layers above take and leave these.
  void run(int32_t index, float* stream) {
    if (is_narrow_ && wanted_.empty()) return;
    const vn_decoder_layer& layer = m_.layers[index];
    const int64_t d = m_.hidden_size;
    float* x = space_.input.take(t_ * d);
    float* output = space_.output.take(t_ * d);
    norm_rows(stream, layer.norms[0], x);
    mix_tokens(layer, index, x, output);
    if (index == m_.last_owner) {
      gather_rows(wanted_, d, stream);
      is_narrow_ = true;
    }
    if (t_ == 0) return;
    add_to_stream(output, layer.output_bias, layer.norms[1], stream);
    norm_rows(stream, layer.norms[2], x);
    const float* bias = feed_forward(layer, x, output);
    if (layer.beside != nullptr) {
      const auto activate = [&](const float* gate_up, float* out) {
        activate_row(layer, gate_up, layer.beside->inner, out);
      };
      add_experts_beside(pool_, space_, *layer.beside, stream, t_, d, m_.norm_eps, activate,
                         output);
    }
    add_to_stream(output, bias, layer.norms[3], stream);
    if (inputs_ != nullptr) {
      const int64_t width = m_.input_width, all = width * m_.num_layers;
      const auto input_of = [&](int64_t row) {
        return inputs_ + flat_row(row) * all + index * width;
      };
      add_layer_input(pool_, space_, layer, t_, d, width, m_.norm_eps, input_of, stream);
    }
    if (layer.scalar != 1.0f) {
      for_rows(pool_, t_, d, [&](int64_t row) {
        for (int64_t i = 0; i < d; ++i) stream[row * d + i] *= layer.scalar;
      });
    }
  }

  // As run() of streams [T, n, D].
  void run_streams(int32_t index, float* streams) {
    if (is_narrow_ && wanted_.empty()) return;
    const vn_decoder_layer& layer = m_.layers[index];
    const int64_t d = m_.hidden_size, n = m_.num_streams;
    HyperState hyper{space_.hyper, space_.post, space_.mix};
    float* x = space_.input.take(t_ * d);
    float* output = space_.output.take(t_ * d);
    read_streams(pool_, m_, layer.attn_hyper, layer.norms[0], streams, t_, hyper, x);
    mix_tokens(layer, index, x, output);
    if (index == m_.last_owner) {
      gather_rows(wanted_, n * d, streams);
      gather_rows(wanted_, n, hyper.post.take(step_.num_tokens * n));
      gather_rows(wanted_, n * n, hyper.mix.take(step_.num_tokens * n * n));
      is_narrow_ = true;
    }
    if (t_ == 0) return;
    write_streams(pool_, m_, output, t_, hyper, streams);
    read_streams(pool_, m_, layer.ffn_hyper, layer.norms[2], streams, t_, hyper, x);
    feed_forward(layer, x, output);
    write_streams(pool_, m_, output, t_, hyper, streams);
  }

  // Moves the wanted rows' streams to where they belong; the others are undefined.
  void finish(float* stream) const { scatter_rows(wanted_, m_.hidden_size, stream); }

  // The same of the means of several streams [wanted, n, D].
  void finish_streams(const float* streams, float* stream) {
    const int64_t d = m_.hidden_size, n = m_.num_streams;
    const float share = 1.0f / static_cast<float>(n);
    for_rows(pool_, static_cast<int64_t>(wanted_.size()), n * d, [&](int64_t row) {
      const float* own = streams + row * n * d;
      float* out = stream + wanted_[row] * d;
      for (int64_t i = 0; i < d; ++i) {
        float total = own[i];
        for (int64_t j = 1; j < n; ++j) total += own[j * d + i];
        out[i] = total * share;
      }
    });
  }

  // Raises what went wrong in any thread.
  void check() const { missing_.check(); }

 private:
  // What stands in the place of attention, and what t_ counts behind the last owner.
  void mix_tokens(const vn_decoder_layer& layer, int32_t index, const float* x, float* output) {
    if (layer.recurrence != nullptr) {
      recur(*layer.recurrence, index == m_.last_owner, x, output);
    } else {
      attend(layer, index >= m_.last_owner, x, output);
    }
  }

  // output [T, D] of the layer's second half for normed x; returns the bias that it lacks, or null.
  const float* feed_forward(const vn_decoder_layer& layer, const float* x, float* output) {
    const float* bias = nullptr;
    if (layer.feed_forward == VN_MLP) {
      run_mlp(layer, x, output);
      bias = layer.down_bias;
    } else {
      route_and_run(layer, x, output);
    }
    if (layer.shared_expert != nullptr) add_shared_expert(layer, x, output);
    return bias;
  }

  void norm_rows(const float* rows, const float* weight, float* out) {
    const int64_t d = m_.hidden_size;
    for_rows(pool_, t_, 4 * d, [&](int64_t row) {
      rms_norm(rows + row * d, weight, 1.0f, d, m_.norm_eps, out + row * d);
    });
  }

  void add_to_stream(float* output, const float* bias, const float* norm, float* stream) {
    const int64_t d = m_.hidden_size;
    for_rows(pool_, t_, 6 * d, [&](int64_t row) {
      float* own = output + row * d;
      add_bias(own, bias, d);
      if (norm != nullptr) rms_norm(own, norm, 1.0f, d, m_.norm_eps, own);
      for (int64_t i = 0; i < d; ++i) stream[row * d + i] += own[i];
    });
  }

  void run_mlp(const vn_decoder_layer& layer, const float* x, float* output) {
    const int64_t inner = layer.inner;
    float* gate_up = space_.hidden.take(t_ * 2 * inner);
    float* hidden = space_.projected.take(t_ * inner);
    multiply(pool_, x, t_, layer.gate_up, gate_up);
    for_rows(pool_, t_, 30 * inner, [&](int64_t row) {
      add_bias(gate_up + row * 2 * inner, layer.gate_up_bias, 2 * inner);
      activate_row(layer, gate_up + row * 2 * inner, inner, hidden + row * inner);
    });
    multiply(pool_, hidden, t_, layer.down, output);
  }

  void route_and_run(const vn_decoder_layer& layer, const float* x, float* output) {
    const int experts = layer.num_experts, wanted = layer.num_chosen;
    float* logits = space_.logits.take(t_ * experts);
    multiply(pool_, x, t_, layer.router, logits);
    Routing routing;
    routing.expert_of.resize(t_ * wanted);
    routing.weight_of.resize(t_ * wanted);
    const Floats no_bias(experts, 0.0f);
    for_rows(pool_, t_, 60 * experts, [&](int64_t row) {
      float* own = logits + row * experts;
      add_bias(own, layer.router_bias, experts);
      int32_t* chosen = routing.expert_of.data() + row * wanted;
      float* weights = routing.weight_of.data() + row * wanted;
      if (layer.scores != nullptr) {
        choose_by_sigmoid(*layer.scores, own, experts, wanted, layer.normalises != 0, chosen, weights);
        return;
      }
      choose_experts(own, no_bias.data(), experts, wanted, chosen);
      weigh_chosen(layer, own, chosen, weights);
    });
    group_by_expert(t_, wanted, experts, routing);
    const ExpertStack stack = {layer.gate_up,   layer.down, layer.gate_up_bias,
                               layer.down_bias, experts,    layer.inner,
                               false};
    run_experts(
        pool_, space_, stack, routing, wanted, x, t_, m_.hidden_size,
        [&](const float* gate_up, float* out) { activate_row(layer, gate_up, layer.inner, out); },
        output);
  }

  // output += the shared expert's of x, times the sigmoid of its gate if it has one.
  void add_shared_expert(const vn_decoder_layer& layer, const float* x, float* output) {
    const vn_shared_expert& own = *layer.shared_expert;
    const int64_t inner = own.inner, d = m_.hidden_size;
    float* gate_up = space_.hidden.take(t_ * 2 * inner);
    float* hidden = space_.projected.take(t_ * inner);
    float* mapped = space_.routed.take(t_ * d);
    float* gates = space_.logits.take(t_);
    multiply(pool_, x, t_, own.gate_up, gate_up);
    const bool has_gate = own.gate.data != nullptr;
    if (has_gate) multiply(pool_, x, t_, own.gate, gates);
    for_rows(pool_, t_, 30 * inner, [&](int64_t row) {
      activate_row(layer, gate_up + row * 2 * inner, inner, hidden + row * inner);
    });
    multiply(pool_, hidden, t_, own.down, mapped);
    for_rows(pool_, t_, 2 * d, [&](int64_t row) {
      const float share = has_gate ? sigmoid(gates[row]) : 1.0f;
      for (int64_t i = 0; i < d; ++i) output[row * d + i] += share * mapped[row * d + i];
    });
  }

  // The chosen experts' shares of a softmax over all of them, or over the chosen alone.
  static void weigh_chosen(const vn_decoder_layer& layer, const float* logits,
                           const int32_t* chosen, float* weights) {
    const float top = logits[chosen[0]];
    float total = 0.0f;
    if (!layer.normalises) {
      for (int e = 0; e < layer.num_experts; ++e) total += std::exp(logits[e] - top);
    }
    for (int k = 0; k < layer.num_chosen; ++k) {
      weights[k] = std::exp(logits[chosen[k]] - top);
      if (layer.normalises) total += weights[k];
    }
    for (int k = 0; k < layer.num_chosen; ++k) weights[k] /= total;
  }

  // ---- recurrence ---------------------------------------------------------------------------

  // As attend(), by a recurrence in its place.
  void recur(const vn_recurrence& layer, bool narrows, const float* x, float* output) {
    const int64_t kept = narrows ? static_cast<int64_t>(wanted_.size()) : t_;
    const KeptRows rows = {narrows ? wanted_.data() : nullptr, kept};
    const float* normed =
        run_recurrence(pool_, space_, layer, step_, runs_, x, t_, m_.norm_eps, rows);
    t_ = kept;
    if (t_ > 0) multiply(pool_, normed, t_, layer.output, output);
  }

  // ---- attention ----------------------------------------------------------------------------

  using Queries = UnitAttention::Queries;
  using OwnRows = UnitAttention::OwnRows;

  // The flat row of a row that the layer computes.
  int64_t flat_row(int64_t row) const { return is_narrow_ ? wanted_[row] : row; }

  // Writes the cache of all rows. If the layer narrows, t_ counts the wanted rows from here on, and
  // output holds theirs.
  void attend(const vn_decoder_layer& layer, bool narrows, const float* x, float* output) {
    const int64_t d = layer.head_dim, heads = layer.num_heads;
    const int64_t width = layer.qkv.rows;
    float* product = space_.queries.take(t_ * width);
    multiply(pool_, x, t_, layer.qkv, product);
    // A row of the product for each that is attended.
    const bool was_narrow = is_narrow_;
    const vn_latents* latents = layer.latents;
    const OwnRows own_rows =
        latents != nullptr ? prepare_latents(layer, product) : prepare_rows(layer, product);
    Queries queries = {product, width, query_stride(layer)};
    if (latents != nullptr) {
      float* taken = space_.latent.take(t_ * heads * d);
      const float* projected = product;
      int64_t stride = width;
      if (latents->query_rank != 0) {
        stride = latents->queries.rows;
        projected = project_queries(*latents, product, width);
      }
      take_queries(pool_, *latents, heads, projected, stride, t_, taken);
      turn_queries(layer, taken);
      queries = {taken, heads * d, d};
    }
    if (layer.indexer != nullptr && layer.keeps_choice == 0) {
      const Turns* turns = find_turns(layer);
      const HeadTurns own = {turns == nullptr ? nullptr : turns->of(0), layer.num_turned};
      indexer_.keep(*layer.indexer, own, x);
      const std::vector<int64_t> all = narrows ? wanted_ : list_rows(t_);
      indexer_.choose(*layer.indexer, own, product, width, all, chosen_);
    }
    float* attended = space_.attended.take(t_ * heads * d);
    units_.attend(layer, list_spans(narrows), queries, own_rows,
                  layer.indexer == nullptr ? nullptr : &chosen_, attended);
    if (narrows && !is_narrow_) {
      gather_rows(wanted_, heads * d, attended);
      t_ = static_cast<int64_t>(wanted_.size());
    }
    if (layer.has_output_gate != 0) {
      for_rows(pool_, t_, 20 * heads * d, [&](int64_t row) {
        const int64_t source = narrows && !was_narrow ? wanted_[row] : row;
        gate_heads(product + source * width, heads, d, attended + row * heads * d);
      });
    }
    if (t_ == 0) return;
    if (latents != nullptr) {
      float* mapped = space_.projected.take(t_ * heads * latents->value_dim);
      map_values(pool_, *latents, heads, attended, d, t_, mapped);
      attended = mapped;
    }
    multiply(pool_, attended, t_, layer.output, output);
  }

  // The requests' rows that attend: all that the layer computes, or if it narrows the wanted ones.
  std::vector<UnitAttention::Span> list_spans(bool narrows) const {
    std::vector<UnitAttention::Span> spans;
    for (int64_t r = 0; r < step_.num_requests; ++r) {
      const int64_t first = narrows ? count_unwanted(step_, r) : 0;
      const int64_t row = is_narrow_ ? narrow_starts_[r] : step_.row_starts[r] + first;
      if (first < step_.counts[r]) spans.push_back({r, first, row, step_.counts[r] - first});
    }
    return spans;
  }

  // Queries [T, H, K + S] of the latents at the front of a product's rows, which are normed.
  const float* project_queries(const vn_latents& latents, float* product, int64_t width) {
    for_rows(pool_, t_, 10 * latents.query_rank, [&](int64_t row) {
      float* own = product + row * width;
      rms_norm(own, latents.query_norm, 1.0f, latents.query_rank, latents.eps, own);
    });
    float* queries = space_.grouped.take(t_ * latents.queries.rows);
    const Product whole =
        whole_product(product, width, t_, latents.queries, queries, latents.queries.rows);
    multiply_all(pool_, &whole, 1);
    return queries;
  }

  // Norms the latents and stores the rows of a layer that attends to such; returns those to read.
  OwnRows prepare_latents(const vn_decoder_layer& layer, float* product) {
    const vn_latents& latents = *layer.latents;
    const int64_t width = layer.qkv.rows;
    float* rows = product + width - layer.head_dim;
    const Turns* turns = find_turns(layer);
    for_rows(pool_, t_, 10 * layer.head_dim, [&](int64_t row) {
      float* own = rows + row * width;
      rms_norm(own, latents.norm, 1.0f, latents.latent_dim, latents.eps, own);
      if (turns != nullptr) {
        rotate_pairs(own + latents.latent_dim, turns->of(row), layer.num_turned);
      }
      store_row(pages_, layer.cache, row, step_.positions[row], own);
      // Rounding here too keeps the result independent of where chunks end.
      round_row(layer.cache.kind, own, layer.head_dim);
    });
    return own_floats(rows, width);
  }

  static OwnRows own_floats(const float* rows, int64_t stride) {
    return {reinterpret_cast<const char*>(rows), stride * static_cast<int64_t>(sizeof(float))};
  }

  // Multiplies heads by the sigmoids of the gates behind their queries.
  static void gate_heads(const float* queries, int64_t heads, int64_t d, float* attended) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* gate = queries + (2 * h + 1) * d;
      float* own = attended + h * d;
      for (int64_t i = 0; i < d; i += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, d - i));
        store_some(own + i, mul(load_some(own + i, lanes), sigmoid(load_some(gate + i, lanes))),
                   lanes);
      }
    }
  }

  // From a head's query to the next in a row of the product.
  static int64_t query_stride(const vn_decoder_layer& layer) {
    return layer.head_dim * (layer.has_output_gate != 0 ? 2 : 1);
  }

  // Norms and turns heads, and stores the rows of a layer that has its own; returns those to read.
  OwnRows prepare_rows(const vn_decoder_layer& layer, float* product) {
    const int64_t query_width = layer.num_heads * query_stride(layer);
    const int64_t width = layer.qkv.rows, key_width = layer.num_kv_heads * layer.head_dim;
    const int64_t row_width = 2 * key_width;
    const bool has_one_product = layer.has_own_rows && width < query_width + row_width;
    OwnRows found = own_floats(product + query_width, width);
    float* apart = nullptr;
    if (layer.shared_slot != 0 && layer.has_own_rows) {
      apart = space_.shared_rows[layer.shared_slot - 1].take(t_ * row_width);
    } else if (has_one_product) {
      apart = space_.key_values.take(t_ * row_width);
    }
    if (apart != nullptr) found = own_floats(apart, row_width);
    char* coded = nullptr;
    if (layer.cache.kind == VN_INT8 && layer.has_own_rows) {
      coded = take_coded_rows(layer);
      found = {coded, layer.cache.width};
    }
    if (layer.shared_slot != 0) {
      if (!layer.has_own_rows) found = shared_[layer.shared_slot - 1];
      shared_[layer.shared_slot - 1] = found;
    }
    const Turns* turns = find_turns(layer);
    for_rows(pool_, t_, 10 * width, [&](int64_t row) {
      float* own = product + row * width;
      const int64_t position = step_.positions[flat_row(row)];
      add_bias(own, layer.qkv_bias, width);
      float* stored = own + query_width;  // keys, then values: a row of the cache
      if (apart != nullptr) {
        stored = apart + row * row_width;
        const float* keys = own + query_width;
        std::memcpy(stored, keys, sizeof(float) * key_width);
        std::memcpy(stored + key_width, has_one_product ? keys : keys + key_width,
                    sizeof(float) * key_width);
      }
      prepare_heads(layer, flat_row(row), turns, own, layer.has_own_rows ? stored : nullptr);
      if (!layer.has_own_rows) return;
      // Rounding here too keeps the result independent of where chunks end.
      if (coded != nullptr) {
        char* own_row = coded + row * layer.cache.width;
        encode_row(layer.cache, stored, reinterpret_cast<int8_t*>(own_row));
        store_coded_row(pages_, layer.cache, row, position, own_row);
        return;
      }
      store_row(pages_, layer.cache, row, position, stored);
      round_row(layer.cache.kind, stored, row_width);
    });
    return found;
  }

  // Room for the step's rows as a cache of bytes has them.
  char* take_coded_rows(const vn_decoder_layer& layer) {
    const int64_t bytes = t_ * layer.cache.width;
    const int64_t values = ceil_div(bytes, static_cast<int64_t>(sizeof(float)));
    return reinterpret_cast<char*>(space_.coded_rows[layer.shared_slot].take(values));
  }

  // What turns the step's rows, as some layers do.
  struct Turns {
    const float* frequencies;
    const int32_t* axis_of_pair;
    int32_t width;
    float magnitude;
    Floats values;  // [tokens, width]

    bool serve(const vn_decoder_layer& layer) const {
      return frequencies == layer.frequencies && axis_of_pair == layer.axis_of_pair &&
             width == layer.num_turned && magnitude == layer.magnitude;
    }
    const float* of(int64_t row) const { return values.data() + row * width; }
  };

  // Made by the first of the layers that turn alike; null where nothing is turned.
  const Turns* find_turns(const vn_decoder_layer& layer) {
    if (layer.frequencies == nullptr) return nullptr;
    const auto serves = [&](const Turns& own) { return own.serve(layer); };
    const auto found = std::find_if(turns_.begin(), turns_.end(), serves);
    if (found != turns_.end()) return &*found;
    const int64_t width = layer.num_turned;
    turns_.push_back({layer.frequencies, layer.axis_of_pair, layer.num_turned, layer.magnitude,
                      Floats(step_.num_tokens * width)});
    float* values = turns_.back().values.data();
    for_rows(pool_, step_.num_tokens, 100 * width,
             [&](int64_t row) { make_turns(layer, row, values + row * width); });
    return &turns_.back();
  }

  void make_turns(const vn_decoder_layer& layer, int64_t row, float* turns) const {
    const int64_t* axes = step_.axes;
    if (axes == nullptr || layer.axis_of_pair == nullptr) {
      const int64_t position = axes == nullptr ? step_.positions[row] : axes[row];
      compute_turns(position, layer.frequencies, layer.num_turned / 2, turns);
    } else {
      for (int32_t i = 0; i < layer.num_turned / 2; ++i) {
        const int64_t place = axes[layer.axis_of_pair[i] * step_.num_tokens + row];
        compute_turns(place, layer.frequencies + i, 1, turns + 2 * i);
      }
    }
    for (int32_t i = 0; i < layer.num_turned; ++i) turns[i] *= layer.magnitude;
  }

  // Turns the shared parts of queries [T, H, L + S], if the layer turns any.
  void turn_queries(const vn_decoder_layer& layer, float* queries) {
    const Turns* turns = find_turns(layer);
    if (turns == nullptr) return;
    const int64_t heads = layer.num_heads, d = layer.head_dim;
    for_rows(pool_, t_, 10 * heads * layer.num_turned, [&](int64_t row) {
      for (int64_t h = 0; h < heads; ++h) {
        float* shared = queries + (row * heads + h) * d + layer.latents->latent_dim;
        rotate_pairs(shared, turns->of(flat_row(row)), layer.num_turned);
      }
    });
  }

  // stored: keys, then values, or null.
  void prepare_heads(const vn_decoder_layer& layer, int64_t row, const Turns* turns, float* queries,
                     float* stored) {
    const int64_t d = layer.head_dim, num_heads = layer.num_heads, stride = query_stride(layer);
    const bool has_whole = layer.norms_whole_rows != 0;
    if (has_whole) {
      rms_norm(queries, layer.q_norm, 1.0f, num_heads * d, m_.norm_eps, queries);
      const int64_t width = layer.num_kv_heads * d;
      if (stored != nullptr) rms_norm(stored, layer.k_norm, 1.0f, width, m_.norm_eps, stored);
    }
    for (int64_t h = 0; h < num_heads + (stored == nullptr ? 0 : layer.num_kv_heads); ++h) {
      float* head = h < num_heads ? queries + h * stride : stored + (h - num_heads) * d;
      const float* norm = h < num_heads ? layer.q_norm : layer.k_norm;
      if (norm != nullptr && !has_whole) rms_norm(head, norm, 1.0f, d, m_.norm_eps, head);
      if (turns != nullptr) rotate_halves(head, turns->of(row), layer.num_turned);
    }
    if (layer.position_beta != 0.0f) {
      const int64_t position = step_.positions[row];
      const float periods = static_cast<float>(position / layer.position_length);
      const float factor = 1.0f + layer.position_beta * std::log1p(periods);
      for (int64_t h = 0; h < num_heads; ++h) {
        for (int64_t i = 0; i < d; ++i) queries[h * stride + i] *= factor;
      }
    }
    for (int64_t h = 0; h < num_heads && layer.noted_queries != nullptr; ++h) {
      std::memcpy(layer.noted_queries + (row * num_heads + h) * d, queries + h * stride,
                  sizeof(float) * d);
    }
    if (layer.key_sizes != nullptr) size_heads(layer, queries, stored);
    for (int64_t h = 0; h < num_heads && layer.cache.kind == VN_INT8; ++h) {
      meet_spread(queries + h * stride, d);
    }
    if (stored == nullptr || !layer.has_value_norm) return;
    for (int64_t h = layer.num_kv_heads; h < 2 * layer.num_kv_heads; ++h) {
      rms_norm(stored + h * d, nullptr, 1.0f, d, m_.norm_eps, stored + h * d);
    }
  }

  // Divides keys, if there are any, by their channels' sizes, and multiplies queries by them.
  static void size_heads(const vn_decoder_layer& layer, float* queries, float* keys) {
    const int64_t d = layer.head_dim, heads = layer.num_heads, kv_heads = layer.num_kv_heads;
    const int64_t stride = query_stride(layer);
    for (int64_t h = 0; h < heads; ++h) {
      const float* sizes = layer.key_sizes + h / (heads / kv_heads) * d;
      for (int64_t i = 0; i < d; ++i) queries[h * stride + i] *= sizes[i];
    }
    if (keys == nullptr) return;
    for (int64_t i = 0; i < kv_heads * d; ++i) keys[i] /= layer.key_sizes[i];
  }

  ThreadPool& pool_;
  Workspace& space_;
  const vn_decoder_model& m_;
  const vn_step& step_;
  const Pages pages_;
  MissingRow missing_;
  PoolIndexer indexer_;
  UnitAttention units_;
  // By flat row: positions of the keys that it chose in the last layer with an indexer.
  std::vector<std::vector<int64_t>> chosen_;
  const float* inputs_;
  const std::vector<int64_t> wanted_;  // flat rows, ascending
  std::vector<StateRun> runs_;         // without recurrent layers: none
  std::vector<int64_t> narrow_starts_;  // by request: where its wanted rows begin among them
  std::vector<Turns> turns_;
  OwnRows shared_[2] = {};
  int64_t t_;  // rows that the layer still computes
  bool is_narrow_ = false;
};

void decoder_forward(ThreadPool& pool, Workspace& space, const vn_decoder_model& m,
                     const vn_step& step, float* stream) {
  const int64_t d = m.hidden_size;
  for_rows(pool, step.num_tokens, 2 * d, [&](int64_t row) {
    float* own = stream + row * d;
    decode_matrix_row(m.embed, step.token_ids[row], own);
    for (int64_t i = 0; i < d; ++i) own[i] *= m.embedding_scale;
  });
  for (int64_t i = 0; i < step.num_soft; ++i) {
    std::memcpy(stream + step.soft_rows[i] * d, step.soft_values + i * d, sizeof(float) * d);
  }
  const float* inputs = make_layer_inputs(pool, space, m, step, stream);
  DecoderLayers layers(pool, space, m, step, inputs);
  if (m.num_streams == 0) {
    for (int32_t i = 0; i < m.num_layers; ++i) layers.run(i, stream);
    layers.finish(stream);
  } else {
    const int64_t n = m.num_streams;
    float* streams = space.streams.take(step.num_tokens * n * d);
    for (int64_t row = 0; row < step.num_tokens * n; ++row) {
      std::memcpy(streams + row * d, stream + row / n * d, sizeof(float) * d);
    }
    for (int32_t i = 0; i < m.num_layers; ++i) layers.run_streams(i, streams);
    layers.finish_streams(streams, stream);
  }
  layers.check();
}

void decoder_settle(ThreadPool& pool, Workspace& space, const vn_decoder_model& m,
                    const vn_step& step) {
  std::vector<StateRun> runs;
  for (int32_t i = 0; i < m.num_layers; ++i) {
    const vn_recurrence* layer = m.layers[i].recurrence;
    if (layer == nullptr) continue;
    if (runs.empty()) runs = find_runs(step, *layer);
    settle_recurrence(pool, space, *layer, step, runs);
  }
}

void decoder_norm(ThreadPool& pool, const vn_decoder_model& m, const float* stream,
                  int64_t num_rows, float* normed) {
  const int64_t d = m.hidden_size;
  for_rows(pool, num_rows, 4 * d, [&](int64_t row) {
    rms_norm(stream + row * d, m.norm, 1.0f, d, m.norm_eps, normed + row * d);
  });
}

void decoder_draft(ThreadPool& pool, Workspace& space, const vn_decoder_drafter& drafter,
                   const vn_step& step, const float* streams, float* output) {
  const vn_decoder_model& m = drafter.block;
  const int64_t d = m.hidden_size, t = step.num_tokens;
  float* joined = space.embedded.take(t * 2 * d);
  for_rows(pool, t, 2 * d, [&](int64_t row) {
    float* own = joined + row * 2 * d;
    decode_matrix_row(m.embed, step.token_ids[row], own);
    for (int64_t i = 0; i < d; ++i) own[i] *= m.embedding_scale;
  });
  for (int64_t i = 0; i < step.num_soft; ++i) {
    std::memcpy(joined + step.soft_rows[i] * 2 * d, step.soft_values + i * d, sizeof(float) * d);
  }
  for_rows(pool, t, 8 * d, [&](int64_t row) {
    float* own = joined + row * 2 * d;
    if (drafter.skips_first != 0 && step.positions[row] == 0) std::fill_n(own, d, 0.0f);
    rms_norm(own, drafter.embedding_norm, 1.0f, d, m.norm_eps, own);
    rms_norm(streams + row * d, drafter.stream_norm, 1.0f, d, m.norm_eps, own + d);
  });
  float* stream = space.streams.take(t * d);
  multiply(pool, joined, t, drafter.fc, stream);
  DecoderLayers layers(pool, space, m, step, nullptr);
  layers.run(0, stream);
  layers.check();
  decoder_norm(pool, m, stream, t, output);
}

void decoder_logits(ThreadPool& pool, Workspace& space, const vn_decoder_model& m,
                    const float* stream, int64_t num_rows, bool is_normed,
                    float* logits) {
  if (!is_normed) {
    float* hidden = space.input.take(num_rows * m.hidden_size);
    decoder_norm(pool, m, stream, num_rows, hidden);
    stream = hidden;
  }
  multiply(pool, stream, num_rows, m.head, logits);
  if (m.final_soft_cap == 0.0f) return;
  // One by one, as rows may be fewer than threads.
  for_rows(pool, num_rows * m.vocab_size, 300,
           [&](int64_t i) { logits[i] = m.final_soft_cap * std::tanh(logits[i] / m.final_soft_cap); });
}

}  // namespace VN_BUILD
}  // namespace vn
