// A model as a pass reads it, and its KV cache. The functions of api.cpp fill them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "formats.h"
#include "states.h"
#include "table.h"

namespace specbeam {

constexpr int MAX_PARTS = 8, MAX_EXPERTS = 4096, MAX_THREADS = 1024;
constexpr int64_t MAX_LAYERS = 1 << 16, MAX_ROTATED = 1 << 15;

// Matrices stacked along their rows. They may have different formats.
struct Product {
  std::vector<Matrix> parts;
  const float *bias = nullptr;
  int64_t bias_size = 0;
  size_t most_parts = MAX_PARTS;
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
  int64_t start;  // where its frequencies begin among the frequencies of all rotations
};

// The first position of a sequence that a node at this position reads. reach: see Part::reach
inline int64_t first_seen(int64_t position, int64_t reach) {
  return reach && position >= reach ? position + 1 - reach : 0;
}

class Part;
using Layer = std::vector<std::unique_ptr<Part>>;
struct Features;

struct Model {
  ModelConfig config;
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
  Product embedding, positions, head;
  // Of models whose layers have embeddings of tokens of their own: a table [vocab, layers * per_layer_size], in a file
  // or packed, and the projection of a token's embedding that is normed and added.
  Table per_layer_table;
  Product per_layer_embedding, per_layer_projection;
  Norm per_layer_norm;
  Product conv1, conv2;  // over three frames each: [hidden, 3 * mel bins], [hidden, 3 * hidden]
  Norm norm;
  std::unique_ptr<Model> encoder;                   // null if there is none
  std::vector<std::shared_ptr<Features>> features;  // what draft heads read of it; of a head first its own
  // Of a draft head: what it reads of its target, the first product, and the norms of that product's inputs.
  std::shared_ptr<Features> read;
  Product fc;
  Norm embedding_norm, feature_norm;
  std::vector<int64_t> head_tokens;  // the tokens of the head's rows, ascending; empty: all tokens

  explicit Model(const ModelConfig &);
  ~Model();
};

// The features of a head in a cache, padded to whole vectors.
inline int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

constexpr int64_t SLOTS_PER_BLOCK = 256, PANEL_SLOTS = 16;

// How a head's keys and values lie in a block of slots. They are float32, or integers: keys of 16 bits and values of 8
// bits, with two scales per slot. Keys lie in panels of PANEL_SLOTS slots: [lane of 32 bits, slot], and the scales of
// keys and of values follow as two more lanes. So a vector holds the same lane of the keys of neighbouring slots.
struct KeyLayout {
  bool whole;            // keys and values are integers
  int64_t width, lanes;  // the padded head_dim; lanes of 32 bits for a key and the scales of its slot
  int64_t value, panel;  // bytes of a value; of a panel
  int64_t keys, head;    // bytes of a block for a head's keys; for its keys and values

  KeyLayout(int64_t head_dim, bool integers)
      : whole(integers),
        width(padded(head_dim)),
        lanes(whole ? width / 2 + 2 : width),
        value(whole ? width : width * int64_t(sizeof(float))),
        panel(PANEL_SLOTS * lanes * int64_t(sizeof(float))),
        keys(SLOTS_PER_BLOCK / PANEL_SLOTS * panel),
        head(keys + SLOTS_PER_BLOCK * value) {}
};

// The keys and values of a part in a cache: [block of slots, kv head, keys and values, SLOTS_PER_BLOCK, width].
struct KeyValues : KeyLayout {
  uint8_t *first;  // in the first block
  int64_t block;   // bytes of a block, in which other parts have sections, too

  // A head's keys and values in the first block.
  uint8_t *first_block(int64_t kv_head) const { return first + kv_head * head; }
  // Bytes from the first block to the panel of a slot's key, and to a slot's value.
  int64_t panel_at(uint64_t slot) const {
    return int64_t(slot / SLOTS_PER_BLOCK) * block + int64_t(slot % SLOTS_PER_BLOCK / PANEL_SLOTS) * panel;
  }
  int64_t value_at(uint64_t slot) const {
    return int64_t(slot / SLOTS_PER_BLOCK) * block + keys + int64_t(slot % SLOTS_PER_BLOCK) * value;
  }
};

// A row of numbers of a part in each slot: [block of slots, SLOTS_PER_BLOCK, size].
struct Rows {
  float *first;         // in the first block
  int64_t size, block;  // numbers of a row; of a block
  float *at(int64_t slot) const { return first + slot / SLOTS_PER_BLOCK * block + slot % SLOTS_PER_BLOCK * size; }
};

// What the parts of a model keep of the tokens of all sequences. A block of slots has a section for each part. Memory
// is reserved once and never moves. The system gives a page when it is first written.
class Cache {
 public:
  int64_t block = 0;               // bytes of a block
  int64_t capacity = 0;            // all slots in use are below it
  std::vector<int32_t> positions;  // [capacity], of each slot's node in its sequence; EMPTY: no node
  static constexpr int32_t EMPTY = -1;
  mutable States states;  // of linear attention

  // one_part: the cache holds what one part keeps at a time
  explicit Cache(bool one_part = false) : one_part(one_part) {}
  ~Cache() {
    if (room) munmap(room, bytes + STEP_BYTES);
  }
  Cache(const Cache &) = delete;

  // Adds a section to each block. Returns where it begins in a block, or -1 if it is too large, or comes too late.
  int64_t add_section(int64_t size) {
    constexpr int64_t MAX_BYTES = int64_t(1) << 46;
    if (data || size > MAX_BYTES || block > MAX_BYTES) return -1;
    if (one_part) return block = std::max(block, size), 0;
    return block += size, block - size;
  }
  KeyValues keys(const KeyLayout &layout, int64_t section) const { return {layout, data + section, block}; }
  Rows rows(int64_t size, int64_t section) const {
    return {reinterpret_cast<float *>(data + section), size, block / int64_t(sizeof(float))};
  }

  // Makes room for this many slots, and keeps the stored ones. Returns the error, or null.
  const char *reserve(int64_t slots) {
    if (slots <= capacity) return nullptr;
    if (!block) return "the model keeps nothing of a token";
    if (!data && !map()) return "no address space is left for a KV cache";
    const int64_t blocks = slots / SLOTS_PER_BLOCK + (slots % SLOTS_PER_BLOCK != 0);
    if (blocks > bytes / block) return "the KV cache would be larger than the memory of this machine";
    positions.resize(blocks * SLOTS_PER_BLOCK, EMPTY);
    const int64_t used = std::min(bytes, (blocks * block + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES);
    if (mprotect(data, used, PROT_READ | PROT_WRITE)) return "no memory is left for a KV cache";
    capacity = blocks * SLOTS_PER_BLOCK;
    return nullptr;
  }

  // Empties slots, and gives the memory of blocks without any other slot back to the system.
  void release(int64_t first, int64_t count) {
    std::fill_n(positions.begin() + first, count, EMPTY);
    states.forget(first, count);
    const int64_t from = (first + SLOTS_PER_BLOCK - 1) / SLOTS_PER_BLOCK, to = (first + count) / SLOTS_PER_BLOCK;
    const int64_t start = whole_pages(from * block), end = to * block / page() * page();
    if (start < end) (void)madvise(data + start, end - start, MADV_DONTNEED);
  }

 private:
  static constexpr int64_t STEP_BYTES = 1 << 21;  // the cache grows by large pages
  const bool one_part;
  uint8_t *room = nullptr, *data = nullptr;  // data: in room, at a multiple of STEP_BYTES
  int64_t bytes = 0;                         // of address space, from data on

  static int64_t page() { return sysconf(_SC_PAGESIZE); }
  static int64_t whole_pages(int64_t n) { return (n + page() - 1) / page() * page(); }

  // Reserves as much address space as the machine has memory, or half of it, or a quarter, and so on.
  bool map() {
    const int64_t memory = sysconf(_SC_PHYS_PAGES) * page(), most = INT32_MAX / SLOTS_PER_BLOCK;
    for (int64_t blocks = std::clamp<int64_t>(memory / block, 1, most); blocks; blocks /= 2) {
      const int64_t wanted = whole_pages(blocks * block);
      void *got = mmap(nullptr, wanted + STEP_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (got == MAP_FAILED) continue;
      room = static_cast<uint8_t *>(got), bytes = wanted;
      data = room + (STEP_BYTES - uintptr_t(got) % STEP_BYTES);
#if defined(MADV_HUGEPAGE)
      (void)madvise(data, bytes, MADV_HUGEPAGE);  // a pass reads more pages than a processor has addresses at hand
#endif
      return true;
    }
    return false;
  }
};

// What draft heads read of each node of a model: a row in the node's slot, with the hidden states before each of these
// layers. Layer num_layers stands for the states after all layers, and num_layers + 1 for these states after the last
// norm.
struct Features {
  std::vector<int64_t> layers;
  int64_t size;  // numbers of a row
  bool of_all;   // all nodes get a row, not only the nodes that go on
  Cache cache;

  Features(std::vector<int64_t> which, int64_t hidden, bool all)
      : layers(std::move(which)), size(int64_t(layers.size()) * hidden), of_all(all) {
    cache.add_section(SLOTS_PER_BLOCK * size * int64_t(sizeof(float)));
  }
  Rows rows() const { return cache.rows(size, 0); }
};

constexpr int64_t NO_FEATURE = -1;

// The slots of a node's ancestors from a position on, up to the end of the prefix or of the suffix.
inline const int64_t *ancestors(const Segment &s, int64_t node, int64_t position) {
  return position < s.prefix_length ? s.prefix + position
                                    : s.suffixes + node * s.suffix_columns + position - s.prefix_length;
}

}  // namespace specbeam
