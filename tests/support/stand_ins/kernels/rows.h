// Rows that move to their experts and back.
#pragma once
#include "launch.h"

namespace stand_ins {

// out[i] = sum over j of input[sources[i, j]]; a source of -1 adds nothing.
Tensor gather_rows(const Tensor& input, const Tensor& sources);

// Where row t goes for expert e, [t, e], int64: rows of one expert lie together, -1 where it does not go there.
Tensor row_map(const Tensor& routing);

// Of such a map: which row each of `count` places has, and which element of [t, e].
std::tuple<Tensor, Tensor> invert_row_map(const Tensor& map, int64_t count);

// Which row each place has where chunks of these sizes are put in another order, and the reverse.
std::tuple<Tensor, Tensor> chunk_map(const Tensor& sizes, const Tensor& order, int64_t rows);

} // namespace stand_ins
