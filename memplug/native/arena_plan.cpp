// How an arena takes a plan up, and lets the former one go.
#include <algorithm>
#include <utility>

#include "arena.h"

namespace memplug {
namespace {

constexpr int64_t LARGEST_PART = 2; // memory that is there is used again where it is at most so many times what is asked

size_t hash_of(int64_t offset, size_t mask) {
  return static_cast<uint64_t>(offset / GRANULARITY) * 0x9E3779B97F4A7C15ull >> 20 & mask;
}

} // namespace

Arena::~Arena() {
  for (const Pending& pending : pending_) {
    device_.drop(pending.event);
  }
  for (const auto& part : parts_) {
    device_.release(part->begin);
  }
}

void Arena::load(ArenaPlan plan) {
  std::vector<std::unique_ptr<Part>> empty;
  int64_t reused_bytes = plan.reused_bytes, kept_bytes = plan.kept_bytes;
  stop();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_live_blocks();
    const bool reusable =
        reused_ != nullptr && reused_bytes <= reused_->nbytes && reused_->nbytes <= LARGEST_PART * reused_bytes;
    Part* const same = reusable ? reused_ : nullptr;
    retire();
    if (same != nullptr) {
      same->retired = false;
      reused_ = same;
      reused_bytes = 0;
    }
    empty = take_empty();
  }
  release(std::move(empty));
  std::vector<std::unique_ptr<Part>> made;
  Part* fresh[2] = {nullptr, nullptr};
  const int64_t wanted[2] = {reused_bytes, kept_bytes};
  try {
    for (int i = 0; i < 2; ++i) {
      if (wanted[i] > 0) {
        char* const begin = device_.reserve(static_cast<size_t>(wanted[i]));
        made.push_back(std::make_unique<Part>(Part{begin, wanted[i], device_.current_stream()}));
        fresh[i] = made.back().get();
      }
    }
  } catch (...) {
    for (const auto& part : made) {
      device_.release(part->begin);
    }
    close();
    throw;
  }
  if (!made.empty()) { // any stream may be the first to use it
    device_.synchronize();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  std::move(made.begin(), made.end(), std::back_inserter(parts_));
  reused_ = fresh[0] != nullptr ? fresh[0] : reused_;
  kept_ = fresh[1];
  streams_.assign(static_cast<size_t>(plan.streams), {false, nullptr});
  plan_ = std::move(plan);
  build();
  for (Part* part : fresh) {
    if (checks_ && part != nullptr) {
      device_.fill(part->begin, part->nbytes, FREED, part->stream);
    }
  }
  if (checks_) {
    device_.synchronize();
  }
  counters_.peak_bytes = counters_.live_bytes;
  counters_.peak_size = counters_.live_size;
  open_ = true;
}

void Arena::close() {
  std::vector<std::unique_ptr<Part>> empty;
  stop();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_live_blocks();
    retire();
    empty = take_empty();
  }
  release(std::move(empty));
}

// Nothing is served any more, and nothing of the plan is under way on the device.
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
  forget_done();
}

void Arena::forget_done() {
  const auto done = std::partition(
      pending_.begin(), pending_.end(), [&](const Pending& pending) { return !device_.is_done(pending.event); });
  for (auto pending = done; pending != pending_.end(); ++pending) {
    device_.drop(pending->event);
  }
  pending_.erase(done, pending_.end());
}

// Blocks at offsets of the plan that ends are blocks like any others from here on.
void Arena::keep_live_blocks() {
  for (int64_t start = live_starts_.from(0); start >= 0; start = live_starts_.from(start + 1)) {
    const Live& live = live_[start];
    char* const begin = reused_->begin + offsets_[start];
    others_[begin] = {reused_->begin + live.end, live.nbytes, live.stream, reused_, -1, live.wanted};
  }
  for (auto& [begin, other] : others_) {
    other.slot = -1; // of slots that are no more
  }
  live_starts_ = LiveStarts();
  offsets_.clear();
  start_table_.assign(1, -1); // every block that is freed from here on is one of the others
  live_.clear();
  late_.clear();
}

void Arena::retire() {
  for (const auto& part : parts_) {
    part->retired = true;
  }
  reused_ = kept_ = nullptr;
  rows_.clear();
  spots_.clear();
  last_spot_ = nullptr;
}

std::vector<std::unique_ptr<Arena::Part>> Arena::take_empty() {
  const auto kept = std::partition(
      parts_.begin(), parts_.end(), [](const auto& part) { return !part->retired || part->live > 0; });
  std::vector<std::unique_ptr<Part>> empty(std::make_move_iterator(kept), std::make_move_iterator(parts_.end()));
  parts_.erase(kept, parts_.end());
  for (const auto& part : empty) {
    for (const auto& [known, other] : streams_) {
      if (known && other != part->stream) {
        const Event event = device_.record(other);
        device_.wait(part->stream, event);
        device_.drop(event);
      }
    }
    for (const Pending& pending : pending_) {
      device_.wait(part->stream, pending.event);
    }
  }
  return empty;
}

void Arena::release(std::vector<std::unique_ptr<Part>> parts) {
  for (const auto& part : parts) {
    device_.release(part->begin);
  }
}

// -- tables -----------------------------------------------------------------------------------------------------------

void Arena::build() {
  for (const PlannedRequest& request : plan_.requests) {
    if (request.kept < 0) {
      offsets_.push_back(int64_t{request.offset}); // a copy: members of packed rows may be misaligned
    }
  }
  std::sort(offsets_.begin(), offsets_.end());
  offsets_.erase(std::unique(offsets_.begin(), offsets_.end()), offsets_.end());
  const auto number = [&](int64_t offset) {
    return static_cast<int32_t>(std::lower_bound(offsets_.begin(), offsets_.end(), offset) - offsets_.begin());
  };
  for (const PlannedRequest& r : plan_.requests) {
    const bool kept = r.kept >= 0;
    rows_.push_back(
        {r.size, r.offset, r.crosses, kept ? -1 : number(r.offset), kept ? -1 : number(r.offset + r.size), r.stream, r.kept, r.spare});
  }
  live_starts_ = LiveStarts(offsets_.size() + 1);
  live_.resize(offsets_.size());

  size_t entries = 16;
  while (entries < 2 * offsets_.size()) {
    entries *= 2;
  }
  start_table_.assign(entries, -1);
  for (size_t i = 0; i < offsets_.size(); ++i) {
    size_t at = hash_of(offsets_[i], entries - 1);
    while (start_table_[at] >= 0) {
      at = (at + 1) & (entries - 1);
    }
    start_table_[at] = static_cast<int32_t>(i);
  }
  build_spots();
}

void Arena::build_spots() {
  const auto& requests = plan_.requests;
  for (size_t i = 0; i < requests.size(); ++i) {
    Spot& spot = spots_[key_of(requests[i].phase, requests[i].layer)];
    spot.begin = spot.end == 0 ? static_cast<int32_t>(i) : spot.begin;
    spot.end = static_cast<int32_t>(i) + 1;
  }
  const auto& dynamic = plan_.dynamic;
  for (size_t i = 0; i < dynamic.size(); ++i) {
    Spot& spot = spots_[key_of(dynamic[i].phase, dynamic[i].layer)];
    spot.dynamic_begin = spot.dynamic_end == 0 ? static_cast<int32_t>(i) : spot.dynamic_begin;
    spot.dynamic_end = static_cast<int32_t>(i) + 1;
  }
  slots_.clear();
  slots_of_.clear();
  for (const KeptSlot& slot : plan_.slots) {
    if (slots_of_.size() <= static_cast<size_t>(slot.kept)) {
      slots_of_.resize(static_cast<size_t>(slot.kept) + 1);
    }
    slots_of_[slot.kept].push_back(static_cast<int32_t>(slots_.size()));
    slots_.push_back({slot.offset});
  }
  spaces_of_.assign(plan_.crosses.size(), {0, 0});
  for (size_t i = 0; i < plan_.spaces.size(); ++i) {
    auto& [first, end] = spaces_of_[plan_.spaces[i].group];
    first = end == 0 ? static_cast<int32_t>(i) : first;
    end = static_cast<int32_t>(i) + 1;
  }
}

int64_t Arena::start_at(int64_t offset) const {
  const size_t mask = start_table_.size() - 1;
  for (size_t at = hash_of(offset, mask); start_table_[at] >= 0; at = (at + 1) & mask) {
    if (offsets_[start_table_[at]] == offset) {
      return start_table_[at];
    }
  }
  return -1;
}

} // namespace memplug
