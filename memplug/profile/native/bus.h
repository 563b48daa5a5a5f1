// Operators as they happen.
#pragma once

namespace memplug {

// While one lives, operators of the calling thread are no forward's.
class Pause {
 public:
  Pause() {
    begin();
  }
  ~Pause() {
    end();
  }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

  static void begin();
  static void end();
  static int depth(); // how many live
};

} // namespace memplug
