// The race detector: are conflicting accesses of tasks ordered? Independent of what the scheduler happens to run.
#pragma once
#include "state.h"

namespace cudasim {

// Notes what a task that is being queued on the stream reads and writes. Returns false where it is not ordered after
// what it conflicts with; each such race is told once.
bool note_accesses(const Stream& stream, const char* task, const Ranges& ranges);

// The bytes are given back: what was done with them counts no more.
void forget(uintptr_t begin, uintptr_t end);

// A violation, where a queued task still needs bytes that go.
void check_unused(uintptr_t begin, uintptr_t end, const char* call);

// Something that is an error on hardware, if not always a visible one.
void violation(const std::string& what);

} // namespace cudasim
