// Mamba 2 (Dao and Gu 2024): a short convolution makes x, B and C, which linear attention (../linear_attention.h) takes
// in as values, keys and queries. The output is gated, and normed by groups.

#include "../pass.h"

namespace specbeam {

namespace {

class Mamba2 final : public Part {
  static constexpr int64_t MAX_KERNEL_SIZE = 16, CONVOLVED_AT_ONCE = 256;  // features

  LinearHeads heads;
  int64_t kernel_size = 0;  // the positions that a filter covers
  Flag has_group_norm = NO, norm_before_gate = NO;
  double min_step = 0, max_step = 0;  // max_step: 0 for none
  double gate_scale = 1, value_scale = 1, key_scale = 1, query_scale = 1, step_scale = 1;
  Product input, filter,
      output;  // input: gates of the output, x, B and C before the convolution, the step of each head
  Norm decay, step, skip, group_norm;
  Section before, rows, states;  // of the cache: what the convolution reads, and what linear attention keeps

 public:
  Mamba2() : Part("mamba2") {
    heads.delta_rule = NO;
    number("num_heads", heads.num_value_heads), number("head_dim", heads.value_dim);
    number("num_groups", heads.num_key_heads), number("state_size", heads.key_dim);
    number("kernel_size", kernel_size);
    number("group_norm", has_group_norm), number("norm_before_gate", norm_before_gate);
    number("min_step", min_step), number("max_step", max_step);
    number("gate_scale", gate_scale), number("value_scale", value_scale), number("key_scale", key_scale);
    number("query_scale", query_scale), number("step_scale", step_scale);
    product("input", input), product("filter", filter), product("output", output);
    norm_of("decay", decay), norm_of("step", step), norm_of("skip", skip), norm_of("norm", group_norm);
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
    const int64_t hidden = m.config.hidden_size, inner = heads.value_size(), count = heads.num_value_heads;
    const bool is_exact = filter.parts.size() == 1 && filter.parts[0].format == F32_ROWS;
    return is_shaped(input, inner + convolved_size() + count, hidden) && is_exact &&
                   is_shaped(filter, convolved_size(), kernel_size) && is_shaped(output, hidden, inner) &&
                   is_sized(decay, count) && is_sized(step, count) && is_sized(skip, count) &&
                   (!has_group_norm || is_sized(group_norm, inner))
               ? nullptr
               : "a Mamba 2";
  }

  const Product &first() const override { return input; }

  void run(Pass &p) const override {
    const int64_t convolved = convolved_size(), inner = heads.value_size(), count = heads.num_value_heads;
    const int64_t wide_stride = stride_of(inner + convolved + count);
    float *wide = room(p.space.wide, p.nodes * wide_stride);
    multiply(input, p.threads, p.activations, wide, wide_stride);
    const Rows kept = p.cache.rows(convolved, before);
    const int64_t at_steps = padded(convolved), stride = stride_of(at_steps + 2 * padded(count));
    float *mixed = room(p.space.mixed, p.nodes * stride);  // x, B and C, steps and decays
    p.threads.each(p.nodes, 4, [&](int64_t n) {
      float *row = wide + n * wide_stride + inner;
      scale(row, inner, value_scale);
      scale(row + inner, heads.key_size(), key_scale);
      scale(row + inner + heads.key_size(), heads.key_size(), query_scale);
      if (const int64_t own = p.row(n, before.region); own != NO_ROW) std::copy_n(row, convolved, kept.at(own));
      steps(row + convolved, mixed + n * stride + at_steps);
    });
    const int64_t pieces = (convolved + CONVOLVED_AT_ONCE - 1) / CONVOLVED_AT_ONCE;
    p.threads.each(p.nodes * pieces, 8, [&](int64_t i) {
      convolve(p, kept, wide + inner, wide_stride, i / pieces, i % pieces * CONVOLVED_AT_ONCE,
               mixed + i / pieces * stride);
    });
    float *attended = room(p.space.attended, p.nodes * inner);
    const float *keys = mixed + inner, *of_heads = mixed + at_steps;
    const LinearMemory memory{p.cache.rows(heads.row_size(), rows), p.cache.rows(heads.state_size(), states),
                              rows.region};
    attend_linearly(p, heads, memory,
                    {keys + heads.key_size(), keys, mixed, of_heads + padded(count), of_heads, stride}, attended);
    if (!p.any_goes_on_after(*this)) return;
    p.activations.resize(p.rows(), output.parts);
    p.threads.each(p.rows(), 4, [&](int64_t r) {
      const int64_t n = p.going()[r];
      float *to = attended + n * inner;
      const float *x = mixed + n * stride, *gates = wide + n * wide_stride;
      for (int64_t i = 0; i < inner; i += LANES)
        store(to + i, multiply_add(all(skip.weight[i / heads.value_dim]), load<F32>(x + i), load<F32>(to + i)));
      if (norm_before_gate) norm_groups(p, to);
      for (int64_t i = 0; i < inner; i += LANES)
        store(to + i, load<F32>(to + i) * activate(SILU, float(gate_scale) * load<F32>(gates + i)));
      if (!norm_before_gate) norm_groups(p, to);
      p.activations.set(r, to);
    });
    multiply(output, p.threads, p.activations, p.out, p.out_stride);
  }

 private:
  int64_t convolved_size() const { return 2 * heads.key_size() + heads.value_size(); }

  static void scale(float *x, int64_t size, double by) {
    for (int64_t i = 0; i < size; i += LANES) store(x + i, float(by) * load<F32>(x + i));
  }

  // The steps and the decays of a node's heads.
  void steps(const float *from, float *to) const {
    const int64_t count = heads.num_value_heads;
    for (int64_t i = 0; i < count; i += LANES) {
      const int64_t some = count - i;
      F32 size = softplus(float(step_scale) * load_some(from + i, some) + load_some(step.weight + i, some));
      size = larger(all(float(min_step)), size);  // NaN stays
      if (max_step > 0) size = smaller(all(float(max_step)), size);
      store(to + i, size);
      store(to + padded(count) + i, load_some(decay.weight + i, some) * size);
    }
  }

  // Convolves some features from `begin` on. inputs: [nodes, stride], what is convolved of the nodes of the pass
  void convolve(const Pass &p, const Rows &kept, const float *inputs, int64_t stride, int64_t n, int64_t begin,
                float *to) const {
    const int64_t position = p.position(n), end = std::min(begin + CONVOLVED_AT_ONCE, convolved_size());
    const int64_t first = std::max<int64_t>(0, kernel_size - 1 - position);  // the filter reaches before the start
    const float *from[MAX_KERNEL_SIZE];
    for (int64_t k = first; k < kernel_size; k++) {
      const auto [node, row] = p.place_at(n, position + 1 - kernel_size + k, before.region);
      from[k] = node == Cache::NO_NODE ? kept.at(row) : inputs + node * stride;
    }
    for (int64_t i = begin; i < end; i += LANES) {
      const auto *w =
          reinterpret_cast<const float *>(filter.parts[0].data + i / LANES * block_bytes(F32_ROWS, kernel_size));
      F32 sum = filter.bias ? load<F32>(filter.bias + i) : F32{};
      for (int64_t k = first; k < kernel_size; k++)
        sum = multiply_add(load<F32>(w + k * LANES), load<F32>(from[k] + i), sum);
      store(to + i, activate(SILU, sum));
    }
  }

  void norm_groups(const Pass &p, float *row) const {
    if (!has_group_norm) return;
    const int64_t size = heads.value_size() / heads.num_key_heads;
    for (int64_t i = 0; i < heads.value_size(); i += size)
      p.norm_row({group_norm.weight + i, nullptr, size}, row + i, row + i, size);
  }
};

const Kind<Mamba2> MAMBA2("mamba2");

}  // namespace

}  // namespace specbeam
