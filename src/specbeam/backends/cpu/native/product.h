// Products of a few rows of activations with a matrix. Activations are quantized to 8 bits, a scale for each group of 32.
#pragma once

#include <vector>

#include "formats.h"
#include "simd.h"

namespace specbeam::SPECBEAM_ISA {

// So many rows, and those that are left, share a weight while it is in a register.
constexpr int TILE = 8;
inline int tile_rows(int64_t first, int64_t rows) { return rows - first < TILE ? int(rows - first) : TILE; }

// Rows of activations, as the matrices they are multiplied with want them: quantized, or as they are. What is known of a
// tile's rows in one group lies together, for it is needed together.
struct Activations {
  int64_t rows = 0, columns = 0, groups = 0;
  bool quantized = false, exact = false;
  std::vector<float> values;    // [rows, columns]
  std::vector<int8_t> bytes;    // [tile, group, row of it, 32]
  std::vector<float> scales;    // [tile, group, row of it]
  std::vector<float> sums;      // the same: of a group's values as quantized, for the minimum
  std::vector<int32_t> halves;  // [tile, group, row of it, 2]: sums of the bytes of each 16, for the zero point

  void resize(int64_t n, const std::vector<Matrix> &parts) {
    rows = n, columns = parts[0].columns, groups = groups_of(columns);
    quantized = exact = false;
    for (const Matrix &part : parts) (part.format == F32_ROWS ? exact : quantized) = true;
    if (exact) grow(values, n * columns);
    if (!quantized) return;
    grow(bytes, n * groups * GROUP);
    grow(scales, n * groups);
    grow(sums, n * groups);
    grow(halves, n * groups * 2);
  }

  void set(int64_t row, const float *x) {
    if (exact) std::memcpy(&values[row * columns], x, columns * sizeof(float));
    if (quantized) quantize(row, x);
  }

 private:
  void quantize(int64_t row, const float *x) {
    const int64_t first = row / TILE * TILE, m = tile_rows(first, rows);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t at = first * groups + g * m + row - first;
      const int64_t left = columns - g * GROUP;
      const F32 a = load_some(x + g * GROUP, left), b = left > LANES ? load_some(x + g * GROUP + LANES, left - LANES) : F32{};
      const I32 sign = all(int32_t(0x7fffffff));
      const F32 high = (F32)((I32)a & sign), low = (F32)((I32)b & sign);
      const float most = max(select(high > low, high, low)), scale = most / 127.0f;
      const float inverse = most > 0 ? 127.0f / most : 0;
      const F32 magic = all(12582912.0f);  // rounds to the nearest whole number
      const I32 qa = __builtin_convertvector(multiply_add(a, all(inverse), magic) - magic, I32);
      const I32 qb = __builtin_convertvector(multiply_add(b, all(inverse), magic) - magic, I32);
      int8_t *q = &bytes[at * GROUP];
      store_bytes(q, qa);
      store_bytes(q + LANES, qb);
      const int32_t sa = sum(qa), sb = sum(qb);
      scales[at] = scale;
      sums[at] = scale * float(sa + sb);
      halves[at * 2] = sa;
      halves[at * 2 + 1] = sb;
    }
  }

  template <class T> static void grow(std::vector<T> &v, size_t n) {
    if (v.size() < n) v.resize(n);
  }
};

// The scales of a group, sixteen outputs at once: a weight is scale[half] * (q - zero) + minimum.
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

template <Format FORMAT> constexpr int ZERO = FORMAT == Q8 ? 128 : FORMAT == Q6_K ? 32 : FORMAT == Q5 ? 16 : 0;
template <Format FORMAT> constexpr bool HAS_MINIMUM = FORMAT == Q5_MIN || FORMAT == Q5_K || FORMAT == Q4_MIN || FORMAT == Q4_K;

// The first or second half of a group's weights.
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

constexpr int AHEAD = 20480;  // bytes

// What is asked for from memory while a group is multiplied: the processor does not look ahead as far as arithmetic takes.
struct Ahead {
  const uint8_t *from;
  int lines;  // of 64 bytes, a group
};

// The product of M rows of activations, from `row` on, with a block; sixteen outputs a row.
template <Format FORMAT, int M>
inline void block_product(const uint8_t *block, int64_t columns, const Activations &x, int64_t row, Ahead ahead, F32 *out) {
  const int64_t groups = x.groups;
  F32 y[M] = {};
  const uint8_t *weights = block;
  const uint8_t *scales = block + weight_bytes(FORMAT, columns), *super = scales;
  for (int64_t g = 0; g < groups; g++) {
    if constexpr (LAYOUTS[FORMAT].super_scales > 0)
      if (g % SUPER == 0) super = scales, scales += LAYOUTS[FORMAT].super_scales;
    for (int j = 0; j < ahead.lines; j++, ahead.from += 64) prefetch(ahead.from);
    const int64_t at = row * groups + g * M;  // the first row's
    const Scales s = scales_at<FORMAT>(scales, super);
    scales += LAYOUTS[FORMAT].group_scales;
    // Sums of whole numbers may be cut and ordered at will: PARTS apart, so that none waits for the one before it.
    constexpr int PARTS = M == 1 ? 4 : M <= 4 ? 2 : 1;
    I32 dots[M][PARTS];
    F32 first[M];  // of Q6_K, which scales each half
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      if (half == 0 || FORMAT == Q6_K) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const int32_t *sums = &x.halves[2 * (at + m)];
          for (int part = 0; part < PARTS; part++) dots[m][part] = I32{};
          if constexpr (ZERO<FORMAT> != 0) dots[m][0] = all(-ZERO<FORMAT> * (FORMAT == Q6_K ? sums[half] : sums[0] + sums[1]));
        }
      }
      U8 w[4];
      unpack<LAYOUTS[FORMAT].bits>(weights, half, w);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const int32_t *q = (const int32_t *)&x.bytes[(at + m) * GROUP] + 4 * half;
          I32 &dot = dots[m][j % PARTS];
          dot = dot4(dot, w[j], q[j]);
        }
      }
      if (half == 0 && FORMAT != Q6_K) continue;
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        I32 total = dots[m][0];
        for (int part = 1; part < PARTS; part++) total += dots[m][part];
        const F32 scale = all(x.scales[at + m]), sum = to_float(total);
        if constexpr (FORMAT == Q6_K) {
          if (half == 0) first[m] = sum * s.first;
          else y[m] = multiply_add(multiply_add(sum, s.second, first[m]), scale, y[m]);
        } else {
          y[m] = multiply_add(sum * scale, s.first, y[m]);
          if constexpr (HAS_MINIMUM<FORMAT>) y[m] = multiply_add(all(x.sums[at + m]), s.minimum, y[m]);
        }
      }
    }
    weights += LAYOUTS[FORMAT].bits * 64;
  }
  for (int m = 0; m < M; m++) out[m] = y[m];
}

template <int M> inline void block_product_float(const uint8_t *block, const Activations &x, int64_t row, F32 *out) {
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
  for (int m = 0; m < M; m++) out[m] = even[m] + odd[m];
}

template <Format FORMAT, int M = TILE>
inline void tile(int m, const Matrix &w, const uint8_t *block, const Activations &x, int64_t row, Ahead ahead, F32 *out) {
  if constexpr (M > 1)
    if (m < M) return tile<FORMAT, M - 1>(m, w, block, x, row, ahead, out);
  if constexpr (FORMAT == F32_ROWS) block_product_float<M>(block, x, row, out);
  else block_product<FORMAT, M>(block, w.columns, x, row, ahead, out);
}

// One block of outputs for the rows from `row` to `end`: out[row * stride + lane], plus the bias if there is one.
template <Format FORMAT>
void block_rows(const Matrix &w, int64_t block, const Activations &x, int64_t row, int64_t end, float *out, int64_t stride, const float *bias) {
  const uint8_t *data = w.data + block * block_bytes(w.format, w.columns);
  const int64_t first = block * BLOCK_ROWS, lanes = w.rows - first < LANES ? w.rows - first : LANES;
  const F32 b = bias ? load_some(bias + first, lanes) : F32{};
  // One tile asks for what lies a little ahead, in this block or the next; of several each asks for a share of the next.
  const int64_t size = block_bytes(FORMAT, w.columns), groups = x.groups, tiles = (end - row + TILE - 1) / TILE;
  const int64_t share = (size / 64 + groups * tiles - 1) / (groups * tiles);  // lines a group
  Ahead ahead{data + (tiles > 1 ? size : AHEAD), int(share)};
  while (row < end) {
    F32 y[TILE];
    const int m = tile_rows(row, x.rows);
    tile<FORMAT>(m, w, data, x, row, ahead, y);
    ahead.from += share * groups * 64;
    for (int i = 0; i < m; i++, row++) {
      store_some(out + row * stride + first, bias ? y[i] + b : y[i], lanes);
    }
  }
}

inline void product_block(const Matrix &w, int64_t block, const Activations &x, int64_t row, int64_t end, float *out, int64_t stride,
                          const float *bias) {
  switch (w.format) {
    case F32_ROWS: return block_rows<F32_ROWS>(w, block, x, row, end, out, stride, bias);
    case Q8: return block_rows<Q8>(w, block, x, row, end, out, stride, bias);
    case Q6_K: return block_rows<Q6_K>(w, block, x, row, end, out, stride, bias);
    case Q5: return block_rows<Q5>(w, block, x, row, end, out, stride, bias);
    case Q5_MIN: return block_rows<Q5_MIN>(w, block, x, row, end, out, stride, bias);
    case Q5_K: return block_rows<Q5_K>(w, block, x, row, end, out, stride, bias);
    case Q4_MIN: return block_rows<Q4_MIN>(w, block, x, row, end, out, stride, bias);
    case Q4_K: return block_rows<Q4_K>(w, block, x, row, end, out, stride, bias);
    default: return;
  }
}

// One row of a matrix as float32 [columns]: an embedding.
inline float weight_at(const Matrix &w, int64_t row, int64_t column) {
  const int lane = int(row % BLOCK_ROWS);
  const uint8_t *block = w.data + row / BLOCK_ROWS * block_bytes(w.format, w.columns);
  if (w.format == F32_ROWS) return ((const float *)block)[column * LANES + lane];
  const Place at = place(w.format, lane, column);
  int q = block[at.byte] >> at.shift;
  if (LAYOUTS[w.format].bits < 8) q &= 15;
  if (LAYOUTS[w.format].bits == 6) {
    const Place upper = upper_place(lane, column);
    q |= (block[upper.byte] >> upper.shift & 3) << 4;
  }
  const int64_t group = column / GROUP;
  const uint8_t *g = block + group_scales(w.format, w.columns, group), *s = block + super_scales(w.format, w.columns, group);
  const auto half = [lane](const uint8_t *p, int part) { return half_to_float(((const uint16_t *)p)[part * LANES + lane]); };
  switch (w.format) {
    case Q8: return half(g, 0) * float(q - 128);
    case Q5: return half(g, 0) * float(q - 16);
    case Q5_MIN:
    case Q4_MIN: return half(g, 0) * float(q) + half(g, 1);
    case Q6_K: return half(s, 0) * float(((const int8_t *)g)[column % GROUP / 16 * LANES + lane]) * float(q - 32);
    default: return half(s, 0) * float(g[lane]) * float(q) - half(s, 1) * float(g[LANES + lane]);
  }
}

}  // namespace specbeam::SPECBEAM_ISA
