// Measures when a step's operators begin on their streams, and how long the streams wait for copies.
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
  // Starts to measure waits, and with `operators` also the beginnings of operators. If both arguments are false, stops;
  // the measurements stay.
  void measure(bool waits, bool operators) {
    if (waits || operators) {
      waits_.clear();
      began_.clear();
      ended_ = nullptr;
    }
    measures_waits_ = waits || operators;
    measures_operators_ = operators;
  }

  // Marks that an operator of the program, or other work, begins on the current stream.
  void mark_operator(Streams& streams, bool of_program) {
    if (measures_operators_ && (of_program || (!began_.empty() && began_.back().of_program)) && !streams.is_capturing()) {
      began_.push_back({streams.mark(streams.current()), of_program});
    }
  }

  void end_step(Streams& streams) {
    if (measures_operators_ && !streams.is_capturing()) {
      ended_ = streams.mark(streams.current());
    }
  }

  // Measures how long a stream waits in `act()`.
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

  // Returns the seconds of all waits; empty if the device has not finished them.
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

  // Returns the seconds of each operator of the program, from its beginning to the next mark, without waits in between.
  // The last entry is for the work after the last operator. Returns empty if the device has not finished the step.
  std::optional<std::vector<double>> operators_s(Streams& streams) const {
    if (!began_.empty() && ended_ == nullptr) {
      return std::nullopt;
    }
    std::vector<double> spans, all;
    for (size_t i = 0; i < began_.size(); ++i) {
      const EventRef& end = i + 1 < began_.size() ? began_[i + 1].at : ended_;
      const std::optional<double> one = streams.seconds_between(began_[i].at, end);
      if (!one) {
        return std::nullopt;
      }
      spans.push_back(*one);
    }
    for (const Waited& wait : waits_) {
      const std::optional<double> one = streams.seconds_between(wait.begin, wait.end);
      if (!one) {
        return std::nullopt;
      }
      if (wait.marks > 0) {
        spans[wait.marks - 1] -= *one;
      }
    }
    double behind_s = 0;
    for (size_t i = 0; i < spans.size(); ++i) {
      // negative if the next operator runs on another stream, where it may have begun earlier
      const double one = std::max(spans[i], 0.0);
      began_[i].of_program ? all.push_back(one) : void(behind_s = one);
    }
    all.push_back(began_.empty() || began_.back().of_program ? 0.0 : behind_s);
    return all;
  }

 private:
  struct Began {
    EventRef at;
    bool of_program;
  };
  struct Waited {
    EventRef begin, end;
    size_t marks; // length of `began_` when the wait began
  };

  bool measures_waits_ = false, measures_operators_ = false;
  std::vector<Began> began_;
  EventRef ended_;
  std::vector<Waited> waits_;
};

} // namespace memplug
