// A swap list in force: finds the tensors that it names in a step as it runs (finder.h), and has them away when it says so.
#pragma once

#include <cstdint>
#include <memory>

#include "relief.h"
#include "swap_step.h"
#include "torch_private.h"

namespace memplug {

// Of the process, for the threads that train (clock.h): there is one list at a time.
void load_swap_list(SwapListPlan plan, std::shared_ptr<StorageSwapper> swapper, int32_t device_type);
void unload_swap_list();

// The session that loaded it is gone, in whatever step it was: everything is back, no request is caught. False: another
// list was loaded since, and stays.
bool drop_swap_list(const std::shared_ptr<StorageSwapper>& swapper);

// A step begins, or is over: then everything is back.
void begin_swap_step();
bool end_swap_step();

SwapListCounters swap_list_counters();

// Whether requests that fail, of a device or of the CPU where that has a limit, are tried again once tensors of the step have
// left. `explain`: see relief.h. Throws where the device's allocator cannot be stood in front of.
void catch_out_of_memory(bool on, c10::Device device, Explanation explain);

// In the child of a fork: nothing more is swapped.
void silence_swap_list();
void lock_swap_list_for_fork();
void unlock_swap_list_after_fork(bool in_child);

} // namespace memplug
