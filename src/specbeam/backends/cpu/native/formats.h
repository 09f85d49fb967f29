// How weights lie in memory. Sixteen rows (outputs) make a block. A lane of a vector is an output, so an output's sum
// over the columns stays in its lane. The columns are added in one order, for any number of tokens and threads.
//
// Columns are in groups of 32. A block of a quantized matrix has two parts:
//
// - weights, group by group. 8-bit weights take 8 vectors of 16 lanes x 4 columns. 4-bit weights take 4 vectors, with
//   the second four vectors in the high nibbles. 6-bit weights are 4-bit weights and 2 vectors more, each with the
//   upper two bits of four vectors. All are unsigned: a signed weight has a zero point added.
// - scales, group by group, as Format says. The formats of llama.cpp's K kind have super scales, too: 16 or 2 x 16 half
//   floats before each 8 groups.
//
// A weight is scale * (q - zero) or scale * q + minimum. The four bits of an MXFP4 weight are the number of a value,
// which is looked up when it is multiplied. The weights of a quantized GGUF file keep their values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "interface.h"

namespace specbeam {

constexpr int BLOCK_ROWS = 16, GROUP_COLUMNS = 32, GROUPS_PER_SUPER = 8;

struct Layout {
  int bits;          // per weight
  int group_scales;  // bytes per group of a block
  int super_scales;  // bytes per 8 groups of a block
};

constexpr Layout LAYOUTS[FORMAT_COUNT] = {
    {32, 0, 0}, {8, 32, 0}, {6, 32, 32}, {6, 32, 0}, {6, 64, 0}, {6, 32, 64}, {4, 64, 0}, {4, 32, 64}, {4, 16, 0},
};

// Twice the values of a float of 4 bits: a sign, two bits of exponent, and one of mantissa (Rouhani et al. 2023).
constexpr int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Half of the power of two that a group's byte stands for: the factor of twice the values.
inline float mxfp4_scale(uint8_t exponent) {
  const uint32_t bits = uint32_t(exponent) << 23 | (exponent ? 0 : 1u << 22);  // without a mantissa, 0 is no power
  float power;
  std::memcpy(&power, &bits, 4);
  return power * 0.5f;
}

inline int64_t groups_of(int64_t columns) { return (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS; }
inline int64_t blocks_of(int64_t rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

inline int64_t weight_bytes(Format format, int64_t columns) {  // of a block without its scales
  return format == F32_ROWS ? columns * BLOCK_ROWS * 4
                            : groups_of(columns) * GROUP_COLUMNS * BLOCK_ROWS * LAYOUTS[format].bits / 8;
}

inline int64_t block_bytes(Format format, int64_t columns) {
  const Layout &layout = LAYOUTS[format];
  const int64_t groups = groups_of(columns), supers = (groups + GROUPS_PER_SUPER - 1) / GROUPS_PER_SUPER;
  const int64_t bytes = weight_bytes(format, columns) + groups * layout.group_scales + supers * layout.super_scales;
  return (bytes + 63) / 64 * 64;
}

// The position of a weight's bits: a byte of its block, and a shift in the byte.
struct Place {
  int64_t byte;
  int shift;
};

// The position of a weight. Of a 6-bit weight, it is that of the lower four bits.
inline Place place(Format format, int lane, int64_t column) {
  const int64_t group = column / GROUP_COLUMNS * (GROUP_COLUMNS * BLOCK_ROWS * LAYOUTS[format].bits / 8);
  const int vector = int(column % GROUP_COLUMNS / 4), at = lane * 4 + int(column % 4);
  if (LAYOUTS[format].bits == 8) return {group + vector * 64 + at, 0};
  return {group + vector % 4 * 64 + at, vector / 4 * 4};
}

// The position of the upper two bits of a 6-bit weight.
inline Place upper_place(int lane, int64_t column) {
  const int vector = int(column % GROUP_COLUMNS / 4);
  return {column / GROUP_COLUMNS * 384 + 256 + vector / 4 * 64 + lane * 4 + column % 4, vector % 4 * 2};
}

// The offset of a group's scales in its block.
inline int64_t group_scales(Format format, int64_t columns, int64_t group) {
  const Layout &layout = LAYOUTS[format];
  const int64_t supers = layout.super_scales ? group / GROUPS_PER_SUPER + 1 : 0;
  return weight_bytes(format, columns) + group * layout.group_scales + supers * layout.super_scales;
}

// The offset of the super scales that a group shares with 7 others.
inline int64_t super_scales(Format format, int64_t columns, int64_t group) {
  return group_scales(format, columns, group / GROUPS_PER_SUPER * GROUPS_PER_SUPER) - LAYOUTS[format].super_scales;
}

struct Matrix {
  Format format;
  int64_t rows, columns;
  const uint8_t *data;  // blocks_of(rows) * block_bytes(format, columns)
};

// One weight of a matrix in float32, for embeddings and for tests.
inline float weight_at(const Matrix &w, int64_t row, int64_t column) {
  const int lane = int(row % BLOCK_ROWS);
  const uint8_t *block = w.data + row / BLOCK_ROWS * block_bytes(w.format, w.columns);
  if (w.format == F32_ROWS) return ((const float *)block)[column * BLOCK_ROWS + lane];
  const Place at = place(w.format, lane, column);
  int q = block[at.byte] >> at.shift;
  if (LAYOUTS[w.format].bits < 8) q &= 15;
  if (LAYOUTS[w.format].bits == 6) {
    const Place upper = upper_place(lane, column);
    q |= (block[upper.byte] >> upper.shift & 3) << 4;
  }
  const int64_t group = column / GROUP_COLUMNS;
  const uint8_t *g = block + group_scales(w.format, w.columns, group),
                *s = block + super_scales(w.format, w.columns, group);
  const auto half = [lane](const uint8_t *p, int part) {
    return half_to_float(((const uint16_t *)p)[part * BLOCK_ROWS + lane]);
  };
  switch (w.format) {
    case Q8: return half(g, 0) * float(q - 128);
    case Q5: return half(g, 0) * float(q - 16);
    case MXFP4: return mxfp4_scale(g[lane]) * float(MXFP4_VALUES[q]);
    case Q5_MIN:
    case Q4_MIN: return half(g, 0) * float(q) + half(g, 1);
    case Q6_K:
      return half(s, 0) * float(((const int8_t *)g)[column % GROUP_COLUMNS / 16 * BLOCK_ROWS + lane]) * float(q - 32);
    default: return half(s, 0) * float(g[lane]) * float(q) - half(s, 1) * float(g[BLOCK_ROWS + lane]);
  }
}

}  // namespace specbeam
