// Packs weights into the layouts of formats.h.
#pragma once

#include "formats.h"

namespace specbeam {

// The types of blocks in GGUF files, with ggml's numbers.
enum Blocks : int32_t {
  Q4_0_BLOCKS = 2,
  Q4_1_BLOCKS = 3,
  Q5_0_BLOCKS = 6,
  Q5_1_BLOCKS = 7,
  Q8_0_BLOCKS = 8,
  Q4_K_BLOCKS = 12,
  Q5_K_BLOCKS = 13,
  Q6_K_BLOCKS = 14,
  MXFP4_BLOCKS = 39,
};

Format format_of(int32_t type);                    // FORMAT_COUNT for a type without a format
int64_t columns_per_block(int32_t type);           // in the file
int64_t row_bytes(int32_t type, int64_t columns);  // of a row in the file

// Packs one block of 16 rows into its place in `out`. order: the source row of each row, or null for the same order.
// Returns whether all scales are finite.
bool pack_block(int32_t type, const uint8_t *source, int64_t rows, int64_t columns, const int64_t *order, int64_t block,
                uint8_t *out);

// Packs one block from float32 [rows, columns] as F32_ROWS, Q8 or Q4_MIN. Returns whether all weights and scales are
// finite.
bool quantize_block(Format format, const float *source, int64_t rows, int64_t columns, int64_t block, uint8_t *out);

}  // namespace specbeam
