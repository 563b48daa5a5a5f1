// Gives each operator a number, which stays the same while the process lives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_private.h"

namespace memplug {

// Stands for the operator's number where torch reports a label that is no operator, such as the autograd engine's label
// around a node.
constexpr int32_t NOT_AN_OPERATOR = -1;
// Returns the operator's number, usually without a lock.
int32_t number_of(const at::RecordFunction& function);

// Returns the names of all operators that have a number, by number.
std::vector<std::string> operator_names();

// Returns the numbers of the operators with these names; gives a number to those that have none yet.
std::vector<int32_t> operator_numbers(const std::vector<std::string>& names);

void lock_names_for_fork();
void unlock_names_after_fork();

} // namespace memplug
