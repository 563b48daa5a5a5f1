// Finds memory that an operator requested (`empty`) and unobserved code may have filled, so that no recompute pass can
// fill it again.
#pragma once

#include "tape.h"

namespace memplug {

// Returns whether the memory of some `empty` on a tape is unfilled: no operator writes to it, or an operator reads (or
// autograd saves) an element that no earlier operator wrote. Needs the tape's `nbytes`.
bool has_unfilled(const Tape& tape);

} // namespace memplug
