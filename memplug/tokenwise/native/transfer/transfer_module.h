// Errors of transfers, as Python sees them.
#pragma once

#include <exception>

namespace memplug {

// Sets the error of `memplug.errors` that a transfer's exception stands for; returns false for any other exception.
bool set_error(const std::exception& error);

} // namespace memplug
