// Errors of transfers, as Python sees them.
#pragma once

#include <exception>

namespace memplug {

// Raises in Python the error of `memplug.errors` that a `Failure` (transfer.h) stands for. Returns false, and raises
// nothing, for any other exception.
bool set_error(const std::exception& error);

} // namespace memplug
