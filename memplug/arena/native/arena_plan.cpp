// Loads plans into an arena, and turns from one to another.
#include <algorithm>
#include <utility>

#include "arena.h"

namespace memplug {
namespace {

// reserved memory of more than this multiple of the needed bytes is released rather than used again
constexpr int64_t LARGEST_PART = 2;

// Returns the micro-batch of a packed phase (`pack` in sequence.h); -1: none.
int32_t micro_batch_of(int32_t phase) {
  return phase / 8 - 1;
}

} // namespace

Arena::~Arena() {
  for (const auto& part : parts_) {
    device_.release(part->begin);
  }
}

void Arena::load(ArenaPlan plan, int64_t number) {
  std::vector<std::unique_ptr<Reservation>> empty;
  int64_t wanted[2] = {plan.reused_bytes, plan.kept_bytes};
  const Role roles[2] = {Role::REUSED, Role::KEPT};
  Reservation* found[2];
  bool fits;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    park();
    parked_.erase(number);
    for (const auto& [other, loaded] : parked_) {
      wanted[0] = std::max(wanted[0], loaded.plan.reused_bytes);
      wanted[1] = std::max(wanted[1], loaded.plan.kept_bytes);
    }
    found[0] = reused_;
    found[1] = kept_;
    fits = open_ && has_right_size(reused_, wanted[0]) && has_right_size(kept_, wanted[1]);
    open_ = false;
    if (annex_ != nullptr) {
      annex_->retired = true;
      annex_ = nullptr;
    }
  }
  stop();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!fits) {
      retire();
      for (int i = 0; i < 2; ++i) {
        found[i] = find_part(roles[i], wanted[i]);
        if (found[i] != nullptr) {
          found[i]->retired = false;
        }
      }
    }
    empty = take_empty();
  }
  release(std::move(empty));
  try {
    for (int i = 0; i < 2; ++i) {
      found[i] = found[i] == nullptr && wanted[i] > 0 ? add_part(wanted[i], roles[i]) : found[i];
    }
  } catch (...) {
    close();
    throw;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  reused_ = found[0];
  kept_ = found[1];
  Loaded loaded;
  loaded.number = number;
  loaded.streams.assign(static_cast<size_t>(plan.streams), {false, nullptr});
  loaded.plan = std::move(plan);
  now_ = std::move(loaded);
  build();
  counters_.peak_bytes = counters_.live_bytes;
  counters_.peak_size = counters_.live_size;
  open_ = true;
}

bool Arena::turn(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (open_ && number == now_.number) {
    return true;
  }
  const auto found = parked_.find(number);
  if (!open_ || found == parked_.end()) {
    return false;
  }
  park();
  now_ = std::move(found->second);
  now_.lifetimes.begin_step();
  parked_.erase(found);
  build_slots();
  if (now_.marked != marks_changed_) {
    mark_rows();
  }
  return true;
}

void Arena::unload(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  parked_.erase(number);
}

// Puts the plan in force aside. Blocks in use lie elsewhere for the plans that follow. These know nothing of the streams
// that have used the memory under this plan, so the next users of the memory wait for the streams' work.
void Arena::park() {
  move_planned();
  for (auto& [begin, block] : kept_blocks_) {
    block.slot = block.slots_end = 0; // the slots were those of the plan that is put aside
  }
  for (const Reservation* part : {reused_, kept_}) {
    for (const auto& [known, stream] : now_.streams) {
      if (part != nullptr && known) {
        pending_.add(part->begin, part->begin + part->nbytes, stream);
      }
    }
  }
  last_spot_ = nullptr;
  now_.unknown.clear();
  if (now_.number != NO_PLAN) {
    now_.marked = marks_changed_;
    parked_[now_.number] = std::move(now_);
  }
  now_ = Loaded();
}

// Returns whether memory that is in use for plans suits a set of plans, of which the largest needs `wanted` bytes.
bool Arena::has_right_size(const Reservation* part, int64_t wanted) const {
  if (part == nullptr || wanted == 0) {
    return part == nullptr && wanted == 0;
  }
  return part->nbytes >= wanted && (is_pinned(*part) || part->nbytes <= LARGEST_PART * wanted);
}

Arena::Reservation* Arena::add_part(int64_t nbytes, Role role) {
  char* const begin = device_.reserve(static_cast<size_t>(nbytes));
  auto part = std::make_unique<Reservation>(Reservation{begin, nbytes, device_.current_stream(), role, Holes(nbytes)});
  if (checks_) {
    device_.fill(begin, nbytes, FREED, part->stream);
  }
  device_.synchronize(); // any stream may be the first to use the memory
  const std::lock_guard<std::mutex> lock(mutex_);
  parts_.push_back(std::move(part));
  return parts_.back().get();
}

// Returns reserved memory of this role with at least `nbytes`, to use it again; null if there is none. Prefers memory
// that cannot be released soon anyway (`is_pinned`), and of this the smallest. Other memory must have at most
// LARGEST_PART times `nbytes`.
Arena::Reservation* Arena::find_part(Role role, int64_t nbytes) const {
  Reservation* best = nullptr;
  const auto rank = [&](const Reservation& part) { return std::make_pair(!is_pinned(part), part.nbytes); };
  for (const auto& part : parts_) {
    const bool fits = part->role == role && nbytes > 0 && part->nbytes >= nbytes &&
        (is_pinned(*part) || part->nbytes <= LARGEST_PART * nbytes);
    best = fits && (best == nullptr || rank(*part) < rank(*best)) ? part.get() : best;
  }
  return best;
}

void Arena::close() {
  std::vector<std::unique_ptr<Reservation>> empty;
  stop();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    park();
    parked_.clear();
    retire();
    empty = take_empty();
  }
  release(std::move(empty));
}

// Stops serving, and waits for the device to finish all work on the plan's memory.
void Arena::stop() {
  bool unused;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
    unused = parts_.empty();
  }
  if (!unused) {
    device_.synchronize();
  }
}

void Arena::begin_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++step_;
  now_.lifetimes.begin_step();
  counters_.dynamic_missed_largest = 0;
  now_.unknown.clear();
  pending_.forget_done();
  note_leftovers();
}

void Arena::retire() {
  for (const auto& part : parts_) {
    part->retired = true;
  }
  reused_ = kept_ = annex_ = nullptr;
}

std::vector<std::unique_ptr<Arena::Reservation>> Arena::take_empty() {
  const auto kept = std::partition(
      parts_.begin(), parts_.end(), [](const auto& part) { return !part->retired || part->live > 0; });
  std::vector<std::unique_ptr<Reservation>> empty(std::make_move_iterator(kept), std::make_move_iterator(parts_.end()));
  parts_.erase(kept, parts_.end());
  for (const auto& part : empty) {
    for (const auto& [known, other] : now_.streams) {
      if (known && other != part->stream) {
        const Event event = device_.record(other);
        device_.wait(part->stream, event);
        device_.drop(event);
      }
    }
    pending_.order_after_all(part->stream); // of plans that are put aside too
  }
  return empty;
}

void Arena::release(std::vector<std::unique_ptr<Reservation>> parts) {
  for (const auto& part : parts) {
    device_.release(part->begin);
  }
}

// -- tables -----------------------------------------------------------------------------------------------------------

void Arena::build() {
  std::vector<int64_t> offsets;
  std::vector<int64_t>& sizes = now_.class_bytes;
  for (const PlannedRequest& request : now_.plan.requests) {
    if (request.kept < 0) {
      offsets.push_back(int64_t{request.offset}); // a copy: members of packed rows may be misaligned
    } else {
      sizes.resize(std::max(sizes.size(), static_cast<size_t>(request.kept) + 1));
      sizes[request.kept] = request.size;
    }
  }
  std::sort(now_.plan.slots.begin(), now_.plan.slots.end(), [](const KeptSlot& a, const KeptSlot& b) {
    return int64_t{a.offset} < int64_t{b.offset};
  });
  now_.planned = PlannedBlocks(std::move(offsets));
  for (const PlannedRequest& r : now_.plan.requests) {
    const bool kept = r.kept >= 0;
    const int32_t start = kept ? -1 : now_.planned.number_from(r.offset);
    const int32_t end = kept ? -1 : now_.planned.number_from(r.offset + r.size);
    now_.rows.push_back(
        {r.size, r.size, r.offset, r.crosses, start, end, r.stream, r.kept, r.spare, r.term, r.base, r.factor});
  }
  now_.lifetimes = Lifetimes(now_.rows.size());
  now_.spaces_of.assign(now_.plan.crosses.size(), {});
  for (const IdleSpace& space : now_.plan.spaces) {
    now_.spaces_of[space.group].push_back(space_of(space.begin, space.end));
  }
  build_spots();
  build_slots();
  mark_rows();
}

void Arena::build_spots() {
  const auto& requests = now_.plan.requests;
  for (size_t i = 0; i < requests.size(); ++i) {
    Spot& spot = now_.spots[key_of(requests[i].phase, requests[i].layer)];
    spot.begin = spot.end == 0 ? static_cast<int32_t>(i) : spot.begin;
    spot.end = static_cast<int32_t>(i) + 1;
    spot.micro_batch = micro_batch_of(requests[i].phase);
    spot.scales |= requests[i].term > CONSTANT;
  }
  const auto& dynamic = now_.plan.dynamic;
  for (size_t i = 0; i < dynamic.size(); ++i) {
    Spot& spot = now_.spots[key_of(dynamic[i].phase, dynamic[i].layer)];
    spot.dynamic_begin = spot.dynamic_end == 0 ? static_cast<int32_t>(i) : spot.dynamic_begin;
    spot.dynamic_end = static_cast<int32_t>(i) + 1;
  }
}

// Places the slots one after another in the order of their planned offsets. Leaves out the bytes of blocks that have
// been in use for a whole step, since these are likely to stay. Drops a slot for which there is no room.
void Arena::build_slots() {
  const std::vector<int64_t>& sizes = now_.class_bytes;
  now_.slots.clear();
  now_.slots_of.assign(sizes.size(), {});
  auto block = kept_ != nullptr ? kept_blocks_.lower_bound(kept_->begin) : kept_blocks_.end();
  int64_t at = 0;
  for (const KeptSlot& slot : now_.plan.slots) {
    const int64_t size = static_cast<size_t>(slot.kept) < sizes.size() ? sizes[slot.kept] : 0;
    for (; block != kept_blocks_.end() && block->first < kept_->begin + at + size; ++block) {
      at = step_ - block->second.since > 1 ? std::max<int64_t>(at, block->second.end - kept_->begin) : at;
    }
    if (size > 0 && at + size <= kept_->nbytes) {
      now_.slots_of[slot.kept].push_back(static_cast<int32_t>(now_.slots.size()));
      now_.slots.push_back({at, at + size});
      at += size;
    }
  }
  for (auto& [begin, held] : kept_blocks_) { // blocks in use hold the slots that they overlap
    if (part_of(begin) == kept_) {
      const int64_t offset = begin - kept_->begin, end = held.end - kept_->begin;
      const auto first = std::partition_point(
          now_.slots.begin(), now_.slots.end(), [&](const LoadedSlot& slot) { return slot.end <= offset; });
      held.slot = static_cast<int32_t>(first - now_.slots.begin());
      held.slots_end = held.slot;
      for (; held.slots_end < static_cast<int32_t>(now_.slots.size()) && now_.slots[held.slots_end].offset < end; ++held.slots_end) {
        ++now_.slots[held.slots_end].held;
      }
    }
  }
}

} // namespace memplug
