// The origin of the memory of a unit's part (unit.h).
#pragma once

#include <cstddef>

namespace memplug {

// The tensor with number `ordinal` among those that the unit saved for backward, or among those that it returned.
struct Source {
  bool saved;
  size_t ordinal;
};

} // namespace memplug
