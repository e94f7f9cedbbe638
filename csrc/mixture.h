// DeepSeek-V4's experts: each chosen expert maps the tokens that chose it, at most once each.
#pragma once

#include "build.h"
#include "kernels.h"

namespace vn {
namespace VN_BUILD {

// Tokens by expert: those of expert e are pairs first[e] .. first[e + 1] - 1.
struct Routing {
  std::vector<int32_t> expert_of;  // [T * chosen]
  std::vector<float> weight_of;    // [T * chosen]
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

inline void route(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
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
  routing.first.assign(experts + 1, 0);
  for (const int32_t e : routing.expert_of) ++routing.first[e + 1];
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

// silu(min(gate, limit)) * clamp(up, -limit, limit) of gate | up, times a factor, into `out`.
inline void gate_row(const float* gate_up, int64_t width, float limit, float factor, float* out) {
  for (int64_t at = 0; at < width; at += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
    const Vec gate = min(load_some(gate_up + at, lanes), fill(limit));
    const Vec up = max(min(load_some(gate_up + width + at, lanes), fill(limit)), fill(-limit));
    const Vec silu = div(gate, add(fill(1.0f), exp(sub(zero(), gate))));
    store_some(out + at, mul(mul(silu, up), fill(factor)), lanes);
  }
}

// output [T, D] = the shared expert's and the chosen experts' outputs of x [T, D].
inline void mix_experts(ThreadPool& pool, Workspace& space, const vn_v4_model& m,
                        const vn_v4_layer& layer, const int64_t* token_ids, const float* x,
                        int64_t t, float* output) {
  const int64_t d = m.hidden_size, width = m.expert_width, wanted = m.num_chosen;
  thread_local Routing routing;
  route(pool, space, m, layer, token_ids, x, t, routing);
  const int64_t pairs = t * wanted, all = pairs + t;
  float* hidden = space.hidden.take(all * 2 * width);
  float* gated = space.projected.take(all * width);
  float* parts = space.parts.take(pairs * d);
  thread_local std::vector<Product> products;
  products.clear();
  for (int64_t e = 0; e < m.num_experts; ++e) {
    const int64_t first = routing.first[e], count = routing.first[e + 1] - first;
    if (count == 0) continue;
    products.push_back({x, d, routing.token_of.data() + first, count, &layer.gate_up,
                        e * 2 * width, 2 * width, hidden + first * 2 * width, 2 * width});
  }
  products.push_back({x, d, nullptr, t, &layer.gate_up, int64_t{m.num_experts} * 2 * width,
                      2 * width, hidden + pairs * 2 * width, 2 * width});
  multiply_all(pool, products.data(), products.size());
  thread_local std::vector<float> factors;
  factors.assign(all, 1.0f);
  for (int64_t i = 0; i < pairs; ++i) factors[routing.pair_of[i]] = routing.weight_of[i];
  const float* factor = factors.data();
  for_rows(pool, all, 30 * width, [&](int64_t i) {
    gate_row(hidden + i * 2 * width, width, m.swiglu_limit, factor[i], gated + i * width);
  });
  products.clear();
  for (int64_t e = 0; e < m.num_experts; ++e) {
    const int64_t first = routing.first[e], count = routing.first[e + 1] - first;
    if (count == 0) continue;
    products.push_back({gated + first * width, width, nullptr, count, &layer.down, e * d, d,
                        parts + first * d, d});
  }
  products.push_back({gated + pairs * width, width, nullptr, t, &layer.down,
                      int64_t{m.num_experts} * d, d, output, d});
  multiply_all(pool, products.data(), products.size());
  const Routing& routed = routing;
  for_rows(pool, t, 2 * wanted * d, [&](int64_t row) {
    for (int64_t k = 0; k < wanted; ++k) {
      const float* part = parts + int64_t{routed.pair_of[row * wanted + k]} * d;
      for (int64_t i = 0; i < d; ++i) output[row * d + i] += part[i];
    }
  });
}

}  // namespace VN_BUILD
}  // namespace vn
