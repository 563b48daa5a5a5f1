#include "decisions.h"

#include <algorithm>

namespace memplug {

std::vector<Action> actions_of(
    const Tape& tape,
    const std::vector<Captured>& captured,
    const std::vector<size_t>& launches,
    const std::vector<int32_t>& wanted) {
  std::vector<bool> needed(tape.nbytes.size());
  for (const int32_t storage : wanted) {
    needed[storage] = true;
  }
  const auto any = [&](const std::vector<int32_t>& storages) {
    return std::any_of(storages.begin(), storages.end(), [&](int32_t storage) { return needed[storage]; });
  };
  enum : uint8_t { NOT, PART, WHOLE, LAUNCH };
  std::vector<uint8_t> how(tape.records.size(), NOT);
  for (const Captured& each : captured) {
    how[each.index] = each.whole ? WHOLE : PART;
  }
  for (const size_t index : launches) {
    how[index] = LAUNCH;
  }
  std::vector<Action> actions(tape.records.size(), Action::SKIP);
  for (size_t index = tape.records.size(); index-- > 0;) {
    const Record& record = tape.records[index];
    // a collective that is waited for has its result in the memory of its input
    const bool waits = record.op->has(WAITS);
    if (how[index] == LAUNCH || record.form == Form::VALUE || (record.form == Form::VIEW && !waits)) {
      continue;
    }
    const bool asked = any(record.made) || any(record.written) || (waits && needed[record.outputs.front().storage]);
    if (how[index] != NOT) {
      if (asked) {
        actions[index] = Action::SUBSTITUTE;
      }
      if (how[index] == WHOLE) {
        for (const int32_t storage : record.made) {
          needed[storage] = false;
        }
        if (waits) {
          needed[record.outputs.front().storage] = false;
        }
        continue;
      }
    } else if (asked || (record.root && !record.draws)) {
      actions[index] = Action::RUN;
    }
    if (actions[index] != Action::SKIP) {
      for (const Use& use : record.inputs) {
        needed[use.storage] = true;
      }
    }
  }
  return actions;
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

Decisions::Decisions(
    std::shared_ptr<const Tape> own_tape,
    std::vector<Captured> own_captured,
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
