// Reads rows of a table in a file. Blocks have the values that they have in packed weights.

#include "table.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "buffer.h"
#include "pack.h"

namespace specbeam {

int64_t table_row_bytes(int32_t type, int64_t columns) {
  switch (type) {
    case F32_NUMBERS: return columns * 4;
    case F16_NUMBERS:
    case BF16_NUMBERS: return columns * 2;
    default: return format_of(type) == FORMAT_COUNT || columns % columns_per_block(type) ? 0 : row_bytes(type, columns);
  }
}

void read_row(const Table &table, int64_t row, float *to) {
  const int64_t columns = table.columns;
  const uint8_t *from = table.data + row * table_row_bytes(table.type, columns);
  if (table.type == F32_NUMBERS) {
    std::memcpy(to, from, columns * sizeof(float));
    return;
  }
  if (table.type == F16_NUMBERS || table.type == BF16_NUMBERS) {
    for (int64_t i = 0; i < columns; i++) {
      uint16_t half;
      std::memcpy(&half, from + 2 * i, 2);
      const uint32_t bits = uint32_t(half) << 16;  // BF16 is the first half of a float32
      if (table.type == F16_NUMBERS) to[i] = half_to_float(half);
      else std::memcpy(to + i, &bits, 4);
    }
    return;
  }
  static thread_local Buffer<uint8_t> block;  // the row alone
  const Matrix packed{format_of(table.type), 1, columns, room(block, block_bytes(format_of(table.type), columns))};
  if (pack_block(table.type, from, 1, columns, nullptr, 0, block.data()))
    for (int64_t i = 0; i < columns; i++) to[i] = weight_at(packed, 0, i);
  else std::fill_n(to, columns, NAN);
}

}  // namespace specbeam
