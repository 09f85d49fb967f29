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
// A bit that CPUID gives. Intel's manual, volume 2A, CPUID, has the leaves, registers and bits.
// __builtin_cpu_supports would do the same, but zig's runtime library answers it with no for every set.
enum Place { EAX, EBX, ECX, EDX };
bool has(unsigned leaf, Place place, int bit, unsigned subleaf = 0) {
  unsigned found[4] = {};
  return __get_cpuid_count(leaf, subleaf, &found[EAX], &found[EBX], &found[ECX], &found[EDX]) &&
         found[place] >> bit & 1;
}

// Whether the system keeps these kinds of registers when it switches threads: bits of XCR0.
constexpr unsigned AVX_STATE = 0x6, AVX512_STATE = 0xe6;
bool keeps(unsigned state) {
  if (!has(1, ECX, 27)) return false;  // OSXSAVE: the system lets programs read XCR0
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & state) == state;
}

bool has_avx2() {
  return keeps(AVX_STATE) && has(1, ECX, 28) && has(1, ECX, 12) && has(1, ECX, 29) && has(7, EBX, 5);  // FMA and F16C
}
bool has_avx512() {  // F, DQ, BW, VL and VNNI
  return has_avx2() && keeps(AVX512_STATE) && has(7, EBX, 16) && has(7, EBX, 17) && has(7, EBX, 30) &&
         has(7, EBX, 31) && has(7, ECX, 11);
}
#if defined(SPECBEAM_AVXVNNI)
bool has_avxvnni() { return has_avx2() && has(7, EAX, 4, 1); }
#endif
#endif

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The name of the instruction set to use, or null if the processor lacks `name`. An empty name asks for the best.
const char *specbeam_isa(const char *name) {
#if defined(__aarch64__) && defined(__linux__)
  const bool neon = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#endif
  const InstructionSet best_first[] = {
#if defined(__x86_64__)
      {"avx512", has_avx512()},
#if defined(SPECBEAM_AVXVNNI)
      {"avxvnni", has_avxvnni()},
#endif
      {"avx2", has_avx2()},
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
