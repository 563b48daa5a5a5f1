// The swap list that a process runs by: finds its tensors in a running step (finder.h), and swaps them as the list
// says.
#pragma once

#include <cstdint>
#include <memory>

#include "relief.h"
#include "swap_step.h"
#include "torch_private.h"

namespace memplug {

// Load and unload the swap list; a process has one at a time. It acts on the threads that train (clock.h).
void load_swap_list(SwapListPlan plan, std::shared_ptr<StorageSwapper> swapper, int32_t device_type);
void unload_swap_list();

// Called when the session that loaded the list is gone, perhaps in the middle of a step: restores all tensors, unloads
// the list, and ends relief. Returns false, and does nothing, if another list has been loaded since.
bool drop_swap_list(const std::shared_ptr<StorageSwapper>& swapper);

// Begin and end a step; `end_swap_step` restores all tensors, and returns false if the device has no room for some.
void begin_swap_step();
bool end_swap_step();

SwapListCounters swap_list_counters();

// Switches relief on or off: if a request fails, relief offloads tensors, and tries the request again. `device` may be
// the CPU, with a limit of its memory. `explain`: see relief.h. Throws if memplug cannot stand in front of the device's
// allocator.
void catch_out_of_memory(bool on, c10::Device device, Explanation explain);

// Called in the child of a fork: stops all swapping.
void silence_swap_list();
void lock_swap_list_for_fork();
void unlock_swap_list_after_fork(bool in_child);

} // namespace memplug
