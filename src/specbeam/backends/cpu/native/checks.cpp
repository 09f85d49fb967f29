// The checks of checks.h. They read all numbers and indices, and follow no address that is not given.

#include "checks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "parts/part.h"

namespace specbeam {

#define STRUCTURE(name) inline const char *wrong_value(const name &s) {
#define FIELD(type, name) \
  if (const char *reason = wrong_value(s.name)) return reason;
#define END       \
  return nullptr; \
  }
#include "interface.def"

const char *wrong(const ModelConfig &c) {
  for (int64_t size : {c.vocab_size, c.hidden_size, c.num_layers, c.context_length})
    if (size < 1 || size > INT32_MAX) return "a size is not between 1 and 2^31 - 1";
  if (c.num_layers > MAX_LAYERS) return "there are too many layers";
  if (c.bands < 0 || c.bands > INT32_MAX ||
      (c.bands && std::max({3 * c.bands, 3 * c.hidden_size, 2 * c.context_length}) > INT32_MAX))
    return "the frames of audio are too large, or too many";
  if (c.per_layer_size && c.bands) return "the layers of an encoder have no embeddings";
  if (c.per_layer_size < 0 || c.per_layer_size > INT32_MAX / 2 / c.num_layers)
    return "the embeddings of the layers are too large";
  if (c.feature_size < 0 || c.feature_size > INT32_MAX - c.hidden_size || (c.feature_size && c.bands))
    return "the features that a draft head reads are too large, or an encoder reads them";
  if (c.joins_embedding && c.feature_size != c.hidden_size)
    return "the features that a draft head reads have another size than its own";
  if (c.head_size < 0 || c.head_size > c.vocab_size) return "the head has more tokens than the vocabulary";
  return wrong_value(c);
}

const char *wrong(const ModelConfig &c, const ModelConfig &encoder) {
  if (c.bands) return "an encoder cannot have an encoder";
  return encoder.bands ? nullptr : "the encoder reads nothing";
}

const char *wrong(const Part &part, const Model &m, const Layer &before) {
  for (const auto &other : before)
    if (other->name == part.name) return "a layer has two parts of one kind, whose parameters have the same names";
  if (part.parallel && before.empty()) return "a part reads the input of another, and there is none before it";
  if (part.parallel && part.has_norm && before.back()->parallel)
    return "a part has its own norm of what two parts before it read";  // the first of these was added already
  if (part.has_joint_norm && (!part.parallel || before.back()->has_sum_norm || before.back()->has_sum_scale))
    return "a part is normed with the output of another, which reads something else or ends with a norm or a scale";
  if (m.config.bands && part.reach()) return "a part of an encoder reads some positions only";
  return part.wrong(m, before);
}

// The first norm around a part that is missing or has a wrong size, or null.
static const char *incomplete_norms(const Part &part, int64_t hidden) {
  for (const auto &[has, norm] : {std::pair(part.has_norm, part.norm),
                                  {part.has_output_norm, part.output_norm},
                                  {part.has_joint_norm, part.joint_norm},
                                  {part.has_sum_norm, part.sum_norm}})
    if (has ? !is_sized(norm, hidden) : bool(norm)) return "a norm";
  if (part.has_sum_scale ? !is_sized(part.sum_scale, 1) : bool(part.sum_scale)) return "the scale of a layer";
  return nullptr;
}

const char *incomplete(const Model &m) {
  const ModelConfig &c = m.config;
  if (c.bands) {
    if (!is_shaped(m.conv1, c.hidden_size, 3 * c.bands) || !is_shaped(m.conv2, c.hidden_size, 3 * c.hidden_size))
      return "a convolution";
    if (!m.positions) return "the positions";
  } else {
    if (!is_shaped(m.embedding, c.vocab_size, c.hidden_size) || m.embedding.parts.size() != 1) return "the embedding";
    if (!is_shaped(m.head, c.head_size ? c.head_size : c.vocab_size, c.hidden_size)) return "the head";
    if (int64_t(m.head_tokens.size()) != c.head_size) return "the tokens of the head";
  }
  if (c.feature_size) {
    if (!m.read) return "the model whose features a draft head reads";
    if (!is_shaped(m.fc, c.hidden_size, c.feature_size + (c.joins_embedding ? c.hidden_size : 0)))
      return "the product that reads features";
    if (!is_sized(m.embedding_norm, c.hidden_size)) return "the norm of embeddings";
    if (c.joins_embedding ? !is_sized(m.feature_norm, c.feature_size) : bool(m.feature_norm))
      return "the norm of features";
  }
  if (m.positions && (!is_shaped(m.positions, c.context_length, c.hidden_size) || m.positions.parts.size() != 1))
    return "the positions";
  if (c.per_layer_size) {
    const int64_t columns = c.num_layers * c.per_layer_size;
    const Table &table = m.per_layer_table;
    const Product &packed = m.per_layer_embedding;
    if (table ? table.rows != c.vocab_size || table.columns != columns || packed
              : !is_shaped(packed, c.vocab_size, columns) || packed.parts.size() != 1)
      return "the embeddings of the layers";
    if (!is_shaped(m.per_layer_projection, columns, c.hidden_size) || !is_sized(m.per_layer_norm, c.per_layer_size))
      return "the projection of embeddings for the layers";
  }
  if (c.final_norm ? !is_sized(m.norm, c.hidden_size) : bool(m.norm)) return "the last norm";
  for (const Layer &layer : m.layers) {
    if (layer.empty()) return "a layer";
    for (const auto &part : layer) {
      if (const char *reason = incomplete_norms(*part, c.hidden_size)) return reason;
      if (const char *reason = part->incomplete(m)) return reason;
    }
  }
  return m.encoder ? incomplete(*m.encoder) : nullptr;
}

// The first array that a segment lacks, or null. A prefix may be longer than the cache: nodes before all windows need
// no slots.
static const char *missing(const Segment &s) {
  if (!s.tokens || !s.positions || !s.slots || s.nodes < 1) return "a segment is empty";
  if (s.nodes > INT32_MAX) return "there are too many nodes";
  if (s.prefix_length < 0 || s.prefix_length > INT32_MAX || (s.prefix_length && !s.prefix))
    return "a prefix is missing";
  if (s.suffix_columns < 0 || s.suffix_columns > INT32_MAX || (s.suffix_columns && !s.suffixes))
    return "the suffixes are missing";
  if (s.source_length < 0 || s.source_length > INT32_MAX || (s.source_length && !s.source))
    return "a source is missing";
  if (s.watched < 0 || s.watched > INT32_MAX || (s.watched && (!s.heads || !s.scores)))
    return "the probed heads are missing";
  return nullptr;
}

// The first error in the heads that a segment probes, or null.
static const char *wrong_heads(const Model &m, const Segment &s) {
  if (s.rows < 1 || s.rows > INT32_MAX || s.shown < 1 || s.shown > s.source_length)
    return "the scores of probed heads have no memory, or are about more positions than the source has";
  for (int64_t i = 0; i < s.watched; i++) {
    const int64_t layer = s.heads[2 * i], head = s.heads[2 * i + 1];
    int64_t heads = 0;
    if (layer >= 0 && layer < int64_t(m.layers.size()))
      for (const auto &part : m.layers[layer]) heads = std::max(heads, part->probed_heads());
    if (head < 0 || head >= heads) return "a probed head is not in the model";
  }
  for (int64_t n = 0; n < s.nodes; n++)
    if (s.positions[n] >= s.rows) return "the scores of probed heads have no row for a position";
  return nullptr;
}

const char *wrong(const Model &m, const Cache &cache, const Segment *segments, int64_t count, const int64_t *wanted,
                  int64_t wanted_count) {
  const ModelConfig &c = m.config;
  int64_t nodes = 0;
  if (!segments || count < 1) return "there is no segment";
  for (const Segment *s = segments; s < segments + count; s++) {
    if (const char *reason = missing(*s)) return reason;
    if (s->nodes > INT32_MAX / 2 - nodes) return "there are too many nodes";
    if (bool(m.encoder) != (s->source_length > 0)) return "a segment lacks its source, or has one without an encoder";
    if (s->suffix_columns > cache.capacity) return "the suffixes are longer than the cache";
    for (int64_t n = 0; n < s->nodes; n++) {
      if (s->tokens[n] < 0 || s->tokens[n] >= c.vocab_size) return "a token is not in the vocabulary";
      if (s->slots[n] < 0 || s->slots[n] >= cache.capacity) return "a slot is not in the cache";
      if (s->positions[n] < 0 || s->positions[n] >= s->prefix_length + s->suffix_columns)
        return "a position is beyond the prefix and the suffixes";
      if (m.positions && s->positions[n] >= c.context_length) return "a position is beyond the context";
    }
    if (m.read && !s->features) return "the places of features are missing";
    for (int64_t n = 0; m.read && n < s->nodes; n++)
      if (const int64_t at = s->features[n];
          at >= m.read->cache.capacity || (at < NO_FEATURE && -2 - at >= cache.capacity))
        return "a feature is not in the cache";
    if (s->watched)
      if (const char *reason = wrong_heads(m, *s)) return reason;
    nodes += s->nodes;
  }
  if (wanted_count < 0 || (wanted_count && !wanted)) return "the wanted nodes are missing";
  for (int64_t i = 0; i < wanted_count; i++)
    if (wanted[i] < 0 || wanted[i] >= nodes) return "a wanted node is not in the pass";
  return nullptr;
}

const char *wrong_ancestors(const Model &m, const Cache &cache, const Segment *segments, int64_t count) {
  for (const Segment *s = segments; s < segments + count; s++) {
    const auto [least, deepest] = std::minmax_element(s->positions, s->positions + s->nodes);
    const auto holds = [&](int64_t slot, int64_t position) {
      return slot >= 0 && slot < cache.capacity && cache.positions[slot] == position;
    };
    const char *const reason = "a node sees a slot that is empty or holds a node of another position";
    int64_t seen = *least;  // the first position that a node sees in any layer
    for (const Layer &layer : m.layers)
      for (const auto &part : layer)
        if (part->has_memory()) seen = std::min(seen, first_seen(*least, part->reach()));
    for (int64_t p = 0; p < std::min(*deepest + 1, s->prefix_length); p++)
      if (!holds(s->prefix[p], p) && (p >= seen || s->prefix[p] != NO_SLOT)) return reason;
    for (int64_t p = 0; p < s->source_length; p++)
      if (!holds(s->source[p], p)) return "the slots of a source are empty or hold something else";
    for (int64_t n = 0; n < s->nodes; n++) {
      for (int64_t p = s->prefix_length; p <= s->positions[n]; p++)
        if (!holds(*ancestors(*s, n, p), p)) return reason;
      if (*ancestors(*s, n, s->positions[n]) != s->slots[n]) return "a node does not see its own slot";
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

const char *wrong(const Choice &c) {
  for (int64_t size : {c.logit_rows, c.request_count, c.edit_count, c.entry_count, c.value_count, c.one_of_count,
                       c.given_count, c.allowed_bytes, c.noise_count, c.top_count, c.row_count})
    if (size < 0 || size > INT64_MAX / 64) return "a size is negative or too large";
  if (c.logit_columns < 1 || c.logit_columns > INT32_MAX) return "a row of logits is not between 1 and 2^31 - 1 long";
  if (!inside(0, c.logit_rows, c.logit_columns, INT64_MAX / 64)) return "there are too many logits";
  const auto given = [](int64_t size, auto... addresses) { return !size || (... && addresses); };
  if (!given(c.logit_rows, c.logits) || !given(c.request_count, c.requests) || !given(c.edit_count, c.edits) ||
      !given(c.entry_count, c.edit_rows, c.edit_tokens) || !given(c.value_count, c.edit_values) ||
      !given(c.one_of_count, c.one_of) || !given(c.given_count, c.given, c.given_log_probs) ||
      !given(c.allowed_bytes, c.allowed) || !given(c.noise_count, c.streams, c.positions) ||
      !given(c.top_count, c.tokens, c.log_probs, c.scores) || !given(c.row_count, c.normalizers, c.totals) ||
      (c.noise_count && !given(c.top_count, c.noise)))
    return "an array is missing";
  const auto negative = [](int64_t token) { return token < 0; };
  if (std::any_of(c.one_of, c.one_of + c.one_of_count, negative) ||
      std::any_of(c.edit_tokens, c.edit_tokens + c.entry_count, negative))
    return "a token is negative";
  for (const Edit *e = c.edits; e != c.edits + c.edit_count; e++) {
    if (const char *reason = wrong_value(*e)) return reason;
    if (e->begin > e->end || e->begin < 0 || e->end > c.entry_count) return "an edit has more entries than there are";
    if (e->kind != BAN && !inside(e->values, e->end - e->begin, 1, c.value_count)) return "an edit lacks values";
  }
  int64_t rows = 0, entries = 0;
  for (const SelectionRequest *r = c.requests; r != c.requests + c.request_count; r++) {
    if (!inside(r->first_row, r->rows, 1, c.logit_rows)) return "a request has rows that the logits lack";
    if ((rows += r->rows) > INT32_MAX) return "there are too many rows";
    if (r->vocab < 1 || r->vocab > c.logit_columns) return "a request has a vocabulary that the logits lack";
    if (r->top < 0 || r->top > r->vocab) return "a request has more tokens than the vocabulary";
    if (!inside(r->row_place, r->rows, 1, c.row_count)) return "there is no room for the sums of a request";
    if (!inside(r->top_place, r->rows, r->top, c.top_count)) return "there is no room for the tokens of a request";
    if (!inside(r->given_place, r->rows, r->given, c.given_count)) return "a request lacks given tokens";
    for (int64_t i = 0; i < r->rows * r->given; i++)
      if (const int64_t token = c.given[r->given_place + i]; token < 0 || token >= r->vocab)
        return "a given token is not in the vocabulary";
    if (r->edits_begin < 0 || r->edits_begin > r->edits_end || r->edits_end > c.edit_count)
      return "a request lacks edits";
    if (r->one_of_begin < 0 || r->one_of_begin > r->one_of_end || r->one_of_end > c.one_of_count)
      return "a request lacks the tokens of one_of";
    if (r->together_begin < 0 || r->together_begin > r->together_end)
      return "the tokens of together end before they begin";
    for (const Edit *e = c.edits + r->edits_begin; e != c.edits + r->edits_end; e++) {
      if ((entries += e->end - e->begin) > INT32_MAX) return "there are too many entries of edits";
      for (int64_t i = e->begin; i < e->end; i++)
        if (c.edit_rows[i] < 0 || c.edit_rows[i] >= r->rows) return "an edit has a row that its request lacks";
    }
    if (r->allowed_place != -1 && !inside(r->allowed_place, r->rows, (r->vocab + 7) / 8, c.allowed_bytes))
      return "a request lacks a part of its mask";
    if (r->noise_place != -1 && !inside(r->noise_place, r->rows, 1, c.noise_count))
      return "a request lacks streams or positions";
    if (!(r->temperature > 0) || !std::isfinite(r->temperature)) return "the temperature is not a positive number";
    if (float(r->temperature) == 0) return "the temperature is too small for float32";
    if (r->top_k < 0) return "top_k is negative";
    for (double p : {r->top_p, r->min_p, r->typical_p})
      if (!(p >= 0 && p <= 1)) return "top_p, min_p or typical_p is not in [0, 1]";
    if (const char *reason = wrong_value(*r)) return reason;
  }
  return nullptr;
}

static const char *wrong(const Segment &s, const SelectionRequest &r, const Ahead &a, int64_t passes) {
  if (const char *reason = missing(s)) return reason;
  if (int64_t room; __builtin_mul_overflow(s.nodes, s.suffix_columns + passes, &room))
    return "the suffixes are too long";
  if (r.rows != s.nodes) return "there is not one request for the nodes of each segment";
  if (a.scores ? r.top <= s.nodes : s.nodes != 1 || r.top != 1)
    return "a request is neither about one token of one node, nor about more tokens than there are beams";
  if (passes > 1 && !a.slots) return "the slots of the nodes to come are missing";
  for (int64_t n = 0; n < s.nodes; n++)
    if (s.positions[n] != s.prefix_length + s.suffix_columns - 1)
      return "a node is not at the end of its prefix or of its suffix";
  return nullptr;
}

const char *wrong(const Segment *segments, int64_t count, const Choice &choice, const Ahead *ahead, int64_t passes) {
  if (choice.request_count != count) return "there is not one request for the nodes of each segment";
  int64_t nodes = 0;
  for (int64_t i = 0; i < count; i++) {
    if (const char *reason = wrong(segments[i], choice.requests[i], ahead[i], passes)) return reason;
    if (choice.requests[i].first_row != nodes) return "the requests are not in the order of the segments";
    nodes += segments[i].nodes;
  }
  if (choice.logit_rows != nodes) return "there are not as many rows of logits as nodes";
  return nullptr;
}

}  // namespace specbeam
