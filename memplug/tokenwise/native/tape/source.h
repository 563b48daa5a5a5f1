// The source of a unit's part (unit.h): the tensor of a call of the unit whose memory the part is.
#pragma once

#include <cstddef>

namespace memplug {

// Tensor number `ordinal` among the tensors that the unit saved for backward, or among those that it returned.
struct Source {
  bool saved; // else returned
  size_t ordinal;
};

} // namespace memplug
