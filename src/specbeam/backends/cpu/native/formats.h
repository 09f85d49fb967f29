// How weights lie in memory. Sixteen rows (outputs) make a block, so that a lane of a vector is an output, and a sum
// over the columns stays in its lane: its order is that of the columns, however many tokens or threads there are.
//
// Columns are in groups of 32, and a block of a quantized matrix is
//
//   bytes:   for each group, 8 vectors of 16 lanes x 4 columns (8 bits), or 4 vectors with the second four in the high
//            nibbles (4 bits), after which 6 bits have 2 vectors with the upper two bits of four vectors each. Weights
//            are unsigned: what a format holds as signed has a zero point added.
//   scales:  for each group, as the format says; for formats of llama.cpp's K kind, first 16 (or 2 x 16) half floats
//   for
//            each 8 groups.
//
// A weight is scale * (q - zero) or scale * q + minimum. What a quantized GGUF file holds comes over with the same
// values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specbeam {

enum Format : int32_t {
  F32_ROWS,  // float32, for each column 16 lanes
  Q8,        // 8 bits, a half float scale a group (Q8_0, our int8)
  Q6_K,      // 6 bits, an 8-bit signed scale for each 16 columns, a half float that scales those for 8 groups
  Q5,        // 6 bits, a half float scale a group (Q5_0)
  Q5_MIN,    // 6 bits, half float scale and minimum (Q5_1)
  Q5_K,      // 6 bits, 8-bit scale and minimum a group, half floats that scale those for 8 groups
  Q4_MIN,    // 4 bits, half float scale and minimum (Q4_0, Q4_1, our int4)
  Q4_K,      // 4 bits, as Q5_K
  FORMATS
};

constexpr int BLOCK_ROWS = 16, GROUP = 32, SUPER = 8;

struct Layout {
  int bits, group_scales, super_scales;  // bytes of scales a block has for a group, and for 8 groups
};

constexpr Layout LAYOUTS[FORMATS] = {
    {32, 0, 0}, {8, 32, 0}, {6, 32, 32}, {6, 32, 0}, {6, 64, 0}, {6, 32, 64}, {4, 64, 0}, {4, 32, 64},
};

inline int64_t groups_of(int64_t columns) { return (columns + GROUP - 1) / GROUP; }
inline int64_t blocks_of(int64_t rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

inline int64_t weight_bytes(Format format, int64_t columns) {  // of a block, without its scales
  return format == F32_ROWS ? columns * BLOCK_ROWS * 4
                            : groups_of(columns) * GROUP * BLOCK_ROWS * LAYOUTS[format].bits / 8;
}

inline int64_t block_bytes(Format format, int64_t columns) {
  const Layout &layout = LAYOUTS[format];
  const int64_t groups = groups_of(columns), supers = (groups + SUPER - 1) / SUPER;
  const int64_t bytes = weight_bytes(format, columns) + groups * layout.group_scales + supers * layout.super_scales;
  return (bytes + 63) / 64 * 64;
}

// Where the byte of a weight is in a block, or its lower four bits; and the upper two of six.
struct Place {
  int64_t byte;
  int shift;
};

inline Place place(Format format, int lane, int64_t column) {
  const int64_t group = column / GROUP * (GROUP * BLOCK_ROWS * LAYOUTS[format].bits / 8);
  const int vector = int(column % GROUP / 4), at = lane * 4 + int(column % 4);
  if (LAYOUTS[format].bits == 8) return {group + vector * 64 + at, 0};
  return {group + vector % 4 * 64 + at, vector / 4 * 4};
}

inline Place upper_place(int lane, int64_t column) {
  const int vector = int(column % GROUP / 4);
  return {column / GROUP * 384 + 256 + vector / 4 * 64 + lane * 4 + column % 4, vector % 4 * 2};
}

// Where the scales of a group begin in a block, and those of its 8 groups.
inline int64_t group_scales(Format format, int64_t columns, int64_t group) {
  const Layout &layout = LAYOUTS[format];
  const int64_t supers = layout.super_scales ? group / SUPER + 1 : 0;
  return weight_bytes(format, columns) + group * layout.group_scales + supers * layout.super_scales;
}

inline int64_t super_scales(Format format, int64_t columns, int64_t group) {
  return group_scales(format, columns, group / SUPER * SUPER) - LAYOUTS[format].super_scales;
}

struct Matrix {
  Format format;
  int64_t rows, columns;
  const uint8_t *data;  // blocks_of(rows) * block_bytes(format, columns)
};

}  // namespace specbeam
