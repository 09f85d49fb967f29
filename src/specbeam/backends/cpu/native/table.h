// A table of numbers as it lies in a file. Single rows are read, and no memory holds the others.
#pragma once

#include <cstdint>

namespace specbeam {

// The types of single numbers in GGUF files, with ggml's numbers. Types of blocks are in pack.h.
enum Numbers : int32_t { F32_NUMBERS = 0, F16_NUMBERS = 1, BF16_NUMBERS = 30 };

struct Table {
  int32_t type = 0;
  int64_t rows = 0, columns = 0;
  const uint8_t *data = nullptr;
  explicit operator bool() const { return data != nullptr; }
};

// The bytes of a row, or 0 for a type without code here, or for columns that are no whole blocks.
int64_t table_row_bytes(int32_t type, int64_t columns);
// Reads a row as float32. A row with scales that are not finite becomes NaN. to: [columns]
void read_row(const Table &, int64_t row, float *to);

}  // namespace specbeam
