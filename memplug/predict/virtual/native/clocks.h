// Simulated clocks of the host, of each stream, and of each direction of the link.
//
// Work begins when its stream is free, but not before the host has queued it. A copy over the link also waits until its
// direction of the link is free (link.h). Times are in seconds since the device was started or restarted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "link.h"

namespace memplug {

// An interval in which one kernel or copy kept a stream busy. A copy's name is its direction.
struct Span {
  int64_t stream;
  double begin_s, end_s, queued_s; // queued_s: when the host queued the work
  std::string name;
};

class Clocks {
 public:
  int64_t make_stream() {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_s_.push_back(0);
    return static_cast<int64_t>(free_s_.size()) - 1;
  }

  // Advances the host's clock.
  void spend(double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    host_s_ += seconds;
  }

  void launch(int64_t stream, double seconds, const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const double begin_s = std::max(free_s_[stream], host_s_);
    run(stream, begin_s, begin_s + seconds, name);
  }

  // Queues a copy and returns the time at which it ends.
  double copy(int64_t stream, CopyDirection direction, CopySeconds seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const double begin_s = std::max({free_s_[stream], link_.free_s(direction), host_s_});
    const double over_s = link_.copy(direction, begin_s, host_s_, seconds);
    run(stream, begin_s, over_s, direction == CopyDirection::TO_HOST ? "to host" : "to device");
    return over_s;
  }

  // Returns the time at which the work queued so far on a stream ends, or the host's time if that is later.
  double over_s(int64_t stream) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::max(free_s_[stream], host_s_);
  }
  // Returns the time at which the work queued so far on all streams ends, or the host's time if that is later.
  double all_over_s() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::max(host_s_, *std::max_element(free_s_.begin(), free_s_.end()));
  }
  double host_s() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return host_s_;
  }

  // Makes a stream, or the host, wait until `at_s`.
  void wait(int64_t stream, double at_s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_s_[stream] = std::max(free_s_[stream], at_s);
  }
  void wait(double at_s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    host_s_ = std::max(host_s_, at_s);
  }

  // Sets all clocks to zero, forgets all queued work and spans, and stops recording spans. Streams stay valid.
  void restart() {
    const std::lock_guard<std::mutex> lock(mutex_);
    host_s_ = 0;
    std::fill(free_s_.begin(), free_s_.end(), 0.0);
    link_ = LinkClock();
    keeps_spans_ = false;
    spans_.clear();
    ++era_;
  }
  // Returns the number of restarts. Times from before and after a restart cannot be compared.
  int64_t era() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return era_;
  }

  // Starts or stops recording spans.
  void keep_spans(bool on) {
    const std::lock_guard<std::mutex> lock(mutex_);
    keeps_spans_ = on;
  }
  // Returns the recorded spans and forgets them.
  std::vector<Span> take_spans() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(spans_, {});
  }

 private:
  void run(int64_t stream, double begin_s, double end_s, const std::string& name) {
    free_s_[stream] = end_s;
    if (keeps_spans_ && end_s > begin_s) {
      spans_.push_back({stream, begin_s, end_s, host_s_, name});
    }
  }

  mutable std::mutex mutex_;
  double host_s_ = 0;
  std::vector<double> free_s_{0}; // the time at which each stream is free; stream 0 is the default stream
  LinkClock link_;
  int64_t era_ = 0;
  bool keeps_spans_ = false;
  std::vector<Span> spans_;
};

} // namespace memplug
