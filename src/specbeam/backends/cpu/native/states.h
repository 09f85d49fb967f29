// The states of linear attention (linear_attention.h) at the borders of sequences. One has the numbers of all parts. It
// is found by the slot of the last node before its border. A state is made of the rows in slots, so one that is not
// here is made again, with the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.h"

namespace specbeam {

constexpr int64_t NO_SLOT = -1;

struct State {
  int64_t slot = NO_SLOT;
  int64_t used = 0;  // the last pass that needed it
  bool complete = false;
  Buffer<float> numbers;
};

class States {
 public:
  // Returns where the numbers of a part begin in a state.
  int64_t add_part(int64_t count) { return size += count, size - count; }
  explicit operator bool() const { return size > 0; }

  // What a pass has begun and not finished is no state.
  void begin_pass() {
    pass++;
    for (auto &one : all)
      if (!one->complete) one->slot = NO_SLOT;
  }
  void finish_pass() {
    for (auto &one : all) one->complete = true;
  }

  State *find(int64_t slot) {
    for (auto &one : all)
      if (one->slot == slot) return one->used = pass, one.get();
    return nullptr;
  }

  // A state to be filled. It takes the place of an empty one, or of the one that was not needed for the longest time.
  State *make(int64_t slot) {
    State *place = nullptr;
    for (auto &one : all)
      if (one->used < pass && (!place || age(*one) > age(*place))) place = one.get();
    if (!place || (place->slot != NO_SLOT && all.size() < KEPT)) {
      auto made = std::make_unique<State>();
      made->numbers.resize(size);
      all.push_back(std::move(made));
      place = all.back().get();
    }
    place->slot = slot, place->used = pass, place->complete = false;
    return place;
  }

  // These slots get other nodes.
  void forget(int64_t first, int64_t count) {
    for (auto &one : all)
      if (one->slot >= first && one->slot < first + count) one->slot = NO_SLOT;
  }

 private:
  static constexpr size_t KEPT = 32;  // states, where a pass needs no more
  int64_t age(const State &one) const { return one.slot == NO_SLOT ? INT64_MAX : pass - one.used; }

  int64_t size = 0, pass = 0;  // size: numbers of a state
  std::vector<std::unique_ptr<State>> all;
};

}  // namespace specbeam
