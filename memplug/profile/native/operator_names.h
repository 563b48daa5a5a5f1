// Operators as small integers, the same for as long as the process lives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_private.h"

namespace memplug {

// An operator's number, found without a lock.
constexpr int32_t NOT_AN_OPERATOR = -1; // a label, such as those that autograd's engine puts around a node
int32_t number_of(const at::RecordFunction& function);

// The names of all that have a number, by number.
std::vector<std::string> operator_names();

// The numbers of operators of these names, given to those that have none yet.
std::vector<int32_t> operator_numbers(const std::vector<std::string>& names);

void lock_names_for_fork();
void unlock_names_after_fork();

} // namespace memplug
