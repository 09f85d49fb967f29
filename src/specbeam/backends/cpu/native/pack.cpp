// Packs weights into the layouts of formats.h. Weights in llama.cpp's blocks keep their values, float32 is quantized.

#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "half.h"

namespace specbeam {

namespace {

uint16_t half_at(const uint8_t *p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

// The 6-bit scales and minima of the 8 groups of a Q4_K or Q5_K block.
void k_scales(const uint8_t *p, uint8_t *scale, uint8_t *minimum) {
  for (int g = 0; g < 4; g++) {
    scale[g] = p[g] & 63;
    minimum[g] = p[g + 4] & 63;
    scale[g + 4] = uint8_t((p[g + 8] & 15) | (p[g] >> 6) << 4);
    minimum[g + 4] = uint8_t(p[g + 8] >> 4 | (p[g + 4] >> 6) << 4);
  }
}

// Writes one row into its lane of a block.
struct Lane {
  Format format;
  uint8_t *block;
  int64_t columns;
  int lane;

  void weight(int64_t column, int q) const {
    if (LAYOUTS[format].bits == 6) {
      const Place upper = upper_place(lane, column);
      block[upper.byte] = uint8_t(block[upper.byte] | q >> 4 << upper.shift);
      q &= 15;
    }
    const Place at = place(format, lane, column);
    block[at.byte] = uint8_t(block[at.byte] | q << at.shift);
  }
  void half(int64_t group, int part, uint16_t h) const {
    std::memcpy(block + group_scales(format, columns, group) + (part * BLOCK_ROWS + lane) * 2, &h, 2);
  }
  void byte(int64_t group, int part, uint8_t b) const {
    block[group_scales(format, columns, group) + part * BLOCK_ROWS + lane] = b;
  }
  void super_half(int64_t group, int part, uint16_t h) const {
    std::memcpy(block + super_scales(format, columns, group) + (part * BLOCK_ROWS + lane) * 2, &h, 2);
  }
};

void pack_row(const Lane &to, int32_t type, const uint8_t *p) {
  const int64_t groups = to.columns / GROUP_COLUMNS;
  uint8_t scale[8], minimum[8];
  if (type == Q4_K_BLOCKS || type == Q5_K_BLOCKS) {
    const int64_t size = type == Q4_K_BLOCKS ? 144 : 176;
    for (int64_t s = 0; s < groups / GROUPS_PER_SUPER; s++, p += size) {
      k_scales(p + 4, scale, minimum);
      const uint8_t *high = p + 16, *low = p + size - 128;
      to.super_half(s * GROUPS_PER_SUPER, 0, half_at(p));
      to.super_half(s * GROUPS_PER_SUPER, 1, half_at(p + 2));
      for (int g = 0; g < GROUPS_PER_SUPER; g++) {
        to.byte(s * GROUPS_PER_SUPER + g, 0, scale[g]);
        to.byte(s * GROUPS_PER_SUPER + g, 1, minimum[g]);
        for (int i = 0; i < GROUP_COLUMNS; i++) {
          int q = low[g / 2 * 32 + i] >> (g % 2 * 4) & 15;
          if (type == Q5_K_BLOCKS) q |= (high[i] >> g & 1) << 4;
          to.weight((s * GROUPS_PER_SUPER + g) * GROUP_COLUMNS + i, q);
        }
      }
    }
    return;
  }
  if (type == Q6_K_BLOCKS) {
    for (int64_t s = 0; s < groups / GROUPS_PER_SUPER; s++, p += 210) {
      const uint8_t *low = p, *high = p + 128;
      to.super_half(s * GROUPS_PER_SUPER, 0, half_at(p + 208));
      for (int g = 0; g < GROUPS_PER_SUPER; g++) {
        const int part = g / 4, within = g % 4;  // the 128 columns, and the 32 within them
        for (int i = 0; i < GROUP_COLUMNS; i++) {
          const int nibble = low[part * 64 + within % 2 * 32 + i] >> (within / 2 * 4) & 15;
          const int bits = high[part * 32 + i] >> (within * 2) & 3;
          to.weight((s * GROUPS_PER_SUPER + g) * GROUP_COLUMNS + i, nibble | bits << 4);
        }
        to.byte(s * GROUPS_PER_SUPER + g, 0, p[192 + g * 2]);
        to.byte(s * GROUPS_PER_SUPER + g, 1, p[192 + g * 2 + 1]);
      }
    }
    return;
  }
  if (type == MXFP4_BLOCKS) {
    for (int64_t g = 0; g < groups; g++, p += 17) {
      to.byte(g, 0, p[0]);
      for (int i = 0; i < GROUP_COLUMNS; i++) to.weight(g * GROUP_COLUMNS + i, p[1 + i % 16] >> (i / 16 * 4) & 15);
    }
    return;
  }
  for (int64_t g = 0; g < groups; g++) {
    const uint16_t d = half_at(p);
    to.half(g, 0, d);
    if (type == Q8_0_BLOCKS) {
      for (int i = 0; i < GROUP_COLUMNS; i++) to.weight(g * GROUP_COLUMNS + i, int(int8_t(p[2 + i])) + 128);
      p += 34;
      continue;
    }
    const bool five = type == Q5_0_BLOCKS || type == Q5_1_BLOCKS,
               with_minimum = type == Q4_1_BLOCKS || type == Q5_1_BLOCKS;
    p += 2;
    if (with_minimum) to.half(g, 1, half_at(p)), p += 2;
    else if (type == Q4_0_BLOCKS) to.half(g, 1, float_to_half(-8.0f * half_to_float(d)));
    uint32_t high = 0;
    if (five) std::memcpy(&high, p, 4), p += 4;
    for (int i = 0; i < GROUP_COLUMNS; i++) {
      int q = p[i % 16] >> (i / 16 * 4) & 15;
      if (five) q |= int(high >> i & 1) << 4;
      to.weight(g * GROUP_COLUMNS + i, q);
    }
    p += 16;
  }
}

// An integer from `low` to `high`. NaN becomes 0.
float rounded(float x, float low, float high) { return x == x ? std::clamp(std::nearbyint(x), low, high) : 0.0f; }

// The highest magnitude, or NaN if there is one: as integers, the bits of NaN are above the bits of infinity.
float highest_magnitude(const float *x, int64_t n) {
  int32_t highest = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    highest = std::max(highest, bits & 0x7fffffff);
  }
  float magnitude;
  std::memcpy(&magnitude, &highest, 4);
  return magnitude;
}

void quantize_int8(const Lane &to, int64_t g, const float *x, int n) {
  const uint16_t h = float_to_half(highest_magnitude(x, n) / 127.0f);
  const float d = half_to_float(h);
  to.half(g, 0, h);
  for (int i = 0; i < GROUP_COLUMNS; i++) {
    const float q = i < n && d > 0 ? rounded(x[i] / d, -127.0f, 127.0f) : 0.0f;
    to.weight(g * GROUP_COLUMNS + i, int(q) + 128);
  }
}

// Four bits: finds a scale and a minimum with a small squared error. It tries 17 scales. Least squares on the rounded
// weights refine each of them twice.
void quantize_int4(const Lane &to, int64_t g, const float *x, int n) {
  float low = 0, high = 0;
  for (int i = 0; i < n; i++) low = std::min(low, x[i]), high = std::max(high, x[i]);
  uint16_t best_d = 0, best_m = 0;
  float least = INFINITY;
  uint8_t best[GROUP_COLUMNS] = {}, q[GROUP_COLUMNS] = {};
  for (int step = -4; step <= 12; step++) {
    float d = (high - low) / (15.0f + 0.25f * float(step)), m = low;
    for (int turn = 0; turn < 2; turn++) {
      if (!(d > 0)) break;
      float sq = 0, sqq = 0, sx = 0, sqx = 0;
      for (int i = 0; i < n; i++) {
        q[i] = uint8_t(rounded((x[i] - m) / d, 0.0f, 15.0f));
        sq += q[i], sqq += float(q[i]) * q[i], sx += x[i], sqx += q[i] * x[i];
      }
      const float det = float(n) * sqq - sq * sq;
      if (det > 0) d = (float(n) * sqx - sq * sx) / det, m = (sx - d * sq) / float(n);
      const uint16_t hd = float_to_half(d), hm = float_to_half(m);
      const float rd = half_to_float(hd), rm = half_to_float(hm);
      float error = 0;
      for (int i = 0; i < n; i++) {
        q[i] = uint8_t(rd != 0 ? rounded((x[i] - rm) / rd, 0.0f, 15.0f) : 0.0f);
        const float e = rd * q[i] + rm - x[i];
        error += e * e;
      }
      if (error < least) {
        least = error, best_d = hd, best_m = hm;
        std::memcpy(best, q, sizeof best);
      }
    }
  }
  // Without a scale, all weights are 0, or they are too large for half floats.
  if (!(least < INFINITY)) best_m = float_to_half(high > low ? INFINITY : 0.0f), std::memset(best, 0, sizeof best);
  to.half(g, 0, best_d);
  to.half(g, 1, best_m);
  for (int i = 0; i < GROUP_COLUMNS; i++) to.weight(g * GROUP_COLUMNS + i, i < n ? best[i] : 0);
}

// Whether the scales of a block are finite. The K kind has half floats in its super scales. The largest byte of an
// MXFP4 group stands for no number.
bool scales_are_finite(Format format, int64_t columns, const uint8_t *block) {
  const Layout &layout = LAYOUTS[format];
  if (format == MXFP4) {
    const uint8_t *first = block + group_scales(format, columns, 0), *end = first + groups_of(columns) * BLOCK_ROWS;
    return std::find(first, end, 255) == end;
  }
  const int64_t step = layout.super_scales ? GROUPS_PER_SUPER : 1;
  const int bytes = layout.super_scales ? layout.super_scales : layout.group_scales;
  bool finite = true;
  for (int64_t g = 0; g < groups_of(columns); g += step) {
    const uint8_t *p = block + (layout.super_scales ? super_scales : group_scales)(format, columns, g);
    for (int i = 0; i < bytes; i += 2) finite &= (half_at(p + i) & 0x7c00) != 0x7c00;
  }
  return finite;
}

}  // namespace

Format format_of(int32_t type) {
  switch (type) {
    case Q8_0_BLOCKS: return Q8;
    case Q5_0_BLOCKS: return Q5;
    case Q5_1_BLOCKS: return Q5_MIN;
    case Q5_K_BLOCKS: return Q5_K;
    case Q6_K_BLOCKS: return Q6_K;
    case Q4_0_BLOCKS:
    case Q4_1_BLOCKS: return Q4_MIN;
    case Q4_K_BLOCKS: return Q4_K;
    case MXFP4_BLOCKS: return MXFP4;
    default: return FORMAT_COUNT;
  }
}

int64_t columns_per_block(int32_t type) {
  return type == Q4_K_BLOCKS || type == Q5_K_BLOCKS || type == Q6_K_BLOCKS ? 256 : 32;
}

int64_t row_bytes(int32_t type, int64_t columns) {
  switch (type) {
    case MXFP4_BLOCKS: return columns / 32 * 17;
    case Q4_0_BLOCKS: return columns / 32 * 18;
    case Q4_1_BLOCKS: return columns / 32 * 20;
    case Q5_0_BLOCKS: return columns / 32 * 22;
    case Q5_1_BLOCKS: return columns / 32 * 24;
    case Q8_0_BLOCKS: return columns / 32 * 34;
    case Q4_K_BLOCKS: return columns / 256 * 144;
    case Q5_K_BLOCKS: return columns / 256 * 176;
    case Q6_K_BLOCKS: return columns / 256 * 210;
    default: return 0;
  }
}

bool pack_block(int32_t type, const uint8_t *source, int64_t rows, int64_t columns, const int64_t *order, int64_t block,
                uint8_t *out) {
  const Format format = format_of(type);
  uint8_t *to = out + block * block_bytes(format, columns);
  std::memset(to, 0, block_bytes(format, columns));
  for (int lane = 0; lane < BLOCK_ROWS && block * BLOCK_ROWS + lane < rows; lane++) {
    const int64_t row = block * BLOCK_ROWS + lane;
    pack_row({format, to, columns, lane}, type, source + (order ? order[row] : row) * row_bytes(type, columns));
  }
  return scales_are_finite(format, columns, to);
}

bool quantize_block(Format format, const float *source, int64_t rows, int64_t columns, int64_t block, uint8_t *out) {
  uint8_t *to = out + block * block_bytes(format, columns);
  std::memset(to, 0, block_bytes(format, columns));
  for (int lane = 0; lane < BLOCK_ROWS && block * BLOCK_ROWS + lane < rows; lane++) {
    const float *x = source + (block * BLOCK_ROWS + lane) * columns;
    if (format != Q8 && !std::isfinite(highest_magnitude(x, columns))) return false;  // of Q8, the scales show it
    if (format == F32_ROWS) {
      for (int64_t k = 0; k < columns; k++) ((float *)to)[k * BLOCK_ROWS + lane] = x[k];
      continue;
    }
    for (int64_t g = 0; g < groups_of(columns); g++) {
      const int here = int(std::min<int64_t>(GROUP_COLUMNS, columns - g * GROUP_COLUMNS));
      const Lane at{format, to, columns, lane};
      if (format == Q8) quantize_int8(at, g, x + g * GROUP_COLUMNS, here);
      else quantize_int4(at, g, x + g * GROUP_COLUMNS, here);
    }
  }
  return format == F32_ROWS || scales_are_finite(format, columns, to);
}

}  // namespace specbeam
