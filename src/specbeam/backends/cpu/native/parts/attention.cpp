// Attention to a node's ancestors, and to an encoder's output. The kernels are in ../attention.cpp.

#include <utility>

#include "../pass.h"

namespace specbeam {

namespace {

// Rotates the first features of a head, halves paired as in GPT-NeoX (Su et al. 2021).
void rotate(float *head, const Pass::Angles &by) {
  for (int64_t i = 0; i < by.count; i++) {
    const float left = head[i], right = head[i + by.count];
    head[i] = left * by.cos[i] - right * by.sin[i];
    head[i + by.count] = right * by.cos[i] + left * by.sin[i];
  }
}

class WithHeads : public Part {
 public:
  Heads heads;
  Product output;

  explicit WithHeads(const char *name) : Part(name) {
    number("num_heads", heads.num_heads), number("num_kv_heads", heads.num_kv_heads);
    number("head_dim", heads.head_dim), number("scale", heads.scale), number("softcap", heads.softcap);
    product("output", output);
  }

  KeyValues keys_in(const Cache &cache) const { return cache.keys({heads.head_dim, whole}, section); }

 protected:
  bool whole = false;   // its keys and values are integers
  int64_t section = 0;  // of the cache

  const char *wrong(const Model &, const Layer &) const override {
    for (int64_t size : {heads.num_heads, heads.num_kv_heads, heads.head_dim})
      if (size < 1) return "a number of heads, or their size, is below 1";
    if (heads.num_heads % heads.num_kv_heads) return "the number of heads is not a multiple of the number of key heads";
    return heads.num_heads > INT32_MAX / 3 / heads.head_dim ? "a layer is too wide" : nullptr;
  }

  // Attends with queries [rows, stride] and multiplies the results. by_node: the rows are all nodes. Without it they
  // are the nodes that go on. gates: [rows, stride], of the results; null for none
  void attend_and_multiply(Pass &p, bool of_source, bool by_node, int64_t window, const float *queries, int64_t stride,
                           const float *gates = nullptr) const {
    const int64_t width = heads.query_size(), rows = p.rows();
    float *attended = room(p.space.attended, p.nodes * width);
    const AttentionJob job = p.plan(of_source, by_node, heads, keys_in(p.cache), window, queries, stride, attended);
    p.threads.each(job.items.size(), 1, [&](int64_t i) { attend(job, i); });
    p.activations.resize(rows, output.parts);
    p.threads.each(rows, 4, [&](int64_t r) {
      const int64_t row = by_node ? p.going()[r] : r;
      join(job, row);
      if (gates) gate(gates + row * stride, attended + row * width);
      p.activations.set(r, attended + row * width);
    });
    multiply(output, p.threads, p.activations, p.out, p.out_stride);
  }

 private:
  void gate(const float *gates, float *result) const {
    for (int64_t i = 0, size = heads.query_size(); i < size; i += LANES) {
      const F32 x = load_some(gates + i, size - i);
      store_some(result + i, load_some(result + i, size - i) / (1.0f + exp(-x)), size - i);
    }
  }
};

class Attention final : public WithHeads {
  int64_t rope = -1, window = 0;  // rope: an index into Model::ropes, or -1; window: 0 for none
  HeadNorm qk_norm = NONE;
  double query_growth = 0;  // the factor of queries is 1 + query_growth * ln(1 + position / query_growth_period)
  int64_t query_growth_period = 0;
  Flag value_norm = NO, keys_are_values = NO;
  int64_t shares_keys_of = -1;  // the layer whose keys and values are read, or -1
  Flag has_sinks = NO, output_gate = NO, beside_embedding = NO;
  Product qkv;  // without the products that it lacks
  Norm q_norm, k_norm;
  std::vector<float> ones;  // the weight of the norm of values

 public:
  Attention() : WithHeads("attention") {
    number("rope", rope), number("window", window), number("qk_norm", qk_norm);
    number("query_growth", query_growth), number("query_growth_period", query_growth_period);
    number("value_norm", value_norm), number("keys_are_values", keys_are_values);
    number("shares_keys_of", shares_keys_of), number("sinks", has_sinks);
    number("output_gate", output_gate), number("beside_embedding", beside_embedding);
    product("qkv", qkv), product("query_key", qkv), product("query", qkv);
    norm_of("q_norm", q_norm), norm_of("k_norm", k_norm), norm_of("sinks", heads.sinks);
  }
  friend class CrossAttention;

  const char *wrong(const Model &m, const Layer &before) const override {
    if (const char *reason = WithHeads::wrong(m, before)) return reason;
    if (window < 0) return "a window is negative";
    if (query_growth && query_growth_period < 1) return "the period in which queries grow is below 1";
    if (query_growth && m.config.bands) return "the queries of an encoder grow";
    if (rope >= int64_t(m.ropes.size())) return "a rotation is missing";
    if (beside_embedding && (!m.config.feature_size || m.config.joins_embedding))
      return "attention reads embeddings that no draft head has beside its features";
    if (output_gate && (shares_keys_of >= 0 || keys_are_values)) return "an attention without values has a gate";
    if (shares_keys_of >= 0) {
      const Attention *source = source_in(m);
      if (m.config.bands || !source || source->shares_keys_of >= 0 || source->window != window ||
          source->heads.num_kv_heads != heads.num_kv_heads || source->heads.head_dim != heads.head_dim)
        return "a layer reads keys of a layer that has none, or has others";
    }
    return rope >= 0 && int64_t(m.ropes[rope].frequencies.size()) * 2 > heads.head_dim ? "a rotation is too large"
                                                                                       : nullptr;
  }

  bool add_memory(const Model &m, Cache &cache, const Layer &) override {
    whole = m.config.integer_cache;
    if (value_norm) ones.assign(heads.head_dim, 1.0f);
    if (shares_keys_of >= 0) return section = source_in(m)->section, true;
    section = cache.add_section(heads.num_kv_heads * KeyLayout(heads.head_dim, whole).head);
    return section >= 0;
  }
  bool has_memory() const override { return shares_keys_of < 0; }
  int64_t reach() const override { return window; }
  bool reads_embedding() const override { return beside_embedding; }

  const char *incomplete(const Model &m) const override {
    if (!is_shaped(qkv, product_rows(), (beside_embedding ? 2 : 1) * m.config.hidden_size))
      return "query, key and value";
    if (!is_shaped(output, m.config.hidden_size, heads.query_size())) return "the attention's output";
    for (const auto &[one, all] :
         {std::pair(q_norm, heads.query_size()), {k_norm, shares_keys_of < 0 ? heads.key_size() : 0}})
      if (qk_norm && all ? !is_sized(one, qk_norm == ALL ? all : heads.head_dim) : bool(one)) return "a norm of heads";
    if (has_sinks ? !is_sized(heads.sinks, heads.num_heads) : bool(heads.sinks)) return "the sinks of heads";
    return nullptr;
  }

  const Product &first() const override { return qkv; }

  void run(Pass &p) const override {
    if (shares_keys_of >= 0) return run_with_shared_keys(p);
    const int64_t query_size = heads.query_size(), key_size = heads.key_size(), head_dim = heads.head_dim;
    const int64_t at_keys = query_size * (output_gate ? 2 : 1);  // the gates are between queries and keys
    const int64_t qkv_rows = at_keys + 2 * key_size, stride = stride_of(qkv_rows);
    float *wide = room(p.space.wide, p.nodes * stride);
    multiply(qkv, p.threads, p.activations, wide, stride);
    const KeyValues keys = keys_in(p.cache);
    p.threads.each(p.nodes, 4, [&](int64_t n) {
      float *row = wide + n * stride;
      // The next node's keys and values come from far away.
      for (int64_t i = at_keys; i < qkv_rows; i += LANES) prefetch(row + stride + i);
      float *values = row + at_keys + key_size;
      if (keys_are_values) std::copy_n(row + at_keys, key_size, values);
      if (value_norm)
        for (int64_t i = 0; i < key_size; i += head_dim)
          p.norm_row({ones.data(), nullptr, head_dim}, values + i, values + i, head_dim);
      if (qk_norm == ALL) {
        p.norm_row(q_norm, row, row, query_size);
        p.norm_row(k_norm, row + at_keys, row + at_keys, key_size);
      }
      for (int64_t h = 0; h < heads.num_heads + heads.num_kv_heads; h++) {
        float *head = row + h * head_dim + (h < heads.num_heads ? 0 : at_keys - query_size);
        if (qk_norm == HEAD) p.norm_row(h < heads.num_heads ? q_norm : k_norm, head, head, head_dim);
        if (rope >= 0) rotate(head, p.angles(n, rope));
        if (qk_norm == ROTATED_HEAD) p.norm_row(h < heads.num_heads ? q_norm : k_norm, head, head, head_dim);
      }
      grow(row, p.position(n));
      put(heads, keys, p.slot(n), row + at_keys, values);
    });
    if (p.any_goes_on_after(*this))
      attend_and_multiply(p, false, true, window, wide, stride, output_gate ? wide + query_size : nullptr);
  }

 private:
  const Attention *source_in(const Model &m) const {
    if (shares_keys_of < layer)
      for (const auto &part : m.layers[shares_keys_of])
        if (const auto *source = dynamic_cast<const Attention *>(part.get())) return source;
    return nullptr;
  }

  // Multiplies all queries of a node by the factor of its position.
  void grow(float *queries, int64_t position) const {
    const int64_t periods = query_growth ? position / query_growth_period : 0;
    if (periods < 1) return;
    const float growth = float(1 + query_growth * std::log1p(double(periods)));
    for (int64_t i = 0; i < heads.query_size(); i++) queries[i] *= growth;
  }

  int64_t product_rows() const {
    const int64_t own_keys = shares_keys_of >= 0 ? 0 : keys_are_values ? 1 : 2;  // with values
    return heads.query_size() * (output_gate ? 2 : 1) + own_keys * heads.key_size();
  }

  // Only the nodes that go on have queries, because no other node reads anything of them.
  void run_with_shared_keys(Pass &p) const {
    const int64_t query_size = heads.query_size(), head_dim = heads.head_dim, stride = stride_of(query_size);
    float *queries = room(p.space.wide, p.rows() * stride);
    multiply(qkv, p.threads, p.activations, queries, stride);
    p.threads.each(p.rows(), 4, [&](int64_t r) {
      float *row = queries + r * stride;
      if (qk_norm == ALL) p.norm_row(q_norm, row, row, query_size);
      for (int64_t i = 0; i < query_size; i += head_dim) {
        if (qk_norm == HEAD) p.norm_row(q_norm, row + i, row + i, head_dim);
        if (rope >= 0) rotate(row + i, p.angles(p.going()[r], rope));
        if (qk_norm == ROTATED_HEAD) p.norm_row(q_norm, row + i, row + i, head_dim);
      }
      grow(row, p.position(p.going()[r]));
    });
    attend_and_multiply(p, false, false, window, queries, stride);
  }
};

// It keeps its keys and values where the attention before it does: a slot has a token or a position of the source.
class CrossAttention final : public WithHeads {
  Product query, key_value;

 public:
  CrossAttention() : WithHeads("cross_attention") { product("query", query), product("key_value", key_value); }

  const char *wrong(const Model &m, const Layer &before) const override {
    if (const char *reason = WithHeads::wrong(m, before)) return reason;
    if (!m.encoder) return "there is no encoder to attend to";
    const Attention *own = attention_in(before);
    return own && own->heads.key_size() == heads.key_size() && own->heads.head_dim == heads.head_dim
               ? nullptr
               : "attention to an encoder has other keys than the attention before it";
  }

  bool add_memory(const Model &m, Cache &, const Layer &before) override {
    whole = m.config.integer_cache, section = attention_in(before)->section;
    return true;
  }
  int64_t probed_heads() const override { return heads.num_heads; }

  const char *incomplete(const Model &m) const override {
    const int64_t hidden = m.config.hidden_size, width = heads.query_size();
    return is_shaped(query, width, hidden) && is_shaped(output, hidden, width) &&
                   is_shaped(key_value, 2 * heads.key_size(), m.encoder->config.hidden_size)
               ? nullptr
               : "cross-attention";
  }

  const Product &first() const override { return query; }

  void run(Pass &p) const override {
    const int64_t stride = stride_of(heads.query_size());
    float *queries = room(p.space.wide, p.nodes * stride);
    multiply(query, p.threads, p.activations, queries, stride);
    show(p, queries, stride);
    attend_and_multiply(p, true, false, 0, queries, stride);
  }

  void place(const Model &m, const Cache &cache, Threads &threads, Workspace &space, const float *states,
             const int64_t *slots, int64_t count) const override {
    const int64_t hidden = m.encoder->config.hidden_size, width = heads.key_size(), stride = stride_of(2 * width);
    float *both = room(space.wide, count * stride);
    const KeyValues keys = keys_in(cache);
    space.activations.resize(count, key_value.parts);
    threads.each(count, 16, [&](int64_t n) { space.activations.set(n, states + n * hidden); });
    multiply(key_value, threads, space.activations, both, stride);
    threads.each(count, 16,
                 [&](int64_t n) { put(heads, keys, slots[n], both + n * stride, both + n * stride + width); });
  }

 private:
  static const Attention *attention_in(const Layer &before) {
    return before.empty() ? nullptr : dynamic_cast<const Attention *>(before.back().get());
  }

  // Writes the scores of the probed heads. queries: [rows, stride], of the nodes that go on
  void show(Pass &p, const float *queries, int64_t stride) const {
    const std::vector<int64_t> &going = p.going();
    const KeyValues keys = keys_in(p.cache);
    const int64_t rows = p.rows(), head_dim = heads.head_dim;
    for (int64_t first = 0, end = 0; first < rows; first = end) {  // the rows of a segment
      while (end < rows && p.space.segment_of[going[end]] == p.space.segment_of[going[first]]) end++;
      const Segment &s = p.segment(going[first]);
      for (int64_t i = 0; i < s.watched; i++) {
        if (s.heads[2 * i] != layer) continue;
        const int64_t head = s.heads[2 * i + 1];
        p.threads.each(s.shown, 64, [&](int64_t t) {
          static thread_local Buffer<float> numbers;
          float *key = room(numbers, keys.width);
          get_key(keys, head / heads.group(), s.source[t], key);
          for (int64_t r = first; r < end; r++) {
            const float *from = queries + r * stride + head * head_dim;
            F32 products{};
            for (int64_t f = 0; f < head_dim; f += LANES)
              products = multiply_add(load_some(from + f, head_dim - f), load<F32>(key + f), products);
            s.scores[(i * s.rows + p.position(going[r])) * s.shown + t] = sum(products) * float(heads.scale);
          }
        });
      }
    }
  }
};

const Kind<Attention> ATTENTION("attention");
const Kind<CrossAttention> CROSS_ATTENTION("cross_attention");

}  // namespace

}  // namespace specbeam
