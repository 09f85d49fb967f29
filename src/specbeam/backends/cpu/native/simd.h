// Vectors of sixteen lanes. The compiler lowers them to the registers of the instruction set. Only fused
// multiplications, dot products of bytes and conversions use intrinsics. Only sources that are compiled once for each
// instruction set may include this file: its functions are other ones for each.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace specbeam {

constexpr int LANES = 16;

#if defined(__AVX2__) && !defined(__AVX512F__)
#define SPECBEAM_EIGHT_LANES
// Two registers of 256 bits that count as one vector. GCC 12 would keep vectors of 64 bytes in memory, and compare and
// convert them lane by lane.
template <class Number> struct Pair {
  typedef Number Lane;
  typedef Number Half __attribute__((vector_size(32)));
  Half low, high;

  Number operator[](int i) const { return i < 32 / int(sizeof(Number)) ? low[i] : high[i - 32 / int(sizeof(Number))]; }
  template <class Other> explicit operator Pair<Other>() const {
    return {(typename Pair<Other>::Half)low, (typename Pair<Other>::Half)high};
  }
};

#define SPECBEAM_OPERATOR(Result, op)                                                       \
  template <class N> inline Pair<Result> operator op(Pair<N> a, Pair<N> b) {                \
    return {a.low op b.low, a.high op b.high};                                              \
  }                                                                                         \
  template <class N> inline Pair<Result> operator op(Pair<N> a, typename Pair<N>::Lane b) { \
    return {a.low op b, a.high op b};                                                       \
  }                                                                                         \
  template <class N> inline Pair<Result> operator op(typename Pair<N>::Lane a, Pair<N> b) { \
    return {a op b.low, a op b.high};                                                       \
  }
SPECBEAM_OPERATOR(N, +)
SPECBEAM_OPERATOR(N, -)
SPECBEAM_OPERATOR(N, *)
SPECBEAM_OPERATOR(N, /)
SPECBEAM_OPERATOR(N, &)
SPECBEAM_OPERATOR(N, |)
SPECBEAM_OPERATOR(N, ^)
SPECBEAM_OPERATOR(N, <<)
SPECBEAM_OPERATOR(N, >>)
SPECBEAM_OPERATOR(int32_t, <)
SPECBEAM_OPERATOR(int32_t, <=)
SPECBEAM_OPERATOR(int32_t, >)
SPECBEAM_OPERATOR(int32_t, ==)
SPECBEAM_OPERATOR(int32_t, !=)
#undef SPECBEAM_OPERATOR
template <class N> inline Pair<N> operator-(Pair<N> a) { return {-a.low, -a.high}; }
template <class N> inline Pair<N> operator~(Pair<N> a) { return {~a.low, ~a.high}; }
template <class N> inline Pair<N> &operator+=(Pair<N> &a, Pair<N> b) { return a = a + b; }

typedef Pair<float> F32;
typedef Pair<int32_t> I32;
typedef Pair<uint32_t> U32;
typedef Pair<uint64_t> U64;
#else
typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint64_t U64 __attribute__((vector_size(64)));
typedef int16_t I16 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(64)));
typedef uint8_t U8 __attribute__((vector_size(64)));
#endif

// The outputs that a product has in a register: sixteen, or eight where registers have 256 bits and there are only 16.
#if defined(SPECBEAM_EIGHT_LANES)
typedef F32::Half Register;
#else
typedef F32 Register;
#endif

// Prefetches into the second-level cache. It can wait for more requests to memory at a time than the first level.
inline void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }
// Prefetches into the first level, to be read or written.
inline void prefetch_to_read(const void *p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_to_write(void *p) { __builtin_prefetch(p, 1, 3); }

template <class T, class P> inline T load(const P *p) {
  T v;
#if defined(SPECBEAM_EIGHT_LANES)
  if constexpr (sizeof v == 64) {  // a copy of both would be a copy in memory
    std::memcpy(&v.low, p, 32);
    std::memcpy(&v.high, (const char *)p + 32, 32);
  } else
#endif
    std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T, class P> inline void store(P *p, T v) {
#if defined(SPECBEAM_EIGHT_LANES)
  if constexpr (sizeof v == 64) {
    std::memcpy(p, &v.low, 32);
    std::memcpy((char *)p + 32, &v.high, 32);
  } else
#endif
    std::memcpy(p, &v, sizeof v);
}

// Loads n floats, at most 16; the other lanes are 0. If n is 16, the compiler knows the size of the copy and makes it
// one instruction.
inline F32 load_some(const float *p, int64_t n) {
  if (n >= LANES) return load<F32>(p);
  float padded[LANES] = {};
  std::memcpy(padded, p, n * sizeof(float));
  return load<F32>(padded);
}
// Stores the first n lanes, at most 16.
inline void store_some(float *p, F32 v, int64_t n) {
  if (n >= LANES) return store(p, v);
  std::memcpy(p, &v, n * sizeof(float));
}

#if defined(SPECBEAM_EIGHT_LANES)
inline Register every(float x) { return (Register)_mm256_set1_ps(x); }
inline F32 all(float x) { return {every(x), every(x)}; }
inline I32 all(int32_t x) { return (I32)F32{(Register)_mm256_set1_epi32(x), (Register)_mm256_set1_epi32(x)}; }
inline Register multiply_add(Register a, Register b, Register c) {
  return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
inline F32 to_float(I32 x) {
  return {__builtin_convertvector(x.low, Register), __builtin_convertvector(x.high, Register)};
}
inline I32 to_int(F32 x) {
  return {__builtin_convertvector(x.low, I32::Half), __builtin_convertvector(x.high, I32::Half)};
}
inline F32 select(I32 mask, F32 a, F32 b) { return {mask.low ? a.low : b.low, mask.high ? a.high : b.high}; }
#else
inline F32 all(float x) { return F32{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline I32 all(int32_t x) { return I32{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Register every(float x) { return all(x); }
inline F32 to_float(I32 x) { return __builtin_convertvector(x, F32); }
inline I32 to_int(F32 x) { return __builtin_convertvector(x, I32); }
inline F32 select(I32 mask, F32 a, F32 b) { return (F32)((mask & (I32)a) | (~mask & (I32)b)); }
#endif

inline F32 multiply_add(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(SPECBEAM_EIGHT_LANES)
  return {multiply_add(a.low, b.low, c.low), multiply_add(a.high, b.high, c.high)};
#elif defined(__aarch64__)
  for (int quarter = 0; quarter < 4; quarter++) {
    const float32x4_t x = vld1q_f32((const float *)&a + 4 * quarter), y = vld1q_f32((const float *)&b + 4 * quarter);
    vst1q_f32((float *)&c + 4 * quarter, vfmaq_f32(vld1q_f32((const float *)&c + 4 * quarter), x, y));
  }
  return c;
#else
  return a * b + c;
#endif
}

#if !defined(SPECBEAM_EIGHT_LANES)
// Adds a dot product to each lane of acc: the lane's four unsigned bytes of w times the four signed bytes of x. The
// bytes of x are -127 to 127. The sums are exact.
inline I32 dot4(I32 acc, U8 w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__ARM_FEATURE_DOTPROD)
  // vdotq takes signed bytes only. So it multiplies w - 128, and the missing 128 * x is added back.
  const int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(x));
  const int32x4_t taken = vdotq_s32(vdupq_n_s32(0), xs, vdupq_n_s8(-128));
  for (int quarter = 0; quarter < 4; quarter++) {
    const uint8x16_t u = veorq_u8(vld1q_u8((const uint8_t *)&w + 16 * quarter), vdupq_n_u8(128));
    const int32x4_t a = vsubq_s32(vld1q_s32((const int32_t *)&acc + 4 * quarter), taken);
    vst1q_s32((int32_t *)&acc + 4 * quarter, vdotq_s32(a, vreinterpretq_s8_u8(u), xs));
  }
  return acc;
#else
  // A product of an unsigned and a signed byte fits in 16 bits. The even and the odd bytes are multiplied apart. Each
  // of the two multiplications makes two products per lane.
  const I16 xs = (I16)all(x), even = (I16)((U16)w & 0xff) * ((I16)((U16)xs << 8) >> 8),
            odd = (I16)((U16)w >> 8) * (xs >> 8);
  const auto low = [](I16 two) { return (I32)((U32)two << 16) >> 16; };
  return acc + low(even) + ((I32)even >> 16) + low(odd) + ((I32)odd >> 16);
#endif
}
#endif

// Adds a dot product to each lane of acc: the lane's two signed numbers of 16 bits times the two of x. Sums must fit.
inline I32 dot2(I32 acc, U32 w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (I32)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(int32_t(x)));
#elif defined(SPECBEAM_EIGHT_LANES)
  const __m256i xs = _mm256_set1_epi32(int32_t(x));
  const auto half = [xs](I32::Half a, U32::Half u) {
#if defined(__AVXVNNI__)
    return (I32::Half)_mm256_dpwssd_avx_epi32((__m256i)a, (__m256i)u, xs);
#else
    return (I32::Half)_mm256_add_epi32((__m256i)a, _mm256_madd_epi16((__m256i)u, xs));
#endif
  };
  return {half(acc.low, w.low), half(acc.high, w.high)};
#else
  const auto low = [](U32 two) { return (I32)(two << 16) >> 16; };
  const auto high = [](U32 two) { return (I32)two >> 16; };
  const U32 xs = (U32)all(int32_t(x));
  return acc + low(w) * low(xs) + high(w) * high(xs);
#endif
}

inline Register load_half(const uint16_t *p) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(SPECBEAM_EIGHT_LANES)
  return (Register)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
  F32 out;
  for (int i = 0; i < LANES; i += 4) vst1q_f32((float *)&out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + i))));
  return out;
#else
  typedef uint16_t Halves __attribute__((vector_size(32)));
  const U32 h = __builtin_convertvector(load<Halves>(p), U32), bits = (h & 0x7fff) << 13;
  const U32 normal = bits + (112u << 23), infinite = bits | 0x7f800000;
  const F32 subnormal = __builtin_convertvector(h & 1023, F32) * 0x1p-24f;
  const F32 magnitude =
      select((h & 0x7c00) == 0, subnormal, select((h & 0x7c00) == 0x7c00, (F32)infinite, (F32)normal));
  return (F32)((U32)magnitude | (h & 0x8000) << 16);
#endif
}

inline Register load_bytes(const uint8_t *p) {
#if defined(__AVX512F__)
  return to_float((I32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(SPECBEAM_EIGHT_LANES)
  return (Register)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  return __builtin_convertvector(load<Bytes>(p), F32);
#endif
}

// Half of the powers of two that bytes stand for, biased by 127.
inline Register load_powers(const uint8_t *p) {
#if defined(__AVX512F__)
  const I32 x = (I32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  return (F32)(x << 23 | ((x == 0) & (1 << 22))) * 0.5f;
#elif defined(SPECBEAM_EIGHT_LANES)
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  const __m256i none = _mm256_and_si256(_mm256_cmpeq_epi32(x, _mm256_setzero_si256()), _mm256_set1_epi32(1 << 22));
  return (Register)_mm256_or_si256(_mm256_slli_epi32(x, 23), none) * 0.5f;
#else
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  const I32 x = __builtin_convertvector(load<Bytes>(p), I32);
  return (F32)(x << 23 | ((x == 0) & (1 << 22))) * 0.5f;
#endif
}

inline Register load_bytes(const int8_t *p) {
#if defined(__AVX512F__)
  return to_float((I32)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(SPECBEAM_EIGHT_LANES)
  return (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(16)));
  return __builtin_convertvector(load<Bytes>(p), F32);
#endif
}

#if defined(SPECBEAM_EIGHT_LANES)
// The lanes in 16 bits, where they fit.
inline __m256i shorts(I32 x) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x.low, (__m256i)x.high), 0xd8);
}

// Stores the lanes in 16 bits, of each four the even ones first.
inline void store_pairs(int16_t *p, I32 x) {
  _mm256_storeu_si256((__m256i *)p, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(shorts(x), 0xd8), 0xd8));
}
#endif

inline void store_bytes(int8_t *p, I32 x) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(SPECBEAM_EIGHT_LANES)
  const __m256i s = shorts(x);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
#else
  for (int i = 0; i < LANES; i++) p[i] = int8_t(x[i]);
#endif
}

inline void store_shorts(int16_t *p, I32 x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(SPECBEAM_EIGHT_LANES)
  _mm256_storeu_si256((__m256i *)p, shorts(x));
#else
  for (int i = 0; i < LANES; i++) p[i] = int16_t(x[i]);
#endif
}

constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// Integral floats from -most to most as integers. Other numbers, infinity and NaN become 0.
inline I32 to_int(F32 whole, float most) {
  const F32 magnitude = (F32)((I32)whole & all(int32_t(0x7fffffff)));
  return to_int(select(magnitude <= most, whole, F32{}));
}
inline I32 rounded(F32 x, float most) { return to_int(x + ROUNDER - ROUNDER, most); }

// The sum of the lanes, in one fixed order: the upper half is added to the lower half, four times. F is float or
// int32_t. The lanes are copied, because GCC would keep a vector whose address is taken in memory, in the caller's
// loop, too.
template <class F, class V> inline F sum(V v) {
  typedef F Eight __attribute__((vector_size(32)));
  typedef F Four __attribute__((vector_size(16)));
  F lanes[LANES];
  store(lanes, v);
  const Eight x = load<Eight>(lanes) + load<Eight>(lanes + 8);
  const Four y = load<Four>((const F *)&x) + load<Four>((const F *)&x + 4);
  return (y[0] + y[2]) + (y[1] + y[3]);
}
inline int32_t sum(I32 x) { return sum<int32_t>(x); }

#if defined(__AVX2__)
// The same orders in registers.
#if defined(SPECBEAM_EIGHT_LANES)
inline __m256 lower_half(F32 v) { return (__m256)v.low; }
inline __m256 upper_half(F32 v) { return (__m256)v.high; }
#else
inline __m256 lower_half(F32 v) { return (__m256)__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256 upper_half(F32 v) { return (__m256)__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
#endif
inline float sum(F32 v) {
  const __m256 x = _mm256_add_ps(lower_half(v), upper_half(v));
  const __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 z = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
inline float max(F32 v) {
  const __m256 x = _mm256_max_ps(lower_half(v), upper_half(v));
  const __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 z = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}
#else
inline float sum(F32 x) { return sum<float>(x); }

inline float max(F32 v) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  float lanes[LANES];
  store(lanes, v);
  const Eight a = load<Eight>(lanes), b = load<Eight>(lanes + 8), x = a > b ? a : b;
  const Four c = load<Four>((const float *)&x), d = load<Four>((const float *)&x + 4), y = c > d ? c : d;
  const float left = y[0] > y[2] ? y[0] : y[2], right = y[1] > y[3] ? y[1] : y[3];
  return left > right ? left : right;
}
#endif

// The sum of lanes that are signed bytes.
inline int32_t sum_of_bytes(I32 x) {
#if defined(__AVX512F__)
  // One instruction adds up the distances of unsigned bytes from 0.
  const __m128i bytes = _mm_xor_si128(_mm512_cvtepi32_epi8((__m512i)x), _mm_set1_epi8(-128));
  const __m128i halves = _mm_sad_epu8(bytes, _mm_setzero_si128());
  return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - LANES * 128;
#elif defined(SPECBEAM_EIGHT_LANES)
  const __m256i s = _mm256_madd_epi16(shorts(x), _mm256_set1_epi16(1));
  const __m128i y = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  const __m128i z = _mm_add_epi32(y, _mm_unpackhi_epi64(y, y));
  return _mm_cvtsi128_si32(z) + _mm_extract_epi32(z, 1);
#else
  return sum(x);
#endif
}

// The larger and the smaller lanes. Where a lane of a is NaN, b's.
inline F32 larger(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(SPECBEAM_EIGHT_LANES)
  return {(Register)_mm256_max_ps((__m256)a.low, (__m256)b.low),
          (Register)_mm256_max_ps((__m256)a.high, (__m256)b.high)};
#else
  return select(a > b, a, b);
#endif
}
inline F32 smaller(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(SPECBEAM_EIGHT_LANES)
  return {(Register)_mm256_min_ps((__m256)a.low, (__m256)b.low),
          (Register)_mm256_min_ps((__m256)a.high, (__m256)b.high)};
#else
  return select(a < b, a, b);
#endif
}

template <int N> inline F32 polynomial(const float (&coefficients)[N], F32 x) {  // the highest power first
  F32 p = all(coefficients[0]);
#pragma GCC unroll 8
  for (int k = 1; k < N; k++) p = multiply_add(p, x, all(coefficients[k]));
  return p;
}

constexpr float EXP_POLYNOMIAL[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                    4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};  // from Cephes (Moshier)

// e^x, within 2 units in the last place; 0 below -87.
inline F32 exp(F32 x) {
  const I32 low = x <= -87.0f;
#if defined(__AVX512F__)
  x = smaller(all(88.0f), x);
#else
  x = larger(all(-87.0f), smaller(all(88.0f), x));
#endif
  const F32 rounded = multiply_add(x, all(1.44269504088896341f), all(ROUNDER)), n = rounded - ROUNDER;
  F32 r = multiply_add(n, all(-0.693359375f), x);
  r = multiply_add(n, all(2.12194440e-4f), r);
  F32 p = polynomial(EXP_POLYNOMIAL, r);
  p = multiply_add(p * r, r, r) + 1.0f;
#if defined(__AVX512F__)
  return select(low, F32{}, (F32)_mm512_scalef_ps((__m512)p, (__m512)n));
#else
  const F32 power = (F32)(((U32)rounded << 23) + (127u << 23));  // the lowest bits of `rounded` are n
  return (F32)((I32)(p * power) & (low ^ all(-1)));
#endif
}

inline F32 tanh(F32 x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// (Phi(x) - 1/2) / x in powers of x^2, by Taylor's series; and Phi(-x) * e^(x^2 / 2) in powers of 1 / (1 + 0.3 x), from
// a fit on 1 to 8.
constexpr float PHI_NEAR_0[] = {-4.12266736e-8f, 6.65969367e-7f, -9.44465592e-6f, 1.15434691e-4f,
                                -1.18732825e-3f, 9.97355673e-3f, -6.64903820e-2f, 3.98942292e-1f};
constexpr float PHI_OF_TAIL[] = {-0.0920732096f, 0.264962316f, -0.0806357861f,  0.186326414f,
                                 0.0988397598f,  0.122746199f, -0.000190232371f};

// Phi(x), the share of the standard normal distribution below x, within 1e-7; where it is small, within 1e-6 of it.
inline F32 normal_share(F32 x) {
  const F32 square = x * x, magnitude = (F32)((I32)x & all(int32_t(0x7fffffff)));
  const F32 near = multiply_add(polynomial(PHI_NEAR_0, square), x, all(0.5f));
  const F32 tail = polynomial(PHI_OF_TAIL, 1.0f / (1.0f + 0.3f * magnitude)) * exp(-0.5f * square);
  return select(square < 1.0f, near, select(x < F32{}, tail, 1.0f - tail));
}

}  // namespace specbeam
