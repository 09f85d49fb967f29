// A model as a pass reads it, and the KV cache of one tree. The functions of api.cpp fill them.
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

// The version of the functions of api.cpp and of the structures they take. When one changes, raise it here and in
// library.py.
constexpr int32_t ABI_VERSION = 4;

enum Activation : int64_t { SILU, GELU, GELU_TANH };

// The numbers of checkpoints/config.py. ModelConfigStruct in library.py mirrors this structure field by field.
struct ModelConfig {
  int64_t vocab, hidden, inner, layers, heads, kv_heads, head_dim, context;
  int64_t layer_norm, activation, gated, parallel, half_cache;  // activation: an Activation; the others: 0 or 1
  double norm_eps, attention_scale, embedding_scale;
  double attention_softcap, logits_softcap;  // 0: no softcap
};

constexpr int MAX_PARTS = 8, MAX_THREADS = 1024;
constexpr int64_t MAX_LAYERS = 1 << 16;

// Matrices stacked along their rows, at most MAX_PARTS. They may have different formats.
struct Product {
  std::vector<Matrix> parts;
  const float *bias = nullptr;
  int64_t bias_size = 0;
  int64_t rows() const {
    int64_t n = 0;
    for (const Matrix &part : parts) n += part.rows;
    return n;
  }
  // The product that yields only the first `outputs` outputs, or all if it has fewer.
  Product first(int64_t outputs) const {
    Product some{{}, bias, bias_size};
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
  int64_t size = 0;
  explicit operator bool() const { return weight != nullptr; }
};

struct Rope {
  std::vector<float> frequencies;  // radians per position
  float scale;
};

struct Layer {
  Norm attention_norm, post_attention_norm, mlp_norm, post_mlp_norm, q_norm, k_norm;
  Product qkv, output, up, down;  // up: in a gated MLP, gate and up stacked
  int64_t rope = -1, window = 0;  // rope: an index into Model::ropes, or -1; window: 0 if attention has no window
};

struct Model {
  ModelConfig config;
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
  Product embedding, positions, head;
  Norm norm;
};

// The features of a head in a cache, padded to whole vectors.
inline int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Keys and values of one tree, [layers, 2, kv_heads, capacity, padded head_dim], in float16 or float32.
struct Cache {
  int64_t layers, kv_heads, width, item;  // width: the padded head_dim; item: bytes
  int64_t capacity = 0;
  std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> data;  // keys and values, layer by layer
  std::vector<int32_t> positions;  // of each slot's node in the text; -1: an empty slot

  bool reserve(int64_t slots) {
    if (slots <= capacity) return true;
    size_t head, all_heads;
    if (slots > INT32_MAX || __builtin_mul_overflow(size_t(slots), size_t(width * item), &head) ||
        __builtin_mul_overflow(head, size_t(kv_heads), &all_heads))
      return false;
    const size_t old = size_t(capacity) * width * item;
    std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> grown;
    grown.reserve(2 * layers);
    for (int64_t i = 0; i < 2 * layers; i++) {
      void *bytes = nullptr;
      if (posix_memalign(&bytes, 64, all_heads)) return false;
      grown.emplace_back((uint8_t *)bytes, &std::free);
      for (int64_t h = 0; h < kv_heads && old; h++)
        std::memcpy(grown[i].get() + h * head, data[i].get() + h * old, old);
    }
    positions.resize(slots, -1);  // before the rest changes, because it may throw
    data = std::move(grown);
    capacity = slots;
    return true;
  }

  uint8_t *at(int64_t layer, int value, int64_t head) {
    return data[2 * layer + value].get() + head * capacity * width * item;
  }
};

// The nodes of one tree in a pass: see backends/contract.py. SegmentStruct in library.py mirrors this structure.
struct Segment {
  Cache *cache;
  int64_t nodes, length;
  const int64_t *tokens, *positions, *slots;  // [nodes]
  const uint8_t *visible;                     // [nodes, length], or null if every node sees every slot
};

}  // namespace specbeam
