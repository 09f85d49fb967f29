// Products of a few rows of activations with a matrix. Activations are quantized to 8 bits, a scale for each group of 32.
#pragma once

#include <vector>

#include "formats.h"
#include "simd.h"

namespace specbeam::SPECBEAM_ISA {

// Rows of activations, quantized and as they were.
struct Activations {
  int64_t rows = 0, columns = 0, groups = 0;
  std::vector<float> values;    // [rows, columns]
  std::vector<int8_t> bytes;    // [rows, groups * 32]
  std::vector<float> scales;    // [rows, groups]
  std::vector<float> sums;      // [rows, groups]: of a group's values as quantized, for the minimum
  std::vector<int32_t> halves;  // [rows, groups, 2]: sums of the bytes of each 16, for the zero point

  void resize(int64_t n, int64_t width) {
    rows = n, columns = width, groups = groups_of(width);
    grow(values, n * width);
    grow(bytes, n * groups * GROUP);
    grow(scales, n * groups);
    grow(sums, n * groups);
    grow(halves, n * groups * 2);
  }

  void quantize(int64_t row) {
    const float *x = &values[row * columns];
    for (int64_t g = 0; g < groups; g++) {
      float padded[GROUP] = {};
      const int64_t here = columns - g * GROUP < GROUP ? columns - g * GROUP : GROUP;
      std::memcpy(padded, x + g * GROUP, here * sizeof(float));
      const F32 a = load<F32>(padded), b = load<F32>(padded + LANES);
      const I32 sign = all(int32_t(0x7fffffff));
      const F32 high = (F32)((I32)a & sign), low = (F32)((I32)b & sign);
      const float most = max(select(high > low, high, low)), scale = most / 127.0f;
      const float inverse = most > 0 ? 127.0f / most : 0;
      const F32 magic = all(12582912.0f);  // rounds to the nearest whole number
      const I32 qa = __builtin_convertvector(multiply_add(a, all(inverse), magic) - magic, I32);
      const I32 qb = __builtin_convertvector(multiply_add(b, all(inverse), magic) - magic, I32);
      int8_t *q = &bytes[(row * groups + g) * GROUP];
      store_bytes(q, qa);
      store_bytes(q + LANES, qb);
      int32_t sa = 0, sb = 0;
      for (int i = 0; i < LANES; i++) sa += qa[i], sb += qb[i];
      scales[row * groups + g] = scale;
      sums[row * groups + g] = scale * float(sa + sb);
      halves[(row * groups + g) * 2] = sa;
      halves[(row * groups + g) * 2 + 1] = sb;
    }
  }

 private:
  template <class T> static void grow(std::vector<T> &v, size_t n) {
    if (v.size() < n) v.resize(n);
  }
};

// The scales of a group, sixteen outputs at once: a weight is scale[half] * (q - zero) + minimum.
struct Scales {
  F32 first, second, minimum;
};

template <Format FORMAT> inline Scales scales_at(const uint8_t *group, const uint8_t *super) {
  if constexpr (FORMAT == Q8) {
    const F32 d = load_half((const uint16_t *)group);
    return {d, d, F32{}};
  } else if constexpr (FORMAT == Q8_MIN || FORMAT == Q4_MIN) {
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

template <Format FORMAT> constexpr int ZERO = FORMAT == Q8 ? 128 : FORMAT == Q6_K ? 32 : 0;
template <Format FORMAT> constexpr bool HAS_MINIMUM = FORMAT == Q8_MIN || FORMAT == Q8_K || FORMAT == Q4_MIN || FORMAT == Q4_K;

// How far ahead weights are asked for, in bytes: with 8 rows the arithmetic is too long for the processor to look ahead itself.
constexpr int64_t AHEAD = 2048;

// The product of M rows of activations, from `row` on, with a block; sixteen outputs a row.
template <Format FORMAT, int M>
inline void block_product(const uint8_t *block, int64_t columns, const Activations &x, int64_t row, F32 *out) {
  const int64_t groups = x.groups;
  F32 y[M] = {};
  const uint8_t *weights = block;
  const uint8_t *scales = block + weight_bytes(FORMAT, columns), *super = scales;
  for (int64_t g = 0; g < groups; g++) {
    if constexpr (LAYOUTS[FORMAT].super_scales > 0)
      if (g % SUPER == 0) super = scales, scales += LAYOUTS[FORMAT].super_scales;
    for (int j = 0; j < LAYOUTS[FORMAT].bits; j++) prefetch(weights + AHEAD + 64 * j);
    U8 w[8];
    if constexpr (LAYOUTS[FORMAT].bits == 4) {
      for (int j = 0; j < 4; j++) {
        const U8 both = load<U8>(weights + 64 * j);
        w[j] = both & 15;
        w[j + 4] = (U8)(((U32)both >> 4) & 0x0f0f0f0f);
      }
      weights += 256;
    } else {
      for (int j = 0; j < 8; j++) w[j] = load<U8>(weights + 64 * j);
      weights += 512;
    }
    const Scales s = scales_at<FORMAT>(scales, super);
    scales += LAYOUTS[FORMAT].group_scales;
    // Sums of whole numbers may be cut and ordered at will: PARTS apart, so that none waits for the one before it.
    constexpr int PARTS = FORMAT == Q6_K ? (M == 1 ? 4 : 2) : M == 1 ? 4 : M <= 4 ? 2 : 1;
    I32 dots[M][PARTS];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const int64_t at = (row + m) * groups + g;
      for (int part = 0; part < PARTS; part++) dots[m][part] = I32{};
      if constexpr (FORMAT == Q6_K) {
        dots[m][0] = all(-ZERO<FORMAT> * x.halves[2 * at]);
        dots[m][PARTS / 2] = all(-ZERO<FORMAT> * x.halves[2 * at + 1]);
      } else if constexpr (ZERO<FORMAT> != 0) {
        dots[m][0] = all(-ZERO<FORMAT> * (x.halves[2 * at] + x.halves[2 * at + 1]));
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const int32_t *q = (const int32_t *)&x.bytes[((row + m) * groups + g) * GROUP];
        I32 &dot = dots[m][j * PARTS / 8];
        dot = dot4(dot, w[j], q[j]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const int64_t at = (row + m) * groups + g;
      const F32 scale = all(x.scales[at]);
      const auto sum = [&](int first, int count) {
        I32 total = dots[m][first];
        for (int part = first + 1; part < first + count; part++) total += dots[m][part];
        return to_float(total) * scale;
      };
      if constexpr (FORMAT == Q6_K) {
        y[m] = multiply_add(sum(0, PARTS / 2), s.first, y[m]);
        y[m] = multiply_add(sum(PARTS / 2, PARTS / 2), s.second, y[m]);
      } else {
        y[m] = multiply_add(sum(0, PARTS), s.first, y[m]);
        if constexpr (HAS_MINIMUM<FORMAT>) y[m] = multiply_add(all(x.sums[at]), s.minimum, y[m]);
      }
    }
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

constexpr int TILE = 8;

template <Format FORMAT, int M>
inline void tile(const Matrix &w, const uint8_t *block, const Activations &x, int64_t row, F32 *out) {
  if constexpr (FORMAT == F32_ROWS) block_product_float<M>(block, x, row, out);
  else block_product<FORMAT, M>(block, w.columns, x, row, out);
}

// One block of outputs for all rows: out[row * stride + lane], plus the bias if there is one.
template <Format FORMAT>
void block_rows(const Matrix &w, int64_t block, const Activations &x, float *out, int64_t stride, const float *bias) {
  const uint8_t *data = w.data + block * block_bytes(w.format, w.columns);
  const int64_t first = block * BLOCK_ROWS, lanes = w.rows - first < LANES ? w.rows - first : LANES;
  float padded[LANES] = {};
  if (bias) std::memcpy(padded, bias + first, lanes * sizeof(float));
  const F32 b = load<F32>(padded);
  for (int64_t row = 0; row < x.rows;) {
    F32 y[TILE];
    const int64_t left = x.rows - row;
    int m;
    if (left >= 8) tile<FORMAT, 8>(w, data, x, row, y), m = 8;
    else if (left >= 4) tile<FORMAT, 4>(w, data, x, row, y), m = 4;
    else if (left >= 2) tile<FORMAT, 2>(w, data, x, row, y), m = 2;
    else tile<FORMAT, 1>(w, data, x, row, y), m = 1;
    for (int i = 0; i < m; i++, row++) {
      const F32 z = bias ? y[i] + b : y[i];
      std::memcpy(out + row * stride + first, &z, lanes * sizeof(float));
    }
  }
}

inline void product_block(const Matrix &w, int64_t block, const Activations &x, float *out, int64_t stride, const float *bias) {
  switch (w.format) {
    case F32_ROWS: return block_rows<F32_ROWS>(w, block, x, out, stride, bias);
    case Q8: return block_rows<Q8>(w, block, x, out, stride, bias);
    case Q8_MIN: return block_rows<Q8_MIN>(w, block, x, out, stride, bias);
    case Q8_K: return block_rows<Q8_K>(w, block, x, out, stride, bias);
    case Q6_K: return block_rows<Q6_K>(w, block, x, out, stride, bias);
    case Q4_MIN: return block_rows<Q4_MIN>(w, block, x, out, stride, bias);
    case Q4_K: return block_rows<Q4_K>(w, block, x, out, stride, bias);
    default: return;
  }
}

// One row of a matrix as float32 [columns]: an embedding.
inline float weight_at(const Matrix &w, int64_t row, int64_t column) {
  const int lane = int(row % BLOCK_ROWS);
  const uint8_t *block = w.data + row / BLOCK_ROWS * block_bytes(w.format, w.columns);
  if (w.format == F32_ROWS) return ((const float *)block)[column * LANES + lane];
  const Place at = place(w.format, lane, column);
  const int q = LAYOUTS[w.format].bits == 4 ? block[at.byte] >> at.shift & 15 : block[at.byte];
  const int64_t group = column / GROUP;
  const uint8_t *g = block + group_scales(w.format, w.columns, group), *s = block + super_scales(w.format, w.columns, group);
  const auto half = [lane](const uint8_t *p, int part) { return half_to_float(((const uint16_t *)p)[part * LANES + lane]); };
  switch (w.format) {
    case Q8: return half(g, 0) * float(q - 128);
    case Q8_MIN:
    case Q4_MIN: return half(g, 0) * float(q) + half(g, 1);
    case Q6_K: return half(s, 0) * float(((const int8_t *)g)[column % GROUP / 16 * LANES + lane]) * float(q - 32);
    default: return half(s, 0) * float(g[lane]) * float(q) - half(s, 1) * float(g[LANES + lane]);
  }
}

}  // namespace specbeam::SPECBEAM_ISA
