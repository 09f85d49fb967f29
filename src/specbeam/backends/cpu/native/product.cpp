// The products of one format (SPECBEAM_FORMAT) with one instruction set (SPECBEAM_ISA). CMakeLists.txt compiles this
// file for each pair, so that compilers work in parallel.
#include "product.h"

namespace specbeam::SPECBEAM_ISA {

namespace {

// The scales of a group for sixteen outputs. A weight is scale * (q - zero) + minimum. The two halves of a group have
// the scales `first` and `second`.
struct Scales {
  F32 first, second, minimum;
};

template <Format FORMAT> inline Scales scales_at(const uint8_t *group, const uint8_t *super) {
  if constexpr (FORMAT == Q8 || FORMAT == Q5) {
    const F32 d = load_half((const uint16_t *)group);
    return {d, d, F32{}};
  } else if constexpr (FORMAT == Q5_MIN || FORMAT == Q4_MIN) {
    const F32 d = load_half((const uint16_t *)group);
    return {d, d, load_half((const uint16_t *)group + LANES)};
  } else if constexpr (FORMAT == Q6_K) {
    const F32 d = load_half((const uint16_t *)super);
    return {d * load_bytes((const int8_t *)group), d * load_bytes((const int8_t *)group + LANES), F32{}};
  } else {
    const F32 d = load_half((const uint16_t *)super) * load_bytes(group);
    return {d, d, -(load_half((const uint16_t *)super + LANES) * load_bytes(group + LANES))};
  }
}

template <Format FORMAT> constexpr int ZERO_POINT = FORMAT == Q8 ? 128 : FORMAT == Q6_K ? 32 : FORMAT == Q5 ? 16 : 0;
template <Format FORMAT> constexpr bool HAS_MINIMUM =
    FORMAT == Q5_MIN || FORMAT == Q5_K || FORMAT == Q4_MIN || FORMAT == Q4_K;

// Unpacks half of a group's weights: the first 16 columns (half = 0) or the last 16.
template <int BITS> __attribute__((always_inline)) inline void unpack(const uint8_t *p, int half, U8 *w) {
  for (int j = 0; j < 4; j++) {
    if constexpr (BITS == 8) {
      w[j] = load<U8>(p + 256 * half + 64 * j);
    } else {
      const U32 both = load<U32>(p + 64 * j);
      w[j] = (U8)((half ? both >> 4 : both) & 0x0f0f0f0f);
    }
  }
  if constexpr (BITS == 6) {
    const U32 four = load<U32>(p + 256 + 64 * half);
    const U32 upper[4] = {four << 4, four << 2, four, four >> 2};
    for (int j = 0; j < 4; j++) w[j] |= (U8)(upper[j] & 0x30303030);
  }
}

constexpr int PREFETCH_BYTES_AHEAD = 20480;

// The weights to prefetch while a group is multiplied. A processor looks a few hundred instructions ahead, and here
// they are arithmetic. Without prefetches it would ask for the next weights too late.
struct Ahead {
  const uint8_t *from;
  int lines;  // cache lines of 64 bytes, per group
};

// The product of M rows of activations, from `row` on, with B neighbouring blocks: sixteen outputs per row and block.
template <Format FORMAT, int M, int B>
inline void block_product(const uint8_t *block, int64_t columns, const Activations &x, int64_t row, Ahead ahead,
                          F32 (*out)[B]) {
  const int64_t groups = x.groups, size = block_bytes(FORMAT, columns);
  F32 y[M][B] = {};
  const uint8_t *weights = block;
  const uint8_t *scales = block + weight_bytes(FORMAT, columns), *super = scales;
  for (int64_t g = 0; g < groups; g++) {
    if constexpr (LAYOUTS[FORMAT].super_scales > 0)
      if (g % GROUPS_PER_SUPER == 0) super = scales, scales += LAYOUTS[FORMAT].super_scales;
    for (int j = 0; j < ahead.lines; j++, ahead.from += 64) prefetch(ahead.from);
    const int64_t at = row * groups + g * M;  // of the first row
    Scales s[B];
#pragma GCC unroll 2
    for (int b = 0; b < B; b++) s[b] = scales_at<FORMAT>(scales + b * size, super + b * size);
    scales += LAYOUTS[FORMAT].group_scales;
    // Integer sums are exact in any order. PARTIAL_SUMS of them run side by side, so that they need not wait for each
    // other.
    constexpr int PARTIAL_SUMS = M == 1 ? 4 : M <= 4 ? 2 : 1;
    I32 dots[M][B][PARTIAL_SUMS];
    F32 first[M][B];  // the scaled sum of the first half: Q6_K has a scale for each half
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      if (half == 0 || FORMAT == Q6_K) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const int32_t *sums = &x.halves[2 * (at + m)];
#pragma GCC unroll 2
          for (int b = 0; b < B; b++) {
            for (int part = 0; part < PARTIAL_SUMS; part++) dots[m][b][part] = I32{};
            if constexpr (ZERO_POINT<FORMAT> != 0)
              dots[m][b][0] = all(-ZERO_POINT<FORMAT> * (FORMAT == Q6_K ? sums[half] : sums[0] + sums[1]));
          }
        }
      }
      U8 w[B][4];
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) unpack<LAYOUTS[FORMAT].bits>(weights + b * size, half, w[b]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const int32_t *q = (const int32_t *)&x.bytes[(at + m) * GROUP_COLUMNS] + 4 * half;
#pragma GCC unroll 2
          for (int b = 0; b < B; b++) {
            I32 &dot = dots[m][b][j % PARTIAL_SUMS];
            dot = dot4(dot, w[b][j], q[j]);
          }
        }
      }
      if (half == 0 && FORMAT != Q6_K) continue;
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const F32 scale = all(x.scales[at + m]);
#pragma GCC unroll 2
        for (int b = 0; b < B; b++) {
          I32 total = dots[m][b][0];
          for (int part = 1; part < PARTIAL_SUMS; part++) total += dots[m][b][part];
          const F32 sum = to_float(total);
          if constexpr (FORMAT == Q6_K) {
            if (half == 0) first[m][b] = sum * s[b].first;
            else y[m][b] = multiply_add(multiply_add(sum, s[b].second, first[m][b]), scale, y[m][b]);
          } else {
            y[m][b] = multiply_add(sum * scale, s[b].first, y[m][b]);
            if constexpr (HAS_MINIMUM<FORMAT>) y[m][b] = multiply_add(all(x.sums[at + m]), s[b].minimum, y[m][b]);
          }
        }
      }
    }
    weights += LAYOUTS[FORMAT].bits * 64;
  }
  for (int m = 0; m < M; m++)
    for (int b = 0; b < B; b++) out[m][b] = y[m][b];
}

template <int M> inline void block_product_float(const uint8_t *block, const Activations &x, int64_t row,
                                                 F32 (*out)[1]) {
  F32 even[M] = {}, odd[M] = {};
  const float *w = (const float *)block;
  for (int64_t k = 0; k < x.columns; k++) {
    const F32 lanes = load<F32>(w + k * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      F32 &y = k % 2 ? odd[m] : even[m];
      y = multiply_add(all(x.values[(row + m) * x.columns + k]), lanes, y);
    }
  }
  for (int m = 0; m < M; m++) out[m][0] = even[m] + odd[m];
}

template <Format FORMAT, int M = TILE_ROWS>
inline void tile(int m, const Matrix &w, const uint8_t *block, const Activations &x, int64_t row, Ahead ahead,
                 F32 (*out)[1]) {
  if constexpr (M > 1)
    if (m < M) return tile<FORMAT, M - 1>(m, w, block, x, row, ahead, out);
  if constexpr (FORMAT == F32_ROWS) block_product_float<M>(block, x, row, out);
  else block_product<FORMAT, M, 1>(block, w.columns, x, row, ahead, out);
}

// Multiplies the rows from `row` up to `end` with B neighbouring blocks. With more than one block, all tiles are full.
template <Format FORMAT, int B>
inline void rows_product(const Matrix &w, int64_t block, const Activations &x, int64_t row, int64_t end, float *out,
                         int64_t stride, const float *bias) {
  const uint8_t *data = w.data + block * block_bytes(FORMAT, w.columns);
  const int64_t first = block * BLOCK_ROWS;
  // A single tile prefetches the weights PREFETCH_BYTES_AHEAD, in this block or a later one. Of several tiles, each
  // prefetches a share of the next blocks.
  const int64_t size = B * block_bytes(FORMAT, w.columns), groups = x.groups,
                tiles = (end - row + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t share = (size / 64 + groups * tiles - 1) / (groups * tiles);  // cache lines per group
  Ahead ahead{data + (tiles > 1 ? size : PREFETCH_BYTES_AHEAD), int(share)};
  while (row < end) {
    F32 y[TILE_ROWS][B];
    const int m = tile_rows(row, x.rows);
    // Each row's outputs are in a line of their own. A store to a line that is far away would hold up the stores after
    // it.
    if (tiles > 1)
      for (int i = 0; i < m; i++)
        for (int b = 0; b < B; b++) prefetch_to_write(out + (row + i) * stride + first + b * BLOCK_ROWS);
    if constexpr (B > 1) block_product<FORMAT, TILE_ROWS, B>(data, w.columns, x, row, ahead, y);
    else tile<FORMAT>(m, w, data, x, row, ahead, y);
    ahead.from += share * groups * 64;
    for (int i = 0; i < m; i++, row++)
      for (int b = 0; b < B; b++) {
        const int64_t output = first + b * BLOCK_ROWS, lanes = w.rows - output;
        store_some(out + row * stride + output, bias ? y[i][b] + load_some(bias + output, lanes) : y[i][b], lanes);
      }
  }
}

}  // namespace

template <Format FORMAT>
void block_rows(const Matrix &w, int64_t block, int64_t count, const Activations &x, int64_t row, int64_t end,
                float *out, int64_t stride, const float *bias) {
  if constexpr (TILE_BLOCKS > 1 && FORMAT != F32_ROWS)
    if (count == TILE_BLOCKS && end - row >= TILE_ROWS) {
      const int64_t full = row + (end - row) / TILE_ROWS * TILE_ROWS;
      rows_product<FORMAT, TILE_BLOCKS>(w, block, x, row, full, out, stride, bias);
      row = full;
    }
  if (row < end)
    for (int64_t i = 0; i < count; i++) rows_product<FORMAT, 1>(w, block + i, x, row, end, out, stride, bias);
}

template void block_rows<SPECBEAM_FORMAT>(const Matrix &, int64_t, int64_t, const Activations &, int64_t, int64_t,
                                          float *, int64_t, const float *);

}  // namespace specbeam::SPECBEAM_ISA
