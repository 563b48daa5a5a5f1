#include "arena.h"

#include <algorithm>
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
  Row* const row = spot != nullptr ? match(*spot, size, stream) : nullptr;
  if (row != nullptr) {
    missed = &counters_.occupied;
    const bool lasting = row->mark != nullptr && lasts(*row->mark);
    found = lasting ? nullptr : row->kept < 0 ? take_planned(*row, nbytes, stream) : take_kept(*row, nbytes, stream);
    if (found != nullptr) {
      return count(found, counters_.planned, counters_.planned_bytes);
    }
    if (lasting || row->kept >= 0) { // a block that outlives the step must not occupy reusable space
      return leave_lasting();
    }
    kind = kind_of(static_cast<int32_t>(row - now_.rows.data()));
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
  } else if ((reuse != Reuse::NOTHING || (spot != nullptr && spot->exceeds)) && lasts(kind)) {
    return leave_lasting();
  } else if (reuse == Reuse::NOTHING && spot != nullptr) {
    note_unknown(*spot, size, stream);
    if (spot->exceeds) { // the planned addresses are no use to a larger step than planned, but their memory is
      if (take_exceeding_kept(*spot, size)) {
        return leave_lasting();
      }
      found = serve_reusable(kind, nbytes, stream);
      counters_.exceeding += found != nullptr;
    }
  }
  if (found == nullptr && reuse != Reuse::NOTHING) {
    found = serve_between(kind, nbytes, stream);
  }
  if (found != nullptr && row != nullptr) {
    now_.lifetimes.begin(static_cast<int32_t>(row - now_.rows.data()));
  }
  if (found == nullptr) {
    if (missed == &counters_.dynamic_missed) {
      counters_.dynamic_missed_bytes += static_cast<int64_t>(nbytes);
      counters_.dynamic_missed_largest = std::max(counters_.dynamic_missed_largest, static_cast<int64_t>(nbytes));
    }
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
    const auto found = now_.spots.find(key);
    if (found == now_.spots.end()) {
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
  if (spot.scales && spot.version != input_version()) {
    scale(spot);
  }
  return &spot;
}

// Computes the sizes of a place's requests from the inputs of its micro-batch.
void Arena::scale(Spot& spot) {
  const auto [version, sizes] = input_sizes(spot.micro_batch);
  std::vector<int64_t> values;
  for (const std::vector<int32_t>& term : now_.plan.terms) {
    int64_t value = 1;
    for (const int32_t dimension : term) {
      value *= static_cast<size_t>(dimension) < sizes.size() ? sizes[dimension] : 0;
    }
    values.push_back(value);
  }
  const int64_t margin = checks_ ? BLOCK_BYTES : 0;
  int64_t balance = 0; // sizes that are larger than planned, less the others
  for (int32_t at = spot.begin; at < spot.end; ++at) {
    Row& row = now_.rows[at];
    if (row.term > CONSTANT) {
      row.size = in_blocks(row.base + row.factor * values[row.term]) + margin;
      balance += row.size > row.most ? 1 : -1;
    }
  }
  spot.version = version;
  spot.exceeds = balance > 0;
}

// Returns the next planned request of this size and stream that has not been served in this step. Looks from the
// expected request onward first, then backward. So an unplanned request does not shift the others, and a planned
// request that does not come is skipped.
Arena::Row* Arena::match(Spot& spot, int64_t size, Stream stream) {
  const auto fits = [&](int32_t at) {
    const Row& row = now_.rows[at];
    const bool is_size = row.term == BOUNDED ? at == spot.next && size <= row.most : row.size == size && size <= row.most;
    return is_size && row.served_in != step_ && is_stream(row.stream, stream);
  };
  const auto take = [&](int32_t at) {
    spot.next = at + 1;
    now_.rows[at].served_in = step_;
    now_.lifetimes.come(at);
    return &now_.rows[at];
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

// Returns whether this size is that of a request that outlives the step and is larger than planned. Each such request
// comes once in a step.
bool Arena::take_exceeding_kept(const Spot& spot, int64_t size) {
  for (int32_t at = spot.begin; at < spot.end; ++at) {
    Row& row = now_.rows[at];
    if (row.kept >= 0 && row.size == size && size > row.most && row.served_in != step_) {
      row.served_in = step_;
      return true;
    }
  }
  return false;
}

// Returns whether `stream` is the plan's stream `number`. A number is bound to the first stream that is compared with
// it, unless that stream is bound to another number already.
bool Arena::is_stream(int32_t number, Stream stream) {
  if (now_.streams[number].first) {
    return now_.streams[number].second == stream;
  }
  for (const auto& [known, handle] : now_.streams) {
    if (known && handle == stream) {
      return false;
    }
  }
  now_.streams[number] = {true, stream};
  return true;
}

// Returns whether this is the plan's only stream.
bool Arena::is_only_stream(Stream stream) const {
  return now_.streams.size() == 1 && now_.streams[0].first && now_.streams[0].second == stream;
}

bool Arena::is_free(const Row& row) const {
  return now_.planned.reaching(row.end, row.offset) < 0 && reused_->holes.are_free(row.offset, row.offset + row.most);
}

void* Arena::take_planned(Row& row, size_t nbytes, Stream stream) {
  if (!is_free(row)) {
    return nullptr;
  }
  char* const begin = reused_->begin + row.offset;
  const bool wanted = hand_out(begin, row.most, nbytes, stream, row.crosses);
  const auto number = static_cast<int32_t>(&row - now_.rows.data());
  now_.planned.add(row.start, {row.offset + row.most, static_cast<int64_t>(nbytes), stream, number, wanted});
  now_.lifetimes.begin(number);
  ++reused_->live;
  return begin;
}

void* Arena::take_kept(Row& row, size_t nbytes, Stream stream) {
  if (static_cast<size_t>(row.kept) >= now_.slots_of.size()) {
    return nullptr;
  }
  for (const int32_t slot : now_.slots_of[row.kept]) {
    if (now_.slots[slot].held == 0) {
      now_.slots[slot].held = 1;
      char* const begin = kept_->begin + now_.slots[slot].offset;
      const bool wanted = hand_out(begin, row.most, nbytes, stream, 0);
      kept_blocks_[begin] = {begin + row.most, static_cast<int64_t>(nbytes), stream, slot, slot + 1, wanted, step_};
      ++kept_->live;
      return begin;
    }
  }
  return nullptr;
}

bool Arena::hand_out(char* begin, int64_t size, size_t nbytes, Stream stream, uint64_t crosses) {
  for (size_t number = 0; crosses != 0 && number < now_.streams.size(); ++number) {
    const auto& [known, other] = now_.streams[number];
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
    if (const int64_t number = part == reused_ ? now_.planned.in_use_at(begin - part->begin) : -1; number >= 0) {
      const PlannedBlock& block = now_.planned[number];
      now_.lifetimes.end(block.row);
      now_.planned.remove(number);
      take_in(*part, begin, part->begin + block.end, block.nbytes, block.stream, block.wanted, true);
    } else if (const Other* const other = others_.find(begin); other != nullptr) {
      part->holes.give_back(begin - part->begin, other->end - part->begin);
      note_end(*other);
      if (const int32_t row = other->steps == 0 ? row_of(other->kind) : NO_ROW; row != NO_ROW) {
        now_.lifetimes.end(row);
      }
      take_in(*part, begin, other->end, other->nbytes, other->stream, other->wanted, is_only_stream(other->stream));
      others_.remove(begin);
    } else if (const auto kept = kept_blocks_.find(begin); kept != kept_blocks_.end()) {
      const KeptBlock block = kept->second;
      kept_blocks_.erase(kept);
      for (int32_t slot = block.slot; slot < block.slots_end; ++slot) {
        --now_.slots[slot].held;
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
    if (!open_) {
      pending_.add(begin, end, stream); // the memory may go back to the device at once
    }
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

Lifetimes Arena::lifetimes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return now_.lifetimes;
}

ArenaCounters Arena::counters() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  ArenaCounters counters = counters_;
  counters.told_bytes = open_ ? counters_.live_bytes : counters_.wanted_bytes;
  for (const auto& part : parts_) {
    counters.reserved_bytes += part->nbytes;
  }
  others_.for_each([&](const char* begin, const Other& other) {
    counters.leftover_bytes += other.steps > 1 ? other.end - begin : 0;
  });
  return counters;
}

} // namespace memplug
