// Asks the processor which instruction sets it has. Python calls this in the library that any processor can run, before
// it loads another one.

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <cstring>

namespace {

struct InstructionSet {
  const char *name;
  bool supported;
};

#if defined(__x86_64__)
// __builtin_cpu_supports does not know F16C and AVX-VNNI in Clang 14.
bool has_f16c() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#if defined(SPECBEAM_AVXVNNI)
bool has_avx_vnni() {
  constexpr unsigned AVX_VNNI = 1 << 4;  // cpuid.h has no name for it there
  unsigned a = 0, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & AVX_VNNI;
}
#endif
#endif

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The name of the instruction set to use, or null if the processor lacks `name`. An empty name asks for the best.
const char *specbeam_isa(const char *name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__) && defined(__linux__)
  const bool neon = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#endif
  const InstructionSet best_first[] = {
#if defined(__x86_64__)
      {"avx512", avx512},
#if defined(SPECBEAM_AVXVNNI)
      {"avxvnni", avx2 && has_avx_vnni()},
#endif
      {"avx2", avx2},
#elif defined(__aarch64__) && defined(__linux__)
      {"neon", neon},
#elif defined(__aarch64__)
      {"neon", true},  // every Mac with ARM has dot products
#endif
      {"portable", true},
  };
  for (const InstructionSet &set : best_first)
    if (set.supported && name && (!*name || !std::strcmp(name, set.name))) return set.name;
  return nullptr;
}
}
#pragma GCC visibility pop
