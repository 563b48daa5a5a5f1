// Which task runs next: as late, as early or in as odd an order as the events allow.
#pragma once
#include "state.h"

namespace cudasim {

// Queues a task, checks its accesses, and runs the tasks that the policy runs now. Returns false at a race, if races
// are errors (Races::RAISE).
bool push(Stream& stream, Task task);

// Queues work that takes so many virtual seconds; negative: as long as it really takes.
cudaError_t run_on(Stream& stream, const char* name, double seconds, Ranges ranges, std::function<void()> run);

// Run tasks until the event is reached, the stream is finished, or all streams are; no more than that needs.
void complete(const Mark& mark);
void finish(Stream& stream);
void finish_all();

// Runs a few tasks or none, at random, under Policy::RANDOM.
void run_some();

// Make the host wait for an event, a stream or all streams: later tasks are ordered after these, and the host's time
// passes.
void wait_for(const Mark& mark);
void wait_for(Stream& stream);
void wait_for_all();

// Returns the host's time, as if the device were another machine: without the time that the device's work takes here,
// and with the time that the host would have had to wait for it.
double now();

} // namespace cudasim
