// The gated delta rule: a state S [K, V] per head, taken through tokens one by one.
//
//   S <- f S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q
//
// f is one factor per token, or one per key channel. Columns of S do not depend on one another, so a
// tile of columns passes all tokens while it lies in the first-level cache. Every sum runs along the
// keys in one chain, and every token is computed in the same way whatever stands before and behind
// it: a state may be taken or resumed after any token with the same bits. The maths is that of
// ops/recurrent.py.
#pragma once

#include <cstring>

#include "aligned.h"
#include "exact.h"

namespace vn {
namespace VN_BUILD {

// Consecutive tokens of one head, and the states to leave: all pointers are the first token's.
struct HeadTokens {
  const float *key, *query, *value;  // of unit length, times K^-0.5, as they are
  const float *factor, *rate;
  float* output;
  // From one token to the next: of keys and queries, values, rates, outputs.
  int64_t key_stride, value_stride, rate_stride, output_stride;
  int64_t key_dim, value_dim;
  int64_t factor_stride;
};

// A state to leave behind `end` tokens; null: nowhere.
struct HeadStore {
  int64_t end;
  float* state;
};

// N vectors of columns, of which the last has `lanes`; rows of the scratch are N vectors.
template <int N>
struct ColumnTile {
  int64_t first;
  int lanes;

  VN_INLINE Vec load_part(const float* row, int n) const {
    return n + 1 < N || lanes == kLanes ? load(row + n * kLanes)
                                        : load_some(row + n * kLanes, lanes);
  }
  VN_INLINE void store_part(float* row, int n, Vec values) const {
    if (n + 1 < N || lanes == kLanes) {
      store(row + n * kLanes, values);
    } else {
      store_some(row + n * kLanes, values, lanes);
    }
  }
};

// scratch = f S; read = its product with the key. from: rows of the tile's columns, null: zeros.
template <int N, bool kByChannel>
inline void begin_token(const ColumnTile<N>& tile, const HeadTokens& at, const float* from,
                        int64_t stride, float* scratch, Vec* read) {
  Vec sums[N];
  each<N>([&](auto n) VN_NOW { sums[n] = zero(); });
  Vec factor = fill(at.factor[0]);
  for (int64_t i = 0; i < at.key_dim; ++i) {
    if constexpr (kByChannel) factor = fill(at.factor[i]);
    const Vec key = fill(at.key[i]);
    float* row = scratch + i * N * kLanes;
    each<N>([&](auto n) VN_NOW {
      const Vec old = from == nullptr ? zero() : tile.load_part(from + i * stride, n);
      const Vec value = mul(factor, old);
      store(row + n * kLanes, value);
      sums[n] = fused(key, value, sums[n]);
    });
  }
  each<N>([&](auto n) VN_NOW { read[n] = sums[n]; });
}

// What the token writes: rate * (value - read).
template <int N>
VN_INLINE void find_change(const ColumnTile<N>& tile, const HeadTokens& at, const Vec* read,
                           Vec* change) {
  const Vec rate = fill(*at.rate);
  each<N>([&](auto n) VN_NOW {
    change[n] = mul(sub(tile.load_part(at.value + tile.first, n), read[n]), rate);
  });
}

// Writes the change and gives the output; the state goes to `to`, which may be the scratch.
template <int N>
inline void end_token(const ColumnTile<N>& tile, const HeadTokens& at, const float* scratch,
                      const Vec* read, float* to, int64_t stride) {
  Vec change[N], sums[N];
  find_change(tile, at, read, change);
  each<N>([&](auto n) VN_NOW { sums[n] = zero(); });
  for (int64_t i = 0; i < at.key_dim; ++i) {
    const Vec key = fill(at.key[i]), query = fill(at.query[i]);
    const float* row = scratch + i * N * kLanes;
    each<N>([&](auto n) VN_NOW {
      const Vec value = fused(key, change[n], load(row + n * kLanes));
      if (to != nullptr) tile.store_part(to + i * stride, n, value);
      sums[n] = fused(query, value, sums[n]);
    });
  }
  each<N>([&](auto n) VN_NOW { tile.store_part(at.output + tile.first, n, sums[n]); });
}

// A token alone, begin_token and end_token without the scratch: the state is read twice, the second
// time from the second-level cache, and scaled again, with the same bits. to: may be from.
template <bool kByChannel, int N>
inline void take_token(const ColumnTile<N>& tile, const HeadTokens& at, const float* from, float* to,
                       int64_t stride) {
  Vec read[N], change[N], sums[N];
  each<N>([&](auto n) VN_NOW { read[n] = sums[n] = zero(); });
  Vec factor = fill(at.factor[0]);
  for (int64_t i = 0; i < at.key_dim; ++i) {
    if constexpr (kByChannel) factor = fill(at.factor[i]);
    const Vec key = fill(at.key[i]);
    each<N>([&](auto n) VN_NOW {
      read[n] = fused(key, mul(factor, tile.load_part(from + i * stride, n)), read[n]);
    });
  }
  find_change(tile, at, read, change);
  for (int64_t i = 0; i < at.key_dim; ++i) {
    if constexpr (kByChannel) factor = fill(at.factor[i]);
    const Vec key = fill(at.key[i]), query = fill(at.query[i]);
    each<N>([&](auto n) VN_NOW {
      const Vec old = mul(factor, tile.load_part(from + i * stride, n));
      const Vec value = fused(key, change[n], old);
      tile.store_part(to + i * stride, n, value);
      sums[n] = fused(query, value, sums[n]);
    });
  }
  each<N>([&](auto n) VN_NOW { tile.store_part(at.output + tile.first, n, sums[n]); });
}

// end_token and the next token's begin_token in one pass, with the same bits.
template <int N, bool kByChannel>
inline void pass_on(const ColumnTile<N>& tile, const HeadTokens& at, const HeadTokens& next,
                    float* scratch, Vec* read) {
  Vec change[N], sums[N], next_read[N];
  find_change(tile, at, read, change);
  each<N>([&](auto n) VN_NOW { sums[n] = next_read[n] = zero(); });
  Vec factor = fill(next.factor[0]);
  for (int64_t i = 0; i < at.key_dim; ++i) {
    if constexpr (kByChannel) factor = fill(next.factor[i]);
    const Vec key = fill(at.key[i]), query = fill(at.query[i]), next_key = fill(next.key[i]);
    float* row = scratch + i * N * kLanes;
    each<N>([&](auto n) VN_NOW {
      Vec value = fused(key, change[n], load(row + n * kLanes));
      sums[n] = fused(query, value, sums[n]);
      value = mul(factor, value);
      store(row + n * kLanes, value);
      next_read[n] = fused(next_key, value, next_read[n]);
    });
  }
  each<N>([&](auto n) VN_NOW {
    tile.store_part(at.output + tile.first, n, sums[n]);
    read[n] = next_read[n];
  });
}

inline HeadTokens token_at(const HeadTokens& tokens, int64_t index) {
  HeadTokens at = tokens;
  at.key += index * at.key_stride;
  at.query += index * at.key_stride;
  at.value += index * at.value_stride;
  at.factor += index * at.factor_stride;
  at.rate += index * at.rate_stride;
  at.output += index * at.output_stride;
  return at;
}

// Takes a tile of columns through all tokens.
template <bool kByChannel, int N>
inline void scan_tile(const ColumnTile<N>& tile, const HeadTokens& tokens, const float* source,
                      const HeadStore* stores, int64_t num_stores) {
  thread_local Floats space;
  space.resize(tokens.key_dim * N * kLanes);
  float* scratch = space.data();
  const int64_t width = tokens.value_dim;
  Vec read[N];
  const float* from = source == nullptr ? nullptr : source + tile.first;
  int64_t token = 0;
  for (int64_t s = 0; s < num_stores; ++s) {
    begin_token<N, kByChannel>(tile, token_at(tokens, token), from, width, scratch, read);
    for (; token + 1 < stores[s].end; ++token) {
      pass_on<N, kByChannel>(tile, token_at(tokens, token), token_at(tokens, token + 1), scratch,
                             read);
    }
    float* to = stores[s].state == nullptr ? nullptr : stores[s].state + tile.first;
    end_token<N>(tile, token_at(tokens, token), scratch, read, to, width);
    ++token;
    from = to;
  }
}

// Calls body(tile) for tiles of N vectors of the columns from `at` on, the rest in narrower ones.
template <int N, typename Body>
VN_INLINE void each_tile(int64_t at, int64_t width, Body&& body) {
  for (; at + N * kLanes <= width; at += N * kLanes) body(ColumnTile<N>{at, kLanes});
  if constexpr (N > 1) {
    each_tile<N / 2>(at, width, body);
  } else if (at < width) {
    body(ColumnTile<1>{at, static_cast<int>(width - at)});
  }
}

// Vectors of a tile of columns that passes many tokens: sums of all of them stay in registers.
#if defined(__AVX512F__)
constexpr int kScanVecs = 4;
#else
constexpr int kScanVecs = 2;
#endif
// Of one that passes a token alone: wide, as it waits for memory, which is quickest in order.
constexpr int kTakeVecs = 8;

// Takes a head's state through consecutive tokens, whose number is the last store's end. Stores
// ascend, one at most for a token, and all but the last have a state. A store may lie where the
// source does. source: [K, V], null: zeros.
template <bool kByChannel>
inline void scan_head(const HeadTokens& tokens, const float* source, const HeadStore* stores,
                      int64_t num_stores) {
  const int64_t width = tokens.value_dim;
  float* state = stores[0].state;
  if (source != nullptr && state != nullptr && num_stores == 1 && stores[0].end == 1) {
    each_tile<kTakeVecs>(0, width, [&](const auto& tile) {
      take_token<kByChannel>(tile, tokens, source + tile.first, state + tile.first, width);
    });
    return;
  }
  each_tile<kScanVecs>(0, width, [&](const auto& tile) {
    scan_tile<kByChannel>(tile, tokens, source, stores, num_stores);
  });
}

// x scaled to unit length, then by a factor; out may be x.
inline void scale_to_unit(const float* x, int64_t count, float factor, float* out) {
  const float inverse = 1.0f / std::sqrt(exact_sum_of_squares(x, count) + 1e-6f);
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] * inverse * factor;
}

}  // namespace VN_BUILD
}  // namespace vn
