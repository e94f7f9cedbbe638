#include "vllm_native.h"

#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "build.h"
#include "thread_pool.h"

struct vn_context {
  vn_context(int num_threads, const vn::Build& chosen) : pool(num_threads), build(chosen) {}

  vn::ThreadPool pool;
  vn::Workspace space;
  const vn::Build& build;
  std::string error;
};

namespace {

bool runs_here(const vn::Build& build) {
#if defined(__x86_64__)
  // Not every compiler's runtime has looked at the processor by now.
  __builtin_cpu_init();
  if (&build == &vn::kAvx512Build) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("fma");
  }
  if (&build == &vn::kAvx2Build) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
#endif
  return &build == &vn::kPortableBuild;
}

const vn::Build* find_build(const char* name) {
  const vn::Build* builds[] = {
#if defined(__x86_64__)
      &vn::kAvx512Build,
      &vn::kAvx2Build,
#endif
      &vn::kPortableBuild,
  };
  for (const vn::Build* build : builds) {
    if ((name == nullptr || std::strcmp(name, build->name) == 0) && runs_here(*build)) return build;
  }
  return nullptr;
}

// No exception passes the border.
template <typename Body>
int32_t guarded(vn_context* context, Body&& body) {
  try {
    body();
    return VN_OK;
  } catch (const std::bad_alloc&) {
    context->error = "the memory for a step's buffers is not there";
    return VN_NO_MEMORY;
  } catch (const std::exception& error) {
    context->error = error.what();
    return VN_INVALID;
  }
}

void check(bool holds, const std::string& message) {
  if (!holds) throw vn::InvalidStep(message);
}

void check_blocks(const vn_cache& cache, const vn_step& step) {
  check(cache.group < step.num_groups, "a cache's KV group has no tables");
  for (int64_t r = 0; r < step.num_requests; ++r) {
    const int64_t at = cache.group * step.num_requests + r;
    const int64_t* ids = step.block_ids + step.table_offsets[at];
    for (int64_t i = 0; i < step.table_lengths[at]; ++i) {
      check(ids[i] >= 0 && ids[i] < cache.num_blocks,
            "block " + std::to_string(ids[i]) + " of KV group " + std::to_string(cache.group) +
                " is not one of " + std::to_string(cache.num_blocks));
    }
  }
}

void check_layer(const vn_v4_layer& layer, const vn_step& step) {
  check_blocks(layer.window, step);
  if (layer.kind != VN_WINDOW) {
    check_blocks(layer.compressor.state, step);
    check_blocks(layer.compressor.entries, step);
  }
  if (layer.kind == VN_CHOSEN_ENTRIES) {
    check_blocks(layer.index_compressor.state, step);
    check_blocks(layer.index_compressor.entries, step);
  }
}

void check_step(const vn_v4_model& model, const vn_step& step) {
  for (int64_t row = 0; row < step.num_tokens; ++row) {
    check(step.token_ids[row] >= 0 && step.token_ids[row] < model.vocab_size,
          "token id " + std::to_string(step.token_ids[row]) + " is not in a vocabulary of " +
              std::to_string(model.vocab_size));
    check(step.positions[row] >= 0, "a position is negative");
  }
  int64_t rows = 0;
  for (int64_t r = 0; r < step.num_requests; ++r) {
    check(step.counts[r] > 0 && step.row_starts[r] == rows, "the requests' rows have gaps");
    check(step.read_from[r] <= step.starts[r], "window rows are read from beyond a step's start");
    rows += step.counts[r];
  }
  check(rows == step.num_tokens, "the requests' rows are not the step's");
}

}  // namespace

extern "C" {

int32_t vn_abi_version(void) { return VN_ABI_VERSION; }

const char* vn_vector_build(const vn_context* context) { return context->build.name; }

vn_context* vn_create(int32_t num_threads, const char* build) {
  const vn::Build* chosen = find_build(build);
  if (chosen == nullptr) return nullptr;
  try {
    return new vn_context(num_threads, *chosen);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void vn_destroy(vn_context* context) { delete context; }

const char* vn_error(const vn_context* context) { return context->error.c_str(); }

int32_t vn_v4_forward(vn_context* context, const vn_v4_model* model, const vn_step* step,
                      float* streams) {
  return guarded(context, [&] {
    check_step(*model, *step);
    for (int32_t i = 0; i < model->num_layers; ++i) check_layer(model->layers[i], *step);
    context->build.v4_forward(context->pool, context->space, *model, *step, streams);
  });
}

int32_t vn_v4_forward_mtp(vn_context* context, const vn_v4_model* model, const vn_step* step,
                          const float* streams, float* output) {
  return guarded(context, [&] {
    check(model->mtp != nullptr, "the model has no MTP block");
    check_step(*model, *step);
    check_layer(*model->mtp, *step);
    context->build.v4_forward_mtp(context->pool, context->space, *model, *step, streams, output);
  });
}

int32_t vn_v4_logits(vn_context* context, const vn_v4_model* model, const float* streams,
                     int64_t num_rows, int32_t is_mtp, float* logits) {
  return guarded(context, [&] {
    context->build.v4_logits(context->pool, context->space, *model, streams, num_rows, is_mtp != 0,
                             logits);
  });
}

int32_t vn_matmul(vn_context* context, const vn_matrix* matrix, const float* x, int64_t num_rows,
                  float* output) {
  return guarded(context,
                 [&] { context->build.matmul(context->pool, *matrix, x, num_rows, output); });
}

}  // extern "C"
