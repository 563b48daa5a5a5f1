// The block size of torch's CUDA allocator and of the arena. Uses no torch.
#pragma once

#include <cstdint>

namespace memplug {

constexpr int64_t BLOCK_BYTES = 512; // the same value as in memplug/sizes.py

// Returns the bytes of a request rounded up to whole blocks.
constexpr int64_t in_blocks(int64_t nbytes) {
  return (nbytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

} // namespace memplug
