// Module hooks that say where the training thread is (memplug/hooks/places.py): C functions, since a step runs two a layer.
#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

void add_place_hooks(pybind11::module_& module);

} // namespace memplug
