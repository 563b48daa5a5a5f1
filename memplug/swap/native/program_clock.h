// Tells which place of the planned program a running step has reached. Operators that are inserted, left out or
// reordered mislead the clock only for a while.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace memplug {

// Each operator of a running step advances the clock by one place of the planned step.
//
// After an operator that is not the planned one, the clock may be off. Until it is right again, it compares the step's
// last few operators with the plan at each operator, and moves to the nearest place at which they match. At a distance
// of d places, min(2 + d, kAlike) operators have to match. The clock looks no further than `kReach` places, and no
// further than the number of operators since it went off.
class ProgramClock {
 public:
  static constexpr int32_t kAlike = 4, kReach = 64;

  // Loads a program: the numbers of its operators (operator_names.h).
  void load(std::vector<int32_t> program) {
    program_ = std::move(program);
    begin();
  }

  // Begins a step.
  void begin() {
    now_ = -1;
    off_for_ = ticks_ = departures_ = 0;
    recent_.fill(-1);
  }

  // Notes that an operator begins; returns its place in the planned step, which may be off by `error()`.
  int32_t tick(int32_t number) {
    for (int i = kAlike - 1; i > 0; --i) {
      recent_[i] = recent_[i - 1];
    }
    recent_[0] = number;
    ++now_;
    ++ticks_;
    if (off_for_ > 0 || !is_at(now_, number)) {
      departures_ += off_for_ == 0;
      ++off_for_;
      find();
    }
    return now_;
  }

  // Sets the clock to a known place.
  void move_to(int32_t place) {
    departures_ += place != now_ && off_for_ == 0;
    now_ = place;
    off_for_ = 0;
  }

  // Returns the nearest of `places` at which the planned step runs the operator with that number; -1: there is none.
  int32_t nearest(const std::vector<int32_t>& places, int32_t number) const {
    int32_t found = -1;
    for (const int32_t place : places) {
      if (is_at(place, number) && (found < 0 || std::abs(place - now_) < std::abs(found - now_))) {
        found = place;
      }
    }
    return found;
  }

  // Returns whether the clock is at the program's last operator.
  bool is_at_end() const {
    return now_ >= 0 && now_ + 1 == static_cast<int32_t>(program_.size());
  }

  // Returns whether every operator of the step so far was the planned one.
  bool is_true() const {
    return departures_ == 0;
  }

  int32_t now() const {
    return now_;
  }

  // Returns whether the clock is unreliable: the step has departed from the plan more than 4 + operators / 40 times.
  bool is_lost() const {
    return kLeast + ticks_ < 40 * departures_;
  }

  // Returns the greatest number of places by which the clock may be off.
  int32_t error() const {
    return off_for_;
  }

 private:
  bool is_at(int32_t place, int32_t number) const {
    return place >= 0 && place < static_cast<int32_t>(program_.size()) && program_[place] == number;
  }

  bool is_alike(int32_t place, int32_t count) const {
    for (int32_t i = 0; i < count; ++i) {
      if (!is_at(place - i, recent_[i])) {
        return false;
      }
    }
    return true;
  }

  void find() {
    for (int32_t distance = 0; distance <= std::min(off_for_, kReach); ++distance) {
      for (const int32_t place : {now_ + distance, now_ - distance}) {
        if (is_alike(place, std::min(kAlike, 2 + distance))) {
          now_ = place;
          off_for_ = 0;
          return;
        }
      }
    }
  }

  std::vector<int32_t> program_;
  std::array<int32_t, kAlike> recent_{}; // numbers of the last operators, the latest first
  int32_t now_ = -1;
  static constexpr int32_t kLeast = 160;

  int32_t ticks_ = 0, departures_ = 0; // operators in this step, and how often they departed from the plan
  int32_t off_for_ = 0; // operators since the last one whose place was known
};

} // namespace memplug
