// When a step's planned requests come, and when their blocks are freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace memplug {

class Lifetimes {
 public:
  static constexpr int32_t STILL_IN_USE = std::numeric_limits<int32_t>::max();

  explicit Lifetimes(size_t requests = 0) : came_(requests), freed_(requests) {
    begin_step();
  }

  void begin_step() {
    count_ = 0;
    came_.assign(came_.size(), -1);
    freed_.assign(freed_.size(), -1);
  }

  // Notes that the program makes this request.
  void come(int32_t request) {
    came_[request] = count_++;
  }

  // Notes that the request has got a block.
  void begin(int32_t request) {
    freed_[request] = STILL_IN_USE;
  }

  // Notes that the request's block of this step is freed.
  void end(int32_t request) {
    freed_[request] = freed_[request] == STILL_IN_USE ? count_ : freed_[request];
  }

  // Returns for each request the number of planned requests that came before it; -1: it has not come.
  const std::vector<int32_t>& came() const {
    return came_;
  }

  // Returns for each request the number of planned requests that had come when its block was freed; -1: it has had no
  // block in this step.
  const std::vector<int32_t>& freed() const {
    return freed_;
  }

 private:
  int32_t count_ = 0; // number of requests that have come
  std::vector<int32_t> came_, freed_;
};

} // namespace memplug
