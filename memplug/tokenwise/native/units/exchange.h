// Operators of c10d, in which other ranks take part: they write to their arguments, and leave something to wait for.
#pragma once

#include <ATen/core/ivalue.h>

namespace memplug {

// Waits for what an exchange's results hold to be waited for; they may hold nothing.
void wait_for(c10::ArrayRef<c10::IValue> results);

// An object or a capsule among an operator's arguments as a tape keeps it: a process group weakly, for its last holder
// waits until its threads have ended, and may be one of them.
c10::IValue kept_object(const c10::IValue& object);

// The argument again; none where its process group is gone.
c10::IValue called_with(const c10::IValue& kept);

// This process's rank in a process group, which an operator has for an argument, itself or by name; -1 where it is gone.
int64_t rank_in(const c10::IValue& kept);

// Whether two objects or capsules, kept or not, are alike: they are boxed anew for each call.
bool same_object(const c10::IValue& one, const c10::IValue& other);

// From now on an exchange whose caller would wait for it at once is over when it returns, where `is_watched` says so of
// this thread: some back ends copy the result at each wait, which is no operator of a region.
void stand_before_exchanges(bool (*is_watched)());

// No more; no exchange runs meanwhile.
void leave_exchanges();

} // namespace memplug
