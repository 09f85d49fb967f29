// Numbers of 16 bits: half floats, as the scales of weights are stored.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace specbeam {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  uint32_t bits;
  if (exponent == 31) bits = sign | 0x7f800000 | fraction << 13;
  else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
  else {
    const float tiny = std::ldexp(float(fraction), -24);
    return sign ? -tiny : tiny;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t float_to_half(float f) {  // rounds to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal as a half float: adding 0.5 rounds at the right bit
    float magnitude, magic = 0.5f;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += magic;
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  bits += 0xc8000fff + ((bits >> 13) & 1);
  return uint16_t(sign | bits >> 13);
}

}  // namespace specbeam
