// One forward pass: the stem, the parts of the layers with their norms and residuals, and the logits of wanted nodes.

#include "pass.h"

#include <algorithm>
#include <numeric>

namespace specbeam {

namespace {

constexpr int64_t SWEEP_BYTES = 256 * 1024;  // of int8 activations, per sweep over the weights
constexpr int64_t ROWS_PER_TILE = 96;        // at most, of queries that read keys and values together
constexpr int64_t BLOCKS_PER_THREAD = 16;    // at least, of a product whose items are several blocks
constexpr int64_t ITEMS_PER_THREAD = 8;      // at least, of attention, where a sequence is long enough

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

}  // namespace

void multiply(const Product &p, Threads &threads, const ActivationRows &x, float *out, int64_t stride) {
  Job job{x, out, int64_t(p.parts.size()), {}, {}};
  const float *bias = p.bias;
  for (size_t i = 0; i < p.parts.size(); i++) {
    job.parts[i] = &p.parts[i], job.bias[i] = bias;
    if (bias) bias += p.parts[i].rows;
  }
  multiply(&job, 1, threads, stride);
}

void multiply(Job *jobs, int64_t count, Threads &threads, int64_t stride) {
  int64_t blocks = 0, all = 0;
  for (const Job *job = jobs; job < jobs + count; job++)
    for (int64_t i = 0; i < job->count; i++) blocks += blocks_of(job->parts[i]->rows);
  // An item is some neighbouring blocks, where there are enough items for all threads.
  const bool enough = blocks >= threads.count() * BLOCKS_PER_THREAD;
  const auto together = [enough](const Job &job) -> int64_t {
    return job.x.rows >= TILE_ROWS && enough ? TILE_BLOCKS : 1;
  };
  for (Job *job = jobs; job < jobs + count; job++) {
    job->items = 0;
    for (int64_t i = 0; i < job->count; i++)
      job->starts[i] = job->items, job->items += (blocks_of(job->parts[i]->rows) + together(*job) - 1) / together(*job);
    // Rows go in sweeps. A sweep's activations stay in the second-level cache while all weights go by.
    const int64_t rows = job->x.rows, most = std::max<int64_t>(MIN_SWEEP_ROWS, SWEEP_BYTES / job->x.columns),
                  least = (rows + most - 1) / most;
    job->sweep = (rows + least * TILE_ROWS - 1) / (least * TILE_ROWS) * TILE_ROWS;
    job->start = all, all += (rows + job->sweep - 1) / job->sweep * job->items;
  }
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(16, all / (threads.count() * 8)));
  threads.each(all, chunk, [&](int64_t number) {
    const Job &job =
        *(std::upper_bound(jobs, jobs + count, number, [](int64_t n, const Job &one) { return n < one.start; }) - 1);
    const int64_t item = (number - job.start) % job.items, first = (number - job.start) / job.items * job.sweep,
                  end = std::min(first + job.sweep, job.x.rows);
    int64_t i = 0, row = 0;
    while (i + 1 < job.count && item >= job.starts[i + 1]) row += job.parts[i++]->rows;
    const Matrix &part = *job.parts[i];
    const int64_t step = together(job), block = (item - job.starts[i]) * step;
    product_blocks(part, block, std::min(step, blocks_of(part.rows) - block), job.x, first, end, job.out + row, stride,
                   job.bias[i]);
  });
}

Pass::Pass(const Model &m, const Cache &kv, Threads &t, Workspace &w, const Segment *s, int64_t count,
           const int64_t *want, int64_t want_count)
    : model(m),
      c(m.config),
      cache(kv),
      threads(t),
      space(w),
      segments(s),
      wanted(want),
      wanted_count(want_count),
      activations(w.activations),
      out_stride(stride_of(m.config.hidden_size)) {
  space.segment_of.clear(), space.row_in.clear(), space.going.clear();
  for (int64_t i = 0; i < count; i++)
    for (int64_t row = 0; row < s[i].nodes; row++)
      space.segment_of.push_back(int32_t(i)), space.row_in.push_back(int32_t(row)), space.going.push_back(nodes++);
  space.nodes.group = space.cross.group = 0;
  for (const Layer &layer : model.layers)
    for (const auto &part : layer)
      if (part->has_memory()) last_with_memory = part.get();
  for (const auto &one : model.features)
    if (one->of_all) last_read = std::max(last_read, *std::max_element(one->layers.begin(), one->layers.end()));
  if (model.encoder) find_sources(count);
  if (cache.states) find_borders(*this, space.borders);
}

// A node sees its whole source: a prefix, which ends where the node stands.
void Pass::find_sources(int64_t count) {
  space.sources.clear(), space.last_positions.clear(), space.last_positions.reserve(nodes);
  for (const Segment *s = segments; s < segments + count; s++) {
    const int64_t *positions = space.last_positions.data() + space.last_positions.size();
    space.last_positions.insert(space.last_positions.end(), s->nodes, s->source_length - 1);
    Segment source;
    source.nodes = s->nodes, source.prefix_length = s->source_length;
    source.positions = positions, source.prefix = s->source;
    space.sources.push_back(source);
  }
}

bool Pass::any_goes_on_after(const Part &part) {
  std::vector<int64_t> &going = space.going;
  if (&part == last_with_memory && part.layer >= last_read) {
    going.assign(wanted, wanted + wanted_count);
    std::sort(going.begin(), going.end());
    going.erase(std::unique(going.begin(), going.end()), going.end());
    space.nodes.group = space.cross.group = 0;
  }
  return !going.empty();
}

// Divides the nodes that go on into tiles. Nodes of a tile are neighbours in their segment, unless all see the same.
void Pass::divide(Tiling &to, int64_t group, const Segment *seen, bool by_node) {
  const int64_t most = std::max<int64_t>(1, ROWS_PER_TILE / group);  // nodes of a tile
  to.group = group, to.by_node = by_node, to.tiles.clear(), to.tile_of.resize(nodes);
  for (size_t i = 0; i < space.going.size(); i++) {
    const int64_t n = space.going[i], row = by_node ? n : int64_t(i);
    const Segment *own = seen + space.segment_of[n];
    const Tile *last = to.tiles.empty() ? nullptr : &to.tiles.back();
    const bool is_apart = seen == segments && last && last->first + last->count != space.row_in[n];
    if (!last || last->segment != own || is_apart || last->count == most)
      to.tiles.push_back({own, row, space.row_in[n], 0, 0, 0, -1});
    to.tiles.back().count++;
    to.tile_of[row] = int32_t(to.tiles.size() - 1);
  }
}

AttentionJob Pass::plan(bool of_source, bool by_node, const Heads &heads, const KeyValues &keys, int64_t window,
                        const float *queries, int64_t stride, float *result) {
  Tiling &rows = of_source ? space.cross : space.nodes;
  if (rows.group != heads.group() || rows.by_node != by_node)
    divide(rows, heads.group(), of_source ? space.sources.data() : segments, by_node);
  AttentionJob job{heads,        keys,   window, queries, stride, result, rows.tiles, space.attention_items,
                   rows.tile_of, nullptr};
  int64_t splits = 0, parts = 0;
  for (Tile &tile : rows.tiles) {
    const int64_t *first = tile.segment->positions + tile.first;
    const auto [least, most] = std::minmax_element(first, first + tile.count);
    tile.split = job.first_seen(*least) / SPLIT, tile.end = *most / SPLIT + 1;
    splits += (tile.end - tile.split) * heads.num_kv_heads;
  }
  const int64_t run = std::max<int64_t>(1, splits / (threads.count() * ITEMS_PER_THREAD));
  space.attention_items.clear();
  for (Tile &tile : rows.tiles) {
    const bool whole = threads.count() == 1 || tile.end - tile.split <= run;
    tile.parts = whole ? -1 : parts;
    if (!whole) parts += heads.num_heads * (tile.end - tile.split) * tile.count * sums_size(keys.width);
    for (int64_t h = 0; h < heads.num_kv_heads; h++)
      for (int64_t split = tile.split; split < tile.end; split += whole ? tile.end : run)
        space.attention_items.push_back(
            {&tile - rows.tiles.data(), h, split, whole ? tile.end : std::min(split + run, tile.end)});
  }
  job.parts = room(space.attention_parts, parts);
  return job;
}

void Pass::rotations() {
  if (model.ropes.empty()) return;
  const int64_t total = model.ropes.back().start + int64_t(model.ropes.back().frequencies.size());
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

// For each layer the normed projection of a node's embedding, and the token's embedding for that layer (Gemma 3n).
void Pass::per_layer_inputs() {
  const int64_t size = c.per_layer_size, total = c.num_layers * size;
  const float of_projection = float(1 / std::sqrt(double(c.hidden_size))), of_table = float(std::sqrt(double(size)));
  float *to = room(space.per_layer, nodes * total);
  activations.resize(nodes, model.per_layer_projection.parts);
  threads.each(nodes, 4, [&](int64_t n) { activations.set(n, x + n * c.hidden_size); });
  multiply(model.per_layer_projection, threads, activations, to, total);
  threads.each(nodes, 1, [&](int64_t n) {
    static thread_local Buffer<float> looked_up;
    float *row = room(looked_up, total), *own = to + n * total;
    const int64_t token = segment(n).tokens[space.row_in[n]];
    if (model.per_layer_table) read_row(model.per_layer_table, token, row);
    else
      for (int64_t i = 0; i < total; i++) row[i] = weight_at(model.per_layer_embedding.parts[0], token, i);
    for (int64_t i = 0; i < total; i++) own[i] *= of_projection;
    for (int64_t l = 0; l < total; l += size) norm_row(model.per_layer_norm, own + l, own + l, size);
    for (int64_t i = 0; i < total; i++) own[i] = (own[i] + row[i] * of_table) * float(M_SQRT1_2);
  });
}

// Each part adds to the hidden states what it makes of them: x = sum_norm(x + scale * output_norm(part(norm(x)))),
// times the number of sum_scale. A norm or a scale that it lacks changes nothing. What one part makes is added as the
// next one reads its input. It is held instead if the next part has a joint norm, which norms the sum of both.
void Pass::layers(int64_t first, int64_t end) {
  normed = room(space.normed, nodes * c.hidden_size), out = room(space.out, nodes * out_stride);
  held = room(space.held, nodes * out_stride);
  const Part *before = nullptr;
  for (int64_t l = first; l < end; l++)
    for (const auto &part : model.layers[l]) {
      begin_part(*part, before);
      part->run(*this);
      if (space.going.empty()) return;
      before = part.get();
    }
  if (before) threads.each(rows(), 4, [&](int64_t r) { add(*before, r); });
}

// Adds what the part before has made, and norms the input of the next part. A parallel part without a norm reads what
// the part before it has read.
void Pass::begin_part(const Part &part, const Part *before) {
  const int64_t hidden = c.hidden_size, beside = part.reads_embedding() ? hidden : 0;
  const bool begins_layer = !before || before->layer != part.layer;
  if (beside) normed = room(space.normed, nodes * 2 * hidden);
  activations.resize(rows(), part.first().parts);
  threads.each(rows(), 4, [&](int64_t r) {
    const int64_t n = space.going[r];
    float *row = x + n * hidden, *from = normed + n * (beside + hidden);
    if (beside) std::copy_n(&space.embedded[n * hidden], hidden, from);
    if (part.parallel && part.norm) norm_row(part.norm, row, from + beside, hidden);
    if (before && part.has_joint_norm) std::copy_n(finished(*before, r), hidden, held + n * out_stride);
    else if (before) add(*before, r);
    if (begins_layer) keep_features(part.layer, n);
    if (!part.parallel) norm_or_copy(part.norm, row, from + beside, hidden);
    activations.set(r, from);
  });
}

// What a part has made of one of the nodes that go on, as it is added to the hidden states.
float *Pass::finished(const Part &part, int64_t r) {
  const int64_t hidden = c.hidden_size;
  const float scale = float(part.output_scale), *before = held + space.going[r] * out_stride;
  float *made = out + r * out_stride;
  if (part.output_norm) norm_row(part.output_norm, made, made, hidden);
  if (scale != 1)
    for (int64_t i = 0; i < hidden; i++) made[i] *= scale;
  if (part.has_joint_norm) {
    for (int64_t i = 0; i < hidden; i++) made[i] += before[i];
    norm_row(part.joint_norm, made, made, hidden);
  }
  return made;
}

void Pass::add(const Part &part, int64_t r) {
  const int64_t hidden = c.hidden_size;
  float *row = x + space.going[r] * hidden;
  const float *made = finished(part, r);
  for (int64_t i = 0; i < hidden; i++) row[i] += made[i];
  if (part.sum_norm) norm_row(part.sum_norm, row, row, hidden);
  if (part.sum_scale)
    for (int64_t i = 0; i < hidden; i++) row[i] *= part.sum_scale.weight[0];
}

// Writes the hidden states before a layer where draft heads read them, if any head does.
void Pass::keep_features(int64_t layer, int64_t n) {
  for (const auto &one : model.features)
    for (size_t i = 0; i < one->layers.size(); i++)
      if (one->layers[i] == layer) {
        float *to = one->rows().at(slot(n)) + int64_t(i) * c.hidden_size;
        if (layer > c.num_layers) norm_or_copy(model.norm, x + n * c.hidden_size, to, c.hidden_size);
        else std::copy_n(x + n * c.hidden_size, c.hidden_size, to);
      }
}

void Pass::embeddings() {
  const Matrix &embedding = model.embedding.parts[0];
  threads.each(nodes, 1, [&](int64_t n) {
    const int64_t token = segment(n).tokens[space.row_in[n]];
    for (int64_t i = 0; i < c.hidden_size; i++) {
      float value = weight_at(embedding, token, i);
      if (model.positions) value += weight_at(model.positions.parts[0], position(n), i);
      x[n * c.hidden_size + i] = value * float(c.embedding_scale);
    }
  });
}

// What a draft head begins with: of the normed embedding e of a node's token and the feature f of its parent
// fc([e, norm(f)]), as in multi-token prediction (DeepSeek-AI 2024, section 2.2), where f may be the head's own. In
// EAGLE-3 (Li et al. 2025) it is fc(f) for a feature of the target, and f for one of the head.
void Pass::head_inputs() {
  const int64_t hidden = c.hidden_size, size = c.feature_size;
  const Rows theirs = model.read->rows(), own = model.features[0]->rows();
  const auto feature = [&](int64_t n) -> const float * {
    const int64_t at = segment(n).features[space.row_in[n]];
    return at == NO_FEATURE ? nullptr : at < 0 ? own.at(-2 - at) : theirs.at(at);
  };
  const Matrix &embedding = model.embedding.parts[0];
  float *embedded = room(space.embedded, nodes * hidden);
  threads.each(nodes, 1, [&](int64_t n) {
    const int64_t token = segment(n).tokens[space.row_in[n]];
    float *row = embedded + n * hidden;
    for (int64_t i = 0; i < hidden; i++) row[i] = weight_at(embedding, token, i) * float(c.embedding_scale);
    norm_row(model.embedding_norm, row, row, hidden);
  });
  if (c.joins_embedding) {
    activations.resize(nodes, model.fc.parts);
    threads.each(nodes, 1, [&](int64_t n) {
      static thread_local Buffer<float> joined;
      float *both = room(joined, hidden + size);
      std::copy_n(embedded + n * hidden, hidden, both);
      if (const float *f = feature(n)) norm_row(model.feature_norm, f, both + hidden, size);
      else std::fill_n(both + hidden, size, 0.0f);
      activations.set(n, both);
    });
    multiply(model.fc, threads, activations, x, hidden);
    return;
  }
  std::vector<int64_t> &of_target = space.of_target;
  of_target.clear();
  for (int64_t n = 0; n < nodes; n++) {
    const float *f = feature(n);
    if (!f) std::fill_n(x + n * hidden, hidden, 0.0f);
    else if (segment(n).features[space.row_in[n]] < 0) std::copy_n(f, hidden, x + n * hidden);
    else of_target.push_back(n);
  }
  if (of_target.empty()) return;
  float *made = room(space.out, int64_t(of_target.size()) * out_stride);
  activations.resize(int64_t(of_target.size()), model.fc.parts);
  threads.each(int64_t(of_target.size()), 1, [&](int64_t r) { activations.set(r, feature(of_target[r])); });
  multiply(model.fc, threads, activations, made, out_stride);
  for (size_t r = 0; r < of_target.size(); r++)
    std::copy_n(made + int64_t(r) * out_stride, hidden, x + of_target[r] * hidden);
}

// The logits of the wanted nodes, whose states are in the activations. Tokens that a draft head lacks have none.
void Pass::head_logits(int64_t vocab, float *logits) {
  const std::vector<int64_t> &tokens = model.head_tokens;
  if (tokens.empty()) return multiply(model.head.first(vocab), threads, activations, logits, vocab);
  const int64_t count = std::lower_bound(tokens.begin(), tokens.end(), vocab) - tokens.begin();
  std::fill_n(logits, wanted_count * vocab, -INFINITY);
  if (!count) return;
  float *own = room(space.own_logits, wanted_count * count);
  multiply(model.head.first(count), threads, activations, own, count);
  threads.each(wanted_count, 1, [&](int64_t i) {
    for (int64_t t = 0; t < count; t++) logits[i * vocab + tokens[t]] = own[i * count + t];
  });
}

void Pass::run(int64_t vocab, float *logits) {
  x = room(space.x, nodes * c.hidden_size);
  rotations();
  if (c.feature_size) head_inputs();
  else embeddings();
  if (c.per_layer_size) per_layer_inputs();
  layers(0, c.num_layers);
  if (!model.features.empty())
    threads.each(rows(), 4, [&](int64_t r) {
      for (int64_t layer : {c.num_layers, c.num_layers + 1}) keep_features(layer, space.going[r]);
    });
  if (!wanted_count) return;
  normed = room(space.normed, wanted_count * c.hidden_size);
  activations.resize(wanted_count, model.head.parts);
  threads.each(wanted_count, 1, [&](int64_t i) {
    norm_or_copy(model.norm, x + wanted[i] * c.hidden_size, normed + i * c.hidden_size, c.hidden_size);
    activations.set(i, normed + i * c.hidden_size);
  });
  head_logits(vocab, logits);
  if (c.logits_scale != 1) {
    const float scale = float(c.logits_scale);
    threads.each(wanted_count, 1, [&](int64_t i) {
      for (int64_t t = i * vocab, end = t + vocab; t < end; t++) logits[t] *= scale;
    });
  }
  if (c.logits_softcap > 0) {
    const float softcap = float(c.logits_softcap);
    threads.each(wanted_count, 1, [&](int64_t i) {
      for (int64_t t = i * vocab, end = t + vocab; t < end; t += LANES)
        store_some(logits + t, softcap * tanh(load_some(logits + t, end - t) / softcap), end - t);
    });
  }
}

// A convolution over three frames is a product whose rows overlap. from: [frames + 2, ...], `step` numbers from row to
// row; to: [rows, hidden], after the activation
void Pass::convolve(const Product &weights, const float *from, int64_t count, int64_t step, float *to) {
  float *wide = room(space.wide, count * out_stride);
  activations.resize(count, weights.parts);
  threads.each(count, 16, [&](int64_t r) { activations.set(r, from + r * step); });
  multiply(weights, threads, activations, wide, out_stride);
  threads.each(count, 16, [&](int64_t r) {
    for (int64_t i = 0; i < c.hidden_size; i += LANES)
      store_some(to + r * c.hidden_size + i, activate(GELU, load<F32>(wide + r * out_stride + i)), c.hidden_size - i);
  });
}

void Pass::encode(const float *features, int64_t first, int64_t end, float *states) {
  x = room(space.x, nodes * c.hidden_size);
  if (first == 0) begin(features);
  else std::copy_n(states, nodes * c.hidden_size, x);
  layers(first, end);
  if (end < c.num_layers) std::copy_n(x, nodes * c.hidden_size, states);
  else
    threads.each(nodes, 16, [&](int64_t n) {
      norm_or_copy(model.norm, x + n * c.hidden_size, states + n * c.hidden_size, c.hidden_size);
    });
}

// Two convolutions, and the embeddings of positions.
void Pass::begin(const float *features) {
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

Workspace *new_workspace() { return new Workspace; }
void delete_workspace(Workspace *workspace) { delete workspace; }

void forward(const Model &model, const Cache &cache, Threads &threads, Workspace &workspace, const Segment *segments,
             int64_t count, const int64_t *wanted, int64_t wanted_count, int64_t vocab, float *logits) {
  Pass pass(model, cache, threads, workspace, segments, count, wanted, wanted_count);
  const Threads::Awake awake(threads);
  pass.run(vocab, logits);
  cache.states.finish_pass();
}

void encode(const Model &encoder, const Cache &one_part, Threads &threads, Workspace &workspace, const float *features,
            int64_t first, int64_t end, float *states) {
  const int64_t nodes = encoder.config.context_length;
  std::vector<int64_t> numbers(nodes), last(nodes, nodes - 1);  // all nodes see all nodes
  std::iota(numbers.begin(), numbers.end(), 0);
  Segment all;
  all.nodes = all.prefix_length = nodes;
  all.positions = last.data(), all.slots = all.prefix = numbers.data();
  Pass pass(encoder, one_part, threads, workspace, &all, 1, numbers.data(), nodes);
  const Threads::Awake awake(threads);
  pass.encode(features, first, end, states);
}

void place(const Model &model, const Cache &cache, Threads &threads, Workspace &workspace, const float *states,
           const int64_t *slots, int64_t count) {
  const Threads::Awake awake(threads);
  for (const Layer &layer : model.layers)
    for (const auto &part : layer) part->place(model, cache, threads, workspace, states, slots, count);
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
