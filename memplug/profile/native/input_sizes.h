// Remembers the sizes of a step's inputs: all dimensions of the tensors that each forward gets. No torch.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace memplug {

// Notes the input sizes of a micro-batch's forward; they stay known until its next forward.
void note_input_sizes(int32_t micro_batch, std::vector<int64_t> sizes);

// Returns a number that changes, from 1 on, whenever a forward gets inputs of other sizes than before; 0: none yet.
uint32_t input_version();

// Returns this number, and the input sizes of a micro-batch; none if no forward of it began.
std::pair<uint32_t, std::vector<int64_t>> input_sizes(int32_t micro_batch);

// Returns the input sizes of all micro-batches.
std::vector<std::vector<int64_t>> input_sizes();

} // namespace memplug
