// Adds what Python sees of swap lists to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

void add_swaps(pybind11::module_& module);

} // namespace memplug
