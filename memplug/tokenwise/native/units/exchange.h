// Exchanges: the operators of c10d, which communicate. They write to their arguments, and return a work object to wait
// for.
#pragma once

#include <ATen/core/ivalue.h>

namespace memplug {

// Waits for the work objects among an exchange's results.
void wait_for(c10::ArrayRef<c10::IValue> results);

// Returns an operator's argument, an object or a capsule, as a tape keeps it. A tape holds a process group by a weak
// reference: destroying a group joins its threads, and the last reference may die on one of them.
c10::IValue kept_object(const c10::IValue& object);

// Returns the argument for another call of the operator; none if it was a process group that is gone. `kept`: the
// argument as the tape keeps it.
c10::IValue called_with(const c10::IValue& kept);

// Returns this process's rank in the process group that an operator got as an object or by name; -1 if the group is
// gone. `kept`: the argument as the tape keeps it.
int64_t rank_in(const c10::IValue& kept);

// Returns whether two arguments, each from a call or from a tape, hold the same object or capsule, or equal reductions.
// torch boxes an object anew for each call, so the boxes cannot be compared.
bool same_object(const c10::IValue& one, const c10::IValue& other);

// Registers for each exchange a kernel that torch calls first, and that then runs the exchange. If the caller would
// wait at once (`async_op=False`), the kernel waits before it returns. It does so only on threads for which
// `is_watched` returns true. Some back ends copy the result during the wait; no operator of the region would show that
// copy.
void stand_before_exchanges(bool (*is_watched)());

// Undoes `stand_before_exchanges`. No exchange may run meanwhile.
void leave_exchanges();

} // namespace memplug
