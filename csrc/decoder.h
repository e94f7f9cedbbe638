// Decoders of grouped-query attention: Llama, Qwen 3, Gemma 3, gpt-oss. The maths is that of the
// torch modules in vllm/model_executor/models/decoder.
#pragma once

#include <atomic>
#include <string>

#include "build.h"
#include "kernels.h"
#include "mixture.h"
#include "wanted_rows.h"

namespace vn {
namespace VN_BUILD {

// Consecutive queries of a request that share one pass over their keys, at most so many; fewer
// where their scores would leave the second-level cache.
constexpr int64_t kQueryRows = 12;
constexpr int64_t kMaxScores = 1 << 17;

inline void silu_row(const float* gate_up, int64_t width, float* out) {
  for (int64_t at = 0; at < width; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
    const Vec gate = load_some(gate_up + at, lanes);
    store_some(out + at, mul(mul(gate, sigmoid(gate)), load_some(gate_up + width + at, lanes)),
               lanes);
  }
}

// gelu by its tanh formula: tanh(z) + 1 = 2 * sigmoid(2 * z).
inline void gelu_row(const float* gate_up, int64_t width, float* out) {
  const Vec cubic = fill(0.044715f), factor = fill(1.5957691216057308f);  // 2 * sqrt(2 / pi)
  for (int64_t at = 0; at < width; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
    const Vec gate = load_some(gate_up + at, lanes);
    const Vec cube = mul(mul(gate, gate), gate);
    const Vec share = sigmoid(mul(factor, fma(cubic, cube, gate)));
    store_some(out + at, mul(mul(gate, share), load_some(gate_up + width + at, lanes)), lanes);
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

inline void activate_row(const vn_decoder_layer& layer, const float* gate_up, float* out) {
  if (layer.activation == VN_SILU) {
    silu_row(gate_up, layer.inner, out);
  } else if (layer.activation == VN_GELU_TANH) {
    gelu_row(gate_up, layer.inner, out);
  } else {
    clamped_row(gate_up, layer.inner, layer.alpha, layer.limit, out);
  }
}

// Turns pairs (i, i + d / 2) of a head.
inline void rotate_halves(float* head, const float* turns, int64_t d) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * turns[2 * i] - b * turns[2 * i + 1];
    head[half + i] = b * turns[2 * i] + a * turns[2 * i + 1];
  }
}

inline void add_bias(float* row, const float* bias, int64_t count) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < count; ++i) row[i] += bias[i];
}

class DecoderLayers {
 public:
  DecoderLayers(ThreadPool& pool, Workspace& space, const vn_decoder_model& model,
                const vn_step& step)
      : pool_(pool), space_(space), m_(model), step_(step), pages_(step), t_(step.num_tokens) {}

  // stream [T, D] before and after the layer; of the last layer that of `wanted` rows alone,
  // ascending flat ones. All rows' keys and values are written.
  void run(const vn_decoder_layer& layer, const std::vector<int64_t>& wanted, float* stream) {
    const int64_t d = m_.hidden_size;
    t_ = step_.num_tokens;
    float* x = space_.input.take(t_ * d);
    float* output = space_.output.take(t_ * d);
    norm_rows(stream, layer.norms[0], x);
    const bool is_whole = static_cast<int64_t>(wanted.size()) == t_;
    attend(layer, x, wanted, output);
    if (t_ == 0) return;
    if (!is_whole) gather_rows(wanted, d, stream);
    add_to_stream(output, layer.output_bias, layer.norms[1], stream);
    norm_rows(stream, layer.norms[2], x);
    const float* bias = nullptr;
    if (layer.feed_forward == VN_MLP) {
      run_mlp(layer, x, output);
      bias = layer.down_bias;
    } else {
      route_and_run(layer, x, output);
    }
    add_to_stream(output, bias, layer.norms[3], stream);
    if (!is_whole) scatter_rows(wanted, d, stream);
  }

  // Raises what went wrong in any thread.
  void check() const {
    if (missing_position_.load() < 0) return;
    throw InvalidStep("attention needs the row of position " +
                      std::to_string(missing_position_.load()) + " of the step's request " +
                      std::to_string(missing_request_.load()) + ", but its table stores none");
  }

 private:
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
      activate_row(layer, gate_up + row * 2 * inner, hidden + row * inner);
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
      choose_experts(own, no_bias.data(), experts, wanted, chosen);
      weigh_chosen(layer, own, chosen, routing.weight_of.data() + row * wanted);
    });
    group_by_expert(t_, wanted, experts, routing);
    const ExpertStack stack = {layer.gate_up,   layer.down, layer.gate_up_bias,
                               layer.down_bias, experts,    layer.inner,
                               false};
    run_experts(
        pool_, space_, stack, routing, wanted, x, t_, m_.hidden_size,
        [&](const float* gate_up, float* out) { activate_row(layer, gate_up, out); }, output);
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

  // ---- attention ----------------------------------------------------------------------------

  // Writes the cache of all rows; from here on t_ counts the wanted ones, and output holds theirs.
  void attend(const vn_decoder_layer& layer, const float* x, const std::vector<int64_t>& wanted,
              float* output) {
    const int64_t d = m_.head_dim, heads = m_.num_heads, kv_heads = m_.num_kv_heads;
    const int64_t width = (heads + 2 * kv_heads) * d, row_width = 2 * kv_heads * d;
    float* qkv = space_.queries.take(t_ * width);
    multiply(pool_, x, t_, layer.qkv, qkv);
    for_rows(pool_, t_, 10 * width, [&](int64_t row) {
      float* own = qkv + row * width;
      add_bias(own, layer.qkv_bias, width);
      prepare_heads(layer, step_.positions[row], own);
      float* stored = own + heads * d;  // keys, then values: a row of the cache
      store_row(pages_, layer.cache, row, step_.positions[row], stored);
      // Rounding here too keeps the result independent of where chunks end.
      round_row(layer.cache.kind, stored, row_width);
    });
    struct Task {
      int64_t request, first, rows, kv_head;
    };
    std::vector<Task> tasks;
    int64_t work = 0;
    const int64_t group = heads / kv_heads;
    const bool is_whole = static_cast<int64_t>(wanted.size()) == t_;
    for (int64_t r = 0; r < step_.num_requests; ++r) {
      const int64_t end = step_.starts[r] + step_.counts[r];
      const int64_t rows = std::max<int64_t>(
          1, std::min(kQueryRows, kMaxScores / (group * std::max<int64_t>(1, end))));
      int64_t first = is_whole ? 0 : count_unwanted(step_, r);
      for (; first < step_.counts[r]; first += rows) {
        for (int64_t k = 0; k < kv_heads; ++k) {
          tasks.push_back({r, first, std::min(rows, step_.counts[r] - first), k});
          work += 2 * tasks.back().rows * group * d * (end - find_first(layer, r, end - 1));
        }
      }
    }
    float* attended = space_.attended.take(t_ * heads * d);
    const auto attend_task = [&](int64_t i) {
      const Task& task = tasks[i];
      attend_rows(layer, task.request, task.first, task.rows, task.kv_head, qkv, attended);
    };
    const int64_t num_tasks = static_cast<int64_t>(tasks.size());
    if (is_short(pool_, work)) {
      for (int64_t i = 0; i < num_tasks; ++i) attend_task(i);
    } else {
      pool_.run(num_tasks, attend_task);
    }
    gather_rows(wanted, heads * d, attended);
    t_ = static_cast<int64_t>(wanted.size());
    if (t_ > 0) multiply(pool_, attended, t_, layer.output, output);
  }

  void prepare_heads(const vn_decoder_layer& layer, int64_t position, float* own) {
    const int64_t d = m_.head_dim;
    thread_local Floats turns;
    if (layer.frequencies != nullptr) {
      turns.resize(d);
      compute_turns(position, layer.frequencies, static_cast<int32_t>(d / 2), turns.data());
      for (float& turn : turns) turn *= layer.magnitude;
    }
    for (int64_t h = 0; h < m_.num_heads + m_.num_kv_heads; ++h) {
      float* head = own + h * d;
      const float* norm = h < m_.num_heads ? layer.q_norm : layer.k_norm;
      if (norm != nullptr) rms_norm(head, norm, 1.0f, d, m_.norm_eps, head);
      if (layer.frequencies != nullptr) rotate_halves(head, turns.data(), d);
    }
  }

  // First position that a query sees.
  int64_t find_first(const vn_decoder_layer& layer, int64_t request, int64_t position) const {
    const int64_t first = layer.window == 0 ? 0 : std::max<int64_t>(0, position - layer.window + 1);
    return std::max(first, layer.window == 0 ? 0 : step_.read_from[request]);
  }

  // Attends `rows` consecutive queries of a request, one key head's.
  void attend_rows(const vn_decoder_layer& layer, int64_t request, int64_t first, int64_t rows,
                   int64_t kv_head, const float* qkv, float* attended) {
    const int64_t d = m_.head_dim, heads = m_.num_heads, group = heads / m_.num_kv_heads;
    const int64_t width = (heads + 2 * m_.num_kv_heads) * d;
    const int64_t position = step_.starts[request] + first;
    const int64_t row = step_.row_starts[request] + first;
    const int64_t from = find_first(layer, request, position), end = position + rows;
    thread_local RowList keys, values;
    gather(layer, request, from, end, kv_head, qkv, keys, values);
    const int64_t count = end - from, padded = (count + kLanes - 1) / kLanes * kLanes;
    thread_local Floats scores;
    thread_local std::vector<const float*> x, weights;
    thread_local std::vector<float*> y, out;
    thread_local Floats scale;
    const int64_t total = rows * group;
    scores.resize(total * padded);
    x.resize(total);
    weights.resize(total);
    y.resize(total);
    out.resize(total);
    scale.resize(total);
    for (int64_t i = 0; i < total; ++i) {
      const int64_t head = kv_head * group + i % group;
      x[i] = qkv + (row + i / group) * width + head * d;
      out[i] = attended + ((row + i / group) * heads + head) * d;
      y[i] = scores.data() + i * padded;
      weights[i] = y[i];
    }
    for (int64_t c = 0; c < count; c += kColumns) {
      const int columns = static_cast<int>(std::min<int64_t>(kColumns, count - c));
      dot_floats(x.data(), total, keys.data() + c, columns, d, y.data(), c);
    }
    for (int64_t i = 0; i < total; ++i) {
      const int64_t own = position + i / group;
      const int64_t low = find_first(layer, request, own) - from, high = own + 1 - from;
      scale[i] = weigh(layer, kv_head * group + i % group, y[i], low, high, count);
    }
    mix_all(total, weights.data(), values.data(), count, d, scale.data(), out.data());
  }

  // Turns the scores of keys low .. high - 1 into softmax terms and hides the others; returns what
  // their mix is scaled by.
  float weigh(const vn_decoder_layer& layer, int64_t head, float* scores, int64_t low,
              int64_t high, int64_t count) const {
    for (int64_t k = low; k < high; ++k) {
      scores[k] *= m_.scale;
      if (m_.soft_cap != 0.0f) scores[k] = m_.soft_cap * std::tanh(scores[k] / m_.soft_cap);
    }
    const float none = -INFINITY;
    const float total =
        softmax_terms(scores + low, high - low, layer.sinks == nullptr ? none : layer.sinks[head]);
    for (int64_t k = 0; k < low; ++k) scores[k] = 0.0f;
    for (int64_t k = high; k < count; ++k) scores[k] = 0.0f;
    return 1.0f / total;
  }

  void gather(const vn_decoder_layer& layer, int64_t request, int64_t from, int64_t end,
              int64_t kv_head, const float* qkv, RowList& keys, RowList& values) {
    const int64_t d = m_.head_dim, kv_heads = m_.num_kv_heads, heads = m_.num_heads;
    const int64_t start = step_.starts[request];
    // Rows that the step does not write are taken as they are stored: its own may lack what they
    // depend on.
    const int64_t written =
        std::max(start, step_.write_from[layer.cache.group * step_.num_requests + request]);
    keys.clear();
    values.clear();
    keys.reserve_decoded(end - from, d);
    values.reserve_decoded(end - from, d);
    pages_.each_row(layer.cache, request, from, std::min(written, end),
                    [&](int64_t position, int64_t offset) {
                      if (offset < 0) {
                        missing_request_.store(request);
                        missing_position_.store(position);
                        offset = 0;
                      }
                      keys.add_stored(layer.cache, offset + kv_head * d, d);
                      values.add_stored(layer.cache, offset + (kv_heads + kv_head) * d, d);
                    });
    for (int64_t p = std::max(from, written); p < end; ++p) {
      const float* row = qkv + (step_.row_starts[request] + p - start) * (heads + 2 * kv_heads) * d;
      keys.add(row + (heads + kv_head) * d);
      values.add(row + (heads + kv_heads + kv_head) * d);
    }
  }

  ThreadPool& pool_;
  Workspace& space_;
  const vn_decoder_model& m_;
  const vn_step& step_;
  const Pages pages_;
  int64_t t_;  // rows that the layer still computes
  std::atomic<int64_t> missing_request_{-1}, missing_position_{-1};
};

inline void decoder_forward(ThreadPool& pool, Workspace& space, const vn_decoder_model& m,
                            const vn_step& step, float* stream) {
  const int64_t d = m.hidden_size;
  for_rows(pool, step.num_tokens, 2 * d, [&](int64_t row) {
    float* own = stream + row * d;
    decode_matrix_row(m.embed, step.token_ids[row], own);
    for (int64_t i = 0; i < d; ++i) own[i] *= m.embedding_scale;
  });
  DecoderLayers layers(pool, space, m, step);
  const std::vector<int64_t> all = list_rows(step.num_tokens), wanted = find_wanted(step);
  for (int32_t i = 0; i < m.num_layers; ++i) {
    layers.run(m.layers[i], i + 1 < m.num_layers ? all : wanted, stream);
  }
  layers.check();
}

inline void decoder_logits(ThreadPool& pool, Workspace& space, const vn_decoder_model& m,
                           const float* stream, int64_t num_rows, float* logits) {
  const int64_t d = m.hidden_size;
  float* hidden = space.input.take(num_rows * d);
  for_rows(pool, num_rows, 4 * d, [&](int64_t row) {
    rms_norm(stream + row * d, m.norm, 1.0f, d, m.norm_eps, hidden + row * d);
  });
  multiply(pool, hidden, num_rows, m.head, logits);
  if (m.final_soft_cap == 0.0f) return;
  for_rows(pool, num_rows, 40 * int64_t{m.vocab_size}, [&](int64_t row) {
    float* own = logits + row * m.vocab_size;
    for (int64_t i = 0; i < m.vocab_size; ++i) {
      own[i] = m.final_soft_cap * std::tanh(own[i] / m.final_soft_cap);
    }
  });
}

}  // namespace VN_BUILD
}  // namespace vn
