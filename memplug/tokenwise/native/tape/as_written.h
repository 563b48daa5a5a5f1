// Nothing compiled runs inside of a region, as compiled code has no operators to see, but for units
// (memplug/hooks/flex_attention.py).
#pragma once

#include <pybind11/pybind11.h>

namespace memplug {

// While one lives, functions that the model compiles run as they are written. The compiler's stance is the process's: of
// threads that overlap, the first sets it and the last puts it back, whichever that is. Guarded by Python's lock.
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

  // Throws what importing the compiler raises.
  static void enter();
  static void leave();

  // The stance before the first that lives; None: there is none.
  static pybind11::object before();
};

} // namespace memplug
