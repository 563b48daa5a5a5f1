// What Python sees of transfers and host rows.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace memplug {

// Sets the error of `memplug.errors` that a transfer's exception stands for; false where it is none of a transfer's.
bool set_error(const std::exception& error);

void add_transfers(pybind11::module_& module);

} // namespace memplug
