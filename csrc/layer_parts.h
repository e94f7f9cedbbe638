// What some decoders' layers have beside attention and one feed-forward part: routed experts next to
// the MLP, and a small input for each token and layer (Gemma 4). The maths is that of
// decoder/experts_beside.py and decoder/layer_inputs.py.
#pragma once

#include "build.h"
#include "kernels.h"
#include "mixture.h"

namespace vn {
namespace VN_BUILD {

// out = gelu(gate) * up by the tanh formula: tanh(z) + 1 = 2 * sigmoid(2 * z).
inline void gelu_times(const float* gates, const float* ups, int64_t width, float* out) {
  const Vec cubic = fill(0.044715f), factor = fill(1.5957691216057308f);  // 2 * sqrt(2 / pi)
  for (int64_t at = 0; at < width; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
    const Vec gate = load_some(gates + at, lanes);
    const Vec cube = mul(mul(gate, gate), gate);
    const Vec share = sigmoid(mul(factor, fma(cubic, cube, gate)));
    store_some(out + at, mul(mul(gate, share), load_some(ups + at, lanes)), lanes);
  }
}

// Weighs a row's best experts by their shares of a softmax over the chosen alone.
inline void choose_scaled(const vn_experts_beside& own, const float* logits, const float* no_bias,
                          int32_t* chosen, float* weights) {
  choose_experts(logits, no_bias, own.num_experts, own.num_chosen, chosen);
  float total = 0.0f;
  for (int k = 0; k < own.num_chosen; ++k) {
    weights[k] = std::exp(logits[chosen[k]] - logits[chosen[0]]);
    total += weights[k];
  }
  for (int k = 0; k < own.num_chosen; ++k) {
    weights[k] = weights[k] / total * own.expert_scales[chosen[k]];
  }
}

// mapped [T, D], the MLP's output, becomes norm(mapped) + norm(experts(norm(stream))).
template <typename Activate>
inline void add_experts_beside(ThreadPool& pool, Workspace& space, const vn_experts_beside& own,
                               const float* stream, int64_t t, int64_t d, float eps,
                               Activate&& activate, float* mapped) {
  const int experts = own.num_experts, wanted = own.num_chosen;
  float* x = space.beside.take(t * d);
  float* routed = space.routed.take(t * d);
  float* logits = space.logits.take(t * experts);
  for_rows(pool, t, 4 * d, [&](int64_t row) {
    rms_norm(stream + row * d, own.router_norm, 1.0f, d, eps, x + row * d);
  });
  multiply(pool, x, t, own.router, logits);
  Routing routing;
  routing.expert_of.resize(t * wanted);
  routing.weight_of.resize(t * wanted);
  const Floats no_bias(experts, 0.0f);
  for_rows(pool, t, 60 * experts + 4 * d, [&](int64_t row) {
    choose_scaled(own, logits + row * experts, no_bias.data(),
                  routing.expert_of.data() + row * wanted,
                  routing.weight_of.data() + row * wanted);
    rms_norm(stream + row * d, own.norms[1], 1.0f, d, eps, x + row * d);
  });
  group_by_expert(t, wanted, experts, routing);
  const ExpertStack stack = {own.gate_up, own.down, nullptr, nullptr, experts, own.inner, false};
  run_experts(pool, space, stack, routing, wanted, x, t, d, activate, routed);
  for_rows(pool, t, 8 * d, [&](int64_t row) {
    float* out = mapped + row * d;
    float* other = routed + row * d;
    rms_norm(out, own.norms[0], 1.0f, d, eps, out);
    rms_norm(other, own.norms[2], 1.0f, d, eps, other);
    for (int64_t i = 0; i < d; ++i) out[i] += other[i];
  });
}

// Inputs of all layers [T, L * w] for a step's tokens and their scaled embeddings [T, D]; null where
// the model has none.
inline const float* make_layer_inputs(ThreadPool& pool, Workspace& space,
                                      const vn_decoder_model& m, const vn_step& step,
                                      const float* embedded) {
  if (m.input_width == 0) return nullptr;
  const int64_t t = step.num_tokens;
  const int64_t width = m.input_width, all = width * m.num_layers;
  float* inputs = space.layer_inputs.take(t * all);
  multiply(pool, embedded, t, m.input_projection, inputs);
  const float half = std::sqrt(0.5f);
  for_rows(pool, t, 8 * all, [&](int64_t row) {
    float* own = inputs + row * all;
    thread_local Floats decoded;
    const float* stored;
    if (step.input_rows != nullptr) {
      stored = step.input_rows + row * all;
    } else {
      decoded.resize(all);
      decode_matrix_row(m.input_table, step.token_ids[row], decoded.data());
      stored = decoded.data();
    }
    for (int64_t i = 0; i < all; ++i) own[i] *= m.input_projection_scale;
    for (int64_t at = 0; at < all; at += width) {
      rms_norm(own + at, m.input_norm, 1.0f, width, m.norm_eps, own + at);
    }
    for (int64_t i = 0; i < all; ++i) own[i] = (stored[i] * m.input_table_scale + own[i]) * half;
  });
  return inputs;
}

// stream [T, D] += norm(output(gelu(gate(stream)) * input)); input_of(row) is a row's [w].
template <typename InputOf>
inline void add_layer_input(ThreadPool& pool, Workspace& space, const vn_decoder_layer& layer,
                            int64_t t, int64_t d, int64_t width, float eps, InputOf&& input_of,
                            float* stream) {
  float* gates = space.hidden.take(t * width);
  float* output = space.output.take(t * d);
  multiply(pool, stream, t, layer.input_gate, gates);
  for_rows(pool, t, 30 * width, [&](int64_t row) {
    gelu_times(gates + row * width, input_of(row), width, gates + row * width);
  });
  multiply(pool, gates, t, layer.input_output, output);
  for_rows(pool, t, 6 * d, [&](int64_t row) {
    float* own = output + row * d;
    rms_norm(own, layer.input_norm, 1.0f, d, eps, own);
    for (int64_t i = 0; i < d; ++i) stream[row * d + i] += own[i];
  });
}

}  // namespace VN_BUILD
}  // namespace vn
