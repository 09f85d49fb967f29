// Products of rows of activations with a matrix. Activations are quantized to 8 bits, with one scale per group of 32
// columns. The kernels are in product.cpp, which is compiled once for each format and instruction set.
#pragma once

#include <algorithm>
#include <vector>

#include "buffer.h"
#include "formats.h"
#include "simd.h"

namespace specbeam {

// The number of rows that share a weight while it is in a register. Without wide registers, more than two rows make
// products little faster and double the time to compile.
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 2;
#endif
// The number of neighbouring blocks of weights that a full tile is multiplied with at a time. A number of the
// activations is then loaded once for all of them. It takes 32 registers.
#if defined(__AVX512F__)
constexpr int TILE_BLOCKS = 2;
#else
constexpr int TILE_BLOCKS = 1;
#endif
// Whether 8-bit weights are multiplied as shorts, in pairs: AVX2 cannot add products of such bytes without overflow.
#if defined(SPECBEAM_EIGHT_LANES) && !defined(__AVXVNNI__)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif
// A product goes through all weights at once for at least this many rows.
constexpr int64_t MIN_SWEEP_ROWS = 64;

// The rows that are left for the last two tiles, where the last one would be small: it takes nearly as long as a larger
// one. These tiles share them. Only within one sweep.
inline int64_t shared_rows(int64_t rows) {
  const int64_t last = rows % TILE_ROWS;
  return last && 2 * last < TILE_ROWS && rows > TILE_ROWS && rows < MIN_SWEEP_ROWS ? TILE_ROWS + last : 0;
}
// The number of rows of the tile that begins at `first`.
inline int tile_rows(int64_t first, int64_t rows) {
  const int64_t left = rows - first;
  return int(left == shared_rows(rows) ? (left + 1) / 2 : std::min<int64_t>(left, TILE_ROWS));
}
// The first row of a row's tile.
inline int64_t tile_start(int64_t row, int64_t rows) {
  const int64_t start = rows - shared_rows(rows);
  if (row < start || start == rows) return row / TILE_ROWS * TILE_ROWS;
  const int64_t second = start + tile_rows(start, rows);
  return row < second ? start : second;
}

// Rows of activations, quantized or in float32, as the formats of the matrices require. The bytes, scales and sums of a
// tile lie together group by group, because a kernel reads them group by group. The arrays are another's.
struct ActivationRows {
  int64_t rows = 0, columns = 0, groups = 0;
  bool quantized = false, exact = false, paired = false;
  float *values = nullptr;    // [rows, columns]
  int8_t *bytes = nullptr;    // [tile, group, row of the tile, 32]
  int16_t *pairs = nullptr;   // [tile, group, row of the tile, 32]: of each four bytes the even ones, then the odd ones
  float *scales = nullptr;    // [tile, group, row of the tile]
  float *sums = nullptr;      // [tile, group, row of the tile]: the sum of the quantized values, for the minimum
  int32_t *halves = nullptr;  // [tile, group, row of the tile, 2]: the sums of 16 bytes each, for the zero point

  // The rows from `first` on, with tiles of their own. Rows are set in the one or the other.
  ActivationRows part(int64_t first, int64_t count) const {
    ActivationRows own = *this;
    own.rows = count;
    if (exact) own.values += first * columns;
    if (!quantized) return own;
    own.bytes += first * groups * GROUP_COLUMNS;
    if (paired) own.pairs += first * groups * GROUP_COLUMNS;
    own.scales += first * groups, own.sums += first * groups, own.halves += first * groups * 2;
    return own;
  }

  void set(int64_t row, const float *x) const {
    if (exact) std::memcpy(&values[row * columns], x, columns * sizeof(float));
    if (quantized) quantize(row, x);
  }

 private:
  // x times `inverse`, as integers from -127 to 127. Where x or `inverse` was not finite, they are 0.
  static I32 rounded(F32 x, float inverse) {
    return to_int(multiply_add(x, all(inverse), all(ROUNDER)) - ROUNDER, 127.0f);
  }

  void quantize(int64_t row, const float *x) const {
    const int64_t first = tile_start(row, rows), m = tile_rows(first, rows);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t at = first * groups + g * m + row - first;
      const int64_t left = columns - g * GROUP_COLUMNS;
      const F32 a = load_some(x + g * GROUP_COLUMNS, left),
                b = left > LANES ? load_some(x + g * GROUP_COLUMNS + LANES, left - LANES) : F32{};
      const I32 sign = all(int32_t(0x7fffffff));
      const F32 high = (F32)((I32)a & sign), low = (F32)((I32)b & sign);
      const float most = max(larger(high, low)), scale = most / 127.0f;
      const float inverse = most > 0 ? 127.0f / most : 0;
      const I32 qa = rounded(a, inverse), qb = rounded(b, inverse);
      int8_t *q = &bytes[at * GROUP_COLUMNS];
      store_bytes(q, qa);
      store_bytes(q + LANES, qb);
#if defined(SPECBEAM_EIGHT_LANES)
      if (paired) store_pairs(&pairs[at * GROUP_COLUMNS], qa), store_pairs(&pairs[at * GROUP_COLUMNS + LANES], qb);
#endif
      const int32_t sa = sum_of_bytes(qa), sb = sum_of_bytes(qb);
      scales[at] = scale;
      sums[at] = scale * float(sa + sb);
      halves[at * 2] = sa;
      halves[at * 2 + 1] = sb;
    }
  }
};

// Activations with their arrays, which stay for the next ones.
struct Activations : ActivationRows {
  void resize(int64_t n, const std::vector<Matrix> &parts) {
    rows = n, columns = parts[0].columns, groups = groups_of(columns);
    quantized = exact = paired = false;
    for (const Matrix &part : parts) {
      (part.format == F32_ROWS ? exact : quantized) = true;
      if (part.format == Q8) paired = HAS_PAIRS;
    }
    if (exact) values = room(all_values, n * columns);
    if (!quantized) return;
    bytes = room(all_bytes, n * groups * GROUP_COLUMNS);
    if (paired) pairs = room(all_pairs, n * groups * GROUP_COLUMNS);
    scales = room(all_scales, n * groups);
    sums = room(all_sums, n * groups);
    halves = room(all_halves, n * groups * 2);
  }

 private:
  Buffer<float> all_values, all_scales, all_sums;
  Buffer<int8_t> all_bytes;
  Buffer<int16_t> all_pairs;
  Buffer<int32_t> all_halves;
};

// Multiplies the rows from `row` up to `end` with `count` blocks of outputs, at most TILE_BLOCKS:
// out[row * stride + output]. bias may be null.
template <Format FORMAT>
void block_rows(const Matrix &w, int64_t block, int64_t count, const ActivationRows &x, int64_t row, int64_t end,
                float *out, int64_t stride, const float *bias);

inline void product_blocks(const Matrix &w, int64_t block, int64_t count, const ActivationRows &x, int64_t row,
                           int64_t end, float *out, int64_t stride, const float *bias) {
  switch (w.format) {
    case F32_ROWS: return block_rows<F32_ROWS>(w, block, count, x, row, end, out, stride, bias);
    case Q8: return block_rows<Q8>(w, block, count, x, row, end, out, stride, bias);
    case Q6_K: return block_rows<Q6_K>(w, block, count, x, row, end, out, stride, bias);
    case Q5: return block_rows<Q5>(w, block, count, x, row, end, out, stride, bias);
    case Q5_MIN: return block_rows<Q5_MIN>(w, block, count, x, row, end, out, stride, bias);
    case Q5_K: return block_rows<Q5_K>(w, block, count, x, row, end, out, stride, bias);
    case Q4_MIN: return block_rows<Q4_MIN>(w, block, count, x, row, end, out, stride, bias);
    case Q4_K: return block_rows<Q4_K>(w, block, count, x, row, end, out, stride, bias);
    case MXFP4: return block_rows<MXFP4>(w, block, count, x, row, end, out, stride, bias);
    default: return;
  }
}

}  // namespace specbeam
