// Inside of a region, functions that the model compiles with torch.compile run uncompiled, as they are written: in
// compiled code there are no operators to observe. Units are an exception (memplug/hooks/flex_attention.py).
#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

// While an instance lives, functions that the model compiles run as they are written. To that end it sets the stance of
// torch's compiler, of which the process has one. If instances of several threads overlap, the first one sets the
// stance, and the last one restores it. Guarded by Python's lock.
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
