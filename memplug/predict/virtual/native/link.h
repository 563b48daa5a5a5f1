// The clock of the link between host and device. Each direction carries one copy at a time, and the two directions slow each
// other down.
//
// A copy runs at one rate while the other direction is idle, and at another rate while the other direction is busy.
// Events and streams need a copy's end as soon as the copy is queued, so the end is computed then, from the copies
// queued so far. A copy that is queued later in the other direction should slow an earlier copy down, but the earlier
// copy's end is fixed. Instead the earlier copy's direction becomes free later, by the time that the earlier copy
// should have lost. So queues of copies in both directions take the right time in total; only the last copy of a queue
// may end too early.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>

namespace memplug {

enum class CopyDirection : uint8_t { TO_HOST, TO_DEVICE };

// Seconds that a copy takes: `alone` while the other direction is idle, `beside` while the other direction is busy.
struct CopySeconds {
  double alone = 0, beside = 0;

  // Returns the copy's speed while the other direction is busy, as a fraction of its speed alone.
  double speed() const {
    return beside > alone ? alone / beside : 1;
  }
};

class LinkClock {
 public:
  double free_s(CopyDirection direction) const {
    return of(direction).free_s;
  }

  // Queues a copy that begins at `begin_s`, when its direction is free, and returns the time at which it ends. No later
  // copy begins before `host_s`, so copies that end before `host_s` are forgotten.
  double copy(CopyDirection direction, double begin_s, double host_s, CopySeconds seconds) {
    Direction& own = directions_[static_cast<size_t>(direction)];
    Direction& other = directions_[1 - static_cast<size_t>(direction)];
    own.forget(host_s);
    other.forget(begin_s);
    RunningCopy run{begin_s, seconds.alone, seconds.speed()};
    // the delay that this copy causes in the other direction and that no `end_s` includes yet, in seconds at full speed
    double owed_s = 0;
    for (size_t at = 0; at < other.copies.size() && (run.left_s > 0 || owed_s > 0); ++at) {
      Copy& copy = other.copies[at];
      run.go(std::max(copy.begin_s - run.now_s, 0.0), 1);
      owed_s += run.go(std::max(copy.end_s - run.now_s, 0.0), run.speed) * (1 - copy.speed);
      double room_s = at + 1 < other.copies.size() ? other.copies[at + 1].begin_s - copy.end_s : kForever;
      const double beside_s = run.go(std::min(owed_s / copy.speed, room_s), run.speed);
      owed_s = std::max(owed_s - beside_s * copy.speed, 0.0);
      room_s -= beside_s;
      const double alone_s = run.left_s > 0 ? 0 : std::min(owed_s, room_s);
      owed_s -= alone_s;
      copy.end_s += beside_s + alone_s;
      other.free_s = std::max(other.free_s, copy.end_s);
    }
    run.go(kForever, 1);
    own.copies.push_back({begin_s, run.now_s, run.speed});
    return own.free_s = run.now_s;
  }

 private:
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  // A queued copy. Its direction is busy from `begin_s` to `end_s`, which includes the time that the copy should have
  // lost.
  struct Copy {
    double begin_s, end_s, speed;
  };

  struct Direction {
    double free_s = 0;
    std::deque<Copy> copies; // in the order in which they begin; their intervals do not overlap

    void forget(double before_s) {
      while (!copies.empty() && copies.front().end_s <= before_s) {
        copies.pop_front();
      }
    }
  };

  // A copy whose end is being computed.
  struct RunningCopy {
    double now_s, left_s, speed; // left_s: seconds that the rest of the copy takes at full speed

    // Runs the copy at a speed for at most `limit_s`, and returns the seconds that this took.
    double go(double limit_s, double at_speed) {
      const bool ends = left_s <= limit_s * at_speed;
      const double took_s = ends ? left_s / at_speed : limit_s;
      left_s = ends ? 0 : left_s - limit_s * at_speed;
      now_s += took_s;
      return took_s;
    }
  };

  const Direction& of(CopyDirection direction) const {
    return directions_[static_cast<size_t>(direction)];
  }

  std::array<Direction, 2> directions_;
};

} // namespace memplug
