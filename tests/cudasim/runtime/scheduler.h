// Which task runs next: as late, as early or in as odd an order as the events allow.
#pragma once
#include "state.h"

namespace cudasim {

// Queues a task, checks its accesses, and runs what the policy runs by now. Returns false where a race is to be an error.
bool push(Stream& stream, Task task);

// Queues work of this duration in virtual seconds; negative: as long as it really takes.
cudaError_t run_on(Stream& stream, const char* name, double seconds, Ranges ranges, std::function<void()> run);

// Run what this needs, and no more.
void complete(const Mark& mark);
void finish(Stream& stream);
void finish_all();

// Under Policy::RANDOM, now and then.
void run_some();

// The host waits: it has seen all of this done, and time has passed for it.
void wait_for(const Mark& mark);
void wait_for(Stream& stream);
void wait_for_all();

// The host's time, as if the device were another machine: without the time that its work takes here, and with the time
// that the host would have had to wait for it.
double now();

} // namespace cudasim
