// The functions that Python calls (backends/cpu/library.py). They check all numbers and indices of their arguments
// (checks.h). On failure a function returns -1, or the error as text and null if all is well. Not checked are
// addresses: the caller gives handles that were not deleted, and arrays as long as the numbers beside them say.

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ahead.h"
#include "checks.h"
#include "kernels.h"
#include "pack.h"
#include "parameters.h"

namespace specbeam {

static const char *const OUT_OF_MEMORY = "out of memory";
constexpr int32_t NOT_FINITE = -2;  // a weight is NaN or infinite, or a scale is too large for a half float

// A model with the threads and the buffers of its passes. Python runs one pass at a time.
struct Loaded {
  int thread_count;
  Model model;
  Cache cache;
  std::unique_ptr<Cache> one_part;  // of the encoder
  std::unique_ptr<Threads> threads;
  pid_t process = getpid();
  Workspace *workspace = nullptr;
  Loaded *target = nullptr;  // of a draft head, whose threads run its passes

  Loaded(int count, const ModelConfig &config, const ModelConfig *encoder) : thread_count(count), model(config) {
    if (!encoder) return;
    model.encoder = std::make_unique<Model>(*encoder);
    one_part = std::make_unique<Cache>(true);
  }
  ~Loaded() { delete_workspace(workspace); }

  Threads &pool() {
    if (target) return target->pool();
    if (process != getpid()) {  // the threads did not survive the fork
      (void)threads.release();
      threads.reset(new Threads(thread_count));
      process = getpid();
    }
    return *threads;
  }
};

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
  each_slot(cache, segments, count, [&](int32_t &in_slot, int64_t n, const Segment &s) {
    in_slot = --mark;
    cache.states.forget(s.slots[n], 1);
  });
  mark = -1;
  each_slot(cache, segments, count, [&](int32_t &in_slot, int64_t, const Segment &) { distinct &= in_slot == --mark; });
  if (!distinct) return "two nodes have the same slot";
  each_slot(cache, segments, count,
            [](int32_t &in_slot, int64_t n, const Segment &s) { in_slot = int32_t(s.positions[n]); });
  return nullptr;
}

}  // namespace specbeam

using namespace specbeam;

static const char *const INTERFACE =
#define ENUM(name, ...) "enum " #name "{" #__VA_ARGS__ "}\n"
#define STRUCTURE(name) "struct " #name "{"
#define FIELD(type, name) #type " " #name ";"
#define END "}\n"
#define FUNCTION(result, name, ...) #result " " #name "(" #__VA_ARGS__ ")\n"
#include "interface.def"
    ;

#pragma GCC visibility push(default)
extern "C" {

#define FUNCTION(result, name, ...) result specbeam_##name(__VA_ARGS__);
#include "interface.def"

const char *specbeam_interface() { return INTERFACE; }

// A hash of the interface (FNV-1a), which library.py compares with its own when it loads a library.
int32_t specbeam_abi_version() {
  uint32_t hash = 2166136261u;
  for (const char *c = INTERFACE; *c; c++) hash = (hash ^ uint8_t(*c)) * 16777619u;
  return int32_t(hash >> 1);
}

int64_t specbeam_matrix_bytes(int32_t format, int64_t rows, int64_t columns) {
  if (format < 0 || format >= FORMAT_COUNT) return -1;
  if (rows < 1 || rows > INT32_MAX || columns < 1 || columns > INT32_MAX) return -1;
  int64_t bytes;
  return __builtin_mul_overflow(blocks_of(rows), block_bytes(Format(format), columns), &bytes) ? -1 : bytes;
}

int32_t specbeam_format_of(int32_t type) { return format_of(type) == FORMAT_COUNT ? -1 : int32_t(format_of(type)); }

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

// Makes a model, without parameters. Returns the error, or null. encoder: null for a model without one. `made` is
// deleted with specbeam_model_delete.
const char *specbeam_model_new(const ModelConfig *config, const ModelConfig *encoder, int32_t threads, void **made) {
  if (threads < 1 || threads > MAX_THREADS) return "the number of threads is not between 1 and 1024";
  if (const char *reason = wrong(*config)) return reason;
  if (encoder) {
    if (const char *reason = wrong(*encoder)) return reason;
    if (const char *reason = wrong(*config, *encoder)) return reason;
  }
  try {
    auto loaded = std::make_unique<Loaded>(threads, *config, encoder);
    loaded->threads.reset(new Threads(threads));
    loaded->workspace = new_workspace();
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

// Adds matrices of one size to a product. `name` is the name in checkpoints/parameters.py, in the layer of this number,
// or in no layer if that is -1. Data is not copied: the caller keeps it alive. Returns 0, or -1 if the name or the size
// is wrong.
int32_t specbeam_model_matrix(void *model, int64_t layer, const char *name, int32_t format, int64_t matrices,
                              int64_t rows, int64_t columns, const uint8_t *data, int64_t bytes) {
  const Parameter parameter = parameter_named(static_cast<Loaded *>(model)->model, layer, name);
  Product *product = parameter.is_bias ? nullptr : parameter.product;
  if (!product || !data || uintptr_t(data) % alignof(float)) return -1;
  if (matrices < 1 || matrices > int64_t(product->most_parts - product->parts.size())) return -1;
  const int64_t size = specbeam_matrix_bytes(format, rows, columns);
  if (bytes < 1 || bytes / matrices != size || bytes % matrices) return -1;
  for (int64_t i = 0; i < matrices; i++) product->parts.push_back({Format(format), rows, columns, data + i * size});
  return 0;
}

// Gives a table of which single rows are read. type: of its numbers or blocks, as in a GGUF file; data: [rows] as a
// file has them, not copied. Returns 0, or -1 if the name, the type or the size is wrong.
int32_t specbeam_model_table(void *model, const char *name, int32_t type, int64_t rows, int64_t columns,
                             const uint8_t *data, int64_t bytes) {
  Model &m = static_cast<Loaded *>(model)->model;
  if (std::string_view(name ? name : "") != "per_layer_embedding.weight" || m.per_layer_table || !data) return -1;
  if (rows < 1 || rows > INT32_MAX || columns < 1 || columns > INT32_MAX) return -1;
  const int64_t row = table_row_bytes(type, columns);
  if (row < 1 || bytes != rows * row) return -1;
  m.per_layer_table = {type, rows, columns, data};
  return 0;
}

// Gives the weight or the bias of a norm, or the bias of a product. data: [size], not copied
int32_t specbeam_model_vector(void *model, int64_t layer, const char *name, const float *data, int64_t size) {
  const auto [product, norm, is_bias] = parameter_named(static_cast<Loaded *>(model)->model, layer, name);
  if (!data || size < 1) return -1;
  if (norm && (norm->size == 0 || norm->size == size)) {
    (is_bias ? norm->bias : norm->weight) = data, norm->size = size;
    return 0;
  }
  if (!product || !is_bias) return -1;
  product->bias = data, product->bias_size = size;
  return 0;
}

// Returns the rotation's number, or -1. frequencies: [count], copied
int32_t specbeam_model_rope(void *model, const float *frequencies, int64_t count, float scale) {
  Model &m = static_cast<Loaded *>(model)->model;
  if (!frequencies || count < 1 || count > MAX_ROTATED || int64_t(m.ropes.size()) >= m.config.num_layers) return -1;
  try {
    const int64_t start = m.ropes.empty() ? 0 : m.ropes.back().start + int64_t(m.ropes.back().frequencies.size());
    m.ropes.push_back({{frequencies, frequencies + count}, scale, start});
  } catch (const std::exception &) {
    return -1;
  }
  return int32_t(m.ropes.size()) - 1;
}

// The types and names of a part's numbers: "int64_t num_heads;double scale;". Null if there is no such part.
const char *specbeam_part_fields(const char *name) {
  static thread_local std::string fields;
  try {
    const auto part = make_part(name);
    return part ? (fields = part->fields()).c_str() : nullptr;
  } catch (const std::exception &) {
    return nullptr;
  }
}

// Adds a part to a layer, after the parts that it has. numbers: [count], in the order of specbeam_part_fields; a
// rotation is its number, or -1 for none. Returns the error, or null. Not after memory was reserved.
const char *specbeam_model_part(void *model, int32_t of_encoder, int64_t layer, const char *name, const double *numbers,
                                int64_t count) {
  auto &loaded = *static_cast<Loaded *>(model);
  if (of_encoder && !loaded.model.encoder) return "the model has no encoder";
  Model &m = of_encoder ? *loaded.model.encoder : loaded.model;
  if (layer < 0 || layer >= int64_t(m.layers.size())) return "there is no such layer";
  try {
    auto part = make_part(name);
    if (!part) return "there is no such part";
    if (!numbers || !part->set(numbers, count)) return "a number is wrong";
    part->layer = layer;
    if (const char *reason = wrong(*part, m, m.layers[layer])) return reason;
    if (!part->add_memory(m, of_encoder ? *loaded.one_part : loaded.cache, m.layers[layer]))
      return "a slot would be too large, or memory was reserved before";
    m.layers[layer].push_back(std::move(part));
    return nullptr;
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// Gives the tokens of the rows of a model's head, if these are not all tokens. tokens: [count], ascending, copied.
// Returns the error, or null.
const char *specbeam_head_tokens(void *model, const int64_t *tokens, int64_t count) {
  Model &m = static_cast<Loaded *>(model)->model;
  if (!tokens || count < 1 || count != m.config.head_size) return "the head has another number of tokens";
  for (int64_t i = 0; i < count; i++)
    if (tokens[i] < (i ? tokens[i - 1] + 1 : 0) || tokens[i] >= m.config.vocab_size)
      return "the tokens of the head are not ascending, or not in the vocabulary";
  try {
    m.head_tokens.assign(tokens, tokens + count);
    return nullptr;
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// Makes a model the draft head of another one, whose threads it shares from now on. From now on passes of the target
// write the hidden states before these layers, [count], into slots (Features of model.h). The target is deleted after
// the head, or not used after it was deleted. No pass of the target may be running. Returns the error, or null.
const char *specbeam_head_of(void *head, void *target, const int64_t *layers, int64_t count) {
  auto &own = *static_cast<Loaded *>(head), &theirs = *static_cast<Loaded *>(target);
  Model &m = own.model, &t = theirs.model;
  if (m.read || !m.config.feature_size) return "the model reads no features, or reads them already";
  if (t.config.feature_size || t.encoder) return "the target is a draft head itself, or has an encoder";
  if (m.config.vocab_size != t.config.vocab_size) return "the target has another vocabulary";
  if (!layers || count < 1 || count > MAX_LAYERS || count * t.config.hidden_size != m.config.feature_size)
    return "the features that it reads have another size than those of the target";
  for (int64_t i = 0; i < count; i++)
    if (layers[i] < 0 || layers[i] > t.config.num_layers + 1) return "it reads a layer that the target lacks";
  try {
    const std::vector<int64_t> wanted(layers, layers + count);
    const auto same =
        std::find_if(t.features.begin(), t.features.end(), [&](const auto &f) { return f->layers == wanted; });
    const bool is_new = same == t.features.end();
    auto read = !is_new ? *same : std::make_shared<Features>(wanted, t.config.hidden_size, true);
    const int64_t last = m.config.num_layers + (m.config.joins_embedding ? 1 : 0);
    auto kept = std::make_shared<Features>(std::vector<int64_t>{last}, m.config.hidden_size, false);
    if (const char *reason = read->cache.reserve(theirs.cache.capacity)) return reason;
    m.features.reserve(1), t.features.reserve(t.features.size() + 1);
    if (is_new) t.features.push_back(read);
    m.features.push_back(std::move(kept)), m.read = std::move(read);
    own.threads.reset();
    own.target = &theirs;
    return nullptr;
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

const char *specbeam_model_incomplete(void *model) { return incomplete(static_cast<Loaded *>(model)->model); }

// Makes room for at least this many slots in the model's cache. Returns the error, or null. No pass may be running.
const char *specbeam_cache_reserve(void *model, int64_t slots) {
  try {
    auto &loaded = *static_cast<Loaded *>(model);
    for (const auto &one : loaded.model.features)
      if (const char *reason = one->cache.reserve(slots)) return reason;
    return loaded.cache.reserve(slots);
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// The bytes of a slot: what all parts keep of a token.
int64_t specbeam_cache_slot_bytes(void *model) { return static_cast<Loaded *>(model)->cache.block / SLOTS_PER_BLOCK; }

// Empties the slots from `first` on. Memory goes back to the system in blocks of 256 slots. Returns 0, or -1 if a slot
// is not in the cache. No pass may be running.
int32_t specbeam_cache_release(void *model, int64_t first, int64_t count) {
  Cache &cache = static_cast<Loaded *>(model)->cache;
  if (first < 0 || count < 0 || first > cache.capacity || count > cache.capacity - first) return -1;
  cache.release(first, count);
  for (const auto &one : static_cast<Loaded *>(model)->model.features)
    if (first + count <= one->cache.capacity) one->cache.release(first, count);
  return 0;
}

// Runs some layers of the encoder over audio. features: [mel bins, frames], two frames per position of the encoder's
// context; states: [context, hidden], what the layers before `first` gave, then what those before `end` give: after the
// last one the encoder's output. Returns the error, or null.
const char *specbeam_encode(void *model, const float *features, int64_t bands, int64_t frames, int64_t first,
                            int64_t end, float *states) {
  auto &loaded = *static_cast<Loaded *>(model);
  const Model *encoder = loaded.model.encoder.get();
  if (!encoder) return "the model has no encoder";
  if (const char *reason = incomplete(loaded.model)) return reason;
  if (!features || !states) return "an array is missing";
  if (bands != encoder->config.bands || frames != 2 * encoder->config.context_length)
    return "the features have another shape than the encoder reads";
  if (first < 0 || first >= end || end > encoder->config.num_layers) return "there are no such layers";
  try {
    if (const char *reason = loaded.one_part->reserve(encoder->config.context_length)) return reason;
    encode(*encoder, *loaded.one_part, loaded.pool(), *loaded.workspace, features, first, end, states);
    return nullptr;
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// Makes slots the source of segments: they get the keys and values of cross-attention to an encoder's output. states:
// [count, hidden of the encoder], a state for each slot. Returns the error, or null. After an error the slots are
// empty.
const char *specbeam_place(void *model, const float *states, const int64_t *slots, int64_t count) {
  auto &loaded = *static_cast<Loaded *>(model);
  Cache &cache = loaded.cache;
  if (!loaded.model.encoder) return "the model has no encoder";
  if (const char *reason = incomplete(loaded.model)) return reason;
  if (!states || !slots || count < 1 || count > INT32_MAX) return "an array is missing";
  for (int64_t i = 0; i < count; i++)
    if (slots[i] < 0 || slots[i] >= cache.capacity) return "a slot is not in the cache";
  const char *reason = nullptr;
  for (int64_t i = 0; i < count; i++) cache.positions[slots[i]] = int32_t(i);
  for (int64_t i = 0; i < count; i++)
    if (cache.positions[slots[i]] != i) reason = "two states have the same slot";
  try {
    if (!reason) place(loaded.model, cache, loaded.pool(), *loaded.workspace, states, slots, count);
  } catch (const std::exception &) {
    reason = OUT_OF_MEMORY;
  }
  if (reason)
    for (int64_t i = 0; i < count; i++) cache.positions[slots[i]] = Cache::EMPTY;
  return reason;
}

// Returns the error, or null. logits: [wanted_count, vocab], for the first `vocab` tokens of the vocabulary. After an
// error the slots of the pass are empty.
const char *specbeam_forward(void *model, const Segment *segments, int64_t count, const int64_t *wanted,
                             int64_t wanted_count, int64_t vocab, float *logits) {
  auto &loaded = *static_cast<Loaded *>(model);
  if (const char *reason = incomplete(loaded.model)) return reason;
  Cache &cache = loaded.cache;
  if (const char *reason = wrong(loaded.model, cache, segments, count, wanted, wanted_count)) return reason;
  if (vocab < 1 || vocab > loaded.model.config.vocab_size)
    return "vocab is not between 1 and the size of the vocabulary";
  if (wanted_count && !logits) return "there is no room for the logits";
  const char *reason = fill_slots(cache, segments, count);
  if (!reason) reason = wrong_ancestors(loaded.model, cache, segments, count);
  try {
    if (!reason)
      forward(loaded.model, cache, loaded.pool(), *loaded.workspace, segments, count, wanted, wanted_count, vocab,
              logits);
  } catch (const std::exception &) {
    reason = OUT_OF_MEMORY;
  }
  if (reason) empty_slots(cache, segments, count);
  return reason;
}

// Makes the selections. Returns the error, or null. The logits are not changed.
const char *specbeam_choose(void *model, const Choice *choice) {
  auto &loaded = *static_cast<Loaded *>(model);
  if (const char *reason = wrong(*choice)) return reason;
  try {
    choose(*choice, loaded.pool());
    return nullptr;
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// Runs up to `passes` passes over sequences, or over beams. Each pass is over the tokens that the one before has
// chosen. It is the last one if a sequence has no allowed token, or if its token is one of `ends`. So is the pass in
// which another thread changes `halt` from 0. Returns the error, or null; then `done` is the number of passes. After an
// error the slots of the last pass are empty.
//
// The choice has a request for each segment, about its nodes. The positions of its noise go on by one. Each pass
// overwrites the logits, which are the choice's. Its results lie where `choice` points, plus the number of the pass
// times the sizes.
//
// Each segment has one node, or beams at one position. The requests for beams ask for more tokens than there are beams.
// Continuations are ranked by their sums, score of the beam plus score of the token. The best of these are the next
// beams, ties resolved by the beam's number, then by the token's index in its row. The pass is the last one if
// - a sum is not a number,
// - one of the next beams is a token of `ends`,
// - the best sum is not above best_above, or the sum of a next beam is not above all_above.
const char *specbeam_forward_ahead(void *model, const Segment *segments, int64_t count, const Ahead *ahead,
                                   float *logits, const Choice *choice, int64_t passes, const int64_t *ends,
                                   int64_t end_count, const int32_t *halt, int64_t *done) {
  if (!segments || count < 1 || count > INT32_MAX || passes < 1 || passes > INT32_MAX) return "there is nothing to do";
  if (!ahead || !choice || choice->logits != logits || !halt || !done || end_count < 0 || (end_count && !ends))
    return "an array is missing";
  if (const char *reason = wrong(*choice)) return reason;
  if (const char *reason = wrong(segments, count, *choice, ahead, passes)) return reason;
  const int64_t nodes = choice->logit_rows;
  const auto is_end = [=](int64_t token) { return std::find(ends, ends + end_count, token) != ends + end_count; };
  try {
    std::vector<Continuation> continuations;
    continuations.reserve(count);
    for (int64_t i = 0; i < count; i++) continuations.emplace_back(segments[i], choice->requests[i], ahead[i], passes);
    std::vector<Segment> next(segments, segments + count);
    std::vector<int64_t> rows(nodes);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<uint32_t> drawn(choice->positions, choice->positions + choice->noise_count);
    Choice own = *choice;
    own.positions = drawn.data();
    bool goes_on = true;
    for (*done = 0; goes_on && *done < passes; ++*done) {
      for (int64_t i = 0; i < count; i++) {
        if (*done) continuations[i].grow();
        next[i] = continuations[i].nodes();
      }
      if (const char *reason =
              specbeam_forward(model, next.data(), count, rows.data(), nodes, own.logit_columns, logits))
        return reason;
      if (const char *reason = specbeam_choose(model, &own)) return reason;
      for (Continuation &one : continuations) goes_on &= one.choose(own, is_end);
      for (uint32_t &position : drawn) position++;
      own.tokens += own.top_count, own.log_probs += own.top_count, own.scores += own.top_count;
      if (own.noise_count) own.noise += own.top_count;
      own.given_log_probs += own.given_count, own.normalizers += own.row_count, own.totals += own.row_count;
      goes_on &= !__atomic_load_n(halt, __ATOMIC_RELAXED);
    }
    return nullptr;
  } catch (const std::exception &) {
    return OUT_OF_MEMORY;
  }
}

// For tests: out[n, rows] = values[n, columns] times the transposed matrix.
int32_t specbeam_multiply(int32_t threads, int32_t format, int64_t rows, int64_t columns, const uint8_t *data,
                          const float *values, int64_t n, float *out) {
  if (specbeam_matrix_bytes(format, rows, columns) < 0 || n < 1 || threads < 1 || threads > MAX_THREADS) return -1;
  try {
    Threads pool(threads);
    multiply({Format(format), rows, columns, data}, pool, values, n, out);
    return 0;
  } catch (const std::exception &) {
    return -1;
  }
}

// For tests: one weight of a matrix, or NaN if the row or the column does not exist.
float specbeam_weight(int32_t format, int64_t rows, int64_t columns, const uint8_t *data, int64_t row, int64_t column) {
  if (specbeam_matrix_bytes(format, rows, columns) < 0 || row < 0 || row >= rows || column < 0 || column >= columns)
    return NAN;
  return weight_at({Format(format), rows, columns, data}, row, column);
}
}
#pragma GCC visibility pop
