// Compares the NEON kernels with the portable kernels, and the last row of a batch with the same row alone. Activations
// are whole numbers, so quantization rounds nothing. test_cpu.py builds this program for aarch64 and runs it in QEMU.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
int32_t specbeam_multiply(const char *, int32_t, int32_t, int64_t, int64_t, const uint8_t *, const float *, int64_t,
                          float *);
int64_t specbeam_matrix_bytes(int32_t, int64_t, int64_t);
const char *specbeam_isa(const char *);
}

int main() {
  if (std::strcmp(specbeam_isa(""), "neon")) return std::puts("the best instruction set is not neon"), 1;
  int wrong = 0;
  const int64_t rows = 37;
  for (int format = 0; specbeam_matrix_bytes(format, rows, 32) > 0; format++)
    for (int64_t columns : {32, 288, 512})
      for (int64_t n : {1, 2, 3, 5, 8, 13}) {
        const int64_t bytes = specbeam_matrix_bytes(format, rows, columns);
        auto *weights = static_cast<uint8_t *>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
        for (int64_t i = 0; i < bytes; i++) weights[i] = uint8_t(std::rand() % 60);
        if (format == 0)
          for (int64_t i = 0; i < bytes / 4; i++)
            reinterpret_cast<float *>(weights)[i] = float(std::rand() % 2001 - 1000);
        std::vector<float> x(n * columns), fast(n * rows), slow(n * rows), alone(rows);
        for (size_t i = 0; i < x.size(); i++) x[i] = i % 32 ? float(std::rand() % 201 - 100) : 127.0f;
        int status = specbeam_multiply("neon", 2, format, rows, columns, weights, x.data(), n, fast.data());
        status |= specbeam_multiply("portable", 1, format, rows, columns, weights, x.data(), n, slow.data());
        status |= specbeam_multiply("neon", 1, format, rows, columns, weights, &x[(n - 1) * columns], 1, alone.data());
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
