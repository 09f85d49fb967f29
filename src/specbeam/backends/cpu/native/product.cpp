// The products of one format (SPECBEAM_FORMAT). CMakeLists.txt compiles this file for each format and instruction set,
// so that compilers work in parallel.
#include "product.h"

namespace specbeam {

namespace {

// The scales of a group for the outputs of a register. A weight is scale * (q - zero) + minimum. The two halves of a
// group have the scales `first` and `second`.
struct Scales {
  Register first, second, minimum;
};

// lane: the register's first output in its block
template <Format FORMAT> inline Scales scales_at(const uint8_t *group, const uint8_t *super, int lane = 0) {
  const auto half = [lane](const uint8_t *p, int part) { return load_half((const uint16_t *)p + part * LANES + lane); };
  const auto byte = [lane](const auto *p, int part) { return load_bytes(p + part * LANES + lane); };
  if constexpr (FORMAT == Q8 || FORMAT == Q5) {
    const Register d = half(group, 0);
    return {d, d, Register{}};
  } else if constexpr (FORMAT == MXFP4) {
    const Register d = load_powers(group + lane);
    return {d, d, Register{}};
  } else if constexpr (FORMAT == Q5_MIN || FORMAT == Q4_MIN) {
    const Register d = half(group, 0);
    return {d, d, half(group, 1)};
  } else if constexpr (FORMAT == Q6_K) {
    const Register d = half(super, 0);
    return {d * byte((const int8_t *)group, 0), d * byte((const int8_t *)group, 1), Register{}};
  } else {
    const Register d = half(super, 0) * byte(group, 0);
    return {d, d, -(half(super, 1) * byte(group, 1))};
  }
}

// Of an MXFP4 weight, twice its value is at least -12.
template <Format FORMAT> constexpr int ZERO_POINT = FORMAT == Q8      ? 128
                                                    : FORMAT == Q6_K  ? 32
                                                    : FORMAT == Q5    ? 16
                                                    : FORMAT == MXFP4 ? 12
                                                                      : 0;
template <Format FORMAT> constexpr bool HAS_MINIMUM =
    FORMAT == Q5_MIN || FORMAT == Q5_K || FORMAT == Q4_MIN || FORMAT == Q4_K;

// MXFP4_VALUES plus the zero point, by the number of a value.
constexpr uint8_t MXFP4_UNSIGNED[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

constexpr int PREFETCH_BYTES_AHEAD = 20480;

// The weights to prefetch while a group is multiplied. A processor looks a few hundred instructions ahead, and here
// they are arithmetic. Without prefetches it would ask for the next weights too late.
struct Ahead {
  const uint8_t *from;
  int lines;  // cache lines of 64 bytes, per group
};

#if defined(SPECBEAM_EIGHT_LANES)

// Registers have eight lanes, and there are only 16 of them. So a block is two parts of eight outputs. Of up to
// MAX_FEW_ROWS rows, the integer sums of a group stay in registers while its weights go by, one vector of four columns
// after another. Of more rows, half of the group's weights stay in registers while the rows take their turns.
#if defined(__AVXVNNI__)
constexpr bool HAS_DOT4 = true;
#else
constexpr bool HAS_DOT4 = false;
#endif
#if defined(__clang__)
constexpr int MAX_FEW_ROWS = HAS_DOT4 ? 6 : TILE_ROWS;
#else
constexpr int MAX_FEW_ROWS = 6;  // with more, GCC moves sums to memory and back too often
#endif
// Without a dot product of four bytes, products are added in 16 bits, two at a time, and their sums must stay below
// 2^15 = 32,768. The bytes of a row are -127 to 127.
//
// - Four-bit weights leave room for all eight vectors of a group: 8 * 2 * 15 * 127 = 30,480.
// - Six-bit weights leave room for two vectors: 2 * 2 * 63 * 127 = 32,004.
// - Eight-bit weights leave none. They are multiplied as shorts (pairs_product).
//
// MXFP4 weights are looked up as numbers up to 24. They count as six-bit weights.
template <Format FORMAT> constexpr int BITS_OF_PRODUCT = FORMAT == MXFP4 ? 6 : LAYOUTS[FORMAT].bits;
template <int BITS> constexpr bool HAS_SHORT_SUMS = BITS == 4 && !HAS_DOT4;
template <int BITS> constexpr int VECTORS_PER_SUM = BITS == 6 && !HAS_DOT4 ? 2 : 1;

// Unpacks vector j of half of a group's weights: four of the first 16 columns (half = 0), or of the last 16.
template <int BITS> __attribute__((always_inline)) inline __m256i unpack(const uint8_t *p, int half, int j) {
  const auto at = [p](int line) { return _mm256_loadu_si256((const __m256i *)(p + 64 * line)); };
  if constexpr (BITS == 8) return at(4 * half + j);
  const __m256i lower = _mm256_and_si256(half ? _mm256_srli_epi16(at(j), 4) : at(j), _mm256_set1_epi8(15));
  if constexpr (BITS == 4) return lower;
  const __m256i four = at(4 + half);
  const __m256i upper = j < 2 ? _mm256_slli_epi16(four, 4 - 2 * j) : _mm256_srli_epi16(four, 2 * j - 4);
  return _mm256_or_si256(lower, _mm256_and_si256(upper, _mm256_set1_epi8(48)));
}

// Values by their numbers, plus the zero point.
inline __m256i mxfp4_values(__m256i numbers) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)MXFP4_UNSIGNED)), numbers);
}

// Adds the dot products of VECTORS_PER_SUM vectors of weights, each with four bytes of a row.
template <int BITS>
__attribute__((always_inline)) inline __m256i add_dots(__m256i sum, const __m256i *w, const __m256i *x) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, w[0], x[0]);
#else
  if constexpr (BITS == 4) return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[0], x[0]));
  const __m256i shorts = _mm256_add_epi16(_mm256_maddubs_epi16(w[0], x[0]), _mm256_maddubs_epi16(w[1], x[1]));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(shorts, _mm256_set1_epi16(1)));
#endif
}

// The sum over a group, or of Q6_K over half a group, as floats without the zero point.
// halves: the sums of the row's bytes in the halves of the group.
template <Format FORMAT>
__attribute__((always_inline)) inline Register finished(__m256i sum, const int32_t *halves, int half) {
  constexpr int ZERO = ZERO_POINT<FORMAT>;
  if constexpr (HAS_SHORT_SUMS<BITS_OF_PRODUCT<FORMAT>>) sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
  if constexpr (ZERO != 0) {
    I32::Half zeros = (I32::Half)_mm256_set1_epi32(halves[half]);
    if constexpr (FORMAT != Q6_K) zeros += (I32::Half)_mm256_set1_epi32(halves[0]);
    sum = _mm256_sub_epi32(sum, (__m256i)(zeros * ZERO));
  }
  return (Register)_mm256_cvtepi32_ps(sum);
}

// The same as block_product, of 8-bit weights as shorts: the even columns of a vector, and then the odd ones. Of
// ROWS rows at a time, the sums over a group stay in registers.
template <int M>
inline void pairs_product(const uint8_t *weights, int64_t columns, const ActivationRows &x, int64_t row, Ahead ahead,
                          F32 (*out)[1]) {
  constexpr int ROWS = std::min(M, 5), VECTORS = GROUP_COLUMNS / 4;
  Register y[M][2] = {};
  const uint8_t *scales = weights + weight_bytes(Q8, columns);
  for (int64_t g = 0; g < x.groups; g++) {
    for (int j = 0; j < ahead.lines; j++, ahead.from += 64) prefetch(ahead.from);
    const int64_t at = row * x.groups + g * M;  // of the first row
#pragma GCC unroll 2
    for (int from = 0; from < M; from += ROWS) {
      const int rows = std::min(ROWS, M - from);
      __m256i sums[ROWS][2];
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) {
        __m256i even[2], odd[2];
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          const __m256i four = _mm256_loadu_si256((const __m256i *)(weights + 64 * j + 32 * part));
          even[part] = _mm256_and_si256(four, _mm256_set1_epi16(255)), odd[part] = _mm256_srli_epi16(four, 8);
        }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
          const int32_t *pairs = (const int32_t *)&x.pairs[(at + from + m) * GROUP_COLUMNS] + 2 * j;
          const __m256i first = _mm256_set1_epi32(pairs[0]), second = _mm256_set1_epi32(pairs[1]);
#pragma GCC unroll 2
          for (int part = 0; part < 2; part++) {
            const __m256i sum = j == 0 ? _mm256_setzero_si256() : sums[m][part];
            sums[m][part] = _mm256_add_epi32(_mm256_add_epi32(sum, _mm256_madd_epi16(even[part], first)),
                                             _mm256_madd_epi16(odd[part], second));
          }
          // GCC would order the additions in a way that needs more registers than there are.
          asm volatile("" : "+x"(sums[m][0]), "+x"(sums[m][1]));
        }
      }
      const Scales s[2] = {scales_at<Q8>(scales, scales, 0), scales_at<Q8>(scales, scales, 8)};
#pragma GCC unroll 8
      for (int m = 0; m < rows; m++) {
        const Register scale = every(x.scales[at + from + m]);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          const Register sum = finished<Q8>(sums[m][part], &x.halves[2 * (at + from + m)], 1);
          y[from + m][part] = multiply_add(sum * scale, s[part].first, y[from + m][part]);
        }
      }
      asm volatile("" : "+r"(weights));  // GCC would keep the rows' common weights in memory
    }
    scales += LAYOUTS[Q8].group_scales;
    weights += VECTORS * 64;
  }
  for (int m = 0; m < M; m++) std::memcpy(&out[m][0], y[m], sizeof y[m]);
}

// The product of M rows of activations, from `row` on, with a block: sixteen outputs per row.
template <Format FORMAT, int M, int B>
inline void block_product(const uint8_t *block, int64_t columns, const ActivationRows &x, int64_t row, Ahead ahead,
                          F32 (*out)[B]) {
  static_assert(B == 1);
  if constexpr (FORMAT == Q8 && HAS_PAIRS) return pairs_product<M>(block, columns, x, row, ahead, out);
  constexpr int BITS = LAYOUTS[FORMAT].bits, PRODUCT_BITS = BITS_OF_PRODUCT<FORMAT>;
  constexpr int VECTORS = VECTORS_PER_SUM<PRODUCT_BITS>;
  constexpr int KEPT = M <= MAX_FEW_ROWS ? VECTORS : 4;  // vectors of weights in registers, of each part
  const int64_t groups = x.groups;
  Register y[M][2] = {};
  const uint8_t *weights = block;
  const uint8_t *scales = block + weight_bytes(FORMAT, columns), *super = scales;
  for (int64_t g = 0; g < groups; g++) {
    if constexpr (LAYOUTS[FORMAT].super_scales > 0)
      if (g % GROUPS_PER_SUPER == 0) super = scales, scales += LAYOUTS[FORMAT].super_scales;
    for (int j = 0; j < ahead.lines; j++, ahead.from += 64) prefetch(ahead.from);
    const int64_t at = row * groups + g * M;  // of the first row
    __m256i sums[M][2];    // over the group; of Q6_K, which has a scale for each half, over half of it
    Register first[M][2];  // of Q6_K: the scaled sums of the first half
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const bool begins = half == 0 || FORMAT == Q6_K, ends = half == 1 || FORMAT == Q6_K;
      const auto unpacked = [&](int j, __m256i(*w)[KEPT]) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++)
#pragma GCC unroll 4
          for (int i = 0; i < KEPT; i++) {
            w[part][i] = unpack<BITS>(weights + 32 * part, half, j + i);
            if constexpr (FORMAT == MXFP4) w[part][i] = mxfp4_values(w[part][i]);
          }
      };
      const auto add = [&](int m, int j, const __m256i(*w)[KEPT]) __attribute__((always_inline)) {
        const int32_t *bytes = (const int32_t *)&x.bytes[(at + m) * GROUP_COLUMNS] + 4 * half + j;
        __m256i q[KEPT];
#pragma GCC unroll 4
        for (int i = 0; i < KEPT; i++) q[i] = _mm256_set1_epi32(bytes[i]);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          __m256i sum = begins && j == 0 ? _mm256_setzero_si256() : sums[m][part];
#pragma GCC unroll 4
          for (int i = 0; i < KEPT; i += VECTORS) sum = add_dots<PRODUCT_BITS>(sum, &w[part][i], &q[i]);
          sums[m][part] = sum;
        }
      };
      const auto finish = [&](int m, const Scales *s) __attribute__((always_inline)) {
        const Register scale = every(x.scales[at + m]);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          const Register sum = finished<FORMAT>(sums[m][part], &x.halves[2 * (at + m)], half);
          Register &to = y[m][part];
          if constexpr (FORMAT == Q6_K) {
            if (half == 0) first[m][part] = sum * s[part].first;
            else to = multiply_add(multiply_add(sum, s[part].second, first[m][part]), scale, to);
          } else {
            to = multiply_add(sum * scale, s[part].first, to);
            if constexpr (HAS_MINIMUM<FORMAT>) to = multiply_add(every(x.sums[at + m]), s[part].minimum, to);
          }
        }
      };
      __m256i w[2][KEPT];
      if constexpr (M <= MAX_FEW_ROWS) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j += KEPT) {
          unpacked(j, w);
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) {
            add(m, j, w);
            // GCC would order the additions in a way that needs more registers than there are.
            asm volatile("" : "+x"(sums[m][0]), "+x"(sums[m][1]));
          }
        }
        if (!ends) continue;
        const Scales s[2] = {scales_at<FORMAT>(scales, super, 0), scales_at<FORMAT>(scales, super, 8)};
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) finish(m, s);
      } else {
        unpacked(0, w);
        const Scales s[2] = {scales_at<FORMAT>(scales, super, 0), scales_at<FORMAT>(scales, super, 8)};
#pragma GCC unroll 1
        for (int m = 0; m < M; m++) {
          add(m, 0, w);
          if (ends) finish(m, s);
        }
      }
    }
    scales += LAYOUTS[FORMAT].group_scales;
    weights += BITS * 64;
  }
  for (int m = 0; m < M; m++) std::memcpy(&out[m][0], y[m], sizeof y[m]);
}

#else

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

// Values by their numbers, plus the zero point.
inline U8 mxfp4_values(U8 numbers) {
#if defined(__AVX512F__)
  const __m128i values = _mm_loadu_si128((const __m128i *)MXFP4_UNSIGNED);
  return (U8)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)numbers);
#elif defined(__aarch64__)
  U8 found;
  for (int quarter = 0; quarter < 4; quarter++)
    vst1q_u8((uint8_t *)&found + 16 * quarter,
             vqtbl1q_u8(vld1q_u8(MXFP4_UNSIGNED), vld1q_u8((const uint8_t *)&numbers + 16 * quarter)));
  return found;
#else
  U8 found;
  for (int i = 0; i < 64; i++) found[i] = MXFP4_UNSIGNED[numbers[i]];
  return found;
#endif
}

// The product of M rows of activations, from `row` on, with B neighbouring blocks: sixteen outputs per row and block.
template <Format FORMAT, int M, int B>
inline void block_product(const uint8_t *block, int64_t columns, const ActivationRows &x, int64_t row, Ahead ahead,
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
      for (int b = 0; b < B; b++) {
        unpack<LAYOUTS[FORMAT].bits>(weights + b * size, half, w[b]);
        if constexpr (FORMAT == MXFP4)
          for (int j = 0; j < 4; j++) w[b][j] = mxfp4_values(w[b][j]);
      }
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

#endif

template <int M> inline void block_product_float(const uint8_t *block, const ActivationRows &x, int64_t row,
                                                 F32 (*out)[1]) {
#if defined(SPECBEAM_EIGHT_LANES)
  if constexpr (M > 4) {  // the sums of four rows stay in registers
    block_product_float<4>(block, x, row, out);
    return block_product_float<M - 4>(block, x, row + 4, out + 4);
  }
#endif
  constexpr int PART = sizeof(Register) / sizeof(float);
  for (int part = 0; part < LANES; part += PART) {
    Register even[M] = {}, odd[M] = {};
    const float *w = (const float *)block + part;
    const auto add = [&](int64_t k, Register *y) __attribute__((always_inline)) {
      const Register lanes = load<Register>(w + k * LANES);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) y[m] = multiply_add(every(x.values[(row + m) * x.columns + k]), lanes, y[m]);
    };
    int64_t k = 0;
    for (; k + 1 < x.columns; k += 2) add(k, even), add(k + 1, odd);
    if (k < x.columns) add(k, even);
    for (int m = 0; m < M; m++) store((float *)&out[m][0] + part, even[m] + odd[m]);
  }
}

template <Format FORMAT, int M = TILE_ROWS>
inline void tile(int m, const Matrix &w, const uint8_t *block, const ActivationRows &x, int64_t row, Ahead ahead,
                 F32 (*out)[1]) {
  if constexpr (M > 1)
    if (m < M) return tile<FORMAT, M - 1>(m, w, block, x, row, ahead, out);
  if constexpr (FORMAT == F32_ROWS) block_product_float<M>(block, x, row, out);
  else block_product<FORMAT, M, 1>(block, w.columns, x, row, ahead, out);
}

// Multiplies the rows from `row` up to `end` with B neighbouring blocks. With more than one block, all tiles are full.
template <Format FORMAT, int B>
inline void rows_product(const Matrix &w, int64_t block, const ActivationRows &x, int64_t row, int64_t end, float *out,
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
void block_rows(const Matrix &w, int64_t block, int64_t count, const ActivationRows &x, int64_t row, int64_t end,
                float *out, int64_t stride, const float *bias) {
  // Q6_K has a scale for each half of a group. Two blocks would need more registers than there are. A single tile is
  // left to one block: its prefetches go straight on.
  if constexpr (TILE_BLOCKS > 1 && FORMAT != F32_ROWS && FORMAT != Q6_K) {
    const int64_t full = std::min(end, x.rows - shared_rows(x.rows)) / TILE_ROWS * TILE_ROWS;
    if (count == TILE_BLOCKS && full - row >= 2 * TILE_ROWS) {
      rows_product<FORMAT, TILE_BLOCKS>(w, block, x, row, full, out, stride, bias);
      row = full;
    }
  }
  if (row < end)
    for (int64_t i = 0; i < count; i++) rows_product<FORMAT, 1>(w, block + i, x, row, end, out, stride, bias);
}

template void block_rows<SPECBEAM_FORMAT>(const Matrix &, int64_t, int64_t, const ActivationRows &, int64_t, int64_t,
                                          float *, int64_t, const float *);

}  // namespace specbeam
