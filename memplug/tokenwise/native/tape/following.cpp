// The part of a forward that follows an earlier forward's tape, changes to a tape of its own once the operators differ,
// and ends the forward.
#include "forward.h"
#include "unfilled.h"

namespace memplug {

bool Forward::follow_another(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& other : known_) {
    if (other != followed_ && begun_ < other->records.size() && is_same(op, arguments, other->records[begun_]) &&
        other->begins_as(*followed_, begun_, saved.size())) {
      followed_ = other;
      return true;
    }
  }
  return false;
}

std::shared_ptr<Tape> Forward::copied(size_t records) const {
  const Tape& from = tape();
  auto found = std::make_shared<Tape>();
  found->records.assign(from.records.begin(), from.records.begin() + static_cast<int64_t>(records));
  found->saves.assign(from.saves.begin(), from.saves.begin() + static_cast<int64_t>(saved.size()));
  unlift(found->records);
  return found;
}

void Forward::depart(size_t records) {
  noted_ = copied(records);
  followed_.reset();
}

// Adds the forward's storages, and the reasons why it is opaque, to `own`, a tape of this forward.
void Forward::describe(Tape& own) const {
  own.given = storages.given;
  own.nbytes = storages.nbytes;
  own.regathered = storages.regathered;
  own.opaque = (opaque_ & ~ASKED) == 0 && has_unfilled(own) ? opaque_ | UNFILLED : opaque_;
}

std::shared_ptr<const Tape> Forward::so_far() const {
  auto found = copied(begun_);
  describe(*found);
  return found;
}

std::shared_ptr<const Tape> Forward::close() {
  if (followed_ != nullptr && (begun_ < followed_->records.size() || saved.size() < followed_->saves.size())) {
    depart(begun_);
  }
  close_counts();
  for (Saved& each : saved) {
    each.written = each.counter.enabled() && each.counter.current_version() != each.version;
  }
  storages.forget();
  found_.clear();
  listener_ = nullptr;
  known_.clear();
  if (followed_ != nullptr) {
    return followed_;
  }
  if ((opaque_ & TRANSFORMED) != 0) {
    opaque_ &= ~FAILED; // operators that a function transform decomposes end without results, but have not failed
  }
  describe(*noted_);
  return noted_;
}

} // namespace memplug
