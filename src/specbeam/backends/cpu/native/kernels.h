// The functions that are compiled once for each instruction set. Each library has one set.
#pragma once

#include "model.h"
#include "threads.h"

namespace specbeam {

struct Workspace;  // the buffers of a pass, kept for the next one
Workspace *new_workspace();
void delete_workspace(Workspace *);

// One forward pass. wanted: [wanted_count], the nodes that get logits; logits: [wanted_count, vocab]
void forward(const Model &, const Cache &, Threads &, Workspace &, const Segment *, int64_t count,
             const int64_t *wanted, int64_t wanted_count, int64_t vocab, float *logits);

// Some layers of an encoder's pass over audio. one_part: holds what the part that runs keeps; features: [mel bins, 2 *
// context]; states: [context, hidden], between layers what the next one reads
void encode(const Model &encoder, const Cache &one_part, Threads &, Workspace &, const float *features, int64_t first,
            int64_t end, float *states);

// Writes the keys and values of cross-attention of all layers into slots. states: [count, hidden of the encoder]
void place(const Model &, const Cache &, Threads &, Workspace &, const float *states, const int64_t *slots,
           int64_t count);

// Makes the selections.
void choose(const Choice &, Threads &);

// out[rows, outputs] = values[rows, columns] times the transposed matrix
void multiply(const Matrix &, Threads &, const float *values, int64_t rows, float *out);

}  // namespace specbeam
