// A swap list in force: finds the tensors that it names in a step as it runs, and has them away when it says so.
//
// The clock is the program's outermost operators (program_clock.h). A tensor is found at its last use by its features
// (features.h), its size, its dtype and the operator that uses it, near the place that it had in the planned step: nearer
// than half way to the next tensor that looks the same there. No match is better than a wrong one; a wrong one would cost
// time, not values (storage_swapper.h).
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "features.h"
#include "storage_swapper.h"

namespace memplug {

// Packed as TARGET in memplug/swap/tables.py. Places are outermost operators of the program.
#pragma pack(push, 1)
struct SwapTarget {
  int64_t nbytes;
  int32_t dtype; // c10::ScalarType, of the first tensor seen in the storage
  int32_t operator_number; // that uses it last; given by name in Python
  uint8_t output; // of that operator, else an input
  int32_t slot; // its number among the operator's tensors of that kind
  uint32_t uses, kinds; // Features, that use included
  uint64_t recent;
  int32_t tolerance; // places by which it may be off
  int32_t last_use, release, prefetch, next_use;
};
#pragma pack(pop)

struct SwapListPlan {
  std::vector<int32_t> program; // numbers of its operators
  std::vector<uint8_t> ranks; // by number, see `Features::read_by`; 255 beyond the end
  std::vector<SwapTarget> targets; // by last use, rising
  int64_t min_bytes = 0; // smaller storages are not looked at
};

struct SwapListCounters {
  int64_t steps = 0;
  int64_t found = 0, missed = 0; // targets, over all steps
};

// Of the process, for the threads that train (clock.h): there is one list at a time.
void load_swap_list(SwapListPlan plan, std::shared_ptr<StorageSwapper> swapper, int32_t device_type);
void unload_swap_list();

// A step begins, or is over: then everything is back.
void begin_swap_step();
bool end_swap_step();

SwapListCounters swap_list_counters();

// In the child of a fork: nothing more is swapped.
void silence_swap_list();
void lock_swap_list_for_fork();
void unlock_swap_list_after_fork();

} // namespace memplug
