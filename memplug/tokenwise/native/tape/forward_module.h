#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

// Adds forwards and their tapes to the native core's Python module.
void add_forwards(pybind11::module_& module);
void add_withheld(pybind11::module_& module);

} // namespace memplug
