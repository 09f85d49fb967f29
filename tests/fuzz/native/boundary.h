// For all fuzz targets: the functions of api.cpp, and numbers that are mostly right and sometimes wild.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "ahead.h"
#include "model.h"
#include "select.h"

extern "C" {
const char *specbeam_isa(const char *);
int64_t specbeam_matrix_bytes(int32_t, int64_t, int64_t);
int32_t specbeam_format_of(int32_t);
int32_t specbeam_pack(int32_t, const uint8_t *, int64_t, int64_t, int64_t, const int64_t *, int64_t, int64_t,
                      uint8_t *);
int32_t specbeam_quantize(int32_t, const float *, int64_t, int64_t, uint8_t *);
uint64_t specbeam_hash(const uint8_t *, int64_t);
const char *specbeam_model_new(const specbeam::ModelConfig *, int32_t, const char *, void **);
void specbeam_model_delete(void *);
int32_t specbeam_model_threads(void *);
int32_t specbeam_model_add(void *, int64_t, int32_t, int32_t, int64_t, int64_t, const uint8_t *, int64_t);
int32_t specbeam_model_bias(void *, int64_t, int32_t, const float *, int64_t);
int32_t specbeam_model_norm(void *, int64_t, int32_t, const float *, const float *, int64_t);
int32_t specbeam_model_rope(void *, const float *, int64_t, float);
int32_t specbeam_model_layer(void *, int64_t, int64_t, int64_t);
const char *specbeam_model_incomplete(void *);
const char *specbeam_cache_reserve(void *, int64_t);
int32_t specbeam_cache_release(void *, int64_t, int64_t);
const char *specbeam_choose(void *, const specbeam::Choice *);
const char *specbeam_forward_ahead(void *, const specbeam::Segment *, int64_t, const specbeam::Ahead *, float *,
                                   const specbeam::Choice *, int64_t, const int64_t *, int64_t, const int32_t *,
                                   int64_t *);
const char *specbeam_forward(void *, const specbeam::Segment *, int64_t, const int64_t *, int64_t, int64_t, float *);
int32_t specbeam_multiply(const char *, int32_t, int32_t, int64_t, int64_t, const uint8_t *, const float *, int64_t,
                          float *);
float specbeam_weight(int32_t, int64_t, int64_t, const uint8_t *, int64_t, int64_t);
}

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
