// Sequences that go on by themselves: each of their passes is over the tokens that the one before has chosen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "model.h"

namespace specbeam {

// A sequence, or the beams of one search.
class Continuation {
 public:
  Continuation(const Segment &first, const SelectionRequest &about, const Ahead &how, int64_t passes)
      : segment(first), request(about), ahead(how), chosen(first.nodes) {
    const int64_t n = segment.nodes, columns = segment.suffix_columns;
    tokens.assign(first.tokens, first.tokens + n), positions.assign(first.positions, first.positions + n);
    segment.tokens = tokens.data(), segment.positions = positions.data();
    if (ahead.scores) scores.assign(ahead.scores, ahead.scores + n);
    if (columns) {
      suffixes.resize(n * (columns + passes - 1)), parents = suffixes;
      segment.suffix_columns = columns + passes - 1, segment.suffixes = suffixes.data();
      for (int64_t i = 0; i < n; i++)
        std::copy_n(first.suffixes + i * columns, columns, suffixes.begin() + i * segment.suffix_columns);
    } else {
      prefix.assign(first.prefix, first.prefix + first.prefix_length);
      if (passes > 1) prefix.insert(prefix.end(), ahead.slots, ahead.slots + passes - 1);
      segment.prefix = prefix.data(), segment.prefix_length = int64_t(prefix.size());
    }
  }

  const Segment &nodes() const { return segment; }

  // Chooses the next nodes by the selection. Returns whether they may be evaluated without a look at them.
  template <class IsEnd> bool choose(const Choice &c, const IsEnd &is_end) {
    const float *found = c.scores + request.top_place;
    selected = c.tokens + request.top_place;
    for (int64_t i = 0; i < segment.nodes; i++)
      if (!std::isfinite(c.normalizers[request.row_place + i]))
        return false;  // a logit is NaN or +inf, or all are -inf
    if (!ahead.scores) {
      chosen[0] = 0;
      return found[0] != -INFINITY && !is_end(selected[0]);
    }
    const int64_t n = segment.nodes, all = n * request.top;
    sums.resize(all), order.resize(all);
    for (int64_t i = 0; i < all; i++) {
      order[i] = i, sums[i] = found[i] + scores[i / request.top];
      if (std::isnan(sums[i])) return false;
    }
    std::partial_sort(order.begin(), order.begin() + n, order.end(),
                      [this](int64_t a, int64_t b) { return sums[a] > sums[b] || (sums[a] == sums[b] && a < b); });
    for (int64_t i = 0; i < n; i++)
      if (is_end(selected[order[i]])) return false;
    for (int64_t i = 0; i < n; i++) chosen[i] = order[i], scores[i] = sums[order[i]];
    return scores[0] > ahead.best_above && scores[n - 1] > ahead.all_above;
  }

  // Goes on to the nodes that were chosen.
  void grow() {
    const int64_t n = segment.nodes, columns = segment.suffix_columns;
    if (columns) {
      parents.swap(suffixes);
      segment.suffixes = suffixes.data();
    }
    for (int64_t i = 0; i < n; i++) {
      tokens[i] = selected[chosen[i]], positions[i]++;
      if (!columns) continue;
      const int64_t at = positions[i] - segment.prefix_length;
      std::copy_n(parents.begin() + chosen[i] / request.top * columns, at, suffixes.begin() + i * columns);
      suffixes[i * columns + at] = ahead.slots[i];
    }
    segment.slots = ahead.slots, ahead.slots += n;
  }

 private:
  Segment segment;
  const SelectionRequest &request;
  Ahead ahead;                                               // its slots: of the nodes after the next pass
  std::vector<int64_t> tokens, positions, prefix, suffixes;  // of the segment
  std::vector<int64_t> parents;                              // the suffixes of the pass before
  std::vector<float> scores, sums;                           // of the beams, and of all their continuations
  std::vector<int64_t> order, chosen;                        // of the continuations
  const int64_t *selected = nullptr;
};

}  // namespace specbeam
