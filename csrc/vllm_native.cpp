#include "vllm_native.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "build.h"
#include "interface_version.h"
#include "thread_pool.h"
#include "tiles.h"
#include "towers.h"

namespace {

// Vector kernels, and what stands beside them.
struct Choice {
  const char* name;
  const vn::Build* build;
  const vn::TowerBuild* towers;
  vn::Units units;
  bool runs;
};

}  // namespace

struct vn_context {
  vn_context(int num_threads, const Choice& chosen)
      : pool(num_threads, chosen.units),
        build(*chosen.build),
        towers(*chosen.towers),
        name(chosen.name) {
    error.reserve(256);  // to say that there is no memory must take none
  }

  vn::ThreadPool pool;
  vn::Workspace space;
  vn::TowerSpace tower_space;
  const vn::Build& build;
  const vn::TowerBuild& towers;
  const char* name;
  std::string error;
};

namespace {

#if defined(__x86_64__)
// Asked of the processor itself: not every compiler's runtime answers __builtin_cpu_supports.
struct Features {
  bool avx2 = false, avx512 = false, vnni = false, vbmi = false, amx = false, amx_int8 = false;
  bool is_amd = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return;
    constexpr unsigned kAuth = 0x68747541;  // AuthenticAMD
    is_amd = b == kAuth;
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
    vnni = avx512 && c >> 11 & 1;
    vbmi = vnni && c >> 1 & 1;
    // The matrix unit: 0x60000 its registers; BF16, TILE; INT8.
    const bool has_unit = (low & 0x60000) == 0x60000 && d >> 22 & 1 && d >> 24 & 1;
    amx = vnni && has_unit && vn::has_tiles();
    amx_int8 = amx && d >> 25 & 1;
  }
};
#endif

// The best first; behind the last one, which runs anywhere, what is used by its name alone.
std::vector<Choice> list_choices() {
  std::vector<Choice> choices;
#if defined(__x86_64__)
  static const Features features;
  vn::Units plain, dots, all;
  plain.fetches_alone = dots.fetches_alone = all.fetches_alone = features.is_amd;
  dots.byte_dots = all.byte_dots = all.tiles = true;
  all.byte_tables = features.vbmi;
  vn::Units tables = dots;
  tables.byte_tables = true;
  choices.push_back({"amx", &vn::kAvx512Build, &vn::avx512::kTowers, all, features.amx});
  choices.push_back({"vbmi", &vn::kAvx512Build, &vn::avx512::kTowers, tables, features.vbmi});
  choices.push_back({"vnni", &vn::kAvx512Build, &vn::avx512::kTowers, dots, features.vnni});
  choices.push_back({"avx512", &vn::kAvx512Build, &vn::avx512::kTowers, plain, features.avx512});
  choices.push_back({"avx2", &vn::kAvx2Build, &vn::avx2::kTowers, plain, features.avx2});
#endif
  choices.push_back({"portable", &vn::kPortableBuild, &vn::portable::kTowers, {}, true});
#if defined(__x86_64__)
  all.byte_tiles = true;
  choices.push_back({"amx-int8", &vn::kAvx512Build, &vn::avx512::kTowers, all, features.amx_int8});
#endif
  return choices;
}

// No exception passes the border.
template <typename Body>
int32_t guarded(vn_context* context, Body&& body) {
  try {
    context->pool.look_for_fork();
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

// message() is asked where it does not hold alone: a step has thousands of these.
template <typename Message>
void check(bool holds, Message&& message) {
  if (!holds) throw vn::InvalidStep(message());
}

void check(bool holds, const char* message) {
  if (!holds) throw vn::InvalidStep(message);
}

// A step that has been looked through, and what its model's caches are compared with.
class CheckedStep {
 public:
  CheckedStep(int64_t vocab_size, const vn_step& step) : step_(step), ids_(step.num_groups) {
    for (int64_t row = 0; row < step.num_tokens; ++row) check_token(step.token_ids[row], vocab_size);
    int64_t rows = 0;
    for (int64_t r = 0; r < step.num_requests; ++r) {
      check(step.row_starts[r] == rows, "the requests' rows have gaps");
      check_request(r, rows);
      rows += step.counts[r];
    }
    check(rows == step.num_tokens, "the requests' rows are not the step's");
    check_drafts();
    read_tables();
  }

  // Of settled drafts: positions and tokens are those of the step that had them.
  struct Settled {};
  CheckedStep(Settled, const vn_step& step) : step_(step), ids_(step.num_groups) {
    for (int64_t r = 0; r < step.num_requests; ++r) {
      check(step.starts[r] >= 0 && step.counts[r] > 0 && step.row_starts[r] >= 0 &&
                step.row_starts[r] + step.counts[r] <= step.total_drafts,
            "accepted drafts are not the step's");
    }
    check(step.num_drafts == nullptr, "settled drafts are no drafts");
    read_tables();
  }

  void check_layer(const vn_v4_layer& layer) const {
    const auto all = [&](int64_t start) { return start / layer.ratio * layer.ratio; };
    check_cache(layer.window, read_few);
    if (layer.kind != VN_WINDOW) {
      check_state(layer.compressor);
      check_cache(layer.compressor.entries, all);
    }
    if (layer.kind == VN_CHOSEN_ENTRIES) {
      check_state(layer.index_compressor);
      check_cache(layer.index_compressor.entries, all);
    }
  }

  void check_layer(const vn_decoder_layer& layer) const {
    if (layer.recurrence == nullptr) {
      check_cache(layer.cache, [&](int64_t start) { return layer.window == 0 ? start : 0; });
      check(layer.cache.kind != VN_INT8 || has_coded_rows(layer),
            "a cache of bytes has other rows than keys and values of the layer's heads");
      if (layer.indexer != nullptr) {
        const int64_t size = layer.indexer->pool_size;
        if (size > 1) check_cache(layer.indexer->state, read_few);
        check_cache(layer.indexer->keys, [&](int64_t start) { return start / size * size; });
      }
      return;
    }
    check_cache(layer.recurrence->states, read_few);
    check(step_.total_drafts == 0 || step_.drafts != nullptr, "the step's drafts are kept nowhere");
  }

 private:
  struct IdRange {
    int64_t low = 0, high = 0;
  };

  void read_tables() {
    for (int64_t at = 0; at < step_.num_groups * step_.num_requests; ++at) {
      IdRange& ids = ids_[at / step_.num_requests];
      const int64_t* table = step_.block_ids + step_.table_offsets[at];
      for (int64_t i = 0; i < step_.table_lengths[at]; ++i) {
        ids.low = std::min(ids.low, table[i]);
        ids.high = std::max(ids.high, table[i]);
      }
    }
  }

  void check_drafts() const {
    int64_t drafts = 0;
    for (int64_t r = 0; step_.num_drafts != nullptr && r < step_.num_requests; ++r) {
      check(step_.num_drafts[r] >= 0 && step_.num_drafts[r] < step_.counts[r],
            "a request's drafts are all of its tokens");
      drafts += step_.num_drafts[r];
    }
    check(drafts == step_.total_drafts, "the requests' drafts are not the step's");
  }

  static bool has_coded_rows(const vn_decoder_layer& layer) {
    const int64_t heads = 2 * int64_t{layer.num_kv_heads}, d = layer.head_dim;
    const int64_t bytes = heads * (d + static_cast<int64_t>(sizeof(float)));
    return layer.latents == nullptr && layer.cache.head_dim == d && layer.cache.width == bytes;
  }

  static int64_t read_few(int64_t) { return 0; }

  void check_state(const vn_compressor& compressor) const {
    if (compressor.state.data != nullptr) check_cache(compressor.state, read_few);
  }

  static void check_token(int64_t id, int64_t vocab_size) {
    check(id >= 0 && id < vocab_size, [&] {
      return "token id " + std::to_string(id) + " is not in a vocabulary of " +
             std::to_string(vocab_size);
    });
  }

  void check_request(int64_t r, int64_t first_row) const {
    const int64_t count = step_.counts[r], start = step_.starts[r];
    check(count > 0 && count <= step_.num_tokens - first_row, "a request's rows are not the step's");
    check(start >= 0, "a position is negative");
    check(step_.read_from[r] <= start, "window rows are read from beyond a step's start");
    for (int64_t i = 0; i < count; ++i) {
      check(step_.positions[first_row + i] == start + i, "a request's positions have gaps");
    }
  }

  // num_stored(start): tokens from the first whose rows are read for a request that begins there.
  template <typename NumStored>
  void check_cache(const vn_cache& cache, NumStored&& num_stored) const {
    check(cache.group >= 0 && cache.group < step_.num_groups, "a cache's KV group has no tables");
    const IdRange& ids = ids_[cache.group];
    check(ids.low >= 0 && ids.high < cache.num_blocks, [&] {
      return "block " + std::to_string(ids.low < 0 ? ids.low : ids.high) + " of KV group " +
             std::to_string(cache.group) + " is not one of " + std::to_string(cache.num_blocks);
    });
    for (int64_t r = 0; r < step_.num_requests; ++r) {
      const int64_t at = cache.group * step_.num_requests + r;
      const int64_t end = step_.table_bases[at] + step_.table_lengths[at];
      const int64_t stored = num_stored(step_.starts[r]);
      // Before memory is taken for so many rows.
      check(stored <= end * cache.block_size, [&] {
        return "attention needs the row of position " + std::to_string(stored - 1) +
               " of the step's request " + std::to_string(r) + " in KV group " +
               std::to_string(cache.group) + ", but its table stores none";
      });
    }
  }

  const vn_step& step_;
  std::vector<IdRange> ids_;  // of each KV group's tables
};

void check_draws(const vn_draws& draws, int64_t num_rows, int64_t vocab_size) {
  check(vocab_size > 0, "a vocabulary is empty");
  for (int64_t i = 0; i < draws.num_draws; ++i) {
    const auto told = [i](const char* what) {
      return [i, what] { return "draw " + std::to_string(i) + what; };
    };
    check(draws.rows[i] > (i == 0 ? -1 : draws.rows[i - 1]) && draws.rows[i] < num_rows, [&] {
      return "draw " + std::to_string(i) + " is of row " + std::to_string(draws.rows[i]) + " of " +
             std::to_string(num_rows) + ", or its row does not follow the one before";
    });
    check(draws.temperature[i] > 0.0f, told(" has a temperature that is not positive"));
    check(draws.min_p[i] >= 0.0f && draws.min_p[i] <= 1.0f, told(" has a min-p outside 0 to 1"));
    check(draws.top_p[i] > 0.0f && draws.top_p[i] <= 1.0f, told(" has a top-p outside 0 to 1"));
    check(draws.top_k[i] >= 1 && draws.top_k[i] <= vocab_size,
          told(" has a top-k outside 1 to the vocabulary's size"));
    check(draws.uniforms[i] >= 0.0f && draws.uniforms[i] < 1.0f,
          told(" has a number outside 0 to 1"));
  }
}

void check_tower(const vn_tower& t, const vn_tower_layer& layer, const float* turns) {
  const int64_t width = t.width, heads = t.num_heads, kv_heads = t.num_kv_heads, d = t.head_dim;
  check(kv_heads > 0 && heads % kv_heads == 0, "a tower's key heads do not divide its heads");
  check(t.num_turned_parts == 0 || (turns != nullptr && d % (2 * t.num_turned_parts) == 0),
        "a tower's heads cannot be turned so");
  const auto maps = [](const vn_tower_matrix& m, int64_t rows, int64_t cols) {
    return m.rows == rows && m.cols == cols;
  };
  const int64_t inner = layer.up.rows;
  check(maps(layer.queries, heads * d, width) && maps(layer.keys, kv_heads * d, width) &&
            maps(layer.values, kv_heads * d, width) && maps(layer.output, width, heads * d) &&
            maps(layer.up, inner, width) && maps(layer.down, width, inner) &&
            (layer.gate.words == nullptr || maps(layer.gate, inner, width)),
        "a matrix of a tower's layer has other sizes");
  for (const vn_tower_matrix* m : {&layer.keys, &layer.values, &layer.output, &layer.gate, &layer.up,
                                   &layer.down}) {
    check(m->words == nullptr || (m->scales == nullptr) == (layer.queries.scales == nullptr),
          "the matrices of a tower's layer are of two kinds");
  }
}

}  // namespace

extern "C" {

int32_t vn_abi_version(void) { return VN_ABI_VERSION; }

const char* vn_vector_build(const vn_context* context) { return context->name; }

vn_context* vn_create(int32_t num_threads, const char* build) {
  try {
    for (const Choice& choice : list_choices()) {
      if (choice.runs && (build == nullptr || std::strcmp(build, choice.name) == 0)) {
        return new vn_context(num_threads, choice);
      }
    }
  } catch (const std::exception&) {
    // Memory is short.
  }
  return nullptr;
}

void vn_destroy(vn_context* context) {
  if (context == nullptr) return;
  context->pool.look_for_fork();
  if (!context->pool.is_left_behind()) delete context;
}

const char* vn_error(const vn_context* context) { return context->error.c_str(); }

int32_t vn_v4_forward(vn_context* context, const vn_v4_model* model, const vn_step* step,
                      float* streams) {
  return guarded(context, [&] {
    const CheckedStep checked(model->vocab_size, *step);
    for (int32_t i = 0; i < model->num_layers; ++i) checked.check_layer(model->layers[i]);
    context->build.v4_forward(context->pool, context->space, *model, *step, streams);
  });
}

int32_t vn_v4_forward_mtp(vn_context* context, const vn_v4_model* model, const vn_step* step,
                          const float* streams, float* output) {
  return guarded(context, [&] {
    check(model->mtp != nullptr, "the model has no MTP block");
    CheckedStep(model->vocab_size, *step).check_layer(*model->mtp);
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

int32_t vn_v41_forward(vn_context* context, const vn_v4_model* model, const vn_step* step,
                       const float* const* table_rows, float* stream) {
  return guarded(context, [&] {
    const CheckedStep checked(model->vocab_size, *step);
    for (int32_t i = 0; i < model->num_layers; ++i) checked.check_layer(model->layers[i]);
    context->build.v41_forward(context->pool, context->space, *model, *step, table_rows, stream);
  });
}

int32_t vn_v41_logits(vn_context* context, const vn_v4_model* model, const float* stream,
                      int64_t num_rows, float* logits) {
  return guarded(context, [&] {
    context->build.v41_logits(context->pool, context->space, *model, stream, num_rows, logits);
  });
}

int32_t vn_decoder_forward(vn_context* context, const vn_decoder_model* model, const vn_step* step,
                           float* stream) {
  return guarded(context, [&] {
    const CheckedStep checked(model->vocab_size, *step);
    for (int32_t i = 0; i < model->num_layers; ++i) checked.check_layer(model->layers[i]);
    context->build.decoder_forward(context->pool, context->space, *model, *step, stream);
  });
}

int32_t vn_decoder_logits(vn_context* context, const vn_decoder_model* model, const float* stream,
                          int64_t num_rows, int32_t is_normed, float* logits) {
  return guarded(context, [&] {
    context->build.decoder_logits(context->pool, context->space, *model, stream, num_rows,
                                  is_normed != 0, logits);
  });
}

int32_t vn_decoder_norm(vn_context* context, const vn_decoder_model* model, const float* stream,
                        int64_t num_rows, float* normed) {
  return guarded(context, [&] {
    context->build.decoder_norm(context->pool, *model, stream, num_rows, normed);
  });
}

int32_t vn_decoder_draft(vn_context* context, const vn_decoder_drafter* drafter,
                         const vn_step* step, const float* streams, float* output) {
  return guarded(context, [&] {
    const vn_decoder_model& block = drafter->block;
    check(block.num_layers == 1 && block.num_streams == 0 && block.layers[0].recurrence == nullptr,
          "a block that drafts is one layer of attention");
    CheckedStep(block.vocab_size, *step).check_layer(block.layers[0]);
    context->build.decoder_draft(context->pool, context->space, *drafter, *step, streams, output);
  });
}

int32_t vn_decoder_settle(vn_context* context, const vn_decoder_model* model,
                          const vn_step* step) {
  return guarded(context, [&] {
    const CheckedStep checked(CheckedStep::Settled{}, *step);
    for (int32_t i = 0; i < model->num_layers; ++i) {
      if (model->layers[i].recurrence != nullptr) checked.check_layer(model->layers[i]);
    }
    context->build.decoder_settle(context->pool, context->space, *model, *step);
  });
}

int32_t vn_sample(vn_context* context, float* logits, int64_t num_rows, int64_t vocab_size,
                  const vn_draws* draws, int64_t* token_ids) {
  return guarded(context, [&] {
    check_draws(*draws, num_rows, vocab_size);
    context->build.sample(context->pool, logits, vocab_size, *draws, token_ids);
  });
}

int32_t vn_forbid(vn_context* context, float* logits, int64_t num_rows, int64_t vocab_size,
                  const int64_t* rows, const uint32_t* masks, int64_t num_masks) {
  return guarded(context, [&] {
    check(vocab_size > 0, "a vocabulary is empty");
    for (int64_t i = 0; i < num_masks; ++i) {
      check(rows[i] > (i == 0 ? -1 : rows[i - 1]) && rows[i] < num_rows, [&] {
        return "mask " + std::to_string(i) + " is of row " + std::to_string(rows[i]) + " of " +
               std::to_string(num_rows) + ", or its row does not follow the one before";
      });
    }
    context->build.forbid(context->pool, logits, vocab_size, rows, masks, num_masks);
  });
}

int32_t vn_matmul(vn_context* context, const vn_matrix* matrix, const float* x, int64_t num_rows,
                  float* output) {
  return guarded(context,
                 [&] { context->build.matmul(context->pool, *matrix, x, num_rows, output); });
}

int32_t vn_gated_delta(vn_context* context, const vn_delta_scan* scan) {
  return guarded(context, [&] { context->build.gated_delta(context->pool, *scan); });
}

int32_t vn_tower_layer_run(vn_context* context, const vn_tower* tower, const vn_tower_layer* layer,
                           const float* turns, int64_t num_rows, float* stream) {
  return guarded(context, [&] {
    check_tower(*tower, *layer, turns);
    context->towers.run_layer(context->pool, context->tower_space, *tower, *layer, turns, num_rows,
                              stream);
  });
}

int32_t vn_tower_map(vn_context* context, const vn_tower_matrix* matrix, const float* x,
                     int64_t num_rows, float* output) {
  return guarded(context, [&] { context->towers.map(context->pool, *matrix, x, num_rows, output); });
}

}  // extern "C"
