// Recomputes tensors of a forward before its backward. For that it runs operators of the forward's tape again, or, if
// the forward has not ended, of its tape so far.
#include <algorithm>

#include "clock.h"
#include "frame.h"
#include "observer.h"

namespace memplug {
namespace {

// Returns whether a tensor lies in given memory (forward.h), or in memory that an operator of the tape made.
bool shows(const Tape& tape, const Use& use) {
  return tape.given[use.storage] || std::any_of(tape.records.begin(), tape.records.end(), [&](const Record& record) {
    return record.makes(use.storage);
  });
}

} // namespace

std::optional<std::vector<at::Tensor>> Frame::again(
    const std::shared_ptr<const Tape>& own_tape, const std::vector<Use>& uses) {
  const Pause unseen;
  const Suspension own;
  std::vector<const Use*> wanted;
  std::vector<int32_t> wanted_storages;
  for (const Use& use : uses) {
    if (!shows(*own_tape, use)) {
      return std::nullopt;
    }
    wanted.push_back(&use);
    wanted_storages.push_back(use.storage);
  }
  const PassActions its(own_tape, {}, {}, wanted_storages);
  if (its.communicates) { // other ranks may not need these tensors now, and would not take part
    return std::nullopt;
  }
  std::vector<std::shared_ptr<Swapped>> read, away;
  try {
    Bases bases(own_tape->nbytes.size());
    for (const auto& [storage, input] : inputs) {
      if (!input->tensor.defined()) {
        away.push_back(input);
      }
    }
    for (const int32_t storage : its.reads) {
      bases[storage] = base_of(storage, own_tape->records.size(), read);
    }
    auto found = run_again(its, std::move(bases), wanted);
    for (const auto& part : away) {
      if (std::find(read.begin(), read.end(), part) != read.end()) {
        flow->transfer->drop(part);
      }
    }
    return found;
  } catch (const Diverged&) {
  } catch (const Failure&) { // a parameter's memory is freed at present (ZeRO 3)
  }
  return std::nullopt;
}

// Recomputes the saved tensors that the forward does not hold. Until the forward ends, holds them, and all tensors that
// autograd saves from now on.
void Frame::hold_so_far() {
  forward.holds_meanwhile = true;
  const auto done = forward.so_far();
  if ((done->opaque & ~ASKED) != 0) {
    return;
  }
  std::vector<size_t> gone;
  std::vector<Use> uses;
  for (size_t i = 0; i < forward.saved.size(); ++i) {
    const Forward::Saved& each = forward.saved[i];
    const bool is_there = each.held.defined() || each.kept.defined() || forward.given[each.use.storage].tensor.defined();
    if (each.alive && !is_there && shows(*done, each.use)) {
      gone.push_back(i);
      uses.push_back(each.use);
    }
  }
  if (const auto found = again(done, uses)) {
    for (size_t i = 0; i < gone.size(); ++i) {
      forward.keep(gone[i], (*found)[i]);
    }
  }
}

at::Tensor Frame::early(size_t index) {
  const Forward::Saved& saved = forward.saved.at(index);
  region->asks = true;
  if (std::this_thread::get_id() != thread_) {
    forward.blind(ASKED);
    for (GivenMemory& each : forward.given) {
      if (each.had_gradient && !std::exchange(each.noted, true) && each.tensor.grad().defined()) {
        before_accumulating(each.tensor.grad());
      }
    }
  }
  const auto found = [&]() -> at::Tensor {
    if (saved.held.defined() || saved.kept.defined()) {
      return saved.held.defined() ? saved.held : saved.kept;
    }
    const at::Tensor& memory = forward.given.at(saved.use.storage).tensor;
    return memory.defined() ? tensor_at(memory, saved.use.geometry) : memory;
  };
  if (!found().defined() && !forward.holds_meanwhile) {
    hold_so_far();
  }
  const at::Tensor tensor = found();
  if (!tensor.defined()) {
    throw Failure(Failure::ASKED_EARLY, saved.use.geometry.size);
  }
  return tensor;
}

} // namespace memplug
