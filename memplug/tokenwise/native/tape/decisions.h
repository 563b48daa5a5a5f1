// The actions of a recompute pass: it runs each operator of a tape, substitutes the operator's captured results, or
// skips it. This follows from the captures and from the storages that the pass has to restore.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "rules.h"
#include "tape.h"

namespace memplug {

// An operator whose results are captured. `whole`: with all of their rows, so a pass does not need the operator's
// inputs.
struct CapturedOperator {
  size_t index;
  bool whole;

  bool operator==(const CapturedOperator& other) const {
    return index == other.index && whole == other.whole;
  }
};

// Returns a pass's action for each operator of the tape. `launches`: operators that the pass skips, since the capture
// of another operator has their result. For example, the capture of a wait has the result of the collective. `wanted`:
// storages that the pass has to restore.
std::vector<Action> actions_of(
    const Tape& tape,
    const std::vector<CapturedOperator>& captured,
    const std::vector<size_t>& launches,
    const std::vector<int32_t>& wanted);

// Returns how many pieces an operator's outputs split into along dimension 0. Any number of pieces may be captured, and
// a recompute pass computes only the others. Returns none if the outputs can only be captured whole, or not at all.
std::optional<int64_t> pieces_of(const Tape& tape, size_t index);

// Returns the given storages (`Tape::given`) that a pass with these actions reads or has to restore.
std::vector<int32_t> read_by(const Tape& tape, const std::vector<Action>& actions, const std::vector<int32_t>& wanted);

// The actions of a recompute pass. Forwards with the same tape, captures and wanted storages share one object.
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
  const std::vector<int32_t> reads; // given storages, from `read_by`
  std::vector<size_t> substituted; // operators whose captured results the pass needs
  bool communicates = false; // the pass runs operators in which other ranks take part
};

} // namespace memplug
