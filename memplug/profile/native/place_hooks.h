// Module hooks that track where the training thread is (memplug/hooks/places.py). They are C functions for speed, since
// each forward of a layer runs two of them.
#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

void add_place_hooks(pybind11::module_& module);

} // namespace memplug
