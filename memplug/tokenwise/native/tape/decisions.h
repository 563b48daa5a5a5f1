// The actions of a recompute pass: for each operator of a tape, run it, substitute its captured results, or skip it.
// They follow from the captures and from the storages that the pass has to restore.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "rules.h"
#include "tape.h"

namespace memplug {

// An operator whose results are captured. `whole`: all rows are captured, so a recompute pass does not need the
// operator's inputs.
struct CapturedOperator {
  size_t index;
  bool whole;

  bool operator==(const CapturedOperator& other) const {
    return index == other.index && whole == other.whole;
  }
};

// Returns a recompute pass's action for each operator of the tape. `launches`: operators that the pass skips, since the
// capture of another operator has their result. For instance, if the operator that waits for a collective is captured,
// the pass does not launch the collective. `wanted`: storages that the pass has to restore.
std::vector<Action> actions_of(
    const Tape& tape,
    const std::vector<CapturedOperator>& captured,
    const std::vector<size_t>& launches,
    const std::vector<int32_t>& wanted);

// Returns into how many equal pieces an operator's outputs split along dimension 0; none if they do not split. A plan
// may capture any number of these pieces; a recompute pass then computes only the others.
std::optional<int64_t> pieces_of(const Tape& tape, size_t index);

// Returns the given storages (`Tape::given`) that a pass with these actions reads or has to restore.
std::vector<int32_t> read_by(const Tape& tape, const std::vector<Action>& actions, const std::vector<int32_t>& wanted);

// The actions of a recompute pass, and the arguments of `actions_of` that they were decided from. Successive forwards
// share one object if these arguments are the same.
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
  const std::vector<int32_t> reads; // given storages that the pass reads or restores, from `read_by`
  std::vector<size_t> substituted; // indices of operators whose captured results the pass needs
  bool communicates = false; // the pass runs operators in which other ranks take part
};

} // namespace memplug
