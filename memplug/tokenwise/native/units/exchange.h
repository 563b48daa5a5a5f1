// Operators of c10d, in which other ranks take part: they write to their arguments, and return work to wait for.
#pragma once

#include <ATen/core/ivalue.h>

namespace memplug {

// Waits for the work among an exchange's results, if there is any.
void wait_for(c10::ArrayRef<c10::IValue> results);

// Returns an object or a capsule among an operator's arguments as a tape keeps it. A process group is held weakly: the
// last holder of a group waits until the group's threads have ended, and may be one of these threads.
c10::IValue kept_object(const c10::IValue& object);

// Returns the argument to call with again; none if its process group is gone.
c10::IValue called_with(const c10::IValue& kept);

// Returns this process's rank in a process group, which is an operator's argument, itself or by name; -1 if it is gone.
int64_t rank_in(const c10::IValue& kept);

// Returns whether two objects or capsules, kept or not, are the same: they are boxed anew for each call.
bool same_object(const c10::IValue& one, const c10::IValue& other);

// Intercepts exchanges: from now on one whose caller would wait for it at once has ended when it returns, on threads
// for which `is_watched` is true. Some back ends copy the result at each wait, which is no operator of a region.
void stand_before_exchanges(bool (*is_watched)());

// Stops intercepting. No exchange may run meanwhile.
void leave_exchanges();

} // namespace memplug
