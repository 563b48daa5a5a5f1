// Inside of a region, functions that the model compiles run as they are written: compiled code has no operators to
// observe. Units are an exception (memplug/hooks/flex_attention.py).
#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

// While one lives, functions that the model compiles run as they are written. The compiler's stance belongs to the
// process: of threads that overlap, the first to enter sets it, and the last to leave restores it. Guarded by Python's
// lock.
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

  // Returns the stance that was replaced; None if no instance lives.
  static pybind11::object before();
};

} // namespace memplug
