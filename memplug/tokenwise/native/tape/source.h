// The source of a unit's part (unit.h): a tensor of the unit's call that lies in the part's memory.
#pragma once

#include <cstddef>

namespace memplug {

// Tensor number `ordinal` among the tensors that the unit saved for backward, or among those that it returned.
struct Source {
  bool saved; // else returned
  size_t ordinal;
};

} // namespace memplug
