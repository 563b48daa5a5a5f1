// When the operators of a step began, and how long they waited for copies, measured on the stream that they run on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "streams.h"

namespace memplug {

class StepTimes {
 public:
  // From here on waits are measured, or operators too; or no more are, and what was measured stays.
  void measure(bool waits, bool operators) {
    if (waits || operators) {
      waits_.clear();
      began_.clear();
    }
    measures_waits_ = waits || operators;
    measures_operators_ = operators;
  }

  // An operator begins on the current stream, or the last one is over.
  void mark_operator(Streams& streams) {
    if (measures_operators_ && !streams.is_capturing()) {
      began_.push_back(streams.mark(streams.current()));
    }
  }

  // Of work of a stream, `act()` is what it may have to wait for.
  template <typename Act>
  void around(Streams& streams, const StreamRef& stream, const Act& act) {
    if (!measures_waits_ || streams.is_capturing()) {
      act();
      return;
    }
    EventRef begin = streams.mark(stream);
    act();
    waits_.push_back({std::move(begin), streams.mark(stream), began_.size()});
  }

  // Seconds of all waits; none: the device is not done.
  std::optional<double> waited_s(Streams& streams) const {
    double all = 0;
    for (const Waited& wait : waits_) {
      const std::optional<double> one = streams.seconds_between(wait.begin, wait.end);
      if (!one) {
        return std::nullopt;
      }
      all += *one;
    }
    return all;
  }

  // Seconds of each operator, from where it began to where the next one did, without waits; none: the device is not done.
  std::optional<std::vector<double>> operators_s(Streams& streams) const {
    std::vector<double> all;
    for (size_t i = 1; i < began_.size(); ++i) {
      const std::optional<double> one = streams.seconds_between(began_[i - 1], began_[i]);
      if (!one) {
        return std::nullopt;
      }
      all.push_back(*one);
    }
    for (const Waited& wait : waits_) {
      const std::optional<double> one = streams.seconds_between(wait.begin, wait.end);
      if (!one) {
        return std::nullopt;
      }
      if (wait.operators > 0 && wait.operators <= all.size()) {
        all[wait.operators - 1] -= *one;
      }
    }
    for (double& one : all) { // on two streams an operator may begin before the one that was asked for earlier
      one = std::max(one, 0.0);
    }
    return all;
  }

 private:
  struct Waited {
    EventRef begin, end;
    size_t operators; // that had begun
  };

  bool measures_waits_ = false, measures_operators_ = false;
  std::vector<EventRef> began_;
  std::vector<Waited> waits_;
};

} // namespace memplug
