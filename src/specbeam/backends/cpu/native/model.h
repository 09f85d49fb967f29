// A model as the pass sees it, and the cache of one tree. Filled through the functions of api.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "formats.h"

namespace specbeam {

// The version of the functions of api.cpp and of the structures they take. Raise it here and in library.py when either
// changes.
constexpr int32_t ABI_VERSION = 2;

enum Activation : int64_t { SILU, GELU, GELU_TANH };

// What checkpoints/config.py says of a model. Mirrored field by field by ModelConfigStruct in library.py.
struct ModelConfig {
  int64_t vocab, hidden, inner, layers, heads, kv_heads, head_dim, context;
  int64_t layer_norm, activation, gated, parallel, half_cache;  // activation: an Activation; the others: 0 or 1
  double norm_eps, attention_scale, embedding_scale;
  double attention_softcap, logits_softcap;  // 0 for none
};

constexpr int MOST_PARTS = 8;

// Matrices stacked along their rows, at most MOST_PARTS: what one product yields may be of several formats.
struct Product {
  std::vector<Matrix> parts;
  const float *bias = nullptr;
  int64_t rows() const {
    int64_t n = 0;
    for (const Matrix &part : parts) n += part.rows;
    return n;
  }
  // The product that yields the first of its outputs, at most all.
  Product first(int64_t outputs) const {
    Product some{{}, bias};
    for (Matrix part : parts) {
      part.rows = std::min(part.rows, outputs);
      if (part.rows > 0) some.parts.push_back(part);
      outputs -= part.rows;
    }
    return some;
  }
  explicit operator bool() const { return !parts.empty(); }
};

struct Norm {
  const float *weight = nullptr, *bias = nullptr;
  explicit operator bool() const { return weight != nullptr; }
};

struct Rope {
  std::vector<float> frequencies;  // radians a position
  float scale;
};

struct Layer {
  Norm attention_norm, post_attention_norm, mlp_norm, post_mlp_norm, q_norm, k_norm;
  Product qkv, output, up, down;  // up is gate and up where one gates the other
  int64_t rope = -1, window = 0;  // which of the model's; 0 for no window
};

struct Model {
  ModelConfig config;
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
  Product embedding, positions, head;
  Norm norm;
};

// Keys and values of one tree, [layers, 2, kv_heads, capacity, padded head_dim], in float16 or float32.
struct Cache {
  int64_t layers, kv_heads, width, item;  // width: head_dim, padded to whole vectors
  int64_t capacity = 0;
  std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> data;  // a layer's keys, its values, the next layer's
  std::vector<int32_t> positions;                                    // in the text, of the node of each slot

  bool reserve(int64_t slots) {
    if (slots <= capacity) return true;
    positions.resize(slots, -1);  // before anything is changed: it may throw
    std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> grown;
    const size_t head = size_t(slots) * width * item, old = size_t(capacity) * width * item;
    for (int64_t i = 0; i < 2 * layers; i++) {
      void *bytes = nullptr;
      if (posix_memalign(&bytes, 64, head * kv_heads)) return false;
      grown.emplace_back((uint8_t *)bytes, &std::free);
      for (int64_t h = 0; h < kv_heads && old; h++)
        std::memcpy(grown[i].get() + h * head, data[i].get() + h * old, old);
    }
    data = std::move(grown);
    capacity = slots;
    return true;
  }

  uint8_t *at(int64_t layer, int value, int64_t head) {
    return data[2 * layer + value].get() + head * capacity * width * item;
  }
};

// The nodes of one tree in a pass, as backends/contract.py has them. Mirrored by SegmentStruct in library.py.
struct Segment {
  Cache *cache;
  int64_t nodes, length;
  const int64_t *tokens, *positions, *slots;  // [nodes]
  const uint8_t *visible;                     // [nodes, length], or null where all see all
};

}  // namespace specbeam
