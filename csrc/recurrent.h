// Recurrent layers by the gated delta rule, one call for each layer of a step.
#pragma once

#include <vector>

#include "build.h"
#include "thread_pool.h"
#include "vllm_native.h"

namespace vn {
namespace VN_BUILD {

// A state to store behind `end` tokens of a request's part of the step.
struct StateStore {
  int64_t end;
  const int64_t* blocks;
};

// One request's part of a step.
struct StateRun {
  int64_t first_row, count;
  const int64_t* source;           // blocks of the state that it begins with, or null: zeros
  std::vector<StateStore> stores;  // ascending
};

// Rows of which an output is wanted: `count` of them; null: the first ones.
struct KeptRows {
  const int64_t* rows;
  int64_t count;
};

// What each request begins with and leaves: a state wherever a unit ends whose blocks it holds, and
// one behind its last token that is no draft.
std::vector<StateRun> find_runs(const vn_step& step, const vn_recurrence& layer);

// One layer's part of a step up to its output's product: x [T, D] gives normed rows [T, H * V], which
// are returned, those kept.
float* run_recurrence(ThreadPool& pool, Workspace& space, const vn_recurrence& l,
                      const vn_step& step, const std::vector<StateRun>& runs, const float* x,
                      int64_t t, float eps, KeptRows kept);

// Runs accepted drafts again, for what they leave.
void settle_recurrence(ThreadPool& pool, Workspace& space, const vn_recurrence& l,
                       const vn_step& step, const std::vector<StateRun>& runs);

}  // namespace VN_BUILD
}  // namespace vn
