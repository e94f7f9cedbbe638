// Attention of queries to the cached rows of their requests, by units of keys.
//
// What a row finds is defined by its own keys alone. These fall into units of kUnitKeys by absolute
// position (or by place in the list that an indexer has chosen):
//
//   keys   | 0 .. 255 | 256 .. 511 | 512 .. 600 |
//   unit   a score for each key, one chain along the head; top: the highest; terms e^(score - top),
//          their sum, and the values weighed by them, one chain along the keys
//   row    units joined in their order, then the sink; divided by the sum at the end
//
// Of rows of bytes chains run over the codes as they are: a key's scale is a factor of its score, that of
// its values of its share. Their heads are spread (spread_head()), and so are the queries, and once more
// what a row finds.
//
// A unit in which a row sees no key is no part of it. Neither batch, threads nor chunks enter, so tasks
// are cut for speed alone. Rows of few queries are done unit by unit: requests whose tables name the
// same blocks there meet its keys together, and each key is read once.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "build.h"
#include "kernels.h"
#include "products.h"
#include "rows_ahead.h"
#include "turned_keys.h"

namespace vn {
namespace VN_BUILD {

constexpr int64_t kUnitKeys = 256;
// Queries of a request in a step that are done unit by unit, at most; more are done row by row.
constexpr int64_t kFewQueries = 8;
// Heads of queries that meet a unit's keys together: their scores stay in the second-level cache, as
// so many bytes of the unit's keys, and as many of its values, do.
constexpr int64_t kQueryHeads = 64, kUnitBytes = 200 << 10;
// Values of units that wait to be joined; further rows keep none.
constexpr int64_t kMaxParts = 1 << 24;
constexpr int64_t kTasksPerThread = 4;
// Tasks of a thread that lists of units are cut into: the last of them is what a thread waits for.
constexpr int64_t kSlicesPerThread = 8;
// What it takes to join a unit to those before it, beside its values, in multiply-adds.
constexpr int64_t kJoinWork = 300;
// Keys of a part of a unit, and the fewer where so many would not stay in the first-level cache, turned.
constexpr int64_t kPartKeys = 32, kWidePartKeys = 16, kTurnedBytes = 16 << 10;
// Keys whose values are mixed before sums rest in memory.
constexpr int64_t kMixKeys = 64;

// What a row has found in some of its keys: the highest score and the sum of e^(score - top).
struct Found {
  float top = -INFINITY, total = 0.0f;

  // A sum has a term of 1, or is no number.
  bool is_empty() const { return total == 0.0f; }
};

// Adds to what a row has found what it finds in the keys behind these.
inline void join(Found& own, float* values, const Found& next, const float* next_values,
                 int64_t width) {
  if (next.is_empty()) return;
  if (own.is_empty()) {
    own = next;
    std::memcpy(values, next_values, sizeof(float) * width);
    return;
  }
  const bool rises = !(next.top <= own.top);
  const float factor = std::exp(rises ? own.top - next.top : next.top - own.top);
  const float* fixed = rises ? next_values : values;
  const float* scaled = rises ? values : next_values;
  const Vec share = fill(factor);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    store(values + i, fma(share, load(scaled + i), load(fixed + i)));
  }
  if (const int rest = static_cast<int>(width - i); rest > 0) {
    store_some(values + i, fma(share, load_some(scaled + i, rest), load_some(fixed + i, rest)), rest);
  }
  if (rises) {
    own.total = own.total * factor + next.total;
    own.top = next.top;
  } else {
    own.total = own.total + factor * next.total;
  }
}

// Ends a row: its sink's share is part of the sum that its values are divided by.
inline void finish_row(Found own, float* values, const float* sink, int64_t width) {
  float factor = 1.0f, total = own.total;
  if (sink != nullptr && own.top < *sink) {
    factor = std::exp(own.top - *sink);
    total = total * factor + 1.0f;
  } else if (sink != nullptr) {
    total += std::exp(*sink - own.top);
  }
  const Vec scale = fill(factor * (1.0f / total));
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(values + i, mul(load(values + i), scale));
  if (const int rest = static_cast<int>(width - i); rest > 0) {
    store_some(values + i, mul(load_some(values + i, rest), scale), rest);
  }
}

// Where a head's keys lie in a row, its values, and how many values of each are read.
struct HeadColumns {
  int64_t keys, values, width;
};

// The rows of some keys: stored ones, then those of the step, which are floats, or bytes if those are.
class KeyRows {
 public:
  void clear(const vn_cache& cache) {
    cache_ = &cache;
    stored_.clear();
    own_.clear();
  }
  void add_stored(int64_t offset) {
    stored_.push_back(static_cast<const char*>(cache_->data) + offset * value_bytes(cache_->kind));
  }
  void add_own(const char* row) { own_.push_back(row); }
  int64_t size() const { return static_cast<int64_t>(stored_.size() + own_.size()); }

  // What lies in memory of keys begin .. end - 1, and of their values.
  RowsAhead::Pieces find_pieces(int64_t begin, int64_t end, const HeadColumns& columns) const {
    const int64_t num_stored = static_cast<int64_t>(stored_.size());
    begin = std::min(begin, num_stored);
    end = std::min(end, num_stored);
    const int64_t size = value_bytes(cache_->kind);
    const bool has_values = columns.values != columns.keys;
    return {stored_.data() + begin, end - begin, columns.keys * size,
            has_values ? columns.values * size : 0, columns.width * size,
            cache_->kind == VN_INT8 ? scale_offset(*cache_, 0) : 0};
  }

  // Multiplies values of keys begin .. begin + count - 1 of `lot` rows by the keys' scales of a head,
  // where rows have such.
  void scale(int64_t begin, int64_t count, int64_t head, int64_t lot, float* const* rows) {
    if (cache_->kind != VN_INT8) return;
    const int64_t num_stored = static_cast<int64_t>(stored_.size()), at = scale_offset(*cache_, head);
    scales_.resize(count);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t key = begin + k;
      const char* row = key < num_stored ? stored_[key] : own_[key - num_stored];
      std::memcpy(&scales_[k], row + at, sizeof(float));
    }
    for (int64_t r = 0; r < lot; ++r) {
      float* own = rows[r] + begin;
      for (int64_t k = 0; k < count; ++k) own[k] *= scales_[k];
    }
  }

  // Calls body(first key, number of keys, list) for parts of at most `size` keys of one type;
  // list(column) points at the values of each from there on.
  template <typename Body>
  void each_part(int64_t size, Body&& body) {
    list_.resize(size);
    const int64_t first_own = static_cast<int64_t>(stored_.size());
    if (cache_->kind == VN_INT8) {
      each_part_of<int8_t>(stored_, 0, size, body);
      each_part_of<int8_t>(own_, first_own, size, body);
      return;
    }
    if (cache_->kind == VN_F32) {
      each_part_of<float>(stored_, 0, size, body);
    } else if (cache_->kind == VN_F16) {
      each_part_of<Half>(stored_, 0, size, body);
    } else {
      each_part_of<Brain>(stored_, 0, size, body);
    }
    each_part_of<float>(own_, first_own, size, body);
  }

 private:
  template <typename T, typename Body>
  void each_part_of(const std::vector<const char*>& rows, int64_t first, int64_t size,
                    Body&& body) {
    const int64_t count = static_cast<int64_t>(rows.size());
    for (int64_t begin = 0; begin < count; begin += size) {
      const int64_t keys = std::min(size, count - begin);
      body(first + begin, keys, [&](int64_t column) {
        const int64_t skip = column * static_cast<int64_t>(sizeof(T));
        for (int64_t k = 0; k < keys; ++k) list_[k] = rows[begin + k] + skip;
        return reinterpret_cast<const T* const*>(list_.data());
      });
    }
  }

  const vn_cache* cache_ = nullptr;
  std::vector<const char*> stored_, own_, list_;
  std::vector<float> scales_;
};

class UnitAttention {
 public:
  // Heads of queries, one at every `stride` of a row, rows `row_stride` apart.
  struct Queries {
    const float* data;
    int64_t row_stride, stride;
  };

  // The step's rows of keys, then values, as a later step reads them: floats, or of a cache of bytes such
  // rows as it has; one at every `stride` bytes.
  struct OwnRows {
    const char* data;
    int64_t stride;
  };

  // Consecutive queries of a request: `first` of the step's tokens, `row` of the layer's rows.
  struct Span {
    int64_t request, first, row, count;

    bool operator==(const Span& other) const {
      return request == other.request && first == other.first && row == other.row &&
             count == other.count;
    }
  };

  UnitAttention(ThreadPool& pool, Workspace& space, const vn_step& step, const Pages& pages,
                MissingRow& missing)
      : pool_(pool), space_(space), step_(step), pages_(pages), missing_(missing) {}

  // attended [rows, H, d]: what the queries of each request's span find. chosen: by row the keys
  // that it sees, none: all up to its own; or null.
  void attend(const vn_decoder_layer& layer, const std::vector<Span>& requests, Queries queries,
              OwnRows own_rows, const std::vector<std::vector<int64_t>>* chosen, float* attended) {
    layer_ = &layer;
    queries_ = queries;
    own_rows_ = own_rows;
    attended_ = attended;
    value_width_ = layer.latents != nullptr ? layer.latents->latent_dim : layer.head_dim;
    group_ = layer.num_heads / layer.num_kv_heads;
    plan_ = &find_plan(requests, chosen);
    run_all();
  }

 private:
  // Queries that attend to the same keys up to their own; one alone if it has chosen its keys.
  struct Keys {
    Span span;
    const std::vector<int64_t>* list;
    int64_t from, end;  // first key that one of them sees, and behind the last
    // Of those done unit by unit: the first unit, how many, and where their parts lie.
    int64_t unit, num_units, part;
  };
  // Rows done one after another, by the heads from one on.
  struct Deep {
    Keys keys;
    int64_t head, num_heads;
  };
  // Members of a plan that meet a unit's keys together, by the key heads from one on.
  struct Item {
    int64_t unit, member, num_members, kv_head, num_kv_heads;
  };
  // Keys that are met next; none: null.
  struct Ahead {
    const KeyRows* rows;
    HeadColumns columns;
  };
  // What is to be done in a step. Layers of one shape do the same.
  using Shape = std::array<int64_t, 10>;
  struct Plan {
    Shape shape;  // all of a layer that enters
    std::vector<Span> requests;
    // What the pairs of queries and keys come to, in multiply-adds, and the parts of `few`.
    int64_t work, num_parts;
    std::vector<Keys> few;
    std::vector<int32_t> members;
    std::vector<Deep> deep;
    std::vector<Item> items;
  };
  // A query at a unit's keys: low .. high - 1 are those that it sees.
  struct Query {
    int64_t row, low, high;
    Found* found;   // by head
    float* values;  // by head, `stride` apart
    int64_t stride;
  };

  int64_t find_first(int64_t request, int64_t position) const {
    if (layer_->window == 0) return 0;
    const int64_t first = std::max<int64_t>(0, position - layer_->window + 1);
    return std::max(first, step_.read_from[request]);
  }

  // Behind the last key that a row of the step sees: its own, or that of its picture, which ends in
  // the step.
  int64_t find_end(int64_t request, int64_t position) const {
    if (layer_->sees_pictures == 0 || step_.sees_to == nullptr) return position + 1;
    return step_.sees_to[step_.row_starts[request] + position - step_.starts[request]];
  }

  // Positions from here on are the step's own rows. Those that it does not write are taken as they
  // are stored: its own may lack what they depend on.
  int64_t find_written(int64_t request) const {
    return std::max(step_.starts[request],
                    step_.write_from[layer_->cache.group * step_.num_requests + request]);
  }

  Keys find_keys(const Span& span, const std::vector<std::vector<int64_t>>* chosen) const {
    if (chosen != nullptr && !(*chosen)[span.row].empty()) {
      const std::vector<int64_t>& list = (*chosen)[span.row];
      return {span, &list, 0, static_cast<int64_t>(list.size()), 0, 0, 0};
    }
    const int64_t position = step_.starts[span.request] + span.first;
    const int64_t end = find_end(span.request, position + span.count - 1);
    return {span, nullptr, find_first(span.request, position), end, 0, 0, 0};
  }

  // Whether the first of some keys is not there, which is noted: the step fails, and what is read of
  // the others would be for nothing, however many they are.
  bool misses_first(const Keys& keys) {
    const int64_t request = keys.span.request;
    if (keys.list != nullptr || keys.from >= find_written(request)) return false;
    if (pages_.find_block(layer_->cache, request, keys.from) != 0) return false;
    missing_.note(layer_->cache, request, keys.from);
    return true;
  }

  // Rows of a request from `first` on, at most so many, that attend to the same keys up to their own.
  static int64_t count_together(const std::vector<std::vector<int64_t>>* chosen, int64_t row,
                                int64_t most) {
    if (chosen == nullptr) return most;
    for (int64_t i = 0; i < most; ++i) {
      if (!(*chosen)[row + i].empty()) return std::max<int64_t>(i, 1);
    }
    return most;
  }

  // The plan for some requests' rows, made by the first layer of its shape; where keys are chosen, by each.
  const Plan& find_plan(const std::vector<Span>& requests,
                        const std::vector<std::vector<int64_t>>* chosen) {
    const vn_cache& cache = layer_->cache;
    const bool has_latents = layer_->latents != nullptr;
    const Shape shape = {cache.group,           cache.block_size, cache.kind,      layer_->num_heads,
                         layer_->num_kv_heads,  layer_->head_dim, layer_->window,  value_width_,
                         layer_->sees_pictures, has_latents};
    const auto serves = [&](const Plan& own) { return own.shape == shape && own.requests == requests; };
    if (chosen == nullptr) {
      const auto found = std::find_if(plans_.begin(), plans_.end(), serves);
      if (found != plans_.end()) return *found;
    }
    Plan plan = {shape, requests, 0, 0, {}, {}, {}, {}};
    set_out(plan, chosen);
    list_items(plan);
    if (chosen != nullptr) return chosen_plan_ = std::move(plan);
    plans_.push_back(std::move(plan));
    return plans_.back();
  }

  // Splits the spans into those done unit by unit and those done row by row.
  void set_out(Plan& plan, const std::vector<std::vector<int64_t>>* chosen) {
    const std::vector<Span>& requests = plan.requests;
    const int64_t heads = layer_->num_heads;
    int64_t total = 0;
    for (const Span& span : requests) total += span.count;
    // Where all heads share their keys, some of them are a task of their own if rows are few.
    const int64_t threads = pool_.num_threads();
    const bool splits = layer_->latents != nullptr && total < kTasksPerThread * threads;
    const int64_t deep_heads = splits ? ceil_div(heads, threads) : group_;
    const int64_t share = ceil_div(total * ceil_div(heads, deep_heads), kTasksPerThread * threads);
    for (const Span& span : requests) {
      const bool is_few = span.count <= kFewQueries;
      const int64_t most = is_few ? span.count
                                  : std::max<int64_t>(1, std::min(share, kQueryHeads / deep_heads));
      for (int64_t done = 0, size = 0; done < span.count; done += size) {
        size = count_together(chosen, span.row + done, std::min(most, span.count - done));
        Keys keys = find_keys({span.request, span.first + done, span.row + done, size}, chosen);
        if (misses_first(keys)) continue;
        plan.work += 2 * size * heads * layer_->head_dim * (keys.end - keys.from);
        keys.unit = keys.from / kUnitKeys;
        keys.num_units = ceil_div(keys.end, kUnitKeys) - keys.unit;
        const int64_t parts = keys.num_units * size * heads;
        if (is_few && (plan.num_parts + parts) * value_width_ <= kMaxParts) {
          keys.part = plan.num_parts;
          plan.num_parts += parts;
          plan.few.push_back(keys);
          continue;
        }
        for (int64_t head = 0; head < heads; head += deep_heads) {
          plan.deep.push_back({keys, head, std::min(deep_heads, heads - head)});
        }
      }
    }
  }

  // Whether two spans read the same blocks, and nothing else, in a unit.
  bool reads_same(const Keys& a, const Keys& b, int64_t unit) const {
    const int64_t end = (unit + 1) * kUnitKeys, from = std::max(unit * kUnitKeys, a.from);
    if (a.list != nullptr || b.list != nullptr || from != std::max(unit * kUnitKeys, b.from)) {
      return false;
    }
    const int64_t ra = a.span.request, rb = b.span.request;
    if (end > std::min(find_written(ra), find_written(rb))) return false;
    if (std::min(end, a.end) != std::min(end, b.end)) return false;
    const vn_cache& cache = layer_->cache;
    for (int64_t p = from; p < end; p = (p / cache.block_size + 1) * cache.block_size) {
      if (pages_.find_block(cache, ra, p) != pages_.find_block(cache, rb, p)) return false;
    }
    return true;
  }

  // Lists what is done unit by unit, in the order of units.
  void list_items(Plan& plan) {
    const std::vector<Keys>& few = plan.few;
    int64_t begin = INT64_MAX, end = 0;
    for (const Keys& keys : few) {
      begin = std::min(begin, keys.unit);
      end = std::max(end, keys.unit + keys.num_units);
    }
    const int64_t kv_heads = layer_->num_kv_heads;
    const int64_t key_bytes = kUnitKeys * layer_->head_dim * value_bytes(layer_->cache.kind);
    const int64_t fewest_tasks = pool_.num_threads() == 1 ? 1 : kTasksPerThread * pool_.num_threads();
    int64_t num_units = 0;
    for (const Keys& keys : few) num_units += keys.num_units;
    const int64_t wanted = ceil_div(fewest_tasks, std::max<int64_t>(1, num_units));
    for (int64_t unit = begin; unit < end; ++unit) {
      // Those that meet: the first span of each lot stands for it.
      std::vector<std::vector<int32_t>> lots;
      std::vector<int64_t> lot_rows;
      for (size_t s = 0; s < few.size(); ++s) {
        const Keys& keys = few[s];
        if (unit < keys.unit || unit >= keys.unit + keys.num_units) continue;
        size_t lot = 0;
        while (lot < lots.size() &&
               !((lot_rows[lot] + keys.span.count) * group_ <= kQueryHeads &&
                 reads_same(few[lots[lot][0]], keys, unit))) {
          ++lot;
        }
        if (lot == lots.size()) {
          lots.emplace_back();
          lot_rows.push_back(0);
        }
        lots[lot].push_back(static_cast<int32_t>(s));
        lot_rows[lot] += keys.span.count;
      }
      for (size_t lot = 0; lot < lots.size(); ++lot) {
        const int64_t first = static_cast<int64_t>(plan.members.size());
        plan.members.insert(plan.members.end(), lots[lot].begin(), lots[lot].end());
        const int64_t together = std::clamp<int64_t>(
            std::min({kQueryHeads / (group_ * lot_rows[lot]), kUnitBytes / key_bytes,
                      ceil_div(kv_heads, wanted)}),
            1, kv_heads);
        for (int64_t head = 0; head < kv_heads; head += together) {
          plan.items.push_back({unit, first, static_cast<int64_t>(lots[lot].size()), head,
                                std::min(together, kv_heads - head)});
        }
      }
    }
  }

  void run_all() {
    found_.resize(plan_->num_parts);
    parts_ = space_.parts.take(plan_->num_parts * value_width_);
    const int64_t num_items = static_cast<int64_t>(plan_->items.size());
    const int64_t num_deep = static_cast<int64_t>(plan_->deep.size());
    const bool is_brief = is_short(pool_, plan_->work);
    const int64_t threads = is_brief ? 1 : pool_.num_threads();
    const int64_t slices = std::min(num_items, threads == 1 ? 1 : kSlicesPerThread * threads);
    const auto run_task = [&](int64_t i) {
      if (i < num_deep) {
        attend_deep(plan_->deep[i]);
        return;
      }
      const int64_t slice = i - num_deep;
      attend_items(num_items * slice / slices, num_items * (slice + 1) / slices);
    };
    run(is_brief, num_deep + slices, run_task);
    const int64_t heads = layer_->num_heads;
    const bool is_quick = is_short(pool_, plan_->num_parts * (kJoinWork + 4 * value_width_));
    run(is_quick, static_cast<int64_t>(plan_->few.size()) * heads,
        [&](int64_t i) { join_units(plan_->few[i / heads], i % heads); });
  }

  template <typename Body>
  void run(bool is_brief, int64_t count, Body&& body) {
    if (is_brief) {
      for (int64_t i = 0; i < count; ++i) body(i);
    } else {
      pool_.run(count, body);
    }
  }

  float* place_of(int64_t row, int64_t head) const {
    return attended_ + (row * layer_->num_heads + head) * layer_->head_dim;
  }

  const float* sink_of(int64_t head) const {
    return layer_->sinks == nullptr ? nullptr : layer_->sinks + head;
  }

  void join_units(const Keys& keys, int64_t head) {
    const int64_t rows = keys.span.count, heads = layer_->num_heads;
    for (int64_t i = 0; i < rows; ++i) {
      float* values = place_of(keys.span.row + i, head);
      Found own;
      for (int64_t u = 0; u < keys.num_units; ++u) {
        const int64_t part = keys.part + (u * rows + i) * heads + head;
        if (keys.num_units == 1) {
          own = found_[part];
        } else {
          join(own, values, found_[part], parts_ + part * value_width_, value_width_);
        }
      }
      finish(own, values, head);
    }
  }

  void finish(const Found& own, float* values, int64_t head) const {
    finish_row(own, values, sink_of(head), value_width_);
    if (layer_->cache.kind == VN_INT8) meet_spread(values, value_width_);
  }

  // What of a unit a row sees, counted from the unit's first key that is read.
  Query see(const Keys& keys, int64_t i, int64_t begin, int64_t end) const {
    int64_t low = keys.from, high = keys.end;
    if (keys.list == nullptr) {
      const int64_t position = step_.starts[keys.span.request] + keys.span.first + i;
      low = find_first(keys.span.request, position);
      high = find_end(keys.span.request, position);
    }
    low = std::max(low, begin) - begin;
    high = std::min(high, end) - begin;
    return {keys.span.row + i, low, high, nullptr, nullptr, 0};
  }

  // Each item's keys are listed while the one before is done, which has the first of them near.
  void attend_items(int64_t first, int64_t end) {
    thread_local KeyRows lists[2];
    collect(plan_->items[first], lists[0]);
    for (int64_t i = first; i < end; ++i) {
      KeyRows& rows = lists[(i - first) % 2];
      Ahead ahead = {nullptr, {}};
      if (i + 1 < end) {
        KeyRows& next = lists[(i + 1 - first) % 2];
        collect(plan_->items[i + 1], next);
        const Item& after = plan_->items[i + 1];
        ahead = {&next, find_columns(after.kv_head, after.num_kv_heads)};
      }
      attend_item(plan_->items[i], rows, ahead);
    }
  }

  void collect(const Item& item, KeyRows& rows) {
    const Keys& first = plan_->few[plan_->members[item.member]];
    collect(first, std::max(item.unit * kUnitKeys, first.from),
            std::min((item.unit + 1) * kUnitKeys, first.end), rows);
  }

  // Those of some key heads. Of a latent row keys are products as values are.
  HeadColumns find_columns(int64_t kv_head, int64_t num_kv_heads) const {
    const int64_t d = layer_->head_dim;
    if (layer_->latents != nullptr) return {0, 0, d};
    return {kv_head * d, (layer_->num_kv_heads + kv_head) * d, num_kv_heads * d};
  }

  void attend_item(const Item& item, KeyRows& rows, const Ahead& ahead) {
    thread_local std::vector<Query> queries;
    queries.clear();
    const Keys& first = plan_->few[plan_->members[item.member]];
    const int64_t begin = std::max(item.unit * kUnitKeys, first.from);
    const int64_t end = std::min((item.unit + 1) * kUnitKeys, first.end);
    const int64_t heads = layer_->num_heads, head = item.kv_head * group_;
    for (int64_t m = 0; m < item.num_members; ++m) {
      const Keys& keys = plan_->few[plan_->members[item.member + m]];
      for (int64_t i = 0; i < keys.span.count; ++i) {
        Query query = see(keys, i, begin, end);
        const int64_t part =
            keys.part + ((item.unit - keys.unit) * keys.span.count + i) * heads + head;
        query.found = found_.data() + part;
        query.values = keys.num_units == 1 ? place_of(query.row, head) : parts_ + part * value_width_;
        query.stride = keys.num_units == 1 ? layer_->head_dim : value_width_;
        queries.push_back(query);
      }
    }
    attend_unit(queries, rows, head, item.num_kv_heads * group_, ahead);
  }

  void attend_deep(const Deep& task) {
    thread_local std::vector<Query> queries;
    thread_local std::vector<Found> found, whole;
    thread_local Floats values;
    thread_local KeyRows rows;
    const Keys& keys = task.keys;
    const int64_t count = keys.span.count, total = count * task.num_heads;
    found.assign(total, {});
    whole.assign(total, {});
    if (static_cast<int64_t>(values.size()) < total * value_width_) {
      values.resize(total * value_width_);
    }
    for (int64_t unit = keys.unit; unit < keys.unit + keys.num_units; ++unit) {
      const int64_t begin = std::max(unit * kUnitKeys, keys.from);
      const int64_t end = std::min((unit + 1) * kUnitKeys, keys.end);
      const bool is_first = unit == keys.unit;
      queries.clear();
      for (int64_t i = 0; i < count; ++i) {
        Query query = see(keys, i, begin, end);
        const int64_t at = i * task.num_heads;
        query.found = (is_first ? whole : found).data() + at;
        query.values =
            is_first ? place_of(query.row, task.head) : values.data() + at * value_width_;
        query.stride = is_first ? layer_->head_dim : value_width_;
        queries.push_back(query);
      }
      collect(keys, begin, end, rows);
      attend_unit(queries, rows, task.head, task.num_heads, {nullptr, {}});
      if (is_first) continue;
      for (int64_t i = 0; i < total; ++i) {
        join(whole[i], place_of(keys.span.row + i / task.num_heads, task.head + i % task.num_heads),
             found[i], values.data() + i * value_width_, value_width_);
      }
    }
    for (int64_t i = 0; i < total; ++i) {
      const int64_t head = task.head + i % task.num_heads;
      finish(whole[i], place_of(keys.span.row + i / task.num_heads, head), head);
    }
  }

  // Lists the rows of keys begin .. end - 1.
  void collect(const Keys& keys, int64_t begin, int64_t end, KeyRows& rows) {
    rows.clear(layer_->cache);
    if (keys.list == nullptr) {
      add_positions(keys.span.request, begin, end, rows);
      return;
    }
    for (int64_t k = begin; k < end;) {
      const int64_t first = (*keys.list)[k];
      int64_t behind = first;
      for (; k < end && (*keys.list)[k] == behind; ++k) ++behind;
      add_positions(keys.span.request, first, behind, rows);
    }
  }

  void add_positions(int64_t request, int64_t from, int64_t end, KeyRows& rows) {
    const int64_t written = find_written(request);
    pages_.each_row(layer_->cache, request, from, std::min(written, end),
                    [&](int64_t position, int64_t offset) {
                      if (offset < 0) {
                        missing_.note(layer_->cache, request, position);
                        offset = 0;
                      }
                      rows.add_stored(offset);
                    });
    for (int64_t p = std::max(from, written); p < end; ++p) {
      const int64_t row = step_.row_starts[request] + p - step_.starts[request];
      rows.add_own(own_rows_.data + row * own_rows_.stride);
    }
  }

  // Lets queries meet the keys of a unit, by `num_heads` heads from one on: whole groups, or some
  // heads of one group.
  void attend_unit(const std::vector<Query>& queries, KeyRows& rows, int64_t head,
                   int64_t num_heads, const Ahead& ahead) {
    thread_local Floats scores, scale;
    thread_local std::vector<const float*> x, weights;
    thread_local std::vector<float*> y, out;
    const int64_t d = layer_->head_dim, count = rows.size();
    const int64_t num_queries = static_cast<int64_t>(queries.size());
    const int64_t total = num_queries * num_heads;
    // Whole vectors of scores are written, and what is too much by the next part again.
    const int64_t stride = kUnitKeys + kLanes;
    if (static_cast<int64_t>(scores.size()) < total * stride) scores.resize(total * stride);
    scale.assign(total, 1.0f);
    x.resize(total);
    weights.resize(total);
    y.resize(total);
    out.resize(total);
    for (int64_t i = 0; i < total; ++i) {
      const Query& query = queries[i % num_queries];
      const int64_t own = i / num_queries;
      x[i] = queries_.data + query.row * queries_.row_stride + (head + own) * queries_.stride;
      y[i] = scores.data() + i * stride;
      out[i] = query.values + own * query.stride;
    }
    const int64_t kv_head = head / group_, num_kv_heads = ceil_div(num_heads, group_);
    const int64_t lot = total / num_kv_heads;
    const HeadColumns columns = find_columns(kv_head, num_kv_heads);
    const int64_t kept_bytes = value_bytes(layer_->cache.kind);
    const bool widens = kept_bytes != 2 || lot > kUnwidenedRows;
    const int64_t turned_bytes = widens ? sizeof(float) : kept_bytes;
    const int64_t size = kPartKeys * d * turned_bytes <= kTurnedBytes ? kPartKeys : kWidePartKeys;
    const int64_t key_work = d * num_kv_heads / kTurnedAtOnce + d * total / kLanes;
    RowsAhead near;
    near.start(rows.find_pieces(0, size, columns), 0);
    rows.each_part(size, [&](int64_t begin, int64_t keys, auto&& list) {
      near.read_rest();
      const int64_t next = begin + keys;
      if (next < count || ahead.rows == nullptr) {
        near.start(rows.find_pieces(next, next + size, columns), keys * key_work);
      } else {
        near.start(ahead.rows->find_pieces(0, size, ahead.columns), keys * key_work);
      }
      for (int64_t h = 0; h < num_kv_heads; ++h) {
        const auto own = list(columns.keys + h * d);
        const auto score = [&](auto* turned) {
          turn_keys(own, keys, d, turned, near);
          score_keys(x.data() + h * lot, lot, turned, keys, d, y.data() + h * lot, begin, near);
        };
        using Value = std::remove_cv_t<std::remove_reference_t<decltype(**own)>>;
        if constexpr (sizeof(Value) == 2) {
          widens ? score(take_turned<float>(size * d)) : score(take_turned<Value>(size * d));
        } else {
          score(take_turned<float>(size * d));
        }
        rows.scale(begin, keys, kv_head + h, lot, y.data() + h * lot);
      }
    });
    for (int64_t i = 0; i < total; ++i) {
      const Query& query = queries[i % num_queries];
      query.found[i / num_queries] = weigh(y[i], query.low, query.high, count);
    }
    near.read_rest();
    rows.each_part(kMixKeys, [&](int64_t begin, int64_t keys, auto&& list) {
      for (int64_t i = 0; i < total; ++i) weights[i] = y[i] + begin;
      for (int64_t h = 0; h < num_kv_heads; ++h) {
        rows.scale(begin, keys, layer_->num_kv_heads + kv_head + h, lot, y.data() + h * lot);
        const MixPart own = {list(columns.values + h * d), keys, begin == 0, begin + keys == count};
        mix_all(lot, weights.data() + h * lot, own, value_width_, scale.data(),
                out.data() + h * lot);
      }
    });
  }

  // Turns the scores of keys low .. high - 1 into terms of a softmax and hides the others.
  Found weigh(float* scores, int64_t low, int64_t high, int64_t count) const {
    if (low >= high) {
      std::fill_n(scores, count, 0.0f);
      return {};
    }
    // Not read through the layer: it might lie where scores are stored, for all that compilers know.
    const float factor = layer_->scale, cap = layer_->soft_cap;
    for (int64_t k = low; k < high; ++k) scores[k] *= factor;
    if (cap != 0.0f) {
      for (int64_t k = low; k < high; ++k) scores[k] = cap * std::tanh(scores[k] / cap);
    }
    const float top = find_highest(scores + low, high - low, -INFINITY);
    const float total = exp_terms(scores + low, high - low, top);
    for (int64_t k = 0; k < low; ++k) scores[k] = 0.0f;
    for (int64_t k = high; k < count; ++k) scores[k] = 0.0f;
    return {top, total};
  }

  ThreadPool& pool_;
  Workspace& space_;
  const vn_step& step_;
  const Pages& pages_;
  MissingRow& missing_;
  const vn_decoder_layer* layer_ = nullptr;
  Queries queries_ = {};
  OwnRows own_rows_ = {};
  float* attended_ = nullptr;
  int64_t value_width_ = 0, group_ = 1;
  std::vector<Plan> plans_;
  Plan chosen_plan_ = {};
  const Plan* plan_ = nullptr;
  std::vector<Found> found_;
  float* parts_ = nullptr;
};

}  // namespace VN_BUILD
}  // namespace vn
