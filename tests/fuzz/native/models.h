// Random models for fuzz targets. Most are right, and some lack a parameter or have a wrong one.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>

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
  const int wide = in.ConsumeIntegralInRange(0, 7) ? 40 : MOST_OUTPUTS;
  for (auto [size, most] : {std::pair{&c.vocab_size, wide}, {&c.hidden_size, 70}, {&c.num_layers, 3}})
    *size = in.number(1, most);
  c.context_length = in.number(8, in.ConsumeIntegralInRange(0, 7) ? 64 : LONGEST_SEQUENCE);
  c.integer_cache = Flag(in.number(NO, YES)), c.norm = NormKind(in.number(RMS, LAYER));
  c.final_norm = in.ConsumeIntegralInRange(0, 3) ? YES : NO;
  c.per_layer_size = in.ConsumeIntegralInRange(0, 3) ? 0 : in.number(1, 20);
  c.norm_eps = 1e-5, c.embedding_scale = 1, c.logits_softcap = in.ConsumeBool() ? 30 : 0;
  c.logits_scale = in.ConsumeBool() ? 0.125 : 1;
  for (double *number : {&c.norm_eps, &c.embedding_scale, &c.logits_scale, &c.logits_softcap})
    if (in.rarely()) *number = in.ConsumeFloatingPoint<double>() / in.ConsumeIntegral<int8_t>();
  return c;
}

// Of an audio encoder beside a model. Its context is short, because a pass is over all of it.
inline ModelConfig encoder_of(Input &in) {
  ModelConfig c = config_of(in);
  if (!in.rarely()) c.per_layer_size = 0;
  c.bands = in.number(1, 20), c.context_length = in.number(1, in.ConsumeIntegralInRange(0, 7) ? 20 : 300);
  return c;
}

// A part that the library has accepted.
struct PartOf {
  std::string name;
  std::map<std::string, double> numbers;
  int64_t number(const char *field) const { return int64_t(numbers.at(field)); }
};

// The parts of a model or of an encoder by layers. Of models with more than some layers, the rest stays empty.
struct Layers {
  std::vector<std::vector<PartOf>> layers;

  // The last positions that the farthest part reads, 0 for all; -1 if no part keeps anything.
  int64_t reach() const {
    int64_t farthest = -1;
    for (const auto &layer : layers)
      for (const PartOf &part : layer) {
        const int64_t own = part.name == "attention"           ? part.number("window")
                            : part.name == "gated_delta_net"   ? 0
                            : part.name == "short_convolution" ? part.number("kernel_size")
                                                               : -1;
        if (own >= 0) farthest = own == 0 || farthest == 0 ? 0 : std::max(farthest, own);
      }
    return farthest;
  }

  // The layer and the number of heads of each cross-attention.
  std::vector<std::pair<int64_t, int64_t>> cross_heads() const {
    std::vector<std::pair<int64_t, int64_t>> all;
    for (size_t l = 0; l < layers.size(); l++)
      for (const PartOf &part : layers[l])
        if (part.name == "cross_attention") all.push_back({int64_t(l), part.number("num_heads")});
    return all;
  }
};

// The names of a part's numbers, in their order.
inline std::vector<std::string> fields_of(const char *part) {
  const char *fields = specbeam_part_fields(part);
  std::vector<std::string> names;
  std::string text = fields ? fields : "";
  for (size_t end; (end = text.find(';')) != std::string::npos; text.erase(0, end + 1))
    names.push_back(text.substr(text.rfind(' ', end) + 1, end - text.rfind(' ', end) - 1));
  return names;
}

// A model without parameters yet, as the library has accepted it.
class Parts {
 public:
  // ropes: the frequencies of each rotation
  Parts(Input &input, void *to, const ModelConfig &config, bool is_encoder, bool beside_encoder,
        std::vector<int64_t> frequencies)
      : in(input),
        model(to),
        c(config),
        of_encoder(is_encoder),
        has_encoder(beside_encoder),
        ropes(std::move(frequencies)) {}

  Layers add() {
    all.layers.resize(size_t(std::min<int64_t>(c.num_layers, 4)));
    for (size_t l = 0; l < all.layers.size(); l++)
      for (const char *name : names()) add_part(int64_t(l), name);
    return all;
  }

 private:
  Input &in;
  void *model;
  const ModelConfig &c;
  const bool of_encoder, has_encoder;
  const std::vector<int64_t> ropes;
  Layers all;

  // The names of parts for a layer: of a usual layer, or any in any order.
  std::vector<const char *> names() {
    std::vector<const char *> names;
    if (in.ConsumeIntegralInRange(0, 3)) {
      names.push_back(of_encoder || in.ConsumeIntegralInRange(0, 2) ? "attention"
                      : in.ConsumeBool()                            ? "short_convolution"
                                                                    : "gated_delta_net");
      if (has_encoder && names[0] == std::string("attention")) names.push_back("cross_attention");
      names.push_back("mlp");
      if (c.per_layer_size) names.push_back("per_layer_embedding");
    } else {
      for (int64_t n = in.ConsumeIntegralInRange(1, 5); n > 0; n--)
        names.push_back(in.PickValueInArray(
            {"attention", "mlp", "short_convolution", "gated_delta_net", "cross_attention", "per_layer_embedding"}));
    }
    if (in.rarely()) names.push_back(in.PickValueInArray({"experts", "", "attention_norm"}));
    if (in.rarely()) names.push_back(nullptr);
    return names;
  }

  // Tries to add a part. One without a mistake must be accepted.
  void add_part(int64_t layer, const char *name) {
    const auto fields = fields_of(name);
    CHECK(fields.empty() ==
          !(name && (!std::strcmp(name, "attention") || !std::strcmp(name, "cross_attention") ||
                     !std::strcmp(name, "mlp") || !std::strcmp(name, "short_convolution") ||
                     !std::strcmp(name, "gated_delta_net") || !std::strcmp(name, "per_layer_embedding"))));
    std::vector<PartOf> &before = all.layers[size_t(layer)];
    bool right = !fields.empty();
    for (const PartOf &part : before) right = right && part.name != name;
    PartOf part{name ? name : "", {}};
    if (right) choose(part, layer, before);
    if (part.name == "per_layer_embedding") right = right && c.per_layer_size;
    if (part.name == "short_convolution") right = right && !of_encoder && c.hidden_size <= INT32_MAX / 3;
    if (part.name == "gated_delta_net") right = right && !of_encoder;
    if (part.name == "cross_attention")
      right = right && has_encoder && !before.empty() && before.back().name == "attention" &&
              part.number("num_kv_heads") == before.back().number("num_kv_heads") &&
              part.number("head_dim") == before.back().number("head_dim");
    auto count = int64_t(fields.size());
    if (in.rarely() && !in.ConsumeIntegralInRange(0, 3))
      count = in.ConsumeBool() ? in.ConsumeIntegralInRange<int64_t>(INT64_MIN, -1) : in.number(0, 3) & 63,
      right = false;
    const auto numbers = exactly<double>(size_t(std::max<int64_t>(count, 0)));
    for (int64_t i = 0; i < count && i < int64_t(fields.size()); i++) numbers[i] = part.numbers[fields[size_t(i)]];
    if (count > 0 && in.rarely() && !in.ConsumeIntegralInRange(0, 3))
      numbers[in.ConsumeIntegralInRange<int64_t>(0, count - 1)] = wrong_number(), right = false;
    const bool nothing = in.rarely() && in.rarely(), astray = in.rarely() && in.rarely();
    const int64_t to = astray ? in.wild() : layer;
    const char *wrong = specbeam_model_part(model, of_encoder, to, name, nothing ? nullptr : numbers.get(), count);
    check(!wrong || *wrong);
    if (right && !nothing && !astray && wrong) std::fprintf(stderr, "a %s was refused: %s\n", name, wrong);
    CHECK(!wrong || !right || nothing || astray);
    if (wrong) return;
    CHECK(!nothing && count == int64_t(fields.size()));
    for (size_t i = 0; i < fields.size(); i++) part.numbers[fields[i]] = numbers[i];
    if (to >= 0 && to < int64_t(all.layers.size())) all.layers[size_t(to)].push_back(part);
  }

  double wrong_number() {
    constexpr double EDGES[] = {NAN, INFINITY, -INFINITY, 1e300, -1, -0.0, 0.5, 2147483647, 2147483648, 1e18};
    return in.ConsumeBool()   ? in.PickValueInArray(EDGES)
           : in.ConsumeBool() ? double(in.wild())
                              : in.ConsumeFloatingPoint<double>();
  }

  // Chooses numbers that go together.
  void choose(PartOf &part, int64_t layer, const std::vector<PartOf> &before) {
    auto &n = part.numbers;
    const bool twice = !before.empty() && before.back().number("parallel");
    n["parallel"] = !before.empty() && !in.ConsumeIntegralInRange(0, 3);
    n["norm"] = n["parallel"] ? !twice && in.ConsumeBool() : in.ConsumeIntegralInRange(0, 3) > 0;
    n["output_norm"] = !in.ConsumeIntegralInRange(0, 3), n["sum_norm"] = !in.ConsumeIntegralInRange(0, 3);
    n["output_scale"] = in.ConsumeIntegralInRange(0, 3) ? 1 : 0.22, n["sum_scale"] = in.ConsumeBool();
    if (part.name == "mlp") {
      n["intermediate_size"] =
          double(in.ConsumeIntegralInRange(1, in.ConsumeIntegralInRange(0, 7) ? 40 : MOST_OUTPUTS));
      n["activation"] = in.ConsumeIntegralInRange(0, 2), n["gated"] = in.ConsumeBool();
    } else if (part.name == "per_layer_embedding") {
      n["size"] = double(c.per_layer_size), n["activation"] = in.ConsumeIntegralInRange(0, 2);
    } else if (part.name == "short_convolution") {
      n["kernel_size"] = in.ConsumeIntegralInRange(1, in.ConsumeIntegralInRange(0, 7) ? 4 : 16);
    } else if (part.name == "gated_delta_net") {
      n["kernel_size"] = in.ConsumeIntegralInRange(1, in.ConsumeIntegralInRange(0, 7) ? 4 : 16);
      n["num_key_heads"] = in.ConsumeIntegralInRange(1, 3), n["tiled"] = in.ConsumeBool();
      n["num_value_heads"] = n["num_key_heads"] * in.ConsumeIntegralInRange(1, 3);
      n["key_dim"] = 16 * in.ConsumeIntegralInRange(1, 3), n["value_dim"] = 16 * in.ConsumeIntegralInRange(1, 3);
    } else {
      n["num_kv_heads"] = in.ConsumeIntegralInRange(1, 3);
      n["head_dim"] = in.PickValueInArray({2, 8, 16, 24, int(in.ConsumeIntegralInRange(1, 40))});
      if (part.name == "cross_attention" && !before.empty() && before.back().name == "attention")
        for (const char *same : {"num_kv_heads", "head_dim"}) n[same] = before.back().numbers.at(same);
      n["num_heads"] = n["num_kv_heads"] * in.ConsumeIntegralInRange(1, 3);
      n["scale"] = 0.25, n["softcap"] = in.ConsumeBool() ? 30 : 0;
    }
    if (part.name != "attention") return;
    const bool of_some = !of_encoder && in.ConsumeBool();
    n["window"] = of_some ? in.ConsumeIntegralInRange(1, 9) : 0, n["rope"] = -1;
    n["qk_norm"] = in.ConsumeIntegralInRange(int(NONE), int(ROTATED_HEAD));
    n["value_norm"] = in.ConsumeBool(), n["keys_are_values"] = in.ConsumeBool(), n["shares_keys_of"] = -1;
    n["output_gate"] = !n["keys_are_values"] && in.ConsumeBool();
    if (layer && !of_encoder && in.ConsumeBool()) {
      const int64_t source = in.ConsumeIntegralInRange<int64_t>(0, layer - 1);
      for (const PartOf &other : all.layers[size_t(source)])
        if (other.name == "attention" && other.number("shares_keys_of") < 0) {
          for (const char *same : {"num_kv_heads", "head_dim", "window"}) n[same] = other.numbers.at(same);
          n["num_heads"] = n["num_kv_heads"], n["shares_keys_of"] = double(source), n["output_gate"] = 0;
        }
    }
    std::vector<int64_t> fitting;
    for (size_t rope = 0; rope < ropes.size() && !of_encoder; rope++)
      if (2 * ropes[rope] <= n["head_dim"]) fitting.push_back(int64_t(rope));
    if (!fitting.empty() && in.ConsumeIntegralInRange(0, 3) != 3)
      n["rope"] = double(fitting[in.ConsumeIntegralInRange<size_t>(0, fitting.size() - 1)]);
    if (!of_encoder && !in.ConsumeIntegralInRange(0, 3))
      n["query_growth"] = 0.25, n["query_growth_period"] = in.ConsumeIntegralInRange(1, 4);
  }
};

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

// The parameters of the parts.
inline void fill_layers(Input &in, Parameters &parameters, void *model, const ModelConfig &c, const Layers &of,
                        const std::string &prefix = "", int64_t encoder_size = 0) {
  const int64_t hidden = c.hidden_size;
  for (size_t number = 0; number < of.layers.size(); number++)
    for (const PartOf &part : of.layers[number]) {
      const auto layer = [&] { return in.rarely() && in.rarely() ? in.wild() : int64_t(number); };
      const std::string own = prefix + part.name;
      const auto product = [&](const char *name, int64_t rows, int64_t columns) {
        add_product(in, parameters, model, layer(), own + "." + name, rows, columns);
      };
      const auto filter = [&](int64_t rows, int64_t kernel) {
        if (in.rarely()) product("filter", rows, kernel);
        const int64_t bytes = specbeam_matrix_bytes(F32_ROWS, rows, kernel);
        if (bytes > 0 && bytes <= int64_t(MAX_PARAMETER_BYTES))
          specbeam_model_matrix(model, layer(), (own + ".filter.weight").c_str(), F32_ROWS, rows, kernel,
                                (uint8_t *)parameters.floats(bytes / 4), bytes);
      };
      const bool more = in.rarely() && in.rarely();  // norms that the part does not have
      if (more || part.number("norm")) add_norm(in, parameters, model, layer(), own + "_norm", hidden);
      if (more || part.number("output_norm"))
        add_norm(in, parameters, model, layer(), prefix + "post_" + part.name + "_norm", hidden);
      if (more || part.number("sum_norm")) add_norm(in, parameters, model, layer(), own + "_sum_norm", hidden);
      if (more || part.number("sum_scale")) add_norm(in, parameters, model, layer(), own + "_sum_scale", 1);
      if (part.name == "mlp") {
        const int64_t inner = part.number("intermediate_size");
        if (part.number("gated")) product("gate_up", 2 * inner, hidden);
        else product("up", inner, hidden);
        product(in.rarely() && in.rarely() ? "" : "down", hidden, inner);
      } else if (part.name == "per_layer_embedding") {
        product("gate", part.number("size"), hidden), product("projection", hidden, part.number("size"));
      } else if (part.name == "short_convolution") {
        const int64_t kernel = part.number("kernel_size");
        product("input", 3 * hidden, hidden), product("output", hidden, hidden);
        filter(hidden, kernel);
      } else if (part.name == "gated_delta_net") {
        const int64_t heads = part.number("num_value_heads"), values = heads * part.number("value_dim"),
                      convolved = 2 * part.number("num_key_heads") * part.number("key_dim") + values;
        product("input", convolved + values, hidden), product("rates", 2 * heads, hidden);
        product("output", hidden, values);
        filter(convolved, part.number("kernel_size"));
        for (const auto &[name, size] : {std::pair{".decay", heads}, {".step", heads}, {".norm", values / heads}})
          add_norm(in, parameters, model, layer(), own + name, size);
      } else {
        const int64_t width = part.number("num_heads") * part.number("head_dim"),
                      keys = part.number("num_kv_heads") * part.number("head_dim");
        const bool shares = part.name == "attention" && part.number("shares_keys_of") >= 0;
        if (shares) product("query", width, hidden);
        else if (part.name == "attention" && part.number("keys_are_values")) product("query_key", width + keys, hidden);
        else if (part.name == "attention")
          product("qkv", width * (part.number("output_gate") ? 2 : 1) + 2 * keys, hidden);
        else product("query", width, hidden), product("key_value", 2 * keys, encoder_size);
        product("output", hidden, width);
        if (part.name == "attention" && (more || part.number("qk_norm")))
          for (const auto &[name, all] : {std::pair{".q_norm", width}, {".k_norm", keys}})
            if (!shares || all == width || more)
              add_norm(in, parameters, model, layer(), own + name,
                       part.number("qk_norm") == ALL ? all : part.number("head_dim"));
      }
    }
}

// The embeddings that layers have of their own: packed, or as a file has them.
inline void add_embeddings_of_layers(Input &in, Parameters &parameters, void *model, const ModelConfig &c) {
  const int64_t columns = std::min<int64_t>(c.num_layers, 1 << 16) * c.per_layer_size;
  if (in.ConsumeBool()) {
    add_product(in, parameters, model, -1, "per_layer_embedding", c.vocab_size, columns);
  } else {
    // Types of numbers and blocks with ggml's numbers, and the bytes of a row.
    const int32_t types[] = {0, 1, 30, 2, 14};
    const int64_t rows[] = {4 * columns, 2 * columns, 2 * columns, columns / 32 * 18, columns / 256 * 210};
    const auto chosen = in.ConsumeIntegralInRange<size_t>(0, 4);
    const int32_t type = types[chosen];
    const int64_t bytes = in.rarely() ? in.wild() : std::min<int64_t>(c.vocab_size, 1 << 20) * rows[chosen];
    if (bytes <= int64_t(MAX_PARAMETER_BYTES))
      specbeam_model_table(model, in.rarely() ? "embedding.weight" : "per_layer_embedding.weight",
                           in.rarely() ? int32_t(in.wild()) : type, c.vocab_size, columns,
                           bytes > 0 ? parameters.bytes(bytes) : nullptr, bytes);
  }
  add_product(in, parameters, model, -1, "per_layer_projection", columns, c.hidden_size);
  add_norm(in, parameters, model, -1, "per_layer_norm", c.per_layer_size);
}

// Adds parts with their parameters, and the other parameters. Returns the parts.
inline Layers fill(Input &in, Parameters &parameters, void *model, const ModelConfig &c,
                   const ModelConfig *encoder = nullptr) {
  std::vector<int64_t> ropes;
  for (int64_t n = std::min<int64_t>(c.num_layers, in.ConsumeIntegralInRange(0, 3)); n > 0; n--) {
    const int64_t count = in.number(1, in.ConsumeBool() ? 4 : 12);
    if (count > int64_t(MAX_PARAMETER_BYTES)) continue;
    const float *frequencies = count > 0 ? parameters.floats(count) : nullptr;
    const int32_t rope = specbeam_model_rope(model, frequencies, count, in.rarely() ? -1e30f : 1);
    CHECK((rope >= 0) == (count > 0 && count <= MAX_ROTATED));
    if (rope >= 0) ropes.push_back(count);
  }
  Layers layers = Parts(in, model, c, false, encoder, ropes).add();
  add_product(in, parameters, model, -1, "embedding", c.vocab_size, c.hidden_size);
  if (in.ConsumeBool()) add_product(in, parameters, model, -1, "positions", c.context_length, c.hidden_size);
  add_product(in, parameters, model, -1, "head", c.vocab_size, c.hidden_size);
  if (c.per_layer_size) add_embeddings_of_layers(in, parameters, model, c);
  if (c.final_norm || in.rarely()) add_norm(in, parameters, model, -1, in.rarely() ? "norms" : "norm", c.hidden_size);
  fill_layers(in, parameters, model, c, layers, "", encoder ? encoder->hidden_size : 0);
  return layers;
}

inline Layers fill_encoder(Input &in, Parameters &parameters, void *model, const ModelConfig &encoder) {
  const Layers layers = Parts(in, model, encoder, true, false, {}).add();
  add_product(in, parameters, model, -1, "encoder.conv1", encoder.hidden_size, 3 * encoder.bands);
  add_product(in, parameters, model, -1, "encoder.conv2", encoder.hidden_size, 3 * encoder.hidden_size);
  add_product(in, parameters, model, -1, "encoder.positions", encoder.context_length, encoder.hidden_size);
  if (encoder.final_norm || in.rarely()) add_norm(in, parameters, model, -1, "encoder.norm", encoder.hidden_size);
  fill_layers(in, parameters, model, encoder, layers, "encoder.");
  return layers;
}

}  // namespace specbeam
