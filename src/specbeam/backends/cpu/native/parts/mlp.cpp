// The feed-forward network of a layer, and one that stands beside experts.

#include "../pass.h"

namespace specbeam {

namespace {

class MLP : public Part {
  int64_t intermediate_size = 0;
  Activation activation = SILU;
  Flag gated = NO;
  double gate_scale = 1;  // factor of the argument of the activation
  Product up, down;       // up: in a gated MLP, gate and up stacked

 public:
  explicit MLP(const char *name = "mlp") : Part(name) {
    number("intermediate_size", intermediate_size), number("activation", activation), number("gated", gated);
    number("gate_scale", gate_scale);
    product("gate_up", up), product("up", up), product("down", down);
  }

  const char *wrong(const Model &, const Layer &) const override {
    return intermediate_size < 1 || intermediate_size > INT32_MAX / 2 ? "the width of an MLP is wrong" : nullptr;
  }

  const char *incomplete(const Model &m) const override {
    const int64_t hidden = m.config.hidden_size, inner = intermediate_size;
    return is_shaped(up, gated ? 2 * inner : inner, hidden) && is_shaped(down, hidden, inner) ? nullptr : "the MLP";
  }

  const Product &first() const override { return up; }

  void run(Pass &p) const override {
    const int64_t inner = intermediate_size, rows = p.rows(), stride = stride_of(gated ? 2 * inner : inner);
    float *wide = room(p.space.wide, p.nodes * stride);
    multiply(up, p.threads, p.activations, wide, stride);
    p.activations.resize(rows, down.parts);
    p.threads.each(rows, 1, [&](int64_t r) {
      static thread_local Buffer<float> activated;
      float *row = room(activated, inner);
      const float *in = wide + r * stride;
      for (int64_t i = 0; i < inner; i += LANES) {
        prefetch(in + i + ACTIVATIONS_AHEAD);
        const F32 y = activate(activation, float(gate_scale) * load_some(in + i, inner - i));
        store_some(row + i, gated ? y * load_some(in + inner + i, inner - i) : y, inner - i);
      }
      p.activations.set(r, row);
    });
    multiply(down, p.threads, p.activations, p.out, p.out_stride);
  }
};

class SharedExpert final : public MLP {
  Flag has_output_gate = NO;
  Product output_gate;

 public:
  SharedExpert() : MLP("shared_expert") { number("output_gate", has_output_gate), product("output_gate", output_gate); }

  const char *incomplete(const Model &m) const override {
    const bool is_right =
        !has_output_gate ? !output_gate
                         : is_shaped(output_gate, 1, m.config.hidden_size) && output_gate.parts[0].format == F32_ROWS;
    return is_right ? MLP::incomplete(m) : "the gate of a shared expert";
  }

  void run(Pass &p) const override {
    MLP::run(p);
    if (!has_output_gate) return;
    const int64_t hidden = p.c.hidden_size, stride = stride_of(1);
    float *gates = room(p.space.wide, p.rows() * stride);
    p.activations.resize(p.rows(), output_gate.parts);
    p.threads.each(p.rows(), 16, [&](int64_t r) { p.activations.set(r, p.normed + p.going()[r] * hidden); });
    multiply(output_gate, p.threads, p.activations, gates, stride);
    p.threads.each(p.rows(), 16, [&](int64_t r) {
      const float share = 1.0f / (1.0f + exp(-all(gates[r * stride])))[0];
      for (int64_t i = 0; i < hidden; i++) p.out[r * p.out_stride + i] *= share;
    });
  }
};

const Kind<MLP> MLP_KIND("mlp");
const Kind<SharedExpert> SHARED_EXPERT("shared_expert");

}  // namespace

}  // namespace specbeam
