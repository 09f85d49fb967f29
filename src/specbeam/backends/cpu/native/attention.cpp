// The attention kernels of one instruction set. Lanes are positions while scores are computed, and features while
// values are added. So each score and each feature has a lane of its own, and adds in one order for any number of
// nodes.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "buffer.h"
#include "simd.h"

namespace specbeam {

namespace {

// The sums that stay in registers: rows of a tile times vectors of positions or features.
#if defined(__AVX512F__)
constexpr int ROWS = 6, VECTORS = 4;
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int ROWS = 3, VECTORS = 2;
#else
constexpr int ROWS = 1, VECTORS = 2;
#endif
constexpr int64_t RUNS_AT_ONCE = 4, VALUES_AT_ONCE = 128;  // read at a time, to stay in the first-level cache
// Where at least this many keys lie side by side, their whole panel is multiplied in place. Other keys are gathered.
constexpr int64_t MIN_RUN_LENGTH = 4;
constexpr int64_t STEPS_PER_FETCH = 8, SLOTS_PER_FETCH = 6;  // a width has a multiple of 8 steps
constexpr int64_t LINE_BYTES = 64;
constexpr int64_t QUERIES_AHEAD = 8;  // that are prefetched

// The largest shares, so that a sum of SPLIT products with values fits into 32 bits. The values of a cache of
// integers are at most LARGEST_VALUE.
constexpr float LARGEST_SHARE = 32767, LARGEST_VALUE = 127;
static_assert(SPLIT * int64_t(LARGEST_SHARE) * int64_t(LARGEST_VALUE) <= INT32_MAX);

// Adds to each lane the product of its numbers with `numbers`: one float32, or two integers of 16 bits.
inline F32 multiply_lanes(F32 sum, U32 lanes, uint32_t numbers) {
  return multiply_add((F32)lanes, (F32)all(int32_t(numbers)), sum);
}
inline I32 multiply_lanes(I32 sum, U32 lanes, uint32_t numbers) { return dot2(sum, lanes, numbers); }

inline void store_some_whole(int16_t *p, I32 x) { store_shorts(p, x); }
inline void store_some_whole(int8_t *p, I32 x) { store_bytes(p, x); }

// Rounds to integers, at most `largest`. Returns what they are to be multiplied by.
template <class Whole> inline float store_whole(Whole *to, const float *x, int64_t size, int64_t width, float largest) {
  const I32 sign = all(int32_t(0x7fffffff));
  F32 magnitudes{};
  for (int64_t i = 0; i < size; i += LANES)
    magnitudes = larger((F32)((I32)load_some(x + i, size - i) & sign), magnitudes);
  const float most = max(magnitudes), inverse = most > 0 ? largest / most : 0;
  for (int64_t i = 0; i < width; i += LANES)
    store_some_whole(to + i, rounded(load_some(x + i, size - i) * inverse, largest));
  return most / largest;
}

// The largest numbers of keys and queries, so that a sum of `width` products fits into 32 bits. Keys and queries in
// this form are at least as precise as in float16, and their products are exact, in any order.
inline float largest_of_key(int64_t width) { return std::floor(std::sqrt(float(INT32_MAX) / float(width + 1))); }

inline I32 load_values(const int8_t *p) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(SPECBEAM_EIGHT_LANES)
  const auto half = [](const int8_t *p) {
    return (I32::Half)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
  };
  return {half(p), half(p + 8)};
#else
  typedef int8_t Bytes __attribute__((vector_size(16)));
  return __builtin_convertvector(load<Bytes>(p), I32);
#endif
}

// The pairs of two rows of V * 16 values.
template <int V> inline void zip(const int8_t *a, const int8_t *b, U32 *out) {
  int v = 0;
#if defined(__AVX512BW__)
#pragma GCC unroll 2
  for (; v + 2 <= V; v += 2) {
    const I32 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto wide = [v](const int8_t *p) {
      return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p + v * LANES)));
    };
    const __m512i x = wide(a), y = wide(b), first = (__m512i)(lanes | (lanes + 32) << 16);
    out[v] = (U32)_mm512_permutex2var_epi16(x, first, y);
    out[v + 1] = (U32)_mm512_permutex2var_epi16(x, _mm512_add_epi16(first, _mm512_set1_epi16(16)), y);
  }
#endif
#pragma GCC unroll 4
  for (; v < V; v++) out[v] = ((U32)load_values(a + v * LANES) & 0xffff) | (U32)load_values(b + v * LANES) << 16;
}

// Calls f(a constant number of rows, the first row) until all rows have had their turn.
template <int M = ROWS, class F> inline void in_groups(int64_t first, int64_t last, const F &f) {
  for (; last - first >= M; first += M) f(std::integral_constant<int, M>(), first);
  if constexpr (M > 1) in_groups<(M + 1) / 2>(first, last, f);
}

// The result of a row for the splits so far: the values times their shares, the largest score, and the sum of the
// shares. A share is e^(score - largest score). The sum is 0 if the row saw nothing yet. They lie in sums_size(width)
// floats, the values first: so each of their vectors is a cache line.
struct Sums {
  float *values, *most, *total;
  Sums(float *p, int64_t width) : values(p), most(p + width), total(p + width + 1) {}

  // Adds the next split.
  void add(const Sums &next, int64_t width) {
    if (*next.total == 0) return;
    if (*total == 0) {
      std::copy_n(next.values, width + 2, values);
      return;
    }
    const float larger = *most > *next.most ? *most : *next.most;
    const F32 old_share = exp(all(*most - larger)), new_share = exp(all(*next.most - larger));
    *total = *total * old_share[0] + *next.total * new_share[0];
    for (int64_t i = 0; i < width; i += LANES)
      store(values + i, multiply_add(load<F32>(next.values + i), new_share, load<F32>(values + i) * old_share));
    *most = larger;
  }

  // sink: null for none
  void finish(float *out, int64_t head_dim, const float *sink) const {
    float share = 1.0f / *total;
    if (sink) {
      const float larger = *most > *sink ? *most : *sink, own = exp(all(*most - larger))[0];
      share = own / (*total * own + exp(all(*sink - larger))[0]);
    }
    for (int64_t i = 0; i < head_dim; i += LANES) store_some(out + i, load<F32>(values + i) * share, head_dim - i);
  }
};

// One item. Rows are the query heads of the tile's nodes: [node, head of the group]. Positions count from the start of
// the split.
// WHOLE: keys, queries, values and shares are integers, and a lane of 32 bits holds N = 2 of them. Else they are
// float32.
template <bool WHOLE> class Work {
  static_assert(LANES == PANEL_SLOTS);
  static constexpr int N = WHOLE ? 2 : 1;
  using Value = std::conditional_t<WHOLE, int8_t, float>;
  using Share = std::conditional_t<WHOLE, int16_t, float>;
  using Dot = std::conditional_t<WHOLE, I32, F32>;

  const AttentionJob &a;
  const AttentionItem &item;
  const Tile &tile;
  const Segment &segment;
  const int64_t group, rows, width, steps;  // steps: lanes of 32 bits for a query or a key
  int64_t start = 0;                        // the first position of the split
  const int64_t lanes;                      // of 32 bits for a key and the scales of the slot
  uint32_t *queries, *values;               // [steps, rows], [VALUES_AT_ONCE / N, width]
  uint32_t *gathered;                       // [RUNS_AT_ONCE, lanes, LANES]
  float *scores, *sums, *split_sums;        // [rows, SPLIT], [rows, sums_size(width)] twice
  float *query_scales, *share_scales;       // [rows]
  float *value_scales;                      // [1 + nodes of the tile, SPLIT]: of the slots that all share, and of each
  Share *shares;                            // [rows, SPLIT]
  int64_t *begin, *end;                     // of the positions that each node sees in the split
  int64_t *slots;                           // [SPLIT]
  const uint8_t *base;                      // the first block
  const uint8_t *next_base = nullptr;       // the first block of the next split
  const Segment *next_segment = nullptr;
  const int64_t *next_slots = nullptr;  // its slots
  int64_t next_count = 0, fetched = 0;  // their number, and how many of them are prefetched

 public:
  Work(const AttentionJob &all, const AttentionItem &one)
      : a(all),
        item(one),
        tile(a.tiles[item.tile]),
        segment(*tile.segment),
        group(a.heads.group()),
        rows(tile.count * group),
        width(a.keys.width),
        steps(width / N),
        lanes(a.keys.lanes) {
    static thread_local Buffer<uint32_t> numbers_of_32_bits;
    static thread_local Buffer<float> numbers;
    static thread_local Buffer<Share> of_shares;
    static thread_local Buffer<int64_t> whole_numbers;
    gathered = room(numbers_of_32_bits, RUNS_AT_ONCE * lanes * LANES + VALUES_AT_ONCE / N * width + rows * steps);
    values = gathered + RUNS_AT_ONCE * lanes * LANES, queries = values + VALUES_AT_ONCE / N * width;
    scores = room(numbers, rows * (SPLIT + 2 * sums_size(width) + 2) + (1 + tile.count) * SPLIT);
    value_scales = scores + rows * SPLIT, sums = value_scales + (1 + tile.count) * SPLIT;
    split_sums = sums + rows * sums_size(width);
    query_scales = split_sums + rows * sums_size(width), share_scales = query_scales + rows;
    shares = room(of_shares, rows * SPLIT);
    begin = room(whole_numbers, 2 * tile.count + SPLIT), end = begin + tile.count;
    slots = end + tile.count;
    base = a.keys.first_block(item.kv_head);
  }

  void run() {
    const bool whole = tile.parts < 0;
    load_queries();
    for (int64_t split = item.split; split < item.end; split++) {
      float *into = split == item.split ? sums : split_sums;
      if (!whole)
        into = a.parts + tile.parts +
               (item.kv_head * (tile.end - tile.split) + split - tile.split) * rows * sums_size(width);
      one_split(split, into);
      if (into != split_sums) continue;
      for (int64_t row = 0; row < rows; row++)
        Sums(sums + row * sums_size(width), width).add(Sums(into + row * sums_size(width), width), width);
    }
    if (!whole) return;
    const int64_t head_dim = a.heads.head_dim;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t head = item.kv_head * group + row % group;
      float *to = a.out + ((tile.node + row / group) * a.heads.num_heads + head) * head_dim;
      Sums(sums + row * sums_size(width), width).finish(to, head_dim, a.heads.sink(head));
    }
  }

 private:
  // The row of a slot. Where no node sees an ancestor, it may lack a slot or a row. Then any row will do.
  int64_t row_in(const Segment &s, int64_t slot) const {
    const int64_t row = slot < 0 ? 0 : row_of(s, a.region, slot);
    return row < 0 || row >= a.keys.capacity ? 0 : row;
  }

  // Finds the rows of a node's ancestors from position `from` up to `to`.
  void find(int64_t node, int64_t from, int64_t to) {
    while (from < to) {
      const bool on_prefix = start + from < segment.prefix_length;
      const int64_t stop = on_prefix ? std::min(to, segment.prefix_length - start) : to;
      const int64_t *path = ancestors(segment, tile.first + node, start + from);
      for (int64_t t = from; t < stop; t++) slots[t] = row_in(segment, path[t - from]);
      from = stop;
    }
  }

  const Value *value(int64_t t) const { return (const Value *)(base + a.keys.value_at(slots[t])); }

  // Finds the slots that are read after this split.
  void look_ahead(int64_t split) {
    const AttentionItem *next = split + 1 < item.end                          ? &item
                                : &item + 1 < a.items.data() + a.items.size() ? &item + 1
                                                                              : nullptr;
    next_count = fetched = 0;
    if (!next) return;
    const int64_t first = (next == &item ? split + 1 : next->split) * SPLIT;
    const Segment &s = *a.tiles[next->tile].segment;
    next_base = a.keys.first_block(next->kv_head);
    next_segment = &s, next_slots = s.prefix + first, next_count = std::min(SPLIT, s.prefix_length - first);
  }

  // Prefetches the keys and values of some more slots of the next split. These requests are spread over the whole
  // split, because a processor can have few of them under way. Neighbouring slots fetch the lines of their panel
  // together.
  __attribute__((always_inline)) void prefetch_next(int64_t some) {
    for (; some > 0 && fetched < next_count; some--, fetched++) {
      const int64_t slot = row_in(*next_segment, next_slots[fetched]), place = slot % LANES;
      const uint8_t *panel = next_base + a.keys.panel_at(slot), *value = next_base + a.keys.value_at(slot);
      for (int64_t i = place * lanes / LANES; i < (place + 1) * lanes / LANES; i++) prefetch(panel + i * LINE_BYTES);
      for (int64_t i = 0; i < a.keys.value; i += LINE_BYTES) prefetch(value + i);
    }
  }

  // Where a row has its numbers for the first lane, as 32 bits.
  static uint32_t bits(const void *p) {
    uint32_t b;
    std::memcpy(&b, p, sizeof b);
    return b;
  }

  void load_queries() {
    const float scale = float(a.heads.scale);
    for (int64_t row = 0; row < rows; row++) {
      const float *from =
          a.queries + (tile.node + row / group) * a.stride + (item.kv_head * group + row % group) * a.heads.head_dim;
      for (int64_t i = 0; i < a.heads.head_dim; i += LANES) prefetch(from + QUERIES_AHEAD / group * a.stride + i);
      uint32_t *query = gathered;  // free until keys are gathered
      if constexpr (WHOLE)
        query_scales[row] = scale * store_whole((int16_t *)query, from, a.heads.head_dim, width, largest_of_key(width));
      else
        for (int64_t i = 0; i < width; i += LANES)
          store((float *)query + i, load_some(from + i, a.heads.head_dim - i) * scale);
      for (int64_t i = 0; i < steps; i++) queries[i * rows + row] = query[i];
    }
  }

  // into: [rows, sums_size(width)]
  void one_split(int64_t split, float *into) {
    start = split * SPLIT;
    int64_t from = SPLIT, to = 0, deepest = 0;
    for (int64_t n = 0; n < tile.count; n++) {
      const int64_t position = segment.positions[tile.first + n];
      end[n] = std::clamp<int64_t>(position + 1 - start, 0, SPLIT);
      begin[n] = std::clamp<int64_t>(a.first_seen(position) - start, 0, SPLIT);
      if (begin[n] >= end[n]) continue;
      from = std::min(from, begin[n] / LANES * LANES);
      if (end[n] > to) to = end[n], deepest = n;
    }
    for (int64_t row = 0; row < rows; row++) *Sums(into + row * sums_size(width), width).total = 0;
    if (from >= to) return;
    look_ahead(split);
    // All nodes share the slots up to here. One node shares all slots with itself.
    const int64_t shared = tile.count == 1 ? to : std::clamp((segment.prefix_length - start) / LANES * LANES, from, to);
    const int64_t all_shared = segment.prefix_length - start >= to ? to : shared;
    score(0, tile.count, deepest, from, all_shared, value_scales);
    for (int64_t n = 0; n < tile.count; n++)
      if (all_shared < end[n])
        score(n, n + 1, n, std::max(all_shared, begin[n] / LANES * LANES), end[n], value_scales + (1 + n) * SPLIT);
    for (int64_t row = 0; row < rows; row++) {
      const int64_t n = row / group;
      if (begin[n] >= end[n]) continue;
      Sums s(into + row * sums_size(width), width);
      share(row, begin[n], end[n], all_shared, s);
      std::fill_n(s.values, width, 0.0f);
    }
    add_values(0, tile.count, deepest, from, all_shared, into);
    for (int64_t n = 0; n < tile.count; n++)
      if (all_shared < end[n]) add_values(n, n + 1, n, std::max(all_shared, begin[n] / LANES * LANES), end[n], into);
    if constexpr (WHOLE)
      for (int64_t row = 0; row < rows; row++)
        for (float *v = Sums(into + row * sums_size(width), width).values, *last = v + width; v < last; v += LANES)
          store(v, to_float(load<I32>(v)) * share_scales[row]);
  }

  // The keys of `count` positions: slots of a panel, from its slot `first` on.
  struct Run {
    const uint32_t *panel;
    int64_t first, position, count;
  };

  // How many positions from t on, below `to`, have their keys side by side in one panel.
  int64_t run_length(int64_t t, int64_t to) const {
    const int64_t most = std::min(to - t, LANES - slots[t] % LANES);
    int64_t n = 1;
    while (n < most && slots[t + n] == slots[t] + n) n++;
    return n;
  }

  // The keys of positions from t on: in place, or gathered in a panel `into`.
  Run run_from(int64_t t, int64_t to, uint32_t *into) const {
    const auto panel = [this](int64_t slot) { return (const uint32_t *)(base + a.keys.panel_at(slot)); };
    int64_t n = run_length(t, to);
    if (n >= MIN_RUN_LENGTH) return {panel(slots[t]), slots[t] % LANES, t, n};
    Run run{into, 0, t, 0};
    while (run.count + n <= LANES) {
      for (; n > 0; n--, run.count++) {
        const int64_t slot = slots[t + run.count];
        const uint32_t *from = panel(slot) + slot % LANES;
        for (int64_t i = 0; i < lanes; i++) into[i * LANES + run.count] = from[i * LANES];
      }
      if (t + run.count == to || (n = run_length(t + run.count, to)) >= MIN_RUN_LENGTH) break;
    }
    return run;
  }

  // Scores of the positions from `from` up to `to`, on the path of `node`, for all rows of the nodes from `first` up to
  // `last`. Scores beyond what a row sees are not used. of_values: where the scales of the values go
  void score(int64_t first, int64_t last, int64_t node, int64_t from, int64_t to, float *of_values) {
    find(node, from, to);
    while (from < to) {
      Run runs[RUNS_AT_ONCE];
      int64_t count = 0;
      for (; count < RUNS_AT_ONCE && from < to; count++) {
        runs[count] = run_from(from, to, gathered + count * lanes * LANES);
        if constexpr (WHOLE)
          store_positions(of_values, runs[count], load<F32>(runs[count].panel + (lanes - 1) * LANES));
        from += runs[count].count;
      }
      in_groups(first * group, last * group, [&](auto m, int64_t row) {
        int64_t r = 0;
        for (; r + VECTORS <= count; r += VECTORS) multiply_keys<m.value, VECTORS>(row, runs + r);
        for (; r < count; r++) multiply_keys<m.value, 1>(row, runs + r);
      });
    }
  }

  // Stores the lanes of a run where its positions are.
  static void store_positions(float *to, const Run &run, F32 of_panel) {
    if (run.count == LANES) store(to + run.position, of_panel);
    else std::memcpy(to + run.position, (const float *)&of_panel + run.first, run.count * sizeof(float));
  }

  void store_scores(int64_t row, const Run &run, Dot dots) {
    if constexpr (WHOLE) {
      const F32 scale = load<F32>(run.panel + steps * LANES) * query_scales[row];
      store_positions(scores + row * SPLIT, run, to_float(dots) * scale);
    } else {
      store_positions(scores + row * SPLIT, run, dots);
    }
  }

  template <int M, int V> void multiply_keys(int64_t row, const Run *runs) {
    Dot s[M][V] = {};
    const uint32_t *q = queries + row, *panels[V];
    for (int v = 0; v < V; v++) panels[v] = runs[v].panel;
    for (int64_t fetch = 0; fetch < steps; fetch += STEPS_PER_FETCH) {
      prefetch_next(SLOTS_PER_FETCH);
#pragma GCC unroll 1  // unrolled, the steps would need more registers than there are
      for (int i = 0; i < STEPS_PER_FETCH; i++, q += rows) {
        U32 keys[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) keys[v] = load<U32>(panels[v]), panels[v] += LANES;
#pragma GCC unroll 6
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) s[m][v] = multiply_lanes(s[m][v], keys[v], q[m]);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store_scores(row + m, runs[v], s[m][v]);
  }

  // Turns a row's scores from `from` up to `to` into shares. In the vectors where these begin and end, the shares
  // beside them become 0. Up to `shared` all nodes have the same slots.
  void share(int64_t row, int64_t from, int64_t to, [[maybe_unused]] int64_t shared, Sums &sum) {
    float *s = scores + row * SPLIT;
    Share *out = shares + row * SPLIT;
    [[maybe_unused]] const float *of_shared = value_scales, *of_own = value_scales + (1 + row / group) * SPLIT;
    const float softcap = float(a.heads.softcap);
    const int64_t start = from / LANES * LANES;
    const auto hide = [&](int64_t t) {
      for (int64_t i = t; i < t + LANES; i++)
        if (i < from || i >= to) s[i] = -INFINITY;
    };
    if (softcap > 0)
      for (int64_t t = start; t < to; t += LANES) store(s + t, softcap * tanh(load<F32>(s + t) / softcap));
    if (from % LANES) hide(start);
    if (to % LANES) hide(to / LANES * LANES);
    F32 most = all(-INFINITY), total{}, most_scaled{};
    for (int64_t t = start; t < to; t += LANES) most = larger(load<F32>(s + t), most);
    const float top = max(most);
    for (int64_t t = start; t < to; t += LANES) {
      prefetch_next(1);
      prefetch_to_read(s + SPLIT + t);  // the next row
      const F32 e = exp(load<F32>(s + t) - top);
      total = total + e;
      if constexpr (WHOLE) {  // what a row does not see may have any scale
        const F32 scaled = e * select(e > 0, load<F32>((t < shared ? of_shared : of_own) + t), F32{});
        store(s + t, scaled);
        most_scaled = larger(scaled, most_scaled);
      } else {
        store(out + t, e);
      }
    }
    if constexpr (WHOLE) {
      const float largest = max(most_scaled), inverse = largest > 0 ? LARGEST_SHARE / largest : 0;
      for (int64_t t = start; t < to; t += LANES)
        store_shorts(out + t, rounded(load<F32>(s + t) * inverse, LARGEST_SHARE));
      share_scales[row] = largest / LARGEST_SHARE;
    }
    *sum.most = top;
    *sum.total = specbeam::sum(total);
  }

  // Adds values times shares at the positions from `from`, a multiple of LANES, up to `to`.
  void add_values(int64_t first, int64_t last, int64_t node, int64_t from, int64_t to, float *into) {
    if (tile.count > 1) find(node, from, to);  // else the score has found them
    if (last - first == 1 && group <= ROWS) return add_values(first, from, to, into);
    for (; from < to; from += VALUES_AT_ONCE) {
      const int64_t stop = std::min(to, from + VALUES_AT_ONCE);
      unpack_values(from, stop);
      in_groups(first * group, last * group, [&](auto m, int64_t row) {
        // The rows of a group mostly see the same positions. Where they do not, they go one by one.
        int64_t low = from, high = stop;
        for (int64_t n = row / group; n <= (row + m.value - 1) / group; n++) {
          low = std::max(low, (begin[n] + N - 1) / N * N);
          high = std::min(high, end[n] / N * N);
        }
        high = std::max(low, high);
        for (int i = 0; i < m.value; i++) add_edge(row + i, from, std::min(low, stop), from, into);
        const int64_t vectors = width / LANES;
        int64_t v = 0;
        for (; v + VECTORS <= vectors; v += VECTORS) add_products<m.value, VECTORS>(row, low, high, from, v, into);
        for (; v < vectors; v++) add_products<m.value, 1>(row, low, high, from, v, into);
        for (int i = 0; i < m.value; i++) add_edge(row + i, std::max(high, from), stop, from, into);
      });
    }
  }

  // The same for the few rows of one node, straight from the cache.
  void add_values(int64_t node, int64_t from, int64_t to, float *into) {
    const auto edge = [&](int64_t t) {
      unpack_values(t, std::min(t + N, to));
      for (int64_t row = node * group; row < (node + 1) * group; row++) add_edge(row, t, t + N, t, into);
    };
    const int64_t low = std::max(from, (begin[node] + N - 1) / N * N),
                  high = std::max(low, std::min(to, end[node]) / N * N);
    if (low > from && low > begin[node]) edge(low - N);
    in_groups(node * group, (node + 1) * group, [&](auto m, int64_t row) {
      int64_t v = 0;
      for (; v + VECTORS <= width / LANES; v += VECTORS)
        add_products<m.value, VECTORS, true>(row, low, high, 0, v, into);
      for (; v < width / LANES; v++) add_products<m.value, 1, true>(row, low, high, 0, v, into);
    });
    if (high < std::min(to, end[node])) edge(high);
  }

  // The rows see all positions from `low` up to `high`. origin: the first unpacked position, unless the values come
  // STRAIGHT from the cache
  template <int M, int V, bool STRAIGHT = false>
  void add_products(int64_t row, int64_t low, int64_t high, int64_t origin, int64_t vector, float *into) {
    if (low >= high) return;
    Dot o[M][V];
    const auto place = [&](int m, int v) { return into + (row + m) * sums_size(width) + (vector + v) * LANES; };
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) o[m][v] = load<Dot>(place(m, v));
    const Share *p = shares + row * SPLIT;
    const uint32_t *from = values + (low - origin) / N * width + vector * LANES;
    for (int64_t t = low; t < high; t += N, from += width) {
      U32 lanes[V];
      if constexpr (STRAIGHT) {
        if (vector == 0) prefetch_next(1);
        read_values<V>(t, t + N, vector, lanes);
      } else {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) lanes[v] = load<U32>(from + v * LANES);
      }
#pragma GCC unroll 6
      for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) o[m][v] = multiply_lanes(o[m][v], lanes[v], bits(p + m * SPLIT + t));
    }
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) store(place(m, v), o[m][v]);
  }

  // The same for one row, at those positions from `low` up to `high` that it sees. A pair may be seen by half.
  void add_edge(int64_t row, int64_t low, int64_t high, int64_t origin, float *into) {
    const int64_t n = row / group;
    low = std::max(low, begin[n] / N * N), high = std::min(high, end[n]);
    for (int64_t t = low; t < high; t += N) {
      uint32_t seen = ~0u;
      if (N == 2 && t < begin[n]) seen &= 0xffff0000;
      if (N == 2 && t + 1 >= end[n]) seen &= 0x0000ffff;
      const uint32_t *from = values + (t - origin) / N * width, numbers = bits(shares + row * SPLIT + t);
      float *to = into + row * sums_size(width);
      for (int64_t i = 0; i < width; i += LANES)
        store(to + i, multiply_lanes(load<Dot>(to + i), load<U32>(from + i) & seen, numbers));
    }
  }

  // values[position / N, feature]
  void unpack_values(int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t += N) {
      uint32_t *out = values + (t - from) / N * width;
      prefetch_next(1);
      const int64_t vectors = width / LANES;
      int64_t v = 0;
      for (; v + VECTORS <= vectors; v += VECTORS) unpack<VECTORS>(t, to, v, out);
      for (; v < vectors; v++) unpack<1>(t, to, v, out);
    }
  }

  template <int V> void unpack(int64_t t, int64_t to, int64_t vector, uint32_t *out) {
    U32 lanes[V];
    read_values<V>(t, to, vector, lanes);
    for (int v = 0; v < V; v++) store(out + (vector + v) * LANES, lanes[v]);
  }

  // The values of the position t, in pairs with the next position. From `to` on they are 0.
  template <int V> void read_values(int64_t t, [[maybe_unused]] int64_t to, int64_t vector, U32 *lanes) const {
    const Value *row = value(t) + vector * LANES;
    if constexpr (WHOLE) {
      static constexpr int8_t ZEROS[V * LANES] = {};
      zip<V>(row, t + 1 < to ? value(t + 1) + vector * LANES : ZEROS, lanes);
    } else {
      for (int v = 0; v < V; v++) lanes[v] = load<U32>(row + v * LANES);
    }
  }
};

}  // namespace

void put(const Heads &heads, const KeyValues &kv, int64_t slot, const float *keys, const float *values) {
  static thread_local Buffer<uint32_t> numbers;
  const int64_t head_dim = heads.head_dim;
  uint32_t *key = room(numbers, kv.lanes);
  for (int64_t h = 0; h < heads.num_kv_heads; h++, keys += head_dim, values += head_dim) {
    uint8_t *base = kv.first_block(h), *value = base + kv.value_at(slot);
    if (kv.whole) {
      const float scales[] = {
          store_whole((int16_t *)key, keys, head_dim, kv.width, largest_of_key(kv.width)),
          store_whole((int8_t *)value, values, head_dim, kv.width, LARGEST_VALUE),
      };
      std::memcpy(key + kv.lanes - 2, scales, sizeof scales);
    } else {
      for (int64_t i = 0; i < kv.width; i += LANES) {
        store((float *)key + i, load_some(keys + i, head_dim - i));
        store((float *)value + i, load_some(values + i, head_dim - i));
      }
    }
    auto *panel = (uint32_t *)(base + kv.panel_at(slot)) + slot % PANEL_SLOTS;
    for (int64_t i = 0; i < kv.lanes; i++) panel[i * PANEL_SLOTS] = key[i];
  }
}

void get_key(const KeyValues &kv, int64_t kv_head, int64_t slot, float *key) {
  const auto *lane = (const uint32_t *)(kv.first_block(kv_head) + kv.panel_at(slot)) + slot % PANEL_SLOTS;
  float scale = 1;
  if (kv.whole) std::memcpy(&scale, lane + (kv.lanes - 2) * PANEL_SLOTS, sizeof scale);
  for (int64_t i = 0; i < kv.width; lane += PANEL_SLOTS) {
    if (kv.whole)
      for (uint32_t half : {*lane & 0xffff, *lane >> 16}) key[i++] = float(int16_t(half)) * scale;
    else std::memcpy(&key[i++], lane, sizeof *key);
  }
}

void attend(const AttentionJob &a, int64_t item) {
  if (a.keys.whole) Work<true>(a, a.items[item]).run();
  else Work<false>(a, a.items[item]).run();
}

void join(const AttentionJob &a, int64_t node) {
  const Tile &tile = a.tiles[a.tile_of[node]];
  if (tile.parts < 0) return;
  const int64_t group = a.heads.group(), rows = tile.count * group, width = a.keys.width;
  for (int64_t h = 0; h < a.heads.num_heads; h++) {
    const int64_t row = (node - tile.node) * group + h % group, splits = tile.end - tile.split;
    float *parts = a.parts + tile.parts + (h / group * splits * rows + row) * sums_size(width);
    Sums sums(parts, width);
    for (int64_t split = 1; split < splits; split++)
      sums.add(Sums(parts + split * rows * sums_size(width), width), width);
    sums.finish(a.out + (node * a.heads.num_heads + h) * a.heads.head_dim, a.heads.head_dim, a.heads.sink(h));
  }
}

}  // namespace specbeam
