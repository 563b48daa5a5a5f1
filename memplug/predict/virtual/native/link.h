// The link between host and device, whose two directions carry one copy at a time each, and slow each other down.
//
// A copy runs at one rate while the other direction is idle, and at another one while that is busy. Events and streams ask when a
// copy is over as soon as it is queued, so its end is fixed then, from the copies that are queued by then. One of the other
// direction that is queued later moves it no more; what it should have lost to that one is carried over: its direction is free
// for the next copy that much later. So copies that queue in both directions take as long as they should, and the last one of
// a direction's queue alone may be over too early.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>

namespace memplug {

enum class Link : uint8_t { TO_HOST, TO_DEVICE };

// What a copy takes with the other direction idle, and with it busy all the while.
struct CopySeconds {
  double alone = 0, beside = 0;

  // How fast it is beside the other direction.
  double speed() const {
    return beside > alone ? alone / beside : 1;
  }
};

class LinkClock {
 public:
  double free_s(Link direction) const {
    return of(direction).free_s;
  }

  // When a copy is over that begins then, not before its direction is free. No later one begins before `host_s`.
  double copy(Link direction, double begin_s, double host_s, CopySeconds seconds) {
    Direction& own = directions_[static_cast<size_t>(direction)];
    Direction& other = directions_[1 - static_cast<size_t>(direction)];
    own.forget(host_s);
    other.forget(begin_s);
    Run run{begin_s, seconds.alone, seconds.speed()};
    double owed_s = 0; // of the other direction, as of a copy alone
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

  // Keeps its direction busy; with what it owes once its end is fixed.
  struct Copy {
    double begin_s, end_s, speed;
  };

  struct Direction {
    double free_s = 0;
    std::deque<Copy> copies; // one behind the other

    void forget(double before_s) {
      while (!copies.empty() && copies.front().end_s <= before_s) {
        copies.pop_front();
      }
    }
  };

  // A copy under way.
  struct Run {
    double now_s, left_s, speed; // left: as alone

    // At that speed up to so many seconds: those that it takes.
    double go(double limit_s, double at_speed) {
      const bool ends = left_s <= limit_s * at_speed;
      const double took_s = ends ? left_s / at_speed : limit_s;
      left_s = ends ? 0 : left_s - limit_s * at_speed;
      now_s += took_s;
      return took_s;
    }
  };

  const Direction& of(Link direction) const {
    return directions_[static_cast<size_t>(direction)];
  }

  std::array<Direction, 2> directions_;
};

} // namespace memplug
