// How far the program has come, by a planned one: operators that were inserted, left out or changed places shift nothing for
// long.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace memplug {

// Counts a step's operators in the numbering of the planned step.
//
// Where an operator is not the planned one, the clock goes on one by one until the last `kAlike` operators are those that
// the plan has at a place at most `kReach` away, and continues from there; of several such places, from the nearest.
class ProgramClock {
 public:
  static constexpr int kAlike = 4, kReach = 64;

  // The numbers of its operators, see sequence.h.
  void load(std::vector<int32_t> program) {
    program_ = std::move(program);
    begin();
  }

  // A step begins.
  void begin() {
    now_ = -1;
    is_off_ = false;
    recent_.fill(-1);
  }

  // An operator begins; returns its place in the planned step, as far as it is known.
  int32_t tick(int32_t number) {
    for (int i = kAlike - 1; i > 0; --i) {
      recent_[i] = recent_[i - 1];
    }
    recent_[0] = number;
    ++now_;
    if (is_off_ || !is_at(now_, number)) {
      find();
    }
    return now_;
  }

  int32_t now() const {
    return now_;
  }

  // Whether the last operators are not the planned ones.
  bool is_off() const {
    return is_off_;
  }

 private:
  bool is_at(int32_t place, int32_t number) const {
    return place >= 0 && place < static_cast<int32_t>(program_.size()) && program_[place] == number;
  }

  bool is_alike(int32_t place) const {
    for (int i = 0; i < kAlike; ++i) {
      if (!is_at(place - i, recent_[i])) {
        return false;
      }
    }
    return true;
  }

  void find() {
    is_off_ = true;
    for (int32_t distance = 0; distance <= kReach; ++distance) {
      for (const int32_t place : {now_ + distance, now_ - distance}) {
        if (is_alike(place)) {
          now_ = place;
          is_off_ = false;
          return;
        }
      }
    }
  }

  std::vector<int32_t> program_;
  std::array<int32_t, kAlike> recent_{}; // the latest first
  int32_t now_ = -1;
  bool is_off_ = false;
};

} // namespace memplug
