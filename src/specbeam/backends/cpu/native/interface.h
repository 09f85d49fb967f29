// The enumerations and structures of interface.def.
#pragma once

#include <cstdint>

namespace specbeam {

#define ENUM(name, ...) enum name : int64_t { __VA_ARGS__ };
#define STRUCTURE(name) struct name {
#define FIELD(type, name) type name{};
#define END \
  }         \
  ;
#include "interface.def"

}  // namespace specbeam
