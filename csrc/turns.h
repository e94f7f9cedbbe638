// What positions do to heads of queries and keys in a decoder: pairs of values are turned.
#pragma once

#include "build.h"
#include "kernels.h"

namespace vn {
namespace VN_BUILD {

// What turns the first `width` values of a step's rows, [tokens, width]; null: nothing is turned.
struct HeadTurns {
  const float* values;
  int64_t width;
};

// Turns pairs (i, i + d / 2) of a head.
inline void rotate_halves(float* head, const float* turns, int64_t d) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * turns[2 * i] - b * turns[2 * i + 1];
    head[half + i] = b * turns[2 * i] + a * turns[2 * i + 1];
  }
}

// Turns pairs of neighbours of a head; the first ones of all stand in its first half then.
inline void rotate_pairs(float* head, const float* turns, int64_t d) {
  const int64_t half = d / 2;
  thread_local Floats whole;
  whole.assign(head, head + d);
  for (int64_t i = 0; i < half; ++i) {
    const float a = whole[2 * i], b = whole[2 * i + 1];
    head[i] = a * turns[2 * i] - b * turns[2 * i + 1];
    head[half + i] = b * turns[2 * i] + a * turns[2 * i + 1];
  }
}

}  // namespace VN_BUILD
}  // namespace vn
