// One forward pass. A node's values are computed in an order that depends on the node alone: on its columns, its heads
// and its ancestors by depth. The order never depends on other nodes, on slots or on threads.

#include <algorithm>
#include <numeric>
#include <string>

#include "attention.h"
#include "kernels.h"
#include "product.h"
#include "simd.h"

namespace specbeam {

// Rows of queries in tiles.
struct Tiling {
  std::vector<Tile> tiles;
  std::vector<int32_t> tile_of;  // by row
};

struct Workspace {
  Buffer<float> x, normed, wide, attended, out, cos, sin, attention_parts;
  std::vector<int32_t> segment_of, row_in;  // by node
  std::vector<int64_t> going;               // the nodes that a layer computes further, ascending
  Tiling nodes, cross;                      // the rows are all nodes; the nodes that go on
  std::vector<Segment> sources;             // for each segment, what its nodes see in cross-attention
  std::vector<int64_t> last_positions;      // of its source, by node
  std::vector<AttentionItem> attention_items;
  Activations activations;
};

namespace {

constexpr int64_t SWEEP_BYTES = 256 * 1024;  // of int8 activations, per sweep over the weights
constexpr int64_t ROWS_PER_TILE = 96;        // at most, of queries that read keys and values together
constexpr int64_t ACTIVATIONS_AHEAD = 1024;  // numbers that are prefetched, over the ends of rows
constexpr int64_t BLOCKS_PER_THREAD = 16;    // at least, of a product whose items are several blocks
constexpr int64_t ITEMS_PER_THREAD = 8;      // at least, of attention, where a sequence is long enough

// The distance of a buffer's rows: an odd number of cache lines. So the lines of neighbouring rows lie in different
// sets of a cache. A multiple of 64 lines would put all rows into the same few sets.
int64_t stride_of(int64_t columns) { return ((columns + LANES - 1) / LANES | 1) * LANES; }

// Writes the first p.rows() columns of out[x.rows, stride].
void multiply(const Product &p, Threads &threads, const Activations &x, float *out, int64_t stride) {
  int64_t blocks = 0, items = 0;
  for (const Matrix &part : p.parts) blocks += blocks_of(part.rows);
  // An item is some neighbouring blocks, where there are enough items for all threads.
  const int64_t together = x.rows >= TILE_ROWS && blocks >= threads.count() * BLOCKS_PER_THREAD ? TILE_BLOCKS : 1;
  std::array<int64_t, MAX_PARTS> starts{};
  for (size_t i = 0; i < p.parts.size(); i++)
    starts[i] = items, items += (blocks_of(p.parts[i].rows) + together - 1) / together;
  // Rows go in sweeps. A sweep's activations stay in the second-level cache while all weights go by.
  const int64_t most = std::max<int64_t>(MIN_SWEEP_ROWS, SWEEP_BYTES / x.columns), least = (x.rows + most - 1) / most;
  const int64_t sweep = (x.rows + least * TILE_ROWS - 1) / (least * TILE_ROWS) * TILE_ROWS,
                sweeps = (x.rows + sweep - 1) / sweep;
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(16, sweeps * items / (threads.count() * 8)));
  threads.each(sweeps * items, chunk, [&](int64_t number) {
    const int64_t item = number % items, first = number / items * sweep, end = std::min(first + sweep, x.rows);
    size_t i = 0;
    while (i + 1 < p.parts.size() && item >= starts[i + 1]) i++;
    int64_t row = 0;
    for (size_t j = 0; j < i; j++) row += p.parts[j].rows;
    const int64_t block = (item - starts[i]) * together, count = std::min(together, blocks_of(p.parts[i].rows) - block);
    product_blocks(p.parts[i], block, count, x, first, end, out + row, stride, p.bias ? p.bias + row : nullptr);
  });
}

struct Rotation {
  double cos, sin;
};

// The cosine and the sine of an angle in radians. The system's functions have other last bits in another version.
Rotation rotation(double angle) {
  // Right angles are taken off until at most half of one is left. Two numbers make up a right angle, so that the
  // product with the first is exact (Cody and Waite 1980).
  constexpr double RIGHT_ANGLE = 1.5707963267341256, REST = 6.077100506506192e-11, ROUNDER = 0x1.8p52;
  const double turns = angle * 0.6366197723675814 + ROUNDER - ROUNDER;
  const double x = (angle - turns * RIGHT_ANGLE) - turns * REST, square = x * x;
  double cos = 1, sin = 1;  // Taylor's series, from the inside: cos x = 1 - x^2/2 (1 - x^2/12 (1 - ...))
#pragma GCC unroll 7
  for (int k = 14; k > 0; k -= 2) {
    cos = 1 - square * (1.0 / (k * (k - 1))) * cos;
    sin = 1 - square * (1.0 / (k * (k + 1))) * sin;
  }
  sin *= x;
  switch (int64_t(turns) & 3) {
    case 0: return {cos, sin};
    case 1: return {-sin, cos};
    case 2: return {-cos, -sin};
    default: return {sin, -cos};
  }
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

  Pass(const Model &m, const Cache &kv, Threads &t, Workspace &w, const Segment *s, int64_t count, const int64_t *want,
       int64_t want_count)
      : model(m), c(m.config), cache(kv), threads(t), space(w), segments(s), wanted(want), wanted_count(want_count) {
    space.segment_of.clear(), space.row_in.clear(), space.going.clear();
    for (int64_t i = 0; i < count; i++)
      for (int64_t row = 0; row < s[i].nodes; row++)
        space.segment_of.push_back(int32_t(i)), space.row_in.push_back(int32_t(row)), space.going.push_back(nodes++);
    if (model.encoder) find_sources(count);
    divide();
  }

  // A node sees its whole source: a prefix, which ends where the node stands.
  void find_sources(int64_t count) {
    space.sources.clear(), space.last_positions.clear(), space.last_positions.reserve(nodes);
    for (const Segment *s = segments; s < segments + count; s++) {
      const int64_t *positions = space.last_positions.data() + space.last_positions.size();
      space.last_positions.insert(space.last_positions.end(), s->nodes, s->source_length - 1);
      space.sources.push_back(
          {s->nodes, s->source_length, 0, 0, nullptr, positions, nullptr, s->source, nullptr, nullptr});
    }
  }

  // Divides the nodes that go on into tiles.
  void divide() {
    divide(space.nodes, segments, [](int64_t, int64_t node) { return node; });
    if (model.encoder) divide(space.cross, space.sources.data(), [](int64_t row, int64_t) { return row; });
  }

  // row_of: a node's row of queries, by its index among the nodes that go on, and by its number
  template <class RowOf> void divide(Tiling &to, const Segment *seen, const RowOf &row_of) {
    const int64_t most = std::max<int64_t>(1, ROWS_PER_TILE / (c.num_heads / c.num_kv_heads));  // nodes of a tile
    to.tiles.clear(), to.tile_of.resize(nodes);
    for (size_t i = 0; i < space.going.size(); i++) {
      const int64_t n = space.going[i], row = row_of(int64_t(i), n);
      const Segment *own = seen + space.segment_of[n];
      const Tile *last = to.tiles.empty() ? nullptr : &to.tiles.back();
      if (!last || last->segment != own || last->node + last->count != row || last->count == most)
        to.tiles.push_back({own, row, space.row_in[n], 0, 0, 0, -1});
      to.tiles.back().count++;
      to.tile_of[row] = int32_t(to.tiles.size() - 1);
    }
  }

  const Segment &segment(int64_t node) const { return segments[space.segment_of[node]]; }
  int64_t position(int64_t node) const { return segment(node).positions[space.row_in[node]]; }

  // Shares the attention of a layer out among threads: a tile and a key head make an item. Of few items, each is
  // several, with some of the splits each.
  Attention plan(Tiling &rows, int64_t layer, int64_t window, const float *queries, int64_t stride, float *out) {
    Attention a{c,      cache, layer, window, queries, stride, out, rows.tiles, space.attention_items, rows.tile_of,
                nullptr};
    int64_t splits = 0, parts = 0;
    for (Tile &tile : rows.tiles) {
      const int64_t *first = tile.segment->positions + tile.first;
      const auto [least, most] = std::minmax_element(first, first + tile.count);
      tile.split = a.first_seen(*least) / SPLIT, tile.end = *most / SPLIT + 1;
      splits += (tile.end - tile.split) * c.num_kv_heads;
    }
    const int64_t run = std::max<int64_t>(1, splits / (threads.count() * ITEMS_PER_THREAD));
    space.attention_items.clear();
    for (Tile &tile : rows.tiles) {
      const bool whole = threads.count() == 1 || tile.end - tile.split <= run;
      tile.parts = whole ? -1 : parts;
      if (!whole) parts += c.num_heads * (tile.end - tile.split) * tile.count * sums_size(cache.width);
      for (int64_t h = 0; h < c.num_kv_heads; h++)
        for (int64_t split = tile.split; split < tile.end; split += whole ? tile.end : run)
          space.attention_items.push_back(
              {&tile - rows.tiles.data(), h, split, whole ? tile.end : std::min(split + run, tile.end)});
    }
    a.parts = room(space.attention_parts, parts);
    return a;
  }

  void norm_row(const Norm &norm, const float *x, float *out, int64_t size) const {
    float mean = 0;
    if (c.norm == LAYER && norm.bias) {
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

  F32 activate(F32 x) const {
    if (c.activation == SILU) return x / (1.0f + exp(-x));
    if (c.activation == GELU_TANH) return 0.5f * x * (1.0f + tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    return x * normal_share(x);
  }

  void activate_row(const float *in, float *out) const {
    for (int64_t i = 0; i < c.intermediate_size; i += LANES) {
      prefetch(in + i + ACTIVATIONS_AHEAD);
      const int64_t here = c.intermediate_size - i;
      const F32 y = activate(load_some(in + i, here));
      store_some(out + i, c.gated_mlp ? y * load_some(in + c.intermediate_size + i, here) : y, here);
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
          const Rotation turn = rotation(angle);
          cos[at] = float(turn.cos) * rope.scale;
          sin[at++] = float(turn.sin) * rope.scale;
        }
    });
  }

  void block(int64_t l, float *x) {
    const Layer &layer = model.layers[l];
    const int64_t heads = c.num_heads + c.num_kv_heads, qkv_rows = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim;
    const int64_t inner_rows = c.intermediate_size * (c.gated_mlp ? 2 : 1);
    const int64_t kept = std::min(l, cache.layers - 1);  // where the cache has the layer
    const int64_t qkv_stride = stride_of(qkv_rows), inner_stride = stride_of(inner_rows),
                  out_stride = stride_of(c.hidden_size);
    Activations &a = space.activations;
    float *normed = room(space.normed, nodes * c.hidden_size);
    float *wide = room(space.wide, nodes * std::max(qkv_stride, inner_stride));
    float *attended = room(space.attended, nodes * c.num_heads * c.head_dim);
    float *out = room(space.out, nodes * out_stride);

    a.resize(nodes, layer.qkv.parts);
    threads.each(nodes, 4, [&](int64_t n) {
      norm_row(layer.attention_norm, x + n * c.hidden_size, normed + n * c.hidden_size, c.hidden_size);
      a.set(n, normed + n * c.hidden_size);
    });
    multiply(layer.qkv, threads, a, wide, qkv_stride);

    int64_t rope_start = 0, rope_total = 0;
    for (size_t r = 0; r < model.ropes.size(); r++) {
      if (int64_t(r) < layer.rope) rope_start += int64_t(model.ropes[r].frequencies.size());
      rope_total += int64_t(model.ropes[r].frequencies.size());
    }
    threads.each(nodes, 4, [&](int64_t n) {
      float *row = wide + n * qkv_stride;
      // The next node's keys and values come from far away.
      for (int64_t i = c.num_heads * c.head_dim; i < qkv_rows; i += LANES) prefetch(row + qkv_stride + i);
      for (int64_t h = 0; h < heads; h++) {
        float *head = row + h * c.head_dim;
        const Norm &norm = h < c.num_heads ? layer.q_norm : layer.k_norm;
        if (norm) norm_row(norm, head, head, c.head_dim);
        if (layer.rope >= 0) {
          const int64_t at = n * rope_total + rope_start;
          rotate(head, model.ropes[layer.rope], &space.cos[at], &space.sin[at]);
        }
      }
      put(c, cache, kept, segment(n).slots[space.row_in[n]], row + c.num_heads * c.head_dim, row + heads * c.head_dim);
    });

    std::vector<int64_t> &going = space.going;
    if (l == c.num_layers - 1) {  // of other nodes, only keys and values are needed
      going.assign(wanted, wanted + wanted_count);
      std::sort(going.begin(), going.end());
      going.erase(std::unique(going.begin(), going.end()), going.end());
      if (going.empty()) return;
      divide();
    }
    const int64_t rows = int64_t(going.size());
    const Attention attention = plan(space.nodes, kept, layer.window, wide, qkv_stride, attended);
    threads.each(attention.items.size(), 1, [&](int64_t i) { attend(attention, i); });
    a.resize(rows, layer.output.parts);
    threads.each(rows, 4, [&](int64_t i) {
      join(attention, going[i]);
      a.set(i, attended + going[i] * c.num_heads * c.head_dim);
    });
    multiply(layer.output, threads, a, out, out_stride);
    if (layer.cross_query) {
      const int64_t width = c.num_heads * c.head_dim, query_stride = stride_of(width);
      a.resize(rows, layer.cross_query.parts);
      threads.each(rows, 4, [&](int64_t r) {
        float *row = x + going[r] * c.hidden_size, *o = out + r * out_stride, *from = normed + going[r] * c.hidden_size;
        for (int64_t i = 0; i < c.hidden_size; i++) row[i] += o[i];
        norm_row(layer.cross_norm, row, from, c.hidden_size);
        a.set(r, from);
      });
      multiply(layer.cross_query, threads, a, wide, query_stride);
      show(l, wide, query_stride);
      const Attention cross = plan(space.cross, kept, 0, wide, query_stride, attended);
      threads.each(cross.items.size(), 1, [&](int64_t i) { attend(cross, i); });
      a.resize(rows, layer.cross_output.parts);
      threads.each(rows, 4, [&](int64_t r) {
        join(cross, r);
        a.set(r, attended + r * width);
      });
      multiply(layer.cross_output, threads, a, out, out_stride);
    }

    a.resize(rows, layer.up.parts);
    threads.each(rows, 4, [&](int64_t r) {
      const int64_t n = going[r];
      float *row = x + n * c.hidden_size, *o = out + r * out_stride, *from = normed + n * c.hidden_size;
      if (layer.post_attention_norm) norm_row(layer.post_attention_norm, o, o, c.hidden_size);
      if (c.parallel && layer.mlp_norm) norm_row(layer.mlp_norm, row, from, c.hidden_size);
      for (int64_t i = 0; i < c.hidden_size; i++) row[i] += o[i];
      if (!c.parallel) norm_row(layer.mlp_norm, row, from, c.hidden_size);
      a.set(r, from);
    });
    multiply(layer.up, threads, a, wide, inner_stride);
    a.resize(rows, layer.down.parts);
    threads.each(rows, 1, [&](int64_t r) {
      static thread_local Buffer<float> activated;
      float *row = room(activated, c.intermediate_size);
      activate_row(wide + r * inner_stride, row);
      a.set(r, row);
    });
    multiply(layer.down, threads, a, out, out_stride);
    threads.each(rows, 4, [&](int64_t r) {
      float *row = x + going[r] * c.hidden_size, *o = out + r * out_stride;
      if (layer.post_mlp_norm) norm_row(layer.post_mlp_norm, o, o, c.hidden_size);
      for (int64_t i = 0; i < c.hidden_size; i++) row[i] += o[i];
    });
  }

  // Writes the scores of the layer's probed heads. queries: [rows, stride], of the nodes that go on
  void show(int64_t l, const float *queries, int64_t stride) {
    const std::vector<int64_t> &going = space.going;
    const int64_t rows = int64_t(going.size());
    for (int64_t first = 0, end = 0; first < rows; first = end) {  // the rows of a segment
      while (end < rows && space.segment_of[going[end]] == space.segment_of[going[first]]) end++;
      const Segment &s = segment(going[first]);
      for (int64_t i = 0; i < s.watched; i++) {
        if (s.heads[2 * i] != l) continue;
        const int64_t head = s.heads[2 * i + 1];
        threads.each(s.shown, 64, [&](int64_t t) {
          static thread_local Buffer<float> numbers;
          float *key = room(numbers, cache.width);
          get_key(cache, l, head * c.num_kv_heads / c.num_heads, s.source[t], key);
          for (int64_t r = first; r < end; r++) {
            const float *query = queries + r * stride + head * c.head_dim;
            F32 products{};
            for (int64_t f = 0; f < c.head_dim; f += LANES)
              products = multiply_add(load_some(query + f, c.head_dim - f), load<F32>(key + f), products);
            s.scores[(i * s.rows + position(going[r])) * s.shown + t] = sum(products) * float(c.attention_scale);
          }
        });
      }
    }
  }

  // logits: [wanted_count, vocab], for the first `vocab` tokens of the vocabulary.
  void run(int64_t vocab, float *logits) {
    float *x = room(space.x, nodes * c.hidden_size);
    rotations();
    const Matrix &embedding = model.embedding.parts[0];
    threads.each(nodes, 1, [&](int64_t n) {
      const int64_t token = segment(n).tokens[space.row_in[n]];
      for (int64_t i = 0; i < c.hidden_size; i++) {
        float value = weight_at(embedding, token, i);
        if (model.positions) value += weight_at(model.positions.parts[0], position(n), i);
        x[n * c.hidden_size + i] = value * float(c.embedding_scale);
      }
    });
    for (int64_t l = 0; l < c.num_layers; l++) block(l, x);
    if (!wanted_count) return;
    Activations &a = space.activations;
    const Product head = model.head.first(vocab);
    float *normed = room(space.normed, wanted_count * c.hidden_size);
    a.resize(wanted_count, head.parts);
    threads.each(wanted_count, 1, [&](int64_t i) {
      norm_row(model.norm, x + wanted[i] * c.hidden_size, normed + i * c.hidden_size, c.hidden_size);
      a.set(i, normed + i * c.hidden_size);
    });
    multiply(head, threads, a, logits, vocab);
    if (c.logits_softcap > 0) {
      const float softcap = float(c.logits_softcap);
      threads.each(wanted_count, 1, [&](int64_t i) {
        for (int64_t t = i * vocab, end = t + vocab; t < end; t += LANES)
          store_some(logits + t, softcap * tanh(load_some(logits + t, end - t) / softcap), end - t);
      });
    }
  }

  // A convolution over three frames is a product whose rows overlap. x: [frames + 2, ...], `step` numbers from row to
  // row; out: [rows, hidden], after the activation
  void convolve(const Product &weights, const float *x, int64_t rows, int64_t step, float *out) {
    const int64_t stride = stride_of(c.hidden_size);
    Activations &a = space.activations;
    float *wide = room(space.wide, rows * stride);
    a.resize(rows, weights.parts);
    threads.each(rows, 16, [&](int64_t r) { a.set(r, x + r * step); });
    multiply(weights, threads, a, wide, stride);
    threads.each(rows, 16, [&](int64_t r) {
      for (int64_t i = 0; i < c.hidden_size; i += LANES)
        store_some(out + r * c.hidden_size + i, activate(load<F32>(wide + r * stride + i)), c.hidden_size - i);
    });
  }

  // features: [mel bins, 2 * nodes]; states: [nodes, hidden], between layers what the next one reads
  void encode(const float *features, int64_t first, int64_t end, float *states) {
    float *x = room(space.x, nodes * c.hidden_size);
    if (first == 0) begin(features, x);
    else std::copy_n(states, nodes * c.hidden_size, x);
    for (int64_t l = first; l < end; l++) block(l, x);
    if (end < c.num_layers) std::copy_n(x, nodes * c.hidden_size, states);
    else
      threads.each(nodes, 16, [&](int64_t n) {
        norm_row(model.norm, x + n * c.hidden_size, states + n * c.hidden_size, c.hidden_size);
      });
  }

  // Two convolutions, and the embeddings of positions.
  void begin(const float *features, float *x) {
    const int64_t frames = 2 * nodes;
    // Frame by frame, with zeros before the first one and after the last one.
    float *padded = room(space.normed, (frames + 2) * c.bands);
    float *between = room(space.attended, (frames + 2) * c.hidden_size);
    const auto pad = [frames](float *frame, int64_t size) {
      std::fill_n(frame, size, 0.0f), std::fill_n(frame + (frames + 1) * size, size, 0.0f);
    };
    pad(padded, c.bands), pad(between, c.hidden_size);
    for (int64_t band = 0; band < c.bands; band++)
      for (int64_t t = 0; t < frames; t++) padded[(t + 1) * c.bands + band] = features[band * frames + t];
    convolve(model.conv1, padded, frames, c.bands, between + c.hidden_size);
    convolve(model.conv2, between, nodes, 2 * c.hidden_size, x);
    threads.each(nodes, 16, [&](int64_t n) {
      for (int64_t i = 0; i < c.hidden_size; i++) x[n * c.hidden_size + i] += weight_at(model.positions.parts[0], n, i);
    });
  }
};

}  // namespace

Workspace *new_workspace() { return new Workspace; }
void delete_workspace(Workspace *workspace) { delete workspace; }

void forward(const Model &model, const Cache &cache, Threads &threads, Workspace &workspace, const Segment *segments,
             int64_t count, const int64_t *wanted, int64_t wanted_count, int64_t vocab, float *logits) {
  Pass pass(model, cache, threads, workspace, segments, count, wanted, wanted_count);
  const Threads::Awake awake(threads);
  pass.run(vocab, logits);
}

void encode(const Model &encoder, const Cache &one_layer, Threads &threads, Workspace &workspace, const float *features,
            int64_t first, int64_t end, float *states) {
  const int64_t nodes = encoder.config.context_length;
  std::vector<int64_t> numbers(nodes), last(nodes, nodes - 1);  // all nodes see all nodes
  std::iota(numbers.begin(), numbers.end(), 0);
  Segment all;
  all.nodes = all.prefix_length = nodes;
  all.positions = last.data(), all.slots = all.prefix = numbers.data();
  Pass pass(encoder, one_layer, threads, workspace, &all, 1, numbers.data(), nodes);
  const Threads::Awake awake(threads);
  pass.encode(features, first, end, states);
}

void place(const Model &model, const Cache &cache, Threads &threads, Workspace &workspace, const float *states,
           const int64_t *slots, int64_t count) {
  const ModelConfig &c = model.config;
  const int64_t hidden = model.encoder->config.hidden_size, width = c.num_kv_heads * c.head_dim,
                stride = stride_of(2 * width);
  float *both = room(workspace.wide, count * stride);
  const Threads::Awake awake(threads);
  for (int64_t l = 0; l < c.num_layers; l++) {
    const Product &product = model.layers[l].cross_key_value;
    workspace.activations.resize(count, product.parts);
    threads.each(count, 16, [&](int64_t n) { workspace.activations.set(n, states + n * hidden); });
    multiply(product, threads, workspace.activations, both, stride);
    threads.each(count, 16,
                 [&](int64_t n) { put(c, cache, l, slots[n], both + n * stride, both + n * stride + width); });
  }
}

void multiply(const Matrix &w, Threads &threads, const float *values, int64_t rows, float *out) {
  const Product p{{w}};
  Activations x;
  x.resize(rows, p.parts);
  const Threads::Awake awake(threads);
  threads.each(rows, 8, [&](int64_t row) { x.set(row, values + row * w.columns); });
  multiply(p, threads, x, out, w.rows);
}

}  // namespace specbeam
