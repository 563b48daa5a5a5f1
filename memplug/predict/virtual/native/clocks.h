// Time of a device that computes nothing: of the host, of each stream, and of the link in each direction.
//
// What is queued on a stream begins once that is free, and not before the host has come to queue it; a copy over the link needs
// that direction of it, too (link.h). Seconds since it last began.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "link.h"

namespace memplug {

// What kept a stream busy, and when the host queued it; of a copy, its direction as the name.
struct Span {
  int64_t stream;
  double begin_s, end_s, queued_s;
  std::string name;
};

class Clocks {
 public:
  int64_t make_stream() {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_s_.push_back(0);
    return static_cast<int64_t>(free_s_.size()) - 1;
  }

  // The host works.
  void spend(double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    host_s_ += seconds;
  }

  void launch(int64_t stream, double seconds, const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const double begin_s = std::max(free_s_[stream], host_s_);
    run(stream, begin_s, begin_s + seconds, name);
  }

  // When it is over.
  double copy(int64_t stream, Link direction, CopySeconds seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const double begin_s = std::max({free_s_[stream], link_.free_s(direction), host_s_});
    const double over_s = link_.copy(direction, begin_s, host_s_, seconds);
    run(stream, begin_s, over_s, direction == Link::TO_HOST ? "to host" : "to device");
    return over_s;
  }

  // When all that is queued now is over.
  double over_s(int64_t stream) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::max(free_s_[stream], host_s_);
  }
  double all_over_s() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::max(host_s_, *std::max_element(free_s_.begin(), free_s_.end()));
  }
  double host_s() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return host_s_;
  }

  // A stream, or the host, does not go on before that time.
  void wait(int64_t stream, double at_s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_s_[stream] = std::max(free_s_[stream], at_s);
  }
  void wait(double at_s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    host_s_ = std::max(host_s_, at_s);
  }

  // At zero again, with nothing under way. Streams stay.
  void restart() {
    const std::lock_guard<std::mutex> lock(mutex_);
    host_s_ = 0;
    std::fill(free_s_.begin(), free_s_.end(), 0.0);
    link_ = LinkClock();
    keeps_spans_ = false;
    spans_.clear();
    ++era_;
  }
  // Counts restarts: times of different ones cannot be compared.
  int64_t era() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return era_;
  }

  // From here on spans are kept, or no more are; those that were.
  void keep_spans(bool on) {
    const std::lock_guard<std::mutex> lock(mutex_);
    keeps_spans_ = on;
  }
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
  std::vector<double> free_s_{0}; // by stream; 0: the default one
  LinkClock link_;
  int64_t era_ = 0;
  bool keeps_spans_ = false;
  std::vector<Span> spans_;
};

} // namespace memplug
