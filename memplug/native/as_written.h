// Nothing compiled runs inside of a region: compiled code has no operators to see.
#pragma once

namespace memplug {

// While one lives, functions that the model compiles run as they are written. The compiler's stance is the process's: of
// threads that overlap, the first sets it and the last puts it back, whichever that is. An interrupt does not keep it from
// being put back.
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

  // Called with Python's lock. Throws what setting the stance raises.
  static void enter();
  static void leave();
};

} // namespace memplug
