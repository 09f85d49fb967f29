// Selections from rows of logits, in the order of operations of selection.py. A row's selection depends on the row and
// its request alone. It has the same bits on every instruction set: no multiplication is fused, and vectors are as wide
// on all.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "buffer.h"
#include "interface.h"
#include "kernels.h"
#include "simd.h"

namespace specbeam {

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK_TOKENS = 512;   // a block's highest score says whether its tokens need a look
constexpr int64_t PIECE_TOKENS = 4096;  // stay in the first-level cache; threads may share the pieces of a row
constexpr int64_t GROUP_TOKENS = 32;    // get their noise at once
constexpr double HIGHEST_NOISE = 22.88;

struct Candidate {
  double rank;  // the score, and the noise if there is any; never NaN
  float score;
  int32_t token;
};

bool better(const Candidate &a, const Candidate &b) {
  return a.rank > b.rank || (a.rank == b.rank && a.token < b.token);
}

// The `most` best of the candidates added, in the order of their tokens, with ranks above the bound.
struct Best {
  size_t most;
  std::vector<Candidate> found;
  double bound;  // the rank of a candidate that comes later must be higher

  void start(int64_t count, double below) { most = size_t(count), found.clear(), bound = below; }

  void add(Candidate candidate) {
    found.push_back(candidate);
    if (found.size() < 2 * most) return;
    std::nth_element(found.begin(), found.begin() + (most - 1), found.end(), better);
    found.resize(most);
    bound = found.back().rank;
  }

  void sort() {
    const size_t count = std::min(most, found.size());
    std::partial_sort(found.begin(), found.begin() + count, found.end(), better);
    found.resize(count);
  }
};

// Loads n scores, at most 16; the other lanes are -inf.
inline F32 load_scores(const float *p, int64_t n) {
  if (n >= LANES) return load<F32>(p);
  float padded[LANES];
  std::fill_n(std::copy_n(p, n, padded), LANES - n, LOWEST);
  return load<F32>(padded);
}

// One bit per lane that is true, the lowest bit first.
inline uint32_t bits(I32 mask) {
#if defined(__AVX512F__)
  return uint32_t(_mm512_test_epi32_mask((__m512i)mask, (__m512i)mask));
#elif defined(SPECBEAM_EIGHT_LANES)
  return uint32_t(_mm256_movemask_ps((__m256)mask.low) | _mm256_movemask_ps((__m256)mask.high) << 8);
#else
  const U64 pairs = (U64)mask;
  if (!(pairs[0] | pairs[1] | pairs[2] | pairs[3] | pairs[4] | pairs[5] | pairs[6] | pairs[7])) return 0;
  uint32_t out = 0;
  for (int i = 0; i < LANES; i++) out |= uint32_t(mask[i] & 1) << i;
  return out;
#endif
}

// Calls f(lane) for each bit, the lowest first.
template <class F> inline void each_bit(uint32_t bits, const F &f) {
  for (; bits; bits &= bits - 1) f(__builtin_ctz(bits));
}

// e^x for each of N vectors with lanes up to 0, within 2 units in the last place; about 10^-38 below -87. As exp of
// simd.h, without fusion. Each step is taken for all vectors, so that few instructions wait for the one before.
template <int N> __attribute__((always_inline)) inline void exp_of_negative(F32 *x) {
  F32 shifted[N], r[N], p[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    x[i] = larger(all(-87.0f), x[i]);
    shifted[i] = x[i] * 1.44269504088896341f + ROUNDER;
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    const F32 n = shifted[i] - ROUNDER;
    r[i] = (x[i] - n * 0.693359375f) + n * 2.12194440e-4f;
    p[i] = all(EXP_POLYNOMIAL[0]);
  }
#pragma GCC unroll 5
  for (int k = 1; k < 6; k++) {
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) p[i] = p[i] * r[i] + EXP_POLYNOMIAL[k];
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    p[i] = p[i] * (r[i] * r[i]) + r[i] + 1.0f;
    x[i] = (F32)((U32)p[i] + ((U32)shifted[i] << 23));
  }
}
inline F32 exp_of_negative(F32 x) {
  exp_of_negative<1>(&x);
  return x;
}

// Products of the lower halves of lanes.
inline uint64_t product(uint64_t a, uint32_t b) { return uint64_t(uint32_t(a)) * b; }
inline U64 product(U64 a, uint32_t b) {
#if defined(__AVX512F__)
  return (U64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(SPECBEAM_EIGHT_LANES)
  const __m256i factor = _mm256_set1_epi64x(b);
  return {(U64::Half)_mm256_mul_epu32((__m256i)a.low, factor), (U64::Half)_mm256_mul_epu32((__m256i)a.high, factor)};
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Random numbers for the tokens of one row, four per counter (Philox4x32-10: Salmon et al. 2011).
struct Philox {
  static constexpr int ROUNDS = 10;
  uint64_t keys[ROUNDS][2], position, stream;

  void start(uint64_t seed, uint32_t at, uint32_t number) {
    uint32_t left = uint32_t(seed), right = uint32_t(seed >> 32);
    for (auto &key : keys) key[0] = left, key[1] = right, left += 0x9e3779b9, right += 0xbb67ae85;
    position = at, stream = number;
  }

  // The words of one counter, or of eight. They are the lower halves of lanes.
  template <class V> std::array<V, 4> words(V counter) const {
    V a = counter, b = V{} + position, c = V{} + stream, d = V{};
    for (const auto &key : keys) {
      const V first = product(a, 0xd2511f53), second = product(c, 0xcd9e8d57);
      a = (second >> 32) ^ b ^ key[0], b = second;
      c = (first >> 32) ^ d ^ key[1], d = first;
    }
    return {a, b, c, d};
  }

  uint32_t word(int64_t token) const { return uint32_t(words(uint64_t(token / 4))[token % 4]); }

  // The words of the GROUP_TOKENS tokens from `token` on, which is a multiple of GROUP_TOKENS.
  void group(int64_t token, U32 &low, U32 &high) const {
    static constexpr uint64_t ORDER[] = {0, 4, 1, 5, 2, 6, 3, 7};
    const auto [a, b, c, d] = words(load<U64>(ORDER) + uint64_t(token / 4));
    const U64 left = (a & 0xffffffffu) | (b << 32), right = (c & 0xffffffffu) | (d << 32);
#if defined(SPECBEAM_EIGHT_LANES)
    const auto unpack = [](auto of_halves, U64 x, U64 y) {
      return (U32)U64{(U64::Half)of_halves(x.low, y.low), (U64::Half)of_halves(x.high, y.high)};
    };
    low = unpack([](auto x, auto y) { return _mm256_unpacklo_epi64((__m256i)x, (__m256i)y); }, left, right);
    high = unpack([](auto x, auto y) { return _mm256_unpackhi_epi64((__m256i)x, (__m256i)y); }, left, right);
#elif defined(__clang__)
    low = (U32)__builtin_shufflevector(left, right, 0, 8, 2, 10, 4, 12, 6, 14);
    high = (U32)__builtin_shufflevector(left, right, 1, 9, 3, 11, 5, 13, 7, 15);
#else
    low = (U32)__builtin_shuffle(left, right, U64{0, 8, 2, 10, 4, 12, 6, 14});
    high = (U32)__builtin_shuffle(left, right, U64{1, 9, 3, 11, 5, 13, 7, 15});
#endif
  }
};

// Standard Gumbel noise, between -3.2 and HIGHEST_NOISE.
double gumbel(uint32_t word) { return -std::log(-std::log((word + 0.5) * 0x1p-32)); }

// The lanes whose score and noise may have a sum above the bound. The others cannot: the noise is at most -log(1 - u),
// and a chord of 2^x is never below it.
inline I32 may_pass(F32 scores, U32 words, F32 bound) {
  constexpr float UNIT = 0x1p23f, MARGIN = 2048;  // of rounding errors
  F32 exponent = (scores - bound) * (UNIT * 1.44269504088896341f) + (UNIT * (127 + 31) + MARGIN);
  exponent = smaller(larger(exponent, F32{}), all(UNIT * 160));
  const F32 limit = (F32)to_int(exponent);      // about 2^31 * e^(score - bound)
  return to_float((I32)(~words >> 1)) < limit;  // about 2^31 * (1 - u)
}

// Below this float, and so below this bound.
inline F32 below(double bound) { return all(float(bound - std::abs(bound) * 1e-6 - 1e-4)); }

// The sum of e^score of a row is e^highest * e^log_sum.
struct LogSum {
  float highest;
  double log_sum;
  explicit operator float() const { return float(highest + log_sum); }
};

// Memory for one row, kept for the next.
struct Space {
  Buffer<float> scores, highest, piece_highest, piece_sums, read;
  std::vector<bool> edited;  // by block
  std::vector<Candidate> kept;
  std::vector<Best> parts;
  std::vector<int64_t> tokens;
};

// An edit's entry.
struct Entry {
  int64_t edit, place;
};

class Row {
 public:
  // helpers: threads to share the row's pieces with, or null
  Row(const Choice &choice, const SelectionRequest &wanted, int64_t number, const Entry *first, const Entry *last,
      Threads *helpers)
      : c(choice),
        request(wanted),
        row(number),
        vocab(request.vocab),
        entries(first),
        entries_end(last),
        threads(helpers),
        logits(c.logits + (request.first_row + row) * c.logit_columns) {}

  void run() {
    raw = log_sum(logits, true);
    normalizer = c.normalizers[request.row_place + row] = float(raw);
    for (int64_t i = 0, at = request.given_place + row * request.given; i < request.given; i++, at++)
      c.given_log_probs[at] = logits[c.given[at]] - normalizer;
    scores = logits;
    if (request.noise_place >= 0) {
      const int64_t at = request.noise_place + row;
      philox.start(request.seed, c.positions[at], c.streams[at]);
    }
    change();
    const bool truncated = top_k > 0 || request.top_p < 1 || request.min_p > 0 || request.typical_p > 0;
    if (truncated) truncate();
    if (request.renormalize) renormalize(truncated);
    if (request.total) c.totals[request.row_place + row] = float(truncated ? log_sum(space.kept) : log_sum_of_scores());
    if (!request.top) return;
    Best &best = truncated ? best_kept() : request.noise_place >= 0 ? best_noisy() : best_scores(request.top);
    best.sort();
    if (best.found.size() < best.most) fill(best, truncated);
    for (int64_t i = 0, at = request.top_place + row * request.top; i < request.top; i++, at++) {
      const Candidate &found = best.found[i];
      c.tokens[at] = found.token;
      c.log_probs[at] = logits[found.token] - normalizer;
      c.scores[at] = found.score;
      if (request.noise_place >= 0) c.noise[at] = gumbel(philox.word(found.token));
    }
  }

 private:
  const Choice &c;
  const SelectionRequest &request;
  const int64_t row, vocab, top_k = request.top_k < request.vocab ? request.top_k : 0;
  const Entry *entries, *entries_end;
  Threads *threads;
  const float *logits, *scores = nullptr;
  LogSum raw{};
  float normalizer = 0;
  Philox philox;
  Space &space = of_thread();

  static Space &of_thread() {
    static thread_local Space space;
    return space;
  }

  int64_t pieces() const { return (vocab + PIECE_TOKENS - 1) / PIECE_TOKENS; }
  int64_t blocks() const { return (vocab + BLOCK_TOKENS - 1) / BLOCK_TOKENS; }

  // Calls f(first token, last token, piece) for each piece.
  template <class F> void each_piece(const F &f) {
    const auto piece = [&](int64_t i) { f(i * PIECE_TOKENS, std::min((i + 1) * PIECE_TOKENS, vocab), i); };
    if (threads) threads->each(pieces(), 1, piece);
    else
      for (int64_t i = 0; i < pieces(); i++) piece(i);
  }

  static float highest_of(const float *p, int64_t count) {
    F32 h[4] = {all(LOWEST), all(LOWEST), all(LOWEST), all(LOWEST)};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
      for (int j = 0; j < 4; j++) h[j] = larger(load<F32>(p + i + j * LANES), h[j]);
    for (; i < count; i += LANES) h[0] = larger(load_scores(p + i, count - i), h[0]);
    return max(larger(larger(h[0], h[1]), larger(h[2], h[3])));
  }

  // The logarithm of the sum of e^score. A piece is added up in one order, and so are the pieces.
  // note: whether the highest score of each block is noted. Otherwise it is known.
  LogSum log_sum(const float *from, bool note) {
    space.highest.resize(blocks());
    const int64_t padded = (pieces() + LANES - 1) / LANES * LANES;
    space.piece_highest.assign(padded, LOWEST), space.piece_sums.assign(padded, 0);
    each_piece([&](int64_t first, int64_t last, int64_t piece) {
      float highest = LOWEST;
      for (int64_t block = first; block < last; block += BLOCK_TOKENS) {
        float &of_block = space.highest[block / BLOCK_TOKENS];
        if (note) of_block = highest_of(from + block, std::min(block + BLOCK_TOKENS, last) - block);
        highest = std::max(highest, of_block);
      }
      const float base = highest == LOWEST ? 0 : highest;
      F32 sums[4] = {};
      int64_t i = first;
      for (; i + 4 * LANES <= last; i += 4 * LANES) {
        F32 four[4];
        for (int j = 0; j < 4; j++) four[j] = load<F32>(from + i + j * LANES) - base;
        exp_of_negative<4>(four);
        for (int j = 0; j < 4; j++) sums[j] += four[j];
      }
      for (; i < last; i += LANES) sums[0] += exp_of_negative(load_scores(from + i, last - i) - base);
      space.piece_highest[piece] = highest;
      space.piece_sums[piece] = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    });
    const float highest = *std::max_element(space.piece_highest.begin(), space.piece_highest.end());
    if (highest == LOWEST) return {LOWEST, 0};
    double total = 0;
    for (int64_t i = 0; i < padded; i += LANES) {
      const F32 weights = exp_of_negative(load<F32>(&space.piece_highest[i]) - highest);
      for (int j = 0; j < LANES; j++) total += double(weights[j]) * space.piece_sums[i + j];
    }
    return {highest, std::log(total)};
  }

  LogSum log_sum_of_scores() { return scores == logits ? raw : log_sum(scores, false); }

  static LogSum log_sum(const std::vector<Candidate> &kept) {
    float highest = LOWEST;
    for (const Candidate &k : kept) highest = std::max(highest, k.score);
    if (highest == LOWEST) return {LOWEST, 0};
    double total = 0;
    for (const Candidate &k : kept) total += std::exp(double(k.score) - highest);
    return {highest, std::log(total)};
  }

  const uint8_t *mask() const {
    return request.allowed_place < 0 ? nullptr : c.allowed + request.allowed_place + row * ((vocab + 7) / 8);
  }

  // Makes `scores`: all changes before truncation. The logits stay as they are.
  void change() {
    const bool divided = request.temperature != 1, masked = request.allowed_place >= 0;
    const bool edited = entries != entries_end || request.one_of_begin != request.one_of_end;
    const bool joined = request.together_begin < std::min(request.together_end, vocab);
    if (!request.normalize && !edited && !masked && !divided && !joined) return;
    const float divisor = joined ? 1 : float(request.temperature);
    if (edited) {
      rewrite(request.normalize, false, 1);
      space.edited.assign(blocks(), false);
      edit();
      keep_likeliest();
      if (masked || divisor != 1) rewrite(false, masked, divisor);
      else note_edited();
    } else {
      rewrite(request.normalize, masked, divisor);
    }
    if (joined) {
      keep_together();
      if (divided) rewrite(false, false, float(request.temperature));
    }
  }

  void rewrite(bool normalize, bool masked, float divisor) {
    rewrite([vocab = vocab, normalize, divisor, subtracted = normalizer, allowed = masked ? mask() : nullptr](
                F32 v, int64_t i) {
      if (normalize) v = v - subtracted;
      if (allowed) {
        const int32_t some = allowed[i / 8] | (i + 8 < vocab ? allowed[i / 8 + 1] << 8 : 0);
        static constexpr int32_t BITS[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        v = select((all(some) & load<I32>(BITS)) != 0, v, all(LOWEST));
      }
      return divisor == 1 ? v : v / divisor;
    });
  }

  // Rewrites `scores` into the space, and notes the highest score of each block.
  template <class F> void rewrite(const F &changed) {
    room(space.scores, vocab);
    const float *from = scores;
    float *to = space.scores.data();
    each_piece([this, from, to, changed](int64_t first, int64_t last, int64_t) {
      for (int64_t block = first; block < last; block += BLOCK_TOKENS) {
        const int64_t end = std::min(block + BLOCK_TOKENS, last);
        int64_t i = block;
        for (; i + LANES <= end; i += LANES) store(to + i, changed(load<F32>(from + i), i));
        if (i < end) store_some(to + i, changed(load_scores(from + i, end - i), i), end - i);
        space.highest[block / BLOCK_TOKENS] = highest_of(to + block, end - block);
      }
    });
    scores = to;
  }

  // Notes the highest score again in each block with a token that was changed.
  void note_edited() {
    for (int64_t block = 0; block < blocks(); block++)
      if (space.edited[block]) {
        const int64_t first = block * BLOCK_TOKENS;
        space.highest[block] = highest_of(scores + first, std::min(BLOCK_TOKENS, vocab - first));
      }
  }

  void set(int64_t token, float score) {
    space.scores[token] = score;
    space.edited[token / BLOCK_TOKENS] = true;
  }

  static float edited(int64_t kind, float score, float value) {
    switch (kind) {
      case ADD: return score + value;
      case REPEAT: return score < 0 ? score * value : score / value;
      case RAISE: return std::isfinite(score) ? score + std::abs(score) * value : score;
      default: return value;
    }
  }

  // An edit reads all its scores before it changes one: so a token that it names twice is changed once.
  void edit() {
    const float *changed = space.scores.data();
    for (const Entry *first = entries, *last = first; first != entries_end; first = last) {
      const Edit &edit = c.edits[first->edit];
      space.read.clear();
      for (; last != entries_end && last->edit == first->edit; last++) {
        const int32_t token = c.edit_tokens[last->place];
        const float score = token < vocab ? changed[token] : 0;
        const float value = edit.kind == BAN ? LOWEST : c.edit_values[edit.values + last->place - edit.begin];
        space.read.push_back(edited(edit.kind, score, value));
      }
      for (const Entry *e = first; e != last; e++)
        if (const int32_t token = c.edit_tokens[e->place]; token < vocab) set(token, space.read[e - first]);
    }
  }

  // Of the tokens of one_of, only the likeliest keeps its score, if it is allowed.
  void keep_likeliest() {
    if (request.one_of_begin == request.one_of_end) return;
    const float *changed = space.scores.data();
    const uint8_t *allowed = mask();
    int64_t likeliest = -1;
    float highest = LOWEST;
    for (int64_t i = request.one_of_begin; i < request.one_of_end; i++) {
      const int64_t token = c.one_of[i];
      if (token >= vocab) continue;
      if (!allowed || allowed[token / 8] >> token % 8 & 1)
        if (changed[token] > highest) highest = changed[token], likeliest = token;
      set(token, LOWEST);
    }
    if (likeliest >= 0) set(likeliest, highest);
  }

  // If the tokens of `together` are likelier together than each other token, only they keep their scores. One thread
  // adds up, in one order.
  void keep_together() {
    const int64_t begin = request.together_begin, end = std::min(request.together_end, vocab);
    float *own = space.scores.data();
    const float highest = highest_of(own + begin, end - begin);
    if (highest == LOWEST) return;
    F32 sums{};
    for (int64_t i = begin; i < end; i += LANES) sums += exp_of_negative(load_scores(own + i, end - i) - highest);
    const float others = std::max(highest_of(own, begin), highest_of(own + end, vocab - end));
    if (!(highest + std::log(double(sum(sums))) > others)) return;
    std::fill(own, own + begin, LOWEST), std::fill(own + end, own + vocab, LOWEST);
    for (int64_t block = 0; block < blocks(); block++) {
      const int64_t first = block * BLOCK_TOKENS, last = std::min(first + BLOCK_TOKENS, vocab);
      space.highest[block] = last <= begin || first >= end ? LOWEST : highest_of(own + first, last - first);
    }
  }

  // Calls f(token) for each token whose score may be above bound(), in order.
  template <class Bound, class F> void each_above(const Bound &bound, const F &f) {
    for (int64_t block = 0; block < vocab; block += BLOCK_TOKENS) {
      if (!(space.highest[block / BLOCK_TOKENS] > bound())) continue;
      const int64_t end = std::min(block + BLOCK_TOKENS, vocab);
      for (int64_t i = block; i < end; i += LANES)
        each_bit(bits(load_scores(scores + i, end - i) > bound()), [&](int lane) { f(i + lane); });
    }
  }

  // The tokens with the highest scores.
  Best &best_scores(int64_t most) {
    Best &best = part(0);
    best.start(most, LOWEST);
    if (most <= blocks()) {  // as many blocks have such a score or a higher one, and so as many tokens
      Buffer<float> &highest = space.read;
      highest.assign(space.highest.begin(), space.highest.end());
      std::nth_element(highest.begin(), highest.begin() + (most - 1), highest.end(), std::greater<float>());
      best.bound = std::nextafter(highest[most - 1], LOWEST);
    }
    each_above([&] { return float(best.bound); },
               [&](int64_t token) {
                 if (scores[token] > best.bound) best.add({scores[token], scores[token], int32_t(token)});
               });
    return best;
  }

  // The tokens with the highest sums of score and noise.
  Best &best_noisy() {
    const int64_t parts = threads ? pieces() : 1;
    for (int64_t i = 0; i < parts; i++) part(i).start(request.top, LOWEST);
    each_piece([&](int64_t first, int64_t last, int64_t piece) {
      Best &best = space.parts[threads ? piece : 0];
      for (int64_t block = first; block < last; block += BLOCK_TOKENS) {
        if (space.highest[block / BLOCK_TOKENS] + HIGHEST_NOISE <= best.bound) continue;
        const int64_t end = std::min(block + BLOCK_TOKENS, last);
        for (int64_t group = block; group < end; group += GROUP_TOKENS) {
          const F32 bound = below(best.bound);
          U32 words[2];
          philox.group(group, words[0], words[1]);
          for (int half = 0; half < 2 && group + half * LANES < end; half++) {
            const int64_t at = group + half * LANES;
            const F32 some = load_scores(scores + at, end - at);
            each_bit(bits(may_pass(some, words[half], bound)), [&](int lane) {
              const double rank = some[lane] + gumbel(words[half][lane]);
              if (rank > best.bound) best.add({rank, some[lane], int32_t(at + lane)});
            });
          }
        }
      }
    });
    Best &all = space.parts[0];
    for (int64_t i = 1; i < parts; i++)
      all.found.insert(all.found.end(), space.parts[i].found.begin(), space.parts[i].found.end());
    return all;
  }

  // The best of the tokens that truncation kept.
  Best &best_kept() {
    Best &best = part(0);
    best.start(request.top, LOWEST);
    for (const Candidate &k : space.kept) {
      if (request.noise_place >= 0 && k.score + HIGHEST_NOISE <= best.bound) continue;
      const double rank = request.noise_place < 0 ? k.score : k.score + gumbel(philox.word(k.token));
      if (rank > best.bound) best.add({rank, k.score, k.token});
    }
    return best;
  }

  Best &part(int64_t i) {
    if (int64_t(space.parts.size()) <= i) space.parts.resize(i + 1);
    return space.parts[i];
  }

  // Adds tokens that are impossible, the lowest first.
  void fill(Best &best, bool truncated) {
    std::vector<int64_t> &known = space.tokens;
    known.clear();
    for (const Candidate &found : best.found) known.push_back(found.token);
    std::sort(known.begin(), known.end());
    auto next = known.begin();
    for (int64_t token = 0; best.found.size() < best.most; token++) {
      if (next != known.end() && *next == token) next++;
      else best.found.push_back({LOWEST, truncated ? LOWEST : scores[token], int32_t(token)});
    }
  }

  // Notes which tokens top_k, top_p, min_p and typical_p keep.
  void truncate() {
    std::vector<Candidate> &kept = space.kept;
    kept.clear();
    const float highest = *std::max_element(space.highest.begin(), space.highest.end());
    if (highest == LOWEST) return;
    LogSum all{};
    double lowest = LOWEST, surprise = 0;
    const bool typical_alone = !(top_k > 0 || request.top_p < 1 || request.min_p > 0);
    if (top_k > 0) {
      Best &best = best_scores(top_k);
      best.sort();
      if (best.found.size() == best.most) lowest = best.found.back().score;
    } else if (request.top_p < 1) {
      // A token whose probability is at most (1 - p) / vocab is left out, because all the less likely ones are no more.
      all = log_sum_of_scores();
      lowest = highest + all.log_sum + std::log((1 - request.top_p) / double(vocab)) - 0.001;
    } else if (request.min_p > 0) {
      lowest = highest + std::log(request.min_p) - 0.001;
    } else {
      // The same holds for tokens whose surprise is over twice the expected one: then no likelier token is further off.
      all = log_sum_of_scores();
      surprise = expected_surprise(all);
      lowest =
          highest + all.log_sum + std::min(std::log((1 - request.typical_p) / double(vocab)), -2 * surprise) - 0.001;
    }
    lowest = std::nextafter(std::max(float(lowest), -std::numeric_limits<float>::max()), LOWEST);
    each_above([&] { return float(lowest); },
               [&](int64_t token) { kept.push_back({scores[token], scores[token], int32_t(token)}); });
    if (request.top_p < 1) nucleus(top_k > 0 ? log_sum(kept) : all);
    if (request.min_p > 0)
      kept.erase(
          std::remove_if(kept.begin(), kept.end(),
                         [&](const Candidate &k) { return std::exp(double(k.score) - highest) < request.min_p; }),
          kept.end());
    if (request.typical_p > 0) {
      if (!typical_alone) all = log_sum(kept), surprise = expected_surprise(kept, all);
      typical(all, surprise);
    }
  }

  // Keeps the likeliest of the kept tokens, whose probabilities first sum to p.
  void nucleus(const LogSum &all) {
    space.kept.resize(best_with(request.top_p, all));
    order_kept();
  }

  // Keeps the tokens whose surprise is nearest to the expected one and whose probabilities first sum to p, and all that
  // are as near as the last of them.
  void typical(const LogSum &all, double expected) {
    std::vector<Candidate> &kept = space.kept;
    for (Candidate &k : kept) k.rank = -std::abs((double(k.score) - all.highest) - all.log_sum + expected);
    const auto last = kept.begin() + best_with(request.typical_p, all);
    double lowest = 0;
    for (auto k = kept.begin(); k != last; k++) lowest = std::min(lowest, k->rank);
    kept.erase(std::remove_if(last, kept.end(), [&](const Candidate &k) { return k.rank < lowest; }), kept.end());
    for (Candidate &k : kept) k.rank = k.score;
    order_kept();
  }

  void order_kept() {
    std::sort(space.kept.begin(), space.kept.end(),
              [](const Candidate &a, const Candidate &b) { return a.token < b.token; });
  }

  // Puts the best of the kept tokens first, whose probabilities first sum to p. Returns their number.
  int64_t best_with(double p, const LogSum &all) {
    std::vector<Candidate> &kept = space.kept;
    auto first = kept.begin(), last = kept.end();
    double before = 0;  // the sum of the probabilities before `first`
    while (last - first > 1) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, better);
      double sum = before;
      for (auto k = first; k != middle; k++) sum += std::exp((double(k->score) - all.highest) - all.log_sum);
      if (sum >= p) last = middle;
      else first = middle, before = sum;
    }
    return last - kept.begin();
  }

  // The mean of -log(p) over the distribution that the scores make.
  double expected_surprise(const LogSum &of_all) {
    const int64_t padded = (pieces() + LANES - 1) / LANES * LANES;
    space.piece_sums.assign(padded, 0);
    each_piece([&](int64_t first, int64_t last, int64_t piece) {
      F32 sums{};
      for (int64_t i = first; i < last; i += LANES) {
        const F32 below = larger(all(-87.0f), load_scores(scores + i, last - i) - of_all.highest);
        sums += exp_of_negative(below) * below;
      }
      space.piece_sums[piece] = sum(sums);
    });
    const double total = std::accumulate(space.piece_sums.begin(), space.piece_sums.end(), 0.0);
    return of_all.log_sum - total * std::exp(-of_all.log_sum);
  }

  static double expected_surprise(const std::vector<Candidate> &kept, const LogSum &all) {
    double total = 0;
    for (const Candidate &k : kept) {
      const double log_prob = (double(k.score) - all.highest) - all.log_sum;
      total -= std::exp(log_prob) * log_prob;
    }
    return total;
  }

  // Makes log-probabilities of the scores, unless no token is possible.
  void renormalize(bool truncated) {
    const LogSum all = truncated ? log_sum(space.kept) : log_sum_of_scores();
    if (all.highest == LOWEST) return;
    const float highest = all.highest, log_sum = float(all.log_sum);
    if (!truncated) return rewrite([highest, log_sum](F32 v, int64_t) { return (v - highest) - log_sum; });
    for (Candidate &k : space.kept) k.rank = k.score = (k.score - highest) - log_sum;
  }
};

}  // namespace

void choose(const Choice &choice, Threads &threads) {
  const Threads::Awake awake(threads);
  std::vector<int64_t> firsts;  // of each row of all requests: its request, and the row's number there
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t r = 0; r < choice.request_count; r++) {
    firsts.push_back(int64_t(rows.size()));
    for (int64_t row = 0; row < choice.requests[r].rows; row++) rows.push_back({r, row});
  }
  // The entries of all edits, by row.
  std::vector<int64_t> ends(rows.size() + 1);
  std::vector<Entry> entries;
  const auto each_entry = [&](const auto &f) {
    for (int64_t r = 0; r < choice.request_count; r++)
      for (int64_t e = choice.requests[r].edits_begin; e < choice.requests[r].edits_end; e++)
        for (int64_t i = choice.edits[e].begin; i < choice.edits[e].end; i++)
          f(firsts[r] + choice.edit_rows[i], Entry{e, i});
  };
  if (choice.entry_count) {
    each_entry([&](int64_t row, Entry) { ends[row + 1]++; });
    for (size_t i = 1; i < ends.size(); i++) ends[i] += ends[i - 1];
    entries.resize(ends.back());
    std::vector<int64_t> next(ends.begin(), ends.end() - 1);
    each_entry([&](int64_t row, Entry entry) { entries[next[row]++] = entry; });
  }
  const auto choose_row = [&](int64_t i, Threads *helpers) {
    const Entry *all = entries.data();
    Row(choice, choice.requests[rows[i].first], rows[i].second, all + ends[i], all + ends[i + 1], helpers).run();
  };
  const auto count = int64_t(rows.size());
  if (threads.count() > 1 && count < threads.count())
    for (int64_t i = 0; i < count; i++) choose_row(i, &threads);
  else threads.each(count, 1, [&](int64_t i) { choose_row(i, nullptr); });
}

}  // namespace specbeam
