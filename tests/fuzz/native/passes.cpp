// Fuzzes models, caches and passes. A pass without a mistake must be accepted, and give each node the bits that its
// path has alone. A pass with a mistake may be refused.

#include <algorithm>

#include "boundary.h"

using namespace specbeam;

namespace {

constexpr size_t MAX_PARAMETER_BYTES = 1 << 18;

struct Parameters {
  std::vector<std::unique_ptr<uint8_t[]>> kept;
  uint64_t random;

  uint8_t *bytes(int64_t n) {
    kept.push_back(exactly<uint8_t>(n));
    for (int64_t i = 0; i < n; i++) kept.back()[i] = uint8_t((random = random * 6364136223846793005u + 1) >> 56);
    return kept.back().get();
  }
  // Numbers from -1 to 1.
  float *floats(int64_t n) {
    auto *p = (float *)bytes(n * int64_t(sizeof(float)));
    for (int64_t i = 0; i < n; i++) p[i] = float(((random = random * 6364136223846793005u + 1) >> 40) / 8388608.0 - 1);
    return p;
  }
};

ModelConfig config_of(Input &in) {
  ModelConfig c{};
  c.kv_heads = in.ConsumeIntegralInRange(1, 3);
  c.heads = c.kv_heads * in.ConsumeIntegralInRange(1, 3);
  for (auto [size, most] :
       {std::pair{&c.vocab, 40}, {&c.hidden, 70}, {&c.inner, 40}, {&c.layers, 3}, {&c.head_dim, 40}})
    *size = in.number(1, most);
  c.context = in.number(8, 64);
  if (in.rarely()) c.heads = in.wild();
  if (in.rarely()) c.kv_heads = in.wild();
  for (int64_t *flag : {&c.layer_norm, &c.gated, &c.parallel, &c.whole_cache}) *flag = in.number(0, 1);
  c.activation = in.number(SILU, GELU_TANH);
  c.norm_eps = 1e-5, c.attention_scale = 0.25, c.embedding_scale = 1;
  for (double *softcap : {&c.attention_softcap, &c.logits_softcap}) *softcap = in.ConsumeBool() ? 30 : 0;
  for (double *number : {&c.norm_eps, &c.attention_scale, &c.embedding_scale, &c.attention_softcap, &c.logits_softcap})
    if (in.rarely()) *number = in.ConsumeFloatingPoint<double>() / in.ConsumeIntegral<int8_t>();
  return c;
}

void add_product(Input &in, Parameters &parameters, void *model, int64_t layer, int which, int64_t rows,
                 int64_t columns) {
  int64_t left = rows;
  for (int part = in.rarely() ? int(in.ConsumeIntegralInRange(0, 12)) : int(in.ConsumeIntegralInRange(1, 3));
       part > 0 && left > 0; part--) {
    int64_t here = part == 1 ? left : in.ConsumeIntegralInRange(int64_t(1), left);
    left -= here;
    const int32_t format = int32_t(in.number(0, FORMAT_COUNT - 1));
    int64_t across = columns;
    if (in.rarely()) here = in.wild();
    if (in.rarely()) across = in.wild();
    int64_t bytes = specbeam_matrix_bytes(format, here, across);
    if (in.rarely()) bytes = in.wild();
    if (bytes > int64_t(MAX_PARAMETER_BYTES)) continue;
    uint8_t *data = nullptr;
    if (bytes > 0 && !in.rarely()) {
      data = format == F32_ROWS ? (uint8_t *)parameters.floats(bytes / 4) : parameters.bytes(bytes);
      if (format != F32_ROWS && !in.rarely())  // without these two bits all scales are below 2
        for (int64_t i = 0; i < bytes; i++) data[i] &= 0x3f;
    }
    specbeam_model_add(model, layer, which, format, here, across, data, bytes);
  }
  if (in.ConsumeBool()) {
    const int64_t size = in.number(rows, rows);
    if (size >= 0 && size < int64_t(MAX_PARAMETER_BYTES))
      specbeam_model_bias(model, layer, which, size ? parameters.floats(size) : nullptr, size);
  }
}

void add_norm(Input &in, Parameters &parameters, void *model, int64_t layer, int which, int64_t size) {
  if (in.rarely()) return;
  size = in.number(size, size);
  if (size < 0 || size > int64_t(MAX_PARAMETER_BYTES)) return;
  const float *weight = parameters.floats(size);
  specbeam_model_norm(model, layer, which, in.rarely() ? nullptr : weight,
                      in.ConsumeBool() ? parameters.floats(size) : nullptr, size);
}

// Returns the widest window of the model's layers, or 0 if a layer has no window.
int64_t fill(Input &in, Parameters &parameters, void *model, const ModelConfig &c) {
  const int64_t some_layers = std::min<int64_t>(c.layers, 4);  // of models with more, the rest stays empty
  const auto layer_of = [&](int64_t layer) { return in.rarely() ? in.wild() : layer; };
  add_product(in, parameters, model, -1, 0, c.vocab, c.hidden);
  if (in.ConsumeBool()) add_product(in, parameters, model, -1, 1, c.context, c.hidden);
  add_product(in, parameters, model, -1, 2, c.vocab, c.hidden);
  add_norm(in, parameters, model, -1, int(in.number(0, 0)), c.hidden);
  int64_t ropes = 0;
  std::vector<int64_t> windows(size_t(c.layers));
  for (int64_t l = 0; l < some_layers; l++) {
    const int64_t width = (c.heads + 2 * c.kv_heads) * c.head_dim;
    add_product(in, parameters, model, layer_of(l), 0, width, c.hidden);
    add_product(in, parameters, model, layer_of(l), 1, c.hidden, c.heads * c.head_dim);
    add_product(in, parameters, model, layer_of(l), 2, c.inner * (c.gated ? 2 : 1), c.hidden);
    add_product(in, parameters, model, layer_of(l), int(in.number(3, 3)), c.hidden, c.inner);
    for (int which = 0; which < 6; which++)
      if (which % 2 == 0 && which < 4 ? true : in.ConsumeBool())
        add_norm(in, parameters, model, layer_of(l), which, which < 4 ? c.hidden : c.head_dim);
    if (c.head_dim > 1 && in.ConsumeBool()) {
      const int64_t count = in.number(1, c.head_dim / 2);
      if (count <= int64_t(MAX_PARAMETER_BYTES)) {
        const float *frequencies = count > 0 ? parameters.floats(count) : nullptr;
        ropes += specbeam_model_rope(model, frequencies, count, in.rarely() ? -1e30f : 1) >= 0;
      }
    }
    const int64_t layer = layer_of(l), rope = in.number(-1, ropes - 1), window = in.ConsumeBool() ? in.number(0, 9) : 0;
    if (specbeam_model_layer(model, layer, rope, window) == 0) windows[size_t(layer)] = window;
  }
  const auto [narrowest, widest] = std::minmax_element(windows.begin(), windows.end());
  return *narrowest ? *widest : 0;
}

struct Node {
  int64_t token, parent, depth, slot;
};

// A tree of tokens. Its nodes lie in slots of the model's cache.
struct Text {
  std::vector<Node> nodes;

  std::vector<int64_t> path(int64_t node) const {
    std::vector<int64_t> path;
    for (; node >= 0; node = nodes[node].parent) path.insert(path.begin(), node);
    return path;
  }
};

// The slots of the model's cache: true for a slot in use.
using Slots = std::vector<bool>;

int64_t free_slot(Input &in, const Slots &taken) {
  const auto capacity = int64_t(taken.size());
  int64_t slot = capacity ? in.ConsumeIntegralInRange<int64_t>(0, capacity - 1) : 0;
  for (int64_t tries = 0; tries < capacity; tries++, slot = (slot + 1) % capacity)
    if (!taken[size_t(slot)]) return slot;
  return -1;
}

// The arrays of a segment. Each has exactly its size.
struct Arrays {
  std::unique_ptr<int64_t[]> tokens, positions, slots, trunk, branches;
};

// A segment of the nodes of a text from `first` on. `shared` positions of their paths become the trunk, or fewer.
std::pair<Segment, Arrays> segment_of(const Text &text, int64_t first, int64_t shared) {
  const auto n = int64_t(text.nodes.size()) - first;
  int64_t deepest = first;
  for (int64_t i = first; i < first + n; i++)
    if (text.nodes[size_t(i)].depth > text.nodes[size_t(deepest)].depth) deepest = i;
  const auto longest = text.path(deepest);
  for (int64_t i = first; i < first + n; i++) {
    const auto path = text.path(i);
    for (size_t p = 0; p < path.size(); p++)
      if (path[p] != longest[p]) shared = std::min(shared, int64_t(p));
  }
  shared = std::min(shared, int64_t(longest.size()));
  Segment s{};
  Arrays a;
  s.nodes = n, s.trunk_length = shared, s.branch_columns = int64_t(longest.size()) - shared;
  for (auto *array : {&a.tokens, &a.positions, &a.slots}) *array = exactly<int64_t>(size_t(n));
  a.trunk = exactly<int64_t>(size_t(shared)), a.branches = exactly<int64_t>(size_t(n * s.branch_columns));
  const auto slot = [&](int64_t node) { return text.nodes[size_t(node)].slot; };
  for (int64_t p = 0; p < shared; p++) a.trunk[p] = slot(longest[size_t(p)]);
  for (int64_t i = 0; i < n; i++) {
    const Node &node = text.nodes[size_t(first + i)];
    a.tokens[i] = node.token, a.positions[i] = node.depth, a.slots[i] = node.slot;
    const auto path = text.path(first + i);
    for (int64_t p = shared; p <= node.depth; p++)
      a.branches[i * s.branch_columns + p - shared] = slot(path[size_t(p)]);
  }
  s.tokens = a.tokens.get(), s.positions = a.positions.get(), s.slots = a.slots.get();
  s.trunk = a.trunk.get(), s.branches = a.branches.get();
  return {s, std::move(a)};
}

// New nodes of a text, as a segment without mistakes. It has no nodes if the cache is full.
std::pair<Segment, Arrays> grow(Input &in, Text &text, Slots &taken, const ModelConfig &c, bool alone) {
  const auto first = int64_t(text.nodes.size()), count = in.ConsumeIntegralInRange<int64_t>(1, 12);
  for (int64_t i = 0; i < count; i++) {
    const auto known = int64_t(text.nodes.size());
    const int64_t parent = known == 0 || in.rarely()   ? -1
                           : alone || in.ConsumeBool() ? known - 1
                                                       : in.ConsumeIntegralInRange<int64_t>(0, known - 1);
    const int64_t depth = parent < 0 ? 0 : text.nodes[size_t(parent)].depth + 1;
    const int64_t slot = free_slot(in, taken);
    if (slot < 0 || depth >= c.context) break;
    taken[size_t(slot)] = true;
    text.nodes.push_back({in.ConsumeIntegralInRange<int64_t>(0, c.vocab - 1), parent, depth, slot});
  }
  if (int64_t(text.nodes.size()) == first) return {Segment{}, Arrays()};
  return segment_of(text, first, in.ConsumeIntegralInRange<int64_t>(0, 80));
}

// The logits of one node, in a pass over its path in slots of its own.
std::vector<float> logits_alone(Input &in, void *model, const Text &text, Slots &taken, int64_t node, int64_t vocab) {
  Text alone;
  for (const int64_t n : text.path(node)) {
    int64_t slot = free_slot(in, taken);
    if (slot < 0) {
      slot = int64_t(taken.size());
      taken.push_back(false);
      check(!specbeam_cache_reserve(model, int64_t(taken.size())));
    }
    taken[size_t(slot)] = true;
    const auto parent = int64_t(alone.nodes.size()) - 1;
    alone.nodes.push_back({text.nodes[size_t(n)].token, parent, parent + 1, slot});
  }
  const auto [s, arrays] = segment_of(alone, 0, INT64_MAX);
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
  switch (in.ConsumeIntegralInRange(0, 9)) {
    case 0: a.tokens[n] = in.wild(); break;
    case 1: a.positions[n] = in.number(0, 20); break;
    case 2: a.slots[n] = in.number(0, 100); break;
    case 3:
      if (s.trunk_length) a.trunk[in.ConsumeIntegralInRange<int64_t>(0, s.trunk_length - 1)] = in.number(0, 100);
      break;
    case 4:
      if (s.branch_columns)
        a.branches[in.ConsumeIntegralInRange<int64_t>(0, s.nodes * s.branch_columns - 1)] = in.number(0, 100);
      break;
    case 5: (in.ConsumeBool() ? s.trunk_length : s.branch_columns) = in.ConsumeBool() ? below_zero() : INT64_MAX; break;
    case 6: s.nodes = in.ConsumeIntegralInRange<int64_t>(INT64_MIN, 0); break;
    case 7: (in.ConsumeBool() ? s.tokens : in.ConsumeBool() ? s.positions : s.slots) = nullptr; break;
    case 8: (in.ConsumeBool() ? s.trunk : s.branches) = nullptr; break;
    default: wanted.push_back(in.wild());
  }
}

void forget(Input &in, void *model, Text &text, Slots &taken) {
  for (const Node &node : text.nodes) {
    taken[size_t(node.slot)] = false;
    if (in.ConsumeBool()) check(specbeam_cache_release(model, node.slot, 1) == 0);
  }
  text.nodes.clear();
}

// Takes slots out of a trunk, before the windows of all nodes.
void drop_unseen(Input &in, const Segment &s, Arrays &a, int64_t window) {
  const int64_t seen = *std::min_element(s.positions, s.positions + s.nodes) + 1 - window;
  for (int64_t p = 0; window && p < std::min(seen, s.trunk_length); p++)
    if (in.ConsumeBool()) a.trunk[p] = Segment::NO_SLOT;
}

void passes(Input &in, void *model, const ModelConfig &c, int64_t window, std::vector<Text> &texts) {
  Slots taken;
  while (in.remaining_bytes() > 0) {
    std::vector<Segment> segments;
    std::vector<Arrays> arrays;
    std::vector<size_t> owners;
    const int64_t slots = in.rarely() ? in.PickValueInArray({INT64_MIN, int64_t(-1), int64_t(1) << 40, INT64_MAX})
                                      : in.ConsumeIntegralInRange<int64_t>(0, 192);
    const bool refused = specbeam_cache_reserve(model, slots);
    check(refused == (slots > 192));
    if (!refused && slots > int64_t(taken.size())) taken.resize(size_t(slots));
    if (in.rarely()) specbeam_cache_release(model, in.wild(), in.number(0, 0));
    for (size_t t = 0; t < texts.size(); t++) {
      Text &text = texts[t];
      if (in.rarely()) forget(in, model, text, taken);
      if (in.rarely()) continue;
      auto [segment, of_segment] = grow(in, text, taken, c, in.ConsumeBool());
      if (!segment.nodes) continue;
      drop_unseen(in, segment, of_segment, window);
      segments.push_back(segment), arrays.push_back(std::move(of_segment)), owners.push_back(t);
    }
    int64_t nodes = 0;
    for (const Segment &s : segments) nodes += s.nodes;
    std::vector<int64_t> wanted;
    for (int64_t i = 0; i < nodes; i++)
      if (in.ConsumeBool()) wanted.push_back(i);
    int64_t vocab = in.ConsumeIntegralInRange<int64_t>(1, c.vocab), count = int64_t(segments.size()),
            wanted_count = int64_t(wanted.size());
    const bool spoiled = !count || in.rarely() || in.rarely();
    if (spoiled && count) {
      spoil(in, segments, arrays, wanted), wanted_count = int64_t(wanted.size());
      if (in.rarely()) vocab = in.wild();
      if (in.rarely()) count = in.ConsumeIntegralInRange<int64_t>(INT64_MIN, 0);
      if (in.rarely()) wanted_count = in.ConsumeIntegralInRange<int64_t>(INT64_MIN, 0);
    }
    const int64_t room = vocab > 0 && vocab <= c.vocab ? vocab : 0;
    const auto logits = exactly<float>(size_t(room * std::max<int64_t>(wanted_count, 0)));
    const auto wanted_exactly = exactly<int64_t>(wanted.size());
    std::copy(wanted.begin(), wanted.end(), wanted_exactly.get());
    const auto segments_exactly = exactly<Segment>(segments.size());
    std::copy(segments.begin(), segments.end(), segments_exactly.get());
    const char *wrong =
        specbeam_forward(model, segments_exactly.get(), count, wanted_exactly.get(), wanted_count, vocab, logits.get());
    check(!wrong || *wrong);
    if (spoiled) {  // the trees here may differ from the cache
      for (Text &text : texts) forget(in, model, text, taken);
      continue;
    }
    if (wrong) std::fprintf(stderr, "refused: %s\n", wrong);
    CHECK(!wrong);
    if (wanted.empty() || in.ConsumeIntegralInRange(0, 3)) continue;
    const auto chosen = in.ConsumeIntegralInRange<size_t>(0, wanted.size() - 1);
    int64_t node = wanted[chosen];
    size_t which = 0;
    while (node >= segments[which].nodes) node -= segments[which++].nodes;
    const Text &text = texts[owners[which]];
    node += int64_t(text.nodes.size()) - segments[which].nodes;
    const auto alone = logits_alone(in, model, text, taken, node, vocab);
    CHECK(same(alone.data(), logits.get() + int64_t(chosen) * vocab, vocab));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Input in(data, size);
  const ModelConfig c = config_of(in);
  void *model = nullptr;
  const auto threads = int32_t(in.rarely() ? in.wild() : in.ConsumeIntegralInRange(0, 20) ? 1 : 2);
  if (threads > 8 && threads <= MAX_THREADS) return 0;  // allowed, but slow
  if (const char *wrong = specbeam_model_new(&c, threads, in.isa(), &model)) {
    check(*wrong && !model);
    return 0;
  }
  Parameters parameters{{}, in.ConsumeIntegral<uint64_t>()};
  const int64_t window = fill(in, parameters, model, c);
  const char *missing = specbeam_model_incomplete(model);
  check(!missing || *missing);
  std::vector<Text> texts(in.ConsumeIntegralInRange<size_t>(1, 3));
  if (missing) {
    const int64_t zero = 0;
    specbeam_cache_reserve(model, 1);
    const Segment s{1, 1, 0, &zero, &zero, &zero, &zero, nullptr};
    check(specbeam_forward(model, &s, 1, &zero, 1, 1, nullptr));
  } else {
    passes(in, model, c, window, texts);
  }
  specbeam_model_delete(model);
  return 0;
}
