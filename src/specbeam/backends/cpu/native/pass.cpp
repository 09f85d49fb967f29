// One forward pass. A node's values are computed in an order that depends on the node alone: on its columns, its heads
// and its ancestors by depth. The order never depends on other nodes, on slots or on threads.

#include <algorithm>
#include <string>

#include "model.h"
#include "product.h"
#include "simd.h"
#include "tables.h"
#include "threads.h"

namespace specbeam::SPECBEAM_ISA {

void choose(const Choice &, Threads &);  // select.cpp

namespace {

// The buffers of a pass, kept for the next one.
struct Workspace {
  std::vector<float> x, normed, wide, attended, out, cos, sin;
  std::vector<int32_t> paths;        // the slots of each node's ancestors by depth, one node after the other
  std::vector<int64_t> path_starts;  // of each node in paths
  Activations activations;
};

constexpr int64_t SWEEP_BYTES = 256 * 1024;  // of int8 activations, per sweep over the weights

float *room(std::vector<float> &v, size_t n) {
  if (v.size() < n) v.resize(n);
  return v.data();
}

// out[x.rows, p.rows()]
void multiply(const Product &p, Threads &threads, const Activations &x, float *out) {
  const int64_t stride = p.rows();
  int64_t blocks = 0;
  std::array<int64_t, MAX_PARTS> starts{};
  for (size_t i = 0; i < p.parts.size(); i++) starts[i] = blocks, blocks += blocks_of(p.parts[i].rows);
  // Rows go in sweeps. A sweep's activations stay in the second-level cache while all weights go by.
  const int64_t most = std::max<int64_t>(64, SWEEP_BYTES / x.columns), least = (x.rows + most - 1) / most;
  const int64_t sweep = (x.rows + least * TILE_ROWS - 1) / (least * TILE_ROWS) * TILE_ROWS,
                sweeps = (x.rows + sweep - 1) / sweep;
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(16, sweeps * blocks / (threads.count() * 8)));
  threads.each(sweeps * blocks, chunk, [&](int64_t item) {
    const int64_t block = item % blocks, first = item / blocks * sweep, end = std::min(first + sweep, x.rows);
    size_t i = 0;
    while (i + 1 < p.parts.size() && block >= starts[i + 1]) i++;
    int64_t row = 0;
    for (size_t j = 0; j < i; j++) row += p.parts[j].rows;
    product_block(p.parts[i], block - starts[i], x, first, end, out + row, stride, p.bias ? p.bias + row : nullptr);
  });
}

struct Pass {
  const Model &model;
  const ModelConfig &c;
  Threads &threads;
  Workspace &space;
  const Segment *segments;
  int64_t nodes = 0;
  std::vector<int32_t> segment_of, row_in;  // by node
  int64_t width;

  Pass(const Model &m, Threads &t, Workspace &w, const Segment *s, int64_t count)
      : model(m), c(m.config), threads(t), space(w), segments(s), width((c.head_dim + LANES - 1) / LANES * LANES) {
    for (int64_t i = 0; i < count; i++)
      for (int64_t row = 0; row < s[i].nodes; row++) segment_of.push_back(int32_t(i)), row_in.push_back(int32_t(row));
    nodes = int64_t(segment_of.size());
  }

  const Segment &segment(int64_t node) const { return segments[segment_of[node]]; }
  int64_t position(int64_t node) const { return segment(node).positions[row_in[node]]; }

  // Finds each node's path: a node sees exactly one node at each depth up to its own. Returns the error, or null.
  const char *find_paths() {
    space.path_starts.assign(nodes + 1, 0);
    for (int64_t n = 0; n < nodes; n++) space.path_starts[n + 1] = space.path_starts[n] + position(n) + 1;
    space.paths.assign(space.path_starts[nodes], -1);
    for (int64_t n = 0; n < nodes; n++) {
      const Segment &s = segment(n);
      int32_t *path = &space.paths[space.path_starts[n]];
      const int64_t depth = position(n);
      const uint8_t *visible = s.visible ? s.visible + row_in[n] * s.length : nullptr;
      const int32_t *positions = s.cache->positions.data();
      for (int64_t slot = 0; slot < s.length; slot++) {
        if (visible && !visible[slot]) continue;
        const int32_t at = positions[slot];
        if (at < 0 || at > depth) return "a node sees a slot that is empty or deeper than itself";
        if (path[at] != -1) return "a node sees two slots of the same depth";
        path[at] = int32_t(slot);
      }
      for (int64_t i = 0; i <= depth; i++)
        if (path[i] < 0) return "a node does not see all of its ancestors";
    }
    return nullptr;
  }

  void norm_row(const Norm &norm, const float *x, float *out, int64_t size) const {
    float mean = 0;
    if (c.layer_norm && norm.bias) {
      double total = 0;
      for (int64_t i = 0; i < size; i++) total += x[i];
      mean = float(total / size);
    }
    F32 squares{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const F32 d = load<F32>(x + i) - mean;
      squares = multiply_add(d, d, squares);
    }
    float total = sum(squares);
    for (; i < size; i++) total += (x[i] - mean) * (x[i] - mean);
    const float scale = float(1.0 / std::sqrt(total / double(size) + c.norm_eps));
    for (i = 0; i < size; i++) out[i] = (x[i] - mean) * scale * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f);
  }

  void rotate(float *head, const Rope &rope, const float *cos, const float *sin) const {
    const int64_t half = int64_t(rope.frequencies.size());
    for (int64_t i = 0; i < half; i++) {
      const float left = head[i], right = head[i + half];
      head[i] = left * cos[i] - right * sin[i];
      head[i + half] = right * cos[i] + left * sin[i];
    }
  }

  void put(uint8_t *to, int64_t slot, const float *from, int64_t item) const {
    for (int64_t i = 0; i < width; i += LANES) {
      const F32 some = load_some(from + i, c.head_dim - i);
      if (item == 2) store_half((uint16_t *)to + slot * width + i, some);
      else store((float *)to + slot * width + i, some);
    }
  }

  template <class Item> static F32 get(const Item *p) {
    if constexpr (sizeof(Item) == 2) return load_half(p);
    else return load<F32>(p);
  }

  // Attention of a node in the query heads that share a key head. Keys and values are read once for all these heads, in
  // pieces of VECTORS vectors of features, which stay in registers. qkv: the node's row; out: [heads * head_dim].
  template <class Item, int VECTORS> void attend(int64_t node, int64_t kv_head, const Layer &layer, int64_t l,
                                                 const float *qkv, float *out) {
    static thread_local std::vector<float> queries, scores;
    Cache &cache = *segment(node).cache;
    const Item *keys = (const Item *)cache.at(l, 0, kv_head), *values = (const Item *)cache.at(l, 1, kv_head);
    const int64_t depth = position(node), group = c.heads / c.kv_heads;
    const int64_t first = layer.window && depth + 1 > layer.window ? depth + 1 - layer.window : 0;
    const int64_t length = depth + 1 - first, padded = (length + LANES - 1) / LANES * LANES;
    const int32_t *path = &space.paths[space.path_starts[node]] + first;
    constexpr int PIECE_FEATURES = VECTORS * LANES;
    float *query = room(queries, group * width), *score = room(scores, group * padded);
    for (int64_t h = 0; h < group; h++)
      for (int64_t i = 0; i < width; i += LANES)
        store(query + h * width + i, load_some(qkv + (kv_head * group + h) * c.head_dim + i, c.head_dim - i));
    for (int64_t piece = 0; piece < width; piece += PIECE_FEATURES)
      for (int64_t t = 0; t < length; t++) {
        const Item *key = keys + path[t] * width + piece;
        F32 k[VECTORS];
        for (int i = 0; i < VECTORS; i++) k[i] = get(key + i * LANES);
        for (int64_t h = 0; h < group; h++) {
          const float *q = query + h * width + piece;
          F32 a{};
          for (int i = 0; i < VECTORS; i++) a = multiply_add(load<F32>(q + i * LANES), k[i], a);
          float &s = score[h * padded + t];
          s = piece ? s + sum(a) : sum(a);
        }
      }
    for (int64_t h = 0; h < group; h++) softmax(score + h * padded, length, padded);
    constexpr int HEADS_AT_ONCE = 16 / VECTORS;
    for (int64_t piece = 0; piece < width; piece += PIECE_FEATURES)
      for (int64_t h = 0; h < group; h += HEADS_AT_ONCE) {
        const float *share[HEADS_AT_ONCE];  // beyond the last head: the last again, not used
        for (int j = 0; j < HEADS_AT_ONCE; j++) share[j] = score + std::min(h + j, group - 1) * padded;
        F32 o[HEADS_AT_ONCE][VECTORS] = {};
        for (int64_t t = 0; t < length; t++) {
          const Item *value = values + path[t] * width + piece;
          F32 v[VECTORS];
          for (int i = 0; i < VECTORS; i++) v[i] = get(value + i * LANES);
          for (int j = 0; j < HEADS_AT_ONCE; j++)
            for (int i = 0; i < VECTORS; i++) o[j][i] = multiply_add(all(share[j][t]), v[i], o[j][i]);
        }
        for (int j = 0; j < HEADS_AT_ONCE && h + j < group; j++)
          for (int64_t i = 0, at = piece; i < VECTORS && at < c.head_dim; i++, at += LANES)
            store_some(out + (kv_head * group + h + j) * c.head_dim + at, o[j][i], c.head_dim - at);
      }
  }

  // Softmax of the first `length` scores, in place. The scores up to `padded` become 0.
  void softmax(float *s, int64_t length, int64_t padded) const {
    const float scale = float(c.attention_scale), softcap = float(c.attention_softcap);
    for (int64_t t = length; t < padded; t++) s[t] = 0;
    F32 most = all(-INFINITY);
    for (int64_t t = 0; t < padded; t += LANES) {
      F32 v = load<F32>(s + t) * scale;
      if (softcap > 0) v = softcap * tanh(v / softcap);
      for (int64_t i = length - t; i < LANES; i++) v[i] = -INFINITY;
      store(s + t, v);
      most = select(v > most, v, most);
    }
    const float top = max(most);
    F32 total{};
    for (int64_t t = 0; t < padded; t += LANES) {
      const F32 e = exp(load<F32>(s + t) - top);
      store(s + t, e);
      total = total + e;
    }
    const float share = 1.0f / sum(total);
    for (int64_t t = 0; t < padded; t += LANES) store(s + t, load<F32>(s + t) * share);
  }

  template <class Item> void attend(int64_t node, int64_t kv_head, const Layer &layer, int64_t l, const float *qkv,
                                    float *out) {
    const int64_t parts = width / LANES;
    if (parts % 8 == 0) attend<Item, 8>(node, kv_head, layer, l, qkv, out);
    else if (parts % 4 == 0) attend<Item, 4>(node, kv_head, layer, l, qkv, out);
    else if (parts % 2 == 0) attend<Item, 2>(node, kv_head, layer, l, qkv, out);
    else attend<Item, 1>(node, kv_head, layer, l, qkv, out);
  }

  F32 activate(F32 x) const {
    if (c.activation == SILU) return x / (1.0f + exp(-x));
    if (c.activation == GELU_TANH) return 0.5f * x * (1.0f + tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    F32 y;
    for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.7071067811865476f));
    return y;
  }

  void activate_row(const float *in, float *out) const {
    for (int64_t i = 0; i < c.inner; i += LANES) {
      const int64_t here = c.inner - i;
      const F32 y = activate(load_some(in + i, here));
      store_some(out + i, c.gated ? y * load_some(in + c.inner + i, here) : y, here);
    }
  }

  void rotations() {
    int64_t total = 0;
    for (const Rope &rope : model.ropes) total += int64_t(rope.frequencies.size());
    float *cos = room(space.cos, nodes * total), *sin = room(space.sin, nodes * total);
    threads.each(nodes, 8, [&](int64_t n) {
      int64_t at = n * total;
      for (const Rope &rope : model.ropes)
        for (float frequency : rope.frequencies) {
          const float angle = float(position(n)) * frequency;  // in float32, as in PyTorch
          cos[at] = std::cos(angle) * rope.scale;
          sin[at++] = std::sin(angle) * rope.scale;
        }
    });
  }

  void block(int64_t l, float *x) {
    const Layer &layer = model.layers[l];
    const int64_t heads = c.heads + c.kv_heads, qkv_rows = (c.heads + 2 * c.kv_heads) * c.head_dim;
    const int64_t inner_rows = c.inner * (c.gated ? 2 : 1);
    Activations &a = space.activations;
    float *normed = room(space.normed, nodes * c.hidden);
    float *wide = room(space.wide, nodes * std::max(qkv_rows, inner_rows));
    float *attended = room(space.attended, nodes * c.heads * c.head_dim);
    float *out = room(space.out, nodes * c.hidden);

    a.resize(nodes, layer.qkv.parts);
    threads.each(nodes, 4, [&](int64_t n) {
      norm_row(layer.attention_norm, x + n * c.hidden, normed + n * c.hidden, c.hidden);
      a.set(n, normed + n * c.hidden);
    });
    multiply(layer.qkv, threads, a, wide);

    int64_t rope_start = 0, rope_total = 0;
    for (size_t r = 0; r < model.ropes.size(); r++) {
      if (int64_t(r) < layer.rope) rope_start += int64_t(model.ropes[r].frequencies.size());
      rope_total += int64_t(model.ropes[r].frequencies.size());
    }
    threads.each(nodes, 4, [&](int64_t n) {
      float *row = wide + n * qkv_rows;
      for (int64_t h = 0; h < heads; h++) {
        float *head = row + h * c.head_dim;
        const Norm &norm = h < c.heads ? layer.q_norm : layer.k_norm;
        if (norm) norm_row(norm, head, head, c.head_dim);
        if (layer.rope >= 0) {
          const int64_t at = n * rope_total + rope_start;
          rotate(head, model.ropes[layer.rope], &space.cos[at], &space.sin[at]);
        }
      }
      const Segment &s = segment(n);
      const int64_t slot = s.slots[row_in[n]];
      for (int64_t h = 0; h < c.kv_heads; h++) {
        put(s.cache->at(l, 0, h), slot, row + (c.heads + h) * c.head_dim, s.cache->item);
        put(s.cache->at(l, 1, h), slot, row + (heads + h) * c.head_dim, s.cache->item);
      }
    });

    threads.each(nodes * c.kv_heads, 1, [&](int64_t i) {
      const int64_t n = i / c.kv_heads, h = i % c.kv_heads;
      float *to = attended + n * c.heads * c.head_dim;
      if (segment(n).cache->item == 2) attend<uint16_t>(n, h, layer, l, wide + n * qkv_rows, to);
      else attend<float>(n, h, layer, l, wide + n * qkv_rows, to);
    });
    a.resize(nodes, layer.output.parts);
    threads.each(nodes, 4, [&](int64_t n) { a.set(n, attended + n * c.heads * c.head_dim); });
    multiply(layer.output, threads, a, out);

    a.resize(nodes, layer.up.parts);
    threads.each(nodes, 4, [&](int64_t n) {
      float *row = x + n * c.hidden, *o = out + n * c.hidden, *from = normed + n * c.hidden;
      if (layer.post_attention_norm) norm_row(layer.post_attention_norm, o, o, c.hidden);
      if (c.parallel && layer.mlp_norm) norm_row(layer.mlp_norm, row, from, c.hidden);
      for (int64_t i = 0; i < c.hidden; i++) row[i] += o[i];
      if (!c.parallel) norm_row(layer.mlp_norm, row, from, c.hidden);
      a.set(n, from);
    });
    multiply(layer.up, threads, a, wide);
    a.resize(nodes, layer.down.parts);
    threads.each(nodes, 1, [&](int64_t n) {
      static thread_local std::vector<float> activated;
      float *row = room(activated, c.inner);
      activate_row(wide + n * inner_rows, row);
      a.set(n, row);
    });
    multiply(layer.down, threads, a, out);
    threads.each(nodes, 4, [&](int64_t n) {
      float *row = x + n * c.hidden, *o = out + n * c.hidden;
      if (layer.post_mlp_norm) norm_row(layer.post_mlp_norm, o, o, c.hidden);
      for (int64_t i = 0; i < c.hidden; i++) row[i] += o[i];
    });
  }

  // logits: [count, vocab], for the first `vocab` tokens of the vocabulary.
  void run(const int64_t *wanted, int64_t count, int64_t vocab, float *logits) {
    float *x = room(space.x, nodes * c.hidden);
    rotations();
    const Matrix &embedding = model.embedding.parts[0];
    threads.each(nodes, 1, [&](int64_t n) {
      const int64_t token = segment(n).tokens[row_in[n]];
      for (int64_t i = 0; i < c.hidden; i++) {
        float value = weight_at(embedding, token, i);
        if (model.positions) value += weight_at(model.positions.parts[0], position(n), i);
        x[n * c.hidden + i] = value * float(c.embedding_scale);
      }
    });
    for (int64_t l = 0; l < c.layers; l++) block(l, x);
    if (!count) return;
    Activations &a = space.activations;
    const Product head = model.head.first(vocab);
    float *normed = room(space.normed, count * c.hidden);
    a.resize(count, head.parts);
    threads.each(count, 1, [&](int64_t i) {
      norm_row(model.norm, x + wanted[i] * c.hidden, normed + i * c.hidden, c.hidden);
      a.set(i, normed + i * c.hidden);
    });
    multiply(head, threads, a, logits);
    if (c.logits_softcap > 0) {
      const float softcap = float(c.logits_softcap);
      threads.each(count, 1, [&](int64_t i) {
        for (float *t = logits + i * vocab; t < logits + (i + 1) * vocab; t++) *t = softcap * std::tanh(*t / softcap);
      });
    }
  }
};

void *new_workspace() { return new Workspace; }
void delete_workspace(void *workspace) { delete static_cast<Workspace *>(workspace); }

const char *forward(const Model &model, Threads &threads, void *workspace, const Segment *segments, int64_t count,
                    const int64_t *wanted, int64_t wanted_count, int64_t vocab, float *logits) {
  Pass pass(model, threads, *static_cast<Workspace *>(workspace), segments, count);
  if (const char *wrong = pass.find_paths()) return wrong;
  const Threads::Awake awake(threads);
  pass.run(wanted, wanted_count, vocab, logits);
  return nullptr;
}

void multiply_one(const Matrix &w, Threads &threads, const float *values, int64_t rows, float *out) {
  const Product p{{w}};
  Activations x;
  x.resize(rows, p.parts);
  const Threads::Awake awake(threads);
  threads.each(rows, 8, [&](int64_t row) { x.set(row, values + row * w.columns); });
  multiply(p, threads, x, out);
}

float weight(const Matrix &w, int64_t row, int64_t column) { return weight_at(w, row, column); }

}  // namespace

extern const Table TABLE = {SPECBEAM_ISA_NAME, new_workspace, delete_workspace, forward, choose, multiply_one, weight};

}  // namespace specbeam::SPECBEAM_ISA
