// Leftovers are blocks that outlive their step although the plan did not know. This file notes which bytes leftovers
// hold, and limits their number.
//
// If a request's block is still in use when a later step begins, the native allocator serves that request from then on.
// The request is recognised by its kind: its place, size and stream, and if it is planned, its number within the place.
// So a planned request leaves at most one leftover. For unplanned requests there is a limit per place: while
// MOST_AT_A_PLACE of their leftovers are in use, the native allocator serves all unplanned requests of the place. Once
// a request's leftover has been freed, the arena serves the request again, after a pause that doubles each time. The
// annex serves requests whose planned bytes a leftover holds.
#include <algorithm>
#include <utility>

#include "arena.h"

namespace memplug {
namespace {

// most blocks in use of one kind of unplanned request: a script that needs more is likely to keep them
constexpr int32_t MOST_ALIKE = 8;
constexpr int32_t MOST_AT_A_PLACE = 16; // most leftovers in use of one place's unplanned requests, of all sizes
constexpr uint32_t FIRST_PAUSE = 32; // steps; doubles each time that a leftover of the kind has stayed for a whole step
constexpr int32_t MOST_DOUBLINGS = 20;
constexpr size_t MANY_MARKS = 4096;

} // namespace

Arena::RequestKind Arena::kind_of(int32_t row) const {
  const PlannedRequest& request = now_.plan.requests[row];
  const uint64_t place = key_of(request.phase, request.layer);
  return {place, request.size, request.stream, row - now_.spots.at(place).begin};
}

// Returns the index of the planned request of this kind, or NO_ROW.
int32_t Arena::row_of(const RequestKind& kind) const {
  const auto spot = kind.number >= 0 ? now_.spots.find(kind.place) : now_.spots.end();
  if (spot == now_.spots.end()) {
    return NO_ROW;
  }
  const int32_t row = spot->second.begin + kind.number;
  return row < spot->second.end && kind_of(row) == kind ? row : NO_ROW;
}

bool Arena::lasts(const RequestKind& kind) const {
  if (marks_.empty()) {
    return false;
  }
  const auto found = marks_.find(kind);
  if (found != marks_.end() && lasts(found->second)) {
    return true;
  }
  const auto all = marks_.find({kind.place, 0, 0, ANY_SIZE});
  return all != marks_.end() && all->second.held >= MOST_AT_A_PLACE;
}

void Arena::mark_rows() {
  now_.marked = marks_changed_;
  for (size_t row = 0; row < now_.rows.size(); ++row) {
    const auto found = marks_.empty() ? marks_.end() : marks_.find(kind_of(static_cast<int32_t>(row)));
    now_.rows[row].mark = found != marks_.end() ? &found->second : nullptr;
  }
}

// Moves blocks at planned offsets from `now_.planned` to `others_`.
void Arena::move_planned() {
  for (int64_t number = now_.planned.next(0); number >= 0; number = now_.planned.next(number + 1)) {
    const PlannedBlock& block = now_.planned[number];
    add_other(
        reused_->begin + now_.planned.offset(number),
        {reused_->begin + block.end, block.nbytes, block.stream, reused_, kind_of(block.row), block.wanted});
    now_.planned.remove(number);
  }
}

// Turns every block that is still in use in the reused part and the annex into a leftover.
void Arena::note_leftovers() {
  move_planned();
  others_.for_each([&](char*, Other& other) {
    if (++other.steps == 1) {
      note_leftover(other);
    }
  });
  for (auto mark = marks_.begin(); marks_.size() > MANY_MARKS && mark != marks_.end();) {
    const bool idle = mark->first.number < 0 && mark->second.held == 0 && mark->second.live == 0;
    mark = idle ? marks_.erase(mark) : std::next(mark);
  }
}

void Arena::note_leftover(const Other& other) {
  const RequestKind& kind = other.kind;
  const size_t known = marks_.size();
  LeftoverHistory& mark = marks_[kind];
  marks_changed_ += marks_.size() != known && kind.number != NO_ROW;
  ++mark.held;
  if (kind.number == NO_ROW) {
    ++marks_[{kind.place, 0, 0, ANY_SIZE}].held;
  } else if (const int32_t row = row_of(kind); row != NO_ROW) {
    now_.rows[row].mark = &mark;
  }
}

// Notes that a block was freed. If this happened in the step after the block's own, there is no pause, since another
// thread may have freed the block a little late.
void Arena::note_end(const Other& other) {
  const auto found = marks_.find(other.kind);
  if (found == marks_.end()) { // no block of this kind was noted, or `forget_leftovers` has forgotten it
    return;
  }
  LeftoverHistory& mark = found->second;
  mark.live -= other.counted;
  if (other.steps > 0) {
    mark.held = std::max(mark.held - 1, 0);
    if (const auto all = marks_.find({other.kind.place, 0, 0, ANY_SIZE}); other.kind.number == NO_ROW && all != marks_.end()) {
      all->second.held = std::max(all->second.held - 1, 0);
    }
  }
  if (other.steps > 1) {
    mark.until = step_ + (FIRST_PAUSE << std::min(mark.strikes++, MOST_DOUBLINGS));
  } else if (other.kind.number == NO_ROW && mark.live == 0 && mark.held == 0 && mark.strikes == 0) {
    marks_.erase(found);
  }
}

void Arena::forget_leftovers() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Row& row : now_.rows) {
    row.mark = nullptr;
  }
  marks_.clear();
  ++marks_changed_;
  others_.for_each([](char*, Other& other) { other.counted = false; });
}

void Arena::forget_wanted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t number = now_.planned.next(0); number >= 0; number = now_.planned.next(number + 1)) {
    now_.planned[number].wanted = false;
  }
  others_.for_each([](char*, Other& other) { other.wanted = false; });
  for (auto& [begin, kept] : kept_blocks_) {
    kept.wanted = false;
  }
  counters_.wanted_bytes = 0;
}

std::vector<std::pair<int64_t, int64_t>> Arena::leftovers() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<int64_t, int64_t>> found;
  others_.for_each([&](const char* begin, const Other& other) {
    if (other.part == reused_ && other.steps > 1) {
      found.emplace_back(begin - reused_->begin, other.end - reused_->begin);
    }
  });
  std::sort(found.begin(), found.end());
  return found;
}

// Returns whether leftovers or kept blocks are in this memory, so that it is unlikely to be released soon.
bool Arena::is_pinned(const Reservation& part) const {
  bool has_leftover = false;
  others_.for_each([&](const char*, const Other& other) {
    has_leftover = has_leftover || (other.part == &part && other.steps > 1);
  });
  return part.role == Role::KEPT ? part.live > 0 : has_leftover;
}

// -- the annex --------------------------------------------------------------------------------------------------------

void Arena::extend(int64_t nbytes) {
  std::vector<std::unique_ptr<Reservation>> empty;
  bool found;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (annex_ != nullptr) {
      annex_->retired = true;
    }
    annex_ = find_part(Role::ANNEX, nbytes);
    found = annex_ != nullptr;
    if (found) {
      annex_->retired = false;
    }
    empty = take_empty();
  }
  release(std::move(empty));
  if (!found && nbytes > 0) {
    Reservation* const part = add_part(nbytes, Role::ANNEX);
    const std::lock_guard<std::mutex> lock(mutex_);
    annex_ = part;
  }
}

// Serves an unplanned request from reusable space or the annex, unless MOST_ALIKE blocks of its kind are in use.
void* Arena::serve_between(const RequestKind& kind, size_t nbytes, Stream stream) {
  const auto known = marks_.find(kind);
  if (known != marks_.end() && known->second.live >= MOST_ALIKE) {
    return nullptr;
  }
  void* found = serve_reusable(kind, nbytes, stream);
  found = found == nullptr && annex_ != nullptr ? take_annex(kind, nbytes, stream) : found;
  if (found != nullptr && kind.number == NO_ROW) {
    ++marks_[kind].live;
    others_.find(static_cast<char*>(found))->counted = true;
  }
  return found;
}

} // namespace memplug
