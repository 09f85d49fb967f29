// The enumerations and structures of interface.def.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace specbeam {

#define ENUM(name, ...) enum name : int64_t { __VA_ARGS__ };
#define STRUCTURE(name) struct name {
#define FIELD(type, name) type name{};
#define END \
  }         \
  ;
#include "interface.def"

// The name of a type, and the first reason why a value is none of its values, or null.
inline const char *type_name(int64_t) { return "int64_t"; }
inline const char *type_name(double) { return "double"; }
template <class T> const char *wrong_value(const T &) { return nullptr; }
inline const char *wrong_value(double number) {
  return !std::isfinite(number) ? "a number is not finite" : number < 0 ? "a number is negative" : nullptr;
}
#define ENUM(name, ...)                                \
  inline const char *type_name(name) { return #name; } \
  inline const char *wrong_value(name value) {         \
    for (name one : {__VA_ARGS__})                     \
      if (value == one) return nullptr;                \
    return "a value is not one of those of " #name;    \
  }
#include "interface.def"

}  // namespace specbeam
