// A mixture of experts: a router gives each node a few MLPs of many. The rows of a pass are grouped by expert, so the
// matrices of an expert are read once for all of its rows. A row's result depends on that row alone: its products do,
// and what its experts make of it is added in the order of their numbers.

#include "../pass.h"

namespace specbeam {

namespace {

class Experts final : public Part {
  int64_t num_experts = 0, experts_per_token = 0, intermediate_size = 0;
  Activation activation = SILU;
  Scoring scoring = SOFTMAX;
  Flag normalized = NO, own_norms = NO, has_expert_scale = NO;
  double sum_epsilon = 0, weight_scale = 1, router_scale = 1, swiglu_limit = 0,
         swiglu_alpha = 1;            // swiglu_limit: 0 for none
  Product router, gate, up, down;     // the last three have a matrix for each expert
  Norm selection_bias, expert_scale;  // a number for each expert, or none
  Norm router_norm, input_norm;       // of the hidden states as they are, if it has own norms

 public:
  Experts() : Part("experts") {
    number("num_experts", num_experts), number("experts_per_token", experts_per_token);
    number("intermediate_size", intermediate_size), number("activation", activation);
    number("scoring", scoring), number("normalized", normalized), number("sum_epsilon", sum_epsilon),
        number("weight_scale", weight_scale);
    number("swiglu_limit", swiglu_limit), number("swiglu_alpha", swiglu_alpha);
    number("own_norms", own_norms), number("router_scale", router_scale), number("expert_scale", has_expert_scale);
    product("router", router), product("gate", gate), product("up", up), product("down", down);
    norm_of("selection_bias", selection_bias), norm_of("expert_scale", expert_scale);
    norm_of("router_norm", router_norm), norm_of("input_norm", input_norm);
    for (Product *one : {&gate, &up, &down}) one->most_parts = MAX_EXPERTS;
  }

  const char *wrong(const Model &m, const Layer &) const override {
    if (num_experts < 1 || num_experts > MAX_EXPERTS) return "the number of experts is wrong";
    if (experts_per_token < 1 || experts_per_token > num_experts) return "a token has more experts than there are";
    if (own_norms && has_norm) return "the input of experts is normed twice";
    const int64_t widest = INT32_MAX / 2 / num_experts;
    return intermediate_size < 1 || intermediate_size > widest || m.config.hidden_size > widest
               ? "the width of an expert is wrong"
               : nullptr;
  }

  const char *incomplete(const Model &m) const override {
    const int64_t hidden = m.config.hidden_size, inner = intermediate_size;
    const bool is_exact = router.parts.size() == 1 && router.parts[0].format == F32_ROWS;
    if (!is_shaped(router, num_experts, hidden) || !is_exact) return "the router of experts";
    if (selection_bias && selection_bias.size != num_experts) return "the selection bias of experts";
    if (has_expert_scale ? expert_scale.size != num_experts : bool(expert_scale)) return "the scales of experts";
    for (const Norm &norm : {router_norm, input_norm})
      if (own_norms ? !is_sized(norm, hidden) : bool(norm)) return "a norm of experts";
    return are_shaped(gate, inner, hidden) && are_shaped(up, inner, hidden) && are_shaped(down, hidden, inner)
               ? nullptr
               : "an expert";
  }

  const Product &first() const override { return router; }

  void run(Pass &p) const override {
    const int64_t hidden = p.c.hidden_size, inner = intermediate_size, rows = p.rows(), most = experts_per_token;
    const int64_t all = rows * most, stride = stride_of(2 * inner);
    Routes &routes = p.space.routes;
    float *wide = room(p.space.wide, std::max(all * stride, rows * stride_of(num_experts)));
    if (own_norms) p.threads.each(rows, 4, [&](int64_t r) { p.activations.set(r, normed(p, router_norm, r)); });
    multiply(router, p.threads, p.activations, wide, stride_of(num_experts));
    routes.expert.resize(all), routes.place.resize(all);
    float *weights = room(routes.weight, all);
    p.threads.each(rows, 16, [&](int64_t r) {
      choose(wide + r * stride_of(num_experts), &routes.expert[r * most], weights + r * most);
    });
    group(routes);

    p.activations.resize(all, {gate.parts[0], up.parts[0]});
    std::vector<Job> &jobs = p.space.jobs;
    jobs.clear();
    each_expert(routes, [&](int64_t e, int64_t first, int64_t count) {
      routes.job[e] = int32_t(jobs.size());
      jobs.push_back({p.activations.part(first, count), wide + first * stride, 2, {}, {}});
      set_part(jobs.back(), 0, gate, e), set_part(jobs.back(), 1, up, e);
    });
    p.threads.each(rows, 4, [&](int64_t r) {
      const float *x = own_norms ? normed(p, input_norm, r) : p.normed + p.going()[r] * hidden;
      for (int64_t i = r * most; i < (r + 1) * most; i++) {
        const int64_t e = routes.expert[i];
        jobs[routes.job[e]].x.set(routes.place[i] - routes.first[e], x);
      }
    });
    multiply(jobs.data(), int64_t(jobs.size()), p.threads, stride);

    p.activations.resize(all, {down.parts[0]});
    const int64_t out_stride = stride_of(hidden);
    float *made = room(p.space.attended, all * out_stride);
    jobs.clear();
    each_expert(routes, [&](int64_t e, int64_t first, int64_t count) {
      jobs.push_back({p.activations.part(first, count), made + first * out_stride, 1, {}, {}});
      set_part(jobs.back(), 0, down, e);
    });
    p.threads.each(all, 4, [&](int64_t i) {
      static thread_local Buffer<float> activated;
      float *row = room(activated, inner);
      const int64_t e = routes.expert[i], place = routes.place[i];
      activate_row(wide + place * stride, row);
      jobs[routes.job[e]].x.set(place - routes.first[e], row);
    });
    multiply(jobs.data(), int64_t(jobs.size()), p.threads, out_stride);
    p.threads.each(rows, 4, [&](int64_t r) {
      float *to = p.out + r * p.out_stride;
      for (int64_t i = 0; i < hidden; i += LANES) {
        F32 sum{};
        for (int64_t j = r * most; j < (r + 1) * most; j++)
          sum = multiply_add(load<F32>(made + routes.place[j] * out_stride + i), all_lanes(weights[j]), sum);
        store_some(to + i, sum, hidden - i);
      }
    });
  }

 private:
  // A row of hidden states with one of its own norms. It is valid until the thread norms another row.
  static const float *normed(const Pass &p, const Norm &norm, int64_t r) {
    static thread_local Buffer<float> row;
    const int64_t hidden = p.c.hidden_size;
    p.norm_row(norm, p.normed + p.going()[r] * hidden, room(row, hidden), hidden);
    return room(row, hidden);
  }

  static F32 all_lanes(float x) { return specbeam::all(x); }

  // Whether a product has a matrix of this shape for each expert, all in one format.
  bool are_shaped(const Product &p, int64_t rows, int64_t columns) const {
    if (int64_t(p.parts.size()) != num_experts || (p.bias && p.bias_size != num_experts * rows)) return false;
    for (const Matrix &one : p.parts)
      if (one.rows != rows || one.columns != columns || one.format != p.parts[0].format) return false;
    return true;
  }

  static void set_part(Job &job, int64_t i, const Product &p, int64_t e) {
    job.parts[i] = &p.parts[e], job.bias[i] = p.bias ? p.bias + e * p.parts[e].rows : nullptr;
  }

  // Calls f(expert, the place of its first row, how many rows) for each expert that has rows.
  template <class F> void each_expert(const Routes &routes, const F &f) const {
    for (int64_t e = 0; e < num_experts; e++)
      if (const int64_t count = routes.first[e + 1] - routes.first[e]) f(e, routes.first[e], count);
  }

  // Gives a row the experts with the highest scores, ascending by their numbers. Of equal scores, the lower experts are
  // taken. logits: of the router, [num_experts]; they become scores.
  void choose(float *logits, int32_t *experts, float *weights) const {
    const int64_t n = num_experts, most = experts_per_token;
    if (const float scale = float(router_scale); scale != 1)
      for (int64_t e = 0; e < n; e++) logits[e] *= scale;
    float highest = logits[0];
    for (int64_t e = 1; e < n; e++) highest = std::max(highest, logits[e]);
    static thread_local Buffer<float> shares_of, ranks_of;
    float *share = room(shares_of, n), *rank = room(ranks_of, n), total = 0;
    for (int64_t e = 0; e < n; e += LANES) {
      const F32 x = load_some(logits + e, n - e);
      store_some(share + e, scoring == SIGMOID ? 1.0f / (1.0f + exp(-x)) : exp(x - highest), n - e);
    }
    for (int64_t e = 0; e < n; e++) {
      rank[e] = scoring == SIGMOID ? share[e] : logits[e];
      if (selection_bias) rank[e] += selection_bias.weight[e];
      total += share[e];
    }
    // Sorted by score: a number that is NaN is above and below no other one.
    for (int64_t e = 0; e < n; e++) {
      int64_t at = std::min(e, most);
      while (at > 0 && rank[e] > rank[experts[at - 1]]) {
        if (at < most) experts[at] = experts[at - 1];
        at--;
      }
      if (at < most) experts[at] = int32_t(e);
    }
    std::sort(experts, experts + most);
    if (normalized) {
      total = scoring == SIGMOID ? float(sum_epsilon) : 0;
      for (int64_t j = 0; j < most; j++) total += share[experts[j]];
    }
    const bool divided = normalized || scoring == SOFTMAX;
    for (int64_t j = 0; j < most; j++) weights[j] = share[experts[j]] / (divided ? total : 1.0f) * float(weight_scale);
    if (has_expert_scale)
      for (int64_t j = 0; j < most; j++) weights[j] *= expert_scale.weight[experts[j]];
  }

  // Gives the rows their places: expert by expert, and the rows of an expert in their order.
  void group(Routes &routes) const {
    routes.first.assign(num_experts + 1, 0), routes.job.resize(num_experts);
    for (int32_t e : routes.expert) routes.first[e + 1]++;
    for (int64_t e = 0; e < num_experts; e++) routes.first[e + 1] += routes.first[e];
    for (size_t i = 0; i < routes.expert.size(); i++) routes.place[i] = int32_t(routes.first[routes.expert[i]]++);
    for (int64_t e = num_experts; e > 0; e--) routes.first[e] = routes.first[e - 1];
    routes.first[0] = 0;
  }

  // in: the outputs of gate and up. to: [intermediate_size]
  void activate_row(const float *in, float *to) const {
    const int64_t inner = intermediate_size;
    const float limit = float(swiglu_limit), alpha = float(swiglu_alpha);
    for (int64_t i = 0; i < inner; i += LANES) {
      const F32 x = load_some(in + i, inner - i), y = load_some(in + inner + i, inner - i);
      F32 made;
      if (limit > 0) {
        const F32 gated = smaller(all_lanes(limit), x);
        const F32 values = larger(all_lanes(-limit), smaller(all_lanes(limit), y));
        made = (values + 1.0f) * (gated / (1.0f + exp(-alpha * gated)));
      } else {
        made = activate(activation, x) * y;
      }
      store_some(to + i, made, inner - i);
    }
  }
};

const Kind<Experts> EXPERTS("experts");

}  // namespace

}  // namespace specbeam
