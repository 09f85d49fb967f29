// Fuzzes requests about logits. Any number of threads and any instruction set must give the bits of one thread with
// portable instructions, and refuse the same choices.

#include <cmath>

#include "boundary.h"

using namespace specbeam;

namespace {

// Arrays of a choice. Each has exactly its size.
template <class T> struct Array {
  std::unique_ptr<T[]> items;
  int64_t size = 0;

  void make(int64_t n) { items = exactly<T>(size_t(n)), size = n; }
  void take(const std::vector<T> &from) {
    make(int64_t(from.size()));
    std::copy(from.begin(), from.end(), items.get());
  }
};

struct Arrays {
  Array<float> logits, edit_values, log_probs, scores, given_log_probs, normalizers, totals;
  Array<SelectionRequest> requests;
  Array<Edit> edits;
  Array<int32_t> edit_rows, edit_tokens;
  Array<int64_t> one_of, given, tokens;
  Array<uint8_t> allowed;
  Array<uint32_t> streams, positions;
  Array<double> noise;

  void make_room(int64_t top, int64_t rows) {
    tokens.make(top), log_probs.make(top), scores.make(top), noise.make(top);
    given_log_probs.make(given.size), normalizers.make(rows), totals.make(rows);
  }
};

float score_of(Input &in) {
  switch (in.ConsumeIntegralInRange(0, 20)) {
    case 0: return -INFINITY;
    case 1: return in.rarely() ? NAN : in.rarely() ? INFINITY : 3e38f;
    case 2: return in.rarely() ? -3e38f : 1e-40f;
    default: return float(in.ConsumeIntegral<int8_t>()) / 8;
  }
}

Choice choice_of(Input &in, Arrays &a) {
  Choice c{};
  c.logit_rows = in.ConsumeIntegralInRange(1, 4);
  c.logit_columns = in.PickValueInArray<int64_t>({1, 7, 16, 40, 530, 4100});
  a.logits.make(c.logit_rows * c.logit_columns);
  uint64_t random = in.ConsumeIntegral<uint64_t>();
  for (int64_t i = 0; i < a.logits.size; i++) {
    random = random * 6364136223846793005u + 1;
    a.logits.items[i] = float(int64_t(random >> 40) % 1000) / 50;
  }
  for (int i = 0; i < 20; i++) a.logits.items[in.ConsumeIntegralInRange<int64_t>(0, a.logits.size - 1)] = score_of(in);
  std::vector<SelectionRequest> requests;
  std::vector<Edit> edits;
  std::vector<int32_t> edit_rows, edit_tokens;
  std::vector<float> edit_values;
  std::vector<int64_t> one_of, given;
  std::vector<uint8_t> allowed;
  std::vector<uint32_t> streams, positions;
  for (int64_t i = in.ConsumeIntegralInRange(0, 4); i > 0; i--) {
    SelectionRequest r{};
    r.rows = in.number(0, c.logit_rows);
    r.first_row = in.number(0, c.logit_rows - std::min(std::max<int64_t>(r.rows, 0), c.logit_rows));
    const int64_t rows = std::min(std::max<int64_t>(r.rows, 0), c.logit_rows);
    r.vocab = in.ConsumeBool() ? c.logit_columns : in.number(1, c.logit_columns);
    const int64_t vocab = std::min(std::max<int64_t>(r.vocab, 1), c.logit_columns);
    r.top = in.number(0, in.ConsumeBool() ? vocab : std::min<int64_t>(vocab, 3));
    r.top_place = c.top_count, c.top_count += rows * std::min(std::max<int64_t>(r.top, 0), vocab);
    r.row_place = in.rarely() ? in.wild() : c.row_count, c.row_count += rows;
    r.given = in.number(0, 2), r.given_place = int64_t(given.size());
    for (int64_t j = 0; j < rows * 2; j++) given.push_back(in.number(0, vocab - 1));
    r.edits_begin = int64_t(edits.size());
    for (int64_t j = in.ConsumeIntegralInRange(0, 3); rows && j > 0; j--) {
      Edit e{EditKind(in.number(ADD, BAN)), int64_t(edit_rows.size()), 0, int64_t(edit_values.size())};
      for (int64_t k = in.ConsumeIntegralInRange(0, 5); k > 0; k--) {
        edit_rows.push_back(int32_t(in.number(0, rows - 1))), edit_tokens.push_back(int32_t(in.number(0, vocab + 3)));
        edit_values.push_back(score_of(in));
      }
      e.end = in.rarely() ? in.wild() : int64_t(edit_rows.size());
      edits.push_back(e);
    }
    r.edits_end = in.rarely() ? in.wild() : int64_t(edits.size());
    r.one_of_begin = int64_t(one_of.size());
    for (int64_t j = in.ConsumeIntegralInRange(0, 3); j > 0; j--) one_of.push_back(in.number(0, vocab + 3));
    r.one_of_end = in.rarely() ? in.wild() : int64_t(one_of.size());
    const auto first = in.ConsumeIntegralInRange<int64_t>(0, vocab + 3);
    r.together_begin = in.rarely() ? in.wild() : first;
    r.together_end = in.rarely() ? in.wild() : first + in.ConsumeIntegralInRange<int64_t>(0, vocab);
    r.allowed_place = in.ConsumeBool() ? int64_t(allowed.size()) : -1;
    for (int64_t j = 0; r.allowed_place >= 0 && j < rows * ((vocab + 7) / 8); j++)
      allowed.push_back(in.ConsumeBool() ? 255 : in.ConsumeIntegral<uint8_t>());
    r.noise_place = in.ConsumeBool() ? int64_t(streams.size()) : -1;
    for (int64_t j = 0; r.noise_place >= 0 && j < rows; j++)
      streams.push_back(in.ConsumeIntegral<uint32_t>()), positions.push_back(in.ConsumeIntegral<uint32_t>());
    r.normalize = Flag(in.number(NO, YES)), r.total = Flag(in.number(NO, YES));
    r.top_k = in.ConsumeBool() ? in.number(0, vocab + 3) : 0;
    r.temperature = in.ConsumeBool() ? 1 : in.rarely() ? in.ConsumeFloatingPoint<double>() : 0.7;
    r.top_p = in.ConsumeBool() ? 1 : in.rarely() ? in.ConsumeFloatingPoint<double>() : in.ConsumeProbability<double>();
    r.min_p = in.ConsumeBool() ? 0 : in.rarely() ? in.ConsumeFloatingPoint<double>() : in.ConsumeProbability<double>();
    r.seed = in.ConsumeIntegral<uint64_t>();
    requests.push_back(r);
  }
  a.requests.take(requests), a.edits.take(edits), a.edit_rows.take(edit_rows), a.edit_tokens.take(edit_tokens);
  a.edit_values.take(edit_values), a.one_of.take(one_of), a.given.take(given), a.allowed.take(allowed);
  a.streams.take(streams), a.positions.take(positions);
  a.make_room(c.top_count, c.row_count);
  c.request_count = a.requests.size, c.edit_count = a.edits.size, c.entry_count = a.edit_rows.size;
  c.value_count = a.edit_values.size, c.one_of_count = a.one_of.size, c.given_count = a.given.size;
  c.allowed_bytes = a.allowed.size, c.noise_count = a.streams.size;
  c.logits = a.logits.items.get(), c.requests = a.requests.items.get(), c.edits = a.edits.items.get();
  c.edit_rows = a.edit_rows.items.get(), c.edit_tokens = a.edit_tokens.items.get();
  c.edit_values = a.edit_values.items.get(), c.one_of = a.one_of.items.get(), c.given = a.given.items.get();
  c.allowed = a.allowed.items.get(), c.streams = a.streams.items.get(), c.positions = a.positions.items.get();
  return c;
}

void give_room(Choice &c, Arrays &a) {
  c.tokens = a.tokens.items.get(), c.log_probs = a.log_probs.items.get(), c.scores = a.scores.items.get();
  c.noise = a.noise.items.get(), c.given_log_probs = a.given_log_probs.items.get();
  c.normalizers = a.normalizers.items.get(), c.totals = a.totals.items.get();
}

void *model_of(int threads, const char *isa) {
  check(use(isa));
  ModelConfig config{};
  config.vocab_size = config.hidden_size = config.num_layers = config.context_length = 1;
  config.embedding_scale = 1;
  void *model = nullptr;
  check(!specbeam_model_new(&config, nullptr, threads, &model));
  return model;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static void *const simple = model_of(1, "portable"), *const models[] = {model_of(1, ""), model_of(3, "")};
  Input in(data, size);
  Arrays arrays, others;
  Choice choice = choice_of(in, arrays);
  give_room(choice, arrays);
  void *model = in.PickValueInArray(models);
  const auto before = std::vector<float>(arrays.logits.items.get(), arrays.logits.items.get() + arrays.logits.size);
  check(use(""));
  const char *wrong = specbeam_choose(model, &choice);
  check(!wrong || *wrong);
  CHECK(same(before.data(), arrays.logits.items.get(), arrays.logits.size));
  Choice again = choice;
  others.given.make(arrays.given.size), others.make_room(choice.top_count, choice.row_count);
  give_room(again, others);
  check(use("portable"));
  const char *other_wrong = specbeam_choose(simple, &again);
  CHECK(!wrong == !other_wrong);
  if (wrong) return 0;
  for (int64_t i = 0; i < choice.top_count; i++) CHECK(choice.tokens[i] == again.tokens[i]);
  CHECK(same(choice.log_probs, again.log_probs, choice.top_count));
  CHECK(same(choice.scores, again.scores, choice.top_count));
  CHECK(same(choice.normalizers, again.normalizers, choice.row_count));
  CHECK(same(choice.totals, again.totals, choice.row_count));
  CHECK(same(choice.given_log_probs, again.given_log_probs, choice.given_count));
  return 0;
}
