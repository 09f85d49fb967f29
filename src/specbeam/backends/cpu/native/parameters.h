// Finds the parameters of a model by their names in checkpoints/parameters.py.
#pragma once

#include <string_view>

#include "parts/part.h"

namespace specbeam {

// A matrix or a bias of a product, or a weight or a bias of a norm. Both are null if there is no such parameter.
struct Parameter {
  Product *product;
  Norm *norm;
  bool is_bias;
};

// layer: -1 for a parameter outside of the layers. name: such as "attention.qkv.weight", "encoder.norm.bias"
inline Parameter parameter_named(Model &model, int64_t layer, const char *name) {
  const std::string_view all = name ? name : "", of_encoder = "encoder.";
  if (all.substr(0, of_encoder.size()) == of_encoder)
    return model.encoder ? parameter_named(*model.encoder, layer, name + of_encoder.size()) : Parameter{};
  const size_t dot = std::min(all.rfind('.'), all.size());
  const std::string_view module = all.substr(0, dot), kind = all.substr(dot);
  if ((kind != ".weight" && kind != ".bias") || layer < -1 || layer >= int64_t(model.layers.size())) return {};
  Parameter found{nullptr, nullptr, kind == ".bias"};
  if (layer >= 0) {
    for (const auto &part : model.layers[layer])
      if (!found.product && !found.norm)
        found.product = part->product_named(module), found.norm = part->norm_named(module);
    return found;
  }
  if (module == "norm") found.norm = &model.norm;
  else if (module == "per_layer_norm") found.norm = &model.per_layer_norm;
  else if (module == "per_layer_embedding") found.product = &model.per_layer_embedding;
  else if (module == "per_layer_projection") found.product = &model.per_layer_projection;
  else if (module == "embedding") found.product = &model.embedding;
  else if (module == "positions") found.product = &model.positions;
  else if (module == "head") found.product = &model.head;
  else if (module == "fc") found.product = &model.fc;
  else if (module == "embedding_norm") found.norm = &model.embedding_norm;
  else if (module == "feature_norm") found.norm = &model.feature_norm;
  else if (module == "conv1") found.product = &model.conv1;
  else if (module == "conv2") found.product = &model.conv2;
  return found;
}

}  // namespace specbeam
