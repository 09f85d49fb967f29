// The functions that are compiled once for each instruction set. Each library has one set.
#pragma once

#include "model.h"
#include "select.h"
#include "threads.h"

namespace specbeam {

struct Workspace;  // the buffers of a pass, kept for the next one
Workspace *new_workspace();
void delete_workspace(Workspace *);

// One forward pass. wanted: [wanted_count], the nodes that get logits; logits: [wanted_count, vocab]
void forward(const Model &, const Cache &, Threads &, Workspace &, const Segment *, int64_t count,
             const int64_t *wanted, int64_t wanted_count, int64_t vocab, float *logits);

// Makes the selections.
void choose(const Choice &, Threads &);

// out[rows, outputs] = values[rows, columns] times the transposed matrix
void multiply(const Matrix &, Threads &, const float *values, int64_t rows, float *out);

}  // namespace specbeam
