// The source of a unit's part (unit.h): a tensor in the part's memory that the unit saved or returned.
#pragma once

#include <cstddef>

namespace memplug {

// The tensor at index `ordinal` of those that the unit saved for backward, or of those that it returned.
struct Source {
  bool saved; // the unit saved it; otherwise the unit returned it
  size_t ordinal;
};

} // namespace memplug
