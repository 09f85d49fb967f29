// Weights into the layouts of formats.h.
#pragma once

#include "formats.h"

namespace specbeam {

// The blocks of GGUF files, by their numbers there (ggml's types).
enum Blocks : int32_t {
  Q4_0_BLOCKS = 2,
  Q4_1_BLOCKS = 3,
  Q5_0_BLOCKS = 6,
  Q5_1_BLOCKS = 7,
  Q8_0_BLOCKS = 8,
  Q4_K_BLOCKS = 12,
  Q5_K_BLOCKS = 13,
  Q6_K_BLOCKS = 14,
};

Format format_of(int32_t type);                    // FORMATS if it has none
int64_t row_bytes(int32_t type, int64_t columns);  // in the file

// One block of 16 rows, into its place in out. order: which row of the source each row is, or null.
void pack_block(int32_t type, const uint8_t *source, int64_t rows, int64_t columns, const int64_t *order, int64_t block,
                uint8_t *out);

// The same from float32 [rows, columns], to F32_ROWS, Q8 or Q4_MIN.
void quantize_block(Format format, const float *source, int64_t rows, int64_t columns, int64_t block, uint8_t *out);

}  // namespace specbeam
