// Turns torch.compile off inside of regions, since compiled code has no operators to observe. The exception is
// FlexAttention, which runs compiled, as a unit (memplug/hooks/flex_attention.py).
#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

// While an instance lives, compiled functions run uncompiled: it sets the stance of torch's compiler
// (`torch.compiler.set_stance`), which is global to the process. If several threads have instances at a time, the first
// instance sets the stance, and the last one to end restores it. Guarded by Python's lock.
class AsWritten {
 public:
  AsWritten() {
    enter();
  }
  ~AsWritten() {
    leave();
  }
  AsWritten(const AsWritten&) = delete;
  AsWritten& operator=(const AsWritten&) = delete;

  // Sets the stance, if no instance lives yet. Throws the error that importing the compiler raises.
  static void enter();
  static void leave();

  // Returns the stance that the first instance replaced; None if no instance lives.
  static pybind11::object before();
};

} // namespace memplug
