// Numbers for operators, the same for as long as the process lives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_private.h"

namespace memplug {

// A label instead of an operator, such as autograd's engine puts around a node.
constexpr int32_t NOT_AN_OPERATOR = -1;
// Returns the operator's number, usually without a lock.
int32_t number_of(const at::RecordFunction& function);

// Returns the names of all numbered operators, by number.
std::vector<std::string> operator_names();

// Returns the numbers of operators with these names; names without a number get one.
std::vector<int32_t> operator_numbers(const std::vector<std::string>& names);

void lock_names_for_fork();
void unlock_names_after_fork();

} // namespace memplug
