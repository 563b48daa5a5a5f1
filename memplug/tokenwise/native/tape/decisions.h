// The action of a recompute pass for each operator of a tape, derived from what is captured and what it has to restore.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "rules.h"
#include "tape.h"

namespace memplug {

// An operator whose results are captured. `whole`: with all rows, so that its inputs are not needed.
struct CapturedOperator {
  size_t index;
  bool whole;

  bool operator==(const CapturedOperator& other) const {
    return index == other.index && whole == other.whole;
  }
};

// Returns an action for each operator. `launches`: operators whose result another operator's capture provides.
// `wanted`: storages that the pass has to restore.
std::vector<Action> actions_of(
    const Tape& tape,
    const std::vector<CapturedOperator>& captured,
    const std::vector<size_t>& launches,
    const std::vector<int32_t>& wanted);

// Returns how many pieces an operator's outputs split into along dimension 0, any number of which may be captured while
// the rest is computed alone; none if they are captured whole or not at all.
std::optional<int64_t> pieces_of(const Tape& tape, size_t index);

// Returns the storages from before the pass that it reads or has to restore.
std::vector<int32_t> read_by(const Tape& tape, const std::vector<Action>& actions, const std::vector<int32_t>& wanted);

// The actions of a recompute pass, made once for forwards that are alike.
struct PassActions {
  PassActions(
      std::shared_ptr<const Tape> tape,
      std::vector<CapturedOperator> captured,
      std::vector<size_t> launches,
      std::vector<int32_t> wanted);

  bool are_of(
      const std::shared_ptr<const Tape>& other_tape,
      const std::vector<CapturedOperator>& other_captured,
      const std::vector<size_t>& other_launches,
      const std::vector<int32_t>& other_wanted) const {
    return tape == other_tape && captured == other_captured && launches == other_launches && wanted == other_wanted;
  }

  const std::shared_ptr<const Tape> tape;
  const std::vector<CapturedOperator> captured;
  const std::vector<size_t> launches;
  const std::vector<int32_t> wanted;

  const std::vector<Action> actions;
  const std::vector<int32_t> reads; // storages, from `read_by`
  std::vector<size_t> substituted; // operators whose captured results the pass needs
  bool communicates = false; // it runs operators in which other ranks take part
};

} // namespace memplug
