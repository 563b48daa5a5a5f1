// Capture of streams into graphs.
#pragma once
#include "state.h"

namespace cudasim {

// Whether the stream is being captured, which then fails: by a call that a capture does not allow.
bool invalidates_capture(Stream& stream);

// The stream waits for an event that was recorded in a capture, and takes part in it from now on.
cudaError_t join_capture(Stream& stream, const Mark& mark);

} // namespace cudasim
