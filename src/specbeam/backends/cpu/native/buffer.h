// Arrays that begin with a cache line. So a vector of 64 bytes lies in one line, and is read and written at once.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace specbeam {

template <class T> struct WholeLines {
  using value_type = T;
  static constexpr std::align_val_t LINE_BYTES{64};
  WholeLines() = default;
  template <class U> WholeLines(const WholeLines<U> &) {}
  T *allocate(size_t n) { return static_cast<T *>(::operator new(n * sizeof(T), LINE_BYTES)); }
  void deallocate(T *p, size_t) { ::operator delete(p, LINE_BYTES); }
  friend bool operator==(const WholeLines &, const WholeLines &) { return true; }
  friend bool operator!=(const WholeLines &, const WholeLines &) { return false; }
};

template <class T> using Buffer = std::vector<T, WholeLines<T>>;

// The first of at least n numbers. A larger buffer loses what it held.
template <class T> T *room(Buffer<T> &buffer, size_t n) {
  if (buffer.size() < n) buffer = Buffer<T>(n);
  return buffer.data();
}

}  // namespace specbeam
