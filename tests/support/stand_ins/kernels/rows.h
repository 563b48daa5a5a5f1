// Moves rows to their experts and back.
#pragma once
#include "launch.h"

namespace stand_ins {

// Returns out[i] = sum over j of input[sources[i, j]]; a source of -1 adds nothing.
Tensor gather_rows(const Tensor& input, const Tensor& sources);

// Returns the place of row t at expert e, int64[t, e], -1 if it does not go there; rows of one expert lie together.
Tensor row_map(const Tensor& routing);

// Inverts a `row_map`: returns for each of `count` places the row t, and the index of (t, e) in the map.
std::tuple<Tensor, Tensor> invert_row_map(const Tensor& map, int64_t count);

// Returns the row of each place after chunks of these sizes are reordered, and the reverse map.
std::tuple<Tensor, Tensor> chunk_map(const Tensor& sizes, const Tensor& order, int64_t rows);

} // namespace stand_ins
