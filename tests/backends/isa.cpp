// isa FOLDER SET: checks that SET is the best instruction set of this processor, and tests the kernels of its library.
// They are compared with the portable kernels, and the last row of a batch with the same row alone. Activations are
// integers, so quantization rounds nothing. test_cpu.py runs this program in QEMU, on other processors.

#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using Multiply = int32_t(int32_t, int32_t, int64_t, int64_t, const uint8_t *, const float *, int64_t, float *);
using MatrixBytes = int64_t(int32_t, int64_t, int64_t);
using Isa = const char *(const char *);

static void *library(const std::string &folder, const std::string &isa) {
  void *loaded = dlopen((folder + "/libspecbeam_cpu_" + isa + ".so").c_str(), RTLD_NOW);
  if (!loaded) std::puts(dlerror()), std::exit(1);
  return loaded;
}

template <class F> static F *function(void *library, const char *name) {
  return reinterpret_cast<F *>(dlsym(library, name));
}

int main(int, char **arguments) {
  const std::string folder = arguments[1], isa = arguments[2];
  void *baseline = library(folder, "portable");
  if (const std::string best = function<Isa>(baseline, "specbeam_isa")(""); best != isa)
    return std::printf("the best instruction set is %s\n", best.c_str()), 1;
  const auto multiply = function<Multiply>(library(folder, isa), "specbeam_multiply"),
             multiply_slowly = function<Multiply>(baseline, "specbeam_multiply");
  const auto matrix_bytes = function<MatrixBytes>(baseline, "specbeam_matrix_bytes");
  int wrong = 0;
  const int64_t rows = 37;
  for (int format = 0; matrix_bytes(format, rows, 32) > 0; format++)
    for (int64_t columns : {32, 288, 512})
      for (int64_t n : {1, 2, 3, 5, 8, 13}) {
        const int64_t bytes = matrix_bytes(format, rows, columns);
        auto *weights = static_cast<uint8_t *>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
        for (int64_t i = 0; i < bytes; i++) weights[i] = uint8_t(std::rand() % 60);
        if (format == 0)
          for (int64_t i = 0; i < bytes / 4; i++)
            reinterpret_cast<float *>(weights)[i] = float(std::rand() % 2001 - 1000);
        std::vector<float> x(n * columns), fast(n * rows), slow(n * rows), alone(rows);
        for (size_t i = 0; i < x.size(); i++) x[i] = i % 32 ? float(std::rand() % 201 - 100) : 127.0f;
        int status = multiply(2, format, rows, columns, weights, x.data(), n, fast.data());
        status |= multiply_slowly(1, format, rows, columns, weights, x.data(), n, slow.data());
        status |= multiply(1, format, rows, columns, weights, &x[(n - 1) * columns], 1, alone.data());
        float most = 0, difference = 0;
        for (size_t i = 0; i < fast.size(); i++)
          most = std::fmax(most, std::fabs(slow[i])), difference = std::fmax(difference, std::fabs(fast[i] - slow[i]));
        const bool differs = std::memcmp(alone.data(), &fast[(n - 1) * rows], rows * sizeof(float));
        if (status || differs || !(difference <= 1e-5f * most)) {
          std::printf("format %d, %d columns, %d rows: off by %g of %g\n", format, int(columns), int(n), difference,
                      most);
          wrong++;
        }
        std::free(weights);
      }
  return wrong != 0;
}
