// A part of a layer: see checkpoints/parts. A file of this folder has the parts of one kind. It says their numbers,
// products and norms by the names that they have there, what makes them wrong, and how they run.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "../kernels.h"

namespace specbeam {

struct Pass;

class Part {
 public:
  const std::string name;  // of its kind; no other part of its layer has it
  // Which norms it has, and whether it reads what the part before it reads.
  Flag has_norm = YES, has_output_norm = NO, has_joint_norm = NO, has_sum_norm = NO, has_sum_scale = NO, parallel = NO;
  // Of its input, of its output, of that with the output of the part before, and of the hidden states with its output.
  Norm norm, output_norm, joint_norm, sum_norm;
  double output_scale = 1;  // factor of its output, after its norm
  Norm sum_scale;           // of one number, which the hidden states are multiplied with in the end
  int64_t layer = 0;        // its number

  virtual ~Part() = default;
  Part(const Part &) = delete;

  // The first error in its numbers, or null. before: the parts before it in its layer
  virtual const char *wrong(const Model &, const Layer &before) const = 0;
  // Adds a section to a cache, where it keeps its numbers of each token. Returns false if that is too much.
  virtual bool add_memory(const Model &, Cache &, const Layer &) { return true; }
  // The first of its parameters that is missing or has a wrong shape, or null.
  virtual const char *incomplete(const Model &) const = 0;
  // Whether nodes read what it keeps of their ancestors.
  virtual bool has_memory() const { return false; }
  // If it has memory: how many last positions a node reads, its own included; 0 for all positions.
  virtual int64_t reach() const { return 0; }
  // Whether its input begins with the normed embedding of the node's token, as in a draft head.
  virtual bool reads_embedding() const { return false; }
  // Its heads whose scores of a source a segment may ask for.
  virtual int64_t probed_heads() const { return 0; }
  // Writes what it keeps of an encoder's output into slots. states: [count, hidden of the encoder]
  virtual void place(const Model &, const Cache &, Threads &, Workspace &, const float *, const int64_t *,
                     int64_t) const {}
  // The product that reads its input.
  virtual const Product &first() const = 0;
  // Writes what it makes of the nodes that go on to Pass::out. The input is in the activations and in Pass::normed.
  virtual void run(Pass &) const = 0;

  // Sets its numbers, in the order of `fields`. Returns false if there are others, or one has a value that its type has
  // not.
  bool set(const double *values, int64_t count) const {
    if (count != int64_t(numbers.size())) return false;
    for (const Number &one : numbers)
      if (!one.set(one.place, *values++)) return false;
    return true;
  }
  // The types and names of its numbers.
  std::string fields() const {
    std::string text;
    for (const Number &one : numbers) text += std::string(one.type) + " " + one.name + ";";
    return text;
  }
  // Its parameters by the names of their modules, without kind: "mlp.down", "mlp_norm", "post_mlp_norm",
  // "mlp_sum_norm".
  Product *product_named(std::string_view module) { return found(products, module); }
  Norm *norm_named(std::string_view module) { return found(norms, module); }

 protected:
  explicit Part(const std::string &part_name) : name(part_name) {
    number("norm", has_norm), number("output_norm", has_output_norm), number("joint_norm", has_joint_norm);
    number("sum_norm", has_sum_norm), number("sum_scale", has_sum_scale), number("parallel", parallel),
        number("output_scale", output_scale);
    norms.push_back({name + "_norm", &norm}), norms.push_back({"post_" + name + "_norm", &output_norm});
    norms.push_back({name + "_joint_norm", &joint_norm}), norms.push_back({name + "_sum_norm", &sum_norm});
    norms.push_back({name + "_sum_scale", &sum_scale});
  }

  template <class T> void number(const char *own, T &value) {
    numbers.push_back({own, type_name(value), &value, assign<T>});
  }
  void product(const char *own, Product &place) { products.push_back({name + "." + own, &place}); }
  void norm_of(const char *own, Norm &place) { norms.push_back({name + "." + own, &place}); }

 private:
  struct Number {
    const char *name, *type;
    void *place;
    bool (*set)(void *, double);
  };
  template <class T> static bool assign(void *place, double value) {
    T &to = *static_cast<T *>(place);
    if constexpr (std::is_same_v<T, double>) {
      to = value;
    } else {
      if (!(value >= -1 && value <= INT32_MAX) || value != std::floor(value)) return false;
      to = T(int64_t(value));
    }
    return !wrong_value(to);
  }
  template <class T> struct Named {
    std::string name;
    T *place;
  };
  template <class T> static T *found(const std::vector<Named<T>> &all, std::string_view module) {
    for (const Named<T> &one : all)
      if (one.name == module) return one.place;
    return nullptr;
  }

  std::vector<Number> numbers;
  std::vector<Named<Product>> products;
  std::vector<Named<Norm>> norms;
};

// Whether a product has this shape, and a bias of as many numbers if it has one.
inline bool is_shaped(const Product &p, int64_t rows, int64_t columns) {
  for (const Matrix &part : p.parts)
    if (part.columns != columns) return false;
  return bool(p) && p.rows() == rows && (!p.bias || p.bias_size == rows);
}
inline bool is_sized(const Norm &norm, int64_t size) { return norm && norm.size == size; }

// The kinds of parts by their names. Each file adds its own.
using MakePart = std::unique_ptr<Part> (*)();
void add_kind(const char *name, MakePart);
template <class T> struct Kind {
  explicit Kind(const char *name) {
    add_kind(name, []() -> std::unique_ptr<Part> { return std::make_unique<T>(); });
  }
};
// A part without parameters, or null for a name that is not known.
std::unique_ptr<Part> make_part(const char *name);

}  // namespace specbeam
