#include "decisions.h"

#include <algorithm>

namespace memplug {
namespace {

// A tape with the members that `actions_for` calls.
struct OfTape {
  const Tape& tape;
  std::vector<Taken> captured;
  std::vector<bool> launched; // for each operator, whether the capture of another operator has its result

  size_t size() const {
    return tape.records.size();
  }
  bool is_left_out(size_t index) const {
    const Record& record = tape.records[index];
    return launched[index] || record.form == Form::VALUE || (record.form == Form::VIEW && !record.op->has(WAITS));
  }
  bool always_runs(size_t index) const {
    return tape.records[index].always_runs();
  }
  Taken taken(size_t index) const {
    return captured[index];
  }
  template <typename Visit>
  void each_read(size_t index, const Visit& visit) const {
    for (const Use& use : tape.records[index].inputs) {
      visit(use.storage);
    }
  }
  template <typename Visit>
  void each_changed(size_t index, const Visit& visit) const {
    each_made(index, visit);
    std::for_each(tape.records[index].written.begin(), tape.records[index].written.end(), visit);
  }
  template <typename Visit>
  void each_made(size_t index, const Visit& visit) const {
    const Record& record = tape.records[index];
    std::for_each(record.made.begin(), record.made.end(), visit);
    if (record.op->has(WAITS)) { // a wait returns the collective's result in the memory of its input
      visit(record.outputs.front().storage);
    }
  }
};

} // namespace

std::vector<Action> actions_of(
    const Tape& tape,
    const std::vector<CapturedOperator>& captured,
    const std::vector<size_t>& launches,
    const std::vector<int32_t>& wanted) {
  const size_t count = tape.records.size();
  OfTape operators{tape, std::vector<Taken>(count, Taken::NOTHING), std::vector<bool>(count)};
  for (const CapturedOperator& each : captured) {
    operators.captured[each.index] = each.whole ? Taken::WHOLE : Taken::PART;
  }
  for (const size_t index : launches) {
    operators.launched[index] = true;
  }
  std::vector<bool> needed(tape.nbytes.size());
  for (const int32_t storage : wanted) {
    needed[storage] = true;
  }
  return actions_for(operators, std::move(needed));
}

std::optional<int64_t> pieces_of(const Tape& tape, size_t index) {
  const Record& record = tape.records[index];
  const auto each = record.op->has(PART_OF_UNIT) ? rows_of_part(tape, index) : std::optional<int64_t>(1);
  const bool lie = std::all_of(
      record.inputs.begin(), record.inputs.end(), [](const Use& use) { return use.geometry.lies; });
  const auto dimensions = [&](size_t i) { return record.inputs.at(i).geometry.size.size(); };
  const bool is_grouped = record.op->schema_name == "aten::_grouped_mm";
  if (!each || !record.op->has(ROWS) || !lie || (is_grouped && (dimensions(0) != 2 || dimensions(1) != 3))) {
    return std::nullopt;
  }
  return record.rows() / *each;
}

std::vector<int32_t> read_by(const Tape& tape, const std::vector<Action>& actions, const std::vector<int32_t>& wanted) {
  std::vector<bool> read(tape.nbytes.size());
  for (const int32_t storage : wanted) {
    read[storage] = true;
  }
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i] != Action::SKIP) {
      for (const Use& use : tape.records[i].inputs) {
        read[use.storage] = true;
      }
    }
  }
  std::vector<int32_t> found;
  for (size_t storage = 0; storage < read.size(); ++storage) {
    if (read[storage] && tape.given[storage]) {
      found.push_back(static_cast<int32_t>(storage));
    }
  }
  return found;
}

PassActions::PassActions(
    std::shared_ptr<const Tape> own_tape,
    std::vector<CapturedOperator> own_captured,
    std::vector<size_t> own_launches,
    std::vector<int32_t> own_wanted)
    : tape(std::move(own_tape)),
      captured(std::move(own_captured)),
      launches(std::move(own_launches)),
      wanted(std::move(own_wanted)),
      actions(actions_of(*tape, captured, launches, wanted)),
      reads(read_by(*tape, actions, wanted)) {
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i] == Action::SUBSTITUTE) {
      substituted.push_back(i);
    }
    communicates = communicates || (actions[i] == Action::RUN && tape->records[i].op->has(COMMUNICATES));
  }
}

} // namespace memplug
