// Attention over latent rows: one cached row a token, of which keys and values of all heads are
// products. Queries are taken to the rows' space, what they find is taken back. The maths is that of
// decoder/latent_attention.py.
#pragma once

#include <cstring>
#include <vector>

#include "build.h"
#include "kernels.h"

namespace vn {
namespace VN_BUILD {

// queries [T, H, L + S] of projected ones, [H, K + S] at the front of rows `stride` apart.
inline void take_queries(ThreadPool& pool, const vn_latents& l, int64_t heads, const float* product,
                         int64_t stride, int64_t t, float* queries) {
  const int64_t width = l.latent_dim + l.shared_dim, own = l.key_dim + l.shared_dim;
  std::vector<Product> products;
  for (int64_t h = 0; h < heads; ++h) {
    products.push_back({product + h * own, stride, nullptr, t, &l.key_maps, h * l.latent_dim,
                        l.latent_dim, queries + h * width, heads * width});
  }
  multiply_all(pool, products.data(), products.size());
  if (l.shared_dim == 0) return;
  for_rows(pool, t * heads, 2 * l.shared_dim, [&](int64_t i) {
    std::memcpy(queries + i * width + l.latent_dim,
                product + i / heads * stride + i % heads * own + l.key_dim,
                sizeof(float) * l.shared_dim);
  });
}

// mapped [T, H * V] of what heads found, [T, H, stride] of which the first L values count.
inline void map_values(ThreadPool& pool, const vn_latents& l, int64_t heads, const float* found,
                       int64_t stride, int64_t t, float* mapped) {
  std::vector<Product> products;
  for (int64_t h = 0; h < heads; ++h) {
    products.push_back({found + h * stride, heads * stride, nullptr, t, &l.value_maps,
                        h * l.value_dim, l.value_dim, mapped + h * l.value_dim,
                        heads * l.value_dim});
  }
  multiply_all(pool, products.data(), products.size());
}

}  // namespace VN_BUILD
}  // namespace vn
