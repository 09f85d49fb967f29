// The gated short convolution of LFM2 (Liquid AI 2025). A node reads the numbers that are convolved of its ancestors as
// attention reads keys, on any path of a tree. It keeps its own in a row, if a node of a later pass reads them.

#include "../pass.h"

namespace specbeam {

namespace {

class ShortConvolution final : public Part {
  static constexpr int64_t MAX_KERNEL_SIZE = 16;

  int64_t kernel_size = 0;  // the positions that a filter covers
  Product input, filter, output;
  Section section;  // of the cache

 public:
  ShortConvolution() : Part("short_convolution") {
    number("kernel_size", kernel_size);
    product("input", input), product("filter", filter), product("output", output);
  }

  const char *wrong(const Model &m, const Layer &) const override {
    if (kernel_size < 1 || kernel_size > MAX_KERNEL_SIZE) return "the filter of a convolution is too long";
    return m.config.hidden_size > INT32_MAX / 3 ? "a convolution is too wide" : nullptr;
  }

  bool add_memory(const Model &m, Cache &cache, const Layer &) override {
    const Lifetime lifetime{kernel_size, 1, 0, false};
    section = cache.add_section(lifetime, SLOTS_PER_BLOCK * padded(m.config.hidden_size) * int64_t(sizeof(float)));
    return section.start >= 0;
  }
  bool has_memory() const override { return true; }
  int64_t reach() const override { return kernel_size; }

  const char *incomplete(const Model &m) const override {
    const int64_t hidden = m.config.hidden_size;
    const bool is_exact = filter.parts.size() == 1 && filter.parts[0].format == F32_ROWS;
    return is_shaped(input, 3 * hidden, hidden) && is_shaped(filter, hidden, kernel_size) && is_exact &&
                   is_shaped(output, hidden, hidden)
               ? nullptr
               : "a short convolution";
  }

  const Product &first() const override { return input; }

  void run(Pass &p) const override {
    const int64_t hidden = p.c.hidden_size, stride = stride_of(3 * hidden);
    float *wide = room(p.space.wide, p.nodes * stride);  // the gates before and after, and what is convolved
    multiply(input, p.threads, p.activations, wide, stride);
    const Rows memory = p.cache.rows(padded(hidden), section);
    p.threads.each(p.nodes, 4, [&](int64_t n) {
      const float *before = wide + n * stride;
      float *x = wide + n * stride + 2 * hidden;
      for (int64_t i = 0; i < hidden; i += LANES)
        store_some(x + i, load_some(before + i, hidden - i) * load_some(x + i, hidden - i), hidden - i);
      if (const int64_t row = p.row(n, section.region); row != NO_ROW) std::copy_n(x, hidden, memory.at(row));
    });
    if (!p.any_goes_on_after(*this)) return;
    const Matrix &weights = filter.parts[0];
    p.activations.resize(p.rows(), output.parts);
    p.threads.each(p.rows(), 4, [&](int64_t r) {
      static thread_local Buffer<float> gated;
      float *to = room(gated, hidden);
      const int64_t n = p.going()[r], at = p.position(n);
      const float *after = wide + n * stride + hidden, *rows[MAX_KERNEL_SIZE];
      const int64_t first = std::max<int64_t>(0, kernel_size - 1 - at);  // the filter reaches before the start
      for (int64_t k = first; k < kernel_size; k++) {
        const auto [node, row] = p.place_at(n, at + 1 - kernel_size + k, section.region);
        rows[k] = node == Cache::NO_NODE ? memory.at(row) : wide + node * stride + 2 * hidden;
      }
      for (int64_t i = 0; i < hidden; i += LANES) {
        const auto *w = reinterpret_cast<const float *>(weights.data + i / LANES * block_bytes(F32_ROWS, kernel_size));
        F32 sum{};
        for (int64_t k = first; k < kernel_size; k++)
          sum = multiply_add(load<F32>(w + k * LANES), load_some(rows[k] + i, hidden - i), sum);
        store_some(to + i, sum * load_some(after + i, hidden - i), hidden - i);
      }
      p.activations.set(r, to);
    });
    multiply(output, p.threads, p.activations, p.out, p.out_stride);
  }
};

const Kind<ShortConvolution> SHORT_CONVOLUTION("short_convolution");

}  // namespace

}  // namespace specbeam
