// For all fuzz targets: the functions of the libraries, and numbers that are mostly right and sometimes wild.
#pragma once

#include <dlfcn.h>
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ahead.h"
#include "model.h"

namespace specbeam {

// The functions of the library of one instruction set. `use` sets them.
#define FUNCTION(result, name, ...) inline result (*specbeam_##name)(__VA_ARGS__);
#include "interface.def"

// Takes the functions of an instruction set; an empty name asks for the best. Returns whether the processor has it.
inline bool use(const std::string &isa) {
  const auto load = [](const std::string &of) {
    void *library = dlopen((SPECBEAM_LIBRARIES "/libspecbeam_cpu_" + of + ".so").c_str(), RTLD_NOW);
    if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::abort();
    return library;
  };
  const auto best = reinterpret_cast<const char *(*)(const char *)>(dlsym(load("portable"), "specbeam_isa"));
  const char *chosen = best(isa.c_str());
  if (!chosen) return false;
  void *library = load(chosen);
#define FUNCTION(result, name, ...) \
  specbeam_##name = reinterpret_cast<result (*)(__VA_ARGS__)>(dlsym(library, "specbeam_" #name));
#include "interface.def"
  return true;
}

}  // namespace specbeam

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

inline void check(bool condition) { CHECK(condition); }

struct Input : FuzzedDataProvider {
  using FuzzedDataProvider::FuzzedDataProvider;

  // Whether one of the rare mistakes happens. It does not when the input is used up.
  bool rarely() { return ConsumeIntegral<uint8_t>() > 250; }

  int64_t wild() {
    constexpr int64_t EDGES[] = {0,
                                 -1,
                                 1,
                                 31,
                                 255,
                                 1 << 16,
                                 INT32_MAX,
                                 int64_t(INT32_MAX) + 1,
                                 INT32_MIN,
                                 int64_t(1) << 40,
                                 INT64_MAX,
                                 INT64_MIN,
                                 INT64_MAX / 2};
    return ConsumeBool() ? PickValueInArray(EDGES) : ConsumeIntegral<int64_t>();
  }

  int64_t number(int64_t low, int64_t high) { return rarely() ? wild() : ConsumeIntegralInRange(low, high); }

  const char *isa() { return PickValueInArray({"portable", "avx2", "avxvnni", "avx512", "", "sse9"}); }
};

// Memory of exactly this size, so that the address sanitizer sees each access beyond it.
template <class T> std::unique_ptr<T[]> exactly(size_t n) { return std::unique_ptr<T[]>(new T[n]()); }

// The same bits, or both not a number.
inline bool same(const float *a, const float *b, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (std::memcmp(a + i, b + i, sizeof *a) && (a[i] == a[i] || b[i] == b[i])) return false;
  return true;
}
