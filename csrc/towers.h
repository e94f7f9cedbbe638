// Towers: the part of the library's interface (vllm_native.h) for what turns pictures into rows, and
// what a vector build offers for it.
#ifndef VLLM_NATIVE_TOWERS_H
#define VLLM_NATIVE_TOWERS_H

#include "vllm_native.h"

#ifdef __cplusplus
extern "C" {
#endif

// Inputs of a matrix whose values share a scale.
#define VN_PAIR_GROUP 96

// Values are clamped to them; infinite ones leave them as they are.
typedef struct {
  float low, high;
} vn_bounds;

// A matrix of floats, or of whole multiples of a scale of each output and group of VN_PAIR_GROUP inputs:
// as vectors these are at most 46,335 long, and products round their inputs alike (csrc/pairs.h). Padded
// with zeros.
typedef struct {
  // Floats [ceil(rows / 16), cols, 16], or [ceil(rows / 16), ceil(cols / 2), 16] of 32 bits: two
  // inputs, the even one low.
  const void* words;
  const float* scales;  // [ceil(rows / 16), ceil(cols / VN_PAIR_GROUP), 16]; null: of floats
  const float* bias;    // [rows], or null
  int64_t rows, cols;
  vn_bounds inputs, outputs;
} vn_tower_matrix;

typedef struct {
  // Before attention, behind it, before the MLP, behind it; the 2nd and 4th null: none there. Biases of
  // layer norms.
  const float *norms[4], *norm_biases[4];
  vn_tower_matrix queries, keys, values, output;
  vn_tower_matrix gate, up, down;       // without words in gate: gelu(up)
  const float *query_norm, *key_norm;  // [d], or null
} vn_tower_layer;

// What the layers of a tower have in common. All rows of a picture see each other.
typedef struct {
  int32_t width, num_heads, num_kv_heads, head_dim;
  int32_t is_rms, norms_values;
  int32_t num_turned_parts;  // of a head, each turned half by half; 0: nothing is turned
  float eps, scale;
  int32_t unused;
} vn_tower;

// Takes the rows of a picture, stream [N, D], through a layer. turns [N, 2, d / 2]: cosines, then
// sines, by part; null: nothing is turned.
VN_API int32_t vn_tower_layer_run(vn_context*, const vn_tower*, const vn_tower_layer*,
                                  const float* turns, int64_t num_rows, float* stream);
// output [N, rows] = x [N, cols] * matrix^T, with bias and bounds.
VN_API int32_t vn_tower_map(vn_context*, const vn_tower_matrix*, const float* x, int64_t num_rows,
                            float* output);

#ifdef __cplusplus
}  // extern "C"

#include <vector>

#include "aligned.h"
#include "thread_pool.h"

namespace vn {

// Grows, never shrinks; the contents are garbage after a call.
template <typename T>
class TowerScratch {
 public:
  T* take(int64_t count) {
    if (static_cast<int64_t>(values_.size()) < count) values_.resize(count);
    return values_.data();
  }

 private:
  std::vector<T, CacheLines<T>> values_;
};

// The buffers of a layer, kept between calls.
struct TowerSpace {
  TowerScratch<int16_t> codes;
  TowerScratch<int32_t> keys, values;
  TowerScratch<float> plain_codes, plain_keys, plain_values;
  TowerScratch<float> query_scales, key_scales, value_scales, attended;
};

// As Build (build.h), for towers.
struct TowerBuild {
  void (*run_layer)(ThreadPool&, TowerSpace&, const vn_tower&, const vn_tower_layer&,
                    const float* turns, int64_t num_rows, float* stream);
  void (*map)(ThreadPool&, const vn_tower_matrix&, const float* x, int64_t num_rows, float* output);
};

#if defined(__x86_64__)
namespace avx512 {
extern const TowerBuild kTowers;
}
namespace avx2 {
extern const TowerBuild kTowers;
}
#endif
namespace portable {
extern const TowerBuild kTowers;
}

}  // namespace vn
#endif
#endif
