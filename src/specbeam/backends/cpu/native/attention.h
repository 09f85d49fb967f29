// Attention of one part over the nodes of a pass. The kernels are in attention.cpp, which is compiled once for each
// instruction set.
#pragma once

#include <vector>

#include "model.h"

namespace specbeam {

// A sequence is read in splits of this many positions. Each split has its own softmax, and a node's splits are joined
// in order. So the order of all additions depends on the node's position alone, and threads can share a long sequence.
constexpr int64_t SPLIT = 256;

// The size of a row's result for a split: a value of `width` features, and two numbers more. It is whole cache lines.
inline int64_t sums_size(int64_t width) { return width + 16; }

// Some nodes of a segment, one after the other. They read the slots that they share together.
struct Tile {
  const Segment *segment;
  int64_t node;          // the first node's number in the pass
  int64_t first, count;  // the nodes in the segment
  int64_t split, end;    // the splits that the nodes see
  int64_t parts;  // where the results of the splits go in AttentionJob::parts, or -1 if one thread does all splits
};

// A tile's attention in the query heads that share a key head, in some of its splits.
struct AttentionItem {
  int64_t tile, kv_head, split, end;
};

// The numbers of a part's heads. Groups of query heads share a head of keys and values.
struct Heads {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  double scale = 1, softcap = 0;  // softcap: 0 for none
  Norm sinks;                     // a number for each query head, or none: see checkpoints/parts/attention.py
  const float *sink(int64_t head) const { return sinks ? sinks.weight + head : nullptr; }
  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t query_size() const { return num_heads * head_dim; }
  int64_t key_size() const { return num_kv_heads * head_dim; }
};

// The attention of one part over the nodes of a pass.
struct AttentionJob {
  const Heads &heads;
  const KeyValues keys;
  int64_t region;        // of the cache, in which the keys are
  int64_t window;        // 0 for none
  const float *queries;  // [nodes, stride], the query heads first
  int64_t stride;
  float *out;  // [nodes, heads * head_dim]
  const std::vector<Tile> &tiles;
  const std::vector<AttentionItem> &items;
  const std::vector<int32_t> &tile_of;  // by node
  float *parts;                         // [kv head, split, row of the tile, sums_size(width)] for each tile

  int64_t first_seen(int64_t position) const { return specbeam::first_seen(position, window); }
};

// Writes the keys and values of a node into a slot. keys, values: [kv_heads * head_dim]
void put(const Heads &, const KeyValues &, int64_t slot, const float *keys, const float *values);
// Reads a key as float32. key: [width of the cache]
void get_key(const KeyValues &, int64_t kv_head, int64_t slot, float *key);
void attend(const AttentionJob &, int64_t item);
// Joins the splits of a node, where several threads did them.
void join(const AttentionJob &, int64_t node);

}  // namespace specbeam
