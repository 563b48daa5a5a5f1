// Captures outputs of a region's forward, to offload or to keep them.
#include <algorithm>
#include <cmath>

#include "clock.h"
#include "frame.h"

namespace memplug {
namespace {

std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) {
    each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

} // namespace

bool Frame::wants(size_t index, const Operator& op) const {
  return op.has(COLLECTIVE) || op.has(PART_OF_UNIT) || (!op.has(EXCHANGE) && setting->decide(index, op).fraction > 0);
}

void Frame::capture(size_t index, c10::ArrayRef<c10::IValue> results) {
  if (region->opaque) {
    return;
  }
  const Suspension own;
  const Record& record = forward.tape().records[index];
  const Operator& op = *record.op;
  const Decision decision = setting->decide(index, op);
  if (op.has(EXCHANGE)) {
    capture_exchange(index, record, results);
  } else if (op.has(PART_OF_UNIT) && !flow->is_worth_swapping(results[0].toTensor())) {
    // keep a small part of a unit: running the unit again would cost more
    capture_outputs(index, record, results, {1, true});
  } else if (decision.fraction > 0 && record.is_capturable()) {
    capture_outputs(index, record, results, decision);
  } else if (op.has(COLLECTIVE)) {
    leave_out(index);
  }
  flow->trim(*this);
}

// Captures the first rows of each output: as many as the decision's fraction says.
void Frame::capture_outputs(
    size_t index, const Record& record, c10::ArrayRef<c10::IValue> results, Decision decision) {
  const Operator& op = *record.op;
  const auto outputs = tensors_of(results);
  // a communicating unit must not run again on this rank alone. So until all of its ranks use the same setting, capture
  // all of its rows, even if host memory is short.
  const bool shrinks = op.has(ROWS) && !decision.keep && !(op.has(SHARED) && !setting->is_agreed);
  const double fraction = decision.fraction * (shrinks ? flow->share : 1.0);
  const int64_t length = outputs.front().dim() > 0 ? outputs.front().size(0) : 0;
  const int64_t pieces = length > 0 ? pieces_of(forward.tape(), index).value_or(0) : 0;
  const bool splits = pieces > 0;
  std::optional<int64_t> rows = splits ? rows_taken(fraction, pieces, splits) * (length / pieces)
                                       : rows_taken(fraction, length, splits); // reset below if these are all rows
  if (*rows == length) {
    rows.reset();
  } else if (*rows == 0) {
    return;
  }
  const int64_t launch = op.has(WAITS) ? launch_of(index) : -1;
  if (op.has(WAITS) && launch < 0) {
    return;
  }
  std::vector<CapturedTensor> parts;
  for (const at::Tensor& value : outputs) {
    const auto part = part_of(value, rows, decision.keep, op);
    if (!part) {
      // host memory is full: the outputs are recomputed, and the destructor of `parts` abandons copies that have begun
      return;
    }
    parts.push_back(*part);
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    add(outputs[i], parts[i]);
  }
  captures_[index] = {std::move(parts), !rows.has_value()};
  if (launch >= 0) {
    launches_[launch] = index;
  }
}

// Captures the result of an exchange (exchange.h) if a recompute pass can substitute it. Otherwise the pass runs the
// exchange again. The choice depends on the operators alone, so it is the same on all ranks.
void Frame::capture_exchange(size_t index, const Record& record, c10::ArrayRef<c10::IValue> results) {
  const auto written = tensors_of(results);
  // the result must cover its storage. An empty result does, too: that of a rank whose experts get no tokens.
  if (written.size() != 1 || written[0].storage_offset() != 0 || written[0].storage().nbytes() != written[0].nbytes()) {
    return;
  }
  const int64_t maker = forward.tape().sole_maker_of(index);
  if (maker < 0) {
    return;
  }
  launches_[maker] = index;
  if (captures_.erase(maker) > 0) {
    region->leave_out(maker, forward.tape().records[maker].op);
  }
  if (setting->is_unneeded(index, *record.op)) {
    captures_[index] = {{}, true};
    return;
  }
  const CapturedTensor part = *part_of(written[0], std::nullopt, false, *record.op);
  add(written[0], part);
  captures_[index] = {{part}, true};
}

// Leaves out a collective whose result no backward has asked for: does not capture the result, and keeps a recompute
// pass from launching the collective.
void Frame::leave_out(size_t index) {
  if (!forward.tape().records[index].op->has(WAITS)) { // the operator both launched the collective and waited for it
    captures_[index] = {{}, true};
  } else if (const int64_t launch = launch_of(index); launch >= 0) {
    captures_[index] = {{}, true};
    launches_[launch] = index;
  }
}

// Returns the index of the operator that launched the collective for which operator `index` waits; -1 if a recompute
// pass cannot substitute the collective's result. That is so if `Tape::launch_of` finds no launch, if the launch
// returns several tensors, or if it writes the result into given memory or into a part of a storage.
int64_t Frame::launch_of(size_t index) const {
  const Tape& tape = forward.tape();
  const int64_t launch = tape.launch_of(index);
  if (launch < 0) {
    return -1;
  }
  const Record& launched = tape.records[launch];
  const bool is_list = launched.op->handle.schema().returns().front().type()->kind() == c10::TypeKind::ListType;
  const Use& result = tape.records[index].inputs.front();
  const bool in_place = launched.writes(result.storage);
  const bool is_own = !forward.storages.given[result.storage] && result.geometry.offset == 0 &&
      result.geometry.nbytes() == forward.storages.nbytes[result.storage];
  return launched.outputs.size() > 1 || is_list || (in_place && !is_own) ? -1 : launch;
}

std::optional<CapturedTensor> Frame::part_of(
    const at::Tensor& value, std::optional<int64_t> rows, bool keep, const Operator& op) {
  const auto kept = [&] { return CapturedTensor{nullptr, std::make_shared<KeptTensor>(value)}; };
  if (keep || !flow->is_worth_swapping(value)) {
    return rows ? std::nullopt : std::optional(kept());
  }
  if (auto swapped = flow->transfer->offload(value, rows.value_or(value.size(0)), region->offloads_late)) {
    return CapturedTensor{std::move(swapped), nullptr};
  }
  // host memory is full: keep an output that this rank must not recompute alone, since other ranks would wait, or since
  // this rank would pick other experts
  const bool alike = op.is_always_captured() || region->shares;
  return alike ? std::optional(kept()) : std::nullopt;
}

void Frame::add(const at::Tensor& tensor, const CapturedTensor& part) {
  const int32_t storage = forward.storages.find(tensor);
  forward.set_captured(storage, part.whole(), part.kept != nullptr, tensor.scalar_type());
  parts_[storage] = part;
  if (part.swapped != nullptr) {
    swapped.push_back(part.swapped);
  }
}

// Returns the captured collectives, and captured parts of communicating units, that a recompute pass would need if no
// other output were captured. `learn` stops capturing the remaining ones, which must be the same on all ranks. So the
// result must not depend on this rank's free host memory.
std::set<size_t> Frame::asked_of_ranks() const {
  std::vector<CapturedOperator> shared;
  for (const auto& [index, capture] : captures_) {
    if (tape->records[index].op->has(COLLECTIVE) || tape->records[index].op->has(SHARED)) {
      shared.push_back({index, true});
    }
  }
  std::set<size_t> asked;
  if (shared.empty()) {
    return asked;
  }
  std::vector<int32_t> storages;
  for (const Forward::Saved& saved : forward.saved) {
    if (saved.use.storage >= 0) {
      storages.push_back(saved.use.storage);
    }
  }
  const auto every = actions_of(*tape, shared, launches(), storages);
  for (const CapturedOperator& each : shared) {
    if (every[each.index] == Action::SUBSTITUTE) {
      asked.insert(each.index);
    }
  }
  return asked;
}

// Finds captured outputs that this forward's backward does not ask for, and stops capturing them in later forwards.
// Fills `spared` and `received`. `substituted`: operators whose captured results the recompute pass needs.
void Frame::learn(const std::vector<size_t>& substituted) {
  const auto of_ranks = asked_of_ranks();
  std::set<size_t> asked(substituted.begin(), substituted.end());
  asked.insert(of_ranks.begin(), of_ranks.end());
  for (const auto& [index, capture] : captures_) {
    const bool used = asked.count(index) > 0 ||
        std::any_of(capture.parts.begin(), capture.parts.end(), [](const CapturedTensor& part) { return part.is_viewed(); });
    if (!used && !tape->records[index].op->has(CHOICE)) {
      region->leave_out(index, tape->records[index].op);
    }
  }
  for (const size_t index : of_ranks) {
    if (tape->records[index].op->has(PART_OF_UNIT)) {
      received.insert(tape->records[index].made.begin(), tape->records[index].made.end());
    }
  }
  for (const auto& [index, capture] : captures_) {
    const Record& record = tape->records[index];
    if (record.op->has(COMMUNICATES) && record.op->has(COLLECTIVE)) {
      spared.insert(index);
      if (of_ranks.count(index) > 0) {
        received.insert(record.made.begin(), record.made.end());
      }
    }
  }
  for (const auto& [launch, index] : launches_) {
    spared.insert({launch, index});
    if (of_ranks.count(index) > 0) {
      const Record& launched = tape->records[launch];
      received.insert(launched.made.begin(), launched.made.end());
      received.insert(launched.written.begin(), launched.written.end());
    }
  }
}

} // namespace memplug
