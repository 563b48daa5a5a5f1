// Casts to eight bits with a scale, and the state of delayed scaling.
#pragma once
#include <string>

#include "matmul.h"

namespace stand_ins {

// How scales are found: from earlier steps, from all elements, or from each `block` of a row.
enum class Scaling { delayed, current, block, power_of_two_block };

// Returns the elements in eight bits, and the factors that restore them: one for all, or one for each block. "delayed"
// reads `scale`. If `amax` is given, raises it to the largest magnitude. `transposed`: stores the transpose of the
// matrix. `out`: memory for elements and factors, instead of new memory.
std::tuple<Tensor, Tensor> quantize(const Tensor& input, std::optional<Tensor> scale, std::optional<Tensor> amax,
                                    at::ScalarType type, Scaling scaling, int64_t block, bool transposed,
                                    std::optional<std::tuple<Tensor, Tensor>> out);
Tensor dequantize(const Operand& operand, at::ScalarType type);
Tensor transpose(const Tensor& eight_bits);

// Ends a step of delayed scaling: stores the reduced amaxes in the histories, computes scales from them, and moves the
// histories on by one.
void update_scales(const Tensor& amaxes, const std::vector<Tensor>& histories, const std::vector<Tensor>& scales,
                   const std::string& algorithm, double largest, int64_t margin);

} // namespace stand_ins
