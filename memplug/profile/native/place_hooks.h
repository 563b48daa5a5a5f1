// Module hooks that track where the training thread is (memplug/hooks/places.py). They are C functions for speed, since
// a step runs two of them for each layer.
#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

void add_place_hooks(pybind11::module_& module);

} // namespace memplug
