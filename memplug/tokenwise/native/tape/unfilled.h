// Memory that was requested (`empty`) and that unobserved code may have filled, which no recompute pass can repeat.
#pragma once

#include "tape.h"

namespace memplug {

// Returns whether operators of a tape read, or autograd saves, elements of an `empty` that no earlier operator was seen
// to write, or whether no operator was seen to write any of them. Valid only once all storages are known.
bool has_unfilled(const Tape& tape);

} // namespace memplug
