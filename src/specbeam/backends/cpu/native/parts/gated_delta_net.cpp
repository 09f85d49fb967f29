// Gated DeltaNet (Yang et al. 2024) as in Qwen3.5: a short convolution makes queries, keys and values, which the gated
// delta rule (../linear_attention.h) takes in. The output of each head is normed and gated.

#include "../pass.h"

namespace specbeam {

namespace {

class GatedDeltaNet final : public Part {
  static constexpr int64_t MAX_KERNEL_SIZE = 16;

  LinearHeads heads;
  int64_t kernel_size = 0;  // the positions that a filter covers
  // input: queries, keys and values before the convolution, gates of the output, beta and the step of each value head
  Product input, filter, output;
  Norm decay, step, norm_of_heads;
  Section before, rows, states;  // of the cache: what the convolution reads, and what linear attention keeps

 public:
  GatedDeltaNet() : Part("gated_delta_net") {
    number("num_key_heads", heads.num_key_heads), number("num_value_heads", heads.num_value_heads);
    number("key_dim", heads.key_dim), number("value_dim", heads.value_dim), number("tiled", heads.tiled);
    number("kernel_size", kernel_size);
    product("input", input), product("rates", input), product("filter", filter), product("output", output);
    norm_of("decay", decay), norm_of("step", step), norm_of("norm", norm_of_heads);
  }

  const char *wrong(const Model &m, const Layer &) const override {
    if (const char *reason = heads.wrong()) return reason;
    if (kernel_size < 1 || kernel_size > MAX_KERNEL_SIZE) return "the filter of a convolution is too long";
    return m.config.bands ? "an encoder has linear attention" : nullptr;
  }

  bool add_memory(const Model &, Cache &cache, const Layer &) override {
    const auto add = [&cache](const Lifetime &lifetime, int64_t numbers) {
      return cache.add_section(lifetime, SLOTS_PER_BLOCK * numbers * int64_t(sizeof(float)));
    };
    before = add({kernel_size, 1, 0, false}, convolved_size());
    rows = add(rows_lifetime(), heads.row_size()), states = add(states_lifetime(), heads.state_size());
    return before.start >= 0 && rows.start >= 0 && states.start >= 0;
  }
  bool has_memory() const override { return true; }
  int64_t reach() const override { return std::max(kernel_size, rows_lifetime().reach); }

  const char *incomplete(const Model &m) const override {
    const int64_t hidden = m.config.hidden_size, values = heads.value_size();
    const bool is_exact = filter.parts.size() == 1 && filter.parts[0].format == F32_ROWS;
    return is_shaped(input, convolved_size() + values + 2 * heads.num_value_heads, hidden) && is_exact &&
                   is_shaped(filter, convolved_size(), kernel_size) && is_shaped(output, hidden, values) &&
                   is_sized(decay, heads.num_value_heads) && is_sized(step, heads.num_value_heads) &&
                   is_sized(norm_of_heads, heads.value_dim)
               ? nullptr
               : "a gated delta net";
  }

  const Product &first() const override { return input; }

  void run(Pass &p) const override {
    const int64_t convolved = convolved_size(), values = heads.value_size(), count = heads.num_value_heads;
    const int64_t wide_stride = stride_of(convolved + values + 2 * count);
    float *wide = room(p.space.wide, p.nodes * wide_stride);
    multiply(input, p.threads, p.activations, wide, wide_stride);
    const Rows kept = p.cache.rows(convolved, before);
    const int64_t at_rates = padded(convolved), stride = stride_of(at_rates + 2 * padded(count));
    float *mixed = room(p.space.mixed, p.nodes * stride);  // queries, keys and values, decays and betas
    p.threads.each(p.nodes, 4, [&](int64_t n) {
      const float *row = wide + n * wide_stride;
      if (const int64_t own = p.row(n, before.region); own != NO_ROW) std::copy_n(row, convolved, kept.at(own));
      rates(row + convolved + values, mixed + n * stride + at_rates);
    });
    const int64_t groups = 2 * heads.num_key_heads + count;
    p.threads.each(p.nodes * groups, 8, [&](int64_t i) {
      convolve(p, kept, wide, wide_stride, i / groups, i % groups, mixed + i / groups * stride);
    });
    float *attended = room(p.space.attended, p.nodes * values);
    const float *keys = mixed + heads.key_size(), *decays = mixed + at_rates;
    const LinearMemory memory{p.cache.rows(heads.row_size(), rows), p.cache.rows(heads.state_size(), states),
                              rows.region};
    attend_linearly(p, heads, memory, {mixed, keys, keys + heads.key_size(), decays, decays + padded(count), stride},
                    attended);
    if (!p.any_goes_on_after(*this)) return;
    p.activations.resize(p.rows(), output.parts);
    p.threads.each(p.rows(), 4, [&](int64_t r) {
      const int64_t n = p.going()[r];
      float *to = attended + n * values;
      const float *gate = wide + n * wide_stride + convolved;
      for (int64_t i = 0; i < values; i += heads.value_dim) p.norm_row(norm_of_heads, to + i, to + i, heads.value_dim);
      for (int64_t i = 0; i < values; i += LANES)
        store(to + i, load<F32>(to + i) * activate(SILU, load<F32>(gate + i)));
      p.activations.set(r, to);
    });
    multiply(output, p.threads, p.activations, p.out, p.out_stride);
  }

 private:
  int64_t convolved_size() const { return 2 * heads.key_size() + heads.value_size(); }

  // The decays and the betas of a node's heads. from: betas before the sigmoid, and steps
  void rates(const float *from, float *to) const {
    const int64_t count = heads.num_value_heads;
    for (int64_t i = 0; i < count; i += LANES) {
      const int64_t some = count - i;
      const F32 steps = softplus(load_some(from + count + i, some) + load_some(step.weight + i, some));
      store(to + i, load_some(decay.weight + i, some) * steps);
      store(to + padded(count) + i, 1.0f / (1.0f + exp(-load_some(from + i, some))));
    }
  }

  // Convolves the features of one head, of queries, keys or values. Queries and keys become unit vectors, and queries
  // are divided by the root of their size. wide: [nodes, stride], what is convolved of the nodes of the pass
  void convolve(const Pass &p, const Rows &kept, const float *wide, int64_t stride, int64_t n, int64_t group,
                float *to) const {
    const int64_t vectors = 2 * heads.num_key_heads, position = p.position(n);
    const int64_t size = group < vectors ? heads.key_dim : heads.value_dim;
    const int64_t begin = group < vectors ? group * size : vectors * heads.key_dim + (group - vectors) * size;
    const int64_t first = std::max<int64_t>(0, kernel_size - 1 - position);  // the filter reaches before the start
    const float *from[MAX_KERNEL_SIZE];
    for (int64_t k = first; k < kernel_size; k++) {
      const auto [node, row] = p.place_at(n, position + 1 - kernel_size + k, before.region);
      from[k] = node == Cache::NO_NODE ? kept.at(row) : wide + node * stride;
    }
    F32 squares{};
    for (int64_t i = begin; i < begin + size; i += LANES) {
      const auto *w =
          reinterpret_cast<const float *>(filter.parts[0].data + i / LANES * block_bytes(F32_ROWS, kernel_size));
      F32 sum{};
      for (int64_t k = first; k < kernel_size; k++)
        sum = multiply_add(load<F32>(w + k * LANES), load<F32>(from[k] + i), sum);
      const F32 active = activate(SILU, sum);
      squares = multiply_add(active, active, squares);
      store(to + i, active);
    }
    if (group >= vectors) return;
    const double length =
        std::sqrt(double(sum(squares)) + 1e-6) * (group < heads.num_key_heads ? std::sqrt(double(heads.key_dim)) : 1.0);
    const float by = float(1 / length);
    for (int64_t i = begin; i < begin + size; i += LANES) store(to + i, load<F32>(to + i) * by);
  }
};

const Kind<GatedDeltaNet> GATED_DELTA_NET("gated_delta_net");

}  // namespace

}  // namespace specbeam
