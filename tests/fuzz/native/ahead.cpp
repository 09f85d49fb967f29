// Fuzzes passes that go ahead in one call: sequences and beams of random trees, in random models. A call without a
// mistake must be accepted. Each of its passes must give the bits of the same pass alone, over nodes in other slots.
// The call must stop after the pass that says so. A call with a mistake may be refused.

#include <algorithm>
#include <cmath>

#include "boundary.h"
#include "models.h"
#include "trees.h"

using namespace specbeam;

namespace {

constexpr int64_t MOST_PASSES = 9, MOST_BEAMS = 64;

// The part of a tree in a call: its nodes of the first pass, and how they go on.
struct Asked {
  size_t tree;
  int64_t first, nodes;       // of the first pass, in the tree
  std::vector<float> scores;  // of beams; empty for one sequence
  Ahead ahead{};
  std::unique_ptr<int64_t[]> slots;
  std::unique_ptr<float[]> of_beams;
};

// The inputs of all requests.
struct Inputs {
  std::vector<SelectionRequest> requests;
  std::vector<Edit> edits;
  std::vector<int32_t> edit_rows, edit_tokens;
  std::vector<float> edit_values;
  std::vector<int64_t> given;
  std::vector<uint8_t> allowed;
  std::vector<uint32_t> streams, positions;
};

// Room for the results of some passes. Each array has exactly its size.
struct Results {
  int64_t passes, top, rows, given;
  std::unique_ptr<int64_t[]> tokens;
  std::unique_ptr<float[]> log_probs, scores, given_log_probs, normalizers, totals;
  std::unique_ptr<double[]> noise;

  Results(int64_t n, const Choice &c)
      : passes(n),
        top(c.top_count),
        rows(c.row_count),
        given(c.given_count),
        tokens(exactly<int64_t>(size_t(n * top))),
        log_probs(exactly<float>(size_t(n * top))),
        scores(exactly<float>(size_t(n * top))),
        given_log_probs(exactly<float>(size_t(n * given))),
        normalizers(exactly<float>(size_t(n * rows))),
        totals(exactly<float>(size_t(n * rows))),
        noise(exactly<double>(size_t(c.noise_count ? n * top : 0))) {}

  void receive(Choice &c) const {
    c.tokens = tokens.get(), c.log_probs = log_probs.get(), c.scores = scores.get(), c.noise = noise.get();
    c.given_log_probs = given_log_probs.get(), c.normalizers = normalizers.get(), c.totals = totals.get();
  }

  // Checks that these are the results of one pass of `others`.
  void check_equal(const Results &others, int64_t pass) const {
    for (int64_t i = 0; i < top; i++) CHECK(tokens[i] == others.tokens[pass * top + i]);
    CHECK(same(log_probs.get(), others.log_probs.get() + pass * top, top));
    CHECK(same(scores.get(), others.scores.get() + pass * top, top));
    CHECK(same(given_log_probs.get(), others.given_log_probs.get() + pass * given, given));
    CHECK(same(normalizers.get(), others.normalizers.get() + pass * rows, rows));
    CHECK(same(totals.get(), others.totals.get() + pass * rows, rows));
  }
};

template <class T> std::unique_ptr<T[]> copied(const std::vector<T> &from) {
  auto out = exactly<T>(from.size());
  std::copy(from.begin(), from.end(), out.get());
  return out;
}

// Adds a request about the nodes of a tree. top: of the tokens of a row
void add_request(Input &in, Inputs &inputs, Choice &c, int64_t nodes, int64_t vocab, int64_t top, bool beams) {
  SelectionRequest r{};
  r.first_row = c.logit_rows, c.logit_rows += nodes;
  r.rows = nodes, r.vocab = vocab, r.top = top;
  r.top_place = c.top_count, c.top_count += nodes * top;
  r.row_place = c.row_count, c.row_count += nodes;
  r.given = in.ConsumeIntegralInRange(0, 7) ? 0 : 1, r.given_place = int64_t(inputs.given.size());
  for (int64_t i = 0; i < nodes * r.given; i++)
    inputs.given.push_back(in.ConsumeIntegralInRange<int64_t>(0, vocab - 1));
  r.edits_begin = int64_t(inputs.edits.size());
  for (int64_t edits = in.ConsumeIntegralInRange(0, 5) ? 0 : 2; edits > 0; edits--) {
    Edit e{EditKind(in.ConsumeIntegralInRange<int64_t>(ADD, BAN)), int64_t(inputs.edit_rows.size()), 0,
           int64_t(inputs.edit_values.size())};
    for (int64_t i = in.ConsumeIntegralInRange(0, 3); i > 0; i--) {
      inputs.edit_rows.push_back(in.ConsumeIntegralInRange(0, int32_t(nodes - 1)));
      inputs.edit_tokens.push_back(in.ConsumeIntegralInRange(0, int32_t(vocab + 3)));
      inputs.edit_values.push_back(1.5f);
    }
    e.end = int64_t(inputs.edit_rows.size());
    inputs.edits.push_back(e);
  }
  r.edits_end = int64_t(inputs.edits.size());
  r.allowed_place = in.ConsumeIntegralInRange(0, 7) ? -1 : int64_t(inputs.allowed.size());
  for (int64_t i = 0; r.allowed_place >= 0 && i < nodes * ((vocab + 7) / 8); i++)
    inputs.allowed.push_back(in.ConsumeBool() ? 255 : in.ConsumeIntegral<uint8_t>());
  r.noise_place = !beams && in.ConsumeBool() ? int64_t(inputs.streams.size()) : -1;
  for (int64_t i = 0; r.noise_place >= 0 && i < nodes; i++) {
    inputs.streams.push_back(in.ConsumeIntegral<uint32_t>());
    inputs.positions.push_back(in.rarely() ? UINT32_MAX - 2 : in.ConsumeIntegral<uint8_t>());
  }
  r.normalize = Flag(in.ConsumeBool()), r.total = Flag(in.ConsumeBool());
  r.top_k = in.ConsumeIntegralInRange(0, 5) ? 0 : in.ConsumeIntegralInRange<int64_t>(0, vocab + 3);
  r.temperature = in.ConsumeIntegralInRange(0, 5) ? 1 : 0.7, r.top_p = in.ConsumeIntegralInRange(0, 5) ? 1 : 0.9;
  r.min_p = in.ConsumeIntegralInRange(0, 5) ? 0 : 0.1, r.seed = in.ConsumeIntegral<uint64_t>();
  inputs.requests.push_back(r);
}

// Adds the nodes of a first pass to a tree: one at any place, or beams of one depth. Returns their number; 0 if the
// context or the cache has no room for all passes.
int64_t add_tips(Input &in, Tree &tree, Slots &taken, const ModelConfig &c, int64_t passes, int64_t wanted) {
  const int64_t parent = in.ConsumeIntegralInRange<int64_t>(-1, int64_t(tree.nodes.size()) - 1);
  const int64_t depth = parent < 0 ? 0 : tree.nodes[size_t(parent)].depth + 1;
  if (depth + passes > c.context_length || std::count(taken.begin(), taken.end(), false) < wanted * passes) return 0;
  std::vector<int64_t> parents;
  for (size_t i = 0; i < tree.nodes.size(); i++)
    if (tree.nodes[i].depth + 1 == depth) parents.push_back(int64_t(i));
  if (parents.empty()) parents.push_back(-1);
  for (int64_t i = 0; i < wanted; i++) {
    const int64_t slot = free_slot(in, taken);
    taken[size_t(slot)] = true;
    const int64_t from = i ? parents[in.ConsumeIntegralInRange<size_t>(0, parents.size() - 1)] : parent;
    tree.nodes.push_back({in.ConsumeIntegralInRange<int64_t>(0, c.vocab_size - 1), from, depth, slot});
  }
  return wanted;
}

// A step after one pass, by the rules of specbeam_forward_ahead.
struct Step {
  bool goes_on;
  std::vector<std::pair<int64_t, int64_t>> next;  // row and token of each next node
  std::vector<float> scores;
};

Step step(const Asked &asked, const SelectionRequest &r, const int64_t *tokens, const float *scores,
          const float *normalizers, const std::vector<int64_t> &ends) {
  for (int64_t row = 0; row < r.rows; row++)
    if (!std::isfinite(normalizers[row])) return {false, {}, {}};
  const auto is_end = [&](int64_t token) { return std::find(ends.begin(), ends.end(), token) != ends.end(); };
  if (asked.scores.empty()) return {scores[0] != -INFINITY && !is_end(tokens[0]), {{0, tokens[0]}}, {}};
  std::vector<float> sums;
  for (int64_t i = 0; i < r.rows * r.top; i++) sums.push_back(scores[i] + asked.scores[size_t(i / r.top)]);
  Step out{true, {}, {}};
  for (float sum : sums)
    if (std::isnan(sum)) return {false, {}, {}};
  std::vector<int64_t> order;
  for (int64_t i = 0; i < r.rows * r.top; i++) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return sums[size_t(a)] > sums[size_t(b)]; });
  for (int64_t i = 0; i < r.rows; i++) {
    const auto here = size_t(order[size_t(i)]);
    if (is_end(tokens[here])) out.goes_on = false;
    out.next.push_back({int64_t(here) / r.top, tokens[here]});
    out.scores.push_back(sums[here]);
  }
  out.goes_on = out.goes_on && out.scores.front() > asked.ahead.best_above && out.scores.back() > asked.ahead.all_above;
  return out;
}

// Adds the nodes that a step has chosen. slots: of these nodes
void add_next(Tree &tree, int64_t first, const Step &step, const std::vector<int64_t> &slots) {
  for (size_t i = 0; i < step.next.size(); i++) {
    const auto [row, token] = step.next[i];
    tree.nodes.push_back({token, first + row, tree.nodes[size_t(first)].depth + 1, slots[i]});
  }
}

std::vector<int64_t> take(Input &in, Slots &taken, int64_t count) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count; i++) {
    out.push_back(i ? free_after(taken, out.back()) : free_slot(in, taken));
    taken[size_t(out.back())] = true;
  }
  return out;
}

void give_back(Slots &taken, const std::vector<int64_t> &slots) {
  for (const int64_t slot : slots) taken[size_t(slot)] = false;
}

// One call, and the same passes one by one in copies of the trees.
class Call {
 public:
  Call(Input &input, void *handle, const ModelConfig &config, std::vector<Tree> &all, Slots &slots)
      : in(input), model(handle), c(config), trees(all), taken(slots) {}

  void run() {
    passes = in.ConsumeIntegralInRange<int64_t>(1, MOST_PASSES);
    choice.logit_columns = in.ConsumeBool() ? c.vocab_size : in.ConsumeIntegralInRange<int64_t>(1, c.vocab_size);
    for (size_t t = 0; t < trees.size(); t++) ask(t);
    if (asked.empty()) return;
    for (int64_t i = in.ConsumeIntegralInRange(0, 7) ? 0 : 3; i > 0; i--)
      ends.push_back(in.ConsumeIntegralInRange<int64_t>(0, c.vocab_size - 1));
    fill_choice();
    if (in.rarely()) return spoiled();
    const Results results(passes, choice);
    results.receive(choice);
    const auto logits = exactly<float>(size_t(choice.logit_rows * choice.logit_columns));
    choice.logits = logits.get();
    const int32_t halt = in.rarely();
    int64_t done = -1;
    const auto of_ends = copied(ends);
    const char *wrong = specbeam_forward_ahead(model, of_segments.get(), count(), of_ahead.get(), logits.get(), &choice,
                                               passes, of_ends.get(), int64_t(ends.size()), &halt, &done);
    if (wrong) std::fprintf(stderr, "refused: %s\n", wrong);
    CHECK(!wrong);
    CHECK(done >= 1 && done <= passes && (!halt || done == 1));
    compare(results, logits.get(), done, halt);
  }

 private:
  Input &in;
  void *model;
  const ModelConfig &c;
  std::vector<Tree> &trees;
  Slots &taken;
  int64_t passes = 0;
  std::vector<Asked> asked;
  std::vector<int64_t> ends;
  Inputs inputs;
  Choice choice{};
  std::vector<Arrays> arrays;
  std::unique_ptr<Segment[]> of_segments;
  std::unique_ptr<Ahead[]> of_ahead;
  std::unique_ptr<SelectionRequest[]> of_requests;
  std::unique_ptr<Edit[]> of_edits;
  std::unique_ptr<int32_t[]> of_edit_rows, of_edit_tokens;
  std::unique_ptr<float[]> of_edit_values;
  std::unique_ptr<int64_t[]> of_given;
  std::unique_ptr<uint8_t[]> of_allowed;
  std::unique_ptr<uint32_t[]> of_streams, of_positions;

  int64_t count() const { return int64_t(asked.size()); }

  void ask(size_t t) {
    const int64_t vocab =
        in.ConsumeBool() ? choice.logit_columns : in.ConsumeIntegralInRange<int64_t>(1, choice.logit_columns);
    const bool beams = vocab > 1 && in.ConsumeBool();
    const int64_t widest = std::min(in.rarely() ? MOST_BEAMS : 8, vocab - 1);
    Asked a{};
    a.tree = t, a.first = int64_t(trees[t].nodes.size());
    a.nodes = add_tips(in, trees[t], taken, c, passes, beams ? in.ConsumeIntegralInRange<int64_t>(1, widest) : 1);
    const bool twins = a.nodes > 1 && !in.ConsumeIntegralInRange(0, 7);  // two beams with the same continuations
    if (twins) {
      Node &one = trees[t].nodes[size_t(a.first)];
      const Node &other = trees[t].nodes[size_t(a.first) + 1];
      one.token = other.token, one.parent = other.parent;
    }
    if (!a.nodes) return;
    const auto slots = take(in, taken, a.nodes * (passes - 1));
    a.slots = copied(slots), a.ahead.slots = a.slots.get();
    a.ahead.best_above = a.ahead.all_above = -INFINITY;
    if (beams) {
      const auto score = [&] { return in.rarely() ? -INFINITY : -float(in.ConsumeIntegral<uint8_t>()) / 7; };
      for (int64_t i = 0; i < a.nodes; i++) a.scores.push_back(in.rarely() ? NAN : score());
      if (twins) a.scores[0] = a.scores[1];
      a.of_beams = copied(a.scores), a.ahead.scores = a.of_beams.get();
      if (!in.ConsumeIntegralInRange(0, 3)) a.ahead.best_above = in.rarely() ? NAN : score();
      if (!in.ConsumeIntegralInRange(0, 3)) a.ahead.all_above = score();
    }
    const int64_t top = beams ? in.ConsumeIntegralInRange(a.nodes + 1, std::min(vocab, 2 * a.nodes + 1)) : 1;
    add_request(in, inputs, choice, a.nodes, vocab, top, beams);
    asked.push_back(std::move(a));
  }

  void fill_choice() {
    of_segments = exactly<Segment>(asked.size()), of_ahead = exactly<Ahead>(asked.size());
    for (size_t i = 0; i < asked.size(); i++) {
      const Asked &a = asked[i];
      auto [segment, kept] =
          segment_of(trees[a.tree], a.first, in.ConsumeIntegralInRange<int64_t>(0, LONGEST_SEQUENCE));
      of_segments[i] = segment, of_ahead[i] = a.ahead, arrays.push_back(std::move(kept));
    }
    of_requests = copied(inputs.requests), of_edits = copied(inputs.edits), of_edit_rows = copied(inputs.edit_rows);
    of_edit_tokens = copied(inputs.edit_tokens), of_edit_values = copied(inputs.edit_values);
    of_given = copied(inputs.given), of_allowed = copied(inputs.allowed);
    of_streams = copied(inputs.streams), of_positions = copied(inputs.positions);
    choice.requests = of_requests.get(), choice.request_count = int64_t(inputs.requests.size());
    choice.edits = of_edits.get(), choice.edit_count = int64_t(inputs.edits.size());
    choice.edit_rows = of_edit_rows.get(), choice.edit_tokens = of_edit_tokens.get();
    choice.entry_count = int64_t(inputs.edit_rows.size());
    choice.edit_values = of_edit_values.get(), choice.value_count = int64_t(inputs.edit_values.size());
    choice.given = of_given.get(), choice.given_count = int64_t(inputs.given.size());
    choice.allowed = of_allowed.get(), choice.allowed_bytes = int64_t(inputs.allowed.size());
    choice.streams = of_streams.get(), choice.positions = of_positions.get();
    choice.noise_count = int64_t(inputs.streams.size());
  }

  // Takes the passes one by one, over copies of the trees in slots of their own.
  void compare(const Results &results, const float *logits, int64_t done, bool halted) {
    std::vector<Tree> copies;
    std::vector<int64_t> lent;
    Choice single = choice;
    const Results alone(1, choice);
    alone.receive(single);
    const auto single_logits = exactly<float>(size_t(choice.logit_rows * choice.logit_columns));
    single.logits = single_logits.get();
    std::vector<uint32_t> drawn(inputs.positions);
    for (const Asked &a : asked) copies.push_back(copy_before(a, lent));
    std::vector<Step> steps(asked.size());
    for (int64_t pass = 0; pass < done; pass++) {
      for (size_t i = 0; i < asked.size(); i++) grow(i, copies[i], pass, steps[i], lent);
      forward_alone(copies, single_logits.get());
      single.positions = drawn.data();
      check(!specbeam_choose(model, &single));
      alone.check_equal(results, pass);
      bool goes_on = !halted;
      for (size_t i = 0; i < asked.size(); i++) {
        const SelectionRequest &r = inputs.requests[i];
        steps[i] = step(asked[i], r, alone.tokens.get() + r.top_place, alone.scores.get() + r.top_place,
                        alone.normalizers.get() + r.row_place, ends);
        goes_on = goes_on && steps[i].goes_on;
        asked[i].scores = steps[i].scores;
      }
      CHECK(goes_on == (pass + 1 < done) || done == passes);
      for (uint32_t &position : drawn) position++;
    }
    CHECK(same(single_logits.get(), logits, choice.logit_rows * choice.logit_columns));
    for (const Asked &a : asked)
      for (int64_t i = a.nodes * (done - 1); i < a.nodes * (passes - 1); i++) taken[size_t(a.slots[i])] = false;
    give_back(taken, lent);
  }

  // A copy of the tree before its new nodes, evaluated in other slots.
  Tree copy_before(const Asked &a, std::vector<int64_t> &lent) {
    Tree copy = trees[a.tree];
    for (Node &node : copy.nodes) node.slot = lend(lent);
    Tree before = copy;
    before.nodes.resize(size_t(a.first));
    if (a.first) {
      const auto [s, kept] = segment_of(before, 0, 0);
      check(!specbeam_forward(model, &s, 1, nullptr, 0, 1, nullptr));
    }
    return copy;
  }

  int64_t lend(std::vector<int64_t> &lent) {
    int64_t slot = free_after(taken, -1);
    if (slot < 0) {
      slot = int64_t(taken.size());
      taken.push_back(false);
      check(!specbeam_cache_reserve(model, int64_t(taken.size()), nullptr));
    }
    taken[size_t(slot)] = true, lent.push_back(slot);
    return slot;
  }

  // Adds the nodes of a pass to a tree and to its copy.
  void grow(size_t i, Tree &copy, int64_t pass, const Step &last, std::vector<int64_t> &lent) {
    if (!pass) return;
    Asked &a = asked[i];
    const auto first = int64_t(copy.nodes.size()) - a.nodes;
    std::vector<int64_t> own(a.slots.get() + (pass - 1) * a.nodes, a.slots.get() + pass * a.nodes), others;
    for (int64_t n = 0; n < a.nodes; n++) others.push_back(lend(lent));
    add_next(trees[a.tree], first, last, own);
    add_next(copy, first, last, others);
  }

  void forward_alone(const std::vector<Tree> &copies, float *logits) {
    std::vector<Segment> segments;
    std::vector<Arrays> kept;
    std::vector<int64_t> rows;
    for (size_t i = 0; i < asked.size(); i++) {
      auto [s, of_segment] = segment_of(copies[i], int64_t(copies[i].nodes.size()) - asked[i].nodes, LONGEST_SEQUENCE);
      segments.push_back(s), kept.push_back(std::move(of_segment));
    }
    for (int64_t row = 0; row < choice.logit_rows; row++) rows.push_back(row);
    check(!specbeam_forward(model, segments.data(), count(), rows.data(), int64_t(rows.size()), choice.logit_columns,
                            logits));
  }

  // The same call with one wrong number. The trees are evicted: they may differ from the cache.
  void spoiled() {
    const Results results(passes, choice);
    results.receive(choice);
    const auto logits = exactly<float>(size_t(choice.logit_rows * choice.logit_columns));
    choice.logits = logits.get();
    const auto of_ends = copied(ends);
    const int32_t halt = 0, *halts = &halt;
    int64_t done = -1, number = count(), end_count = int64_t(ends.size());
    float *to = logits.get();
    const auto which = in.ConsumeIntegralInRange<size_t>(0, asked.size() - 1);
    const Asked &one = asked[which];
    const int64_t to_come = one.nodes * (passes - 1);
    for (const Asked &each : asked) give_back(taken, {each.slots.get(), each.slots.get() + each.nodes * (passes - 1)});
    Segment &s = of_segments[which];
    const Arrays &a = arrays[which];
    SelectionRequest &r = of_requests[which];
    const auto n = in.ConsumeIntegralInRange<int64_t>(0, s.nodes - 1);
    const auto below = [&](int64_t limit) { return in.ConsumeIntegralInRange<int64_t>(INT64_MIN, limit); };
    switch (in.ConsumeIntegralInRange(0, 17)) {
      case 0: a.tokens[n] = in.wild(); break;
      case 1: a.positions[n] = in.number(0, 20); break;
      case 2: a.slots[n] = in.number(0, 100); break;
      case 3:
        if (s.prefix_length) a.prefix[in.ConsumeIntegralInRange<int64_t>(0, s.prefix_length - 1)] = in.number(-1, 100);
        break;
      case 4:
        if (s.suffix_columns)
          a.suffixes[in.ConsumeIntegralInRange<int64_t>(0, s.nodes * s.suffix_columns - 1)] = in.number(-1, 100);
        break;
      case 5: (in.ConsumeBool() ? s.prefix_length : s.suffix_columns) = in.wild(); break;
      case 6: s.nodes = below(0); break;
      case 7: (in.ConsumeBool() ? s.tokens : in.ConsumeBool() ? s.positions : s.slots) = nullptr; break;
      case 8: (in.ConsumeBool() ? s.prefix : s.suffixes) = nullptr; break;
      case 9:
        if (to_come) one.slots[in.ConsumeIntegralInRange<int64_t>(0, to_come - 1)] = in.number(-1, 100);
        break;
      case 10: of_ahead[which].slots = nullptr; break;
      case 11: of_ahead[which].scores = nullptr; break;
      case 12: passes = below(passes); break;
      case 13: number = below(number - 1); break;
      case 14: (in.ConsumeBool() ? r.top : in.ConsumeBool() ? r.rows : r.first_row) = in.wild(); break;
      case 15: (in.ConsumeBool() ? choice.logit_rows : choice.request_count) = below(0); break;
      case 16: end_count = below(end_count); break;
      default:
        if (in.ConsumeBool()) to = nullptr;
        else halts = nullptr;
    }
    const char *wrong = specbeam_forward_ahead(model, of_segments.get(), number, of_ahead.get(), to, &choice, passes,
                                               of_ends.get(), end_count, halts, &done);
    check(!wrong || *wrong);
    for (Tree &tree : trees) evict(in, model, tree, taken);
  }
};

// Evaluates new nodes of some trees in one pass.
void evaluate(Input &in, void *model, const ModelConfig &c, std::vector<Tree> &trees, Slots &taken) {
  std::vector<Segment> segments;
  std::vector<Arrays> arrays;
  for (Tree &tree : trees) {
    if (std::count(taken.begin(), taken.end(), false) < 20) evict(in, model, tree, taken);
    auto [segment, of_segment] = grow(in, tree, taken, c, in.ConsumeBool());
    if (segment.nodes) segments.push_back(segment), arrays.push_back(std::move(of_segment));
  }
  if (!segments.empty())
    check(!specbeam_forward(model, segments.data(), int64_t(segments.size()), nullptr, 0, 1, nullptr));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Input in(data, size);
  const ModelConfig c = config_of(in);
  void *model = nullptr;
  const int32_t threads = in.ConsumeIntegralInRange(0, 4) ? 1 : 2;
  if (!use(in.isa()) || specbeam_model_new(&c, nullptr, threads, &model)) return 0;
  Parameters parameters{{}, in.ConsumeIntegral<uint64_t>()};
  const Layers layers = fill(in, parameters, model, c);
  if (!specbeam_model_incomplete(model) && layers.reach() >= 0) {
    std::vector<Tree> trees(in.ConsumeIntegralInRange<size_t>(1, 3));
    Slots taken(size_t(c.context_length > 64 ? MOST_SLOTS : in.ConsumeIntegralInRange(8, 192)));
    check(!specbeam_cache_reserve(model, int64_t(taken.size()), nullptr));
    while (in.remaining_bytes() > 0) {
      evaluate(in, model, c, trees, taken);
      Call(in, model, c, trees, taken).run();
    }
  }
  specbeam_model_delete(model);
  return 0;
}
