#include "arena.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace memplug {
namespace {

constexpr int32_t LOOK_AROUND = 32; // planned requests to search on either side of the expected one
constexpr int SURROUNDING = 0xA5;

} // namespace

// -- requests ---------------------------------------------------------------------------------------------------------

void* Arena::request(int32_t phase, int32_t layer, size_t nbytes, Stream stream, Reuse reuse) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!open_ || nbytes == 0) {
    return nullptr;
  }
  // With checks, a margin with a pattern follows each block.
  const int64_t size = in_blocks(static_cast<int64_t>(nbytes)) + (checks_ ? BLOCK_BYTES : 0);
  const auto count = [&](void* found, int64_t& requests, int64_t& sum) {
    requests += 1;
    sum += static_cast<int64_t>(nbytes);
    return found;
  };
  const auto leave_lasting = [&] { return count(nullptr, counters_.lasting, counters_.lasting_bytes); };
  Spot* const spot = spot_of(phase, layer);
  int64_t* missed = reuse == Reuse::WITHOUT_GRADIENTS ? &counters_.without_gradients : &counters_.unplanned;
  RequestKind kind{key_of(phase, layer), size, 0, NO_ROW};
  void* found = nullptr;
  if (Row* row = spot != nullptr ? match(*spot, size, stream) : nullptr; row != nullptr) {
    missed = &counters_.occupied;
    const bool lasting = row->mark != nullptr && lasts(*row->mark);
    found = lasting ? nullptr : row->kept < 0 ? take_planned(*row, nbytes, stream) : take_kept(*row, nbytes, stream);
    if (found != nullptr) {
      return count(found, counters_.planned, counters_.planned_bytes);
    }
    if (lasting || row->kept >= 0) { // a block that outlives the step must not occupy reusable space
      return leave_lasting();
    }
    kind = kind_of(static_cast<int32_t>(row - rows_.data()));
    found = row->spare >= 0 ? take_reusable(row->spare, kind, nbytes, stream) : nullptr;
    found = found == nullptr && annex_ != nullptr ? take_annex(kind, nbytes, stream) : found;
  } else if (spot != nullptr && spot->dynamic_begin < spot->dynamic_end) {
    if (lasts(kind)) {
      return leave_lasting();
    }
    missed = &counters_.dynamic_missed;
    if ((found = take_dynamic(*spot, kind, nbytes, stream)) != nullptr) {
      return count(found, counters_.dynamic, counters_.dynamic_bytes);
    }
  } else if (reuse != Reuse::NOTHING && lasts(kind)) {
    return leave_lasting();
  }
  if (found == nullptr && reuse != Reuse::NOTHING) {
    found = serve_between(kind, nbytes, stream);
  }
  if (found == nullptr) {
    counters_.dynamic_missed_bytes += missed == &counters_.dynamic_missed ? static_cast<int64_t>(nbytes) : 0;
    return count(nullptr, *missed, counters_.fallback_bytes);
  }
  return count(found, counters_.reusable, counters_.reusable_bytes);
}

void Arena::elsewhere(size_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (open_ && nbytes > 0) {
    ++counters_.elsewhere;
  }
}

Arena::Spot* Arena::spot_of(int32_t phase, int32_t layer) {
  const uint64_t key = key_of(phase, layer);
  if (key != last_place_ || last_spot_ == nullptr) {
    const auto found = spots_.find(key);
    if (found == spots_.end()) {
      return nullptr;
    }
    last_place_ = key;
    last_spot_ = &found->second;
  }
  Spot& spot = *last_spot_;
  if (spot.step != step_) {
    spot.step = step_;
    spot.next = spot.begin;
    spot.dynamic_next = spot.dynamic_begin;
  }
  return &spot;
}

// Returns the next planned request of this size and stream that has not been served in this step. Looks from the
// expected request onward first, then backward. So an unplanned request does not shift the others, and a planned
// request that does not come is skipped.
Arena::Row* Arena::match(Spot& spot, int64_t size, Stream stream) {
  const auto fits = [&](int32_t at) {
    const Row& row = rows_[at];
    return row.size == size && row.served_in != step_ && is_stream(row.stream, stream);
  };
  const auto take = [&](int32_t at) {
    spot.next = at + 1;
    rows_[at].served_in = step_;
    return &rows_[at];
  };
  const int32_t expected = spot.next;
  for (int32_t at = expected; at < std::min(spot.end, expected + LOOK_AROUND); ++at) {
    if (fits(at)) {
      return take(at);
    }
  }
  for (int32_t at = expected - 1; at >= std::max(spot.begin, expected - LOOK_AROUND); --at) {
    if (fits(at)) {
      return take(at);
    }
  }
  return nullptr;
}

// Returns whether `stream` is the plan's stream `number`. A number is bound to the first stream that is compared with
// it, unless that stream is bound to another number already.
bool Arena::is_stream(int32_t number, Stream stream) {
  if (streams_[number].first) {
    return streams_[number].second == stream;
  }
  for (const auto& [known, handle] : streams_) {
    if (known && handle == stream) {
      return false;
    }
  }
  streams_[number] = {true, stream};
  return true;
}

// Returns whether this is the plan's only stream.
bool Arena::is_only_stream(Stream stream) const {
  return streams_.size() == 1 && streams_[0].first && streams_[0].second == stream;
}

bool Arena::is_free(const Row& row) {
  const int64_t before = live_starts_.before(row.end);
  if (before >= 0 && live_[before].end > row.offset) {
    late_.emplace(live_[before].row, static_cast<int32_t>(&row - rows_.data()));
    return false;
  }
  const Stretch other = runs_.first(row.offset, row.offset + row.size);
  return other.first == other.second;
}

void* Arena::take_planned(Row& row, size_t nbytes, Stream stream) {
  if (!is_free(row)) {
    return nullptr;
  }
  char* const begin = reused_->begin + row.offset;
  const bool wanted = hand_out(begin, row.size, nbytes, stream, row.crosses);
  live_starts_.add(row.start);
  const auto number = static_cast<int32_t>(&row - rows_.data());
  live_[row.start] = {row.offset + row.size, static_cast<int64_t>(nbytes), stream, number, wanted};
  ++reused_->live;
  return begin;
}

void* Arena::take_kept(Row& row, size_t nbytes, Stream stream) {
  if (static_cast<size_t>(row.kept) >= slots_of_.size()) {
    return nullptr;
  }
  for (const int32_t slot : slots_of_[row.kept]) {
    if (slots_[slot].held == 0) {
      slots_[slot].held = 1;
      char* const begin = kept_->begin + slots_[slot].offset;
      const bool wanted = hand_out(begin, row.size, nbytes, stream, 0);
      kept_blocks_[begin] = {begin + row.size, static_cast<int64_t>(nbytes), stream, slot, slot + 1, wanted, step_};
      ++kept_->live;
      return begin;
    }
  }
  return nullptr;
}

// Serves a dynamic request from the lowest free bytes of its group, or the highest ones below the group's ceiling.
void* Arena::take_dynamic(Spot& spot, const RequestKind& kind, size_t nbytes, Stream stream) {
  const int32_t group = plan_.dynamic[spot.dynamic_next].group;
  spot.dynamic_next = std::min(spot.dynamic_next + 1, spot.dynamic_end - 1);
  if (group < 0 || !is_stream(0, stream)) {
    return nullptr;
  }
  const int64_t ceiling = plan_.ceilings[group];
  int64_t offset = ceiling > 0 ? highest(group, kind.size, ceiling) : -1;
  offset = offset < 0 ? lowest(group, kind.size) : offset;
  return offset < 0 ? nullptr : take_other(*reused_, offset, kind, nbytes, stream, plan_.crosses[group]);
}

// Returns the offset of the lowest `size` bytes of the group that are free now, or -1.
int64_t Arena::lowest(int32_t group, int64_t size) const {
  for (int32_t at = spaces_of_[group].first; at < spaces_of_[group].second; ++at) {
    const IdleSpace& space = plan_.spaces[at];
    for (int64_t begin = space.begin; begin + size <= space.end;) {
      const Stretch live = next_live(begin, space.end);
      if (live.first - begin >= size) {
        return begin;
      }
      begin = live.second;
    }
  }
  return -1;
}

// Returns the offset of the highest `size` bytes of the group below `ceiling` that are free now, or -1.
int64_t Arena::highest(int32_t group, int64_t size, int64_t ceiling) const {
  for (int32_t at = spaces_of_[group].second; at-- > spaces_of_[group].first;) {
    const IdleSpace& space = plan_.spaces[at];
    for (int64_t end = std::min<int64_t>(space.end, ceiling); end - size >= space.begin;) {
      const Stretch live = last_live(space.begin, end);
      if (end - live.second >= size) {
        return end - size;
      }
      end = live.first;
    }
  }
  return -1;
}

// Serves a request from the smallest stretch of the group's bytes that is free now and large enough (STWeaver, eq. 6).
void* Arena::take_reusable(int32_t group, const RequestKind& kind, size_t nbytes, Stream stream) {
  const int64_t size = kind.size;
  Stretch best{0, 0};
  for (int32_t at = spaces_of_[group].first; at < spaces_of_[group].second && is_stream(0, stream); ++at) {
    const IdleSpace& space = plan_.spaces[at];
    const Stretch found = fitting(space.begin, space.end, size, false);
    if (found.second > found.first && (best.second == 0 || found.second - found.first < best.second - best.first)) {
      best = found;
    }
  }
  if (best.second == 0) {
    return nullptr;
  }
  return take_other(*reused_, best.first, kind, nbytes, stream, plan_.crosses[group]);
}

void* Arena::take_other(
    Reservation& part, int64_t offset, const RequestKind& kind, size_t nbytes, Stream stream, uint64_t crosses) {
  char* const begin = part.begin + offset;
  const bool wanted = hand_out(begin, kind.size, nbytes, stream, crosses);
  add_other(begin, {begin + kind.size, static_cast<int64_t>(nbytes), stream, &part, kind, wanted});
  ++part.live;
  return begin;
}

void Arena::add_other(char* begin, const Other& other) {
  others_[begin] = other;
  if (other.part == reused_) {
    runs_.add(begin - reused_->begin, other.end - reused_->begin);
  }
}

// Returns a free stretch of at least `size` bytes in [begin, end): the smallest, or with `highest` the highest. Returns
// an empty stretch if there is none.
Stretch Arena::fitting(int64_t begin, int64_t end, int64_t size, bool highest) const {
  Stretch best{0, 0};
  while (begin < end) {
    const Stretch live = next_live(begin, end);
    const Stretch free{begin, live.first};
    if (free.second - free.first >= size &&
        (best.second == 0 || highest || free.second - free.first < best.second - best.first)) {
      best = free;
    }
    begin = live.second;
  }
  return best;
}

// Returns the first block in use that overlaps [from, end), clipped to begin at `from` or later; an empty stretch at
// `end` if there is none.
Stretch Arena::next_live(int64_t from, int64_t end) const {
  Stretch found{end, end};
  if (!offsets_.empty()) {
    const int64_t above = first_start(from + 1);
    int64_t start = live_starts_.before(above);
    if (start < 0 || live_[start].end <= from) {
      start = live_starts_.from(above);
    }
    if (start >= 0 && offsets_[start] < end) {
      found = {std::max(offsets_[start], from), live_[start].end};
    }
  }
  const Stretch other = runs_.first(from, found.first);
  return other.first < other.second ? other : found;
}

// Returns the last block in use that overlaps [from, end), clipped to end at `end` or earlier; an empty stretch at
// `from` if there is none.
Stretch Arena::last_live(int64_t from, int64_t end) const {
  Stretch found{from, from};
  if (!offsets_.empty()) {
    const int64_t start = live_starts_.before(first_start(end));
    if (start >= 0 && live_[start].end > from) {
      found = {offsets_[start], std::min(live_[start].end, end)};
    }
  }
  const Stretch other = runs_.last(found.second, end);
  return other.first < other.second ? other : found;
}

// Returns the index in `offsets_` of the first offset at or above `offset`.
int64_t Arena::first_start(int64_t offset) const {
  return std::lower_bound(offsets_.begin(), offsets_.end(), offset) - offsets_.begin();
}

bool Arena::hand_out(char* begin, int64_t size, size_t nbytes, Stream stream, uint64_t crosses) {
  for (size_t number = 0; crosses != 0 && number < streams_.size(); ++number) {
    const auto& [known, other] = streams_[number];
    if ((crosses >> number & 1) != 0 && known && other != stream) {
      const Event event = device_.record(other);
      device_.wait(stream, event);
      device_.drop(event);
    }
  }
  pending_.order(begin, begin + size, stream);
  if (checks_) {
    counters_.written_freed += !device_.is_filled(begin, size, FREED, stream);
    device_.fill(begin + nbytes, size - nbytes, SURROUNDING, stream);
  }
  counters_.live_bytes += static_cast<int64_t>(nbytes);
  counters_.live_size += size;
  counters_.peak_bytes = std::max(counters_.peak_bytes, counters_.live_bytes);
  counters_.peak_size = std::max(counters_.peak_size, counters_.live_size);
  const bool wanted = device_.handed_out(begin, nbytes, stream);
  counters_.wanted_bytes += wanted ? static_cast<int64_t>(nbytes) : 0;
  return wanted;
}

// -- freed blocks -----------------------------------------------------------------------------------------------------

bool Arena::give_back(void* pointer) {
  std::vector<std::unique_ptr<Reservation>> empty;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Reservation* const part = part_of(pointer);
    if (part == nullptr) {
      return false;
    }
    char* const begin = static_cast<char*>(pointer);
    const int64_t start = part == reused_ ? start_at(begin - part->begin) : -1;
    if (start >= 0 && live_starts_.holds(start)) {
      const Live& live = live_[start];
      live_starts_.remove(start);
      take_in(*part, begin, part->begin + live.end, live.nbytes, live.stream, live.wanted, true);
    } else if (const auto found = others_.find(begin); found != others_.end()) {
      const Other other = found->second;
      others_.erase(found);
      if (part == reused_) {
        runs_.remove(begin - part->begin, other.end - part->begin);
      }
      note_end(other);
      take_in(*part, begin, other.end, other.nbytes, other.stream, other.wanted, is_only_stream(other.stream));
    } else if (const auto kept = kept_blocks_.find(begin); kept != kept_blocks_.end()) {
      const KeptBlock block = kept->second;
      kept_blocks_.erase(kept);
      for (int32_t slot = block.slot; slot < block.slots_end; ++slot) {
        --slots_[slot].held;
      }
      take_in(*part, begin, block.end, block.nbytes, block.stream, block.wanted, block.slot < block.slots_end);
    } else {
      return true; // not the beginning of a block: there is nothing to free
    }
    empty = take_empty();
  }
  release(std::move(empty));
  return true;
}

void Arena::take_in(Reservation& part, char* begin, char* end, int64_t nbytes, Stream stream, bool wanted, bool alone) {
  // `alone`: see `PendingUses::end_block`. With checks, `stream` waits for the other streams that use the block, since
  // they must not read the pattern that is written below.
  pending_.end_block(begin, end, stream, alone, checks_);
  if (checks_) {
    counters_.written_beyond += !device_.is_filled(begin + nbytes, end - begin - nbytes, SURROUNDING, stream);
    device_.fill(begin, end - begin, FREED, stream);
  }
  counters_.live_bytes -= nbytes;
  counters_.live_size -= end - begin;
  counters_.wanted_bytes -= wanted ? nbytes : 0;
  --part.live;
  device_.came_back(begin, static_cast<size_t>(nbytes), wanted, open_);
}

bool Arena::use_on(void* pointer, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (part_of(pointer) == nullptr) {
    return false;
  }
  pending_.use_on(static_cast<char*>(pointer), stream);
  return true;
}

bool Arena::owns(const void* pointer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return part_of(pointer) != nullptr;
}

char* Arena::reserved_with(const void* pointer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Reservation* const part = part_of(pointer);
  return part != nullptr ? part->begin : nullptr;
}

Arena::Reservation* Arena::part_of(const void* pointer) const {
  const auto* const address = static_cast<const char*>(pointer);
  for (const auto& part : parts_) {
    if (part->begin <= address && address < part->begin + part->nbytes) {
      return part.get();
    }
  }
  return nullptr;
}

std::vector<std::pair<int32_t, int32_t>> Arena::late() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {late_.begin(), late_.end()};
}

ArenaCounters ArenaCounters::since(const ArenaCounters& before) const {
  ArenaCounters since = *this;
  for (const auto& [name, value, is_now] : ARENA_COUNTERS) {
    since.*value -= is_now ? 0 : before.*value;
  }
  return since;
}

ArenaCounters Arena::counters() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  ArenaCounters counters = counters_;
  counters.told_bytes = open_ ? counters_.live_bytes : counters_.wanted_bytes;
  for (const auto& part : parts_) {
    counters.reserved_bytes += part->nbytes;
  }
  for (const auto& [begin, other] : others_) {
    counters.leftover_bytes += other.steps > 1 ? other.end - begin : 0;
  }
  return counters;
}

} // namespace memplug
