// The kinds of parts by their names, and models, which own parts.

#include "part.h"

namespace specbeam {

namespace {

struct Named {
  std::string_view name;
  MakePart make;
};

std::vector<Named> &kinds() {
  static std::vector<Named> all;
  return all;
}

}  // namespace

void add_kind(const char *name, MakePart make) { kinds().push_back({name, make}); }

std::unique_ptr<Part> make_part(const char *name) {
  for (const Named &kind : kinds())
    if (name && kind.name == name) return kind.make();
  return nullptr;
}

Model::Model(const ModelConfig &numbers) : config(numbers), layers(numbers.num_layers) {}
Model::~Model() = default;

}  // namespace specbeam
