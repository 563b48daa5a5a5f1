// How long a program waits for copies, measured where it does.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "streams.h"

namespace memplug {

class WaitTimes {
 public:
  // From here on waits are measured, those of an earlier time forgotten; or no more are.
  void measure(bool on) {
    is_on_ = on;
    if (on) {
      waits_.clear();
    }
  }

  // Of work of a stream, `act()` is what it may have to wait for.
  template <typename Act>
  void around(Streams& streams, const StreamRef& stream, const Act& act) {
    if (!is_on_ || streams.is_capturing()) {
      act();
      return;
    }
    EventRef begin = streams.mark(stream);
    act();
    waits_.emplace_back(std::move(begin), streams.mark(stream));
  }

  // Seconds of all of them; none: the device is not done.
  std::optional<double> seconds(Streams& streams) const {
    double all = 0;
    for (const auto& [begin, end] : waits_) {
      const std::optional<double> one = streams.seconds_between(begin, end);
      if (!one) {
        return std::nullopt;
      }
      all += *one;
    }
    return all;
  }

 private:
  bool is_on_ = false;
  std::vector<std::pair<EventRef, EventRef>> waits_;
};

} // namespace memplug
