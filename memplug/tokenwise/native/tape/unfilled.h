// Memory that was asked for (`empty`), and that unobserved code may have filled: no recompute pass does that again.
#pragma once

#include "tape.h"

namespace memplug {

// Whether operators of a tape read elements of an `empty`, or autograd saves some, that no operator before was seen to
// write; or none was seen to write any. To be asked when all storages are known.
bool has_unfilled(const Tape& tape);

} // namespace memplug
