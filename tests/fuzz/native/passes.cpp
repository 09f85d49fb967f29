// Fuzzes models, caches and passes. A pass without a mistake must be accepted, and give each node the bits that its
// path has alone. A pass with a mistake may be refused.

#include <algorithm>

#include "boundary.h"
#include "models.h"
#include "trees.h"

using namespace specbeam;

namespace {

// What the nodes see of an encoder: slots of the cache. It has none for a model without an encoder, and before it is
// placed.
struct Source {
  std::unique_ptr<int64_t[]> slots;
  int64_t length = 0;

  void give(Segment &s) const { s.source = slots.get(), s.source_length = length; }

  void drop(Slots &taken) {
    for (int64_t i = 0; i < length; i++) taken[size_t(slots[i])] = false;
    length = 0;
  }
};

// Lets the encoder read, and places its output in free slots, if there are enough.
void listen(Input &in, void *model, const ModelConfig &encoder, bool has_memory, Parameters &parameters, Slots &taken,
            Source &source) {
  const bool spoiled = in.rarely();
  const int64_t frames = spoiled ? in.wild() : 2 * encoder.context_length;
  const auto states = exactly<float>(size_t(encoder.context_length * encoder.hidden_size));
  const float *features = in.rarely() ? nullptr : parameters.floats(2 * encoder.context_length * encoder.bands);
  const char *wrong = specbeam_encode(model, features, encoder.bands, frames, 0, encoder.num_layers, states.get());
  check(bool(wrong) == (!features || frames != 2 * encoder.context_length || !has_memory));
  if (wrong) return;
  if (encoder.num_layers > 1 && in.ConsumeBool()) {  // the same in two pieces
    const int64_t size = encoder.context_length * encoder.hidden_size,
                  middle = in.ConsumeIntegralInRange<int64_t>(1, encoder.num_layers - 1);
    const auto again = exactly<float>(size_t(size));
    check(!specbeam_encode(model, features, encoder.bands, frames, 0, middle, again.get()));
    check(!specbeam_encode(model, features, encoder.bands, frames, middle, encoder.num_layers, again.get()));
    CHECK(same(states.get(), again.get(), size));
  }
  const int64_t length = in.ConsumeIntegralInRange<int64_t>(1, encoder.context_length);
  source.slots = exactly<int64_t>(size_t(length));
  for (; source.length < length; source.length++) {
    const int64_t slot = free_slot(in, taken);
    if (slot < 0) return source.drop(taken);
    taken[size_t(slot)] = true, source.slots[source.length] = slot;
  }
  const auto tried = exactly<int64_t>(size_t(length));
  std::copy_n(source.slots.get(), length, tried.get());
  if (in.rarely()) tried[in.ConsumeIntegralInRange<int64_t>(0, length - 1)] = in.wild();
  wrong = specbeam_place(model, states.get(), tried.get(), length);
  check(!wrong || *wrong);
  if (wrong || !std::equal(tried.get(), tried.get() + length, source.slots.get())) source.drop(taken);
}

// Heads of cross-attention that a segment probes, and the memory for their scores.
struct Watched {
  std::unique_ptr<int64_t[]> heads;
  std::unique_ptr<float[]> scores;
};

Watched watch(Input &in, Segment &s, const std::vector<std::pair<int64_t, int64_t>> &cross_heads) {
  s.watched = in.ConsumeIntegralInRange<int64_t>(1, 3);
  s.shown = in.ConsumeIntegralInRange<int64_t>(1, s.source_length);
  s.rows = 1 + *std::max_element(s.positions, s.positions + s.nodes);
  Watched own{exactly<int64_t>(size_t(2 * s.watched)), exactly<float>(size_t(s.watched * s.rows * s.shown))};
  for (int64_t i = 0; i < s.watched; i++) {
    const auto [layer, heads] = cross_heads[in.ConsumeIntegralInRange<size_t>(0, cross_heads.size() - 1)];
    own.heads[2 * i] = layer, own.heads[2 * i + 1] = in.ConsumeIntegralInRange<int64_t>(0, heads - 1);
  }
  s.heads = own.heads.get(), s.scores = own.scores.get();
  return own;
}

// The logits of one node, in a pass over its path in slots of its own.
std::vector<float> logits_alone(Input &in, void *model, const Tree &tree, Slots &taken, int64_t node, int64_t vocab,
                                const Source &source) {
  Tree alone;
  for (const int64_t n : tree.path(node)) {
    int64_t slot = free_slot(in, taken);
    if (slot < 0) {
      slot = int64_t(taken.size());
      taken.push_back(false);
      check(!specbeam_cache_reserve(model, int64_t(taken.size()), nullptr));
    }
    taken[size_t(slot)] = true;
    const auto parent = int64_t(alone.nodes.size()) - 1;
    alone.nodes.push_back({tree.nodes[size_t(n)].token, parent, parent + 1, slot});
  }
  auto [s, arrays] = segment_of(alone, 0, INT64_MAX);
  source.give(s);
  const auto last = int64_t(alone.nodes.size()) - 1;
  std::vector<float> logits((size_t(vocab)));
  check(!specbeam_forward(model, &s, 1, &last, 1, vocab, logits.data()));
  for (const Node &n : alone.nodes) taken[size_t(n.slot)] = false;
  return logits;
}

// Spoils one number of a pass.
void spoil(Input &in, std::vector<Segment> &segments, std::vector<Arrays> &arrays, std::vector<int64_t> &wanted) {
  const auto which = in.ConsumeIntegralInRange<size_t>(0, segments.size() - 1);
  Segment &s = segments[which];
  Arrays &a = arrays[which];
  const auto n = in.ConsumeIntegralInRange<int64_t>(0, s.nodes - 1);
  const auto below_zero = [&] { return in.ConsumeIntegralInRange<int64_t>(INT64_MIN, -1); };
  static std::vector<int32_t> rows;
  switch (in.ConsumeIntegralInRange(0, 13)) {
    case 0: a.tokens[n] = in.wild(); break;
    case 1: a.positions[n] = in.number(0, 20); break;
    case 2: a.slots[n] = in.number(0, 100); break;
    case 3:
      if (s.prefix_length) a.prefix[in.ConsumeIntegralInRange<int64_t>(0, s.prefix_length - 1)] = in.number(0, 100);
      break;
    case 4:
      if (s.suffix_columns)
        a.suffixes[in.ConsumeIntegralInRange<int64_t>(0, s.nodes * s.suffix_columns - 1)] = in.number(0, 100);
      break;
    case 5:
      (in.ConsumeBool() ? s.prefix_length : s.suffix_columns) = in.ConsumeBool() ? below_zero() : INT64_MAX;
      break;
    case 6: s.nodes = in.ConsumeIntegralInRange<int64_t>(INT64_MIN, 0); break;
    case 7: (in.ConsumeBool() ? s.tokens : in.ConsumeBool() ? s.positions : s.slots) = nullptr; break;
    case 8: (in.ConsumeBool() ? s.prefix : s.suffixes) = nullptr; break;
    case 9:
      if (in.ConsumeBool()) s.source = nullptr;
      else s.source_length = in.ConsumeBool() ? below_zero() : s.source_length ? 0 : INT64_MAX;
      break;
    case 10:
      (in.ConsumeBool()   ? s.watched
       : in.ConsumeBool() ? s.rows
                          : s.shown) = in.ConsumeBool() ? below_zero() : INT64_MAX;
      break;
    case 11:
      if (s.watched) const_cast<int64_t *>(s.heads)[in.ConsumeIntegralInRange<int64_t>(0, 1)] = in.wild();
      break;
    case 12:
      rows = rows_of_slots();
      rows[in.ConsumeIntegralInRange<size_t>(0, 2 * ROW_SLOTS)] = int32_t(in.wild());
      s.row_of_slot = in.rarely() ? nullptr : rows.data();
      if (in.rarely()) s.row_slots = in.ConsumeBool() ? below_zero() : INT64_MAX;
      break;
    default: wanted.push_back(in.wild());
  }
}

// Adds an attention to a layer, though memory was reserved. That must be refused: no pass would know where it keeps
// what.
void add_late(void *model, bool of_encoder) {
  std::vector<double> numbers;
  for (const std::string &name : fields_of("short_convolution"))
    numbers.push_back(name == "norm" || name == "kernel_size" ? 1 : 0);
  CHECK(specbeam_model_part(model, of_encoder, 0, "short_convolution", numbers.data(), int64_t(numbers.size())));
}

// encoder: null for a model without one
void passes(Input &in, void *model, const ModelConfig &c, const Layers &layers, const ModelConfig *encoder,
            const Layers &of_encoder, Parameters &parameters, std::vector<Tree> &trees) {
  const int64_t reach = layers.reach();
  const auto cross_heads = layers.cross_heads();
  int64_t lifetime[5];
  CHECK((specbeam_cache_slot_bytes(model) > 0 || !specbeam_cache_lifetime(model, 0, lifetime)) == (reach >= 0));
  if (reach < 0) {  // no node has a place then
    CHECK(specbeam_cache_reserve(model, 1, nullptr));
    return;
  }
  Slots taken;
  Source source;
  while (in.remaining_bytes() > 0) {
    std::vector<Segment> segments;
    std::vector<Arrays> arrays;
    std::vector<size_t> owners;
    std::vector<Watched> watched;
    const int64_t slots = in.rarely() ? in.PickValueInArray({INT64_MIN, int64_t(-1), int64_t(1) << 40, INT64_MAX})
                                      : in.ConsumeIntegralInRange<int64_t>(0, c.context_length > 64 ? MOST_SLOTS : 192);
    const bool refused = specbeam_cache_reserve(model, slots, nullptr);
    check(refused == (slots > MOST_SLOTS));
    if (!refused && slots > int64_t(taken.size())) taken.resize(size_t(slots));
    if (!taken.empty() && in.rarely()) add_late(model, encoder && in.ConsumeBool());
    if (in.rarely() && !specbeam_cache_release(model, in.wild(), in.number(0, 0))) {
      source.drop(taken);
      for (Tree &tree : trees) evict(in, model, tree, taken);
    }
    if (encoder && !source.length) listen(in, model, *encoder, of_encoder.reach() >= 0, parameters, taken, source);
    if (encoder && !source.length) continue;
    for (size_t t = 0; t < trees.size(); t++) {
      Tree &tree = trees[t];
      if (in.rarely()) evict(in, model, tree, taken);
      if (in.rarely()) continue;
      auto [segment, of_segment] = grow(in, tree, taken, c, in.ConsumeBool());
      if (!segment.nodes) continue;
      drop_unseen(in, segment, of_segment, reach);
      source.give(segment);
      if (source.length && !cross_heads.empty() && in.ConsumeBool()) watched.push_back(watch(in, segment, cross_heads));
      segments.push_back(segment), arrays.push_back(std::move(of_segment)), owners.push_back(t);
    }
    int64_t nodes = 0;
    for (const Segment &s : segments) nodes += s.nodes;
    std::vector<int64_t> wanted;
    for (int64_t i = 0; i < nodes; i++)
      if (in.ConsumeBool()) wanted.push_back(i);
    int64_t vocab = in.ConsumeIntegralInRange<int64_t>(1, c.vocab_size), count = int64_t(segments.size()),
            wanted_count = int64_t(wanted.size());
    const bool spoiled = !count || in.rarely() || in.rarely();
    if (spoiled && count) {
      spoil(in, segments, arrays, wanted), wanted_count = int64_t(wanted.size());
      if (in.rarely()) vocab = in.wild();
      if (in.rarely()) count = in.ConsumeIntegralInRange<int64_t>(INT64_MIN, 0);
      if (in.rarely()) wanted_count = in.ConsumeIntegralInRange<int64_t>(INT64_MIN, 0);
    }
    const int64_t room = vocab > 0 && vocab <= c.vocab_size ? vocab : 0;
    const auto logits = exactly<float>(size_t(room * std::max<int64_t>(wanted_count, 0)));
    const auto wanted_exactly = exactly<int64_t>(wanted.size());
    std::copy(wanted.begin(), wanted.end(), wanted_exactly.get());
    const auto segments_exactly = exactly<Segment>(segments.size());
    std::copy(segments.begin(), segments.end(), segments_exactly.get());
    const char *wrong =
        specbeam_forward(model, segments_exactly.get(), count, wanted_exactly.get(), wanted_count, vocab, logits.get());
    check(!wrong || *wrong);
    if (spoiled) {  // the trees here may differ from the cache
      source.drop(taken);
      for (Tree &tree : trees) evict(in, model, tree, taken);
      continue;
    }
    if (wrong) std::fprintf(stderr, "refused: %s\n", wrong);
    CHECK(!wrong);
    if (wanted.empty() || in.ConsumeIntegralInRange(0, 3)) continue;
    const auto chosen = in.ConsumeIntegralInRange<size_t>(0, wanted.size() - 1);
    int64_t node = wanted[chosen];
    size_t which = 0;
    while (node >= segments[which].nodes) node -= segments[which++].nodes;
    const Tree &tree = trees[owners[which]];
    node += int64_t(tree.nodes.size()) - segments[which].nodes;
    const auto alone = logits_alone(in, model, tree, taken, node, vocab, source);
    CHECK(same(alone.data(), logits.get() + int64_t(chosen) * vocab, vocab));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Input in(data, size);
  const bool has_encoder = !in.ConsumeIntegralInRange(0, 3);
  const ModelConfig c = config_of(in), encoder = has_encoder ? encoder_of(in) : ModelConfig{};
  void *model = nullptr;
  const auto threads = int32_t(in.rarely() ? in.wild() : in.ConsumeIntegralInRange(0, 20) ? 1 : 2);
  if (threads > 8 && threads <= MAX_THREADS) return 0;  // allowed, but slow
  if (!use(in.isa())) return 0;
  if (const char *wrong = specbeam_model_new(&c, has_encoder ? &encoder : nullptr, threads, &model)) {
    check(*wrong && !model);
    return 0;
  }
  Parameters parameters{{}, in.ConsumeIntegral<uint64_t>()};
  const Layers layers = fill(in, parameters, model, c, has_encoder ? &encoder : nullptr);
  const Layers of_encoder = has_encoder ? fill_encoder(in, parameters, model, encoder) : Layers{};
  const char *missing = specbeam_model_incomplete(model);
  check(!missing || *missing);
  std::vector<Tree> trees(in.ConsumeIntegralInRange<size_t>(1, 3));
  if (missing) {
    const int64_t zero = 0;
    specbeam_cache_reserve(model, 1, nullptr);
    const Segment s{1, 1, 0, 0, &zero, &zero, &zero, &zero, nullptr, nullptr};
    check(specbeam_forward(model, &s, 1, &zero, 1, 1, nullptr));
  } else {
    passes(in, model, c, layers, has_encoder ? &encoder : nullptr, of_encoder, parameters, trees);
  }
  specbeam_model_delete(model);
  return 0;
}
