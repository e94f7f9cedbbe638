// Buffers of floats that begin where a cache line begins.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace vn {

// A vector register of floats is a cache line wide: begun elsewhere, each read takes two lines.
template <typename T>
struct CacheLines {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  CacheLines() = default;
  template <typename U>
  CacheLines(const CacheLines<U>&) {}
  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kLine));
  }
  void deallocate(T* values, std::size_t) { ::operator delete(values, kLine); }
  friend bool operator==(const CacheLines&, const CacheLines&) { return true; }
  friend bool operator!=(const CacheLines&, const CacheLines&) { return false; }
};

using Floats = std::vector<float, CacheLines<float>>;

}  // namespace vn
