// Raises the errors of transfers in Python.
#pragma once

#include <exception>

namespace memplug {

// Raises in Python the error of `memplug.errors` for a `Failure` (transfer.h). Returns false, and raises nothing, for
// any other exception.
bool set_error(const std::exception& error);

} // namespace memplug
