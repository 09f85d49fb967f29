// Finds the parameters of a model by their names in backends/torch/transformer.py.
#pragma once

#include <string_view>

#include "model.h"

namespace specbeam {

// A matrix or a bias of a product, or a weight or a bias of a norm. Both are null if there is no such parameter.
struct Parameter {
  Product *product;
  Norm *norm;
  bool is_bias;
};

template <class T, class Owner> struct Named {
  std::string_view name;
  T Owner::*place;
};

constexpr Named<Product, Model> PRODUCTS_OF_MODEL[] = {{"embedding", &Model::embedding},
                                                       {"positions", &Model::positions},
                                                       {"head", &Model::head},
                                                       {"conv1", &Model::conv1},
                                                       {"conv2", &Model::conv2}};
constexpr Named<Norm, Model> NORMS_OF_MODEL[] = {{"norm", &Model::norm}};
constexpr Named<Product, Layer> PRODUCTS_OF_LAYER[] = {{"attention.qkv", &Layer::qkv},
                                                       {"attention.output", &Layer::output},
                                                       {"cross_attention.query", &Layer::cross_query},
                                                       {"cross_attention.key_value", &Layer::cross_key_value},
                                                       {"cross_attention.output", &Layer::cross_output},
                                                       {"mlp.gate_up", &Layer::up},
                                                       {"mlp.up", &Layer::up},
                                                       {"mlp.down", &Layer::down}};
constexpr Named<Norm, Layer> NORMS_OF_LAYER[] = {
    {"attention_norm", &Layer::attention_norm},   {"post_attention_norm", &Layer::post_attention_norm},
    {"cross_attention_norm", &Layer::cross_norm}, {"mlp_norm", &Layer::mlp_norm},
    {"post_mlp_norm", &Layer::post_mlp_norm},     {"attention.q_norm", &Layer::q_norm},
    {"attention.k_norm", &Layer::k_norm}};

template <class T, class Owner, size_t N>
T *named(const Named<T, Owner> (&all)[N], Owner &owner, std::string_view name) {
  for (const auto &one : all)
    if (one.name == name) return &(owner.*one.place);
  return nullptr;
}

// layer: -1 for a parameter outside of the layers. name: such as "attention.qkv.weight", "encoder.norm.bias"
inline Parameter parameter_named(Model &model, int64_t layer, const char *name) {
  const std::string_view all = name ? name : "", of_encoder = "encoder.";
  if (all.substr(0, of_encoder.size()) == of_encoder)
    return model.encoder ? parameter_named(*model.encoder, layer, name + of_encoder.size()) : Parameter{};
  const size_t dot = std::min(all.rfind('.'), all.size());
  const std::string_view owner = all.substr(0, dot), kind = all.substr(dot);
  if ((kind != ".weight" && kind != ".bias") || layer < -1 || layer >= int64_t(model.layers.size())) return {};
  if (layer == -1)
    return {named(PRODUCTS_OF_MODEL, model, owner), named(NORMS_OF_MODEL, model, owner), kind == ".bias"};
  Layer &l = model.layers[layer];
  return {named(PRODUCTS_OF_LAYER, l, owner), named(NORMS_OF_LAYER, l, owner), kind == ".bias"};
}

}  // namespace specbeam
