// Fuzzes packing, and products with packed weights of any bytes. An output must be the same bits for a row alone, for
// any number of threads, and for AVX2, AVX-VNNI and AVX-512.

#include "boundary.h"

using namespace specbeam;

namespace {

constexpr int64_t MAX_BYTES = 1 << 18;

// Bytes of the input, repeated.
std::unique_ptr<uint8_t[]> bytes_of(Input &in, int64_t n) {
  auto out = exactly<uint8_t>(size_t(n));
  const auto some = in.ConsumeBytes<uint8_t>(std::min<size_t>(size_t(n), 600));
  for (int64_t i = 0; i < n && !some.empty(); i++) out[i] = some[size_t(i) % some.size()];
  return out;
}

std::unique_ptr<float[]> floats_of(Input &in, int64_t n) {
  auto out = exactly<float>(size_t(n));
  const auto bytes = bytes_of(in, 4 * n);
  if (n) std::memcpy(out.get(), bytes.get(), size_t(4 * n));
  if (!in.rarely())  // mostly numbers of a usual size
    for (int64_t i = 0; i < n; i++) out[i] = float(bytes[4 * i] - 128) / 16;
  return out;
}

// Packs blocks or numbers. Returns the matrix, or null if that was refused.
std::unique_ptr<uint8_t[]> packed(Input &in, int32_t &format, int64_t rows, int64_t columns) {
  std::unique_ptr<uint8_t[]> out;
  if (in.ConsumeBool()) {
    const auto type = int32_t(in.number(2, 15));
    format = specbeam_format_of(type);
    const int64_t room = specbeam_matrix_bytes(format, rows, columns);
    if (room > MAX_BYTES) return nullptr;
    out = exactly<uint8_t>(size_t(std::max<int64_t>(room, 0)));
    constexpr int64_t BYTES_PER_256[] = {0, 0, 144, 160, 0, 0, 176, 192, 272, 0, 0, 0, 144, 176, 210, 0};
    int64_t given = in.wild();
    if (room > 0 && type >= 0 && type < 16 && !in.rarely()) given = rows * columns * BYTES_PER_256[type] / 256;
    if (given < 0 || given > MAX_BYTES) given = 0;
    const auto source = bytes_of(in, given);
    std::unique_ptr<int64_t[]> order;
    if (in.ConsumeBool() && rows > 0 && rows < MAX_BYTES) {
      order = exactly<int64_t>(size_t(rows));
      for (int64_t row = 0; row < rows; row++) order[row] = in.number(0, rows - 1);
    }
    const int64_t first = in.number(0, 1), last = in.rarely() ? in.wild() : room > 0 ? (rows + 15) / 16 : 1;
    if (specbeam_pack(type, source.get(), given, rows, columns, order.get(), first, last, out.get())) return nullptr;
    check(room > 0);
    return out;
  }
  format = int32_t(in.rarely() ? in.wild() : in.PickValueInArray({F32_ROWS, Q8, Q4_MIN}));
  const int64_t room = specbeam_matrix_bytes(format, rows, columns);
  if (room > MAX_BYTES) return nullptr;
  out = exactly<uint8_t>(size_t(std::max<int64_t>(room, 0)));
  const auto values = floats_of(in, room > 0 ? rows * columns : 0);
  return specbeam_quantize(format, values.get(), rows, columns, out.get()) ? nullptr : std::move(out);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Input in(data, size);
  check(use("portable"));
  // Two blocks of weights are multiplied at once if there are 256 rows, or 512 for two threads.
  const int64_t rows = in.number(1, in.ConsumeIntegralInRange(0, 3) ? 40 : 600),
                columns = in.ConsumeBool() ? in.number(1, 100) : 256 * in.ConsumeIntegralInRange<int64_t>(1, 2);
  int32_t format = int32_t(in.number(0, FORMAT_COUNT - 1));
  std::unique_ptr<uint8_t[]> matrix;
  if (in.ConsumeBool()) {
    matrix = packed(in, format, rows, columns);
  } else {
    const int64_t room = specbeam_matrix_bytes(format, rows, columns);
    if (room > 0 && room <= MAX_BYTES) matrix = bytes_of(in, room);
  }
  if (!matrix) return 0;
  const int64_t row = in.number(0, rows - 1), column = in.number(0, columns - 1);
  specbeam_weight(format, rows, columns, matrix.get(), row, column);

  const auto n = in.ConsumeIntegralInRange<int64_t>(1, 20), chosen = in.ConsumeIntegralInRange<int64_t>(0, n - 1);
  const auto values = floats_of(in, n * columns);
  std::unique_ptr<float[]> avx;
  for (const char *isa : {"portable", "avx2", "avxvnni", "avx512"}) {
    if (!use(isa)) continue;
    auto all = exactly<float>(size_t(n * rows)), alone = exactly<float>(size_t(rows));
    const int threads = in.ConsumeIntegralInRange(0, 50) ? 1 : 2;
    check(!specbeam_multiply(threads, format, rows, columns, matrix.get(), values.get(), n, all.get()));
    const auto row_alone = exactly<float>(size_t(columns));
    std::copy_n(values.get() + chosen * columns, columns, row_alone.get());
    check(!specbeam_multiply(1, format, rows, columns, matrix.get(), row_alone.get(), 1, alone.get()));
    CHECK(same(alone.get(), all.get() + chosen * rows, rows));
    if (std::strncmp(isa, "avx", 3)) continue;
    if (avx) CHECK(same(avx.get(), all.get(), n * rows));
    avx = std::move(all);
  }
  return 0;
}
