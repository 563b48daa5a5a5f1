// Which task runs next: as late, as early or in as odd an order as the events allow.
#pragma once
#include "state.h"

namespace cudasim {

// Queues a task, checks its accesses, and runs the tasks that the policy runs now. With Races::RAISE, returns false at
// a race.
bool push(Stream& stream, Task task);

// Queues work that takes this many virtual seconds; negative: as long as it really takes.
cudaError_t run_on(Stream& stream, const char* name, double seconds, Ranges ranges, std::function<void()> run);

// Run only the tasks that are needed to reach an event, to finish a stream, or to finish all streams.
void complete(const Mark& mark);
void finish(Stream& stream);
void finish_all();

// Runs a few tasks or none, at random, under Policy::RANDOM.
void run_some();

// Make the host wait for an event, a stream or all streams: later tasks are ordered after them, and the host's clock
// advances.
void wait_for(const Mark& mark);
void wait_for(Stream& stream);
void wait_for_all();

// Returns the host's time as if the device were another machine. The time that the device's work takes on this machine
// does not count; the time that the host would wait for this work does.
double now();

} // namespace cudasim
