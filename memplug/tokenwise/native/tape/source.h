// Where the memory of a part of a unit (unit.h) comes from.
#pragma once

#include <cstddef>

namespace memplug {

// The tensor that the unit saved for backward as the n-th, or that it returned as the n-th.
struct Source {
  bool saved;
  size_t ordinal;
};

} // namespace memplug
