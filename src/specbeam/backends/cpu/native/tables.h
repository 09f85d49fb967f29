// The functions of one instruction set. The same sources are compiled once for each set.
#pragma once

#include "model.h"
#include "select.h"
#include "threads.h"

namespace specbeam {

struct Table {
  const char *name;
  void *(*new_workspace)();
  void (*delete_workspace)(void *);
  void (*forward)(const Model &, const Cache &, Threads &, void *workspace, const Segment *, int64_t count,
                  const int64_t *wanted, int64_t wanted_count, int64_t vocab, float *logits);
  void (*choose)(const Choice &, Threads &);
  void (*multiply)(const Matrix &, Threads &, const float *values, int64_t rows, float *out);
  float (*weight)(const Matrix &, int64_t row, int64_t column);
};

}  // namespace specbeam
