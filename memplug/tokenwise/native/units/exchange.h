// Exchanges: operators of c10d, in which other ranks take part. They write to their arguments, and return a work object
// to wait for.
#pragma once

#include <ATen/core/ivalue.h>

namespace memplug {

// Waits for the work objects among an exchange's results.
void wait_for(c10::ArrayRef<c10::IValue> results);

// Returns an object or a capsule among an operator's arguments as a tape keeps it. A tape holds a process group weakly:
// the last holder of a group waits until the group's threads have ended, and may itself be one of these threads.
c10::IValue kept_object(const c10::IValue& object);

// Returns the argument for another call of the operator, given the one that the tape keeps; none if it is a process
// group that is gone.
c10::IValue called_with(const c10::IValue& kept);

// Returns this process's rank in the process group that is an operator's argument, as an object or by name. Returns -1
// if the group is gone. `kept`: the argument as the tape keeps it.
int64_t rank_in(const c10::IValue& kept);

// Returns whether two arguments are the same object or capsule. torch boxes it anew for each call, so the boxes differ.
// Each may come from a call or from a tape.
bool same_object(const c10::IValue& one, const c10::IValue& other);

// Intercepts exchanges whose caller waits for them at once, on threads for which `is_watched` returns true: from now on
// such an exchange has ended when its operator returns. Some back ends copy the result at each wait; no operator of the
// region shows such a copy.
void stand_before_exchanges(bool (*is_watched)());

// Stops intercepting exchanges. None may run meanwhile.
void leave_exchanges();

} // namespace memplug
