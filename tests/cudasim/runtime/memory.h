// Device memory, and host memory that the driver knows.
#pragma once
#include "state.h"

namespace cudasim {

const size_t PAGE_BYTES = 4096;

// Returns whether all of the bytes lie in one of these pieces of memory, or in several side by side.
bool lies_in(const std::map<uintptr_t, size_t>& pieces, const void* pointer, size_t bytes = 1);

inline Range range_of(const void* pointer, size_t bytes, bool write) {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  return {at, at + bytes, write};
}

} // namespace cudasim
