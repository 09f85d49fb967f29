// Random models for fuzz targets. Most are right, and some lack a parameter or have a wrong one.
#pragma once

#include <algorithm>

#include "boundary.h"

namespace specbeam {

constexpr size_t MAX_PARAMETER_BYTES = 1 << 18;
constexpr int MOST_OUTPUTS = 600;      // two threads multiply two blocks of weights at once if there are 512 outputs
constexpr int LONGEST_SEQUENCE = 700;  // attention reads sequences in splits of 256 positions

struct Parameters {
  std::vector<std::unique_ptr<uint8_t[]>> kept;
  uint64_t random;

  uint8_t *bytes(int64_t n) {
    kept.push_back(exactly<uint8_t>(n));
    for (int64_t i = 0; i < n; i++) kept.back()[i] = uint8_t((random = random * 6364136223846793005u + 1) >> 56);
    return kept.back().get();
  }
  // Numbers from -1 to 1.
  float *floats(int64_t n) {
    auto *p = (float *)bytes(n * int64_t(sizeof(float)));
    for (int64_t i = 0; i < n; i++) p[i] = float(((random = random * 6364136223846793005u + 1) >> 40) / 8388608.0 - 1);
    return p;
  }
};

inline ModelConfig config_of(Input &in) {
  ModelConfig c{};
  c.num_kv_heads = in.ConsumeIntegralInRange(1, 3);
  c.num_heads = c.num_kv_heads * in.ConsumeIntegralInRange(1, 3);
  const int wide = in.ConsumeIntegralInRange(0, 7) ? 40 : MOST_OUTPUTS;
  for (auto [size, most] : {std::pair{&c.vocab_size, wide},
                            {&c.hidden_size, 70},
                            {&c.intermediate_size, wide},
                            {&c.num_layers, 3},
                            {&c.head_dim, 40}})
    *size = in.number(1, most);
  c.context_length = in.number(8, in.ConsumeIntegralInRange(0, 7) ? 64 : LONGEST_SEQUENCE);
  if (in.rarely()) c.num_heads = in.wild();
  if (in.rarely()) c.num_kv_heads = in.wild();
  for (Flag *flag : {&c.gated_mlp, &c.parallel, &c.integer_cache}) *flag = Flag(in.number(NO, YES));
  c.norm = NormKind(in.number(RMS, LAYER)), c.activation = Activation(in.number(SILU, GELU_TANH));
  c.norm_eps = 1e-5, c.attention_scale = 0.25, c.embedding_scale = 1;
  for (double *softcap : {&c.attention_softcap, &c.logits_softcap}) *softcap = in.ConsumeBool() ? 30 : 0;
  for (double *number : {&c.norm_eps, &c.attention_scale, &c.embedding_scale, &c.attention_softcap, &c.logits_softcap})
    if (in.rarely()) *number = in.ConsumeFloatingPoint<double>() / in.ConsumeIntegral<int8_t>();
  return c;
}

// Of an audio encoder beside a model. Its context is short, because a pass is over all of it.
inline ModelConfig encoder_of(Input &in) {
  ModelConfig c = config_of(in);
  c.bands = in.number(1, 20), c.context_length = in.number(1, in.ConsumeIntegralInRange(0, 7) ? 20 : 300),
  c.parallel = NO;
  return c;
}

inline void add_product(Input &in, Parameters &parameters, void *model, int64_t layer, const std::string &name,
                        int64_t rows, int64_t columns) {
  int64_t left = rows;
  for (int part = in.rarely() ? int(in.ConsumeIntegralInRange(0, 12)) : int(in.ConsumeIntegralInRange(1, 3));
       part > 0 && left > 0; part--) {
    int64_t here = part == 1 ? left : in.ConsumeIntegralInRange(int64_t(1), left);
    left -= here;
    const int32_t format = int32_t(in.number(0, FORMAT_COUNT - 1));
    int64_t across = columns;
    if (in.rarely()) here = in.wild();
    if (in.rarely()) across = in.wild();
    int64_t bytes = specbeam_matrix_bytes(format, here, across);
    if (in.rarely()) bytes = in.wild();
    if (bytes > int64_t(MAX_PARAMETER_BYTES)) continue;
    uint8_t *data = nullptr;
    if (bytes > 0 && !in.rarely()) {
      data = format == F32_ROWS ? (uint8_t *)parameters.floats(bytes / 4) : parameters.bytes(bytes);
      if (format != F32_ROWS && !in.rarely())  // without these two bits all scales are below 2
        for (int64_t i = 0; i < bytes; i++) data[i] &= 0x3f;
    }
    specbeam_model_matrix(model, layer, (name + ".weight").c_str(), format, here, across, data, bytes);
  }
  if (in.ConsumeBool()) {
    const int64_t size = in.number(rows, rows);
    if (size >= 0 && size < int64_t(MAX_PARAMETER_BYTES))
      specbeam_model_vector(model, layer, (name + ".bias").c_str(), size ? parameters.floats(size) : nullptr, size);
  }
}

inline void add_norm(Input &in, Parameters &parameters, void *model, int64_t layer, const std::string &name,
                     int64_t expected) {
  for (const char *kind : {".weight", ".bias"}) {
    if (in.rarely() || (kind == std::string(".bias") && in.ConsumeBool())) continue;
    const int64_t size = in.number(expected, expected);
    if (size < 0 || size > int64_t(MAX_PARAMETER_BYTES)) continue;
    const float *numbers = parameters.floats(size);
    specbeam_model_vector(model, layer, (name + kind).c_str(), in.rarely() ? nullptr : numbers, size);
  }
}

// What layers have in models and in encoders.
inline void fill_layer(Input &in, Parameters &parameters, void *model, const ModelConfig &c, int64_t layer,
                       const std::string &of = "") {
  const auto own = [&] { return in.rarely() ? in.wild() : layer; };
  const int64_t width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim;
  add_product(in, parameters, model, own(), of + "attention.qkv", width, c.hidden_size);
  add_product(in, parameters, model, own(), of + "attention.output", c.hidden_size, c.num_heads * c.head_dim);
  add_product(in, parameters, model, own(), of + (c.gated_mlp ? "mlp.gate_up" : "mlp.up"),
              c.intermediate_size * (c.gated_mlp ? 2 : 1), c.hidden_size);
  add_product(in, parameters, model, own(), of + (in.rarely() ? "mlp" : "mlp.down"), c.hidden_size,
              c.intermediate_size);
  for (const char *name : {"attention_norm", "mlp_norm"})
    add_norm(in, parameters, model, own(), of + name, c.hidden_size);
  for (const char *name : {"post_attention_norm", "post_mlp_norm"})
    if (in.ConsumeBool()) add_norm(in, parameters, model, own(), of + name, c.hidden_size);
  for (const char *name : {"attention.q_norm", "attention.k_norm"})
    if (in.ConsumeBool()) add_norm(in, parameters, model, own(), of + name, c.head_dim);
}

inline void fill_encoder(Input &in, Parameters &parameters, void *model, const ModelConfig &c,
                         const ModelConfig &encoder) {
  add_product(in, parameters, model, -1, "encoder.conv1", encoder.hidden_size, 3 * encoder.bands);
  add_product(in, parameters, model, -1, "encoder.conv2", encoder.hidden_size, 3 * encoder.hidden_size);
  add_product(in, parameters, model, -1, "encoder.positions", encoder.context_length, encoder.hidden_size);
  add_norm(in, parameters, model, -1, "encoder.norm", encoder.hidden_size);
  for (int64_t l = 0; l < std::min<int64_t>(encoder.num_layers, 4); l++)
    fill_layer(in, parameters, model, encoder, l, "encoder.");
  for (int64_t l = 0; l < std::min<int64_t>(c.num_layers, 4); l++) {
    const int64_t width = c.num_heads * c.head_dim;
    add_norm(in, parameters, model, l, "cross_attention_norm", c.hidden_size);
    add_product(in, parameters, model, l, "cross_attention.query", width, c.hidden_size);
    add_product(in, parameters, model, l, "cross_attention.key_value", 2 * c.num_kv_heads * c.head_dim,
                encoder.hidden_size);
    add_product(in, parameters, model, l, "cross_attention.output", c.hidden_size, width);
  }
}

// Returns the widest window of the model's layers, or 0 if a layer has no window.
inline int64_t fill(Input &in, Parameters &parameters, void *model, const ModelConfig &c) {
  const int64_t some_layers = std::min<int64_t>(c.num_layers, 4);  // of models with more, the rest stays empty
  const auto layer_of = [&](int64_t layer) { return in.rarely() ? in.wild() : layer; };
  add_product(in, parameters, model, -1, "embedding", c.vocab_size, c.hidden_size);
  if (in.ConsumeBool()) add_product(in, parameters, model, -1, "positions", c.context_length, c.hidden_size);
  add_product(in, parameters, model, -1, "head", c.vocab_size, c.hidden_size);
  add_norm(in, parameters, model, -1, in.rarely() ? "norms" : "norm", c.hidden_size);
  int64_t ropes = 0;
  std::vector<int64_t> windows(size_t(c.num_layers));
  for (int64_t l = 0; l < some_layers; l++) {
    fill_layer(in, parameters, model, c, l);
    if (c.head_dim > 1 && in.ConsumeBool()) {
      const int64_t count = in.number(1, c.head_dim / 2);
      if (count <= int64_t(MAX_PARAMETER_BYTES)) {
        const float *frequencies = count > 0 ? parameters.floats(count) : nullptr;
        ropes += specbeam_model_rope(model, frequencies, count, in.rarely() ? -1e30f : 1) >= 0;
      }
    }
    const int64_t layer = layer_of(l), rope = in.number(-1, ropes - 1), window = in.ConsumeBool() ? in.number(0, 9) : 0;
    if (specbeam_model_layer(model, layer, rope, window) == 0) windows[size_t(layer)] = window;
  }
  const auto [narrowest, widest] = std::minmax_element(windows.begin(), windows.end());
  return *narrowest ? *widest : 0;
}

}  // namespace specbeam
