#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

// Adds tapes and their observers to the native core's Python module.
void add_tapes(pybind11::module_& module);

} // namespace memplug
