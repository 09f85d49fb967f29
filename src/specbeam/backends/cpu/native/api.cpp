// The functions that Python calls (backends/cpu/library.py). They check all numbers and indices of their arguments. On
// failure a function returns -1, or the error as text and null if all is well. Not checked are addresses: the caller
// gives handles that were not deleted, and arrays as long as the numbers beside them say.

#include <unistd.h>

#if defined(SPECBEAM_X86)
#include <cpuid.h>
#elif defined(SPECBEAM_ARM) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <vector>

#include "ahead.h"
#include "formats.h"
#include "model.h"
#include "pack.h"
#include "select.h"
#include "tables.h"
#include "threads.h"

namespace specbeam {

static const char *const OUT_OF_MEMORY = "out of memory";
constexpr int32_t NOT_FINITE = -2;  // a weight is NaN or infinite, or a scale is too large for a half float

#define SPECBEAM_TABLE(isa) \
  namespace isa {           \
  extern const Table TABLE; \
  }
SPECBEAM_TABLE(portable)
#if defined(SPECBEAM_X86)
SPECBEAM_TABLE(avx2)
#if defined(SPECBEAM_AVXVNNI)
SPECBEAM_TABLE(avxvnni)
#endif
SPECBEAM_TABLE(avx512)
#elif defined(SPECBEAM_ARM)
SPECBEAM_TABLE(neon)
#endif

static const Table *table_named(const char *name) {
  if (!name) return nullptr;
  const auto is = [name](const Table &t) { return std::strcmp(name, t.name) == 0; };
#if defined(SPECBEAM_X86)
  __builtin_cpu_init();
  // __builtin_cpu_supports does not know F16C in Clang 14. The answer is kept, because asking the processor takes
  // microseconds on a virtual machine.
  static const bool f16c = [] {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
  }();
  const bool two = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const bool five = two && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (five && (!*name || is(avx512::TABLE))) return &avx512::TABLE;
#if defined(SPECBEAM_AVXVNNI)
  static const bool dot_products = [] {
    constexpr unsigned AVX_VNNI = 1 << 4;  // cpuid.h has no name for it in Clang 14
    unsigned a = 0, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & AVX_VNNI;
  }();
  if (two && dot_products && (!*name || is(avxvnni::TABLE))) return &avxvnni::TABLE;
#endif
  if (two && (!*name || is(avx2::TABLE))) return &avx2::TABLE;
#elif defined(SPECBEAM_ARM)
#if defined(__linux__)
  const bool dot_products = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  const bool dot_products = true;  // every Mac with ARM has them
#endif
  if (dot_products && (!*name || is(neon::TABLE))) return &neon::TABLE;
#endif
  return !*name || is(portable::TABLE) ? &portable::TABLE : nullptr;
}

// A model with the threads and the buffers of its passes. Python runs one pass at a time.
struct Loaded {
  const Table *table;
  int thread_count;
  Model model;
  Cache cache;
  std::unique_ptr<Threads> threads;
  pid_t process = getpid();
  void *workspace = nullptr;

  Loaded(const Table *best, int count, const ModelConfig &config)
      : table(best), thread_count(count), model{config, {}, {}, {}, {}, {}, {}}, cache(config) {
    model.layers.resize(config.layers);
  }
  ~Loaded() { table->delete_workspace(workspace); }

  Threads &pool() {
    if (process != getpid()) {  // the threads did not survive the fork
      (void)threads.release();
      threads.reset(new Threads(thread_count));
      process = getpid();
    }
    return *threads;
  }
};

static Product *product_named(Model &model, int64_t layer, int which) {
  if (layer < 0) {
    Product *all[] = {&model.embedding, &model.positions, &model.head};
    return which >= 0 && which < 3 ? all[which] : nullptr;
  }
  if (layer >= int64_t(model.layers.size())) return nullptr;
  Layer &l = model.layers[layer];
  Product *all[] = {&l.qkv, &l.output, &l.up, &l.down};
  return which >= 0 && which < 4 ? all[which] : nullptr;
}

static Norm *norm_named(Model &model, int64_t layer, int which) {
  if (layer < 0) return which == 0 ? &model.norm : nullptr;
  if (layer >= int64_t(model.layers.size())) return nullptr;
  Layer &l = model.layers[layer];
  Norm *all[] = {&l.attention_norm, &l.post_attention_norm, &l.mlp_norm, &l.post_mlp_norm, &l.q_norm, &l.k_norm};
  return which >= 0 && which < 6 ? all[which] : nullptr;
}

// The first error in a configuration, or null.
static const char *wrong(const ModelConfig &c) {
  for (int64_t size : {c.vocab, c.hidden, c.inner, c.layers, c.heads, c.kv_heads, c.head_dim, c.context})
    if (size < 1 || size > INT32_MAX) return "a size is not between 1 and 2^31 - 1";
  if (c.layers > MAX_LAYERS) return "there are too many layers";
  if (c.heads % c.kv_heads) return "the number of heads is not a multiple of the number of key heads";
  if (c.heads > INT32_MAX / 3 / c.head_dim || c.inner > INT32_MAX / 2) return "a layer is too wide";
  if (c.activation < SILU || c.activation > GELU_TANH) return "the activation is not known";
  for (int64_t flag : {c.layer_norm, c.gated, c.parallel, c.whole_cache})
    if (flag != 0 && flag != 1) return "a flag is neither 0 nor 1";
  for (double number : {c.norm_eps, c.attention_scale, c.embedding_scale, c.attention_softcap, c.logits_softcap})
    if (!std::isfinite(number)) return "a number is not finite";
  if (c.norm_eps < 0 || c.attention_softcap < 0 || c.logits_softcap < 0) return "a number is negative";
  return nullptr;
}

// The first parameter that is missing or has a wrong shape, or null.
static const char *incomplete(const Model &m) {
  const ModelConfig &c = m.config;
  const auto shaped = [](const Product &p, int64_t rows, int64_t columns) {
    for (const Matrix &part : p.parts)
      if (part.columns != columns) return false;
    return bool(p) && p.rows() == rows && (!p.bias || p.bias_size == rows);
  };
  const auto sized = [](const Norm &norm, int64_t size) { return norm && norm.size == size; };
  if (!shaped(m.embedding, c.vocab, c.hidden) || m.embedding.parts.size() != 1) return "the embedding";
  if (m.positions && (!shaped(m.positions, c.context, c.hidden) || m.positions.parts.size() != 1))
    return "the positions";
  if (!shaped(m.head, c.vocab, c.hidden)) return "the head";
  if (!sized(m.norm, c.hidden)) return "the last norm";
  for (const Layer &l : m.layers) {
    if (!sized(l.attention_norm, c.hidden)) return "a norm";
    if ((l.mlp_norm || !c.parallel) && !sized(l.mlp_norm, c.hidden)) return "a norm";
    for (const Norm &norm : {l.post_attention_norm, l.post_mlp_norm})
      if (norm && norm.size != c.hidden) return "a norm";
    for (const Norm &norm : {l.q_norm, l.k_norm})
      if (norm && norm.size != c.head_dim) return "a norm of heads";
    if (!shaped(l.qkv, (c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden)) return "query, key and value";
    if (!shaped(l.output, c.hidden, c.heads * c.head_dim)) return "the attention's output";
    if (!shaped(l.up, c.inner * (c.gated ? 2 : 1), c.hidden) || !shaped(l.down, c.hidden, c.inner)) return "the MLP";
    if (l.rope >= int64_t(m.ropes.size())) return "a rotation";
    if (l.rope >= 0 && int64_t(m.ropes[l.rope].frequencies.size()) * 2 > c.head_dim) return "a rotation's size";
  }
  return nullptr;
}

// The first error in the segments or the wanted nodes, or null.
static const char *wrong(const Model &m, const Cache &cache, const Segment *segments, int64_t count,
                         const int64_t *wanted, int64_t wanted_count) {
  const ModelConfig &c = m.config;
  int64_t nodes = 0;
  if (!segments || count < 1) return "there is no segment";
  for (const Segment *s = segments; s < segments + count; s++) {
    if (!s->tokens || !s->positions || !s->slots || s->nodes < 1) return "a segment is empty";
    if (s->nodes > INT32_MAX / 2 - nodes) return "there are too many nodes";
    // A trunk may be longer than the cache: nodes before all windows need no slots.
    if (s->trunk_length < 0 || s->trunk_length > INT32_MAX || (s->trunk_length && !s->trunk))
      return "a trunk is missing";
    if (s->branch_columns < 0 || s->branch_columns > cache.capacity || (s->branch_columns && !s->branches))
      return "the branches are missing or longer than the cache";
    for (int64_t n = 0; n < s->nodes; n++) {
      if (s->tokens[n] < 0 || s->tokens[n] >= c.vocab) return "a token is not in the vocabulary";
      if (s->slots[n] < 0 || s->slots[n] >= cache.capacity) return "a slot is not in the cache";
      if (s->positions[n] < 0 || s->positions[n] >= s->trunk_length + s->branch_columns)
        return "a position is beyond the trunk and the branches";
      if (m.positions && s->positions[n] >= c.context) return "a position is beyond the context";
    }
    nodes += s->nodes;
  }
  if (wanted_count < 0 || (wanted_count && !wanted)) return "the wanted nodes are missing";
  for (int64_t i = 0; i < wanted_count; i++)
    if (wanted[i] < 0 || wanted[i] >= nodes) return "a wanted node is not in the pass";
  return nullptr;
}

// Calls f(position in its slot, its number in the segment, the segment) for each node of a pass, in order.
template <class F> static void each_slot(Cache &cache, const Segment *segments, int64_t count, const F &f) {
  for (const Segment *s = segments; s < segments + count; s++)
    for (int64_t n = 0; n < s->nodes; n++) f(cache.positions[s->slots[n]], n, *s);
}

static void empty_slots(Cache &cache, const Segment *segments, int64_t count) {
  each_slot(cache, segments, count, [](int32_t &in_slot, int64_t, const Segment &) { in_slot = Cache::EMPTY; });
}

// Notes the nodes' positions in their slots. Returns the error, or null.
static const char *fill_slots(Cache &cache, const Segment *segments, int64_t count) {
  int32_t mark = -1;  // each node leaves its own in its slot: if another node has the same slot, one mark is gone
  bool distinct = true;
  each_slot(cache, segments, count, [&](int32_t &in_slot, int64_t, const Segment &) { in_slot = --mark; });
  mark = -1;
  each_slot(cache, segments, count, [&](int32_t &in_slot, int64_t, const Segment &) { distinct &= in_slot == --mark; });
  if (!distinct) return "two nodes have the same slot";
  each_slot(cache, segments, count,
            [](int32_t &in_slot, int64_t n, const Segment &s) { in_slot = int32_t(s.positions[n]); });
  return nullptr;
}

// The first error in the ancestors of the nodes, or null. The slot of an ancestor must hold a node of its position. An
// ancestor on the trunk may lack a slot if it lies before all windows of all nodes.
static const char *wrong_ancestors(const Model &m, const Cache &cache, const Segment *segments, int64_t count) {
  for (const Segment *s = segments; s < segments + count; s++) {
    const auto [least, deepest] = std::minmax_element(s->positions, s->positions + s->nodes);
    const auto holds = [&](int64_t slot, int64_t position) {
      return slot >= 0 && slot < cache.capacity && cache.positions[slot] == position;
    };
    const char *const reason = "a node sees a slot that is empty or holds a node of another position";
    int64_t seen = *least;  // the first position that a node sees in any layer
    for (const Layer &layer : m.layers) seen = std::min(seen, first_seen(*least, layer.window));
    for (int64_t p = 0; p < std::min(*deepest + 1, s->trunk_length); p++)
      if (!holds(s->trunk[p], p) && (p >= seen || s->trunk[p] != Segment::NO_SLOT)) return reason;
    for (int64_t n = 0; n < s->nodes; n++) {
      for (int64_t p = s->trunk_length; p <= s->positions[n]; p++)
        if (!holds(*s->path(n, p), p)) return reason;
      if (*s->path(n, s->positions[n]) != s->slots[n]) return "a node does not see its own slot";
    }
  }
  return nullptr;
}

// Whether [first, first + rows * columns) lies in [0, size). No product overflows.
static bool inside(int64_t first, int64_t rows, int64_t columns, int64_t size) {
  int64_t items;
  return first >= 0 && rows >= 0 && columns >= 0 && !__builtin_mul_overflow(rows, columns, &items) && first <= size &&
         items <= size - first;
}

// The first error in a choice, or null.
static const char *wrong(const Choice &c) {
  for (int64_t size : {c.logit_rows, c.wish_count, c.edit_count, c.entry_count, c.value_count, c.one_of_count,
                       c.given_count, c.allowed_bytes, c.noise_count, c.most_count, c.row_count})
    if (size < 0 || size > INT64_MAX / 64) return "a size is negative or too large";
  if (c.logit_columns < 1 || c.logit_columns > INT32_MAX) return "a row of logits is not between 1 and 2^31 - 1 long";
  if (!inside(0, c.logit_rows, c.logit_columns, INT64_MAX / 64)) return "there are too many logits";
  const auto given = [](int64_t size, auto... addresses) { return !size || (... && addresses); };
  if (!given(c.logit_rows, c.logits) || !given(c.wish_count, c.wishes) || !given(c.edit_count, c.edits) ||
      !given(c.entry_count, c.edit_rows, c.edit_tokens) || !given(c.value_count, c.edit_values) ||
      !given(c.one_of_count, c.one_of) || !given(c.given_count, c.given, c.given_log_probs) ||
      !given(c.allowed_bytes, c.allowed) || !given(c.noise_count, c.streams, c.positions) ||
      !given(c.most_count, c.tokens, c.log_probs, c.scores) || !given(c.row_count, c.normalizers, c.totals) ||
      (c.noise_count && !given(c.most_count, c.noise)))
    return "an array is missing";
  const auto negative = [](int64_t token) { return token < 0; };
  if (std::any_of(c.one_of, c.one_of + c.one_of_count, negative) ||
      std::any_of(c.edit_tokens, c.edit_tokens + c.entry_count, negative))
    return "a token is negative";
  for (const Edit *e = c.edits; e != c.edits + c.edit_count; e++) {
    if (e->kind < ADD || e->kind > BAN) return "the kind of an edit is not known";
    if (e->begin > e->end || e->begin < 0 || e->end > c.entry_count) return "an edit has more entries than there are";
    if (e->kind != BAN && !inside(e->values, e->end - e->begin, 1, c.value_count)) return "an edit lacks values";
  }
  int64_t rows = 0, entries = 0;
  for (const Wish *w = c.wishes; w != c.wishes + c.wish_count; w++) {
    if (!inside(w->first_row, w->rows, 1, c.logit_rows)) return "a wish has rows that the logits lack";
    if ((rows += w->rows) > INT32_MAX) return "there are too many rows";
    if (w->vocab < 1 || w->vocab > c.logit_columns) return "a wish has a vocabulary that the logits lack";
    if (w->most < 0 || w->most > w->vocab) return "a wish has more tokens than the vocabulary";
    if (!inside(w->row_place, w->rows, 1, c.row_count)) return "there is no room for the sums of a wish";
    if (!inside(w->most_place, w->rows, w->most, c.most_count)) return "there is no room for the tokens of a wish";
    if (!inside(w->given_place, w->rows, w->given, c.given_count)) return "a wish lacks given tokens";
    for (int64_t i = 0; i < w->rows * w->given; i++)
      if (const int64_t token = c.given[w->given_place + i]; token < 0 || token >= w->vocab)
        return "a given token is not in the vocabulary";
    if (w->edits_begin < 0 || w->edits_begin > w->edits_end || w->edits_end > c.edit_count) return "a wish lacks edits";
    if (w->one_of_begin < 0 || w->one_of_begin > w->one_of_end || w->one_of_end > c.one_of_count)
      return "a wish lacks the tokens of one_of";
    for (const Edit *e = c.edits + w->edits_begin; e != c.edits + w->edits_end; e++) {
      if ((entries += e->end - e->begin) > INT32_MAX) return "there are too many entries of edits";
      for (int64_t i = e->begin; i < e->end; i++)
        if (c.edit_rows[i] < 0 || c.edit_rows[i] >= w->rows) return "an edit has a row that its wish lacks";
    }
    if (w->allowed_place != -1 && !inside(w->allowed_place, w->rows, (w->vocab + 7) / 8, c.allowed_bytes))
      return "a wish lacks a part of its mask";
    if (w->noise_place != -1 && !inside(w->noise_place, w->rows, 1, c.noise_count))
      return "a wish lacks streams or positions";
    if ((w->normalize != 0 && w->normalize != 1) || (w->total != 0 && w->total != 1))
      return "a flag is neither 0 nor 1";
    if (!(w->temperature > 0) || !std::isfinite(w->temperature)) return "the temperature is not a positive number";
    if (float(w->temperature) == 0) return "the temperature is too small for float32";
    if (w->top_k < 0) return "top_k is negative";
    if (!(w->top_p >= 0 && w->top_p <= 1) || !(w->min_p >= 0 && w->min_p <= 1))
      return "top_p or min_p is not in [0, 1]";
  }
  return nullptr;
}

}  // namespace specbeam

using namespace specbeam;

extern "C" {

// The version of this interface, or -1 if the sizes of the caller's structures differ.
int32_t specbeam_abi_version(int64_t model_config_bytes, int64_t segment_bytes, int64_t wish_bytes,
                             int64_t choice_bytes, int64_t ahead_bytes) {
  const bool same = model_config_bytes == sizeof(ModelConfig) && segment_bytes == sizeof(Segment) &&
                    wish_bytes == sizeof(Wish) && choice_bytes == sizeof(Choice) && ahead_bytes == sizeof(Ahead);
  return same ? ABI_VERSION : -1;
}

// The name of the instruction set to use, or null if the processor lacks `name`. An empty name asks for the best.
const char *specbeam_isa(const char *name) {
  const Table *table = table_named(name);
  return table ? table->name : nullptr;
}

int64_t specbeam_matrix_bytes(int32_t format, int64_t rows, int64_t columns) {
  if (format < 0 || format >= FORMAT_COUNT) return -1;
  if (rows < 1 || rows > INT32_MAX || columns < 1 || columns > INT32_MAX) return -1;
  int64_t bytes;
  return __builtin_mul_overflow(blocks_of(rows), block_bytes(Format(format), columns), &bytes) ? -1 : bytes;
}

int32_t specbeam_format_of(int32_t type) { return format_of(type) == FORMAT_COUNT ? -1 : format_of(type); }

// Returns 0, -1 if the sizes do not fit, or NOT_FINITE.
int32_t specbeam_pack(int32_t type, const uint8_t *source, int64_t bytes, int64_t rows, int64_t columns,
                      const int64_t *order, int64_t first, int64_t last, uint8_t *out) {
  if (specbeam_matrix_bytes(format_of(type), rows, columns) < 0 || columns % columns_per_block(type)) return -1;
  if (!source || !out || bytes != rows * row_bytes(type, columns)) return -1;
  if (first < 0 || last > blocks_of(rows)) return -1;
  for (int64_t row = 0; order && row < rows; row++)
    if (order[row] < 0 || order[row] >= rows) return -1;
  for (int64_t block = first; block < last; block++)
    if (!pack_block(type, source, rows, columns, order, block, out)) return NOT_FINITE;
  return 0;
}

// Returns 0, -1 if the sizes do not fit, or NOT_FINITE.
int32_t specbeam_quantize(int32_t format, const float *source, int64_t rows, int64_t columns, uint8_t *out) {
  if ((format != F32_ROWS && format != Q8 && format != Q4_MIN) || !source || !out) return -1;
  if (specbeam_matrix_bytes(format, rows, columns) < 0) return -1;
  for (int64_t block = 0; block < blocks_of(rows); block++)
    if (!quantize_block(Format(format), source, rows, columns, block, out)) return NOT_FINITE;
  return 0;
}

// A hash that finds damage. It does not protect against attackers.
uint64_t specbeam_hash(const uint8_t *p, int64_t bytes) {
  uint64_t lanes[4] = {1, 2, 3, 4};
  int64_t i = 0;
  for (; i + 32 <= bytes; i += 32)
    for (int j = 0; j < 4; j++) {
      uint64_t word;
      std::memcpy(&word, p + i + 8 * j, 8);
      lanes[j] = (lanes[j] ^ word) * 0x9e3779b97f4a7c15u;
      lanes[j] ^= lanes[j] >> 29;
    }
  uint64_t hash = uint64_t(bytes);
  for (; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
  for (uint64_t lane : lanes) hash = (hash ^ lane) * 0x9e3779b97f4a7c15u, hash ^= hash >> 32;
  return hash;
}

// Makes a model, without parameters. Returns the error, or null. `made` is deleted with specbeam_model_delete.
const char *specbeam_model_new(const ModelConfig *config, int32_t threads, const char *isa, void **made) {
  const Table *table = table_named(isa);
  if (!table) return "the instruction set is not available";
  if (threads < 1 || threads > MAX_THREADS) return "the number of threads is not between 1 and 1024";
  if (const char *reason = wrong(*config)) return reason;
  try {
    auto loaded = std::make_unique<Loaded>(table, threads, *config);
    loaded->threads.reset(new Threads(threads));
    loaded->workspace = table->new_workspace();
    *made = loaded.release();
    return nullptr;
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// No pass of the model may be running.
void specbeam_model_delete(void *model) {
  auto *loaded = static_cast<Loaded *>(model);
  if (loaded->process != getpid()) (void)loaded->threads.release();
  delete loaded;
}

// The number of threads that the model's passes have: fewer than were asked for where the system makes no more.
int32_t specbeam_model_threads(void *model) { return static_cast<Loaded *>(model)->pool().count(); }

// Data is not copied: the caller keeps it alive. Returns 0, or -1 if the product or the size is wrong.
int32_t specbeam_model_add(void *model, int64_t layer, int32_t which, int32_t format, int64_t rows, int64_t columns,
                           const uint8_t *data, int64_t bytes) {
  Product *product = product_named(static_cast<Loaded *>(model)->model, layer, which);
  if (!product || !data || uintptr_t(data) % alignof(float) || product->parts.size() >= MAX_PARTS) return -1;
  if (bytes < 1 || bytes != specbeam_matrix_bytes(format, rows, columns)) return -1;
  product->parts.push_back({Format(format), rows, columns, data});
  return 0;
}

// bias: [size]
int32_t specbeam_model_bias(void *model, int64_t layer, int32_t which, const float *bias, int64_t size) {
  Product *product = product_named(static_cast<Loaded *>(model)->model, layer, which);
  if (!product || !bias) return -1;
  product->bias = bias, product->bias_size = size;
  return 0;
}

// weight, bias: [size]; bias may be null
int32_t specbeam_model_norm(void *model, int64_t layer, int32_t which, const float *weight, const float *bias,
                            int64_t size) {
  Norm *norm = norm_named(static_cast<Loaded *>(model)->model, layer, which);
  if (!norm || !weight) return -1;
  *norm = {weight, bias, size};
  return 0;
}

// Returns the rotation's number, or -1. frequencies: [count], copied
int32_t specbeam_model_rope(void *model, const float *frequencies, int64_t count, float scale) {
  Model &m = static_cast<Loaded *>(model)->model;
  if (!frequencies || count < 1 || count > m.config.head_dim / 2 || int64_t(m.ropes.size()) >= m.config.layers)
    return -1;
  try {
    m.ropes.push_back({{frequencies, frequencies + count}, scale});
  } catch (const std::exception &) {
    return -1;
  }
  return int32_t(m.ropes.size()) - 1;
}

// rope: a rotation's number, or -1 for none. window: 0 for none
int32_t specbeam_model_layer(void *model, int64_t layer, int64_t rope, int64_t window) {
  Model &m = static_cast<Loaded *>(model)->model;
  if (layer < 0 || layer >= int64_t(m.layers.size()) || window < 0) return -1;
  if (rope < -1 || rope >= int64_t(m.ropes.size())) return -1;
  m.layers[layer].rope = rope;
  m.layers[layer].window = window;
  return 0;
}

const char *specbeam_model_incomplete(void *model) { return incomplete(static_cast<Loaded *>(model)->model); }

// Makes room for at least this many slots in the model's cache. Returns the error, or null. No pass may be running.
const char *specbeam_cache_reserve(void *model, int64_t slots) {
  try {
    return static_cast<Loaded *>(model)->cache.reserve(slots);
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// Empties the slots from `first` on. Memory goes back to the system in blocks of 256 slots. Returns 0, or -1 if a slot
// is not in the cache. No pass may be running.
int32_t specbeam_cache_release(void *model, int64_t first, int64_t count) {
  Cache &cache = static_cast<Loaded *>(model)->cache;
  if (first < 0 || count < 0 || first > cache.capacity || count > cache.capacity - first) return -1;
  cache.release(first, count);
  return 0;
}

// Returns the error, or null. logits: [wanted_count, vocab], for the first `vocab` tokens of the vocabulary. After an
// error the slots of the pass are empty.
const char *specbeam_forward(void *model, const Segment *segments, int64_t count, const int64_t *wanted,
                             int64_t wanted_count, int64_t vocab, float *logits) {
  auto &loaded = *static_cast<Loaded *>(model);
  if (const char *reason = incomplete(loaded.model)) return reason;
  Cache &cache = loaded.cache;
  if (const char *reason = wrong(loaded.model, cache, segments, count, wanted, wanted_count)) return reason;
  if (vocab < 1 || vocab > loaded.model.config.vocab) return "vocab is not between 1 and the size of the vocabulary";
  if (wanted_count && !logits) return "there is no room for the logits";
  const char *reason = fill_slots(cache, segments, count);
  if (!reason) reason = wrong_ancestors(loaded.model, cache, segments, count);
  try {
    if (!reason)
      loaded.table->forward(loaded.model, cache, loaded.pool(), loaded.workspace, segments, count, wanted, wanted_count,
                            vocab, logits);
  } catch (const std::exception &) {
    reason = OUT_OF_MEMORY;
  }
  if (reason) empty_slots(cache, segments, count);
  return reason;
}

// Answers wishes. Returns the error, or null. The logits are not changed.
const char *specbeam_choose(void *model, const Choice *choice) {
  auto &loaded = *static_cast<Loaded *>(model);
  if (const char *reason = wrong(*choice)) return reason;
  try {
    loaded.table->choose(*choice, loaded.pool());
    return nullptr;
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// Runs up to `passes` passes over texts, or over the beams of texts. Each pass is over the tokens that the one before
// has chosen. It is the last one if a text has no allowed token, or if its token is one of `ends`. So is the pass in
// which another thread changes `halt` from 0. Returns the error, or null; then `done` is the number of passes. After an
// error the slots of the last pass are empty.
//
// After every `every` passes but the last one, `show` is called with the number of passes so far, unless it is null.
// Their results are in their places then. If it returns 0, there is no further pass.
//
// The choice has a wish for each segment, about its nodes. The positions of its noise go on by one. Each pass
// overwrites the logits, which are the choice's. Its results lie in the places of `choice`, plus the number of the pass
// times the sizes.
//
// Each segment has one node, or beams at one position. Beams have wishes about m tokens, more than there are beams.
// Their continuations are ranked by their sums, score of the beam plus score of the token. The best of these are the
// next beams, ties resolved by the beam's number, then by the token's place in its row. The pass is the last one if
// - a sum is not a number,
// - one of the next beams is a token of `ends`,
// - the best sum is not above best_above, or the sum of a next beam is not above all_above.
const char *specbeam_forward_ahead(void *model, const Segment *segments, int64_t count, const Ahead *ahead,
                                   float *logits, const Choice *choice, int64_t passes, const int64_t *ends,
                                   int64_t end_count, const int32_t *halt, int64_t every, int32_t (*show)(int64_t),
                                   int64_t *done) {
  if (!segments || count < 1 || count > INT32_MAX || passes < 1 || passes > INT32_MAX) return "there is nothing to do";
  if (!ahead || !choice || choice->logits != logits || !halt || !done || end_count < 0 || (end_count && !ends))
    return "an array is missing";
  if (show && every < 1) return "results are to be shown after no pass";
  if (const char *reason = wrong(*choice)) return reason;
  if (choice->wish_count != count) return "there is not one wish for the nodes of each segment";
  int64_t nodes = 0;
  for (int64_t i = 0; i < count; i++) {
    if (const char *reason = GrowingText::wrong(segments[i], choice->wishes[i], ahead[i], passes)) return reason;
    if (choice->wishes[i].first_row != nodes) return "the wishes are not in the order of the segments";
    nodes += segments[i].nodes;
  }
  if (choice->logit_rows != nodes) return "there are not as many rows of logits as nodes";
  const auto is_end = [=](int64_t token) { return std::find(ends, ends + end_count, token) != ends + end_count; };
  try {
    std::vector<GrowingText> texts;
    texts.reserve(count);
    for (int64_t i = 0; i < count; i++) texts.emplace_back(segments[i], choice->wishes[i], ahead[i], passes);
    std::vector<Segment> next(segments, segments + count);
    std::vector<int64_t> rows(nodes);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<uint32_t> drawn(choice->positions, choice->positions + choice->noise_count);
    Choice own = *choice;
    own.positions = drawn.data();
    bool goes_on = true;
    for (*done = 0; goes_on && *done < passes; ++*done) {
      for (int64_t i = 0; i < count; i++) {
        if (*done) texts[i].grow();
        next[i] = texts[i].nodes();
      }
      if (const char *reason =
              specbeam_forward(model, next.data(), count, rows.data(), nodes, own.logit_columns, logits))
        return reason;
      if (const char *reason = specbeam_choose(model, &own)) return reason;
      for (GrowingText &text : texts) goes_on &= text.choose(own, is_end);
      for (uint32_t &position : drawn) position++;
      own.tokens += own.most_count, own.log_probs += own.most_count, own.scores += own.most_count;
      if (own.noise_count) own.noise += own.most_count;
      own.given_log_probs += own.given_count, own.normalizers += own.row_count, own.totals += own.row_count;
      const int64_t so_far = *done + 1;
      if (show && goes_on && so_far < passes && so_far % every == 0) goes_on = show(so_far);
      goes_on &= !__atomic_load_n(halt, __ATOMIC_RELAXED);
    }
    return nullptr;
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// For tests: out[n, rows] = values[n, columns] times the transposed matrix.
int32_t specbeam_multiply(const char *isa, int32_t threads, int32_t format, int64_t rows, int64_t columns,
                          const uint8_t *data, const float *values, int64_t n, float *out) {
  const Table *table = table_named(isa);
  if (!table || specbeam_matrix_bytes(format, rows, columns) < 0 || n < 1 || threads < 1 || threads > MAX_THREADS)
    return -1;
  try {
    Threads pool(threads);
    table->multiply({Format(format), rows, columns, data}, pool, values, n, out);
    return 0;
  } catch (const std::exception &) {
    return -1;
  }
}

// For tests: one weight of a matrix, or NaN if the row or the column does not exist.
float specbeam_weight(int32_t format, int64_t rows, int64_t columns, const uint8_t *data, int64_t row, int64_t column) {
  if (specbeam_matrix_bytes(format, rows, columns) < 0 || row < 0 || row >= rows || column < 0 || column >= columns)
    return NAN;
  return portable::TABLE.weight({Format(format), rows, columns, data}, row, column);
}
}
