// The C interface of the native CPU kernels: plain structs and functions, no torch, no Python.
//
// A step of a model is one call. Everything a call needs stands in the structs below; the library
// keeps no model, only a context: its threads, its scratch memory and its last error message.
//
//   vn_create ----> vn_context
//                     |  vn_v4_forward(context, model, step, streams)   embeds, runs all layers
//                     |  vn_v4_logits(context, model, streams, ...)     any rows -> logits
//                     v
//   vn_destroy
//
// Shapes are row-major, strides in elements. T: tokens of the step, R: requests, n: residual
// streams, D: hidden size, H: heads, d: width of a head. Every output element has one order of
// accumulation, whatever T, the number of threads or what else is in the step.
#ifndef VLLM_NATIVE_H
#define VLLM_NATIVE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VN_API __attribute__((visibility("default")))

enum vn_status { VN_OK = 0, VN_INVALID = 1, VN_NO_MEMORY = 2 };

// How the values of a matrix or a cache are stored.
//   VN_MXFP4: e2m1 codes, two to a byte, the even column in the low nibble, [rows, cols / 2].
//   VN_FP8: e4m3 codes.
//   VN_PANELS: `data` is a vn_panels.
//   VN_PARTS: several matrices, one below the other; `data` are `group` vn_matrix of no parts.
//   VN_BF16_PANELS: bf16 values whose products round their inputs to bf16 too; `data` are words
//   [panels, ceil(cols / 32) * 16, 64], 64 outputs to a panel: two inputs of one output, the even one
//   low, filled up with zeros.
//   VN_F16: of caches alone; what is larger than the largest of them is stored as that one.
//   VN_INT8: of caches alone. A row: the codes of all heads, keys then values, and behind them an fp32
//   scale of each head, the 127th part of its largest magnitude. Codes are of spread heads: in the place
//   of each run of values stand all its sums and differences, the rows of a Hadamard matrix times the run.
//   A run is the largest power of two, at most 512, that divides a head.
enum vn_kind {
  VN_F32 = 0,
  VN_BF16 = 1,
  VN_MXFP4 = 2,
  VN_FP8 = 3,
  VN_PARTS = 4,
  VN_PANELS = 5,
  VN_BF16_PANELS = 6,
  VN_F16 = 7,
  VN_INT8 = 8
};

// Codes of a packed matrix: two's complement, plain, numbers in a table of 16, or floats of eight bits.
enum vn_code_kind {
  VN_CODE_INT8 = 0,
  VN_CODE_INT4 = 1,
  VN_CODE_UINT4 = 2,
  VN_CODE_IQ4 = 3,
  VN_CODE_E2M1 = 4,
  VN_CODE_INT6 = 5,
  VN_CODE_E4M3 = 6,
  VN_CODE_NF4 = 7,
  // 2q - 15 for q of four bits.
  VN_CODE_ODD4 = 8,
  // Of less than four bits; how they lie in words: csrc/units.h. 0 to 3, and -1 to 2:
  VN_CODE_UINT2 = 9,
  VN_CODE_INT2 = 10,
  // -4 to 3, and numbers in tables of eight:
  VN_CODE_INT3 = 11,
  VN_CODE_IQ1 = 12,
  VN_CODE_IQ2 = 13,
  // Indexes into a codebook, with signs:
  VN_CODE_IQ2_XXS = 14,
  VN_CODE_IQ3_XXS = 15
};
// What a product's inputs are rounded to: a property of the matrix. Bytes: multiples of a 127th of the
// largest of a row, or of a row's group. Two bytes: of a 127 * 254th.
enum vn_input_kind {
  VN_INPUT_FLOATS = 0,
  VN_INPUT_BYTES_BY_ROW = 1,
  VN_INPUT_BYTES_BY_GROUP = 2,
  VN_INPUT_TWO_BYTES_BY_GROUP = 3
};
enum vn_scale_kind {
  VN_SCALE_F32 = 0,
  VN_SCALE_F16 = 1,
  VN_SCALE_BF16 = 2,
  VN_SCALE_INT8 = 3,
  VN_SCALE_E8M0 = 4,
  VN_SCALE_E4M3 = 5,  // with scale_steps
  VN_SCALE_LOW4 = 6,   // the low nibbles of bytes, and the high ones
  VN_SCALE_HIGH4 = 7,
  // 2s + 1, s the top nibbles of a unit's last word: `scales` is the first such line of `codes`.
  VN_SCALE_IN_CODES = 8
};

// A matrix packed for products: outputs in lanes, 64 to a panel, padded with zero codes. P panels,
// G = ceil(cols / group) groups, F = ceil(G / factor_groups).
//   weight = code * scale + offset
typedef struct {
  // [P, words, 64]; a word: 8 inputs of one output (of bytes 4), lowest first. INT6: 16 inputs are three
  // words, two of low nibbles and one of high pairs: byte b holds, from its lowest bits, those of
  // inputs 2b, 2b + 1, 8 + 2b, 9 + 2b; codes are lifted by 32. Less than four bits: csrc/units.h.
  const uint32_t* codes;
  const void* scales;     // [P, G, 64] of scale_kind
  const uint16_t* scale_factors;   // fp16 [P, F, 64]: scales are multiplied by it; or null
  const void* offsets;             // [P, G, 64] of offset_kind, or null. INT8 without factors: zero
                                   // points, so that the offset is -zero * scale
  const uint16_t* offset_factors;  // as scale_factors
  const int32_t* order;            // [cols]: the input that the k-th code is of, or null: k
  // [P, 8], of e4m3 scales: what 1, 1.125 .. 1.875 stand for; others are powers of two of them.
  const float* scale_steps;
  int32_t code_kind, scale_kind, offset_kind;
  int32_t group, factor_groups;
  int32_t input_kind;  // of bytes: at most 131,072 inputs to a group
  float scale_step;    // what all scales are multiplied by: a power of two
  int32_t unused;
  // Of kinds with indexes: two tables of 256 bytes (units.h); or null.
  const uint8_t* codebook;
} vn_panels;

// A matrix [rows, cols] that maps cols inputs to rows outputs.
typedef struct {
  const void* data;
  // Of codes: one per `rows_per_scale` rows and `group` columns, the last cut off, row-major.
  const uint8_t* scales;
  int64_t rows, cols, row_stride;
  int32_t kind;  // vn_kind
  int32_t group;
  int32_t rows_per_scale;
  int32_t has_byte_scales;  // e8m0, else fp32
} vn_matrix;

// One named KV cache: [num_blocks, rows_per_block, width], the last axis contiguous. Of VN_INT8 width and
// stride are in bytes.
typedef struct {
  void* data;
  int64_t num_blocks, block_stride;
  int32_t rows_per_block, width;
  int32_t block_size;  // tokens of a block
  int32_t group;       // whose block tables address it
  int32_t kind;        // vn_kind
  int32_t head_dim;    // of VN_INT8: codes under one scale
} vn_cache;

// One step of a flattened batch. Tables of group g and request r stand at [g * R + r].
typedef struct {
  int64_t num_tokens, num_requests, num_groups;
  const int64_t* token_ids;      // [T]
  const int64_t* positions;      // [T]
  const int64_t* row_starts;     // [R] first flat row
  const int64_t* starts;         // [R] first position
  const int64_t* counts;         // [R] tokens of the step, positive
  const int64_t* read_from;      // [R] first position whose window rows are stored
  const int64_t* wanted_from;    // [R] first position whose streams are read: others are undefined
  const int64_t* output_from;    // [R] first position whose output is read, in this step or later
  const int64_t* write_from;     // [G, R] first position to write
  const int64_t* table_offsets;  // [G, R] where the table begins in block_ids
  const int64_t* table_lengths;  // [G, R]
  const int64_t* table_bases;    // [G, R] index of the first listed block
  const int64_t* block_ids;      // all tables end to end; 0: not stored
  const float* input_rows;       // [T, L * w] rows of the model's input table; null: read from it
  const int64_t* num_drafts;     // [R] last tokens that are guesses, fewer than all; null: none
  int64_t total_drafts;
  // Of a model with recurrent layers: what the drafts would do to their states, [layers, drafts,
  // C + F + H], F decays a row; written by a step, read when they are settled. Null without drafts.
  float* drafts;
  // Of a step with pictures: flat rows [S] whose embeddings stand in soft_values [S, D] as they are.
  int64_t num_soft;
  const int64_t* soft_rows;
  const float* soft_values;
  const int64_t* axes;     // [3, T] number, row and column that turn rows; null: positions do
  // [T] behind the last position that a row sees in layers that sees_pictures; null: its own.
  const int64_t* sees_to;
} vn_step;

// ---- DeepSeek-V4 ----------------------------------------------------------------------------

enum vn_v4_layer_kind { VN_WINDOW = 0, VN_ALL_ENTRIES = 1, VN_CHOSEN_ENTRIES = 2 };

// Hyper-connections around one sublayer, all fp32; m = (2 + n) * n.
typedef struct {
  const float* fn;     // [m, n * D]
  const float* base;   // [m]
  const float* scale;  // [3]: reading, writing, mixing
} vn_hyper;

// A compressor: `ratio` rows of c | s (twice as wide with overlap) become one entry. Of one row c alone
// is there, and no state.
typedef struct {
  const float* ape;   // [ratio, row_width], or null: scores have no bias
  const float* norm;  // [width]
  vn_cache state, entries;
  int32_t row_width, width;
} vn_compressor;

// DeepSeek-V4.1: whose entries and choices a layer attends to. Entries and index keys lie where the
// layer's two compressors say, which may be another layer's caches.
typedef struct {
  int32_t makes_entries, chooses;  // else those of a layer below, and what the last one chose
  int32_t candidates;  // vn_v4_candidates
  int32_t unused;
  vn_matrix key_proj;     // [index_dim, d]: of entries before they are turned
  const float* key_norm;  // [index_dim]
} vn_v4_sharing;

// Later choices are made of the blocks that this one names; this one is made of named blocks.
enum vn_v4_candidates { VN_ALL_CANDIDATES = 0, VN_NAMES_CANDIDATES = 1, VN_WITHIN_CANDIDATES = 2 };

// DeepSeek-V4.1: what the rows of a table of n-grams add to the streams before a layer.
typedef struct {
  vn_matrix wkv;  // [(n + 1) * D, rows of a token * width]: a key for each stream, then a value
  const float *q_weight, *k_weight;  // [n, D]
  int64_t index;                     // which of the step's tables
} vn_ngram_gate;

typedef struct {
  int32_t kind;   // vn_v4_layer_kind
  int32_t ratio;  // tokens of an entry
  int32_t overlap, unused;
  vn_hyper attn_hyper, ffn_hyper;
  const float* attn_norm;  // [D]
  const float* ffn_norm;   // [D]
  // Outputs in order: q latent, kv, then (with entries of its own) the compressor's rows, then (with
  // an indexer) its compressor's rows, if there is one, and its head weights.
  vn_matrix in_proj;
  const float* q_norm;   // [q_lora_rank]
  const float* kv_norm;  // [d]
  vn_matrix wq_b, wo_a, wo_b;
  const float* sinks;  // [H]
  vn_cache window;
  vn_compressor compressor, index_compressor;
  vn_matrix index_wq_b;
  vn_matrix router;                // [E, D]
  const float* router_bias;        // [E], or null: hash-routed
  const int64_t* expert_of_token;  // [vocab, chosen], or null
  vn_matrix gate_up;               // [E + 1, 2 * M, D] as one matrix; the shared expert last
  vn_matrix down;                  // [E + 1, D, M] likewise
  const vn_v4_sharing* sharing;    // or null: entries and choices are the layer's own
  const vn_ngram_gate* ngrams;     // or null
} vn_v4_layer;

typedef struct {
  vn_matrix embed;  // [vocab, D]
  vn_matrix head;   // [vocab, D]
  vn_hyper head_hyper;  // fn [n, n * D], base [n], scale [1]
  const float* norm;    // [D]
  const vn_v4_layer* layers;
  // The MTP block; its layer's caches are addressed by group 0 of its own steps.
  const vn_v4_layer* mtp;  // or null
  vn_matrix mtp_e_proj, mtp_h_proj;
  const float *mtp_enorm, *mtp_hnorm, *mtp_norm;  // [D]
  vn_hyper mtp_head_hyper;
  const float* main_frequencies;      // [rope / 2]
  const float* compress_frequencies;  // [rope / 2]
  int32_t num_layers, vocab_size, hidden_size, num_streams;
  int32_t num_heads, head_dim, rope_dim, q_lora_rank;
  int32_t o_groups, o_lora_rank, window, index_heads;
  int32_t index_dim, index_topk, num_experts, num_chosen;
  int32_t expert_width, sinkhorn_iterations;
  float routed_scale, swiglu_limit, hyper_eps, norm_eps;
  // DeepSeek-V4.1: queries are not normed by head; above the last layer that makes entries (cut, or
  // -1) only what outputs depend on is computed; of a choice so many blocks of entries are named.
  int32_t has_plain_queries, cut, candidate_blocks, candidate_block_size;
  int64_t image_token_id;  // takes nothing from tables; -1: none
} vn_v4_model;

// ---- decoders of grouped-query attention ----------------------------------------------------

enum vn_feed_forward { VN_MLP = 0, VN_EXPERTS = 1 };
// gate | up halves under silu or gelu (by tanh), or gate, up alternating: (up + 1) * gate *
// sigmoid(alpha * gate), clamped; or halves under silu, the gate at most the limit, up within it.
enum vn_activation { VN_SILU = 0, VN_GELU_TANH = 1, VN_CLAMPED = 2, VN_LIMITED_SILU = 3 };

// Routed experts beside a layer's MLP, both over the stream; each part is normed, then their sum.
typedef struct {
  const float* norms[3];       // [D]: after the MLP, before the experts, after them
  const float* router_norm;    // [D]: of the stream on its way to the router
  const float* expert_scales;  // [E]: the chosen ones' shares are multiplied by theirs
  vn_matrix router, gate_up, down;
  int32_t num_experts, num_chosen, inner, unused;
} vn_experts_beside;

// An MLP that every token passes beside routed experts, times the sigmoid of its gate; without the
// gate's data as it is.
typedef struct {
  vn_matrix gate_up, down, gate;  // [2 * M, D], [D, M], [1, D]
  int32_t inner, unused;
} vn_shared_expert;

// Choice among experts by the sigmoids of their logits, or by a softmax over all.
typedef struct {
  const float* bias;  // [E]: takes part in the choice alone
  // Groups of E / num_groups neighbours; the chosen ones' best two scores sum up to most.
  int32_t num_groups, num_chosen_groups;
  float factor;  // of the chosen scores
  int32_t is_softmax;  // then a group's rank is its best score
} vn_sigmoid_router;

// Keys and values of all heads as products of one cached row a token, | latent [L] | shared [S] |: the
// layer has one key head, of L + S values. Rows of its qkv: queries [H * (K + S)], then that row; or in
// the queries' place a latent [rank] of their own, of which they are a product. Shared parts are turned
// by the layer's frequencies, if it has any: pairs of neighbours, kept as two halves.
typedef struct {
  vn_matrix key_maps;    // [H * L, K]: a head's own part of its query, taken to the latent
  vn_matrix value_maps;  // [H * V, L]
  vn_matrix queries;     // [H * (K + S), rank], or without data
  const float* norm;     // [L]
  const float* query_norm;  // [rank], or null
  int32_t latent_dim, shared_dim, key_dim, value_dim, query_rank;
  float eps;  // of the norms
} vn_latents;

// A choice of the keys that a query attends to, by pools of pool_size tokens: those of the num_chosen
// complete pools of the highest scores, and all behind the last complete one. J heads of I values, the
// first of which the layer's frequencies turn, if it has any. The key of a pool of one token is the
// token's: there are no gate, bias and state then.
typedef struct {
  vn_matrix queries;  // [J * I, rank], of the latent of the layer's queries
  vn_matrix inputs;   // [I + J, D]: index keys, then the heads' weights
  vn_matrix gate;     // [I, D]
  const float* place_bias;  // [pool_size, I]
  const float* key_norm;    // [2, I]: weights and bias of the index keys' norm
  vn_cache state, keys;     // rows of open pools [2 * I], keys of complete ones [I]
  int32_t num_heads, width, pool_size, num_chosen;
  int32_t turns_pairs;  // neighbours are turned, and kept as two halves; 0: pairs (i, i + half) are
  int32_t unused;
} vn_pool_indexer;

// A recurrent layer by the gated delta rule, in the place of attention: a state [K, V] for each of H
// heads, of which neighbours share one of G heads of queries and keys. C = 2 * G * K + H * V.
typedef struct {
  // Rows: the convolution's inputs (queries, keys, values) [C], gates [H * V], betas [H], decays
  // [H]. Interleaved: by key head its query, key, values and gates; then its betas and decays.
  // With a decay for each channel: inputs [C], betas [H], then what decays and what gates come of.
  vn_matrix in_proj, output;
  vn_matrix decays, gates;   // of a decay for each channel: [H * K, rank], [H * V, rank]
  const float* conv;         // [W, C], the oldest input's first
  const float* decay_rates;  // [H], positive: e^-(rate * softplus(input + bias)) is left of a state
  const float* dt_bias;      // [H], or [H * K]
  const float* norm;         // [V]
  // The states of all layers, fp32: heads_per_block heads of all layers in each of the first
  // num_head_pieces blocks of a state, then channels_per_block channels in each of the others. Its
  // table counts pieces, num_pieces to a block_size of tokens.
  vn_cache states;
  int32_t number;  // which of the recurrent layers
  int32_t num_channels, num_key_heads, num_heads, key_dim, value_dim, conv_width;
  int32_t is_interleaved, has_sigmoid_gate;
  int32_t heads_per_block, channels_per_block, num_head_pieces, num_pieces, has_channel_decays;
  // Above 0: e^-(bound * sigmoid(rate * (input + bias))) is left instead.
  float decay_bound;
  int32_t unused;
} vn_recurrence;

// Every vector may be null where the family has none; norms' weights are factors.
typedef struct {
  // Before attention, after it, before feed-forward, after it; the 2nd and 4th null if the family
  // does not norm on the way out.
  const float* norms[4];
  // Rows: query heads, key heads, value heads; without value heads where one product makes both,
  // query heads alone where the layer reads another's rows. A gated head has its gate behind it.
  vn_matrix qkv, output;
  const float *qkv_bias, *output_bias;
  const float *q_norm, *k_norm;  // [d]
  const float* sinks;            // [H]
  const float* frequencies;      // [turned / 2], or null: nothing is turned
  vn_cache cache;                // a row: keys of K heads, then values
  float magnitude;               // of turned rows
  int32_t window;                // 0: all
  int32_t feed_forward, activation;
  int32_t num_experts, num_chosen;
  int32_t inner, normalises;
  float alpha, limit;
  vn_matrix router;
  const float* router_bias;
  vn_matrix gate_up, down;  // [2 * M, D] and [D, M], or stacked by expert
  const float *gate_up_bias, *down_bias;
  int32_t num_heads, num_kv_heads, head_dim;
  float scale, soft_cap;
  int32_t has_own_rows;    // else `cache` is another layer's, whose rows are read
  int32_t shared_slot;     // 1 or 2: rows of this step that other layers read too; 0: none do
  int32_t has_value_norm;  // values are normed per head, without weights
  float scalar;            // the layer's output is multiplied by it
  int32_t num_turned;      // first values of a head that are turned
  int32_t has_output_gate;
  int32_t norms_whole_rows;  // q_norm [H * d] and k_norm [K * d] are over all heads together
  // Queries are scaled by 1 + beta * log(1 + floor(position / length)); 0: they are not.
  float position_beta;
  int32_t position_length;
  const vn_recurrence* recurrence;         // or null: attention
  const vn_latents* latents;               // or null: keys and values of their own
  const vn_pool_indexer* indexer;          // or null: queries attend to all keys; see keeps_choice
  const vn_sigmoid_router* scores;         // or null: experts' shares are a softmax
  const vn_shared_expert* shared_expert;  // or null
  const vn_experts_beside* beside;  // or null
  vn_matrix input_gate, input_output;  // [w, D] and [D, w]; without data: the layer adds no input
  const float* input_norm;             // [D]
  vn_hyper attn_hyper, ffn_hyper;      // of a model with several streams
  const int32_t* axis_of_pair;  // [turned / 2]: which of a row's axes turns each pair, or null: 0
  int32_t sees_pictures;        // rows of one picture see each other both ways
  int32_t keeps_choice;         // `indexer` is of a layer below, whose queries' keys are attended to
  // [K, d] powers of two, or null: what keys are divided by where they are stored. Queries are multiplied
  // by them instead, so that scores are the same.
  const float* key_sizes;
  float* noted_queries;  // [tokens, H, d]: where queries are noted as they meet keys, or null
} vn_decoder_layer;

typedef struct {
  vn_matrix embed, head;
  const float* norm;
  const vn_decoder_layer* layers;
  int32_t num_layers, vocab_size, hidden_size;
  int32_t last_owner;  // the last layer with rows of its own: from its queries on wanted rows alone
  // Inputs of layers: (a row of the table * table_scale + norm(projection of the embedding *
  // projection_scale)) / sqrt(2), w values for each layer.
  vn_matrix input_table, input_projection;  // [rows, L * w], [L * w, D]; without data: none
  const float* input_norm;                  // [w]
  int32_t input_width, unused;
  float input_table_scale, input_projection_scale;
  float embedding_scale, final_soft_cap, norm_eps;
  // Residual streams, mixed around each half of a layer; their mean is what is read. 0: one, to which
  // halves are added. Of several, layers have two norms, and nothing beside attention and one MLP or
  // experts.
  int32_t num_streams, sinkhorn_iterations;
  float hyper_eps;
} vn_decoder_model;

// A block that drafts the token after the next one, from a model's normed stream at t:
//   fc [norm(embedding of the token at t + 1) | norm(stream)], one layer, the block's norm
typedef struct {
  // Of one layer, whose caches are addressed by the groups of the block's own steps, and one stream;
  // embedding and head are the model's. All rows are computed.
  vn_decoder_model block;
  vn_matrix fc;                               // [D, 2 * D]
  const float *embedding_norm, *stream_norm;  // [D]
  int32_t skips_first, unused;                // zeros stand for the embedding at position 0
} vn_decoder_drafter;

// ---- sampling -------------------------------------------------------------------------------

// Which rows of logits are drawn from, and how.
typedef struct {
  int64_t num_draws;
  const int64_t* rows;       // ascending, none twice
  const float* temperature;  // positive
  const float* min_p;        // 0 to 1; 0: keeps all
  const int64_t* top_k;      // 1 to vocab; vocab: keeps all
  const float* top_p;        // above 0, to 1; 1: keeps all
  const float* uniforms;     // 0 to below 1
} vn_draws;

// ---- recurrence -----------------------------------------------------------------------------

// The gated delta rule over one request's tokens (csrc/gated_delta.h), for tests and measurements.
typedef struct {
  const float *queries, *keys;  // [T, G, K], of any length
  const float* values;          // [T, H, V]
  const float* logs;            // of decays: [T, H], or [T, H, K] if has_channel_decays
  const float* betas;           // [T, H]
  float* state;                 // [H, K, V], changed
  float* outputs;               // [T, H, V]
  int64_t num_tokens;
  int32_t num_key_heads, num_heads, key_dim, value_dim, has_channel_decays, unused;
} vn_delta_scan;

// ---- functions ------------------------------------------------------------------------------

typedef struct vn_context vn_context;

VN_API int32_t vn_abi_version(void);
// Name of the vector build in use: "amx", "vnni", "avx512", "avx2" or "portable".
VN_API const char* vn_vector_build(const vn_context* context);
// num_threads counts the caller. build: a name as above, or null for the best that runs here.
// Returns null when the build does not run here or memory is short.
VN_API vn_context* vn_create(int32_t num_threads, const char* build);
VN_API void vn_destroy(vn_context* context);
// What went wrong in the last call that did not return VN_OK.
VN_API const char* vn_error(const vn_context* context);

// Embeds the step's tokens and runs all layers; writes the caches. streams: [T, n, D].
VN_API int32_t vn_v4_forward(vn_context*, const vn_v4_model*, const vn_step*, float* streams);
// Runs the MTP block over `streams` [T, n, D] at the step's positions, token_ids being the next
// tokens; writes its cache. output: [T, n, D].
VN_API int32_t vn_v4_forward_mtp(vn_context*, const vn_v4_model*, const vn_step*, const float* streams,
                          float* output);
// Logits [M, vocab] of any M rows of streams [M, n, D]; of the MTP block's if is_mtp.
VN_API int32_t vn_v4_logits(vn_context*, const vn_v4_model*, const float* streams, int64_t num_rows,
                     int32_t is_mtp, float* logits);
// DeepSeek-V4.1: streams are read by the weights of the sublayer before. table_rows: of each table fp32
// [T, rows of a token * width]. stream [T, D]: collapsed by the last weights; logits are of its rows.
VN_API int32_t vn_v41_forward(vn_context*, const vn_v4_model*, const vn_step*,
                              const float* const* table_rows, float* stream);
VN_API int32_t vn_v41_logits(vn_context*, const vn_v4_model*, const float* stream, int64_t num_rows,
                             float* logits);
// The same two for a decoder; its stream is [T, D]. is_normed: the rows have passed the last norm.
VN_API int32_t vn_decoder_forward(vn_context*, const vn_decoder_model*, const vn_step*,
                                  float* stream);
VN_API int32_t vn_decoder_logits(vn_context*, const vn_decoder_model*, const float* stream,
                                 int64_t num_rows, int32_t is_normed, float* logits);
// Rows [M, D] of a decoder's stream behind its last norm, which its head reads: normed.
VN_API int32_t vn_decoder_norm(vn_context*, const vn_decoder_model*, const float* stream,
                               int64_t num_rows, float* normed);
// Runs a block that drafts over `streams` [T, D] at the step's positions, token_ids being the next
// tokens; writes its caches. streams: normed, or what an earlier call returned. output: [T, D], normed.
VN_API int32_t vn_decoder_draft(vn_context*, const vn_decoder_drafter*, const vn_step*,
                                const float* streams, float* output);
// Stores the states behind accepted drafts of the last step. Of `step` only requests, starts, counts
// (accepted tokens, from the first draft on), row_starts (among that step's drafts), tables and the
// drafts are read.
VN_API int32_t vn_decoder_settle(vn_context*, const vn_decoder_model*, const vn_step*);
// One token of each drawn row of logits [num_rows, vocab], which is overwritten. token_ids: one per
// draw. A row that holds no finite logit, or a NaN, gives the vocabulary's last token.
VN_API int32_t vn_sample(vn_context*, float* logits, int64_t num_rows, int64_t vocab_size,
                         const vn_draws*, int64_t* token_ids);
// Sets to -infinity what masks forbid in rows of logits [num_rows, vocab]. rows: one per mask, each at
// most once. masks [num_masks, ceil(vocab / 32)]: bit b of word w allows token 32 w + b.
VN_API int32_t vn_forbid(vn_context*, float* logits, int64_t num_rows, int64_t vocab_size,
                         const int64_t* rows, const uint32_t* masks, int64_t num_masks);
// output [T, rows] = x [T, cols] * matrix^T, for tests and measurements.
VN_API int32_t vn_matmul(vn_context*, const vn_matrix*, const float* x, int64_t num_rows, float* output);
VN_API int32_t vn_gated_delta(vn_context*, const vn_delta_scan*);
// hashes [num_blocks, 32]: each block's SHA-256 over the pickle of (the hash before it, its tokens,
// None); `parent` [32] stands before the first. block_size: 4 to 8,192 tokens.
VN_API int32_t vn_hash_blocks(const uint8_t* parent, const int32_t* token_ids, int64_t num_blocks,
                              int32_t block_size, uint8_t* hashes);
// The codes of a GGUF type's blocks [num_rows, row_bytes], as vn_panels has them. type: its name.
VN_API int32_t vn_pack_blocks(const char* type, const uint8_t* rows, int64_t num_rows,
                              int64_t row_bytes, int32_t num_threads, uint32_t* panels);

#ifdef __cplusplus
}
#endif
#endif
