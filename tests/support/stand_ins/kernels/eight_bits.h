// Casts to eight bits with a scale, and the state of delayed scaling.
#pragma once
#include <string>

#include "matmul.h"

namespace stand_ins {

// How scales come about: by the state of earlier steps, of all elements, or of each `block` of a row.
enum class Scaling { delayed, current, block, power_of_two_block };

// Returns the elements in eight bits and what each (or each of a block) is to be multiplied by to have it back.
// "delayed" reads `scale`; that and "current" put the largest magnitude into `amax`, where it is larger. `transposed`:
// what is stored is the matrix's transpose. `out`: where both go, instead of new memory.
std::tuple<Tensor, Tensor> quantize(const Tensor& input, std::optional<Tensor> scale, std::optional<Tensor> amax,
                                    at::ScalarType type, Scaling scaling, int64_t block, bool transposed,
                                    std::optional<std::tuple<Tensor, Tensor>> out);
Tensor dequantize(const Operand& operand, at::ScalarType type);
Tensor transpose(const Tensor& eight_bits);

// At the end of a step of delayed scaling: the reduced amaxes go into the histories, scales follow from those, and the
// histories move on by one.
void update_scales(const Tensor& amaxes, const std::vector<Tensor>& histories, const std::vector<Tensor>& scales,
                   const std::string& algorithm, double largest, int64_t margin);

} // namespace stand_ins
