// The granularity of torch's CUDA allocator, and of the arena. Knows no torch.
#pragma once

#include <cstdint>

namespace memplug {

constexpr int64_t BLOCK_BYTES = 512; // as memplug/sizes.py has it for Python

// Bytes of the whole blocks that a request takes.
constexpr int64_t in_blocks(int64_t nbytes) {
  return (nbytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

} // namespace memplug
