// What a recompute pass does with each operator of a tape: it follows from what is captured, and what is to be restored.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "rules.h"
#include "tape.h"

namespace memplug {

// What of an operator's results is captured: `whole` where all rows of them are, so that its inputs are not needed.
struct Captured {
  size_t index;
  bool whole;

  bool operator==(const Captured& other) const {
    return index == other.index && whole == other.whole;
  }
};

// `launches`: operators whose result another one's capture gives. `wanted`: storages that the pass is to restore.
std::vector<Action> actions_of(
    const Tape& tape,
    const std::vector<Captured>& captured,
    const std::vector<size_t>& launches,
    const std::vector<int32_t>& wanted);

// Into how many pieces an operator's outputs split along dimension 0, any number of which may be captured while the rest is
// computed alone; none: they are captured whole, or not.
std::optional<int64_t> pieces_of(const Tape& tape, size_t index);

// Storages that are there before the pass, and that it reads or is to restore.
std::vector<int32_t> read_by(const Tape& tape, const std::vector<Action>& actions, const std::vector<int32_t>& wanted);

// Made once for forwards that are alike.
struct Decisions {
  Decisions(
      std::shared_ptr<const Tape> tape,
      std::vector<Captured> captured,
      std::vector<size_t> launches,
      std::vector<int32_t> wanted);

  bool are_of(
      const std::shared_ptr<const Tape>& other_tape,
      const std::vector<Captured>& other_captured,
      const std::vector<size_t>& other_launches,
      const std::vector<int32_t>& other_wanted) const {
    return tape == other_tape && captured == other_captured && launches == other_launches && wanted == other_wanted;
  }

  const std::shared_ptr<const Tape> tape;
  const std::vector<Captured> captured;
  const std::vector<size_t> launches;
  const std::vector<int32_t> wanted;

  const std::vector<Action> actions;
  const std::vector<int32_t> reads; // storages, as `read_by` says
  std::vector<size_t> substituted; // operators whose captured results the pass asks for
  bool communicates = false; // it calls operators that other ranks take part in
};

} // namespace memplug
