// One forward pass as the parts of the layers see it. A node's values are computed in an order that depends on the node
// alone: on its columns, its heads and its ancestors by depth. The order never depends on other nodes, on slots or on
// threads.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "linear_attention.h"
#include "parts/part.h"
#include "product.h"
#include "simd.h"

namespace specbeam {

// Rows of queries in tiles, for groups of this many query heads; 0 where they are not divided yet.
struct Tiling {
  int64_t group = 0;
  bool by_node = true;  // a row has its node's number, and not its own
  std::vector<Tile> tiles;
  std::vector<int32_t> tile_of;  // by row
};

// Some rows of activations, and the matrices that they are multiplied with.
struct Job {
  ActivationRows x;
  float *out;                                   // of the first row
  int64_t count;                                // of the matrices
  std::array<const Matrix *, MAX_PARTS> parts;  // stacked along their rows
  std::array<const float *, MAX_PARTS> bias;    // of each; null for none
  // How its work is divided: see multiply.
  int64_t start = 0, items = 0, sweep = 0;
  std::array<int64_t, MAX_PARTS> starts{};
};

// The experts of the nodes that go on. A row has `most` experts, ascending.
struct Routes {
  std::vector<int32_t> expert, place;  // [rows, most]; the place of a row among all rows of all experts
  Buffer<float> weight;                // [rows, most]
  std::vector<int64_t> first;          // by expert, where its rows begin; at the end the number of all rows
  std::vector<int32_t> job;            // by expert
};

struct Workspace {
  Buffer<float> x, normed, wide, mixed, us, attended, out, held, cos, sin, attention_parts, per_layer, embedded;
  Buffer<float> own_logits;
  std::vector<int32_t> segment_of, row_in;  // by node
  std::vector<int64_t> going;               // the nodes that go on, ascending
  std::vector<int64_t> of_target;           // the nodes of a draft head whose parents' features are the target's
  Tiling nodes, cross;                      // the rows are all nodes; the nodes that go on
  std::vector<Segment> sources;             // for each segment, what its nodes see in cross-attention
  std::vector<int64_t> last_positions;      // of its source, by node
  std::vector<AttentionItem> attention_items;
  Activations activations;
  Routes routes;
  std::vector<Job> jobs;
  Borders borders;
};

constexpr int64_t ACTIVATIONS_AHEAD = 1024;  // numbers that are prefetched, over the ends of rows

// The distance of a buffer's rows: an odd number of cache lines. So the lines of neighbouring rows lie in different
// sets of a cache. A multiple of 64 lines would put all rows into the same few sets.
inline int64_t stride_of(int64_t columns) { return ((columns + LANES - 1) / LANES | 1) * LANES; }

// Writes the first p.rows() columns of out[x.rows, stride].
void multiply(const Product &p, Threads &, const ActivationRows &x, float *out, int64_t stride);
// The same for several jobs, whose outputs have the same stride. It fills in how their work is divided.
void multiply(Job *jobs, int64_t count, Threads &, int64_t stride);

inline F32 activate(Activation activation, F32 x) {
  if (activation == SILU) return x / (1.0f + exp(-x));
  if (activation == GELU_TANH) return 0.5f * x * (1.0f + tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  if (activation == RELU2) {
    const F32 positive = larger(F32{}, x);  // NaN stays
    return positive * positive;
  }
  return x * normal_share(x);
}

// ln(1 + y) of y from 0 to 1, by the series of the inverse hyperbolic tangent. The system's function has other last
// bits in another version.
inline F32 log1p(F32 y) {
  const F32 s = y / (2.0f + y), square = s * s;
  F32 sum = all(1.0f / 17);
#pragma GCC unroll 8
  for (int k = 15; k > 0; k -= 2) sum = multiply_add(sum, square, all(1.0f / float(k)));
  return 2.0f * s * sum;
}

// ln(1 + e^x)
inline F32 softplus(F32 x) {
  const F32 magnitude = (F32)((I32)x & all(int32_t(0x7fffffff)));
  return larger(x, F32{}) + log1p(exp(-magnitude));
}

struct Pass {
  const Model &model;
  const ModelConfig &c;
  const Cache &cache;
  Threads &threads;
  Workspace &space;
  const Segment *segments;
  const int64_t *wanted, wanted_count;
  int64_t nodes = 0;
  Activations &activations;
  // Buffers of the layers, by node: the hidden states, and the input of a part, normed. By row of the nodes that go on:
  // what a part makes of it.
  // held, by node: what a part has made that the next one is normed with.
  float *x = nullptr, *normed = nullptr, *out = nullptr, *held = nullptr;
  const int64_t out_stride;

  Pass(const Model &, const Cache &, Threads &, Workspace &, const Segment *, int64_t count, const int64_t *wanted,
       int64_t wanted_count);

  // The nodes that go on. Their rows in a part's arrays are in this order.
  const std::vector<int64_t> &going() const { return space.going; }
  int64_t rows() const { return int64_t(space.going.size()); }
  const Segment &segment(int64_t node) const { return segments[space.segment_of[node]]; }
  int64_t position(int64_t node) const { return segment(node).positions[space.row_in[node]]; }
  int64_t slot(int64_t node) const { return segment(node).slots[space.row_in[node]]; }
  // The row of a node in a region of the cache, or NO_ROW.
  int64_t row(int64_t node, int64_t region) const { return row_of(segment(node), region, slot(node)); }
  // The row of a node's ancestor in a region whose rows are made by the first pass that reads them: UNMADE - row if it
  // is this pass, NO_ROW if no later pass reads it.
  int64_t made_row_at(int64_t node, int64_t position, int64_t region) const {
    return made_row_of(cache, segment(node), region, slot_at(node, position), position);
  }
  // The slot of a node's ancestor.
  int64_t slot_at(int64_t node, int64_t position) const {
    return *ancestors(segment(node), space.row_in[node], position);
  }
  // Where a node's ancestor is: its number if it is in the pass, or NO_NODE, and its row in a region of the cache.
  struct Place {
    int64_t node, row;
  };
  Place place_at(int64_t node, int64_t position, int64_t region) const {
    const Segment &s = segment(node);
    const int64_t slot = *ancestors(s, space.row_in[node], position);
    return {cache.node_of[slot], row_of(s, region, slot)};
  }

  // A part with memory calls it once all nodes are stored. After the last such part, only the wanted nodes go on.
  // Returns whether any node goes on.
  bool any_goes_on_after(const Part &);

  // Shares the attention of a part out among threads: a tile and a key head make an item. Of few items, each is
  // several, with some of the splits each. of_source: the nodes see their source. by_node: the rows of the queries and
  // of the result are all nodes. Without it they are the nodes that go on.
  AttentionJob plan(bool of_source, bool by_node, const Heads &, const KeyValues &, int64_t region, int64_t window,
                    const float *queries, int64_t stride, float *result);

  // The cosines and sines of a node's position in a rotation.
  struct Angles {
    const float *cos, *sin;
    int64_t count;
  };
  Angles angles(int64_t node, int64_t rope) const {
    const Rope &own = model.ropes[rope], &last = model.ropes.back();
    const int64_t at = node * (last.start + int64_t(last.frequencies.size())) + own.start;
    return {&space.cos[at], &space.sin[at], int64_t(own.frequencies.size())};
  }

  // What the stem has made of a node's token for a layer: [per_layer_size]
  const float *per_layer_input(int64_t node, int64_t layer) const {
    return &space.per_layer[(node * c.num_layers + layer) * c.per_layer_size];
  }

  void norm_row(const Norm &norm, const float *row, float *to, int64_t size) const {
    float mean = 0;
    if (c.norm == LAYER && norm.bias) {
      double total = 0;
      for (int64_t i = 0; i < size; i++) total += row[i];
      mean = float(total / size);
    }
    F32 squares{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const F32 d = load<F32>(row + i) - mean;
      squares = multiply_add(d, d, squares);
    }
    float total = sum(squares);
    for (; i < size; i++) total += (row[i] - mean) * (row[i] - mean);
    const float scale = float(1.0 / std::sqrt(total / double(size) + c.norm_eps));
    for (i = 0; i < size; i++) to[i] = (row[i] - mean) * scale * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f);
  }

  void norm_or_copy(const Norm &norm, const float *row, float *to, int64_t size) const {
    if (norm) norm_row(norm, row, to, size);
    else std::copy_n(row, size, to);
  }

  // logits: [wanted_count, vocab], for the first `vocab` tokens of the vocabulary.
  void run(int64_t vocab, float *logits);
  // features: [mel bins, 2 * nodes]; states: [nodes, hidden], between layers what the next one reads
  void encode(const float *features, int64_t first, int64_t end, float *states);

 private:
  const Part *last_with_memory = nullptr;  // after which only the wanted nodes go on
  int64_t last_read = 0;                   // the last layer whose input is read of all nodes by a draft head

  void find_sources(int64_t count);
  void divide(Tiling &, int64_t group, const Segment *seen, bool by_node);
  void rotations();
  void per_layer_inputs();
  void embeddings();
  void head_inputs();
  void keep_features(int64_t layer, int64_t node);
  void head_logits(int64_t vocab, float *logits);
  void layers(int64_t first, int64_t end);
  void begin_part(const Part &, const Part *before);
  float *finished(const Part &, int64_t row);
  void add(const Part &, int64_t row);
  void convolve(const Product &weights, const float *from, int64_t rows, int64_t step, float *to);
  void begin(const float *features);
};

}  // namespace specbeam
