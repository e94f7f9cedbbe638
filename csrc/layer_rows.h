// Which rows of a step the layers of DeepSeek-V4 and V4.1 compute. Windows are W rows, of L layers.
//
// Rows that are computed again because windows were lost, from r on, without any window before them:
// in each layer W - 1 more of them are wrong, and nothing that is right depends on these.
//
//   layer 0     |=============================|   from r + layer * (W - 1) on
//   layer 1        |==========================|
//   L - 1                            |========|
//
// In DeepSeek-V4.1, above the last layer that makes entries (the cut), rows before the first one whose
// output is read, at q, are of use only to rows of their window in the next layer.
//
//   0 .. cut-1  |==========================================|
//   cut         |entries alone . . . . . . |===============|
//   cut + 1                                     |==========|   from q - (L - layer) * (W - 1) on
//   L - 1                                            |=====|   q, and the window before it
#pragma once

#include <memory>
#include <vector>

#include "build.h"
#include "narrow_step.h"
#include "v4_attention.h"
#include "wanted_rows.h"

namespace vn {
namespace VN_BUILD {

// The rows of a whole step, or what is left of them.
class LayerRows {
 public:
  // cut: -1: all rows are read.
  LayerRows(ThreadPool& pool, Workspace& space, const vn_v4_model& m, const vn_step& step,
            int32_t cut)
      : m_(m),
        whole_(step),
        cut_(cut),
        all_(list_rows(step.num_tokens)),
        dropped_(step.num_requests, 0),
        whole_attention_(pool, space, m, step, choices_) {}

  const vn_step& step() const { return narrow_ ? narrow_->step() : whole_; }
  // Flat rows of the whole step, ascending.
  const std::vector<int64_t>& rows() const { return narrow_ ? narrow_->rows() : all_; }
  V4Attention& attention() { return narrow_ ? *narrow_attention_ : whole_attention_; }
  bool is_narrow() const { return narrow_ != nullptr; }

  // Whether fewer rows are of use in a layer than were in the one before.
  bool can_narrow(int32_t layer) const {
    return count_useless(whole_, layer, is_above(layer)) != dropped_;
  }

  // Leaves the others out. streams [T, n, D], and lag [T, n] if there is one, move to the front.
  void narrow(int32_t layer, float* streams, float* lag) {
    dropped_ = count_useless(whole_, layer, is_above(layer));
    auto next = std::make_unique<NarrowStep>(whole_, dropped_);
    std::vector<int64_t> places;
    size_t at = 0;
    for (const int64_t row : next->rows()) {
      while (rows()[at] != row) ++at;
      places.push_back(static_cast<int64_t>(at));
    }
    const int64_t n = m_.num_streams;
    gather_rows(places, n * m_.hidden_size, streams);
    if (lag != nullptr) gather_rows(places, n, lag);
    if (narrow_attention_ != nullptr) narrow_attention_->check();
    narrow_attention_ = nullptr;
    narrow_ = std::move(next);
    narrow_attention_ =
        std::make_unique<V4Attention>(whole_attention_, narrow_->step(), narrow_->rows());
  }

  // Rows of the step whose streams are read behind a layer, ascending.
  std::vector<int64_t> find_wanted_behind(int32_t layer) const {
    // Of all rows that reach the cut entries are made.
    const std::vector<int64_t> useless = count_useless(step(), layer + 1, is_above(layer));
    std::vector<int64_t> rows;
    for (int64_t r = 0; r < step().num_requests; ++r) {
      int64_t i = useless[r];
      if (layer + 1 == m_.num_layers) i = std::max(i, count_unwanted(step(), r));
      for (; i < step().counts[r]; ++i) rows.push_back(step().row_starts[r] + i);
    }
    return rows;
  }

  // Raises what went wrong in any thread.
  void check() const {
    whole_attention_.check();
    if (narrow_attention_ != nullptr) narrow_attention_->check();
  }

 private:
  bool is_above(int32_t layer) const { return cut_ >= 0 && layer >= cut_; }

  // Of each request how many of its first rows are of no use in a layer, or behind the last.
  std::vector<int64_t> count_useless(const vn_step& step, int32_t layer, bool is_lazy) const {
    const int64_t reach = m_.window - 1;
    std::vector<int64_t> counts;
    for (int64_t r = 0; r < step.num_requests; ++r) {
      int64_t first = 0;
      if (step.read_from[r] > 0) first = step.read_from[r] + layer * reach;
      if (is_lazy) {
        first = std::max(first, step.output_from[r] - (m_.num_layers - layer) * reach);
      }
      counts.push_back(std::clamp<int64_t>(first - step.starts[r], 0, step.counts[r]));
    }
    return counts;
  }

  const vn_v4_model& m_;
  const vn_step& whole_;
  const int32_t cut_;
  const std::vector<int64_t> all_;
  std::vector<int64_t> dropped_;
  V4Choices choices_;
  V4Attention whole_attention_;
  std::unique_ptr<NarrowStep> narrow_;
  std::unique_ptr<V4Attention> narrow_attention_;
};

}  // namespace VN_BUILD
}  // namespace vn
