// Random trees of tokens for fuzz targets, their slots, and the segments of passes over them.
#pragma once

#include <algorithm>

#include "boundary.h"

namespace specbeam {

struct Node {
  int64_t token, parent, depth, slot;
};

// A tree of tokens. Its nodes lie in slots of the model's cache.
struct Tree {
  std::vector<Node> nodes;

  std::vector<int64_t> path(int64_t node) const {
    std::vector<int64_t> path;
    for (; node >= 0; node = nodes[size_t(node)].parent) path.push_back(node);
    std::reverse(path.begin(), path.end());
    return path;
  }
};

// The slots of the model's cache: true for a slot in use.
using Slots = std::vector<bool>;

constexpr int64_t MOST_SLOTS = 1024;  // of two trees and more, in several blocks of the cache

// The first free slot after this one, or from the start on; -1 if all slots are taken.
inline int64_t free_after(const Slots &taken, int64_t slot) {
  for (size_t tries = 0; tries < taken.size(); tries++)
    if (slot = (slot + 1) % int64_t(taken.size()); !taken[size_t(slot)]) return slot;
  return -1;
}

inline int64_t free_slot(Input &in, const Slots &taken) {
  return taken.empty() ? -1 : free_after(taken, in.ConsumeIntegralInRange<int64_t>(0, int64_t(taken.size()) - 1));
}

// The rows of slots, for more lifetimes than a model has: neighbours are swapped.
constexpr int64_t ROW_SLOTS = 2 * MOST_SLOTS, MOST_LIFETIMES = 32;
inline std::vector<int32_t> &rows_of_slots() {
  static std::vector<int32_t> rows = [] {
    std::vector<int32_t> swapped(size_t(ROW_SLOTS * MOST_LIFETIMES));
    for (size_t i = 0; i < swapped.size(); i++) swapped[i] = int32_t(i % ROW_SLOTS) ^ 1;
    return swapped;
  }();
  return rows;
}

// The arrays of a segment. Each has exactly its size.
struct Arrays {
  std::unique_ptr<int64_t[]> tokens, positions, slots, prefix, suffixes;
};

// A segment of the nodes of a tree from `first` on. `shared` positions of their paths become the prefix, or fewer.
inline std::pair<Segment, Arrays> segment_of(const Tree &tree, int64_t first, int64_t shared) {
  const auto n = int64_t(tree.nodes.size()) - first;
  int64_t deepest = first;
  for (int64_t i = first; i < first + n; i++)
    if (tree.nodes[size_t(i)].depth > tree.nodes[size_t(deepest)].depth) deepest = i;
  const auto longest = tree.path(deepest);
  for (int64_t i = first; i < first + n; i++) {
    const auto path = tree.path(i);
    for (size_t p = 0; p < path.size(); p++)
      if (path[p] != longest[p]) shared = std::min(shared, int64_t(p));
  }
  shared = std::min(shared, int64_t(longest.size()));
  Segment s{};
  Arrays a;
  s.nodes = n, s.prefix_length = shared, s.suffix_columns = int64_t(longest.size()) - shared;
  for (auto *array : {&a.tokens, &a.positions, &a.slots}) *array = exactly<int64_t>(size_t(n));
  a.prefix = exactly<int64_t>(size_t(shared)), a.suffixes = exactly<int64_t>(size_t(n * s.suffix_columns));
  const auto slot = [&](int64_t node) { return tree.nodes[size_t(node)].slot; };
  for (int64_t p = 0; p < shared; p++) a.prefix[p] = slot(longest[size_t(p)]);
  for (int64_t i = 0; i < n; i++) {
    const Node &node = tree.nodes[size_t(first + i)];
    a.tokens[i] = node.token, a.positions[i] = node.depth, a.slots[i] = node.slot;
    const auto path = tree.path(first + i);
    for (int64_t p = shared; p <= node.depth; p++)
      a.suffixes[i * s.suffix_columns + p - shared] = slot(path[size_t(p)]);
  }
  s.tokens = a.tokens.get(), s.positions = a.positions.get(), s.slots = a.slots.get();
  s.prefix = a.prefix.get(), s.suffixes = a.suffixes.get();
  s.row_slots = ROW_SLOTS, s.row_of_slot = rows_of_slots().data();
  return {s, std::move(a)};
}

// New nodes of a tree, as a segment without mistakes. It has no nodes if the cache is full.
inline std::pair<Segment, Arrays> grow(Input &in, Tree &tree, Slots &taken, const ModelConfig &c, bool alone) {
  const auto first = int64_t(tree.nodes.size()), count = in.ConsumeIntegralInRange<int64_t>(1, 12);
  if (!first && c.context_length > 64 && in.ConsumeBool()) {  // a long prompt
    for (int64_t depth = 0; depth < c.context_length - 20; depth++) {
      const int64_t slot = depth ? free_after(taken, tree.nodes.back().slot) : free_slot(in, taken);
      if (slot < 0) break;
      taken[size_t(slot)] = true;
      tree.nodes.push_back({depth * 7 % c.vocab_size, depth - 1, depth, slot});
    }
  }
  for (int64_t i = 0; i < count; i++) {
    const auto known = int64_t(tree.nodes.size());
    const int64_t parent = known == 0 || in.rarely()   ? -1
                           : alone || in.ConsumeBool() ? known - 1
                                                       : in.ConsumeIntegralInRange<int64_t>(0, known - 1);
    const int64_t depth = parent < 0 ? 0 : tree.nodes[size_t(parent)].depth + 1;
    const int64_t slot = free_slot(in, taken);
    if (slot < 0 || depth >= c.context_length) break;
    taken[size_t(slot)] = true;
    tree.nodes.push_back({in.ConsumeIntegralInRange<int64_t>(0, c.vocab_size - 1), parent, depth, slot});
  }
  if (int64_t(tree.nodes.size()) == first) return {Segment{}, Arrays()};
  return segment_of(tree, first, in.ConsumeIntegralInRange<int64_t>(0, 80));
}

inline void evict(Input &in, void *model, Tree &tree, Slots &taken) {
  for (const Node &node : tree.nodes) {
    taken[size_t(node.slot)] = false;
    if (in.ConsumeBool()) check(specbeam_cache_release(model, node.slot, 1) == 0);
  }
  tree.nodes.clear();
}

// Takes slots out of a prefix, before what all nodes read. reach: of the farthest part, 0 for all positions
inline void drop_unseen(Input &in, const Segment &s, Arrays &a, int64_t reach) {
  const int64_t seen = *std::min_element(s.positions, s.positions + s.nodes) + 1 - reach;
  for (int64_t p = 0; reach && p < std::min(seen, s.prefix_length); p++)
    if (in.ConsumeBool()) a.prefix[p] = NO_SLOT;
}

}  // namespace specbeam
