#include "vllm_native.h"

#include <cstring>
#include <memory>
#include <new>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

#if defined(__x86_64__)
// Asked of the processor itself: not every compiler's runtime answers __builtin_cpu_supports.
struct Features {
  bool avx2 = false, avx512 = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool has_fma = (c >> 12 & 1) != 0 && (c >> 29 & 1) != 0;  // and halves
    const bool saves_registers = c >> 27 & 1;
    if (!has_fma || !saves_registers || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    // Which registers the system keeps: 0x6 the 256-bit ones, 0xe0 the 512-bit ones and masks.
    avx2 = (low & 0x6) == 0x6 && b >> 5 & 1;
    const bool has_all = b >> 16 & 1 && b >> 17 & 1 && b >> 30 & 1 && b >> 31 & 1;  // F DQ BW VL
    avx512 = avx2 && (low & 0xe0) == 0xe0 && has_all;
  }
};
#endif

bool runs_here(const vn::Build& build) {
#if defined(__x86_64__)
  static const Features features;
  if (&build == &vn::kAvx512Build) return features.avx512;
  if (&build == &vn::kAvx2Build) return features.avx2;
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

void check_step(int64_t vocab_size, const vn_step& step) {
  for (int64_t row = 0; row < step.num_tokens; ++row) {
    check(step.token_ids[row] >= 0 && step.token_ids[row] < vocab_size,
          "token id " + std::to_string(step.token_ids[row]) + " is not in a vocabulary of " +
              std::to_string(vocab_size));
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

void check_draws(const vn_draws& draws, int64_t num_rows, int64_t vocab_size) {
  check(vocab_size > 0, "a vocabulary is empty");
  for (int64_t i = 0; i < draws.num_draws; ++i) {
    const std::string who = "draw " + std::to_string(i);
    check(draws.rows[i] > (i == 0 ? -1 : draws.rows[i - 1]) && draws.rows[i] < num_rows,
          who + " is of row " + std::to_string(draws.rows[i]) + " of " + std::to_string(num_rows) +
              ", or its row does not follow the one before");
    check(draws.temperature[i] > 0.0f, who + " has a temperature that is not positive");
    check(draws.min_p[i] >= 0.0f && draws.min_p[i] <= 1.0f, who + " has a min-p outside 0 to 1");
    check(draws.top_p[i] > 0.0f && draws.top_p[i] <= 1.0f, who + " has a top-p outside 0 to 1");
    check(draws.top_k[i] >= 1 && draws.top_k[i] <= vocab_size,
          who + " has a top-k outside 1 to the vocabulary's size");
    check(draws.uniforms[i] >= 0.0f && draws.uniforms[i] < 1.0f,
          who + " has a number outside 0 to 1");
  }
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
    check_step(model->vocab_size, *step);
    for (int32_t i = 0; i < model->num_layers; ++i) check_layer(model->layers[i], *step);
    context->build.v4_forward(context->pool, context->space, *model, *step, streams);
  });
}

int32_t vn_v4_forward_mtp(vn_context* context, const vn_v4_model* model, const vn_step* step,
                          const float* streams, float* output) {
  return guarded(context, [&] {
    check(model->mtp != nullptr, "the model has no MTP block");
    check_step(model->vocab_size, *step);
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

int32_t vn_decoder_forward(vn_context* context, const vn_decoder_model* model, const vn_step* step,
                           float* stream) {
  return guarded(context, [&] {
    check_step(model->vocab_size, *step);
    for (int32_t i = 0; i < model->num_layers; ++i) check_blocks(model->layers[i].cache, *step);
    context->build.decoder_forward(context->pool, context->space, *model, *step, stream);
  });
}

int32_t vn_decoder_logits(vn_context* context, const vn_decoder_model* model, const float* stream,
                          int64_t num_rows, float* logits) {
  return guarded(context, [&] {
    context->build.decoder_logits(context->pool, context->space, *model, stream, num_rows, logits);
  });
}

int32_t vn_sample(vn_context* context, float* logits, int64_t num_rows, int64_t vocab_size,
                  const vn_draws* draws, int64_t* token_ids) {
  return guarded(context, [&] {
    check_draws(*draws, num_rows, vocab_size);
    context->build.sample(context->pool, logits, vocab_size, *draws, token_ids);
  });
}

int32_t vn_matmul(vn_context* context, const vn_matrix* matrix, const float* x, int64_t num_rows,
                  float* output) {
  return guarded(context,
                 [&] { context->build.matmul(context->pool, *matrix, x, num_rows, output); });
}

}  // extern "C"
