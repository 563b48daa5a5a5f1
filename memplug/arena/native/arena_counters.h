// The arena's counters.
#pragma once

#include <cstdint>

namespace memplug {

// Counts of requests since the arena was made; each request is in one count. Fields marked "now" hold current values.
struct ArenaCounters {
  int64_t planned = 0; // served at their planned addresses
  int64_t planned_bytes = 0;
  int64_t dynamic = 0; // served from reusable space of their group
  int64_t dynamic_bytes = 0;
  // served from other reusable space or the annex: they were unplanned, or their planned address was in use
  int64_t reusable = 0;
  int64_t reusable_bytes = 0;
  int64_t exceeding = 0; // of these: not in the plan, and made by a pass whose inputs are larger than planned
  int64_t unplanned = 0; // left to the native allocator: the plan has no such request
  int64_t occupied = 0; // left to the native allocator: the planned address was in use
  int64_t dynamic_missed = 0; // left to the native allocator: no reusable space of the group was large enough
  int64_t dynamic_missed_bytes = 0;
  int64_t dynamic_missed_largest = 0; // now: bytes of the largest of these requests in the step
  // left to the native allocator: made without gradients, as by a validation, and no space was large enough
  int64_t without_gradients = 0;
  int64_t fallback_bytes = 0; // bytes of the requests in the four counts above
  int64_t lasting = 0; // left to the native allocator: their blocks outlive the step
  int64_t lasting_bytes = 0;
  int64_t elsewhere = 0; // left to the native allocator: from threads that do not train, or in withheld passes
  int64_t written_freed = 0; // blocks that were written to after they were freed
  int64_t written_beyond = 0; // blocks that were written to beyond their end
  int64_t reserved_bytes = 0; // now: reserved, including memory of earlier plans that is still in use
  int64_t live_bytes = 0; // now: bytes of blocks in use, as requested
  int64_t live_size = 0; // now: bytes of blocks in use, rounded up
  int64_t peak_size = 0; // the largest live_size since the plan was loaded
  int64_t peak_bytes = 0; // the largest live_bytes since the plan was loaded
  int64_t leftover_bytes = 0; // now: bytes of leftovers that have been in use for a whole step
  int64_t wanted_bytes = 0; // now: bytes of blocks with `wanted` set, see `ArenaDevice::handed_out`
  // now: bytes of blocks whose free is reported to a recording: all under a plan, else wanted_bytes
  int64_t told_bytes = 0;

  int64_t from_arena() const {
    return planned + dynamic + reusable;
  }
  // Returns the number of training threads' requests that the native allocator served, without those counted in
  // `lasting`.
  int64_t fallback() const {
    return unplanned + occupied + dynamic_missed + without_gradients;
  }
  // Returns how many requests the native allocator served because the plan does not fit the program.
  int64_t mismatched() const {
    return unplanned + occupied;
  }
  // Returns the counts since `before`; fields marked "now" keep their values.
  ArenaCounters since(const ArenaCounters& before) const;
};

// The counters that Python reads, by name.
struct ArenaCounter {
  const char* name;
  int64_t ArenaCounters::*value;
  bool is_now = false;
};
inline constexpr ArenaCounter ARENA_COUNTERS[] = {
    {"planned", &ArenaCounters::planned},
    {"planned_bytes", &ArenaCounters::planned_bytes},
    {"dynamic", &ArenaCounters::dynamic},
    {"dynamic_bytes", &ArenaCounters::dynamic_bytes},
    {"reusable", &ArenaCounters::reusable},
    {"reusable_bytes", &ArenaCounters::reusable_bytes},
    {"exceeding", &ArenaCounters::exceeding},
    {"unplanned", &ArenaCounters::unplanned},
    {"occupied", &ArenaCounters::occupied},
    {"dynamic_missed", &ArenaCounters::dynamic_missed},
    {"dynamic_missed_bytes", &ArenaCounters::dynamic_missed_bytes},
    {"dynamic_missed_largest", &ArenaCounters::dynamic_missed_largest, true},
    {"without_gradients", &ArenaCounters::without_gradients},
    {"fallback_bytes", &ArenaCounters::fallback_bytes},
    {"lasting", &ArenaCounters::lasting},
    {"lasting_bytes", &ArenaCounters::lasting_bytes},
    {"elsewhere", &ArenaCounters::elsewhere},
    {"written_freed", &ArenaCounters::written_freed},
    {"written_beyond", &ArenaCounters::written_beyond},
    {"reserved_bytes", &ArenaCounters::reserved_bytes, true},
    {"leftover_bytes", &ArenaCounters::leftover_bytes, true},
    {"live_bytes", &ArenaCounters::live_bytes, true},
    {"live_size", &ArenaCounters::live_size, true},
    {"peak_bytes", &ArenaCounters::peak_bytes, true},
    {"peak_size", &ArenaCounters::peak_size, true},
};

inline ArenaCounters ArenaCounters::since(const ArenaCounters& before) const {
  ArenaCounters since = *this;
  for (const auto& [name, value, is_now] : ARENA_COUNTERS) {
    since.*value -= is_now ? 0 : before.*value;
  }
  return since;
}

} // namespace memplug
