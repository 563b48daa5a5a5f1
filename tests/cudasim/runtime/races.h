// The race detector: are conflicting accesses of tasks ordered? The answer does not depend on the order in which tasks
// run.
#pragma once
#include "state.h"

namespace cudasim {

// Notes the bytes that a task reads and writes, when the stream queues the task. Returns false at a race: the task
// conflicts with an earlier one and is not ordered after it. Each race is reported once.
bool note_accesses(const Stream& stream, const char* task, const Ranges& ranges);

// Forgets the accesses to bytes that are freed.
void forget(uintptr_t begin, uintptr_t end);

// Reports a violation if a queued task still needs bytes that are freed.
void check_unused(uintptr_t begin, uintptr_t end, const char* call);

// Reports a violation: an error on hardware, though not always a visible one.
void violation(const std::string& what);

} // namespace cudasim
