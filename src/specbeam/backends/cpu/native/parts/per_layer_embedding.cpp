// What a layer makes of its own embeddings of tokens (Gemma 3n; Gemma Team 2025).

#include "../pass.h"

namespace specbeam {

namespace {

class PerLayerEmbedding final : public Part {
  int64_t size = 0;  // of an embedding
  Activation activation = SILU;
  Product gate, projection;

 public:
  PerLayerEmbedding() : Part("per_layer_embedding") {
    number("size", size), number("activation", activation);
    product("gate", gate), product("projection", projection);
  }

  const char *wrong(const Model &m, const Layer &) const override {
    return size < 1 || size != m.config.per_layer_size ? "a layer reads embeddings of another size than it has"
                                                       : nullptr;
  }

  const char *incomplete(const Model &m) const override {
    const int64_t hidden = m.config.hidden_size;
    return is_shaped(gate, size, hidden) && is_shaped(projection, hidden, size) ? nullptr : "the gate of embeddings";
  }

  const Product &first() const override { return gate; }

  void run(Pass &p) const override {
    const int64_t rows = p.rows(), stride = stride_of(size);
    float *wide = room(p.space.wide, rows * stride);
    multiply(gate, p.threads, p.activations, wide, stride);
    p.activations.resize(rows, projection.parts);
    p.threads.each(rows, 4, [&](int64_t r) {
      float *row = wide + r * stride;
      const float *own = p.per_layer_input(p.going()[r], layer);
      for (int64_t i = 0; i < size; i += LANES) {
        const F32 gated = activate(activation, load_some(row + i, size - i)) * load_some(own + i, size - i);
        store_some(row + i, gated, size - i);
      }
      p.activations.set(r, row);
    });
    multiply(projection, p.threads, p.activations, p.out, p.out_stride);
  }
};

const Kind<PerLayerEmbedding> PER_LAYER_EMBEDDING("per_layer_embedding");

}  // namespace

}  // namespace specbeam
