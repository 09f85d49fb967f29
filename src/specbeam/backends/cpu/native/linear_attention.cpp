// The kernels of linear attention.

#include "linear_attention.h"

#include <new>
#include <tuple>

#include "pass.h"

namespace specbeam {

namespace {

constexpr int64_t REGISTER_LANES = sizeof(Register) / sizeof(float);

// out[r] += the sum over i of a[r][i] * b[i], in the order of i, for some columns.
template <int R, int V>
inline void add_products(const float *const *a, const float *const *b, int64_t n, int64_t column, float *const *out) {
  Register sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = load<Register>(out[r] + column + v * REGISTER_LANES);
  for (int64_t i = 0; i < n; i++) {
    Register x[V];
    for (int v = 0; v < V; v++) x[v] = load<Register>(b[i] + column + v * REGISTER_LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const Register y = every(a[r][i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = multiply_add(y, x[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out[r] + column + v * REGISTER_LANES, sums[r][v]);
}

template <int R>
inline void add_products(const float *const *a, const float *const *b, int64_t n, int64_t columns, float *const *out) {
  constexpr int V = R > 2 ? 2 : 4;
  int64_t c = 0;
  for (; c + V * REGISTER_LANES <= columns; c += V * REGISTER_LANES) add_products<R, V>(a, b, n, c, out);
  for (; c < columns; c += REGISTER_LANES) add_products<R, 1>(a, b, n, c, out);
}

void add_products(const float *const *a, int64_t rows, const float *const *b, int64_t n, int64_t columns,
                  float *const *out) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) add_products<6>(a + r, b, n, columns, out + r);
  for (; r + 2 <= rows; r += 2) add_products<2>(a + r, b, n, columns, out + r);
  for (; r < rows; r++) add_products<1>(a + r, b, n, columns, out + r);
}

inline float dot(const float *a, const float *b, int64_t n) {
  F32 products{};
  for (int64_t i = 0; i < n; i += LANES) products = multiply_add(load<F32>(a + i), load<F32>(b + i), products);
  return sum(products);
}

inline void scale(float *x, int64_t n, float by) {
  for (int64_t i = 0; i < n; i += LANES) store(x + i, load<F32>(x + i) * by);
}

// A head's rows on a path, ancestors first.
struct PathRows {
  std::vector<const float *> keys, us;
  std::vector<float> decays, weights;  // weights: e^(sum of the decays after the row)
  float before = 1;                    // e^(sum of all decays)

  int64_t count() const { return int64_t(keys.size()); }
  void clear() { keys.clear(), us.clear(), decays.clear(); }
  void add(const float *key, const float *u, float decay) {
    keys.push_back(key), us.push_back(u), decays.push_back(decay);
  }
  // own: the decay of a node after the rows; 0 for none
  void weigh(float own) {
    const int64_t n = count();
    weights.resize(n + LANES);
    float total = own;
    for (int64_t i = n - 1; i >= 0; i--) weights[i] = total, total += decays[i];
    weights[n] = total;
    for (int64_t i = 0; i <= n; i += LANES) store_some(&weights[i], exp(load_some(&weights[i], n + 1 - i)), n + 1 - i);
    before = weights[n];
  }
};

// One value head of a pass.
class Head {
  Pass &p;
  const LinearHeads &heads;
  const LinearMemory &memory;
  const LinearInputs &in;
  float *const us;  // of the nodes of the pass, [nodes, value_size]
  const int64_t h, size, at_key, at_u, at_decay;
  PathRows &rows;
  float *places;  // of states without rows, [places, size]

 public:
  Head(Pass &pass, const LinearHeads &all, const LinearMemory &kept, const LinearInputs &inputs, float *us_of_pass,
       int64_t head, PathRows &to, float *states)
      : p(pass),
        heads(all),
        memory(kept),
        in(inputs),
        us(us_of_pass),
        h(head),
        size(all.key_dim * all.value_dim),
        at_key(all.key_head(head) * all.key_dim),
        at_u(head * all.value_dim),
        at_decay(all.key_size() + all.value_size() + head),
        rows(to),
        places(states) {}

  void run(const Borders &borders, float *out) {
    static thread_local Buffer<float> numbers;
    for (const Border &border : borders.all) {
      if (border.made) make(border, borders);
      const int64_t count = border.end - border.first, *readers = borders.readers.data() + border.first;
      float *products = room(numbers, count * vectors() * heads.value_dim);  // of the state with each reader's vectors
      multiply(state(border), readers, count, products);
      for (int64_t i = 0; i < count; i++)
        finish(readers[i], border.position, products + i * vectors() * heads.value_dim, out);
    }
  }

 private:
  const float *key(int64_t n) const { return in.keys + n * in.stride + at_key; }
  const float *query(int64_t n) const { return in.queries + n * in.stride + at_key; }
  float *state_in(int64_t row) const { return memory.states.at(row) + h * size; }
  float *state(const Border &border) const {
    if (!border.position) return nullptr;
    return border.row != NO_ROW ? state_in(border.row) : places + border.place * size;
  }
  // A node multiplies the state with its query, and for the delta rule with its key.
  int64_t vectors() const { return heads.delta_rule ? 2 : 1; }

  // The rows of a node's ancestors from a position on, up to before another one.
  void collect(int64_t n, int64_t begin, int64_t end) {
    rows.clear();
    for (int64_t position = begin; position < end; position++) {
      const auto [node, row] = p.place_at(n, position, memory.row_region);
      if (node != Cache::NO_NODE) {
        rows.add(key(node), us + node * heads.value_size() + at_u, in.decays[node * in.stride + h]);
      } else {
        if (row < 0) throw std::bad_alloc();  // the checks find that before
        const float *kept = memory.rows.at(row);
        rows.add(kept + at_key, kept + heads.key_size() + at_u, kept[at_decay]);
      }
    }
  }

  void make(const Border &border, const Borders &borders) {
    float *const own = state(border);
    const float *from = border.before >= 0            ? state(borders.all[border.before])
                        : border.before_row != NO_ROW ? state_in(border.before_row)
                                                      : nullptr;
    if (!from) std::fill_n(own, size, 0.0f);
    else if (from != own) std::copy_n(from, size, own);
    for (int64_t position = border.begin; position < border.position; position += BORDER) {
      collect(border.node, position, position + BORDER);
      move(own);
    }
  }

  // Moves a state on to the end of the rows.
  void move(float *own) {
    static thread_local Buffer<float> numbers;
    static thread_local std::vector<const float *> weighted;
    static thread_local std::vector<float *> to;
    const int64_t n = rows.count();
    float *a = room(numbers, heads.key_dim * n);
    rows.weigh(0);
    weighted.clear(), to.clear();
    for (int64_t d = 0; d < heads.key_dim; d++) {
      for (int64_t i = 0; i < n; i++) a[d * n + i] = rows.weights[i] * rows.keys[i][d];
      weighted.push_back(a + d * n), to.push_back(own + d * heads.value_dim);
    }
    scale(own, size, rows.before);
    add_products(weighted.data(), heads.key_dim, rows.us.data(), n, heads.value_dim, to.data());
  }

  // products: [count, vectors, value_dim]
  void multiply(const float *own, const int64_t *readers, int64_t count, float *products) {
    static thread_local std::vector<const float *> read, of_state;
    static thread_local std::vector<float *> to;
    std::fill_n(products, count * vectors() * heads.value_dim, 0.0f);
    if (!own) return;
    read.clear(), of_state.clear(), to.clear();
    for (int64_t i = 0; i < count; i++) {
      read.push_back(query(readers[i]));
      if (heads.delta_rule) read.push_back(key(readers[i]));
    }
    for (size_t i = 0; i < read.size(); i++) to.push_back(products + i * heads.value_dim);
    for (int64_t d = 0; d < heads.key_dim; d++) of_state.push_back(own + d * heads.value_dim);
    add_products(read.data(), int64_t(read.size()), of_state.data(), heads.key_dim, heads.value_dim, to.data());
  }

  // The output of a node and its u. products: of the state at its border with its vectors
  void finish(int64_t n, int64_t border, float *products, float *out) {
    static thread_local Buffer<float> numbers;
    collect(n, border, p.position(n));
    const int64_t count = rows.count(), dim = heads.value_dim;
    const float decay = in.decays[n * in.stride + h], beta = in.betas[n * in.stride + h];
    float *of_query = room(numbers, 2 * count), *of_key = of_query + count;
    rows.weigh(decay);
    for (int64_t i = 0; i < count; i++) {
      of_query[i] = rows.weights[i] * dot(rows.keys[i], query(n), heads.key_dim);
      if (heads.delta_rule) of_key[i] = rows.weights[i] * dot(rows.keys[i], key(n), heads.key_dim);
    }
    scale(products, vectors() * dim, rows.before);
    const float *weights[] = {of_query, of_key};
    float *sums[] = {products, products + dim}, *with_query = sums[0], *with_key = sums[1];
    add_products(weights, vectors(), rows.us.data(), count, dim, sums);
    const F32 own = all(dot(key(n), query(n), heads.key_dim));
    const float *value = in.values + n * in.stride + at_u;
    float *u = us + n * heads.value_size() + at_u, *to = out + n * heads.value_size() + at_u;
    for (int64_t i = 0; i < dim; i += LANES) {
      const F32 v = load<F32>(value + i), change = beta * (heads.delta_rule ? v - load<F32>(with_key + i) : v);
      store(u + i, change);
      store(to + i, multiply_add(own, change, load<F32>(with_query + i)));
    }
  }
};

// Decides as what a state begins that this pass makes.
void plan(const Pass &p, const Region &states, int64_t region, Borders &borders, int64_t number) {
  Border &border = borders.all[number];
  border.made = true;
  for (border.begin = border.position - BORDER; border.begin > 0; border.begin -= BORDER) {
    const int64_t slot = p.slot_at(border.node, border.begin - 1);
    for (int64_t i = number; i-- > 0 && borders.all[i].position >= border.begin;)
      if (borders.all[i].position == border.begin && borders.all[i].slot == slot) {
        border.before = i, borders.all[i].last_user = number;
        return;
      }
    if (const int64_t row = p.made_row_at(border.node, border.begin - 1, region); states.holds(row, border.begin - 1)) {
      border.before_row = row;
      return;
    }
  }
}

}  // namespace

const char *LinearHeads::wrong() const {
  constexpr int64_t MOST = 1 << 16;
  for (int64_t size : {num_key_heads, num_value_heads, key_dim, value_dim})
    if (size < 1 || size > MOST) return "a number of heads of linear attention, or their size, is wrong";
  if (num_value_heads % num_key_heads) return "the number of value heads is not a multiple of the number of key heads";
  if (key_dim % LANES || value_dim % LANES) return "the size of a head of linear attention is no multiple of 16";
  return std::max(key_size(), value_size()) > INT32_MAX / 8 || state_size() > INT32_MAX ? "a layer is too wide"
                                                                                        : nullptr;
}

void find_borders(const Pass &p, int64_t region, Borders &to) {
  to.all.clear(), to.readers.clear(), to.places = 0;
  const Region &states = *p.cache.regions[region];
  constexpr int64_t READS_NOT = INT64_MAX;
  static thread_local std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>
      order;  // border, slot, position, node
  order.clear();
  for (int64_t n = 0; n < p.nodes; n++) {
    const int64_t position = p.position(n), own = border_of(position);
    order.push_back({own, own ? p.slot_at(n, own - 1) : NO_SLOT, position, n});
    for (int64_t b = own - BORDER; b > first_seen(position, states.lifetime.reach); b -= BORDER)
      if (p.made_row_at(n, b - 1, region) <= UNMADE) order.push_back({b, p.slot_at(n, b - 1), READS_NOT, n});
  }
  std::sort(order.begin(), order.end());
  for (const auto &[border, slot, position, node] : order) {
    if (to.all.empty() || to.all.back().position != border || to.all.back().slot != slot) {
      const int64_t first = int64_t(to.readers.size());
      to.all.push_back({border, slot, node, first, first});
    }
    if (position != READS_NOT) to.readers.push_back(node), to.all.back().end++;
  }
  for (int64_t i = 0; i < int64_t(to.all.size()); i++) {
    Border &border = to.all[i];
    if (!border.position) continue;
    const int64_t row = p.made_row_at(border.node, border.position - 1, region);
    if (row <= UNMADE) border.row = UNMADE - row;
    else if (states.holds(row, border.position - 1)) border.row = row;
    if (border.row != row || row == NO_ROW) plan(p, states, region, to, i);
  }
  // A state without a row takes over the place of the one before, if no later one begins as that.
  for (int64_t i = 0; i < int64_t(to.all.size()); i++) {
    Border &border = to.all[i];
    if (!border.made || border.row != NO_ROW) continue;
    const Border *before = border.before < 0 ? nullptr : &to.all[border.before];
    border.place = before && before->row == NO_ROW && before->last_user == i ? before->place : to.places++;
  }
}

void attend_linearly(Pass &p, const LinearHeads &heads, const LinearMemory &memory, const LinearInputs &in,
                     float *out) {
  const Borders &borders = p.space.borders;
  float *us = room(p.space.us, p.nodes * heads.value_size());
  p.threads.each(heads.num_value_heads, 1, [&](int64_t h) {
    static thread_local PathRows rows;
    static thread_local Buffer<float> states;
    float *places = room(states, borders.places * heads.key_dim * heads.value_dim);
    Head(p, heads, memory, in, us, h, rows, places).run(borders, out);
  });
  p.threads.each(p.nodes, 8, [&](int64_t n) {
    const int64_t row = p.row(n, memory.row_region);
    if (row == NO_ROW) return;
    float *to = memory.rows.at(row);
    to = std::copy_n(in.keys + n * in.stride, heads.key_size(), to);
    to = std::copy_n(us + n * heads.value_size(), heads.value_size(), to);
    std::copy_n(in.decays + n * in.stride, heads.num_value_heads, to);
  });
}

}  // namespace specbeam
