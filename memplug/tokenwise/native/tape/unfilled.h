// Memory that an operator requested (`empty`) and that unobserved code may have filled. No recompute pass can fill it
// again.
#pragma once

#include "tape.h"

namespace memplug {

// Returns whether the memory of some `empty` on a tape is unfilled: no operator writes any of its elements, or an
// operator reads, or autograd saves, an element that no earlier operator wrote. Valid only once all storages are known.
bool has_unfilled(const Tape& tape);

} // namespace memplug
