// Routed experts: each chosen one maps the tokens that chose it, all in two products.
#pragma once

#include "build.h"
#include "kernels.h"

namespace vn {
namespace VN_BUILD {

// Tokens by expert: those of expert e are pairs first[e] .. first[e + 1] - 1.
struct Routing {
  std::vector<int32_t> expert_of;  // [T * chosen]
  Floats weight_of;    // [T * chosen]
  std::vector<int32_t> first;      // [E + 1]
  std::vector<int32_t> token_of;   // [pairs] in order of experts, then of tokens
  std::vector<int32_t> pair_of;    // [T * chosen] where a token's choice stands
};

// The chosen experts of one row, by falling score + bias, among equal ones the first.
inline void choose_experts(const float* scores, const float* bias, int count, int wanted,
                           int32_t* chosen) {
  for (int k = 0; k < wanted; ++k) {
    int best = -1;
    for (int e = 0; e < count; ++e) {
      if (std::find(chosen, chosen + k, e) != chosen + k) continue;
      if (best < 0 || scores[e] + bias[e] > scores[best] + bias[best]) best = e;
    }
    chosen[k] = best;
  }
}

// Replaces logits by their softmax.
inline void softmax_all(float* logits, int count) {
  const float top = *std::max_element(logits, logits + count);
  float total = 0.0f;
  for (int e = 0; e < count; ++e) total += logits[e] = std::exp(logits[e] - top);
  for (int e = 0; e < count; ++e) logits[e] /= total;
}

// Chooses a row's experts by scores, which replace its logits, among equal ones the first; weights are
// the scores, scaled to a sum of one if `normalises`, times the factor.
inline void choose_by_sigmoid(const vn_sigmoid_router& own, float* logits, int experts, int wanted,
                              bool normalises, int32_t* chosen, float* weights) {
  if (own.is_softmax != 0) {
    softmax_all(logits, experts);
  } else {
    for (int e = 0; e < experts; ++e) logits[e] = sigmoid(logits[e]);
  }
  const int groups = own.num_groups, size = experts / groups;
  thread_local Floats bias;
  bias.assign(own.bias, own.bias + experts);
  if (own.num_chosen_groups < groups) {
    thread_local Floats sums;
    thread_local std::vector<int32_t> kept;
    sums.resize(groups);
    kept.resize(own.num_chosen_groups);
    for (int g = 0; g < groups; ++g) {
      int32_t best[2];
      const float *scores = logits + g * size, *extra = own.bias + g * size;
      if (own.is_softmax != 0) {
        sums[g] = *std::max_element(scores, scores + size);
        continue;
      }
      choose_experts(scores, extra, size, 2, best);
      sums[g] = (scores[best[0]] + extra[best[0]]) + (scores[best[1]] + extra[best[1]]);
    }
    const Floats no_bias(groups, 0.0f);
    choose_experts(sums.data(), no_bias.data(), groups, own.num_chosen_groups, kept.data());
    for (int g = 0; g < groups; ++g) {
      if (std::find(kept.begin(), kept.end(), g) != kept.end()) continue;
      std::fill_n(bias.begin() + g * size, size, -INFINITY);
    }
  }
  choose_experts(logits, bias.data(), experts, wanted, chosen);
  float total = 1e-20f;
  for (int k = 0; k < wanted; ++k) total += logits[chosen[k]];
  for (int k = 0; k < wanted; ++k) {
    weights[k] = logits[chosen[k]] / (normalises ? total : 1.0f) * own.factor;
  }
}

// Sorts the pairs of token and expert by expert; expert_of and weight_of are filled.
inline void group_by_expert(int64_t t, int wanted, int experts, Routing& routing) {
  routing.first.assign(experts + 1, 0);
  for (int64_t i = 0; i < t * wanted; ++i) ++routing.first[routing.expert_of[i] + 1];
  for (int e = 0; e < experts; ++e) routing.first[e + 1] += routing.first[e];
  std::vector<int32_t> next(routing.first.begin(), routing.first.end() - 1);
  routing.token_of.resize(t * wanted);
  routing.pair_of.resize(t * wanted);
  for (int64_t i = 0; i < t * wanted; ++i) {
    const int32_t pair = next[routing.expert_of[i]]++;
    routing.token_of[pair] = static_cast<int32_t>(i / wanted);
    routing.pair_of[i] = pair;
  }
}

// The experts' matrices, [2 * width, D] and [D, width] each, one after another.
struct ExpertStack {
  const vn_matrix& gate_up;
  const vn_matrix& down;
  const float* gate_up_bias;  // [E, 2 * width], or null
  const float* down_bias;     // [E, D], or null
  int64_t num_experts, width;
  bool has_shared;  // one more expert, which every token takes, stands last
};

// output [T, D] = the weighted sum of the chosen experts' outputs of x [T, D], and the shared one's.
// activate(gate_up row, inner row) makes the second product's input.
template <typename Activate>
inline void run_experts(ThreadPool& pool, Workspace& space, const ExpertStack& stack,
                        const Routing& routing, int64_t wanted, const float* x, int64_t t,
                        int64_t d, Activate&& activate, float* output) {
  const int64_t width = stack.width, pairs = t * wanted;
  const int64_t all = stack.has_shared ? pairs + t : pairs;
  float* hidden = space.hidden.take(all * 2 * width);
  float* inner = space.projected.take(all * width);
  float* parts = space.parts.take(pairs * d);
  std::vector<Product> up, down;
  std::vector<int64_t> expert_of_pair(all, stack.num_experts);
  for (int64_t e = 0; e < stack.num_experts; ++e) {
    const int64_t first = routing.first[e], count = routing.first[e + 1] - first;
    if (count == 0) continue;
    std::fill_n(expert_of_pair.begin() + first, count, e);
    up.push_back({x, d, routing.token_of.data() + first, count, &stack.gate_up, e * 2 * width,
                  2 * width, hidden + first * 2 * width, 2 * width});
    down.push_back({inner + first * width, width, nullptr, count, &stack.down, e * d, d,
                    parts + first * d, d});
  }
  if (stack.has_shared) {
    const int64_t e = stack.num_experts;
    up.push_back({x, d, nullptr, t, &stack.gate_up, e * 2 * width, 2 * width,
                  hidden + pairs * 2 * width, 2 * width});
    down.push_back({inner + pairs * width, width, nullptr, t, &stack.down, e * d, d, output, d});
  }
  multiply_all(pool, up.data(), up.size());
  const int64_t* experts = expert_of_pair.data();
  for_rows(pool, all, 30 * width, [&](int64_t i) {
    float* own = hidden + i * 2 * width;
    if (stack.gate_up_bias != nullptr) {
      const float* bias = stack.gate_up_bias + experts[i] * 2 * width;
      for (int64_t k = 0; k < 2 * width; ++k) own[k] += bias[k];
    }
    activate(own, inner + i * width);
  });
  multiply_all(pool, down.data(), down.size());
  for_rows(pool, t, 2 * wanted * d, [&](int64_t row) {
    float* own = output + row * d;
    if (!stack.has_shared) std::fill_n(own, d, 0.0f);
    for (int64_t k = 0; k < wanted; ++k) {
      const int64_t pair = routing.pair_of[row * wanted + k];
      const float weight = routing.weight_of[row * wanted + k];
      const float* part = parts + pair * d;
      if (stack.down_bias == nullptr) {
        for (int64_t i = 0; i < d; ++i) own[i] += weight * part[i];
      } else {
        const float* bias = stack.down_bias + experts[pair] * d;
        for (int64_t i = 0; i < d; ++i) own[i] += weight * (part[i] + bias[i]);
      }
    }
  });
}

// silu(min(gate, limit)) * clamp(up, -limit, limit) of gate | up.
inline void clamped_silu_row(const float* gate_up, int64_t width, float limit, float* out) {
  for (int64_t at = 0; at < width; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
    const Vec gate = min(load_some(gate_up + at, lanes), fill(limit));
    const Vec up = max(min(load_some(gate_up + width + at, lanes), fill(limit)), fill(-limit));
    store_some(out + at, mul(mul(gate, sigmoid(gate)), up), lanes);
  }
}

// Chooses DeepSeek-V4's experts: by token id, or by score and bias; weights are the scores'.
inline void route_v4(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
                     const vn_v4_layer& layer, const int64_t* token_ids, const float* x, int64_t t,
                     Routing& routing) {
  const int experts = m.num_experts, wanted = m.num_chosen;
  float* scores = space.logits.take(t * experts);
  multiply(pool, x, t, layer.router, scores);
  routing.expert_of.resize(t * wanted);
  routing.weight_of.resize(t * wanted);
  for_rows(pool, t, 60 * experts, [&](int64_t row) {
    float* own = scores + row * experts;
    for (int e = 0; e < experts; ++e) {
      // Beyond 20 the softplus is its argument in fp32.
      own[e] = std::sqrt(own[e] > 20.0f ? own[e] : std::log1p(std::exp(own[e])));
    }
    int32_t* chosen = routing.expert_of.data() + row * wanted;
    if (layer.expert_of_token != nullptr) {
      for (int k = 0; k < wanted; ++k) {
        chosen[k] = static_cast<int32_t>(layer.expert_of_token[token_ids[row] * wanted + k]);
      }
    } else {
      choose_experts(own, layer.router_bias, experts, wanted, chosen);
    }
    float total = 1e-20f;
    for (int k = 0; k < wanted; ++k) total += own[chosen[k]];
    for (int k = 0; k < wanted; ++k) {
      routing.weight_of[row * wanted + k] = own[chosen[k]] * (m.routed_scale / total);
    }
  });
  group_by_expert(t, wanted, experts, routing);
}

inline void mix_v4_experts(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
                           const vn_v4_layer& layer, const int64_t* token_ids, const float* x,
                           int64_t t, float* output) {
  Routing routing;
  route_v4(pool, space, m, layer, token_ids, x, t, routing);
  const ExpertStack stack = {layer.gate_up, layer.down,     nullptr, nullptr,
                             m.num_experts, m.expert_width, true};
  run_experts(
      pool, space, stack, routing, m.num_chosen, x, t, m.hidden_size,
      [&](const float* gate_up, float* out) {
        clamped_silu_row(gate_up, m.expert_width, m.swiglu_limit, out);
      },
      output);
}

}  // namespace VN_BUILD
}  // namespace vn
