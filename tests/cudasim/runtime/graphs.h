// Capture of streams into graphs.
#pragma once
#include "state.h"

namespace cudasim {

// For calls that a capture does not allow: returns whether the stream is being captured, and makes that capture fail.
bool invalidates_capture(Stream& stream);

// Makes the stream wait for an event that was recorded in a capture, and take part in this capture from now on.
cudaError_t join_capture(Stream& stream, const Mark& mark);

} // namespace cudasim
